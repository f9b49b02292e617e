"""Where an engine takes its tile sizes from: measured tables first, then the rules.

A table answers for its own layer shapes, at batches near a measured one. The rules answer for the
rest.
"""

from __future__ import annotations

import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from lora_backends.common.files import as_path
from lora_backends.common.names import TILES_VARIABLE
from lora_backends.errors import InvalidInputError
from lora_backends.sgmv.runs import Counted
from lora_backends.sgmv.tiles import rules
from lora_backends.sgmv.tiles.bounds import PREFILL_TOKENS
from lora_backends.sgmv.tiles.eight_bit_rules import of_8_bits
from lora_backends.sgmv.tiles.gpu import H200, Gpu, gpu_of
from lora_backends.sgmv.tiles.sizes import BatchShape, LayerShape, TileConfig
from lora_backends.sgmv.tiles.table import (
    Entry,
    TileTable,
    device_of,
    file_name,
    is_like,
    is_of,
    parsed_table,
    read_like_table,
    read_table,
)

_LOG = logging.getLogger("lora_backends.tiles")

REACH = math.sqrt(2)
"""A measured batch stands for batches with up to this many times its tokens and active slots, which
is halfway to the next power of two. With a reach of 2, most entries lost to the rules on an
H200."""

PREFILL_REACH = 1.15
"""The reach for batches of 300 tokens or more, smaller because the best split of the inputs depends
on the number of tiles: on an H200 an entry took 1.03 to 1.06 times as long as the rules at 1.2 to
1.6 times its tokens."""


Index = Mapping[tuple[LayerShape, int], Sequence[Entry]]
"""The entries of a table by layer and tokens per tile."""


def _unmeasured(*_: object) -> None:
    """Return None: nothing was measured. A function, so that `rules_for` can be pickled."""


@dataclass(frozen=True, eq=False)
class TileSource:
    """Answers an engine's questions about sizes."""

    tile_tokens: Callable[[int, int], int]  # (num_tokens, active_slots) to tokens per tile
    choose_tiles: Callable[[BatchShape, LayerShape], TileConfig]
    files: tuple[str, ...] = ()  # tables in use, the strongest first; () means the rules alone
    measured: Callable[[BatchShape, LayerShape], TileConfig | None] = _unmeasured
    """Returns the sizes that a table measured on this device has for a layer, or None."""
    like: str | None = None  # the device of the last table, if that is another one
    named_tile: Callable[[int, int], int | None] = _unmeasured
    """Returns the tokens per tile that a table names for (num_tokens, active_slots), or None."""

    def tile_for(self, num_tokens: int, counted: Counted) -> int:
        """Return the tokens per tile for a batch whose tokens may fall unevenly on slots."""
        named = self.named_tile(num_tokens, counted.active)
        if named is not None:
            return named
        tile = self.tile_tokens(num_tokens, counted.active)
        return rules.wider_tile(tile, num_tokens, counted)

    @property
    def origin(self) -> str:
        """Where sizes come from, the strongest first."""
        names = list(self.files)
        if self.like is not None:
            names[-1] += f" (measured on {self.like}, a like card)"
        return ", then ".join([*names, "the rules"])


@lru_cache(maxsize=64)
def rules_for(gpu: Gpu = H200, one_wave: bool = True) -> TileSource:
    """Return the rules for a GPU, without a table; `one_wave` as in `rules.choose_tiles`."""
    return TileSource(rules.tile_tokens, partial(rules.choose_tiles, gpu=gpu, one_wave=one_wave))


