"""`AdapterPool`: the stacked weights of every layer of one base model, filled slot by slot."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lora_backends.adapters.files.limits import LoadLimits
from lora_backends.adapters.peft.dora import BaseLayers
from lora_backends.adapters.pool.expert_stacks import ExpertStacks
from lora_backends.adapters.pool.quantized import AdapterReport, as_adapter_dtype
from lora_backends.adapters.pool.records import EMPTY, SlotRecord
from lora_backends.adapters.pool.slots import SlotTable
from lora_backends.adapters.pool.stack_format import StackFormat
from lora_backends.adapters.pool.stacks import ModuleStacks
from lora_backends.adapters.pool.staging import Replacements, Staged, Staging, check_name
from lora_backends.adapters.pool.streams import SlotStreams
from lora_backends.adapters.pool.tensors import tensors_of
from lora_backends.adapters.pool.uninterrupted import run_whole
from lora_backends.adapters.read_options import ReadOptions
from lora_backends.adapters.specs import Checkpoint, ExpertSpec, ModuleSpec
from lora_backends.errors import InvalidInputError, shown
from lora_backends.experts import ExpertWeights
from lora_backends.weights import LoRAWeights


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
        unused: returns, for a path that the base model lacks, why it does not need that module, or
            None. Such a module of an adapter is left out with a warning.

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
        own_modules: Replacements | None = None,
        unused: Callable[[str], str | None] | None = None,
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
        self._eight_bit = as_adapter_dtype(adapter_dtype, dtype)
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
        form = StackFormat(max_adapters, dtype, self._eight_bit, self.device)
        self._stacks = ModuleStacks(self.modules, groups, max_rank, form)
        self._experts = ExpertStacks(self.experts, expert_rank, form)
        self._staging = Staging(
            self.modules, max_rank, form, self._experts, base_layers, own_modules
        )
        self.read_options = ReadOptions(
            self.modules,
            max_rank,
            self.limits,
            self.experts,
            expert_rank,
            own_modules is not None,
            unused,
        )
        # Calls read it without the lock: a record is replaced whole, never changed.
        self._records: dict[int, SlotRecord] = {}

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
            accept: gets the checkpoint and raises to refuse it.
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
        check_name(name)
        if name in self.slots and not replace_existing:
            raise InvalidInputError(
                f"an adapter named {name!r} is loaded already\n"
                f"  to do: unload it first, or pass replace_existing=True"
            )

    def read(self, folder: str | Path) -> Checkpoint:
        """Read a PEFT checkpoint that fits the base model and the stacks, as `load`."""
        from lora_backends.adapters.peft.checkpoint import read_with_options  # needs pydantic

        return read_with_options(folder, self.read_options)

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
        check_name(name)
        return self._staging.stage(checkpoint)

    def put(self, name: str, staged: Staged, then: Callable[[], None] | None = None) -> Loaded:
        """Write a staged adapter into a slot, as `add`.

        `then` is called after the last write, before the slot gets its name, with the slots locked.

        Raises:
            InvalidInputError: as `add`, or a CUDA graph is being captured.
        """
        if self._streams is not None:
            self._streams.check_not_capturing(name)
        with self.slots.lock:  # no call may take the slot while it is written
            # A prefetch may be writing the only slot that can be taken.
            self.slots.wait_for_room([name])
            slot, evicted = self.slots.candidate(name)
            # It may run out of memory, so it comes while the old adapter still has its name.
            self._reserve(staged)
            self.slots.vacate(name, slot)  # before the first write: see the class
            with self._writing(slot):
                # Ranks are 0 while the matrices change: a graph that reads the slot adds nothing.
                self._clear(slot)
                self._records[slot] = staged.record
                self._write(slot, staged)
            # Before the name: a call that sees the name needs its stacks.
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
        that any stream and any graph may read it. Whatever goes wrong leaves it without a name, and
        its ranks 0.

        `is_wanted` is asked before and after the writes, and `then` is called when the slot gets
        its name, both with the slots locked. Returns False if no slot can be spared or the adapter
        is not wanted. Modules of its own are left to `put`, because a stream that reads them has to
        be recorded.
        """
        if any(True for _ in tensors_of(staged.record.replacements)):
            return False
        # Taken with the lock, written without it: batches of other slots go on.
        with self.slots.lock:
            slot = self.slots.reserve(name) if is_wanted() else None
        if slot is None:
            return False
        try:
            with self.slots.lock:
                self._reserve(staged)
                self._records[slot] = staged.record
            if self._streams is not None:
                self._streams.before_write_ahead(slot)
            # Else the ranks of the evicted adapter count with the new matrices.
            self._zero(slot)
            self._write(slot, staged)
            if self._streams is not None:
                self._streams.after_write_ahead(slot)
            with self.slots.lock:
                # Another thread may have loaded or forgotten the name meanwhile.
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
                    self._records.pop(slot, None)
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
            then: called after the last write, with the slots locked; no interrupt cuts it short.

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
            # Without the lock: the calls that hold the slot need it to end.
            time.sleep(0.001)

    def _overwrite(
        self, name: str, slot: int, staged: Staged, then: Callable[[], None] | None
    ) -> None:
        now, new = self._records[slot], staged.record
        if now.replacements or new.replacements:
            raise InvalidInputError(
                f"adapter {name!r} cannot be updated in place: it has modules of its own\n"
                f"  to do: add_adapter({name!r}, ...), which replaces it"
            )
        # Prepared calls and graphs hold the stacks of this layout.
        layouts = [{path: m.layout for path, m in r.modules.items()} for r in (now, new)]
        if layouts[0] != layouts[1]:
            paths = sorted({path for path, _ in layouts[0].items() ^ layouts[1].items()})
            raise InvalidInputError(
                f"adapter {name!r} cannot be updated in place: another layout at "
                f"{', '.join(paths[:3])}{', ...' * (len(paths) > 3)}\n"
                f"  allowed: the same modules, with a bias and DoRA where it has them\n"
                f"  to do: add_adapter({name!r}, ...), which replaces it"
            )

        def overwrite() -> None:
            self._records[slot] = staged.record
            self._write(slot, staged)
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
            # The name goes first: an interrupt leaves a slot that no row can ask for.
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
            modules = self._records[slot].modules
        errors = {path: m.error for path, m in sorted(modules.items()) if m.error is not None}
        return AdapterReport(
            name,
            slot,
            self._eight_bit or self.dtype,
            sum(module.nbytes for module in modules.values()),
            self._stacks.nbytes + self._experts.nbytes,
            errors,
        )

    def modules_of(self, slot: int) -> list[str]:
        """Return the paths of the modules and experts that the adapter in `slot` touches."""
        record = self._record(slot)
        return list({**record.modules, **record.replacements})

    def adapted_by(self, slot: int) -> list[str]:
        """Return the paths of the modules and experts for which the adapter in `slot` has LoRA."""
        return list(self._record(slot).modules)

    def lora_of(self, slot: int, module: str) -> tuple[int, float]:
        """Return rank and scaling of the adapter in `slot` at a module, both 0 without LoRA."""
        part = self._record(slot).modules.get(module)
        return (0, 0.0) if part is None else (part.rank, part.scaling)

    def bytes_of(self, slot: int) -> int:
        """Return the bytes of the adapter in `slot`: matrices, scales and modules of its own."""
        return self._record(slot).nbytes

    def own_modules(self, slot: int) -> Mapping[str, Any]:
        """Return the replacements of modules that the adapter in `slot` brings, by path."""
        return self._record(slot).replacements

    def has_bias(self, slot: int, module: str) -> bool:
        """Return whether the adapter in `slot` brings a bias for a module."""
        part = self._record(slot).modules.get(module)
        return part is not None and part.has_bias

    def has_output_scales(self, slot: int, module: str) -> bool:
        """Return whether the adapter in `slot` brings output_scales (DoRA) for a module."""
        part = self._record(slot).modules.get(module)
        return part is not None and part.has_output_scales

    def has_dora(self, slot: int) -> bool:
        """Return whether the adapter in `slot` brings output_scales for any module."""
        return any(part.has_output_scales for part in self._record(slot).modules.values())

    def has_lora_bias(self, slot: int) -> bool:
        """Return whether the adapter in `slot` brings a bias of its own, not folded in by DoRA."""
        parts = self._record(slot).modules.values()
        return any(part.has_bias and not part.has_output_scales for part in parts)

    def is_active(self, slot: int, path: str, held: tuple[ExpertWeights, ...]) -> bool:
        """Return whether stacks that a caller holds have a slot's LoRA of experts."""
        form = self._record(slot).modules[path].form
        return form is not None and any(self._experts[path, form] is stack for stack in held)

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

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the matrices in the stacks."""
        return self._eight_bit or self.dtype

    def record_of(self, slot: int) -> SlotRecord:
        """Return the record of a slot: another object once the slot has been written again."""
        return self._record(slot)

    @contextmanager
    def writing(self, slot: int) -> Iterator[None]:
        """Order the writes of a slot in the block with its uses on other CUDA streams."""
        with self.slots.lock, self._writing(slot):
            yield

    def _note_active(self) -> None:
        records = self._records.values()
        touched = {path for record in records for path in record.modules}
        weights = {path: self._stacks[path] for path in self.modules if path in touched}
        experts = {
            (path, module.form): None  # a dict keeps the order
            for record in records
            for path, module in record.modules.items()
            if module.form is not None
        }
        self.active = Active(weights, self._stacks.shared(weights), self._experts.by_path(experts))

    def _record(self, slot: int) -> SlotRecord:
        return self._records.get(slot, EMPTY)

    def _reserve(self, staged: Staged) -> None:
        """Allocate the stacks that an adapter needs; the slots are locked."""
        self._stacks.reserve(staged.modules)
        self._experts.reserve(staged.experts)

    def _write(self, slot: int, staged: Staged) -> None:
        """Write tensors of a slot that no call reads; the slots need not be locked."""
        for delta in staged.modules:
            self._stacks.write(slot, delta)
        for experts in staged.experts:
            self._experts.write(slot, experts)
        self._stacks.write_tables(
            slot, staged.modules
        )  # last: rank 0 hides matrices that are half written

    def _zero(self, slot: int) -> None:
        """Set the ranks of a slot to 0 in every stack, also after an interrupted load."""
        self._experts.zero(slot)
        self._stacks.zero(slot)

    def _writing(self, slot: int) -> AbstractContextManager[None]:
        """Order the writes of a slot in the block with its uses on other CUDA streams."""
        return nullcontext() if self._streams is None else self._streams.writing(slot)

    def _clear(self, slot: int) -> None:
        self._zero(slot)
        self._records.pop(slot, None)  # after the ranks: an interrupt leaves a record to clear
