"""The interface: what is checked before a backend's own code runs, and the defaults."""

import contextlib
import dataclasses
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.small_layers import small_batch, small_weights

from lora_backends import (
    BackendUnavailableError,
    InvalidInputError,
    LoRABackend,
    LoRABackendError,
    LoRABatch,
    LoRAWeights,
    UnsupportedInputError,
    get_backend,
)
from lora_backends.testing import expected_linear
from lora_backends.torch_ref import TorchRefBackend


class Minimal(LoRABackend):
    """Three methods, a plan that is no LoRAPlan: all that an author has to write."""

    def prepare_batch(self, batch, out=None):
        if out is None:
            return {"slots": batch.token_slots.clone()}
        out["slots"].copy_(batch.token_slots)
        return out

    def run_lora_a(self, x, weights, plan):
        h = x.new_zeros(weights.num_slices, x.shape[0], weights.max_rank, dtype=torch.float32)
        for t, slot in enumerate(plan["slots"].tolist()):
            for s in range(weights.num_slices):
                r = int(weights.ranks[slot, s]) if slot >= 0 else 0
                h[s, t, :r] = weights.lora_a[slot, s, :r].float() @ x[t].float()
        return h

    def run_lora_b(self, h, weights, plan, base_output=None):
        y = base_output
        if y is None:
            y = torch.zeros(h.shape[1], weights.out_features, dtype=weights.dtype)
        for t, slot in enumerate(plan["slots"].tolist()):
            for s in range(weights.num_slices if slot >= 0 else 0):
                o, e = weights.slice_offsets[s : s + 2]
                r = int(weights.ranks[slot, s])
                delta = weights.lora_b[slot, o:e, :r].float() @ h[s, t, :r]
                y[t, o:e] += (weights.scalings[slot, s] * delta).to(y.dtype)
        return y


@pytest.fixture(params=[False, True], ids=["inference", "gradients"])
def _grad_mode(request):
    """The two ways through the checks: without gradients most calls are passed in one look."""
    with torch.set_grad_enabled(request.param):
        yield


either_way = pytest.mark.usefixtures("_grad_mode")


@pytest.fixture
def job():
    """Return a function that calls one method of torch_ref with one argument changed."""
    backend = get_backend("torch_ref", device="cpu")
    good = {
        "x": torch.randn(7, 10),
        "weights": small_weights(),
        "plan": backend.prepare_batch(small_batch()),
        "base_output": torch.zeros(7, 14),
    }

    def call(method="run_linear", **change):
        arguments = good | change
        if method == "run_lora_a":
            arguments.pop("base_output")
        if method == "run_lora_b":
            arguments["h"] = arguments.get("h", torch.zeros(3, 7, 3))
            arguments.pop("x")
        return getattr(backend, method)(**arguments)

    return call


def test_three_methods_make_a_backend():
    backend, reference = Minimal(), TorchRefBackend()
    weights, x = small_weights(), torch.randn(7, 10)
    for method in ("run_linear", "run_qkv", "run_logits"):
        actual = getattr(backend, method)(x, weights, backend.prepare_batch(small_batch()))
        plan = reference.prepare_batch(small_batch())
        torch.testing.assert_close(actual, getattr(reference, method)(x, weights, plan))
    ids = torch.arange(7)
    plan = backend.prepare_batch(small_batch())
    expected = reference.run_embedding(ids, weights, reference.prepare_batch(small_batch()))
    torch.testing.assert_close(backend.run_embedding(ids, weights, plan), expected)
    assert Minimal.name == "Minimal" and not Minimal.unavailable_reasons("cpu")


def test_a_backend_without_the_three_methods_cannot_be_made():
    class Half(LoRABackend):
        def prepare_batch(self, batch, out=None):
            return batch

    with pytest.raises(TypeError, match="run_lora_a"):
        Half()


@either_way
def test_an_override_is_checked_and_may_call_its_parent():
    class Doubled(TorchRefBackend):
        def run_linear(self, x, weights, plan, base_output=None):
            return 2 * super().run_linear(x, weights, plan, base_output)

    backend = Doubled()
    plan = backend.prepare_batch(small_batch())
    x = torch.randn(7, 10)
    expected = 2 * TorchRefBackend().run_linear(x, small_weights(), plan)
    assert torch.equal(backend.run_linear(x, small_weights(), plan), expected)
    with pytest.raises(InvalidInputError):
        backend.run_linear(x[:3], small_weights(), plan)


