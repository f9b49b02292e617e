"""`AdapterPool`: the stacked weights of every layer of one base model, filled slot by slot."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lora_backends.adapters.dora import BaseLayers, dora_terms
from lora_backends.adapters.expert_stacks import ExpertStacks
from lora_backends.adapters.limits import LoadLimits
from lora_backends.adapters.residual import with_residual
from lora_backends.adapters.slots import SlotTable
from lora_backends.adapters.specs import (
    Checkpoint,
    ExpertDelta,
    ExpertSpec,
    ModuleDelta,
    ModuleSpec,
)
from lora_backends.adapters.stacks import Stacks, StagedDelta
from lora_backends.errors import InvalidInputError, UnsupportedInputError, shown
from lora_backends.experts import ExpertWeights
from lora_backends.weights import LoRAWeights


@dataclass(frozen=True)
class Loaded:
    """Where an adapter went."""

    name: str
    slot: int
    evicted: str | None  # the name that lost this slot


class AdapterPool:
    """Slots for adapters of one base model; `weights` has what a backend takes.

    A layer's stack is allocated when the first adapter that touches it is loaded, and keeps its
    address from then on. A load reads, checks and converts everything before it writes, so a
    failed load leaves every slot as it was. The adapter that it evicts or replaces loses its name
    before the first write, and the new one gets its name after the last: a load that an exception
    or a signal interrupts while it writes leaves a slot without a name, which no row can ask for.

    Args:
        modules: what the base model has, by module path.
        max_adapters: number of slots.
        max_rank: width of every stack.
        dtype: dtype of the stacks, the model's; a checkpoint is rounded to it.
        device: where the stacks live.
        groups: paths of linear modules that share an input and a stack, in the order of its
            slices; a module is in one group at most.
        limits: what the files of a checkpoint may cost; None takes the defaults.
        experts: what the base model has, by path of a stacked parameter of experts.
        max_expert_rank: width of the stacks of experts; None is the same as `max_rank`.
        base_layers: returns the weight and bias of the base model's module at a path. It is asked
            when an adapter with DoRA is loaded; None refuses those.
        own_modules: returns what takes the place of modules of the base model, by path, for an
            adapter that brings more than LoRA; None refuses those.

    Raises:
        InvalidInputError: a number is less than 1, or too large.
    """

    def __init__(
        self,
        modules: Mapping[str, ModuleSpec],
        max_adapters: int = 8,
        max_rank: int = 64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        groups: Iterable[Sequence[str]] = (),
        limits: LoadLimits | None = None,
        experts: Mapping[str, ExpertSpec] | None = None,
        max_expert_rank: int | None = None,
        *,
        base_layers: BaseLayers | None = None,
        own_modules: Callable[[Checkpoint], Mapping[str, Any]] | None = None,
    ) -> None:
        expert_rank = max_rank if max_expert_rank is None else max_expert_rank
        for key, number in (
            ("max_adapters", max_adapters),
            ("max_rank", max_rank),
            ("max_expert_rank", expert_rank),
        ):
            if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number < 2**31:
                raise InvalidInputError(
                    f"{key} is {shown(number)}; allowed: an int, 1 or more and less than 2^31"
                )
        self.modules, self.experts = dict(modules), dict(experts or {})
        self.limits = limits or LoadLimits()
        self.slots = SlotTable(max_adapters)
        self.max_rank, self.max_expert_rank = max_rank, expert_rank
        self.dtype = dtype
        self.device = torch.device(device)
        self.active_weights: Mapping[str, LoRAWeights] = {}
        """The stacks of the modules that a loaded adapter touches, by path.

        Replaced and never changed, so a call may hold it. A stack is one object for good, unless
        an adapter brings its first bias or its first output_scales (DoRA).
        """
        self.shared_weights: Mapping[str, LoRAWeights] = {}
        """The stacks of groups where two or more modules are active, by the group's first path."""
        self.active_experts: Mapping[str, tuple[ExpertWeights, ...]] = {}
        """The stacks of the experts that a loaded adapter touches, by path of the parameter.

        Replaced and never changed, as `active_weights`. A parameter has a stack for each form that
        adapters have; an adapter has rank 0 in all but one.
        """
        self._stacks = Stacks(self.modules, groups, max_adapters, max_rank, dtype, self.device)
        self._base_layers = base_layers
        self._own_modules = own_modules
        self._own: dict[int, Mapping[str, Any]] = {}  # slot -> by path, what `own_modules` returned
        self._experts = ExpertStacks(self.experts, max_adapters, expert_rank, dtype, self.device)
        self._users: dict[str, set[int]] = {}  # module path -> slots whose adapter touches it
        self._biased: set[tuple[int, str]] = set()  # slots and modules with a bias
        self._scaled: set[tuple[int, str]] = set()  # slots and modules with output_scales

    def load(
        self,
        name: str,
        folder: str | Path,
        accept: Callable[[Checkpoint], None] | None = None,
        replace_existing: bool = False,
    ) -> Loaded:
        """Read a PEFT checkpoint into a slot: a free one, else the least recently used.

        Args:
            name: what the adapter is called from now on.
            folder: with adapter_config.json and the weights.
            accept: looks at what was read and raises to refuse it.
            replace_existing: whether a loaded adapter of this name may be overwritten.

        Returns:
            The slot, and the adapter that was evicted for it.

        Raises:
            InvalidInputError: the name is taken, the files do not fit the base model, or every
                slot is pinned.
            UnsupportedInputError: a feature that cannot be reproduced exactly, or DoRA and this
                pool knows no base weights.
        """
        _check_name(name)
        if name in self.slots and not replace_existing:
            raise InvalidInputError(
                f"an adapter named {name!r} is loaded already\n"
                f"  to do: unload it first, or pass replace_existing=True"
            )
        from lora_backends.adapters.checkpoint import read_checkpoint  # needs pydantic

        checkpoint = read_checkpoint(
            folder,
            self.modules,
            self.max_rank,
            self.limits,
            self.experts,
            self.max_expert_rank,
            self._own_modules is not None,
        )
        if accept is not None:
            accept(checkpoint)
        return self.add(name, checkpoint)

    def add(self, name: str, checkpoint: Checkpoint) -> Loaded:
        """Put a checkpoint that is in memory into a slot, replacing one of the same name.

        Raises:
            InvalidInputError: it does not fit the base model, or every slot is pinned.
            UnsupportedInputError: DoRA, or modules of its own, as `load`.
        """
        _check_name(name)
        if not isinstance(checkpoint, Checkpoint):
            raise InvalidInputError(
                f"the checkpoint is {shown(checkpoint)}\n  allowed: a Checkpoint, e.g. of "
                f"lora_backends.adapters.read_checkpoint"
            )
        for delta in checkpoint.modules.values():
            self._check_fits(delta)
        staged: list[StagedDelta | ExpertDelta] = [
            *(self._stage(delta) for delta in checkpoint.modules.values()),
            *(self._experts.stage(delta) for delta in checkpoint.experts.values()),
        ]
        own = self._stage_own(checkpoint)
        with self.slots.lock:  # no call may take the slot while it is written
            slot, evicted = self.slots.candidate(name)
            self._stacks.reserve(d for d in staged if isinstance(d, StagedDelta))
            self._experts.reserve(d for d in staged if isinstance(d, ExpertDelta))
            self.slots.vacate(name, slot)  # before the first write: see the class
            self._clear(slot)
            self._write(slot, staged)
            self._own[slot] = own
            self._note_active()
            self.slots.assign(name, slot)
        return Loaded(name, slot, evicted)

    def unload(self, name: str) -> None:
        """Free the slot of `name`; its rows of every stack count as rank 0 from now on.

        Raises:
            InvalidInputError: it is not loaded, or pinned or in use.
        """
        with self.slots.lock:
            self._clear(self.slots.release(name))
            self._note_active()

    def weights(self, module: str) -> LoRAWeights | None:
        """Return the stack of a module, or None where no loaded adapter touches it."""
        return self.active_weights.get(module)

    def modules_of(self, slot: int) -> list[str]:
        """Return the paths of the modules and experts that the adapter in `slot` touches."""
        with self.slots.lock:  # another thread may load
            touched = [module for module, users in self._users.items() if slot in users]
            return touched + [path for path in self._own.get(slot, ()) if path not in touched]

    def own_modules(self, slot: int) -> Mapping[str, Any]:
        """Return what the adapter in `slot` has in the place of modules, by path."""
        return self._own.get(slot, {})

    def has_bias(self, slot: int, module: str) -> bool:
        """Return whether the adapter in `slot` brings a bias for a module."""
        return (slot, module) in self._biased

    def has_output_scales(self, slot: int, module: str) -> bool:
        """Return whether the adapter in `slot` brings output_scales (DoRA) for a module."""
        return (slot, module) in self._scaled

    def has_dora(self, slot: int) -> bool:
        """Return whether the adapter in `slot` brings output_scales for any module."""
        with self.slots.lock:
            return any(scaled == slot for scaled, _ in self._scaled)

    def has_lora_bias(self, slot: int) -> bool:
        """Return whether the adapter in `slot` brings a bias of its own, not folded in by DoRA."""
        with self.slots.lock:
            return any(biased == slot for biased, _ in self._biased - self._scaled)

    def is_active(self, slot: int, path: str, held: tuple[ExpertWeights, ...]) -> bool:
        """Return whether stacks that a caller holds have a slot's LoRA of experts."""
        own = self._experts.of(slot, path)
        return any(stack is own for stack in held)

    def _note_active(self) -> None:
        modules = {path for path, users in self._users.items() if users} - {*self.experts}
        self.active_weights = {path: self._stacks[path] for path in self._users if path in modules}
        self.active_experts = self._experts.active()
        self.shared_weights = self._stacks.shared(self.active_weights)

    def _check_fits(self, delta: ModuleDelta) -> None:
        spec, rank = self.modules.get(delta.module), delta.rank
        if spec is None or spec.kind != delta.kind or not 1 <= rank <= self.max_rank:
            raise InvalidInputError(
                f"the pool has no room for {delta.kind} {delta.module!r} of rank {rank}\n"
                f"  the base model has there: {spec}\n  max_rank: {self.max_rank}"
            )
        given = [tuple(t.shape) for t in (delta.lora_a, delta.lora_b, delta.bias) if t is not None]
        allowed = [(rank, spec.in_features), (spec.out_features, rank), (spec.out_features,)]
        if given != allowed[: len(given)]:
            raise InvalidInputError(
                f"the LoRA of {delta.module!r} does not fit the base model\n"
                f"  given: lora_a, lora_b and bias of shapes {given}\n  allowed: {allowed}"
            )
        if delta.magnitude is not None:
            shape = tuple(delta.magnitude.shape)
            if delta.bias is not None or shape != allowed[2]:
                raise InvalidInputError(
                    f"the magnitude (DoRA) of {delta.module!r} does not fit\n  given: shape {shape}"
                    f"{', and a bias' * (delta.bias is not None)}\n"
                    f"  allowed: {allowed[2]}, without a LoRA bias"
                )

    def _stage(self, delta: ModuleDelta) -> StagedDelta:
        """Return the delta in the pool's dtype, on its device."""
        if delta.init is not None:
            delta = with_residual(delta, self._base_layers, self.max_rank)
        scaling, scales, bias = _as_scaling(delta), None, delta.bias
        if delta.magnitude is not None:
            scales, bias = dora_terms(delta, self.modules[delta.module], self._base_layers)
        staged = StagedDelta(
            module=delta.module,
            rank=delta.rank,
            scaling=scaling,
            lora_a=delta.lora_a.to(self.device, self.dtype),
            lora_b=delta.lora_b.to(self.device, self.dtype),
            bias=None if bias is None else bias.to(self.device, torch.float32),
            output_scales=None if scales is None else scales.to(self.device, torch.float32),
        )
        for name, tensor in (("lora_A", staged.lora_a), ("lora_B", staged.lora_b)):
            if not bool(tensor.isfinite().all()):
                raise InvalidInputError(
                    f"{name} of {delta.module} does not fit {self.dtype}: a value overflows\n"
                    f"  to do: load the base model in bfloat16 or float32"
                )
        if staged.bias is not None and not bool(staged.bias.isfinite().all()):
            raise InvalidInputError(f"the LoRA bias of {delta.module} is not finite")
        return staged

    def _stage_own(self, checkpoint: Checkpoint) -> Mapping[str, Any]:
        """Return what takes the place of modules of the base model."""
        if self._own_modules is not None:
            return self._own_modules(checkpoint)
        if checkpoint.own:
            raise UnsupportedInputError(
                f"{checkpoint.folder} brings modules of its own besides LoRA, which this pool "
                f"cannot run\n  to do: use lora_backends.hf.MultiLoRAModel, or merge the adapter"
            )
        return {}

    def _write(self, slot: int, deltas: Iterable[StagedDelta | ExpertDelta]) -> None:
        for delta in deltas:
            # Noted first: the next load into the slot clears what an interrupt leaves of this one.
            self._users.setdefault(delta.module, set()).add(slot)
            if isinstance(delta, ExpertDelta):
                self._experts.write(slot, delta)
                continue
            if delta.bias is not None:
                self._biased.add((slot, delta.module))
            if delta.output_scales is not None:
                self._scaled.add((slot, delta.module))
            self._stacks.write(slot, delta)

    def _clear(self, slot: int) -> None:
        self._own.pop(slot, None)
        for module, users in self._users.items():
            if slot in users:
                if module in self.experts:
                    self._experts.clear(slot, module)
                else:
                    self._stacks.clear(slot, module)
                self._biased.discard((slot, module))
                self._scaled.discard((slot, module))
                users.discard(slot)  # last: an interrupt before it leaves the module to clear


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidInputError(f"an adapter's name is a non-empty str; given: {shown(name)}")


def _as_scaling(delta: ModuleDelta) -> float:
    """Return the scaling of a delta; a wrong one would be found only after its slot was cleared."""
    try:
        scaling = float(delta.scaling)
    except (TypeError, ValueError):
        scaling = math.nan
    if not math.isfinite(scaling):
        raise InvalidInputError(
            f"the scaling of {delta.module!r} is {delta.scaling!r}\n  allowed: a finite number"
        )
    return scaling
