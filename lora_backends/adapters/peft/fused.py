"""Converts adapters whose model splits a projection that the base model fuses, or the reverse.

fused base    q_proj, k_proj, v_proj -> qkv_proj: A stacked, B block by block at its part's outputs
split base    qkv_proj -> q_proj, k_proj, v_proj: the same A, and each part's rows of B

The result equals PEFT's on a model with the adapter's own modules and the same weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lora_backends.adapters.specs import FusedPart, ModuleDelta, ModuleSpec
from lora_backends.errors import InvalidInputError, UnsupportedInputError

SPLIT = {
    ("self_attn", "qkv_proj"): ("q_proj", "k_proj", "v_proj"),
    ("mlp", "gate_up_proj"): ("gate_proj", "up_proj"),
}
"""By owner and name of a fused module: its parts, whose output columns follow one another. This
holds for every decoder of Transformers with these names (Phi-3, GLM)."""

FUSED_NAMES = frozenset("qkv_proj query_key_value Wqkv c_attn qkv gate_up_proj in_proj_qkv".split())
_PARTS = frozenset("q_proj k_proj v_proj gate_proj up_proj in_proj_q in_proj_k in_proj_v".split())


@dataclass(frozen=True)
class OtherName:
    """A path that the base model lacks, for output columns of modules that it has."""

    spec: ModuleSpec
    places: tuple[tuple[str, Tensor], ...]
    """Paths of base modules, each with int64 indices of columns. One place: this path's columns in
    the fused base module. Several: the columns of each base module in this fused path."""

    @property
    def is_part(self) -> bool:
        """Whether it is a part of one base module; else several base modules are its parts."""
        return len(self.places) == 1


def other_names(modules: Mapping[str, ModuleSpec]) -> dict[str, OtherName]:
    """Return paths of parts of the base's fused modules, and of fused forms of its split ones."""
    names: dict[str, OtherName] = {}
    for path, spec in modules.items():
        parent, _, last = path.rpartition(".")
        for part in spec.parts:
            place = ((path, part.columns),)
            names[f"{parent}.{part.name}"] = OtherName(_like(spec, part.width), place)
        for (owner, fused), parts in SPLIT.items():
            if last == parts[0] and parent.rpartition(".")[2] == owner:
                by_part = [(f"{parent}.{name}", modules.get(f"{parent}.{name}")) for name in parts]
                names |= _fused(f"{parent}.{fused}", by_part)
    return {path: name for path, name in names.items() if path not in modules}


def _like(spec: ModuleSpec, width: int) -> ModuleSpec:
    return ModuleSpec("linear", spec.in_features, width, transposed=spec.transposed)


def _fused(path: str, by_place: list[tuple[str, ModuleSpec | None]]) -> dict[str, OtherName]:
    places, start = [], 0
    for place, spec in by_place:
        if spec is None or spec.kind != "linear" or spec.transposed:
            return {}
        places.append((place, FusedPart("", start, spec.out_features).columns))
        start += spec.out_features
    specs = [spec for _, spec in by_place if spec is not None]
    if len({spec.in_features for spec in specs}) > 1:
        return {}
    return {path: OtherName(_like(specs[0], start), tuple(places))}


def order_unknown(module: str, modules: Mapping[str, ModuleSpec]) -> str | None:
    """Return the base module that may fuse a missing one in an unknown order, or None."""
    parent, _, last = module.rpartition(".")
    if last not in _PARTS:
        return None
    fused = (f"{parent}.{name}" for name in sorted(FUSED_NAMES))
    return next((path for path in fused if path in modules), None)


def without_second_names(
    targeted: Collection[str],  # paths that the file has no LoRA for
    names: Mapping[str, OtherName],
    served: Collection[str],  # paths of the base model that it has LoRA for
    used: Collection[str],  # keys of `names` that it has LoRA for
) -> list[str]:
    """Return targeted paths without second names of modules that are targeted anyway."""
    # a configuration may target q_proj and qkv_proj, although its own model had only one of them
    through_others = {place for path in used for place, _ in names[path].places}
    directly_served = {*served} - through_others
    last_names = {path.rpartition(".")[2] for path in used}

    def is_meant(path: str) -> bool:
        places = {place for place, _ in names[path].places}
        if places & through_others:  # the adapter's model splits this module
            return True
        is_alone = places.isdisjoint(targeted) or path.rpartition(".")[2] in last_names
        return is_alone and places.isdisjoint(directly_served)

    return [path for path in targeted if path not in names or is_meant(path)]


