"""Tile sizes of the backward's kernels.

Those of sums over a slot's tokens follow from the layer alone, so that a gradient has the same bits
in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from lora_backends.sgmv.tiles.gpu import Gpu
from lora_backends.sgmv.tiles.sizes import MIN_DOT, LayerShape, padded_rank, power_of_two

INVARIANT_ROWS = 32
"""A batch-invariant backend cuts the columns of grad as for this many tiles, always."""

MOST_PARTS = 8
"""The most planes of dh."""

CLEARED_TOKENS = 64
"""Tokens whose rows of dx a program clears if they have no adapter."""

MOST_LOADED = 144 << 10
"""Bytes of shared memory for loads in flight."""

SUM_COLUMNS = 128
"""Columns of a program that sums rows."""


@dataclass(frozen=True)
class DhTiles:
    """Sizes of dh = grad @ B."""

    block_r: int  # ranks per program; a power of two >= 16
    block_c: int  # columns of grad per loop step; a power of two >= 16
    parts: int  # of the columns; each part writes its own plane of dh
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class DxTiles:
    """Sizes of dx = dh @ A."""

    block_c: int  # columns of dx per step; a power of two >= 16
    block_r: int  # ranks per product; a power of two >= 16
    num_warps: int
    blocks: int  # steps of a program


@dataclass(frozen=True)
class OuterTiles:
    """Sizes of a sum of outer products."""

    block_t: int  # tokens per loop step; a power of two >= 16
    block_n: int  # rows of h per program, all slices stacked; a power of two >= 16
    block_c: int  # columns per program; a power of two >= 16
    h_left: bool  # whether h is the left operand
    piece: int  # tokens of a piece; a power of two
    num_stages: int
    num_warps: int


def dh_tiles(
    layer: LayerShape, tile: int, rows: int, width: int, grad_bytes: int, casts: bool, gpu: Gpu
) -> DhTiles:
    """Return the sizes of dh for a grid of `rows` programs, each of `tile` rows of grad.

    `width` is that of the widest slice; `casts`: values of grad change their dtype before the
    product.
    """
    block_r = min(256, padded_rank(layer.max_rank))
    # where values are widened: one stage, because ptxas before 13.3 miscompiles a pipelined wgmma
    # whose left operand is in registers; and shorter steps, because longer ones spill registers
    block_c, stages = (128, 3) if not casts else (64 if block_r > 64 else 128, 1)
    least = 2 if stages > 1 else 1

    def taken() -> int:
        return stages * block_c * (tile * grad_bytes + block_r * layer.item_bytes)

    while taken() > min(gpu.shared_bytes, MOST_LOADED) and (stages > least or block_c > MIN_DOT):
        if stages > least:
            stages -= 1
        else:
            block_c //= 2
    programs = rows * layer.num_slices * -(-padded_rank(layer.max_rank) // block_r)
    wanted = gpu.multiprocessors // programs
    steps = -(-width // block_c)
    parts = max(1, min(MOST_PARTS, wanted, steps // 4))
    warps = 8 if tile * block_r > 4096 else 4
    return DhTiles(block_r, block_c, parts, warps, stages)


def dx_tiles(layer: LayerShape) -> DxTiles:
    """Return the sizes of dx."""
    wide, rank_pad = layer.item_bytes > 2, padded_rank(layer.max_rank)
    # several slices read more of dh and A than of dx: programs of four steps read dh once
    blocks = 4 if layer.num_slices > 1 else 1
    warps = 8 if layer.num_slices == 1 and rank_pad == MIN_DOT else 4
    return DxTiles(64 if wide else 128, min(32 if wide else 64, rank_pad), warps, blocks)


def outer_tiles(
    layer: LayerShape, stacked: int, columns: int, right_bytes: int, casts: bool, gpu: Gpu
) -> OuterTiles:
    """Return the sizes of dlora_a or dlora_b.

    `stacked` are the rows of h, all slices that a program sums stacked; `casts`: values of the
    right side, which has `columns`, change their dtype before the product.
    """
    wide = layer.item_bytes > 2
    # with more ranks only one program fits a multiprocessor, which then waits for its loads
    block_n = max(MIN_DOT, min(64, power_of_two(stacked)))
    block_c = 64 if wide else 128
    h_left = block_n < 64 and (casts or wide)
    # one stage: as in `dh_tiles`, where the right side is the left operand
    in_registers = not h_left and (casts or wide)
    block_t, stages, warps = (32, 1, 4) if in_registers else (128, 3, 4)
    if block_n == 64 and not (casts or wide):
        block_t = 64
        # programs twice as wide read h half as often. Above 128 rows of h, three or more programs
        # read the same columns, and share them in the L2 cache only while all run at once.
        if stacked <= 128:
            block_c, warps = 256, 8
    token_bytes = 4 * block_n + right_bytes * block_c
    while stages * block_t * token_bytes > min(gpu.shared_bytes, 200 << 10):
        if block_t > 32:
            block_t //= 2
        else:
            stages -= 1
    # pieces as long as for 128 columns, since wider blocks write as many partial sums per piece
    piece = piece_tokens(stacked, -(-columns // min(block_c, 128)))
    return OuterTiles(block_t, block_n, block_c, h_left, piece, stages, warps)


def piece_tokens(values: int, programs: int) -> int:
    """Return how many tokens of a slot a program sums.

    Fewer would let one long slot fill more of a GPU. But each piece but a lone one writes and reads
    float32 sums of `values` rows, which should cost little beside its tokens.

    >>> piece_tokens(16, 32), piece_tokens(192, 32), piece_tokens(16, 112)
    (2048, 8192, 8192)
    """
    return max(2048, power_of_two(32 * values), min(8192, power_of_two(64 * programs)))
