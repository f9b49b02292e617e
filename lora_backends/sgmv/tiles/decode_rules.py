"""The rules for tile sizes of batches that are not a prefill."""

from __future__ import annotations

from dataclasses import replace

from lora_backends.sgmv.tiles.bounds import (
    FEW_ROWS,
    LONE_TOKENS,
    LONG_INPUT,
    MANY_ROWS,
    SHORT_INPUT,
    WIDE_OUTPUT,
    planes_of,
)
from lora_backends.sgmv.tiles.gpu import H200
from lora_backends.sgmv.tiles.sizes import (
    MAX_BLOCK_R,
    MIN_DOT,
    BatchShape,
    ExpandTiles,
    LayerShape,
    ShrinkTiles,
    TileConfig,
    has_whole_rows,
    padded_rank,
    parts,
    power_of_two,
)

# above so many blocks of 16 rows of A, higher ranks take blocks of 32, which read x less often
_MOST_GROUPED = 600
_TILE_INPUTS = 1024  # of a program of the shrink, for one tile of a high rank


def are_alone(batch: BatchShape, layer: LayerShape) -> bool:
    """Return whether slots have about one token each, in a layer that is not short of inputs."""
    alone = batch.num_tokens < min(LONE_TOKENS, 2 * max(1, batch.active_slots))
    # A captured graph keeps its sizes while the batch changes. Below SHORT_INPUT inputs most small
    # batches sum in one order, so that a replay gives the bits of an eager call; kernels without a
    # matrix product would sum in another.
    return alone and layer.in_features >= SHORT_INPUT


def of_lone_tokens(tiles: TileConfig, rows: int, layer: LayerShape) -> TileConfig:
    """Return sizes for tokens alone with their slot: 16-bit kernels without a matrix product."""
    rank_pad = padded_rank(layer.max_rank)
    if layer.item_bytes != 2 or not has_whole_rows(layer.max_rank) or rank_pad > MAX_BLOCK_R:
        return tiles
    narrow, long = rank_pad == MIN_DOT, layer.in_features >= LONG_INPUT
    # in all other batches an expand without a matrix product was slower as often as faster
    if rows < FEW_ROWS:
        if layer.out_features >= WIDE_OUTPUT:
            block_c, num_warps = (256, 4) if narrow else (128, 2)
        else:
            block_c, num_warps = (128, 4) if narrow else (64, 4 if long else 2)
        expand = ExpandTiles(block_c, rank_pad, num_warps=num_warps, num_stages=0)
        tiles = replace(tiles, expand=expand)
    elif narrow and (rows >= MANY_ROWS or layer.out_features >= WIDE_OUTPUT):
        chunks = 2 if rows >= MANY_ROWS else 1
        expand = ExpandTiles(256, MIN_DOT, chunks, num_warps=2, num_stages=0)
        tiles = replace(tiles, expand=expand)
    if rows > 1:
        return tiles
    planes = 28 if long else 16  # two steps of 256 at 14,336 inputs, one at 4,096
    block_k = 512 if layer.in_features > 3 * 256 * planes else 256
    split_k = parts(layer.in_features, block_k, planes)
    shrink = ShrinkTiles(MIN_DOT, block_k, split_k, warps_k=0, num_warps=8, num_stages=1)
    return replace(tiles, shrink=shrink)


