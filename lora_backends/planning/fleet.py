"""The plan: bytes, slots that fit, times of a step, and what becomes of the traffic on n cards."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from lora_backends.errors import InvalidInputError
from lora_backends.planning.cards import Card
from lora_backends.planning.checks import check_number, check_whole
from lora_backends.planning.shapes import ModelShapes
from lora_backends.planning.simulation import Outcome, Times, simulate
from lora_backends.planning.traffic import Traffic

Routing = Literal["by adapter", "any card"]
ROUTINGS: tuple[Routing, ...] = ("by adapter", "any card")
MOST_CARDS = 64
STRIDE = 32
"""Prompts take the time of the next multiple of so many tokens, so that few lengths are priced."""
THRASHES = 0.1
"""Share of the time that copies into slots may hold the batch before slots are called too few."""


@dataclass(frozen=True)
class Fleet:
    """What a card serves with, and what counts as good enough.

    Args:
        rows: the most in a batch.
        slots: of the pool; None: as many as fit.
        cpu_bytes: of the adapters in memory, as in `keep_adapters`; None: all of them.
        spare: share of the card's memory that is left to activations and the engine.
        max_wait_s: that 95% of the requests may wait before their first step.
        base_step_s: of the base model's decode step with `rows` rows; None: the bytes of its
            weights and cache over the rate of a copy, which no engine reaches.
        prompt_tokens_per_s: of the base model; None: its flop over the rate of large products.
        load_bytes_per_s: from memory into a slot.
        disk_bytes_per_s: of reading adapters.
        eager: no CUDA graph hides the host's time.

    Raises:
        InvalidInputError: a number that is too small or too large.
    """

    rows: int = 64
    slots: int | None = None
    cpu_bytes: int | None = None
    spare: float = 0.1
    max_wait_s: float = 1.0
    base_step_s: float | None = None
    prompt_tokens_per_s: float | None = None
    load_bytes_per_s: float = 20e9
    disk_bytes_per_s: float = 1e9
    eager: bool = False

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
    """The answer; seconds and bytes."""

    model: ModelShapes
    card: str
    slots_that_fit: int
    slots: int  # that the plan takes
    cache_bytes: int  # of `rows` requests of mean length
    base_step_s: float
    lora_step_s: float  # that the adapters add, at the mean number of rows and adapters
    by_slots: tuple[Outcome, ...]  # one card, all of its share of the traffic
    cards: dict[str, int | None]  # by routing; None: more than 64
    cards_outcome: dict[str, Outcome | None]
    thrashes_below: int | None  # the least slots that do not thrash; None: all of these do
    notes: tuple[str, ...]

    def describe(self) -> dict[str, Any]:
        """Return the plan as JSON's values."""
        plan = asdict(self)
        outcomes = [*plan["by_slots"], *filter(None, plan["cards_outcome"].values())]
        for outcome in outcomes:
            del outcome["trace"]
        return plan


def make_plan(model: ModelShapes, traffic: Traffic, card: Card, fleet: Fleet) -> Plan:
    """Plan a fleet.

    Returns:
        The plan. Outcomes `by_slots` are those of one card of the fewest that keep up by adapter
        (of one card, if none do), so that slots are what differs.

    Raises:
        InvalidInputError: not one slot fits beside the base model and the cache.
    """
    notes = [*model.notes, f"times of run_linear: {card.source}"]
    tokens = traffic.prompt_tokens + traffic.output_tokens
    if model.cache_bytes_per_token is None:
        notes.append("the cache counts nothing")
    per_token = model.cache_bytes_per_token or 0.0
    cache = math.ceil(fleet.rows * tokens * per_token)
    room = card.memory_bytes * (1 - fleet.spare) - model.base_bytes - cache
    fit = int(room // model.slot_bytes)
    if fit < 1:
        raise InvalidInputError(
            f"no slot fits on {card.name}\n"
            f"  given: {_gb(card.memory_bytes)} of memory, {fleet.spare:.0%} of it left to others; "
            f"{_gb(model.base_bytes)} of weights, {_gb(cache)} of cache, "
            f"{_gb(model.slot_bytes)} for a slot\n"
            f"  to do: fewer rows, shorter requests, a lower max_rank, 8 bits, or a larger card"
        )
    slots = min(fleet.slots or fit, traffic.adapters)
    if slots > fit:
        raise InvalidInputError(f"{slots} slots do not fit on {card.name}\n  allowed: {fit}")
    times = _times(model, card, fleet, int(tokens * per_token))
    if fleet.base_step_s is None:
        notes.append(
            "the base model's step is its bytes at the rate of a copy: engines take longer"
        )
    if fleet.prompt_tokens_per_s is None:
        notes.append("prompts run at the rate of large products: engines take longer")
    notes.append(
        f"taken as given: {_gb(fleet.load_bytes_per_s)}/s into a slot, "
        f"{_gb(fleet.disk_bytes_per_s)}/s from a disk"
    )
    memory = traffic.adapters * model.file_bytes if fleet.cpu_bytes is None else fleet.cpu_bytes

    def run(routing: Routing, cards: int, with_slots: int = slots) -> Outcome:
        only, share = traffic.divided(cards) if routing == "by adapter" else (None, 1 / cards)
        return simulate(
            traffic.draw(share, only),
            times,
            slots=with_slots,
            rows=fleet.rows,
            adapter_bytes=model.file_bytes,
            memory_bytes=memory,
            in_memory=[*(only or range(traffic.adapters))][::-1],
        )

    found = {routing: _fewest(partial(run, routing), fleet) for routing in ROUTINGS}
    cards = found["by adapter"][0] or 1
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
        cache_bytes=cache,
        base_step_s=times.step(mean[0], 0),
        lora_step_s=times.step(*mean) - times.step(mean[0], 0),
        by_slots=by_slots,
        cards={routing: n for routing, (n, _) in found.items()},
        cards_outcome={routing: outcome for routing, (_, outcome) in found.items()},
        thrashes_below=min(good) if good else None,
        notes=tuple(notes),
    )


def _times(model: ModelShapes, card: Card, fleet: Fleet, cache_bytes: int) -> Times:
    """Return what the parts take; `cache_bytes` are those of a request of mean length."""
    known: dict[tuple[int, int], float] = {}
    prompts: dict[int, float] = {}

    def step(rows: int, adapters: int) -> float:
        if (rows, adapters) not in known:
            base = fleet.base_step_s
            if base is None:
                base = (model.base_bytes + rows * cache_bytes) / card.copy_bytes_per_s
            known[rows, adapters] = base + card.lora_s(model, rows, adapters, fleet.eager)
        return known[rows, adapters]

    def prompt(tokens: int) -> float:
        tokens = math.ceil(tokens / STRIDE) * STRIDE
        if tokens in prompts:
            return prompts[tokens]
        if fleet.prompt_tokens_per_s is not None:
            base = tokens / fleet.prompt_tokens_per_s
        else:
            base = 2 * model.base_parameters * tokens / card.flop_per_s
        prompts[tokens] = base + card.lora_s(model, tokens, 1, fleet.eager)
        return prompts[tokens]

    return Times(
        step=step,
        prompt=prompt,
        load=model.file_bytes / fleet.load_bytes_per_s,
        read=model.file_bytes / fleet.disk_bytes_per_s,
    )


def _fewest(run: Callable[[int], Outcome], fleet: Fleet) -> tuple[int | None, Outcome | None]:
    """Return the fewest cards that keep up with short waits, and their outcome."""
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
