"""How a backend cuts one batch for one layer, as `lora-backends explain` draws it.

An engine offers it in its module ``explain``, as a function of that name. The function takes plan
and tile sizes from the same functions as a call does.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch

from lora_backends.batch import LoRABatch
from lora_backends.errors import InvalidInputError, LoRABackendError, UnsupportedInputError
from lora_backends.operations import Input, Operation, find_operation
from lora_backends.selection.registry import backend_class, backend_names


@dataclass(frozen=True)
class Layer:
    """The shapes of a layer; no weights are needed.

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
    """Tokens of one slot that programs process together."""

    slot: int
    tokens: tuple[int, ...]  # in kernel order
    places: int  # rows computed, at least len(tokens)


class Share(NamedTuple):
    """The useful part of the computed work."""

    used: int
    computed: int

    @property
    def wasted(self) -> float:
        """The useless part, 0 to 1."""
        return 1 - self.used / self.computed if self.computed else 0.0


@dataclass(frozen=True)
class Launch:
    """One kernel launch; shares count the programs that have work."""

    name: str  # "shrink" or "expand"
    unit: str  # the engine's word for a program
    programs: int
    idle: int  # programs without work
    rows: Share  # tokens against places
    columns: Share  # inputs of the shrink, columns of y of the expand
    ranks: Share  # true ranks against lanes
    products: Share  # multiplications: all three axes together


@dataclass(frozen=True)
class Program:
    """The sizes that a program multiplies, or each of `count` programs."""

    rows: Share
    columns: Share
    ranks: Share
    count: int = 1


def launch_of(
    name: str, unit: str, work: Iterable[Program], programs: int | None = None, parts: int = 1
) -> Launch:
    """Return a launch from its programs with work; `unit` is the engine's word for a program.

    `programs` are those launched, None: those with work; `parts` of them share the work of one.
    """
    rows, columns, ranks, products = ([0, 0] for _ in range(4))
    busy = 0
    for program in work:
        busy += parts * program.count
        for i in range(2):  # used, computed
            row, column, rank = program.rows[i], program.columns[i], program.ranks[i]
            rows[i] += program.count * row
            columns[i] += program.count * column
            ranks[i] += program.count * rank
            products[i] += program.count * row * column * rank
    launched = busy if programs is None else programs
    shares = (Share(*total) for total in (rows, columns, ranks, products))
    return Launch(name, unit, launched, launched - busy, *shares)


@dataclass(frozen=True)
class Explanation:
    """One batch and layer as one engine processes them."""

    backend: str
    token_slots: tuple[int, ...]
    num_slots: int
    layer: Layer
    order: tuple[int, ...]  # tokens with an adapter, in kernel order
    piece_name: str  # "tile", "segment", ...
    pieces: tuple[Piece, ...]
    launches: tuple[Launch, ...]
    facts: tuple[str, ...]  # sizes, and their source
    legend: str  # one paragraph
    operation: str = "run_linear"  # the launches are its own

    @classmethod
    def of(
        cls, backend: str, batch: LoRABatch, layer: Layer, pieces: Iterable[Piece], **cut: Any
    ) -> Self:
        """Return the explanation of a batch that is processed piece by piece.

        `cut` holds the other fields: piece_name, launches, facts and legend.
        """
        pieces = tuple(pieces)
        return cls(
            backend=backend,
            token_slots=tuple(batch.token_slots.tolist()),
            num_slots=batch.num_slots,
            layer=layer,
            order=tuple(token for piece in pieces for token in piece.tokens),
            pieces=pieces,
            **cut,
        )


def explain(
    backend: str, batch: LoRABatch, layer: Layer, operation: str = "run_linear"
) -> Explanation:
    """Return how a backend cuts a batch for a layer.

    Args:
        backend: a registered name whose engine offers it; it need not run here.
        batch: the slots of the tokens.
        layer: the shapes, with ranks for each slot of the batch.
        operation: its name; a part of a layer has only the launches that it needs.

    Returns:
        The explanation, to be drawn.

    Raises:
        InvalidInputError: no such backend or operation, or a layer for another number of slots, or
            of slices that the operation does not take.
        BackendUnavailableError: the backend does not import.
        UnsupportedInputError: the engine does not offer it.
    """
    explainer = _explainer(backend)
    if explainer is None:
        offering = [name for name in backend_names() if _offers(name)]
        raise UnsupportedInputError(
            f"backend {backend!r} has no explanation of how it cuts a batch\n"
            f"  allowed: {', '.join(offering) or 'none of those registered'}"
        )
    if len(layer.ranks) != batch.num_slots:
        raise InvalidInputError(
            f"ranks of {len(layer.ranks)} slots for a batch of num_slots={batch.num_slots}"
        )
    return _part(explainer.explain(batch, layer), find_operation(operation))


def _part(whole: Explanation, operation: Operation) -> Explanation:
    """Return the explanation of one operation from that of a whole layer."""
    slices = len(whole.layer.output_slices)
    if operation.num_slices not in (None, slices):
        raise InvalidInputError(
            f"{operation.name} does not run a layer of {slices} slices\n"
            f"  needed: {operation.num_slices}"
        )
    needed = {"shrink": operation.input is Input.ROWS, "expand": operation.result == "y"}
    facts = whole.facts
    if operation.input is Input.TOKEN_IDS:
        facts = (*facts, "A is gathered by token id: h takes a launch, but no products")
    return replace(
        whole,
        operation=operation.name,
        launches=tuple(launch for launch in whole.launches if needed.get(launch.name, True)),
        facts=facts,
    )


def table_device() -> torch.device:
    """Return the device whose table of tile sizes applies here."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _explainer(backend: str) -> Any | None:
    # a plugin of a single module has no folder for a module `explain`
    home = backend_class(backend).__module__
    if not hasattr(sys.modules[home], "__path__"):
        return None
    spec = importlib.util.find_spec(f"{home}.explain")
    return importlib.import_module(spec.name) if spec else None


def _offers(backend: str) -> bool:
    try:
        return _explainer(backend) is not None
    except LoRABackendError:
        return False
