"""The rules for tile sizes: pure functions of shapes and a GPU, fitted to one H200.

They generalise the sizes that measured fastest on the layers of Llama-3-8B, in bfloat16 and int8.
Any result is correct on any shape. For another GPU, which is untried, they count rows as an H200
would and take no more shared memory than it has; memory bandwidth enters no rule.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from lora_backends.sgmv.tiles.gpu import H200, Gpu
from lora_backends.sgmv.tiles.sizes import (
    MAX_BLOCK_R,
    MIN_DOT,
    TMA_BYTES,
    BatchShape,
    ExpandTiles,
    LayerShape,
    ShrinkTiles,
    TileConfig,
    fitting,
    has_whole_rows,
    padded_rank,
    parts,
    power_of_two,
)

_PREFILL_TOKENS = 512
_FEW_ROWS = 8  # of the grid: fewer leave most of an H200 idle
_MANY_ROWS = 32  # of the grid: about a quarter of an H200's multiprocessors
_PREFETCH_ROWS = 96  # of the grid, see `prefetched_lines`
_MOST_PLANES = 32  # of h: the expand reads them all back
_SHORT_INPUT = 2048  # in_features below which most small batches sum in one order
_LONG_INPUT = 8192  # in_features from which more parts are faster
_WIDE_OUTPUT = 16384  # out_features from which reading another plane of h costs too much
_MOST_GROUPED = (
    600  # blocks of 16 rows of A, above which higher ranks take 32: x is read less often
)
_TILE_INPUTS = 1024  # of a program of the shrink, for one tile of a high rank
_ROW_INPUTS = 1024  # per step of a shrink of 8 bits without a matrix product
_SHARED_BYTES = 128 * 1024  # shared memory for the loads in flight


def tile_tokens(num_tokens: int, active_slots: int) -> int:
    """Return the tokens per tile for a batch: 16, 32 or 64."""
    # tiles of 16 waste the fewest places on slots with few tokens; wider tiles read A and B less
    # often
    average = num_tokens // max(1, active_slots)
    if num_tokens < _PREFILL_TOKENS:
        return 32 if average >= 32 and num_tokens > _MANY_ROWS else 16
    return 64 if average >= 64 else 32 if average >= 32 else 16


@lru_cache(maxsize=4096)
def choose_tiles(batch: BatchShape, layer: LayerShape, gpu: Gpu = H200) -> TileConfig:
    """Return the sizes for one layer and batch on a GPU."""
    if layer.item_bytes == 1:
        wide = replace(layer, item_bytes=2)
        return of_8_bits(choose_tiles(batch, wide, gpu), batch, wide, gpu)
    rows = gpu.as_on_h200(batch.rows)
    if batch.num_tokens < _PREFILL_TOKENS:
        shrink = _shrink_decode(rows, batch, layer)
    elif batch.tile_tokens == 16:
        shrink = _shrink_many_adapters(rows, layer)
    else:
        shrink = _shrink_prefill(rows, batch, layer)
    shrink = fitting(_bounded(shrink, batch, layer), batch.tile_tokens, layer.item_bytes, gpu)
    tiles = TileConfig(shrink, _expand(rows, batch, layer, gpu.shared_bytes >= TMA_BYTES))
    return _of_lone_tokens(tiles, rows, layer) if _are_alone(batch, layer) else tiles


def _are_alone(batch: BatchShape, layer: LayerShape) -> bool:
    """Return whether slots have about one token each, in a layer that is not short of inputs."""
    alone = batch.num_tokens < min(_PREFILL_TOKENS, 2 * max(1, batch.active_slots))
    # A captured graph keeps its sizes while the batch changes. Below _SHORT_INPUT inputs most small
    # batches sum in one order, so that a replay gives the bits of an eager call; kernels without a
    # matrix product would sum in another.
    return alone and layer.in_features >= _SHORT_INPUT


def _of_lone_tokens(tiles: TileConfig, rows: int, layer: LayerShape) -> TileConfig:
    """Return sizes for tokens alone with their slot: 16-bit kernels without a matrix product."""
    rank_pad = padded_rank(layer.max_rank)
    if layer.item_bytes != 2 or not has_whole_rows(layer.max_rank) or rank_pad > MAX_BLOCK_R:
        return tiles
    narrow, long = rank_pad == MIN_DOT, layer.in_features >= _LONG_INPUT
    # in all other batches an expand without a matrix product was slower as often as faster
    if rows < _FEW_ROWS:
        if layer.out_features >= _WIDE_OUTPUT:
            block_c, num_warps = (256, 4) if narrow else (128, 2)
        else:
            block_c, num_warps = 128 if narrow else 64, 4
        expand = ExpandTiles(block_c, rank_pad, num_warps=num_warps, num_stages=0)
        tiles = replace(tiles, expand=expand)
    elif rows >= _MANY_ROWS and narrow:
        chunks = 2 if layer.num_slices == 1 else 4
        expand = ExpandTiles(256, MIN_DOT, chunks, num_warps=2, num_stages=0)
        tiles = replace(tiles, expand=expand)
    if rows > 1:
        return tiles
    planes = 28 if long else 16
    # planes of a high rank are larger: longer steps leave fewer of them for the expand to read
    few_planes = not narrow and not long
    block_k = 512 if few_planes or layer.in_features > 3 * 256 * planes else 256
    split_k = parts(layer.in_features, block_k, planes)
    shrink = ShrinkTiles(MIN_DOT, block_k, split_k, warps_k=0, num_warps=8, num_stages=1)
    return replace(tiles, shrink=shrink)


def ends_beyond_ranks(batch: BatchShape, gpu: Gpu = H200) -> bool:
    """Return whether programs of the shrink that have no rows of A within the ranks end early."""
    # To know that, every program first waits for the ranks. With few rows of the grid, dropping
    # that wait brings decode to 0.92 to 1.0 of its time. Many rows fill the GPU, and programs that
    # end make room for others.
    return gpu.as_on_h200(batch.rows) >= _MANY_ROWS


def prefetched_lines(batch: BatchShape, layer: LayerShape, gpu: Gpu = H200) -> tuple[int, int]:
    """Return the lines of 128 bytes to prefetch per row of x, and of y where B comes by TMA."""
    rows, wide = gpu.as_on_h200(batch.rows), layer.out_features >= _WIDE_OUTPUT
    if batch.tile_tokens < 64 or rows < _MANY_ROWS:
        return 0, 0
    # lines of x cost up to 1.15 times the time here, and lines of y pay only in wide layers
    if rows < _PREFETCH_ROWS:
        return 0, 2 if wide else 0
    # more lines of y delay the expand: 8 take 1.02 times as long as 4
    return 8, 4 if wide and padded_rank(layer.max_rank) == 16 else 2


def _shrink_decode(rows: int, batch: BatchShape, layer: LayerShape) -> ShrinkTiles:
    """Split the inputs until every multiprocessor has work; the expand reads every plane back."""
    grouped = batch.tile_tokens <= 32 and layer.item_bytes == 2
    if rows > 1 and grouped and layer.in_features >= _SHORT_INPUT:
        return _shrink_in_groups(rows, batch, layer)
    # one tile, or of more: float32, tiles of more than 32 tokens, and short inputs
    stacked = power_of_two(layer.stacked)
    long, narrow = layer.in_features >= _LONG_INPUT, padded_rank(layer.max_rank) == 16
    single = layer.num_slices == 1
    if rows == 1 and _is_tile_of_high_rank(batch, layer):
        return _shrink_one_tile(layer)
    if rows == 1:
        block_n, programs, planes = 16, 128, 28 if long and narrow else 16
    elif rows >= _MANY_ROWS:
        block_n = 16 if stacked <= (32 if narrow else 128) else 64
        programs, planes = 512 if long and not narrow else 256, 4 if long else 2
    else:
        compact = batch.tile_tokens > 16 or (single and not narrow)
        compact = compact and not long and layer.out_features < _WIDE_OUTPUT
        block_n, programs = (16, 512) if compact else (min(64, stacked), 128)
        planes = (16 if single else 8) // (1 if narrow else 2)
        planes = max(4, planes * 16 // batch.tile_tokens * (4 if long else 1))
    blocks = -(-layer.stacked // block_n) * rows
    split_k = _planes(layer.in_features, min(planes, programs // blocks))
    if block_n == 16 and batch.tile_tokens == 16 and (rows >= _MANY_ROWS or long):
        return ShrinkTiles(block_n, 256, split_k, warps_k=4)
    return ShrinkTiles(block_n, 128, split_k, num_stages=4)


def _shrink_in_groups(rows: int, batch: BatchShape, layer: LayerShape) -> ShrinkTiles:
    """Return the sizes for 16 bits: groups of warps divide the inputs of a step.

    A block of A has 16 or 32 rows.
    """
    narrow, long = padded_rank(layer.max_rank) == MIN_DOT, layer.in_features >= _LONG_INPUT
    block_n, blocks = MIN_DOT, -(-layer.stacked // MIN_DOT) * rows
    wide_tile, small = batch.tile_tokens > 16, layer.num_slices == 1 and not long
    if not narrow and (blocks > _MOST_GROUPED or (wide_tile and not small)):
        block_n, blocks = 32, -(-layer.stacked // 32) * rows
    if blocks <= H200.multiprocessors:
        wanted = (256 if long else 128) * MIN_DOT // batch.tile_tokens
        most = 8 if wide_tile and small else 16
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
    # shorter inputs are summed in one order by most small batches, see `_are_alone`
    return batch.tile_tokens == 16 and high and whole and layer.in_features >= _SHORT_INPUT


def _shrink_one_tile(layer: LayerShape) -> ShrinkTiles:
    """Give a program 1,024 inputs: four steps, whose loads are all in flight.

    More programs would shorten the shrink less than their planes of h lengthen the expand.
    """
    blocks = -(-layer.stacked // MIN_DOT)
    planes = min(layer.in_features // _TILE_INPUTS, 128 // blocks)
    split_k = _planes(layer.in_features, planes)
    return ShrinkTiles(MIN_DOT, 256, split_k, warps_k=4, num_stages=4)


def _shrink_many_adapters(rows: int, layer: LayerShape) -> ShrinkTiles:
    """Keep hundreds of programs in flight: reading every row of A once dominates."""
    block_n, narrow = min(64, power_of_two(layer.stacked)), padded_rank(layer.max_rank) == 16
    single, wide = layer.num_slices == 1, layer.out_features >= _WIDE_OUTPUT
    planes = 4 if narrow and (single or wide) else 2
    programs = 512 if narrow and single else 256
    planes = min(planes, programs // (-(-layer.stacked // block_n) * rows))
    split_k = _planes(layer.in_features, planes)
    if block_n == 16 and layer.in_features >= _LONG_INPUT:
        return ShrinkTiles(block_n, 256, split_k, warps_k=4)
    return ShrinkTiles(block_n, 128, split_k, num_stages=4)


def _shrink_prefill(rows: int, batch: BatchShape, layer: LayerShape) -> ShrinkTiles:
    """Take wide blocks of A: x is read again for every block."""
    stacked = power_of_two(layer.stacked)
    wide, narrow = layer.out_features >= _WIDE_OUTPUT, padded_rank(layer.max_rank) == 16
    single, long = layer.num_slices == 1, layer.in_features >= _LONG_INPUT
    programs = -(-layer.stacked // min(64, stacked)) * rows
    planes = 4 if single or not (narrow or wide) else 2
    most = 8 if single and (narrow or long) else 4
    planes = max(planes, min(most, (128 if single else 64) // programs))
    planes = 1 if stacked >= 256 and rows >= 64 else min(planes, 256 // rows)
    split_k = _planes(layer.in_features, planes)
    block_n, block_k = min(64, stacked), 128
    if stacked >= 128:
        block_n, block_k = (128 if rows >= 64 and batch.tile_tokens == 64 else 64), 64
    programs = -(-layer.stacked // block_n) * rows * split_k
    step = 4 * (block_n + batch.tile_tokens) * layer.item_bytes  # of four loads in flight
    if programs <= H200.multiprocessors and 128 * step <= _SHARED_BYTES:
        return ShrinkTiles(
            block_n, 128, split_k, num_stages=4
        )  # one per SM: all shared memory is its own
    stages = 4 if block_k * step <= _SHARED_BYTES * 3 // 4 else 3  # two or more per SM
    return ShrinkTiles(block_n, block_k, split_k, num_stages=stages)


def _expand(rows: int, batch: BatchShape, layer: LayerShape, tma: bool) -> ExpandTiles:
    rank_pad = padded_rank(layer.max_rank)
    block_r = min(rank_pad, MAX_BLOCK_R)
    wide = layer.out_features >= _WIDE_OUTPUT
    prefill = batch.num_tokens >= _PREFILL_TOKENS
    if layer.item_bytes == 4:  # float32 products take more registers and shared memory
        block_r, block_c, chunks = min(block_r, 32), 64, 1
    elif batch.tile_tokens > 64:
        block_c, chunks = 64, 8 if prefill else 2
    elif prefill:
        block_c = 64 if rows < 64 and not wide else 128
        least = 256 if batch.tile_tokens == 16 else 128  # programs
        chunks = _chunks(rows * (layer.out_features // block_c) // least)
    elif rank_pad == 16:
        many = rows * layer.out_features >= 200_000  # elements of y, about
        block_c, chunks = (128, 4) if many else (256, 1)
    elif wide and rows >= _FEW_ROWS and block_r == rank_pad:
        return ExpandTiles(64, block_r, 8, num_stages=3 if tma else 1)
    elif batch.tile_tokens > 16 and layer.num_slices > 1 and not wide:
        block_c, chunks = 64, 4
    else:
        block_c, chunks = 128, 4 if wide and batch.tile_tokens > 16 else 1
    if tma and prefill and layer.item_bytes == 2 and block_r == rank_pad:
        # TMA is faster where each multiprocessor runs two programs or more, or just one
        kibi = rows * layer.out_features // 1024
        if batch.tile_tokens == 64 or (wide and batch.tile_tokens == 32):
            if kibi >= 2 * H200.multiprocessors:
                stages = 4 if block_r == MIN_DOT else 3
                return ExpandTiles(128, block_r, 8, num_warps=8, num_stages=stages)
            if 128 <= 2 * kibi <= 200:
                return ExpandTiles(128, block_r, 4, num_stages=3)
    return ExpandTiles(block_c, block_r, chunks if block_r == rank_pad else 1)


def of_8_bits(
    tiles: TileConfig, batch: BatchShape, layer: LayerShape, gpu: Gpu = H200
) -> TileConfig:
    """Return sizes for a stack of 8 bits with a scale per row, made from those for 16 bits."""
    rows, shrink, expand = gpu.as_on_h200(batch.rows), tiles.shrink, tiles.expand
    if _are_alone(batch, layer) and layer.item_bytes == 2:
        lone = _of_lone_tokens_of_8_bits(rows, batch, layer, gpu)
        if lone is not None:
            return lone
    if shrink.warps_k:
        shrink = _shrink_of_8_bits(tiles, batch, layer, gpu)
    if expand.num_stages:
        expand = _expand_of_8_bits(expand, batch, layer, rows)
    return TileConfig(shrink, expand)


def _of_lone_tokens_of_8_bits(
    rows: int, batch: BatchShape, layer: LayerShape, gpu: Gpu
) -> TileConfig | None:
    """Return sizes for slots of about one token each, or None where they take those of all batches.

    Of these shrinks only that of one tile, at ranks up to 16, takes a matrix product.
    """
    rank_pad, long = padded_rank(layer.max_rank), layer.in_features >= _LONG_INPUT
    if rank_pad == MIN_DOT:
        if rows == 1 and batch.tile_tokens == MIN_DOT:
            block_k = 512 if long else 256
            split_k = parts(layer.in_features, block_k, 28)
            # two stages are enough: most programs have one or two steps
            shrink = ShrinkTiles(MIN_DOT, block_k, split_k, warps_k=4, num_stages=2)
            shrink = fitting(shrink, MIN_DOT, 1, gpu)
            block_c, num_warps = (128, 4) if layer.num_slices == 1 else (256, 2)
            return TileConfig(shrink, ExpandTiles(block_c, MIN_DOT, 1, num_warps, num_stages=0))
        many = rows >= _MANY_ROWS
        # up to four chunks while 700 programs or more remain
        chunks = _chunks(min(4, rows * (layer.out_features // 256) // 700))
        expand = ExpandTiles(256, MIN_DOT, chunks, 2 if many else 4, num_stages=0)
        return TileConfig(_shrink_rows(layer, rows), expand)
    if rank_pad > MAX_BLOCK_R or not has_whole_rows(layer.max_rank):
        return None
    if rows == 1:
        planes, expand = 28, ExpandTiles(128, rank_pad, num_stages=0)
    elif rows >= _MANY_ROWS:
        # about four steps per program; their loads are all in flight together
        planes = min(28, max(2, -(-layer.in_features // 2048)))
        expand = ExpandTiles(128, rank_pad, 4, num_warps=2, num_stages=0)
    else:
        return None
    split_k = parts(layer.in_features, 512, planes)
    shrink = ShrinkTiles(MIN_DOT, 512, split_k, warps_k=0, num_warps=8, num_stages=1)
    return TileConfig(shrink, expand)


def _shrink_of_8_bits(
    tiles: TileConfig, batch: BatchShape, layer: LayerShape, gpu: Gpu
) -> ShrinkTiles:
    """Twice as many inputs a step keep as many bytes in flight; wide tiles have their own rule."""
    shrink, prefill = tiles.shrink, batch.num_tokens >= _PREFILL_TOKENS
    most = 128 if prefill and shrink.block_n >= 64 else 512
    long = layer.in_features >= 2 * shrink.block_k * shrink.split_k
    if prefill and batch.tile_tokens >= 64 and shrink.warps_k == 1:
        shrink = _long_shrink_of_8_bits(shrink, batch, layer, gpu)
    elif long and shrink.block_k < most:
        block_k, stages = min(most, 2 * shrink.block_k), shrink.num_stages
        split_k = parts(layer.in_features, block_k, shrink.split_k)
        if shrink.warps_k > 1:
            stages = min(3, stages)
            if layer.in_features >= _LONG_INPUT and not prefill:
                split_k = max(2, split_k)  # one program would take all steps of the layer in turn
        shrink = replace(shrink, block_k=block_k, split_k=split_k, num_stages=stages)
    if prefill and batch.tile_tokens < 64:
        shrink = replace(shrink, num_stages=min(shrink.num_stages, 3))
    elif not prefill and tiles.expand.block_r > MIN_DOT:
        shrink = replace(shrink, block_n=min(shrink.block_n, 32))
    stage = shrink.block_k * (shrink.block_n + batch.tile_tokens * layer.item_bytes)
    stages = max(2, min(shrink.num_stages, _SHARED_BYTES // stage))
    shrink, item_bytes = replace(shrink, num_stages=stages), 4 if layer.item_bytes == 4 else 1
    return fitting(shrink, batch.tile_tokens, item_bytes, gpu)


def _long_shrink_of_8_bits(
    shrink: ShrinkTiles, batch: BatchShape, layer: LayerShape, gpu: Gpu
) -> ShrinkTiles:
    """Return blocks of up to 64 rows of A, in enough programs to hide their widening."""
    block_n, narrow = min(64, shrink.block_n), padded_rank(layer.max_rank) == MIN_DOT
    blocks = -(-layer.stacked // block_n)
    block_k, stages = (128, 5) if narrow else (128, 3) if blocks <= 2 else (64, 5)
    # that takes two programs per multiprocessor, or one at rank 16
    programs = blocks * gpu.as_on_h200(batch.rows) * shrink.split_k
    split_k, wanted = shrink.split_k, 128 if narrow else 256
    if programs < wanted and layer.in_features >= 4 * block_k * split_k:
        split_k *= 2
    elif split_k % 2 == 0 and programs >= 2 * wanted and layer.out_features >= _WIDE_OUTPUT:
        # a wide expand would read all of the planes
        split_k //= 2
    return replace(
        shrink, block_n=block_n, block_k=block_k, split_k=split_k, num_warps=4, num_stages=stages
    )


def _expand_of_8_bits(
    expand: ExpandTiles, batch: BatchShape, layer: LayerShape, rows: int
) -> ExpandTiles:
    """Return sizes of the expand of 8 bits."""
    # in prefill 4 warps, to hide each other's widening, but 8 at rank 16 with TMA
    if batch.num_tokens >= _PREFILL_TOKENS:
        if expand.num_stages == 1:
            return replace(expand, block_c=64, num_warps=4)
        if expand.block_r > MIN_DOT:
            return replace(expand, num_warps=4)
        wide = layer.out_features >= _WIDE_OUTPUT
        return replace(expand, num_stages=4) if wide else expand
    if expand.block_r > MIN_DOT:
        whole = expand.block_r == padded_rank(layer.max_rank)
        if rows >= _MANY_ROWS and batch.tile_tokens <= 32 and expand.block_c == 128 and whole:
            return ExpandTiles(128, expand.block_r, 4)
        return replace(expand, num_stages=1)
    # a single row of the grid is faster with twice as many programs of 128
    block_c, chunks = max(expand.block_c, 128 if rows == 1 else 256), expand.chunks
    if block_c > expand.block_c and rows < _MANY_ROWS:
        if batch.tile_tokens > MIN_DOT:
            return expand
        chunks = max(1, chunks // 2)
    return replace(expand, block_c=block_c, chunks=chunks)


def _shrink_rows(layer: LayerShape, rows: int) -> ShrinkTiles:
    """Read wide blocks of A straight to registers; split the inputs until programs are many."""
    block_k = max(MIN_DOT, min(_ROW_INPUTS, power_of_two(layer.in_features)))
    split_k = parts(layer.in_features, block_k, 8 if rows >= _MANY_ROWS else 16)
    return ShrinkTiles(MIN_DOT, block_k, split_k, warps_k=0, num_stages=1)


def of_scaled_blocks(
    tiles: TileConfig, batch: BatchShape, layer: LayerShape, gpu: Gpu = H200
) -> TileConfig:
    """Return sizes for a stack of 8 bits whose scales change along the inputs."""
    # loads of scales, float32, take more shared memory than those of A
    shrink = fitting(tiles.shrink, batch.tile_tokens, layer.item_bytes, gpu, scaled=True)
    return replace(tiles, shrink=shrink)


def _chunks(most: int) -> int:
    """Return the largest power of two from 1 to 8 that does not exceed `most`."""
    return next((chunks for chunks in (8, 4, 2) if chunks <= most), 1)


def _bounded(shrink: ShrinkTiles, batch: BatchShape, layer: LayerShape) -> ShrinkTiles:
    """Lower sizes until loads in flight fit in shared memory and sums fit in registers."""
    if layer.item_bytes == 4:
        shrink = ShrinkTiles(min(shrink.block_n, 64), 32, shrink.split_k, num_stages=2)
    if batch.tile_tokens > 64:
        shrink = replace(shrink, block_k=min(shrink.block_k, 64), num_warps=8)
    stage = shrink.block_k * (shrink.block_n + batch.tile_tokens) * layer.item_bytes
    return replace(shrink, num_stages=max(2, min(shrink.num_stages, _SHARED_BYTES // stage)))


def _planes(in_features: int, most: int) -> int:
    """Return how many parts the inputs have, each a plane of h: up to `most` and _MOST_PLANES."""
    steps, most = max(1, in_features // 256), min(most, _MOST_PLANES)
    # the largest number of equal parts, in steps of 256, if that is more than half of `most`
    equal = max(split for split in range(1, max(1, most) + 1) if steps % split == 0)
    if 2 * equal > most or in_features < _SHORT_INPUT:
        return equal
    # unequal, as for 11008: 43 steps, a prime
    return parts(in_features, 256, most)
