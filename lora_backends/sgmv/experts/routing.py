"""The routing of a layer: pairs sorted by key on the device, in memory that keeps its addresses.

It holds a copy of the router's choice. The shrink cannot read `topk_ids` in its place: the caller
may overwrite them, and a graph of the shrink alone follows routings that are refilled outside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from lora_backends.common.devices import is_capturing
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.experts import ExpertRouting
from lora_backends.sgmv.experts import routing_kernels
from lora_backends.sgmv.experts.rules import PairShape, expected_keys, pair_shape
from lora_backends.sgmv.kernels.operands import RoutingSizes
from lora_backends.sgmv.launching.kernel import (
    INTERPRETED,
    RECORD,
    Arguments,
    SpecializedKernel,
    current_stream,
    has_launch_hooks,
    is_current,
    several_devices,
    specialized,
    stream_of,
)
from lora_backends.sgmv.runs import aligned, max_runs
from lora_backends.sgmv.tiles.sizes import power_of_two

MOST_COMPARED = 512
"""Pairs up to which each pair is compared with all others; more are counted by key."""

_OWN = 128  # pairs of a program that counts
_OWN_ALONE = 32  # pairs of a program that sorts nothing: one per thread
_RECORD = routing_kernels.RECORD.value  # int32 values of a tile
_MOST_KEYS = 2**31 - 1
_MOST_PAIRS = 2**31 - _OWN
_INPUTS = 4  # tensors of a choice: experts, weights, the map and slots
_MOST_SORTERS = 8  # of a routing
_MOST_SCANNED = 8192  # counts that a program sums at once


@dataclass(eq=False)
class SgmvRouting(ExpertRouting):
    """A routing and its pairs, sorted by slot and expert and cut into tiles of one of each.

    Slots [1, 0, 1] and experts [[0, 2], [0, -1], [0, 2]] in tiles of 16 pairs:

        order   [2, 0, 4, 1, 5]                          the last place is not written
        tiles   [[0, 0, 0, 1, 2], [1, 0, 1, 2, 0], [1, 2, 3, 2, 1]]
        count   [3, 5]

    A tile's values are slot, expert, first place, pairs and first pair. Tiles may stand in any
    order, and the pairs of an expert too where there are many. Where few pairs share an expert of a
    slot, `singles` has a tile for each of them, in the order of their places.

    Where `shape.alone` holds, nothing is sorted: pair i stands at place i, in tile i. The tile of
    a dead pair has 0 pairs. `tiles` then replaces `singles`, which is empty.
    """

    num_slots: int  # that keys are made of
    shape: PairShape  # that tile sizes follow from
    order: Tensor  # [num_tokens * top_k] int32, the pair at every place
    tiles: Tensor  # [max_tiles, 8] int32; three values are unused
    singles: Tensor  # [num_tokens * top_k, 8] int32, or [0, 8]
    count: Tensor  # [2] int32, tiles in use, and those of single pairs
    scratch: tuple[Tensor, ...]  # counters and keys that the sort keeps between launches
    of_tokens: PairShape | None  # of `tokens`; None: tokens are never sorted
    tokens: SgmvRouting | None = field(default=None, init=False)
    # the tokens sorted by slot, made for the first layer whose experts all share an A
    plan_refills: int = field(default=0, init=False)  # of the plan, when the pairs were sorted
    settled: Any = field(default=None, init=False, repr=False)
    # the `launch_place` of the last site since the pairs were sorted. Its shrink waits for the sort
    # and its expand for the shrink, so any later kernel there finds the tables complete, even
    # before it waits itself
    chosen: dict[Any, Any] | None = field(default=None, init=False, repr=False)
    # the kernels of each `SiteChoice`
    sorters: dict[Any, _Sorter | None] | None = field(default=None, init=False, repr=False)
    # by the kind of choice; None for a kind that was sorted once

    _transient: ClassVar[tuple[str, ...]] = (
        *ExpertRouting._transient,
        "chosen",
        "sorters",
        "settled",
    )

    @property
    def num_pairs(self) -> int:
        """Pairs, dead ones included."""
        return self.order.shape[0]

    @property
    def max_tiles(self) -> int:
        """Tiles that any choice of as many pairs can need."""
        return self.tiles.shape[0]


def make_routing(
    plan: Any, topk_ids: Tensor, num_experts: int, fixed: PairShape | None
) -> SgmvRouting:
    """Return a routing with room for a choice of the shape of `topk_ids`; nothing is sorted yet.

    Tile sizes follow from `fixed` in every batch; None: from a uniform router.
    """
    tokens, top_k = topk_ids.shape
    if fixed is None:
        slots = plan.active_slots
        # Tokens that one slot can have: in a plan with room all of them, after a refill. Any other
        # plan keeps the sizes of its first batch: a refill that fills one slot is right, but slow.
        most = tokens if plan.has_room else tokens - slots + 1
        keys = expected_keys(tokens, top_k, num_experts, slots)
        shape, by_slot = pair_shape(tokens * top_k, keys, most), pair_shape(tokens, slots, most)
    else:
        shape = by_slot = fixed
    return _new_routing(
        plan, topk_ids, num_experts, shape, by_slot if top_k > 1 and num_experts > 1 else None
    )


def _new_routing(
    plan: Any, topk_ids: Tensor, num_experts: int, shape: PairShape, of_tokens: PairShape | None
) -> SgmvRouting:
    (tokens, top_k), device = topk_ids.shape, topk_ids.device
    pairs, num_keys = tokens * top_k, plan.num_slots * num_experts
    if num_keys >= _MOST_KEYS or pairs > _MOST_PAIRS:
        raise UnsupportedInputError(
            f"too many experts for one routing\n  given: {plan.num_slots} slots of {num_experts} "
            f"experts, {pairs} pairs\n  allowed: below 2**31 of slots times experts, and of pairs"
        )
    singles = pairs if shape.has_singles and not shape.alone else 0
    tiles = max(1, pairs) if shape.alone else max_runs(pairs, num_keys, shape.tile)
    # in int32 values; the sort needs zeros in its counters, and `sort_tokens` in the experts
    is_compared = shape.alone or pairs <= MOST_COMPARED
    scratch = (2,) if is_compared else (pairs, pairs, 2 * num_keys, 2)
    sizes = 2 * pairs, pairs, pairs, tiles * _RECORD, singles * _RECORD, 2, *scratch
    ids, factors, order, of_tiles, of_singles, count, *scratches = _zeros(sizes, device)
    if is_compared:
        scratches = [scratches[0].view(torch.int64)]
    else:
        scratches[2] = scratches[2].view(2, num_keys)
    return SgmvRouting(
        plan=plan,
        num_experts=num_experts,
        topk_ids=ids.view(torch.int64).view(tokens, top_k),
        topk_weights=factors.view(torch.float32).view(tokens, top_k),
        num_slots=plan.num_slots,
        shape=shape,
        order=order,
        tiles=of_tiles.view(tiles, _RECORD),
        singles=of_singles.view(singles, _RECORD),
        count=count,
        scratch=tuple(scratches),
        of_tokens=of_tokens,
    )


def _zeros(sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """Return int32 tables of these sizes, all zeros, in one allocation: a model makes many."""
    starts = list(accumulate(map(aligned, sizes), initial=0))
    memory = torch.zeros(starts[-1], dtype=torch.int32, device=device)
    pairs = zip(sizes, starts, strict=False)
    return [memory.as_strided((size,), (1,), start) for size, start in pairs]


def sort_pairs(
    routing: SgmvRouting,
    plan: Any,
    topk_ids: Tensor,
    topk_weights: Tensor,
    expert_map: Tensor | None,
    programmatic: bool,
) -> None:
    """Fill a routing with a choice, in one launch or in two."""
    if plan.num_slots != routing.num_slots:
        raise InvalidInputError(
            f"out was made for a plan of another size\n"
            f"  given: a plan of {plan.num_slots} slots, a routing for {routing.num_slots}\n"
            f"  to do: make a new routing"
        )
    routing.plan, routing.plan_refills, routing.settled = plan, plan.refills, None
    pairs = routing.num_pairs
    if pairs == 0:
        return
    mapped = topk_ids if expert_map is None else expert_map  # not read without a map
    slots = plan.token_slots()
    inputs = topk_ids, topk_weights, mapped, slots
    strides = (*topk_ids.stride(), *topk_weights.stride(), mapped.shape[0])
    addresses = [tensor.data_ptr() for tensor in inputs]
    kind = topk_ids.dtype, strides, expert_map is not None, programmatic
    if routing.sorters is None:
        routing.sorters = {}
    sorter = routing.sorters.get(kind)
    if sorter is not None and sorter.run(addresses):
        return
    shape = (routing.top_k, routing.num_experts, expert_map is not None)
    launches = [*_launches(routing, inputs, strides, shape, programmatic)]
    for rows, kernel, arguments in launches:
        kernel.launch(rows, arguments)
    if INTERPRETED or RECORD.get() is not None:
        return
    if kind not in routing.sorters:
        if len(routing.sorters) >= _MOST_SORTERS:
            routing.sorters.clear()
        routing.sorters[kind] = None  # a routing that is never refilled needs none
    elif sorter is None and not any(address & 15 for address in addresses):
        routing.sorters[kind] = _Sorter(launches)


def _launches(
    routing: SgmvRouting,
    inputs: tuple[Tensor, ...],
    strides: tuple[int, ...],
    shape: tuple[int, int, bool],
    programmatic: bool,
) -> Iterator[tuple[int, SpecializedKernel, Arguments]]:
    """Yield the rows of the grid, the kernel and the arguments of each launch that sorts pairs."""
    pairs, kept = routing.num_pairs, (routing.topk_ids, routing.topk_weights)
    if routing.shape.alone:
        tensors = (*inputs, *kept, routing.order, routing.tiles, routing.count)
        rows = -(-pairs // _OWN_ALONE)
        yield rows, _alone(*shape, programmatic), Arguments(tensors, (), (pairs, *strides))
        return
    results = (routing.order, routing.tiles, routing.singles, routing.count)
    cut = routing.shape.tile, routing.shape.has_singles
    if pairs <= MOST_COMPARED:
        kernel = _compare(pairs, *shape, cut, programmatic)
        arguments = Arguments((*inputs, *kept, *results, *routing.scratch), (), (pairs, *strides))
        yield -(-pairs // kernel.sizes.OWN), kernel, arguments
        return
    keys, nths, counts, turn = routing.scratch
    num_keys, programs = counts.shape[1], -(-pairs // _OWN)
    tensors, numbers = (*inputs, *kept, *routing.scratch), (pairs, num_keys, *strides)
    yield programs, _count(*shape, programmatic), Arguments(tensors, (), numbers)
    scatter = _scatter(routing.num_experts, cut, num_keys, pairs, programmatic)
    arguments = Arguments((keys, nths, counts, turn, *results), (), (pairs, num_keys))
    yield programs, scatter, arguments


class _Sorter:
    """The launches that sort choices of one kind, at any aligned addresses, into a routing.

    The addresses of a choice are the first arguments of the first kernel.
    """

    __slots__ = ("_device", "_first", "_more", "_several", "_stream_of")

    def __init__(self, launches: Sequence[tuple[int, SpecializedKernel, Arguments]]) -> None:
        self._device = launches[0][2].tensors[0].device
        self._several, self._stream_of = several_devices(), stream_of()
        (rows, kernel, arguments), *more = launches
        self._first = rows, kernel.bind(arguments, range(_INPUTS))
        self._more = [(rows, kernel.bind(given, ())) for rows, kernel, given in more]

    def run(self, addresses: Sequence[int]) -> bool:
        """Sort the choice, or return False, with nothing run: `sort_pairs` then launches it."""
        if (self._several and not is_current(self._device)) or RECORD.get() is not None:
            return False
        if any([address & 15 for address in addresses]):
            return False  # Triton compiles other code for unaligned addresses
        stream, hooks = self._stream_of(self._device.index), has_launch_hooks()
        rows, kernel = self._first
        kernel.launch(rows, stream, addresses, hooks)
        for rows, kernel in self._more:
            kernel.launch(rows, stream, (), hooks)
        return True


def launch_place(device: torch.device) -> Any:
    """Return where kernels go now: a record, or a stream and whether a graph captures it."""
    recorded = RECORD.get()
    if recorded is not None:
        return recorded
    return current_stream(device.index), is_capturing(device)


def follow_plan(routing: SgmvRouting, programmatic: bool) -> None:
    """Sort the pairs again if their tokens have other slots: the plan was refilled."""
    plan, sorted_at = routing.plan, routing.plan_refills
    if sorted_at != plan.refills:
        sort_pairs(routing, plan, routing.topk_ids, routing.topk_weights, None, programmatic)
        if RECORD.get() is not None:
            routing.plan_refills = sorted_at  # launches were only noted: the next call sorts


def sort_tokens(routing: SgmvRouting, programmatic: bool) -> SgmvRouting:
    """Sort the tokens of a routing by slot; return what they are sorted into."""
    tokens = routing.tokens
    if tokens is None:
        assert routing.of_tokens is not None
        column = routing.topk_ids[:, :1]
        tokens = _new_routing(routing.plan, column, 1, routing.of_tokens, None)
        # memory of a CUDA graph holds zeros only after a replay, so no other call may use it
        if not is_capturing(column.device):
            routing.tokens = tokens
    # every expert is 0, as the memory is made with zeros
    choice = tokens.topk_ids, tokens.topk_weights
    # it depends on the plan alone, but is done for every call: a captured graph follows its refills
    sort_pairs(tokens, routing.plan, *choice, None, programmatic)
    return tokens


@lru_cache(maxsize=1024)
def _alone(top_k: int, num_experts: int, has_map: bool, programmatic: bool) -> SpecializedKernel:
    sizes = RoutingSizes(num_experts, _OWN_ALONE, programmatic, top_k, has_map)
    return _kernel(routing_kernels.alone_kernel, sizes, 1)


@lru_cache(maxsize=1024)
def _compare(
    pairs: int,
    top_k: int,
    num_experts: int,
    has_map: bool,
    cut: tuple[int, bool],
    programmatic: bool,
) -> SpecializedKernel:
    width = max(16, power_of_two(pairs))
    # one warp sums without a barrier; its lanes hold more values of a pair, so it takes fewer pairs
    own, warps = (2, 1) if width <= 128 else (4, 4)
    if pairs <= 8:
        own = 8
    sizes = RoutingSizes(
        NUM_EXPERTS=num_experts,
        OWN=own,
        PROGRAMMATIC=programmatic,
        TOP_K=top_k,
        HAS_MAP=has_map,
        TILE=cut[0],
        SINGLES=cut[1],
        BLOCK_Q=width,
        ONE_PROGRAM=pairs <= 8,
    )
    return _kernel(routing_kernels.compare_kernel, sizes, warps)


@lru_cache(maxsize=1024)
def _count(top_k: int, num_experts: int, has_map: bool, programmatic: bool) -> SpecializedKernel:
    sizes = RoutingSizes(num_experts, _OWN, programmatic, top_k, has_map)
    return _kernel(routing_kernels.count_kernel, sizes, 4)


@lru_cache(maxsize=1024)
def _scatter(
    num_experts: int, cut: tuple[int, bool], num_keys: int, pairs: int, programmatic: bool
) -> SpecializedKernel:
    sizes = RoutingSizes(
        NUM_EXPERTS=num_experts,
        OWN=_OWN,
        PROGRAMMATIC=programmatic,
        TILE=cut[0],
        SINGLES=cut[1],
        BLOCK_K=max(_OWN, min(_MOST_SCANNED, power_of_two(num_keys))),
        HALF=16 if pairs < 2**16 else 32,
    )
    return _kernel(routing_kernels.scatter_kernel, sizes, 4 if num_keys <= 512 else 8)


def _kernel(kernel: Any, sizes: RoutingSizes, warps: int) -> SpecializedKernel:
    return specialized(kernel, 1, num_warps=warps, programmatic=sizes.PROGRAMMATIC, SIZES=sizes)
