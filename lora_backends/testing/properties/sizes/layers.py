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
from lora_backends.operations import BY_NAME, Input
from lora_backends.testing import oracles
from lora_backends.testing.assertions import assert_same_bits
from lora_backends.testing.cases.dense import LoRACase
from lora_backends.testing.properties.core import (
    ANY_LAYER,
    BY_CLAIM,
    either_prop,
    no_interpreter,
    prop,
)
from lora_backends.testing.properties.runs import (
    assert_right,
    check_linear,
    expected,
    expected_of,
    intermediate,
    linear,
    operations_for,
    run,
    strided_h,
)
from lora_backends.testing.properties.sizes.all_large import in_any_order, large_layers

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
    examples=2,
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
    examples=2,
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


@prop(
    "Sizes above all thresholds of kernels are right with every dtype and option.",
    agreement=BY_CLAIM,
    examples=1,
)
def sizes_above_all_thresholds_are_right(backend: LoRABackend, case: LoRACase) -> None:
    """Every operation on one plan, fresh or refilled; two sizes, or three, are large together."""
    for large, row in large_layers(backend, case, skipped=("run_embedding", "run_logits")):
        inputs = large.case.build(backend.device)
        plan = large.plan(backend, inputs)
        x, weights, batch, base = inputs.x, inputs.weights, inputs.batch, inputs.base
        about, exact = f"{weights!r}, {batch.num_tokens} tokens", large.case.is_integer
        wanted_h = oracles.expected_shrink(x, weights, batch)
        with naming(f"run_lora_a of {about}"):
            h = backend.run_lora_a(x, weights, plan)
            assert_right(h, wanted_h, inputs, exact)
        if backend.narrow_intermediate:
            wanted = expected(backend, inputs)
        else:
            out = x.dtype if base is None else base.dtype
            wanted = oracles.expected_expand(wanted_h, weights, batch, base, out)
        for operation in operations_for(weights):
            by_ids, right = operation.input is Input.TOKEN_IDS, wanted
            if operation.name == row["skipped"]:
                continue
            if by_ids:
                right = expected_of(backend, operation, inputs, h)
            with naming(f"{operation.name} of {about}"):
                y = run(backend, operation, inputs, plan, inputs.new_view(), h)
                assert_right(y, right, inputs, exact)


def mixed_sizes(backend: LoRABackend, case: LoRACase) -> Iterator[LoRACase]:
    """Yield a case for each pair of sizes, with both large; in the interpreter two cases."""
    draw, small = random.Random(case.seed), _small(case)
    if case.values == "real":  # their bound grows with the width of a row
        small = replace(small, values="sparse")
    pairs = list(combinations(("tokens", "slots", "inputs", "columns", "rank"), 2))
    if no_interpreter(backend) is not None:
        pairs = draw.sample(pairs, 2)
    powers = {name: _powers(draw, largest) for name, largest in LARGEST.items()}
    for pair in pairs:
        number = {name: _near(draw, next(powers[name])) if name in pair else 0 for name in LARGEST}
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
            slots=in_any_order(draw, tokens, slots),
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


def _powers(draw: random.Random, largest: int) -> Iterator[int]:
    """Yield powers of two, each in turn; thresholds of kernels are such."""
    powers = [1 << e for e in range(3, 12) if largest // 16 <= 1 << e <= largest]
    draw.shuffle(powers)
    return cycle(powers)


def _near(draw: random.Random, power: int) -> int:
    """Return a power of two, a neighbour of it, or a size up to the next power."""
    return power + draw.choice((-1, 0, 1, power // 16, power // 4, draw.randint(1, power - 1)))


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
    """Yield cases with one size or two at an end."""
    # sizes that every tile divides
    yield replace(small, in_features=2048, output_slices=(2048,) * len(small.output_slices))
    yield replace(small, max_rank=512, ranks=_changed(small.ranks, more=512))
    yield replace(small, max_rank=512, ranks=_changed(small.ranks, more=191))  # 192 to 199
    yield replace(
        small,
        output_slices=_repeated(small.output_slices, 9),
        ranks=tuple(_repeated(ranks, 9) for ranks in small.ranks),
        scalings=tuple(_repeated(scalings, 9) for scalings in small.scalings),
    )


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
