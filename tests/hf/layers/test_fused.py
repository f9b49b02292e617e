"""Adapters for q, k and v on a base that fuses them, and the other way round, against PEFT."""

import copy
import warnings
from pathlib import Path

import peft
import pytest
import torch
import transformers
from helpers.adapters.saved_adapters import edit_config, edit_tensors, save_random, with_seed
from safetensors.torch import load_file
from torch import nn

from lora_backends import InvalidInputError, UnsupportedInputError
from lora_backends.hf import MultiLoRAModel
from lora_backends.hf.layout.fused import KNOWN

IDS = torch.arange(2 * 7).reshape(2, 7) + 3
SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
JOINED = {
    "qkv_proj": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "gate_up_proj": ("mlp", ("gate_proj", "up_proj")),
}
SPLIT = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def phi3():
    return with_seed(lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES)))


@pytest.fixture(scope="module")
def llama(phi3):
    """Return the model without fused layers that has Phi-3's weights."""
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, rms_norm_eps=phi3.config.rms_norm_eps)
    )
    state = phi3.state_dict()
    for fused, (owner, names) in JOINED.items():
        for layer in range(SIZES["num_hidden_layers"]):
            path = f"model.layers.{layer}.{owner}"
            parts = [model.get_submodule(f"{path}.{name}") for name in names]
            weights = state.pop(f"{path}.{fused}.weight").split([p.out_features for p in parts])
            state |= {
                f"{path}.{name}.weight": weight for name, weight in zip(names, weights, strict=True)
            }
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, phi3(IDS).logits)
    return model


def save(base, folder, **config):
    save_random(base, folder, 0.2, **config)
    return folder


def assert_rows_of_peft(base, reference, folder, **options):
    """Compare rows on `base` with PEFT's on `reference`; the adapter has an effect."""
    model = MultiLoRAModel(copy.deepcopy(base), "torch_ref", **{"max_rank": 24} | options)
    model.load_adapter("a", folder)
    with torch.no_grad():
        truth = peft.PeftModel.from_pretrained(copy.deepcopy(reference), folder).eval()(IDS).logits
        plain = base(IDS).logits
    rows = model(adapters=["a", None], input_ids=IDS).logits
    assert (truth - plain).abs().max() > 0.05
    torch.testing.assert_close(rows[0], truth[0], rtol=0, atol=2e-5)
    assert torch.equal(rows[1], model.base(IDS).logits[1])


@pytest.mark.parametrize(
    "config",
    [
        {"r": 4, "lora_alpha": 8, "target_modules": SPLIT},
        {"r": 4, "target_modules": ["q_proj", "v_proj"]},  # no part for k
        {"r": 4, "target_modules": ["up_proj", "k_proj"], "layers_to_transform": [1]},
        {
            "r": 4,
            "target_modules": SPLIT,
            "rank_pattern": {"k_proj": 2},
            "alpha_pattern": {"v_proj": 3, "layers.0.mlp.up_proj": 5},
        },
        {"r": 3, "target_modules": ["q_proj", "k_proj", "v_proj"], "use_dora": True},
        {"r": 3, "target_modules": ["q_proj", "v_proj"], "lora_bias": True},
        {"r": 4, "target_modules": "all-linear", "use_rslora": True},
    ],
    ids=["all", "q and v", "k of one layer", "patterns", "dora", "lora bias", "all-linear"],
)
def test_a_fused_base_serves_split_projections(phi3, llama, tmp_path, config):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # nothing is missing
        assert_rows_of_peft(phi3, llama, save(llama, tmp_path / "a", **config))


