"""Requests that come to a fleet: when, with which adapter, and how long."""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lora_backends.errors import InvalidInputError


class Request(NamedTuple):
    """One request."""

    arrival: float  # seconds
    adapter: int  # 0 is the most popular one
    prompt: int  # tokens
    output: int  # tokens


@dataclass(frozen=True)
class Traffic:
    """What comes to all cards together.

    Args:
        adapters: that may be asked for.
        rate: requests in a second; gaps are exponential (a Poisson process).
        zipf: adapter i is asked for in proportion to 1 / (i + 1)^zipf; 0: all alike.
        prompt_tokens: mean length of a prompt; lengths are exponential, 1 or more.
        output_tokens: mean length of an answer, likewise.
        requests: drawn.
        seed: of every draw.

    Raises:
        InvalidInputError: a number that is too small.
    """

    adapters: int
    rate: float
    zipf: float = 1.0
    prompt_tokens: int = 512
    output_tokens: int = 128
    requests: int = 4000
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("adapters", "prompt_tokens", "output_tokens", "requests"):
            if getattr(self, key) < 1:
                raise InvalidInputError(f"{key} is {getattr(self, key)}\n  allowed: 1 or more")
        if not (self.rate > 0 and math.isfinite(self.rate)):
            raise InvalidInputError(f"rate is {self.rate}\n  allowed: more than 0, per second")
        if not (self.zipf >= 0 and math.isfinite(self.zipf)):
            raise InvalidInputError(f"zipf is {self.zipf}\n  allowed: a number, 0 or more")

    def popularity(self) -> list[float]:
        """Return the share of the requests that each adapter gets; they add up to 1."""
        weights = [(i + 1.0) ** -self.zipf for i in range(self.adapters)]
        total = sum(weights)
        return [weight / total for weight in weights]

    def draw(self, share: float = 1.0, only: Iterable[int] | None = None) -> list[Request]:
        """Return the requests that come to one card, in order of arrival.

        Args:
            share: of all requests that it gets.
            only: the adapters that it gets requests of; None: all.
        """
        generator = random.Random(self.seed)
        adapters = list(range(self.adapters) if only is None else only)
        popularity = self.popularity()
        ends = list(itertools.accumulate(popularity[i] for i in adapters))
        now, made = 0.0, []
        for _ in range(self.requests):
            now += generator.expovariate(self.rate * share)
            place = bisect_left(ends, generator.random() * ends[-1])
            lengths = (
                max(1, round(generator.expovariate(1 / mean)))
                for mean in (self.prompt_tokens, self.output_tokens)
            )
            made.append(Request(now, adapters[min(place, len(ends) - 1)], *lengths))
        return made

    def divided(self, cards: int) -> tuple[list[int], float]:
        """Deal adapters to cards, the most popular first, to the card with the least requests.

        Returns:
            The adapters of the card with the most requests, and its share of all requests.
        """
        popularity = self.popularity()
        loads: list[tuple[float, int]] = [(0.0, card) for card in range(cards)]
        owned: list[list[int]] = [[] for _ in range(cards)]
        for adapter, share in enumerate(popularity):
            load, card = min(loads)
            loads[card] = (load + share, card)
            owned[card].append(adapter)
        load, card = max(loads)
        return owned[card], load
