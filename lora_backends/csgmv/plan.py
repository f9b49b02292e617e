"""The plan: tokens permuted by slot, cut into segments, and segments of a slot put into groups.

Everything is built on the CPU by the functions below, written into one packed int32 buffer and
copied once. Every table is found by number alone and keeps its address when the plan is refilled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lora_backends.batch import LoRABatch
from lora_backends.gpu.ready import RememberingPlan
from lora_backends.gpu.staging import aligned, sort_key, staging_buffer

EMPTY = -1
"""The slot of an unused segment and the token of an unused place."""

Ints = npt.NDArray[Any]
"""int64"""


@dataclass(eq=False)
class CsgmvPlan(RememberingPlan):
    """Which slot and tokens every segment has, and which segments every group has.

    Slots [2, -1, 0, 2, 2, 2, 2] in segments of 2 tokens and groups of 2 segments. Place p is
    position p % 2 of segment p // 2, and h has a row for every place:

        segment_slots   [0, 2, 2, 2, -1]
        segment_tokens  [[2, -1], [0, 3], [4, 5], [6, -1], [-1, -1]]
        group_starts    [0, 1, 3, 4, 4]        group g has segments [starts[g], starts[g + 1])

    No composition of 7 tokens over 3 slots needs more than 5 segments or 4 groups.
    """

    segment_size: int  # tokens per segment, a power of two >= 16
    group_size: int  # most segments per group, a power of two
    active_slots: int  # slots with tokens when the plan was made: tile sizes follow from it
    num_segments: int  # segments in use now, <= max_segments
    num_groups: int  # groups in use now, <= max_groups
    max_segments: int  # segments that any composition of as many tokens and slots can need
    max_groups: int  # groups likewise: rows of the grid while a graph is captured
    packed: torch.Tensor  # [packed_size] int32, on the device; the tables are views of it
    segment_slots: torch.Tensor  # [max_segments] int32, slot or -1
    segment_tokens: torch.Tensor  # [max_segments, segment_size] int32, token or -1
    group_starts: torch.Tensor  # [max_groups + 1] int32, ascending

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        found = tables(self.packed, self.max_segments, self.segment_size)
        self.segment_slots, self.segment_tokens, self.group_starts = found


def most_runs(num_tokens: int, num_slots: int, length: int) -> int:
    """Return how many runs of at most `length` tokens of one slot a batch can need, at least 1.

    One with a single token for each of ``n = min(num_tokens, num_slots)`` slots, and one more for
    every `length` of the remaining tokens.

    >>> most_runs(num_tokens=7, num_slots=3, length=2), most_runs(7, 3, 4)
    (5, 4)
    """
    slots = min(num_tokens, num_slots)
    return max(1, slots + (num_tokens - slots) // length)


def count_tokens(token_slots: Ints, num_slots: int) -> Ints:
    """Return the tokens of every slot, those without an adapter left out.

    >>> count_tokens(np.array([2, -1, 0, 2, 2, 2, 2]), 3).tolist()
    [1, 0, 5]
    """
    return np.bincount(token_slots + 1, minlength=num_slots + 1)[1:]


def permutation(token_slots: Ints) -> Ints:
    """Return the tokens that have an adapter, slot by slot, in ascending order within each.

    >>> permutation(np.array([2, -1, 0, 2, 2, 2, 2])).tolist()
    [2, 0, 3, 4, 5, 6]
    """
    without = np.count_nonzero(token_slots < 0)
    return sort_key(token_slots, int(token_slots.max(initial=0))).argsort(kind="stable")[without:]


def split(counts: Ints, size: int) -> Ints:
    """Return how many parts of at most `size` every count is cut into.

    >>> split(np.array([1, 0, 5]), 2).tolist()
    [1, 0, 3]
    """
    return (counts + (size - 1)) // size


def places(counts: Ints, segments: Ints, segment_size: int) -> Ints:
    """Return the place of every token of the permutation: each slot starts a segment of its own.

    >>> places(np.array([1, 0, 5]), np.array([1, 0, 3]), 2).tolist()
    [0, 2, 3, 4, 5, 6]
    """
    ends = counts.cumsum()
    # a slot's tokens move from their position in the permutation to that of its first segment
    moved = (segments.cumsum() - segments) * segment_size - (ends - counts)
    found: Ints = np.arange(int(ends[-1])) + moved.repeat(counts)
    return found


def starts_of_groups(segments: Ints, group_size: int) -> Ints:
    """Return the first segment of every group.

    >>> starts_of_groups(np.array([1, 0, 3]), 2).tolist()
    [0, 1, 3]
    """
    groups = split(segments, group_size)
    ends = groups.cumsum()
    # a slot's first group starts at its first segment
    moved = (segments.cumsum() - segments) - (ends - groups) * group_size
    starts: Ints = np.arange(int(ends[-1])) * group_size + moved.repeat(groups)
    return starts


def make_plan(
    batch: LoRABatch, segment_size: int, group_size: int, active_slots: int, device: torch.device
) -> CsgmvPlan:
    """Return a new plan, its tables on their way to the device."""
    segments = most_runs(batch.num_tokens, batch.num_slots, segment_size)
    groups = most_runs(batch.num_tokens, batch.num_slots, segment_size * group_size)
    size = aligned(segments) + aligned(segments * segment_size) + groups + 1
    staged, array = staging_buffer(size, device)
    num_segments, num_groups = fill(array, batch, segment_size, group_size, segments)
    packed = staged.to(device, non_blocking=True)
    segment_slots, segment_tokens, group_starts = tables(packed, segments, segment_size)
    return CsgmvPlan(
        num_tokens=batch.num_tokens,
        num_slots=batch.num_slots,
        segment_size=segment_size,
        group_size=group_size,
        active_slots=active_slots,
        num_segments=num_segments,
        num_groups=num_groups,
        max_segments=segments,
        max_groups=groups,
        packed=packed,
        segment_slots=segment_slots,
        segment_tokens=segment_tokens,
        group_starts=group_starts,
    )


def tables(packed: torch.Tensor, segments: int, segment_size: int) -> tuple[torch.Tensor, ...]:
    """Return `segment_slots`, `segment_tokens` and `group_starts`, views of the packed buffer."""
    tokens_at = aligned(segments)
    groups_at = tokens_at + aligned(segments * segment_size)
    groups = packed.shape[0] - groups_at
    return (  # slices would take longer
        packed.as_strided((segments,), (1,)),
        packed.as_strided((segments, segment_size), (segment_size, 1), tokens_at),
        packed.as_strided((groups,), (1,), groups_at),
    )


def fill(
    packed: npt.NDArray[np.int32],
    batch: LoRABatch,
    segment_size: int,
    group_size: int,
    max_segments: int,
) -> tuple[int, int]:
    """Write the tables of a batch, laid out as `tables` finds them, and return their lengths.

    Args:
        packed: overwritten.
        batch: the slots.
        segment_size: tokens per segment.
        group_size: segments per group.
        max_segments: that `packed` has room for.

    Returns:
        Segments and groups in use.
    """
    token_slots = batch.token_slots.numpy()
    counts = count_tokens(token_slots, batch.num_slots)
    segments = split(counts, segment_size)
    starts = starts_of_groups(segments, group_size)
    num_segments, num_groups = int(segments.sum()), starts.size
    tokens_at = aligned(max_segments)
    groups_at = tokens_at + aligned(max_segments * segment_size)
    packed[:groups_at] = EMPTY
    packed[:num_segments] = np.arange(batch.num_slots).repeat(segments)
    packed[tokens_at + places(counts, segments, segment_size)] = permutation(token_slots)
    packed[groups_at : groups_at + num_groups] = starts
    packed[groups_at + num_groups :] = num_segments
    return num_segments, num_groups


def refill(plan: CsgmvPlan, batch: LoRABatch) -> CsgmvPlan:
    """Write the tables of `batch` into the plan: one asynchronous copy from pinned memory."""
    staged, array = staging_buffer(plan.packed.shape[0], plan.packed.device)
    sizes = (plan.segment_size, plan.group_size, plan.max_segments)
    plan.num_segments, plan.num_groups = fill(array, batch, *sizes)
    plan.packed.copy_(staged, non_blocking=True)
    return plan
