"""Checks a checkpoint and converts it to the form that the slots of a pool take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from lora_backends.adapters.peft.dora import BaseLayers, dora_terms
from lora_backends.adapters.peft.pissa import without_start
from lora_backends.adapters.pool.expert_stacks import ExpertStacks
from lora_backends.adapters.pool.quantized import StagedExperts, check_no_overflow, quantized_pair
from lora_backends.adapters.pool.records import ModuleRecord, SlotRecord
from lora_backends.adapters.pool.stack_format import StackFormat
from lora_backends.adapters.pool.stacks import StagedDelta
from lora_backends.adapters.pool.tensors import in_one_copy
from lora_backends.adapters.specs import Checkpoint, ModuleDelta, ModuleSpec
from lora_backends.common.names import PEFT_BASE
from lora_backends.errors import InvalidInputError, UnsupportedInputError, shown

MOST_START_ERROR = 0.05
"""Largest relative error of a PiSSA or OLoRA delta in 8 bits. The delta is the difference of two
rounded products, so its relative error is large where they are nearly equal."""

Replacements: TypeAlias = Callable[[Checkpoint], Mapping[str, Any]]
"""Returns an adapter's replacements of base modules, by path."""


@dataclass(frozen=True, eq=False)
class Staged:
    """An adapter as the slots take it: on their device, in their dtype."""

    modules: Sequence[StagedDelta]
    experts: Sequence[StagedExperts]
    record: SlotRecord  # of the slot that it is written to


