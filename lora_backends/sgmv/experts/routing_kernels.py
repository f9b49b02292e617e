# mypy: ignore-errors
"""The kernels that sort pairs by key and cut each key's pairs into tiles.

The key of a pair is slot * num_experts + expert; a dead pair has `DEAD`, above every key. After
sorting, place i holds pair ``order[i]``, and a tile is a run of at most TILE places of one key. A
tile's record has five values: slot, expert, first place, pairs, first pair. Records stand in any
order, so that they can be handed out by a counter; a pair's result depends on neither its tile nor
its place. With SINGLES every pair also has a record for itself, at its place.

Where few pairs share a key, nothing is sorted: every pair is a tile, at the place of its number.

Axes: P (pairs of this program), Q (pairs to compare with), K (keys).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

DEAD = tl.constexpr(2**31 - 1)
RECORD = tl.constexpr(8)
"""Values from one tile's record to the next."""


class Choice(NamedTuple):
    """The router's choice: the experts of every token, and their weights."""

    ids: Any
    ids_stride_t: Any
    ids_stride_j: Any
    weights: Any
    weights_stride_t: Any
    weights_stride_j: Any
    map: Any  # from an expert to its number on this rank
    mapped: Any  # length of the map
    slots: Any  # of every token
    pairs: Any  # number of them


class Records(NamedTuple):
    """Tiles, one for each pair here that begins one."""

    key: Any
    place: Any  # of the first pair
    count: Any  # pairs
    pair: Any  # the first one


