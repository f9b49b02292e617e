"""Hypothesis strategies for cases of experts; they shrink as those of dense layers do."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from lora_backends.operations import BY_NAME
from lora_backends.testing.cases.experts import ExpertCase
from lora_backends.testing.cases.strategies import (
    EXACT_SCALINGS,
    FLOATS,
    KINDS_OF_VALUES,
    REAL_SCALINGS,
    Kinds,
    drawn_form,
    layer_widths,
    tables,
    token_slots,
)
from lora_backends.testing.profiles import DEFAULT, Profile

MOST_TOKENS = 24
"""Tokens of a case: each has up to four pairs."""

MOST_RANK = 64
"""Up to here sums of an integer case are exact, the router's weights and four pairs included."""


@st.composite
def expert_cases(
    draw: DrawFn,
    /,
    dtypes: Sequence[torch.dtype] = FLOATS,
    *,
    profile: Profile = DEFAULT,
    values: Kinds = "real",
    base: bool | None = None,
    token_scales: bool | None = None,
    stored: torch.dtype | None = None,
    min_tokens: int = 0,
    every_slot: bool = False,
    features: Collection[str] = (),
    **options: Any,
) -> ExpertCase:
    """Draw a whole case: arguments as in `lora_cases`; `options` fixes those of `run_experts`."""
    form = drawn_form(draw, dtypes, stored, base, token_scales, features)
    num_slots = draw(st.integers(1, min(4, profile.max_slots)))
    slots = draw(token_slots(num_slots, profile, every_slot))
    if not every_slot:
        slots = slots[:MOST_TOKENS]
    slots += (0,) * (min_tokens - len(slots))
    num_experts, top_k = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    expert = st.one_of(st.integers(0, num_experts - 1), st.integers(-1, num_experts - 1))
    # one case of ten; more would leave little to compare
    if draw(st.sampled_from((False,) * 9 + (True,))):
        expert = st.just(-1)  # all pairs are dead
    num_slices = draw(st.integers(1, 3))
    interleaved = num_slices > 1 and draw(st.booleans())
    widths = draw(st.tuples(*[layer_widths(profile)] * num_slices))
    max_rank = draw(st.sampled_from([rank for rank in profile.ranks if rank <= MOST_RANK]))
    kind = draw(st.sampled_from(KINDS_OF_VALUES[values]))
    scaling = st.sampled_from(EXACT_SCALINGS if kind == "integer" else REAL_SCALINGS)
    rank = st.one_of(st.integers(0, max_rank), st.sampled_from((max_rank, 0)))
    table = (
        num_slots,
        draw(st.sampled_from((num_experts, 1))),
        draw(st.sampled_from((num_slices, 1))),
    )
    drawn: dict[str, Any] = {
        o.name: draw(st.sampled_from(o.values)) for o in BY_NAME["run_experts"].options
    }
    case = ExpertCase(
        slots=slots,
        ids=draw(tables(expert, len(slots), top_k)),
        num_experts=num_experts,
        ranks=draw(tables(rank, *table)),
        max_rank=max_rank,
        in_features=draw(layer_widths(profile)),
        output_slices=(widths[0],) * num_slices if interleaved else widths,
        scalings=draw(tables(scaling, *table)),
        top_k=top_k,
        shared_a=draw(st.booleans()),
        shared_b=draw(st.booleans()),
        interleaved=interleaved,
        mapped=draw(st.booleans()),
        values=kind,
        **(form | drawn | options),
    )
    for edge in sorted(case.edges()):
        event(edge)
    return case
