"""Files of measured tile sizes, checked before any size is used.

A table belongs to one backend and one device model; cards that are `alike` may use it, too. It
holds the fastest sizes measured for some layer shapes and batches.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from lora_backends.common.files import read_text
from lora_backends.errors import InvalidInputError
from lora_backends.sgmv.tiles.alike import are_alike, scaled
from lora_backends.sgmv.tiles.gpu import Gpu, gpu_of
from lora_backends.sgmv.tiles.sizes import TILE_TOKENS, LayerShape, TileConfig, tile_faults
from lora_backends.sgmv.tiles.strict_json import StrictError, parse

SCHEMA = 3
"""Version of the files' layout: a file of another version is refused."""


Key: TypeAlias = tuple[LayerShape, int, int, int]
"""Identifies an `Entry` in a table: layer, tokens, active slots, tokens per tile."""


@dataclass(frozen=True)
class Entry:
    """The measurement of one layer shape and batch."""

    layer: LayerShape
    num_tokens: int
    active_slots: int  # slots that have tokens
    tile_tokens: int  # tokens per tile of the plan
    tiles: TileConfig
    # microseconds of one `run_linear`, both from one search
    tuned_us: float  # with these tiles
    rules_us: float  # with the tiles of the rules of that day

    @property
    def key(self) -> Key:
        """The entry's `Key`."""
        return self.layer, self.num_tokens, self.active_slots, self.tile_tokens


@dataclass(frozen=True)
class BatchTiles:
    """The tokens per tile for the plan of one batch: the fastest over all layers measured."""

    num_tokens: int
    active_slots: int
    tile_tokens: int


@dataclass(frozen=True)
class TileTable:
    """One file."""

    schema: int
    backend: str
    device: str  # as torch.cuda.get_device_name
    capability: str  # e.g. "9.0", or "gfx942" on ROCm
    multiprocessors: int
    versions: Mapping[str, str]  # of torch and triton
    date: str  # ISO, of the last measurement
    batches: tuple[BatchTiles, ...]
    entries: tuple[Entry, ...]


def device_of(device: torch.device | str) -> tuple[str, str]:
    """Return the model of a device and its compute capability, or its architecture on ROCm."""
    device = torch.device(device)
    if device.type != "cuda":
        return device.type, "none"
    name = torch.cuda.get_device_name(device)
    # torch reports a numeric capability here, too, but (9, 0) is an MI200
    if torch.version.hip is not None:
        return name, torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return name, f"{major}.{minor}"


def file_name(backend: str, device: torch.device | str) -> str:
    """Return the name of the file for a backend on a device, e.g. "triton-nvidia-h200.json"."""
    name, capability = device_of(device)
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"{backend}-{slug}.json" if capability != "none" else f"{backend}-{device}.json"


def read_table(path: Path, backend: str, device: torch.device | str) -> TileTable:
    """Read a table of this device; check its backend, and that all of its sizes can run."""
    return _read(path, backend, device, _check_owner)


def read_like_table(path: Path, backend: str, device: torch.device | str) -> TileTable:
    """Read a table of this device, or of one that is `alike`, with its sizes scaled to this one."""
    table, gpu = _read(path, backend, device, _check_like), gpu_of(device)
    if is_of(table, device):
        return table
    entries = [replace(entry, tiles=_scaled(entry, table, gpu)) for entry in table.entries]
    # sizes measured on another card may not run here
    return replace(table, entries=tuple(e for e in entries if not _faults(e, gpu)))


def new_table(
    backend: str,
    device: torch.device | str,
    versions: Mapping[str, str],
    entries: Iterable[Entry],
    batches: Iterable[BatchTiles] = (),
) -> TileTable:
    """Return a table of this device with today's date."""
    name, capability = device_of(device)
    return TileTable(
        schema=SCHEMA,
        backend=backend,
        device=name,
        capability=capability,
        multiprocessors=gpu_of(device).multiprocessors,
        versions=versions,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        batches=tuple(batches),
        entries=tuple(entries),
    )


def is_of(table: TileTable, device: torch.device | str) -> bool:
    """Return whether a table was measured on this model of a device."""
    measured = (table.device, table.capability, table.multiprocessors)
    return measured == (*device_of(device), gpu_of(device).multiprocessors)


def is_like(table: TileTable, device: torch.device | str) -> bool:
    """Return whether a table was measured on this model of a device or on a like one."""
    (_, capability), gpu = device_of(device), gpu_of(device)
    return is_of(table, device) or are_alike(
        table.capability, table.multiprocessors, capability, gpu.multiprocessors
    )


def parsed_table(path: Path, backend: str) -> TileTable:
    """Read a table of any device; its sizes are not checked."""
    try:
        return _parse(read_text(path))
    except OSError as error:
        raise _broken(path, backend, f"cannot be read: {error.strerror or error}") from error
    except (ValueError, OverflowError, RecursionError) as error:
        raise _broken(path, backend, str(error)) from error


