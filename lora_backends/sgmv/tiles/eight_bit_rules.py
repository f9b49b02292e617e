"""The rules for tile sizes of stacks of 8 bits, made from those for 16 bits."""

from __future__ import annotations

from dataclasses import replace

from lora_backends.sgmv.tiles.bounds import (
    FEW_ROWS,
    LONG_INPUT,
    MANY_ROWS,
    SHARED_BYTES,
    SHORT_INPUT,
    WIDE_OUTPUT,
    chunks_up_to,
    is_prefill,
)
from lora_backends.sgmv.tiles.decode_rules import are_alone
from lora_backends.sgmv.tiles.gpu import H200, Gpu
from lora_backends.sgmv.tiles.sizes import (
    MAX_BLOCK_R,
    MIN_DOT,
    BatchShape,
    ExpandTiles,
    LayerShape,
    ShrinkTiles,
    TileConfig,
    fitting,
    has_whole_rows,
    padded_rank,
    parts,
)

_ROW_INPUTS = 1024  # per step of a shrink without a matrix product, in four warps
_RESIDENT = 4 * H200.multiprocessors  # programs with such steps that run at the same time


def of_8_bits(
    tiles: TileConfig, batch: BatchShape, layer: LayerShape, gpu: Gpu = H200
) -> TileConfig:
    """Return sizes for a stack of 8 bits with a scale per row.

    `tiles` and `layer` are those of the same layer in 16 bits, or float32. Tokens alone with their
    slot, and one tile of a low rank, may have sizes of their own. Others follow from `tiles`.
    """
    rows, shrink, expand = gpu.as_on_h200(batch.rows), tiles.shrink, tiles.expand
    if layer.item_bytes == 2 and layer.in_features >= SHORT_INPUT:
        own = None
        if rows == 1 and batch.tile_tokens == MIN_DOT >= padded_rank(layer.max_rank):
            own = _of_one_tile(batch, layer, gpu)
        elif are_alone(batch, layer):
            own = _of_lone_tokens_of_8_bits(rows, layer)
        if own is not None:
            return own
    if shrink.warps_k:
        shrink = _shrink_of_8_bits(tiles, batch, layer, gpu)
    if expand.num_stages:
        expand = _expand_of_8_bits(expand, batch, layer, rows)
    return TileConfig(shrink, expand)


def _of_one_tile(batch: BatchShape, layer: LayerShape, gpu: Gpu) -> TileConfig:
    """Return the sizes for one tile of up to 16 ranks."""
    block_k = 512 if layer.in_features >= LONG_INPUT else 256
    split_k = parts(layer.in_features, block_k, 28)  # at 14,336 inputs one step each
    # two stages are enough: most programs have one or two steps
    shrink = ShrinkTiles(MIN_DOT, block_k, split_k, warps_k=4, num_stages=2)
    if are_alone(batch, layer):
        block_c, num_warps = (128, 4) if layer.num_slices == 1 else (256, 2)
        expand = ExpandTiles(block_c, MIN_DOT, 1, num_warps, num_stages=0)
    else:
        expand = ExpandTiles(128, MIN_DOT, 2 if layer.out_features >= WIDE_OUTPUT else 1)
    return TileConfig(fitting(shrink, MIN_DOT, 1, gpu), expand)


