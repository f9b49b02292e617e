"""Prints tokens of engines of two processes, plain and sharded: parallel_engine.py MODEL FOLDER."""

import gc
import sys
from pathlib import Path

from helpers.vllm_engines import ADAPTERS, PROMPTS, Engine

NAMES = [None, "all", "small", "some", "uneven", "ends"]


def main(model, folder):
    for sharded in (False, True):
        engine = Engine(
            model,
            {name: Path(folder) / name for name in ADAPTERS},
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
            fully_sharded_loras=sharded,
            max_loras=5,
            disable_log_stats=True,
        )
        for tokens in engine.tokens(PROMPTS[: len(NAMES)], NAMES):
            print("sharded" if sharded else "plain", tokens, flush=True)
        engine.llm.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()


if __name__ == "__main__":
    main(*sys.argv[1:])
