"""`lora-backends bench`: times backends side by side on this device, against its limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lora_backends.bench import Cell, read_result, summarize
from lora_backends.bench.job import BenchRun, make_job
from lora_backends.bench.results import (
    check_plots,
    check_writable,
    layer_name,
    result_text,
    writable_file,
)
from lora_backends.bench.schema import check_cells
from lora_backends.cli.console import INTERRUPTED, note, output, output_of_plugins_aside, table
from lora_backends.cli.options import (
    ConfigJson,
    Device,
    DType,
    InFeatures,
    JsonFlag,
    OutputSlices,
    Preset,
)
from lora_backends.common.files import as_path
from lora_backends.errors import InvalidInputError
from lora_backends.operations import DENSE

NOISY_PERCENT = 15


def bench(
    preset: Preset = None,
    config_json: ConfigJson = None,
    in_features: InFeatures = None,
    output_slices: OutputSlices = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens of a batch, e.g. 1,16,256.")] = None,
    adapters: Annotated[str | None, typer.Option(help="Adapters of a batch, e.g. 1,8.")] = None,
    rank: Annotated[str | None, typer.Option(help="Ranks, e.g. 16,64.")] = None,
    mixes: Annotated[
        str | None, typer.Option(help="How adapters mix: identical,distinct,uniform,skewed.")
    ] = None,
    operations: Annotated[
        str | None,
        typer.Option(help=f"all, or some of {', '.join(DENSE)}; default: run_linear."),
    ] = None,
    backends: Annotated[
        str | None, typer.Option(help="Backends, e.g. triton,torch_ref; default: all that run.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME.KEY=VALUE", help="A backend's option.")
    ] = None,
    dtype: DType = None,
    device: Device = None,
    file: Annotated[
        Path | None, typer.Option("--output", help="Write the results here, cell by cell.")
    ] = None,
    as_json: JsonFlag = False,
    plot: Annotated[Path | None, typer.Option(help="Folder for plots, PNG and SVG.")] = None,
    from_json: Annotated[
        Path | None, typer.Option(help="Measure nothing: show the results in this file.")
    ] = None,
) -> None:
    """Time backends side by side, layer by layer, and compare them with the device's limit.

    Every result is checked before it is timed. With --tokens, --adapters, --rank or --mixes, every
    combination is timed; without, a set of batches for the device.
    """
    asked: dict[str, Any] = {
        "preset_name": preset,
        "config_json": config_json,
        "in_features": in_features,
        "output_slices": output_slices,
        "tokens": tokens,
        "adapters": adapters,
        "rank": rank,
        "mixes": mixes,
        "operations": operations,
        "backends": backends,
        "dtype": dtype,
        "device": device,
    }
    if from_json is not None and (file or option or any(v is not None for v in asked.values())):
        raise InvalidInputError("--from-json measures nothing\n  allowed beside it: --json, --plot")
    # before anything is measured, which takes minutes
    file, plot = _writable(file, plot)
    if from_json is not None:
        result, interrupted = read_result(from_json), False
        # the file may come from anybody, and the tables index into it
        check_cells(result, from_json)
    else:
        with output_of_plugins_aside(as_json):
            result, interrupted = _run(make_job(**asked, options=option or []), file)
    if as_json:
        typer.echo(result_text(result), nl=False)
    else:
        show(result)
    if interrupted:
        where = f"; they are in {file}" if file and result.get("rows") else ""
        note(f"interrupted after {len(result.get('rows', ()))} cells{where}")
        raise typer.Exit(INTERRUPTED)
    if plot is not None:
        from lora_backends.bench.plots import save_plots

        for written in save_plots(result, plot):
            note(f"written: {written}")


def _writable(file: Path | None, plot: Path | None) -> tuple[Path | None, Path | None]:
    """Return both paths expanded; refuse unwritable ones before anything is measured."""
    if file is not None:
        file = writable_file(file, "--output")
    if plot is not None:
        check_plots("--plot")
        plot = as_path(plot, "--plot")
        check_writable(plot, "--plot")
    return file, plot


def _run(job: BenchRun, path: Path | None) -> tuple[dict[str, Any], bool]:
    """Measure; return the result and whether the user interrupted it."""
    for name, reason in job.left_out.items():
        note(f"not timed: {name}: {reason}")
    result: dict[str, Any] = {}
    try:
        with _progress(len(job.cells)) as notify:
            job.run(path, notify, result)
    except KeyboardInterrupt:
        return result, True
    return result, False


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int, Cell], None]]:
    """Yield a function that shows the running cell: a bar on a terminal, else a line per cell."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda index, cell: note(f"{index + 1}/{total} {_cell_text(cell)}")
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console) as bar:
        task = bar.add_task("measuring the device's limits", total=total)
        yield lambda index, cell: bar.update(task, completed=index, description=_cell_text(cell))
        bar.update(task, completed=total)


