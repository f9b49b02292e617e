"""Backends under `torch.compile`: one graph, declared mutations, plans that are refilled."""

import copy
import dataclasses
import gc

import pytest
import torch
from helpers.small_layers import small_batch, small_weights

from lora_backends import (
    InvalidInputError,
    LoRABatch,
    UnsupportedInputError,
    backend_names,
    get_backend,
    unavailable_reasons,
)
from lora_backends.features import CAPACITY, TOKEN_SCALES
from lora_backends.operations import BY_NAME, OPERATIONS, Input
from lora_backends.torch_ref import TorchRefBackend

ANOTHER = LoRABatch([1, 1, -1, 3, 2, 0, -1], num_slots=4)
RETURNING_Y = [
    operation
    for operation in OPERATIONS
    if operation.result == "y" and operation.is_dense and operation.num_slices in (None, 3)
]
BACKENDS = [(name, "cpu") for name in backend_names() if not unavailable_reasons(name, "cpu")]
if torch.cuda.is_available():
    BACKENDS += [
        pytest.param(name, "cuda", marks=pytest.mark.gpu)
        for name in backend_names()
        if not unavailable_reasons(name, "cuda")
    ]

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
    pytest.mark.usefixtures("fresh_programs"),
]


def _backend(name, device):
    return get_backend(name, device=device)


def _on(device, weights):
    names = ("lora_a", "lora_b", "ranks", "scalings", "bias")
    return dataclasses.replace(weights, **{n: getattr(weights, n).to(device) for n in names})


def _inputs(operation, device):
    """Return the first argument of an operation, and a base output."""
    generator = torch.Generator().manual_seed(1)
    kind = BY_NAME[operation].input
    x = torch.randn((3, 7, 3) if kind is Input.H else (7, 10), generator=generator)
    if kind is Input.TOKEN_IDS:
        x = torch.randint(0, 10, (7,), generator=generator)
    return x.to(device), torch.randn(7, 14, generator=generator).to(device)


@pytest.mark.parametrize("operation", [operation.name for operation in RETURNING_Y])
@pytest.mark.parametrize("name, device", BACKENDS)
def test_a_call_is_part_of_one_graph_and_follows_a_refilled_plan(name, device, operation):
    backend, weights = _backend(name, device), _on(device, small_weights(bias=True))
    x, base = _inputs(operation, device)
    call = getattr(backend, operation)

    def layer(x, base, plan):
        y = base * 2
        call(x, weights, plan, base_output=y)
        return y + call(x, weights, plan)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    plan = backend.prepare_batch(small_batch())
    assert torch.equal(compiled(x, base, plan), layer(x, base, plan))
    backend.prepare_batch(ANOTHER, out=plan)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(compiled(x, base, plan), layer(x, base, plan))


@pytest.mark.parametrize("name, device", BACKENDS)
def test_arguments_may_be_given_by_name(name, device):
    backend, weights = _backend(name, device), _on(device, small_weights(bias=True))
    x, _ = _inputs("run_linear", device)
    ids, _ = _inputs("run_embedding", device)

    def layer(x, ids, plan):
        h = backend.run_lora_a(x=x, weights=weights, plan=plan)
        y = backend.run_lora_b(h=h, weights=weights, plan=plan)
        backend.run_logits(hidden=x, weights=weights, plan=plan, base_output=y)
        return backend.run_embedding(token_ids=ids, weights=weights, plan=plan, base_output=y)

    plan = backend.prepare_batch(small_batch())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, ids, plan), layer(x, ids, plan))


def test_new_plans_are_compiled_for_once_more():
    backend, weights = TorchRefBackend(), small_weights(bias=True)
    x, _ = _inputs("run_linear", "cpu")
    compiled = torch.compile(
        lambda plan: backend.run_linear(x, weights, plan), fullgraph=True, backend="eager"
    )
    for _ in range(2):
        compiled(backend.prepare_batch(small_batch()))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in (small_batch(), ANOTHER):
            plan = backend.prepare_batch(batch)
            assert torch.equal(compiled(plan), backend.run_linear(x, weights, plan))


BATCHES = [
    LoRABatch([3, -1, 0], 4),
    LoRABatch([1, 1, -1, 3, 2, 0, -1], 4),
    LoRABatch([], 4),
    LoRABatch([2, 0, 3, 1], 4),
]
"""Batches of at most seven tokens."""


