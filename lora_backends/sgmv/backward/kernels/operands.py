"""Constants of the backward's kernels, and the bundles that device functions pass.

Axes: T (tokens), N (ranks of h, all slices stacked), R (rank), C (columns of x or of y).
"""

from __future__ import annotations

from typing import Any, NamedTuple


class DhSizes(NamedTuple):
    """Constants of the shrink over B; names as in `ExpandSizes`."""

    STARTS: tuple[int, ...]  # first columns of the slices, then out_features
    FIRST_GROUPS: tuple[int, ...]  # of columns that share scales, the first of every slice
    NUM_SLICES: int
    MAX_RANK: int
    SLICE_ALIGN: int
    STORAGE: int
    GROUP_C: int
    GROUP_R: int
    WIDE: int
    BLOCK_C: int
    BLOCK_R: int
    RANK_BLOCKS: int  # programs that share out the ranks
    PARTS: int  # programs that share out the columns; each writes its own plane of dh
    EVEN_C: int  # columns of a wide load of grad; 0: any; BLOCK_C: no block ends early
    EVEN_R: int  # ranks of a wide load of B
    HAS_TOKEN_SCALES: bool
    PRECISION: str
    INTERPRETED: bool


class DxSizes(NamedTuple):
    """Constants of the expand over A; names as in `ShrinkSizes`."""

    NUM_SLICES: int
    SLICE_ALIGN: int
    STORAGE: int
    GROUP_R: int
    GROUP_K: int
    WIDE: int
    RANK_PAD: int
    BLOCK_R: int
    BLOCK_C: int
    BLOCKS: int  # of columns per program
    BLOCK_T: int  # tokens whose rows a program clears if they have no adapter
    EVEN_C: int  # as in `DhSizes`
    EVEN_H: int  # ranks of a wide load of dh
    ADDS: bool
    PRECISION: str
    INTERPRETED: bool


class PieceSizes(NamedTuple):
    """Constants by which a program finds its piece of a slot's tokens."""

    SIZE: int  # tokens of a run
    RUNS: int  # runs of a piece; 0: no slot has more than one piece
    ALL: bool  # whether all slots are wanted
    BY_PLACE: bool  # whether h has a row for every place, not for every token


class OuterSizes(NamedTuple):
    """Constants of a sum of outer products."""

    STARTS: tuple[int, ...]  # first columns of the parts that have slices of their own
    FIRST_PROGRAMS: tuple[int, ...]
    NUM_SLICES: int
    MAX_RANK: int
    RANK_PAD: int
    BLOCK_T: int
    BLOCK_N: int
    BLOCK_C: int
    N_BLOCKS: int  # programs that share out N
    H_LEFT: bool  # whether h is the left operand: [N, T] @ [T, C]
    BY_COLUMN: bool  # whether a column of the result follows the last, as in lora_b
    SCALED: bool  # whether scalings multiply the result
    HAS_TOKEN_SCALES: bool
    EVEN_C: int  # as in `DhSizes`
    EVEN_H: int
    WIDE: int  # dtype of the products
    PRECISION: str
    INTERPRETED: bool
    CHUNKS: int = 1


class RowSumSizes(NamedTuple):
    """Constants of the sum of rows."""

    COLUMNS: int
    BLOCK_T: int
    BLOCK_C: int
    INTERPRETED: bool


class PlaneSizes(NamedTuple):
    """Constants of the sum of planes, or of pieces."""

    BLOCK: int
    INTERPRETED: bool
    PLANES: int = 0
    WIDTH: int = 0  # values of a row
    CLEARS: bool = False  # whether rows without an adapter become zero
    PROGRAMMATIC: bool = False  # whether it may start before the kernel in front has ended


class EmbeddingSizes(NamedTuple):
    """Constants of the sum of the tokens of each id."""

    MAX_RANK: int
    BLOCK_R: int
    N_BLOCKS: int  # programs that share out the ranks
    BLOCK_T: int
    INTERPRETED: bool


class SlotPiece(NamedTuple):
    """Neighbouring runs of one slot."""

    slot: Any
    first: Any  # place
    end: Any  # place, no piece where it is below `first`
    part: Any  # where the partial sum goes; -1: the piece has all tokens of its slot