class Staging:
    """Stages checkpoints for the slots of one pool, whose arguments these are."""

    def __init__(
        self,
        modules: Mapping[str, ModuleSpec],
        max_rank: int,
        form: StackFormat,
        experts: ExpertStacks,
        base_layers: BaseLayers | None,
        replacements: Replacements | None,
    ) -> None:
        self._modules, self._max_rank = modules, max_rank
        self._format, self._experts = form, experts
        self._base_layers, self._replacements_of = base_layers, replacements

    def stage(self, checkpoint: Checkpoint) -> Staged:
        """Return a checkpoint as the slots take it.

        Raises:
            InvalidInputError: it does not fit the base model.
            UnsupportedInputError: as `AdapterPool.load`.
        """
        check_checkpoint(checkpoint)
        deltas = checkpoint.modules.values()
        for delta in deltas:  # all of them before the first is copied
            self._check_fits(delta)
        on_device = self._in_one_copy(checkpoint)
        modules = [self._stage(delta, on_device.get(delta.module)) for delta in deltas]
        experts = [self._experts.stage(delta) for delta in checkpoint.experts.values()]
        records = {d.module: _record(d) for d in modules}
        records |= {d.module: self._experts.record(d) for d in experts}
        return Staged(modules, experts, SlotRecord(records, self._replacements(checkpoint)))

    def _check_fits(self, delta: ModuleDelta) -> None:
        spec, rank = self._modules.get(delta.module), delta.rank
        if spec is None or spec.kind != delta.kind or not 1 <= rank <= self._max_rank:
            raise InvalidInputError(
                f"the pool has no room for {delta.kind} {delta.module!r} of rank {rank}\n"
                f"  the base model has there: {spec}\n  max_rank: {self._max_rank}"
            )
        shapes = [tuple(t.shape) for t in (delta.lora_a, delta.lora_b, delta.bias) if t is not None]
        allowed = [(rank, spec.in_features), (spec.out_features, rank), (spec.out_features,)]
        if shapes != allowed[: len(shapes)]:
            raise InvalidInputError(
                f"the LoRA of {delta.module!r} does not fit the base model\n"
                f"  given: lora_a, lora_b and bias of shapes {shapes}\n  allowed: {allowed}"
            )
        if delta.magnitude is not None:
            shape = tuple(delta.magnitude.shape)
            if delta.bias is not None or shape != allowed[2]:
                raise InvalidInputError(
                    f"the magnitude (DoRA) of {delta.module!r} does not fit\n  given: shape {shape}"
                    f"{', and a bias' * (delta.bias is not None)}\n"
                    f"  allowed: {allowed[2]}, without a LoRA bias"
                )

    def _in_one_copy(self, checkpoint: Checkpoint) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return A and B in the pool's dtype on its device, by path, if one copy moves them all."""
        deltas = checkpoint.modules.values()
        if self._format.eight_bit is not None or any(delta.init is not None for delta in deltas):
            return {}  # these change before they are copied
        pairs = [matrix for delta in deltas for matrix in (delta.lora_a, delta.lora_b)]
        copied = in_one_copy(pairs, self._format.device, self._format.dtype)
        # One check of all values: on a GPU each check waits for the device.
        # `_stage` then names the matrix that is not finite
        if copied is None or not bool(copied[0].isfinite().all()):
            return {}
        matrices = iter(copied[1])
        return {delta.module: (next(matrices), next(matrices)) for delta in deltas}

    def _stage(
        self, delta: ModuleDelta, on_device: tuple[torch.Tensor, torch.Tensor] | None
    ) -> StagedDelta:
        """Return a delta as a slot takes it; `on_device` is its A and B, if they are there."""
        init = delta.init
        if init is not None:
            delta = without_start(delta, self._base_layers, self._max_rank)
        scaling, scales, bias = _as_scaling(delta), None, delta.bias
        if delta.magnitude is not None:
            # Of the matrices in the file: PEFT's norm knows no rounding.
            scales, bias = dora_terms(delta, self._modules[delta.module], self._base_layers)
        a, b, a_scales, b_scales, error = delta.lora_a, delta.lora_b, None, None, None
        eight_bit = self._format.eight_bit
        if eight_bit is not None:
            a, a_scales, b, b_scales, error = quantized_pair(a, b, eight_bit)
            if init is not None and error > MOST_START_ERROR:
                raise UnsupportedInputError(
                    f"the LoRA of {delta.module!r} is what training added to its start "
                    f"(init_lora_weights = {init!r}), too little for {eight_bit}\n"
                    f"  given: a relative error of {error:.2g}\n"
                    f"  allowed: {MOST_START_ERROR}\n"
                    f"  to do: leave adapter_dtype out, or save the adapter with "
                    f"path_initial_model_for_weight_conversion"
                )
        if on_device is None:
            device, dtype = self._format.device, self._format.stored
            on_device = a.to(device, dtype), b.to(device, dtype)
            if eight_bit is None:  # `quantized_pair` has checked the values
                check_no_overflow(delta.module, lora_A=on_device[0], lora_B=on_device[1])
        bias = self._moved(bias)
        if bias is not None and not bool(bias.isfinite().all()):
            raise InvalidInputError(f"the LoRA bias of {delta.module} is not finite")
        return StagedDelta(
            module=delta.module,
            rank=delta.rank,
            scaling=scaling,
            lora_a=on_device[0],
            lora_b=on_device[1],
            bias=bias,
            output_scales=self._moved(scales),
            a_scales=self._moved(a_scales),
            b_scales=self._moved(b_scales),
            error=error,
        )

    def _moved(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(self._format.device, torch.float32)

    def _replacements(self, checkpoint: Checkpoint) -> Mapping[str, Any]:
        if self._replacements_of is not None:
            return self._replacements_of(checkpoint)
        if checkpoint.own:
            raise UnsupportedInputError(
                f"{checkpoint.folder} brings modules of its own besides LoRA, which this pool "
                f"cannot run\n  to do: use lora_backends.hf.MultiLoRAModel, or merge the adapter"
            )
        return {}


def check_checkpoint(checkpoint: object) -> None:
    """Refuse anything but a `Checkpoint`."""
    if not isinstance(checkpoint, Checkpoint):
        raise InvalidInputError(
            f"the checkpoint is {shown(checkpoint)}\n  allowed: a Checkpoint, e.g. of "
            f"lora_backends.adapters.read_checkpoint"
        )


def check_name(name: str) -> None:
    """Refuse a name that no adapter can have."""
    if not isinstance(name, str) or not name:
        raise InvalidInputError(f"an adapter's name is a non-empty str; given: {shown(name)}")
    if name == PEFT_BASE:
        raise InvalidInputError(
            f"no adapter can be named {name!r}: in a call it stands for the base model\n"
            f"  to do: give it another name"
        )


def _record(delta: StagedDelta) -> ModuleRecord:
    return ModuleRecord(
        delta.nbytes,
        delta.error,
        delta.bias is not None,
        delta.output_scales is not None,
        rank=delta.rank,
        scaling=delta.scaling,
    )


def _as_scaling(delta: ModuleDelta) -> float:
    """Return the scaling of a delta, checked before any slot is cleared for it."""
    try:
        scaling = float(delta.scaling)
    except (TypeError, ValueError):
        scaling = math.nan
    if not math.isfinite(scaling):
        raise InvalidInputError(
            f"the scaling of {delta.module!r} is {delta.scaling!r}\n  allowed: a finite number"
        )
    return scaling
