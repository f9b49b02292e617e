"""Prints tokens of engines of two processes, plain and sharded: parallel_engine.py MODEL FOLDER."""

import gc
import sys
from pathlib import Path

from helpers.vllm_engines import ADAPTERS, KINDS, PARALLEL, PROMPTS, Engine


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
        if kind == "sharded":
            try:
                engine.llm.llm_engine.add_lora(engine.request("dora"))
            except Exception as error:
                print("refused", " ".join(str(error).split()), flush=True)
        engine.llm.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()


if __name__ == "__main__":
    main(*sys.argv[1:])
