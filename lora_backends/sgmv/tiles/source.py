"""Where an engine takes its tile sizes from: measured tables first, then the rules.

A table answers for its own layer shapes, at batches near a measured one. The rules answer for the
rest.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from lora_backends.common.files import as_path
from lora_backends.common.names import TILES_VARIABLE
from lora_backends.errors import InvalidInputError
from lora_backends.sgmv.tiles import rules
from lora_backends.sgmv.tiles.gpu import H200, Gpu, gpu_of
from lora_backends.sgmv.tiles.sizes import BatchShape, LayerShape, TileConfig
from lora_backends.sgmv.tiles.table import Entry, TileTable, file_name, read_table

REACH = 2.0
"""A measured batch stands for batches with up to this many times its tokens and active slots."""


@dataclass(frozen=True, eq=False)
class TileSource:
    """Answers an engine's two questions about sizes; both functions are pure and cached."""

    tile_tokens: Callable[[int, int], int]  # (num_tokens, active_slots) to tokens per tile
    choose_tiles: Callable[[BatchShape, LayerShape], TileConfig]
    files: tuple[str, ...] = ()  # tables in use, the strongest first; () means the rules alone


@lru_cache(maxsize=64)
def rules_for(gpu: Gpu = H200) -> TileSource:
    """Return the rules for a GPU, without a table."""
    return TileSource(rules.tile_tokens, partial(rules.choose_tiles, gpu=gpu))


def tile_source(
    backend: str,
    package: str,
    device: torch.device,
    tiles: str | os.PathLike[str] | TileSource,
    batch_invariant: bool = False,
) -> TileSource:
    """Return the source that an engine's option `tiles` asks for.

    "auto" takes the user's table for the device, then the one in the folder `tables` of the
    engine's package, then the rules. A batch-invariant engine uses the rules alone.

    Raises:
        InvalidInputError: a file is named for a batch-invariant engine; or a file, under "auto"
            too, cannot be read, is broken, or belongs to another backend or device.
    """
    if isinstance(tiles, TileSource):
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
            f"  to do: drop one of the two; a table's sizes vary with the batch"
        )
    gpu = gpu_of(device)
    if batch_invariant or tiles == "rules":
        return rules_for(gpu)
    if tiles == "auto":
        paths = [path for path in _automatic(backend, package, device) if path.is_file()]
    else:
        paths = [as_path(tiles, f"the table of tiles of backend {backend!r}")]
    if not paths:
        return rules_for(gpu)
    tables = [read_table(path, backend, device) for path in paths]
    return _from_tables(tables, tuple(map(str, paths)), gpu)


def fixed_source(tile_tokens: int, tiles: TileConfig) -> TileSource:
    """Return a source that gives the same sizes for every batch and layer, as a search needs."""
    return TileSource(lambda *_: tile_tokens, lambda *_: tiles)


def user_folder() -> Path:
    """Return the user's folder of tables, which need not exist.

    It is ``$LORA_BACKENDS_TILES``, else ``lora_backends/tiles`` in ``$XDG_CACHE_HOME``, else in
    ``~/.cache``.
    """
    given = os.environ.get(TILES_VARIABLE)
    if given:
        return as_path(given, TILES_VARIABLE)
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = cache if cache.is_absolute() else Path(os.path.expanduser("~")) / ".cache"
    return base / "lora_backends" / "tiles"


def nearest(measured: Sequence[Any], num_tokens: int, active_slots: int) -> Any | None:
    """Return the measurement nearest to a batch in log space; None if all are beyond `REACH`.

    Of several equally near the first counts. A measurement has `num_tokens` and `active_slots`.
    """
    best, shortest = None, math.inf
    for candidate in measured:
        tokens = _ratio(candidate.num_tokens, num_tokens)
        slots = _ratio(candidate.active_slots, active_slots)
        distance = math.log(tokens) ** 2 + math.log(slots) ** 2
        if max(tokens, slots) <= REACH and distance < shortest:
            best, shortest = candidate, distance
    return best


def _automatic(backend: str, package: str, device: torch.device) -> list[Path]:
    """Return the places of tables for a device, the strongest first."""
    folder = user_folder()
    if os.environ.get(TILES_VARIABLE) and not folder.is_dir():
        raise InvalidInputError(
            f"{TILES_VARIABLE} does not name a folder\n  given: {folder}\n"
            f"  to do: make it, or unset the variable; `lora-backends tune` makes it when it writes"
        )
    name = file_name(backend, device)
    return [folder / name, Path(str(files(package) / "tables" / name))]


def _from_tables(tables: Sequence[TileTable], paths: tuple[str, ...], gpu: Gpu) -> TileSource:
    indexes = [_index(table) for table in tables]

    @lru_cache(maxsize=4096)
    def tile_tokens(num_tokens: int, active_slots: int) -> int:
        for table in tables:
            near = nearest(table.batches, num_tokens, active_slots)
            if near is not None:
                return int(near.tile_tokens)
        return rules.tile_tokens(num_tokens, active_slots)

    @lru_cache(maxsize=4096)
    def choose_tiles(batch: BatchShape, layer: LayerShape) -> TileConfig:
        for index in indexes:
            entries = index.get((layer, batch.tile_tokens), ())
            near = nearest(entries, batch.num_tokens, batch.active_slots)
            if near is not None:
                found: TileConfig = near.tiles
                return found
        if layer.item_bytes == 1:
            wide = replace(layer, item_bytes=2)
            return rules.of_8_bits(choose_tiles(batch, wide), batch, wide, gpu)
        return rules.choose_tiles(batch, layer, gpu)

    return TileSource(tile_tokens, choose_tiles, paths)


def _index(table: TileTable) -> dict[tuple[LayerShape, int], list[Entry]]:
    index = defaultdict(list)
    for entry in table.entries:
        index[entry.layer, entry.tile_tokens].append(entry)
    return dict(index)


def _ratio(a: int, b: int) -> float:
    return max(a, b) / max(1, min(a, b))
