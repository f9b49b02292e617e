"""Several adapters per token: kernels of single adapters, run over (token, adapter) pairs.

The shrink gathers the row of x of each pair and writes a row of h for it. The expand adds all pairs
of a block of tokens to the block's rows of y (`kernels.blend`), so y is read and stored once.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from lora_backends.batch import LoRABatch
from lora_backends.dispatch.many_adapters import sorted_tokens
from lora_backends.numba_cpu import launch
from lora_backends.numba_cpu.config import BLEND_LONG, BLEND_PIECE, LONG_SEGMENT, MAX_SEGMENT
from lora_backends.numba_cpu.kernels import dense, eight_bit
from lora_backends.numba_cpu.layer import CODE_FLOAT32, DTYPE_CODES, LocatedLayer
from lora_backends.numba_cpu.needs import EXPAND
from lora_backends.numba_cpu.plan import NO_SCALES, PACK_WORK, Ints, Work, needs_of
from lora_backends.numba_cpu.routines import eight_bit_table, table_of

_PACK_BLOCKS, _PACK_Y = struct.Struct("4q").pack, struct.Struct("3q").pack  # of `Blocks`


class NumbaBlend:
    """The pairs of a batch, sorted by block of tokens, then slot, then token.

    Tokens with equal adapters lie together; a block is MAX_SEGMENT tokens. Slots [[0, 2], [2, -1],
    [0, 2]] make one block of the tokens [0, 2, 1]; the pairs' rows of x are [0, 2] for slot 0 and
    [0, 2, 1] for slot 2. If a token has a slot twice, its two pairs lie in two segments.
    """

    halves_match = False  # each kernel divides its work among threads in its own way

    def __init__(self, batch: LoRABatch) -> None:
        self.refill(batch)

    def __getstate__(self) -> LoRABatch:
        return self.batch  # addresses die with a copy

    def __setstate__(self, batch: LoRABatch) -> None:
        self.refill(batch)

    def refill(self, batch: LoRABatch) -> None:
        """Take another batch."""
        self.batch = batch
        ordered = sorted_tokens(batch)
        self.tokens: Ints = ordered.tokens
        place, column = np.nonzero(ordered.live)
        block, slot, repeat = (
            place // MAX_SEGMENT,
            ordered.slots[ordered.live],
            ordered.repeats[ordered.live],
        )
        order = np.lexsort((place, repeat, slot, block))
        block, slot, repeat, place = block[order], slot[order], repeat[order], place[order]
        keys = (np.diff(each, prepend=-1) != 0 for each in (block, slot, repeat))
        starts = np.flatnonzero(np.logical_or.reduce(list(keys))) if len(order) else order
        starts, stops = _pieces(starts, np.append(starts[1:], len(order))[: len(starts)])
        self.segments: Ints = np.stack([slot[starts], starts, stops], axis=1)
        count = -(-len(self.tokens) // MAX_SEGMENT)
        self.first_segments: Ints = np.searchsorted(block[starts], np.arange(count + 1))
        self.first_tokens: Ints = np.minimum(np.arange(count + 1) * MAX_SEGMENT, len(self.tokens))
        self.x_order: Ints = self.tokens[place]
        self.in_block: Ints = place % MAX_SEGMENT
        self.own: Ints = np.arange(len(order))
        self.scales = None
        if ordered.scales is not None:
            self.scales = np.ascontiguousarray(ordered.scales[place, column[order]])
        self.num_segments, self.num_positions = len(self.segments), len(order)
        self.h_rows, self.needs = self.num_positions, needs_of(self.segments)
        self.packed_work = PACK_WORK(*self._work(self.x_order))
        self.of_copies = PACK_WORK(*self._work(self.in_block))
        arrays = self.first_segments, self.first_tokens, self.tokens
        self.blocks = _PACK_BLOCKS(count, *(array.ctypes.data for array in arrays))

    def _work(self, y_order: Ints) -> Work:
        halves = self.num_segments, self.segments.ctypes.data
        x, numbers, y = (order.ctypes.data for order in (self.x_order, self.own, y_order))
        scales = NO_SCALES if self.scales is None else (self.scales.ctypes.data, 4)
        return Work(*halves, 1, *halves, x, numbers, numbers, y, *scales, numbers)


def _pieces(starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """Cut segments of LONG_SEGMENT pairs or more, but fewer than BLEND_LONG, into pieces.

    >>> _pieces(np.array([0, 20]), np.array([20, 24]))[0].tolist()
    [0, 7, 14, 20]
    """
    lengths = stops - starts
    cut = (lengths >= LONG_SEGMENT) & (lengths < BLEND_LONG)
    counts = np.where(cut, -(-lengths // BLEND_PIECE), 1)
    steps = (-(-lengths // counts)).repeat(counts)
    nth = np.arange(len(steps)) - (np.cumsum(counts) - counts).repeat(counts)
    first = starts.repeat(counts) + nth * steps
    return first, np.minimum(first + steps, stops.repeat(counts))


@dataclass(eq=False, slots=True)
class BlendedRun:
    """A call of one layer: the `CachedCall` of a blend."""

    shrink: launch.Bound
    expand: launch.Kernel
    fields: bytes  # of the expand's `KernelCall`, before those of a `Work`
    y_fields: tuple[int, int]  # y_row and y_dtype of `Blocks`
    needs: int  # flags of `numba_cpu.needs` for the batch's segments

    @classmethod
    def of(
        cls, first: int, located: LocatedLayer, blend: NumbaBlend, x: torch.Tensor, y: torch.Tensor
    ) -> BlendedRun:
        """Return the call that shrinks x (`SHRINK`) or token ids (`GATHER`), and adds to y."""
        shrink = launch.bind(first, located, blend.needs, x, None, None)
        needs = blend.needs | located.needs | EXPAND
        expand = _kernel(located.eight_bit, located.dtype, needs)
        fields = launch.expand_fields(expand, located)
        return cls(shrink, expand, fields, (launch.row_of(y), DTYPE_CODES[y.dtype]), blend.needs)

    def run(self, x: torch.Tensor, weights: Any, blend: NumbaBlend, y: torch.Tensor) -> bool:
        """Run both kernels; return False, with nothing run, if the batch needs other routines."""
        if not blend.num_segments:
            return True
        if blend.needs != self.needs:
            return False
        row, code = self.y_fields
        work = blend.packed_work if code == CODE_FLOAT32 else blend.of_copies
        blocks = blend.blocks + _PACK_Y(y.data_ptr(), row, code)
        ends = self.fields, work, blocks
        launch.shrink_and_add(self.shrink, self.expand, blend, x.data_ptr(), ends)
        return True


@cache
def _kernel(is_eight_bit: bool, dtype: torch.dtype, needs: int) -> launch.Kernel:
    """Compile or load the kernel; its routines add to float32, whatever the dtype of y."""
    wide = torch.float32
    if is_eight_bit:
        return launch.kernel_of(_entry(True), eight_bit_table(wide, wide, needs))
    return launch.kernel_of(_entry(False), table_of(dtype, wide, needs))


@cache
def _entry(is_eight_bit: bool) -> Any:
    return eight_bit.blend_entry() if is_eight_bit else dense.blend_entry()
