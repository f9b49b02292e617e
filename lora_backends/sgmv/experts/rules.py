"""Sizes for experts: pure functions of shapes and a GPU, fitted to one H200 in bfloat16.

Every dtype starts from `_common_tiles`. float32 keeps those sizes; stacks of 16 and of 8 bits
replace the ones that a search beat. Any result is correct on any shape. For another GPU, which is
untried, the rules count tiles as an H200 would and take no more shared memory than that GPU has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from lora_backends.sgmv.tiles.gpu import H200, Gpu
from lora_backends.sgmv.tiles.sizes import (
    MAX_BLOCK_R,
    MIN_DOT,
    TMA_BYTES,
    ExpandTiles,
    ShrinkTiles,
    fitting,
    has_whole_rows,
    padded_rank,
    parts,
    power_of_two,
)

_STAGE_BYTES = 32 * 1024  # of one step of the shrink: fits on every device
_SHARED_BYTES = 96 * 1024  # for the loads of a shrink in flight
_SHARED_BYTES_OF_8 = 75 * 1024  # the same for 8-bit stacks in tiles of 16: three programs fit
_FEW_TILES = 16  # so few that programs wait for loads that follow each other, not for bytes
_MANY_TILES = 200  # from this number of blocks on, a shrink needs no split
# Pairs per key below which the expand runs pair by pair, without a matrix product.
# Pairs of one key then read its B once each, the first from memory and the others from L2.
_ALONE = 1.13  # for other ranks, and for the shrink: nearly every pair has its key to itself
_MOST_ALONE = 16  # pairs that a key may have where nothing is sorted
_SHARING = {8: 2.6, 16: 1.8}  # for 16 bits, by max_rank: these load B without a mask
_SHARING_OF_8 = {16: 2.6, 32: 1.8, 64: 1.35}  # by padded rank
_SHARING_OF_8_FEW = 5.0  # for 8 bits of rank 16 and fewer than _FEW_PAIRS
_FEW_PAIRS = 100
_SHRINK_SHARING_OF_8 = 2.0  # for the shrink of 8 bits, at rank 16
_LONG_INPUT = 8192  # in_features from which warps share out a step with few tiles, too
_SHORT_INPUT = 2048  # in_features up to which a shrink pair by pair makes few planes of h
_WIDE_OUTPUT = 16384  # out_features from which reading another plane of h costs too much
_MOST_SINGLE_RANKS = 128  # up to which a pair alone is expanded without a matrix product
_SINGLE_VALUES = 4096  # of B per program there
_SINGLE_ROWS = 8  # of A per program of a pair alone, where tiles are few
_SINGLE_PROGRAMS = 96  # with fewer, multiprocessors are idle
_SINGLE_LONG_PROGRAMS = 200  # the same for ranks above 16, which are more bytes; in float32 alone
_MOST_SINGLE_TILES = 16  # whose shrink takes no matrix product
_MOST_SINGLE_INPUTS = 32768  # of a shrink without a matrix product: its code has every step
_MOST_PLANES = 32  # of h
_MOST_EAGER = 2**21  # values of A that are read before the rank is known: 1 us in 16 bits
# 16 bits: shrinks of tiles of 16 pairs, and expands of ranks above 16:
_GROUPED_K = 256  # inputs that groups of warps share out
_MOST_GROUPED = 600  # blocks of 16 rows of A up to which they do, where A has 64 rows or more
_MOST_HALVED = 1000  # blocks up to which, above _MOST_GROUPED, a program takes two of them
_AT_ONCE = {4: 4, 3: 6, 2: 7}  # programs per multiprocessor by stages; ties go to the first
_PIPELINED_TILES = 40  # above which an expand of 16 pairs has loads of B by TMA in flight
_LONG_PIPELINED_TILES = 600  # above which a program of that expand takes up to four blocks
_MOST_ALONE_TILES = 600  # up to which ranks of 64 are expanded pair by pair
# 16 bits: shrinks of tiles of more than 16 pairs:
_PREFILL_PROGRAMS = 264  # programs at least, as far as planes allow, at ranks up to 16
_PREFILL_PROGRAMS_LONG = 200  # the same for ranks above 16
_MOST_PREFILL_PLANES = 4  # of h


@dataclass(frozen=True)
class PairShape:
    """The sizes of a routing that tile sizes depend on."""

    pairs: int  # of a token and an expert, dead ones included
    keys: int  # pairs of a slot and an expert that are expected to be in use
    tile: int  # most pairs per tile
    alone: bool = False  # every pair is a tile of its own, so that nothing is sorted

    @property
    def each(self) -> float:
        """Pairs per key that are expected."""
        return self.pairs / max(1, self.keys)

    @property
    def has_singles(self) -> bool:
        """Whether kernels of some layer may run pair by pair, in tiles of one."""
        most = max([_ALONE, *_SHARING.values(), *_SHARING_OF_8.values()])
        return self.each < max(most, self.sharing_of_8(MIN_DOT))

    def sharing_of_8(self, rank_pad: int) -> float:
        """Return the pairs per key below which 8-bit stacks are expanded pair by pair."""
        if rank_pad == MIN_DOT and self.pairs < _FEW_PAIRS:
            return _SHARING_OF_8_FEW
        return _SHARING_OF_8.get(rank_pad, _ALONE)

    @property
    def tiles(self) -> int:
        """Tiles that are expected."""
        if 2 * self.pairs <= self.tile * self.keys:
            return max(1, self.keys)
        return max(1, min(self.pairs, self.pairs // self.tile + self.keys // 2))


@dataclass(frozen=True)
class SiteTiles:
    """The sizes of both kernels of a site."""

    shrink: ShrinkTiles
    expand: ExpandTiles
    shrink_rows: int  # pairs per program of the shrink: 1, without a matrix product, or MIN_DOT up
    expand_rows: int  # pairs per program of the expand: 1, without a matrix product, or MIN_DOT up
    eager_a: bool = False  # read A before the rank is known
    eager_b: bool = False  # read B before the rank is known


@dataclass(frozen=True)
class SiteShape:
    """The sizes of a site that tile sizes depend on."""

    num_a: int  # matrices A: one per slice, or 1
    max_rank: int
    in_features: int
    out_features: int
    widest: int  # columns of the widest slice that the expand tells apart
    item_bytes: int  # of a value of x, to which 8-bit weights are widened: 2, or 4 for float32
    general: bool  # interleaved columns

    @property
    def stacked(self) -> int:
        """Rows of A, each matrix padded to a power of two."""
        return self.num_a * padded_rank(self.max_rank)


def expected_keys(tokens: int, top_k: int, num_experts: int, active_slots: int) -> int:
    """Return how many (slot, expert) pairs a uniform router would use.

    >>> expected_keys(16, 8, 128, 1), expected_keys(4096, 2, 8, 8)
    (82, 64)
    """
    slots = max(1, min(active_slots, tokens))
    missed = math.pow(1 - min(1.0, top_k / num_experts), tokens / slots)
    return max(1, round(slots * num_experts * (1 - missed)))


def pair_shape(pairs: int, keys: int, most: int) -> PairShape:
    """Return the shape of a routing; `most`: pairs that a key can have.

    >>> pair_shape(8, 8, 1).alone, pair_shape(8, 8, 100).alone, pair_shape(80, 8, 10).alone
    (True, False, False)
    """
    shape = PairShape(pairs, keys, tile_pairs(pairs, keys))
    # the expected keys are a guess: few tokens bound the cost of a worse batch or a refill
    return replace(shape, alone=shape.each < _ALONE and most <= _MOST_ALONE)


def tile_pairs(pairs: int, keys: int) -> int:
    """Return the most pairs per tile: 16, 32, 64 or 128."""
    each = pairs / max(1, keys)
    for tile, most in ((16, 12), (32, 24), (64, 96)):
        if each < most:
            return tile
    return 128


@lru_cache(maxsize=4096)
def choose_tiles(pairs: PairShape, site: SiteShape, gpu: Gpu = H200) -> SiteTiles:
    """Return the sizes for one site and routing on a GPU, for stacks of 16 or 32 bits."""
    tiles = _common_tiles(pairs, site, gpu)
    if site.item_bytes == 4:
        return tiles
    count = gpu.as_on_h200(pairs.tiles)
    tiles = replace(tiles, expand=_loading_ahead(tiles, count, site))
    if tiles.shrink_rows > MIN_DOT:
        tiles = _prefill(tiles, count, pairs, site, gpu)
    elif tiles.shrink_rows == MIN_DOT and site.in_features >= _GROUPED_K:
        if (grouped := _shrink_in_groups(count, site)) is not None:
            tiles = replace(tiles, shrink=fitting(grouped, MIN_DOT, site.item_bytes, gpu))
    if padded_rank(site.max_rank) > MIN_DOT:
        return _of_long_ranks(tiles, count, site, gpu.shared_bytes >= TMA_BYTES)
    by_pair = tiles.expand_rows == 1 and has_whole_rows(site.max_rank)
    if by_pair and _FEW_TILES < count <= H200.multiprocessors and site.in_features <= _SHORT_INPUT:
        split_k = parts(site.in_features, 256, _MOST_PLANES)
        tiles = replace(tiles, shrink=ShrinkTiles(16, 256, split_k, num_warps=2), shrink_rows=1)
    few_values = count * site.stacked * site.in_features <= _MOST_EAGER
    return replace(tiles, eager_a=tiles.eager_a or few_values)


def _common_tiles(pairs: PairShape, site: SiteShape, gpu: Gpu) -> SiteTiles:
    """Return the sizes that all stacks start from."""
    tiles = gpu.as_on_h200(pairs.tiles)
    rank_pad, few = padded_rank(site.max_rank), tiles <= _FEW_TILES
    shrink_rows = max(MIN_DOT, min(64, pairs.tile))
    expand_rows = max(MIN_DOT, min(32 if rank_pad <= 32 else 64, pairs.tile))
    sharing = _ALONE if site.item_bytes == 4 else _SHARING.get(site.max_rank, _ALONE)
    if rank_pad <= _MOST_SINGLE_RANKS and pairs.each < sharing:
        expand_rows = 1
    shrink = _shrink(tiles, pairs, site, shrink_rows)
    shrink = fitting(shrink, shrink_rows, site.item_bytes, gpu)
    few_pairs = pairs.each < _ALONE and pairs.tiles <= _MOST_SINGLE_TILES
    if few_pairs and site.in_features <= _MOST_SINGLE_INPUTS:
        programs = _SINGLE_PROGRAMS if rank_pad == MIN_DOT else _SINGLE_LONG_PROGRAMS
        shrink, shrink_rows = _shrink_single(tiles, site, _SINGLE_ROWS, programs), 1
    return SiteTiles(
        shrink,
        _expand(tiles, site, expand_rows, gpu.shared_bytes >= TMA_BYTES),
        shrink_rows,
        expand_rows,
        eager_a=few,
        eager_b=few or rank_pad == MIN_DOT,  # a row of B is then one sector of memory
    )


def _prefill(
    tiles: SiteTiles, count: int, pairs: PairShape, site: SiteShape, gpu: Gpu
) -> SiteTiles:
    """Return the sizes for tiles of more than 16 pairs in 16 bits."""
    block_n, narrow = min(64, power_of_two(site.stacked)), padded_rank(site.max_rank) == MIN_DOT
    rows, block_k, stages = min(64, pairs.tile), 64, 4
    blocks = -(-site.stacked // block_n) * count * (pairs.tile // rows)
    if rows == 32:
        block_k, stages = 128 if block_n == MIN_DOT else 64, 5
    elif blocks <= H200.multiprocessors:  # two programs fit on each
        block_k, stages = 128, 3 if block_n == 64 else 4
    elif site.stacked >= 128:
        # a program takes all pairs of a tile, so that a block of A is read once per tile
        blocks //= pairs.tile // rows
        rows, stages = pairs.tile, 3
    elif block_n == 32 and pairs.tile == 128:
        stages = 3
    elif block_n == MIN_DOT and pairs.tile == 64:
        block_k, stages = 128, 3
    # as many planes as give each multiprocessor one or two programs; few, as the expand reads all
    wanted = _PREFILL_PROGRAMS if narrow else _PREFILL_PROGRAMS_LONG
    planes = min(_MOST_PREFILL_PLANES, -(-wanted // blocks))
    split_k = parts(site.in_features, block_k, planes)
    shrink = ShrinkTiles(block_n, block_k, split_k, num_stages=stages)
    shrink, expand = fitting(shrink, rows, site.item_bytes, gpu), tiles.expand
    if expand.chunks > 1 and tiles.expand_rows > MIN_DOT:
        expand = _with_more_chunks(expand, tiles.expand_rows, site)
    return replace(tiles, shrink=shrink, shrink_rows=rows, expand=expand)


def _with_more_chunks(expand: ExpandTiles, rows: int, site: SiteShape) -> ExpandTiles:
    """Return the expand with 9 to 16 chunks if it loads B by TMA and has 5 chunks or fewer.

    45 blocks of columns divide by 5 and by 15: 15 chunks make a third of the programs. That was no
    faster where programs had 6 chunks or more, or 64 pairs and large blocks of B.
    """
    chunks, values = chunks_of(site.widest, expand.block_c, 16), expand.block_c * expand.block_r
    if expand.num_stages <= 1 or expand.chunks > 5 or chunks <= 8:
        return expand
    if values <= _SINGLE_VALUES:
        return replace(expand, chunks=chunks, num_stages=4)
    return replace(expand, chunks=chunks) if rows <= 32 else expand


def _loading_ahead(chosen: SiteTiles, tiles: int, site: SiteShape) -> ExpandTiles:
    """Return the expand; at rank 16 and many columns a program loads a block while it adds one."""
    expand, block_c = chosen.expand, _SINGLE_VALUES // MIN_DOT
    if site.max_rank != MIN_DOT or site.general:
        return expand
    if chosen.expand_rows == 1 and expand.block_c > block_c and site.out_features < _WIDE_OUTPUT:
        if tiles * site.out_features > 8 * H200.multiprocessors * block_c:
            return replace(expand, block_c=block_c, chunks=parts(site.widest, block_c, 2))
    elif chosen.expand_rows == MIN_DOT and expand.chunks > 1:
        if site.out_features >= _WIDE_OUTPUT:
            return replace(expand, block_c=block_c, chunks=chunks_of(site.widest, block_c, 4))
    return expand


def choose_tiles_of_8_bits(pairs: PairShape, site: SiteShape, gpu: Gpu = H200) -> SiteTiles:
    """Return the sizes for stacks of 8 bits with a scale per row."""
    tiles = _common_tiles(pairs, site, gpu)
    if site.item_bytes == 4:
        return tiles
    count = gpu.as_on_h200(pairs.tiles)
    few = pairs.tiles <= _MOST_SINGLE_TILES
    rank_pad = padded_rank(site.max_rank)
    # pair by pair with more pairs per key than in 16 bits: reading B again costs half as much
    if rank_pad <= _MOST_SINGLE_RANKS and pairs.each < pairs.sharing_of_8(rank_pad):
        tiles = replace(tiles, expand=_expand(count, site, 1, tma=False), expand_rows=1)
    by_pair = pairs.each < _ALONE and few
    if rank_pad == MIN_DOT and tiles.expand_rows == 1:
        by_pair = pairs.each < _SHRINK_SHARING_OF_8 or pairs.pairs < _FEW_PAIRS
    if by_pair and site.in_features <= _MOST_SINGLE_INPUTS:
        block_n = _SINGLE_ROWS if few else 2 * _SINGLE_ROWS
        shrink = _shrink_single(count, site, block_n, _SINGLE_PROGRAMS)
        tiles = replace(tiles, shrink=shrink, shrink_rows=1)
    shrink, expand, rows = tiles.shrink, tiles.expand, tiles.expand_rows
    # twice as many inputs a step keep as many bytes in flight, unless that pads the inputs by over
    # an eighth, or programs are so few that they wait for one load anyway
    block_k = min(512, 2 * shrink.block_k)
    stage = block_k * (shrink.block_n + 2 * tiles.shrink_rows)
    wasteful = -(-site.in_features // block_k) * block_k * 8 > site.in_features * 9
    many = tiles.shrink_rows > 1 and count > _FEW_TILES
    if many and stage <= _STAGE_BYTES and not wasteful:
        if tiles.shrink_rows >= 32:
            most_stages = min(3, _SHARED_BYTES // stage)
        else:
            # so that three programs of 16 pairs fit on a multiprocessor: 75 KiB of loads in flight
            most_stages = min(4, _SHARED_BYTES_OF_8 // stage)
        shrink = replace(
            shrink,
            block_k=block_k,
            split_k=parts(site.in_features, block_k, shrink.split_k),
            num_stages=max(2, min(shrink.num_stages, most_stages)),
        )
    block_c, chunks = expand.block_c, expand.chunks
    if rows >= 32:
        block_c = 64
    elif rows > 1 and expand.block_r == MIN_DOT:
        block_c = max(block_c, 256)
    elif rows > 1 and expand.block_r == rank_pad:
        block_c, chunks = (2 * block_c, 1) if chunks == 1 else (block_c, 2 * chunks)
    if (block_c, chunks) != (expand.block_c, expand.chunks) and not site.general:
        chunks = chunks_of(site.widest, block_c, chunks)
        expand = replace(expand, block_c=block_c, chunks=chunks)
    if tiles.shrink_rows > 1:  # else A goes to registers
        shrink = fitting(shrink, tiles.shrink_rows, 1, gpu)
    # one stage: unlike for dense layers, `expand_tma` of experts does not widen
    return replace(tiles, shrink=shrink, expand=replace(expand, num_stages=1))


def _shrink(tiles: int, pairs: PairShape, site: SiteShape, rows: int) -> ShrinkTiles:
    """Split the inputs until every multiprocessor has work; the expand reads every plane back.

    8 bits and float32 start from these sizes. In 16 bits only tiles of 16 pairs take them, where
    `_shrink_in_groups` returns None or the inputs are few.
    """
    stacked = power_of_two(site.stacked)
    if site.item_bytes == 4:
        block_n = min(32, stacked)
        blocks = -(-site.stacked // block_n) * tiles
        return ShrinkTiles(block_n, 32, parts(site.in_features, 32, 256 // blocks), num_stages=2)
    if tiles <= 4:
        wide = site.out_features >= _WIDE_OUTPUT
        block_n, programs, planes = 16, 128, 16 if wide else 32
    elif tiles <= _FEW_TILES:
        block_n, programs, planes = 16 if stacked <= 32 else 32, 256, 16
    else:
        block_n, programs, planes = min(64, stacked), 512, 8
    parts_of_tile = max(1, pairs.tile // rows)
    blocks = -(-site.stacked // block_n) * tiles * parts_of_tile
    many = blocks >= (2 * H200.multiprocessors if block_n <= 32 else _MANY_TILES)
    most = 1 if many else min(planes, programs // blocks)
    # groups of warps share out a step
    shared_out = tiles > _FEW_TILES or site.in_features >= _LONG_INPUT
    if stacked == 16 and rows == MIN_DOT and shared_out:
        return ShrinkTiles(16, 256, parts(site.in_features, 256, most), warps_k=4, num_stages=4)
    split_k = parts(site.in_features, 128, most)
    block_k = 128 if rows < 64 or block_n < 64 else 64
    while block_k * (block_n + rows) * site.item_bytes > _STAGE_BYTES:
        block_k //= 2
    stage = block_k * (block_n + rows) * site.item_bytes
    most_stages = 3 if block_n == 32 and blocks > 4 * H200.multiprocessors else 4
    stages = max(2, min(most_stages, _SHARED_BYTES // stage))
    return ShrinkTiles(block_n, block_k, split_k, num_stages=stages)


def _shrink_in_groups(tiles: int, site: SiteShape) -> ShrinkTiles | None:
    """Return the sizes for tiles of 16 pairs in 16 bits; None: those of `_shrink`.

    Groups of warps share out a step of 16 rows of A. Planes of h are few: the expand reads all.
    """
    blocks, narrow = site.stacked // MIN_DOT * tiles, padded_rank(site.max_rank) == MIN_DOT
    if site.stacked >= 64 and blocks > _MOST_GROUPED:  # wider blocks read x less often
        return ShrinkTiles(32, 128, 1, num_stages=4) if blocks <= _MOST_HALVED else None
    wanted = -(-(200 if narrow else 120) // blocks)
    if narrow and blocks <= 2 * H200.multiprocessors:
        wanted = max(wanted, 2)
    split_k = parts(site.in_features, _GROUPED_K, min(16, wanted))
    stages = max(_AT_ONCE, key=lambda count: _fill(blocks * split_k, _AT_ONCE[count]))
    return ShrinkTiles(MIN_DOT, _GROUPED_K, split_k, warps_k=4, num_stages=stages)


def _fill(programs: int, at_once: int) -> float:
    """Return the part of a GPU that programs keep busy; 1 where all run at once."""
    slots = at_once * H200.multiprocessors
    return 1.0 if programs <= slots else programs / (-(-programs // slots) * slots)


def _of_long_ranks(tiles: SiteTiles, count: int, site: SiteShape, tma: bool) -> SiteTiles:
    """Return the sizes for ranks above 16 in 16 bits."""
    rank_pad = padded_rank(site.max_rank)
    if tiles.shrink_rows == 1:
        block_k, warps = (512, 8) if site.in_features > _LONG_INPUT else (256, 4)
        split_k = parts(site.in_features, block_k, _MOST_PLANES)
        tiles = replace(tiles, shrink=ShrinkTiles(32, block_k, split_k, num_warps=warps))
    if site.general or rank_pad > MAX_BLOCK_R:
        return tiles
    if tiles.expand_rows == 1 and rank_pad == MAX_BLOCK_R and count > _FEW_TILES:
        if count <= _MOST_ALONE_TILES:  # a program loads a block while it adds one
            return replace(tiles, expand=ExpandTiles(128, rank_pad, 2))
        tiles = replace(tiles, expand=_expand(count, site, MIN_DOT, tma), expand_rows=MIN_DOT)
    if tma and tiles.expand_rows == MIN_DOT and count > _PIPELINED_TILES:
        most = 4 if count > _LONG_PIPELINED_TILES else 2
        chunks = max(2, chunks_of(site.widest, 128, most))
        return replace(tiles, expand=ExpandTiles(128, rank_pad, chunks, num_warps=2, num_stages=2))
    return tiles


def _shrink_single(tiles: int, site: SiteShape, block_n: int, programs: int) -> ShrinkTiles:
    """Take the widest blocks of A for at least `programs` programs; each loads its block whole."""
    blocks = -(-site.stacked // block_n) * tiles
    for block_k in (1024, 512):
        split_k = parts(site.in_features, block_k, _MOST_PLANES)
        if blocks * split_k >= programs:
            break
    else:
        block_k = 256
        split_k = parts(site.in_features, block_k, _MOST_PLANES)
    return ShrinkTiles(block_n, block_k, split_k)


def _expand(tiles: int, site: SiteShape, rows: int, tma: bool) -> ExpandTiles:
    rank_pad = padded_rank(site.max_rank)
    block_r, narrow = min(rank_pad, MAX_BLOCK_R), rank_pad == MIN_DOT
    many = tiles * site.out_features >= 400_000  # elements of y, about
    if rows == 1:
        block_c = _SINGLE_VALUES // rank_pad
        if tiles * site.out_features > 4 * H200.multiprocessors * block_c:
            block_c *= 2
        return ExpandTiles(min(block_c, power_of_two(site.widest)), rank_pad)
    if site.item_bytes == 4:  # float32 products take more registers and shared memory
        return ExpandTiles(64, min(block_r, 32))
    if site.general or block_r < rank_pad:
        return ExpandTiles(128, block_r)
    even = 64 if site.widest % 128 and site.widest % 64 == 0 else 128
    if rows >= 32:
        return ExpandTiles(even, block_r, chunks_of(site.widest, even, 8), 4, 3 if tma else 1)
    if not many:
        return ExpandTiles(256 if narrow else even, block_r)
    if narrow and even < 128:
        return ExpandTiles(256, block_r, 2)
    block_c = 128 if narrow else 64
    return ExpandTiles(block_c, block_r, chunks_of(site.widest, block_c, 4))


def chunks_of(width: int, block_c: int, most: int) -> int:
    """Return the chunks per program, up to `most`, that cover `width` with the least waste.

    >>> chunks_of(768, 128, 8), chunks_of(2880, 128, 8), chunks_of(64, 128, 8)
    (6, 1, 1)
    """
    blocks = -(-width // block_c)
    return min(range(min(most, blocks), 0, -1), key=lambda n: -(-blocks // n) * n)
