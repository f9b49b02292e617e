"""The search for tile sizes: which sizes are tried, and when one counts as faster.

Nothing here touches a GPU: a `Lab` compiles, checks and times. Timings are noisy. So sizes are
timed in turns, each round drops the slower ones (successive halving), and the winner has to beat
the sizes of the rules in new timings.

Source:
    Jamieson and Talwalkar, Non-stochastic Best Arm Identification, arXiv 1502.07943.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from lora_backends.sgmv.tiles.gpu import Gpu
from lora_backends.sgmv.tiles.rules import choose_tiles
from lora_backends.sgmv.tiles.sizes import (
    MIN_DOT,
    BatchShape,
    LayerShape,
    ShrinkTiles,
    TileConfig,
    parts,
    tile_faults,
)
from lora_backends.sgmv.tiles.source import TileSource
from lora_backends.sgmv.tiles.table import Entry

REPEATS = 3
"""Timings of each candidate before the slower two thirds are dropped."""

FINAL = 11
"""Timings of each of the last two, in turns."""

WINS = 9
"""Turns of `FINAL` that a winner has to be faster in; one of two equals is with chance 3%."""

MARGIN = 0.01
"""Share of the time that a winner has to gain."""


class Lab(Protocol):
    """Compiles, checks and times tile sizes for one layer and batch."""

    def prepare(self, tiles: Any) -> str | None:
        """Compile and check these sizes; return the reason if they cannot be used."""

    def sample(self, tiles: Any) -> float:
        """Return one timing of prepared sizes, in microseconds of one call."""

    def keep(self, kept: Iterable[Any]) -> None:
        """Free all prepared sizes but these."""


@dataclass(frozen=True)
class Found:
    """The result of one search."""

    tiles: Any  # the fastest sizes, or those of the rules
    tuned_us: float
    rules_us: float  # timed in turns with tuned_us
    tried: int  # candidates timed, without the rules
    failed: tuple[str, ...]  # a reason for each candidate that could not be used


class RulesFail(Exception):
    """The sizes of the rules cannot be used."""


def search_entry(
    batch: BatchShape,
    layer: LayerShape,
    gpu: Gpu,
    in_use: TileSource,
    lab: Lab,
    now: Callable[[], float],
    end: float,
) -> tuple[Found, Entry]:
    """Run `search` for a layer and a batch until `end`; return its result and the entry."""
    rules = choose_tiles(batch, layer, gpu)
    result = search(
        rules,
        [in_use.choose_tiles(batch, layer), *far_away(rules, batch, layer, gpu)],
        lambda tiles: not tile_faults(tiles, batch.tile_tokens, layer, gpu),
        lab,
        lambda: now() >= end,
    )
    entry = Entry(
        layer=layer,
        num_tokens=batch.num_tokens,
        active_slots=batch.active_slots,
        tile_tokens=batch.tile_tokens,
        tiles=result.tiles,
        tuned_us=round(result.tuned_us, 3),
        rules_us=round(result.rules_us, 3),
    )
    return result, entry


def search(
    rules: Any,
    starts: Iterable[Any],  # the sizes in use, and others to start from
    legal: Callable[[Any], bool],  # whether the kernels can take a TileConfig
    lab: Lab,
    out_of_time: Callable[[], bool],  # asked before each candidate is compiled
) -> Found:
    """Climb from the fastest start: change one size at a time while that makes a call faster.

    The result is never slower than the sizes of the rules or, given time to try them, than the
    starts.

    Raises:
        RulesFail: the sizes of the rules cannot be compiled, or compute a wrong result.
    """
    reason = lab.prepare(rules)
    if reason is not None:
        raise RulesFail(reason)
    seen, failed = {rules}, []

    def prepared(candidates: Iterable[Any]) -> list[Any]:
        usable = []
        for tiles in candidates:
            if tiles in seen or not legal(tiles):
                continue
            if out_of_time():
                break
            seen.add(tiles)
            reason = lab.prepare(tiles)
            if reason is None:
                usable.append(tiles)
            else:
                failed.append(reason)
        return usable

    best = fastest([rules, *prepared(starts)], lab.sample)
    while True:
        winner = fastest([best, *prepared(neighbours(best))], lab.sample)
        if winner == best:
            break
        best = winner
        # graphs and their memory add up over a search
        lab.keep({rules, best})
    tried = len(seen) - 1 - len(failed)
    if best != rules:  # the timings that chose it flatter it
        rules_us, best_us, won = _duel(rules, best, lab.sample)
        if won:
            return Found(best, best_us, rules_us, tried, tuple(failed))
    us = statistics.median(lab.sample(rules) for _ in range(FINAL))
    return Found(rules, us, us, tried, tuple(failed))


def far_away(tiles: TileConfig, batch: BatchShape, layer: LayerShape, gpu: Gpu) -> list[TileConfig]:
    """Return sizes that climbing rarely reaches, because several of them change together.

    In each, groups of warps share out long steps of 16 rows of A; multiprocessors have one, two or
    four programs each. On an H200 they often beat what climbing had found.
    """
    blocks = -(-layer.stacked // MIN_DOT) * batch.rows
    block_k = 512 if layer.item_bytes == 1 else 256  # 512 bytes per row of A in 8 and 16 bits
    splits = [
        parts(layer.in_features, block_k, max(1, programs * gpu.multiprocessors // blocks))
        for programs in (1, 2, 4)
    ]
    shrinks = [ShrinkTiles(MIN_DOT, block_k, split_k, 4, 4, 4) for split_k in splits]
    return [replace(tiles, shrink=shrink) for shrink in dict.fromkeys(shrinks)]


def neighbours(tiles: Any) -> list[Any]:
    """Return a TileConfig with one size doubled, halved, or one more or less."""
    halves = [_changed(tiles, half.name) for half in fields(tiles)]
    # a search with little time tries sizes of both kernels
    in_turns = itertools.chain.from_iterable(itertools.zip_longest(*halves))
    return list(dict.fromkeys(each for each in in_turns if each is not None))


def _changed(tiles: Any, half: str) -> list[Any]:
    sizes, changed = getattr(tiles, half), []
    for field in fields(sizes):
        size = getattr(sizes, field.name)
        # sizes are powers of two; stages and parts count by one
        for step in (2 * size, size // 2, size + 1, size - 1):
            if step > 0:
                changed.append(replace(tiles, **{half: replace(sizes, **{field.name: step})}))
    return changed


def fastest(rivals: Sequence[Any], sample: Callable[[Any], float]) -> Any:
    """Return the fastest of some sizes; the first keeps its place unless it is clearly beaten."""
    holder, alive = rivals[0], list(rivals[1:])
    times: dict[Any, list[float]] = {tiles: [] for tiles in alive}
    while len(alive) > 1:
        # in turns, so that a slow moment of the machine hits all
        for _ in range(REPEATS):
            for tiles in alive:
                times[tiles].append(sample(tiles))
        alive.sort(key=lambda tiles: statistics.median(times[tiles]))
        del alive[max(1, math.ceil(len(alive) / 3)) :]
    return alive[0] if alive and _duel(holder, alive[0], sample)[2] else holder


def _duel(holder: Any, rival: Any, sample: Callable[[Any], float]) -> tuple[float, float, bool]:
    """Time two in turns; return both medians, and whether the rival is clearly faster."""
    pairs = [(sample(holder), sample(rival)) for _ in range(FINAL)]
    held, tried = (statistics.median(side) for side in zip(*pairs, strict=True))
    wins = sum(b < a for a, b in pairs)
    return held, tried, tried < (1 - MARGIN) * held and wins >= WINS
