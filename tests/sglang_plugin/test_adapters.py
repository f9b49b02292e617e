"""Adapters of SGLang's own class, without an engine, whose parts it would not fuse."""

from types import SimpleNamespace

import pytest
import torch

from lora_backends import UnsupportedInputError
from lora_backends.integrations.sglang import wrapping
from lora_backends.integrations.sglang.backend import BackendForSGLang

RANK, PREFIX = 2, "base_model.model.model.layers.0"


@pytest.fixture
def load(monkeypatch):
    """Return a function that normalizes an adapter with A and B of some modules of one layer."""
    from sglang.srt.lora.lora import LoRAAdapter

    monkeypatch.setenv("LORA_BACKENDS_SGLANG", "torch_ref")
    wrapping.wrap()
    backend = BackendForSGLang(2, torch.device("cpu"))

    def made(names, model_has=None):
        adapter = LoRAAdapter.__new__(LoRAAdapter)
        torch.nn.Module.__init__(adapter)
        weights = {}
        for name in names:
            weights[f"{PREFIX}.{name}.lora_A.weight"] = torch.zeros(RANK, 6)
            weights[f"{PREFIX}.{name}.lora_B.weight"] = torch.zeros(4, RANK)
        adapter.lora_backend, adapter.layers = backend, [SimpleNamespace(weights=weights)]
        adapter.config = SimpleNamespace(r=RANK, hf_config={})
        adapter.base_hf_config = SimpleNamespace(architectures=[])
        object.__setattr__(adapter, "_moe_is_gated_by_layer", {})
        if model_has is not None:
            modules = [(name, None) for name in model_has]
            model = SimpleNamespace(named_modules=lambda: modules)
            object.__setattr__(adapter, "base_model", model)
        adapter._normalize_weights()
        return weights

    return made


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (["self_attn.q_proj"], "q_proj"),
        (["self_attn.k_proj", "self_attn.v_proj"], "k_proj, v_proj"),
        (["mlp.up_proj"], "up_proj"),
        (["linear_attn.in_proj_q", "linear_attn.in_proj_k"], "in_proj_k, in_proj_q"),
        (["linear_attn.in_proj_z"], "in_proj_z"),
        (["attn.wq_du"], "wq_du"),
        (["self_attn.q_a_proj"], "q_a_proj"),
        (["self_attn.kv_a_proj_with_mqa"], "kv_a_proj_with_mqa"),
        (["mixer.x_proj"], "x_proj"),
    ],
)
def test_parts_of_what_sglang_fuses_are_refused_by_name(load, names, named):
    with pytest.raises(UnsupportedInputError, match=f"given: {named}\n"):
        load(names)


def test_whole_sets_are_fused(load):
    weights = load(["self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj"])
    assert {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in weights} == {
        "qkv_proj",
        "gate_up_proj",
    }
    assert load(["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"])


def test_modules_of_the_layer_alone_tell_whether_a_part_stands_by_itself(load):
    assert load(["mlp.up_proj"], ["model.layers.0.mlp.up_proj"])
    others = ["vision_tower.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]
    with pytest.raises(UnsupportedInputError, match="given: up_proj"):
        load(["mlp.up_proj"], [*others, "model.layers.0.mlp.gate_up_proj"])


def test_a_weight_of_a_tower_is_refused_when_it_is_read(load):
    from sglang.srt.lora.lora import LoRAAdapter

    adapter = LoRAAdapter.__new__(LoRAAdapter)
    torch.nn.Module.__init__(adapter)
    adapter.lora_backend = BackendForSGLang(2, torch.device("cpu"))
    with pytest.raises(UnsupportedInputError, match="vision_tower"):
        adapter._process_weight("vision_tower.layers.0.q_proj.lora_A.weight", torch.zeros(1))
