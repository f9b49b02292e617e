"""The tables of a batch of several adapters per token: tiles of tokens, and the slots of each tile.

Tokens with the same set of adapters lie together. A tile takes set after set until their slots, or
their tokens, are more than it has room for. One shrink and one expand serve all adapters:

                 passes of one adapter each       one pass
    launches     2n                               2, or 3 where planes of h are added up apart
    x is read    once for each adapter            in tiles of 64 tokens once for all adapters
    y moves      n reads, n writes                1 read, 1 write
    A, B, h      once for each adapter of a tile  the same

for x [tokens, in], y [tokens, out] and n adapters per token. If few tokens have the same set, tiles
of one set would read an adapter many times: then a tile takes several sets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from lora_backends.batch import LoRABatch
from lora_backends.dispatch.many_adapters import SortedTokens, sorted_tokens
from lora_backends.sgmv.runs import (
    EMPTY,
    Ints,
    aligned,
    bucket,
    count_slots,
    max_runs,
    most_run_tables,
    run_tables,
    run_tables_size,
)
from lora_backends.sgmv.tiles.sizes import TILE_TOKENS, power_of_two

ENTRIES = 8
"""The entries of a tile of unlike tokens, unless one token has more."""


class Cut(NamedTuple):
    """How a batch is cut into tiles."""

    tile_tokens: int
    entries: int  # of a tile, at most; a power of two
    merged: bool  # whether tokens of a tile may have other adapters than their neighbours
    by_pair: bool  # whether the shrink takes pairs of a token and an adapter, by slot


@dataclass(eq=False)
class Blend:
    """The tiles of a batch.

    Slots [[0, 2], [2, -1], [0, 2], [1, 0]] with two entries per tile:

        starts   [0, 1, 4]          tile i has the positions from starts[i] to starts[i + 1]
        tokens   [3, 0, 2, 1]
        slots    [[0, 1], [0, 2]]   the entries of each tile, ascending, then -1
        factors  [[1, 1], [1, 1], [1, 1], [1, nan]]
        ids      [[0, 1], [0, 1], [0, 1], [1, -1]]

    A pair is a token and one of its adapters, slots ascending. factors [positions, width] has the
    scale of each pair, NaN where there is none; ids has the pair's entry in the tile, or -1. A slot
    that a token has twice is two entries. Programs loop over tiles, so a captured grid serves any
    number of them. All tables lie in one buffer, which a refill overwrites.

    Each pair has a row of h: ``token * width + j``. By pair, the shrink is that of one adapter per
    token on the pairs; its tables of runs of one slot, as `layout` cuts them, lie behind the
    others.
    """

    num_slots: int
    capacity: int  # tokens that a refill may have
    adapters: int  # per token, at most
    has_room: bool  # whether a refill may change `tile_tokens`, until a graph is captured
    packed: torch.Tensor  # [size] int32, on the device
    entries: int = 0  # of a tile, at most; a power of two
    merged: bool = False  # whether tokens of a tile may have other adapters than their neighbours
    by_pair: bool = False  # whether the shrink takes pairs
    run_pairs: int = 0  # of a run, at most
    num_runs: int = 0  # of pairs
    most_runs: int = 0  # that any batch can need
    active_slots: int = 0
    room: int = 0  # the most tiles that any batch can need
    tile_tokens: int = 0  # 0: not filled yet
    num_tokens: int = 0
    num_tiles: int = 0
    tiles_hint: int = 1  # about `num_tiles`; kernels' tile sizes follow from it
    is_captured: bool = field(default=False, kw_only=True)  # whether a CUDA graph uses the tables

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"is_captured": False}  # no graph uses a copy

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """The number of tiles, then `starts`, `tokens`, `slots`, `factors` and `ids`."""
        starts, tokens, slots, factors, ids = (self.packed[at:] for at in self._places()[:5])
        return self.packed, starts, tokens, slots, factors.view(torch.float32), ids

    @property
    def width(self) -> int:
        """Pairs of a token."""
        return power_of_two(self.adapters)

    def pair_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots and the pairs of all runs."""
        return run_tables(self.packed, self._places()[5], self.run_pairs, self.most_runs)

    def pair_rows(self, capturing: bool, rows: int) -> int:
        """Return the rows of the grid of a shrink by pair, as `grid_rows`."""
        if not capturing:
            return self.num_runs
        return max_runs(rows * self.adapters, self.num_slots, self.run_pairs)

    def _places(self) -> tuple[int, ...]:
        return places(self.capacity, self.room, self.entries, self.width)

    def grid_rows(self, capturing: bool, rows: int) -> int:
        """Return the rows of the grid for x of `rows` rows: those in use.

        While capturing, enough for most batches: in others a program computes several tiles.
        """
        if not capturing:
            return self.num_tiles
        # most rows of a larger grid would have no tile, and their programs wait for the shrink
        fewest = -(-rows // self.tile_tokens)
        usual = fewest if self.merged else max_runs(rows, self.num_slots, self.tile_tokens)
        return min(self.room, max(usual, self.num_tiles))

    def fill(self, batch: LoRABatch, ordered: SortedTokens, tile_tokens: Any) -> None:
        """Cut a batch into tiles, and start the copy of the tables to the device."""
        may_cut = self.tile_tokens == 0 or (self.has_room and not self.is_captured)
        if may_cut:
            cut = choose_cut(batch, ordered, tile_tokens)
            self.tile_tokens, self.entries, self.merged, self.by_pair = cut
            self.room = room_of(self.capacity, self.adapters, self.entries, self.merged)
        pinned = not self.packed.is_cpu
        staged = torch.empty(
            self.packed.numel(), dtype=torch.int32, device="cpu", pin_memory=pinned
        )
        array = staged.numpy()
        keys = np.where(ordered.live, ordered.slots * self.adapters + ordered.repeats, -1)
        starts, of_tiles = cut_tiles(keys, self.tile_tokens, self.entries, self.merged)
        starts_at, tokens_at, slots_at, factors_at, ids_at, pairs_at = self._places()
        count, active = len(of_tiles), len(ordered.tokens)
        array[0] = count
        array[starts_at : starts_at + count + 1] = starts
        # a captured grid may have more rows, which read their tile's start before they stop
        array[starts_at + count + 1 : starts_at + self.room + 1] = starts[-1]
        array[tokens_at : tokens_at + active] = ordered.tokens
        firsts = np.cumsum([0, *map(len, of_tiles)])
        tiles = np.arange(count).repeat(np.diff(firsts))
        entries = np.array([key for tile in of_tiles for key in tile], np.int64)
        nth = np.arange(len(entries)) - firsts[tiles]
        slots = array[slots_at : slots_at + self.room * self.entries].reshape(-1, self.entries)
        slots.fill(-1)
        slots[tiles, nth] = entries // self.adapters
        width = self.width
        factors = array[factors_at : factors_at + self.capacity * width].view(np.float32)
        factors, ids = factors.reshape(-1, width), array[ids_at : ids_at + self.capacity * width]
        ids = ids.reshape(-1, width)
        factors.fill(np.nan)
        ids.fill(EMPTY)
        position, column = np.nonzero(ordered.live)
        tile = np.arange(count).repeat(np.diff(starts))[position]
        wide = self.num_slots * self.adapters  # above every key
        place = np.searchsorted(tiles * wide + entries, tile * wide + keys[position, column])
        ids[position, column] = place - firsts[tile]
        scales = 1.0 if ordered.scales is None else ordered.scales[position, column]
        factors[position, column] = scales
        if self.by_pair:
            pairs = np.full((batch.num_tokens, width), EMPTY, np.int64)
            pairs[ordered.tokens[position], column] = ordered.slots[position, column]
            self._fill_pairs(array[pairs_at:], pairs.ravel(), may_cut, tile_tokens)
        self.num_tokens, self.num_tiles = batch.num_tokens, count
        if may_cut:
            self.tiles_hint = bucket(max(count, 1))
        self.packed.copy_(staged, non_blocking=True)

    def _fill_pairs(self, tables: Ints, slots: Ints, may_cut: bool, tile_tokens: Any) -> None:
        """Cut the pairs of all tokens into runs of one slot; `slots` has that of each, or -1."""
        counted = count_slots(slots, self.num_slots)
        if may_cut:
            self.active_slots = counted.active
            self.run_pairs = tile_tokens(int(counted.counts[1:].sum()), max(1, counted.active))
            most = self.capacity * self.adapters
            self.most_runs = max_runs(most, self.num_slots, self.run_pairs)
        tables[: run_tables_size(self.run_pairs, self.most_runs)].fill(EMPTY)
        of_runs, pairs = counted.runs(self.run_pairs)
        self.num_runs, at = of_runs.size, aligned(self.most_runs)
        tables[: of_runs.size] = of_runs
        tables[at : at + pairs.size] = pairs


def cut_tiles(
    keys: Ints, tile_tokens: int, entries: int, merged: bool = True
) -> tuple[list[int], list[list[int]]]:
    """Return the start of each tile and the end of the last, and the keys of each tile, ascending.

    Args:
        keys: [positions, n] the adapters of each position, with equal rows together; -1: none.
        tile_tokens: the most positions of a tile.
        entries: the most keys of a tile; at least n.
        merged: whether a tile may have positions of unlike adapters.

    >>> cut_tiles(np.array([[0, 1], [0, 2], [0, 2], [2, -1]]), 16, 2)
    ([0, 1, 4], [[0, 1], [0, 2]])
    """
    starts, tiles, current = [0], list[list[int]](), set[int]()
    changes = np.flatnonzero((keys[1:] != keys[:-1]).any(1)) + 1
    bounds = [0, *changes.tolist(), len(keys)] if len(keys) else []
    for first, end in zip(bounds, bounds[1:], strict=False):
        own, at = {key for key in keys[first].tolist() if key >= 0}, first
        if len(current | own) > entries or (first and not merged):
            starts.append(at)
            tiles.append(sorted(current))
            current = set()
        current |= own
        while end - starts[-1] > tile_tokens:
            starts.append(starts[-1] + tile_tokens)
            tiles.append(sorted(current))
            current = set(own)
    if len(keys):
        starts.append(len(keys))
        tiles.append(sorted(current))
    return starts, tiles


def places(capacity: int, room: int, entries: int, width: int) -> tuple[int, ...]:
    """Return where `starts`, `tokens`, `slots`, `factors`, `ids` and the tables of runs begin."""
    starts = aligned(1)
    tokens = starts + aligned(room + 1)
    slots = tokens + aligned(capacity)
    factors = slots + aligned(room * entries)
    ids = factors + aligned(capacity * width)
    runs = ids + aligned(capacity * width)
    return starts, tokens, slots, factors, ids, runs


def new_blend(batch: LoRABatch, capacity: int | None, device: torch.device) -> Blend:
    """Return empty tables with room for `capacity` tokens."""
    has_room, capacity = capacity is not None, capacity or batch.num_tokens
    adapters = batch.adapters_per_token
    width = power_of_two(adapters)
    runs = most_run_tables(capacity * adapters, batch.num_slots, TILE_TOKENS)
    sizes = [
        places(capacity, room_of(capacity, adapters, entries, merged), entries, width)[-1] + runs
        for entries, merged in ((width, False), (max(ENTRIES, width), True))
    ]
    packed = torch.empty(max(sizes), dtype=torch.int32, device=device)
    return Blend(batch.num_slots, capacity, adapters, has_room, packed)


def room_of(capacity: int, adapters: int, entries: int, merged: bool) -> int:
    """Return the most tiles that any batch of `capacity` tokens can need."""
    if not merged:
        return max(1, capacity)
    # Two adjacent tiles together have more keys, or more tokens, than one tile may have. More than
    # `entries` keys need at least `in_two` tokens, and a full tile has more tokens than that.
    in_two = entries // adapters + 1
    return max(1, 2 * -(-capacity // in_two))


def choose_cut(batch: LoRABatch, ordered: SortedTokens, tile_tokens: Any) -> Cut:
    """Return how a batch is cut, for layers of any rank.

    `tile_tokens(tokens, sets of adapters)` returns the tokens of a tile of one set.
    """
    tokens, adapters = len(ordered.tokens), batch.adapters_per_token
    sets = 1 + int((ordered.slots[1:] != ordered.slots[:-1]).any(1).sum())
    used = len(np.unique(ordered.slots[ordered.live]))
    width = power_of_two(adapters)
    # Tiles of one set read `sets * adapters` adapters; a tile of unlike tokens reads up to ENTRIES
    # for 16. That is fewer if each adapter would be read more than twice; with more adapters than
    # ENTRIES few tokens share a tile. From 4 tokens a set and adapter on, tiles of one set are as
    # fast on an H200, and their adapters share a product.
    reads = (2 if used <= ENTRIES else 4) * used
    if sets > 1 and tokens < 4 * adapters * sets and sets * adapters > reads:
        return Cut(16, max(ENTRIES, width), merged=True, by_pair=True)
    size = tile_tokens(batch.num_tokens, sets)
    if tokens > 512 and tokens >= 32 * sets:  # fills at least half of a tile of 64
        size = max(size, 64)
    elif batch.num_tokens < 512:  # tiles of 64 were not timed
        size = min(size, 32)
    # Reading x once for all adapters pays where it is long; a shrink by pair reads each adapter for
    # all of its tokens together.
    return Cut(size, width, merged=False, by_pair=size < 64)


def fill_blend(blend: Blend, batch: LoRABatch, tile_tokens: Any) -> Blend:
    """Fill the tables; `tile_tokens` as in `choose_cut`."""
    blend.fill(batch, sorted_tokens(batch), tile_tokens)
    return blend
