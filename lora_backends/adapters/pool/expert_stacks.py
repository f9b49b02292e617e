"""The stacked weights of experts, which come in several forms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from lora_backends.adapters.pool.quantized import StagedExperts, bytes_of, quantized_experts
from lora_backends.adapters.specs import ExpertDelta, ExpertSpec
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.experts import ExpertWeights


class Form(NamedTuple):
    """How the matrices of an adapter lie; adapters of one form share a stack."""

    num_a: int  # 1: one A feeds gate and up
    one_a: bool  # all experts share A
    one_b: bool  # all experts share B


class ExpertStacks:
    """Stacks of stacked parameters, by path and form; a slot of a parameter has one form.

    An adapter whose experts share A, or where gate and up have an A each, is kept as it is: to
    convert it to another form would take more memory, or round. A stack is allocated when the
    first adapter of its form is loaded, and keeps its address from then on.

    Args:
        specs: the parameters of the base model, by path.
        num_slots: slots of every stack.
        max_rank: width of every stack.
        dtype: dtype of the model, and of the stacks unless they have 8 bits.
        device: where they live.
        stored: an 8-bit dtype of the stacks, or None.
    """

    def __init__(
        self,
        specs: Mapping[str, ExpertSpec],
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        stored: torch.dtype | None = None,
    ) -> None:
        self.specs = dict(specs)
        self._num_slots, self._max_rank = num_slots, max_rank
        self._dtype, self._device, self._stored = dtype, device, stored
        self._stacks: Mapping[tuple[str, Form], ExpertWeights] = {}
        self._forms: dict[tuple[int, str], Form] = {}  # of slots in use, by slot and path

    def active(self) -> dict[str, tuple[ExpertWeights, ...]]:
        """Return the stacks that slots in use have, by path."""
        used = dict.fromkeys((path, form) for (_, path), form in self._forms.items())
        found: dict[str, tuple[ExpertWeights, ...]] = {}
        for path, form in used:
            found[path] = (*found.get(path, ()), self._stacks[path, form])
        return found

    def of(self, slot: int, path: str) -> ExpertWeights:
        """Return the stack that holds a slot's LoRA of a parameter."""
        return self._stacks[path, self._forms[slot, path]]

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices and scales, whatever slots are in use."""
        return sum(
            bytes_of(stack.lora_a, stack.lora_b, stack.a_scales, stack.b_scales)
            for stack in self._stacks.values()
        )

    def stage(self, delta: ExpertDelta) -> StagedExperts:
        """Return a delta in the dtype of the stacks, on their device.

        Raises:
            InvalidInputError: it does not fit the base model or the stacks, or overflows.
        """
        self._check_fits(delta)
        if self._stored is None:
            staged = StagedExperts(
                delta.module,
                delta.lora_a.to(self._device, self._dtype),
                delta.lora_b.to(self._device, self._dtype),
                delta.ranks.to(self._device, torch.int32),
                delta.scalings.to(self._device, torch.float32),
            )
            values = {"lora_A": staged.lora_a, "lora_B": staged.lora_b}
        else:
            spec = self.specs[delta.module]
            staged, values = quantized_experts(delta, spec, self._stored, self._device), {}
        values["a scaling"] = staged.scalings
        for name, tensor in values.items():
            if not bool(tensor.isfinite().all()):
                raise InvalidInputError(
                    f"{name} of {delta.module} does not fit {tensor.dtype}: a value overflows\n"
                    f"  to do: load the base model in bfloat16 or float32"
                )
        return staged

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of every stack, without tables of ranks."""
        parts = ("lora_a", "lora_b", "a_scales", "b_scales")
        found = [getattr(stack, part) for stack in self._stacks.values() for part in parts]
        return [tensor for tensor in found if tensor is not None]

    def has_form(self, slot: int, delta: ExpertDelta) -> bool:
        """Return whether a delta has the form of the LoRA that a slot has now."""
        return self._forms.get((slot, delta.module)) == self._form(delta)

    @torch.inference_mode(False)  # else no thread outside that mode could write them
    def reserve(self, deltas: Iterable[StagedExperts]) -> None:
        """Allocate the stacks that the deltas need and that do not exist yet: all, or none."""
        stacks = dict(self._stacks)
        for delta in deltas:
            key = (delta.module, self._form(delta))
            if key not in stacks:
                stacks[key] = self._allocate(*key)
        self._stacks = stacks

    def note(self, slot: int, delta: StagedExperts) -> None:
        """Note the form that a parameter has in a slot from now on."""
        self._forms[slot, delta.module] = self._form(delta)

    def write(self, slot: int, delta: StagedExperts) -> None:
        """Write a delta into a slot; `reserve` has allocated its stack."""
        stack = self._stacks[delta.module, self._form(delta)]
        stack.lora_a[slot, :, :, : delta.rank] = delta.lora_a
        stack.lora_b[slot, :, :, : delta.rank] = delta.lora_b
        if stack.a_scales is not None and delta.a_scales is not None:
            stack.a_scales[slot, :, :, : delta.rank] = delta.a_scales
        if stack.b_scales is not None and delta.b_scales is not None:
            stack.b_scales[slot] = delta.b_scales
        stack.scalings[slot] = delta.scalings
        stack.ranks[slot] = delta.ranks

    def forget(self, slot: int, path: str) -> None:
        """Note that a parameter has no LoRA in a slot."""
        self._forms.pop((slot, path), None)

    def zero(self, slot: int) -> None:
        """Let a slot count as rank 0 in every stack."""
        for stack in self._stacks.values():
            stack.ranks[slot] = 0

    def _form(self, delta: ExpertDelta) -> Form:
        several = self.specs[delta.module].num_experts > 1
        sizes = (delta.lora_a.shape[0], delta.lora_b.shape[0])
        return Form(delta.lora_a.shape[1], *(several and size == 1 for size in sizes))

    def _allocate(self, path: str, form: Form) -> ExpertWeights:
        spec, slots = self.specs[path], self._num_slots
        experts_a, experts_b = (
            1 if shared else spec.num_experts for shared in (form.one_a, form.one_b)
        )
        table = (slots, spec.num_experts, form.num_a)
        scales: dict[str, Any] = {}
        if self._stored is not None:  # one for each row
            like: dict[str, Any] = {"dtype": torch.float32, "device": self._device}
            shape = (slots, experts_a, form.num_a, self._max_rank, 1)
            scales["a_scales"] = torch.ones(shape, **like)
            scales["b_scales"] = torch.ones((slots, experts_b, spec.out_features, 1), **like)
            scales["compute_dtype"] = self._dtype
        return ExpertWeights(
            lora_a=self._zeros(slots, experts_a, form.num_a, self._max_rank, spec.in_features),
            lora_b=self._zeros(slots, experts_b, spec.out_features, self._max_rank),
            ranks=torch.zeros(table, dtype=torch.int32, device=self._device),
            scalings=torch.zeros(table, dtype=torch.float32, device=self._device),
            output_slices=spec.output_slices,
            num_experts=spec.num_experts,
            interleaved=spec.interleaved,
            **scales,
        )

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self._stored or self._dtype, device=self._device)

    def _check_fits(self, delta: ExpertDelta) -> None:
        spec = self.specs.get(delta.module)
        if spec is not None and spec.refusal is not None:
            raise UnsupportedInputError(
                f"LoRA of experts that cannot be reproduced exactly\n"
                f"  given: {delta.module}: {spec.refusal}\n  allowed: adapters without it"
            )
        given = [tuple(t.shape) for t in (delta.lora_a, delta.lora_b, delta.ranks, delta.scalings)]
        if spec is None or len(given[0]) != 4 or not 1 <= given[0][2] <= self._max_rank:
            raise InvalidInputError(
                f"the pool has no room for experts {delta.module!r} with lora_a {list(given[0])}\n"
                f"  the base model has there: {spec}\n  max_expert_rank: {self._max_rank}"
            )
        experts, (_, num_a, rank, _) = spec.num_experts, given[0]
        counts = {1, experts}
        fits = (
            given[0][0] in counts
            and num_a in {1, len(spec.output_slices)}
            and given[0][3] == spec.in_features
            and given[1] in [(count, spec.out_features, rank) for count in counts]
            and given[2] == given[3] == (experts, num_a)
        )
        if not fits:
            raise InvalidInputError(
                f"the LoRA of {delta.module!r} does not fit the base model\n"
                f"  given: lora_a, lora_b, ranks and scalings of shapes {given}\n"
                f"  allowed: [{experts} or 1, {num_a}, {rank}, {spec.in_features}], "
                f"[{experts} or 1, {spec.out_features}, {rank}], and twice [{experts}, {num_a}]"
            )
        if not bool(((delta.ranks >= 0) & (delta.ranks <= rank)).all()):
            raise InvalidInputError(
                f"the ranks of {delta.module!r} are not in 0..{rank}, the rank of its lora_a"
            )
