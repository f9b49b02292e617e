"""The LoRA of experts as PEFT's `target_parameters` stacks it.

A parameter has two matrices for all of its experts:

    A [E * r, in]    A.reshape(E, r, in)     expert after expert
    B [out, r * E]   B.reshape(out, r, E)    rank after rank

Some versions of PEFT took the wrong axis of the parameter for the input. Then A has the width of
the output and B that of the input, and the update is `(A[e].T @ B[:, :, e].T)` instead of
`B[:, :, e] @ A[e]`: the matrices are exchanged. If the two widths differ, the shapes show it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from lora_backends.adapters.experts.names import DOWN, GATED, PLAIN, ExpertGroup
from lora_backends.adapters.experts.source import A_KEY, B_KEY, PREFIX, ExpertSource
from lora_backends.adapters.files.formats import CONFIG_FILE
from lora_backends.adapters.files.messages import as_json, problem
from lora_backends.adapters.files.tensor_checks import typed
from lora_backends.adapters.peft.module_rules import targets_parameter
from lora_backends.adapters.specs import ExpertDelta, ExpertSpec
from lora_backends.errors import InvalidInputError, UnsupportedInputError


def assigned(
    source: ExpertSource, experts: str, groups: Sequence[ExpertGroup]
) -> list[tuple[str, ExpertGroup]]:
    """Return each group with the path of its parameter."""
    # With two parameters, PEFT puts the inner one below base_layer.
    by_place = {group.projection: group for group in groups}
    if len(by_place) < len(groups):
        given = [f"LoRA for {group.path!r}" for group in groups]
        raise source.error(f"the LoRA of {experts!r} is given twice", given, "one path for it")
    if source.specs is not None and not _parameters(source, experts):
        source.spec(f"{experts}.{GATED}")
    names = [n for n in _parameters(source, experts) if targets_parameter(source.config, n)]
    if not names:
        raise source.untargeted(experts)
    # PEFT wraps the module once per parameter, in their order in the module: the first is the inner
    places = {1: [""], 2: ["base_layer", ""]}.get(len(names), [])
    if set(by_place) != set(places):
        raise source.error(
            f"target_parameters and the tensors of {experts!r} disagree",
            [*(f"target: {name}" for name in names), *(f"LoRA for {g.path!r}" for g in groups)],
            f"tensors below {experts!r} for one parameter, and below '{experts}.base_layer' for "
            f"the first of two",
            f"correct target_parameters in {CONFIG_FILE}, or save the adapter again",
        )
    return [(name, by_place[place]) for name, place in zip(names, places, strict=True)]


def _parameters(source: ExpertSource, experts: str) -> list[str]:
    """Return the parameters that an experts' module may have, in their order there."""
    names = [f"{experts}.{name}" for name in (GATED, PLAIN, DOWN)]
    return [name for name in names if source.specs is None or name in source.specs]


def _fits(source: ExpertSource, name: str, group: ExpertGroup) -> tuple[bool, bool]:
    """Return whether the matrices have the shapes of the parameter, and of an exchanged one."""
    spec, rank = source.spec(name), source.rules[name].rank
    (rows, wide), (high, columns) = group.parts[A_KEY].shape, group.parts[B_KEY].shape
    if spec is None:
        fits = rows == columns and rows % rank == 0
        return fits, fits
    if rows != columns or rows != spec.num_experts * rank:
        return False, False
    widths = (spec.in_features, spec.out_features)
    return (wide, high) == widths, (high, wide) == widths


def exchanged_by_shapes(
    source: ExpertSource, stacked: Sequence[tuple[str, ExpertGroup]]
) -> dict[bool, bool]:
    """Return whether the matrices are exchanged, by order of the axes, where a shape shows it."""
    by_shapes = {}
    for name, group in stacked:
        straight, exchanged = _fits(source, name, group)
        spec = source.spec(name)
        if spec is not None and straight != exchanged:
            # one version of PEFT has saved all of them
            by_shapes[spec.transposed] = exchanged
    return by_shapes


