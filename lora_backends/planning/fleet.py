"""The plan: memory, slots that fit, step times, and how many cards carry the load."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, Literal

from lora_backends.errors import InvalidInputError
from lora_backends.planning.cards import Card
from lora_backends.planning.checks import check_number, check_whole
from lora_backends.planning.shapes import ModelShapes
from lora_backends.planning.simulation import Outcome, Simulation, Times
from lora_backends.planning.traffic import Traffic

Routing = Literal["by adapter", "any card"]
ROUTINGS: tuple[Routing, ...] = ("by adapter", "any card")
MOST_CARDS = 64
STRIDE = 32
"""Prompt lengths are rounded up to a multiple of this, so that few prompt times are computed."""
THRASHES = 0.1
"""The fleet thrashes where copies into slots block the batch for a larger share of the time."""


@dataclass(frozen=True)
class Fleet:
    """The serving options of every card, and the longest acceptable wait.

    Raises:
        InvalidInputError: a number is out of range.
    """

    rows: int = 64  # the most in a batch
    slots: int | None = None  # of the pool; None: as many as fit
    cpu_bytes: int | None = None  # for adapters, as in `keep_adapters`; None: enough for all
    spare: float = 0.1  # share of the card's memory left to activations and the engine
    max_wait_s: float = 1.0  # 95th percentile of the wait before a request's first step
    # Decode step of the base model with `rows` rows. None: the bytes of weights and cache divided
    # by the card's copy rate, a lower bound.
    base_step_s: float | None = None
    # Prefill rate of the base model. None: the rate of a large matrix product divided by 2 flop
    # per parameter, an upper bound.
    prompt_tokens_per_s: float | None = None
    load_bytes_per_s: float = 20e9  # from host memory into a slot
    disk_bytes_per_s: float = 1e9
    eager: bool = False  # whether the engine runs without CUDA graphs, so that host time counts

    def __post_init__(self) -> None:
        check_whole("rows", self.rows)
        if self.slots is not None:
            check_whole("slots", self.slots)
        check_number("spare", self.spare, least=0, most=0.999)
        if self.cpu_bytes is not None:
            check_whole("cpu_bytes", self.cpu_bytes, least=0, most=10**18)
        for key in ("max_wait_s", "load_bytes_per_s", "disk_bytes_per_s"):
            check_number(key, getattr(self, key))
        for key in ("base_step_s", "prompt_tokens_per_s"):
            if getattr(self, key) is not None:
                check_number(key, getattr(self, key))


@dataclass(frozen=True)
class Plan:
    """A plan, in seconds and bytes."""

    model: ModelShapes
    card: str
    slots_that_fit: int
    slots: int  # that the plan uses
    cache_bytes: int  # of `rows` requests of mean length
    base_step_s: float  # at the mean number of rows
    lora_step_s: float  # added by the adapters, at the mean numbers of rows and adapters
    by_slots: tuple[Outcome, ...]  # one card with its share of the traffic, by number of slots
    cards: dict[str, int | None]  # the fewest that keep up, by routing; None: more than 64
    cards_outcome: dict[str, Outcome | None]  # with that number of cards, by routing
    thrashes_below: int | None  # fewest of `by_slots` with few copies and short waits; None: none
    notes: tuple[str, ...]

    def describe(self) -> dict[str, Any]:
        """Return the plan as values for JSON, without the traces."""
        plan = asdict(self)
        outcomes = [*plan["by_slots"], *filter(None, plan["cards_outcome"].values())]
        for outcome in outcomes:
            del outcome["trace"]
        return plan


def make_plan(model: ModelShapes, traffic: Traffic, card: Card, fleet: Fleet) -> Plan:
    """Plan a fleet.

    The simulations for `by_slots` all use the fewest cards that keep up with requests routed by
    adapter, or one card if no number of cards does.

    Raises:
        InvalidInputError: no slot fits beside the base model and the cache, or fewer than
            `fleet.slots` do.
    """
    notes = [*model.notes, f"times of run_linear: {card.source}"]
    tokens = traffic.prompt_tokens + traffic.output_tokens
    if model.cache_bytes_per_token is None:
        notes.append("the cache counts as 0 bytes")
    per_token = model.cache_bytes_per_token or 0.0
    cache_bytes = math.ceil(fleet.rows * tokens * per_token)
    free = card.memory_bytes * (1 - fleet.spare) - model.base_bytes - cache_bytes
    fit = int(free // model.slot_bytes)
    if fit < 1:
        raise InvalidInputError(
            f"no slot fits on {card.name}\n"
            f"  given: {_gb(card.memory_bytes)} of memory, {fleet.spare:.0%} of it spare; "
            f"{_gb(model.base_bytes)} of weights, {_gb(cache_bytes)} of cache, "
            f"{_gb(model.slot_bytes)} for a slot\n"
            f"  to do: use fewer rows, shorter requests, a lower max_rank, 8-bit adapters or a "
            f"larger card"
        )
    slots = min(fleet.slots or fit, traffic.adapters)
    if slots > fit:
        raise InvalidInputError(f"{slots} slots do not fit on {card.name}\n  allowed: {fit}")
    times = _times(model, card, fleet, int(tokens * per_token))
    if fleet.base_step_s is None:
        notes.append("the base model's step is a lower bound: its bytes divided by the copy rate")
    if fleet.prompt_tokens_per_s is None:
        notes.append(
            "the time of a prompt is a lower bound: its flop divided by the rate of a large product"
        )
    notes.append(
        f"assumed: {_gb(fleet.load_bytes_per_s)}/s into a slot, "
        f"{_gb(fleet.disk_bytes_per_s)}/s from disk"
    )
    memory = traffic.adapters * model.file_bytes if fleet.cpu_bytes is None else fleet.cpu_bytes

    def run(routing: Routing, cards: int, with_slots: int = slots) -> Outcome:
        only, share = traffic.divided(cards) if routing == "by adapter" else (None, 1 / cards)
        simulation = Simulation(
            traffic.draw(share, only),
            times,
            slots=with_slots,
            rows=fleet.rows,
            adapter_bytes=model.file_bytes,
            memory_bytes=memory,
            in_memory=[*(only or range(traffic.adapters))][::-1],
        )
        return simulation.run()

    fewest = {routing: _fewest(partial(run, routing), fleet) for routing in ROUTINGS}
    cards = fewest["by adapter"][0] or 1
    most = min(slots, len(traffic.divided(cards)[0]))
    steps = sorted({*(2**i for i in range(most.bit_length())), most})
    by_slots = tuple(run("by adapter", cards, count) for count in steps)
    good = [o.slots for o in by_slots if o.loading <= THRASHES and _is_good(o, fleet)]
    chosen = by_slots[-1]
    mean = max(1, round(chosen.mean_rows)), max(1, round(chosen.mean_adapters))
    return Plan(
        model=model,
        card=card.name,
        slots_that_fit=fit,
        slots=slots,
        cache_bytes=cache_bytes,
        base_step_s=times.step(mean[0], 0),
        lora_step_s=times.step(*mean) - times.step(mean[0], 0),
        by_slots=by_slots,
        cards={routing: n for routing, (n, _) in fewest.items()},
        cards_outcome={routing: outcome for routing, (_, outcome) in fewest.items()},
        thrashes_below=min(good) if good else None,
        notes=tuple(notes),
    )


def _times(model: ModelShapes, card: Card, fleet: Fleet, cache_bytes: int) -> Times:
    """Return the times of a fleet; `cache_bytes` is the cache of one request of mean length."""

    @cache
    def step(rows: int, adapters: int) -> float:
        base = fleet.base_step_s
        if base is None:
            base = (model.base_bytes + rows * cache_bytes) / card.copy_bytes_per_s
        return base + card.lora_s(model, rows, adapters, fleet.eager)

    @cache
    def rounded_prompt(tokens: int) -> float:
        if fleet.prompt_tokens_per_s is None:
            base = 2 * model.base_parameters * tokens / card.flop_per_s
        else:
            base = tokens / fleet.prompt_tokens_per_s
        return base + card.lora_s(model, tokens, 1, fleet.eager)

    return Times(
        step=step,
        prompt=lambda tokens: rounded_prompt(math.ceil(tokens / STRIDE) * STRIDE),
        load=model.file_bytes / fleet.load_bytes_per_s,
        read=model.file_bytes / fleet.disk_bytes_per_s,
    )


def _fewest(run: Callable[[int], Outcome], fleet: Fleet) -> tuple[int | None, Outcome | None]:
    """Return the fewest cards that keep up within `max_wait_s`, and their outcome."""
    low, high = 0, 1  # `low` cards are too few
    outcome = run(high)
    while not _is_good(outcome, fleet):
        if high == MOST_CARDS:
            return None, None
        low, high = high, min(2 * high, MOST_CARDS)
        outcome = run(high)
    while high - low > 1:
        middle = (low + high) // 2
        tried = run(middle)
        if _is_good(tried, fleet):
            high, outcome = middle, tried
        else:
            low = middle
    return high, outcome


def _is_good(outcome: Outcome, fleet: Fleet) -> bool:
    return outcome.keeps_up and outcome.wait_p95_s <= fleet.max_wait_s


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"
