"""Plots of a result: time against tokens and adapters, efficiency, roofline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from lora_backends.bench.results import DECODE_TOKENS, layer_name, times

Result = Mapping[str, Any]
Cell = Mapping[str, Any]

# The palette of Okabe and Ito is safe for colour blindness; markers differ for print in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "os^DvP"
GREY = "#555555"
PANEL = (4.6, 3.3)  # inches


def save_plots(result: Result, folder: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Draw every plot that the rows of a result allow, and return the files.

    The folder is made if it is missing. Time against tokens (adapters) needs two cells that differ
    in nothing else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in PLOTS.items():
        figure = draw(result)
        if figure is None:
            continue
        for ending in formats:
            written.append(save_figure(figure, folder / f"{name}.{ending}"))
    return written


def save_figure(figure: Figure, file: Path) -> Path:
    """Write a figure in the format of the file's ending, and return the file."""
    # without a date or random names, equal results give equal files
    dated = {"Date": None} if file.suffix == ".svg" else None
    with rc_context({"svg.hashsalt": file.stem}):
        figure.savefig(file, dpi=150, metadata=dated)
    return file


def time_against_tokens(result: Result) -> Figure | None:
    """Draw microseconds against tokens, the number of adapters and the rank fixed."""
    return _time_against(result, "tokens", "adapters", "adapters")


def time_against_adapters(result: Result) -> Figure | None:
    """Draw microseconds against active adapters, the number of tokens and the rank fixed."""
    return _time_against(result, "active_adapters", "tokens", "tokens")


def _time_against(result: Result, axis: str, fixed: str, unit: str) -> Figure | None:
    panels = {}
    for name, cells in _by_projection(result["rows"]).items():
        series = _longest_series(cells, axis, fixed)
        if len(series) > 1:
            panels[name] = series
    if not panels:
        return None
    figure, all_axes = _panels(len(panels))
    what = axis.replace("_", " ")
    axes: Axes
    for axes, cells in zip(all_axes, panels.values(), strict=False):
        ticks = [cell[axis] for cell in cells]
        limits = [cell["limit_us"] for cell in cells]
        axes.plot(ticks, limits, color=GREY, linestyle="--", label="limit")
        for index, contender in enumerate(result["contenders"]):
            _line(axes, cells, axis, contender, index)
        first = cells[0]
        axes.set_title(f"{_layer(first)}\n{first[fixed]} {unit}, rank {first['rank']}", fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        _plain_ticks(axes, ticks)
        axes.set_xlabel(what)
        axes.grid(True, which="major", alpha=0.3)
    figure.supylabel("microseconds of one layer's LoRA", fontsize=10)
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(f"Time against {what}\n{_where(result)}", fontsize=10)
    return figure


def _line(axes: Axes, cells: Sequence[Cell], axis: str, contender: str, index: int) -> None:
    mine = [cell for cell in cells if "us" in cell["results"].get(contender, {})]
    timings = [cell["results"][contender] for cell in mine]
    low = [one["us"] - one.get("us_q1", one["us"]) for one in timings]
    high = [one.get("us_q3", one["us"]) - one["us"] for one in timings]
    axes.errorbar(
        [cell[axis] for cell in mine],
        [one["us"] for one in timings],
        yerr=[low, high],
        label=contender,
        color=COLOURS[index % len(COLOURS)],
        marker=MARKERS[index % len(MARKERS)],
        markersize=5,
        linewidth=1.5,
        capsize=2,
    )


def efficiency(result: Result) -> Figure | None:
    """Draw the efficiency of each contender, cell by cell."""
    names = [name for name in result["contenders"] if times(result, name)]
    if not names:
        return None
    rows = list(dict.fromkeys(_batch(cell) for cell in result["rows"]))
    columns = list(_by_projection(result["rows"]))
    width = 2.2 + len(names) * max(1.6, 0.75 * len(columns))
    figure = Figure(figsize=(width + 0.9, 1.6 + 0.3 * len(rows)), layout="constrained")
    grid = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    image = None
    for axes, name in zip(grid, names, strict=True):
        shares = [[float("nan")] * len(columns) for _ in rows]
        for cell, timing in times(result, name):
            row, column = rows.index(_batch(cell)), columns.index(layer_name(cell))
            shares[row][column] = timing["efficiency"]
        image = axes.imshow(shares, cmap="cividis", vmin=0, vmax=1, aspect="auto")
        _annotate(axes, shares)
        axes.set_title(name, fontsize=10)
        axes.set_xticks(range(len(columns)), columns, rotation=35, ha="right")
        axes.set_yticks(range(len(rows)), rows, fontsize=8)
        axes.tick_params(length=0)
    assert image is not None
    figure.colorbar(image, ax=grid, label="efficiency")
    figure.suptitle(
        f"Efficiency = modelled minimum time / measured time\n{_where(result)}", fontsize=10
    )
    return figure


def _annotate(axes: Axes, shares: Sequence[Sequence[float]]) -> None:
    scale = colormaps["cividis"]
    for y, row in enumerate(shares):
        for x, share in enumerate(row):
            if share == share:  # not NaN: a cell that was not measured stays white
                red, green, blue, _ = scale(min(share, 1.0))
                dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
                colour = "white" if dark else "black"
                axes.text(x, y, f"{share:.2f}", ha="center", va="center", fontsize=8, color=colour)


def roofline(result: Result) -> Figure | None:
    """Draw operations per second against arithmetic intensity, under the roof of the device."""
    names = [name for name in result["contenders"] if times(result, name)]
    if not names or "gemm_gflop_per_s" not in result["limits"]:
        return None
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    intensities = [cell["flop"] / cell["bytes"] for cell in result["rows"]]
    copy, gemm = (result["limits"][key] for key in ("copy_gb_per_s", "gemm_gflop_per_s"))
    ends = [min(intensities) / 2, max(*intensities, gemm / copy) * 2]
    roof = sorted([*ends, gemm / copy])
    label = f"roof: copy at {copy:.0f} GB/s, matrix product at {gemm:.0f} GFLOP/s"
    axes.plot(roof, [min(gemm, copy * x) for x in roof], color=GREY, linestyle="--", label=label)
    for index, name in enumerate(names):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        for decode in (True, False):
            pairs = [p for p in times(result, name) if (p[0]["tokens"] <= DECODE_TOKENS) is decode]
            if not pairs:
                continue
            axes.plot(
                [cell["flop"] / cell["bytes"] for cell, _ in pairs],
                [cell["flop"] / timing["us"] / 1e3 for cell, timing in pairs],
                linestyle="",
                marker=marker,
                markersize=6,
                color=colour,
                markerfacecolor=colour if decode else "none",
                alpha=0.8,
                label=f"{name}, {'up to' if decode else 'above'} {DECODE_TOKENS} tokens",
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_xlabel("arithmetic intensity, FLOP per byte that must move")
    axes.set_ylabel("GFLOP/s")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.16), ncols=2, frameon=False)
    axes.set_title(f"Roofline\n{_where(result)}", fontsize=10)
    return figure