@pytest.mark.parametrize("config", [{}, {"use_dora": True}, {"lora_bias": True}])
def test_a_split_base_serves_fused_projections(phi3, llama, tmp_path, config):
    config = {"r": 4, "target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]} | config
    assert_rows_of_peft(llama, phi3, save(phi3, tmp_path / "a", **config))


def test_the_ranks_of_parts_add_up(phi3, llama, tmp_path):
    folder = save(llama, tmp_path / "a", r=4, target_modules=["q_proj", "k_proj", "v_proj"])
    model = MultiLoRAModel(copy.deepcopy(phi3), "torch_ref", max_rank=11)
    with pytest.raises(InvalidInputError, match="set max_rank to 12 or more"):
        model.load_adapter("a", folder)
    assert_rows_of_peft(phi3, llama, folder, max_rank=12)


def test_a_rank_that_is_offered_is_enough_for_all_modules(phi3, llama, tmp_path):
    pattern = {"o_proj": 5, "q_proj": 6, "gate_proj": 9}
    folder = save(llama, tmp_path / "a", r=3, target_modules=SPLIT, rank_pattern=pattern)
    model = MultiLoRAModel(copy.deepcopy(phi3), "torch_ref", max_rank=4)
    with pytest.raises(InvalidInputError, match="set max_rank to 12 or more"):
        model.load_adapter("a", folder)
    assert_rows_of_peft(phi3, llama, folder, max_rank=12)
    model = MultiLoRAModel(copy.deepcopy(llama), "torch_ref", max_rank=4)
    with pytest.raises(InvalidInputError, match="set max_rank to 9 or more"):
        model.load_adapter("a", folder)


def test_dora_of_some_parts_is_refused(phi3, llama, tmp_path):
    folder = save(llama, tmp_path / "a", r=4, target_modules=["q_proj"], use_dora=True)
    with pytest.raises(UnsupportedInputError, match=r"DoRA .*q_proj.*, and not for all of"):
        MultiLoRAModel(copy.deepcopy(phi3), "torch_ref").load_adapter("a", folder)


def test_parts_that_are_not_trained_are_told(phi3, llama, tmp_path):
    folder = save(llama, tmp_path / "a", r=2, target_modules=["q_proj", "k_proj"])
    edit_tensors(
        folder, lambda tensors: {k: t for k, t in tensors.items() if "1.self_attn.k" not in k}
    )
    with pytest.warns(RuntimeWarning, match=r"no LoRA for 'model.layers.1.self_attn.k_proj'"):
        MultiLoRAModel(copy.deepcopy(phi3), "torch_ref").load_adapter("a", folder)


@pytest.mark.parametrize(
    ("targets", "lacking"),
    [
        (["q_proj", "k_proj", "o_proj"], ["k_proj"]),
        (["q_proj", "k_proj", "o_proj"], ["q_proj", "k_proj"]),
        ("all-linear", ["k_proj"]),
    ],
)
def test_parts_that_no_layer_has_are_told_or_refused(phi3, llama, tmp_path, targets, lacking):
    """As on a base that splits them: PEFT's LoRA of these may be random numbers."""
    folder = save(llama, tmp_path / "a", r=2, target_modules=targets)

    def kept(tensors):
        return {k: t for k, t in tensors.items() if not any(part in k for part in lacking)}

    edit_tensors(folder, kept)
    assert_lacks(phi3, folder, f"no LoRA for 'model.layers.1.self_attn.{lacking[-1]}'")


def test_a_fused_module_that_no_layer_has_is_told_or_refused(phi3, llama, tmp_path):
    folder = save(phi3, tmp_path / "a", r=2, target_modules=["qkv_proj", "o_proj"])
    edit_tensors(folder, lambda tensors: {k: t for k, t in tensors.items() if "qkv" not in k})
    assert_lacks(llama, folder, "no LoRA for 'model.layers.1.self_attn.qkv_proj'")


def assert_lacks(base, folder, fact):
    model = MultiLoRAModel(copy.deepcopy(base), "torch_ref", max_rank=24)
    with pytest.warns(RuntimeWarning, match=fact):
        model.load_adapter("a", folder)
    edit_config(folder, init_lora_weights=False)
    with pytest.raises(InvalidInputError, match="PEFT gives them random numbers"):
        model.load_adapter("b", folder)


@pytest.mark.parametrize("name", ["fused", "split"])
def test_targets_may_name_a_module_twice(phi3, llama, tmp_path, name):
    base = {"fused": phi3, "split": llama}[name]
    folder = save(llama, tmp_path / "a", r=2, target_modules=["q_proj", "k_proj", "v_proj"])
    edit_config(folder, target_modules=["qkv_proj", *SPLIT[:3]])
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # nothing is missing
        MultiLoRAModel(copy.deepcopy(base), "torch_ref").load_adapter("a", folder)


def test_both_names_of_one_module_are_refused(phi3, llama, tmp_path):
    folder = save(llama, tmp_path / "a", r=2, target_modules=["q_proj"])
    other = save(phi3, tmp_path / "b", r=2, target_modules=["qkv_proj"])
    more = load_file(other / "adapter_model.safetensors")
    edit_tensors(folder, lambda tensors: tensors | more)
    edit_config(folder, target_modules=["q_proj", "qkv_proj"])
    with pytest.raises(InvalidInputError, match="which the base model computes as one"):
        MultiLoRAModel(copy.deepcopy(phi3), "torch_ref").load_adapter("a", folder)


def test_a_start_of_split_weights_is_refused(phi3, llama, tmp_path):
    folder = save(llama, tmp_path / "a", r=2, target_modules=["q_proj"], init_lora_weights="olora")
    with pytest.raises(UnsupportedInputError, match="its start depends on the whole weight"):
        MultiLoRAModel(copy.deepcopy(phi3), "torch_ref").load_adapter("a", folder)


def test_split_projections_are_not_trained_further(phi3, llama, tmp_path):
    folder = save(llama, tmp_path / "a", r=2, target_modules=["q_proj"])
    model = MultiLoRAModel(copy.deepcopy(phi3), "torch_ref")
    with pytest.raises(UnsupportedInputError, match="other names"):
        model.load_adapter("a", folder, trainable=True)


def test_an_order_that_is_not_known_is_refused_by_name(llama, tmp_path):
    config = transformers.CodeGenConfig(
        vocab_size=40, n_embd=24, n_layer=1, n_head=4, n_positions=32, rotary_dim=4
    )
    base = with_seed(lambda: transformers.CodeGenForCausalLM(config))
    folder = save(llama, tmp_path / "a", r=2, target_modules=["q_proj"])
    start = "base_model.model.transformer.h.0.attn.q_proj.lora_"
    parts = {f"{start}A.weight": torch.ones(2, 24), f"{start}B.weight": torch.ones(24, 2)}
    edit_tensors(folder, lambda _: parts)
    with pytest.raises(UnsupportedInputError, match=r"q_proj' with others as .*qkv_proj"):
        MultiLoRAModel(base, "torch_ref").load_adapter("a", folder)


BASES = {
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES)),
    "glm": lambda: transformers.GlmForCausalLM(transformers.GlmConfig(**SIZES, head_dim=6)),
    "glm4": lambda: transformers.Glm4ForCausalLM(transformers.Glm4Config(**SIZES, head_dim=6)),
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES)),
    "bloom": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=40, hidden_size=24, n_layer=1, n_head=4)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=40, n_embd=24, n_layer=1, n_head=4)
    ),
    "mpt": lambda: transformers.MptForCausalLM(
        transformers.MptConfig(vocab_size=40, d_model=24, n_layers=1, n_heads=4, max_seq_len=32)
    ),
}
FUSED = [
    ("phi3", "layers.0.self_attn.qkv_proj", "o_proj"),
    ("gpt_neox", "layers.0.attention.query_key_value", "dense"),
    ("bloom", "h.0.self_attention.query_key_value", "dense"),
    ("gpt2", "h.0.attn.c_attn", "c_proj"),
    ("mpt", "blocks.0.attn.Wqkv", "out_proj"),
]


