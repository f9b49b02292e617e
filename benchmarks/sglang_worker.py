"""One engine of SGLang in a process of its own, for `sglang_step`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from engine_processes import prompts_of, serve


class Contender:
    """An engine, and the requests that it is timed with."""

    def __init__(self, spec: dict[str, Any]) -> None:
        os.environ.pop("LORA_BACKENDS_SGLANG", None)
        if spec["backend"]:
            os.environ["LORA_BACKENDS_SGLANG"] = spec["backend"]
        import sglang
        from sglang.srt.server_args import ServerArgs

        options = spec["options"]
        known = set(getattr(ServerArgs, "__dataclass_fields__", options))
        without = sorted(options.keys() - known)  # of this version of SGLang
        options = {key: value for key, value in options.items() if key in known}
        self._engine: Any = sglang.Engine(**options)
        self._names: list[str] = spec["names"]
        self.greeting = {"without": without}

    def seconds(self, rows: int, adapters: int, prompt: int, tokens: int) -> float:
        """Return the wall time of requests that arrive at once."""
        ids = prompts_of(rows, prompt)
        names = [self._names[row % adapters] for row in range(rows)] if self._names else None
        start = time.perf_counter()
        self._generate(ids, names, tokens)
        return time.perf_counter() - start

    def answers(
        self, prompts: list[list[int]], names: Sequence[str], tokens: int
    ) -> list[dict[str, Any]]:
        """Return greedy tokens and, at each, the log-probabilities of the 20 likeliest tokens."""
        options = {"return_logprob": True, "top_logprobs_num": 20}
        found = self._generate(prompts, list(names) if self._names else None, tokens, **options)
        return [
            {
                "tokens": list(answer["output_ids"]),
                "tops": [
                    {str(token): logprob for logprob, token, *_ in top}
                    for top in answer["meta_info"]["output_top_logprobs"]
                ],
            }
            for answer in found
        ]

    def close(self) -> None:
        """End the engine's own processes."""
        self._engine.shutdown()

    def _generate(
        self, ids: list[list[int]], names: Any, tokens: int, **options: Any
    ) -> list[dict[str, Any]]:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        found: list[dict[str, Any]] = self._engine.generate(
            input_ids=ids, sampling_params=sampling, lora_path=names, **options
        )
        return found


if __name__ == "__main__":
    serve(Contender)
