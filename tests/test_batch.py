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
        ([[0]], 3, r"shape \[1, 1\]"),
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
