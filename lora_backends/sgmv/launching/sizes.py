"""The constants that dense layers and experts share, from tile sizes and how values are stored."""

from __future__ import annotations

from typing import Any

from lora_backends.sgmv.kernels.operands import ExpandSizes, ShrinkSizes
from lora_backends.sgmv.launching.kernel import INTERPRETED
from lora_backends.sgmv.storage import WIDE, Storage
from lora_backends.sgmv.tiles.sizes import (
    ColumnPrograms,
    ExpandTiles,
    ShrinkTiles,
    padded_rank,
    power_of_two,
    row_ranks,
)


def shrink_sizes(
    tiles: ShrinkTiles, in_features: int, max_rank: int, storage: Storage, **others: Any
) -> ShrinkSizes:
    """Return the constants of a shrink; `others` are the rest, by name."""
    step = tiles.block_k * tiles.split_k
    return ShrinkSizes(
        STORAGE=storage.kind,
        GROUP_R=storage.block[0] or 0,
        GROUP_K=storage.block[1] or 0,
        RANK_PAD=padded_rank(max_rank),
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        WARPS_K=tiles.warps_k,
        SPLIT_K=tiles.split_k,
        STEPS=-(-in_features // step),
        EVEN_K=in_features % step == 0,
        INTERPRETED=INTERPRETED,
        **others,
    )


def expand_sizes(
    tiles: ExpandTiles,
    columns: ColumnPrograms,
    planes: int,  # of h
    max_rank: int,
    storage: Storage,
    padded_h: bool = False,  # rows of h have room for the padded rank
    **others: Any,
) -> ExpandSizes:
    """Return the constants of an expand."""
    group = 16 if storage.kind and max_rank % 16 == 0 else 8  # ranks of a wide load
    even = group if max_rank % group == 0 else 0
    return ExpandSizes(
        STARTS=columns.starts,
        FIRST_PROGRAMS=columns.firsts,
        STORAGE=storage.kind,
        GROUP_C=storage.block[0] or 0,
        GROUP_R=storage.block[1] or 0,
        WIDE=WIDE[storage.wide],
        SPLIT_K=planes,
        PLANES=power_of_two(planes),
        RANK_PAD=padded_rank(max_rank),
        ROW_RANKS=row_ranks(max_rank),
        BLOCK_C=tiles.block_c,
        BLOCK_R=tiles.block_r,
        CHUNKS=tiles.chunks,
        STAGES=tiles.num_stages,
        WARPS=tiles.num_warps,
        EVEN_C=columns.even,
        EVEN_R=even,
        EVEN_H=8 if padded_h else even,
        INTERPRETED=INTERPRETED,
        **others,
    )