def as_base(
    deltas: Mapping[str, ModuleDelta],  # some of whose paths are keys of `names`
    names: Mapping[str, OtherName],
    modules: Mapping[str, ModuleSpec],
    max_rank: int | None,  # None sets no limit
    needed: int,  # the `max_rank` that has room for all of them
) -> dict[str, ModuleDelta]:
    """Return deltas for the modules that the base model has.

    Raises:
        InvalidInputError: two deltas are for one module, or the ranks of parts exceed `max_rank`.
        UnsupportedInputError: PiSSA or OLoRA, or DoRA of only some parts of a fused module.
    """
    result = {path: delta for path, delta in deltas.items() if path not in names}
    parts_of: dict[str, list[tuple[ModuleDelta, Tensor]]] = {}
    for path, delta in deltas.items():
        if path not in names:
            continue
        if delta.init is not None:
            places = ", ".join(place for place, _ in names[path].places)
            raise UnsupportedInputError(
                f"init_lora_weights = {delta.init!r} for {path!r}, which the base model computes "
                f"in {places}: its start depends on the whole weight\n"
                f"  to do: save the adapter with path_initial_model_for_weight_conversion"
            )
        if names[path].is_part:
            place, columns = names[path].places[0]
            parts_of.setdefault(place, []).append((delta, columns))
            continue
        for divided in _divided(delta, names[path]):
            _check_free(result, divided.module, path)
            result[divided.module] = divided
    for path, parts in parts_of.items():
        _check_free(result, path, parts[0][0].module)
        result[path] = _joined(path, modules[path], parts, max_rank, needed)
    return {path: result[path] for path in sorted(result)}


def _check_free(result: Mapping[str, ModuleDelta], path: str, other: str) -> None:
    if path in result:
        raise InvalidInputError(
            f"the checkpoint has LoRA for {path!r} and for {other!r}, which the base model computes"
            f" as one\n  allowed: one of them\n  to do: save the adapter again"
        )


def _divided(delta: ModuleDelta, name: OtherName) -> Iterator[ModuleDelta]:
    for path, columns in name.places:
        bias = None if delta.bias is None else delta.bias[columns]
        magnitude = None if delta.magnitude is None else delta.magnitude[columns]
        lora_b = delta.lora_b[columns]
        yield replace(delta, module=path, lora_b=lora_b, bias=bias, magnitude=magnitude)


def _joined(
    path: str,
    spec: ModuleSpec,
    parts: list[tuple[ModuleDelta, Tensor]],
    max_rank: int | None,
    needed: int,
) -> ModuleDelta:
    deltas = [delta for delta, _ in parts]
    rank = sum(delta.rank for delta in deltas)
    names = ", ".join(repr(delta.module) for delta in deltas)
    if max_rank is not None and rank > max_rank:
        raise InvalidInputError(
            f"the base model computes {names} as {path!r}, where their ranks add up\n"
            f"  given: ranks {[delta.rank for delta in deltas]}\n  allowed: at most {max_rank} "
            f"together (max_rank)\n  to do: set max_rank to {needed} or more"
        )
    with_magnitude = [delta for delta in deltas if delta.magnitude is not None]
    if with_magnitude and sum(map(len, (columns for _, columns in parts))) < spec.out_features:
        raise UnsupportedInputError(
            f"DoRA (use_dora) for {names}, and not for all of {path!r}, into which the base model "
            f"fuses them\n  to do: merge the adapter into its base model"
        )
    scaling = deltas[0].scaling
    alike = all(delta.scaling == scaling for delta in deltas)
    dtype = deltas[0].lora_a.dtype if alike else torch.float32
    for delta in deltas:
        for tensor in (delta.lora_a, delta.lora_b, delta.magnitude):
            dtype = dtype if tensor is None else torch.promote_types(dtype, tensor.dtype)
    lora_b = torch.zeros(spec.out_features, rank, dtype=dtype)
    bias = magnitude = None
    if any(delta.bias is not None for delta in deltas):
        bias = torch.zeros(spec.out_features)
    if with_magnitude:
        magnitude = torch.zeros(spec.out_features, dtype=dtype)
    start = 0
    for delta, columns in parts:
        b = delta.lora_b.to(dtype)
        lora_b[columns, start : start + delta.rank] = b if alike else b * delta.scaling
        start += delta.rank
        if bias is not None and delta.bias is not None:
            bias[columns] = delta.bias
        if magnitude is not None and delta.magnitude is not None:
            magnitude[columns] = delta.magnitude.to(dtype)
    lora_a = torch.cat([delta.lora_a.to(dtype) for delta in deltas])
    return ModuleDelta(
        path, "linear", rank, scaling if alike else 1.0, lora_a, lora_b, bias, magnitude
    )
