"""Prints the tokens of an engine of two processes: parallel_engine.py MODEL ADAPTERS SHARDED."""

import sys
from pathlib import Path

from vllm_engines import ADAPTERS, PROMPTS, Engine

NAMES = [None, "all", "small", "some", "uneven", "ends"]

if __name__ == "__main__":
    model, folder, sharded = sys.argv[1:]
    engine = Engine(
        model,
        {name: Path(folder) / name for name in ADAPTERS},
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        fully_sharded_loras=bool(int(sharded)),
        max_loras=5,
        disable_log_stats=True,
    )
    for tokens in engine.tokens(PROMPTS[: len(NAMES)], NAMES):
        print("tokens", tokens, flush=True)
