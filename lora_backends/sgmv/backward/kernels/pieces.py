# mypy: ignore-errors
"""Device functions that find the tokens of a program that sums over those of one slot.

Runs of one slot are neighbours in the plan's tables, slots ascending, so the places of a slot's
tokens are neighbours too. A program sums one piece of them, in their order: the sum of a slot does
not depend on what else is in the batch.

A piece is RUNS runs, counted from the slot's first. The places of all slots are divided into
windows of RUNS runs as well. A window has at most one run where a second or later piece of a slot
starts: two of one slot lie RUNS apart, and a slot that starts behind the window's first run has its
second piece beyond the window. So a row of the grid for every wanted slot takes its first piece,
and one for every window takes the later piece that starts there. Slots of several pieces write
partial sums, two places for each window: the first piece of a slot, and a later one.
"""

import triton
import triton.language as tl

from lora_backends.sgmv.backward.kernels.operands import SlotPiece


@triton.jit
def runs_of(slot, slot_table_ptr, runs):
    """Return the first run of a slot and the run after its last; both equal if it has none."""
    first, end = slot * 0, slot * 0
    for start in tl.range(0, runs, 512, num_stages=1):
        i = start + tl.arange(0, 512)
        of = tl.load(slot_table_ptr + i, mask=i < runs, other=-1)
        first += tl.sum(((of >= 0) & (of < slot)).to(tl.int32))
        end += tl.sum(((of >= 0) & (of <= slot)).to(tl.int32))
    return first, end


@triton.jit
def place_of(slot, slots_ptr, num_slots):
    """Return where a slot is in the list of wanted ones, -1: nowhere."""
    place = slot * 0 - 1
    for start in tl.range(0, num_slots, 128, num_stages=1):
        i = start + tl.arange(0, 128)
        of = tl.load(slots_ptr + i, mask=i < num_slots, other=-1)
        place = tl.maximum(place, tl.max(tl.where(of == slot, i, -1)))
    return place


@triton.jit
def piece_of(row, slots_ptr, num_slots, slot_table_ptr, runs, P: tl.constexpr):
    """Return the `SlotPiece` of a grid row: a wanted slot's first, then one for each window."""
    row = row.to(tl.int32)
    part = row * 0 - 1
    if P.RUNS == 0:
        slot = row if P.ALL else tl.load(slots_ptr + row)
        first, end = runs_of(slot, slot_table_ptr, runs)
    else:
        is_first = row < num_slots
        window = tl.maximum(row - num_slots, 0)
        at = window * P.RUNS
        if P.ALL:
            wanted = row
        else:
            wanted = tl.load(slots_ptr + row, mask=is_first, other=-1)
        slot = tl.where(is_first, wanted, tl.load(slot_table_ptr + at))
        first, end = runs_of(slot, slot_table_ptr, runs)
        has_more = end - first > P.RUNS
        if is_first:
            part = tl.where(has_more, first // P.RUNS * 2, -1)
            end = tl.minimum(end, first + P.RUNS)
        else:
            first += tl.maximum(tl.cdiv(at - first, P.RUNS), 1) * P.RUNS
            end = tl.where(first < at + P.RUNS, tl.minimum(end, first + P.RUNS), 0)
            part = window * 2 + 1
            if not P.ALL:
                end = tl.where(place_of(slot, slots_ptr, num_slots) < 0, 0, end)
    return SlotPiece(slot=slot, first=first * P.SIZE, end=end * P.SIZE, part=part)
