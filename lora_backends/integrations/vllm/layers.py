"""vLLM's LoRA layers as weights of this library: views of its stacks, and the adapters' true ranks.

vLLM keeps a tensor per slice, A [max_loras, 1, rank, in] and B [max_loras, 1, out, rank], padded
with zeros and with the scaling folded into B. Nothing is copied; vLLM goes on writing them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch

from lora_backends import features
from lora_backends.common.names import VLLM_FACTORS_VARIABLE
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.weights import LoRAWeights

Ranks: TypeAlias = Callable[[Any, int], list[int]]
"""From vLLM's lora_a of an adapter and the number of slices to the rank of each slice."""


@dataclass(eq=False)
class AdoptedLayer:
    """One LoRA layer of vLLM."""

    weights: LoRAWeights  # no A in an embedding, no B in a head that an adapter replaces
    wrapper: Any  # the `BackendWrapper` whose batch the layer runs on
    table: torch.Tensor | None = None  # [slots * vocabulary, max_rank]: an embedding's A
    ranked: set[int] = field(default_factory=set)  # slots whose adapter has a rank above 0 here
    is_called: bool = False  # whether the model has called the layer
    prepared: set[tuple[int, int]] = field(default_factory=set)  # rows and active slots whose
    # kernels for graphs are compiled

    def set_ranks(self, slot: int, ranks: Sequence[int]) -> None:
        """Write the true ranks of a slot in place, where captured graphs read them.

        Scales and biases of the slot are reset.
        """
        weights = self.weights
        self.ranked.discard(slot)
        if weights.bias is not None and weights.output_scales is not None:
            weights.bias[slot].fill_(0)
            weights.output_scales[slot].fill_(1)
        if any(ranks):
            self.ranked.add(slot)
        # fills, not copies from the host, which would wait for the device
        weights.scalings[slot].fill_(1)  # vLLM's sleep of level 2 discards all but its stacks
        for s, rank in enumerate(ranks):
            weights.ranks[slot, s].fill_(min(rank, weights.max_rank))

    def make_factors(self) -> None:
        """Give the layer an output scale and a bias for each slot, 1 and 0."""
        weights = self.weights
        if weights.output_scales is not None:
            return
        # vLLM loads adapters in inference mode, and outside of it; only plain tensors take both
        with torch.inference_mode(False):
            shape = weights.num_slots, weights.out_features
            scales = torch.ones(shape, dtype=torch.float32, device=weights.device)
            bias = torch.zeros_like(scales)
            self.weights = replace(weights, output_scales=scales, bias=bias)
        self.prepared.clear()


_LAYERS: WeakValueDictionary[int, AdoptedLayer] = WeakValueDictionary()
"""By the address of a first stack; a layer's views keep its stacks, so live addresses differ."""


def find(stack: torch.Tensor) -> AdoptedLayer:
    """Return the layer whose first A or B a stack is.

    Raises:
        InvalidInputError: it is neither.
    """
    layer = _LAYERS.get(stack.data_ptr())
    if layer is None:
        raise InvalidInputError(
            f"vLLM calls LoRA with stacks of no layer that it announced by set_mapping\n"
            f"  given: {list(stack.shape)} {stack.dtype} on {stack.device}"
        )
    return layer


def adopt(module: Any, wrapper: Any) -> None:
    """Make a layer of a LoRA module of vLLM, and follow the ranks that vLLM writes into it.

    Raises:
        UnsupportedInputError: its stacks have another layout.
    """
    a, b = _stacks(module, "lora_a_stacked"), _stacks(module, "lora_b_stacked")
    table = getattr(module, "lora_a_stacked_2d", None)
    # other ranks in A than in B: sharded by rank, see `plugin.keep_whole`
    if not b or (a and a[0].shape[2] != b[0].shape[3]) or not (a or table is not None):
        shapes = [list(each.shape) for each in (*a, *b)]
        raise UnsupportedInputError(
            f"the LoRA layer {type(module).__name__} keeps its matrices in an unknown layout\n"
            f"  given: lora_a_stacked and lora_b_stacked of {shapes}"
        )
    layer = AdoptedLayer(_weights(a, b), wrapper, table)
    module.lora_backends_layers = [layer]
    if wrapper.has_factors:
        layer.make_factors()
    for stacks in (a, b):
        if stacks:
            _LAYERS[stacks[0].data_ptr()] = layer
    full = _stacks(module, "full_weight_stacked")
    if full:  # a classification head that an adapter replaces; shrunk by, like an A
        head = AdoptedLayer(_weights(full, ()), wrapper)
        module.lora_backends_layers.append(head)
        _LAYERS[full[0].data_ptr()] = head

    def set_ranks(slot: int, lora_a: Any) -> None:
        layer.set_ranks(slot, true_ranks(lora_a, len(b)))
        if full:
            head.set_ranks(slot, [full[0].shape[2]])

    follow(module, set_ranks)


def follow(module: Any, set_ranks: Callable[[int, Any], None]) -> None:
    """Call ``set_ranks(slot, lora_a)`` after vLLM has written a slot; lora_a is () for a reset.

    vLLM does not tell the ranks in any other way. The two methods are replaced on the instance,
    so any subclass is followed; `set_lora` of vLLM calls `reset_lora` first.
    """
    set_lora, reset_lora = module.set_lora, module.reset_lora

    def set_lora_and_ranks(index: int, lora_a: Any, lora_b: Any) -> None:
        set_lora(index, lora_a, lora_b)
        set_ranks(index, lora_a)

    def reset_lora_and_ranks(index: int) -> None:
        set_ranks(index, ())
        reset_lora(index)

    module.set_lora, module.reset_lora = set_lora_and_ranks, reset_lora_and_ranks


