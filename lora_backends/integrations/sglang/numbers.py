"""Ranks and scalings of the slots on the device, where captured graphs read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Numbers:
    """One rank and one scaling per slot, shared by all layers with the same number of slices.

    SGLang has one of each per adapter. When a batch changes a value, the tensors are rewritten in
    place, on the stream of the forward pass.

    Args:
        num_slots: of every layer.
        device: of the layers.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.device = device
        self._ranks = [0] * num_slots
        self._scalings = [0.0] * num_slots
        self._linear: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by number of slices
        self._experts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of_linear(self, num_slices: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ranks and scalings, [num_slots, num_slices] each."""
        if num_slices not in self._linear:
            self._linear[num_slices] = self._new(num_slices)
            self._write()
        return self._linear[num_slices]

    def of_experts(self, num_slices: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ranks, and scalings of 1, [num_slots, 1, num_slices] each."""
        if num_slices not in self._experts:
            self._experts[num_slices] = self._new(1, num_slices)
            self._write()
        return self._experts[num_slices]

    def set(self, slots: Sequence[int], ranks: Sequence[int], scalings: Sequence[float]) -> None:
        """Set ranks and scalings of some slots, from lists with an entry per slot."""
        changed = False
        for slot in slots:
            if (self._ranks[slot], self._scalings[slot]) != (ranks[slot], scalings[slot]):
                self._ranks[slot], self._scalings[slot] = ranks[slot], scalings[slot]
                changed = True
        if changed:
            self._write()

    def _new(self, *axes: int) -> tuple[torch.Tensor, torch.Tensor]:
        # tensors made in inference mode could not be written outside of it
        with torch.inference_mode(False):
            shape = (self.num_slots, *axes)
            return (
                torch.zeros(shape, dtype=torch.int32, device=self.device),
                torch.ones(shape, dtype=torch.float32, device=self.device),
            )

    def _write(self) -> None:
        ranks = self._on_device(self._ranks, torch.int32)
        scalings = self._on_device(self._scalings, torch.float32)
        with torch.no_grad():
            for of_ranks, of_scalings in self._linear.values():
                of_ranks.copy_(ranks[:, None].expand_as(of_ranks))
                of_scalings.copy_(scalings[:, None].expand_as(of_scalings))
            for of_ranks, _ in self._experts.values():
                of_ranks.copy_(ranks[:, None, None].expand_as(of_ranks))

    def _on_device(self, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        if self.device.type == "cpu":
            return torch.tensor(values, dtype=dtype)
        pinned = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=True)
        return pinned.to(self.device, non_blocking=True)
