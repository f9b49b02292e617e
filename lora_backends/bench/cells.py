"""Cells: the shape of a layer, a batch and an operation, timed together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lora_backends.errors import InvalidInputError, did_you_mean, shown
from lora_backends.model_shapes import EMBEDDING, LAYER, Projections
from lora_backends.operations import DENSE, Input, find_operation

MIXES = ("identical", "distinct", "uniform", "skewed")
"""How tokens are assigned to adapters, after Punica (arXiv 2310.18547)."""
ZIPF = 1.5
MOST = 2**31 - 1  # of any size
H_BYTES, ID_BYTES = 4, 8  # of one value of h, and of one token id
MIN_SLOTS = 8  # a stack usually has more slots than a small batch uses

Composition = tuple[int, int, int, str]  # tokens, adapters, rank, mix

_SMALL: Sequence[Composition] = (
    (1, 1, 16, "uniform"),
    (16, 8, 16, "uniform"),
    (64, 1, 16, "identical"),
    (64, 8, 16, "uniform"),
    (64, 8, 16, "skewed"),
    (64, 64, 16, "distinct"),
)
COMPOSITIONS: Mapping[str, Sequence[Composition]] = {
    "cuda": (
        *_SMALL,
        (256, 8, 16, "uniform"),
        (2048, 8, 16, "uniform"),
        (16, 8, 64, "uniform"),
        (256, 8, 64, "uniform"),
        (2048, 8, 64, "skewed"),
    ),
    "cpu": (*_SMALL, (256, 8, 16, "uniform"), (64, 8, 64, "uniform")),
}
"""The default batches for each projection, by type of device."""


@dataclass(frozen=True)
class Cell:
    """One layer, one batch and one operation.

    Args:
        projection: name of the layer in tables and plots.
        in_features: width of x.
        output_slices: width of every slice of y.
        tokens: rows of x.
        adapters: number of adapters; some may have no token.
        rank: of all adapters.
        mix: one of `MIXES`. identical: all tokens use one adapter; distinct: each token uses its
            own; uniform: round-robin, so that neighbours use different adapters; skewed: drawn
            with a popularity that falls as 1 / i^1.5, tokens of one adapter side by side.
        operation: the name of one of `operations.DENSE`.

    Raises:
        InvalidInputError: a size below 1, no such mix or operation, or an operation for another
            number of slices.

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
    operation: str = "run_linear"

    def __post_init__(self) -> None:
        object.__setattr__(self, "output_slices", tuple(self.output_slices))
        sizes = (self.in_features, *self.output_slices, self.tokens, self.adapters, self.rank)
        if not self.output_slices or min(sizes) < 1 or max(sizes) > MOST:
            raise InvalidInputError(
                f"not a cell\n  given: {shown(self)}\n  allowed: sizes from 1 to {MOST}"
            )
        if self.mix not in MIXES:
            raise InvalidInputError(
                f"no mix of adapters named {self.mix!r}{did_you_mean(self.mix, MIXES)}\n"
                f"  allowed: {', '.join(MIXES)}"
            )
        find_operation(self.operation)
        if not fits(self.operation, len(self.output_slices)):
            raise InvalidInputError(
                f"{self.operation} does not run a layer of {len(self.output_slices)} slices\n"
                f"  given: {self}"
            )
        # these mixes define the number of adapters
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
        """The slot of every token; equal cells have equal slots."""
        return deal(self.tokens, self.adapters, self.mix == "skewed")

    @property
    def active_adapters(self) -> int:
        """Number of adapters with a token."""
        if self.mix != "skewed":  # round-robin
            return min(self.tokens, self.adapters)
        return len(set(self.token_slots))

    def adapter_bytes(self, itemsize: int) -> int:
        """Return the size of one adapter's A and B."""
        width = len(self.output_slices) * self.in_features + self.out_features
        return itemsize * self.rank * width

    def bytes_moved(self, itemsize: int) -> int:
        """Return the bytes that the operation must move."""
        operation, active = find_operation(self.operation), self.active_adapters
        h = len(self.output_slices) * self.tokens * self.rank
        # active A and B are read once, and the input; y is read and written
        rows_of_a = active * len(self.output_slices) * self.rank
        inputs = {
            Input.ROWS: itemsize * (rows_of_a + self.tokens) * self.in_features,
            # of A, token ids select one column per token
            Input.TOKEN_IDS: itemsize * h + ID_BYTES * self.tokens,
            Input.H: H_BYTES * h,
        }
        outputs = {
            "h": H_BYTES * h,
            "y": itemsize * (active * self.rank + 2 * self.tokens) * self.out_features,
        }
        return inputs[operation.input] + outputs[operation.result]

    @property
    def flop(self) -> int:
        """Multiplications and additions of the operation."""
        operation, width = find_operation(self.operation), 0
        if operation.input is Input.ROWS:
            width += len(self.output_slices) * self.in_features
        if operation.result == "y":
            width += self.out_features
        return 2 * self.tokens * self.rank * width

    @property
    def launches(self) -> int:
        """Kernels that the operation needs: one that makes h, one that makes y."""
        operation = find_operation(self.operation)
        return (operation.input is not Input.H) + (operation.result == "y")

    def describe(self) -> dict[str, Any]:
        """Return the cell as a row of a result file."""
        return asdict(self) | {
            "output_slices": list(self.output_slices),
            "active_adapters": self.active_adapters,
        }