def tile_source(
    backend: str,
    package: str,
    device: torch.device,
    tiles: str | os.PathLike[str] | TileSource,
    batch_invariant: bool = False,
) -> TileSource:
    """Return the source that an engine's option `tiles` asks for.

    "auto" takes the user's table for the device, then the one in the folder `tables` of the
    engine's package, or else the one there of the most similar card that is `alike`, then the
    rules. A file may be of this device or a like one. A batch-invariant engine uses only the rules.

    Raises:
        InvalidInputError: a file is named for a batch-invariant engine; or a file, under "auto"
            too, cannot be read, is broken, or belongs to another backend or an unlike device.
    """
    if isinstance(tiles, TileSource):
        return tiles
    if not isinstance(tiles, str | os.PathLike):
        raise InvalidInputError(
            f"tiles of backend {backend!r}: given {tiles!r}\n"
            f"  allowed: 'auto', 'rules', 'tune:60s' or another time, or the file of a table"
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
        user, shipped = _automatic(backend, package, device)
        tables = {
            path: read_table(path, backend, device) for path in (user, shipped) if path.is_file()
        }
        if shipped not in tables:
            tables |= _of_like_card(shipped.parent, backend, device)
    else:
        path = as_path(tiles, f"the table of tiles of backend {backend!r}")
        tables = {path: read_like_table(path, backend, device)}
    source = _from_tables(tables, device, gpu) if tables else rules_for(gpu)
    _LOG.info("%s on %s: tile sizes from %s", backend, device_of(device)[0], source.origin)
    return source


def fixed_source(tile_tokens: int, tiles: TileConfig) -> TileSource:
    """Return a source that gives the same sizes for every batch and layer, as a search needs."""
    return TileSource(lambda *_: tile_tokens, lambda *_: tiles, named_tile=lambda *_: tile_tokens)


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


def standing_for(
    measured: Sequence[Any],
    num_tokens: int,
    active_slots: int,
    prefill_reach: float = PREFILL_REACH,
) -> Any | None:
    """Return the nearest measurement of a batch of the same kind, within the reach of its kind.

    The entry of one token, used for two tokens of one adapter, took 1.3 times as long as the rules.
    """
    kind = kind_of(num_tokens, active_slots)
    alike = [each for each in measured if kind_of(each.num_tokens, each.active_slots) == kind]
    is_large, _ = kind
    return nearest(alike, num_tokens, active_slots, prefill_reach if is_large else REACH)


def kind_of(num_tokens: int, active_slots: int) -> tuple[bool, bool]:
    """Return whether a batch is large, and whether slots have fewer than two tokens each.

    Each kind has its own fastest kernels.
    """
    return num_tokens >= min(PREFILL_TOKENS.values()), num_tokens < 2 * active_slots


def nearest(
    measured: Sequence[Any], num_tokens: int, active_slots: int, reach: float = REACH
) -> Any | None:
    """Return the measurement nearest to a batch in log space; None if all are beyond `reach`."""
    best, shortest = None, math.inf
    for candidate in measured:
        tokens = _ratio(candidate.num_tokens, num_tokens)
        slots = _ratio(candidate.active_slots, active_slots)
        distance = math.log(tokens) ** 2 + math.log(slots) ** 2
        if max(tokens, slots) <= reach and distance < shortest:
            # of several equally near the first counts
            best, shortest = candidate, distance
    return best


def _automatic(backend: str, package: str, device: torch.device) -> tuple[Path, Path]:
    """Return the paths of the user's table for a device, and of the library's own."""
    folder = user_folder()
    if os.environ.get(TILES_VARIABLE) and not folder.is_dir():
        raise InvalidInputError(
            f"{TILES_VARIABLE} does not name a folder\n  given: {folder}\n"
            f"  to do: make it, or unset the variable; `lora-backends tune` makes it when it writes"
        )
    name = file_name(backend, device)
    return folder / name, Path(str(files(package) / "tables" / name))


def _of_like_card(folder: Path, backend: str, device: torch.device) -> dict[Path, TileTable]:
    """Return the table in a folder of the like card with the nearest number of multiprocessors."""
    count, tables = gpu_of(device).multiprocessors, {}
    for path in sorted(folder.glob(f"{backend}-*.json")):
        if is_like(parsed_table(path, backend), device):
            tables[path] = read_like_table(path, backend, device)
    nearest_first = sorted(tables, key=lambda path: _ratio(tables[path].multiprocessors, count))
    return {path: tables[path] for path in nearest_first[:1]}


def _from_tables(given: Mapping[Path, TileTable], device: torch.device, gpu: Gpu) -> TileSource:
    tables = list(given.values())
    indexes = [_index(table) for table in tables]
    of_device = [
        index for index, table in zip(indexes, tables, strict=True) if is_of(table, device)
    ]
    like = None if is_of(tables[-1], device) else tables[-1].device

    @lru_cache(maxsize=4096)
    def named_tile(num_tokens: int, active_slots: int) -> int | None:
        for table in tables:
            near = standing_for(table.batches, num_tokens, active_slots)
            if near is not None:
                return int(near.tile_tokens)
        return None

    def tile_tokens(num_tokens: int, active_slots: int) -> int:
        named = named_tile(num_tokens, active_slots)
        return rules.tile_tokens(num_tokens, active_slots) if named is None else named

    @lru_cache(maxsize=4096)
    def choose_tiles(batch: BatchShape, layer: LayerShape) -> TileConfig:
        chosen = _first(indexes, batch, layer)
        if chosen is not None:
            return chosen
        if layer.item_bytes == 1:
            of_16_bits = replace(layer, item_bytes=2)
            return of_8_bits(choose_tiles(batch, of_16_bits), batch, of_16_bits, gpu)
        return rules.choose_tiles(batch, layer, gpu)

    return TileSource(
        tile_tokens,
        choose_tiles,
        tuple(map(str, given)),
        partial(_first, of_device),
        like,
        named_tile,
    )


def _first(indexes: Iterable[Index], batch: BatchShape, layer: LayerShape) -> TileConfig | None:
    """Return the sizes of the first table that measured a layer near a batch."""
    for index in indexes:
        entries = index.get((layer, batch.tile_tokens), ())
        near: Entry | None = standing_for(entries, batch.num_tokens, batch.active_slots)
        if near is not None:
            return near.tiles
    return None


def _index(table: TileTable) -> Index:
    index = defaultdict(list)
    for entry in table.entries:
        index[entry.layer, entry.tile_tokens].append(entry)
    return dict(index)


def _ratio(a: int, b: int) -> float:
    return max(a, b) / max(1, min(a, b))
