"""Compares variants of the rules for 8-bit stacks on one GPU, over the peers' decode cells.

Each variant replaces some sizes of the rules by sizes from the H200's table. "7 of 14 cells" in its
docstring: it changes 14 cells, and the table has its sizes in 7 of them. The table's times do not
show which of these sizes saves time; this benchmark does:

    python benchmarks/run.py rule_variants --processes 12 --output variants.json
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import h200_moe
import torch
from h200 import DEVICE, DTYPE, PEERS, cell_of, create
from h200_eight_bit import DECODE, call_of
from h200_features import replays_in_turns
from measuring import Measurement, Options, Result, Row, flag

from lora_backends import LoRABackend, quantize_weights
from lora_backends.bench.cells import Cell
from lora_backends.bench.layers import make_layers, make_workload
from lora_backends.common.devices import as_device
from lora_backends.dtypes import dtype_name
from lora_backends.sgmv.tiles import rules
from lora_backends.sgmv.tiles.gpu import Gpu, gpu_of
from lora_backends.sgmv.tiles.sizes import (
    BatchShape,
    ExpandTiles,
    LayerShape,
    ShrinkTiles,
    TileConfig,
    padded_rank,
    parts,
    tile_faults,
)
from lora_backends.sgmv.tiles.source import TileSource

Variant = Callable[[TileConfig, BatchShape, LayerShape], TileConfig]
"""Takes the sizes of the rules, a batch and a layer of 8 bits; returns other sizes or the same."""

WIDE, LONG, MANY = 16384, 8192, 32  # out_features, in_features, rows of the grid, as in the rules


def _is_alone(batch: BatchShape) -> bool:
    return batch.num_tokens < 2 * batch.active_slots


def narrow_blocks(tiles: TileConfig, batch: BatchShape, layer: LayerShape) -> TileConfig:
    """At rank 16, a program of the shrink has 16 rows of A (5 of 5 cells).

    The rules take 64 for three slices and 32 for two: qkv with 16 tokens of 8 adapters took 5.87 us
    and 4.04 with the table's sizes.
    """
    shrink = tiles.shrink
    if padded_rank(layer.max_rank) > 16 or batch.rows >= MANY or not shrink.warps_k:
        return tiles
    return replace(tiles, shrink=replace(shrink, block_n=16))


def warp_parts(tiles: TileConfig, batch: BatchShape, layer: LayerShape) -> TileConfig:
    """As `narrow_blocks`, with the warps of a step in 4 groups (7 of 14 cells; rank 16: 6 of 9)."""
    found = narrow_blocks(tiles, batch, layer)
    shrink = found.shrink
    if batch.tile_tokens > 16 or shrink.block_n > 16 or shrink.warps_k != 1:
        return found
    return replace(found, shrink=replace(shrink, warps_k=4))


def lone_row(tiles: TileConfig, batch: BatchShape, layer: LayerShape) -> TileConfig:
    """One token: many planes at rank 16, few at rank 64 except in long layers (6 of 8 cells).

    The rules do the opposite. An expand of rank 64 reads every plane back.
    """
    rank_pad, shrink = padded_rank(layer.max_rank), tiles.shrink
    if batch.rows > 1 or not _is_alone(batch) or shrink.warps_k or rank_pad > 64:
        return tiles
    long = layer.in_features >= LONG
    block_k = 512 if long else 256 if rank_pad == 16 else 1024
    split_k = parts(layer.in_features, block_k, 28 if long else 16)
    shrink = ShrinkTiles(16, block_k, split_k, warps_k=0, num_warps=8 if long else 4, num_stages=1)
    return TileConfig(shrink, ExpandTiles(128, rank_pad, num_warps=4, num_stages=0))


def lone_rows(tiles: TileConfig, batch: BatchShape, layer: LayerShape) -> TileConfig:
    """For many slots of one token each, no matrix product at rank 64 either (7 of 8 kernels).

    At rank 16, programs of the expand have two warps (4 of 4 cells).
    """
    rank_pad = padded_rank(layer.max_rank)
    if batch.rows < MANY or not _is_alone(batch) or rank_pad not in (16, 64):
        return tiles
    if rank_pad == 16:
        return replace(tiles, expand=replace(tiles.expand, num_warps=2))
    split_k = parts(layer.in_features, 512, 4 if layer.in_features >= LONG else 2)
    shrink = ShrinkTiles(16, 512, split_k, warps_k=0, num_warps=8, num_stages=1)
    return TileConfig(shrink, ExpandTiles(128, 64, chunks=4, num_warps=2, num_stages=0))


def flat_expand(tiles: TileConfig, batch: BatchShape, layer: LayerShape) -> TileConfig:
    """In wide layers, 8 steps of 64 columns: rank 64 or wide tiles, 8 rows or more (5 of 6 cells).

    gate_up with 256 tokens of 8 adapters at rank 16 took 22.75 us with one step of 256 columns,
    13.10 in 16 bits, and 11.63 with the table's sizes.
    """
    expand, rank_pad = tiles.expand, padded_rank(layer.max_rank)
    steps = layer.out_features >= WIDE and expand.num_stages and expand.block_r == rank_pad
    if not steps or not (batch.tile_tokens > 16 or (rank_pad == 64 and batch.rows >= 8)):
        return tiles
    return replace(tiles, expand=ExpandTiles(64, rank_pad, chunks=8))


def wide_expand(tiles: TileConfig, batch: BatchShape, layer: LayerShape) -> TileConfig:
    """At rank 64 in other layers, 256 columns and 8 warps (5 of 9 cells)."""
    expand = tiles.expand
    fits = layer.out_features < WIDE and 1 < batch.rows < MANY and expand.num_stages == 1
    if not fits or expand.block_r != 64 or expand.chunks > 1:
        return tiles
    return replace(tiles, expand=replace(expand, block_c=256, num_warps=8))


SINGLE: dict[str, Variant] = {
    each.__name__: each
    for each in (narrow_blocks, warp_parts, lone_row, lone_rows, flat_expand, wide_expand)
}


def all_of_them(tiles: TileConfig, batch: BatchShape, layer: LayerShape) -> TileConfig:
    """Every variant, one after another."""
    for variant in SINGLE.values():
        tiles = variant(tiles, batch, layer)
    return tiles


VARIANTS: dict[str, Variant] = SINGLE | {"all_of_them": all_of_them}

METHOD = (
    "Microseconds of run_linear into an existing y, in a CUDA graph over layers with different "
    "weights, 240 MB of bfloat16 in all; graphs of all variants of a cell are replayed in turns, "
    "median of 9 rounds of 10 replays. bfloat16, rules: the rules for 16 and 8 bits; auto: "
    "8 bits with the tables of this card or a like one; the others: the rules for 8 bits, changed. "
    "A variant that takes the rules' sizes in a cell has no time there. tile_tokens: the rules'."
)


def source_of(variant: Variant, gpu: Gpu) -> TileSource:
    """Return the rules for a GPU with a variant for 8 bits, where its sizes fit on the GPU."""

    def choose(batch: BatchShape, layer: LayerShape) -> TileConfig:
        by_rules = rules.choose_tiles(batch, layer, gpu)
        if layer.item_bytes > 1:
            return by_rules
        tiles = variant(by_rules, batch, layer)
        return by_rules if tile_faults(tiles, batch.tile_tokens, layer, gpu) else tiles

    return TileSource(rules.tile_tokens, choose)


def backends_of(cell: Cell, gpu: Gpu) -> dict[str, Any]:
    """Return the option `tiles` of each contender; only variants that change the cell are there."""
    batch = BatchShape(
        cell.tokens, cell.active_adapters, rules.tile_tokens(cell.tokens, cell.active_adapters)
    )
    layer = LayerShape(len(cell.output_slices), cell.rank, cell.in_features, cell.out_features, 1)
    by_rules = rules.choose_tiles(batch, layer, gpu)
    found: dict[str, Any] = {"bfloat16": "rules", "rules": "rules", "auto": "auto"}
    for name, variant in VARIANTS.items():
        source = source_of(variant, gpu)
        if source.choose_tiles(batch, layer) != by_rules:
            found[name] = source
    return found


def measure(options: Options, _: Result) -> Iterator[Row]:
    """Yield a row per decode cell and backend."""
    stored, names = getattr(torch, options.dtype), options.backends.split(",")
    peers = json.loads(PEERS.read_text())
    cells = [cell_of(row, peers["projections"]) for row in peers["rows"]]
    cells = [cell for cell in cells if cell.tokens <= DECODE][:: options.every]
    h200_moe.compile_ahead(run_once, names, cells, options.processes, stored)
    for name in names:
        for cell in cells:
            calls, layers = calls_of(name, cell, stored)
            times = replays_in_turns(calls, layers)
            us = {f"{key}_us": round(value, 3) for key, value in times.items()}
            yield cell.describe() | {"backend": name} | us


def calls_of(
    name: str, cell: Cell, stored: torch.dtype, most_layers: int | None = None
) -> tuple[dict[str, Callable[[int], object]], int]:
    """Return the call of each contender in a cell, and how many layers it rotates over."""
    work = make_workload(cell, make_layers(cell, DEVICE, DTYPE)[:most_layers])
    narrow = [quantize_weights(layer, stored) for layer in work.layers]
    calls = {}
    for contender, tiles in backends_of(cell, gpu_of(as_device(DEVICE))).items():
        backend: LoRABackend = create(name, {"tiles": tiles})
        layers = work.layers if contender == "bfloat16" else narrow
        calls[contender] = call_of(backend, work, layers, backend.prepare_batch(work.batch))
    return calls, len(work.layers)


@torch.no_grad()
def run_once(names: list[str], cells: list[Cell], stored: torch.dtype) -> None:
    """Run one layer of every cell with every contender, so that its kernels are compiled."""
    for cell in cells:
        for name in names:
            for call in calls_of(name, cell, stored, most_layers=1)[0].values():
                call(0)
                torch.cuda.synchronize()
            torch.cuda.empty_cache()


def summarize(result: Result) -> dict[str, Any]:
    """Summarize each contender over the cells that it changes.

    mean, least, greatest: the rules' time over its own; faster, slower: the cells that differ by
    more than 2%; behind_bfloat16: of all cells, those that take more than 1 / 0.97 of bfloat16's
    time, with the rules' time where it changes nothing.
    """
    summary: dict[str, Any] = {}
    for backend in dict.fromkeys(row["backend"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["backend"] == backend]
        names = ["rules", "auto", *VARIANTS]
        summary[backend] = {name: _summary(rows, f"{name}_us") for name in names}
    return summary


def _summary(rows: list[Row], key: str) -> dict[str, Any]:
    gains = [row["rules_us"] / row[key] for row in rows if key in row]
    behind = sum(row.get(key, row["rules_us"]) > row["bfloat16_us"] / 0.97 for row in rows)
    found: dict[str, Any] = {"cells": len(gains), "behind_bfloat16": behind}
    if gains:
        found |= {
            "mean": round(statistics.geometric_mean(gains), 3),
            "least": round(min(gains), 3),
            "greatest": round(max(gains), 3),
            "faster": sum(gain > 1.02 for gain in gains),
            "slower": sum(gain < 0.98 for gain in gains),
        }
    return found


def settings(options: Options) -> dict[str, Any]:
    """Return the settings that the result records."""
    return {"device": DEVICE, "dtype": dtype_name(DTYPE), "stored": options.dtype}


RULES = Measurement(
    rows=measure,
    file="rule_variants.json",
    method=METHOD,
    settings=settings,
    summary=summarize,
    options={
        "--backends": flag("triton", "separated by commas"),
        "--dtype": flag("int8", "of the stacks, as torch names it"),
        "--every": flag(1, "take every n-th cell"),
        "--processes": h200_moe.PROCESSES,
    },
    partial=True,
)
