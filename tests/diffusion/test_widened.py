"""Layers with their LoRA as one widened product equal the base product with LoRA added to it."""

import doctest
import gc
import weakref
from itertools import product as each_of

import pytest
import torch
from helpers.diffusion.diffusion_loras import BOUND, ENTRIES, PROMPTS, RANK, tensors_of
from helpers.diffusion.tiny_pipelines import PIPELINES, run
from torch.autograd import forward_ad

from lora_backends import NO_ADAPTER, LoRABatch, LoRAWeights, get_backend
from lora_backends.diffusers import MultiLoRAPipeline, calls, component, widened
from lora_backends.torch_ref import TorchRefBackend

SLOTS = torch.tensor([2, NO_ADAPTER, 0, 2, 1, 0, NO_ADAPTER])


@pytest.fixture
def always(monkeypatch):
    """Widen every product, on a CPU too."""
    monkeypatch.setattr(widened, "is_cheaper", lambda *sizes: True)


def layer(ranks, **terms):
    """Return a stack of three adapters, with NaN beyond each one's rank, and to scale rank 0."""
    torch.manual_seed(0)
    a, b = torch.randn(3, 1, 11, 6), torch.randn(3, 10, 11)
    for slot, rank in enumerate(ranks):
        a[slot, :, rank:] = b[slot, :, rank:] = torch.nan
    ranks, scalings = torch.tensor(ranks)[:, None].int(), torch.tensor([[0.5], [2.0], [-0.7]])
    scalings[ranks == 0] = torch.nan
    return LoRAWeights(a, b, ranks, scalings, (10,), **terms)


def product(weights, ranks):
    """Return the widened product and the base product with LoRA added to it."""
    engine = get_backend("torch_ref", device="cpu")
    plan = engine.prepare_batch(LoRABatch(SLOTS, 3))
    x, w, bias = torch.randn(7, 6), torch.randn(10, 6), torch.randn(10)
    products = widened.WidenedProducts(engine, [2, 0, 1], {id(weights): max(ranks)})
    with torch.no_grad():
        expected = engine.run_linear(x, weights, plan, torch.nn.functional.linear(x, w, bias))
        return products.run(x[None], weights, plan, w, bias), expected


@pytest.mark.parametrize("ranks", [(3, 11, 5), (8, 8, 2), (0, 1, 0), (0, 0, 0)])
def test_a_widened_product_is_the_layer_with_lora(always, ranks):
    y, expected = product(layer(ranks), ranks)
    if not any(ranks):
        assert y is None
    else:
        torch.testing.assert_close(y[0], expected)


def test_tangents_and_lazy_negations_are_left_to_the_guards(always):
    """Kernels would drop tangents, and read negated values without their sign."""
    weights, engine = layer((3, 11, 5)), get_backend("torch_ref", device="cpu")
    plan = engine.prepare_batch(LoRABatch(SLOTS, 3))
    x, w = torch.randn(7, 6), torch.randn(10, 6)
    products = widened.WidenedProducts(engine, [2, 0, 1], {id(weights): 11})
    with torch.no_grad():
        assert products.run(x, weights, plan, w, None) is not None
        assert products.run(torch._neg_view(x), weights, plan, w, None) is None
        assert products.run(x, weights, plan, torch._neg_view(w), None) is None
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            assert products.run(dual, weights, plan, w, None) is None


def test_lora_is_added_where_an_engine_cannot_make_the_operands(always):
    weights, engine = layer((3, 11, 5)), TorchRefBackend("cpu")
    engine.widened_operands = lambda *given: None
    plan = engine.prepare_batch(LoRABatch(SLOTS, 3))
    products = widened.WidenedProducts(engine, [2, 0, 1], {id(weights): 11})
    with torch.no_grad():
        given = torch.randn(7, 6), weights, plan, torch.randn(10, 6), None
        assert products.run(*given) is None


def test_slices_of_a_layer_have_columns_of_their_own(always):
    torch.manual_seed(0)
    widths, ranks = (4, 5), torch.tensor([[3, 0], [11, 2], [0, 7]], dtype=torch.int32)
    a, b = torch.randn(3, 2, 11, 6), torch.randn(3, 9, 11)
    scalings = torch.randn(3, 2)
    scalings[ranks == 0] = torch.nan
    weights = LoRAWeights(a, b, ranks, scalings, widths)
    engine = get_backend("torch_ref", device="cpu")
    plan = engine.prepare_batch(LoRABatch(SLOTS, 3))
    x, w = torch.randn(7, 6), torch.randn(9, 6)
    products = widened.WidenedProducts(engine, [2, 0, 1], {id(weights): 11})
    with torch.no_grad():
        expected = engine.run_linear(x, weights, plan, torch.nn.functional.linear(x, w))
        torch.testing.assert_close(products.run(x, weights, plan, w, None), expected)


