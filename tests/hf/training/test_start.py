"""A new adapter has the values that PEFT draws; what cannot be trained is refused by its name."""

import copy

import peft
import pytest
import torch
from helpers.adapters.training import (
    PATTERNS,
    PLAIN,
    WIDE,
    batch,
    by_peft,
    parameters_of,
    tiny,
    wrapped,
)

from lora_backends import InvalidInputError, LoRABackendError, UnsupportedInputError

STARTS = {
    "plain": ("llama", PLAIN),
    "all-linear": ("llama", WIDE),
    "patterns": ("llama", PATTERNS),
    "a regular expression": ("llama", {"r": 3, "target_modules": r".*\.1\..*(q|up)_proj"}),
    "some layers": ("llama", {"r": 2, "target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "excluded": ("llama", {**WIDE, "exclude_modules": ["o_proj"]}),
    "gaussian": ("llama", {**PLAIN, "init_lora_weights": "gaussian"}),
    "orthogonal": ("llama", {**PLAIN, "init_lora_weights": "orthogonal"}),
    "random": ("llama", {**PLAIN, "init_lora_weights": False}),
    "a task": ("llama", {**PLAIN, "task_type": "CAUSAL_LM"}),
    "embedding and head": ("llama", {"r": 3, "target_modules": ["embed_tokens", "lm_head"]}),
    "tied": ("qwen", {"r": 3, "target_modules": "all-linear"}),
    "Conv1D": ("gpt2", {"r": 3, "target_modules": ["c_attn", "wte"]}),
}


@pytest.mark.parametrize("name", STARTS)
def test_the_same_seed_gives_the_values_of_peft(name):
    kind, config = STARTS[name]
    expected = by_peft(tiny(kind), config, seed=5)
    after = torch.rand(1)
    given = peft.LoraConfig(**config)
    before = copy.deepcopy(given)
    for fuse in (False, True):
        model = wrapped(tiny(kind), fuse=fuse)
        torch.manual_seed(5)
        loaded = model.new_adapter("a", given)
        assert torch.equal(torch.rand(1), after)  # PEFT's draws, and no more
        found, theirs = model.adapter_parameters("a"), parameters_of(expected)
        assert [*found] == [*peft.get_peft_model_state_dict(expected, save_embedding_layers=False)]
        assert all(torch.equal(found[key], theirs[key]) for key in theirs)
        assert all(p.requires_grad and type(p) is torch.nn.Parameter for p in found.values())
        assert model.adapters == ["a"] and loaded.name == "a"
    assert given == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_are_the_values_of_peft_and_parameters_their_roundings(dtype):
    theirs = parameters_of(by_peft(tiny(dtype=dtype), WIDE, seed=2))
    for wanted in (torch.float32, None):
        model = wrapped(tiny(dtype=dtype))
        torch.manual_seed(2)
        model.new_adapter("a", peft.LoraConfig(**WIDE), dtype=wanted)
        for key, parameter in model.adapter_parameters("a").items():
            assert torch.equal(parameter, theirs[key].to(wanted or dtype))


def test_the_base_is_frozen_until_the_model_is_detached():
    base = tiny()
    base.lm_head.weight.requires_grad_(False)
    flags = {name: p.requires_grad for name, p in base.named_parameters()}
    config = copy.deepcopy(base.config)
    model = wrapped(base, fuse=True)
    with pytest.raises(LoRABackendError):
        model.new_adapter("a", peft.LoraConfig(target_modules=["nothing"]))
    assert {name: p.requires_grad for name, p in base.named_parameters()} == flags
    model.new_adapter("a", peft.LoraConfig(**PLAIN))
    assert not any(parameter.requires_grad for parameter in base.parameters())
    a = model.adapter_parameters("a")
    values = {key: p.detach().clone() for key, p in a.items()}
    model.detach()
    assert {name: p.requires_grad for name, p in base.named_parameters()} == flags
    assert base.config.to_dict() == config.to_dict()
    assert not any(isinstance(m, peft.tuners.lora.LoraLayer) for m in base.modules())
    assert all(torch.equal(a[key], value) for key, value in values.items())
    ids, _ = batch(1)
    assert torch.equal(base(input_ids=ids).logits, tiny()(input_ids=ids).logits)


REFUSED = {
    "use_dora": {"use_dora": True},
    "lora_bias": {"lora_bias": True},
    "bias = 'all'": {"bias": "all"},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "trainable_token_indices": {"trainable_token_indices": [1, 2]},
    "alora_invocation_tokens": {"alora_invocation_tokens": [3], "task_type": "CAUSAL_LM"},
    "layer_replication": {"layer_replication": [(0, 2), (0, 2)]},
    "ensure_weight_tying": {"ensure_weight_tying": True},
    "init_lora_weights = 'pissa'": {"init_lora_weights": "pissa"},
    "init_lora_weights = 'olora'": {"init_lora_weights": "olora"},
    "init_lora_weights = 'eva'": {"init_lora_weights": "eva"},
    "init_lora_weights = 'pissa_niter_4'": {"init_lora_weights": "pissa_niter_4"},
    "use_qalora": {"use_qalora": True},
    "velora_config": {"velora_config": {"num_groups": 4}},
    "target_parameters": {"target_parameters": ["lm_head.weight"]},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_features_that_are_not_trained_are_refused_by_name(name):
    base = tiny()
    before = copy.deepcopy(base.state_dict())
    model = wrapped(base)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], **REFUSED[name])
    state = torch.get_rng_state()
    with pytest.raises(UnsupportedInputError, match=name):
        model.new_adapter("a", config)
    assert torch.equal(torch.get_rng_state(), state) and model.adapters == []
    after = base.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert all(p.requires_grad for p in base.parameters())


def test_what_cannot_be_an_adapter_is_refused():
    model = wrapped(tiny(), max_adapters=1, max_rank=4)
    with pytest.raises(InvalidInputError, match="allowed: a peft.LoraConfig"):
        model.new_adapter("a", {"r": 8})
    with pytest.raises(UnsupportedInputError, match="another method"):
        model.new_adapter("a", peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10))
    with pytest.raises(InvalidInputError, match="max_rank"):
        model.new_adapter("a", peft.LoraConfig(r=5, target_modules=["q_proj"]))
    with pytest.raises(InvalidInputError, match="PEFT makes no adapter.*\n.*nothing"):
        model.new_adapter("a", peft.LoraConfig(r=2, target_modules=["nothing"]))
    with pytest.raises(InvalidInputError, match=r"dtype torch.float16 over.*\n.*torch.float32"):
        model.new_adapter("a", peft.LoraConfig(r=2, **_Q), dtype=torch.float16)
    model.new_adapter("a", peft.LoraConfig(r=2, **_Q), dtype=torch.float32)
    with pytest.raises(InvalidInputError, match="loaded already"):
        model.new_adapter("a", peft.LoraConfig(r=2, **_Q))
    with pytest.raises(InvalidInputError, match="no slot for adapter 'b'[\\s\\S]*trained: a"):
        model.new_adapter("b", peft.LoraConfig(r=2, **_Q))
    with pytest.raises(InvalidInputError, match="is not loaded"):
        model.adapter_parameters("b")


_Q = {"target_modules": ["q_proj"]}


def test_classification_heads_are_refused(make_base):
    model = wrapped(tiny())
    config = peft.LoraConfig(**PLAIN, task_type="SEQ_CLS")
    with pytest.raises(UnsupportedInputError, match="modules_to_save"):
        model.new_adapter("a", config)
    assert model.adapters == []


def test_8_bit_adapters_and_stores_are_refused():
    model = wrapped(tiny(), adapter_dtype="int8")
    with pytest.raises(UnsupportedInputError, match="adapter_dtype"):
        model.new_adapter("a", peft.LoraConfig(**PLAIN))
    model = wrapped(tiny())
    model.keep_adapters()
    with pytest.raises(UnsupportedInputError, match="keep_adapters"):
        model.new_adapter("a", peft.LoraConfig(**PLAIN))
