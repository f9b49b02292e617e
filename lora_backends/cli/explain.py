"""`lora-backends explain`: draws how a backend cuts a batch for a layer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lora_backends.cli.console import output, table
from lora_backends.common.files import new_file
from lora_backends.errors import InvalidInputError
from lora_backends.explain import Explanation, Launch
from lora_backends.explain import explain as explain_batch
from lora_backends.explain.job import make_batch, make_layer, ranges
from lora_backends.model_shapes import PRESETS
from lora_backends.operations import DENSE

MOST_PIECES = 24
"""Pieces drawn; the rest is only counted."""

BAR = 32


def explain(
    slots: Annotated[
        str | None, typer.Option(help="Slot of every token, e.g. 2,-1,0,2,2; -1: none.")
    ] = None,
    sequences: Annotated[
        str | None, typer.Option(help="SLOT:LENGTH of every sequence, e.g. 0:5,2:7.")
    ] = None,
    batch: Annotated[
        Path | None, typer.Option(help="JSON or TOML: slots or sequences, num_slots, ranks.")
    ] = None,
    num_slots: Annotated[int | None, typer.Option(help="Slots of the stack.")] = None,
    backend: Annotated[
        str, typer.Option(help="triton, csgmv, torch_ref, numba_cpu, ...")
    ] = "triton",
    operation: Annotated[str, typer.Option(help=f"One of {', '.join(DENSE)}.")] = "run_linear",
    preset: Annotated[str, typer.Option(help=f"A model: {', '.join(PRESETS)}.")] = "llama3-8b",
    projection: Annotated[str, typer.Option(help="qkv, o, gate_up, down or embedding.")] = "qkv",
    in_features: Annotated[
        int | None, typer.Option(help="Width of x, instead of a preset.")
    ] = None,
    output_slices: Annotated[
        str | None, typer.Option(help="Widths of y's slices, e.g. 4096,1024,1024.")
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(help="One rank for all slots, or one per slot: 16,8,64.")
    ] = None,
    max_rank: Annotated[int | None, typer.Option(help="Width of the stack.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    svg: Annotated[Path | None, typer.Option(help="Also draw to this file.")] = None,
) -> None:
    """Draw how a backend cuts a batch: order, pieces, launches, and wasted work.

    It uses the backend's own plan and tile sizes and needs no GPU.
    """
    made, file_ranks = make_batch(slots, sequences, num_slots, batch)
    layer = make_layer(
        made.num_slots,
        preset_name=preset,
        projection=projection,
        in_features=in_features,
        output_slices=output_slices,
        ranks=file_ranks if ranks is None else ranks,
        max_rank=max_rank,
        dtype=dtype,
    )
    if svg is not None:
        # refused before the batch is explained
        svg = new_file(svg, "--svg")
    explanation = explain_batch(backend, made, layer, operation)
    if svg is not None:
        from lora_backends.explain.svg import draw

        try:
            svg.write_text(draw(explanation), encoding="utf-8")
        except OSError as error:
            raise InvalidInputError(f"cannot write {svg}: {error.strerror or error}") from error
    show(explanation)
    if svg is not None:
        output().print(f"drawn: {svg}", markup=False, soft_wrap=True)


def show(explanation: Explanation) -> None:
    """Print an explanation."""
    console = output()
    layer, name = explanation.layer, explanation.piece_name
    widths = "+".join(map(str, layer.output_slices))
    console.print(
        f"{explanation.backend}, {explanation.operation}: {len(explanation.token_slots)} tokens, "
        f"{explanation.num_slots} slots; "
        f"layer {layer.in_features} -> {widths}, max_rank {layer.max_rank}",
        markup=False,
    )
    tokens_of: dict[int, list[int]] = {}
    for token, slot in enumerate(explanation.token_slots):
        tokens_of.setdefault(slot, []).append(token)
    rows = []
    for slot, tokens in sorted(tokens_of.items()):
        rank = "-" if slot < 0 else "/".join(map(str, layer.ranks[slot]))
        rows.append(["none" if slot < 0 else str(slot), rank, str(len(tokens)), ranges(tokens)])
    table("tokens by adapter", ["slot", ">ranks", ">tokens", "which"], rows, lines=False)
    order = ranges(explanation.order, 24) or "nothing to do"
    console.print(f"kernel order: {order}", markup=False)
    # a pipe may have an encoding without blocks
    full, empty = ("█", "░") if console.is_terminal else ("#", ".")
    rows = []
    for number, piece in enumerate(explanation.pieces[:MOST_PIECES]):
        share = len(piece.tokens) / piece.places
        # a piece with one token of many still shows
        filled = max(1, round(share * min(BAR, piece.places)))
        bar = full * filled + empty * (min(BAR, piece.places) - filled)
        held = f"{len(piece.tokens)} of {piece.places}"
        rows.append([str(number), str(piece.slot), held, bar, ranges(piece.tokens, 6)])
    more = len(explanation.pieces) - len(rows)
    title = f"{name}s" + (f", the first {len(rows)}; {more} more" if more else "")
    table(title, [f">{name}", ">slot", ">places", "", "tokens"], rows, lines=False)
    table(
        "launches, and the wasted share of each axis",
        ["", ">launched", ">idle", ">rows", ">inputs or columns", ">ranks", ">all products"],
        [_launch(launch) for launch in explanation.launches],
        lines=False,
    )
    for line in (*explanation.facts, "", explanation.legend):
        console.print(line, markup=False)


def _launch(launch: Launch) -> list[str]:
    shares = (launch.rows, launch.columns, launch.ranks, launch.products)
    wasted = [f"{100 * share.wasted:.0f}%" for share in shares]
    return [launch.name, f"{launch.programs} {launch.unit}", str(launch.idle), *wasted]
