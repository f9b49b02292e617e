"""Prompts, adapters and real engines of vLLM for the tests of the plug-in."""

import json
import os
import sys

from helpers.adapters.peft_models import LAYERS, LINEAR

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
for name, value in SETTINGS.items():
    os.environ.setdefault(name, value)

EVEN = {f"model.layers.{layer}.mlp.down_proj": 4 for layer in range(LAYERS)}
ADAPTERS = {
    "all": dict(r=8, lora_alpha=16, target_modules=LINEAR),
    "small": dict(r=2, lora_alpha=8, target_modules=LINEAR),
    "some": dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"]),
    "uneven": dict(
        r=2,
        lora_alpha=4,
        target_modules=["k_proj", "o_proj", "down_proj"],
        rank_pattern=EVEN,
        alpha_pattern={name: 3 * rank for name, rank in EVEN.items()},
    ),
    "ends": dict(r=8, lora_alpha=16, target_modules=["embed_tokens", "lm_head", "q_proj"]),
    "patterns": dict(
        r=2,
        lora_alpha=4,
        target_modules=LINEAR,
        layers_to_transform=[1],
        rank_pattern={"q_proj": 8, "up_proj": 1},
        alpha_pattern={"v_proj": 16, "q_proj": 3},
    ),
    "rs": dict(r=4, lora_alpha=8, use_rslora=True, target_modules=["gate_proj", "up_proj"]),
}
INVOCATION = [200, 201]
KINDS = {  # that vLLM's own loader refuses, or version 0.30 gets wrong
    "dora": dict(r=4, lora_alpha=8, use_dora=True, target_modules=[*LINEAR, "embed_tokens"]),
    "dora_head": dict(r=2, lora_alpha=6, use_dora=True, target_modules=["lm_head", "k_proj"]),
    "bias": dict(r=4, lora_alpha=8, lora_bias=True, target_modules=LINEAR),
    "alora": dict(
        r=4, lora_alpha=8, alora_invocation_tokens=INVOCATION, target_modules=[*LINEAR, "lm_head"]
    ),
    "pissa": dict(r=4, lora_alpha=8, init_lora_weights="pissa", target_modules=LINEAR),
    "olora": dict(r=4, lora_alpha=8, init_lora_weights="olora", target_modules=LINEAR),
    "tokens": dict(
        r=4, lora_alpha=8, trainable_token_indices=[5, 9, 200], target_modules=["q_proj"]
    ),
    "ranks": dict(
        r=2,
        lora_alpha=4,
        use_rslora=True,
        use_dora=True,
        target_modules=LINEAR,
        rank_pattern={"q_proj": 8, "up_proj": 1},
        alpha_pattern={"v_proj": 16, "q_proj": 3},
    ),
}
BOTH = [None, "all", "some", "uneven", "ends", "bias", "pissa", "tokens"]
LIVE = {"plain": ["all", "dora"], "sharded": ["all", "uneven"]}
"""Adapters that are versions of a live one, on two processes."""
PARALLEL = dict.fromkeys(LIVE, [*BOTH[1:], "dora"])  # adapters of the rows of two processes


def live_version(folder):
    """Return the tensors and the configuration of a PEFT folder, as `live.update` takes them."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    return load_file(folder / "adapter_model.safetensors"), config


def allow_a_second_engine():
    """Keep a search of vLLM 0.32 away from llvmlite, on whose library it fails.

    It looks into every module when it builds an engine, so it fails after numba was imported.
    """
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:  # another version
        return
    register = dispatcher.register_kernels
    if hasattr(register, "around"):
        return

    def register_without_llvmlite(*args, **kwargs):
        names = [name for name in sys.modules if name.partition(".")[0] == "llvmlite"]
        hidden = {name: sys.modules.pop(name) for name in names}
        try:
            return register(*args, **kwargs)
        finally:
            sys.modules.update(hidden)

    register_without_llvmlite.around = register
    dispatcher.register_kernels = register_without_llvmlite


class Engine:
    """A real engine, asked for greedy tokens with one adapter, or None, per prompt."""

    def __init__(self, tiny, adapters, **options):
        from vllm import LLM

        allow_a_second_engine()
        defaults = dict(
            dtype="float32",
            enable_lora=True,
            max_loras=3,
            max_lora_rank=8,
            max_cpu_loras=8,
            max_model_len=256,
            max_num_seqs=16,
            max_num_batched_tokens=256,
            skip_tokenizer_init=True,
            disable_log_stats=False,
        )
        self.llm = LLM(str(tiny), **{**defaults, **options})
        self.adapters = adapters

    def request(self, name):
        from vllm.lora.request import LoRARequest

        if name is None:
            return None
        return LoRARequest(name, 1 + list(self.adapters).index(name), str(self.adapters[name]))

    def tokens(self, prompts, names, length=6):
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=length, min_tokens=length, detokenize=False, ignore_eos=True
        )
        out = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            sampling,
            lora_request=[self.request(name) for name in names],
            use_tqdm=False,
        )
        return [list(each.outputs[0].token_ids) for each in out]

    @property
    def manager(self):
        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        return runner.lora_manager._adapter_manager

    @property
    def wrapper(self):
        return next(iter(self.manager.punica_wrapper_mapping.values()))

    def metric(self, name):
        return sum(each.value for each in self.llm.get_metrics() if each.name == name)