def moved(base, path, behind, changes):
    """Return the input of the module behind a fused one, changed in its first token, per row.

    Args:
        base: the model.
        path: of the fused module, in the model below the head.
        behind: name of the module that follows in the same parent.
        changes: [rows, columns] added to the fused module's output at the first token.
    """
    model, seen = base.base_model, []

    def change(module, args, output):
        output = output.clone()
        output[:, 0] += changes
        return output

    parent = model.get_submodule(path.rpartition(".")[0])
    handles = [
        model.get_submodule(path).register_forward_hook(change),
        getattr(parent, behind).register_forward_pre_hook(lambda m, args: seen.append(args[0])),
    ]
    with torch.no_grad():
        model(IDS[:1].expand(len(changes), -1))
    for handle in handles:
        handle.remove()
    return seen[0].reshape(len(changes), IDS.shape[1], -1)


def parts_in(base, path):
    model = MultiLoRAModel(base, "torch_ref")
    name = next(name for name in model.pool.modules if name.endswith(path))
    return {part.name: part.columns for part in model.pool.modules[name].parts}


@pytest.mark.parametrize(("name", "path", "behind"), FUSED, ids=[f[0] for f in FUSED])
def test_the_columns_of_q_k_and_v_act_as_such(name, path, behind):
    """A change at the first token: q changes nothing, k all later tokens, v that token as well."""
    base = with_seed(BASES[name])
    width = base.base_model.get_submodule(path)(torch.zeros(1, 24)).shape[1]
    out = moved(base, path, behind, torch.cat([torch.zeros(1, width), torch.eye(width)]))
    change = (out[1:] - out[0]).abs().amax(-1) > 1e-6
    first, later = change[:, 0], change[:, 1:].any(1)
    parts = parts_in(base, path)
    found = {"q_proj": ~first & ~later, "k_proj": ~first & later, "v_proj": first}
    for part, columns in parts.items():
        assert found[part].nonzero().flatten().tolist() == sorted(columns.tolist())
    # Heads follow each other: a column of v moves that column of the heads that read it.
    moving = ((out[1:] - out[0])[parts["v_proj"], 0].abs() > 1e-6).nonzero()[:, 1]
    heads, size = 4, 6
    shared = heads * size // len(parts["v_proj"])
    order = torch.arange(heads * size).view(-1, shared, size).movedim(2, 1).flatten()
    assert torch.equal(moving, order)