@either_way
def test_row_strided_views_are_taken(job):
    x, base = torch.randn(7, 40)[:, 3:13], torch.zeros(7, 30)
    result = job(x=x, base_output=base[:, 9:23])
    # other strides may mean another order of sums, so the rows need not equal contiguous ones
    _assert_within_bound(result, x, torch.zeros(7, 14))
    assert (base[:, :9] == 0).all() and (base[:, 23:] == 0).all()


def _assert_within_bound(y, x, base):
    """Check y of `small_weights` and `small_batch` against the bound on its rounding errors."""
    expected = expected_linear(x, small_weights(), small_batch(), base)
    assert ((y.double() - expected.value).abs() <= expected.bound).all()


with warnings.catch_warnings(action="ignore"):  # torch says that they are new
    NESTED = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
STRIDED = torch.zeros(20, 7).T
BAD = [
    ("run_linear", {"x": torch.zeros(6, 10)}, r"x is \[6, 10\]; allowed: \[7, 10\]"),
    ("run_linear", {"x": torch.zeros(7, 9)}, r"x is \[7, 9\]"),
    ("run_linear", {"x": torch.zeros(7)}, "two axes"),
    ("run_linear", {"x": torch.zeros(7, 10).half()}, "weights are float32; allowed: float32"),
    ("run_linear", {"x": STRIDED[:, :10]}, "last axis of x"),
    ("run_linear", {"x": torch.zeros(7, 10, device="meta")}, "x is on meta"),
    ("run_linear", {"base_output": torch.zeros(7, 13)}, r"allowed: \[7, 14\]"),
    (
        "run_linear",
        {"base_output": torch.zeros(1, 14).expand(7, 14)},
        "rows of base_output overlap",
    ),
    ("run_linear", {"base_output": STRIDED[:, :14]}, "last axis of base_output"),
    ("run_linear", {"base_output": [1]}, r"base_output is \(list\)"),
    ("run_linear", {"x": torch.zeros(7, 10).to_sparse()}, "torch.sparse_coo; allowed: a dense"),
    ("run_linear", {"x": NESTED}, "x is nested float32 cpu; allowed: a dense tensor"),
    ("run_lora_a", {"x": torch.zeros(7, 10).numpy()}, r"x is \(ndarray\); allowed: a tensor"),
    ("run_lora_a", {"x": "rows"}, r"x is \(str\); allowed: a tensor"),
    ("run_lora_a", {"x": torch.zeros(7, 10, device="meta")}, "x is on meta"),
    ("run_lora_b", {"h": torch.zeros(3, 7, 3).numpy()}, r"h is \(ndarray\); allowed: a tensor"),
    ("run_lora_b", {"h": torch.zeros(3, 7, 3).to_sparse()}, "allowed: a dense tensor"),
    ("run_linear", {"weights": None}, "NoneType; allowed: LoRAWeights"),
    (
        "run_linear",
        {"weights": SimpleNamespace(lora_a=torch.zeros(2), output_slices=(2,))},
        "SimpleNamespace; allowed: LoRAWeights",
    ),
    ("run_linear", {"plan": 3}, "TorchRefPlan"),
    ("run_lora_a", {"x": torch.zeros(6, 10)}, r"x is \[6, 10\]"),
    ("run_lora_b", {"h": torch.zeros(3, 7, 2)}, r"allowed: \[3, 7, 3\]"),
    ("run_lora_b", {"h": torch.zeros(3, 7, 3).half()}, "h.dtype is float16"),
    ("run_gate_up", {}, "the layer has 3 slices; run_gate_up takes 2"),
    ("run_qkv", {"weights": small_weights(slices=(6, 3))}, "run_qkv takes 3"),
]


