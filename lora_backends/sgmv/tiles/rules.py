"""The rules for tile sizes: pure functions of shapes and a GPU, fitted to one H200.

They generalise the sizes that measured fastest on the layers of Llama-3-8B, in bfloat16 and int8.
Any result is correct on any shape. For another GPU, which is untried, they count rows as an H200
would and take no more shared memory than it has; memory bandwidth enters no rule.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from lora_backends.sgmv.runs import Counted, split
from lora_backends.sgmv.tiles.bounds import (
    MANY_ROWS,
    PREFILL_TOKENS,
    SHARED_BYTES,
    WIDE_OUTPUT,
    is_prefill,
)
from lora_backends.sgmv.tiles.decode_rules import (
    are_alone,
    expand_decode,
    of_lone_tokens,
    shrink_decode,
)
from lora_backends.sgmv.tiles.eight_bit_rules import of_8_bits
from lora_backends.sgmv.tiles.gpu import H200, Gpu
from lora_backends.sgmv.tiles.prefill_rules import (
    expand_prefill,
    shrink_in_one_wave,
    shrink_many_adapters,
    shrink_prefill,
)
from lora_backends.sgmv.tiles.sizes import (
    MAX_BLOCK_R,
    TMA_BYTES,
    BatchShape,
    ExpandTiles,
    LayerShape,
    ShrinkTiles,
    TileConfig,
    fitting,
    padded_rank,
)

FEW_WIDE = 7  # tiles of 64 tokens; fewer leave too much of the GPU idle
_PREFETCH_ROWS = 96  # of the grid, see `prefetched_lines`


def tile_tokens(num_tokens: int, active_slots: int) -> int:
    """Return the tokens per tile for a batch: 16, 32 or 64."""
    # Wider tiles read A and B less often. Narrower ones leave fewer places empty, and occupy more
    # multiprocessors where tiles are few.
    slots = max(1, active_slots)
    average = num_tokens // slots
    if num_tokens >= PREFILL_TOKENS[64]:
        if average > 32 and slots * -(-average // 64) >= FEW_WIDE:
            return 64
        return 32 if average > 16 else 16
    of_16, of_32 = slots * -(-average // 16), slots * -(-average // 32)  # rows, about
    return 32 if of_16 >= 12 and of_32 <= 0.6 * of_16 else 16


def wider_tile(tile: int, num_tokens: int, counted: Counted) -> int:
    """Return the tokens per tile for a batch whose tokens may fall unevenly on slots.

    From 300 tokens on, `tile` doubles if that leaves at most 0.8 times as many tiles. If tokens
    fall on slots at random, about half of the slots have more than the average. If that is close to
    `tile`, they need a second tile, which reads A and B again.
    """
    if num_tokens < PREFILL_TOKENS[64] or tile not in (16, 32):
        return tile
    slots = max(1, counted.active)
    if slots * -(-(num_tokens // slots) // 64) < FEW_WIDE:
        return tile  # `tile_tokens` never gives 64 here, so kernels were not measured
    narrow, wide = (int(split(counted.counts[1:], size).sum()) for size in (tile, 2 * tile))
    return 2 * tile if wide <= 0.8 * narrow else tile


@lru_cache(maxsize=4096)
def choose_tiles(
    batch: BatchShape, layer: LayerShape, gpu: Gpu = H200, one_wave: bool = True
) -> TileConfig:
    """Return the sizes for one layer and batch on a GPU.

    Without `one_wave`, tiles of 64 tokens take the sizes of `shrink_prefill`, with which blends
    were measured.
    """
    if layer.item_bytes == 1:
        of_16_bits = replace(layer, item_bytes=2)
        chosen = choose_tiles(batch, of_16_bits, gpu, one_wave)
        return of_8_bits(chosen, batch, of_16_bits, gpu)
    rows, tma = gpu.as_on_h200(batch.rows), gpu.shared_bytes >= TMA_BYTES
    prefill = is_prefill(batch)
    if one_wave and prefill and batch.tile_tokens == 64 and layer.item_bytes == 2:
        # blocks of 256 rows of A were tried only on Hopper, which has room for TMA
        shrink = shrink_in_one_wave(rows, layer, 256 if tma else 128)
    else:
        shrink = _bounded(_shrink(rows, batch, layer), batch, layer)
    shrink = fitting(shrink, batch.tile_tokens, layer.item_bytes, gpu)
    tiles = TileConfig(shrink, _expand(rows, batch, layer, tma))
    return of_lone_tokens(tiles, rows, layer) if are_alone(batch, layer) else tiles


def ends_beyond_ranks(batch: BatchShape, gpu: Gpu = H200) -> bool:
    """Return whether programs of the shrink that have no rows of A within the ranks end early."""
    # To know that, every program first waits for the ranks. With few rows of the grid, dropping
    # that wait brings decode to 0.92 to 1.0 of its time. Many rows fill the GPU, and programs that
    # end make room for others.
    return gpu.as_on_h200(batch.rows) >= MANY_ROWS


def prefetched_lines(batch: BatchShape, layer: LayerShape, gpu: Gpu = H200) -> tuple[int, int]:
    """Return the lines of 128 bytes to prefetch per row of x, and of y where B comes by TMA."""
    rows, wide = gpu.as_on_h200(batch.rows), layer.out_features >= WIDE_OUTPUT
    if batch.tile_tokens < 64 or rows < MANY_ROWS:
        return 0, 0
    # lines of x cost up to 1.15 times the time here, and lines of y pay only in wide layers
    if rows < _PREFETCH_ROWS:
        return 0, 2 if wide else 0
    # more lines of y delay the expand: 8 take 1.02 times as long as 4
    return 8, 4 if wide and padded_rank(layer.max_rank) == 16 else 2


def of_scaled_blocks(
    tiles: TileConfig, batch: BatchShape, layer: LayerShape, gpu: Gpu = H200
) -> TileConfig:
    """Return sizes for a stack of 8 bits whose scales change along the inputs."""
    # loads of scales, float32, take more shared memory than those of A
    shrink = fitting(tiles.shrink, batch.tile_tokens, layer.item_bytes, gpu, scaled=True)
    return replace(tiles, shrink=shrink)


def _shrink(rows: int, batch: BatchShape, layer: LayerShape) -> ShrinkTiles:
    if not is_prefill(batch):
        return shrink_decode(rows, batch, layer)
    if batch.tile_tokens == 16:
        return shrink_many_adapters(rows, layer)
    return shrink_prefill(rows, batch, layer)


def _expand(rows: int, batch: BatchShape, layer: LayerShape, tma: bool) -> ExpandTiles:
    rank_pad = padded_rank(layer.max_rank)
    block_r, prefill = min(rank_pad, MAX_BLOCK_R), is_prefill(batch)
    if layer.item_bytes == 4:  # float32 products take more registers and shared memory
        return ExpandTiles(64, min(block_r, 32))
    if batch.tile_tokens > 64:
        return ExpandTiles(64, block_r, 1 if block_r < rank_pad else 8 if prefill else 2)
    choose = expand_prefill if prefill else expand_decode
    return choose(rows, batch, layer, tma)


def _bounded(shrink: ShrinkTiles, batch: BatchShape, layer: LayerShape) -> ShrinkTiles:
    """Lower sizes until loads in flight fit in shared memory and sums fit in registers."""
    if layer.item_bytes == 4:
        shrink = ShrinkTiles(min(shrink.block_n, 64), 32, shrink.split_k, num_stages=2)
    if batch.tile_tokens > 64:
        shrink = replace(shrink, block_k=min(shrink.block_k, 64), num_warps=8)
    stage = shrink.block_k * (shrink.block_n + batch.tile_tokens) * layer.item_bytes
    return replace(shrink, num_stages=max(2, min(shrink.num_stages, SHARED_BYTES // stage)))
