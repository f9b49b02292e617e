"""Prints tokens of engines of two processes: parallel_engine.py MODEL ADAPTERS MIXTURES."""

import gc
import sys
from pathlib import Path

from helpers.adapters.peft_models import PROMPTS
from helpers.servers.vllm_engines import ADAPTERS, KINDS, LIVE, PARALLEL, Engine, live_version
from helpers.servers.vllm_experts import stand_in

from lora_backends.errors import InvalidInputError
from lora_backends.integrations.vllm import live

PROCESSES = dict(tensor_parallel_size=2, distributed_executor_backend="mp", disable_log_stats=True)

stand_in()  # where workers import this file, too


def main(model, folder, mixtures):
    for kind, names in PARALLEL.items():
        engine = Engine(
            model,
            {name: Path(folder) / name for name in (*ADAPTERS, *KINDS)},
            fully_sharded_loras=kind == "sharded",
            max_loras=8,
            max_cpu_loras=9,
            **PROCESSES,
        )
        for tokens in engine.tokens(PROMPTS, names):
            print(kind, tokens, flush=True)
        update_live(engine.llm, Path(folder), kind)
        end(engine)
        del engine
    for experts in (4, 5):
        run_experts(Path(mixtures) / str(experts), experts)


def run_experts(base, count):
    """Print tokens of experts in turn on the two processes, or why their adapter is refused."""
    adapters = {"experts": base / "adapter"}
    engine = Engine(base, adapters, enable_expert_parallel=True, **PROCESSES)
    try:
        engine.llm.llm_engine.add_lora(engine.request("experts"))
        found = engine.tokens(PROMPTS[:3], ["experts", None, "experts"])
    except Exception as error:  # vLLM raises its own, with the text
        found = " ".join(str(error).split())
    print(f"{count} experts {found}", flush=True)
    end(engine)


def end(engine):
    """Let an engine's processes end."""
    engine.llm.llm_engine.engine_core.shutdown()
    gc.collect()


def update_live(llm, folder, kind):
    """Print tokens of two versions of a live adapter in one batch, and the refusal of a third."""
    from vllm import SamplingParams

    for version, name in enumerate(LIVE[kind]):
        live.update(llm, "alice", *live_version(folder / name), version=version)
    tensors, config = live_version(folder / "all")
    tensors = {key: value[:, :-1] if "lora_A" in key else value for key, value in tensors.items()}
    try:
        live.update(llm, "alice", tensors, config, version=2)
    except InvalidInputError as error:
        print("live refused", " ".join(str(error).split()), flush=True)
    sampling = SamplingParams(
        temperature=0, max_tokens=6, min_tokens=6, detokenize=False, ignore_eos=True
    )
    out = llm.generate(
        [{"prompt_token_ids": PROMPTS[0]}] * 2,
        sampling,
        lora_request=[live.request("alice", 0), live.request("alice")],
        use_tqdm=False,
    )
    for each in out:
        print("live", kind, list(each.outputs[0].token_ids), live.versions(llm), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
