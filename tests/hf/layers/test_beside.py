"""Layers whose base product the backend multiplies in graphs, beside their LoRA."""

from types import SimpleNamespace

import pytest
import torch
from helpers.adapters.deltas import random_checkpoint
from helpers.engines import device_or_skip, make_engine
from helpers.graphs import captured_logits
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional

from lora_backends import LoRABatch, LoRAWeights
from lora_backends.hf import MultiLoRAModel
from lora_backends.hf.calls import prepared
from lora_backends.hf.hooks import overlapped as beside
from lora_backends.sgmv.base import product
from lora_backends.torch_ref import TorchRefBackend

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ROWS = ["a", None, "b"]
COMPOSITIONS = [ROWS, ["b", "b", None], [None] * 3, ["a", "a", "b"]]
IDS = torch.randint(0, 40, (3, 5), generator=torch.Generator().manual_seed(1))
LAYERS, CALLS = 2, 8  # q, k and v; o; gate and up; down

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")


class Multiplying(TorchRefBackend):
    """Multiplies bases, and notes of how many slices and with which bias."""

    cuda_graphs = True
    multiplies_bases = True
    most_base_rows = 64

    def __init__(self):
        super().__init__()
        self.noted = []

    def run_with_base(self, x, weight, bias, weights, plan):
        if len(x) > self.most_base_rows:
            return None
        self.noted.append((weights.num_slices, bias is not None))
        return self.run_linear(x, weights, plan, functional.linear(x, weight, bias))


@pytest.fixture
def capturing(monkeypatch):
    """Return a function that says whether a graph captures."""

    def set(now):
        for module in (beside, prepared):
            monkeypatch.setattr(module, "is_capturing", lambda device: now)

    return set


def wrapped(backend, base):
    del base.model.layers[LAYERS:]
    model = MultiLoRAModel(base, backend, max_adapters=2, max_rank=4, fuse=True)
    for seed, adapter in enumerate("ab"):
        model.add_adapter(adapter, random_checkpoint(base, LINEAR, 4 - seed, seed))
    return model


@pytest.fixture
def make(make_base):
    def make(dtype=torch.bfloat16, backend=None):
        return wrapped(backend or Multiplying(), make_base("llama_bias").to(dtype))

    return make


def logits(model, rows, ids=IDS):
    return model(adapters=rows, input_ids=ids, use_cache=False).logits


def test_a_graph_multiplies_by_the_backend_and_follows_updates(make, capturing):
    model = make()
    noted, layer = model.backend.noted, [(3, True), (1, True), (2, False), (1, False)]
    with model.prepare(ROWS, tokens=5) as step:
        expected = logits(model, ROWS)
        assert not noted, "a call by names is never captured"
        for _ in range(2):
            assert torch.equal(logits(model, step), expected)
        assert noted == layer * LAYERS, "compiled once, before the capture"
        assert not step.asks_backend, "later eager passes spend no time on it"
        capturing(True)
        for rows in COMPOSITIONS:
            step.update(rows)
            noted.clear()
            assert torch.equal(logits(model, step), logits(model, rows))
            assert noted == layer * LAYERS


def test_a_pass_after_a_capture_without_one_compiles(make, capturing):
    model = make()
    noted = model.backend.noted
    with model.prepare(ROWS, tokens=5) as step:
        for now, count in ((True, CALLS), (False, CALLS), (False, 0)):
            capturing(now)
            noted.clear()
            logits(model, step)
            assert len(noted) == count


def test_what_the_backend_does_not_multiply_runs_in_turn(make, capturing):
    model, noted = make(), []
    with model.prepare(ROWS, tokens=5) as step:
        model.backend.run_with_base = lambda *given: noted.append(given)
        for now in (False, True):
            capturing(now)
            assert torch.equal(logits(model, step), logits(model, ROWS))
        assert len(noted) == 2 * CALLS


CASES = ["float32", "many rows", "a lower limit", "blend", "autocast", "another backend"]


@pytest.mark.parametrize("case", CASES)
def test_other_calls_and_programs_stay_as_they_are(make, capturing, fresh_programs, case):
    backend, calls, graphs = Multiplying(), [], []
    backend.multiplies_bases = case != "another backend"
    backend.most_base_rows = 14 if case == "a lower limit" else 64
    backend.run_with_base = lambda *given: calls.append(given)
    model = make(torch.float32 if case == "float32" else torch.bfloat16, backend)
    rows = [{"a": 0.5, "b": 0.5}, None, "b"] if case == "blend" else ROWS
    rows, ids = (rows * 5, IDS.repeat(5, 1)) if case == "many rows" else (rows, IDS)
    program = torch.compile(model.base, fullgraph=True, backend=keeping(graphs))
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"),
        model.prepare(rows, tokens=5) as step,
    ):
        for now in (False, True):
            capturing(now)
            assert torch.equal(logits(model, step, ids), logits(model, rows, ids))
            with model.using(step):
                program(input_ids=ids, use_cache=False)
    assert not calls and graphs and not count(graphs, "lora_backends.linear.default")


