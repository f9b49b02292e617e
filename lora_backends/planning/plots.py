"""The plot of a plan: hit rates and waits against the number of slots."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from lora_backends.bench.plots import COLOURS, save_figure
from lora_backends.planning.fleet import Plan


def save_plot(plan: Plan, file: Path) -> Path:
    """Save the plot in the format of the file's suffix, and return its path."""
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    rates, waits = figure.subplots(1, 2)
    slots = [outcome.slots for outcome in plan.by_slots]
    series = (
        (rates, "hit_rate", "in a slot", 100.0),
        (rates, "memory_rate", "from memory", 100.0),
        (rates, "disk_rate", "from a disk", 100.0),
        (waits, "wait_p50_s", "median", 1.0),
        (waits, "wait_p95_s", "95th percentile", 1.0),
    )
    for index, (axes, key, label, factor) in enumerate(series):
        values = [factor * getattr(outcome, key) for outcome in plan.by_slots]
        axes.plot(slots, values, "o-", color=COLOURS[index % len(COLOURS)], label=label)
    rates.set(ylabel="requests, %", title="where requests found their adapter", ylim=(0, 100))
    waits.set(ylabel="seconds", title="wait before the first step", ylim=(0, None))
    for axes in (rates, waits):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("slots")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{plan.card}: {plan.model.origin}, rank {plan.model.rank}", fontsize=9)
    return save_figure(figure, file)
