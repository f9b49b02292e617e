"""Where an engine takes its tile sizes from: tables that were measured, else its rules.

A layer shape that a table has, at a batch near a measured one, takes the table's sizes; all else
takes those of the rules, the functions of the engine's tuning module.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from lora_backends.errors import InvalidInputError
from lora_backends.gpu.tables import Entry, LayerShape, TileTable, file_name, read_table

FOLDER_VARIABLE = "LORA_BACKENDS_TILES"
"""The environment variable that names the user's folder of tables."""

REACH = 2.0
"""A measured batch stands for those with up to this many times its tokens and its adapters."""


@dataclass(frozen=True, eq=False)
class TileChoice:
    """Where an engine takes its sizes from; both functions are cheap and pure."""

    block_tokens: Callable[[int, int], int]  # as TileRules.block_tokens
    choose_tiles: Callable[..., Any]  # as TileRules.choose_tiles
    sources: tuple[str, ...] = ()  # files of the tables, strongest first; () is the rules alone


def tile_choice(
    rules: Any,
    backend: str,
    device: torch.device,
    tiles: str | os.PathLike[str] | TileChoice,
    batch_invariant: bool = False,
) -> TileChoice:
    """Return the sizes that a backend was asked to use.

    Args:
        rules: the engine's tuning module, a `TileRules`.
        backend: its name.
        device: where it runs.
        tiles: "auto" (the user's table for this device, then the library's own, then the rules),
            "rules", the file of a table, or a choice, which is returned as it is.
        batch_invariant: the rules alone, since a table's sizes follow the batch.

    Returns:
        The choice.

    Raises:
        InvalidInputError: a file is named for a batch-invariant backend; the file cannot be read,
            is broken, or is another backend's or device's; also in "auto", for a file that
            carries this device's name.
    """
    if isinstance(tiles, TileChoice):
        return tiles
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


def _ratio(a: int, b: int) -> float:
    return max(a, b) / max(1, min(a, b))