def keeping(graphs):
    """Return a compiler that keeps its graphs."""

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    return aot_autograd(fw_compiler=keep)


def count(graphs, name):
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    return [str(node.target) for node in nodes if node.op == "call_function"].count(name)


def test_a_program_has_one_operation_a_layer_that_a_graph_runs_by_the_backend(
    make, capturing, fresh_programs
):
    model, graphs = make(), []
    noted = model.backend.noted
    program = torch.compile(model.base, fullgraph=True, backend=keeping(graphs))
    with model.prepare(ROWS, tokens=5) as step, model.using(step):
        for _ in range(2):
            found = program(input_ids=IDS, use_cache=False).logits
            assert len(noted) == CALLS, "compiled once, before the capture"
        assert torch.equal(found, logits(model, step))
        assert count(graphs, "lora_backends.linear.default") == CALLS
        assert count(graphs, "auto_functionalized_v2") == 0
        assert count(graphs, "aten.mm.default") == 1, "the head"
        with torch._dynamo.config.patch(error_on_recompile=True):
            for now in (False, True):
                capturing(now)
                for rows in COMPOSITIONS:
                    step.update(rows)
                    noted.clear()
                    found = program(input_ids=IDS, use_cache=False).logits
                    assert len(noted) == CALLS * now
                    assert torch.equal(found, logits(model, rows))


def test_a_program_reads_weights_that_were_moved(make, fresh_programs):
    model, x = make(), torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    attention = model.base.model.layers[0].self_attn
    modules = attention.q_proj, attention.k_proj, attention.o_proj
    program = torch.compile(lambda: [module(x) for module in modules], backend="aot_eager")
    step = model.prepare(ROWS, tokens=5)
    before = None
    for _ in range(3):
        with model.using(step):
            found = program()
            for y, module in zip(found, modules, strict=True):
                torch.testing.assert_close(y, module(x))
        assert before is None or not torch.allclose(found[1], before)
        before = found[1]
        for module in modules[1:]:
            module.weight.data = module.weight.data * 2


class Tripled(torch.Tensor):
    """Multiplies as three times its values."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is functional.linear:
            args = [a.as_subclass(torch.Tensor) * 3 if type(a) is cls else a for a in args]
        return super().__torch_function__(function, types, args, kwargs)


def given(module, name, value):
    """Return a compiled call of a module, traced and then given another parameter, and its x."""
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    program = torch.compile(lambda: module(x), backend="eager")
    program()
    setattr(module, name, torch.nn.Parameter(value(getattr(module, name)), requires_grad=False))
    return program, x


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_program_leaves_parameters_of_another_class_to_torch(make, fresh_programs, name):
    model = make()
    module = model.base.model.layers[0].self_attn.o_proj
    with model.prepare(ROWS, tokens=5) as step, model.using(step):
        program, x = given(module, name, lambda plain: (plain.data + 1).as_subclass(Tripled))
        found = program()
        assert torch.equal(found, module(x))
        setattr(module, name, torch.nn.Parameter(getattr(module, name).as_subclass(torch.Tensor)))
        assert not torch.allclose(found, module(x))


def test_a_program_refuses_a_weight_on_another_device(make, fresh_programs):
    model = make()
    module = model.base.model.layers[0].self_attn.o_proj
    with model.prepare(ROWS, tokens=5) as step, model.using(step):
        program, _ = given(module, "weight", lambda plain: plain.to("meta"))
        with pytest.raises(RuntimeError, match=r"(?i)device"):
            program()


def whole(*shape, seed):
    """Return small whole numbers: their products and sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).bfloat16()


PREPARED = SimpleNamespace(asks_backend=True, widened=None)
"""Of a call, what a layer asks it."""


@pytest.fixture
def narrow(monkeypatch):
    """Let the engines multiply by small weights, which cuBLAS would multiply faster."""
    monkeypatch.setattr(product, "MULTIPROCESSORS_PER_PROGRAM", 1 << 20)