@triton.jit
def _experts_of(p, choice, S: tl.constexpr):
    """Return the expert of each pair on this rank, -1 for none."""
    inside = p < choice.pairs
    at = (p // S.TOP_K).to(tl.int64) * choice.ids_stride_t
    at += (p % S.TOP_K).to(tl.int64) * choice.ids_stride_j
    expert = tl.load(choice.ids + at, mask=inside, other=-1).to(tl.int64)
    if S.HAS_MAP:
        known = (expert >= 0) & (expert < choice.mapped)
        expert = tl.load(choice.map + expert, mask=known, other=-1).to(tl.int64)
    local = (expert >= 0) & (expert < S.NUM_EXPERTS)
    return tl.where(local, expert, -1).to(tl.int32)


@triton.jit
def _keys_of(p, choice, expert, S: tl.constexpr):
    """Return the key of each pair."""
    slot = tl.load(choice.slots + p // S.TOP_K, mask=p < choice.pairs, other=-1)
    dead = (slot < 0) | (expert < 0)
    return tl.where(dead, DEAD, slot * S.NUM_EXPERTS + expert)


@triton.jit
def _keep(p, choice, expert, experts_ptr, factors_ptr, S: tl.constexpr):
    """Copy the router's choice into the routing's own memory."""
    inside = p < choice.pairs
    at = (p // S.TOP_K).to(tl.int64) * choice.weights_stride_t
    at += (p % S.TOP_K).to(tl.int64) * choice.weights_stride_j
    factor = tl.load(choice.weights + at, mask=inside, other=0.0)
    tl.store(experts_ptr + p, expert.to(tl.int64), mask=inside)
    tl.store(factors_ptr + p, factor, mask=inside)


@triton.jit
def _store_records(tiles_ptr, row, records, mask, S: tl.constexpr):
    """Write the records of tiles."""
    at = tiles_ptr + row * RECORD
    tl.store(at, records.key // S.NUM_EXPERTS, mask=mask)
    tl.store(at + 1, records.key % S.NUM_EXPERTS, mask=mask)
    tl.store(at + 2, records.place, mask=mask)
    tl.store(at + 3, records.count, mask=mask)
    tl.store(at + 4, records.pair, mask=mask)


@triton.jit(do_not_specialize=["pairs"])
def alone_kernel(
    ids_ptr,
    weights_ptr,
    map_ptr,
    slots_ptr,
    experts_ptr,
    factors_ptr,
    order_ptr,
    tiles_ptr,
    count_ptr,
    pairs,
    ids_stride_t,
    ids_stride_j,
    weights_stride_t,
    weights_stride_j,
    num_mapped,
    PROGRAMS: tl.constexpr,
    SIZES: tl.constexpr,
):
    """Make every pair a tile; the tile of a dead pair has no pair."""
    if SIZES.PROGRAMMATIC:
        gdc_wait()
        gdc_launch_dependents()
    p = tl.program_id(0) * SIZES.OWN + tl.arange(0, SIZES.OWN)  # [P]
    choice = Choice(
        ids=ids_ptr, ids_stride_t=ids_stride_t, ids_stride_j=ids_stride_j, weights=weights_ptr,
        weights_stride_t=weights_stride_t, weights_stride_j=weights_stride_j, map=map_ptr,
        mapped=num_mapped, slots=slots_ptr, pairs=pairs,
    )  # fmt: skip
    expert = _experts_of(p, choice, SIZES)
    key = _keys_of(p, choice, expert, SIZES)
    _keep(p, choice, expert, experts_ptr, factors_ptr, SIZES)
    inside, live = p < pairs, key != DEAD
    tl.store(order_ptr + p, p, mask=inside)
    key = tl.where(live, key, 0)  # an index that may be loaded from
    records = Records(key=key, place=p, count=live.to(tl.int32), pair=p)
    _store_records(tiles_ptr, p, records, inside, SIZES)
    if tl.program_id(0) == 0:
        tl.store(count_ptr, pairs)
        tl.store(count_ptr + 1, pairs)


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
    SIZES: tl.constexpr,
):
    """Sort few pairs in one launch: a program compares each of its pairs with every pair.

    The place of a pair is the number of pairs that come before it. Programs share one counter in
    `state_ptr`, zero before and after: its low half counts tiles, its high half programs that have
    added theirs.
    """
    if SIZES.PROGRAMMATIC:
        gdc_wait()
        gdc_launch_dependents()
    p = tl.program_id(0) * SIZES.OWN + tl.arange(0, SIZES.OWN)  # [P]
    choice = Choice(
        ids=ids_ptr, ids_stride_t=ids_stride_t, ids_stride_j=ids_stride_j, weights=weights_ptr,
        weights_stride_t=weights_stride_t, weights_stride_j=weights_stride_j, map=map_ptr,
        mapped=num_mapped, slots=slots_ptr, pairs=pairs,
    )  # fmt: skip
    expert = _experts_of(p, choice, SIZES)
    key = _keys_of(p, choice, expert, SIZES)
    q = tl.arange(0, SIZES.BLOCK_Q)  # [Q]
    other = _experts_of(q, choice, SIZES)
    other = _keys_of(q, choice, other, SIZES)
    same = other[None, :] == key[:, None]  # [P, Q]
    earlier = same & (q[None, :] < p[:, None])
    before = earlier | (other[None, :] < key[:, None])
    place = tl.sum(before.to(tl.int32), axis=1)
    # pairs of the key, and in the upper half those before this one
    packed = tl.sum(same.to(tl.int32) + (earlier.to(tl.int32) << 16), axis=1)
    of_key, earlier_of_key = packed & 0xFFFF, packed >> 16
    _keep(p, choice, expert, experts_ptr, factors_ptr, SIZES)
    live = (p < pairs) & (key != DEAD)
    tl.store(order_ptr + place, p, mask=live)
    heads = live & (earlier_of_key % SIZES.TILE == 0)
    row = tl.cumsum(heads.to(tl.int32), axis=0) - 1
    made = tl.sum(heads.to(tl.int32), axis=0)
    if SIZES.ONE_PROGRAM:
        tl.store(count_ptr, made)
    else:
        seen = tl.atomic_add(state_ptr, made.to(tl.int64) + (1 << 32), sem="relaxed")
        first_row = (seen & 0xFFFFFFFF).to(tl.int32)
        row += first_row
        if (seen >> 32) == tl.num_programs(0) - 1:  # the last program to add
            tl.store(count_ptr, first_row + made)
            tl.store(state_ptr, (seen * 0).to(tl.int64))
    count = tl.minimum(of_key - earlier_of_key, SIZES.TILE)
    records = Records(key=key, place=place, count=count, pair=p)
    _store_records(tiles_ptr, row, records, heads, SIZES)
    if SIZES.SINGLES:
        singles = Records(key=key, place=place, count=1, pair=p)
        _store_records(singles_ptr, place, singles, live, SIZES)
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
    SIZES: tl.constexpr,
):
    """Count many pairs by key, the first launch of two, and number the pairs of each key.

    ``counts[turn]`` is zero before. Pairs of a key are numbered in the order of their arrival.
    """
    if SIZES.PROGRAMMATIC:
        gdc_wait()
        gdc_launch_dependents()
    turn = tl.load(turn_ptr)
    p = tl.program_id(0) * SIZES.OWN + tl.arange(0, SIZES.OWN)  # [P]
    choice = Choice(
        ids=ids_ptr, ids_stride_t=ids_stride_t, ids_stride_j=ids_stride_j, weights=weights_ptr,
        weights_stride_t=weights_stride_t, weights_stride_j=weights_stride_j, map=map_ptr,
        mapped=num_mapped, slots=slots_ptr, pairs=pairs,
    )  # fmt: skip
    expert = _experts_of(p, choice, SIZES)
    key = _keys_of(p, choice, expert, SIZES)
    counts = counts_ptr + turn.to(tl.int64) * num_keys + tl.where(key != DEAD, key, 0)
    nth = tl.atomic_add(counts, 1, mask=key != DEAD, sem="relaxed")
    _keep(p, choice, expert, experts_ptr, factors_ptr, SIZES)
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
    SIZES: tl.constexpr,
):
    """Place many pairs, the second launch of two: each program sums all counts for itself."""
    if SIZES.PROGRAMMATIC:
        gdc_wait()
        gdc_launch_dependents()
    OWN: tl.constexpr = SIZES.OWN
    LOW: tl.constexpr = (1 << SIZES.HALF) - 1
    SUM: tl.constexpr = tl.int32 if SIZES.HALF == 16 else tl.int64
    turn = tl.load(turn_ptr + 1)
    p = tl.program_id(0) * OWN + tl.arange(0, OWN)  # [P]
    key = tl.load(keys_ptr + p, mask=p < pairs, other=DEAD)
    nth = tl.load(nths_ptr + p, mask=p < pairs, other=0)
    counts = counts_ptr + turn.to(tl.int64) * num_keys
    start = tl.zeros((OWN,), dtype=SUM)  # pairs of lower keys, and their tiles
    of_key = tl.zeros((OWN,), dtype=tl.int32)
    done = tl.zeros((), dtype=SUM)
    for first in range(0, num_keys, SIZES.BLOCK_K):
        k = first + tl.arange(0, SIZES.BLOCK_K)  # [K]
        count = tl.load(counts + k, mask=k < num_keys, other=0)
        # one sum counts pairs and, in its upper HALF bits, tiles
        both = count.to(SUM) + (((count + SIZES.TILE - 1) // SIZES.TILE).to(SUM) << SIZES.HALF)
        sums = tl.cumsum(both, axis=0)
        here = (key >= first) & (key - first < SIZES.BLOCK_K)
        index = tl.where(here, key - first, 0)
        start = tl.where(here, tl.gather(sums - both + done, index, 0), start)
        of_key = tl.where(here, tl.gather(count, index, 0), of_key)
        done += tl.sum(both, axis=0)
    live = key != DEAD
    place = (start & LOW).to(tl.int32) + nth
    tl.store(order_ptr + place, p, mask=live)
    row = ((start >> SIZES.HALF) & LOW).to(tl.int32) + nth // SIZES.TILE
    count = tl.minimum(of_key - nth, SIZES.TILE)
    heads = live & (nth % SIZES.TILE == 0)
    records = Records(key=key, place=place, count=count, pair=p)
    _store_records(tiles_ptr, row, records, heads, SIZES)
    if SIZES.SINGLES:
        singles = Records(key=key, place=place, count=1, pair=p)
        _store_records(singles_ptr, place, singles, live, SIZES)
    # the counts of the next turn, which nothing else touches in this one
    other = counts_ptr + (1 - turn).to(tl.int64) * num_keys
    for first in range(tl.program_id(0) * OWN, num_keys, tl.num_programs(0) * OWN):
        k = first + tl.arange(0, OWN)
        tl.store(other + k, tl.zeros((OWN,), dtype=tl.int32), mask=k < num_keys)
    if tl.program_id(0) == 0:
        tl.store(count_ptr, ((done >> SIZES.HALF) & LOW).to(tl.int32))
        if SIZES.SINGLES:
            tl.store(count_ptr + 1, (done & LOW).to(tl.int32))
        tl.store(turn_ptr, 1 - turn)