def scaled(batch):
    """Return a batch with a scale per token."""
    return LoRABatch(batch.token_slots, 4, torch.linspace(-1, 2, batch.num_tokens))


@pytest.mark.parametrize("name, device", BACKENDS)
def test_a_program_follows_a_plan_with_room(name, device):
    """Batches of other sizes, with and without scales, and ranks and scalings that change."""
    backend, weights = _backend(name, device), _on(device, small_weights(bias=True))
    if not {CAPACITY, TOKEN_SCALES} <= backend.features:
        pytest.skip(f"{name} does not declare capacity and token_scales")
    x, base = _inputs("run_linear", device)

    def layer(x, base, plan):
        y = base * 2
        backend.run_linear(x, weights, plan, y)
        return y

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    plan = backend.prepare_batch(scaled(BATCHES[0]), capacity=9)
    assert torch.equal(compiled(x, base, plan), layer(x, base, plan))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for turn, batch in enumerate(BATCHES):
            if turn == 2:
                weights.ranks.clamp_(max=1)
                weights.scalings.mul_(-2)
            for given in (scaled(batch), batch):
                backend.prepare_batch(given, out=plan)
                found = compiled(x, base, plan)
                assert torch.equal(found, layer(x, base, plan))
                assert torch.equal(found[batch.num_tokens :], (base * 2)[batch.num_tokens :])


def test_a_program_adds_several_adapters_of_a_token():
    backend, weights = TorchRefBackend(), small_weights(bias=True)
    x, base = _inputs("run_linear", "cpu")

    def layer(x, base, plan):
        y = base * 2
        backend.run_linear(x, weights, plan, y)
        return y + backend.run_linear(x, weights, plan)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    plan = backend.prepare_batch(LoRABatch([[0, 1]] * 7, 4, [[0.7, 0.3]] * 7))
    assert torch.equal(compiled(x, base, plan), layer(x, base, plan))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in (small_batch(), LoRABatch([[3, -1], [1, 2], [0, 3]], 4)):
            backend.prepare_batch(batch, out=plan)
            assert torch.equal(compiled(x, base, plan), layer(x, base, plan))


def test_weights_rewritten_in_place_are_met():
    backend, weights = TorchRefBackend(), small_weights(bias=True)
    x, _ = _inputs("run_linear", "cpu")
    plan = backend.prepare_batch(small_batch())
    compiled = torch.compile(
        lambda x: backend.run_linear(x, weights, plan), fullgraph=True, backend="aot_eager"
    )
    compiled(x)
    weights.lora_b.mul_(-3)
    assert torch.equal(compiled(x), backend.run_linear(x, weights, plan))


@pytest.mark.parametrize("suffix", ["", "_uncaptured"])
def test_torch_finds_the_operations_well_formed(suffix):
    backend, weights = TorchRefBackend(), small_weights(bias=True)
    plan = backend.prepare_batch(small_batch())
    x, base = _inputs("run_linear", "cpu")
    handles = backend.handle, weights.handle, plan.handle
    operations = torch.ops.lora_backends
    shrink = getattr(operations, f"run_lora_a{suffix}").default
    torch.library.opcheck(shrink, (x, 3, 3, *handles))
    add = getattr(operations, f"add_lora{suffix}_").default
    torch.library.opcheck(add, ("run_linear", x, base, *handles, []))
    ids, _ = _inputs("run_embedding", "cpu")
    torch.library.opcheck(add, ("run_embedding", ids, base, *handles, []))


def test_only_what_a_graph_may_capture_is_open_to_it():
    uncaptured = torch.ops.lora_backends.add_lora_uncaptured_.default
    captured = torch.ops.lora_backends.add_lora_.default
    assert torch.Tag.cudagraph_unsafe in uncaptured.tags
    assert torch.Tag.cudagraph_unsafe not in captured.tags


def test_arguments_are_checked_in_a_compiled_program():
    backend, weights = TorchRefBackend(), small_weights(bias=True)
    plan = backend.prepare_batch(small_batch())
    compiled = torch.compile(lambda x: backend.run_linear(x, weights, plan), backend="eager")
    with pytest.raises(InvalidInputError, match=r"x is \[7, 11\]; allowed: \[7, 10\]"):
        compiled(torch.zeros(7, 11))


