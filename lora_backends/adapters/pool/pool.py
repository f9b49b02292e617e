"""`AdapterPool`: the stacked weights of every layer of one base model, filled slot by slot."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lora_backends.adapters.files.limits import LoadLimits
from lora_backends.adapters.peft.dora import BaseLayers, dora_terms
from lora_backends.adapters.peft.pissa import with_residual
from lora_backends.adapters.pool.expert_stacks import ExpertStacks
from lora_backends.adapters.pool.quantized import (
    AdapterReport,
    Kept,
    StagedExperts,
    as_adapter_dtype,
    quantized_pair,
)
from lora_backends.adapters.pool.slots import SlotTable
from lora_backends.adapters.pool.stacks import Stacks, StagedDelta
from lora_backends.adapters.pool.streams import SlotStreams
from lora_backends.adapters.pool.tensors import in_one_copy, tensors_of
from lora_backends.adapters.pool.uninterrupted import run_whole
from lora_backends.adapters.specs import (
    Checkpoint,
    ExpertSpec,
    ModuleDelta,
    ModuleSpec,
)
from lora_backends.common.names import PEFT_BASE
from lora_backends.errors import InvalidInputError, UnsupportedInputError, shown
from lora_backends.experts import ExpertWeights
from lora_backends.weights import LoRAWeights

MOST_RESIDUAL_ERROR = 0.05
"""Largest relative error of a PiSSA or OLoRA delta in 8 bits. The delta is the difference of two
rounded products, so its relative error is large where they are nearly equal."""


@dataclass(frozen=True, eq=False)
class Staged:
    """An adapter as the slots take it: on their device, in their dtype."""

    deltas: Sequence[StagedDelta | StagedExperts]
    own: Mapping[str, Any]  # by path, its replacements of modules of the base model


class Active(NamedTuple):
    """The stacks that loaded adapters touch, as of one moment."""

    weights: Mapping[str, LoRAWeights]  # by path of a module
    shared: Mapping[str, LoRAWeights]  # by a group's first path, of two or more active modules
    experts: Mapping[str, tuple[ExpertWeights, ...]]  # by path of a parameter of experts


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
        modules: the linear modules and embeddings of the base model, by path.
        max_adapters: number of slots.
        max_rank: width of every stack.
        dtype: dtype of the stacks, the model's; a checkpoint is rounded to it.
        device: where the stacks live.
        groups: paths of linear modules that share an input and a stack, in the order of its
            slices; a module is in one group at most.
        limits: of the size and cost of a checkpoint's files; None takes the defaults.
        experts: the stacked parameters of experts of the base model, by path.
        max_expert_rank: width of the stacks of experts; None is the same as `max_rank`.
        base_layers: returns the weight and bias of the base model's module at a path. It is asked
            when an adapter with DoRA is loaded; None refuses those.
        adapter_dtype: int8, float8_e4m3fn or float8_e5m2, or the name of one: adapters are
            quantised to it when they are loaded, with a scale per row. None keeps `dtype`.
        own_modules: returns an adapter's replacements of base modules, by path. It is called for
            adapters that bring more than LoRA; None refuses those.

    Raises:
        InvalidInputError: a number is less than 1, or too large; `adapter_dtype` is another dtype,
            or does not go with `dtype`.
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
        adapter_dtype: torch.dtype | str | None = None,
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
        self.limits = LoadLimits.of(limits)
        self.max_rank, self.max_expert_rank = max_rank, expert_rank
        self.dtype = dtype
        self._stored = as_adapter_dtype(adapter_dtype, dtype)
        self.device = torch.device(device)
        self._streams = SlotStreams(self.device) if self.device.type == "cuda" else None
        self.slots = SlotTable(max_adapters, self._streams)
        self.active = Active({}, {}, {})
        """The stacks that loaded adapters touch.

        Replaced as one and never changed, so a call may hold it while other threads load. A stack
        is one object for good, unless an adapter brings its first bias or its first output_scales
        (DoRA). A parameter of experts has a stack for each form that adapters have; an adapter has
        rank 0 in all but one.
        """
        form = (dtype, self.device, self._stored)
        self._stacks = Stacks(self.modules, groups, max_adapters, max_rank, *form)
        self._base_layers = base_layers
        self._own_modules = own_modules
        self._own: dict[int, Mapping[str, Any]] = {}  # slot -> by path, what `own_modules` returned
        self._experts = ExpertStacks(self.experts, max_adapters, expert_rank, *form)
        self._users: dict[str, set[int]] = {}  # module path -> slots whose adapter touches it
        self._kept: dict[tuple[int, str], Kept] = {}  # by slot and module
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
            name: of the adapter.
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
        self.check_new(name, replace_existing)
        checkpoint = self.read(folder)
        if accept is not None:
            accept(checkpoint)
        staged = self.stage(name, checkpoint)
        with self.slots.lock:
            self.check_new(name, replace_existing)  # another thread may have loaded it meanwhile
            return self.put(name, staged)

    def check_new(self, name: str, replace_existing: bool) -> None:
        """Refuse a name that cannot be loaded.

        Raises:
            InvalidInputError: it is no name, or taken and not to be replaced.
        """
        _check_name(name)
        if name in self.slots and not replace_existing:
            raise InvalidInputError(
                f"an adapter named {name!r} is loaded already\n"
                f"  to do: unload it first, or pass replace_existing=True"
            )

    def read(self, folder: str | Path) -> Checkpoint:
        """Read a PEFT checkpoint that fits the base model and the stacks, as `load`."""
        from lora_backends.adapters.peft.checkpoint import read_checkpoint  # needs pydantic

        return read_checkpoint(
            folder,
            self.modules,
            self.max_rank,
            self.limits,
            self.experts,
            self.max_expert_rank,
            self._own_modules is not None,
        )

    def add(self, name: str, checkpoint: Checkpoint) -> Loaded:
        """Put a checkpoint that is in memory into a slot, replacing one of the same name.

        Raises:
            InvalidInputError: it does not fit the base model, or every slot is pinned.
            UnsupportedInputError: DoRA, or modules of its own, as `load`.
        """
        return self.put(name, self.stage(name, checkpoint))

    def stage(self, name: str, checkpoint: Checkpoint) -> Staged:
        """Check a checkpoint and bring it to the device, in the dtype of the stacks.

        Raises:
            InvalidInputError: it does not fit the base model.
            UnsupportedInputError: DoRA, as `load`.
        """
        _check_name(name)
        check_checkpoint(checkpoint)
        for delta in checkpoint.modules.values():
            self._check_fits(delta)
        moved = self._moved(checkpoint)
        return Staged(
            [
                *(
                    self._stage(delta, moved.get(delta.module))
                    for delta in checkpoint.modules.values()
                ),
                *(self._experts.stage(delta) for delta in checkpoint.experts.values()),
            ],
            self._stage_own(checkpoint),
        )

    def put(self, name: str, staged: Staged, then: Callable[[], None] | None = None) -> Loaded:
        """Write a staged adapter into a slot, as `add`.

        Args:
            name: of the adapter.
            staged: from `stage`.
            then: called behind the last write and before the slot gets its name, with the slots
                locked.

        Raises:
            InvalidInputError: as `add`, or a CUDA graph is being captured.
        """
        if self._streams is not None:
            self._streams.check_not_capturing(name)
        with self.slots.lock:  # no call may take the slot while it is written
            self.slots.wait_for_room([name])
            slot, evicted = self.slots.candidate(name)
            self._reserve(staged)
            self.slots.vacate(name, slot)  # before the first write: see the class
            with self._writing(slot):
                self._clear(slot)
                self._note(slot, staged)
                self._write(slot, staged.deltas)
            self._note_active()
            if then is not None:
                then()
            self.slots.assign(name, slot)
        return Loaded(name, slot, evicted)

    def put_ahead(
        self, name: str, staged: Staged, is_wanted: Callable[[], bool], then: Callable[[], None]
    ) -> bool:
        """Write a staged adapter into a slot that can be spared, before a batch asks for it.

        Batches run while the slot is written: they wait for the lock of the slots only while the
        slot is taken, and while it gets its name. It gets the name when its writes are over, so
        that any stream and any graph may read it. Whatever goes wrong leaves it without a name,
        and its ranks 0.

        Args:
            name: of the adapter.
            staged: on a CUDA device, by the current stream.
            is_wanted: asked before and behind the writes, with the slots locked.
            then: called when the slot gets its name, with the slots locked.

        Returns:
            Whether it was written: False if no slot can be spared, or it is not wanted. Modules of
            its own are left to `put`, because a stream that reads them has to be recorded.
        """
        if any(True for _ in tensors_of(staged.own)):
            return False
        with self.slots.lock:
            slot = self.slots.reserve(name) if is_wanted() else None
        if slot is None:
            return False
        try:
            with self.slots.lock:
                self._reserve(staged)
                self._forget(slot)
                self._note(slot, staged)
            if self._streams is not None:
                self._streams.before_write_ahead(slot)
            self._zero(slot)
            self._write(slot, staged.deltas)
            if self._streams is not None:
                self._streams.after_write_ahead(slot)
            with self.slots.lock:
                if is_wanted():
                    self._note_active()
                    then()
                    self.slots.settle(slot, name)
                    return True
            self._give_up(slot)
            return False
        except BaseException:
            self._give_up(slot)
            raise

    def _give_up(self, slot: int) -> None:
        """Free a slot that was taken to be written ahead."""
        try:
            self._zero(slot)
            if self._streams is not None:
                self._streams.after_write_ahead(slot)
        finally:
            with self.slots.lock:
                try:
                    self._forget(slot)
                    self._note_active()
                finally:
                    self.slots.settle(slot)  # else batches may wait for it for ever

    def update(
        self,
        name: str,
        checkpoint: Checkpoint,
        timeout_s: float = 0.0,
        then: Callable[[], None] | None = None,
    ) -> int:
        """Overwrite the weights of a loaded adapter where they are, with newer ones of its own.

        Its slot, its pins and the prepared adapters and graphs that use it stay. An interrupt
        comes after the last write.

        Args:
            name: of a loaded adapter.
            checkpoint: of the same modules, with a bias and DoRA where it has them; ranks may
                differ.
            timeout_s: how long to wait for calls and requests that use it, in seconds.
            then: called behind the last write, with the slots locked; no interrupt cuts it short.

        Returns:
            The slot.

        Raises:
            InvalidInputError: it is not loaded, other modules, or still in use; or `timeout_s` is
                no number; or a CUDA graph is being captured. Nothing has changed.
            UnsupportedInputError: DoRA, as `load`.
        """
        if self._streams is not None:
            self._streams.check_not_capturing(name)
        if not (isinstance(timeout_s, (int, float)) and timeout_s >= 0):  # NaN would wait for ever
            raise InvalidInputError(
                f"timeout_s is {shown(timeout_s)}\n  allowed: a number of seconds, 0 or more"
            )
        staged, deadline = self.stage(name, checkpoint), time.monotonic() + timeout_s
        while True:
            with self.slots.lock:
                try:
                    slot = self.slots.updatable(name)
                except InvalidInputError:
                    if name not in self.slots or time.monotonic() >= deadline:
                        raise
                else:
                    self._overwrite(name, slot, staged, then)
                    return slot
            time.sleep(0.001)

    def _overwrite(
        self, name: str, slot: int, staged: Staged, then: Callable[[], None] | None
    ) -> None:
        if staged.own or self._own.get(slot):
            raise InvalidInputError(
                f"adapter {name!r} cannot be updated in place: it has modules of its own\n"
                f"  to do: add_adapter({name!r}, ...), which replaces it"
            )
        now = {
            (path, self.has_bias(slot, path), self.has_output_scales(slot, path))
            for path in self.modules_of(slot)
        }
        new = {
            (
                d.module,
                getattr(d, "bias", None) is not None,
                getattr(d, "output_scales", None) is not None,
            )
            for d in staged.deltas
        }
        experts = [d for d in staged.deltas if isinstance(d, StagedExperts)]
        if now != new or not all(self._experts.has_form(slot, d) for d in experts):
            paths = sorted(path for path, *_ in now ^ new) or [d.module for d in experts]
            raise InvalidInputError(
                f"adapter {name!r} cannot be updated in place: another layout at "
                f"{', '.join(paths[:3])}{', ...' * (len(paths) > 3)}\n"
                f"  allowed: the same modules, with a bias and DoRA where it has them\n"
                f"  to do: add_adapter({name!r}, ...), which replaces it"
            )

        def overwrite() -> None:
            self._note(slot, staged)
            self._write(slot, staged.deltas)
            if then is not None:
                then()

        with self._writing(slot):
            failure, interrupt = run_whole(overwrite, self.device)
        if failure is not None:
            self.slots.vacate(name, slot)  # no row may use a slot that is half overwritten
            raise failure
        if interrupt is not None:
            raise interrupt

    def unload(self, name: str) -> None:
        """Free the slot of `name`; its rows of every stack count as rank 0 from now on.

        Raises:
            InvalidInputError: it is not loaded, or pinned or in use, or a CUDA graph is being
                captured.
        """
        if self._streams is not None:
            self._streams.check_not_capturing(name)
        with self.slots.lock:
            slot = self.slots.release(name)
            with self._writing(slot):
                self._clear(slot)
            self._note_active()

    def weights(self, module: str) -> LoRAWeights | None:
        """Return the stack of a module, or None where no loaded adapter touches it."""
        return self.active.weights.get(module)

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor that the stacks hold, those of unused slots included."""
        return [*self._stacks.tensors(), *self._experts.tensors()]

    def report(self, name: str) -> AdapterReport:
        """Return how an adapter is kept: its bytes, and the error of 8-bit values.

        Raises:
            InvalidInputError: it is not loaded.
        """
        with self.slots.lock:
            slot = self.slots.slot(name)
            kept = self._kept_of(slot)
        errors = {path: one.error for path, one in sorted(kept.items()) if one.error is not None}
        return AdapterReport(
            name,
            slot,
            self._stored or self.dtype,
            sum(one.nbytes for one in kept.values()),
            self._stacks.nbytes + self._experts.nbytes,
            errors,
        )

    def modules_of(self, slot: int) -> list[str]:
        """Return the paths of the modules and experts that the adapter in `slot` touches."""
        with self.slots.lock:  # another thread may load
            touched = self.adapted_by(slot)
            return touched + [path for path in self._own.get(slot, ()) if path not in touched]

    def adapted_by(self, slot: int) -> list[str]:
        """Return the paths of the modules and experts for which the adapter in `slot` has LoRA."""
        with self.slots.lock:
            return [module for module, users in self._users.items() if slot in users]

    def bytes_of(self, slot: int) -> int:
        """Return the bytes of the adapter in `slot`: matrices, scales and modules of its own."""
        with self.slots.lock:
            own = sum(getattr(module, "nbytes", 0) for module in self._own.get(slot, {}).values())
            return own + sum(kept.nbytes for kept in self._kept_of(slot).values())

    def _kept_of(self, slot: int) -> dict[str, Kept]:
        return {path: kept for (own, path), kept in self._kept.items() if own == slot}

    @property
    def runs_own_modules(self) -> bool:
        """Whether adapters may bring more than LoRA."""
        return self._own_modules is not None

    def own_modules(self, slot: int) -> Mapping[str, Any]:
        """Return the replacements of modules that the adapter in `slot` brings, by path."""
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

    @property
    def active_weights(self) -> Mapping[str, LoRAWeights]:
        """The stacks of the modules that a loaded adapter touches, by path."""
        return self.active.weights

    @property
    def shared_weights(self) -> Mapping[str, LoRAWeights]:
        """The stacks of groups where two or more modules are active, by the group's first path."""
        return self.active.shared

    @property
    def active_experts(self) -> Mapping[str, tuple[ExpertWeights, ...]]:
        """The stacks of the experts that a loaded adapter touches, by path of the parameter."""
        return self.active.experts

    def _note_active(self) -> None:
        modules = {path for path, users in self._users.items() if users} - {*self.experts}
        weights = {path: self._stacks[path] for path in self._users if path in modules}
        self.active = Active(weights, self._stacks.shared(weights), self._experts.active())

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

    def _moved(self, checkpoint: Checkpoint) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return A and B in the pool's dtype on its device, by path, if one copy moves them all.

        Not those with a value that is not finite: `_stage` finds it and says where it is.
        """
        deltas = checkpoint.modules.values()
        if self._stored is not None or any(delta.init is not None for delta in deltas):
            return {}  # these change on the way
        pairs = [matrix for delta in deltas for matrix in (delta.lora_a, delta.lora_b)]
        copied = in_one_copy(pairs, self.device, self.dtype)
        if copied is None or not bool(copied[0].isfinite().all()):
            return {}
        matrices = iter(copied[1])
        return {delta.module: (next(matrices), next(matrices)) for delta in deltas}

    def _stage(
        self, delta: ModuleDelta, moved: tuple[torch.Tensor, torch.Tensor] | None
    ) -> StagedDelta:
        """Return the delta in the pool's dtype, on its device, where `moved` may be already."""
        init = delta.init
        if init is not None:
            delta = with_residual(delta, self._base_layers, self.max_rank)
        scaling, scales, bias = _as_scaling(delta), None, delta.bias
        if delta.magnitude is not None:
            scales, bias = dora_terms(delta, self.modules[delta.module], self._base_layers)
        a, b, a_scales, b_scales, error = delta.lora_a, delta.lora_b, None, None, None
        if self._stored is not None:
            a, a_scales, b, b_scales, error = quantized_pair(a, b, self._stored)
            if init is not None and error > MOST_RESIDUAL_ERROR:
                raise UnsupportedInputError(
                    f"the LoRA of {delta.module!r} is what training added to its start "
                    f"(init_lora_weights = {init!r}), too little for {self._stored}\n"
                    f"  given: a relative error of {error:.2g}\n"
                    f"  allowed: {MOST_RESIDUAL_ERROR}\n"
                    f"  to do: leave adapter_dtype out, or save the adapter with "
                    f"path_initial_model_for_weight_conversion"
                )
        kept = self._stored or self.dtype
        on_device = moved or (a.to(self.device, kept), b.to(self.device, kept))
        staged = StagedDelta(
            module=delta.module,
            rank=delta.rank,
            scaling=scaling,
            lora_a=on_device[0],
            lora_b=on_device[1],
            bias=None if bias is None else bias.to(self.device, torch.float32),
            output_scales=None if scales is None else scales.to(self.device, torch.float32),
            a_scales=None if a_scales is None else a_scales.to(self.device),
            b_scales=None if b_scales is None else b_scales.to(self.device),
            error=error,
        )
        for name, tensor in (("lora_A", staged.lora_a), ("lora_B", staged.lora_b)):
            if moved is None and self._stored is None and not bool(tensor.isfinite().all()):
                raise InvalidInputError(
                    f"{name} of {delta.module} does not fit {self.dtype}: a value overflows\n"
                    f"  to do: load the base model in bfloat16 or float32"
                )
        if staged.bias is not None and not bool(staged.bias.isfinite().all()):
            raise InvalidInputError(f"the LoRA bias of {delta.module} is not finite")
        return staged

    def _stage_own(self, checkpoint: Checkpoint) -> Mapping[str, Any]:
        """Return the checkpoint's replacements of base modules, by path."""
        if self._own_modules is not None:
            return self._own_modules(checkpoint)
        if checkpoint.own:
            raise UnsupportedInputError(
                f"{checkpoint.folder} brings modules of its own besides LoRA, which this pool "
                f"cannot run\n  to do: use lora_backends.hf.MultiLoRAModel, or merge the adapter"
            )
        return {}

    def _reserve(self, staged: Staged) -> None:
        """Allocate the stacks that an adapter needs; the slots are locked."""
        self._stacks.reserve(d for d in staged.deltas if isinstance(d, StagedDelta))
        self._experts.reserve(d for d in staged.deltas if isinstance(d, StagedExperts))

    def _note(self, slot: int, staged: Staged) -> None:
        """Note the adapter that is about to be written into a slot; the slots are locked."""
        for delta in staged.deltas:
            self._users.setdefault(delta.module, set()).add(slot)
            self._kept[slot, delta.module] = Kept(delta.nbytes, delta.error)
            if isinstance(delta, StagedExperts):
                self._experts.note(slot, delta)
                continue
            if delta.bias is not None:
                self._biased.add((slot, delta.module))
            if delta.output_scales is not None:
                self._scaled.add((slot, delta.module))
        self._own[slot] = staged.own

    def _forget(self, slot: int) -> None:
        """Note that a slot holds nothing; the slots are locked."""
        self._own.pop(slot, None)
        for module, users in self._users.items():
            if slot in users:
                if module in self.experts:
                    self._experts.forget(slot, module)
                self._kept.pop((slot, module), None)
                self._biased.discard((slot, module))
                self._scaled.discard((slot, module))
                users.discard(slot)  # last: an interrupt before it leaves the module to forget

    def _write(self, slot: int, deltas: Sequence[StagedDelta | StagedExperts]) -> None:
        """Write tensors of a slot that no call reads; the slots need not be locked."""
        for delta in deltas:
            if isinstance(delta, StagedExperts):
                self._experts.write(slot, delta)
            else:
                self._stacks.write(slot, delta)
        self._stacks.write_tables(slot, [d for d in deltas if isinstance(d, StagedDelta)])

    def _zero(self, slot: int) -> None:
        """Set the ranks of a slot to 0 in every stack, also after an interrupted load."""
        self._experts.zero(slot)
        self._stacks.zero(slot)

    def _writing(self, slot: int) -> AbstractContextManager[None]:
        """Order the writes of a slot in the block with what other CUDA streams do with it."""
        return nullcontext() if self._streams is None else self._streams.writing(slot)

    def _clear(self, slot: int) -> None:
        self._zero(slot)
        self._forget(slot)


def check_checkpoint(checkpoint: object) -> None:
    """Refuse anything but a `Checkpoint`."""
    if not isinstance(checkpoint, Checkpoint):
        raise InvalidInputError(
            f"the checkpoint is {shown(checkpoint)}\n  allowed: a Checkpoint, e.g. of "
            f"lora_backends.adapters.read_checkpoint"
        )


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidInputError(f"an adapter's name is a non-empty str; given: {shown(name)}")
    if name == PEFT_BASE:
        raise InvalidInputError(
            f"no adapter can be named {name!r}: in a call it stands for the base model\n"
            f"  to do: give it another name"
        )


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
