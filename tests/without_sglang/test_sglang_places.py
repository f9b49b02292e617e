"""Weights of an adapter without a place in SGLang's pool, on stand-ins of its classes."""

from types import SimpleNamespace

import pytest
import torch

from lora_backends import UnsupportedInputError
from lora_backends.integrations.sglang.places import (
    Places,
    check_copy,
    check_name,
    check_taken,
)

RANK, MAX_RANK, WIDTH, SLOTS, VOCAB = 2, 4, 6, 3, 11
OUT = {"qkv_proj": 9, "o_proj": 6, "up_proj": 5}
SLICES = {"qkv_proj": 3}
PREFIX = "base_model.model.model.layers"


EXPERTS, INNER = 4, 3


class Experts:
    tp_size = 1

    def slice_moe_lora_a_weights(self):
        raise AssertionError


@pytest.fixture
def pool():
    """Return a pool of two layers, of which the second one alone has up_proj and experts."""

    def stacks(shape, **experts):
        both = {name: shape(name) for name in OUT} | experts
        return {name: [torch.zeros(SLOTS, *shape)] * 2 for name, shape in both.items()}

    def end(*shape):
        return torch.zeros(SLOTS, *shape)

    return SimpleNamespace(
        target_modules={*OUT, "in_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head"},
        max_lora_rank=MAX_RANK,
        tp_size=1,
        base_hf_config=SimpleNamespace(vocab_size=VOCAB),
        A_buffer=stacks(
            lambda name: (SLICES.get(name, 1) * MAX_RANK, WIDTH),
            gate_up_proj_moe=(EXPERTS, 2 * MAX_RANK, WIDTH),
            down_proj_moe=(EXPERTS, MAX_RANK, INNER),
        ),
        B_buffer=stacks(
            lambda name: (OUT[name], MAX_RANK),
            gate_up_proj_moe=(EXPERTS, 2 * INNER, MAX_RANK),
            down_proj_moe=(EXPERTS, WIDTH, MAX_RANK),
        ),
        embedding_A_buffer={"embed_tokens": end(MAX_RANK, VOCAB)},
        embedding_B_buffer={"embed_tokens": end(WIDTH, MAX_RANK)},
        lm_head_A_buffer={"lm_head": end(MAX_RANK, WIDTH)},
        lm_head_B_buffer={"lm_head": end(VOCAB, MAX_RANK)},
    )


MODULES = [
    {"model.layers.0.self_attn.qkv_proj": None, "model.layers.0.self_attn.o_proj": None},
    {
        "model.layers.1.self_attn.qkv_proj": None,
        "model.layers.1.mlp.up_proj": None,
        "model.layers.1.mlp.experts": Experts(),
    },
]
ENDS = {"embed_tokens": "a layer", "lm_head": "a layer"}
OF_ENDS = {
    "model.embed_tokens.lora_embedding_A": (RANK, VOCAB),
    "model.embed_tokens.lora_embedding_B": (WIDTH, RANK),
    "lm_head.lora_A.weight": (RANK, WIDTH),
    "lm_head.lora_B.weight": (VOCAB, RANK),
}


def check_places(pool, modules, adapter, ends=ENDS):
    Places(pool, modules, ends).check(adapter)


def adapter(*changes, without=(), ends=None):
    """Return an adapter that has its places, with some weights changed, added or taken away."""
    layers = [{}, {}]
    for path, slices, out in (
        ("0.self_attn.qkv_proj", 3, 9),
        ("0.self_attn.o_proj", 1, 6),
        ("1.mlp.up_proj", 1, 5),
        ("1.mlp.experts.3.down_proj", 1, WIDTH),
    ):
        weights = layers[int(path[0])]
        width = INNER if "experts" in path else WIDTH
        weights[f"{PREFIX}.{path}.lora_A.weight"] = torch.zeros(slices * RANK, width)
        weights[f"{PREFIX}.{path}.lora_B.weight"] = torch.zeros(out, RANK)
    for layer, name, shape in changes:
        layers[layer][f"{PREFIX}.{layer}.{name}"] = torch.zeros(shape)
    for layer, name in without:
        del layers[layer][f"{PREFIX}.{layer}.{name}"]
    return SimpleNamespace(
        layers=[SimpleNamespace(weights=weights) for weights in layers],
        embedding_layers={
            f"base_model.model.{name}": torch.zeros(shape) for name, shape in (ends or {}).items()
        },
        config=SimpleNamespace(r=RANK),
    )