def read_stacked(
    source: ExpertSource, name: str, group: ExpertGroup, by_shapes: Mapping[bool, bool]
) -> ExpertDelta:
    """Return the LoRA of one parameter."""
    rule, spec = source.rules[name], source.spec(name)
    source.check_room(name, rule.rank)
    straight, exchanged = _fits(source, name, group)
    a, b = group.parts[A_KEY], group.parts[B_KEY]
    if not straight and not exchanged:
        raise _misshapen(source, name, group, spec, rule.rank)
    if straight and exchanged:
        is_transposed = spec is not None and spec.transposed
        # Square: another parameter of the file shows the order, else the version of PEFT.
        if is_transposed in by_shapes:
            exchanged = by_shapes[is_transposed]
        else:
            exchanged = _exchanged_by_version(source, name, is_transposed)
    elif spec is not None and by_shapes.get(spec.transposed) != exchanged:
        raise _misshapen(source, name, group, spec, rule.rank)
    num_experts = a.shape[0] // rule.rank
    first = a.reshape(num_experts, rule.rank, -1)  # [E, r, in]
    second = b.reshape(b.shape[0], rule.rank, num_experts).permute(2, 0, 1)  # [E, out, r]
    # A then has the output's width: the update is its transpose times B's.
    if exchanged:
        first, second = second.transpose(1, 2), first.transpose(1, 2)
    return ExpertDelta(
        module=name,
        lora_a=first[:, None].contiguous(),
        lora_b=second.contiguous(),
        ranks=torch.full((num_experts, 1), rule.rank, dtype=torch.int32, device="cpu"),
        scalings=torch.full((num_experts, 1), rule.scaling, dtype=torch.float32, device="cpu"),
    )


def _misshapen(
    source: ExpertSource, name: str, group: ExpertGroup, spec: ExpertSpec | None, rank: int
) -> InvalidInputError:
    given = [typed(f"{PREFIX}{group.path}.{part}", t) for part, t in group.parts.items()]
    allowed = f"for rank {rank} by {CONFIG_FILE}: [experts * rank, in] and [out, rank * experts]"
    if spec is not None:
        rows = spec.num_experts * rank
        allowed = (
            f"[{rows}, {spec.in_features}] and [{spec.out_features}, {rows}], for rank {rank} by "
            f"{CONFIG_FILE} and {spec.num_experts} experts of the base model"
        )
    to_do = "load it on the model it was trained on, with the configuration saved beside it"
    return source.error(f"the LoRA of {name!r} has the wrong shape", given, allowed, to_do)


def _exchanged_by_version(source: ExpertSource, name: str, is_transposed: bool) -> bool:
    """Return whether the version of PEFT that saved a file has exchanged its matrices."""
    saved_by = source.config.peft_version
    match = re.match(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})(.*)", str(saved_by))
    if match is not None:
        version = (int(match[1]), int(match[2]), int(match[3]))
        is_release = not match[4]
        if version > (0, 19, 1) or (version == (0, 19, 1) and is_release):
            return False
        if version < (0, 18, 0) or (is_release and version < (0, 19, 0)):
            # up to 0.18 PEFT took every parameter for [experts, in, out]
            return not is_transposed
        # 0.19.0 took those that Transformers marks as [experts, in, out] for [experts, out, in]
        if version == (0, 19, 0) and is_release and not is_transposed:
            return True
    raise UnsupportedInputError(
        problem(
            source.path,
            f"it cannot be told which of A and B of {name!r} reads the input: both have the same "
            f"width, and versions of PEFT differ",
            f"peft_version = {as_json(saved_by)}",
            "matrices of two widths, or a peft_version that is known: a release other than 0.19.0",
            f"write the version of PEFT that saved the adapter into {CONFIG_FILE}",
        )
    )