@pytest.mark.parametrize(
    "out", [torch.zeros(2, 3, 7, 3), torch.zeros(3, 7, 3).half(), torch.zeros(3, 7, 1)]
)
def test_an_out_of_another_shape_or_dtype_is_refused_in_a_compiled_program(out):
    backend, weights = TorchRefBackend(), small_weights()
    plan, x = backend.prepare_batch(small_batch()), torch.randn(7, 10)
    compiled = torch.compile(
        lambda x, out: backend.run_lora_a(x, weights, plan, out=out), backend="eager"
    )
    with pytest.raises(InvalidInputError, match=r"out is .*allowed: \[3, 7, 3\] float32"):
        compiled(x, out)
    good = torch.full((3, 7, 3), torch.nan)
    assert compiled(x, good) is good
    assert torch.equal(good, backend.run_lora_a(x, weights, plan))


def _leaves(operation, device):
    """Return a layer whose tensors are leaves, the first argument and base_output as leaves."""
    weights = _on(device, small_weights(bias=True))
    scales = torch.rand(4, 14, generator=torch.Generator().manual_seed(2)).to(device)
    names = ("lora_a", "lora_b", "bias")
    tensors = {name: getattr(weights, name).clone().requires_grad_() for name in names}
    weights = dataclasses.replace(weights, **tensors, output_scales=scales.requires_grad_())
    x, base = _inputs(operation, device)
    first = x if BY_NAME[operation].input is Input.TOKEN_IDS else x.requires_grad_()
    leaves = [
        t for t in (first, base.requires_grad_(), *tensors.values(), scales) if t.requires_grad
    ]
    return weights, first, base, leaves


@pytest.mark.parametrize("operation", ["run_lora_a", *(op.name for op in RETURNING_Y)])
@pytest.mark.parametrize("name, device", BACKENDS)
def test_a_training_step_is_one_graph_with_the_gradients_of_an_eager_step(name, device, operation):
    backend = _backend(name, device)
    weights, first, base, leaves = _leaves(operation, device)
    plan, call = backend.prepare_batch(small_batch()), getattr(backend, operation)

    def step(first, base):
        if operation == "run_lora_a":
            return call(first, weights, plan).pow(2).sum() + base.sum()
        y = base * 2
        call(first, weights, plan, base_output=y)
        return (y + call(first, weights, plan)).pow(2).sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.enable_grad():
        expected = torch.autograd.grad(step(first, base), leaves, allow_unused=True)
        found = torch.autograd.grad(compiled(first, base), leaves, allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        # AOTAutograd adds the gradients of the two calls in another order
        assert one is None or torch.allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name, device", BACKENDS)
def test_a_compiled_backward_by_the_tables_of_another_batch_is_refused(name, device):
    backend, weights = _backend(name, device), _on(device, small_weights(bias=True))
    plan = backend.prepare_batch(small_batch())
    compiled = torch.compile(
        lambda x: backend.run_linear(x, weights, plan).sum(), fullgraph=True, backend="aot_eager"
    )
    with torch.enable_grad():
        for refilled in (False, True):
            loss = compiled(torch.randn(7, 10, device=device, requires_grad=True))
            if refilled:
                backend.prepare_batch(ANOTHER, out=plan)
                with pytest.raises(
                    InvalidInputError, match="refilled between forward and backward"
                ):
                    loss.backward()
            else:
                loss.backward()


def test_a_program_that_changes_a_stack_first_computes_with_the_new_one():
    backend, weights = TorchRefBackend(), small_weights()
    plan = backend.prepare_batch(small_batch())

    def step(x):
        weights.lora_b.mul_(2)
        return backend.run_linear(x, weights, plan)

    x = torch.randn(7, 10, requires_grad=True)
    with torch.enable_grad():
        expected = 2 * backend.run_linear(x, weights, plan)
        found = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)


