"""The LoRA of experts as modules per expert, or as tensors with an axis of experts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_backends.adapters.experts.names import GATED, PLAIN, PROJECTIONS, ExpertGroup
from lora_backends.adapters.experts.source import A_KEY, B_KEY, ExpertSource
from lora_backends.adapters.files.formats import CONFIG_FILE
from lora_backends.adapters.peft.module_rules import targets_parameter
from lora_backends.adapters.specs import ExpertDelta, ExpertSpec


@dataclass(frozen=True)
class _ProjectionLora:
    """The matrices of one projection, of one expert or of all."""

    path: str  # as the file has it
    number: int | None  # of the expert; None: the first axes are those of all experts, or 1
    slice: int | None  # of the parameter's slices; None: all columns
    rank: int
    scaling: float
    a: Tensor  # [num_experts or 1, rank, in_features]
    b: Tensor  # [num_experts or 1, columns, rank]


def read_projections(
    source: ExpertSource, experts: str, groups: Sequence[ExpertGroup]
) -> dict[str, ExpertDelta]:
    """Return the LoRA of the parameters of one experts' module, by their paths."""
    entries: dict[str, list[_ProjectionLora]] = {}
    for group in groups:
        parameter, index = PROJECTIONS[group.projection]
        # Experts without a gate have up_proj as a parameter of its own.
        if group.projection == PLAIN and source.specs and f"{experts}.{PLAIN}" in source.specs:
            parameter, index = PLAIN, None
        name = f"{experts}.{parameter}"
        spec = source.spec(name)
        of_parameter = entries.setdefault(name, [])
        of_parameter += _split(source, name, spec, _entry(source, name, index, group))
    return {name: _joined(source, name, of_parameter) for name, of_parameter in entries.items()}


def _entry(
    source: ExpertSource, name: str, index: int | None, group: ExpertGroup
) -> _ProjectionLora:
    rule = source.rules[group.path]
    names = (group.path, group.path.rpartition(".")[0])
    if not targets_parameter(source.config, name) and not any(
        source.rules[n].targeted for n in names if n
    ):
        raise source.untargeted(group.path)
    source.check_room(group.path, rule.rank)
    a, b = group.parts[A_KEY], group.parts[B_KEY]
    if group.number is not None:
        a, b = a[None], b[None]
    return _ProjectionLora(group.path, group.number, index, rule.rank, rule.scaling, a, b)


def _split(
    source: ExpertSource, name: str, spec: ExpertSpec | None, entry: _ProjectionLora
) -> Iterator[_ProjectionLora]:
    """Yield an entry, or those of gate and up where A holds the ranks of both."""
    # Gate and up with an A each: [A of gate; A of up] and [B of gate; B of up].
    half, rest = divmod(entry.a.shape[1], 2)
    is_double = name.endswith(GATED) and entry.slice is None and entry.number is None
    if not is_double or rest or half != entry.rank or entry.b.shape[2] != half:
        yield entry
        return
    if spec is not None and spec.interleaved:
        raise source.error(
            f"it cannot be told which columns of {name!r} belong to the gate: the base model "
            f"interleaves them",
            [f"A of gate and up apart, {list(entry.a.shape)}", f"B {list(entry.b.shape)}"],
            f"A of rank {entry.rank} for both, or tensors of gate_proj and up_proj",
        )
    for index, (a, b) in enumerate(
        zip(torch.tensor_split(entry.a, 2, 1), torch.tensor_split(entry.b, 2, 1), strict=True)
    ):
        yield _ProjectionLora(entry.path, None, index, entry.rank, entry.scaling, a, b)