def test_weights_with_places_are_taken(pool):
    check_places(pool, MODULES, adapter(ends=OF_ENDS))
    whole = {"model.embed_tokens.weight": (VOCAB, WIDTH)}  # which `check_copy` compares
    check_places(pool, MODULES, adapter(ends=OF_ENDS | whole))


@pytest.mark.parametrize(
    ("changes", "without", "named"),
    [
        # SGLang would take it for in_proj, whose name stands in its own
        ([(0, "linear_attn.in_proj_q.lora_A.weight", (2, 6))], (), "in_proj_q.*once fused"),
        ([(0, "self_attn.wq_du.lora_A.weight", (2, 6))], (), "wq_du.*once fused"),
        ([(0, "self_attn.k_proj.lora_A.weight", (2, 6))], (), "k_proj.*once fused"),
        ([(0, "mlp.up_proj.lora_A.weight", (2, 6))], (), "up_proj.*no LoRA there"),
        ([(0, "mlp.experts.1.down_proj.lora_A.weight", (2, 6))], (), "no LoRA there"),
        ([(1, "mlp.experts.down_proj.lora_A.weight", (2, 3))], (), r"allowed: \(4, 2, 3\)"),
        ([(1, "mlp.experts.down_proj.lora_A.weight", (1, 2, 3))], (), r"allowed: \(4, 2, 3\)"),
        ([(1, "mlp.experts.4.down_proj.lora_A.weight", (2, 3))], (), "experts 0 to 3"),
        ([(1, "mlp.experts.1.down_proj.lora_A.weight", (4, 3))], (), r"allowed: \(2, 3\)"),
        ([(1, "mlp.experts.1.down_proj.lora_B.weight", (6, 4))], (), r"allowed: \(6, 2\)"),
        ([(1, "mlp.experts.1.gate_up_proj.lora_A.weight", (2, 6))], (), r"allowed: \(4, 6\)"),
        ([(1, "mlp.shared_experts.1.up_proj.lora_A.weight", (2, 6))], (), "have no numbers"),
        ([(0, "self_attn.o_proj.lora_magnitude_vector", (6,))], (), "neither A nor B"),
        ([(0, "cross.o_proj.lora_A.weight", (2, 6))], (), "another weight is A of the same"),
        ([(0, "self_attn.o_proj.lora_A.weight", (3, 6))], (), r"\(3, 6\)(.|\n)*allowed: \(2, 6\)"),
        (
            [(0, "self_attn.qkv_proj.lora_A.weight", (2, 6))],
            (),
            r"\(2, 6\)(.|\n)*allowed: \(6, 6\)",
        ),
        ([(0, "self_attn.o_proj.lora_B.weight", (7, 2))], (), r"\(7, 2\)(.|\n)*allowed: \(6, 2\)"),
        ((), [(0, "self_attn.o_proj.lora_B.weight")], "it has A alone"),
    ],
)
def test_weights_without_a_place_of_their_own_are_refused(pool, changes, without, named):
    with pytest.raises(UnsupportedInputError, match=named):
        check_places(pool, MODULES, adapter(*changes, without=without))


def test_a_head_that_the_pool_or_the_model_lacks_is_refused(pool):
    with pytest.raises(UnsupportedInputError, match="no LoRA on lm_head"):
        check_places(pool, MODULES, adapter(ends=OF_ENDS), ENDS | {"lm_head": None})
    pool.target_modules.remove("lm_head")
    with pytest.raises(UnsupportedInputError, match="lm_head.*embed_tokens"):
        check_places(pool, MODULES, adapter(ends=OF_ENDS))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        # SGLang loads what it has of a vocabulary that is smaller
        ("lm_head.lora_B.weight", (VOCAB - 1, RANK)),
        ("lm_head.lora_B.weight", (VOCAB + 1, RANK)),
        ("lm_head.lora_A.weight", (RANK + 1, WIDTH)),
        ("model.embed_tokens.lora_embedding_A", (RANK, VOCAB + 2)),
        ("model.embed_tokens.lora_embedding_B", (WIDTH - 1, RANK)),
    ],
)
def test_embeddings_and_heads_of_another_shape_are_refused(pool, name, shape):
    wanted = str(OF_ENDS[name]).replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(UnsupportedInputError, match=f"{name}(.|\n)*allowed: {wanted}"):
        check_places(pool, MODULES, adapter(ends=OF_ENDS | {name: shape}))


