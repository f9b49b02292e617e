"""Files of measured tile sizes, checked strictly.

A table belongs to one backend and one model of device and holds measured batches of layer shapes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from lora_backends.errors import InvalidInputError
from lora_backends.gpu.strict import StrictError, parse

SCHEMA = 2
"""Version of the files' layout: a file of another version is refused."""


@dataclass(frozen=True)
class LayerShape:
    """What tile sizes depend on in a layer."""

    num_slices: int
    max_rank: int
    in_features: int
    out_features: int
    item_bytes: int  # of one weight: 2, or 4 for float32


@dataclass(frozen=True)
class Entry:
    """What was measured for one layer shape and batch."""

    layer: LayerShape
    num_tokens: int
    active_slots: int  # slots that have tokens
    tile_tokens: int  # tokens per tile of the plan
    tiles: Any  # the engine's TileConfig
    tuned_us: float  # microseconds of one run_linear with these tiles
    rules_us: float  # with the tiles of the rules, in the same run


@dataclass(frozen=True)
class BatchTiles:
    """The tile size of the plan of one batch, the best over all layers measured."""

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


class TileRules(Protocol):
    """What an engine's tuning module offers, so that its tiles can be tabled and tuned."""

    TileConfig: type
    """A frozen dataclass of frozen dataclasses of ints."""
    TILE_TOKENS: tuple[int, ...]
    """Tokens per tile that its kernels take."""
    block_tokens: Callable[[int, int], int]
    """(num_tokens, active_slots) to tokens per tile."""
    choose_tiles: Callable[..., Any]
    """(num_tokens, active_slots, tile_tokens, *fields of LayerShape) to a TileConfig."""
    candidates: Callable[..., Sequence[Any]]
    """The arguments of `choose_tiles` to the TileConfigs worth trying."""
    tile_faults: Callable[..., list[str]]
    """(tiles, tile_tokens, *fields of LayerShape) to why its kernels cannot take them; [] if
    they can and give right results."""


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


def read_table(path: Path, rules: Any, backend: str, device: torch.device | str) -> TileTable:
    """Read a table and check that it belongs to the backend and device, and that it can be run.

    Args:
        path: the file.
        rules: the engine's tuning module.
        backend: its name.
        device: where the table is to be used.

    Returns:
        The table, its entries' tiles of the engine's TileConfig.

    Raises:
        InvalidInputError: it names the file, what is wrong with it and what to do.
    """
    try:
        table = _parse(path.read_text(encoding="utf-8"), rules)
        _check_owner(table, backend, device)
        _check_entries(table, rules)
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


def _parse(text: str, rules: Any) -> TileTable:
    value = json.loads(text, parse_constant=_no_number, object_pairs_hook=_no_twins)
    schema = value.get("schema") if isinstance(value, dict) else None
    if isinstance(value, dict) and schema != SCHEMA:
        raise StrictError(f"its schema is {schema!r}, this version reads {SCHEMA}")
    table: TileTable = parse(TileTable, value, "the table", {"tiles": rules.TileConfig})
    return table


def _no_number(constant: str) -> None:
    raise StrictError(f"{constant} is no number")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise StrictError("a key stands twice in one object")
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


def _check_entries(table: TileTable, rules: Any) -> None:
    """Refuse what kernels would run wrongly, and two entries for one question."""
    seen: set[Any] = set()
    for i, batch in enumerate(table.batches):
        _check_batch(f"batches[{i}]", batch, rules)
        _check_once(f"batches[{i}]", (batch.num_tokens, batch.active_slots), seen)
    for i, entry in enumerate(table.entries):
        where, layer = f"entries[{i}]", asdict(entry.layer)
        _check_batch(where, entry, rules)
        if min(layer.values()) < 1 or layer["item_bytes"] not in (2, 4):
            raise StrictError(f"{where}.layer is no layer: {layer}")
        if not (_is_time(entry.tuned_us) and _is_time(entry.rules_us)):
            raise StrictError(f"{where}: microseconds are numbers above 0")
        faults = rules.tile_faults(entry.tiles, entry.tile_tokens, *layer.values())
        if faults:
            raise StrictError(f"{where}.tiles cannot be run: {'; '.join(faults)}")
        key = (entry.layer, entry.num_tokens, entry.active_slots, entry.tile_tokens)
        _check_once(where, key, seen)


def _check_batch(where: str, batch: BatchTiles | Entry, rules: Any) -> None:
    if not 1 <= batch.active_slots <= batch.num_tokens:
        raise StrictError(f"{where}: 1 <= active_slots <= num_tokens must hold")
    if batch.tile_tokens not in rules.TILE_TOKENS:
        allowed = ", ".join(map(str, rules.TILE_TOKENS))
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
        f"  to do: delete it and write it anew (lora-backends tune {backend}), "
        f"or pass tiles='rules'"
    )