@either_way
@pytest.mark.parametrize(("method", "change", "told"), BAD)
def test_contradictory_arguments_are_refused_before_anything_is_written(job, method, change, told):
    base = change.get("base_output", torch.zeros(7, 14))
    before = torch.as_tensor(base).clone()
    with pytest.raises(InvalidInputError, match=told) as raised:
        job(method, **{"base_output": base} | change)
    assert f"backend 'torch_ref' cannot run {method}" in str(raised.value)
    assert torch.equal(torch.as_tensor(base), before)


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (torch.tensor([0] * 6 + [10]), r"range over 0..10; allowed: 0..9"),
        (torch.tensor([0] * 6 + [-1]), r"range over -1..0"),
        (torch.zeros(7), r"\[7\] int32 or int64"),
        (torch.zeros(6, dtype=torch.int64), r"allowed: \[7\]"),
        (torch.tensor(1), r"allowed: \[7\]"),
        (torch.zeros(14, dtype=torch.int64)[::2], "contiguous"),
        ([0] * 7, r"token_ids is \(list\); allowed: a tensor"),
        (torch.zeros(7, dtype=torch.int64).to_sparse(), "allowed: a dense tensor"),
    ],
)
def test_bad_token_ids_are_refused(ids, told):
    backend = TorchRefBackend()
    with pytest.raises(InvalidInputError, match=told):
        backend.run_embedding(ids, small_weights(), backend.prepare_batch(small_batch()))


@either_way
def test_x_and_base_output_may_not_be_one_tensor():
    backend = TorchRefBackend()
    weights = small_weights(slices=(10,))
    x = torch.randn(7, 10)
    with pytest.raises(InvalidInputError, match="base_output overlaps x in memory"):
        backend.run_linear(x, weights, backend.prepare_batch(small_batch()), x)


@either_way
def test_a_plan_for_other_slots_or_tokens_is_refused(job):
    backend = TorchRefBackend()
    plan = backend.prepare_batch(LoRABatch([0] * 7, 5))
    with pytest.raises(InvalidInputError, match="plan is for 5 slots, the weights have 4"):
        job(plan=plan)
    with pytest.raises(InvalidInputError, match="num_slots=5, the batch has 4"):
        backend.prepare_batch(small_batch(), out=plan)
    with pytest.raises(InvalidInputError, match="room for 7 tokens, the batch has num_tokens=8"):
        backend.prepare_batch(LoRABatch([0] * 8, 5), out=plan)
    with pytest.raises(InvalidInputError, match="allowed: a LoRABatch"):
        backend.prepare_batch([0, 1])


def _dora(weights):
    shape = (weights.num_slots, weights.out_features)
    return dataclasses.replace(weights, output_scales=torch.ones(shape))


def _split(weights):
    parts = tuple(weights.a_of(s) for s in range(weights.num_slices))
    return dataclasses.replace(weights, lora_a=parts)


@either_way
@pytest.mark.parametrize(
    ("feature", "call"),
    [
        ("capacity", lambda b, x, plan: b.prepare_batch(small_batch(), capacity=9)),
        ("token_scales", lambda b, x, plan: b.prepare_batch(LoRABatch([0], 1, [1.0]))),
        ("output_scales", lambda b, x, plan: b.run_linear(x, _dora(small_weights()), plan)),
        ("slice_tensors", lambda b, x, plan: b.run_linear(x, _split(small_weights()), plan)),
    ],
)
def test_a_feature_that_a_backend_does_not_declare_is_refused_by_name(feature, call):
    backend = Minimal()
    plan = backend.prepare_batch(small_batch())
    with pytest.raises(UnsupportedInputError, match=f"{feature}, which this backend does not have"):
        call(backend, torch.randn(7, 10), plan)


@either_way
@pytest.mark.parametrize(
    ("method", "change", "told"),
    [
        ("run_lora_a", {"out": torch.zeros(3, 7, 2)}, r"out is .*allowed: \[3, 7, 3\] float32"),
        ("run_lora_a", {"out": torch.zeros(3, 7, 3).double()}, "out is .* float64"),
        ("run_lora_a", {"out": torch.zeros(3, 3, 7).mT}, "out is not contiguous"),
        ("run_lora_a", {"out": "h"}, "out is .*allowed: a tensor"),
        ("run_linear", {"x": torch.zeros(8, 10)}, r"x is \[8, 10\]; allowed: \[7, 10\]"),
        (
            "run_linear",
            {"weights": dataclasses.replace(small_weights(), lora_b=None)},
            "lora_b is None, which run_linear reads",
        ),
        (
            "run_qkv",
            {"weights": dataclasses.replace(small_weights(), lora_a=None)},
            "lora_a is None, which run_qkv reads",
        ),
    ],
)
def test_wrong_outs_rows_and_halves_are_refused(job, method, change, told):
    with pytest.raises(InvalidInputError, match=told):
        job(method, **change)


