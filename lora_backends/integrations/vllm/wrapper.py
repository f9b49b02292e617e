"""`BackendWrapper`: vLLM's interface for LoRA, on a backend of this library."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.lora.layers import BaseLayerWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase

from lora_backends import features
from lora_backends.batch import NO_ADAPTER, LoRABatch
from lora_backends.common.devices import is_capturing
from lora_backends.common.names import VLLM_FACTORS_VARIABLE
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.integrations.plans import Plans
from lora_backends.integrations.vllm import (
    experts,
    inputs,
    layers,
    operation,
    plugin,
    prompts,
    warm_up,
)
from lora_backends.integrations.vllm.adapters import follow as adapters
from lora_backends.integrations.vllm.adapters import invocations
from lora_backends.integrations.vllm.ids import slots_of
from lora_backends.integrations.vllm.operation import run
from lora_backends.selection.choice import get_backend

NEEDED = frozenset({features.CAPACITY, features.SLICE_TENSORS})
"""Features that a backend must have: vLLM pads x without telling, and keeps a tensor per slice."""


class BackendWrapper(PunicaWrapperBase):  # type: ignore[misc]  # vLLM is no dependency
    """Holds the current batch, and runs vLLM's LoRA layers on it.

    vLLM makes one for a model, announces each batch to it by `update_metadata`, and calls it from
    each layer. Other layers run on vLLM's own wrapper, which it makes when the first
    one needs it.

    Args:
        max_num_batched_tokens: tokens of a batch at most.
        max_batches: sequences of a batch at most.
        device: of the model.
        kwargs: `lora_config`, vLLM's.

    Raises:
        BackendUnavailableError: the backend asked for does not run on the device.
        UnsupportedInputError: it lacks a feature that vLLM's layers need, or layers get rows
            whose adapters vLLM does not announce.
    """

    def __init__(
        self,
        max_num_batched_tokens: int,
        max_batches: int,
        device: torch.device | str,
        **kwargs: Any,
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        self._left_to_own = _drop_indices(self)
        prompts.follow()
        inputs.follow()
        adapters.follow()
        invocations.follow()
        warm_up.follow()
        self.was_run = False  # whether the model has called a layer
        self.has_factors = os.environ.get(VLLM_FACTORS_VARIABLE, "0") not in ("", "0")
        self._arguments = (max_num_batched_tokens, max_batches, device), kwargs
        self._own: Any = None  # vLLM's own wrapper, for layers that are not taken over
        self._announced: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        plugin.keep_whole(kwargs["lora_config"])
        num_slots = kwargs["lora_config"].max_loras
        backend = get_backend(plugin.backend_asked_for(), device=device)
        missing = NEEDED - backend.features
        if missing:
            raise UnsupportedInputError(
                f"backend {backend.name!r} cannot run inside vLLM\n"
                f"  it lacks: {', '.join(sorted(missing))}\n  to do: choose another backend"
            )
        config = get_current_vllm_config_or_none()
        plugin.check_settings(config)
        compilation = None if config is None else config.compilation_config
        self.parallel = None if config is None else config.parallel_config
        model = None if config is None else config.model_config
        self.model_dtype = getattr(model, "dtype", None)  # of x and y
        self.takes_embeddings = getattr(model, "enable_prompt_embeds", False)
        self.tokens = Plans(backend, num_slots, max_num_batched_tokens, compilation)
        self.sampled = Plans(backend, num_slots, max(max_num_batched_tokens, max_batches))
        self.prompt = Plans(backend, num_slots, max_num_batched_tokens)
        plugin.logger().info(
            "LoRA of linear layers, embeddings and heads runs on backend %r on %s",
            backend.name,
            backend.device,
        )

    @property
    def captures_graphs(self) -> bool:
        """Whether a CUDA graph replays layers as they are."""
        return any(plans.is_captured for plans in (self.tokens, self.sampled, self.prompt))

    def update_metadata(
        self,
        mapping: Any,
        lora_index_to_id: list[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: Any,
    ) -> None:
        """Take the next batch: an adapter id per token and per sampled row, on the host.

        Raises:
            InvalidInputError: an id has no slot.
        """
        slot_of = {id_: slot for slot, id_ in enumerate(lora_index_to_id) if id_ is not None}
        slot_of[0] = NO_ADAPTER
        num_slots = self.tokens.num_slots
        tokens = sampled = LoRABatch(slots_of(mapping.index_mapping, slot_of), num_slots)
        if mapping.prompt_mapping != mapping.index_mapping:  # equal while all requests decode
            sampled = LoRABatch(slots_of(mapping.prompt_mapping, slot_of), num_slots)
        # after both lookups: an id without a slot must leave the last batch unchanged
        self.is_prefill = mapping.is_prefill
        self.tokens.set_batch(tokens)
        self.sampled.set_batch(sampled)
        part = inputs.part_of(mapping)
        if part:
            inputs.announce(part, self.tokens, self.sampled.slots)
        # a copy of the list, in which vLLM writes the slots of later batches
        self._announced = (mapping, list(lora_index_to_id), max_loras, vocab_size), kwargs
        if self._own is not None:
            self._own.update_metadata(*self._announced[0], **kwargs)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Add the LoRA of a linear layer to y.

        With ``add_inputs=False`` y is zero, as vLLM's second stream passes it: vLLM's own kernel
        leaves rows without adapter as they are.
        """
        _check_plain(scale, buffer)
        run(y, x, lora_a_stacked[0], operation.LINEAR)
        return y

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Add the LoRA of a head to the logits y of the sampled rows, or of a prompt's tokens."""
        _check_plain(scale, buffer)
        if operation.adds_no_logits(lora_a_stacked):
            return y
        x = _rows(x)
        slots = self._slots_of_logits(x.shape[0])
        if slots is not None:
            self.prompt.set_slots(slots)
        kind = operation.LOGITS if slots is None else operation.PROMPT
        run(_rows(y), x, lora_a_stacked, kind)
        return y

    def _slots_of_logits(self, rows: int) -> Sequence[int] | None:
        """Return the slot of each row of the logits; None where vLLM has announced them."""
        first, counts = prompts.first_token(), prompts.rows_per_request()
        if first is not None:
            return self.tokens.slots[first : first + rows]
        if counts is None:
            return None
        announced = self.sampled.slots
        if len(counts) != len(announced) or sum(counts) != rows:
            raise InvalidInputError(
                f"logits do not fit the batch that vLLM has announced\n"
                f"  given: {rows} rows\n"
                f"  allowed: {sum(counts)} rows of {len(announced)} requests"
            )
        return [slot for slot, count in zip(announced, counts, strict=True) for _ in range(count)]

    def add_shrink(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        scale: float,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Multiply x by the whole head of each token's adapter, into y [1, tokens, labels] float32.

        vLLM calls it for token classification. It passes zeros, which stay where a token has no
        adapter.
        """
        _check_plain(scale)
        run(y, _rows(x), lora_a_stacked[0], operation.SHRINK)
        return y

    def apply_lora_full_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        weight_stacked: torch.Tensor,
        bias_stacked: torch.Tensor,
        module_enabled: torch.Tensor,
    ) -> torch.Tensor:
        """Replace the rows of y whose adapter brings a whole classification head of its own."""
        sampled = self.sampled
        if sampled.num_rows != y.shape[0]:
            raise InvalidInputError(
                f"a classification head does not fit the batch that vLLM has announced\n"
                f"  given: {y.shape[0]} rows\n  allowed: {sampled.num_rows}"
            )
        if sampled.is_idle:
            return y
        h = y.new_empty((1, y.shape[0], weight_stacked.shape[-2]), dtype=torch.float32)
        run(h, x, weight_stacked, operation.FULL)
        slots = sampled.token_slots(y.shape[0])
        known = slots.clamp(min=0)
        is_full = (slots >= 0) & module_enabled[known]
        full = h[0].to(y.dtype) + bias_stacked[known].to(y.dtype)
        return y.copy_(torch.where(is_full[:, None], full, y))

    def add_lora_w13(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Add the LoRA of the experts' first product, gate and up, to y [tokens * k, columns].

        Returns:
            What vLLM hands on to `add_lora_w2`, in place of sorted tokens: here the routing.

        Raises:
            UnsupportedInputError: the tokens are not those of the batch.
        """
        if not experts.is_adopted(lora_a_stacked[0]):
            arguments = y, x, lora_a_stacked, lora_b_stacked, topk_ids, topk_weights
            handed_on: tuple[Any, ...]
            handed_on = self.own().add_lora_w13(*arguments, *args, **kwargs)
            return handed_on
        if kwargs.get("token_lora_mapping") is not None:
            raise UnsupportedInputError(
                "experts of tokens from several processes are not supported\n"
                "  given: token_lora_mapping, the slots of tokens that vLLM has gathered\n"
                "  allowed: the batch's own tokens"
            )
        expert_map = args[0] if args else kwargs.get("expert_map")
        routed = experts.add_first(
            self.tokens, y, x, lora_a_stacked, topk_ids, topk_weights, expert_map
        )
        return routed, None, None, None

    def add_lora_w2(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        topk_weights: torch.Tensor,
        sorted_token_ids_lora: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Add the LoRA of the experts' second product, weighted by the router, to y."""
        if not experts.is_adopted(lora_a_stacked[0]):
            arguments = y, x, lora_a_stacked, lora_b_stacked, topk_weights, sorted_token_ids_lora
            self.own().add_lora_w2(*arguments, *args, **kwargs)
        else:
            routed = sorted_token_ids_lora  # as `add_lora_w13` has returned it
            experts.add_second(self.tokens, y, x, lora_a_stacked, topk_weights, routed)

    def moe_lora_align_block_size(self, *args: Any, **kwargs: Any) -> Any:
        """Sort the pairs of token and expert, for vLLM's own kernels."""
        return self.own().moe_lora_align_block_size(*args, **kwargs)

    def add_lora_fused_moe(self, *args: Any, **kwargs: Any) -> Any:
        """Run vLLM's own kernel for experts on pairs that vLLM has sorted."""
        return self.own().add_lora_fused_moe(*args, **kwargs)

    def own(self, reason: str = "") -> Any:
        """Return vLLM's own wrapper, which follows the batch from now on.

        Args:
            reason: names the layers that are not taken over, for the log.

        Raises:
            UnsupportedInputError: a CUDA graph captures the first call: replays would read the
                captured batch's indices.
        """
        if self._own is None:
            if is_capturing(self.tokens.backend.device):
                raise UnsupportedInputError(
                    "a CUDA graph captures a layer of vLLM's own, and none has run before\n"
                    "  to do: let vLLM warm up before it captures: cudagraph_num_of_warmups >= 1"
                )
            module, _, name = plugin.own_wrapper_name().rpartition(".")
            args, kwargs = self._arguments
            # a layer may ask in inference mode; later batches may come outside of it
            with torch.inference_mode(False), torch.no_grad():
                own = getattr(import_module(module), name)(*args, **kwargs)
                if self._announced is not None:
                    own.update_metadata(*self._announced[0], **self._announced[1])
            self._own = own
        if reason:
            plugin.logger().warning_once("LoRA not taken over: %s; vLLM's own runs it", reason)
        return self._own

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of vLLM's own wrapper, which vLLM reads where it runs the experts.

        That wrapper is made when a layer reads index tensors, or their sizes, by itself.
        """
        own = self.__dict__.get("_own")
        if own is None and name in self.__dict__.get("_left_to_own", ()):
            own = self.own()
        if own is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(own, name)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1, tensor.shape[-1])


def _drop_indices(wrapper: PunicaWrapperBase) -> set[str]:
    """Remove the index tensors and their sizes, which vLLM's own layers read; return their names.

    The layers taken over do not read them, and each batch would rewrite them by 18 launches.
    """
    names: set[str] = vars(wrapper).keys() - {"device", "is_prefill"}
    for name in names:
        delattr(wrapper, name)
    return names


def _check_plain(scale: float, buffer: Any = None) -> None:
    """Refuse arguments that no caller in vLLM passes: a scaling beside B, or memory for h."""
    if scale != 1.0 or buffer is not None:
        raise UnsupportedInputError(
            f"LoRA with a scale or a buffer of the caller's is not supported\n"
            f"  given: scale {scale}, buffer {'None' if buffer is None else 'a tensor'}\n"
            f"  allowed: scale 1.0 and no buffer; vLLM folds scalings into B"
        )


def _run_own(name: str) -> Callable[..., Any]:
    def method(self: BackendWrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.own(f"{name} of this version of vLLM"), name)(*args, **kwargs)

    return method


# A later vLLM may ask for more than the versions known here; its own wrapper has it.
for _name in BackendWrapper.__abstractmethods__:
    setattr(BackendWrapper, _name, _run_own(_name))
abc.update_abstractmethods(BackendWrapper)


def _follow_mapping() -> None:
    """Let each LoRA layer of vLLM that is given a `BackendWrapper` become a layer of it.

    vLLM has no hook between making a layer's stacks and profiling, tracing and capturing it.
    """
    set_mapping = BaseLayerWithLoRA.set_mapping

    def set_mapping_and_adopt(self: Any, punica_wrapper: Any) -> None:
        set_mapping(self, punica_wrapper)
        if isinstance(punica_wrapper, BackendWrapper):
            if experts.is_experts(self):
                experts.adopt(self, punica_wrapper)
            else:
                layers.adopt(self, punica_wrapper)
                operation.fuse(self)
                if isinstance(self, VocabParallelEmbeddingWithLoRA):
                    operation.embed_by_token(self)

    BaseLayerWithLoRA.set_mapping = set_mapping_and_adopt


_follow_mapping()