@pytest.mark.parametrize("term", ["bias", "output_scales"])
def test_lora_with_other_terms_is_added(always, term):
    ranks = (3, 11, 5)
    assert product(layer(ranks, **{term: torch.ones(3, 10)}), ranks)[0] is None


class BarePlan:
    """A plan that takes no attributes."""

    __slots__ = ("num_slots", "num_tokens", "segments", "token_scales")

    def __init__(self, plan):
        for name in self.__slots__:
            setattr(self, name, getattr(plan, name))


class BarePlans(TorchRefBackend):
    """An engine of another project, whose plans are no `LoRAPlan`."""

    plan_type = BarePlan

    def prepare_batch(self, batch, out=None, capacity=None):
        return BarePlan(super().prepare_batch(batch, capacity=capacity))


@pytest.fixture
def widths(always, monkeypatch):
    """Return the list of the widths of products that calls on a CPU widen, None where they add."""
    real, found = widened.WidenedProducts.run, []

    def counted(self, *args):
        y = real(self, *args)
        found.append(None if y is None else y.shape[-1])
        return y

    monkeypatch.setattr(widened.WidenedProducts, "run", counted)
    monkeypatch.setattr(calls, "WIDENING_DEVICES", ("cpu",))
    # as on a GPU, where modules run by a `forward` of this library
    monkeypatch.setattr(component, "WrappedModel", _fused(component.WrappedModel))
    return found


def test_images_are_the_same_with_widened_products(widths, monkeypatch):
    pipe = PIPELINES["Flux"]()
    model = MultiLoRAPipeline(pipe, backend=BarePlans())
    for seed, name in enumerate(("anime", "ink")):
        model.load_adapter(name, tensors_of(pipe, ["transformer"], seed, rank=3 + 7 * seed))
    for entries in (["anime", None, "ink"], ["ink", "ink", "ink"]):
        images = []
        for devices in ((), ("cpu",)):
            monkeypatch.setattr(calls, "WIDENING_DEVICES", devices)
            widths.clear()
            images.append(run(pipe, PROMPTS, call=model, adapters=entries))
            assert bool(widths) == bool(devices) and None not in widths
        torch.testing.assert_close(*images, rtol=0, atol=BOUND * float(images[0].abs().max()))


@pytest.mark.parametrize("name", ["Stable Diffusion", "SDXL"])
def test_joined_self_attention_is_widened(widths, monkeypatch, name):
    pipe = PIPELINES[name]()
    model = MultiLoRAPipeline(pipe, backend="torch_ref")
    model.load_adapter("anime", tensors_of(pipe, ["unet"], seed=1))
    some = tensors_of(pipe, ["unet"], seed=2, rank=11)  # the largest rank is not the leader's
    model.load_adapter("ink", {k: v for k, v in some.items() if "attn1.to_v" in k})
    joined = {sum(group.widths) for group in model._components["unet"].wrapped.hooked.groups}
    images = []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(calls, "WIDENING_DEVICES", devices)
        widths.clear()
        images.append(run(pipe, PROMPTS, call=model, adapters=["anime", None, "ink"]))
    assert joined and joined <= set(widths) and None not in widths
    torch.testing.assert_close(*images, rtol=0, atol=BOUND * float(images[0].abs().max()))


def test_a_call_is_freed_with_its_inputs(widths, monkeypatch):
    pipe = PIPELINES["SDXL"]()
    model = MultiLoRAPipeline(pipe, backend="torch_ref")
    model.load_adapter("anime", tensors_of(pipe, ["unet"], 0))
    made, inputs, make = [], [], calls.ComponentCall.__init__

    def noted(call, *given):
        made.append(weakref.ref(call))
        make(call, *given)

    monkeypatch.setattr(calls.ComponentCall, "__init__", noted)
    pipe.unet.register_forward_pre_hook(
        lambda _, args, kwargs: inputs.append(weakref.ref(kwargs["encoder_hidden_states"])),
        with_kwargs=True,
    )
    gc.disable()  # it may be long until it runs
    try:
        run(pipe, PROMPTS, call=model, adapters=["anime", None, None])
        assert made and [found() for found in (*made, inputs[-1])] == [None] * (len(made) + 1)
    finally:
        gc.enable()


