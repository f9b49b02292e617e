"""Reading the LoRA of experts: every layout that trainers save becomes one `ExpertDelta`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lora_backends.adapters.experts.names import ExpertGroup
from lora_backends.adapters.experts.projections import read_projections
from lora_backends.adapters.experts.source import A_KEY, B_KEY, PREFIX, ExpertSource
from lora_backends.adapters.experts.stacked import assigned, exchanged_by_shapes, read_stacked
from lora_backends.adapters.files.formats import CONFIG_FILE
from lora_backends.adapters.files.messages import problem
from lora_backends.adapters.files.tensor_checks import check_dtype, check_finite, typed
from lora_backends.adapters.specs import ExpertDelta
from lora_backends.errors import UnsupportedInputError


def read_experts(
    source: ExpertSource, taken: Mapping[str, Sequence[ExpertGroup]]
) -> dict[str, ExpertDelta]:
    """Return the LoRA of every stacked parameter of experts, by its path.

    Raises:
        InvalidInputError: tensors contradict each other, the configuration or the base model.
        UnsupportedInputError: the file does not show how PEFT laid the matrices out, or has a bias.
    """
    deltas: dict[str, ExpertDelta] = {}
    stacked: list[tuple[str, ExpertGroup]] = []
    for experts, groups in sorted(taken.items()):
        styles = {group.style for group in groups}
        # First: the readers rely on two matrices with the right number of axes.
        _check_parts(source, groups)
        if len(styles) > 1:
            what = f"the LoRA of {experts!r} is laid out in more than one way"
            given = [f"tensors of {group.path!r}" for group in groups]
            raise source.error(what, given, "one of them", "save the adapter again")
        if styles == {"stacked"}:
            stacked += assigned(source, experts, groups)
        else:
            deltas |= read_projections(source, experts, groups)
    # After all groups: one parameter's shapes decide for the others.
    exchanged = exchanged_by_shapes(source, stacked)
    for name, group in stacked:
        deltas[name] = read_stacked(source, name, group, exchanged)
    return {name: deltas[name] for name in sorted(deltas)}


def _check_parts(source: ExpertSource, groups: Sequence[ExpertGroup]) -> None:
    if source.config.lora_bias:
        raise _biased(source, f"lora_bias = true in {CONFIG_FILE}")
    if source.config.use_dora:
        what = "the weights belong to a feature that this library cannot reproduce exactly"
        used = f"use_dora (DoRA) = true in {CONFIG_FILE}, and LoRA of {groups[0].path!r}"
        allowed = "LoRA of experts without DoRA"
        raise UnsupportedInputError(problem(source.path, what, used, allowed))
    for group in groups:
        given = [f"tensor '{PREFIX}{group.path}.{part}'" for part in group.parts]
        if any(part.startswith("lora_B.bias") for part in group.parts):
            raise _biased(source, given[0])
        if set(group.parts) != {A_KEY, B_KEY}:
            what = f"the LoRA of {group.path!r} is not a pair of matrices"
            raise source.error(what, given, f"{A_KEY} and {B_KEY}", "save the adapter again")
        for part, tensor in group.parts.items():
            key = f"{PREFIX}{group.path}.{part}"
            check_dtype(source.error, key, tensor)
            axes = 3 if group.style == "named" else 2
            if tensor.ndim != axes or not tensor.numel():
                what, allowed = "a tensor has the wrong shape", f"{axes} axes, none of them empty"
                raise source.error(what, typed(key, tensor), allowed, "save the adapter again")
            check_finite(source.error, key, tensor)


def _biased(source: ExpertSource, given: str) -> UnsupportedInputError:
    what = "the weights belong to a feature that this library cannot reproduce exactly"
    allowed = "LoRA of experts without a bias"
    given = f"lora_bias (a bias per expert), by {given}"
    return UnsupportedInputError(problem(source.path, what, given, allowed))
