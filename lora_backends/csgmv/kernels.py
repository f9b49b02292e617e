# mypy: ignore-errors
"""Chunked segments: a row is one group of segments, and h has a row for every place.

So the expand reads rows that lie together. With BY_TOKEN h has a row for every token, as callers of
`run_lora_a` see it. T names the axis over the places of a group.
"""

import triton
import triton.language as tl

from lora_backends.sgmv.kernels.entry import expand_kernel, gather_kernel, shrink_kernel
from lora_backends.sgmv.kernels.operands import Rows

__all__ = ["expand_kernel", "find_rows", "gather_kernel", "shrink_kernel"]


@triton.jit
def find_rows(row, slot_table_ptr, token_table_ptr, group_starts_ptr, ROW: tl.constexpr):
    """Return the slot of a group, its tokens [T] and their rows of h [T]."""
    if ROW.GROUP == 1:  # group g is segment g: group_starts need not be read
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
    return Rows(slot=slot, tokens=tokens, h=tokens if ROW.BY_TOKEN else places)
