"""How a backend cuts one batch for one layer: what `lora-backends explain` draws.

An engine offers it in a module ``explain`` of its own, with one function of that name; it takes
its plan and its tile sizes from the functions that a call takes them from.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from typing import Any

import torch

from lora_backends.batch import LoRABatch
from lora_backends.errors import InvalidInputError, LoRABackendError, UnsupportedInputError
from lora_backends.registry import backend_class, backend_names


@dataclass(frozen=True)
class Layer:
    """The shapes of a layer; explaining needs no weights.

    Raises:
        InvalidInputError: sizes below 1, or ranks that do not fit.
    """

    in_features: int
    output_slices: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]  # [num_slots][num_slices], 0..max_rank
    max_rank: int
    item_bytes: int = 2  # of one weight

    def __post_init__(self) -> None:
        sizes = (self.in_features, *self.output_slices, self.max_rank)
        widths = {len(ranks) for ranks in self.ranks}
        wide = [rank for ranks in self.ranks for rank in ranks if not 0 <= rank <= self.max_rank]
        if min(sizes) < 1 or not self.output_slices:
            raise InvalidInputError(f"not a layer\n  given: {self}\n  allowed: sizes of 1 or more")
        if widths != {len(self.output_slices)} or wide:
            raise InvalidInputError(
                f"ranks do not fit the layer\n  given: {self.ranks}\n"
                f"  allowed: for each slot {len(self.output_slices)} ranks, 0 to {self.max_rank}"
            )


@dataclass(frozen=True)
class Piece:
    """Tokens of one slot that programs take together."""

    slot: int
    tokens: tuple[int, ...]  # in kernel order
    places: int  # rows that are computed, at least as many as tokens


@dataclass(frozen=True)
class Share:
    """How much of what is computed counts."""

    used: int
    computed: int

    @property
    def wasted(self) -> float:
        """The part that is computed for nothing, 0 to 1."""
        return 1 - self.used / self.computed if self.computed else 0.0


@dataclass(frozen=True)
class Launch:
    """One half of the work; shares count the programs that have something to do."""

    name: str  # "shrink" or "expand"
    unit: str  # what a program is to the engine
    programs: int
    idle: int  # programs that find nothing to do and return
    rows: Share  # tokens against places
    columns: Share  # inputs of the shrink, columns of y of the expand
    ranks: Share  # true ranks against lanes
    products: Share  # multiplications, all three together


@dataclass(frozen=True)
class Explanation:
    """One batch and layer in one engine's terms."""

    backend: str
    token_slots: tuple[int, ...]
    num_slots: int
    layer: Layer
    order: tuple[int, ...]  # tokens with an adapter as the kernels meet them
    piece_name: str  # "tile", "segment", ...
    pieces: tuple[Piece, ...]
    launches: tuple[Launch, ...]
    facts: tuple[str, ...]  # sizes, and where they come from
    legend: str  # one paragraph


def explain(backend: str, batch: LoRABatch, layer: Layer) -> Explanation:
    """Return how a backend cuts a batch for a layer.

    Args:
        backend: a registered name whose engine offers it; it need not run here.
        batch: the slots of the tokens.
        layer: the shapes, with ranks for as many slots as the batch has.

    Returns:
        What there is to draw.

    Raises:
        InvalidInputError: no such backend, or a layer for another number of slots.
        BackendUnavailableError: the backend does not import.
        UnsupportedInputError: the engine does not offer it.
    """
    found = _explainer(backend)
    if found is None:
        offering = [name for name in backend_names() if _offers(name)]
        raise UnsupportedInputError(
            f"backend {backend!r} does not explain how it cuts a batch\n"
            f"  allowed: {', '.join(offering) or 'none of those registered'}"
        )
    if len(layer.ranks) != batch.num_slots:
        raise InvalidInputError(
            f"ranks of {len(layer.ranks)} slots for a batch of num_slots={batch.num_slots}"
        )
    explanation: Explanation = found.explain(batch, layer)
    return explanation


def tokens_of(batch: LoRABatch) -> tuple[int, ...]:
    """Return the slot of every token."""
    return tuple(int(slot) for slot in batch.token_slots.tolist())


def table_device() -> torch.device:
    """Return the device whose table of tile sizes applies here."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _explainer(backend: str) -> Any | None:
    home = backend_class(backend).__module__
    if not hasattr(sys.modules[home], "__path__"):
        return None
    found = importlib.util.find_spec(f"{home}.explain")
    return importlib.import_module(found.name) if found else None


def _offers(backend: str) -> bool:
    try:
        return _explainer(backend) is not None
    except LoRABackendError:
        return False
