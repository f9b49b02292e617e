"""What is timed: a cell is one layer's shape and one batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lora_backends.errors import InvalidInputError, did_you_mean
from lora_backends.model_shapes import Projections

MIXES = ("identical", "distinct", "uniform", "skewed")
"""How tokens are dealt over adapters, after Punica (arXiv 2310.18547)."""
ZIPF = 1.5
MIN_SLOTS = 8  # a stack has room for more adapters than a small batch uses

Composition = tuple[int, int, int, str]  # tokens, adapters, rank, mix

COMPOSITIONS: Mapping[str, Sequence[Composition]] = {
    "cuda": (
        (1, 1, 16, "uniform"),
        (16, 8, 16, "uniform"),
        (64, 1, 16, "identical"),
        (64, 8, 16, "uniform"),
        (64, 8, 16, "skewed"),
        (64, 64, 16, "distinct"),
        (256, 8, 16, "uniform"),
        (2048, 8, 16, "uniform"),
        (16, 8, 64, "uniform"),
        (256, 8, 64, "uniform"),
        (2048, 8, 64, "skewed"),
    ),
    "cpu": (
        (1, 1, 16, "uniform"),
        (16, 8, 16, "uniform"),
        (64, 1, 16, "identical"),
        (64, 8, 16, "uniform"),
        (64, 8, 16, "skewed"),
        (64, 64, 16, "distinct"),
        (256, 8, 16, "uniform"),
        (64, 8, 64, "uniform"),
    ),
}
"""The batches that each projection of a model is timed with, by type of device."""


@dataclass(frozen=True)
class Cell:
    """One layer and one batch.

    Args:
        projection: its name in tables and plots.
        in_features: width of x.
        output_slices: width of every slice of y.
        tokens: rows of x.
        adapters: adapters that tokens are dealt over; a batch may leave some without a token.
        rank: of all adapters.
        mix: one of `MIXES`. identical: all tokens use one adapter; distinct: every token its own;
            uniform: dealt round-robin, so that neighbours use different adapters; skewed: drawn
            with a popularity that falls as 1 / i^1.5, tokens of one adapter side by side.

    Raises:
        InvalidInputError: a size below 1, or no such mix.

    Source:
        Punica: Multi-Tenant LoRA Serving, arXiv 2310.18547, names the four mixes.
    """

    projection: str
    in_features: int
    output_slices: tuple[int, ...]
    tokens: int
    adapters: int
    rank: int
    mix: str = "uniform"

    def __post_init__(self) -> None:
        object.__setattr__(self, "output_slices", tuple(self.output_slices))
        sizes = (self.in_features, *self.output_slices, self.tokens, self.adapters, self.rank)
        if not self.output_slices or min(sizes) < 1:
            raise InvalidInputError(
                f"not a layer and a batch\n  given: {self}\n  allowed: sizes >= 1"
            )
        if self.mix not in MIXES:
            raise InvalidInputError(
                f"no mix of adapters named {self.mix!r}{did_you_mean(self.mix, MIXES)}\n"
                f"  allowed: {', '.join(MIXES)}"
            )
        fixed = {"identical": 1, "distinct": self.tokens}
        object.__setattr__(self, "adapters", fixed.get(self.mix, self.adapters))

    @property
    def num_slots(self) -> int:
        """Slots of the stack: one per adapter, 8 at least."""
        return max(MIN_SLOTS, self.adapters)

    @property
    def out_features(self) -> int:
        """Width of y."""
        return sum(self.output_slices)

    @property
    def token_slots(self) -> list[int]:
        """The slot of every token: the same ones every time."""
        return deal(self.tokens, self.adapters, self.mix == "skewed")

    @property
    def active_adapters(self) -> int:
        """Adapters that have a token."""
        return len(set(self.token_slots))

    def adapter_bytes(self, itemsize: int) -> int:
        """Return the size of one adapter's A and B."""
        width = len(self.output_slices) * self.in_features + self.out_features
        return itemsize * self.rank * width

    def bytes_moved(self, itemsize: int) -> int:
        """Return what must move: active A and B once, x once, y read and written."""
        rows = itemsize * self.tokens * (self.in_features + 2 * self.out_features)
        return self.active_adapters * self.adapter_bytes(itemsize) + rows

    @property
    def flop(self) -> int:
        """Multiplications and additions of shrink and expand."""
        width = len(self.output_slices) * self.in_features + self.out_features
        return 2 * self.tokens * self.rank * width

    def describe(self) -> dict[str, Any]:
        """Return the cell as a row of a result file."""
        return asdict(self) | {
            "output_slices": list(self.output_slices),
            "active_adapters": self.active_adapters,
        }


def deal(tokens: int, adapters: int, skewed: bool) -> list[int]:
    """Return the slot of every token: dealt round-robin, or drawn by popularity and grouped."""
    if not skewed:
        return [token % adapters for token in range(tokens)]
    popularity = torch.arange(1, adapters + 1).double() ** -ZIPF
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(popularity, tokens, True, generator=generator)
    return sorted(int(slot) for slot in drawn)


def make_cells(
    projections: Projections,
    device_type: str,
    tokens: Sequence[int] = (),
    adapters: Sequence[int] = (),
    ranks: Sequence[int] = (),
    mixes: Sequence[str] = (),
) -> list[Cell]:
    """Return every projection with every batch.

    Args:
        projections: from `preset`, `read_config`, or by hand.
        device_type: "cpu" or "cuda": which of `COMPOSITIONS` is used if no sizes are given.
        tokens: numbers of tokens; if any of the four is given, every combination is made.
        adapters: numbers of adapters.
        ranks: ranks.
        mixes: some of `MIXES`.

    Returns:
        The cells, none twice.
    """
    compositions: Iterable[Composition] = COMPOSITIONS[device_type]
    if tokens or adapters or ranks or mixes:
        compositions = itertools.product(
            tokens or (16, 64, 256), adapters or (8,), ranks or (16,), mixes or ("uniform",)
        )
    pairs = itertools.product(projections.items(), list(compositions))
    cells = [Cell(name, width, slices, *batch) for (name, (width, slices)), batch in pairs]
    return list(dict.fromkeys(cells))


def num_layers(cell: Cell, itemsize: int, rotated_bytes: float, most: int) -> int:
    """Return how many layers hold `rotated_bytes` together, 4 to `most` of them."""
    size = cell.num_slots * cell.adapter_bytes(itemsize)
    return max(4, min(most, math.ceil(rotated_bytes / size)))
