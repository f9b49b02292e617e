"""The plan's bytes equal those of the real model, cache and pool."""

import json

import pytest
import torch

from lora_backends import InvalidInputError, UnsupportedInputError
from lora_backends.hf import MultiLoRAModel
from lora_backends.planning.shapes import read_shapes

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture
def config_of(tmp_path):
    """Return a function that saves the configuration of a model and returns its folder."""

    def save(model):
        model.config.save_pretrained(tmp_path / "config")
        return tmp_path / "config"

    return save


def mixtral():
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config).eval()


def within(planned, measured, part=0.01):
    return abs(planned - measured) <= part * measured


@pytest.mark.parametrize("adapter_dtype", [None, "int8"])
@pytest.mark.parametrize(
    ("base", "targets"),
    [
        ("llama", "all-linear"),
        ("gpt2", ["c_attn"]),
        ("llama", ["q_proj", "embed_tokens", "lm_head"]),
    ],
)
def test_bytes_of_a_dense_model(make_base, save_adapter, config_of, base, targets, adapter_dtype):
    model = make_base(base)
    folder = save_adapter(base, r=4, target_modules=targets)
    planned = read_shapes(
        config_of(model), 4, max_rank=8, target_modules=targets, dtype="float32",
        adapter_dtype=adapter_dtype,
    )  # fmt: skip
    parameters = {id(p): p for p in model.parameters()}.values()
    assert planned.base_bytes == sum(p.numel() * p.element_size() for p in parameters)
    adapted = MultiLoRAModel(model, "torch_ref", 3, 8, adapter_dtype=adapter_dtype)
    adapted.load_adapter("a", folder)
    report = adapted.pool.report("a")
    assert within(3 * (planned.slot_bytes - 8 * planned.modules), report.stack_bytes)
    assert within(planned.adapter_bytes, report.nbytes)


def test_bytes_of_experts(config_of):
    import peft

    model = mixtral()
    planned = read_shapes(
        config_of(model), 4, target_modules=["q_proj"], target_parameters=EXPERTS, dtype="float32"
    )
    assert any("parameters of experts" in note for note in planned.notes)
    adapted = MultiLoRAModel(model, "torch_ref", 2, 4)
    options = {"target_modules": ["q_proj"], "target_parameters": EXPERTS}
    adapted.add_adapter("a", peft.get_peft_model(mixtral(), peft.LoraConfig(r=4, **options)))
    report = adapted.pool.report("a")
    assert within(2 * (planned.slot_bytes - 8 * 6), report.stack_bytes)


def test_experts_of_all_linear_have_stacks_of_their_widest_rank(config_of):
    import peft

    planned = read_shapes(config_of(mixtral()), 4, dtype="float32")
    adapted = MultiLoRAModel(mixtral(), "torch_ref", 2, 4, max_expert_rank=8)
    config = peft.LoraConfig(r=4, target_modules="all-linear")
    adapted.add_adapter("a", peft.get_peft_model(mixtral(), config))
    report = adapted.pool.report("a")
    # q, k, v, o, a router and two parameters of experts in each of two layers
    assert within(2 * (planned.slot_bytes - 8 * 14), report.stack_bytes)
    assert within(planned.adapter_bytes, report.nbytes)
    assert any("max_expert_rank" in note for note in planned.notes)
    assert (16, (4,)) in {(layer.in_features, layer.output_slices) for layer in planned.layers}


def gemma():
    import transformers

    config = transformers.Gemma2Config(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, sliding_window=16,
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config).eval()


@pytest.mark.parametrize("make", [mixtral, gemma])
def test_the_cache_of_experts_and_of_small_windows_is_counted(make, config_of):
    model = make()
    planned = read_shapes(config_of(model), 4, dtype="float32")
    cache = model(input_ids=torch.ones(1, 10, dtype=torch.long), use_cache=True).past_key_values
    held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    assert planned.cache_bytes_per_token == held / 10


