import pytest
import torch

from lora_backends import InvalidInputError, LoRAWeights

GOOD = {
    "lora_a": torch.zeros(4, 3, 2, 16),
    "lora_b": torch.zeros(4, 12, 2),
    "ranks": torch.tensor([[2, 0, 2]] * 4, dtype=torch.int32),
    "scalings": torch.ones(4, 3),
    "output_slices": (8, 2, 2),
}


def test_sizes_are_read_off_the_tensors():
    weights = LoRAWeights(**GOOD)
    assert (weights.num_slots, weights.num_slices, weights.max_rank) == (4, 3, 2)
    assert (weights.in_features, weights.out_features) == (16, 12)
    assert weights.slice_offsets == (0, 8, 10, 12)


def test_tensors_are_kept_so_that_a_slot_can_be_rewritten():
    weights = LoRAWeights(**GOOD)
    assert weights.lora_a is GOOD["lora_a"]
    assert weights.ranks.data_ptr() == GOOD["ranks"].data_ptr()
    assert weights.scalings.data_ptr() == GOOD["scalings"].data_ptr()


def test_ranks_and_scalings_take_their_dtype():
    weights = LoRAWeights(**GOOD | {"ranks": GOOD["ranks"].long(), "scalings": [[1, 2, 3]] * 4})
    assert weights.ranks.dtype == torch.int32
    assert weights.scalings.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"lora_a": torch.zeros(4, 2, 16)}, "number of axes"),
        ({"lora_b": torch.zeros(4, 11, 2)}, r"lora_b has the wrong shape\n  given: \[4, 11, 2\]"),
        ({"lora_b": torch.zeros(4, 12, 2).half()}, "differ in dtype"),
        ({"lora_a": torch.zeros(4, 3, 2, 16).int()}, "not a floating-point"),
        ({"lora_a": [1]}, "not a floating-point"),
        ({"ranks": torch.tensor([[3, 0, 2]] * 4)}, r"ranks\[0, 0\] = 3"),
        ({"ranks": torch.tensor([[-1, 0, 2]] * 4)}, r"ranks\[0, 0\] = -1"),
        ({"ranks": torch.ones(4, 3)}, "ranks has the wrong dtype"),
        ({"ranks": torch.ones(3, 3, dtype=torch.int32)}, "ranks has the wrong shape"),
        ({"scalings": torch.ones(4)}, "scalings has the wrong shape"),
        ({"output_slices": (8, 4)}, "2 widths"),
        ({"output_slices": (8, 4, 0)}, "widths"),
        ({"output_slices": ()}, "widths"),
        ({"output_slices": 12}, "widths"),
        ({"output_slices": None}, "widths"),
        ({"ranks": torch.tensor([[2**32 + 1, 0, 2]] * 4)}, "4294967297"),
        ({"ranks": None}, "ranks cannot be read"),
        ({"scalings": "x"}, "scalings cannot be read"),
        ({"scalings": None}, "scalings cannot be read"),
        ({"scalings": torch.ones(4, 3, dtype=torch.complex64)}, "scalings has the wrong dtype"),
        ({"lora_a": torch.zeros(4, 3, 2, 16).to(torch.float8_e4m3fn)}, "differ in dtype"),
        ({"bias": torch.zeros(4, 11)}, "bias has the wrong shape"),
        ({"bias": torch.zeros(4, 12, device="meta")}, "bias is on meta"),
        ({"lora_a": torch.zeros(4, 3, 16, 2).transpose(2, 3)}, "not contiguous"),
    ],
)
def test_contradictions_are_refused_with_what_was_given(change, told):
    with pytest.raises(InvalidInputError, match=told):
        LoRAWeights(**GOOD | change)


@pytest.mark.parametrize("name", ["lora_a", "lora_b", "ranks", "scalings", "bias"])
def test_a_lazy_negation_is_refused(name):
    arguments = GOOD | {"bias": torch.zeros(4, 12)}
    arguments[name] = torch._neg_view(arguments[name])
    with pytest.raises(InvalidInputError, match=f"{name} is a lazy negation"):
        LoRAWeights(**arguments)


ODD_TENSORS = {
    "torch.sparse_coo; pass .to_dense": lambda tensor: tensor.to_sparse(),
    "torch.sparse_csr; pass .to_dense": lambda tensor: tensor.to_sparse_csr(),
    "is a nested tensor": lambda tensor: torch.nested.nested_tensor(list(tensor)),
}
NAMES = ["lora_a", "lora_b", "ranks", "scalings", "bias"]


@pytest.mark.filterwarnings("ignore:.*(prototype|beta state)")
@pytest.mark.parametrize(
    ("name", "told"),
    [(name, told) for name in NAMES for told in ODD_TENSORS if "csr" not in told or name == "bias"],
)
def test_a_tensor_whose_memory_holds_no_values_is_refused_by_name(name, told):
    arguments = GOOD | {"bias": torch.zeros(4, 12)}
    arguments[name] = ODD_TENSORS[told](arguments[name])
    with pytest.raises(InvalidInputError, match=f"{name} .*{told}"):
        LoRAWeights(**arguments)


