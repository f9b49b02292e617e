"""Bundles for device functions: pointers and strides that belong together, and constants.

An entry kernel bundles its arguments. It does so by keyword: Triton's cache on disk knows the
source of device functions, but not the order of the fields here.

Constants come from the host in one bundle: the fields of a bundle that a kernel makes would be no
constants in the functions that it calls. In Triton 3.6 a field is a plain value. So device code
first assigns it to a `tl.constexpr` where Triton takes nothing else: in the shape of a new block
and as the end of a `tl.static_range`. It passes no string on by itself.

Axes: T (rows of the tile), N (rows of A, all slices stacked), R (rank), C (columns of y).
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Input(NamedTuple):
    """x: [rows, in_features]."""

    ptr: Any
    stride_t: Any
    features: Any


class AStack(NamedTuple):
    """A of every slot and slice, the ranks, and of 8 bits the scales."""

    ptr: Any
    ranks: Any
    slices: Any  # the table of separate tensors
    scales: Any
    stride_l: Any
    stride_s: Any
    stride_r: Any
    scales_stride_l: Any
    scales_stride_s: Any
    scales_stride_r: Any


class StackedRows(NamedTuple):
    """A block of rows of A, all slices stacked, each [N]."""

    slot: Any  # also one for all
    s: Any  # slices
    r: Any  # ranks
    live: Any  # whether there is such a row


class ARows(NamedTuple):
    """The rows of A that a program multiplies, each [N]."""

    at: Any  # addresses
    scales: Any  # addresses of their scales
    scale: Any  # of a row whose inputs share one
    used: Any  # whether a row lies within the rank


class Intermediate(NamedTuple):
    """h: [planes, slices, rows, `h_width` or max_rank]; planes follow each other."""

    ptr: Any
    rows: Any
    stride_s: Any
    stride_t: Any


class BStack(NamedTuple):
    """B of every slot and column, and of 8 bits the scales."""

    ptr: Any
    slices: Any  # the table of separate tensors
    scales: Any
    stride_l: Any
    stride_c: Any
    scales_stride_l: Any
    scales_stride_c: Any


class Output(NamedTuple):
    """y: [rows, out_features], and the factors and terms of the product."""

    ptr: Any
    stride_t: Any
    scalings: Any
    token_scales: Any
    bias: Any
    bias_stride_l: Any
    scales: Any  # output_scales
    scales_stride_l: Any


class Rows(NamedTuple):
    """The rows of one tile, which an engine finds for a row of the grid."""

    slot: Any  # -1: the tile is empty
    tokens: Any  # rows of x and y [T], -1 where there is none
    h: Any  # rows of h [T]


class Columns(NamedTuple):
    """The columns of y that a program adds to, all of one slice."""

    s: Any  # the slice
    first: Any
    end: Any  # of the slice
    rank: Any  # of the slot in the slice


class RowsOfY(NamedTuple):
    """The rows of y that a program adds to."""

    at: Any  # addresses [T]
    read: Any  # whether a row is read [T]
    written: Any  # whether a row is written [T]


class Tile(NamedTuple):
    """The operands of one program of an expand, and the part of y that it adds to.

    For a pair alone, h and y have no axis T.
    """

    h: Any  # addresses of rows of h, of the slice [T]
    plane: Any  # from one plane of h to the next
    y: Any  # `RowsOfY`
    factor: Any  # of the product: one, or one for each row [T, 1]
    b: Any  # B of the slot and, unless columns count over all slices, of the slice
    b_stride: Any  # from column to column
    read: Any  # ranks of B that are read, which may be more than the rank
    rank: Any
    scales: Any  # of B, of the slot
    scales_stride: Any  # from group to group of columns
    first: Any  # the program's first column
    end: Any  # of the slice
    # dense layers
    group: Any = None  # of columns that share scales, the first of the slice
    start: Any = None  # the first column of the slice
    bias: Any = None  # of the slot
    output_scales: Any = None  # of the slot


class Block(NamedTuple):
    """The values that are loaded for one block of columns, besides y."""

    c: Any  # columns of y [C]
    b: Any  # [R, C]; row by row [C, R], as it lies in memory
    scales: Any  # of b: [C], or [R, C] where they change along the rank
    output_scales: Any  # [C]


class ShrinkSizes(NamedTuple):
    """Constants of a shrink."""

    STORAGE: int  # how A is stored, as `widened` numbers it
    GROUP_R: int  # rows of A that share a scale; 0: all
    GROUP_K: int  # inputs that share a scale; 0: all
    RANK_PAD: int
    BLOCK_N: int
    BLOCK_K: int
    WARPS_K: int
    SPLIT_K: int
    STEPS: int
    EVEN_K: bool
    PRECISION: str
    INTERPRETED: bool
    PROGRAMMATIC: bool
    # dense layers
    NUM_SLICES: int = 1
    SLICE_ALIGN: int = 0  # 0: slices lie at equal distances
    EVEN_R: int = 0  # ranks of a wide store of h
    EXITS: bool = False
    PREFETCH: int = 0  # lines of 128 bytes of each row of x


class GatherSizes(NamedTuple):
    """Constants of a gather; names as in `ShrinkSizes`."""

    NUM_SLICES: int
    SLICE_ALIGN: int
    STORAGE: int
    GROUP_R: int
    GROUP_K: int
    BLOCK_R: int


class ExpandSizes(NamedTuple):
    """Constants of an expand."""

    STARTS: tuple[int, ...]  # first columns of the slices, then out_features
    FIRST_PROGRAMS: tuple[int, ...]
    STORAGE: int  # how B is stored, as `widened` numbers it
    GROUP_C: int  # columns that share a scale; 0: all of a slice
    GROUP_R: int  # ranks that share a scale; 0: all
    FIRST_GROUPS: tuple[int, ...]  # the first group of columns of every slice
    WIDE: int  # dtype of the product with an 8-bit B, as `wide_dtype` numbers it
    SPLIT_K: int  # planes of h
    PLANES: int  # the same, rounded up to a power of two
    RANK_PAD: int
    ROW_RANKS: int  # ranks per row of B in kernels without a matrix product
    BLOCK_C: int
    BLOCK_R: int
    CHUNKS: int
    STAGES: int
    WARPS: int  # of a program
    EVEN_C: bool
    EVEN_R: int  # ranks of a wide load of B
    EVEN_H: int  # ranks of a wide load of h
    PRECISION: str
    INTERPRETED: bool
    PROGRAMMATIC: bool
    # dense layers
    NUM_SLICES: int = 1
    SLICE_ALIGN: int = 0  # 0: B is one tensor
    HAS_BIAS: bool = False
    HAS_OUTPUT_SCALES: bool = False
    HAS_TOKEN_SCALES: bool = False
    EXACT_H: bool = False
    LATE_Y: bool = False  # an earlier kernel than the shrink may still write y
    EARLY_B: bool = False  # widen the first block of an 8-bit B before the wait for h
    PREFETCH: int = 0  # lines of 128 bytes of each row of y
    # experts
    FRESH: bool = False  # y holds nothing yet
    SCALE_STARTS: tuple[int, ...] = ()  # first columns of the slices, for scales
    SPREAD: bool = False  # column c is row c // slices of slice c % slices, for scales


class SiteSizes(NamedTuple):
    """Constants by which a kernel of experts finds its pairs and their matrices."""

    ROWS: int  # pairs per program
    PARTS: int  # programs per tile of the routing
    TOP_K: int
    NUM_A: int
    MAX_RANK: int
    EAGER: bool  # read A or B up to MAX_RANK, whatever the rank
    BY_TOKEN: bool  # h has a row for every token, not for every place
    INTERLEAVED: bool  # column c belongs to slice c % NUM_A
    WEIGHTED: bool
    SETTLED: bool = False  # whether a shrink reads the routing before it waits


class SumSizes(NamedTuple):
    """Constants of the sum over the pairs of a token."""

    STARTS: tuple[int, ...]
    TOP_K: int
    NUM_A: int
    BLOCK_C: int
    INTERLEAVED: bool
    INTERPRETED: bool
    PROGRAMMATIC: bool


class RoutingSizes(NamedTuple):
    """Constants of the kernels that sort pairs by key."""

    NUM_EXPERTS: int
    OWN: int  # pairs of a program
    PROGRAMMATIC: bool
    TOP_K: int = 1
    HAS_MAP: bool = False
    TILE: int = 0
    SINGLES: bool = False
    BLOCK_Q: int = 0  # pairs to compare with
    ONE_PROGRAM: bool = False  # whether the grid has a single program
    BLOCK_K: int = 0  # keys summed at once
    HALF: int = 0  # bits of a count


class BaseSizes(NamedTuple):
    """Constants of the product with a base layer's weight."""

    BLOCK_T: int
    BLOCK_C: int
    BLOCK_K: int
    STAGES: int
    HAS_BIAS: bool
    PRECISION: str
    INTERPRETED: bool
    PROGRAMMATIC: bool


class WideSizes(NamedTuple):
    """Constants of the operands of a widened product."""

    EACH: int  # columns of an adapter and slice
    NUM_SLICES: int
    SLICE_ALIGN: int  # 0: slices lie at equal distances
    BLOCK_N: int
    BLOCK_K: int
    INTERPRETED: bool
    # of the left operand
    PLACES: int = 0  # adapters, rounded up to a power of two
    BLOCK_T: int = 0
    EVEN_K: bool = False
    PRECISION: str = ""
    # of the right operand
    BLOCK_C: int = 0
    STARTS: tuple[int, ...] = ()  # first columns of slices