def _read(
    path: Path,
    backend: str,
    device: torch.device | str,
    check: Callable[[TileTable, str, torch.device | str], None],
) -> TileTable:
    table = parsed_table(path, backend)
    try:
        check(table, backend, device)
        _check_entries(table, gpu_of(device) if is_of(table, device) else None)
    except StrictError as error:
        raise _broken(path, backend, str(error)) from error
    return table


def table_text(table: TileTable) -> str:
    """Return a table as JSON, an entry a line."""
    head = asdict(table)
    lists = {name: head.pop(name) for name in ("batches", "entries")}
    parts = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for name, rows in lists.items():
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        parts.append(f" {json.dumps(name)}: [\n{lines}\n ]" if rows else f' "{name}": []')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _parse(text: str) -> TileTable:
    value = json.loads(text, parse_constant=_no_number, object_pairs_hook=_unique_keys)
    schema = value.get("schema") if isinstance(value, dict) else None
    if isinstance(value, dict) and schema != SCHEMA:
        raise StrictError(f"its schema is {schema!r}, this version reads {SCHEMA}")
    table: TileTable = parse(TileTable, value, "the table")
    return table


def _no_number(constant: str) -> None:
    raise StrictError(f"{constant} is not a number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    by_key = dict(pairs)
    if len(by_key) < len(pairs):
        raise StrictError("an object repeats a key")
    return by_key


def _check_owner(table: TileTable, backend: str, device: torch.device | str) -> None:
    _check_backend(table, backend)
    if not is_of(table, device):
        raise StrictError(_other_card(table, device))


def _check_like(table: TileTable, backend: str, device: torch.device | str) -> None:
    _check_backend(table, backend)
    if not is_like(table, device):
        raise StrictError(f"{_other_card(table, device)}, which is not alike")


def _check_backend(table: TileTable, backend: str) -> None:
    if table.backend != backend:
        raise StrictError(f"it is a table of backend {table.backend!r}, not of {backend!r}")
    if table.multiprocessors < 1:
        raise StrictError(f"its multiprocessors are {table.multiprocessors}, not 1 or more")


def _other_card(table: TileTable, device: torch.device | str) -> str:
    (name, capability), gpu = device_of(device), gpu_of(device)
    return (
        f"it was measured on {table.device!r} (capability {table.capability}, "
        f"{table.multiprocessors} multiprocessors); "
        f"this is {name!r} ({capability}, {gpu.multiprocessors})"
    )


def _check_entries(table: TileTable, gpu: Gpu | None) -> None:
    """Refuse sizes that kernels would run wrongly, and two entries for one layer and batch."""
    seen: set[Any] = set()
    for i, batch in enumerate(table.batches):
        _check_batch(f"batches[{i}]", batch)
        _check_once(f"batches[{i}]", (batch.num_tokens, batch.active_slots), seen)
    for i, entry in enumerate(table.entries):
        where, layer = f"entries[{i}]", asdict(entry.layer)
        _check_batch(where, entry)
        if min(layer.values()) < 1 or layer["item_bytes"] not in (1, 2, 4):
            raise StrictError(f"{where}.layer is not a layer: {layer}")
        if not (_is_time(entry.tuned_us) and _is_time(entry.rules_us)):
            raise StrictError(f"{where}: microseconds are numbers above 0")
        # sizes of another card, for which `gpu` is None, are checked after they are scaled
        faults = _faults(entry, gpu) if gpu is not None else []
        if faults:
            raise StrictError(f"{where}.tiles cannot be run: {'; '.join(faults)}")
        _check_once(where, entry.key, seen)


def _scaled(entry: Entry, table: TileTable, gpu: Gpu) -> TileConfig:
    if _faults(entry, gpu):
        return entry.tiles  # left out; nothing can be computed from such sizes
    return scaled(entry.tiles, entry.layer, table.multiprocessors, gpu)


def _faults(entry: Entry, gpu: Gpu) -> list[str]:
    return tile_faults(entry.tiles, entry.tile_tokens, entry.layer, gpu)


def _check_batch(where: str, batch: BatchTiles | Entry) -> None:
    if not 1 <= batch.active_slots <= batch.num_tokens:
        raise StrictError(f"{where}: 1 <= active_slots <= num_tokens must hold")
    if batch.tile_tokens not in TILE_TOKENS:
        allowed = ", ".join(map(str, TILE_TOKENS))
        raise StrictError(f"{where}.tile_tokens is {batch.tile_tokens}; allowed: {allowed}")


def _check_once(where: str, key: Any, seen: set[Any]) -> None:
    if key in seen:
        raise StrictError(f"{where} repeats an earlier one")
    seen.add(key)


def _is_time(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _broken(path: Path, backend: str, problem: str) -> InvalidInputError:
    return InvalidInputError(
        f"the table of tiles {path} cannot be used: {problem}\n"
        f"  to do: delete the file and tune again (lora-backends tune {backend}), "
        f"or pass tiles='rules'"
    )
