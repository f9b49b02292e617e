"""The rules for tile sizes of a prefill, as `bounds.is_prefill` defines it."""

from __future__ import annotations

from lora_backends.sgmv.tiles.bounds import (
    LONG_INPUT,
    MANY_ROWS,
    SHARED_BYTES,
    WIDE_OUTPUT,
    chunks_up_to,
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
    padded_rank,
    power_of_two,
)


def shrink_in_one_wave(rows: int, layer: LayerShape, most_n: int) -> ShrinkTiles:
    """Return the sizes for tiles of 64 tokens in 16 bits: about one program per multiprocessor.

    Every block of A reads x again. So inputs are split with blocks of up to `most_n` rows; then
    blocks are halved while there is room for more programs.
    """
    wide, narrow = layer.out_features >= WIDE_OUTPUT, padded_rank(layer.max_rank) == MIN_DOT
    single, long = layer.num_slices == 1, layer.in_features >= LONG_INPUT
    block_n, least_n = min(most_n, power_of_two(layer.stacked)), MIN_DOT
    # every program of the expand reads all planes of h; a wide layer has most programs
    if wide and rows <= 8:
        # narrower blocks would fill the GPU, but reading x again costs more
        planes, least_n = 4, min(64, block_n)
    elif wide:
        planes = 4 if narrow and rows < MANY_ROWS else 2
    elif single and (narrow or long):
        planes = 16 if narrow and long else 8
    else:
        planes = 4
    programs = H200.multiprocessors // rows  # of a row of the grid
    narrow_slice = single and narrow
    if narrow_slice and rows <= H200.multiprocessors:
        programs = max(2, programs)  # two on a multiprocessor hide each other's loads
    split_k = planes_of(layer.in_features, min(planes, programs // -(-layer.stacked // block_n)))
    while block_n > least_n and -(-layer.stacked // (block_n // 2)) * split_k <= programs:
        block_n //= 2
    block_k = 64 if block_n > 64 else 128
    if rows < 64 or narrow_slice:
        stages = 5 if block_n == 128 else 4
    else:  # parts have many steps: take most of the shared memory
        stages = 5 if block_n == 256 else 6
    steps = -(-layer.in_features // (block_k * split_k))
    return ShrinkTiles(block_n, block_k, split_k, num_stages=max(2, min(stages, steps)))


def shrink_many_adapters(rows: int, layer: LayerShape) -> ShrinkTiles:
    """Keep hundreds of programs in flight: reading every row of A once dominates."""
    block_n, narrow = min(64, power_of_two(layer.stacked)), padded_rank(layer.max_rank) == MIN_DOT
    single, wide = layer.num_slices == 1, layer.out_features >= WIDE_OUTPUT
    planes = 4 if narrow and (single or wide) else 2
    programs = 512 if narrow and single else 256
    planes = min(planes, programs // (-(-layer.stacked // block_n) * rows))
    split_k = planes_of(layer.in_features, planes)
    if block_n == 16 and layer.in_features >= LONG_INPUT:
        return ShrinkTiles(block_n, 256, split_k, warps_k=4)
    return ShrinkTiles(block_n, 128, split_k, num_stages=4)


def shrink_prefill(rows: int, batch: BatchShape, layer: LayerShape) -> ShrinkTiles:
    """Return the sizes for tiles of 32 and above 64 tokens, and of 64 in blends and float32."""
    stacked = power_of_two(layer.stacked)
    wide, narrow = layer.out_features >= WIDE_OUTPUT, padded_rank(layer.max_rank) == MIN_DOT
    single, long = layer.num_slices == 1, layer.in_features >= LONG_INPUT
    programs = -(-layer.stacked // min(64, stacked)) * rows
    planes = 4 if single or not (narrow or wide) else 2
    most = 8 if single and (narrow or long) else 4
    planes = max(planes, min(most, (128 if single else 64) // programs))
    planes = 1 if stacked >= 256 and rows >= 64 else min(planes, 256 // rows)
    split_k = planes_of(layer.in_features, planes)
    block_n, block_k = min(64, stacked), 128
    if stacked >= 128:
        block_n, block_k = (128 if rows >= 64 and batch.tile_tokens == 64 else 64), 64
    programs = -(-layer.stacked // block_n) * rows * split_k
    step = 4 * (block_n + batch.tile_tokens) * layer.item_bytes  # bytes of four loads, per input
    if programs <= H200.multiprocessors and 128 * step <= SHARED_BYTES:
        # a program has all of a multiprocessor's shared memory
        return ShrinkTiles(block_n, 128, split_k, num_stages=4)
    stages = 4 if block_k * step <= SHARED_BYTES * 3 // 4 else 3  # two or more share it
    return ShrinkTiles(block_n, block_k, split_k, num_stages=stages)


def expand_prefill(rows: int, batch: BatchShape, layer: LayerShape, tma: bool) -> ExpandTiles:
    """Return the sizes of the expand for 16 bits and tiles of up to 64 tokens."""
    rank_pad, wide = padded_rank(layer.max_rank), layer.out_features >= WIDE_OUTPUT
    block_r, narrow, tile = min(rank_pad, MAX_BLOCK_R), rank_pad == MIN_DOT, batch.tile_tokens
    single, kibi = layer.num_slices == 1, rows * layer.out_features // 1024
    wave = H200.multiprocessors  # `kibi`: programs of the expand if each had 1,024 columns
    if tma and block_r == rank_pad:
        if kibi >= 2 * wave and (tile == 64 or (wide and tile == 32)):
            # A multiprocessor runs two programs at once. Programs of 2,048 columns: at most two for
            # each, so that none waits; at least 1.5, or too much of the GPU is idle.
            whole = single and layer.out_features % 2048 == 0
            fill = whole and not (narrow or wide) and 3 * wave <= kibi <= 4 * wave
            return ExpandTiles(128, block_r, 16 if fill else 8, 8, 4 if narrow else 3)
        if tile == 64 and 64 <= kibi <= 100:
            # programs of 512 columns if there is at most one per multiprocessor, else of 256
            return ExpandTiles(128 if 2 * kibi <= wave else 64, block_r, 4, num_stages=3)
        if tile == 64 and kibi > 100 and not narrow:
            # programs of 1,024 columns if there are 1.5 per multiprocessor or more, else of 512
            return ExpandTiles(128 if 2 * kibi >= 3 * wave else 64, block_r, 8, num_stages=3)
    # 512 to 1,023 tokens of one slice of 4,096 columns: blocks of 128 columns are faster while h
    # has at most 8 planes
    few_columns = single and narrow and tile == 64 and 32 <= kibi < 64
    block_c = 128 if rows >= 64 or wide or (few_columns and layer.in_features < LONG_INPUT) else 64
    least = 256 if tile == 16 else 128  # programs
    chunks = chunks_up_to(rows * (layer.out_features // block_c) // least)
    num_warps = 8 if narrow and tile == 64 and block_c * chunks == 512 else 4
    return ExpandTiles(block_c, block_r, chunks if block_r == rank_pad else 1, num_warps)
