"""Tables of measured tile sizes: files, checked strictly, that go before an engine's rules.

A table belongs to one backend and one model of device and holds measured batches of layer shapes.
An engine asks its `TileChoice`: a layer shape that a table has, at a batch near a measured one,
takes the table's sizes; all else takes the rules of the engine's config module.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import torch

from lora_backends.errors import InvalidInputError
from lora_backends.gpu.strict import StrictError, parse

SCHEMA = 1
"""Version of the files' layout: a file of another version is refused."""

FOLDER_VARIABLE = "LORA_BACKENDS_TILES"
"""The environment variable that names the user's folder of tables."""

REACH = 2.0
"""A measured batch stands for those with up to this many times its tokens and its adapters."""


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
    """What an engine's config module offers, so that its tiles can be tabled and tuned."""

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


@dataclass(frozen=True)
class TileChoice:
    """Where an engine takes its sizes from; both functions are cheap and pure."""

    block_tokens: Callable[[int, int], int]  # as TileRules.block_tokens
    choose_tiles: Callable[..., Any]  # as TileRules.choose_tiles
    sources: tuple[str, ...] = ()  # files of the tables, strongest first; () is the rules alone


def tile_choice(
    rules: Any,
    backend: str,
    device: torch.device,
    tiles: str | os.PathLike[str],
    batch_invariant: bool = False,
) -> TileChoice:
    """Return the sizes that a backend was asked to use.

    Args:
        rules: the engine's config module, a `TileRules`.
        backend: its name.
        device: where it runs.
        tiles: "auto" (the user's table for this device, then the library's own, then the rules),
            "rules", or the file of a table.
        batch_invariant: the rules alone, since a table's sizes follow the batch.

    Returns:
        The choice.

    Raises:
        InvalidInputError: a file is named for a batch-invariant backend; the file cannot be read,
            is broken, or is another backend's or device's; also in "auto", for a file that
            carries this device's name.
    """
    if not isinstance(tiles, str | os.PathLike):
        raise InvalidInputError(
            f"tiles of backend {backend!r}: given {tiles!r}\n"
            f"  allowed: 'auto', 'rules', or the file of a table"
        )
    if batch_invariant and tiles not in ("auto", "rules"):
        raise InvalidInputError(
            f"a batch-invariant backend {backend!r} reads no table of tiles\n"
            f"  given: batch_invariant=True, tiles={str(tiles)!r}\n"
            f"  to do: leave out one of the two; a table's sizes follow the batch"
        )
    if batch_invariant or tiles == "rules":
        return TileChoice(rules.block_tokens, rules.choose_tiles)
    if tiles == "auto":
        found = [path for path in _automatic(rules, backend, device) if path.is_file()]
    else:
        found = [Path(tiles).expanduser()]
    if not found:
        return TileChoice(rules.block_tokens, rules.choose_tiles)
    tables = [read_table(path, rules, backend, device) for path in found]
    return _from_tables(tables, rules, tuple(map(str, found)))


def fixed_choice(tile_tokens: int, tiles: Any) -> TileChoice:
    """Return the choice that is the same for every batch and layer: what a search measures."""
    return TileChoice(lambda *_: tile_tokens, lambda *_: tiles)


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


def user_folder() -> Path:
    """Return the user's folder of tables, which need not exist.

    It is ``$LORA_BACKENDS_TILES``, else ``lora_backends/tiles`` in ``$XDG_CACHE_HOME``, else in
    ``~/.cache``.
    """
    given = os.environ.get(FOLDER_VARIABLE)
    if given:
        return Path(given).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = cache if cache.is_absolute() else Path(os.path.expanduser("~")) / ".cache"
    return base / "lora_backends" / "tiles"


def read_table(path: Path, rules: Any, backend: str, device: torch.device | str) -> TileTable:
    """Read a table and check that it belongs to the backend and device, and that it can be run.

    Args:
        path: the file.
        rules: the engine's config module.
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


def _automatic(rules: Any, backend: str, device: torch.device) -> list[Path]:
    """Return where tables for a device may stand, the strongest first."""
    folder = user_folder()
    if os.environ.get(FOLDER_VARIABLE) and not folder.is_dir():
        raise InvalidInputError(
            f"{FOLDER_VARIABLE} names no folder\n  given: {folder}\n"
            f"  to do: make it, or unset the variable; `lora-backends tune` makes it when it writes"
        )
    name = file_name(backend, device)
    own = files(rules.__package__) / "tables" / name
    return [folder / name, Path(str(own))]


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
        f"  to do: write it anew (lora-backends tune {backend}), delete it, or pass tiles='rules'"
    )


def _from_tables(tables: Sequence[TileTable], rules: Any, sources: tuple[str, ...]) -> TileChoice:
    indexes = [_index(table) for table in tables]

    @lru_cache(maxsize=4096)
    def block_tokens(num_tokens: int, active_slots: int) -> int:
        for table in tables:
            near = nearest(table.batches, num_tokens, active_slots)
            if near is not None:
                return int(near.tile_tokens)
        return int(rules.block_tokens(num_tokens, active_slots))

    @lru_cache(maxsize=4096)
    def choose_tiles(num_tokens: int, active_slots: int, tile_tokens: int, *layer: int) -> Any:
        for index in indexes:
            entries = index.get((LayerShape(*layer), tile_tokens), ())
            near = nearest(entries, num_tokens, active_slots)
            if near is not None:
                return near.tiles
        return rules.choose_tiles(num_tokens, active_slots, tile_tokens, *layer)

    return TileChoice(block_tokens, choose_tiles, sources)


def _index(table: TileTable) -> dict[tuple[LayerShape, int], list[Entry]]:
    index = defaultdict(list)
    for entry in table.entries:
        index[entry.layer, entry.tile_tokens].append(entry)
    return dict(index)


def nearest(measured: Sequence[Any], num_tokens: int, active_slots: int) -> Any | None:
    """Return what was measured nearest to a batch, in log space; None if all are out of `REACH`.

    Args:
        measured: objects with `num_tokens` and `active_slots`.
        num_tokens: of the batch.
        active_slots: of the batch.

    Returns:
        One of `measured`, the first of those equally near, or None.
    """
    best, shortest = None, math.inf
    for candidate in measured:
        tokens = _ratio(candidate.num_tokens, num_tokens)
        slots = _ratio(candidate.active_slots, active_slots)
        distance = math.log(tokens) ** 2 + math.log(slots) ** 2
        if max(tokens, slots) <= REACH and distance < shortest:
            best, shortest = candidate, distance
    return best


def _ratio(a: int, b: int) -> float:
    return max(a, b) / max(1, min(a, b))
