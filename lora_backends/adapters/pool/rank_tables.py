"""Ranks and scalings of every stack of a pool, in one tensor each."""

from __future__ import annotations

from collections.abc import Mapping

import torch

ALIGNED = 32
"""Elements that each table's start is a multiple of: kernels are compiled for aligned pointers."""


class Tables:
    """Tables [num_slots, slices] of groups, and [num_slots, 1] of each module of a larger group.

    They are contiguous parts of one tensor, so a few launches write a slot of all of them.
    """

    def __init__(
        self, groups: Mapping[str, tuple[str, ...]], num_slots: int, device: torch.device
    ) -> None:
        self._num_slots, self._device = num_slots, device
        self._starts: dict[tuple[str, ...], int] = {}
        self._columns: dict[str, list[tuple[int, int]]] = {}  # path -> (place in slot 0, stride)
        size = 0
        for group in dict.fromkeys([*groups.values(), *((path,) for path in groups)]):
            self._starts[group] = size
            for index, path in enumerate(group):
                self._columns.setdefault(path, []).append((size + index, len(group)))
            # Rounded up, so that the next table is aligned.
            size += -(-num_slots * len(group) // ALIGNED) * ALIGNED
        self._ranks = torch.zeros(size, dtype=torch.int32, device=device)
        self._scalings = torch.zeros(size, dtype=torch.float32, device=device)
        columns = [column for of_path in self._columns.values() for column in of_path]
        places = torch.tensor(columns, dtype=torch.int64, device=device)
        self._places, self._strides = places.reshape(-1, 2).unbind(1)

    def of(self, *group: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ranks, int32, and the scalings, float32, of a group or of one module."""
        start, size = self._starts[group], self._num_slots * len(group)
        ranks, scalings = (
            table[start : start + size].view(self._num_slots, len(group))
            for table in (self._ranks, self._scalings)
        )
        return ranks, scalings

    def write(self, slot: int, values: Mapping[str, tuple[int, float]]) -> None:
        """Write the rank and scaling of modules, by path, into a slot."""
        places = {
            place + slot * stride: value
            for path, value in values.items()
            for place, stride in self._columns[path]
        }
        ranks, scalings = zip(*places.values(), strict=True)
        at = self._moved(list(places), torch.int64)
        self._scalings.index_copy_(0, at, self._moved(scalings, torch.float32))
        self._ranks.index_copy_(0, at, self._moved(ranks, torch.int32))  # last: 0 hides the rest

    def zero(self, slot: int) -> None:
        """Write rank 0 of every module into a slot."""
        self._ranks.index_fill_(0, self._places + slot * self._strides, 0)

    def _moved(self, values: object, dtype: torch.dtype) -> torch.Tensor:
        # CUDA reads pageable memory before it returns, so the host need not wait for the copy
        return torch.tensor(values, dtype=dtype, device="cpu").to(self._device, non_blocking=True)
