"""Adapters of 8 bits on a model: its rows are those of the stored values, in float32."""

from dataclasses import replace

import pytest
import torch
from helpers.adapters.deltas import random_checkpoint
from helpers.sweeps.mixtures import ATTENTION as MOE_ATTENTION
from helpers.sweeps.mixtures import KNOWN, build, in_peft

from lora_backends import InvalidInputError, LoRAConfig, UnsupportedInputError
from lora_backends.adapters import AdapterPool, read_checkpoint
from lora_backends.hf import MultiLoRAModel
from lora_backends.torch_ref import TorchRefBackend

LAYERS = ("q_proj", "k_proj", "v_proj", "down_proj")
IDS = torch.randint(0, 40, (3, 5), generator=torch.Generator().manual_seed(1))
ROWS = ["a", None, "b"]


def as_int8(values):
    """Return the values that int8 with a scale per row stands for, written out plainly."""
    scales = values.abs().amax(-1, keepdim=True) / 127
    scales[scales == 0] = 1
    return (values / scales).round() * scales


def stored(checkpoint):
    """Return the checkpoint whose values are those that 8-bit slots hold."""

    def of(deltas):
        return {
            path: replace(delta, lora_a=as_int8(delta.lora_a), lora_b=as_int8(delta.lora_b))
            for path, delta in deltas.items()
        }

    return replace(checkpoint, modules=of(checkpoint.modules), experts=of(checkpoint.experts))


def logits(model, rows=ROWS):
    return model(adapters=rows, input_ids=IDS, use_cache=False).logits


def wrap(base, checkpoints, **options):
    model = MultiLoRAModel(base, "torch_ref", max_adapters=3, max_rank=6, **options)
    for name, checkpoint in checkpoints.items():
        model.add_adapter(name, checkpoint)
    return model


@pytest.mark.parametrize("fuse", [False, True])
def test_rows_are_those_of_the_stored_values(make_base, fuse):
    base = make_base("llama_bias")
    given = {name: random_checkpoint(base, LAYERS, seed=n) for n, name in enumerate("ab")}
    model = wrap(make_base("llama_bias"), given, adapter_dtype="int8", fuse=fuse)
    exact = wrap(make_base("llama_bias"), {name: stored(c) for name, c in given.items()})
    torch.testing.assert_close(logits(model), logits(exact), rtol=1e-5, atol=1e-5)
    wide = wrap(make_base("llama_bias"), given)
    assert (logits(model)[0] - logits(wide)[0]).abs().max() > 1e-4  # it is quantised
    torch.testing.assert_close(logits(model)[1], logits(wide)[1], rtol=1e-5, atol=1e-5)
    model.unload_adapter("a")
    model.add_adapter("c", given["b"])  # into the slot that was a's
    torch.testing.assert_close(logits(model, ["c", None, "b"])[2], logits(exact)[2])
    expected = logits(exact, ["b", None, "b"])
    torch.testing.assert_close(logits(model, ["c", None, "b"]), expected, rtol=1e-5, atol=1e-5)