def _cell_text(cell: Cell) -> str:
    batch = f"{cell.tokens} tokens, {cell.adapters} adapters ({cell.mix}), rank {cell.rank}"
    return f"{cell.projection}, {cell.operation}: {batch}"


def show(result: dict[str, Any]) -> None:
    """Print the cells, a summary of the contenders, and notes."""
    names = list(result.get("contenders", ()))
    if not result.get("rows"):
        return
    ways = {name: contender["timing"] for name, contender in result["contenders"].items()}
    table(
        "microseconds, +- half the interquartile range, efficiency (limit / measured time)",
        ["layer", ">tokens", ">adapters", ">rank", "mix", ">limit us"]
        + [f">{name}\n({ways[name]})" for name in names],
        [_row(cell, names) for cell in result["rows"]],
        lines=False,
    )
    summary = summarize(result)
    keys = ("efficiency_decode", "efficiency_prefill", "fastest", "cells", "errors")
    titles = ["efficiency, decode", "efficiency, prefill", "fastest in", "cells", "errors"]
    table(
        "geometric means over cells; decode: up to 256 tokens",
        ["", *(f">{title}" for title in titles)],
        [[name, *(_number(summary[name].get(key)) for key in keys)] for name in names],
        lines=False,
    )
    _show_notes(result)


def _show_notes(result: dict[str, Any]) -> None:
    limits = result["limits"]
    console = output()
    lines = [
        f"{result['device']}, {result['dtype']}: copy {limits['copy_gb_per_s']:.0f} GB/s, "
        f"launch {limits['launch_us']:.2f} us"
    ]
    lines += [f"note: {note}" for note in result["notes"]]
    lines += [f"not timed: {name}: {reason}" for name, reason in result["left_out"].items()]
    timed = [one for cell in result["rows"] for one in cell["results"].values() if "us" in one]
    # the limit assumes that x and y come from memory
    if any(one["efficiency"] > 1 for one in timed):
        lines.append("note: efficiency above 1: x and y stay in a cache")
    noisy = sum(_percent(one) > NOISY_PERCENT for one in timed)
    if noisy:
        lines.append(
            f"note: {noisy} of {len(timed)} times vary by more than +-{NOISY_PERCENT}%: other "
            f"programs were running; measure again"
        )
    errors = {
        f"{name}: {outcome['error']}"
        for cell in result["rows"]
        for name, outcome in cell["results"].items()
        if "error" in outcome
    }
    lines += [f"error: {line}" for line in sorted(errors)]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _row(cell: dict[str, Any], names: list[str]) -> list[str]:
    head = [layer_name(cell), cell["tokens"], cell["active_adapters"], cell["rank"], cell["mix"]]
    times = [_time(cell["results"].get(name, {})) for name in names]
    return [*map(str, head), f"{cell['limit_us']:.1f}", *times]


def _time(timing: dict[str, Any]) -> str:
    if "us" not in timing:
        return "error" if "error" in timing else ""
    return f"{timing['us']:.1f} +-{_percent(timing):.0f}% {timing['efficiency']:.2f}"


def _percent(timing: dict[str, Any]) -> float:
    """Return half the interquartile range in percent of the median."""
    return 50 * float(timing.get("us_q3", 0) - timing.get("us_q1", 0)) / float(timing["us"])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
