# mypy: ignore-errors
"""Device functions that find the work of a program, and the addresses of its operands.

Offsets that a stride multiplies are int64: slot times stride exceeds int32 in large stacks.
"""

import triton
import triton.language as tl

from lora_backends.sgmv.kernels.operands import Rows


@triton.jit
def row_and_program(PROGRAMS: tl.constexpr):
    """Return this program's row of the grid and its index within the row.

    With PROGRAMS > 0 the grid has one axis and the programs of a row follow each other; with 0 it
    has two axes, (programs, rows).
    """
    if PROGRAMS > 0:
        row = tl.program_id(0) // PROGRAMS
        program = tl.program_id(0) % PROGRAMS
    else:
        row = tl.program_id(1)
        program = tl.program_id(0)
    return row.to(tl.int64), program


@triton.jit
def find_rows(row, slot_table_ptr, token_table_ptr, group_starts_ptr, ROW: tl.constexpr):
    """Return the slot of a row of the grid, its tokens [T] and their rows of h [T].

    T names the axis over the places of a group. group_starts is read only where a group may have
    several segments.
    """
    if ROW.GROUP == 1:  # group g is segment g
        places = row * ROW.SEGMENT + tl.arange(0, ROW.SEGMENT)
        slot = tl.load(slot_table_ptr + row)
        tokens = tl.load(token_table_ptr + places)
    else:
        first = tl.load(group_starts_ptr + row)
        end = tl.load(group_starts_ptr + row + 1)
        last = end.to(tl.int64) * ROW.SEGMENT
        places = first.to(tl.int64) * ROW.SEGMENT + tl.arange(0, ROW.SEGMENT * ROW.GROUP)
        slot = tl.load(slot_table_ptr + first, mask=first < end, other=-1)
        tokens = tl.load(token_table_ptr + places, mask=places < last, other=-1)
    slot, tokens = slot.to(tl.int64), tokens.to(tl.int64)
    h = tokens if ROW.BY_TOKEN else places
    if ROW.WIDTH > 1:
        tokens = tl.where(tokens >= 0, tokens // ROW.WIDTH, -1)
    return Rows(slot=slot, tokens=tokens, h=h)


@triton.jit
def columns_of(program, S: tl.constexpr):
    """Return a program's slice, its first column of y, and the end of the slice."""
    STRIDE: tl.constexpr = S.BLOCK_C * S.CHUNKS
    SLICES: tl.constexpr = len(S.FIRST_PROGRAMS)
    s = program * 0
    first = program * STRIDE
    end = program * 0 + S.STARTS[1]
    for i in tl.static_range(1, SLICES):
        beyond = program >= S.FIRST_PROGRAMS[i]
        s = tl.where(beyond, i, s)
        first = tl.where(beyond, S.STARTS[i] + (program - S.FIRST_PROGRAMS[i]) * STRIDE, first)
        end = tl.where(beyond, S.STARTS[i + 1], end)
    return s, first, end


@triton.jit
def entry(values, t, i):
    """Return element i of a block [T] of integers."""
    return tl.sum(tl.where(t == i, values, 0))


@triton.jit
def in_elements(stride, ptr, EVEN_R: tl.constexpr):
    """Return a stride of B in elements; the host multiplied it by `slice_tables.stride_unit`."""
    if EVEN_R > 0:
        return stride // (ptr.dtype.element_ty.primitive_bitwidth // 8)
    else:
        return stride


@triton.jit
def slice_entry(slices_ptr, s, mask, ALIGN: tl.constexpr):
    """Return the entry of slice s in a table of separate tensors, in elements.

    It has the distance of the slice's tensor from the base, and the strides of slots and rows.
    """
    # in units of ALIGN, so that loads stay wide
    at = slices_ptr + s * 3
    distance = tl.load(at, mask=mask, other=0)
    slot_stride = tl.load(at + 1, mask=mask, other=0)
    row_stride = tl.load(at + 2, mask=mask, other=0)
    # a product, since Triton 3.9 forgets `tl.multiple_of` of a scalar and loads two bytes at a time
    return distance * ALIGN, slot_stride * ALIGN, row_stride * ALIGN


@triton.jit
def rows_of_a(a, slot, s, r, S: tl.constexpr):
    """Return the addresses of rows r of a slot's A in slices s, [N] or one slice."""
    if S.SLICE_ALIGN > 0:
        distance, slot_stride, row_stride = slice_entry(
            a.slices, s, s < S.NUM_SLICES, S.SLICE_ALIGN
        )
        at = a.ptr + distance + slot * slot_stride + r.to(tl.int64) * row_stride
    else:
        at = a.ptr + slot * a.stride_l + s.to(tl.int64) * a.stride_s + r.to(tl.int64) * a.stride_r
    return at


@triton.jit
def scales_of_a(a, slot, s, r, S: tl.constexpr):
    """Return the addresses of the scales of rows r of a slot's A in slices s."""
    at = a.scales + slot * a.scales_stride_l + s.to(tl.int64) * a.scales_stride_s
    return at + group_of(r, S.GROUP_R) * a.scales_stride_r


@triton.jit
def in_groups(r, rank, GROUP: tl.constexpr):
    """Return r < rank, rounded up to groups of 8 or 16; a GROUP of 0 rounds nothing."""
    if GROUP > 0:
        # constant over 8 neighbours, so that loads and stores stay 16 bytes wide; bytes take groups
        # of 16
        return r // GROUP * GROUP < rank
    else:
        return r < rank


@triton.jit
def group_of(index, SIZE: tl.constexpr):
    """Return the group that an index belongs to, int64; a SIZE of 0 makes one group of all."""
    if SIZE == 0:
        return index.to(tl.int64) * 0
    else:
        return index.to(tl.int64) // SIZE
