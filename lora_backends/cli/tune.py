"""`lora-backends tune`: measures tile sizes on this GPU and writes a table that backends read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lora_backends.bench.cells import PRESETS
from lora_backends.bench.search import Found
from lora_backends.bench.tune import Progress, gains, gpu_lab_of, summary_lines, tune_points
from lora_backends.bench.tune_job import DEFAULTS, Point, Tuning, make_tuning
from lora_backends.cli.console import output, table

INTERRUPTED = 130


def tune(
    backend: Annotated[str, typer.Argument(help="An engine with tiles, e.g. triton.")],
    budget: Annotated[str, typer.Option(help="How long to measure: 90s, 5m, 1h.")] = "10m",
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
    tokens: Annotated[
        str | None, typer.Option(help=f"Tokens of a batch; {DEFAULTS['tokens']} if left out.")
    ] = None,
    adapters: Annotated[
        str | None, typer.Option(help=f"Adapters of a batch; {DEFAULTS['adapters']} if left out.")
    ] = None,
    rank: Annotated[
        str | None, typer.Option(help=f"Widths of the stack; {DEFAULTS['rank']} if left out.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 if left out.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1, ...")] = None,
    file: Annotated[
        Path | None, typer.Option("--output", help="The table; in the user's folder if left out.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes that compile.")] = None,
) -> None:
    """Search tile sizes for layers and batches on this GPU, and write them to a table.

    Backends made with tiles="auto" read the table from the user's folder. Every size is checked
    before it is timed. What was found is kept: the same command goes on where one was interrupted.
    """
    job = make_tuning(
        backend,
        budget=budget,
        output=file,
        jobs=jobs,
        device=device,
        preset_name=preset,
        config_json=config_json,
        in_features=in_features,
        output_slices=output_slices,
        tokens=tokens,
        adapters=adapters,
        rank=rank,
        dtype=dtype,
    )
    try:
        progress = tune_points(job, gpu_lab_of, _Shown(job))
    except KeyboardInterrupt:
        text = f"interrupted; {job.partial} keeps what was found: the same command goes on"
        _stderr().print(text, markup=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    show(job, progress)


def show(job: Tuning, progress: Progress) -> None:
    """Print what the table gains, and where it is."""
    rows = [
        [
            gain.point.cell.projection,
            str(gain.point.cell.tokens),
            str(gain.point.active_slots),
            str(gain.point.layer.max_rank),
            str(gain.point.tile_tokens),
            f"{gain.rules_us:.2f}",
            f"{gain.tuned_us:.2f}",
            f"{gain.rules_us / gain.tuned_us:.2f}",
        ]
        for gain in gains(job, progress)
    ]
    columns = ["layer", ">tokens", ">adapters", ">rank", ">tile", ">rules us", ">tuned us"]
    if rows:
        title = f"{job.backend} on {job.device}: tile sizes of the rules and of the table"
        table(title, [*columns, ">times as fast"], rows, lines=False)
    for line in summary_lines(job, progress):
        output().print(line, markup=False, soft_wrap=True)


class _Shown:
    """Tells on standard error which point is searched and what came of it."""

    def __init__(self, job: Tuning) -> None:
        self._total = len(job.points)

    def __call__(self, index: int, point: Point, found: Found | None) -> None:
        cell, place = point.cell, f"{index + 1}/{self._total}"
        if found is None:
            batch = f"{cell.tokens} tokens, {point.active_slots} adapters, rank {cell.rank}"
            text = f"{place} {cell.projection}: {batch}, {point.tile_tokens} tokens a tile"
        else:
            times = f"{found.rules_us:.2f} us -> {found.tuned_us:.2f} us"
            text = f"  {times}, {found.tried} sizes timed"
        _stderr().print(text, markup=False, soft_wrap=True)


def _stderr() -> Console:
    return Console(stderr=True, highlight=False)
