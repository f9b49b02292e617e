# mypy: ignore-errors
"""The per-LoRA grid: a row is one tile of one slot's tokens, and h has a row for every token."""

import triton
import triton.language as tl

from lora_backends.sgmv.kernels.entry import expand_kernel, gather_kernel, shrink_kernel
from lora_backends.sgmv.kernels.operands import Rows

__all__ = ["expand_kernel", "find_rows", "gather_kernel", "shrink_kernel"]


@triton.jit
def find_rows(row, slot_table_ptr, token_table_ptr, group_starts_ptr, ROW: tl.constexpr):
    """Return the slot of a tile, and its tokens [T] as rows of h, too."""
    slot = tl.load(slot_table_ptr + row).to(tl.int64)
    tokens = tl.load(token_table_ptr + row * ROW.TILE + tl.arange(0, ROW.TILE)).to(tl.int64)
    return Rows(slot=slot, tokens=tokens, h=tokens)
