"""Writes the planner's table of cards from benchmark results: python tools/planner_cards.py."""

from __future__ import annotations

import json
from pathlib import Path

from lora_backends.planning.cards import Card, card_of, table_of

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "lora_backends" / "planning" / "tables" / "cards.json"
MEMORY = {"NVIDIA H200": 141 * 10**9}
"""Bytes of memory by card, from data sheets."""
RESULTS = ("h200_triton.json",)


def cards() -> list[Card]:
    """Return the cards of the result files in `RESULTS`."""
    found = []
    for name in RESULTS:
        result = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
        source = f"{result['device']}, {result['date']}, triton {result['versions']['triton']}"
        found.append(card_of(result, MEMORY[result["device"]], source))
    return found


if __name__ == "__main__":
    TABLE.write_text(table_of(cards()), encoding="utf-8")
