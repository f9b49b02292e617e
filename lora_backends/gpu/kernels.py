# mypy: ignore-errors
"""Device functions of the engines written in Triton, right on a GPU and in the interpreter.

Shapes in comments name the axes T (tokens of a tile), R (rank) and C (columns of y).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def row_and_program(PROGRAMS: tl.constexpr):
    """Return the row of the grid and the program in it.

    With PROGRAMS, the grid has one axis, in which the programs of a row follow each other; it has
    two, (programs, rows), with 0.
    """
    if PROGRAMS > 0:
        row = tl.program_id(0) // PROGRAMS
        program = tl.program_id(0) % PROGRAMS
    else:
        row = tl.program_id(1)
        program = tl.program_id(0)
    return row, program


@triton.jit
def rounded(value, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return float32 values in `dtype`, rounded to nearest; the interpreter truncates bfloat16."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        value = tl.where(value == value, nearest.to(tl.float32, bitcast=True), value)
    return value.to(dtype)


@triton.jit
def multiply(left, right, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return ``left @ right`` in float32; the interpreter would multiply the bits of bfloat16."""
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision=PRECISION)


@triton.jit
def multiply_add(left, right, added, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return ``left @ right + added``, as `multiply`."""
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, added, input_precision=PRECISION)


@triton.jit
def expand_columns(
    h_rows,
    plane,
    b_slot,
    b_stride_c,
    y_rows,
    bias_row,
    first,
    end,
    rank,
    scaling,
    has_token,
    BLOCK_R: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN_C: tl.constexpr,
    EVEN_R: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EXACT_H: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """Add CHUNKS blocks of columns, all ranks in one product; loads run one block ahead."""
    r = tl.arange(0, BLOCK_R)  # [R]
    c = first + tl.arange(0, BLOCK_C)  # [C]
    b = load_b(b_slot, b_stride_c, c, r, end, rank, EVEN_C, EVEN_R)
    y = load_y(y_rows, c, has_token, end, EVEN_C)
    if PROGRAMMATIC:
        gdc_wait()  # before h alone: the shrink kernel let this one start after its own wait
        gdc_launch_dependents()
    h = load_h(h_rows, plane, r, rank, has_token, SPLIT_K, EVEN_R)  # [T, R]
    for chunk in tl.static_range(CHUNKS):
        delta = scaling * product(h, within(b, r, rank), EXACT_H, PRECISION, INTERPRETED)  # [T, C]
        c_now, y_now = c, y
        if chunk + 1 < CHUNKS:
            c = c + BLOCK_C
            b = load_b(b_slot, b_stride_c, c, r, end, rank, EVEN_C, EVEN_R)
            y = load_y(y_rows, c, has_token, end, EVEN_C)
        store_y(
            y_rows, c_now, y_now, delta, bias_row, has_token, end, HAS_BIAS, EVEN_C, INTERPRETED
        )


@triton.jit
def expand_boxes(
    b_boxes,
    b_row,
    h_rows,
    plane,
    y_rows,
    bias_row,
    first,
    end,
    rank,
    scaling,
    has_token,
    BLOCK_R: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_C: tl.constexpr,
    EVEN_R: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """Add CHUNKS blocks of columns as `expand_columns` does, with STAGES boxes of B in flight."""
    if PROGRAMMATIC:
        gdc_wait()
        gdc_launch_dependents()
    h = load_h(h_rows, plane, tl.arange(0, BLOCK_R), rank, has_token, SPLIT_K, EVEN_R)  # [T, R]
    if rank < BLOCK_R:
        _box_by_box(
            b_boxes, b_row, h, y_rows, bias_row, first, end, rank, scaling, has_token, BLOCK_R,
            BLOCK_C, CHUNKS, STAGES, EVEN_C, HAS_BIAS, True, PRECISION, INTERPRETED,
        )  # fmt: skip
    else:  # a full box is multiplied where it lies, in shared memory
        _box_by_box(
            b_boxes, b_row, h, y_rows, bias_row, first, end, rank, scaling, has_token, BLOCK_R,
            BLOCK_C, CHUNKS, STAGES, EVEN_C, HAS_BIAS, False, PRECISION, INTERPRETED,
        )  # fmt: skip


@triton.jit
def _box_by_box(
    b_boxes,
    b_row,
    h,
    y_rows,
    bias_row,
    first,
    end,
    rank,
    scaling,
    has_token,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_C: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Add the blocks; MASKED: B may hold anything beyond the rank."""
    for chunk in tl.range(0, CHUNKS, num_stages=STAGES):
        c_first = first + chunk * BLOCK_C
        c = c_first + tl.arange(0, BLOCK_C)  # [C]
        y = load_y(y_rows, c, has_token, end, EVEN_C)
        b = b_boxes.load([b_row + c_first, 0]).T  # [R, C], other slices' columns beyond the end
        if MASKED:
            b = within(b, tl.arange(0, BLOCK_R), rank)
        delta = scaling * product(h, b, False, PRECISION, INTERPRETED)  # [T, C]
        store_y(y_rows, c, y, delta, bias_row, has_token, end, HAS_BIAS, EVEN_C, INTERPRETED)


@triton.jit
def columns_of(program, STARTS: tl.constexpr, FIRST_PROGRAMS: tl.constexpr, STRIDE: tl.constexpr):
    """Return the slice of a program, its first column and the end of the slice."""
    s = program * 0
    first = program * STRIDE
    end = program * 0 + STARTS[1]
    for i in tl.static_range(1, len(FIRST_PROGRAMS)):
        within = program >= FIRST_PROGRAMS[i]
        s = tl.where(within, i, s)
        first = tl.where(within, STARTS[i] + (program - FIRST_PROGRAMS[i]) * STRIDE, first)
        end = tl.where(within, STARTS[i + 1], end)
    return s, first, end


@triton.jit
def in_groups(r, rank, EVEN_R: tl.constexpr):
    """Return r < rank, rounded up to groups of 8 where the rows of the stack consist of them.

    A mask that is constant over 8 neighbours keeps loads and stores 16 bytes wide.
    """
    if EVEN_R:
        return r // 8 * 8 < rank
    return r < rank


@triton.jit
def load_h(h_rows, plane, r, rank, has_token, SPLIT_K: tl.constexpr, EVEN_R: tl.constexpr):
    """Return h, the sum of its planes in order, zero beyond the rank."""
    mask = has_token[:, None] & in_groups(r, rank, EVEN_R)[None, :]
    h = tl.load(h_rows[:, None] + r[None, :], mask=mask, other=0.0)  # [T, R]
    for k in tl.static_range(1, SPLIT_K):
        h += tl.load(h_rows[:, None] + k * plane + r[None, :], mask=mask, other=0.0)
    return tl.where((r < rank)[None, :], h, 0.0)


@triton.jit
def load_b(b_slot, b_stride_c, c, r, end, rank, EVEN_C: tl.constexpr, EVEN_R: tl.constexpr):
    """Return a block of B, transposed; what stands beyond the rank may be anything."""
    mask = in_groups(r, rank, EVEN_R)[:, None]
    if not EVEN_C:
        mask = mask & (c < end)[None, :]
    offsets = c.to(tl.int64)[None, :] * b_stride_c + r[:, None]
    return tl.load(b_slot + offsets, mask=mask, other=0.0)  # [R, C]


@triton.jit
def within(b, r, rank):
    """Return b, zero beyond the rank."""
    return tl.where((r < rank)[:, None], b, 0.0)


@triton.jit
def load_y(y_rows, c, has_token, end, EVEN_C: tl.constexpr):
    """Return a block of y."""
    mask = has_token[:, None]
    if not EVEN_C:
        mask = mask & (c < end)[None, :]
    return tl.load(y_rows[:, None] + c[None, :], mask=mask, other=0.0)  # [T, C]


@triton.jit
def product(h, b, EXACT_H: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return h @ b with h in the dtype of b, or both in float32."""
    if EXACT_H:
        return multiply(h, b.to(tl.float32), PRECISION, INTERPRETED)
    return multiply(rounded(h, b.dtype, INTERPRETED), b, PRECISION, INTERPRETED)


@triton.jit
def store_y(
    y_rows,
    c,
    y,
    delta,
    bias_row,
    has_token,
    end,
    HAS_BIAS: tl.constexpr,
    EVEN_C: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Store y + delta + bias, each element rounded once."""
    mask = has_token[:, None]
    if not EVEN_C:
        mask = mask & (c < end)[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_row + c, mask=c < end, other=0.0)
        delta += bias.to(tl.float32)[None, :]
    total = y.to(tl.float32) + delta
    tl.store(y_rows[:, None] + c[None, :], rounded(total, y.dtype, INTERPRETED), mask=mask)
