"""Both launches of a site of experts, kept with every argument that stays the same.

In a model every layer meets a routing of the same sizes at every step, and most steps need kernels
that an earlier step has used. A repeated call passes to two compiled kernels the addresses of x, h,
y and the routing's tables, and the rows of h.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lora_backends.common.devices import is_capturing
from lora_backends.experts import ExpertWeights
from lora_backends.sgmv.experts.launch import (
    SiteLaunches,
    pair_factors,
    parts_of,
    tiles_of,
)
from lora_backends.sgmv.experts.routing import SgmvRouting, follow_plan, sort_tokens
from lora_backends.sgmv.launching.call_cache import Launched, scratch_of
from lora_backends.sgmv.launching.kernel import (
    RECORD,
    BoundKernel,
    has_launch_hooks,
    is_current,
    several_devices,
    stream_of,
)
from lora_backends.sgmv.launching.tma import without_tensor

MOST_SIZES = 16
"""Pairs of kernels that one call keeps; beyond, the oldest goes."""

_SHRINK = "x_ptr", "order_ptr", "tiles_ptr", "count_ptr", "h_ptr", "h_rows"
_EXPAND = "h_ptr", "y_ptr", "factors_ptr", "order_ptr", "tiles_ptr", "count_ptr", "h_rows"
"""Arguments that change from call to call."""

_SIZE = 4  # bytes of a value of scratch memory


class _Bound(NamedTuple):
    """A kernel, and the rows of its grid for each tile, as `parts_of` counts them."""

    kernel: BoundKernel
    parts: int

    @classmethod
    def of(cls, launched: Launched, changing: tuple[str, ...]) -> _Bound:
        kernel, arguments = launched
        descriptors = tuple(map(without_tensor, arguments.descriptors))
        places = [kernel.kernel.arg_names.index(name) for name in changing]
        bound = kernel.bind(arguments._replace(descriptors=descriptors), places)
        return cls(bound, parts_of(kernel))


class _Pair(NamedTuple):
    """Both kernels of one choice of tile sizes, and the sizes of h between them."""

    shrink: _Bound
    expand: _Bound
    planes: int  # of h
    row_bytes: int  # of a row of h in one plane


class CachedSite:
    """The launches of one layer and kind of arguments, for any routing: a `CachedCall`."""

    __slots__ = ("_choice", "_device", "_pairs", "_scratch", "_several", "_stream_of", "_weighted")

    def __init__(self, made: SiteLaunches, weighted: bool) -> None:
        self._choice, self._weighted = made.choice, weighted
        self._device = made.shrink.arguments.tensors[0].device
        self._several, self._stream_of = several_devices(), stream_of()
        self._scratch = scratch_of(self._device)
        self._pairs: dict[Any, _Pair] = {}  # by the kernels
        self.add(made)

    def add(self, made: SiteLaunches) -> None:
        """Keep the launches of another call of this kind, which may have used other kernels."""
        key = made.shrink.kernel, made.expand.kernel
        if key in self._pairs:
            return
        h = made.shrink.arguments.tensors[-1]
        pair = _Pair(
            _Bound.of(made.shrink, _SHRINK),
            _Bound.of(made.expand, _EXPAND),
            h.shape[0],
            h.shape[2] * h.element_size(),
        )
        kept = list(self._pairs.items())[-(MOST_SIZES - 1) :]
        self._pairs = dict([*kept, (key, pair)])  # a new one: threads may be reading the old

    def run(
        self, x: torch.Tensor, weights: ExpertWeights, routing: SgmvRouting, y: torch.Tensor
    ) -> bool:
        """Launch both kernels.

        Returns False, with neither run, if the kernels for the routing's tiles are not kept here,
        if another device is current, or if launches are only noted.
        """
        device, choice = self._device, self._choice
        if (self._several and not is_current(device)) or RECORD.get() is not None:
            return False
        programmatic = choice.options.programmatic
        follow_plan(routing, programmatic)
        stream = self._stream_of(device.index)
        capturing = bool(stream) and is_capturing(device)  # no graph captures the default stream
        place = (stream, capturing) if programmatic else None  # as `launch_place`
        both = choice.kernels(routing, place)
        pair = self._pairs.get((both.shrink, both.expand))
        if pair is None:
            return False
        if capturing:
            routing.plan.is_captured = True
        # before the shrink: as in `add_experts`, no kernel may run between it and the expand
        factors = pair_factors(routing, self._weighted)
        shrunk = sort_tokens(routing, programmatic) if choice.site.by_token else routing
        rows = shrunk.num_pairs
        values = -(-pair.planes * rows * pair.row_bytes // _SIZE)
        h = self._scratch.new(values) if stream else self._scratch.take(values)
        at_h, hooks = h.address, has_launch_hooks()
        tables, programs = _addresses(shrunk, pair.shrink.parts)
        pair.shrink.kernel.launch(programs, stream, (x.data_ptr(), *tables, at_h, rows), hooks)
        tables, programs = _addresses(routing, pair.expand.parts)
        given = (at_h, y.data_ptr(), factors.data_ptr(), *tables, rows)
        pair.expand.kernel.launch(programs, stream, given, hooks)
        routing.settled = place
        if not stream:
            self._scratch.give_back(h)
        return True


def _addresses(routing: SgmvRouting, parts: int) -> tuple[list[int], int]:
    tables, programs = tiles_of(routing, parts)
    return [table.data_ptr() for table in tables], programs
