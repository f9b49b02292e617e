"""`lora-backends bench`: backends side by side on this device, against its limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lora_backends.bench import Cell, read_result, summarize
from lora_backends.bench.cells import PRESETS
from lora_backends.bench.job import Job, make_job
from lora_backends.bench.results import check_writable, writable_file
from lora_backends.cli.console import output, table
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.files import as_path

INTERRUPTED = 130
NOISY_PERCENT = 15


def bench(
    preset: Annotated[
        str | None, typer.Option(help=f"Layers of a model: {', '.join(PRESETS)}.")
    ] = None,
    config_json: Annotated[
        Path | None, typer.Option(help="Layers of the model of a Transformers config.json.")
    ] = None,
    in_features: Annotated[int | None, typer.Option(help="One layer: width of x.")] = None,
    output_slices: Annotated[
        str | None, typer.Option(help="One layer: widths of y's slices, e.g. 4096,1024,1024.")
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens of a batch, e.g. 1,16,256.")] = None,
    adapters: Annotated[str | None, typer.Option(help="Adapters of a batch, e.g. 1,8.")] = None,
    rank: Annotated[str | None, typer.Option(help="Ranks, e.g. 16,64.")] = None,
    mixes: Annotated[
        str | None, typer.Option(help="How adapters mix: identical,distinct,uniform,skewed.")
    ] = None,
    backends: Annotated[
        str | None, typer.Option(help="Backends, e.g. triton,torch_ref; all that run if left out.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME.KEY=VALUE", help="A backend's option.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 on a CPU, bfloat16 on a GPU if left out.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; the best one here.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Keep the results here, cell by cell.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Folder for plots, PNG and SVG.")] = None,
    from_json: Annotated[
        Path | None, typer.Option(help="Measure nothing: show the results in this file.")
    ] = None,
) -> None:
    """Time backends side by side, layer by layer, and compare with what the device allows.

    Every result is checked before it is timed. Given --tokens, --adapters, --rank or --mixes,
    every combination is timed; else a set made for the device.
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
        "backends": backends,
        "dtype": dtype,
        "device": device,
    }
    if from_json is not None and (
        json_file or option or any(v is not None for v in asked.values())
    ):
        raise InvalidInputError("--from-json measures nothing\n  allowed beside it: --plot")
    json_file, plot = _writable(json_file, plot)
    if from_json is not None:
        result, interrupted = read_result(from_json), False
    else:
        result, interrupted = _run(make_job(**asked, options=option or []), json_file)
    show(result)
    if interrupted:
        _tell_interrupted(result, json_file)
        raise typer.Exit(INTERRUPTED)
    if plot is not None:
        from lora_backends.bench.plots import save_plots

        for file in save_plots(result, plot):
            output().print(f"written: {file}", markup=False, soft_wrap=True)


def _writable(json_file: Path | None, plot: Path | None) -> tuple[Path | None, Path | None]:
    """Refuse what could not be kept, before minutes are spent on it."""
    if json_file is not None:
        json_file = writable_file(json_file, "--json")
    if plot is not None:
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError as error:
            raise UnsupportedInputError(
                f"--plot needs a package that is not installed: {error.name}\n"
                f"  to do: pip install 'lora-backends[bench]'"
            ) from error
        plot = as_path(plot, "--plot")
        check_writable(plot, "--plot")
    return json_file, plot


def _run(job: Job, path: Path | None) -> tuple[dict[str, Any], bool]:
    """Measure; return the results and whether the user ended it early."""
    stderr = Console(stderr=True, highlight=False)
    for name, reason in job.left_out.items():
        stderr.print(f"not timed: {name}: {reason}", markup=False, soft_wrap=True)
    result: dict[str, Any] = {}
    try:
        with _progress(len(job.cells), stderr) as tell:
            job.run(path, tell, result)
    except KeyboardInterrupt:
        return result, True
    return result, False