def test_h_of_an_out_that_overlaps_x_is_refused(job):
    memory = torch.zeros(100)
    with pytest.raises(InvalidInputError, match="out overlaps x in memory"):
        job("run_lora_a", x=memory[:70].view(7, 10), out=memory[30:93].view(3, 7, 3))


@pytest.mark.parametrize("capacity", [6, True, 7.0, "7", 2**31])
def test_a_capacity_that_is_none_is_refused(capacity):
    with pytest.raises(InvalidInputError, match="capacity is .*allowed"):
        TorchRefBackend().prepare_batch(small_batch(), capacity=capacity)


def test_a_refill_keeps_its_capacity():
    backend = TorchRefBackend()
    plan = backend.prepare_batch(small_batch(), capacity=9)
    backend.prepare_batch(LoRABatch([0] * 9, 4), out=plan, capacity=9)
    assert (plan.num_tokens, plan.capacity) == (9, 9)
    backend.prepare_batch(LoRABatch([], 4), out=plan)
    assert (plan.num_tokens, plan.capacity) == (0, 9)
    with pytest.raises(InvalidInputError, match="capacity is 10, out was made for 9"):
        backend.prepare_batch(small_batch(), out=plan, capacity=10)
    with pytest.raises(InvalidInputError, match="room for 9 tokens.*capacity=10 or more"):
        backend.prepare_batch(LoRABatch([0] * 10, 4), out=plan)


@either_way
def test_several_adapters_per_token_are_refused_where_a_token_has_one_row_of_h(job):
    backend, base = TorchRefBackend(), torch.ones(7, 14)
    plan = backend.prepare_batch(LoRABatch([[0, 1]] * 7, 4))
    for method in ("run_lora_a", "run_lora_b"):
        with pytest.raises(UnsupportedInputError, match=f"{method} cannot run with several"):
            job(method, plan=plan, base_output=base)
    with pytest.raises(UnsupportedInputError, match="output_scales to several adapters"):
        job(plan=plan, weights=_dora(small_weights()), base_output=base)
    assert (base == 1).all()
    single = backend.prepare_batch(small_batch())
    with pytest.raises(InvalidInputError, match="made for 1 adapters per token, the batch has 2"):
        backend.prepare_batch(LoRABatch([[0, 1]] * 7, 4), out=single)


def test_what_a_backend_does_not_support_is_another_error():
    backend = Minimal()
    plan = backend.prepare_batch(small_batch())
    with pytest.raises(UnsupportedInputError, match="supported: bfloat16, float16, float32"):
        backend.run_linear(torch.randn(7, 10).double(), small_weights(torch.float64), plan)

    class WithoutGradients(Minimal):
        differentiable = False

    backend = WithoutGradients()
    with pytest.raises(UnsupportedInputError, match="requires a gradient"):
        backend.run_linear(torch.randn(7, 10, requires_grad=True), small_weights(), plan)
    with torch.no_grad():
        backend.run_linear(torch.randn(7, 10, requires_grad=True), small_weights(), plan)


def test_every_error_has_one_root():
    assert issubclass(InvalidInputError, LoRABackendError)
    assert issubclass(InvalidInputError, ValueError)
    assert issubclass(UnsupportedInputError, NotImplementedError)
    assert issubclass(UnsupportedInputError, LoRABackendError)
    assert issubclass(BackendUnavailableError, RuntimeError)
    assert issubclass(BackendUnavailableError, LoRABackendError)


def test_what_a_mixin_brings_is_checked_too():
    class Mixin:
        def run_linear(self, x, weights, plan, base_output=None):
            base_output.zero_()
            return base_output

    class Mixed(Mixin, TorchRefBackend):
        pass

    backend, base = Mixed(), torch.ones(7, 14)
    with pytest.raises(InvalidInputError):
        backend.run_linear(torch.zeros(9, 1), small_weights(), None, base)
    assert (base == 1).all()


