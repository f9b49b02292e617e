"""Hypothesis strategies for whole cases: structure is drawn, values follow from a drawn seed.

Everything shrinks towards few tokens of slot 0, one slot, one slice, width and rank 1, float32
without base_output.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, Literal, TypeAlias, cast

import torch
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from lora_backends.batch import NO_ADAPTER
from lora_backends.eight_bit import COMPUTE_DTYPES, LARGEST, ScaleBlock
from lora_backends.features import EIGHT_BIT, OUTPUT_SCALES, SLICE_TENSORS, TOKEN_SCALES
from lora_backends.testing.cases.dense import LoRACase, Values
from lora_backends.testing.profiles import DEFAULT, Profile

Kinds: TypeAlias = Literal["real", "inexact", "integer", "either"]
KINDS_OF_VALUES: Mapping[Kinds, tuple[Values, ...]] = {
    "real": ("real",),
    "inexact": ("real", "sparse"),
    "integer": ("integer",),
    "either": ("real", "integer", "sparse", "integer"),
}
"""The kinds of values that each choice draws from; each entry is as likely."""

Split: TypeAlias = Literal["", "a", "b", "ab"]
SPLITS: tuple[Split, ...] = ("", "ab", "a", "b")

REAL_SCALINGS = (1.0, 2.0, 0.5, -1.0, 0.0, 0.3, -1.7, 5.656854249492381)
EXACT_SCALINGS = (1.0, 2.0, 0.5, -1.0, 0.0, 0.25, -2.0)
PADS = (0, 1, 3, 8, 260)
STORED = (*[None] * 5, *LARGEST, torch.float8_e4m3fn, torch.float8_e5m2)
BLOCKS: tuple[ScaleBlock, ...] = ((1, None), (None, None), (4, 16), (3, 5), (1, 32), (16, None))
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@cache
def run_lengths(profile: Profile = DEFAULT) -> SearchStrategy[int]:
    """Draw a number of tokens: small, or at the edge of a tile."""
    return st.one_of(st.integers(1, 4), st.integers(0, 20), st.sampled_from(profile.lengths))


@cache
def token_slots(
    num_slots: int, profile: Profile = DEFAULT, every_slot: bool = False
) -> SearchStrategy[tuple[int, ...]]:
    """Draw the slots of a batch, -1 among them: runs of one slot, as drawn, sorted or shuffled.

    Every fourth batch, or each with `every_slot`, has tokens of every slot, and one without any:
    Hypothesis draws few of these, as most of its draws resemble an earlier one.
    """
    some = st.integers(NO_ADAPTER, num_slots - 1)
    slot = st.one_of(st.integers(0, num_slots - 1), some)
    lengths = run_lengths(profile)
    runs = st.one_of(
        st.lists(st.tuples(slot, lengths), max_size=3),
        st.lists(st.tuples(slot, lengths), min_size=2, max_size=6),
        st.tuples(st.tuples(some, st.one_of(lengths, st.just(1)))),  # one, or none, owns all
        st.lists(slot, min_size=1, max_size=16).map(lambda slots: [(s, 1) for s in slots]),
        st.tuples(st.tuples(st.just(NO_ADAPTER), st.integers(1, 20))),
    )
    order = st.sampled_from(("drawn", "sorted", "shuffled"))
    at_edge = st.sampled_from((None, -1, 0, 1))
    first = [*range(num_slots), NO_ADAPTER]
    firsts = st.just(first) if every_slot else st.sampled_from(([], [], [], first))
    limit = st.just(profile.max_tokens)
    return st.builds(_ordered, runs, firsts, order, st.integers(0, 99), at_edge, limit)


def _ordered(
    runs: Sequence[tuple[int, int]],
    firsts: list[int],
    order: str,
    seed: int,
    at_edge: int | None,
    max_tokens: int,
) -> tuple[int, ...]:
    slots = [*firsts, *(slot for slot, length in runs for _ in range(length))][:max_tokens]
    if at_edge is not None and len(slots) > 8:  # a shorter batch begins anew, up to a tile
        slots = (2 * slots)[: max(16, len(slots) // 16 * 16) + at_edge]
    if order == "sorted":
        slots.sort()
    elif order == "shuffled":
        random.Random(seed).shuffle(slots)
    return tuple(slots)


@cache
def layer_widths(profile: Profile = DEFAULT) -> SearchStrategy[int]:
    """Draw in_features or the width of a slice: small, odd, or next to the edge of a tile."""
    return st.one_of(st.integers(1, 8), st.integers(1, 40), st.sampled_from(profile.widths))


@cache
def slice_widths(num_slices: int, profile: Profile = DEFAULT) -> SearchStrategy[tuple[int, ...]]:
    """Draw widths of slices, each its own, or equal as those of gate and up."""
    width = layer_widths(profile)
    return st.one_of(st.tuples(*[width] * num_slices), width.map(lambda one: (one,) * num_slices))


@cache
def rank_tables(
    num_slots: int, num_slices: int, max_rank: int
) -> SearchStrategy[tuple[tuple[int, ...], ...]]:
    """Draw ranks[num_slots][num_slices]: all full, or each of its own, 0 included."""
    one = st.one_of(st.integers(0, max_rank), st.sampled_from((max_rank, 0)))
    return st.one_of(
        st.just(((max_rank,) * num_slices,) * num_slots), tables(one, num_slots, num_slices)
    )


def tables(values: SearchStrategy[Any], *shape: int) -> SearchStrategy[Any]:
    """Draw nested tuples of a shape."""
    for size in reversed(shape):
        values = st.tuples(*[values] * size)
    return values


def drawn_if(draw: DrawFn, is_allowed: bool, fixed: bool | None) -> bool:
    """Return `fixed`, unless it is None; then a drawn bool where True is allowed."""
    if fixed is None:
        return is_allowed and draw(st.booleans())
    return fixed


def drawn_form(
    draw: DrawFn,
    dtypes: Sequence[torch.dtype],
    stored: torch.dtype | None,
    base: bool | None,
    token_scales: bool | None,
    features: Collection[str],
) -> dict[str, Any]:
    """Draw the dtypes, guards and scales of a case of any kind; arguments as in `lora_cases`."""
    ordered = sorted(dtypes, key=lambda dtype: (dtype != torch.float32, str(dtype)))
    # before the dtype is drawn, which stacks of 8 bits restrict
    if stored is None and EIGHT_BIT in features and not set(ordered).isdisjoint(COMPUTE_DTYPES):
        stored = draw(st.sampled_from(STORED))
    if stored is not None:  # float64 goes with wider stacks
        ordered = [dtype for dtype in ordered if dtype in COMPUTE_DTYPES]
    dtype = draw(st.sampled_from(ordered))
    with_base = draw(st.booleans()) if base is None else base
    any_dtype = st.one_of(st.just(dtype), st.sampled_from(ordered))
    return {
        "dtype": dtype,
        "base": draw(any_dtype) if with_base else None,
        "x_pad": draw(st.sampled_from(PADS)),
        "base_pad": draw(st.sampled_from(PADS)) if with_base else 0,
        "weights_pad": draw(st.sampled_from((0, 0, 1, 8))),
        "stored": stored,
        "scale_block": (1, None) if stored is None else draw(st.sampled_from(BLOCKS)),
        "token_scales": drawn_if(draw, TOKEN_SCALES in features, token_scales),
        "seed": draw(st.integers(0, 999)),
    }


def drawn_split(draw: DrawFn, is_allowed: bool, fixed: str | None) -> Split:
    """Return `fixed`, unless it is None; then drawn stacks that are tuples, where allowed."""
    if fixed is None:
        return draw(st.sampled_from(SPLITS)) if is_allowed else ""
    return cast(Split, fixed)


@st.composite
def lora_cases(
    draw: DrawFn,
    dtypes: Sequence[torch.dtype] = FLOATS,
    *,
    profile: Profile = DEFAULT,
    values: Kinds = "real",
    num_slices: int | None = None,
    base: bool | None = None,
    bias: bool | None = None,
    token_scales: bool | None = None,
    output_scales: bool | None = None,
    split: str | None = None,
    stored: torch.dtype | None = None,
    min_tokens: int = 0,
    every_slot: bool = False,
    features: Collection[str] = (),
) -> LoRACase:
    """Draw a whole case.

    Args:
        draw: given by Hypothesis.
        dtypes: dtypes of x, weights and base_output, e.g. ``Backend.dtypes``.
        profile: how large.
        values: "real" draws normal values, "inexact" these or sparse ones, "integer" small
            integers, "either" any of the three.
        num_slices: fixes the number of slices.
        base: fixes whether there is a base_output.
        bias: fixes whether there is a bias.
        token_scales: fixes whether tokens have scales.
        output_scales: fixes whether the layer has output_scales.
        split: fixes which stacks are tuples of one tensor per slice: "", "a", "b" or "ab".
        stored: fixes an 8-bit dtype of the stacks.
        min_tokens: pads the batch with tokens of slot 0.
        every_slot: puts tokens of every slot, and one without any, into every batch.
        features: names of `lora_backends.features` that cases may need where nothing is fixed.

    Returns:
        A `LoRACase`; its edges are Hypothesis events.
    """
    form = drawn_form(draw, dtypes, stored, base, token_scales, features)
    num_slots = draw(st.integers(1, profile.max_slots))
    slots = draw(token_slots(num_slots, profile, every_slot))
    slots += (0,) * (min_tokens - len(slots))
    slices = num_slices or draw(st.integers(1, profile.max_slices))
    max_rank = draw(st.sampled_from(profile.ranks))
    kind = draw(st.sampled_from(KINDS_OF_VALUES[values]))
    scalings = EXACT_SCALINGS if kind == "integer" else REAL_SCALINGS
    with_bias = draw(st.booleans()) if bias is None else bias
    case = LoRACase(
        slots=slots,
        ranks=draw(rank_tables(num_slots, slices, max_rank)),
        max_rank=max_rank,
        in_features=draw(layer_widths(profile)),
        output_slices=draw(slice_widths(slices, profile)),
        scalings=draw(tables(st.sampled_from(scalings), num_slots, slices)),
        bias=with_bias,
        wide_bias=draw(st.booleans()) if with_bias else False,
        values=kind,
        output_scales=drawn_if(draw, OUTPUT_SCALES in features, output_scales),
        split=drawn_split(draw, SLICE_TENSORS in features, split),
        **form,
    )
    for edge in sorted(case.edges()):
        event(edge)
    return case
