"""`run_linear` again: both launches of a layer and a plan, kept with all that does not change.

In a model every layer meets the same plan at every step. What is left to do for a call that was
made before is to look it up and to hand the addresses of x, h and y to two kernels that are
compiled and whose other arguments are known. The memory of h is the plan's, and serves all layers
in turn.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import Any, NamedTuple

import torch

from lora_backends.backend import LoRAPlan
from lora_backends.gpu.boxes import by_address
from lora_backends.gpu.launching import (
    INTERPRETED,
    Arguments,
    ReadyLaunch,
    Variant,
    are_launches_told,
    current_stream,
    is_current,
)
from lora_backends.weights import LoRAWeights

EMPTY_ROW = 0 if INTERPRETED else 1
"""Rows that are launched for a batch without adapters, which does nothing but compile what a CUDA
graph may need that is captured next: nothing can be compiled in a capture."""

MOST_KEPT = 4096
"""Calls that a plan remembers: layers, times the kinds of x and y that they are called with."""

LARGEST_KEPT = 2**20
"""float32 values of h that a plan keeps memory for: taking it anew is 3 to 6 us of host time, which
larger batches do not notice."""

MOST_STREAMS = 16
"""Streams and threads that a plan keeps memory for."""


class Launched(NamedTuple):
    """What a kernel was launched with."""

    variant: Variant
    arguments: Arguments


@dataclass(eq=False, slots=True)
class ReadyLinear:
    """Both launches of one `run_linear`, and the arguments that they are for."""

    choice: object  # what tile sizes came from
    device: torch.device
    x_shape: torch.Size
    x_dtype: torch.dtype
    y_shape: torch.Size
    x_span: int  # bytes from the first to the last element
    y_span: int
    weights: tuple[int, ...]  # addresses of the layer's tensors, to notice that one has moved
    h_values: int  # float32, of the planes between the kernels
    shrink: ReadyLaunch  # x and h move
    expand: ReadyLaunch  # h and y move


@dataclass(eq=False)
class RememberingPlan(LoRAPlan):
    """A plan that remembers the launches of the layers that it was used with."""

    _ready: dict[Any, ReadyLinear] = field(default_factory=dict, init=False, repr=False)
    _memory: dict[Any, tuple[int, torch.Tensor]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __getstate__(self) -> dict[str, Any]:
        # a copy has tables of its own
        return super().__getstate__() | {"_ready": {}, "_memory": {}}

    def repeat(
        self,
        handles: tuple[int, ...],
        choice: object,
        rows: int,
        capturing: bool,
        x: torch.Tensor,
        weights: LoRAWeights,
        y: torch.Tensor,
        keep: bool,
    ) -> bool:
        """Launch what `remember` was given, if that is for a call with just these arguments.

        A call that was remembered has passed all checks, so nothing is checked again but that
        this one is no other: one look takes less than all checks would, and most calls of a model
        are repeated.

        Args:
            handles: as in `remember`.
            choice: as in `remember`.
            rows: of the grid.
            capturing: whether a CUDA graph is being captured.
            x: as in `run_linear`, of whatever type; with more axes in front if contiguous.
            weights: the layer.
            y: base_output, of whatever type, with the axes of x.
            keep: whether memory for h may be taken that lives as long as the plan.

        Returns:
            Whether y is done.
        """
        if type(x) is not torch.Tensor or type(y) is not torch.Tensor:
            return False
        try:
            x_first, y_first = x.data_ptr(), y.data_ptr()
            key = _key_of(handles, x, x_first, y, y_first)
            found, addresses = self._ready.get(key), _addresses_of(weights)
        except RuntimeError:  # no strides or no memory: the checks say what is wrong
            return False
        if found is None or found.choice is not choice or found.weights != addresses:
            found = self._flattened(key, handles, choice, addresses, x, y)
        if (
            found is None
            or x.shape != found.x_shape
            or x.dtype != found.x_dtype
            or y.shape != found.y_shape
            or x.device != found.device
            or y.device != found.device
            or (torch.is_grad_enabled() and _wants_gradient(x, weights, y))
            or not is_current(found.device)
        ):
            return False
        if x_first < y_first + found.y_span and y_first < x_first + found.x_span:
            return False  # columns of one buffer, or an error
        if rows:
            stream = current_stream(found.device.index)
            h = self._memory_of_h(found, stream, keep and not capturing)
            h_first, told = h.data_ptr(), are_launches_told()
            found.shrink.launch(rows, stream, x_first, h_first, told)
            found.expand.launch(rows, stream, h_first, y_first, told)
        return True

    def _flattened(
        self,
        key: Any,
        handles: tuple[int, ...],
        choice: object,
        addresses: tuple[int, ...],
        x: torch.Tensor,
        y: torch.Tensor,
    ) -> ReadyLinear | None:
        """Return the launches for the rows of x and y, and remember them for their own shapes."""
        if x.ndim < 3 or x.shape[:-1] != y.shape[:-1]:
            return None
        if not (x.is_contiguous() and y.is_contiguous()):
            return None
        rows, columns = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        found = self._ready.get(_key_of(handles, rows, x.data_ptr(), columns, y.data_ptr()))
        if found is None or found.choice is not choice or found.weights != addresses:
            return None
        if found.x_shape != rows.shape or found.y_shape != columns.shape:
            return None
        return self._keep(key, replace(found, x_shape=x.shape, y_shape=y.shape))

    def _keep(self, key: Any, found: ReadyLinear) -> ReadyLinear:
        if len(self._ready) >= MOST_KEPT:
            self._ready.clear()
        self._ready[key] = found
        return found

    def _memory_of_h(self, found: ReadyLinear, stream: int, keep: bool) -> torch.Tensor:
        """Return memory that nothing else on the stream uses before the launches that follow.

        It is kept for whoever asks for that alone: where a CUDA graph or a compiled program is
        being captured or warmed up, what is allocated belongs to that. Each thread has its own,
        since its launches may come between those of another.
        """
        if not keep or found.h_values > LARGEST_KEPT:
            return torch.empty(found.h_values, dtype=torch.float32, device=found.device)
        place = stream, get_ident()
        values, kept = self._memory.get(place, (0, None))
        if kept is None or values < found.h_values:
            if len(self._memory) >= MOST_STREAMS:
                self._memory.clear()
            kept = torch.empty(found.h_values, dtype=torch.float32, device=found.device)
            self._memory[place] = found.h_values, kept
        return kept

    def remember(
        self,
        handles: tuple[int, ...],
        choice: object,
        x: torch.Tensor,
        weights: LoRAWeights,
        y: torch.Tensor,
        shrink: Launched,
        expand: Launched,
    ) -> None:
        """Keep the launches of a call that was just made, where they may be repeated.

        Args:
            handles: of backend and weights, and whatever the shape of h depends on.
            choice: an object that stands for where tile sizes come from.
            x: of the call.
            weights: the layer.
            y: of the call.
            shrink: x is its first pointer, h the last one.
            expand: h is its first pointer, y the third.
        """
        if INTERPRETED or not _tables_are_contiguous(weights):
            return  # not contiguous: copies were passed on
        x_span, y_span = _span_of(x), _span_of(y)
        x_first, y_first = x.data_ptr(), y.data_ptr()
        if x_first < y_first + y_span and y_first < x_first + x_span:
            return  # `repeat` leaves it to the checks whether they overlap
        boxes = tuple(map(by_address, expand.arguments.boxes))
        found = ReadyLinear(
            choice,
            x.device,
            x.shape,
            x.dtype,
            y.shape,
            x_span,
            y_span,
            _addresses_of(weights),
            math.prod(expand.arguments.tensors[0].shape),
            shrink.variant.ready(shrink.arguments, len(shrink.arguments.tensors) - 1),
            expand.variant.ready(expand.arguments._replace(boxes=boxes), 2),
        )
        self._keep(_key_of(handles, x, x_first, y, y_first), found)


def with_contiguous_tables(weights: LoRAWeights) -> LoRAWeights:
    """Return the layer with contiguous ranks and scalings, as kernels take them.

    Copies are made here, before the first launch: between two kernels of which the second may
    start early, a third must not come.
    """
    if _tables_are_contiguous(weights):
        return weights
    found = copy.copy(weights)
    object.__setattr__(found, "ranks", weights.ranks.contiguous())
    object.__setattr__(found, "scalings", weights.scalings.contiguous())
    return found


def _tables_are_contiguous(weights: LoRAWeights) -> bool:
    return weights.ranks.is_contiguous() and weights.scalings.is_contiguous()


def _key_of(
    handles: tuple[int, ...], x: torch.Tensor, x_first: int, y: torch.Tensor, y_first: int
) -> tuple[Any, ...]:
    """Return what compiled kernels and their other arguments depend on."""
    return handles, x.stride(), y.stride(), y.dtype, x_first & 15 == 0, y_first & 15 == 0


def _span_of(rows: torch.Tensor) -> int:
    """Return the bytes from the first element of a matrix to behind its last one."""
    elements = (rows.shape[0] - 1) * rows.stride(0) + rows.shape[1] if rows.numel() else 0
    return elements * rows.element_size()


def _wants_gradient(x: torch.Tensor, weights: LoRAWeights, y: torch.Tensor) -> bool:
    tensors = (x, y, weights.lora_a, weights.lora_b, weights.bias)
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _addresses_of(weights: LoRAWeights) -> tuple[int, ...]:
    """Return where the tensors of a layer lie."""
    bias = weights.bias
    return (
        weights.lora_a.data_ptr(),
        weights.lora_b.data_ptr(),
        weights.ranks.data_ptr(),
        weights.scalings.data_ptr(),
        0 if bias is None else bias.data_ptr(),
    )
