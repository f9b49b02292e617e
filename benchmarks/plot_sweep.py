"""Draws the curves of the result of `h200_sweep`.

python benchmarks/plot_sweep.py docs/images [RESULT]
"""

from __future__ import annotations

import sys
from pathlib import Path

from h200 import SWEEPS
from measuring import RESULTS

from lora_backends.bench.plots import save_figure, time_against_adapters, time_against_tokens
from lora_backends.bench.results import read_result


def draw(folder: Path, file: Path = RESULTS / "h200_sweep.json") -> None:
    """Write one SVG a sweep."""
    result = read_result(file)
    folder.mkdir(parents=True, exist_ok=True)
    for sweep, batches in SWEEPS.items():
        plot = time_against_tokens if sweep == "tokens" else time_against_adapters
        rows = [row for row in result["rows"] if (row["tokens"], row["adapters"]) in batches]
        figure = plot({**result, "rows": rows}) if rows else None
        if figure is not None:
            print(save_figure(figure, folder / f"h200_sweep_{sweep}.svg"))


if __name__ == "__main__":
    draw(*map(Path, sys.argv[1:]))
