"""Descriptions of adapters: rank, targets, dtype, bytes and place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_backends.adapters.pool.tensors import tensors_of
from lora_backends.adapters.specs import Checkpoint, ExpertDelta, ModuleDelta
from lora_backends.dtypes import dtype_name
from lora_backends.errors import LoRABackendError

if TYPE_CHECKING:
    from lora_backends.adapters.pool.pool import AdapterPool
    from lora_backends.adapters.pool.store import AdapterStore


@dataclass(frozen=True)
class AdapterInfo:
    """One adapter, for people to read."""

    name: str
    place: str  # "slot 0", "memory" or "disk"
    rank: int = 0  # the largest of its modules
    targets: tuple[str, ...] = ()  # last parts of their paths, sorted
    modules: int = 0  # how many it touches
    dtype: str = ""
    bytes: int = 0  # of its tensors, at their own rank
    folder: str | None = None  # where it was read from
    problem: str | None = None  # why its files cannot be loaded


@dataclass(frozen=True)
class AdaptersReport:
    """The adapters of a model, and the memory that they take."""

    adapters: tuple[AdapterInfo, ...]  # in slots, in memory, on disk
    stack_bytes: int  # of the device: all slots of every module that was ever adapted
    cpu_bytes: int  # of adapters in memory, those in slots included
    cpu_budget: int  # most that they may take; 0 without a store


def described(name: str, place: str, checkpoint: Checkpoint) -> AdapterInfo:
    """Return the description of a checkpoint."""
    deltas: list[ModuleDelta | ExpertDelta] = [
        *checkpoint.modules.values(),
        *checkpoint.experts.values(),
    ]
    tensors = list(tensors_of(checkpoint))
    return AdapterInfo(
        name,
        place,
        max((delta.rank for delta in deltas), default=0),
        _targets(delta.module for delta in deltas),
        len(deltas),
        ", ".join(sorted({dtype_name(delta.lora_a.dtype) for delta in deltas})),
        sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        str(checkpoint.folder),
    )


def report(pool: AdapterPool, store: AdapterStore | None) -> AdaptersReport:
    """Return the adapters of a pool and its store; files that are not in memory are read."""
    infos = []
    for name in pool.slots.names:
        with pool.slots.lock:
            if name in pool.slots:
                infos.append(_in_slot(pool, name))
    loaded = {info.name for info in infos}
    in_memory, folders = ({}, {}) if store is None else (store.kept(), store.folders())
    infos += [
        described(name, "memory", each.checkpoint)
        for name, each in in_memory.items()
        if name not in loaded
    ]
    for name, folder in folders.items():
        if name not in loaded and name not in in_memory:
            try:
                infos.append(described(name, "disk", pool.read(folder)))
            except LoRABackendError as error:
                infos.append(AdapterInfo(name, "disk", folder=str(folder), problem=str(error)))
    return AdaptersReport(
        tuple(infos),
        sum(tensor.nbytes for tensor in pool.tensors()),
        0 if store is None else store.kept_bytes,
        0 if store is None else store.cpu_bytes,
    )


def _in_slot(pool: AdapterPool, name: str) -> AdapterInfo:
    slot = pool.slots.place(name)
    paths, rank, dtypes = pool.adapted_by(slot), 0, set()
    for path in paths:
        stacks: Iterable[Any] = pool.active_experts.get(path) or (pool.active_weights[path],)
        for stack in stacks:
            rank = max(rank, int(stack.ranks[slot].max()))
            dtypes.add(dtype_name(stack.lora_a.dtype))
    size = pool.bytes_of(slot)
    dtype = ", ".join(sorted(dtypes))
    return AdapterInfo(name, f"slot {slot}", rank, _targets(paths), len(paths), dtype, size)


def _targets(paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({path.rpartition(".")[2] for path in paths}))