def shrink_decode(rows: int, batch: BatchShape, layer: LayerShape) -> ShrinkTiles:
    """Split the inputs until every multiprocessor has work; the expand reads every plane back."""
    grouped = batch.tile_tokens <= 32 and layer.item_bytes == 2
    if rows > 1 and grouped and layer.in_features >= SHORT_INPUT:
        return _shrink_in_groups(rows, batch, layer)
    # what is left: one tile, float32, tiles of more than 32 tokens, and short inputs
    stacked = power_of_two(layer.stacked)
    long, narrow = layer.in_features >= LONG_INPUT, padded_rank(layer.max_rank) == MIN_DOT
    single = layer.num_slices == 1
    if rows == 1 and _is_tile_of_high_rank(batch, layer):
        return _shrink_one_tile(layer)
    if rows == 1:
        block_n, programs, planes = 16, 128, 28 if long and narrow else 16
    elif rows >= MANY_ROWS:
        block_n = 16 if stacked <= (32 if narrow else 128) else 64
        programs, planes = 512 if long and not narrow else 256, 4 if long else 2
    else:
        compact = batch.tile_tokens > 16 or (single and not narrow)
        compact = compact and not long and layer.out_features < WIDE_OUTPUT
        block_n, programs = (16, 512) if compact else (min(64, stacked), 128)
        planes = (16 if single else 8) // (1 if narrow else 2)
        planes = max(4, planes * 16 // batch.tile_tokens * (4 if long else 1))
    blocks = -(-layer.stacked // block_n) * rows
    split_k = planes_of(layer.in_features, min(planes, programs // blocks))
    if block_n == 16 and batch.tile_tokens == 16 and (rows >= MANY_ROWS or long):
        return ShrinkTiles(block_n, 256, split_k, warps_k=4)
    return ShrinkTiles(block_n, 128, split_k, num_stages=4)


def _shrink_in_groups(rows: int, batch: BatchShape, layer: LayerShape) -> ShrinkTiles:
    """Return the sizes for 16 bits: groups of warps divide the inputs of a step.

    A block of A has 16 or 32 rows.
    """
    narrow, long = padded_rank(layer.max_rank) == MIN_DOT, layer.in_features >= LONG_INPUT
    block_n, blocks = MIN_DOT, -(-layer.stacked // MIN_DOT) * rows
    wide_tile, small = batch.tile_tokens > 16, layer.num_slices == 1 and not long
    # 96 to 127 blocks in four parts are three or four programs per multiprocessor; blocks of 32
    # rows halve that, and are faster
    halved = 96 <= blocks < 128 or blocks > _MOST_GROUPED or (wide_tile and not small)
    if halved and not narrow:
        block_n, blocks = 32, -(-layer.stacked // 32) * rows
    if blocks <= H200.multiprocessors:
        wanted = (128 if not long else 256 if narrow else 512) * MIN_DOT // batch.tile_tokens
        most = 8 if wide_tile and small else 16
        if not narrow and (rows >= FEW_ROWS or batch.num_tokens >= 12 * batch.rows):
            # each program of the expand reads planes * rank values of h per token
            most = max(4, (512 if long else 256) // padded_rank(layer.max_rank))
        planes = min(most, max(4, wanted // blocks))
    else:
        planes = 2 if narrow and blocks <= 3 * H200.multiprocessors else 1
    # `parts` may leave the last part empty: 14,336 inputs were faster in 15 parts, one of them
    # empty, than in 14
    split_k = parts(layer.in_features, 256, planes)
    return ShrinkTiles(block_n, 256, split_k, warps_k=4, num_stages=4)


def _is_tile_of_high_rank(batch: BatchShape, layer: LayerShape) -> bool:
    """Return whether `_shrink_one_tile` gives the sizes, for a batch of one row of the grid."""
    high = layer.item_bytes == 2 and padded_rank(layer.max_rank) >= 64
    # a last part that is shorter masks every load: 11,008 inputs take 1.2 times as long
    whole = layer.in_features % _TILE_INPUTS == 0
    # shorter inputs are summed in one order by most small batches, see `are_alone`
    return batch.tile_tokens == 16 and high and whole and layer.in_features >= SHORT_INPUT


def _shrink_one_tile(layer: LayerShape) -> ShrinkTiles:
    """Give a program 1,024 inputs, more where blocks are many; four loads are in flight.

    More programs would shorten the shrink less than their planes of h lengthen the expand.
    """
    blocks = -(-layer.stacked // MIN_DOT)
    planes = min(layer.in_features // _TILE_INPUTS, 128 // blocks)
    split_k = planes_of(layer.in_features, planes)
    return ShrinkTiles(MIN_DOT, 256, split_k, warps_k=4, num_stages=4)


def expand_decode(rows: int, batch: BatchShape, layer: LayerShape, tma: bool) -> ExpandTiles:
    """Return the sizes of the expand of a small batch, for 16 bits and tiles of up to 64 tokens."""
    rank_pad, wide = padded_rank(layer.max_rank), layer.out_features >= WIDE_OUTPUT
    block_r, narrow = min(rank_pad, MAX_BLOCK_R), rank_pad == MIN_DOT
    whole, wide_tile = block_r == rank_pad, batch.tile_tokens > 16
    if wide and whole and not narrow and rows >= (6 if wide_tile else 4):
        if rows < 16 and not wide_tile:
            return ExpandTiles(64, block_r, 4)
        return ExpandTiles(64, block_r, 8, num_stages=3 if tma else 1)
    elements = rows * batch.tile_tokens // MIN_DOT * layer.out_features  # of y over 16
    if narrow and elements >= 200_000:
        block_c, chunks = 128, 4
    elif wide_tile and layer.num_slices > 1 and not wide and rows >= FEW_ROWS:
        block_c, chunks = 64, 2 if narrow else 4
    elif narrow:
        block_c, chunks = 256, 1
    else:
        block_c, chunks = 128, 4 if wide and wide_tile else 1
    return ExpandTiles(block_c, block_r, chunks if whole else 1)
