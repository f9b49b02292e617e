"""Measurements of a card: its limits, and the time of `run_linear` by layer and batch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lora_backends.bench import Cell
from lora_backends.errors import InvalidInputError, did_you_mean
from lora_backends.planning.shapes import EIGHT_BIT, SCALE_BYTES, LayerGroup, ModelShapes

TABLE = "cards.json"


class Measured(NamedTuple):
    """One measurement: `run_linear` of one layer with one batch."""

    in_features: int
    out_features: int
    slices: int
    tokens: int
    adapters: int  # with at least one token
    rank: int
    efficiency: float  # modelled minimum time / measured time

    def distance(self, other: Measured) -> float:
        """Return the sum of log2(a / b)^2 over the sizes a and b of two measurements."""
        return sum(math.log2(a / b) ** 2 for a, b in zip(self[:-1], other[:-1], strict=True))


@dataclass(frozen=True)
class Card:
    """The measurements of one device."""

    name: str
    memory_bytes: int
    copy_bytes_per_s: float  # read and written by a large copy
    flop_per_s: float  # of a large matrix product
    launch_s: float  # time of a near-empty kernel in a CUDA graph; 0 on a CPU
    host_s: float  # of one `run_linear`, which a CUDA graph removes
    cells: tuple[Measured, ...]  # efficiencies of `run_linear`
    source: str  # of the numbers, for the notes of a plan

    def linear_s(
        self,
        layer: LayerGroup,
        tokens: int,  # rows of x
        adapters: int,  # with at least one token
        rank: int,  # of each adapter
        itemsize: int,  # bytes per element of x and y, and of A and B unless `eight_bit`
        eight_bit: bool = False,  # A and B have one byte per element, and a scale per row
    ) -> float:
        """Return the seconds of one `run_linear`.

            (bytes / copy_bytes_per_s + launches * launch_s) / efficiency

        Bytes and launches are those of `bench.Cell`; the efficiency is that of the nearest
        measurement.
        """
        cell = Cell("layer", layer.in_features, layer.output_slices, tokens, adapters, rank)
        active, slices = cell.active_adapters, len(layer.output_slices)
        moved = cell.bytes_moved(itemsize)
        if eight_bit:
            moved += active * (cell.adapter_bytes(1) - cell.adapter_bytes(itemsize))
            moved += active * SCALE_BYTES * (slices * rank + cell.out_features)
        limit = moved / self.copy_bytes_per_s + cell.launches * self.launch_s
        like = Measured(layer.in_features, cell.out_features, slices, tokens, active, rank, 1.0)
        return limit / min(self.cells, key=like.distance).efficiency

    def lora_s(self, model: ModelShapes, tokens: int, adapters: int, eager: bool = False) -> float:
        """Return the seconds that adapters add to one forward pass of the model.

        `adapters` have at least one of the `tokens`; an `eager` pass runs without CUDA graphs, so
        that `host_s` counts per layer.
        """
        if not tokens or not adapters:
            return 0.0
        itemsize = getattr(torch, model.dtype).itemsize
        eight_bit = model.adapter_dtype in EIGHT_BIT
        host_s = self.host_s if eager else 0.0
        return sum(
            layer.count
            * (host_s + self.linear_s(layer, tokens, adapters, model.rank, itemsize, eight_bit))
            for layer in model.layers
        )


def find_card(name: str) -> Card:
    """Return a card of the package's table, by its name in any case, with or without "NVIDIA"."""
    cards = _cards()
    wanted = {known.lower().removeprefix("nvidia "): known for known in cards}
    key = wanted.get(name.lower().removeprefix("nvidia "))
    if key is None:
        raise InvalidInputError(
            f"no card named {name!r}{did_you_mean(name.lower(), wanted)}\n"
            f"  allowed: {', '.join(cards)}, or a result file of lora-backends bench\n"
            f"  to do: measure your card: lora-backends bench --preset llama3-8b --json > card.json"
        )
    return cards[key]


def read_card(path: Path, memory_bytes: int) -> Card:
    """Return a card from a result of `lora-backends bench`, which does not state its memory."""
    # imported here: pydantic takes longer to import than the rest of this module
    from lora_backends.bench import read_result
    from lora_backends.bench.schema import check_cells

    result = read_result(path)
    check_cells(result, path)
    return card_of(result, memory_bytes, str(path))


def card_of(result: Mapping[str, Any], memory_bytes: int, source: str) -> Card:
    """Return a card from a benchmark result of `run_linear`, by each cell's fastest contender."""
    cells = []
    for row in result["rows"]:
        efficiencies = [t["efficiency"] for t in row["results"].values() if "efficiency" in t]
        if row["operation"] == "run_linear" and efficiencies:
            out = row["output_slices"]
            sizes = (row["in_features"], sum(out), len(out), row["tokens"], row["active_adapters"])
            cells.append(Measured(*sizes, row["rank"], max(efficiencies)))
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
    """Return the package's table of cards as JSON, with one cell per line."""
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
