"""DoRA on a model: prepared adapters, joined siblings, 16-bit and quantized base weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.adapters.deltas import random_checkpoint

from lora_backends import InvalidInputError, UnsupportedInputError
from lora_backends.adapters import Checkpoint
from lora_backends.hf import MultiLoRAModel
from lora_backends.torch_ref import TorchRefBackend

ATTENTION = ("q_proj", "k_proj", "v_proj")
IDS = torch.randint(0, 40, (3, 5), generator=torch.Generator().manual_seed(1))
ROWS = ["dora", None, "plain"]


def dora(base, targets=ATTENTION, seed=3):
    """Return random LoRA with a magnitude for each module."""
    checkpoint = random_checkpoint(base, targets, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    return Checkpoint(
        Path("in memory"),
        {
            path: replace(
                delta, magnitude=1 + 0.5 * torch.randn(len(delta.lora_b), generator=generator)
            )
            for path, delta in checkpoint.modules.items()
        },
        {},
    )


@pytest.fixture
def make(make_base):
    def make(name="llama_bias", layers=3, **options):
        base = make_base(name)
        del base.model.layers[layers:]
        model = MultiLoRAModel(base, "torch_ref", max_adapters=3, max_rank=4, **options)
        model.add_adapter("plain", random_checkpoint(model.base, ATTENTION, seed=1))
        return model

    return make


def logits(model, rows=ROWS):
    return model(adapters=rows, input_ids=IDS, use_cache=False).logits


def merged(model, base, checkpoint):
    """Put DoRA's weights into `base`: W' = m (W + s B A) / ||W + s B A||."""
    for path, delta in checkpoint.modules.items():
        weight = base.get_submodule(path).weight
        sum = weight.data + delta.scaling * delta.lora_b @ delta.lora_a
        weight.data = sum * (delta.magnitude / sum.norm(dim=1))[:, None]
    return base


@pytest.mark.parametrize("fuse", [False, True])
def test_rows_are_those_of_the_merged_weights(make, make_base, fuse):
    model = make(fuse=fuse)
    checkpoint = dora(model.base)
    before = logits(model, [None, None, "plain"])
    model.add_adapter("dora", checkpoint)
    rows = logits(model)
    with torch.no_grad():
        expected = merged(model, make_base("llama_bias"), checkpoint)(input_ids=IDS).logits[0]
    torch.testing.assert_close(rows[0], expected, rtol=0, atol=2e-5)
    assert (rows[0] - before[0]).abs().max() > 1e-2
    assert torch.equal(rows[1:], before[1:]), "rows without DoRA have changed"


@pytest.mark.parametrize("fuse", [False, True])
def test_siblings_may_have_dora_in_some_modules_only(make, make_base, fuse):
    model = make(fuse=fuse)
    checkpoint = dora(model.base, ["k_proj"])
    model.add_adapter("dora", checkpoint)
    with torch.no_grad():
        expected = merged(model, make_base("llama_bias"), checkpoint)(input_ids=IDS).logits[0]
    torch.testing.assert_close(logits(model)[0], expected, rtol=0, atol=2e-5)


def test_an_unloaded_slot_serves_plain_lora_again(make):
    model = make()
    model.add_adapter("other", random_checkpoint(model.base, ATTENTION, seed=9))
    expected = logits(model, ["other", None, "plain"])
    model.unload_adapter("other")
    model.add_adapter("dora", dora(model.base))
    logits(model)
    model.unload_adapter("dora")
    model.add_adapter("other", random_checkpoint(model.base, ATTENTION, seed=9))
    assert torch.equal(logits(model, ["other", None, "plain"]), expected)


def test_the_first_dora_is_refused_where_adapters_were_prepared_without(make):
    model = make()
    step = model.prepare(["plain", None, "plain"], tokens=5)
    model.add_adapter("dora", dora(model.base))
    with pytest.raises(InvalidInputError, match="no output_scales \\(DoRA\\), when this was prep"):
        step.update(ROWS)
    assert step.adapters == ["plain", None, "plain"]
    assert torch.equal(logits(model, step), logits(model, step.adapters))
    step = model.prepare(["plain", None, "plain"], tokens=5)
    for rows in (ROWS, ["dora"] * 3, [None, "plain", "dora"]):
        step.update(rows)
        assert torch.equal(logits(model, step), logits(model, rows))


def test_prepared_adapters_follow_a_dora_slot_that_is_rewritten(make):
    model = make()
    model.add_adapter("dora", dora(model.base))
    step = model.prepare([None] * 3, tokens=5)
    model.add_adapter("dora", dora(model.base, seed=8))
    step.update(ROWS)
    assert torch.equal(logits(model, step), logits(model, ROWS))


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
def test_a_compiled_program_follows_updates_to_dora(make):
    torch.compiler.reset()
    model = make(layers=1)
    model.add_adapter("dora", dora(model.base))
    compiled = torch.compile(model.base, fullgraph=True, backend="aot_eager")
    with model.prepare([None] * 3, tokens=5) as step:
        for rows in (ROWS, [None, "dora", "dora"]):
            step.update(rows)
            with model.using(step):
                result = compiled(input_ids=IDS, use_cache=False).logits
            torch.testing.assert_close(result, logits(model, rows), rtol=0, atol=1e-5)


def quantized(weight):
    return torch.nn.Parameter(weight.to(torch.int8), requires_grad=False)


class Packed(torch.Tensor):
    """A tensor subclass, as torchao's quantized weights are."""


@pytest.mark.parametrize(
    "change", [quantized, lambda weight: torch.nn.Parameter(weight.data.as_subclass(Packed))]
)
def test_a_quantized_base_weight_refuses_dora_by_name(make, change):
    model = make()
    checkpoint = dora(model.base, ["v_proj"])
    path = next(iter(checkpoint.modules))
    module = model.base.get_submodule(path)
    module.weight = change(module.weight)
    with pytest.raises(UnsupportedInputError, match=f"DoRA .use_dora.*{path}: its base weight is"):
        model.add_adapter("dora", checkpoint)
    assert model.adapters == ["plain"]
    assert model.pool.weights(path).output_scales is None


def test_a_backend_without_output_scales_refuses_dora_at_loading(make_base, monkeypatch):
    monkeypatch.setattr(TorchRefBackend, "features", frozenset())
    model = MultiLoRAModel(make_base("llama"), TorchRefBackend(), max_rank=4)
    with pytest.raises(UnsupportedInputError, match="DoRA.*torch_ref.*lacks output_scales"):
        model.add_adapter("dora", dora(model.base))


def test_dora_on_a_16_bit_model_is_that_of_the_merged_weights_within_its_rounding(make_base):
    base = make_base("llama").bfloat16()
    checkpoint = dora(base)
    model = MultiLoRAModel(base, "torch_ref", max_rank=4)
    model.add_adapter("dora", checkpoint)
    wide = merged(model, make_base("llama").bfloat16().float(), checkpoint)
    with torch.no_grad():
        expected = wide(input_ids=IDS).logits
    scale = expected.abs().max()
    assert (logits(model, ["dora"] * 3).float() - expected).abs().max() < 0.05 * scale