@pytest.mark.parametrize(
    "names", [["ranks"], ["scalings"], sorted(GOOD.keys() - {"output_slices"})]
)
def test_weights_on_meta_are_refused(names):
    with pytest.raises(InvalidInputError, match="is on meta, where tensors have no values"):
        LoRAWeights(**GOOD | {name: GOOD[name].to("meta") for name in names})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"lora_a": GOOD["lora_a"].numpy()}, "lora_a is not a floating-point tensor"),
        ({"lora_b": "x"}, "lora_b is not a floating-point tensor"),
        ({"ranks": "x"}, "ranks cannot be read"),
        ({"ranks": [[10**5000] * 3] * 4}, "ranks cannot be read"),
        ({"scalings": [[10**400] * 3] * 4}, "scalings cannot be read"),
        ({"scalings": torch.ones(4, 3, requires_grad=True)}, "scalings requires a gradient"),
        ({"output_slices": (10**30, 2, 2)}, "allowed: at least one int from 1 to 2147483647"),
        ({"output_slices": (10**5000, 2, 2)}, "a value of type tuple that cannot be shown"),
        ({"output_slices": "abc"}, "output_slices is not a tuple of widths"),
    ],
)
def test_what_is_no_layer_is_refused(change, told):
    with pytest.raises(InvalidInputError, match=told):
        LoRAWeights(**GOOD | change)


PARTS = {
    "lora_a": tuple(torch.zeros(4, 2, 16 + 2 * s)[..., :16] for s in range(3)),
    "lora_b": tuple(torch.zeros(4, width, 2) for width in (8, 2, 2)),
}


def test_a_tensor_per_slice_is_kept_as_it_lies():
    weights = LoRAWeights(**GOOD | PARTS)
    assert (weights.num_slots, weights.num_slices, weights.max_rank) == (4, 3, 2)
    assert (weights.in_features, weights.out_features) == (16, 12)
    for s in range(3):
        assert weights.a_of(s) is PARTS["lora_a"][s] and weights.b_of(s) is PARTS["lora_b"][s]
    assert weights.needs == {"slice_tensors"}
    assert LoRAWeights(**GOOD | {"lora_a": list(PARTS["lora_a"])}).lora_a == PARTS["lora_a"]


def test_the_parts_of_a_stack_are_views():
    weights = LoRAWeights(**GOOD)
    assert weights.a_of(1).data_ptr() == weights.lora_a[:, 1].data_ptr()
    assert weights.b_of(2).data_ptr() == weights.lora_b[:, 10:].data_ptr()
    assert (weights.a_of(1).shape, weights.b_of(2).shape) == ((4, 2, 16), (4, 2, 2))
    assert weights.needs == frozenset()


@pytest.mark.parametrize(("half", "inputs"), [("lora_a", 0), ("lora_b", 16)])
@pytest.mark.parametrize("given", [{}, PARTS])
def test_a_half_may_be_missing(half, inputs, given):
    weights = LoRAWeights(**GOOD | given | {half: None})
    assert (weights.num_slots, weights.max_rank, weights.out_features) == (4, 2, 12)
    assert weights.in_features == inputs


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"lora_a": None, "lora_b": None}, "both None"),
        ({"lora_a": ()}, "lora_a is an empty tuple"),
        ({"lora_a": PARTS["lora_a"][:2]}, "3 widths .* 2 tensors in lora_a"),
        ({"lora_b": PARTS["lora_b"][:2]}, "3 widths .* 2 tensors in lora_b"),
        ({"lora_a": (*PARTS["lora_a"][:2], torch.zeros(4, 2, 15))}, r"lora_a\[2\] has the wrong"),
        ({"lora_b": PARTS["lora_b"][::-1]}, r"lora_b\[0\] has the wrong shape"),
        ({"lora_a": (*PARTS["lora_a"][:2], None)}, r"lora_a\[2\] is not a floating-point tensor"),
        ({"lora_a": (*PARTS["lora_a"][:2], torch.zeros(4, 2, 16).half())}, "differ in dtype"),
        ({"lora_a": (torch.zeros(4, 16, 2).mT, *PARTS["lora_a"][1:])}, "not contiguous"),
        ({"lora_a": (torch.zeros(4, 2), *PARTS["lora_a"][1:])}, "number of axes"),
        ({"lora_a": None, "lora_b": torch.zeros(4, 12)}, "number of axes"),
        ({"output_scales": torch.ones(4, 11)}, "output_scales has the wrong shape"),
        ({"a_scales": torch.ones(4, 12, requires_grad=True)}, "requires a gradient"),
        ({"output_scales": torch.ones(4, 12, dtype=torch.bool)}, "wrong dtype"),
        ({"output_scales": torch.ones(4, 12, device="meta")}, "is on meta"),
        ({"output_scales": torch.ones(12, 4).T}, "last axis of output_scales"),
    ],
)
def test_wrong_tensors_per_slice_halves_and_scales_are_refused(change, told):
    with pytest.raises(InvalidInputError, match=told):
        LoRAWeights(**GOOD | change)


def test_output_scales_take_their_dtype_and_are_kept():
    scales = torch.ones(4, 12)
    assert LoRAWeights(**GOOD, output_scales=scales).output_scales is scales
    taken = LoRAWeights(**GOOD, output_scales=scales.double())
    assert taken.output_scales.dtype == torch.float32 and taken.needs == {"output_scales"}
