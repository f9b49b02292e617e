"""Random requests: arrival times, adapters and lengths."""

from __future__ import annotations

import heapq
import itertools
import random
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lora_backends.planning.checks import check_number, check_whole


class Arrival(NamedTuple):
    """One request."""

    arrival: float  # seconds
    adapter: int  # 0 is the most popular
    prompt: int  # tokens
    output: int  # tokens


@dataclass(frozen=True)
class Traffic:
    """The load of the whole fleet.

    Raises:
        InvalidInputError: a number is out of range.
    """

    adapters: int
    rate: float  # requests per second; arrivals are a Poisson process
    # Exponent s of Zipf's law: adapter i = 0, 1, ... gets a share of the requests proportional to
    # 1 / (i + 1)^s. 0: equal shares.
    zipf: float = 1.0
    prompt_tokens: int = 512  # mean; lengths are exponential, rounded, 1 at least
    output_tokens: int = 128  # mean, distributed alike
    requests: int = 4000  # in a simulation
    seed: int = 0  # of all draws

    def __post_init__(self) -> None:
        for key in ("adapters", "prompt_tokens", "output_tokens", "requests"):
            check_whole(key, getattr(self, key))
        check_whole("seed", self.seed, least=0, most=2**64)
        check_number("rate", self.rate, most=1e9)
        check_number("zipf", self.zipf, least=0, most=100)

    def popularity(self) -> list[float]:
        """Return each adapter's share of the requests; the shares add up to 1."""
        weights = [(i + 1.0) ** -self.zipf for i in range(self.adapters)]
        total = sum(weights)
        return [weight / total for weight in weights]

    def draw(self, share: float = 1.0, only: Iterable[int] | None = None) -> list[Arrival]:
        """Return the requests of one card, by its share of all, in order of arrival.

        It gets those of the adapters in `only`, None: of all.
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
            made.append(Arrival(now, adapters[min(place, len(ends) - 1)], *lengths))
        return made

    def divided(self, cards: int) -> tuple[list[int], float]:
        """Assign adapters to cards: the most popular first, each to the least loaded card.

        Returns:
            The adapters of the card with the most requests, and its share of all requests.
        """
        popularity = self.popularity()
        loads: list[tuple[float, int]] = [(0.0, card) for card in range(cards)]
        owned: list[list[int]] = [[] for _ in range(cards)]
        for adapter, share in enumerate(popularity):
            load, card = loads[0]
            heapq.heapreplace(loads, (load + share, card))
            owned[card].append(adapter)
        load, card = max(loads)
        return owned[card], load