@pytest.mark.parametrize("name", ["phi3", "glm", "glm4"])
def test_the_columns_of_gate_and_up_act_as_such(name):
    """The output is linear in up, and not in gate."""
    base, path = with_seed(BASES[name]), "layers.0.mlp.gate_up_proj"
    eye, width = torch.eye(40), 40
    out = moved(base, path, "down_proj", torch.cat([torch.zeros(1, width), eye, 2 * eye]))[:, 0]
    once, twice = out[1 : width + 1] - out[0], out[width + 1 :] - out[0]
    rows = torch.arange(width) % 20  # gate and up of one column
    linear = (twice - 2 * once).abs()[torch.arange(width), rows] < 1e-6
    parts = parts_in(base, path)
    assert parts["gate_proj"].tolist() == (~linear).nonzero().flatten().tolist()
    assert parts["up_proj"].tolist() == linear.nonzero().flatten().tolist()


def test_a_delta_net_serves_split_projections(tmp_path):
    """Tinker's adapters of Qwen3.5 name in_proj_q, in_proj_k and in_proj_v."""
    config = transformers.Qwen3_5TextConfig(
        **SIZES,
        head_dim=6,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=6,
        linear_value_head_dim=6,
    )
    base = with_seed(lambda: transformers.Qwen3_5ForCausalLM(config))
    split = copy.deepcopy(base)
    net = split.model.layers[0].linear_attn
    widths = {"in_proj_q": net.key_dim, "in_proj_k": net.key_dim, "in_proj_v": net.value_dim}
    weights = net.in_proj_qkv.weight.split([*widths.values()])
    for name, weight in zip(widths, weights, strict=True):
        setattr(net, name, nn.Linear(24, len(weight), bias=False))
        getattr(net, name).weight.data = weight.detach().clone()
    net.in_proj_qkv = Rejoined(net, [*widths])
    targets = [*widths, "in_proj_z", "out_proj"]
    assert_rows_of_peft(base, split, save(split, tmp_path / "a", r=4, target_modules=targets))


class Rejoined(nn.Module):
    def __init__(self, parent, names):
        super().__init__()
        self.parent, self.names = (parent,), names  # a tuple: not a module of this one

    def forward(self, x):
        return torch.cat([getattr(self.parent[0], name)(x) for name in self.names], dim=-1)

    def __deepcopy__(self, memo):
        return Rejoined(copy.deepcopy(self.parent[0], memo), self.names)


def test_transformers_has_the_classes_that_are_known():
    names = {name for name, _ in KNOWN}
    found = set()
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        text = file.read_text()
        found |= {name for name in names if f"\nclass {name}(" in text}
    assert found == names
