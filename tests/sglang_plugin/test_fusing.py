"""Base products together with their LoRA, in SGLang's own linear layers."""

from types import SimpleNamespace

import pytest
import torch

from lora_backends import get_backend
from lora_backends.integrations.sglang import backend as of_plugin
from lora_backends.integrations.sglang import fusing

SLOTS, RANK, WIDTH, OUT = 3, 4, 16, 10
RANKS, SCALINGS = [4, 0, 2], [2.0, 0.0, 0.5]
IDS = {"a": 0, None: 1, "c": 2}


class Multiplying:
    """torch_ref, with products of the base as a GPU's engine has them."""

    multiplies_bases, cuda_graphs = True, True

    def __init__(self):
        self._backend = get_backend("torch_ref", device="cpu")
        self.products = 0

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def run_with_base(self, x, weight, bias, layer, plan):
        self.products += 1
        y = torch.nn.functional.linear(x, weight, bias)
        return self._backend.run_linear(x, layer, plan, y)


@pytest.fixture
def made(monkeypatch):
    """Return a backend, a row-parallel layer with LoRA, and what its product should be."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.lora.layers import RowParallelLinearWithLoRA

    monkeypatch.setenv("LORA_BACKENDS_SGLANG", "torch_ref")
    engine = Multiplying()
    monkeypatch.setattr(of_plugin, "get_backend", lambda *_, **__: engine)
    state = SimpleNamespace(shapes=False, capturing=False, engine=engine)
    monkeypatch.setattr(of_plugin, "_is_capturing_shapes", lambda: state.shapes)
    monkeypatch.setattr(fusing, "is_capturing", lambda device: state.capturing)
    backend = state.backend = of_plugin.BackendForSGLang(SLOTS, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    base = torch.nn.Module()
    base.weight = torch.nn.Parameter(torch.randn(OUT, WIDTH, generator=generator))
    base.bias = torch.nn.Parameter(torch.randn(OUT, generator=generator))
    base.quant_method = UnquantizedLinearMethod()
    for name, value in dict(
        tp_rank=0,
        tp_size=1,
        tp_group=None,
        skip_bias_add=False,
        input_is_parallel=True,
        reduce_results=False,
        use_dp_attention_reduce=False,
        output_size=OUT,
    ).items():
        setattr(base, name, value)
    monkeypatch.setattr(
        "sglang.srt.lora.layers.get_group_rank_size", lambda _: (0, 1), raising=False
    )
    layer = state.layer = RowParallelLinearWithLoRA(base, backend)
    layer.set_lora_info(
        torch.randn(SLOTS, RANK, WIDTH, generator=generator),
        torch.randn(SLOTS, OUT, RANK, generator=generator),
    )
    backend.adopt(SimpleNamespace(uid_to_buffer_id=IDS), [layer])
    return state


def announce(backend, ids):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=len(ids), lora_ids=ids)
    indices = [IDS[id_] for id_ in ids]
    backend.prepare_lora_batch(batch, indices, RANKS, SCALINGS, use_decode_cuda_graph=True)


def wanted(layer, x, slots):
    y = torch.nn.functional.linear(x, layer.weight, layer.bias)
    for row, slot in enumerate(slots):
        r = RANKS[slot]
        a, b = layer.A_buffer[slot, :r], layer.B_buffer[slot, :, :r]
        y[row] += SCALINGS[slot] * b @ (a @ x[row])
    return y


@torch.no_grad()
def test_a_captured_product_has_its_lora_once(made):
    x = torch.randn(4, WIDTH)
    announce(made.backend, ["a", None, "c", "a"])  # ranks and scalings
    torch.testing.assert_close(made.layer(x)[0], wanted(made.layer, x, [0, 1, 2, 0]))
    assert made.engine.products == 0, "a batch that is served, perhaps by a graph"
    made.shapes = True
    announce(made.backend, [None] * 4)
    slots = [0, 1, 2, 0]  # as the plugin fills what SGLang captures
    torch.testing.assert_close(made.layer(x)[0], wanted(made.layer, x, slots))
    assert made.engine.products == 1, "the warm-up compiles the kernels"
    made.capturing = True
    torch.testing.assert_close(made.layer(x)[0], wanted(made.layer, x, slots))
    assert made.engine.products == 2
    base = made.layer.base_layer
    alone = base.quant_method.apply(base, x, base.bias)
    assert made.engine.products == 2, "a caller of the base layer gets its product alone"
    torch.testing.assert_close(alone, torch.nn.functional.linear(x, base.weight, base.bias))


@torch.no_grad()
def test_a_backend_that_cannot_multiply_leaves_the_product_to_sglang(made, monkeypatch):
    monkeypatch.setattr(Multiplying, "run_with_base", lambda *_: None)
    made.shapes = made.capturing = True
    announce(made.backend, [None] * 4)
    made.backend.numbers.set([0, 2], RANKS, SCALINGS)
    x = torch.randn(4, WIDTH)
    torch.testing.assert_close(made.layer(x)[0], wanted(made.layer, x, [0, 1, 2, 0]))


def test_methods_that_layers_share_and_quantized_weights_keep_their_products(made):
    other = torch.nn.Module()
    shared = SimpleNamespace(quant_method=made.layer.base_layer.quant_method)
    kind = type("RowParallelLinearWithLoRA", (), {})
    layers = [kind(), kind()]
    for layer in layers:
        layer.base_layer, layer.forward = shared, other.forward
    made.backend._fused.adopt(layers)
    assert all(layer.forward == other.forward for layer in layers)
    quantized = kind()
    quantized.base_layer, quantized.forward = SimpleNamespace(quant_method=other), other.forward
    made.backend._fused.adopt([quantized])
    assert quantized.forward == other.forward
