"""Lists of slots on a device, sent once and without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from lora_backends.common.devices import is_capturing

MOST_LISTS = 4096
"""Lists that are kept; those that a graph reads are kept besides."""


class _Sent(NamedTuple):
    slots: torch.Tensor  # int32
    event: torch.cuda.Event | None  # after the copy


_Key: TypeAlias = tuple[torch.device, tuple[int, ...]]
_sent: dict[_Key, _Sent] = {}
_of_graphs: dict[_Key, torch.Tensor] = {}


def slots_on(device: torch.device, slots: Sequence[int]) -> torch.Tensor:
    """Return slots as an int32 tensor on the device."""
    key = device, tuple(slots)
    if is_capturing(device):
        kept = _of_graphs.get(key)
        if kept is None and key in _sent:
            kept = _of_graphs[key] = _sent[key].slots
        # A graph that meets a list first writes it slot by slot, since it cannot wait for a copy
        # outside of it; those sent earlier have arrived, because torch waits for the device before
        # it captures.
        return _written(device, key[1]) if kept is None else kept
    sent = _sent.get(key)
    if sent is None:
        if len(_sent) >= MOST_LISTS:
            _sent.clear()
        # Memory comes from the default stream: on another stream torch may allocate from the pool
        # of a graph, which has to be free after it.
        sent = _sent[key] = _send(device, key[1])
    if sent.event is not None:
        stream = torch.cuda.current_stream(device)
        if stream != torch.cuda.default_stream(device):
            stream.wait_event(sent.event)
            sent.slots.record_stream(stream)
    return sent.slots


def _send(device: torch.device, slots: tuple[int, ...]) -> _Sent:
    if device.type != "cuda":
        return _Sent(torch.tensor(slots, dtype=torch.int32, device=device), None)
    stream = torch.cuda.default_stream(device)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        staged = torch.tensor(slots, dtype=torch.int32, device="cpu", pin_memory=True)
        sent = staged.to(device, non_blocking=True)
        event.record(stream)
    return _Sent(sent, event)


def _written(device: torch.device, slots: tuple[int, ...]) -> torch.Tensor:
    written = torch.empty(len(slots), dtype=torch.int32, device=device)
    for at, slot in enumerate(slots):
        written[at].fill_(slot)
    return written