def _joined(source: ExpertSource, name: str, entries: Sequence[_ProjectionLora]) -> ExpertDelta:
    """Return the entries of one parameter as one delta, padded to the largest rank."""
    spec = source.spec(name)
    num_experts = _num_experts(spec, entries)
    _check_entries(source, name, spec, entries, num_experts)
    rank = max(entry.rank for entry in entries)
    num_a = 1 if entries[0].slice is None else 2
    one_a, one_b = (
        num_experts > 1 and all(e.number is None and t.shape[0] == 1 for e, t in pairs)
        for pairs in ([(e, e.a) for e in entries], [(e, e.b) for e in entries])
    )
    wide, high = entries[0].a.shape[2], entries[0].b.shape[1] * num_a
    shape_a = (1 if one_a else num_experts, num_a, rank, wide)
    shape_b = (1 if one_b else num_experts, high, rank)
    dtype = entries[0].a.dtype
    for entry in entries:
        # The widest dtype of the parts, so that no value is rounded.
        dtype = torch.promote_types(dtype, torch.promote_types(entry.a.dtype, entry.b.dtype))
    # Checked before the allocation.
    _check_size(source, name, (math.prod(shape_a) + math.prod(shape_b)) * dtype.itemsize)
    # Zeros: an expert without LoRA, and columns above an expert's rank, add nothing.
    a, b = (
        torch.zeros(shape_a, dtype=dtype, device="cpu"),
        torch.zeros(shape_b, dtype=dtype, device="cpu"),
    )
    ranks = torch.zeros(num_experts, num_a, dtype=torch.int32, device="cpu")
    scalings = torch.zeros(num_experts, num_a, dtype=torch.float32, device="cpu")
    for entry in entries:
        whose = slice(None) if entry.number is None else slice(entry.number, entry.number + 1)
        index = entry.slice or 0
        a[whose, index, : entry.rank] = entry.a
        b[whose, _columns(spec, high, entry.slice), : entry.rank] = entry.b
        ranks[whose, index], scalings[whose, index] = entry.rank, entry.scaling
    return ExpertDelta(name, a, b, ranks, scalings)


def _num_experts(spec: ExpertSpec | None, entries: Sequence[_ProjectionLora]) -> int:
    if spec is not None:
        return spec.num_experts
    numbers = (0 if entry.number is None else entry.number + 1 for entry in entries)
    sizes = (max(entry.a.shape[0], entry.b.shape[0]) for entry in entries)
    return max(*numbers, *sizes, 1)


def _columns(spec: ExpertSpec | None, high: int, index: int | None) -> slice:
    if index is None:
        return slice(None)
    if spec is not None and spec.interleaved:
        return slice(index, None, 2)
    return slice(index * high // 2, (index + 1) * high // 2)


def _check_entries(
    source: ExpertSource,
    name: str,
    spec: ExpertSpec | None,
    entries: Sequence[_ProjectionLora],
    num_experts: int,
) -> None:
    """Refuse entries that overlap, or whose shapes do not fit each other or the base model."""
    seen: set[tuple[int | None, int | None]] = set()
    for entry in entries:
        place = (entry.number, entry.slice)
        if place in seen or (entry.slice is None) != (entries[0].slice is None):
            what = f"the LoRA of {name!r} is given twice"
            given = [f"LoRA for {other.path!r}" for other in entries[:5]]
            raise source.error(what, given, "gate and up together, or each of them once")
        seen.add(place)
        wide, high = entries[0].a.shape[2], entries[0].b.shape[1]
        if spec is not None:
            wide = spec.in_features
            high = spec.out_features if entry.slice is None else spec.output_slices[entry.slice]
        experts = (1,) if entry.number is not None else (1, num_experts)
        shapes = [tuple(entry.a.shape), tuple(entry.b.shape)]
        allowed_a = [(count, entry.rank, wide) for count in experts]
        allowed_b = [(count, high, entry.rank) for count in experts]
        if shapes[0] not in allowed_a or shapes[1] not in allowed_b:
            drop = 0 if entry.number is None else 1
            what = f"the LoRA of {entry.path!r} has the wrong shape"
            allowed = (
                f"A {list(allowed_a[-1][drop:])} and B {list(allowed_b[-1][drop:])}, rank "
                f"{entry.rank} by {CONFIG_FILE}" + ", or 1 for the experts" * (not drop)
            )
            shown = f"A {list(shapes[0][drop:])}, B {list(shapes[1][drop:])}"
            raise source.error(what, shown, allowed, "load it on the model it was trained on")
        if entry.number is not None and entry.number >= num_experts:
            what = f"the base model has fewer experts than the adapter at {name!r}"
            shown, allowed = f"expert {entry.number}", f"0..{num_experts - 1}"
            raise source.error(what, shown, allowed, "load it on the model it was trained on")


def _check_size(source: ExpertSource, name: str, size: int) -> None:
    """Limit the padding: experts without LoRA and smaller ranks fill up with zeros."""
    if size > source.options.limits.unpacked_bytes:
        given = f"{name!r}, of {size} bytes for all experts"
        raise source.options.limits.exceeded("unpacked_bytes", source.path, given, size)