@pytest.mark.parametrize("name", OF_ENDS)
def test_embeddings_and_heads_need_both_halves(pool, name):
    ends = {each: shape for each, shape in OF_ENDS.items() if each != name}
    with pytest.raises(UnsupportedInputError, match="it has [AB] alone"):
        check_places(pool, MODULES, adapter(ends=ends))
    twice = OF_ENDS | {f"other.{name}": OF_ENDS[name]}
    with pytest.raises(UnsupportedInputError, match="another weight is [AB] of the same"):
        check_places(pool, MODULES, adapter(ends=twice))


def test_a_weight_that_two_modules_of_a_layer_would_take_is_refused(pool):
    two = {"model.layers.0.cross.o_proj": None} | MODULES[0]
    with pytest.raises(UnsupportedInputError, match=r"2 modules share it: .*cross.*self_attn"):
        check_places(pool, [two, MODULES[1]], adapter())


def test_shared_experts_and_parts_of_experts_have_their_own_axis(pool):
    """Experts of two processes by inner width and two by number, with shared outer matrices."""
    stacks = pool.A_buffer["gate_up_proj_moe"], pool.B_buffer["down_proj_moe"]
    for stack in stacks:
        stack[1] = stack[1][:, :1]
    pool.moe_use_local_expert_ids, pool.moe_ep_size = True, 2
    parts = Experts()
    parts.tp_size = 2
    modules = [MODULES[0], MODULES[1] | {"model.layers.1.mlp.experts": parts}]
    shapes = {
        "gate_up_proj.lora_A": (1, 2 * RANK, WIDTH),
        "gate_up_proj.lora_B": (2 * EXPERTS, 4 * INNER, RANK),
        "down_proj.lora_A": (2 * EXPERTS, RANK, 2 * INNER),
        "down_proj.lora_B": (1, WIDTH, RANK),
    }
    own = [(1, f"mlp.experts.3.down_proj.lora_{half}.weight") for half in "AB"]

    def check(shapes):
        changes = [(1, f"mlp.experts.{name}.weight", shape) for name, shape in shapes.items()]
        check_places(pool, modules, adapter(*changes, without=own))

    check(shapes)
    for name, (first, *rest) in shapes.items():
        for other in ((first + 1, *rest), (first, rest[0] + 1, rest[1]), (first, rest[0], 1)):
            with pytest.raises(UnsupportedInputError, match=name):
                check(shapes | {name: other})
    with pytest.raises(UnsupportedInputError, match="one weight serves all experts"):
        numbered = (1, "mlp.experts.0.gate_up_proj.lora_A.weight", (2 * RANK, WIDTH))
        check_places(pool, modules, adapter(numbered, without=own))


@pytest.mark.parametrize(
    ("name", "base", "shape"),
    [
        # each process would take its part from the front of one that is too wide
        ("o_proj.lora_A", dict(input_size=12, output_size=6), (RANK, 12)),
        ("o_proj.lora_B", dict(input_size=12, output_size=6), (6, RANK)),
        ("o_proj.lora_B", dict(output_sizes=[7, 9]), (7, RANK)),
        (
            "qkv_proj.lora_B",
            dict(total_num_heads=4, total_num_kv_heads=1, head_size=2, output_sizes=[8, 4, 4]),
            (12, RANK),
        ),
        (
            "qkv_proj.lora_B",
            dict(inkling_head_dim=2, inkling_num_heads=4, inkling_num_kv_heads=1, inkling_d_rel=3),
            (24, RANK),
        ),
    ],
)
def test_processes_split_weights_of_the_whole_layers_shape(pool, name, base, shape):
    pool.tp_size = 2
    places = Places(pool, [], {})
    target, half = name.split(".lora_")
    module = SimpleNamespace(base_layer=SimpleNamespace(**base))
    assert places._shape(0, target, half, RANK, module) == shape


def test_lora_of_an_end_that_sglang_reads_past_is_refused():
    for name in OF_ENDS:
        check_taken(name, OF_ENDS)
        with pytest.raises(UnsupportedInputError, match="target_modules"):
            check_taken(name, {})
    check_taken("unembed_tokens.lora_A.weight", OF_ENDS)
    check_taken("lm_head.weight", {})
    check_taken(f"{PREFIX}.0.self_attn.q_proj.lora_A.weight", {})


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("base_model.model.score.lora_A.weight", "ignores it"),
        ("base_model.model.visual.blocks.0.attn.qkv.lora_A.weight", "ignores it"),
        ("base_model.model.transformer.word_embeddings.lora_embedding_A", "ignores it"),
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