PLOTS: Mapping[str, Callable[[Result], Figure | None]] = {
    "time_against_tokens": time_against_tokens,
    "time_against_adapters": time_against_adapters,
    "efficiency": efficiency,
    "roofline": roofline,
}


def _by_projection(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(layer_name(cell), []).append(cell)
    return groups


def _longest_series(cells: Sequence[Cell], axis: str, fixed: str) -> list[Cell]:
    """Return the most cells that differ along `axis` alone, in its order."""
    series: dict[tuple[Any, ...], dict[int, Cell]] = defaultdict(dict)
    for cell in cells:
        key = (cell[fixed], cell["rank"], cell["mix"] == "skewed", cell["in_features"])
        # a line has one point per tick
        series[key].setdefault(cell[axis], cell)  # the other mixes deal the tokens alike
    longest = max(series.values(), key=len)
    return [longest[value] for value in sorted(longest)]


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    columns = count if count < 4 else 2 if count == 4 else 3
    rows = -(-count // columns)
    size = (PANEL[0] * columns, PANEL[1] * rows + 0.7)
    figure = Figure(figsize=size, layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    for axes in grid[count:]:
        axes.set_visible(False)
    return figure, grid


def _plain_ticks(axes: Axes, ticks: Sequence[int]) -> None:
    """Label so few values that the labels do not overlap."""
    powers = [tick for tick in ticks if tick & (tick - 1) == 0] or list(ticks)
    shown = powers[:: -(-len(powers) // 8)]
    axes.set_xticks(shown, [str(tick) for tick in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _layer(cell: Cell) -> str:
    widths = " + ".join(str(width) for width in cell["output_slices"])
    return f"{layer_name(cell)}: {cell['in_features']} to {widths}"


def _batch(cell: Cell) -> str:
    adapters = cell["active_adapters"]
    skewed = ", skewed" if cell["mix"] == "skewed" else ""
    return (
        f"{cell['tokens']} token{'s'[: cell['tokens'] - 1]}, "
        f"{adapters} adapter{'s'[: adapters - 1]}{skewed}, rank {cell['rank']}"
    )


def _where(result: Result) -> str:
    return f"{result['device']}, {result['dtype']}, {result['date']}"
