"""Weights of an adapter without a place in SGLang's pool, on stand-ins of its classes."""

from types import SimpleNamespace

import pytest
import torch

from lora_backends import UnsupportedInputError
from lora_backends.integrations.sglang.places import check_copy, check_name, check_places

RANK, MAX_RANK, WIDTH, SLOTS = 2, 4, 6, 3
OUT = {"qkv_proj": 9, "o_proj": 6, "up_proj": 5}
SLICES = {"qkv_proj": 3}
PREFIX = "base_model.model.model.layers"


class Experts:
    def slice_moe_lora_a_weights(self):
        raise AssertionError


@pytest.fixture
def pool():
    """Return a pool of two layers, of which the second one alone has up_proj and experts."""

    def stacks(shape):
        return {name: [torch.zeros(SLOTS, *shape(name))] * 2 for name in OUT}

    return SimpleNamespace(
        target_modules={*OUT, "in_proj", "down_proj", "embed_tokens"},
        max_lora_rank=MAX_RANK,
        tp_size=1,
        A_buffer=stacks(lambda name: (SLICES.get(name, 1) * MAX_RANK, WIDTH)),
        B_buffer=stacks(lambda name: (OUT[name], MAX_RANK)),
    )


MODULES = [
    {"model.layers.0.self_attn.qkv_proj": None, "model.layers.0.self_attn.o_proj": None},
    {
        "model.layers.1.self_attn.qkv_proj": None,
        "model.layers.1.mlp.up_proj": None,
        "model.layers.1.mlp.experts": Experts(),
    },
]


def adapter(*changes, without=(), ends=()):
    """Return an adapter that has its places, with some weights changed, added or taken away."""
    layers = [{}, {}]
    for path, slices, out in (
        ("0.self_attn.qkv_proj", 3, 9),
        ("0.self_attn.o_proj", 1, 6),
        ("1.mlp.up_proj", 1, 5),
        ("1.mlp.experts.3.down_proj", 1, 5),
    ):
        weights = layers[int(path[0])]
        weights[f"{PREFIX}.{path}.lora_A.weight"] = torch.zeros(slices * RANK, WIDTH)
        weights[f"{PREFIX}.{path}.lora_B.weight"] = torch.zeros(out, RANK)
    for layer, name, shape in changes:
        layers[layer][f"{PREFIX}.{layer}.{name}"] = torch.zeros(shape)
    for layer, name in without:
        del layers[layer][f"{PREFIX}.{layer}.{name}"]
    return SimpleNamespace(
        layers=[SimpleNamespace(weights=weights) for weights in layers],
        embedding_layers=dict.fromkeys(ends),
        config=SimpleNamespace(r=RANK),
    )


def test_weights_with_places_are_taken(pool):
    check_places(pool, MODULES, adapter(ends=["model.embed_tokens.lora_embedding_A"]))


@pytest.mark.parametrize(
    ("changes", "without", "named"),
    [
        # SGLang would take it for in_proj, whose name stands in its own
        ([(0, "linear_attn.in_proj_q.lora_A.weight", (2, 6))], (), "in_proj_q.*once fused"),
        ([(0, "self_attn.wq_du.lora_A.weight", (2, 6))], (), "wq_du.*once fused"),
        ([(0, "self_attn.k_proj.lora_A.weight", (2, 6))], (), "k_proj.*once fused"),
        ([(0, "mlp.up_proj.lora_A.weight", (2, 6))], (), "up_proj.*no LoRA there"),
        ([(0, "mlp.experts.1.down_proj.lora_A.weight", (2, 6))], (), "no LoRA there"),
        ([(1, "mlp.experts.down_proj.lora_A.weight", (2, 6))], (), "neither the number"),
        ([(0, "self_attn.o_proj.lora_magnitude_vector", (6,))], (), "neither A nor B"),
        ([(0, "cross.o_proj.lora_A.weight", (2, 6))], (), "another weight is A of the same"),
        ([(0, "self_attn.o_proj.lora_A.weight", (3, 6))], (), r"\(3, 6\), not \(2, 6\)"),
        ([(0, "self_attn.qkv_proj.lora_A.weight", (2, 6))], (), r"\(2, 6\), not \(6, 6\)"),
        ([(0, "self_attn.o_proj.lora_B.weight", (7, 2))], (), r"\(7, 2\), not \(6, 2\)"),
        ((), [(0, "self_attn.o_proj.lora_B.weight")], "it has A alone"),
    ],
)
def test_weights_without_a_place_of_their_own_are_refused(pool, changes, without, named):
    with pytest.raises(UnsupportedInputError, match=named):
        check_places(pool, MODULES, adapter(*changes, without=without))


def test_a_head_that_the_pool_lacks_is_refused(pool):
    with pytest.raises(UnsupportedInputError, match="lm_head.*embed_tokens"):
        check_places(pool, MODULES, adapter(ends=["base_model.model.lm_head.lora_A.weight"]))


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("base_model.model.score.lora_A.weight", "leaves it out"),
        ("base_model.model.visual.blocks.0.attn.qkv.lora_A.weight", "leaves it out"),
        ("base_model.model.transformer.word_embeddings.lora_embedding_A", "leaves it out"),
        (
            "base_model.model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_A.weight",
            "language model's layer",
        ),
    ],
)
def test_weights_outside_of_the_language_model_are_refused(name, named):
    with pytest.raises(UnsupportedInputError, match=named):
        check_name(name)


@pytest.mark.parametrize(
    "name",
    [
        f"{PREFIX}.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.lm_head.lora_A.weight",
    ],
)
def test_weights_of_the_language_model_are_taken(name):
    check_name(name)


@pytest.mark.parametrize("end", ["embed_tokens", "lm_head"])
def test_a_whole_embedding_or_head_has_to_be_the_base_models(end):
    model = torch.nn.Module()
    model.embed_tokens = torch.nn.Embedding(7, 4)  # of which the last two pad the vocabulary
    model.lm_head = torch.nn.Linear(4, 7, bias=False)
    name, own = f"base_model.model.{end}.weight", getattr(model, end).weight.detach()[:5].clone()
    check_copy(name, own, model)
    check_copy(f"base_model.model.{end}.lora_A.weight", torch.zeros(2, 4), None)
    for weight, beside in ((own + 1, model), (own[:, :3], model), (own, None)):
        with pytest.raises(UnsupportedInputError, match=end):
            check_copy(name, weight, beside)


@pytest.mark.parametrize("name", ["input_embeddings", "output_embeddings"])
def test_added_tokens_are_refused_when_the_adapter_loads(name):
    with pytest.raises(UnsupportedInputError, match=name):
        check_copy(name, torch.zeros(1, 4), torch.nn.Module())
