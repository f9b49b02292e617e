"""Models with random weights, and random PEFT adapters for them, for engines that serve."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SEEDS = 8  # files of weights, which are drawn side by side


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder.

    Args:
        hidden: width of the residual stream.
        inner: width between gate, up and down; of one expert in a mixture.
        layers: of the model.
        heads: of the queries.
        kv_heads: of the keys and values.
        head: width of one head.
        experts: in each layer; 0: a dense model.
        top_k: experts per token.
        family: Transformers' model_type.
        vocabulary: tokens; a small one, since several engines share a card.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    experts: int = 0
    top_k: int = 0
    family: str = "llama"
    vocabulary: int = 32000

    def attention(self) -> dict[str, tuple[int, int]]:
        """Return inputs and outputs of the projections of attention."""
        q, kv = self.heads * self.head, self.kv_heads * self.head
        sites = {f"self_attn.{name}_proj": (self.hidden, kv) for name in "kv"}
        return {
            "self_attn.q_proj": (self.hidden, q),
            **sites,
            "self_attn.o_proj": (q, self.hidden),
        }

    def feed_forward(self) -> dict[str, tuple[int, int]]:
        """Return inputs and outputs of gate, up and down, of every expert in a mixture."""
        wide, back = (self.hidden, self.inner), (self.inner, self.hidden)
        if self.family == "mixtral":
            names = {"w1": wide, "w2": back, "w3": wide}
        else:
            names = {"gate_proj": wide, "up_proj": wide, "down_proj": back}
        if not self.experts:
            return {f"mlp.{name}": shape for name, shape in names.items()}
        place = "block_sparse_moe" if self.family == "mixtral" else "mlp"
        return {
            f"{place}.experts.{expert}.{name}": shape
            for expert in range(self.experts)
            for name, shape in names.items()
        }


LLAMA_8B = Shape(4096, 14336, 32, 32, 8, 128)
SMOLLM2 = Shape(576, 1536, 30, 9, 3, 64)
QWEN3_MOE = Shape(2048, 768, 8, 32, 4, 128, 128, 8, "qwen3_moe")  # eight of Qwen3-30B-A3B's layers
MIXTRAL = Shape(4096, 14336, 4, 32, 8, 128, 8, 2, "mixtral")  # four of Mixtral-8x7B's layers
TINY_MOE = Shape(64, 32, 2, 4, 2, 16, 8, 2, "qwen3_moe")


def save_config(folder: Path, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Save the configuration of a model, and return its folder."""
    config: dict[str, Any] = {
        "model_type": shape.family,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "vocab_size": shape.vocabulary,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 16384,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if shape.family == "llama":
        config |= {"architectures": ["LlamaForCausalLM"]}
    elif shape.family == "mixtral":
        config |= {"architectures": ["MixtralForCausalLM"], "num_local_experts": shape.experts}
        config |= {"num_experts_per_tok": shape.top_k, "sliding_window": None}
    else:
        config |= {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": shape.experts}
        config |= {"num_experts_per_tok": shape.top_k, "moe_intermediate_size": shape.inner}
        config |= {"intermediate_size": 3 * shape.hidden, "norm_topk_prob": True}
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_model(folder: Path, shape: Shape, dtype: torch.dtype, device: str) -> Path:
    """Save a model with random weights, drawn on a device, and return its folder."""
    save_config(folder, shape, dtype)
    shapes = _weights(shape)
    parts = [dict(list(shapes.items())[i::SEEDS]) for i in range(SEEDS)]

    def save(index: int) -> dict[str, str]:
        generator = torch.Generator(device=device).manual_seed(index)
        tensors, file = {}, f"model-{index}.safetensors"
        for name, size in parts[index].items():
            values = torch.empty(size, dtype=dtype, device=device)
            is_norm = "norm" in name
            values = values.fill_(1) if is_norm else values.normal_(0, 0.02, generator=generator)
            tensors[name] = values.cpu()
        save_file(tensors, folder / file, metadata={"format": "pt"})
        return dict.fromkeys(tensors, file)

    with ThreadPoolExecutor(SEEDS) as pool:
        index = {name: file for each in pool.map(save, range(SEEDS)) for name, file in each.items()}
    listed = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listed))
    return folder


def _weights(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a whole model's weights by name."""
    hidden = shape.hidden
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocabulary, hidden),
        "lm_head.weight": (shape.vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    sites: dict[str, tuple[int, ...]] = {
        name: size[::-1] for name, size in (shape.attention() | shape.feed_forward()).items()
    }
    if shape.family == "qwen3_moe":
        sites |= {f"self_attn.{name}_norm": (shape.head,) for name in "qk"}
        sites |= {"mlp.gate": (shape.experts, hidden)}
    elif shape.family == "mixtral":
        sites |= {"block_sparse_moe.gate": (shape.experts, hidden)}
    sites |= {name: (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    for layer in range(shape.layers):
        shapes |= {f"model.layers.{layer}.{site}.weight": size for site, size in sites.items()}
    return shapes


def save_adapter(folder: Path, shape: Shape, rank: int, seed: int, dtype: torch.dtype) -> Path:
    """Save a random PEFT adapter on attention and the feed-forward parts, every expert included."""
    sites = shape.attention() | shape.feed_forward()
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(shape.layers):
        for site, (width, out) in sites.items():
            key = f"base_model.model.model.layers.{layer}.{site}"
            a = torch.randn(rank, width, generator=generator) / width**0.5
            b = torch.randn(out, rank, generator=generator) * 0.02
            tensors |= {f"{key}.lora_A.weight": a.to(dtype), f"{key}.lora_B.weight": b.to(dtype)}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    names = sorted({site.rpartition(".")[2] for site in sites})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank}
    config |= {"target_modules": names, "bias": "none", "base_model_name_or_path": "model"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def save_adapters(
    folder: Path, count: int, shape: Shape, rank: int, dtype: torch.dtype
) -> dict[str, str]:
    """Save adapters, and return their folders by name."""
    with ThreadPoolExecutor(SEEDS) as pool:
        places = list(
            pool.map(
                lambda index: save_adapter(folder / f"adapter{index}", shape, rank, index, dtype),
                range(count),
            )
        )
    return {place.name: str(place) for place in places}
