"""Cases of dense layers and of experts whose sizes are above any threshold of a kernel.

Kernels choose by a size, or by two: a rank above 32 together with more than 512 inputs. A case
whose two sizes are large crosses every such pair of thresholds. Each row of a covering array joins
sizes that are large together with a dtype, with options of the layer and with the plan's history.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from lora_backends.backend import LoRABackend
from lora_backends.batch import NO_ADAPTER, LoRABatch
from lora_backends.eight_bit import COMPUTE_DTYPES, LARGEST
from lora_backends.features import (
    CAPACITY,
    EIGHT_BIT,
    OUTPUT_SCALES,
    SLICE_TENSORS,
    TOKEN_SCALES,
)
from lora_backends.operations import BY_NAME
from lora_backends.testing.cases.dense import LoRACase
from lora_backends.testing.cases.experts import ExpertCase
from lora_backends.testing.cases.inputs import LoRAInputs
from lora_backends.testing.cases.strategies import BLOCKS
from lora_backends.testing.properties.core import no_interpreter
from lora_backends.testing.properties.sizes.covering import covering

Sizes = Mapping[str, int]

DENSE: tuple[Sizes, ...] = (
    {"rank": 33, "inputs": 16_390},
    {"rank": 257, "inputs": 1030},
    {"rank": 257, "columns": 1030},
    {"rank": 129, "inputs": 2060, "columns": 2060, "tokens": 40},
    {"rank": 5, "inputs": 16_390, "columns": 32_770},
    {"tokens": 260, "rank": 140, "inputs": 260, "columns": 520},
    {"tokens": 1030, "rank": 2, "inputs": 1030},
    {"tokens": 4100, "slots": 270, "rank": 2},
    {"slots": 140, "rank": 70, "inputs": 20},
    {"slots": 140, "rank": 2, "inputs": 1030, "columns": 1030},
)
"""Sizes that are large together; columns of each slice, as far as memory allows."""

EXPERTS: tuple[Sizes, ...] = (
    {"experts": 257, "top_k": 17, "tokens": 6},
    {"experts": 130, "rank": 40},
    {"experts": 70, "inputs": 1030, "columns": 520, "rank": 1, "slots": 1},
    {
        "experts": 2,
        "inputs": 2060,
        "columns": 1030,
        "rank": 70,
        "slots": 1,
        "top_k": 5,
        "tokens": 2,
    },
    {"experts": 2, "inputs": 8200, "columns": 4100, "rank": 2, "slots": 1, "top_k": 9},
    {"rank": 257, "top_k": 17},
    {"slots": 40, "inputs": 520, "columns": 520, "rank": 2, "experts": 2},
    {"slots": 40, "experts": 70, "rank": 1, "top_k": 9},
    {"tokens": 300, "rank": 40, "inputs": 70},
)
"""The same for experts."""


class Large(NamedTuple):
    """A case, and how its plan is made."""

    case: LoRACase
    history: str  # "fresh", "refilled", or "room": refilled with fewer tokens than before

    def plan(self, backend: LoRABackend, inputs: LoRAInputs) -> Any:
        """Return the plan of the batch of some inputs."""
        if self.history == "fresh":
            return backend.prepare_batch(inputs.batch)
        slots = self.case.slots[::-1] + (0, NO_ADAPTER) * 9 * (self.history == "room")
        options = {"capacity": len(slots)} if self.history == "room" else {}
        plan = backend.prepare_batch(LoRABatch(slots, self.case.num_slots), **options)
        return backend.prepare_batch(inputs.batch, out=plan)


def large_layers(
    backend: LoRABackend,
    case: LoRACase,
    most: int = 9 << 17,
    plain: bool = False,
    **factors: tuple[Any, ...],
) -> Iterator[tuple[Large, dict[str, Any]]]:
    """Yield cases of dense layers, each with its values of further factors.

    `most` limits the elements of A, of B, of x and of a slice of y; `plain` makes stacks of 8 bits
    few, which have no gradient.
    """
    draw, has = random.Random(case.seed), backend.features
    rows = covering(
        {
            "large": DENSE,
            "slices": (1, 2, 3),
            "dtype": _dtypes(backend),
            "base": ("none", "own", "other"),
            "bias": ("", "own", "wide"),
            "values": ("sparse", "integer"),
            "token_scales": (False, True)[: 1 + (TOKEN_SCALES in has)],
            "output_scales": (False, True)[: 1 + (OUTPUT_SCALES in has)],
            "split": ("", "ab", "one") if SLICE_TENSORS in has else ("",),
            "stored": _stored(backend, plain),
            "pad": (0, 3),
            "history": ("fresh", "refilled", "room")[: 2 + (CAPACITY in has)],
            **factors,
        },
        draw,
    )
    for row in _some(backend, draw, rows):
        yield Large(_layer(backend, draw, row, most), row["history"]), row


def _dtypes(backend: LoRABackend) -> tuple[torch.dtype, ...]:
    """Return the dtypes of a backend, without float64 where there are others."""
    return tuple(d for d in backend.dtypes if d in COMPUTE_DTYPES) or backend.dtypes


def _stored(backend: LoRABackend, plain: bool) -> tuple[str | None, ...]:
    """Return kinds of stacks of 8 bits, and None for others, twice as often if `plain`."""
    if EIGHT_BIT not in backend.features or _dtypes(backend)[0] not in COMPUTE_DTYPES:
        return (None,)
    return (None, None, "any") if plain else (None, "int", "float")


def _some(backend: LoRABackend, draw: random.Random, rows: list[Any]) -> list[Any]:
    """Return all rows; in Triton's interpreter, which is slow, three with smaller sizes."""
    if no_interpreter(backend) is None:
        return rows
    few = draw.sample(rows, 3)
    return [
        row | {"large": {name: -(-size // 8) for name, size in row["large"].items()}} for row in few
    ]


def _layer(backend: LoRABackend, draw: random.Random, row: Any, most: int) -> LoRACase:
    slices, number = row["slices"], _drawn(draw, row["large"])
    slots, rank = number.get("slots", 1), number["rank"]
    tokens = number.get("tokens", 40 if "slots" in number else draw.choice((1, 2, 9)))
    widest = min(most // (slots * rank * slices), most // tokens)
    inputs, width = (min(number.get(n, draw.randint(2, 40)), widest) for n in ("inputs", "columns"))
    if slots == 1:  # two, where memory allows
        slots += 2 * max(inputs, width) <= widest
    width = min(width, 33_000 // slices)
    widths = [max(1, width - s) for s in range(slices)]
    exact = row["values"] == "integer"
    kinds = (rank, rank, rank - 1, 0)
    return LoRACase(
        slots=_with_ends(draw, tokens, slots),
        ranks=(
            (rank,) * slices,
            *(tuple(draw.choices(kinds, k=slices)) for _ in range(slots - 1)),
        ),
        max_rank=rank,
        in_features=inputs,
        output_slices=tuple(widths),
        scalings=tuple(
            tuple(draw.choices((1.0, -0.5, 2.0 if exact else 0.3), k=slices)) for _ in range(slots)
        ),
        bias=bool(row["bias"]),
        wide_bias=row["bias"] == "wide",
        x_pad=row["pad"],
        base_pad=row["pad"],
        weights_pad=draw.choice((0, 1)),
        output_scales=row["output_scales"],
        split=draw.choice(("a", "b")) if row["split"] == "one" else row["split"],
        **_form(backend, draw, row),
    )


def _form(backend: LoRABackend, draw: random.Random, row: Any) -> dict[str, Any]:
    """Return the dtypes and scales of a case of either kind."""
    dtype, stored = row["dtype"], row["stored"]
    kinds = [k for k in LARGEST if k.is_floating_point == (stored == "float") or stored == "any"]
    others = [d for d in _dtypes(backend) if d.itemsize != dtype.itemsize]
    bases = {"none": None, "own": dtype, "other": draw.choice(others or [dtype])}
    return {
        "dtype": dtype,
        "base": bases[row["base"]],
        "stored": None if stored is None else draw.choice(kinds),
        "scale_block": (1, None) if stored is None else draw.choice(BLOCKS),
        "token_scales": row["token_scales"],
        "values": row["values"],
        "seed": draw.randrange(1000),
    }


def _drawn(draw: random.Random, sizes: Sizes) -> dict[str, int]:
    """Return the sizes, most of them a little larger, so that tiles leave a rest of any size."""
    return {name: size + draw.randint(0, size // 32) for name, size in sizes.items()}


def in_any_order(draw: random.Random, tokens: int, slots: int) -> tuple[int, ...]:
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


def _with_ends(draw: random.Random, tokens: int, slots: int) -> tuple[int, ...]:
    """Return the slots of tokens, the last slot and slot 0 among them; at most 12 are active."""
    active = [0, *sorted(draw.sample(range(1, slots), min(slots, 12) - 1))]
    some = in_any_order(draw, tokens, len(active))
    return (slots - 1, *(active[slot] if slot >= 0 else slot for slot in some[1:-1]), 0)[:tokens]


def large_experts(
    backend: LoRABackend, case: ExpertCase, plain: bool = False
) -> Iterator[ExpertCase]:
    """Yield cases of experts; `plain` as in `large_layers`."""
    draw, has = random.Random(case.seed), backend.features
    options = {o.name: o.values for o in BY_NAME["run_experts"].options}
    rows = covering(
        {
            "large": EXPERTS,
            "layout": ("interleaved", "blocks", "one slice"),
            **options,
            "shared": ("", "a", "b"),
            "one_a": (False, True),
            "mapped": (False, True),
            "dtype": _dtypes(backend),
            "base": ("none", "own", "other"),
            "values": ("sparse", "integer"),
            "token_scales": (False, True)[: 1 + (TOKEN_SCALES in has)],
            "stored": _stored(backend, plain),
        },
        draw,
    )
    for row in _some(backend, draw, rows):
        yield _experts(backend, draw, row, tuple(options))


def _experts(
    backend: LoRABackend, draw: random.Random, row: Any, options: tuple[str, ...]
) -> ExpertCase:
    number, interleaved = _drawn(draw, row["large"]), row["layout"] == "interleaved"
    slices = 1 if row["layout"] == "one slice" else draw.choice((2, 3))
    slots, rank = number.get("slots", 2), number.get("rank", draw.randint(1, 4))
    experts = number.get("experts", draw.randint(2, 4))
    top_k, tokens = (
        number.get("top_k", draw.randint(1, 3)),
        number.get("tokens", min(max(slots, 4), 12)),
    )
    width = number.get("columns", draw.randint(2, 12))
    widths = (width,) * slices if interleaved else tuple(width + s for s in range(slices))
    exact = row["values"] == "integer"
    table = slots, draw.choice((experts, 1)), 1 if row["one_a"] else slices

    def drawn(values: tuple[Any, ...]) -> Any:
        """Return a table of random values."""
        slots, experts, stacks = table
        of = [[tuple(draw.choices(values, k=stacks)) for _ in range(experts)] for _ in range(slots)]
        return tuple(map(tuple, of))

    ids = tuple(tuple(draw.choices(range(-1, experts), k=top_k)) for _ in range(tokens - 1))
    return ExpertCase(
        slots=_with_ends(draw, tokens, slots),
        ids=(*ids, (experts - 1,) * top_k),
        num_experts=experts,
        ranks=drawn((rank, rank, rank, rank - 1)),
        max_rank=rank,
        in_features=number.get("inputs", draw.randint(2, 12)),
        output_slices=widths,
        scalings=drawn((1.0, -0.5, 2.0 if exact else 0.3)),
        top_k=top_k,
        shared_a=row["shared"] == "a",
        shared_b=row["shared"] == "b",
        interleaved=interleaved,
        mapped=row["mapped"],
        **_form(backend, draw, row),
        x_pad=draw.choice((0, 3)),
        weights_pad=draw.choice((0, 1)),
        **{name: row[name] for name in options},
    )
