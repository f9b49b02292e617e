"""The search for tile sizes: which are measured, in what order, and when one counts as faster.

Nothing here knows a GPU: a `Lab` compiles, checks and times. Times are noisy, so rivals are timed
in turns, the slower part is given up round by round (successive halving), and the winner has to
beat the rules once more, in new timings.

Source:
    Jamieson and Talwalkar, Non-stochastic Best Arm Identification, arXiv 1502.07943.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, is_dataclass, replace
from typing import Any, Protocol

ROUND = 24
"""Candidates compiled and timed together."""

REPEATS = 3
"""Timings of every rival before the slower two thirds are given up."""

FINAL = 11
"""Timings of the last two, in turns."""

WINS = 9
"""Of `FINAL` turns that a winner has to be faster in: by chance one of two equals is in 3%."""

MARGIN = 0.01
"""Share of the time that a winner has to gain; below it the rules stay."""

PATIENCE = 3
"""Rounds without a new best after which a search ends."""


class Lab(Protocol):
    """Where candidates are run; what `sample` is asked for has passed `prepare`."""

    def prepare(self, candidates: Sequence[Any]) -> Mapping[Any, str]:
        """Compile and check candidates; return why some of them cannot be used."""

    def sample(self, tiles: Any) -> float:
        """Return microseconds of one call, timed once."""

    def keep(self, candidates: Iterable[Any]) -> None:
        """Forget what was prepared of all others."""


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    tiles: Any  # the best, or those of the rules
    tuned_us: float
    rules_us: float  # timed in turns with the best
    tried: int  # candidates timed, the rules' not counted
    failed: tuple[str, ...]  # one reason for each candidate that could not be used


class RulesFail(Exception):
    """The rules' own sizes cannot be run here."""


def search(
    rules: Any,
    candidates: Sequence[Any],
    legal: Callable[[Any], bool],
    lab: Lab,
    out_of_time: Callable[[], bool],
    known: Iterable[Any] = (),
) -> Found:
    """Walk from the rules' sizes, or better known ones, to better ones, the nearest untried first.

    Args:
        rules: a TileConfig, where the walk begins.
        candidates: TileConfigs; a step takes one field's value from any of them.
        legal: whether the kernels can take a TileConfig.
        lab: where they are run.
        out_of_time: asked before each round.
        known: TileConfigs that were found before, by any run: where the walk begins, if one of
            them beats the rules.

    Returns:
        The best that was found, at least as good as the rules and, if time allowed a round, as
        the known ones.

    Raises:
        RulesFail: the rules' sizes cannot be compiled, or compute something wrong.
    """
    reason = lab.prepare([rules]).get(rules)
    if reason is not None:
        raise RulesFail(reason)
    best, seen, stale = rules, {rules}, 0
    failed: list[str] = []
    again = [tiles for tiles in dict.fromkeys(known) if tiles not in seen and legal(tiles)]
    if again and not out_of_time():
        seen.update(again)
        reasons = lab.prepare(again)
        failed += reasons.values()
        best = fastest([best, *(tiles for tiles in again if tiles not in reasons)], lab.sample)
        lab.keep({rules, best})
    while stale < PATIENCE and not out_of_time():
        fresh = [
            tiles for tiles in _nearest(best, candidates) if tiles not in seen and legal(tiles)
        ]
        if not fresh:
            break
        fresh = fresh[:ROUND]
        seen.update(fresh)
        reasons = lab.prepare(fresh)
        failed += reasons.values()
        before = best
        best = fastest([best, *(tiles for tiles in fresh if tiles not in reasons)], lab.sample)
        lab.keep({rules, best})
        stale = stale + 1 if best == before else 0
    tried = len(seen) - 1 - len(failed)
    return _verdict(rules, best, lab.sample, tried, tuple(failed))


def fastest(rivals: Sequence[Any], sample: Callable[[Any], float]) -> Any:
    """Return the fastest; the first of `rivals` holds its place unless beaten clearly.

    Args:
        rivals: TileConfigs, the best so far first.
        sample: times one.

    Returns:
        One of them.
    """
    times: dict[Any, list[float]] = {tiles: [] for tiles in rivals}
    alive, holder = list(rivals[1:]), rivals[0]
    while len(alive) > 1:
        for _ in range(REPEATS):
            for tiles in alive:
                times[tiles].append(sample(tiles))
        alive.sort(key=lambda tiles: statistics.median(times[tiles]))
        del alive[max(1, math.ceil(len(alive) / 3)) :]
    if not alive:
        return holder
    return alive[0] if _duel(holder, alive[0], sample).won else holder


def _verdict(
    rules: Any, best: Any, sample: Callable[[Any], float], tried: int, failed: tuple[str, ...]
) -> Found:
    """Time the best against the rules anew: the timings that chose it flatter it."""
    if best == rules:
        us = statistics.median(sample(rules) for _ in range(FINAL))
        return Found(rules, us, us, tried, failed)
    duel = _duel(rules, best, sample)
    if duel.won:
        return Found(best, duel.rival_us, duel.holder_us, tried, failed)
    return Found(rules, duel.holder_us, duel.holder_us, tried, failed)


@dataclass(frozen=True)
class _Duel:
    """Two timed in turns; times are medians."""

    holder_us: float
    rival_us: float
    won: bool  # by the rival


def _duel(holder: Any, rival: Any, sample: Callable[[Any], float]) -> _Duel:
    pairs = [(sample(holder), sample(rival)) for _ in range(FINAL)]
    held, tried = (statistics.median(side) for side in zip(*pairs, strict=True))
    wins = sum(b < a for a, b in pairs)
    return _Duel(held, tried, tried < (1 - MARGIN) * held and wins >= WINS)


def _nearest(best: Any, candidates: Sequence[Any]) -> list[Any]:
    """Return `best` with one field's value from any candidate, those most alike first."""
    steps: dict[Any, float] = {}
    for field in fields(best):
        now = getattr(best, field.name)
        for value in dict.fromkeys(getattr(tiles, field.name) for tiles in candidates):
            steps.setdefault(replace(best, **{field.name: value}), _distance(now, value))
    return sorted(steps, key=steps.__getitem__)


def _distance(a: Any, b: Any) -> float:
    """Return how far two values of a field are apart: about one for each doubling of a size."""
    pairs = zip(_sizes(a), _sizes(b), strict=True)
    return sum(abs(math.log2((1 + x) / (1 + y))) for x, y in pairs)


def _sizes(value: Any) -> tuple[int, ...]:
    return astuple(value) if is_dataclass(value) and not isinstance(value, type) else (value,)
