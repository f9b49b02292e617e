"""Prints tokens of engines of two processes, plain and sharded: parallel_engine.py MODEL FOLDER."""

import gc
import sys
from pathlib import Path

from helpers.adapters.peft_models import PROMPTS
from helpers.servers.vllm_engines import ADAPTERS, KINDS, LIVE, PARALLEL, Engine, live_version

from lora_backends.errors import InvalidInputError
from lora_backends.integrations.vllm import live


def main(model, folder):
    for kind, names in PARALLEL.items():
        engine = Engine(
            model,
            {name: Path(folder) / name for name in (*ADAPTERS, *KINDS)},
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
            fully_sharded_loras=kind == "sharded",
            max_loras=8,
            max_cpu_loras=9,
            disable_log_stats=True,
        )
        for tokens in engine.tokens(PROMPTS, names):
            print(kind, tokens, flush=True)
        update_live(engine.llm, Path(folder), kind)
        engine.llm.llm_engine.engine_core.shutdown()
        del engine
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
