"""`lora-backends tune`: measures tile sizes on this GPU and writes a table that backends read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lora_backends.bench.search import Found
from lora_backends.bench.tune import (
    DEFAULTS,
    Notify,
    Point,
    make_tuning,
    summary_lines,
    tune_points,
)
from lora_backends.cli.console import INTERRUPTED, note, output
from lora_backends.cli.options import (
    ConfigJson,
    Device,
    DType,
    InFeatures,
    OutputSlices,
    Preset,
)


def tune(
    backend: Annotated[str, typer.Argument(help="An engine with tiles, e.g. triton.")],
    budget: Annotated[str, typer.Option(help="How long to measure: 90s, 5m, 1h.")] = "10m",
    preset: Preset = None,
    config_json: ConfigJson = None,
    in_features: InFeatures = None,
    output_slices: OutputSlices = None,
    tokens: Annotated[str, typer.Option(help="Tokens of a batch.")] = DEFAULTS["tokens"],
    adapters: Annotated[str, typer.Option(help="Adapters of a batch.")] = DEFAULTS["adapters"],
    rank: Annotated[str, typer.Option(help="Widths of the stack.")] = DEFAULTS["rank"],
    dtype: DType = None,
    device: Device = None,
    file: Annotated[
        Path | None, typer.Option("--output", help="The table; default: in the user's folder.")
    ] = None,
) -> None:
    """Search tile sizes for layers and batches on this GPU, and write them to a table.

    Backends made with tiles="auto" read the table from the user's folder. Every size is checked
    before it is timed. The table is written after every search, and the same command continues
    with the batches that it lacks.
    """
    job = make_tuning(
        backend,
        budget=budget,
        output=file,
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
    from lora_backends.bench.tune_gpu import gpu_lab  # imports Triton

    try:
        progress = tune_points(job, gpu_lab(job), _show_progress(len(job.points)))
    # the table holds every finished search
    except KeyboardInterrupt:
        note(f"interrupted; {job.path} has the results so far: run the same command to continue")
        raise typer.Exit(INTERRUPTED) from None
    for line in summary_lines(job, progress):
        output().print(line, markup=False, soft_wrap=True)


def _show_progress(total: int) -> Notify:
    """Return a function that prints a line before and after each search."""

    def show_point(index: int, point: Point, result: Found | None) -> None:
        cell = point.cell
        if result is None:
            batch = f"{cell.tokens} tokens, {point.active_slots} adapters, rank {cell.rank}"
            text = f"{cell.projection}: {batch}, {point.tile_tokens} tokens a tile"
            note(f"{index + 1}/{total} {text}")
        else:
            times = f"{result.rules_us:.2f} us -> {result.tuned_us:.2f} us"
            note(f"  {times}, {result.tried} sizes timed")

    return show_point
