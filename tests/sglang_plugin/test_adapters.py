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


@pytest.fixture
def reading(monkeypatch):
    """Return an adapter of SGLang's class that targets the embedding alone."""
    from sglang.srt.lora.lora import LoRAAdapter

    monkeypatch.setenv("LORA_BACKENDS_SGLANG", "torch_ref")
    wrapping.wrap()
    adapter = LoRAAdapter.__new__(LoRAAdapter)
    torch.nn.Module.__init__(adapter)
    adapter.lora_backend = BackendForSGLang(2, torch.device("cpu"))
    adapter.config = SimpleNamespace(target_modules=["embed_tokens"])
    adapter.embedding_layers = {}
    return adapter


def test_lora_of_a_head_that_peft_ties_to_the_embedding_is_refused(reading):
    reading._process_weight("base_model.model.embed_tokens.lora_embedding_A", torch.zeros(2, 6))
    with pytest.raises(UnsupportedInputError, match="lm_head.*target_modules"):
        reading._process_weight("base_model.model.lm_head.lora_A.weight", torch.zeros(2, 6))
    from lora_backends.integrations.sglang.adapters import check_features

    values = {"peft_type": "LORA", "target_modules": ["embed_tokens"], "ensure_weight_tying": True}
    with pytest.raises(UnsupportedInputError, match="given: ensure_weight_tying"):
        check_features(values, "tied")
    check_features(values | {"target_modules": ["q_proj"]}, "no ends")


REFUSED = {
    "use_dora": True,
    "bias": "all",
    "lora_bias": True,
    "modules_to_save": ["lm_head"],
    "rank_pattern": {"q_proj": 3},
    "alpha_pattern": {"q_proj": 3},
    "target_parameters": ["mlp.experts.down_proj"],
    "init_lora_weights": "pissa",
    "alora_invocation_tokens": [1, 2],
    "layer_replication": [[0, 4], [2, 5]],
    "trainable_token_indices": [1],
    "arrow_config": {},
    "peft_type": "LOHA",
    "a_new_field": 1,
}


@pytest.mark.parametrize(
    "values",
    [*({key: value} for key, value in REFUSED.items())]
    + [{"init_lora_weights": name} for name in ("olora", "lora_ga", "loftq", "corda")],
    ids=str,
)
def test_features_that_sglang_ignores_are_refused_by_name(values):
    from lora_backends.integrations.sglang.adapters import check_features

    plain = {"peft_type": "LORA", "target_modules": ["q_proj", "v_proj"], "r": 2, "lora_alpha": 4}
    check_features(plain, "plain")
    with pytest.raises(UnsupportedInputError, match=next(iter(values))):
        check_features(plain | values, "refused")


def test_a_weight_of_a_tower_is_refused_when_it_is_read(reading):
    with pytest.raises(UnsupportedInputError, match="vision_tower"):
        reading._process_weight("vision_tower.layers.0.q_proj.lora_A.weight", torch.zeros(1))