def test_modules_with_one_input_are_one_layer_and_the_cache_is_counted(make_base, config_of):
    model = make_base("llama")
    planned = read_shapes(config_of(model), 4, dtype="float32")
    layers = {(layer.in_features, layer.output_slices): layer.count for layer in planned.layers}
    assert layers == {
        (16, (16, 8, 8)): 3, (16, (16,)): 3, (16, (24, 24)): 3, (24, (16,)): 3,
    }  # fmt: skip
    cache = model(input_ids=torch.ones(1, 10, dtype=torch.long), use_cache=True).past_key_values
    held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    assert planned.cache_bytes_per_token == held / 10


def test_the_adapter_takes_no_memory(make_base, config_of, monkeypatch):
    places, fill = set(), torch.nn.init.kaiming_uniform_

    def noted(tensor, *args, **options):
        places.add(tensor.device.type)
        return fill(tensor, *args, **options)

    config = config_of(make_base("llama"))
    monkeypatch.setattr(torch.nn.init, "kaiming_uniform_", noted)
    read_shapes(config, 4)
    assert places == {"meta"}


def test_code_that_a_model_brings_is_refused_without_a_question(tmp_path, monkeypatch):
    own = {"auto_map": {"AutoModelForCausalLM": "some/where--code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", **own}))
    asked = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "n")
    with pytest.raises(UnsupportedInputError, match="no causal language model"):
        read_shapes(tmp_path)
    assert not asked


def test_notes_tell_of_quantised_weights_and_sliding_windows(make_base, tmp_path):
    config = make_base("llama").config.to_dict()
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert any("quantization_config" in note for note in read_shapes(tmp_path).notes)
    sizes = {key: config[key] for key in ("vocab_size", "hidden_size", "intermediate_size")}
    text = {**sizes, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    vision = {**sizes, "num_hidden_layers": 1, "num_attention_heads": 2}
    del vision["vocab_size"]
    nested = {
        "model_type": "gemma3", "text_config": {**text, "head_dim": 8, "sliding_window": 512},
        "vision_config": vision,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(nested))
    found = read_shapes(tmp_path)
    assert found.cache_bytes_per_token and any("sliding window" in note for note in found.notes)


@pytest.mark.parametrize(
    ("content", "options", "error", "match"),
    [
        ("{", {}, InvalidInputError, "not valid JSON"),
        ("{}", {}, InvalidInputError, "no model_type"),
        ('{"model_type": "lama"}', {}, UnsupportedInputError, "lama"),
        ('{"model_type": "vit"}', {}, UnsupportedInputError, "causal"),
        ("[]", {}, InvalidInputError, "no model_type"),
        (None, {"rank": 0}, InvalidInputError, "rank is 0"),
        (None, {"rank": "4"}, InvalidInputError, "rank is '4'"),
        (None, {"rank": 10**12}, InvalidInputError, "rank is 1000000000000"),
        (None, {"dtype": torch.float16}, InvalidInputError, "dtype is torch.float16"),
        (None, {"rank": 8, "max_rank": 4}, InvalidInputError, "max_rank 4"),
        (None, {"dtype": "int8"}, InvalidInputError, "bfloat16"),
        (None, {"adapter_dtype": "int4"}, InvalidInputError, "int8"),
        (None, {"target_modules": ["no_proj"]}, InvalidInputError, "no_proj"),
        (None, {"target_modules": ["q_proj", "no_proj"]}, InvalidInputError, "no_proj"),
        (None, {"target_modules": None}, InvalidInputError, "target_modules is None"),
        (None, {"target_parameters": "experts"}, InvalidInputError, "target_parameters is"),
        (None, {"target_parameters": ["experts.up"]}, InvalidInputError, "experts.up"),
    ],
)
def test_what_is_refused(make_base, tmp_path, content, options, error, match):
    file = tmp_path / "config.json"
    content = json.dumps(make_base("llama").config.to_dict()) if content is None else content
    file.write_text(content)
    with pytest.raises(error, match=match):
        read_shapes(file, **options)
