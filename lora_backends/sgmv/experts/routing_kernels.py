# mypy: ignore-errors
"""The kernels that sort pairs by key and cut each key's pairs into tiles.

The key of a pair is slot * num_experts + expert; a dead pair has `DEAD`, above every key. After
sorting, place i holds pair ``order[i]``, and a tile is a run of at most TILE places of one key. A
tile's record has five values: slot, expert, first place, pairs, first pair. Records stand in any
order, so that they can be handed out by a counter; a pair's result depends on neither its tile nor
its place. With SINGLES every pair also has a record for itself, at its place.

Axes: P (pairs of this program), Q (pairs to compare with), K (keys).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

DEAD = tl.constexpr(2**31 - 1)
RECORD = tl.constexpr(8)
"""Values from one tile's record to the next."""


@triton.jit
def _experts_of(
    p,
    pairs,
    ids_ptr,
    map_ptr,
    ids_stride_t,
    ids_stride_j,
    num_mapped,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    HAS_MAP: tl.constexpr,
):
    """Return the expert of each pair on this rank, -1 for none."""
    inside = p < pairs
    at = (p // TOP_K).to(tl.int64) * ids_stride_t + (p % TOP_K).to(tl.int64) * ids_stride_j
    expert = tl.load(ids_ptr + at, mask=inside, other=-1).to(tl.int64)
    if HAS_MAP:
        known = (expert >= 0) & (expert < num_mapped)
        expert = tl.load(map_ptr + expert, mask=known, other=-1).to(tl.int64)
    local = (expert >= 0) & (expert < NUM_EXPERTS)
    return tl.where(local, expert, -1).to(tl.int32)


@triton.jit
def _keys_of(p, pairs, expert, slots_ptr, TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr):
    """Return the key of each pair."""
    slot = tl.load(slots_ptr + p // TOP_K, mask=p < pairs, other=-1)
    dead = (slot < 0) | (expert < 0)
    return tl.where(dead, DEAD, slot * NUM_EXPERTS + expert)


@triton.jit
def _keep(
    p,
    pairs,
    expert,
    weights_ptr,
    experts_ptr,
    factors_ptr,
    weights_stride_t,
    weights_stride_j,
    TOP_K: tl.constexpr,
):
    """Copy the router's choice into the routing's own memory."""
    inside = p < pairs
    at = (p // TOP_K).to(tl.int64) * weights_stride_t + (p % TOP_K).to(tl.int64) * weights_stride_j
    factor = tl.load(weights_ptr + at, mask=inside, other=0.0)
    tl.store(experts_ptr + p, expert.to(tl.int64), mask=inside)
    tl.store(factors_ptr + p, factor, mask=inside)


@triton.jit
def _record(tiles_ptr, row, key, first, count, pair, mask, NUM_EXPERTS: tl.constexpr):
    """Write the records of tiles."""
    at = tiles_ptr + row * RECORD
    tl.store(at, key // NUM_EXPERTS, mask=mask)
    tl.store(at + 1, key % NUM_EXPERTS, mask=mask)
    tl.store(at + 2, first, mask=mask)
    tl.store(at + 3, count, mask=mask)
    tl.store(at + 4, pair, mask=mask)


@triton.jit(do_not_specialize=["pairs"])
def compare_kernel(
    ids_ptr,
    weights_ptr,
    map_ptr,
    slots_ptr,
    experts_ptr,
    factors_ptr,
    order_ptr,
    tiles_ptr,
    singles_ptr,
    count_ptr,
    state_ptr,
    pairs,
    ids_stride_t,
    ids_stride_j,
    weights_stride_t,
    weights_stride_j,
    num_mapped,
    PROGRAMS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    TILE: tl.constexpr,
    SINGLES: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    ALONE: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """Sort few pairs in one launch: a program compares each of its pairs with every pair.

    The place of a pair is the number of pairs that come before it. Programs share one counter in
    `state_ptr`, zero before and after: its low half counts tiles, its high half programs that have
    added theirs.
    """
    if PROGRAMMATIC:
        gdc_wait()
        gdc_launch_dependents()
    p = tl.program_id(0) * OWN + tl.arange(0, OWN)  # [P]
    expert = _experts_of(
        p, pairs, ids_ptr, map_ptr, ids_stride_t, ids_stride_j, num_mapped, TOP_K, NUM_EXPERTS,
        HAS_MAP,
    )  # fmt: skip
    key = _keys_of(p, pairs, expert, slots_ptr, TOP_K, NUM_EXPERTS)
    q = tl.arange(0, BLOCK_Q)  # [Q]
    other = _experts_of(
        q, pairs, ids_ptr, map_ptr, ids_stride_t, ids_stride_j, num_mapped, TOP_K, NUM_EXPERTS,
        HAS_MAP,
    )  # fmt: skip
    other = _keys_of(q, pairs, other, slots_ptr, TOP_K, NUM_EXPERTS)
    same = other[None, :] == key[:, None]  # [P, Q]
    earlier = same & (q[None, :] < p[:, None])
    before = earlier | (other[None, :] < key[:, None])
    place = tl.sum(before.to(tl.int32), axis=1)
    # pairs of the key, and in the upper half those before this one
    packed = tl.sum(same.to(tl.int32) + (earlier.to(tl.int32) << 16), axis=1)
    of_key, earlier_of_key = packed & 0xFFFF, packed >> 16
    _keep(
        p, pairs, expert, weights_ptr, experts_ptr, factors_ptr, weights_stride_t,
        weights_stride_j, TOP_K,
    )  # fmt: skip
    live = (p < pairs) & (key != DEAD)
    tl.store(order_ptr + place, p, mask=live)
    heads = live & (earlier_of_key % TILE == 0)
    row = tl.cumsum(heads.to(tl.int32), axis=0) - 1
    made = tl.sum(heads.to(tl.int32), axis=0)
    if ALONE:
        tl.store(count_ptr, made)
    else:
        seen = tl.atomic_add(state_ptr, made.to(tl.int64) + (1 << 32), sem="relaxed")
        first_row = (seen & 0xFFFFFFFF).to(tl.int32)
        row += first_row
        if (seen >> 32) == tl.num_programs(0) - 1:  # the last program to add
            tl.store(count_ptr, first_row + made)
            tl.store(state_ptr, (seen * 0).to(tl.int64))
    count = tl.minimum(of_key - earlier_of_key, TILE)
    _record(tiles_ptr, row, key, place, count, p, heads, NUM_EXPERTS)
    if SINGLES:
        _record(singles_ptr, place, key, place, 1, p, live, NUM_EXPERTS)
        if tl.program_id(0) == 0:
            tl.store(count_ptr + 1, tl.sum((other != DEAD).to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["pairs", "num_keys"])
def count_kernel(
    ids_ptr,
    weights_ptr,
    map_ptr,
    slots_ptr,
    experts_ptr,
    factors_ptr,
    keys_ptr,
    nths_ptr,
    counts_ptr,
    turn_ptr,
    pairs,
    num_keys,
    ids_stride_t,
    ids_stride_j,
    weights_stride_t,
    weights_stride_j,
    num_mapped,
    PROGRAMS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    OWN: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """Count many pairs by key, the first launch of two, and number the pairs of each key.

    ``counts[turn]`` is zero before. Pairs of a key are numbered in the order of their arrival.
    """
    if PROGRAMMATIC:
        gdc_wait()
        gdc_launch_dependents()
    turn = tl.load(turn_ptr)
    p = tl.program_id(0) * OWN + tl.arange(0, OWN)  # [P]
    expert = _experts_of(
        p, pairs, ids_ptr, map_ptr, ids_stride_t, ids_stride_j, num_mapped, TOP_K, NUM_EXPERTS,
        HAS_MAP,
    )  # fmt: skip
    key = _keys_of(p, pairs, expert, slots_ptr, TOP_K, NUM_EXPERTS)
    counts = counts_ptr + turn.to(tl.int64) * num_keys + tl.where(key != DEAD, key, 0)
    nth = tl.atomic_add(counts, 1, mask=key != DEAD, sem="relaxed")
    _keep(
        p, pairs, expert, weights_ptr, experts_ptr, factors_ptr, weights_stride_t,
        weights_stride_j, TOP_K,
    )  # fmt: skip
    tl.store(keys_ptr + p, key, mask=p < pairs)
    tl.store(nths_ptr + p, nth, mask=p < pairs)
    if tl.program_id(0) == 0:
        tl.store(turn_ptr + 1, turn)  # which counts the second launch reads


@triton.jit(do_not_specialize=["pairs", "num_keys"])
def scatter_kernel(
    keys_ptr,
    nths_ptr,
    counts_ptr,
    turn_ptr,
    order_ptr,
    tiles_ptr,
    singles_ptr,
    count_ptr,
    pairs,
    num_keys,
    PROGRAMS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
    SINGLES: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALF: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """Place many pairs, the second launch of two: each program sums all counts for itself.

    One sum counts pairs and, in its upper HALF bits, tiles. The counts of the next turn, which
    nothing else touches in this one, are set to zero.
    """
    if PROGRAMMATIC:
        gdc_wait()
        gdc_launch_dependents()
    LOW: tl.constexpr = (1 << HALF) - 1
    SUM: tl.constexpr = tl.int32 if HALF == 16 else tl.int64
    turn = tl.load(turn_ptr + 1)
    p = tl.program_id(0) * OWN + tl.arange(0, OWN)  # [P]
    key = tl.load(keys_ptr + p, mask=p < pairs, other=DEAD)
    nth = tl.load(nths_ptr + p, mask=p < pairs, other=0)
    counts = counts_ptr + turn.to(tl.int64) * num_keys
    start = tl.zeros((OWN,), dtype=SUM)  # pairs of lower keys, and their tiles
    of_key = tl.zeros((OWN,), dtype=tl.int32)
    done = tl.zeros((), dtype=SUM)
    for first in range(0, num_keys, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)  # [K]
        count = tl.load(counts + k, mask=k < num_keys, other=0)
        both = count.to(SUM) + (((count + TILE - 1) // TILE).to(SUM) << HALF)
        sums = tl.cumsum(both, axis=0)
        here = (key >= first) & (key - first < BLOCK_K)
        index = tl.where(here, key - first, 0)
        start = tl.where(here, tl.gather(sums - both + done, index, 0), start)
        of_key = tl.where(here, tl.gather(count, index, 0), of_key)
        done += tl.sum(both, axis=0)
    live = key != DEAD
    place = (start & LOW).to(tl.int32) + nth
    tl.store(order_ptr + place, p, mask=live)
    row = ((start >> HALF) & LOW).to(tl.int32) + nth // TILE
    count = tl.minimum(of_key - nth, TILE)
    heads = live & (nth % TILE == 0)
    _record(tiles_ptr, row, key, place, count, p, heads, NUM_EXPERTS)
    if SINGLES:
        _record(singles_ptr, place, key, place, 1, p, live, NUM_EXPERTS)
    other = counts_ptr + (1 - turn).to(tl.int64) * num_keys
    for first in range(tl.program_id(0) * OWN, num_keys, tl.num_programs(0) * OWN):
        k = first + tl.arange(0, OWN)
        tl.store(other + k, tl.zeros((OWN,), dtype=tl.int32), mask=k < num_keys)
    if tl.program_id(0) == 0:
        tl.store(count_ptr, ((done >> HALF) & LOW).to(tl.int32))
        if SINGLES:
            tl.store(count_ptr + 1, (done & LOW).to(tl.int32))
        tl.store(turn_ptr, 1 - turn)
