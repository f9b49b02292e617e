import copy
import pickle

import numpy as np
import pytest
import torch

from lora_backends import NO_ADAPTER, InvalidInputError, LoRABatch


@pytest.mark.parametrize(
    "slots",
    [
        [0, -1, 2, 2],
        (0, -1, 2, 2),
        np.array([0, -1, 2, 2], dtype=np.int16),
        np.array([2, 2, -1, 0])[::-1],
        torch.tensor([0, -1, 2, 2], dtype=torch.int32),
    ],
)
def test_lists_arrays_and_tensors_are_the_same_batch(slots):
    batch = LoRABatch(slots, num_slots=3)
    assert batch.num_tokens == 4
    assert batch.token_slots.tolist() == [0, NO_ADAPTER, 2, 2]
    assert batch.token_slots.dtype == torch.int64


def test_the_batch_keeps_its_own_copy():
    slots = torch.tensor([0, 1])
    batch = LoRABatch(slots, 2)
    slots[0] = 1
    assert batch.token_slots.tolist() == [0, 1]


@pytest.mark.parametrize("empty", [[], torch.empty(0, dtype=torch.int32), np.array([])])
def test_a_batch_may_be_empty(empty):
    assert LoRABatch(empty, 1).num_tokens == 0


def test_sequences_repeat_their_slot():
    batch = LoRABatch.from_sequences([2, -1, 0], [3, 1, 0], num_slots=3)
    assert batch.token_slots.tolist() == [2, 2, 2, -1]


@pytest.mark.parametrize(
    ("slots", "num_slots", "told"),
    [
        ([0, 3], 3, "3 at index 1"),
        ([-2], 3, "-2 at index 0"),
        ([0.5], 3, "dtype torch.float"),
        ([True], 3, "torch.bool"),
        ([[[0]]], 3, r"shape \[1, 1, 1\]"),
        (["a"], 3, "cannot be read"),
        ([0], 0, "num_slots"),
        ([0], True, "num_slots"),
        (np.array([2**64 - 1], dtype=np.uint64), 3, "beyond int64"),
        ([0], 1.0, "num_slots"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), 1, "meta"),
    ],
)
def test_bad_slots_are_refused_with_what_was_given(slots, num_slots, told):
    with pytest.raises(InvalidInputError, match=told):
        LoRABatch(slots, num_slots)


@pytest.mark.parametrize(
    ("slots", "lengths", "told"),
    [([0, 1], [1], "2 slots, 1 lengths"), ([0], [-1], "negative"), ([5], [0], "5 at index 0")],
)
def test_bad_sequences_are_refused(slots, lengths, told):
    with pytest.raises(InvalidInputError, match=told):
        LoRABatch.from_sequences(slots, lengths, 2)


def test_numpy_integers_count_slots():
    assert LoRABatch([0], np.int64(3)).num_slots == 3


def test_a_lazy_negation_is_read_by_its_values():
    slots = torch._neg_view(torch.tensor([0, 1, -2]))
    assert LoRABatch(slots, 3).token_slots.tolist() == [0, -1, 2]
    assert not LoRABatch(slots, 3).token_slots.is_neg()


@pytest.mark.parametrize(
    "num_slots", [2**31, 10**30, 10**5000, -(10**5000), 2.5, True], ids=lambda value: "slots"
)
def test_a_number_of_slots_that_no_plan_holds_is_refused(num_slots):
    with pytest.raises(InvalidInputError, match="allowed: an int from 1 to 2147483647"):
        LoRABatch([0], num_slots)


@pytest.mark.parametrize("lengths", [[2**31], [10**12], [2**62] * 2 + [5], [2**62] * 4])
def test_sequences_of_more_tokens_than_a_plan_holds_are_refused(lengths):
    """The sum of the last two wraps around in int64, to five tokens and to none."""
    with pytest.raises(InvalidInputError, match=f"given: {sum(lengths)}\n  allowed: at most"):
        LoRABatch.from_sequences([0] * len(lengths), lengths, 1)


ODD_TENSORS = {
    "torch.sparse_coo; pass .to_dense": lambda: torch.tensor([0, 1]).to_sparse(),
    "torch.sparse_csr; pass .to_dense": lambda: torch.eye(2, dtype=torch.int64).to_sparse_csr(),
    "nested tensor": lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]),
    "is quantized, torch.qint8": lambda: torch.quantize_per_tensor(
        torch.zeros(2), 1.0, 0, torch.qint8
    ),
    "masked values": lambda: np.ma.array([0, 1], mask=[False, True]),
}


