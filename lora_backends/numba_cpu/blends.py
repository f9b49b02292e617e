"""Several adapters per token: the kernels of single adapters over pairs of token and adapter.

The shrink gathers rows of x by pair and writes a row of h for each. The expand adds all pairs of a
block of tokens to its rows of y at once (`kernels.blend`), so y is read and stored once.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import numpy as np
import torch

from lora_backends.batch import NO_ADAPTER, LoRABatch
from lora_backends.numba_cpu import launch
from lora_backends.numba_cpu.config import MAX_SEGMENT
from lora_backends.numba_cpu.kernels import dense, eight_bit
from lora_backends.numba_cpu.kernels.blend import Blocks
from lora_backends.numba_cpu.layer import CODE_FLOAT32, DTYPE_CODES, LocatedLayer
from lora_backends.numba_cpu.needs import EXPAND
from lora_backends.numba_cpu.plan import NO_SCALES, PACK_WORK, Ints, Work, needs_of
from lora_backends.numba_cpu.routines import eight_bit_table, table_of

_PACK_BLOCKS = struct.Struct(f"{len(Blocks._fields)}q").pack


class Blend:
    """The pairs of a batch: by block of tokens, then slot, then token.

    Tokens with equal adapters lie together, and blocks are MAX_SEGMENT of them. Slots [[0, 2],
    [2, -1], [0, 2]] make one block of the tokens [0, 2, 1]; the pairs' rows of x are [0, 2] for slot
    0 and [0, 2, 1] for slot 2. A slot that a token has twice has a segment for each.
    """

    halves_match = False  # threads meet between the halves, in two launches

    def __init__(self, batch: LoRABatch) -> None:
        self.refill(batch)

    def __getstate__(self) -> LoRABatch:
        return self.batch  # addresses die with a copy

    def __setstate__(self, batch: LoRABatch) -> None:
        self.refill(batch)

    def refill(self, batch: LoRABatch) -> None:
        """Take another batch."""
        self.batch = batch
        slots = batch.token_slots.numpy().reshape(batch.num_tokens, -1)
        adapters = slots.shape[1]
        beyond = np.where(slots == NO_ADAPTER, batch.num_slots, slots)
        by_slot = np.argsort(beyond, axis=1, kind="stable")
        ascending = np.take_along_axis(beyond, by_slot, axis=1)
        tokens = np.lexsort(ascending.T[::-1])  # by adapters, those without one last
        ascending = ascending[tokens]
        live = ascending < batch.num_slots
        self.tokens: Ints = np.ascontiguousarray(tokens[: int(live[:, 0].sum())])
        repeats = np.zeros_like(ascending)  # of a slot within a token
        for j in range(1, adapters):
            same = ascending[:, j] == ascending[:, j - 1]
            repeats[:, j] = np.where(same, repeats[:, j - 1] + 1, 0)
        place, column = np.nonzero(live)
        block, slot, repeat = place // MAX_SEGMENT, ascending[live], repeats[live]
        order = np.lexsort((place, repeat, slot, block))
        block, slot, repeat, place = block[order], slot[order], repeat[order], place[order]
        keys = (np.diff(each, prepend=-1) != 0 for each in (block, slot, repeat))
        starts = np.flatnonzero(np.logical_or.reduce(list(keys))) if len(order) else order
        self.segments: Ints = np.stack(
            [slot[starts], starts, np.append(starts[1:], len(order))[: len(starts)]], axis=1
        )
        count = -(-len(self.tokens) // MAX_SEGMENT)
        self.first_segments: Ints = np.searchsorted(block[starts], np.arange(count + 1))
        self.first_tokens: Ints = np.minimum(np.arange(count + 1) * MAX_SEGMENT, len(self.tokens))
        self.x_order: Ints = self.tokens[place]
        self.in_block: Ints = place % MAX_SEGMENT
        self.own: Ints = np.arange(len(order))
        self.scales = None
        if batch.token_scales is not None:
            scales = batch.token_scales.numpy().reshape(slots.shape)[self.x_order]
            self.scales = scales[self.own, by_slot[self.x_order, column[order]]].copy()
        self.num_segments, self.num_positions = len(self.segments), len(order)
        self.h_rows, self.needs = self.num_positions, needs_of(self.segments)
        self.packed_work = PACK_WORK(*self._work(self.x_order))
        self._of_copies = PACK_WORK(*self._work(self.in_block))

    def _work(self, y_order: Ints) -> Work:
        halves = self.num_segments, self.segments.ctypes.data
        x, own, y = (order.ctypes.data for order in (self.x_order, self.own, y_order))
        scales = NO_SCALES if self.scales is None else (self.scales.ctypes.data, 4)
        return Work(*halves, 1, *halves, x, own, own, y, *scales, own)

    def expand_fields(self, y: torch.Tensor) -> tuple[bytes, bytes]:
        """Return the bytes of a `Work` and of `Blocks` for y."""
        code = DTYPE_CODES[y.dtype]
        work = self.packed_work if code == CODE_FLOAT32 else self._of_copies
        arrays = self.first_segments, self.first_tokens, self.tokens
        places = (array.ctypes.data for array in arrays)
        count = len(self.first_tokens) - 1
        return work, _PACK_BLOCKS(count, *places, y.data_ptr(), launch.row_of(y), code)


def run(first: int, located: LocatedLayer, blend: Blend, x: torch.Tensor, y: torch.Tensor) -> None:
    """Shrink x (`SHRINK`) or token ids (`GATHER`), and add the expansion to y."""
    if not blend.num_segments:
        return
    shape = located.num_slices, blend.h_rows, located.max_rank
    h = torch.empty(shape, dtype=torch.float32, device="cpu")
    launch.run(first, located, blend, x=x, h=h)
    needs = blend.needs | located.needs | EXPAND
    kernel = _kernel(located.eight_bit, located.dtype, needs)
    launch.expand_blocks(kernel, located, blend, h, *blend.expand_fields(y))


@cache
def _kernel(is_eight_bit: bool, dtype: torch.dtype, needs: int) -> launch.Kernel:
    """Compile the kernel, or load it: its routines add to float32, whatever the dtype of y."""
    wide = torch.float32
    if is_eight_bit:
        return launch.kernel_of(_entry(True), eight_bit_table(wide, wide, needs))
    return launch.kernel_of(_entry(False), table_of(dtype, wide, needs))


@cache
def _entry(is_eight_bit: bool) -> Any:
    return eight_bit.blend_entry() if is_eight_bit else dense.blend_entry()
