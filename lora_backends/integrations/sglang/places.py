"""Checks, when an adapter loads, that each of its weights has a place in SGLang's pool.

SGLang looks for the place when the adapter first enters a slot. A weight without one then ends the
server. A weight for a module that its layer lacks is ignored without an error. Of a weight that is
too wide, each process takes the wrong part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lora_backends.errors import UnsupportedInputError, shown

_HALF = re.compile(r"^(.+)\.lora_(?:embedding_)?([AB])(?:\.|$)")
_LAYER = re.compile(r"layers\.\d+\.")  # as SGLang finds the number of a layer
_TOWER = re.compile(r"vision|visual|image|audio|speech")
_EXPERTS = re.compile(r"(?:^|\.)experts(?:\.|$)")
_NUMBERED = re.compile(r"experts\.(\d+)\.")
_ENDS = ("embed_tokens", "lm_head", "unembed_tokens", "input_embeddings", "output_embeddings")


def check_name(name: str) -> None:
    """Refuse a weight that SGLang would ignore, or give to the language model by mistake.

    Raises:
        UnsupportedInputError: it is outside the layers, or in an encoder's layers.
    """
    layer = _LAYER.search(name)
    if layer is None and not any(end in name for end in _ENDS):
        raise _refused(name, "SGLang ignores it: its name has no layer number")
    if is_tower(name if layer is None else name[: layer.start()]):
        raise _refused(name, "SGLang would apply it to the language model's layer of that number")


def check_copy(name: str, weight: torch.Tensor, model: torch.nn.Module | None) -> None:
    """Refuse a whole embedding or head in an adapter's file, unless it equals the model's own.

    PEFT saves the whole weight beside LoRA of an embedding, with trained rows if the vocabulary has
    grown. SGLang ignores it.

    Args:
        name: of the weight in the file.
        weight: its values.
        model: SGLang's; None if this version does not pass it to adapters.

    Raises:
        UnsupportedInputError: it differs, or there is no model to compare it with.
    """
    if _LAYER.search(name) or _HALF.match(name):
        return
    end = "embed_tokens" if "embed_tokens" in name and "unembed" not in name else "lm_head"
    suffixes = f"{end}.weight", f"{end}.base_layer.weight"
    found = [] if model is None else model.named_parameters(remove_duplicate=False)
    own = [parameter for path, parameter in found if path.endswith(suffixes)]
    # SGLang pads the vocabulary
    if not any(
        weight.dim() == 2
        and weight.shape[1:] == each.shape[1:]
        and torch.equal(each.detach()[: len(weight)].cpu(), weight.cpu().to(each.dtype))
        for each in own
    ):
        raise _refused(name, "it is a whole weight that differs from the base model's")


def check_taken(name: str, taken: Mapping[str, Any]) -> None:
    """Refuse LoRA of an embedding or a head that SGLang has ignored.

    Args:
        name: of the weight in the file.
        taken: the weights of embedding and head that SGLang has kept, by name.

    Raises:
        UnsupportedInputError: the configuration does not target the embedding or head. PEFT does
            not list a head that it ties to the embedding.
    """
    if _LAYER.search(name) or _HALF.match(name) is None:
        return
    if name.replace("unembed_tokens", "lm_head") not in taken:
        raise _refused(name, "SGLang ignores it: target_modules of the adapter do not name it")


def is_tower(path: str) -> bool:
    """Return whether a path up to ``layers.`` is in an encoder beside the language model."""
    return _TOWER.search(path) is not None


@dataclass(eq=False)
class Places:
    """The places of an engine.

    Args:
        pool: SGLang's `LoRAMemoryPool`.
        modules: for each layer of the model, its LoRA layers by name.
        ends: the LoRA layers of ``embed_tokens`` and ``lm_head`` by these names; None for none.
    """

    pool: Any
    modules: Sequence[Mapping[str, Any]]
    ends: Mapping[str, Any]

    def check(self, adapter: Any) -> None:
        """Refuse an adapter with a weight that has no place of its own, or another shape.

        Args:
            adapter: a `LoRAAdapter` with normalized weights.

        Raises:
            UnsupportedInputError: the first such weight.
        """
        rank = adapter.config.r
        self._check_ends(adapter.embedding_layers, rank)
        for number, layer in enumerate(adapter.layers):
            self._check_layer(number, layer.weights, rank)

    def _check_ends(self, weights: Mapping[str, torch.Tensor], rank: int) -> None:
        halves: dict[str, str] = {}
        for name, weight in weights.items():
            end = _target_of_end(name)
            if end not in self.pool.target_modules:
                raise _refused(name, self._targets())
            match = _HALF.match(name)
            if match is None:  # the base model's own, see `check_copy`
                continue
            if self.ends.get(end) is None:
                raise _refused(name, f"this model has no LoRA on {end}")
            half, vocabulary = match[2], self.pool.base_hf_config.vocab_size
            if end == "embed_tokens":
                inputs, outputs = vocabulary, self.pool.embedding_B_buffer[end].shape[1]
            else:  # B in the pool may be a process's part
                inputs, outputs = self.pool.lm_head_A_buffer[end].shape[2], vocabulary
            wanted = (rank, inputs) if half == "A" else (outputs, rank)
            _check_shape(name, weight, wanted)
            _note_half(halves, end, half, name)
        _check_halves(halves, "")

    def _check_layer(self, number: int, weights: Mapping[str, torch.Tensor], rank: int) -> None:
        halves: dict[str, str] = {}  # of each place
        for name, weight in weights.items():
            match = _HALF.match(name)
            if match is None:
                raise _refused(name, "it is neither A nor B of LoRA")
            path, half = match.groups()
            target = _target(path, self.pool.target_modules)
            if target is None:
                raise _refused(name, f"{self._targets()}, once fused")
            is_expert = _EXPERTS.search(path) is not None
            module = self._module(number, target, name, is_expert)
            if is_expert:
                self._check_expert(number, target, half, name, weight, rank, module)
            elif _NUMBERED.search(path):
                raise _refused(name, "shared experts of this model have no numbers")
            else:
                wanted = self._shape(number, target, half, rank, module)
                _check_shape(name, weight, wanted)
            place = _LAYER.split(path)[-1] if is_expert else target
            _note_half(halves, place, half, name)
        _check_halves(halves, f" of layer {number}")

    def _module(self, number: int, target: str, name: str, is_expert: bool) -> Any:
        """Return the one LoRA layer that takes a weight."""
        taking = {
            place: module
            for place, module in self.modules[number].items()
            if (
                hasattr(module, "slice_moe_lora_a_weights")
                if is_expert
                else f".{place}".endswith(f".{target}")
            )
        }
        if not taking:
            raise _refused(name, "this layer of the model has no LoRA there")
        if len(taking) > 1:  # SGLang would add it to each
            raise _refused(name, f"{len(taking)} modules share it: {', '.join(sorted(taking))}")
        (module,) = taking.values()
        return module

    def _shape(
        self, number: int, target: str, half: str, rank: int, module: Any
    ) -> tuple[int, int]:
        """Return the shape of a whole weight, before tensor parallelism splits it."""
        a, b = self.pool.A_buffer[target][number], self.pool.B_buffer[target][number]
        num_slices = a.shape[1] // self.pool.max_lora_rank
        is_split = self.pool.tp_size > 1
        if half == "A":
            return num_slices * rank, module.base_layer.input_size if is_split else a.shape[2]
        return _outputs(module.base_layer, num_slices) if is_split else b.shape[1], rank

    def _check_expert(
        self,
        number: int,
        target: str,
        half: str,
        name: str,
        weight: torch.Tensor,
        rank: int,
        module: Any,
    ) -> None:
        a, b = (of[f"{target}_moe"][number] for of in (self.pool.A_buffer, self.pool.B_buffer))
        experts = max(a.shape[1], b.shape[1])  # one of them is 1 if experts share it
        is_shared = (a if half == "A" else b).shape[1] < experts
        if getattr(self.pool, "moe_use_local_expert_ids", False):
            experts *= self.pool.moe_ep_size
        # the experts' inner width is split
        is_split = target.startswith("down" if half == "A" else "gate_up")
        parts = getattr(module, "tp_size", 1) if is_split else 1
        num_slices = a.shape[2] // self.pool.max_lora_rank
        wanted = num_slices * rank, a.shape[3] * parts
        if half == "B":
            wanted = b.shape[2] * parts, rank
        match = _NUMBERED.search(name)
        if match is None:
            _check_shape(name, weight, (1 if is_shared else experts, *wanted))
        elif is_shared:
            raise _refused(name, "one weight serves all experts, so it needs an axis of experts")
        elif int(match[1]) >= experts:
            raise _refused(name, f"the model has experts 0 to {experts - 1}")
        else:
            _check_shape(name, weight, wanted)

    def _targets(self) -> str:
        return f"--lora-target-modules are {sorted(self.pool.target_modules)}"


def _outputs(base: Any, num_slices: int) -> int:
    """Return how many output columns of a whole base layer take LoRA."""
    if hasattr(base, "inkling_d_rel"):  # its keys and values may be on several processes
        heads, kv = base.inkling_num_heads, base.inkling_num_kv_heads
        return int(base.inkling_head_dim * (heads + 2 * kv) + base.inkling_d_rel * heads)
    if hasattr(base, "total_num_kv_heads"):  # likewise
        return int((base.total_num_heads + 2 * base.total_num_kv_heads) * base.head_size)
    if hasattr(base, "output_sizes"):
        return sum(base.output_sizes[:num_slices])
    return int(base.output_size)


def _target_of_end(name: str) -> str:
    # as SGLang tells them apart
    return "embed_tokens" if "embed_tokens" in name else "lm_head"


def _note_half(halves: dict[str, str], place: str, half: str, name: str) -> None:
    if half in halves.setdefault(place, ""):
        raise _refused(name, f"another weight is {half} of the same {place}")
    halves[place] += half


def _check_halves(halves: Mapping[str, str], where: str) -> None:
    for place, found in halves.items():
        if len(found) != 2:
            raise _refused(f"{place}{where}", f"it has {found} alone")


def _target(path: str, targets: set[str]) -> str | None:
    """Return the target that SGLang picks for a path, if the path ends with it; else None.

    SGLang picks the longest target anywhere in the name.
    """
    ends = [each for each in targets if f".{path}".endswith(f".{each}")]
    inside = [each for each in targets if each in path]
    longest = max(inside, key=len, default=None)
    return longest if longest in ends else None


def _check_shape(name: str, weight: torch.Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(weight.shape) != wanted:
        raise _refused(name, f"its shape is {tuple(weight.shape)}", f"{wanted} in this model")


def _refused(name: str, reason: str, allowed: str = "") -> UnsupportedInputError:
    to_do = (
        "check that the adapter belongs to this model, and that each weight has the rank r of its "
        "adapter_config.json"
        if allowed
        else "train the adapter without it, or start SGLang with it in --lora-target-modules"
    )
    return UnsupportedInputError(
        f"SGLang cannot serve a weight of an adapter\n"
        f"  given: {shown(name)}: {reason}\n"
        + (f"  allowed: {allowed}\n" if allowed else "")
        + f"  to do: {to_do}"
    )
