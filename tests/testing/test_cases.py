"""Cases: reproducible from their text, poisoned where nothing may be read, drawn at every edge."""

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.statistics import collector

from lora_backends import InvalidInputError
from lora_backends.features import FEATURES
from lora_backends.testing import GuardedOutput, LoRACase, case_from
from lora_backends.testing.cases.inputs import same_bits
from lora_backends.testing.cases.kinds import KINDS

QUICK = settings(max_examples=60, deadline=None, database=None)
CASE = LoRACase(
    slots=(0, -1, 1),
    ranks=((2, 0), (1, 3)),
    max_rank=4,
    in_features=5,
    output_slices=(3, 2),
    scalings=((0.5, 1.0), (-1.0, 0.0)),
    dtype=torch.bfloat16,
    base=torch.float32,
    bias=True,
    x_pad=1,
    base_pad=3,
    weights_pad=2,
)


@QUICK
@given(
    st.one_of([kind.strategy(values="either", features=FEATURES) for kind in KINDS.values()]),
)
def test_a_case_is_read_back_from_its_text(case):
    assert case_from(repr(case)) == case


@pytest.mark.parametrize("text", ["LoRACase(", "LoRACase()", "3", "__import__('os')"])
def test_text_that_is_no_case_is_refused(text):
    with pytest.raises(InvalidInputError, match=r"LoRACase\(\.\.\.\)"):
        case_from(text)


def test_the_text_names_only_what_differs_from_the_defaults():
    text = repr(LoRACase((0,), ((1,),), 1, 1, (1,), ((1.0,),)))
    assert text == (
        "LoRACase(slots=(0,), ranks=((1,),), max_rank=1, in_features=1, output_slices=(1,), "
        "scalings=((1.0,),))"
    )


def test_a_case_builds_the_same_values_every_time():
    first, second = CASE.build(), CASE.build()
    for left, right in (
        (first.x, second.x),
        (first.weights.lora_a, second.weights.lora_a),
        (first.weights.lora_b, second.weights.lora_b),
        (first.base, second.base),
    ):
        assert same_bits(left, right)


def test_values_beyond_each_rank_and_rows_without_adapter_are_nan():
    inputs = CASE.build()
    assert inputs.x.isnan().all(1).tolist() == [False, True, False]
    for slot in range(2):
        for s, columns in enumerate((slice(0, 3), slice(3, 5))):
            rank = CASE.ranks[slot][s]
            a, b = inputs.weights.lora_a[slot, s], inputs.weights.lora_b[slot, columns]
            assert a[rank:].isnan().all() and not a[:rank].isnan().any()
            assert b[:, rank:].isnan().all() and not b[:, :rank].isnan().any()


def test_views_are_strided_as_the_case_says():
    inputs = CASE.build()
    assert inputs.x.stride() == (5 + 2, 1)
    assert inputs.new_base().view.stride() == (5 + 6, 1)
    assert inputs.weights.lora_a.stride(2) == 5 + 4


def test_a_write_beside_the_view_is_noticed():
    for row, column in ((-1, 0), (3, 0), (0, -1), (2, 5)):
        guarded = GuardedOutput(torch.zeros(3, 5), pad=1)
        guarded.assert_untouched()
        whole = guarded.view.as_strided((5, 7), (7, 1), 0)
        whole[row + 1, column + 1] += 1
        with pytest.raises(AssertionError, match=f"row {row}, column {column}"):
            guarded.assert_untouched()


def drawn_edges(kind):
    """Return how often each edge was an event of one run of 240 cases, as Hypothesis counts."""
    cases = []

    def collect(statistics):
        for case in statistics["generate-phase"]["test-cases"]:
            cases.append(set(case["events"]))

    @seed(0)
    @settings(
        max_examples=240,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(kind.strategy(features=FEATURES))
    def draw(case):
        pass

    with collector.with_value(collect):
        draw()
    return Counter(event for events in cases for event in events)


@pytest.mark.parametrize("kind", KINDS.values(), ids=[kind.__name__ for kind in KINDS])
def test_every_edge_is_drawn(kind):
    counts = drawn_edges(kind)
    assert {edge for edge in kind.edges if counts[edge] < 2} == set()


@QUICK
@given(st.one_of([kind.strategy(every_slot=True) for kind in KINDS.values()]))
def test_every_slot_has_a_token_and_one_token_has_none(case):
    assert set(case.slots) == {-1, *range(case.num_slots)}
