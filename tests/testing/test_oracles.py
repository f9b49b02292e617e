"""The oracles themselves, against numbers worked out by hand and against each other."""

import pytest
import torch
from hypothesis import given, settings

from lora_backends import LoRABatch, LoRAWeights
from lora_backends.testing import (
    Expected,
    LoRACase,
    assert_close,
    assert_same_bits,
    assert_same_values,
    expected_embedding,
    expected_linear,
    expected_shrink,
    lora_cases,
    rounded_exactly,
)

QUICK = settings(max_examples=40, deadline=None, database=None)


def by_hand():
    """Two slots of rank 1 on two slices of widths 1 and 2; slot 1 does not adapt slice 0."""
    nan = float("nan")
    weights = LoRAWeights(
        lora_a=torch.tensor([[[[1.0, 2.0]], [[0.0, 1.0]]], [[[nan, nan]], [[3.0, -1.0]]]]),
        lora_b=torch.tensor([[[2.0], [1.0], [-1.0]], [[nan], [4.0], [5.0]]]),
        ranks=torch.tensor([[1, 1], [0, 1]], dtype=torch.int32),
        scalings=torch.tensor([[0.5, 2.0], [nan, -1.0]]),
        output_slices=(1, 2),
    )
    x = torch.tensor([[1.0, 1.0], [2.0, 0.0], [nan, nan]])
    return x, weights, LoRABatch([0, 1, -1], 2)


def test_a_layer_without_columns_has_an_embedding_of_no_tokens():
    ranks, scalings = torch.tensor([[2]]), torch.ones(1, 1)
    weights = LoRAWeights(torch.zeros(1, 1, 2, 0), torch.zeros(1, 3, 2), ranks, scalings, (3,))
    ids = torch.zeros(0, dtype=torch.int64)
    assert expected_embedding(ids, weights, LoRABatch([], 1)).value.shape == (0, 3)


def test_the_formula_gives_what_is_worked_out_by_hand():
    x, weights, batch = by_hand()
    weights.scalings.nan_to_num_()
    wanted = [[3.0, 2.0, -2.0], [0.0, -24.0, -30.0], [0.0, 0.0, 0.0]]
    assert expected_linear(x, weights, batch).value.tolist() == wanted


def test_h_is_zero_beyond_a_rank_and_without_adapter():
    x, weights, batch = by_hand()
    assert expected_shrink(x, weights, batch).value.tolist() == [
        [[3.0], [0.0], [0.0]],
        [[1.0], [6.0], [0.0]],
    ]


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.parametrize("columns", [2, 9])  # x uses half of them, or few
def test_zeros_of_x_hide_no_odd_value_of_a(odd, columns):
    weights = LoRAWeights(
        lora_a=torch.ones(2, 1, 2, columns),
        lora_b=torch.ones(2, 1, 2),
        ranks=torch.ones(2, 1, dtype=torch.int32),
        scalings=torch.ones(2, 1),
        output_slices=(1,),
    )
    weights.lora_a[1, 0, :, 1] = odd
    weights.lora_a[0, 0, 1, 1] = odd  # beyond the rank
    x = torch.zeros(2, columns)
    x[:, :1] = 1
    h = expected_shrink(x, weights, LoRABatch([0, 1], 2)).value
    assert h[0, :, 0].isnan().tolist() == [False, True]


def test_base_output_and_bias_are_added():
    x, weights, batch = by_hand()
    weights.scalings.nan_to_num_()
    bias = torch.tensor([[10.0, 20.0, 30.0], [1.0, 2.0, 3.0]])
    biased = LoRAWeights(
        weights.lora_a, weights.lora_b, weights.ranks, weights.scalings, (1, 2), bias
    )
    base = torch.ones(3, 3)
    wanted = [[14.0, 23.0, 29.0], [2.0, -21.0, -26.0], [1.0, 1.0, 1.0]]
    assert expected_linear(x, biased, batch, base).value.tolist() == wanted


