"""What a call passes before the engine's method: every check once, whoever defines the method."""

import copy
import functools
import gc
import inspect
import random
import weakref

import pytest
import torch
from helpers.small_layers import ByAddress, small_batch, small_weights
from helpers.storing import Storing
from torch._subclasses import FakeTensorMode

from lora_backends import (
    InvalidInputError,
    LoRABackend,
    LoRABackendError,
    UnsupportedInputError,
)
from lora_backends.dispatch import wrap
from lora_backends.operations import BY_NAME, OPERATIONS, Input
from lora_backends.torch_ref import TorchRefBackend


@pytest.fixture
def checked(monkeypatch):
    """Return the list of operations that were checked."""
    names, accepted = [], wrap.is_accepted
    monkeypatch.setattr(
        wrap,
        "is_accepted",
        lambda engine, op, *args: names.append(op.name) or accepted(engine, op, *args),
    )
    return names


class Defaults(TorchRefBackend):
    """torch_ref with the interface's own run_linear and run_embedding."""

    run_linear = LoRABackend.run_linear
    run_embedding = LoRABackend.run_embedding


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_an_operation_is_a_method_of_the_interface(operation):
    parameters = list(inspect.signature(getattr(LoRABackend, operation.name)).parameters)
    assert parameters[:3] == ["self", operation.argument, "weights"]
    assert ("base_output" in parameters) is (operation.result == "y")
    assert operation.same_as is None or operation.same_as in BY_NAME


def test_every_run_method_of_the_interface_is_an_operation():
    methods = {name for name in vars(LoRABackend) if name.startswith("run_")}
    assert {name for name in methods if not name.endswith("_backward")} == set(BY_NAME)


@pytest.mark.parametrize("name", ["run_linear", "run_qkv", "run_logits", "run_embedding"])
def test_a_default_is_checked_once(checked, name):
    backend = Defaults()
    first = torch.arange(7) if name == "run_embedding" else torch.randn(7, 10)
    getattr(backend, name)(first, small_weights(), backend.prepare_batch(small_batch()))
    assert checked == [name]


def test_a_method_of_a_mixin_is_checked_once_in_every_class_that_has_it(checked):
    class Mixin:
        def run_linear(self, x, weights, plan, base_output=None):
            return base_output

    class One(Mixin, TorchRefBackend):
        pass

    class Two(Mixin, TorchRefBackend):
        pass

    class Three(One):
        pass

    for backend in (One(), Two(), Three()):
        plan = backend.prepare_batch(small_batch())
        backend.run_linear(torch.randn(7, 10), small_weights(), plan, torch.zeros(7, 14))
        assert checked == ["run_linear"]
        checked.clear()


def test_what_an_author_wraps_around_an_inherited_method_is_checked():
    class Author(TorchRefBackend):
        @functools.wraps(TorchRefBackend.run_linear)
        def run_linear(self, x, weights, plan, base_output=None):
            base_output.zero_()
            return base_output

    base = torch.ones(7, 14)
    with pytest.raises(InvalidInputError):
        Author().run_linear(torch.zeros(9, 1), small_weights(), None, base)
    assert (base == 1).all()


def test_a_default_runs_what_stands_on_the_instance():
    backend = TorchRefBackend()
    backend.run_linear = lambda *args: "mine"
    plan = backend.prepare_batch(small_batch())
    assert backend.run_qkv(torch.randn(7, 10), small_weights(), plan) == "mine"


def test_the_first_argument_has_its_own_name():
    backend = TorchRefBackend()
    plan, weights, x = backend.prepare_batch(small_batch()), small_weights(), torch.randn(7, 10)
    expected = backend.run_linear(x=x, weights=weights, plan=plan)
    assert torch.equal(backend.run_logits(hidden=x, weights=weights, plan=plan), expected)
    with pytest.raises(TypeError, match="unexpected keyword argument 'x'"):
        backend.run_logits(x=x, weights=weights, plan=plan)


def first_of(name):
    """Return a first argument for an operation on `small_weights`."""
    if name == "run_embedding":
        return torch.arange(7)
    return torch.randn(3, 7, 3) if name == "run_lora_b" else torch.randn(7, 10)


DENSE = [op.name for op in OPERATIONS if op.result == "h" or op.input is not Input.ROUTED_ROWS]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("transform", ["functionalize", "vmap", "FakeTensor", "freed"])
def test_a_tensor_without_an_address_is_refused_by_a_backend_that_reads_it(transform, name):
    """`numba_cpu` read from address 0, which ended the process."""
    backend, argument = ByAddress(), BY_NAME[name].argument
    num_slices = BY_NAME[name].num_slices or 3
    weights = small_weights(slices=(6, 3, 5)[:num_slices])
    plan, first = backend.prepare_batch(small_batch()), first_of(name)

    def run(first, weights=weights):
        return getattr(backend, name)(first, weights, plan)

    with pytest.raises(InvalidInputError, match=f"{argument} has no address.*torch_ref"):
        if transform == "functionalize":
            torch.func.functionalize(run)(first)
        elif transform == "vmap":
            torch.vmap(run)(first[None])
        elif transform == "FakeTensor":
            run(FakeTensorMode().from_tensor(first))
        else:
            freed = first.clone()
            freed.untyped_storage().resize_(0)
            run(freed)
    if transform == "freed":
        half = "lora_b" if name == "run_lora_b" else "lora_a"
        getattr(weights, half).untyped_storage().resize_(0)
        with pytest.raises(InvalidInputError, match=f"{half} has no address"):
            run(first)