@contextmanager
def _progress(total: int, console: Console) -> Iterator[Any]:
    """Yield what shows the running cell: a bar on a terminal, else a line per cell."""
    if not console.is_terminal:
        yield lambda index, cell: console.print(
            f"{index + 1}/{total} {_cell_text(cell)}", markup=False, soft_wrap=True
        )
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console) as bar:
        task = bar.add_task("measuring the device's limits", total=total)
        yield lambda index, cell: bar.update(task, completed=index, description=_cell_text(cell))
        bar.update(task, completed=total)


def _cell_text(cell: Cell) -> str:
    batch = f"{cell.tokens} tokens, {cell.adapters} adapters ({cell.mix}), rank {cell.rank}"
    return f"{cell.projection}: {batch}"


def show(result: dict[str, Any]) -> None:
    """Print the cells, what the contenders add up to, and what to know about them."""
    names = list(result.get("contenders", ()))
    if not result.get("cells"):
        return
    ways = {name: found["timing"] for name, found in result["contenders"].items()}
    table(
        "microseconds, +- half the interquartile range, share of the limit",
        ["layer", ">tokens", ">adapters", ">rank", "mix", ">limit us"]
        + [f">{name}\n({ways[name]})" for name in names],
        [_row(cell, names) for cell in result["cells"]],
        lines=False,
    )
    summary = summarize(result)
    keys = ("efficiency_decode", "efficiency_prefill", "fastest", "cells", "errors")
    titles = ["of the limit, decode", "of the limit, prefill", "fastest in", "cells", "errors"]
    table(
        "geometric means over cells; decode: up to 256 tokens",
        ["", *(f">{title}" for title in titles)],
        [[name, *(_number(summary[name].get(key)) for key in keys)] for name in names],
        lines=False,
    )
    _tell(result)


def _tell(result: dict[str, Any]) -> None:
    limits, where = result["limits"], result["environment"]
    console = output()
    lines = [
        f"{where['device']}, {result['dtype']}: copy {limits['copy_gb_per_s']:.0f} GB/s, "
        f"{limits['launches']} launches of {limits['launch_us']:.2f} us"
    ]
    lines += [f"note: {note}" for note in result["notes"]]
    lines += [f"not timed: {name}: {reason}" for name, reason in result["left_out"].items()]
    timed = [one for cell in result["cells"] for one in cell["results"].values() if "us" in one]
    if any(one["efficiency"] > 1 for one in timed):
        lines.append("note: more than the limit is reached where x and y stay in a cache")
    noisy = sum(_percent(one) > NOISY_PERCENT for one in timed)
    if noisy:
        lines.append(
            f"note: {noisy} of {len(timed)} times vary by more than +-{NOISY_PERCENT}%: something "
            f"else was running; measure again"
        )
    errors = {
        f"{name}: {found['error']}"
        for cell in result["cells"]
        for name, found in cell["results"].items()
        if "error" in found
    }
    lines += [f"error: {line}" for line in sorted(errors)]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _row(cell: dict[str, Any], names: list[str]) -> list[str]:
    head = [cell["projection"], cell["tokens"], cell["active_adapters"], cell["rank"], cell["mix"]]
    times = [_time(cell["results"].get(name, {})) for name in names]
    return [*map(str, head), f"{cell['limit_us']:.1f}", *times]


def _time(found: dict[str, Any]) -> str:
    if "us" not in found:
        return "error" if "error" in found else ""
    return f"{found['us']:.1f} +-{_percent(found):.0f}% {found['efficiency']:.2f}"


def _percent(found: dict[str, Any]) -> float:
    """Return half the interquartile range in percent of the median."""
    return 50 * float(found["us_q3"] - found["us_q1"]) / float(found["us"])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def _tell_interrupted(result: dict[str, Any], path: Path | None) -> None:
    done = len(result.get("cells", ()))
    kept = f"; they are in {path}" if path and done else ""
    Console(stderr=True, highlight=False).print(
        f"interrupted after {done} cells{kept}", markup=False, soft_wrap=True
    )