def _assert_steps_agree(compiled, step, tensors, *arguments):
    """Compare what a compiled step and an eager one return, and the gradients of some tensors."""
    tensors = [tensor.requires_grad_() for tensor in tensors]
    with torch.enable_grad():
        found, expected = compiled(*arguments), step(*arguments)
        assert torch.allclose(found, expected, atol=1e-6)
        pairs = zip(
            *(torch.autograd.grad(y.sum(), tensors) for y in (found, expected)), strict=True
        )
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-5) for one, other in pairs)


@pytest.mark.parametrize("operation, dynamic", [("run_linear", None), ("run_lora_a", True)])
def test_one_compiled_step_trains_layer_after_layer(operation, dynamic):
    """torch makes symbols of handles that differ from call to call."""
    backend, (x, _) = TorchRefBackend(), _inputs("run_linear", "cpu")
    plan = backend.prepare_batch(small_batch())

    def step(x, weights):
        return getattr(backend, operation)(x, weights, plan).square()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for _ in range(3):
        weights = small_weights(bias=True)
        _assert_steps_agree(compiled, step, [x, weights.lora_a], x, weights)


def test_a_compiled_step_trains_several_adapters_of_a_token():
    backend, weights = TorchRefBackend(), small_weights(bias=True)
    x, base = _inputs("run_linear", "cpu")
    plan = backend.prepare_batch(LoRABatch([[0, 1]] * 6 + [[2, -1]], 4, [[0.7, 0.3]] * 7))

    def step(x, base):
        y = backend.run_linear(x, weights, plan, base * 2)
        return y + backend.run_linear(x, weights, plan)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    leaves = [x, base, weights.lora_a, weights.lora_b, weights.bias]
    _assert_steps_agree(compiled, step, leaves, x, base)


@pytest.mark.parametrize("trains", [False, True])
def test_autocast_casts_x_in_a_compiled_program(trains):
    backend, weights = TorchRefBackend(), small_weights(bias=True)
    plan, x = backend.prepare_batch(small_batch()), _inputs("run_linear", "cpu")[0].bfloat16()

    def step(x):
        with torch.autocast("cpu", torch.bfloat16):
            return backend.run_linear(x, weights, plan)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert compiled(x).dtype == torch.float32 and torch.equal(compiled(x), step(x))
    if trains:
        _assert_steps_agree(compiled, step, [x, weights.lora_b], x)


def test_torch_finds_the_recorded_operation_well_formed():
    backend, weights = TorchRefBackend(), small_weights(bias=True)
    plan = backend.prepare_batch(small_batch())
    tensors = [torch.nan_to_num(t) for t in weights.tensors.values()]
    tensors = [t.requires_grad_(t.is_floating_point() and t.shape[-1] != 3) for t in tensors]
    x, base = (t.requires_grad_() for t in _inputs("run_linear", "cpu"))
    handles = backend.handle, weights.handle, plan.handle
    arguments = ("run_linear", x, base, tensors, *handles, [7, 14], base.dtype, False)
    torch.library.opcheck(torch.ops.lora_backends.recorded.default, arguments)


def test_a_backend_without_gradients_refuses_them_in_a_compiled_program():
    class WithoutGradients(TorchRefBackend):
        differentiable = False

    backend, weights = WithoutGradients(), small_weights(bias=True)
    plan = backend.prepare_batch(small_batch())
    compiled = torch.compile(lambda x: backend.run_linear(x, weights, plan), backend="eager")
    with torch.enable_grad(), pytest.raises(UnsupportedInputError, match="gradient"):
        compiled(torch.randn(7, 10, requires_grad=True))


def test_a_plan_of_any_type_works_outside_of_the_graph():
    class ListPlans(TorchRefBackend):
        plan_type = list

        def prepare_batch(self, batch, out=None):
            return [super().prepare_batch(batch)]

        def run_linear(self, x, weights, plan, base_output=None):
            return TorchRefBackend().run_linear(x, weights, plan[0], base_output)

    backend, weights = ListPlans(), small_weights(bias=True)
    x, _ = _inputs("run_linear", "cpu")
    plan = backend.prepare_batch(small_batch())
    compiled = torch.compile(lambda x: backend.run_linear(x, weights, plan) + 1, backend="eager")
    assert torch.equal(compiled(x), backend.run_linear(x, weights, plan) + 1)


