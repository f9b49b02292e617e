"""Models, adapters and real engines of SGLang for the tests of the plug-in.

This module is imported by the processes of an engine, too: it imports neither torch nor SGLang.
"""

import asyncio
import json

from helpers.adapters.peft_models import LAYERS, LINEAR

ENDS = ["embed_tokens", "lm_head"]
ADAPTERS = {
    "all": dict(r=8, lora_alpha=16, target_modules=LINEAR),
    "small": dict(r=2, lora_alpha=8, target_modules=LINEAR),
    "qv": dict(r=5, lora_alpha=8, target_modules=["q_proj", "v_proj"]),
    "gate": dict(r=3, lora_alpha=9, target_modules=["gate_proj", "down_proj"]),
    "ends": dict(r=7, lora_alpha=16, target_modules=[*ENDS, "q_proj", "k_proj", "v_proj"]),
    "rs": dict(
        r=4, lora_alpha=8, use_rslora=True, target_modules=["o_proj", "gate_proj", "up_proj"]
    ),
    "layer": dict(r=6, lora_alpha=12, target_modules=LINEAR, layers_to_transform=[1]),
}
"""Ranks up to the engine's highest, so that slots are reloaded with larger and smaller ones."""
GREEDY = {"temperature": 0, "ignore_eos": True}

EXPERTS, WIDE = 4, 64
MOE_ADAPTERS = {"four": 4, "two": 2}
MOE_TARGETS = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
SCALING = 3


def save_moe_adapter(folder, rank, seed):
    """Save a random adapter on attention and every expert of the tiny mixture."""
    import torch
    from safetensors.torch import save_file

    generator, tensors = torch.Generator().manual_seed(seed), {}
    attention = {"q_proj": (64, 64), "k_proj": (64, 32), "v_proj": (64, 32)}
    sites = {f"self_attn.{name}": shape for name, shape in attention.items()}
    for expert in range(EXPERTS):
        for name in ("gate_proj", "up_proj"):
            sites[f"mlp.experts.{expert}.{name}"] = (64, WIDE)
        sites[f"mlp.experts.{expert}.down_proj"] = (WIDE, 64)
    for layer in range(LAYERS):
        for site, (width, out) in sites.items():
            key = f"base_model.model.model.layers.{layer}.{site}"
            for name, shape in (("lora_A", (rank, width)), ("lora_B", (out, rank))):
                tensors[f"{key}.{name}.weight"] = 0.15 * torch.randn(shape, generator=generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "bias": "none"}
    config |= {"lora_alpha": SCALING * rank, "target_modules": MOE_TARGETS}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merge(model, folder):
    """Add an adapter that `save_moe_adapter` saved to the weights of Transformers' model."""
    import torch
    from safetensors.torch import load_file

    tensors, weights = load_file(folder / "adapter_model.safetensors"), model.state_dict()
    for key, a in tensors.items():
        if "lora_A" not in key:
            continue
        delta = SCALING * tensors[key.replace("lora_A", "lora_B")] @ a
        path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        layer, is_expert, expert = path.partition(".experts.")
        if not is_expert:
            place = weights[f"{path}.weight"]
        elif expert.endswith("down_proj"):
            place = weights[f"{layer}.experts.down_proj"][int(expert.split(".")[0])]
        else:
            both = weights[f"{layer}.experts.gate_up_proj"][int(expert.split(".")[0])]
            place = both[:WIDE] if expert.endswith("gate_proj") else both[WIDE:]
        with torch.no_grad():
            place += delta
    return model


class Engine:
    """A real engine in processes of its own, with one adapter, or None, per prompt."""

    def __init__(self, model, adapters, targets, **options):
        import sglang

        defaults = dict(
            model_path=str(model),
            device="cpu",
            dtype="float32",
            skip_tokenizer_init=True,
            attention_backend="torch_native",
            sampling_backend="pytorch",
            grammar_backend="none",
            mem_fraction_static=0.6,  # of what is free
            max_total_tokens=8192,
            max_running_requests=16,
            disable_cuda_graph=True,
            log_level="warning",
            enable_lora=True,
            max_loras_per_batch=4,
            max_lora_rank=8,
            lora_target_modules=targets,
            lora_paths=[f"{name}={folder}" for name, folder in adapters.items()],
        )
        self.engine = sglang.Engine(**defaults | options)

    def answers(self, prompts, names, length=6, **options):
        sampling = {**GREEDY, "max_new_tokens": length}
        return self.engine.generate(
            input_ids=prompts, sampling_params=sampling, lora_path=names, **options
        )

    def tokens(self, prompts, names, length=6):
        return [answer["output_ids"] for answer in self.answers(prompts, names, length)]

    def load(self, name, folder):
        return self.engine.load_lora_adapter(name, str(folder))

    def load_from_memory(self, name, tensors, config):
        return self.engine.load_lora_adapter_from_tensors(name, tensors, config)

    def unload(self, name):
        return self.engine.unload_lora_adapter(name)

    def together(self, *coroutines):
        """Run coroutines at once, on the engine's loop."""

        async def run():
            return await asyncio.gather(*coroutines)

        return self.engine.loop.run_until_complete(run())

    async def later_tokens(self, prompts, names, length):
        sampling = {**GREEDY, "max_new_tokens": length}
        answers = await self.engine.async_generate(
            input_ids=prompts, sampling_params=sampling, lora_path=names
        )
        return [answer["output_ids"] for answer in answers]

    async def load_and_ask(self, name, folder, prompts, length):
        """Load an adapter, ask for tokens with it, and unload it, while others are served."""
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, UnloadLoRAAdapterReqInput

        manager = self.engine.tokenizer_manager
        load = LoadLoRAAdapterReqInput(lora_name=name, lora_path=str(folder))
        loaded = await manager.load_lora_adapter(load, None)
        assert loaded.success, loaded.error_message
        found = await self.later_tokens(prompts, [name] * len(prompts), length)
        unload = UnloadLoRAAdapterReqInput(lora_name=name)
        assert (await manager.unload_lora_adapter(unload, None)).success
        return found

    def close(self):
        self.engine.shutdown()
