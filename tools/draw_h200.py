"""Draws the efficiency of every contender on an H200: docs/images/h200.svg.

A line per batch; a mark is the geometric mean over the four projections of the layer, the bar
behind it reaches from the lowest to the highest. Needs matplotlib: pip install '.[bench]'.

    python tools/draw_h200.py
"""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean
from typing import Any

import matplotlib
from figures import CONTENDERS, PHASES, RESULTS, digest, efficiency, measured

matplotlib.use("svg")
import matplotlib.pyplot as plt

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "h200.svg"
# The palette of Okabe and Ito is safe for colour blindness; markers differ as well.
STYLES = {
    "triton": {"color": "#0072B2", "marker": "o", "markersize": 8, "zorder": 4},
    "csgmv": {"color": "#CC79A7", "marker": "v", "markersize": 7, "zorder": 5},
    "SGLang 0.5.23 triton_v2": {"color": "#D55E00", "marker": "s", "markersize": 6, "zorder": 3},
    "SGLang 0.5.23 csgmv": {"color": "#009E73", "marker": "^", "markersize": 6, "zorder": 2},
    "vLLM 0.33": {"color": "#555555", "marker": "D", "markersize": 5, "zorder": 1},
}
# The two engines of this library are almost equal, so they are drawn a little apart.
SHIFTS = {"triton": -0.17, "csgmv": 0.17}
Batch = tuple[int, int, int, str]


def main() -> None:
    """Draw both phases one above the other and write the picture."""
    matplotlib.rcParams.update({"svg.hashsalt": "h200", "font.size": 10, "svg.fonttype": "path"})
    batches = by_batch()
    split = [[b for b in batches if belongs(b[0])] for belongs in PHASES.values()]
    figure, panels = plt.subplots(
        2, 1, figsize=(8.6, 8.2), sharex=True, height_ratios=[len(part) + 0.6 for part in split]
    )
    for panel, phase, part in zip(panels, PHASES, split, strict=True):
        draw(panel, phase, {batch: batches[batch] for batch in part})
    handles, labels = panels[0].get_legend_handles_labels()
    labels = [f"lora_backends, {name}" if name in RESULTS else name for name in labels]
    figure.legend(handles, labels, loc="upper center", ncols=3, frameon=False, columnspacing=1.4)
    panels[-1].set_xlabel("efficiency = modelled minimum time / measured time")
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None, "Description": digest()})
    # The writer of SVG leaves blanks at the ends of lines.
    lines = PICTURE.read_text(encoding="utf-8").splitlines()
    PICTURE.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")
    print(f"written: {PICTURE} ({PICTURE.stat().st_size // 1024} KB)")


def by_batch() -> dict[Batch, list[dict[str, Any]]]:
    """Return the cells of every batch, one per projection."""
    batches: dict[Batch, list[dict[str, Any]]] = {}
    for cell in sorted(measured(), key=lambda c: (c["tokens"], c["active_adapters"], c["rank"])):
        key = (cell["tokens"], cell["active_adapters"], cell["rank"], cell["mix"])
        batches.setdefault(key, []).append(cell)
    return batches


def draw(panel: Any, phase: str, batches: dict[Batch, list[dict[str, Any]]]) -> None:
    """Draw one phase: a line per batch, a mark per contender."""
    for name in (*RESULTS, *CONTENDERS):
        lines = [line + SHIFTS.get(name, 0) for line in range(len(batches))]
        values = [efficiency(cells, name) for cells in batches.values()]
        style: dict[str, Any] = STYLES[name]
        panel.hlines(
            lines,
            [min(v) for v in values],
            [max(v) for v in values],
            color=style["color"],
            alpha=0.3,
            linewidth=3,
        )
        means = [geometric_mean(v) for v in values]
        panel.plot(means, lines, linestyle="none", label=name, markeredgecolor="white", **style)
    panel.set_yticks(range(len(batches)), [label(batch) for batch in batches])
    panel.set_ylim(len(batches) - 0.4, -0.6)
    panel.set_xlim(0, 1.16)
    panel.axvline(1, color="black", linewidth=1)
    panel.text(1, -0.7, "limit", ha="center", va="bottom")
    panel.grid(axis="x", color="#dddddd", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(axis="y", length=0)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.set_title(phase, loc="left", fontsize=11, fontweight="bold")


def label(batch: Batch) -> str:
    """Return the name of a line."""
    tokens, active, rank, mix = batch
    skewed = " (skewed)" if mix == "skewed" else ""
    return (
        f"{tokens} token{'s' if tokens > 1 else ''}, "
        f"{active} adapter{'s' if active > 1 else ''}{skewed}, rank {rank}"
    )


if __name__ == "__main__":
    main()