def _of_lone_tokens_of_8_bits(rows: int, layer: LayerShape) -> TileConfig | None:
    """Return sizes without a matrix product for tokens alone with their slot.

    None: the sizes of other batches apply.
    """
    rank_pad = padded_rank(layer.max_rank)
    if rank_pad == MIN_DOT:
        many = rows >= MANY_ROWS
        # up to four chunks while 700 programs or more remain
        chunks = chunks_up_to(min(4, rows * (layer.out_features // 256) // 700))
        expand = ExpandTiles(256, MIN_DOT, chunks, 2 if many else 4, num_stages=0)
        shrink = _shrink_rows(layer, 8 if many else 16)
        if -(-layer.stacked // MIN_DOT) * rows * shrink.split_k > _RESIDENT:
            # shorter steps use fewer registers, so more programs are resident
            shrink = replace(shrink, block_k=min(512, shrink.block_k))
        return TileConfig(shrink, expand)
    if rank_pad > MAX_BLOCK_R or not has_whole_rows(layer.max_rank):
        return None
    if rows == 1:
        num_warps = 2 if layer.out_features >= WIDE_OUTPUT else 4
        expand = ExpandTiles(128, rank_pad, 1, num_warps, num_stages=0)
        return TileConfig(_shrink_rows(layer, 28), expand)
    if rows < MANY_ROWS:
        return None
    expand = ExpandTiles(128, rank_pad, 4, num_warps=2, num_stages=0)
    if layer.num_slices == 1 and layer.in_features < LONG_INPUT:
        # about 2,048 inputs per program, whose loads are all in flight together
        return TileConfig(_shrink_rows(layer, max(2, -(-layer.in_features // 2048))), expand)
    # about 512 programs, each with at most 16 steps
    planes = max(2, 512 // (-(-layer.stacked // 32) * rows), -(-layer.in_features // (16 * 256)))
    split_k = parts(layer.in_features, 256, planes)
    return TileConfig(ShrinkTiles(32, 256, split_k, warps_k=0, num_stages=1), expand)


def _shrink_of_8_bits(
    tiles: TileConfig, batch: BatchShape, layer: LayerShape, gpu: Gpu
) -> ShrinkTiles:
    """Double the inputs of a step: as many bytes are in flight as in 16 bits."""
    shrink, prefill = tiles.shrink, is_prefill(batch)
    most = 128 if prefill and shrink.block_n >= 64 else 512
    can_double = layer.in_features >= 2 * shrink.block_k * shrink.split_k
    if prefill and batch.tile_tokens >= 64 and shrink.warps_k == 1:
        shrink = _prefill_shrink_of_8_bits(shrink, batch, layer, gpu)
    elif can_double and shrink.block_k < most:
        block_k, stages = min(most, 2 * shrink.block_k), shrink.num_stages
        split_k = parts(layer.in_features, block_k, shrink.split_k)
        if shrink.warps_k > 1:
            stages = min(3, stages)
            if layer.in_features >= LONG_INPUT and not prefill:
                split_k = max(2, split_k)  # one program would take all steps of the layer in turn
        shrink = replace(shrink, block_k=block_k, split_k=split_k, num_stages=stages)
    if prefill and batch.tile_tokens < 64:
        shrink = replace(shrink, num_stages=min(shrink.num_stages, 3))
    elif not prefill and tiles.expand.block_r > MIN_DOT:
        shrink = _decode_shrink_of_8_bits(shrink, batch, layer, gpu)
    stage = shrink.block_k * (shrink.block_n + batch.tile_tokens * layer.item_bytes)
    stages = max(2, min(shrink.num_stages, SHARED_BYTES // stage))
    shrink, item_bytes = replace(shrink, num_stages=stages), 4 if layer.item_bytes == 4 else 1
    return fitting(shrink, batch.tile_tokens, item_bytes, gpu)


def _decode_shrink_of_8_bits(
    shrink: ShrinkTiles, batch: BatchShape, layer: LayerShape, gpu: Gpu
) -> ShrinkTiles:
    """Return the shrink sizes for ranks above 16 in a batch that is not a prefill."""
    rows, single = gpu.as_on_h200(batch.rows), layer.num_slices == 1
    grouped = shrink.warps_k > 1 and layer.item_bytes == 2
    if rows == 1 and grouped and batch.tile_tokens == MIN_DOT:
        if layer.in_features >= LONG_INPUT:
            split_k = parts(layer.in_features, 256, 14)  # four steps each at 14,336 inputs
            return ShrinkTiles(MIN_DOT, 256, split_k, warps_k=4, num_stages=4)
        split_k = parts(layer.in_features, 512, 8)
        return ShrinkTiles(MIN_DOT if single else 32, 512, split_k, warps_k=4, num_stages=4)
    block_n, split_k = min(shrink.block_n, 32), shrink.split_k
    if grouped and batch.tile_tokens == MIN_DOT and rows < MANY_ROWS:
        block_n = MIN_DOT
    elif grouped and batch.tile_tokens == 32:
        block_n, split_k = MIN_DOT if single else 32, min(4, split_k)
    few = -(-layer.stacked // block_n) * rows * split_k < 2 * H200.multiprocessors
    if grouped and rows >= MANY_ROWS and few and layer.out_features < WIDE_OUTPUT:
        split_k = 2 * split_k
    return replace(
        shrink, block_n=block_n, split_k=parts(layer.in_features, shrink.block_k, split_k)
    )


def _prefill_shrink_of_8_bits(
    shrink: ShrinkTiles, batch: BatchShape, layer: LayerShape, gpu: Gpu
) -> ShrinkTiles:
    """Return blocks of up to 64 rows of A, and enough programs to hide their conversion."""
    block_n, narrow = min(64, shrink.block_n), padded_rank(layer.max_rank) == MIN_DOT
    blocks = -(-layer.stacked // block_n)
    block_k, stages = (128, 5) if narrow else (128, 3) if blocks <= 2 else (64, 5)
    # enough is two programs per multiprocessor, or one at rank 16
    programs = blocks * gpu.as_on_h200(batch.rows) * shrink.split_k
    split_k, wanted = shrink.split_k, 128 if narrow else 256
    # eight steps remain for each part
    if programs < wanted and layer.in_features >= 16 * block_k * split_k:
        split_k *= 2
    elif split_k % 2 == 0 and programs >= 2 * wanted and layer.out_features >= WIDE_OUTPUT:
        # a wide expand would read all of the planes
        split_k //= 2
    return replace(
        shrink, block_n=block_n, block_k=block_k, split_k=split_k, num_warps=4, num_stages=stages
    )


def _expand_of_8_bits(
    expand: ExpandTiles, batch: BatchShape, layer: LayerShape, rows: int
) -> ExpandTiles:
    """Return sizes of the expand of 8 bits."""
    wide = layer.out_features >= WIDE_OUTPUT
    if is_prefill(batch):
        # 4 warps, so that more programs hide each other's conversions; at rank 16 with TMA as many
        # as 16 bits take
        if expand.num_stages == 1 or expand.block_c == 64:
            return replace(expand, block_c=64, num_warps=4, num_stages=1)
        if expand.block_r > MIN_DOT:
            return replace(expand, num_warps=4)
        return replace(expand, num_stages=4) if wide and expand.block_c <= 128 else expand
    if expand.block_r > MIN_DOT:
        whole = expand.block_r == padded_rank(layer.max_rank)
        if layer.item_bytes == 2 and whole and batch.tile_tokens <= 32:
            return _decode_expand_of_8_bits(expand, batch, layer, rows)
        return replace(expand, num_stages=1)
    by_row = batch.num_tokens <= 2 * batch.active_slots and has_whole_rows(layer.max_rank)
    # short layers sum in one order, see `are_alone`
    by_row = by_row and layer.item_bytes == 2 and layer.in_features >= SHORT_INPUT
    if wide and by_row and batch.tile_tokens == MIN_DOT and FEW_ROWS <= rows < MANY_ROWS:
        return ExpandTiles(256, MIN_DOT, 1, num_warps=2, num_stages=0)
    # a single row of the grid is faster with twice as many programs of 128
    block_c, chunks = max(expand.block_c, 128 if rows == 1 else 256), expand.chunks
    if block_c > expand.block_c and rows < MANY_ROWS:
        if batch.tile_tokens > MIN_DOT:
            return replace(expand, num_stages=1)
        chunks = max(1, chunks // 2)
    return replace(expand, block_c=block_c, chunks=chunks, num_stages=1)


def _decode_expand_of_8_bits(
    expand: ExpandTiles, batch: BatchShape, layer: LayerShape, rows: int
) -> ExpandTiles:
    """Return the expand sizes for ranks from 17 to 64, which fit in one block."""
    wide, block_r = layer.out_features >= WIDE_OUTPUT, expand.block_r
    if batch.tile_tokens == 32 and not wide and rows < MANY_ROWS:
        return ExpandTiles(256, block_r, 1, num_warps=8)
    if rows >= MANY_ROWS and expand.block_c == 128:  # a program takes 512 columns
        block_c = 128 if layer.out_features <= 4096 else 64
        return ExpandTiles(block_c, block_r, 512 // block_c)
    if wide and expand.block_c == 64 and expand.chunks == 4:
        return ExpandTiles(128, block_r, 4)
    # with more than two programs per multiprocessor, halve their number: each takes two blocks
    programs = rows * -(-layer.out_features // expand.block_c)
    if rows < MANY_ROWS and expand.chunks == 1 and programs > 2 * H200.multiprocessors:
        return replace(expand, chunks=2, num_stages=1)
    return replace(expand, num_stages=1)


def _shrink_rows(layer: LayerShape, planes: int) -> ShrinkTiles:
    """Read wide blocks of A straight to registers; split the inputs until programs are many."""
    split_k = parts(layer.in_features, _ROW_INPUTS, planes)
    if layer.in_features > 4 * _ROW_INPUTS * split_k:
        # shorter steps divide more evenly: 5,120 inputs are one part of five steps of 1,024, or two
        # parts of five steps of 512
        split_k = parts(layer.in_features, 512, planes)
        return ShrinkTiles(MIN_DOT, 512, split_k, warps_k=0, num_warps=8, num_stages=1)
    return ShrinkTiles(MIN_DOT, _ROW_INPUTS, split_k, warps_k=0, num_stages=1)
