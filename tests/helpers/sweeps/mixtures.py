"""Tiny random mixtures of experts of several architectures, and PEFT's adapters for them."""

import copy
import json
import warnings

import torch
import transformers

TEXT = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
SMALL = {**TEXT, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
SHARED = {**SMALL, "num_experts": 4, "shared_expert_intermediate_size": 8}
GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
LINEAR_ATTENTION = {
    "head_dim": 8,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
MIXTURES = {
    "qwen3_moe": ("Qwen3Moe", {**SMALL, "num_experts": 4}),
    "mixtral": ("Mixtral", {**TEXT, "num_local_experts": 3}),
    "gpt_oss": (
        "GptOss",
        {**TEXT, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "olmoe": ("Olmoe", {**TEXT, "num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": ("DeepseekV3", {**SMALL, **LATENT, **GROUPS}),
    "qwen2_moe": ("Qwen2Moe", SHARED),
    "qwen3_next": ("Qwen3Next", {**SHARED, **LINEAR_ATTENTION}),
    "glm4_moe": ("Glm4Moe", {**SMALL, **GROUPS, "head_dim": 8}),
    "phimoe": ("Phimoe", {**TEXT, "num_local_experts": 4}),
    "minimax_m2": (
        "MiniMaxM2",
        {**TEXT, "head_dim": 8, "rotary_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "nemotron_h": (
        "NemotronH",
        {**SMALL, **GROUPS, "head_dim": 8, "hybrid_override_pattern": "*E"},
    ),
}
"""Name to the prefix of its classes, and the configuration."""

KNOWN = [n for n, (prefix, _) in MIXTURES.items() if hasattr(transformers, f"{prefix}ForCausalLM")]
"""Those that the installed Transformers has."""

ATTENTION = {"deepseek_v3": "o_proj"}  # a projection of attention that is called q_proj elsewhere
UP = {"nemotron_h": "up_proj"}  # the parameter that is called gate_up_proj elsewhere


def build(name, seed=7, **changes):
    """Return a random model in eval mode; parameters that start as 0 are random, too."""
    prefix, config = MIXTURES[name]
    torch.manual_seed(seed)
    made = getattr(transformers, f"{prefix}Config")(**copy.deepcopy({**config, **changes}))
    model = getattr(transformers, f"{prefix}ForCausalLM")(made).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn(parameter.shape))
    return model


def in_peft(base, folder, seed, std=0.3, **config):
    """Return `base` with a random adapter of PEFT, which is saved into a folder as well."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, peft.LoraConfig(**config)).eval()
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.copy_(std * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(folder)
    return model


def peft_layers(model):
    """Return the layers of PEFT by path; those of parameters by path of the parameter."""
    import peft

    layers = {}
    for path, module in model.named_modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            path = path.removeprefix("base_model.model.").replace(".base_layer", "")
            parameter = getattr(module, "parameter_name", "weight")
            layers[path if parameter == "weight" else f"{path}.{parameter}"] = module
    return layers


def write_folder(folder, tensors, **config):
    """Write a checkpoint by hand; names of tensors are those below "base_model.model."."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    values = {"peft_type": "LORA", "r": 2, "target_modules": "all-linear", **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    content = {f"base_model.model.{k}": t.contiguous() for k, t in tensors.items()}
    save_file(content, folder / "adapter_model.safetensors")
    return folder


def updates(delta, interleaved=False):
    """Return what is added to each expert's weight, [num_experts, out_features, in_features]."""
    experts, num_a = delta.ranks.shape
    a = delta.lora_a.double().expand(experts, -1, -1, -1)
    b = delta.lora_b.double().expand(experts, -1, -1)
    full = torch.zeros(experts, b.shape[1], a.shape[3], dtype=torch.float64)
    for expert in range(experts):
        for s in range(num_a):
            width = b.shape[1] // num_a
            columns = slice(s, None, num_a) if interleaved else slice(s * width, (s + 1) * width)
            r, scaling = delta.ranks[expert, s], delta.scalings[expert, s].double()
            product = b[expert, columns, :r] @ a[expert, s, :r]
            full[expert, columns] = scaling * product
    return full