def test_another_device_is_refused_by_its_name_alone():
    backend, weights = ByAddress(), small_weights()
    plan, x = backend.prepare_batch(small_batch()), torch.randn(7, 10, device="meta")
    with pytest.raises(InvalidInputError, match="x is on meta, the backend on cpu") as refused:
        backend.run_linear(x, weights, plan)
    assert "no address" not in str(refused.value)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_backend_of_torch_operators_runs_within_transforms():
    backend, weights = TorchRefBackend(), small_weights()
    plan, x, y = backend.prepare_batch(small_batch()), torch.randn(7, 10), torch.randn(7, 14)

    def run(x, y):
        return backend.run_linear(x, weights, plan, y.clone())

    expected = run(x, y)
    assert torch.equal(torch.func.functionalize(run)(x, y), expected)
    torch.testing.assert_close(torch.vmap(run)(x[None], y[None])[0], expected)
    value = torch.func.grad(lambda x: run(x, y).sum())(x)
    x.requires_grad_()
    run(x, y).sum().backward()
    torch.testing.assert_close(value, x.grad)


@pytest.fixture
def guarded(monkeypatch):
    """Return the list of operations whose arguments the guards have looked at."""
    names, guard = [], wrap.check_operation
    monkeypatch.setattr(
        wrap,
        "check_operation",
        lambda engine, op, *args, **kwargs: (
            names.append(op.name) or guard(engine, op, *args, **kwargs)
        ),
    )
    return names


@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("pad", [0, 3])
def test_a_kind_of_call_that_has_passed_meets_no_guard_again(guarded, pad, gradients, with_base):
    backend, weights = ByAddress(), small_weights(bias=True)
    plan = backend.prepare_batch(small_batch(), capacity=9)

    def run(rows):
        x, y = torch.randn(rows, 10 + pad)[:, :10], torch.randn(rows, 14 + pad)[:, :14]
        return backend.run_linear(x, weights, plan, y if with_base else None)

    with torch.set_grad_enabled(gradients):
        run(7), run(9), run(8)  # rows are no part of a kind
    assert guarded == ["run_linear"]


@pytest.mark.parametrize("name", DENSE)
def test_every_operation_recognises_its_calls(guarded, name):
    backend, num_slices = ByAddress(), BY_NAME[name].num_slices or 3
    weights = small_weights(slices=(6, 3, 5)[:num_slices])
    plan = backend.prepare_batch(small_batch())
    for _ in range(3):
        getattr(backend, name)(first_of(name), weights, plan)
    reads_values = name == "run_embedding"
    assert guarded.count(name) == (3 if reads_values else 1)


def test_a_kind_that_has_passed_for_one_layer_or_backend_passes_for_no_other(guarded):
    backend, x, y = ByAddress(), torch.randn(7, 10), torch.zeros(7, 14)
    plan = backend.prepare_batch(small_batch())
    for weights in (small_weights(), small_weights()):
        backend.run_linear(x, weights, plan, y)
    ByAddress().run_linear(x, weights, plan, y)
    assert len(guarded) == 3


def spoiled_layer(weights):
    weights.lora_a.data = weights.lora_a.double()
    return weights


SPOILED = {
    "x of another dtype": lambda x, w, y: (x.double(), w, y),
    "x too wide": lambda x, w, y: (torch.randn(7, 11), w, y),
    "x with fewer rows": lambda x, w, y: (x[1:], w, y),
    "x of one axis": lambda x, w, y: (x[0], w, y),
    "x of no axis": lambda x, w, y: (x[0, 0], w, y),
    "x strided": lambda x, w, y: (torch.randn(10, 7).T, w, y),
    "x on meta": lambda x, w, y: (x.to("meta"), w, y),
    "x negated": lambda x, w, y: (torch._neg_view(x), w, y),
    "x a list": lambda x, w, y: (x.tolist(), w, y),
    "y negated": lambda x, w, y: (x, w, torch._neg_view(y)),
    "y an integer": lambda x, w, y: (x, w, y.long()),
    "y with fewer rows": lambda x, w, y: (x, w, y[1:]),
    "y whose rows overlap": lambda x, w, y: (x, w, y[:1].expand(7, 14)),
    "y on x": lambda x, w, y: (y.view(-1)[:70].view(7, 10), w, y),
    "y on lora_b": lambda x, w, y: (x, w, w.lora_b.view(-1)[:98].view(7, 14)),
    "y a leaf": lambda x, w, y: (x, w, y.requires_grad_()),
    "a layer of another dtype": lambda x, w, y: (x, spoiled_layer(w), y),
}