def test_the_bound_is_zero_exactly_where_nothing_is_added():
    x, weights, batch = by_hand()
    weights.scalings.nan_to_num_()
    zero = expected_linear(x, weights, batch).bound == 0
    assert zero.tolist() == [[False] * 3, [True, False, False], [True] * 3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_bound_is_tight_enough_to_see_one_percent(dtype):
    case = LoRACase(
        slots=(0,) * 20,
        ranks=((16,),),
        max_rank=16,
        in_features=64,
        output_slices=(33,),
        scalings=((2.0,),),
        dtype=dtype,
    )
    inputs = case.build()
    wanted = expected_linear(inputs.x, inputs.weights, inputs.batch)
    seen = (0.01 * wanted.value.abs() > wanted.bound).double().mean()
    assert seen > 0.95


@QUICK
@given(lora_cases())
def test_float32_sums_in_any_order_stay_within_the_bound(case):
    inputs = case.build()
    reversed_weights = LoRAWeights(
        inputs.weights.lora_a.flip(-1),
        inputs.weights.lora_b,
        inputs.weights.ranks,
        inputs.weights.scalings,
        inputs.weights.output_slices,
        inputs.weights.bias,
    )
    from lora_backends.torch_ref import TorchRefBackend

    backend = TorchRefBackend("cpu")
    y = backend.run_linear(
        inputs.x.flip(-1), reversed_weights, backend.prepare_batch(inputs.batch), inputs.base
    )
    base = case.build().base
    assert_close(y, expected_linear(inputs.x, inputs.weights, inputs.batch, base), inputs)


@QUICK
@given(lora_cases(values="integer"))
def test_sums_of_an_integer_case_are_exact_also_with_h_in_bfloat16(case):
    inputs = case.build()
    h = expected_shrink(inputs.x, inputs.weights, inputs.batch).value
    assert torch.equal(h.bfloat16().double(), h)
    wanted = expected_linear(inputs.x, inputs.weights, inputs.batch, inputs.base)
    rounded_exactly(wanted, case.base or case.dtype)  # raises where a sum is not exact


def test_an_inexact_sum_is_no_integer_case():
    inexact = Expected(torch.tensor([1 / 3], dtype=torch.float64), torch.zeros(1))
    with pytest.raises(ValueError, match="not exact in float32"):
        rounded_exactly(inexact, torch.float16)


def test_an_embedding_is_a_linear_layer_of_one_hot_rows():
    x, weights, batch = by_hand()
    weights.scalings.nan_to_num_()
    ids = torch.tensor([1, 0, 1])
    wanted = expected_linear(torch.eye(2)[ids], weights, batch).value
    assert torch.equal(expected_embedding(ids, weights, batch).value, wanted)


def comparison():
    case = LoRACase((0, 0), ((1, 1),), 1, 2, (2, 2), ((1.0, 0.5),))
    inputs = case.build()
    return inputs, torch.zeros(2, 4)


def test_a_difference_is_reported_with_its_place_values_and_bound():
    inputs, y = comparison()
    wanted = Expected(torch.zeros(2, 4, dtype=torch.float64), torch.full((2, 4), 0.5))
    y[1, 3], y[0, 0] = 2.0, 0.75
    with pytest.raises(AssertionError) as raised:
        assert_close(y, wanted, inputs)
    message = str(raised.value)
    assert "2 of 8 elements" in message
    assert "y[1, 3]: token 1, slot 0, slice 1, rank 1, scaling 0.5" in message
    assert "actual   2" in message and "error    2, bound 0.5" in message


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_nan_and_infinity_are_never_within_a_bound(wrong):
    inputs, y = comparison()
    y[0, 1] = wrong
    with pytest.raises(AssertionError, match=r"y\[0, 1\]"):
        assert_close(y, Expected(torch.zeros(2, 4), torch.full((2, 4), 1e30)), inputs)


def test_an_error_just_within_the_bound_passes():
    inputs, y = comparison()
    assert_close(y + 0.5, Expected(torch.zeros(2, 4), torch.full((2, 4), 0.5)), inputs)


def test_the_sign_of_a_zero_counts_for_bits_alone():
    inputs, y = comparison()
    assert_same_values(-y, y, inputs)
    with pytest.raises(AssertionError, match="differ in their bits"):
        assert_same_bits(-y, y, inputs)


def test_equal_nan_are_the_same_bits_but_not_the_same_value():
    inputs, y = comparison()
    y[0, 0] = float("nan")
    assert_same_bits(y, y.clone(), inputs)
    with pytest.raises(AssertionError):
        assert_same_values(y, y.clone(), inputs)
