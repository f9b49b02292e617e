"""Small mixtures of experts, their adapters, and what vLLM runs on them in Triton, in torch.

vLLM has no Triton on a CPU.
"""

import json
from types import SimpleNamespace

import torch

from helpers.adapters.peft_models import HIDDEN, VOCAB, greedy_tokens

LAYERS, INNER, RANK, SCALING = 2, 32, 4, 2.0
KEY = "base_model.model.model.layers.{}.mlp.experts.{}.{}.lora_{}.weight"


def stand_in():
    """Let vLLM's `TritonExperts` multiply, route and sum in torch, in this process."""
    from vllm.model_executor.layers.fused_moe.experts import triton_moe

    triton_moe.tl = SimpleNamespace(float32=torch.float32, bfloat16=torch.bfloat16)
    triton_moe.try_get_optimal_moe_config = lambda *args, **kwargs: {}
    triton_moe._prepare_expert_assignment = places
    triton_moe.invoke_fused_moe_triton_kernel = multiply
    triton_moe.TritonExperts.moe_sum = lambda _, pairs, y, *args: y.copy_(pairs.sum(1))


def places(topk_ids, config, num_tokens, top_k, num_experts, expert_map, **kwargs):
    """Return the place of each pair's expert in this process, or -1, and two placeholders."""
    here = topk_ids if expert_map is None else expert_map[topk_ids]
    return here.flatten(), None, None


def multiply(x, weight, y, x_scale, scale, topk_weights, here, _, __, weighted, top_k, *args, **kw):
    """Write the product of each pair of token and expert into y; 0 for experts elsewhere."""
    rows = x.repeat_interleave(top_k, 0)
    product = torch.einsum("pi,poi->po", rows, weight[here.clamp(min=0)])
    product[here < 0] = 0
    if weighted:
        product *= topk_weights.reshape(-1, 1)
    y.view(-1, y.shape[-1]).copy_(product)


def save_mixture(folder, experts):
    """Save a random Qwen3-MoE, small enough to be quick, and return its folder."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=experts,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=1,
        dtype="float32",
    )
    torch.manual_seed(7)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def save_expert_adapter(folder, experts, seed):
    """Save a random adapter of every expert, in the layout of one module per expert."""
    from safetensors.torch import save_file

    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(LAYERS):
        for expert in range(experts):
            for name in ("gate_proj", "up_proj", "down_proj"):
                wide, tall = (INNER, HIDDEN) if name == "down_proj" else (HIDDEN, INNER)
                for half, shape in (("A", (RANK, wide)), ("B", (tall, RANK))):
                    key = KEY.format(layer, expert, name, half)
                    tensors[key] = 0.2 * torch.randn(shape, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = ["gate_proj", "up_proj", "down_proj"]
    config = dict(peft_type="LORA", r=RANK, lora_alpha=SCALING * RANK, target_modules=modules)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged_tokens(base, adapter, prompt, length=6):
    """Return the greedy tokens of a mixture with an adapter, or None, in its weights."""
    import transformers
    from safetensors.torch import load_file

    model = transformers.Qwen3MoeForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    tensors = {} if adapter is None else load_file(adapter / "adapter_model.safetensors")

    def delta(*site):
        return SCALING * tensors[KEY.format(*site, "B")] @ tensors[KEY.format(*site, "A")]

    for i, layer in enumerate(model.model.layers if tensors else ()):
        experts = layer.mlp.experts
        for j in range(len(experts.down_proj)):
            both = torch.cat([delta(i, j, "gate_proj"), delta(i, j, "up_proj")])
            experts.gate_up_proj.data[j] += both
            experts.down_proj.data[j] += delta(i, j, "down_proj")
    return greedy_tokens(model, prompt, length)
