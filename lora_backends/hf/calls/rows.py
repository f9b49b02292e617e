"""Base of calls that find the row of each position by the form of an input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from lora_backends.adapters import AdapterPool
from lora_backends.backend import LoRABackend
from lora_backends.batch import NO_ADAPTER
from lora_backends.hf.calls.running import ModelCall
from lora_backends.hf.layout.images import Images
from lora_backends.hf.layout.layout import Layout, Spread, Untried


class RowsCall(ModelCall):
    """A call whose plans follow from how the rows of the batch lie in an input."""

    def __init__(self, model: str, pool: AdapterPool, images: Images, backend: LoRABackend) -> None:
        super().__init__(model, pool)
        self.backend, self._pool, self._images = backend, pool, images
        self._untried: Untried | None = None  # inputs of this pass that no trial pass gave
        # Most modules of a pass see inputs of one layout and shape: these skip the search.
        self._layout: Layout | None = None
        self._shape: tuple[int, ...] | None = None
        self._plan: Any = None

    def plan(self, shape: tuple[int, ...], layout: Layout, paths: Sequence[str]) -> Any:
        """Return the plan for an input of modules at `paths`, of `shape` without its last axis.

        Raises:
            UnsupportedInputError: the row of some position is not known, and rows differ.
            InvalidInputError: a graph captures a shape that no call has met before.
        """
        if layout is self._layout and shape == self._shape and self._untried is None:
            return self._plan
        return self._find_plan(shape, layout, paths)

    def _find_plan(self, shape: tuple[int, ...], layout: Layout, paths: Sequence[str]) -> Any:
        """Return the plan as `plan` does, for any input."""
        raise NotImplementedError

    def _reason_against(
        self, spread: Spread | None, layout: Layout, key: str, allowed: int
    ) -> str | None:
        """Return why the rows of an input are not known, or None; count the call under `key`.

        `spread` is that of the rows, if the layout has one; `allowed` are the calls of a module
        with text alone.
        """
        # An untried input counts even if the layout knows the form: images may have that form.
        reason = layout.reason if spread is None else None
        if self._untried is not None and not reason:
            reason = self._untried.reason_against(key, allowed)
        return reason


def spread_slots(row_slots: Sequence[int], spread: Spread) -> torch.Tensor:
    """Return the slot of every position of an input whose rows lie as `spread` says."""
    before, after = spread
    slots = torch.tensor(row_slots, dtype=torch.int64, device="cpu")
    return slots.repeat_interleave(after).repeat(before)


def uses_one_slot(
    touched: Mapping[int, set[str]], row_slots: Iterable[int], paths: Sequence[str]
) -> bool:
    """Return whether rows have the same adapters, or none, in modules that see the same input.

    `touched` has the paths of the modules that the adapters of each number touch. `row_slots` has
    the number in `Choices` of every row, which is a slot unless it is a blend.
    """
    slots = {*row_slots}
    return len(slots) == 1 or all(touched[slot].isdisjoint(paths) for slot in slots)


def slot_of_all(row_slots: Iterable[int]) -> int:
    """Return the slot that all rows use, or `NO_ADAPTER` where they differ."""
    slots = {*row_slots}
    return slots.pop() if len(slots) == 1 else NO_ADAPTER