def fits(operation: str, num_slices: int) -> bool:
    """Return whether an operation takes layers of `num_slices` slices."""
    return find_operation(operation).num_slices in (None, num_slices)


def deal(tokens: int, adapters: int, skewed: bool) -> list[int]:
    """Return the slot of every token: round-robin, or drawn by popularity and sorted."""
    if not skewed:
        return [token % adapters for token in range(tokens)]
    popularity = torch.arange(1, adapters + 1, device="cpu").double() ** -ZIPF
    # a fixed seed: equal cells get equal slots in every run
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(popularity, tokens, True, generator=generator)
    # tokens of one sequence are neighbours in a batch
    return sorted(int(slot) for slot in drawn)


def make_cells(
    projections: Projections,
    device_type: str,
    tokens: Sequence[int] = (),
    adapters: Sequence[int] = (),
    ranks: Sequence[int] = (),
    mixes: Sequence[str] = (),
    operations: Sequence[str] = ("run_linear",),
) -> list[Cell]:
    """Return every operation with every projection that it takes and every batch, none twice.

    If any of tokens, adapters, ranks and mixes is given, their combinations are the batches, else
    `COMPOSITIONS` of the type of device. Operations that read token ids take the embedding, if
    there is one; others take all projections but the embedding.

    Raises:
        InvalidInputError: no such operation, or one that takes none of the projections.
    """
    compositions: Iterable[Composition] = COMPOSITIONS[device_type]
    if tokens or adapters or ranks or mixes:
        compositions = itertools.product(
            tokens or (16, 64, 256), adapters or (8,), ranks or (16,), mixes or ("uniform",)
        )
    layers = [
        (operation, name, *projections[name])
        for operation in operations
        for name in projections_of(operation, projections)
    ]
    cells = [
        Cell(name, width, slices, *batch, operation=operation)
        for (operation, name, width, slices), batch in itertools.product(layers, list(compositions))
    ]
    # mixes that fix the number of adapters make cells equal
    return list(dict.fromkeys(cells))


def projections_of(operation: str, projections: Projections) -> list[str]:
    """Return the names of the projections that an operation takes; none is an error."""
    ids = find_operation(operation).input is Input.TOKEN_IDS
    names = [
        name
        for name, (_, slices) in projections.items()
        if fits(operation, len(slices)) and (name == LAYER or ids is (name == EMBEDDING))
    ]
    if not names:
        raise InvalidInputError(
            f"{operation} takes none of the layers\n  given: {projections}\n"
            f"  needed: {DENSE[operation].num_slices or 'any number of'} slices"
        )
    return names


def num_layers(cell: Cell, itemsize: int, rotated_bytes: float, most: int) -> int:
    """Return how many layers hold `rotated_bytes` together, 4 to `most` of them."""
    size = cell.num_slots * cell.adapter_bytes(itemsize)
    return max(4, min(most, math.ceil(rotated_bytes / size)))