def test_embeddings_and_dora_of_8_bits_keep_close_to_the_file(make_base, save_adapter):
    options = {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}
    folders = {
        "a": save_adapter(name="a", std=0.3, **options),
        "b": save_adapter(name="b", std=0.3, seed=4, use_dora=True, r=4, target_modules=["q_proj"]),
    }
    models = []
    for dtype in (None, "int8"):
        model = wrap(make_base("llama"), {}, adapter_dtype=dtype)
        for name, folder in folders.items():
            model.load_adapter(name, folder)
        models.append(model)
    plain = logits(models[0], [None] * 3)
    for row in (0, 2):
        effect = (logits(models[0])[row] - plain[row]).norm()
        error = (logits(models[1])[row] - logits(models[0])[row]).norm()
        assert 0 < error < 0.05 * effect


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_experts_and_routers_of_8_bits_are_those_of_the_stored_values(name, tmp_path):
    if name not in KNOWN:
        pytest.skip(f"this Transformers has no {name}")
    router = "router" if name == "gpt_oss" else "gate"
    sites = [f"{router}.weight", "experts.gate_up_proj", "experts.down_proj"]
    attention = [MOE_ATTENTION.get(name, "q_proj")]
    in_peft(build(name), tmp_path, 5, r=2, target_modules=attention, target_parameters=sites)
    model = MultiLoRAModel(build(name), "torch_ref", max_rank=4, adapter_dtype="int8")
    exact = MultiLoRAModel(build(name), "torch_ref", max_rank=4)
    model.load_adapter("a", tmp_path)
    pool = model.pool
    checkpoint = read_checkpoint(tmp_path, pool.modules, 4, None, pool.experts, 4)
    exact.add_adapter("a", stored(checkpoint))
    rows = ["a", None, "a"]
    torch.testing.assert_close(logits(model, rows), logits(exact, rows), rtol=1e-4, atol=1e-4)
    report = model.adapter_report("a")
    assert set(report.errors) == {*checkpoint.modules, *checkpoint.experts}
    for path, delta in checkpoint.experts.items():
        assert 0 < report.errors[path] < 0.02
        assert pool.experts[path].num_experts == len(delta.ranks)


def test_a_report_has_the_bytes_and_the_error_of_every_module(make_base):
    base = make_base("llama")
    given = random_checkpoint(base, LAYERS)
    model = wrap(base, {"a": given}, adapter_dtype="int8")
    report = model.adapter_report("a")
    assert (report.name, report.slot, report.dtype) == ("a", 0, torch.int8)
    for path, delta in given.modules.items():
        exact = delta.lora_b @ delta.lora_a
        found = as_int8(delta.lora_b) @ as_int8(delta.lora_a)
        expected = float((found - exact).norm() / exact.norm())
        assert report.errors[path] == pytest.approx(expected, rel=1e-3)
    assert report.error == max(report.errors.values())
    deltas = given.modules.values()
    elements = sum(delta.lora_a.numel() + delta.lora_b.numel() for delta in deltas)
    scales = sum(delta.rank + len(delta.lora_b) for delta in deltas)
    assert report.nbytes == elements + 4 * scales
    wide = wrap(make_base("llama"), {"a": given}).adapter_report("a")
    assert wide.errors == {} and wide.error == 0 and wide.dtype == torch.float32
    assert wide.nbytes == 4 * elements
    assert wide.stack_bytes > 2 * report.stack_bytes
    model.unload_adapter("a")
    with pytest.raises(InvalidInputError, match="no adapter named 'a'"):
        model.adapter_report("a")


def test_what_cannot_be_8_bits_is_refused_by_name(make_base):
    with pytest.raises(InvalidInputError, match="adapter_dtype is 'int4'"):
        wrap(make_base("llama"), {}, adapter_dtype="int4")
    with pytest.raises(InvalidInputError, match="for a model of torch.float64"):
        wrap(make_base("llama").double(), {}, adapter_dtype="int8")
    with pytest.raises(InvalidInputError, match="adapter_dtype is torch.float16"):
        AdapterPool({}, adapter_dtype=torch.float16)

    class Plain(TorchRefBackend):
        features = frozenset()

    with pytest.raises(UnsupportedInputError, match="it lacks eight_bit"):
        MultiLoRAModel(make_base("llama"), Plain("cpu"), adapter_dtype="int8")


def test_a_configuration_names_the_adapter_dtype(make_base, save_adapter):
    folder = save_adapter(r=4, target_modules=["q_proj"])
    config = LoRAConfig(backend="torch_ref", adapters={"a": folder}, adapter_dtype="float8_e4m3fn")
    model = MultiLoRAModel.from_config(make_base("llama"), config)
    report = model.adapter_report("a")
    assert report.dtype == torch.float8_e4m3fn and 0 < report.error < 0.06
    with pytest.raises(InvalidInputError, match="adapter_dtype"):
        LoRAConfig(adapter_dtype="int4")
