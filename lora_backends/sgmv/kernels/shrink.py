# mypy: ignore-errors
"""The shrink of one tile: h = x @ A.T, and for one-hot rows the gather of columns of A.

Axes: T (rows of the tile), N (rows of A, all slices stacked), K (inputs), R (rank), W (groups of
warps that share out a step of K).
"""

import triton
import triton.language as tl

from lora_backends.sgmv.kernels.indexing import (
    entry,
    group_of,
    in_groups,
    rows_of_a,
    scales_of_a,
)
from lora_backends.sgmv.kernels.operands import ARows, StackedRows
from lora_backends.sgmv.kernels.products import multiply
from lora_backends.sgmv.kernels.widening import widened


@triton.jit
def shrink_tile(x, a, h, rows, program, S: tl.constexpr):
    """h[k, s, rows.h, :r] = x[tokens, part k] @ a[slot, s, :r, part k].T for a block of rows of A.

    Each part k of the inputs writes its own plane of partial sums.
    """
    part = program % S.SPLIT_K
    n = program // S.SPLIT_K * S.BLOCK_N + tl.arange(0, S.BLOCK_N)  # [N]
    s = n // S.RANK_PAD  # [N]
    plane = S.NUM_SLICES * h.rows.to(tl.int64) * h.stride_t
    h_columns = h.ptr + part * plane + s.to(tl.int64) * h.stride_s + n % S.RANK_PAD  # [N]
    block = StackedRows(slot=rows.slot, s=s, r=n % S.RANK_PAD, live=s < S.NUM_SLICES)
    shrink_block(x, a, block, h_columns, h.stride_t, rows, part, S)


@triton.jit
def shrink_block(x, a, block, h_columns, h_stride_t, rows, part, S: tl.constexpr):
    """Write the sums of one part of the inputs for a block of rows of A, `StackedRows`.

    `h_columns` are the addresses of their columns of h in row 0 [N].
    """
    slot, s, r = block.slot, block.s, block.r
    ranks_at = a.ranks + slot * S.NUM_SLICES + s
    rank = tl.load(ranks_at, mask=block.live, other=0, cache_modifier=".cg")  # [N]
    if S.EXITS:
        # to know that, every program waits for its ranks; without EXITS it runs on, and loads no A
        if tl.max(rank - r) <= 0:
            return
    has_token = rows.tokens >= 0  # [T]
    x_rows = x.ptr + rows.tokens * x.stride_t  # [T]
    at, used = rows_of_a(a, slot, s, r, S), r < rank
    scales = scales_of_a(a, slot, s, r, S)
    a_rows = ARows(at=at, scales=scales, scale=scale_of_rows(scales, used, S), used=used)
    # zeros are written beyond the rank, up to the end of its group
    if S.WARPS_K == 0:  # token by token, without a matrix product
        t = tl.arange(0, rows.tokens.shape[0])  # [T]
        for i in tl.range(0, tl.max(tl.where(has_token, t + 1, 0)), num_stages=1):
            token, h_row = entry(rows.tokens, t, i), entry(rows.h, t, i)
            x_row = x.ptr + tl.maximum(token, 0) * x.stride_t
            sums = row_sums(x_row, a_rows, part, x.features, S)  # [1, N]
            written = in_groups(r, tl.where(token >= 0, rank, 0), S.EVEN_R)
            tl.store(h_columns[None, :] + h_row * h_stride_t, sums, mask=written[None, :])
    else:
        sums = partial_sums(x_rows, has_token, a_rows, part, x.features, S)  # [T, N]
        mask = has_token[:, None] & in_groups(r, rank, S.EVEN_R)[None, :]
        tl.store(h_columns[None, :] + (rows.h * h_stride_t)[:, None], sums, mask=mask)


@triton.jit
def scale_of_rows(scales, used, S: tl.constexpr):
    """Return the scales of rows of A that have one each [N], by which their sums are multiplied."""
    if S.STORAGE > 0 and S.GROUP_K == 0:
        return tl.load(scales, mask=used, other=0.0)
    else:
        return 0.0