@pytest.mark.filterwarnings("ignore:.*(prototype|beta state|Quantized|quantized)")
@pytest.mark.parametrize("told", ODD_TENSORS)
def test_values_that_cannot_be_read_as_they_lie_are_refused_by_name(told):
    values = ODD_TENSORS[told]()
    with pytest.raises(InvalidInputError, match=told):
        LoRABatch(values, 3)
    with pytest.raises(InvalidInputError, match=told):
        LoRABatch.from_sequences([0, 1], values, 3)


@pytest.mark.parametrize(
    "values", ["abc", b"ab", None, {}, {0}, np.array([0, None]), [[[]]], [None]]
)
def test_what_is_no_list_of_integers_is_refused(values):
    with pytest.raises(InvalidInputError, match="token_slots"):
        LoRABatch(values, 3)


def test_a_list_nested_deeply_is_refused():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidInputError, match="token_slots"):
        LoRABatch(deep, 3)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_is_an_equal_batch(copied):
    batch = copied(LoRABatch([0, -1, 2], 3))
    assert batch.token_slots.tolist() == [0, -1, 2] and batch.num_slots == 3


SCALES = [[0.7, 0.3], [1.0, 0.0]]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_scales_are_kept_as_float32_in_the_shape_of_the_slots(kind):
    batch = LoRABatch(kind([[0, 2], [1, -1]]), 3, token_scales=kind(SCALES))
    assert (batch.num_tokens, batch.adapters_per_token) == (2, 2)
    assert torch.equal(batch.token_scales, torch.tensor(SCALES))
    assert LoRABatch([0], 1, [2]).token_scales.dtype == torch.float32
    assert LoRABatch([0], 1).token_scales is None


def test_the_batch_keeps_its_own_copy_of_scales():
    scales = torch.ones(1)
    batch = LoRABatch([0], 1, scales)
    scales[0] = 3
    assert batch.token_scales.tolist() == [1.0]


def test_one_adapter_per_token_needs_no_second_axis():
    batch = LoRABatch([[0], [-1]], 1, [[0.5], [2.0]])
    assert batch.adapters_per_token == 1
    assert batch.token_slots.tolist() == [0, -1] and batch.token_scales.tolist() == [0.5, 2.0]


def test_a_batch_of_several_adapters_falls_into_batches_of_one():
    first, second, third = LoRABatch([[0, 2], [1, -1]], 3, SCALES).per_adapter(3)
    assert (first.token_slots.tolist(), second.token_slots.tolist()) == ([0, 1], [2, -1])
    assert torch.equal(second.token_scales, torch.tensor([0.3, 0.0]))
    assert third.token_slots.tolist() == [-1, -1] and third.token_scales.tolist() == [1.0, 1.0]
    assert LoRABatch([0, 1], 2).per_adapter(2)[1].token_scales is None


def test_sequences_repeat_their_slots_and_scales():
    batch = LoRABatch.from_sequences([[0, 1], [2, -1]], [2, 1], 3, scales=SCALES)
    assert batch.token_slots.tolist() == [[0, 1], [0, 1], [2, -1]]
    assert torch.equal(batch.token_scales, torch.tensor(SCALES)[[0, 0, 1]])


@pytest.mark.parametrize(
    ("scales", "told"),
    [
        ([1.0], r"shape \[1\]"),
        ([[1.0, 2.0]], r"shape \[1, 2\]"),
        ([1.0, float("nan")], "nan at index 1"),
        ([float("-inf"), 1.0], "-inf at index 0"),
        ([1e39, 1.0], "not finite in float32"),
        ([True, False], "torch.bool"),
        ([1j, 0], "complex"),
        ("ab", "cannot be read"),
        (torch.ones(2, device="meta"), "on a device"),
        (torch.ones(2, requires_grad=True), "requires a gradient"),
        (torch.ones(2).to_sparse(), "cannot be read"),
    ],
)
def test_scales_that_are_none_are_refused(scales, told):
    with pytest.raises(InvalidInputError, match=told) as raised:
        LoRABatch([0, 1], 2, token_scales=scales)
    assert "token_scales" in str(raised.value)
