"""Sizes beyond those that are drawn: thousands of tokens, slots and columns, ranks of hundreds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations, cycle, islice
from typing import Any, TypeVar

from lora_backends.backend import LoRABackend
from lora_backends.batch import NO_ADAPTER
from lora_backends.operations import BY_NAME
from lora_backends.testing import oracles
from lora_backends.testing.assertions import assert_same_bits
from lora_backends.testing.cases.dense import LoRACase
from lora_backends.testing.cases.experts import ExpertCase
from lora_backends.testing.properties.core import (
    ANY_EXPERTS,
    ANY_LAYER,
    BY_CLAIM,
    either_prop,
    no_interpreter,
    prop,
)
from lora_backends.testing.properties.experts import check_experts
from lora_backends.testing.properties.runs import (
    assert_right,
    check_linear,
    expected_of,
    intermediate,
    linear,
    operations_for,
    run,
    strided_h,
)

SMALL = 8
"""The other sizes of a case with one large size, so that it takes little time."""

T = TypeVar("T")


@prop(
    "Batches of a thousand adapters, and of 70,000 tokens, are right.",
    agreement=BY_CLAIM,
    examples=2,
    requires=(no_interpreter,),
)
def large_batches_are_right(backend: LoRABackend, case: LoRACase) -> None:
    """The first batch is in random order, the second in long runs of one slot."""
    # more slots than a block of threads on a GPU has
    small, count = _small(case), 1030
    slots = random.Random(case.seed).choices(range(NO_ADAPTER, count), k=4100)
    mixed = replace(
        small,
        slots=tuple(slots),
        ranks=_repeated(small.ranks, count),
        scalings=_repeated(small.scalings, count),
        in_features=case.in_features + 30,
    )
    tiles, rest = 157 * 256, 25_003  # one length that tiles divide, and one that none divides
    runs = (case.num_slots - 1,) * tiles + (NO_ADAPTER,) * 5_000 + (0,) * rest
    for large in (mixed, replace(small, slots=runs)):
        inputs = large.build(backend.device)
        with naming(f"a batch of {large.num_tokens} tokens for {large.num_slots} slots"):
            y = check_linear(backend, large, inputs)
        # the oracle's bound would hide a row of another tile
        if backend.deterministic and backend.batch_invariant:
            for row in (1, large.num_tokens // 2, large.num_tokens - 1):
                alone = inputs.select([row])
                assert_same_bits(linear(backend, alone), y[row : row + 1], alone)


@either_prop(
    "Layers of thousands of columns, rank 512 and nine slices are right.",
    features=ANY_LAYER,
    examples=3,
)
def large_layers_are_right(backend: LoRABackend, case: LoRACase) -> None:
    """Fused and in two steps, and the embedding of more tokens than 16 bits count."""
    small = _small(case)
    for large in _large_layers(small):
        if case.values == "real":  # their bound grows with the width of a row
            large = replace(large, values="sparse")
        inputs = large.build(backend.device)
        with naming(f"{inputs.weights!r}, fused"):
            check_linear(backend, large, inputs)
        plan = backend.prepare_batch(inputs.batch)
        h = backend.run_lora_a(inputs.x, inputs.weights, plan)
        y = backend.run_lora_b(h, inputs.weights, plan, inputs.new_view())
        wanted = oracles.expected_linear(inputs.x, inputs.weights, inputs.batch, inputs.base)
        with naming(f"{inputs.weights!r}, in two steps"):
            assert_right(y, wanted, inputs, case.is_integer)
    _check_vocabulary(backend, small)


@either_prop(
    "Any two sizes may be large together, in batches of any order.",
    features=ANY_LAYER,
    examples=3,
)
def two_large_sizes_are_right(backend: LoRABackend, case: LoRACase) -> None:
    """Of tokens, slots, inputs, columns and the rank; by run_linear and another operation."""
    for turn, large in enumerate(mixed_sizes(backend, case)):
        inputs = large.build(backend.device)
        plan, h = backend.prepare_batch(inputs.batch), strided_h(large, inputs)
        others = [op for op in operations_for(inputs.weights) if op.name != "run_linear"]
        for operation in (BY_NAME["run_linear"], others[(case.seed + turn) % len(others)]):
            y = run(backend, operation, inputs, plan, inputs.new_view(), h)
            wanted = expected_of(backend, operation, inputs, h)
            with naming(f"{operation.name} of {inputs.weights!r}, {large.num_tokens} tokens"):
                assert_right(y, wanted, inputs, large.is_integer)


def mixed_sizes(backend: LoRABackend, case: LoRACase) -> Iterator[LoRACase]:
    """Yield a case for each pair of sizes, with both large; in the interpreter two cases."""
    draw, small = random.Random(case.seed), _small(case)
    pairs = list(combinations(("tokens", "slots", "inputs", "columns", "rank"), 2))
    if no_interpreter(backend) is not None:
        pairs = draw.sample(pairs, 2)
    for pair in pairs:
        number = {name: _large(draw, LARGEST[name]) if name in pair else 0 for name in LARGEST}
        slices = len(small.output_slices)
        slots = number["slots"] or small.num_slots
        inputs = number["inputs"] or small.in_features
        rank = number["rank"] or small.max_rank
        widths = list(small.output_slices)
        if number["columns"]:
            widths[draw.randrange(slices)] = number["columns"]
        # limits the memory of the oracle
        most = max(32, GATHERED // (rank * max(slices * inputs, sum(widths))))
        tokens = min(number["tokens"], most) or max(SMALL, draw.choice((20, slots)))
        kinds = [(0, rank, rank, draw.randint(1, rank))[draw.randrange(4)] for _ in range(7)]
        table = [[draw.choice(kinds) for _ in range(slices)] for _ in range(slots)]
        table[draw.randrange(slots)][draw.randrange(slices)] = rank
        yield replace(
            small,
            slots=_in_any_order(draw, tokens, slots),
            ranks=tuple(map(tuple, table)),
            max_rank=rank,
            in_features=inputs,
            output_slices=tuple(widths),
            scalings=_repeated(small.scalings, slots),
        )


LARGEST = {"tokens": 2048, "slots": 128, "inputs": 2048, "columns": 2048, "rank": 256}
"""`mixed_sizes` draws sizes near powers of two up to these."""

GATHERED = 1 << 21
"""The most elements of A or B that the oracle gathers for the tokens of a case of `mixed_sizes`."""


def _large(draw: random.Random, largest: int) -> int:
    """Return a power of two, a neighbour of it, or a size up to the next power."""
    # thresholds of kernels are powers of two
    powers = [1 << e for e in range(3, 12) if largest // 16 <= 1 << e <= largest]
    power = draw.choice(powers)
    return power + draw.choice((-1, 0, 1, power // 16, power // 4, draw.randint(1, power - 1)))


def _in_any_order(draw: random.Random, tokens: int, slots: int) -> tuple[int, ...]:
    """Return the slots of tokens: one slot, each in turn, or random ones in one of four orders."""
    order = draw.choice(("one", "each", "random", "rising", "falling", "runs"))
    if order == "one":
        return (draw.randrange(slots),) * tokens
    if order == "each":
        first = draw.randrange(slots)
        return tuple((first + token) % slots for token in range(tokens))
    drawn = draw.choices(range(NO_ADAPTER, slots), k=tokens)
    if order == "runs":
        return tuple(drawn[token // 50] for token in range(tokens))
    return tuple(drawn if order == "random" else sorted(drawn, reverse=order == "falling"))


def _check_vocabulary(backend: LoRABackend, small: LoRACase) -> None:
    """Check an embedding, and a head, of a vocabulary that 16 bits do not count.

    Values are integers, as the bound of a sum of that length would hide a lost part.
    """
    scalings = tuple(tuple((0.5, -2.0)[s % 2] for s in range(len(row))) for row in small.scalings)
    small = replace(small, values="integer", scalings=scalings)
    inputs = replace(small, in_features=70_001).build(backend.device)
    y = linear(backend, inputs, name="run_embedding")
    arguments = (inputs.token_ids, inputs.weights, inputs.batch, inputs.base)
    narrow = intermediate(backend, inputs)
    with naming("a vocabulary of 70,001 tokens"):
        wanted = oracles.expected_embedding(*arguments, intermediate=narrow)
        assert_right(y, wanted, inputs, exact=True)
    if no_interpreter(backend) is not None:  # each of these layers would take it half a minute
        return
    few = replace(small, slots=small.slots[:3])
    for large in (
        replace(few, in_features=70_001),
        replace(few, output_slices=(*small.output_slices[:-1], 70_001)),
    ):
        inputs = large.build(backend.device)
        with naming(repr(inputs.weights)):
            check_linear(backend, large, inputs)


def _large_layers(small: LoRACase) -> Iterator[LoRACase]:
    """Yield cases with one large size."""
    # odd, so that every tile size leaves a rest
    yield replace(small, in_features=6001)
    yield replace(small, in_features=2048, output_slices=(2048,) * len(small.output_slices))
    yield replace(small, output_slices=tuple(width + 4100 for width in small.output_slices))
    yield replace(small, max_rank=512, ranks=_changed(small.ranks, more=512))
    yield replace(small, max_rank=512, ranks=_changed(small.ranks, more=191))  # 192 to 199
    yield replace(
        small,
        output_slices=_repeated(small.output_slices, 9),
        ranks=tuple(_repeated(ranks, 9) for ranks in small.ranks),
        scalings=tuple(_repeated(scalings, 9) for scalings in small.scalings),
    )


@prop(
    "130 experts, wide experts, many slots and hundreds of pairs are right.",
    kind=ExpertCase,
    agreement=BY_CLAIM,
    values="either",
    examples=3,
    min_tokens=1,
    features=ANY_EXPERTS,
)
def many_experts_are_right(backend: LoRABackend, case: ExpertCase) -> None:
    """Each with random options, so that a few cases cover most combinations."""
    for large in large_experts(backend, case):
        inputs = large.build(backend.device)
        with naming(f"{inputs.weights!r}, {large.num_tokens} tokens, {large.top_k} experts each"):
            check_experts(backend, large, inputs)


def large_experts(backend: LoRABackend, case: ExpertCase) -> Iterator[ExpertCase]:
    """Yield 70 tokens with 130 experts, then 6 with wide experts, then 600 of 40 slots.

    In the interpreter the last has 200 tokens.
    """
    numbers, most = random.Random(case.seed), min(case.max_rank, SMALL)
    tokens = 600 if no_interpreter(backend) is None else 200

    def sized(num_slots: int, experts: int, ranks: Sequence[int], **sizes: Any) -> ExpertCase:
        """Return the case with other options, and tables for some slots and experts."""
        widths, slices = sizes["output_slices"], len(case.output_slices)
        interleaved = slices > 1 and numbers.random() < 0.5
        shape = num_slots, numbers.choice((experts, experts, 1)), numbers.choice((slices, 1))
        scalings = (1.0, -0.5, 2.0 if case.is_integer else 0.3)
        options = {o.name: numbers.choice(o.values) for o in BY_NAME["run_experts"].options}
        sizes["output_slices"] = (widths[0],) * slices if interleaved else widths
        return replace(
            case,
            num_experts=experts,
            ranks=_table(numbers, ranks, *shape),
            scalings=_table(numbers, scalings, *shape),
            max_rank=max(ranks),
            shared_a=numbers.random() < 0.25,
            shared_b=numbers.random() < 0.25,
            interleaved=interleaved,
            mapped=numbers.random() < 0.5,
            **(sizes | options),
        )

    low = {
        "in_features": min(case.in_features, SMALL),
        "output_slices": tuple(min(width, SMALL) for width in case.output_slices),
    }
    few = (most, most, 1, 0)
    many = {"slots": _slots(numbers, 70, 3), "ids": _ids(numbers, 70, range(-1, 130), 10)}
    yield sized(3, 130, few, top_k=10, **many, **low)
    rank = min(case.max_rank, 60) + 69
    wide = {
        "slots": _slots(numbers, 6, case.num_slots),
        "ids": ((0,) * case.top_k, *_ids(numbers, 5, range(-1, case.num_experts), case.top_k)),
        "in_features": numbers.choice((513, 1029, 2100)),
        "output_slices": tuple(width + 1024 for width in case.output_slices),
        "values": "sparse",  # sums of integers would not be exact, and a dense row's bound is wide
    }
    yield sized(case.num_slots, case.num_experts, (rank, 70), **wide)
    last = case.num_experts - 1
    busy = {"slots": _slots(numbers, tokens, 40), "ids": _ids(numbers, tokens, (0, 0, -1, last), 2)}
    yield sized(40, case.num_experts, few, top_k=2, **busy, **low)


def _slots(numbers: random.Random, tokens: int, slots: int) -> tuple[int, ...]:
    return 0, *numbers.choices(range(NO_ADAPTER, slots), k=tokens - 1)


def _ids(
    numbers: random.Random, tokens: int, experts: Sequence[int], top_k: int
) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(numbers.choices(experts, k=top_k)) for _ in range(tokens))


def _table(numbers: random.Random, values: Sequence[Any], *shape: int) -> Any:
    """Return nested tuples of a shape, drawn from values."""
    if not shape:
        return numbers.choice(values)
    return tuple(_table(numbers, values, *shape[1:]) for _ in range(shape[0]))


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Add the large sizes to a failure, whose case shows only the others."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"made large: {what}\n{error}") from None


def _small(case: LoRACase) -> LoRACase:
    """Return the case with small sizes, and a token that has an adapter."""
    return replace(
        case,
        slots=(0, *case.slots[:19]),
        x_pad=min(case.x_pad, SMALL),
        base_pad=min(case.base_pad, SMALL),
        ranks=_changed(case.ranks, most=SMALL),
        max_rank=min(case.max_rank, SMALL),
        in_features=min(case.in_features, SMALL),
        output_slices=tuple(min(width, SMALL) for width in case.output_slices),
    )


def _repeated(values: Sequence[T], count: int) -> tuple[T, ...]:
    return tuple(islice(cycle(values), count))


def _changed(ranks: Any, most: int = 512, more: int = 0) -> Any:
    """Return nested tuples of ranks, those above 0 changed."""
    if isinstance(ranks, tuple):
        return tuple(_changed(part, most, more) for part in ranks)
    return min(ranks + more, most) if ranks else 0