def check_factors(module: Any) -> AdoptedLayer:
    """Return the layer of a LoRA module of vLLM that has room for output scales and a bias.

    Raises:
        UnsupportedInputError: it has no room for them.
    """
    layer: AdoptedLayer = module.lora_backends_layers[0]
    backend = layer.wrapper.tokens.backend
    if features.OUTPUT_SCALES not in backend.features:
        raise UnsupportedInputError(
            f"DoRA and lora_bias cannot run here\n  given: backend {backend.name!r}, "
            f"{type(module).__name__}\n  to do: choose another backend"
        )
    if layer.weights.output_scales is None and layer.wrapper.captures_graphs:
        raise UnsupportedInputError(
            f"DoRA and lora_bias need room in the captured CUDA graphs\n"
            f"  to do: set {VLLM_FACTORS_VARIABLE}=1, or pass enforce_eager=True to vLLM"
        )
    return layer


def set_factors(module: Any, slot: int, piece: int | None, factors: Any) -> None:
    """Write an adapter's output scales and bias of one module into a slot of its layer.

    Args:
        module: vLLM's LoRA layer.
        slot: that holds the adapter's matrices.
        piece: index of the packed module in the layer; None: the layer is the module.
        factors: `scales` and `bias`, [out_features] of the whole module each, or None.

    Raises:
        UnsupportedInputError: the layer has no room for them.
    """
    layer = check_factors(module)
    layer.make_factors()
    weights = layer.weights
    row = getattr(module, "tp_size", 1) > 1 and hasattr(module.base_layer, "input_is_parallel")
    for table, values in (
        (weights.output_scales, factors.scales),
        (weights.bias, factors.bias),
    ):
        if values is None or table is None:
            continue
        if table is weights.bias and row and module.tp_rank > 0:
            continue  # one process adds the bias, so the sum over processes has it once
        mine, first = _share(module, values[:, None], piece, weights.output_slices)
        table[slot, first : first + mine.shape[0]].copy_(mine[:, 0])


def _share(
    module: Any, values: torch.Tensor, piece: int | None, widths: Sequence[int]
) -> tuple[torch.Tensor, int]:
    """Return the part of a column of outputs that this process has, cut as vLLM cuts B."""
    first = 0 if piece is None else sum(widths[:piece])
    if getattr(module, "tp_size", 1) == 1 or not hasattr(module, "n_slices"):
        return values, first
    if piece is None and module.n_slices > 1:  # one module of the adapter for several slices
        parts = list(torch.split(values, list(module.base_layer.output_sizes)))
        return torch.cat(module.slice_lora_b(parts)), 0
    if piece is None:
        return module.slice_lora_b(values), 0
    return module.slice_lora_b([values if s == piece else None for s in range(module.n_slices)])[
        piece
    ], first


def as_stored(x: torch.Tensor, weights: Any) -> torch.Tensor:
    """Return x in a dtype that weights take.

    vLLM's `lora_dtype` may differ from the model's, and a router may compute in float32. PEFT
    rounds x in the same way.
    """
    if x.dtype in weights.input_dtypes or not x.is_floating_point():
        return x
    return x.to(weights.dtype)


def true_ranks(lora_a: torch.Tensor | Sequence[torch.Tensor | None], num_slices: int) -> list[int]:
    """Return the rank of each slice, 0 where the adapter has no A.

    One A, or several that are not one per slice, may feed any slice: then the highest rank counts
    for all. That is right because vLLM pads with zeros.
    """
    matrices = [lora_a] if isinstance(lora_a, torch.Tensor) else list(lora_a)
    ranks = [0 if each is None else each.shape[-2] for each in matrices]
    return ranks if len(ranks) == num_slices else [max(ranks, default=0)] * num_slices


def _stacks(module: Any, name: str) -> tuple[torch.Tensor, ...]:
    """Return the stacks of a module by slice, or () where there are none of this layout."""
    attribute = getattr(module, name, None)
    stacks = (attribute,) if isinstance(attribute, torch.Tensor) else tuple(attribute or ())
    fits = all(stack.ndim == 4 and stack.shape[1] == 1 for stack in stacks)
    return stacks if fits else ()  # an embedding's A is a table, whose rows are gathered


def _weights(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> LoRAWeights:
    """Return views of stacks, () for a half that is missing, as weights of rank 0 in every slot."""
    lora_a: Any = tuple(stack[:, 0] for stack in a) or None
    lora_b: Any = tuple(stack[:, 0] for stack in b) or None
    widest: tuple[torch.Tensor, ...] = lora_b or lora_a
    shape, device = (widest[0].shape[0], len(widest)), widest[0].device
    if len(widest) == 1:  # one tensor, which every backend takes
        lora_a, lora_b = a[0] if a else None, lora_b[0] if b else None
    return LoRAWeights(
        lora_a=lora_a,
        lora_b=lora_b,
        ranks=torch.zeros(shape, dtype=torch.int32, device=device),
        scalings=torch.ones(shape, dtype=torch.float32, device=device),
        output_slices=tuple(stack.shape[1] for stack in widest),
    )
