"""The plan: tokens sorted by slot and cut into tiles of one slot."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from lora_backends.batch import LoRABatch
from lora_backends.sgmv import runs
from lora_backends.sgmv.launching.kernel import ABSENT
from lora_backends.sgmv.layout import RowSizes, SgmvPlan, Tables
from lora_backends.sgmv.runs import Counted


@dataclass(eq=False)
class TritonPlan(SgmvPlan):
    """Which slot and which tokens every tile has.

    Slots [2, -1, 0, 2, 2] in tiles of 2 tokens; over three slots, 5 tokens need at most 4 tiles:

        slot_table   [0, 2, 2, -1]
        token_table  [[2, -1], [0, 3], [4, -1], [-1, -1]]
    """

    @override
    def h_rows(self, rows: int) -> int:
        # a multiple of 16: Triton compiles other code where the stride of slices is none
        return -(-rows // 16) * 16

    @override
    def row_constants(self, by_token: bool) -> RowSizes:
        return _row(self.tile_tokens)

    @override
    def _view_tables(self) -> Tables:
        first = self.tables_at()
        return *runs.run_tables(self.packed, first, self.run_tokens, self.most_runs), ABSENT

    @override
    def stage(
        self, staged: npt.NDArray[np.int32], batch: LoRABatch, counted: Counted, *cut: int
    ) -> None:
        (tile_tokens,) = cut
        self._stage_runs(staged, batch, counted, tile_tokens, tile_tokens)


@lru_cache(maxsize=64)
def _row(tile_tokens: int) -> RowSizes:
    return RowSizes(tile_tokens, 1, True)
