"""Sizes beyond those that are drawn: thousands of tokens, slots and columns, ranks of hundreds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, islice
from typing import Any, TypeVar

from lora_backends.backend import LoRABackend
from lora_backends.batch import NO_ADAPTER
from lora_backends.testing import oracles
from lora_backends.testing.assertions import assert_same_bits
from lora_backends.testing.cases.dense import LoRACase
from lora_backends.testing.cases.experts import ExpertCase
from lora_backends.testing.properties.core import (
    ANY_EXPERTS,
    ANY_LAYER,
    BOUNDED,
    BY_CLAIM,
    either_prop,
    no_interpreter,
    prop,
)
from lora_backends.testing.properties.experts import check_experts
from lora_backends.testing.properties.runs import (
    assert_right,
    check_linear,
    intermediate,
    linear,
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
        with _naming(f"a batch of {large.num_tokens} tokens for {large.num_slots} slots"):
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
        inputs = large.build(backend.device)
        with _naming(f"{inputs.weights!r}, fused"):
            check_linear(backend, large, inputs)
        plan = backend.prepare_batch(inputs.batch)
        h = backend.run_lora_a(inputs.x, inputs.weights, plan)
        y = backend.run_lora_b(h, inputs.weights, plan, inputs.new_view())
        wanted = oracles.expected_linear(inputs.x, inputs.weights, inputs.batch, inputs.base)
        with _naming(f"{inputs.weights!r}, in two steps"):
            assert_right(y, wanted, inputs, case.is_integer)
    _check_vocabulary(backend, small)


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
    with _naming("a vocabulary of 70,001 tokens"):
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
        with _naming(repr(inputs.weights)):
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
    "130 experts, wide experts, and hundreds of pairs are right.",
    kind=ExpertCase,
    agreement=BOUNDED,
    examples=2,
    min_tokens=1,
    features=ANY_EXPERTS,
)
def many_experts_are_right(backend: LoRABackend, case: ExpertCase) -> None:
    """70 tokens; then few, of a thousand columns and ranks above 64; then 300 of few experts."""
    numbers, experts, most = random.Random(case.seed), 130, min(case.max_rank, SMALL)
    slots = (0, *_repeated(case.slots, 69))

    def table(values: Sequence[T], count: int) -> tuple[tuple[tuple[T, ...], ...], ...]:
        """Return values for each slot, expert and A."""
        width = len(case.ranks[0][0])
        return tuple(
            tuple(tuple(numbers.choices(values, k=width)) for _ in range(count))
            for _ in range(case.num_slots)
        )

    many = replace(
        case,
        slots=slots,
        ids=tuple(tuple(numbers.choices(range(-1, experts), k=10)) for _ in slots),
        num_experts=experts,
        top_k=10,
        ranks=table((most, most, 1, 0), experts),
        max_rank=most,
        scalings=table((1.0, -0.5, 0.3), experts),
        shared_a=False,
        in_features=min(case.in_features, SMALL),
        output_slices=tuple(min(width, SMALL) for width in case.output_slices),
    )
    wide = replace(
        case,
        slots=(0, *case.slots[1:6]),
        ids=((0,) * case.top_k, *case.ids[1:6]),
        ranks=table((case.max_rank + 69, 70), case.num_experts),
        max_rank=case.max_rank + 69,
        scalings=table((1.0, -0.5, 0.3), case.num_experts),
        in_features=1029,
        output_slices=tuple(width + 1024 for width in case.output_slices),
    )
    long = (0, *_repeated(case.slots, 299))
    busy = replace(
        many,
        slots=long,
        ids=tuple(tuple(numbers.choices((0, 0, -1, case.num_experts - 1), k=2)) for _ in long),
        num_experts=case.num_experts,
        top_k=2,
        ranks=table((most, most, 1, 0), case.num_experts),
        scalings=table((1.0, -0.5, 0.3), case.num_experts),
    )
    for large in (many, wide, busy):
        inputs = large.build(backend.device)
        with _naming(f"{inputs.weights!r}, {large.num_tokens} tokens, {large.top_k} experts each"):
            check_experts(backend, large, inputs)


@contextmanager
def _naming(what: str) -> Iterator[None]:
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