@triton.jit
def row_sums(x_row, a, part, features, S: tl.constexpr):
    """Return x @ A.T of one row over one part of the inputs, [1, N], without a matrix product."""
    N: tl.constexpr = a.at.shape[0]
    STEPS: tl.constexpr = S.STEPS
    sums = tl.zeros((N,), dtype=tl.float32)
    for step in tl.static_range(STEPS):
        done = step * S.BLOCK_K
        k = part * (STEPS * S.BLOCK_K) + done + tl.arange(0, S.BLOCK_K)[None, :]  # [1, K]
        # A goes from memory straight to the registers that multiply it, all of a program's at once.
        # It is loaded after x: Triton lays out the product as its last load.
        if S.EVEN_K:
            x = tl.load(x_row + k)
            values = tl.load(a.at[:, None] + k, mask=a.used[:, None], other=0.0)  # [N, K]
        else:
            inside = k < features
            x = tl.load(x_row + k, mask=inside, other=0.0)
            values = tl.load(a.at[:, None] + k, mask=a.used[:, None] & inside, other=0.0)
        values = widened(values, tl.float32, S.STORAGE)
        if S.STORAGE > 0 and S.GROUP_K > 0:
            mask = a.used[:, None] & (k < features)
            values *= tl.load(a.scales[:, None] + k // S.GROUP_K, mask=mask, other=0.0)
        sums += tl.sum(values * x.to(tl.float32), axis=1)
    sums = sums[None, :]
    if S.STORAGE > 0 and S.GROUP_K == 0:
        sums *= a.scale[None, :]
    return sums


@triton.jit
def partial_sums(x_rows, has_x, a, part, features, S: tl.constexpr):
    """Return x @ A.T over one part of the inputs, [T, N]; each of WARPS_K groups sums its share."""
    T: tl.constexpr = x_rows.shape[0]
    N: tl.constexpr = a.at.shape[0]
    W: tl.constexpr = S.WARPS_K
    k_first = part * (S.STEPS * S.BLOCK_K)
    if W == 1:
        k = k_first + tl.arange(0, S.BLOCK_K)  # [K]
        x_k, a_k = k[None, :], k[:, None]
        x_at, a_at = x_rows[:, None] + x_k, a.at[None, :] + a_k  # [T, K], [K, N]
        x_in, a_in = has_x[:, None], a.used[None, :]
        scales_at = a.scales[None, :]
        acc = tl.zeros((T, N), dtype=tl.float32)
    else:
        WIDTH: tl.constexpr = S.BLOCK_K // W
        k = k_first + tl.arange(0, W)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        x_k, a_k = k[:, None, :], k[:, :, None]
        x_at = x_rows[None, :, None] + x_k  # [W, T, K]
        a_at = a.at[None, None, :] + a_k  # [W, K, N]
        x_in, a_in = has_x[None, :, None], a.used[None, None, :]
        scales_at = a.scales[None, None, :]
        acc = tl.zeros((W, T, N), dtype=tl.float32)
    for step in range(S.STEPS):
        done = step * S.BLOCK_K
        if S.EVEN_K:
            x = tl.load(x_at + done, mask=x_in, other=0.0)
            values = tl.load(a_at + done, mask=a_in, other=0.0)
        else:
            x = tl.load(x_at + done, mask=x_in & (x_k < features - done), other=0.0)
            values = tl.load(a_at + done, mask=a_in & (a_k < features - done), other=0.0)
        if S.STORAGE > 0:
            if S.GROUP_K > 0:  # scales change along the sum: products are float32
                mask = a_in & (a_k < features - done)
                scale = tl.load(scales_at + (a_k + done) // S.GROUP_K, mask=mask, other=0.0)
                values = widened(values, tl.float32, S.STORAGE) * scale
                x = x.to(tl.float32)
            else:
                values = widened(values, x.dtype, S.STORAGE)
        acc = multiply(x, values, acc, S)
    if W > 1:
        acc = sum_of_groups(acc)
    if S.STORAGE > 0 and S.GROUP_K == 0:
        acc *= a.scale[None, :]
    return acc


@triton.jit
def sum_of_groups(parts):
    """Return the sum of parts [W, T, N] over W, pair by pair."""
    # `tl.sum` would send every value through shared memory by itself, `tl.split` sends four
    sums = tl.permute(parts, (1, 2, 0))
    if parts.shape[0] == 8:
        low, high = tl.split(tl.reshape(sums, (parts.shape[1], parts.shape[2], 4, 2)))
        sums = low + high
    if parts.shape[0] >= 4:
        low, high = tl.split(tl.reshape(sums, (parts.shape[1], parts.shape[2], 2, 2)))
        sums = low + high
    low, high = tl.split(sums)
    return low + high


@triton.jit
def gather_tile(token_ids_ptr, a, h, rows, program, S: tl.constexpr):
    """h[s, rows.h, :r] = a[slot, s, :r, token_ids[tokens]]: the shrink of one-hot rows."""
    s = (program % S.NUM_SLICES).to(tl.int64)
    r = program // S.NUM_SLICES * S.BLOCK_R + tl.arange(0, S.BLOCK_R)  # [R]
    used = r < tl.load(a.ranks + rows.slot * S.NUM_SLICES + s)  # [R]
    has_token = rows.tokens >= 0  # [T]
    ids = tl.load(token_ids_ptr + rows.tokens, mask=has_token, other=0).to(tl.int64)  # [T]
    a_columns = rows_of_a(a, rows.slot, s, r, S)  # [R]
    mask = has_token[:, None] & used[None, :]
    values = tl.load(a_columns[None, :] + ids[:, None], mask=mask, other=0.0)  # [T, R]
    values = widened(values, tl.float32, S.STORAGE)
    if S.STORAGE > 0:
        scales = scales_of_a(a, rows.slot, s, r, S)  # [R]
        scales_at = scales[None, :] + group_of(ids, S.GROUP_K)[:, None]
        values *= tl.load(scales_at, mask=mask, other=0.0)
    h_rows = h.ptr + s * h.stride_s + rows.h * h.stride_t  # [T]
    tl.store(h_rows[:, None] + r[None, :], values, mask=mask)
