"""Files of measured tile sizes, checked before any size is used.

A table belongs to one backend and one device model. It holds the fastest sizes measured for some
layer shapes and batches.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lora_backends.common.files import read_text
from lora_backends.errors import InvalidInputError
from lora_backends.sgmv.tiles.gpu import Gpu, gpu_of
from lora_backends.sgmv.tiles.sizes import TILE_TOKENS, LayerShape, TileConfig, tile_faults
from lora_backends.sgmv.tiles.strict_json import StrictError, parse

SCHEMA = 2
"""Version of the files' layout: a file of another version is refused."""


@dataclass(frozen=True)
class Entry:
    """The measurement of one layer shape and batch."""

    layer: LayerShape
    num_tokens: int
    active_slots: int  # slots that have tokens
    tile_tokens: int  # tokens per tile of the plan
    tiles: TileConfig
    tuned_us: float  # microseconds of one run_linear with these tiles
    rules_us: float  # with the tiles of the rules, in the same run


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
    capability: str  # e.g. "9.0"
    versions: Mapping[str, str]  # of torch and triton
    date: str  # ISO, of the last measurement
    batches: tuple[BatchTiles, ...]
    entries: tuple[Entry, ...]


def device_of(device: torch.device | str) -> tuple[str, str]:
    """Return the model of a device and its compute capability."""
    device = torch.device(device)
    if device.type != "cuda":
        return device.type, "none"
    major, minor = torch.cuda.get_device_capability(device)
    return torch.cuda.get_device_name(device), f"{major}.{minor}"


def file_name(backend: str, device: torch.device | str) -> str:
    """Return the name of the file for a backend on a device, e.g. "triton-nvidia-h200.json"."""
    name, capability = device_of(device)
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"{backend}-{slug}.json" if capability != "none" else f"{backend}-{device}.json"


def read_table(path: Path, backend: str, device: torch.device | str) -> TileTable:
    """Read a table; check that it belongs to the backend and device and that its sizes can run."""
    try:
        table = _parse(read_text(path))
        _check_owner(table, backend, device)
        _check_entries(table, gpu_of(device))
    except OSError as error:
        raise _broken(path, backend, f"cannot be read: {error.strerror or error}") from error
    except (ValueError, OverflowError, RecursionError) as error:
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
    found = dict(pairs)
    if len(found) < len(pairs):
        raise StrictError("an object repeats a key")
    return found


def _check_owner(table: TileTable, backend: str, device: torch.device | str) -> None:
    name, capability = device_of(device)
    if table.backend != backend:
        raise StrictError(f"it is a table of backend {table.backend!r}, not of {backend!r}")
    if (table.device, table.capability) != (name, capability):
        raise StrictError(
            f"it was measured on {table.device!r} (capability {table.capability}); "
            f"this is {name!r} ({capability})"
        )


def _check_entries(table: TileTable, gpu: Gpu) -> None:
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
        faults = tile_faults(entry.tiles, entry.tile_tokens, entry.layer, gpu)
        if faults:
            raise StrictError(f"{where}.tiles cannot be run: {'; '.join(faults)}")
        key = (entry.layer, entry.num_tokens, entry.active_slots, entry.tile_tokens)
        _check_once(where, key, seen)


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
