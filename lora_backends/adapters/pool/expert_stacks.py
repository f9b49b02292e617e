"""The stacked weights of experts, which come in several forms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from lora_backends.adapters.pool.quantized import (
    StagedExperts,
    check_no_overflow,
    quantized_experts,
)
from lora_backends.adapters.pool.records import ExpertForm, ModuleRecord
from lora_backends.adapters.pool.stack_format import (
    StackFormat,
    bytes_in,
    tensors_in,
    write_matrices,
)
from lora_backends.adapters.specs import ExpertDelta, ExpertSpec
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.experts import ExpertWeights


class ExpertStacks:
    """Stacks of stacked parameters, by path and form; a slot of a parameter has one form.

    An adapter whose experts share A, or where gate and up have an A each, is kept as it is: to
    convert it to another form would take more memory, or round. A stack is allocated when the first
    adapter of its form is loaded, and keeps its address from then on.
    """

    def __init__(self, specs: Mapping[str, ExpertSpec], max_rank: int, form: StackFormat) -> None:
        self.specs = dict(specs)
        self._max_rank, self._format = max_rank, form
        self._stacks: Mapping[tuple[str, ExpertForm], ExpertWeights] = {}

    def __getitem__(self, key: tuple[str, ExpertForm]) -> ExpertWeights:
        return self._stacks[key]

    def by_path(
        self, used: Iterable[tuple[str, ExpertForm]]
    ) -> dict[str, tuple[ExpertWeights, ...]]:
        """Return the stacks of paths and forms, by path."""
        stacks: dict[str, tuple[ExpertWeights, ...]] = {}
        for path, form in used:
            stacks[path] = (*stacks.get(path, ()), self._stacks[path, form])
        return stacks

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices and scales, whatever slots are in use."""
        return sum(map(bytes_in, self._stacks.values()))

    def stage(self, delta: ExpertDelta) -> StagedExperts:
        """Return a delta that fits the stacks, in their dtype, on their device, or refuse it."""
        self._check_fits(delta)
        device, dtype, eight_bit = self._format.device, self._format.dtype, self._format.eight_bit
        if eight_bit is None:
            staged = StagedExperts(
                delta.module,
                delta.lora_a.to(device, dtype),
                delta.lora_b.to(device, dtype),
                delta.ranks.to(device, torch.int32),
                delta.scalings.to(device, torch.float32),
            )
            check_no_overflow(delta.module, lora_A=staged.lora_a, lora_B=staged.lora_b)
        else:
            spec = self.specs[delta.module]
            staged = quantized_experts(delta, spec, eight_bit, device)
        check_no_overflow(delta.module, **{"a scaling": staged.scalings})
        return staged

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of every stack, without tables of ranks."""
        return tensors_in(self._stacks.values())

    def record(self, delta: StagedExperts) -> ModuleRecord:
        """Return the record of a delta in a slot."""
        return ModuleRecord(delta.nbytes, delta.error, form=self._form(delta))

    @torch.inference_mode(False)  # else no thread outside that mode could write them
    def reserve(self, deltas: Iterable[StagedExperts]) -> None:
        """Allocate the stacks that the deltas need and that do not exist yet: all, or none."""
        # A copy: an allocation that fails leaves the stacks as they were.
        stacks = dict(self._stacks)
        for delta in deltas:
            key = (delta.module, self._form(delta))
            if key not in stacks:
                stacks[key] = self._allocate(*key)
        self._stacks = stacks

    def write(self, slot: int, delta: StagedExperts) -> None:
        """Write a delta into a slot; `reserve` has allocated its stack."""
        stack = self._stacks[delta.module, self._form(delta)]
        write_matrices(stack, slot, delta)
        # Ranks last: rank 0 hides matrices that are half written.
        stack.scalings[slot] = delta.scalings
        stack.ranks[slot] = delta.ranks

    def zero(self, slot: int) -> None:
        """Let a slot count as rank 0 in every stack."""
        for stack in self._stacks.values():
            stack.ranks[slot] = 0

    def _form(self, delta: ExpertDelta) -> ExpertForm:
        several = self.specs[delta.module].num_experts > 1
        # With one expert, shared and separate matrices have one layout.
        sizes = (delta.lora_a.shape[0], delta.lora_b.shape[0])
        return ExpertForm(delta.lora_a.shape[1], *(several and size == 1 for size in sizes))

    def _allocate(self, path: str, form: ExpertForm) -> ExpertWeights:
        spec = self.specs[path]
        experts_a, experts_b = (1 if one else spec.num_experts for one in (form.one_a, form.one_b))
        shape_a = (experts_a, form.num_a, self._max_rank, spec.in_features)
        shape_b = (experts_b, spec.out_features, self._max_rank)
        table = (self._format.num_slots, spec.num_experts, form.num_a)
        return ExpertWeights(
            **self._format.matrices(shape_a, shape_b),
            ranks=torch.zeros(table, dtype=torch.int32, device=self._format.device),
            scalings=torch.zeros(table, dtype=torch.float32, device=self._format.device),
            output_slices=spec.output_slices,
            num_experts=spec.num_experts,
            interleaved=spec.interleaved,
        )

    def _check_fits(self, delta: ExpertDelta) -> None:
        spec = self.specs.get(delta.module)
        if spec is not None and spec.refusal is not None:
            raise UnsupportedInputError(
                f"LoRA of experts that cannot be reproduced exactly\n"
                f"  given: {delta.module}: {spec.refusal}\n  allowed: adapters without it"
            )
        shapes = [tuple(t.shape) for t in (delta.lora_a, delta.lora_b, delta.ranks, delta.scalings)]
        if spec is None or len(shapes[0]) != 4 or not 1 <= shapes[0][2] <= self._max_rank:
            raise InvalidInputError(
                f"the pool has no room for experts {delta.module!r} with lora_a {list(shapes[0])}\n"
                f"  the base model has there: {spec}\n  max_expert_rank: {self._max_rank}"
            )
        experts, (_, num_a, rank, _) = spec.num_experts, shapes[0]
        # Of the first axis: 1 if the experts share the matrix.
        counts = {1, experts}
        fits = (
            shapes[0][0] in counts
            and num_a in {1, len(spec.output_slices)}
            and shapes[0][3] == spec.in_features
            and shapes[1] in [(count, spec.out_features, rank) for count in counts]
            and shapes[2] == shapes[3] == (experts, num_a)
        )
        if not fits:
            raise InvalidInputError(
                f"the LoRA of {delta.module!r} does not fit the base model\n"
                f"  given: lora_a, lora_b, ranks and scalings of shapes {shapes}\n"
                f"  allowed: [{experts} or 1, {num_a}, {rank}, {spec.in_features}], "
                f"[{experts} or 1, {spec.out_features}, {rank}], and twice [{experts}, {num_a}]"
            )
        if not bool(((delta.ranks >= 0) & (delta.ranks <= rank)).all()):
            raise InvalidInputError(
                f"the ranks of {delta.module!r} are not in 0..{rank}, the rank of its lora_a"
            )
