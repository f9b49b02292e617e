# mypy: ignore-errors
"""Device functions that bring lines into L2 while an earlier kernel still runs; CUDA only."""

import triton
import triton.language as tl

from lora_backends.sgmv.kernels.indexing import rows_of_a
from lora_backends.sgmv.kernels.operands import StackedRows

LINES = tl.constexpr(4)
"""The most lines prefetched per row of A."""


@triton.jit
def prefetch_lines(pointers, wanted):
    """Bring the lines of 128 bytes at some addresses into L2."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred wanted;
        setp.ne.s32 wanted, $2, 0;
        @wanted prefetch.global.L2 [$1];
        mov.b32 $0, 0;
        }
        """,
        "=r,l,r",
        [pointers.to(tl.int64), wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_a(x, a, slot, program, S: tl.constexpr):
    """Bring into L2 the first 512 bytes that `shrink_tile` will read of each of its rows of A.

    It may run while an earlier kernel writes A and the ranks: L2 takes the new values.
    """
    n = program // S.SPLIT_K * S.BLOCK_N + tl.arange(0, S.BLOCK_N)  # [N]
    s, r = n // S.RANK_PAD, n % S.RANK_PAD  # [N]
    live = s < tl.where(slot >= 0, S.NUM_SLICES, 0)  # [N]
    block = StackedRows(slot=slot, s=s, r=r, live=live)
    prefetch_block(x, a, block, program % S.SPLIT_K, S)


@triton.jit
def prefetch_block(x, a, block, part, S: tl.constexpr):
    """Do so for one part of the inputs and a block of rows of A, `StackedRows`."""
    # a rank from before that write prefetches too many rows or too few
    ranks_at = a.ranks + block.slot * S.NUM_SLICES + block.s
    rank = tl.load(ranks_at, mask=block.live, other=0, cache_modifier=".cg")  # [N]
    a_rows = rows_of_a(a, block.slot, block.s, block.r, S)
    prefetch_rows(a_rows, block.r < rank, part, x.features, S)


@triton.jit
def prefetch_rows(at, wanted, part, features, S: tl.constexpr):
    """Prefetch the first LINES lines of one part of the rows of A at some addresses [N]."""
    LINE: tl.constexpr = 1024 // at.dtype.element_ty.primitive_bitwidth  # values of 128 bytes
    PART: tl.constexpr = S.STEPS * S.BLOCK_K
    of_part = tl.arange(0, LINES) * LINE
    k = part * PART + of_part
    # without a branch, because every program must wait before it may end
    wanted = wanted[:, None] & ((of_part < PART) & (k < features))[None, :]
    prefetch_lines(at[:, None] + k[None, :], wanted)


@triton.jit
def prefetch_x(x, tokens, program, S: tl.constexpr):
    """Bring into L2 the first PREFETCH lines of each row of x that `shrink_tile` will read.

    As in `prefetch_a`, an earlier kernel may still write x.
    """
    LINE: tl.constexpr = 1024 // x.ptr.dtype.element_ty.primitive_bitwidth  # values of 128 bytes
    PART: tl.constexpr = S.STEPS * S.BLOCK_K
    of_part = tl.arange(0, S.PREFETCH) * LINE
    k = program % S.SPLIT_K * PART + of_part
    # only programs of the first rows of A: the others read the same lines
    wanted = (tokens >= 0) & (program < S.SPLIT_K)  # [T]
    wanted = wanted[:, None] & ((of_part < PART) & (k < x.features))[None, :]
    prefetch_lines((x.ptr + tokens * x.stride_t)[:, None] + k[None, :], wanted)


@triton.jit
def prefetch_y(tile, S: tl.constexpr):
    """Bring into L2 the first PREFETCH lines of each row of y that `expand_tma` will read."""
    LINE: tl.constexpr = (
        1024 // tile.y.at.dtype.element_ty.primitive_bitwidth
    )  # values of 128 bytes
    c = tile.first + tl.arange(0, S.PREFETCH) * LINE
    at = tile.y.at[:, None] + c[None, :]
    prefetch_lines(at, tile.y.written[:, None] & (c < tile.end)[None, :])