def test_a_handle_ends_with_its_object_and_copies_have_their_own():
    weights = small_weights()
    copies = [copy.copy(weights), copy.deepcopy(weights)]
    assert len({weights.handle, *(each.handle for each in copies)}) == 3
    assert torch.equal(copies[1].lora_b.nan_to_num(), weights.lora_b.nan_to_num())
    backend = TorchRefBackend()
    plan = backend.prepare_batch(small_batch())
    gone = weights.handle
    del weights, copies
    gc.collect()
    with pytest.raises(InvalidInputError, match=f"handle {gone} stands for nothing"):
        torch.ops.lora_backends.add_lora_(
            "run_linear",
            torch.zeros(7, 10),
            torch.zeros(7, 14),
            backend.handle,
            gone,
            plan.handle,
            [],
        )


def each_on_gpu(test):
    """Run a test on the GPU with each backend that runs there."""
    names = [name for name in backend_names() if not unavailable_reasons(name, "cuda")]
    needs = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
    return pytest.mark.gpu(needs(pytest.mark.parametrize("name", names)(test)))


def _layer_on_gpu(name):
    """Return a backend, a plan of it, a function of x and base that uses both, and its inputs."""
    backend, weights = _backend(name, "cuda"), _on("cuda", small_weights(bias=True))
    plan = backend.prepare_batch(small_batch())

    def layer(x, base):
        y = base * 2
        backend.run_linear(x, weights, plan, y)
        return y.relu()

    return backend, plan, layer, _inputs("run_linear", "cuda")


@each_on_gpu
def test_captured_programs_follow_refilled_plans(name):
    backend, plan, layer, inputs = _layer_on_gpu(name)
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for slots in ([3, -1, 0, 1, 0, 2, 3], [-1] * 7, [2] * 7, [1, 1, -1, 3, 2, 0, -1]) * 3:
        backend.prepare_batch(LoRABatch(slots, 4), out=plan)
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(*inputs), layer(*inputs))


@each_on_gpu
def test_a_program_is_captured_behind_eager_calls(name):
    """What is kept for repeated calls must not lie in the memory pool of its graph."""
    _, _, layer, inputs = _layer_on_gpu(name)
    expected = [layer(*inputs) for _ in range(3)][0]
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):  # warms up, captures, replays
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(*inputs), expected)


@each_on_gpu
def test_captured_programs_follow_a_plan_with_room(name):
    backend, weights = _backend(name, "cuda"), _on("cuda", small_weights(bias=True))
    if not {CAPACITY, TOKEN_SCALES} <= backend.features:
        pytest.skip(f"{name} does not declare capacity and token_scales")
    x, base = _inputs("run_linear", "cuda")
    plan = backend.prepare_batch(scaled(BATCHES[0]), capacity=9)

    def layer(x, base):
        y = base * 2
        backend.run_linear(x, weights, plan, y)
        return y.relu()

    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for turn, batch in enumerate(BATCHES * 3):
        weights.scalings.mul_(-1)
        captured = turn >= len(BATCHES)  # a plan captured without token_scales refuses them
        backend.prepare_batch(batch if captured and turn % 2 else scaled(batch), out=plan)
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(x, base), layer(x, base))


def test_calls_of_a_thread_run_while_another_traces(monkeypatch):
    """torch's flag is one for all threads; a call that took it for its own would never end."""
    backend, weights, batch = TorchRefBackend(), small_weights(), small_batch()
    plan = backend.prepare_batch(batch)
    x = torch.randn(batch.num_tokens, weights.in_features)
    expected = backend.run_linear(x, weights, plan), backend.run_lora_a(x, weights, plan)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert torch.equal(backend.run_linear(x, weights, plan), expected[0])
    assert torch.equal(backend.run_lora_a(x, weights, plan), expected[1])


def test_an_export_holds_the_operation():
    """A trace under torch's modes, without Dynamo, which answers for itself."""
    backend, weights, batch = TorchRefBackend(), small_weights(), small_batch()
    plan = backend.prepare_batch(batch)

    class Module(torch.nn.Module):
        def forward(self, x):
            return backend.run_linear(x, weights, plan)

    x = torch.randn(batch.num_tokens, weights.in_features)
    with torch.no_grad():
        graph = torch.export.export(Module(), (x,), strict=False).graph
    assert any("add_lora" in str(node.target) for node in graph.nodes)
