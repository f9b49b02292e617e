"""What was measured on a card: its limits, and times of `run_linear` by layer and batch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from lora_backends.errors import InvalidInputError, did_you_mean
from lora_backends.planning.shapes import EIGHT_BIT, SCALE_BYTES, Layer, ModelShapes

TABLE = "cards.json"
LAUNCHES = 2  # of run_linear: one makes h, one makes y


class Measured(NamedTuple):
    """One cell: `run_linear` of a layer with a batch."""

    in_features: int
    out_features: int
    slices: int
    tokens: int
    adapters: int  # that have a token
    rank: int
    efficiency: float  # limit over time

    def distance(self, other: Measured) -> float:
        """Return how unlike two cells are: the sum of squares of the sizes' octaves."""
        return sum(math.log2(a / b) ** 2 for a, b in zip(self[:-1], other[:-1], strict=True))


@dataclass(frozen=True)
class Card:
    """A device, as it was measured.

    Args:
        name: of the device.
        memory_bytes: of it.
        copy_bytes_per_s: bytes that a large copy reads and writes in a second.
        flop_per_s: of large products.
        launch_s: between two kernels of a CUDA graph.
        host_s: of the host, for one `run_linear`; hidden behind the device in a CUDA graph.
        cells: efficiencies of `run_linear`.
        source: where the numbers come from.
    """

    name: str
    memory_bytes: int
    copy_bytes_per_s: float
    flop_per_s: float
    launch_s: float
    host_s: float
    cells: tuple[Measured, ...]
    source: str

    def linear_s(
        self,
        layer: Layer,
        tokens: int,
        adapters: int,
        rank: int,
        width: int,
        stored: int | None = None,
    ) -> float:
        """Return the seconds of one `run_linear`.

        The limit is the bytes of `Cell.bytes_moved` over the rate of a copy, and the launches; the
        nearest measured cell says which part of the limit is reached.

        Args:
            layer: with the widths of x and y.
            tokens: rows of x.
            adapters: that have a token.
            rank: of each.
            width: bytes of a value of x and y.
            stored: bytes of a value of A and B; None: `width`. One byte has scales besides.
        """
        out, slices = sum(layer.output_slices), len(layer.output_slices)
        stored = stored or width
        moved = width * tokens * (layer.in_features + 2 * out)
        moved += stored * adapters * rank * (slices * layer.in_features + out)
        if stored == 1:
            moved += SCALE_BYTES * adapters * (slices * rank + out)
        limit = moved / self.copy_bytes_per_s + LAUNCHES * self.launch_s
        like = Measured(layer.in_features, out, slices, tokens, adapters, rank, 1.0)
        return limit / min(self.cells, key=like.distance).efficiency

    def lora_s(self, model: ModelShapes, tokens: int, adapters: int, eager: bool = False) -> float:
        """Return the seconds that the adapters add to a pass of the model."""
        if not tokens or not adapters:
            return 0.0
        width = 4 if model.dtype == "float32" else 2
        stored = 1 if model.adapter_dtype in EIGHT_BIT else width
        return sum(
            layer.count
            * (
                self.linear_s(layer, tokens, adapters, model.rank, width, stored)
                + (self.host_s if eager else 0.0)
            )
            for layer in model.layers
        )


def card_names() -> list[str]:
    """Return the cards that the package has measurements of."""
    return sorted(_cards())


def find_card(name: str) -> Card:
    """Return a card that the package has measurements of.

    Raises:
        InvalidInputError: it has none of this card.
    """
    cards = _cards()
    wanted = {known.lower().removeprefix("nvidia "): known for known in cards}
    key = wanted.get(name.lower().removeprefix("nvidia "))
    if key is None:
        raise InvalidInputError(
            f"no card named {name!r}{did_you_mean(name.lower(), wanted)}\n"
            f"  allowed: {', '.join(cards)}, or a file\n"
            f"  to do: measure your card: lora-backends bench --preset llama3-8b --json > card.json"
        )
    return cards[key]


def read_card(path: Path, memory_bytes: int) -> Card:
    """Return a card from a result of `lora-backends bench` on it.

    Args:
        path: of the result.
        memory_bytes: of the card, which the result does not tell.

    Raises:
        InvalidInputError: no such file, or it has no cell of `run_linear` with a time.
    """
    from lora_backends.bench.results import read_result
    from lora_backends.bench.schema import check_cells

    result = read_result(path)
    check_cells(result, path)
    return card_of(result, memory_bytes, str(path))


def card_of(result: Mapping[str, Any], memory_bytes: int, source: str) -> Card:
    """Return a card from the cells of a result; of several contenders, the fastest of each cell."""
    cells = []
    for row in result["rows"]:
        found = [t["efficiency"] for t in row["results"].values() if "efficiency" in t]
        if row["operation"] == "run_linear" and found:
            out = row["output_slices"]
            sizes = (row["in_features"], sum(out), len(out), row["tokens"], row["active_adapters"])
            cells.append(Measured(*sizes, row["rank"], max(found)))
    if not cells:
        raise InvalidInputError(
            f"{source} has no time of run_linear\n  to do: lora-backends bench --json > card.json"
        )
    limits = result["limits"]
    return Card(
        name=result["device"],
        memory_bytes=memory_bytes,
        copy_bytes_per_s=1e9 * limits["copy_gb_per_s"],
        flop_per_s=1e9 * (limits.get("gemm_gflop_per_s") or math.inf),
        launch_s=1e-6 * (limits.get("launch_us") or 0.0),
        host_s=1e-6 * (result.get("host_us") or {}).get("run_linear", 0.0),
        cells=tuple(cells),
        source=source,
    )


def table_of(cards: Iterable[Card]) -> str:
    """Return the package's table of cards as JSON, a cell a line."""
    entries = []
    for card in cards:
        head = {k: v for k, v in vars(card).items() if k != "cells"}
        cells = ",\n  ".join(json.dumps(list(cell)) for cell in card.cells)
        entries.append(json.dumps(head)[:-1] + f', "cells": [\n  {cells}\n ]}}')
    return "[\n " + ",\n ".join(entries) + "\n]\n"


@cache
def _cards() -> dict[str, Card]:
    text = files(__package__).joinpath("tables", TABLE).read_text(encoding="utf-8")
    cards = {}
    for entry in json.loads(text):
        cells = tuple(Measured(*cell) for cell in entry["cells"])
        cards[entry["name"]] = Card(**{**entry, "cells": cells})
    return cards


def with_memory(card: Card, gigabytes: float | None) -> Card:
    """Return a card of another size of memory, in 1e9 bytes; None leaves it."""
    return card if gigabytes is None else replace(card, memory_bytes=int(1e9 * gigabytes))
