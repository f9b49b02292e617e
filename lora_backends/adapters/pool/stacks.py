"""The stacked weights of a pool, and how modules that share an input share one stack."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lora_backends.adapters.pool.rank_tables import Tables
from lora_backends.adapters.pool.stack_format import (
    StackFormat,
    bytes_in,
    tensors_in,
    write_matrices,
)
from lora_backends.adapters.specs import ModuleSpec
from lora_backends.weights import LoRAWeights

_TERMS = {"bias": 0.0, "output_scales": 1.0}
"""Terms of a module's output that few adapters bring, and the value that changes nothing."""


@dataclass(frozen=True, eq=False)
class StagedDelta:
    """One module's LoRA as a slot takes it: in the dtype of the stacks, on their device."""

    module: str  # path
    rank: int
    scaling: float
    lora_a: torch.Tensor  # [rank, in_features]
    lora_b: torch.Tensor  # [out_features, rank]
    bias: torch.Tensor | None  # [out_features] float32
    output_scales: torch.Tensor | None  # [out_features] float32: DoRA
    a_scales: torch.Tensor | None = None  # [rank, 1] float32, of 8 bits
    b_scales: torch.Tensor | None = None  # [out_features, 1] float32, of 8 bits
    error: float | None = None  # relative, of B A; None where it is not quantised

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices and their scales."""
        return bytes_in(self)


@dataclass(frozen=True)
class _Allocated:
    """The allocated stacks; replaced as one object, so an interrupt leaves the old or the new."""

    whole: Mapping[tuple[str, ...], LoRAWeights]  # by group
    parts: Mapping[str, LoRAWeights]  # by path, of the modules that were ever touched


class ModuleStacks:
    """Stacks of modules by path; those of a group are views of one stack with a slice a module.

    A group's stack and its views share matrices, biases and output_scales, so a slot is written
    once for both. Biases and output_scales are allocated with the first adapter of the group that
    brings them. Ranks and scalings exist twice, because engines need contiguous tables, and a
    column of the group's table is not contiguous. The tables of all stacks lie in one tensor, which
    one launch writes.
    """

    def __init__(
        self,
        modules: Mapping[str, ModuleSpec],
        groups: Iterable[Sequence[str]],
        max_rank: int,
        form: StackFormat,
    ) -> None:
        self._modules = modules
        self._groups: dict[str, tuple[str, ...]] = {path: (path,) for path in modules}
        for group in groups:
            self._groups |= dict.fromkeys(group, tuple(group))
        self._max_rank, self._form = max_rank, form
        self._stacks = _Allocated({}, {})
        self._tables: Tables | None = None  # with the first stack

    def __getitem__(self, path: str) -> LoRAWeights:
        return self._stacks.parts[path]

    def shared(self, used: Iterable[str]) -> dict[str, LoRAWeights]:
        """Return the stacks of groups with two or more modules of `used`, by their first path."""
        used = set(used)
        return {
            group[0]: stack
            for group, stack in self._stacks.whole.items()
            if len(group) > 1 and len(used.intersection(group)) > 1
        }

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of every stack, without tables of ranks."""
        return tensors_in(self._stacks.whole.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices and scales, whatever slots are in use."""
        return sum(map(bytes_in, self._stacks.whole.values()))

    @torch.inference_mode(False)  # else no thread outside that mode could write them
    def reserve(self, deltas: Iterable[StagedDelta]) -> None:
        """Allocate the stacks that the deltas need and that do not exist yet: all, or none."""
        if self._tables is None:
            self._tables = Tables(self._groups, self._form.num_slots, self._form.device)
        tables = self._tables
        whole, parts = dict(self._stacks.whole), dict(self._stacks.parts)
        for delta in deltas:
            group = self._groups[delta.module]
            index = group.index(delta.module)
            stack = self._with_terms(whole.get(group) or self._allocate(group, tables), delta)
            whole[group] = stack
            if len(group) == 1:
                parts[delta.module] = stack
                continue
            part = parts.get(delta.module) or _part(stack, index, tables.of(delta.module))
            first, end = _columns(stack, index)
            views = {
                term: getattr(stack, term)[:, first:end]
                for term in _TERMS
                if getattr(delta, term) is not None and getattr(part, term) is None
            }
            # Calls compare stacks by identity: one that gets nothing stays the same object.
            parts[delta.module] = replace(part, **views) if views else part
        is_new = any(self._stacks.whole.get(group) is not stack for group, stack in whole.items())
        if is_new and self._form.device.type == "cuda":
            # another thread's stream may read a stack as soon as it is found here
            torch.cuda.current_stream(self._form.device).synchronize()
        self._stacks = _Allocated(whole, parts)

    def write(self, slot: int, delta: StagedDelta) -> None:
        """Write a delta's tensors into a slot; `reserve` has allocated its stacks."""
        part = self._stacks.parts[delta.module]
        write_matrices(part, slot, delta)
        for term in _TERMS:
            if getattr(delta, term) is not None:
                getattr(part, term)[slot] = getattr(delta, term)

    def write_tables(self, slot: int, deltas: Sequence[StagedDelta]) -> None:
        """Write the ranks and scalings of deltas, after their tensors."""
        if self._tables is not None and deltas:
            self._tables.write(slot, {d.module: (d.rank, d.scaling) for d in deltas})

    def zero(self, slot: int) -> None:
        """Let a slot of every module count as rank 0, with no bias and scales of 1."""
        if self._tables is not None:
            self._tables.zero(slot)
        for stack in self._stacks.whole.values():
            for term, neutral in _TERMS.items():
                if getattr(stack, term) is not None:
                    getattr(stack, term)[slot] = neutral

    def _with_terms(self, stack: LoRAWeights, delta: StagedDelta) -> LoRAWeights:
        """Return a stack with the bias and output_scales that a delta brings first."""
        like: dict[str, Any] = {"dtype": torch.float32, "device": self._form.device}
        shape = (self._form.num_slots, stack.out_features)
        new: dict[str, Any] = {
            term: torch.full(shape, neutral, **like)
            for term, neutral in _TERMS.items()
            if getattr(delta, term) is not None and getattr(stack, term) is None
        }
        return replace(stack, **new) if new else stack

    def _allocate(self, group: tuple[str, ...], tables: Tables) -> LoRAWeights:
        specs = [self._modules[path] for path in group]
        widths = tuple(spec.out_features for spec in specs)
        shape_a = (len(group), self._max_rank, specs[0].in_features)
        ranks, scalings = tables.of(*group)
        return LoRAWeights(
            **self._form.matrices(shape_a, (sum(widths), self._max_rank)),
            ranks=ranks,
            scalings=scalings,
            output_slices=widths,
        )


def _part(stack: LoRAWeights, index: int, tables: tuple[torch.Tensor, torch.Tensor]) -> LoRAWeights:
    """Return one module's stack: views of a group's, with tables of its own."""
    first, end = _columns(stack, index)
    return LoRAWeights(
        lora_a=stack.lora_a[:, index : index + 1],
        lora_b=stack.lora_b[:, first:end],
        ranks=tables[0],
        scalings=tables[1],
        output_slices=(end - first,),
        a_scales=None if stack.a_scales is None else stack.a_scales[:, index : index + 1],
        b_scales=None if stack.b_scales is None else stack.b_scales[:, first:end],
        compute_dtype=stack.compute_dtype,
    )


def _columns(stack: LoRAWeights, index: int) -> tuple[int, int]:
    """Return the first output column of a slice, and the one after its last."""
    return stack.slice_offsets[index], stack.slice_offsets[index + 1]