@pytest.mark.gpu
@pytest.mark.parametrize("terms", ["", "bias", "bias, scales, dora"])
@pytest.mark.parametrize("variant", ["triton", "csgmv-16"])
def test_an_engine_gives_what_both_give_in_turn(capturing, narrow, monkeypatch, variant, terms):
    device = device_or_skip()
    backend = make_engine(variant, device)
    if not backend.multiplies_bases:
        pytest.skip("the device has no TMA")
    halves_and_twos = torch.tensor([[1.0, 2.0], [0.5, 1.0]]).repeat(1, 7)
    weights = LoRAWeights(
        lora_a=whole(2, 2, 3, 24, seed=1).to(device),
        lora_b=whole(2, 14, 3, seed=2).to(device),
        ranks=torch.tensor([[3, 1], [2, 3]], dtype=torch.int32, device=device),
        scalings=torch.tensor([[0.5, 1.0], [2.0, 1.0]], device=device),
        output_slices=(9, 5),
        output_scales=halves_and_twos.to(device) if "dora" in terms else None,
    )
    token_scales = torch.tensor([1, 2, 0.5, 1, 2, 4]) if "scales" in terms else None
    plan = backend.prepare_batch(LoRABatch([0, -1, 1, 1, 0, 0], 2, token_scales=token_scales))
    x = whole(2, 3, 24, seed=3).to(device).transpose(0, 1)  # [3, 2, 24]
    weight, base_bias = whole(14, 24, seed=4).to(device), whole(14, seed=5).to(device)
    launched, run = [], backend.run_with_base
    monkeypatch.setattr(
        backend, "run_with_base", lambda *given: launched.append(run(*given)) or launched[-1]
    )
    layer = beside.linear_with_lora(backend, "run_linear")
    given = x, weights, plan, weight, base_bias if "bias" in terms else None
    with torch.no_grad():
        wanted = layer(PREPARED, False, *given)
        capturing(True)
        assert torch.equal(layer(PREPARED, False, *given), wanted)
    assert wanted.shape == (3, 2, 14)
    assert len(launched) == 2 and all(y is not None for y in launched)


def on_gpu(make_base, monkeypatch, variant):
    """Return a model in bfloat16 and the calls of the backend that a graph captured."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("torch finds no CUDA device with TMA")
    backend, captured = make_engine(variant, "cuda"), []
    run = backend.run_with_base

    def noting(*given):
        y = run(*given)
        if torch.cuda.is_current_stream_capturing():
            captured.append(y is not None)
        return y

    monkeypatch.setattr(backend, "run_with_base", noting)
    return wrapped(backend, make_base("llama_bias").bfloat16().cuda()), captured


APART = 2 * CALLS * 2**-8
"""The relative error if the product and the sum of each layer rounded to another neighbour in all
values, 2^-8 apart in bfloat16, and all errors added up. An adapter changes 0.8."""


def assert_alike(found, expected, others):
    """Compare logits with eager ones, which lie further from those of other adapters."""
    error = (found - expected).float().norm() / expected.float().norm()
    change = (found - others).float().norm() / expected.float().norm()
    assert error <= APART and change > 3 * APART


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["triton", "csgmv-16"])
def test_a_captured_model_gives_eager_logits_and_follows_updates(
    make_base, monkeypatch, narrow, variant
):
    model, captured = on_gpu(make_base, monkeypatch, variant)
    ids = IDS.cuda()
    with model.prepare(ROWS, tokens=5) as step:
        given = {"adapters": step, "input_ids": ids, "use_cache": False}
        graph, found = captured_logits(model, **given)
        assert captured == [True] * CALLS
        others = None
        for rows in COMPOSITIONS * 2:
            step.update(rows)
            graph.replay()
            expected = logits(model, step, ids)
            if others is not None:
                assert_alike(found, expected, others)
            others = expected


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_gives_eager_logits_and_follows_updates(
    make_base, monkeypatch, narrow, fresh_programs, mode
):
    model, captured = on_gpu(make_base, monkeypatch, "triton")
    ids, others = IDS.cuda(), None
    program = torch.compile(model.base, fullgraph=True, dynamic=False, mode=mode)
    with model.prepare(ROWS, tokens=5) as step:
        for rows in COMPOSITIONS * 2:
            step.update(rows)
            torch.compiler.cudagraph_mark_step_begin()
            with model.using(step):
                found = program(input_ids=ids, use_cache=False).logits
            expected = logits(model, step, ids)
            if others is not None:
                assert_alike(found, expected, others)
            others = expected
    assert all(captured) and len(captured) % CALLS == 0
    assert bool(captured) is (mode == "reduce-overhead")