@either_way
def test_columns_of_one_buffer_may_lie_side_by_side_but_not_overlap():
    backend, weights = TorchRefBackend(), small_weights()
    plan, buffer = backend.prepare_batch(small_batch()), torch.randn(7, 30)
    x, base = buffer[:, :10].clone(), buffer[:, 10:24].clone()
    result = backend.run_linear(buffer[:, :10], weights, plan, buffer[:, 10:24])
    _assert_within_bound(result, x, base)
    for first in (1, 9):
        with pytest.raises(InvalidInputError, match="base_output overlaps x in memory"):
            backend.run_linear(buffer[:, :10], weights, plan, buffer[:, first : first + 14])
    backend.run_linear(buffer[:, 20:], weights, plan, buffer[:, 6:20])
    with pytest.raises(InvalidInputError, match="base_output overlaps x in memory"):
        backend.run_linear(buffer[:, 19:29], weights, plan, buffer[:, 6:20])


def test_a_leaf_that_requires_a_gradient_is_not_written_to(job):
    with pytest.raises(InvalidInputError, match="leaf that requires a gradient"):
        job(base_output=torch.zeros(7, 14, requires_grad=True))


def test_a_bias_that_requires_a_gradient_is_not_lost():
    weights = small_weights(bias=True)
    weights.bias.requires_grad_()
    backend = Minimal()
    y = backend.run_linear(torch.randn(7, 10), weights, backend.prepare_batch(small_batch()))
    y.sum().backward()
    assert torch.equal(weights.bias.grad[:, 0], torch.tensor([2.0, 1.0, 1.0, 2.0]))


@either_way
def test_a_plan_whose_sizes_are_no_ints_is_not_checked():
    class Odd(Minimal):
        def prepare_batch(self, batch, out=None):
            class Plan(dict):
                num_tokens = torch.tensor([1, 2])
                num_slots = torch.tensor([1, 2])

            return Plan(slots=batch.token_slots)

    backend = Odd()
    plan = backend.prepare_batch(small_batch())
    backend.run_linear(torch.randn(7, 10), small_weights(), plan)
    backend.prepare_batch(small_batch(), out=plan)


def test_a_numbered_cpu_is_the_cpu():
    backend = TorchRefBackend("cpu:0")
    plan = backend.prepare_batch(small_batch())
    assert backend.run_linear(torch.randn(7, 10), small_weights(), plan).shape == (7, 14)


@contextlib.contextmanager
def _default_device(name):
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


def _all_results(name, made):
    """Return what each operation returns, for weights and batches made of lists and arrays."""
    backend = get_backend(name, device="cpu")
    tables = (made.ranks.tolist(), made.scalings.tolist())
    weights = LoRAWeights(made.lora_a, made.lora_b, *tables, made.output_slices, made.bias)
    plan = backend.prepare_batch(LoRABatch.from_sequences([3, -1, 0], [2, 1, 4], 4))
    backend.prepare_batch(LoRABatch(np.array([3, -1, 0, 1, 0, 2, 3]), 4), out=plan)
    x = torch.linspace(-1, 1, 70, device="cpu").view(7, 10)
    ids = torch.arange(7, device="cpu")
    h = backend.run_lora_a(x, weights, plan)
    return [
        h,
        backend.run_lora_b(h, weights, plan),
        backend.run_linear(x, weights, plan, torch.ones(7, 11, device="cpu")),
        backend.run_gate_up(x, weights, plan),
        backend.run_logits(x, weights, plan),
        backend.run_embedding(ids, weights, plan),
        backend.run_linear(x[:0], weights, backend.prepare_batch(LoRABatch([], 4))),
    ]


@pytest.mark.parametrize("default", [torch.device, _default_device])
@pytest.mark.parametrize("name", ["torch_ref", pytest.param("numba_cpu", marks=pytest.mark.slow)])
def test_the_default_device_of_torch_has_no_effect(name, default):
    made = small_weights(bias=True, slices=(6, 5))
    expected = _all_results(name, made)
    with default("meta"):  # where tensors have no values
        results = _all_results(name, made)
    for result, wanted in zip(results, expected, strict=True):
        assert result.device.type == "cpu"
        assert torch.equal(result, wanted)


def test_the_default_device_of_torch_stops_no_import():
    code = (
        "import torch; torch.set_default_device('meta')\n"
        "from lora_backends.selection.registry import backend_class, backend_names\n"
        "for name in backend_names(): backend_class(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
