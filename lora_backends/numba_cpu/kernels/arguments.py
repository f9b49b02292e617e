"""The arguments of kernels and routines, as records; addresses and strides are in bytes."""

from __future__ import annotations

from typing import NamedTuple

from lora_backends.numba_cpu.layer import Slice


class KernelCall(NamedTuple):
    """The arguments of a kernel."""

    first: int  # SHRINK, GATHER or 0
    routines: int  # address of the fields of a `Routines`
    expand: int  # whether that is followed by the second half
    thread_num: int  # addresses of OpenMP's functions
    num_threads: int
    barrier: int
    layer: int  # address of the fields of a `LayerPointers`
    x_row: int
    h_row: int
    y_row: int
    x_dtype: int  # CODE_FLOAT32, ...; kernels of 8-bit stacks ask for it
    y_dtype: int
    a_count: int  # from here on the fields of a `Work`
    a_segments: int
    a_span: int
    b_count: int
    b_segments: int
    x_order: int
    to_order: int
    h_order: int
    y_order: int
    scales: int
    scales_row: int
    scales_order: int
    whole: int  # whether a thread does both halves of its share of the segments
    threads: int  # 1: OpenMP is not asked
    x: int
    h: int
    h_slice: int
    y: int


class Segment(NamedTuple):
    """A range of positions whose rows read the same weights."""

    key: int  # slot + (expert << EXPERT_BITS)
    start: int
    stop: int


SEGMENT_BYTES, SLICE_BYTES = 8 * len(Segment._fields), 8 * len(Slice._fields)


class RowPointers(NamedTuple):
    """Rows of x, h or y, or the scales of rows, one per position."""

    start: int  # address of row 0
    step: int  # bytes from row to row
    order: int  # address of the row of each position, [positions] int64


class ColumnPointers(NamedTuple):
    """Columns of y, with their rows of b, bias and output_scales."""

    b: int  # address of the first row
    b_row: int
    bias_dtype: int
    bias: int  # address of the first element; 0: none
    bias_size: int  # bytes of an element
    output_scale: int  # address of the first; 0: none
    column: int  # the first


class SumFactors(NamedTuple):
    """The rank of a slot's slice, and the factors of its sums."""

    rank: int
    scaling: int  # address of the slot's
    scales: RowPointers  # of the rows


class Shrink(NamedTuple):
    """Columns of ``h = x @ a.T`` for a segment."""

    a: int  # address of row 0
    a_row: int
    n: int  # inputs
    first: int  # columns of h from here
    last: int  # to here, not included
    goes_on: int  # whether the rows that follow in memory are likely to be next
    start: int  # positions
    stop: int
    x: RowPointers
    h: RowPointers


class Gather(NamedTuple):
    """Columns of a as rows of h, for a segment of token ids."""

    a: int
    a_row: int
    rank: int
    start: int
    stop: int
    ids: RowPointers
    h: RowPointers


class Expand(NamedTuple):
    """Columns of y to which ``scale * scaling * h @ b.T + bias`` is added, for a segment."""

    columns: ColumnPointers
    groups: int  # of columns, whose size depends on the routine
    factors: SumFactors
    start: int
    stop: int
    h: RowPointers
    y: RowPointers


class PackedBlock(NamedTuple):
    """A block of A, widened, and its sums with all tokens of a segment."""

    packed: int  # [vectors, LONG_RANKS, 16] float32
    sums: int  # [groups of tokens, TOKENS, LONG_RANKS, 16] float32
    width: int  # inputs of this chunk
    next_a: int  # the rows of a to be fetched meanwhile
    next_rows: int
    next_row: int
    next_lines: int  # of each
    fresh: int  # whether x is not in a cache yet
    begun: int  # whether sums of earlier chunks wait
    ends: int  # whether this is the last chunk, which writes h
    ranks: int  # columns of h
    tokens: int
    x: RowPointers
    h: RowPointers


class Panel(NamedTuple):
    """Up to `LONG_PANEL` columns of ``h = x @ a.T`` for a long segment."""

    add_block: int  # address of the routine that multiplies
    scratch: int
    a: int
    a_row: int
    n: int
    ranks: int  # columns of h
    tokens: int
    x: RowPointers
    h: RowPointers


class Stored(NamedTuple):
    """Columns of y, and the rows of b that are stored as float32."""

    columns: int  # [rank, 16 or 64 rows of b] float32
    paired: int  # of the columns have an even and an odd sum by turns
    width: int  # bytes that were read of each row of b
    expand: Expand


class ExpandLong(NamedTuple):
    """As `Expand`, in groups of 64 columns."""

    add_stored: int  # address of the routine that adds
    scratch: int
    expand: Expand


class Scales(NamedTuple):
    """The scales of a matrix of 8 bits."""

    start: int  # address of the first
    row: int  # bytes from one group of rows to the next
    column: int  # bytes from one group of columns to the next
    rows: int  # rows that share a scale; 0: all
    columns: int  # columns that share one; 0: all


class Copy(NamedTuple):
    """A copy of rows of x as float32."""

    x_dtype: int
    tokens: int
    width: int
    to: int  # address of the order of the copied rows, which lie after it
    x: RowPointers


class EightBitGather(NamedTuple):
    """As `Gather`, from a matrix of 8 bits."""

    stored: int  # INT8, E4M3 or E5M2
    scales: Scales
    gather: Gather


class EightBitPanel(NamedTuple):
    """As `Panel`, from a matrix of 8 bits."""

    stored: int
    scales: Scales
    first: int  # row of a that `panel` begins with
    x_dtype: int
    panel: Panel


class EightBitExpand(NamedTuple):
    """As `Expand`, from a matrix of 8 bits; rows of b are those of the slice."""

    add_many: int  # addresses of routines: 64 columns
    add_one: int  # 16 columns
    expand_column: int
    stored: int
    scales: Scales
    y_dtype: int
    scratch: int
    row: int  # from this row of b
    end: int  # to this, not included
    expand: Expand
