"""How much `verify` tries: sizes drawn, examples per property, time to shrink a failure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    """Sizes and numbers of one run of the suite."""

    name: str
    effort: float  # factor on every property's number of examples
    max_tokens: int
    max_slots: int
    max_slices: int
    widths: tuple[int, ...]  # widths of x and of slices drawn besides small ones
    ranks: tuple[int, ...]  # values of max_rank
    lengths: tuple[int, ...]  # tokens of a run of one slot, besides small ones
    shrink_seconds: float  # time to look for a smaller failing case, per property


_RANKS = (1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64)
_EDGES = (15, 16, 17, 31, 32, 33, 48, 63, 64, 65)

DEFAULT = Profile(
    name="default",
    effort=1.0,
    max_tokens=72,
    max_slots=6,
    max_slices=3,
    widths=(*_EDGES, 96, 129),
    ranks=_RANKS,
    lengths=_EDGES,
    shrink_seconds=20.0,
)

THOROUGH = Profile(
    name="thorough",
    effort=8.0,
    max_tokens=400,
    max_slots=40,
    max_slices=5,
    widths=(*_EDGES, 96, 127, 128, 129, 256, 300, 513, 1024),
    ranks=(*_RANKS, 96, 127, 128, 129, 256, 512),
    lengths=(*_EDGES, 127, 128, 129, 200, 256, 257),
    shrink_seconds=120.0,
)

PROFILES = {profile.name: profile for profile in (DEFAULT, THOROUGH)}
