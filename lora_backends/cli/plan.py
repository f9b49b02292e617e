"""`lora-backends plan`: slots that fit, waits of requests, and cards for a load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from lora_backends.cli.console import output, step, table
from lora_backends.cli.options import JsonFlag
from lora_backends.errors import InvalidInputError
from lora_backends.planning.cards import Card, find_card, read_card
from lora_backends.planning.checks import check_number
from lora_backends.planning.fleet import Fleet, Plan, make_plan
from lora_backends.planning.shapes import read_shapes
from lora_backends.planning.simulation import Outcome
from lora_backends.planning.traffic import Traffic

FORMATS = (".svg", ".png", ".pdf")
"""Suffixes that `--plot` takes."""


def plan(
    config_json: Annotated[
        Path, typer.Option(help="config.json of the base model, or its folder.")
    ],
    adapters: Annotated[int, typer.Option(help="Number of adapters.")],
    rate: Annotated[float, typer.Option(help="Requests per second of the whole fleet.")],
    card: Annotated[
        str, typer.Option(help="A measured card, or a result file of bench (.json).")
    ] = "NVIDIA H200",
    memory_gb: Annotated[
        float | None, typer.Option(help="Memory of the card in 1e9 bytes; needed with a file.")
    ] = None,
    rank: Annotated[int, typer.Option(help="Rank of every adapter.")] = 16,
    max_rank: Annotated[
        int | None, typer.Option(help="Rank that the stacks have room for; default: rank.")
    ] = None,
    target_modules: Annotated[
        str, typer.Option(help="As in PEFT: all-linear, or names separated by commas.")
    ] = "all-linear",
    target_parameters: Annotated[
        str, typer.Option(help="As in PEFT, for stacked experts: names separated by commas.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="Dtype of the base model.")] = "bfloat16",
    adapter_dtype: Annotated[
        str | None,
        typer.Option(help="Dtype of the stacks: int8, float8_e4m3fn, ...; default: dtype."),
    ] = None,
    zipf: Annotated[
        float, typer.Option(help="Popularity of adapter i is 1 / i^zipf; 0: equal.")
    ] = 1.0,
    prompt_tokens: Annotated[int, typer.Option(help="Mean length of a prompt.")] = 512,
    output_tokens: Annotated[int, typer.Option(help="Mean length of an output.")] = 128,
    rows: Annotated[int, typer.Option(help="The most requests in a batch.")] = 64,
    slots: Annotated[
        int | None, typer.Option(help="max_adapters; default: as many as fit.")
    ] = None,
    cpu_gb: Annotated[
        float | None,
        typer.Option(help="Host memory for adapters in 1e9 bytes; default: enough for all."),
    ] = None,
    spare: Annotated[float, typer.Option(help="Share of the card's memory left free.")] = 0.1,
    max_wait_s: Annotated[float, typer.Option(help="Bound on the 95th percentile of waits.")] = 1.0,
    base_step_ms: Annotated[
        float | None, typer.Option(help="Your engine's decode step without adapters.")
    ] = None,
    prompt_tokens_per_s: Annotated[
        float | None, typer.Option(help="Your engine's prefill rate without adapters.")
    ] = None,
    load_gb_per_s: Annotated[float, typer.Option(help="From memory into a slot.")] = 20.0,
    disk_gb_per_s: Annotated[float, typer.Option(help="From disk into memory.")] = 1.0,
    eager: Annotated[bool, typer.Option("--eager", help="No CUDA graphs.")] = False,
    requests: Annotated[int, typer.Option(help="Number of simulated requests.")] = 4000,
    seed: Annotated[int, typer.Option(help="Seed of the simulation.")] = 0,
    as_json: JsonFlag = False,
    plot: Annotated[
        Path | None, typer.Option(help="Save a plot of hit rates and waits to FILE.")
    ] = None,
) -> None:
    """Say how many adapters fit on a card, how long requests wait, and how many cards it takes.

    Bytes come from the model's configuration and PEFT, times from measurements of the card, and
    waits from a simulation of the pool's own policy. It loads no weights and needs no GPU.
    """
    if plot is not None:
        from lora_backends.bench.results import check_plots, writable_file

        check_plots("--plot")
        if plot.suffix not in FORMATS:
            raise InvalidInputError(f"--plot is {plot}\n  allowed: a file *{', *'.join(FORMATS)}")
        plot = writable_file(plot, "--plot")
    if cpu_gb is not None:
        check_number("--cpu-gb", cpu_gb, least=0, most=1e9)
    fleet = Fleet(
        rows=rows,
        slots=slots,
        cpu_bytes=None if cpu_gb is None else int(1e9 * cpu_gb),
        spare=spare,
        max_wait_s=max_wait_s,
        base_step_s=None if base_step_ms is None else base_step_ms / 1e3,
        prompt_tokens_per_s=prompt_tokens_per_s,
        load_bytes_per_s=1e9 * load_gb_per_s,
        disk_bytes_per_s=1e9 * disk_gb_per_s,
        eager=eager,
    )
    traffic = Traffic(adapters, rate, zipf, prompt_tokens, output_tokens, requests, seed)
    measured = _card(card, memory_gb)
    names = [name.strip() for name in target_modules.split(",") if name.strip()]
    with step("reading the model's configuration"):
        shapes = read_shapes(
            config_json,
            rank,
            max_rank=max_rank,
            target_modules=names[0] if names == ["all-linear"] else names,
            target_parameters=[n.strip() for n in target_parameters.split(",") if n.strip()],
            dtype=dtype,
            adapter_dtype=adapter_dtype,
        )
    with step("simulating the traffic"):
        made = make_plan(shapes, traffic, measured, fleet)
    if plot is not None:
        from lora_backends.planning.plots import save_plot

        save_plot(made, plot)
    if as_json:
        typer.echo(json.dumps(made.describe(), indent=2))
    else:
        show(made, fleet)
        if plot is not None:
            output().print(f"drawn: {plot}", markup=False, soft_wrap=True)


def _card(name: str, memory_gb: float | None) -> Card:
    if memory_gb is not None:
        check_number("--memory-gb", memory_gb, most=1e9)
    memory = None if memory_gb is None else int(1e9 * memory_gb)
    if name.endswith(".json"):
        if memory is None:
            raise InvalidInputError(
                f"--memory-gb is missing: {name} does not state the card's memory"
            )
        return read_card(Path(name), memory)
    measured = find_card(name)
    return measured if memory is None else replace(measured, memory_bytes=memory)


def show(made: Plan, fleet: Fleet) -> None:
    """Print a plan as tables and notes."""
    model = made.model
    table(
        f"{model.origin} on {made.card}",
        ["", ">"],
        [
            ["base model", _bytes(model.base_bytes)],
            [f"cache of {fleet.rows} requests", _bytes(made.cache_bytes)],
            [f"an adapter of rank {model.rank}, {model.modules} modules", _bytes(model.file_bytes)],
            [f"a slot of rank {model.max_rank}, {model.adapter_dtype}", _bytes(model.slot_bytes)],
            ["slots that fit", f"{made.slots_that_fit:,}"],
            ["decode step of the base model", f"{1e3 * made.base_step_s:.2f} ms"],
            ["added by the adapters", f"{1e3 * made.lora_step_s:.2f} ms"],
        ],
        lines=False,
    )
    columns = [
        ">slots",
        ">in a slot",
        ">memory",
        ">disk",
        ">wait p50",
        ">p95",
        ">copies",
        ">tokens/s",
    ]
    share = made.cards["by adapter"] or 1
    title = f"one of {share} cards" if share > 1 else "one card"
    table(f"{title}, by slots", columns, [_row(o) for o in made.by_slots], lines=False)
    console = output()
    if made.thrashes_below is None:
        console.print("thrashes or waits too long with any of these slots", markup=False)
    elif made.thrashes_below > made.by_slots[0].slots:
        console.print(f"thrashes or waits too long below {made.thrashes_below} slots", markup=False)
    for routing, count in made.cards.items():
        text = "more than 64 cards" if count is None else f"{count} card{'s' * (count > 1)}"
        where = "the card of their adapter" if routing == "by adapter" else "any card"
        console.print(f"requests sent to {where}: {text}", markup=False)
    for each in made.notes:
        console.print(f"note: {each}", markup=False, soft_wrap=True)


def _row(outcome: Outcome) -> list[str]:
    return [
        f"{outcome.slots:,}",
        *(f"{100 * r:.1f}%" for r in (outcome.hit_rate, outcome.memory_rate, outcome.disk_rate)),
        f"{outcome.wait_p50_s:.3f} s",
        f"{outcome.wait_p95_s:.3f} s" + ("" if outcome.keeps_up else ", grows"),
        f"{100 * outcome.loading:.1f}%",
        f"{outcome.tokens_per_s:,.0f}",
    ]


def _bytes(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