def test_a_scaling_does_not_take_h_out_of_the_range_of_float16(widths, monkeypatch):
    pipe = PIPELINES["Flux"]().to(torch.float16)
    model = MultiLoRAPipeline(pipe, backend="torch_ref")
    # q is normalised, so a delta may be large: h is in the hundreds
    tensors = {k: v for k, v in tensors_of(pipe, ["transformer"], 1).items() if "to_q" in k}
    tensors = {k: v * (1e3 if "lora_A" in k else 1e-3) for k, v in tensors.items()}
    for name, scaling in (("small", 1), ("large", 1000)):
        alphas = {f"{key.partition('.lora_')[0]}.alpha": RANK * scaling for key in tensors}
        model.load_adapter(name, tensors | {key: torch.tensor(n) for key, n in alphas.items()})
    for name in ("small", "large"):
        images = []
        for devices in ((), ("cpu",)):
            monkeypatch.setattr(calls, "WIDENING_DEVICES", devices)
            widths.clear()
            images.append(run(pipe, PROMPTS, call=model, adapters=[name, None, name]))
        assert images[0].isfinite().all()
        torch.testing.assert_close(*images, rtol=0, atol=0.02)
        assert (None in widths) == (name == "large")


def test_batch_invariant_engines_are_left_to_add(widths, monkeypatch):
    pipe = PIPELINES["Flux"]()
    model = MultiLoRAPipeline(pipe, backend="torch_ref")
    monkeypatch.setattr(model.backend, "batch_invariant", True)
    model.load_adapter("anime", tensors_of(pipe, ["transformer"], 1))
    run(pipe, PROMPTS, call=model, adapters=["anime", None, None])
    assert not widths


def test_only_products_of_16_bits_are_widened_and_their_copies_are_about_as_large_as_y():
    assert doctest.testmod(widened).failed == 0
    assert not widened.is_cheaper(65536, 640, 5120, 64, 4)
    cheaper = 0
    sizes = each_of((1024, 4096, 65536), (320, 1280, 3072), (320, 5120, 21504), (8, 64, 512))
    for rows, inputs, outputs, columns in sizes:
        if widened.is_cheaper(rows, inputs, outputs, columns, 2):
            cheaper += 1
            assert (rows + outputs) * (inputs + columns) < 1.25 * rows * outputs
    assert cheaper > 9


@pytest.mark.parametrize("name", ["Stable Diffusion", "SDXL"])
def test_images_are_the_same_with_joined_self_attention(monkeypatch, name):
    images = []
    for make in (component.WrappedModel, _fused(component.WrappedModel)):
        monkeypatch.setattr(component, "WrappedModel", make)
        pipe = PIPELINES[name]()
        model = MultiLoRAPipeline(pipe, backend="torch_ref")
        model.load_adapter("anime", tensors_of(pipe, ["unet"], seed=1))
        some = {k: v for k, v in tensors_of(pipe, ["unet"], seed=2).items() if "to_q" in k}
        model.load_adapter("ink", some)
        for entries in (ENTRIES, ["ink"] * 3):
            images.append(run(pipe, PROMPTS, call=model, adapters=entries))
    groups = model._components["unet"].wrapped.hooked.groups
    assert groups and not any(group.apart for group in groups)
    for plain, joined in zip(images[:2], images[2:], strict=True):
        torch.testing.assert_close(joined, plain, rtol=0, atol=BOUND * float(plain.abs().max()))


def _fused(kind):
    return lambda base, backend, dtype, device, _, trial: kind(
        base, backend, dtype, device, True, trial
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.no_grad()
def test_a_feed_forward_of_sdxl_is_widened_on_a_gpu():
    engine, on = get_backend("auto", device="cuda"), {"device": "cuda", "dtype": torch.bfloat16}
    rows, slots = 8192, torch.arange(8).repeat_interleave(1024) % 4
    x, w = torch.randn(rows, 640, **on), torch.randn(10240, 640, **on) / 25
    a, b = torch.randn(4, 1, 16, 640, **on) / 25, torch.randn(4, 10240, 16, **on)
    numbers = {"device": "cuda", "dtype": torch.float32}
    ranks = torch.full((4, 1), 16, device="cuda", dtype=torch.int32)
    weights = LoRAWeights(a, b, ranks, torch.full((4, 1), 0.5, **numbers), (10240,))
    plan = engine.prepare_batch(LoRABatch(slots, 4))
    products = widened.WidenedProducts(engine, [0, 1, 2, 3], {id(weights): 16})
    y = products.run(x, weights, plan, w, None)
    expected = engine.run_linear(x, weights, plan, torch.nn.functional.linear(x, w))
    assert y is not None
    assert (y - expected).norm() < 0.01 * expected.norm()
