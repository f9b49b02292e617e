"""The operation of a layer in compiled programs, in turn or beside the base's product."""

from types import SimpleNamespace

import pytest
import torch
from helpers.servers.vllm_layers import (
    IDS,
    INDEX_TO_ID,
    SLICES,
    SLOTS,
    WIDTH,
    delta,
    make_module,
    mapping,
)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_programs_have_one_operation_a_layer(wrapper, x, dynamic):
    modules = [make_module(wrapper), make_module(wrapper)]
    graphs = []

    def keep_graph(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def forward(x):
        y = x.new_zeros(x.shape[0], sum(SLICES))
        for module in modules:
            wrapper.add_lora_linear(y, x, module.lora_a_stacked, module.lora_b_stacked, 1.0, SLICES)
        return y

    compiled = torch.compile(forward, backend=keep_graph, fullgraph=True, dynamic=dynamic)
    for ids in (IDS, IDS[::-1], [0] * len(IDS)):  # the batch is no part of the program
        wrapper.update_metadata(mapping(ids), INDEX_TO_ID, SLOTS + 1, 100)
        wanted = sum(delta(module, x, ids) for module in modules)
        torch.testing.assert_close(compiled(x), wanted)
    (graph,) = graphs
    called = [node for node in graph.graph.nodes if "lora" in str(node.target)]
    operations = [node for node in called if node.op == "call_function"]
    assert len(operations) == 2
    assert all("lora_backends_vllm.run" in str(node.target) for node in operations)
    # its inputs are x and a stack of each layer, not the layers' state
    assert len([node for node in called if node.op == "placeholder"]) == 2


class UnquantizedLinearMethod:
    def __init__(self, product="default_unquantized_gemm"):
        self._gemm_impl = SimpleNamespace(__name__=product)


class Fp8LinearMethod(UnquantizedLinearMethod):
    pass


class ModelWeightParameter(torch.nn.Parameter):
    """The class in which vLLM keeps a weight that is not quantized."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def vllm_adds(module):
    """Return vLLM's own way: the base product, and LoRA in an operation of its own."""

    def apply_sync(x, bias=None):
        y = torch.nn.functional.linear(x, module.base_layer.weight, bias)
        rows = y.view(-1, y.shape[-1]), x.flatten(0, -2)
        stacks = module.lora_a_stacked, module.lora_b_stacked
        module.lora_backends_layers[0].wrapper.add_lora_linear(*rows, *stacks, 1.0, SLICES)
        return y

    return apply_sync


@pytest.fixture
def fuse(wrapper, monkeypatch):
    """Return a function that fuses a layer, and what ran in which order."""
    from lora_backends.integrations.vllm import operation

    order, addresses, backend = [], [], wrapper.tokens.backend
    linear = torch.nn.functional.linear

    def noted(product):
        def base(*args):
            if not torch.compiler.is_compiling():
                order.append("base")
            return product(*args)

        return base

    def run_with_base(x, weight, bias, weights, plan):
        assert {type(weight), type(bias)} <= {torch.Tensor, type(None)}, "it takes plain tensors"
        assert weight.data_ptr() in addresses and weight.is_contiguous(), "a copy of the weight"
        order.append("both")
        y = linear(x, weight, bias)
        backend.run_linear(x, weights, plan, y)
        return y

    monkeypatch.setattr(torch.nn.functional, "linear", noted(linear))
    monkeypatch.setattr(torch, "mm", noted(torch.mm))
    monkeypatch.setattr(torch, "addmm", noted(torch.addmm))
    monkeypatch.setattr(backend, "multiplies_bases", True, raising=False)
    monkeypatch.setattr(backend, "run_with_base", run_with_base, raising=False)

    def fused(method):
        weight = torch.randn(sum(SLICES), WIDTH, generator=torch.Generator().manual_seed(3))
        weight = ModelWeightParameter(weight, requires_grad=False)
        addresses.append(weight.data_ptr())
        base_layer = SimpleNamespace(weight=weight, quant_method=method)
        module = make_module(wrapper, base_layer=base_layer)
        module._apply_sync = vllm_adds(module)
        operation.fuse(module)
        return module

    return fused, order


@pytest.mark.parametrize(
    "method, is_fused",
    [
        (UnquantizedLinearMethod(), True),
        (UnquantizedLinearMethod("cuda_flashinfer_bf16_gemm"), False),
        (Fp8LinearMethod(), False),
    ],
)
def test_in_graphs_the_backend_multiplies_beside_its_lora(
    wrapper, fuse, monkeypatch, x, method, is_fused
):
    """Other products of vLLM, as of quantized weights, stay as they are."""
    from lora_backends.integrations.vllm import operation

    fused, order = fuse
    module = fused(method)
    bias = torch.randn(sum(SLICES), generator=torch.Generator().manual_seed(4))
    bias = torch.nn.Parameter(bias, requires_grad=False)
    wanted = x @ module.base_layer.weight.T + bias + delta(module, x, IDS)
    sizes = SimpleNamespace(cudagraph_capture_sizes=[64])
    monkeypatch.setattr(wrapper.tokens, "_compilation", sizes)
    torch.testing.assert_close(module._apply_sync(x, bias), wanted)
    assert order == ["base"], "no graph has so many rows"
    sizes.cudagraph_capture_sizes = [len(x)]
    for _ in range(2):
        torch.testing.assert_close(module._apply_sync(x, bias), wanted)
    assert order[1:] == ["base", *["both"] * is_fused, "base"], "compiled once, beforehand"
    monkeypatch.setattr(operation, "is_capturing", lambda device: True)
    torch.testing.assert_close(module._apply_sync(x, bias), wanted)
    assert order[-1] == ("both" if is_fused else "base")
    wrapper.update_metadata(mapping([0] * len(x)), INDEX_TO_ID, SLOTS + 1, 100)
    base = x @ module.base_layer.weight.T
    torch.testing.assert_close(module._apply_sync(x), base)
    assert order[-1] == "base"


def test_what_the_backend_does_not_multiply_runs_in_turn(wrapper, fuse, monkeypatch, x):
    from lora_backends.integrations.vllm import operation

    fused, order = fuse
    module = fused(UnquantizedLinearMethod())
    monkeypatch.setattr(wrapper.tokens.backend, "run_with_base", lambda *_: None)
    wanted = x @ module.base_layer.weight.T + delta(module, x, IDS)
    for capturing in (False, True):
        monkeypatch.setattr(operation, "is_capturing", lambda device, now=capturing: now)
        torch.testing.assert_close(module._apply_sync(x), wanted)
    assert order == ["base", "base"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_program_has_one_operation_for_the_product_and_lora(
    wrapper, fuse, monkeypatch, x, dynamic
):
    from lora_backends.integrations.vllm import operation

    fused, order = fuse
    module, graphs = fused(UnquantizedLinearMethod()), []

    def inductor(graph, inputs):
        from torch._inductor.compile_fx import compile_fx

        graphs.append(graph)
        return compile_fx(graph, inputs)

    def forward(x):  # rows that are copied to lie together
        return module._apply_sync(x.sin().view(2, 3, WIDTH).transpose(0, 1)) * 2

    ids, x = IDS[:6], x[:6]
    wrapper.update_metadata(mapping(ids), INDEX_TO_ID, SLOTS + 1, 100)
    rows = x.sin().view(2, 3, WIDTH).transpose(0, 1).reshape(6, WIDTH)
    wanted = 2 * (rows @ module.base_layer.weight.T + delta(module, rows, ids))
    torch.testing.assert_close(forward(x), wanted.view(3, 2, -1))
    assert order == ["base", "both"]
    order.clear()
    monkeypatch.setattr(operation, "is_capturing", lambda device: True)
    with torch.inference_mode():
        compiled = torch.compile(forward, backend=inductor, fullgraph=True, dynamic=dynamic)
        torch.testing.assert_close(compiled(x), wanted.view(3, 2, -1))
    assert order == ["both"]
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count("lora_backends_vllm.linear") == 1
    assert not any(name in " ".join(called) for name in ("matmul", "nn.linear", "vllm.run"))


def test_the_product_of_this_vllm_is_recognised(monkeypatch):
    import functools

    from vllm import envs
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from lora_backends.integrations.vllm.operation import _multiplies_by_torch

    method = UnquantizedLinearMethod()
    layer = SimpleNamespace(quant_method=method)
    assert not _multiplies_by_torch(layer), "on a CPU its weights are packed"
    torchs = utils.default_unquantized_gemm
    monkeypatch.setattr(utils, "dispatch_unquantized_gemm", lambda: torchs)
    if hasattr(method, "_gemm_impl"):
        method._gemm_impl = torchs
    assert _multiplies_by_torch(layer)
    method._gemm_impl = functools.partial(torchs)
    assert not _multiplies_by_torch(layer), "an unknown product"
    method._gemm_impl = torchs
    # not the variable: an engine of this process has made vLLM remember it
    monkeypatch.setitem(vars(envs), "VLLM_BATCH_INVARIANT", True)
    assert not _multiplies_by_torch(layer)
    assert not _multiplies_by_torch(SimpleNamespace())


def test_a_layer_that_adds_lora_in_its_own_way_keeps_it(wrapper, monkeypatch):
    from lora_backends.integrations.vllm import operation

    class Linear(SimpleNamespace):
        def _apply_sync(self, x, bias=None):
            return self._apply_lora_to_output(x, x)

        def _apply_lora_to_output(self, x, y):
            return y

    class Head(Linear):
        def _apply_lora_to_output(self, x, y):
            return y + 1

    monkeypatch.setattr(wrapper.tokens.backend, "multiplies_bases", True, raising=False)
    base_layer = SimpleNamespace(quant_method=UnquantizedLinearMethod())
    for kind, is_replaced in ((Linear, True), (Head, False)):
        module = kind(**vars(make_module(wrapper, base_layer=base_layer)))
        operation.fuse(module)
        assert ("_apply_sync" in vars(module)) is is_replaced


def test_inductor_runs_the_operation_in_place(wrapper, x):
    module = make_module(wrapper)

    def forward(x):
        y = x @ x.new_ones(WIDTH, sum(SLICES))
        wrapper.add_lora_linear(y, x, module.lora_a_stacked, module.lora_b_stacked, 1.0, SLICES)
        return y * 2

    with torch.inference_mode():
        torch.testing.assert_close(torch.compile(forward, fullgraph=True)(x), forward(x))
