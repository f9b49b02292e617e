"""Tiny random models of many architectures, and PEFT's adapters for them in memory."""

import copy
import random
import warnings
from pathlib import Path

import torch
import transformers

from lora_backends.adapters import Checkpoint, ModuleDelta

TEXT = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
GROUPED = {**TEXT, "num_key_value_heads": 1}
LATENT = {
    **TEXT,
    "num_key_value_heads": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
MROPE = {
    **TEXT,
    "num_key_value_heads": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 1, 1],
    },
}
PATCHES = {
    "depth": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
}
IMAGE, IMAGE_SIZE, ORDINARY = 60, 8, 58
"""The placeholder token, the size of an image, and the number of tokens with no meaning."""

IMAGES = {"image_token_id": IMAGE, "image_token_index": IMAGE}
LLAMA = {"model_type": "llama", **GROUPED}
SIGLIP = {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False}

ARCHITECTURES = {
    "llama": ("Llama", "ForCausalLM", GROUPED),
    "gpt2": ("GPT2", "LMHeadModel", {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "opt": ("OPT", "ForCausalLM", {**TEXT, "ffn_dim": 24, "word_embed_proj_dim": 8}),
    "mixtral": ("Mixtral", "ForCausalLM", {**GROUPED, "num_local_experts": 3}),
    "qwen2_moe": (
        "Qwen2Moe",
        "ForCausalLM",
        {
            **GROUPED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
        },
    ),
    "xlnet": (
        "XLNet",
        "LMHeadModel",
        {"vocab_size": 64, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24},
    ),
    "rwkv": (
        "Rwkv",
        "ForCausalLM",
        {
            "vocab_size": 64,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "attention_hidden_size": 16,
        },
    ),
    "deepseek_v2": ("DeepseekV2", "ForCausalLM", LATENT),
    "deepseek_v3": ("DeepseekV3", "ForCausalLM", LATENT),
    "bert": ("Bert", "ForSequenceClassification", TEXT),
    "roberta": ("Roberta", "ForSequenceClassification", TEXT),
    "modernbert": ("ModernBert", "ForMaskedLM", {**TEXT, "pad_token_id": 0}),
    "deberta": (
        "DebertaV2",
        "ForMaskedLM",
        {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "longformer": (
        "Longformer",
        "ForMaskedLM",
        {**TEXT, "attention_window": 4, "max_position_embeddings": 64},
    ),
    "big_bird": ("BigBird", "ForMaskedLM", {**TEXT, "block_size": 2, "num_random_blocks": 1}),
    "llava": (
        "Llava",
        "ForConditionalGeneration",
        {
            "vision_config": {"model_type": "clip_vision_model", **VISION},
            "text_config": LLAMA,
            **IMAGES,
        },
    ),
    "gemma3": (
        "Gemma3",
        "ForConditionalGeneration",
        {
            "text_config": {**GROUPED, "head_dim": 8},
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
            "boi_token_index": 61,
            "eoi_token_index": 62,
            **IMAGES,
        },
    ),
    "paligemma": (
        "PaliGemma",
        "ForConditionalGeneration",
        {
            "text_config": {"model_type": "gemma", **GROUPED, "head_dim": 8},
            "vision_config": {**SIGLIP, "projection_dim": 16},
            "projection_dim": 16,
            **IMAGES,
        },
    ),
    "smolvlm": (
        "SmolVLM",
        "ForConditionalGeneration",
        {
            "text_config": LLAMA,
            "vision_config": VISION,
            "scale_factor": 2,
            "pad_token_id": 0,
            **IMAGES,
        },
    ),
    "idefics3": (
        "Idefics3",
        "ForConditionalGeneration",
        {
            "text_config": LLAMA,
            "vision_config": VISION,
            "scale_factor": 2,
            "pad_token_id": 0,
            **IMAGES,
        },
    ),
    "qwen2_vl": (
        "Qwen2VL",
        "ForConditionalGeneration",
        {
            **IMAGES,
            "text_config": MROPE,
            "vision_config": {**PATCHES, "embed_dim": 16, "mlp_ratio": 2},
            "vision_start_token_id": 58,
            "vision_end_token_id": 59,
            "video_token_id": 61,
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        "ForConditionalGeneration",
        {
            **IMAGES,
            "text_config": MROPE,
            "vision_config": {
                **PATCHES,
                "out_hidden_size": 16,
                "intermediate_size": 24,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            "vision_start_token_id": 58,
            "vision_end_token_id": 59,
            "video_token_id": 61,
        },
    ),
    "vipllava": (
        "VipLlava",
        "ForConditionalGeneration",
        {
            "vision_config": {"model_type": "clip_vision_model", **VISION},
            "text_config": LLAMA,
            "vision_feature_layers": [-1, -2],
            **IMAGES,
        },
    ),
    "clip": (
        "CLIP",
        "Model",
        {
            "text_config": {**TEXT, "eos_token_id": 63, "max_position_embeddings": 32},
            "vision_config": VISION,
            "projection_dim": 8,
        },
    ),
    "wav2vec2": (
        "Wav2Vec2",
        "ForCTC",
        {
            **TEXT,
            "vocab_size": 20,
            "conv_dim": [16, 16],
            "conv_stride": [4, 4],
            "conv_kernel": [8, 8],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
        },
    ),
    "t5": ("T5", "ForConditionalGeneration", {"vocab_size": 64, "d_model": 16, "num_layers": 1}),
}
"""Name to the prefix of its classes, the kind of model, and the configuration."""

KNOWN = [
    name
    for name, (prefix, kind, _) in ARCHITECTURES.items()
    if hasattr(transformers, f"{prefix}Config") and hasattr(transformers, prefix + kind)
]
"""Those that the installed Transformers has."""

TOKENS_PER_IMAGE = {
    "llava": 4,
    "vipllava": 4,
    "gemma3": 4,
    "paligemma": 4,
    "smolvlm": 1,
    "idefics3": 1,
    "qwen2_vl": 0,  # depends on the image
    "qwen2_5_vl": 0,
}


def build(name, seed=7):
    """Return a random model of an architecture, in eval mode."""
    prefix, kind, config = ARCHITECTURES[name]
    torch.manual_seed(seed)
    # A configuration changes what it is given.
    made = getattr(transformers, f"{prefix}Config")(**copy.deepcopy(config))
    return getattr(transformers, prefix + kind)(made).eval()


def in_peft(base, targets, seed):
    """Return a copy of `base` with one random adapter of PEFT, and the same adapter for us."""
    import peft

    config = peft.LoraConfig(r=3, target_modules=targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    layers = {
        path.removeprefix("base_model.model."): layer
        for path, layer in model.named_modules()
        if isinstance(layer, peft.tuners.lora.LoraLayer)
    }
    return model, Checkpoint(Path("in memory"), {p: _delta(p, x) for p, x in layers.items()}, {})


def _delta(path, layer):
    embeds, scale = "default" in layer.lora_embedding_A, 1.0
    if embeds:
        scale = float(getattr(layer.base_layer, "embed_scale", 1.0))
        a, b = layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]
    else:
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    return ModuleDelta(
        module=path,
        kind="embedding" if embeds else "linear",
        rank=3,
        scaling=layer.scaling["default"] * scale,
        lora_a=a.detach().clone(),
        lora_b=b.detach().clone(),
        bias=None,
    )


def inputs_of(name, rows, length, seed, images=None):
    """Return inputs of a model; `images` are those of each row, for a model with images."""
    generator, chance = torch.Generator().manual_seed(seed), random.Random(seed)
    if name == "wav2vec2":
        return {"input_values": torch.randn(rows, 200, generator=generator)}
    if images is None:
        ids = torch.randint(1, ORDINARY, (rows, length), generator=generator)
        if name == "clip":
            ids[:, -1] = 63
            pixels = torch.randn(rows, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
            return {"input_ids": ids, "pixel_values": pixels}
        return {"input_ids": ids}
    texts = [[chance.randrange(1, ORDINARY) for _ in range(length)] for _ in range(rows)]
    grids = []  # height and width in patches of every image, in order
    for text, count in zip(texts, images, strict=True):
        for _ in range(count):
            grids.append((1, 2 * chance.randint(1, 3), 2 * chance.randint(1, 3)))
        places = sorted(chance.randint(0, length) for _ in range(count))
        for place, grid in reversed([*zip(places, grids[len(grids) - count :], strict=True)]):
            tokens = TOKENS_PER_IMAGE[name] or grid[1] * grid[2] // 4
            text[place:place] = [58, *[IMAGE] * tokens, 59]
    longest = max(map(len, texts))
    inputs = {
        "input_ids": torch.tensor([[1] * (longest - len(text)) + text for text in texts]),
        "attention_mask": torch.tensor(
            [[0] * (longest - len(text)) + [1] * len(text) for text in texts]
        ),
    }
    if name.startswith("qwen"):
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
    if sum(images):
        inputs["pixel_values"] = _pixels(name, images, grids, generator)
    if sum(images) and name.startswith("qwen"):
        inputs["image_grid_thw"] = torch.tensor(grids)
    return inputs


def _pixels(name, images, grids, generator):
    size = (3, IMAGE_SIZE, IMAGE_SIZE)
    if name.startswith("qwen"):
        patches = sum(height * width for _, height, width in grids)
        return torch.randn(patches, 3 * 4 * 4, generator=generator)
    if name not in ("smolvlm", "idefics3"):
        return torch.randn(sum(images), *size, generator=generator)
    pixels = torch.zeros(len(images), max(images), *size)
    for row, count in enumerate(images):
        pixels[row, :count] = torch.randn(count, *size, generator=generator)
    return pixels