@pytest.mark.parametrize("change", SPOILED)
@pytest.mark.parametrize("backend", [TorchRefBackend(), ByAddress()], ids=["torch", "address"])
def test_a_spoiled_call_is_refused_where_a_call_of_its_kind_has_passed(backend, change):
    weights, plan = small_weights(), backend.prepare_batch(small_batch())
    x, y = torch.randn(7, 10), torch.zeros(7, 14)
    backend.run_linear(x, weights, plan, y)
    before = y.clone()
    with pytest.raises(LoRABackendError):
        backend.run_linear(*_with_plan(SPOILED[change](x, weights, y), plan))
    assert torch.equal(y.detach(), before)


def _with_plan(call, plan):
    x, weights, y = call
    return x, weights, plan, y


def test_a_layer_whose_memory_was_exchanged_is_checked_anew(guarded):
    backend, weights, x = ByAddress(), small_weights(), torch.randn(7, 10)
    plan = backend.prepare_batch(small_batch())
    for _ in range(2):
        expected = backend.run_linear(x, weights, plan)
    weights.lora_b.data = weights.lora_b.clone()
    assert torch.equal(backend.run_linear(x, weights, plan), expected)
    assert len(guarded) == 2
    weights.lora_b.data = weights.lora_b[:, :13].clone()
    with pytest.raises(InvalidInputError, match="lora_b is .* had another shape"):
        backend.run_linear(x, weights, plan)


def test_a_stored_call_keeps_no_layer_alive():
    backend = Storing()
    weights, plan = small_weights(), backend.prepare_batch(small_batch())
    weights.derived(tensors_of)
    backend.run_linear(torch.randn(7, 10), weights, plan, torch.zeros(7, 14))
    alive = weakref.ref(weights.lora_a)
    del weights
    gc.collect()
    assert len(plan.call_cache) == 1 and alive() is None


def tensors_of(weights):
    return tuple(weights.tensors.values())


def test_what_is_derived_from_a_layer_is_made_anew_where_a_tensor_moved():
    weights = small_weights()
    first = weights.derived(tensors_of)
    assert weights.derived(tensors_of) is first
    weights.lora_b.data = weights.lora_b.clone()
    assert weights.derived(tensors_of) is not first
    assert copy.copy(weights).derived(tensors_of) is not weights.derived(tensors_of)


def any_tensor(draw, memory, columns):
    """Return a tensor of about the kind that a call takes, or of one a little off."""
    rows, width = draw.choice([0, 1, 6, 7, 8]), columns + draw.choice([0, 0, 0, 0, 1])
    dtype = draw.choice([torch.float32, torch.float32, torch.float64])
    first, row = draw.choice([0, 0, 3, 60, 120]), draw.choice([width, width, width + 4, 1, 0])
    view = memory.view(dtype)[first:].as_strided((rows, width), (row, draw.choice([1, 1, 1, 2])))
    return draw.choice([view, view, view.clone(), torch._neg_view(view), view[None]])


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("backend", [TorchRefBackend(), ByAddress()], ids=["torch", "address"])
def test_no_call_is_recognised_that_the_guard_refuses(backend, gradients):
    """Whatever has passed before for the same layer."""
    draw, operation = random.Random(7), BY_NAME["run_linear"]
    weights, plan = small_weights(), backend.prepare_batch(small_batch(), capacity=8)
    passed = recognised = 0
    with torch.set_grad_enabled(gradients):
        for _ in range(1500):
            plan.num_tokens, memory = draw.choice([6, 7, 8]), torch.zeros(800)
            x, y = any_tensor(draw, memory, 10), any_tensor(draw, memory, 14)
            y = draw.choice([y, y, None])
            x.requires_grad_(gradients and x.is_leaf and draw.random() < 0.1)
            found = wrap.is_accepted(backend, operation, x, weights, plan, y)
            try:
                wrap.guard(backend, operation, x, weights, plan, y)
                passed += 1
            except LoRABackendError:
                assert not found, (x.shape, x.stride(), y is not None and (y.shape, y.stride()))
            recognised += found
    assert passed > recognised > passed / 3


@pytest.mark.filterwarnings("ignore")  # of the trace
@pytest.mark.parametrize("name", ["run_lora_a", "run_linear"])
def test_a_jit_trace_records_the_lora_or_is_refused(name):
    weights, batch = small_weights(), small_batch()

    def traced(backend):
        plan = backend.prepare_batch(batch)
        run = getattr(backend, name)
        run(
            torch.randn(batch.num_tokens, weights.in_features), weights, plan
        )  # stored, or accepted
        x = torch.randn(batch.num_tokens, weights.in_features)
        return torch.jit.trace(lambda x: run(x, weights, plan), x)(2 * x), run(2 * x, weights, plan)

    recorded, expected = traced(TorchRefBackend("cpu"))
    assert expected.abs().max() > 0 and torch.allclose(recorded, expected)
    with pytest.raises(UnsupportedInputError, match=f"{name} under torch.jit.trace"):
        traced(ByAddress("cpu"))
