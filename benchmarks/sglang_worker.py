"""One engine of SGLang in a process of its own, for `sglang_step`: JSON in and out, line by line.

SGLang keeps state per process, so engines that take turns cannot share one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any


class Contender:
    """An engine, and the requests that it is timed with."""

    def __init__(self, options: dict[str, Any], names: Sequence[str]) -> None:
        import sglang
        from sglang.srt.server_args import ServerArgs

        known = set(getattr(ServerArgs, "__dataclass_fields__", options))
        self.without = sorted(options.keys() - known)  # of this version of SGLang
        options = {key: value for key, value in options.items() if key in known}
        self.engine: Any = sglang.Engine(**options)
        self.names = list(names)

    def seconds(self, rows: int, adapters: int, prompt: int, tokens: int) -> float:
        """Return the wall time of requests that arrive at once."""
        ids = [
            [(7919 * (row + 1) + 104729 * i * (row + 3)) % 31000 for i in range(prompt)]
            for row in range(rows)
        ]
        names = [self.names[row % adapters] for row in range(rows)] if self.names else None
        start = time.perf_counter()
        self._generate(ids, names, tokens)
        return time.perf_counter() - start

    def answers(
        self, prompts: list[list[int]], names: list[str | None], tokens: int
    ) -> list[dict[str, Any]]:
        """Return greedy tokens and, at each, the log-probabilities of the 20 likeliest tokens."""
        options = {"return_logprob": True, "top_logprobs_num": 20}
        found = self._generate(prompts, names if self.names else None, tokens, **options)
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

    def _generate(
        self, ids: list[list[int]], names: Any, tokens: int, **options: Any
    ) -> list[dict[str, Any]]:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        found: list[dict[str, Any]] = self.engine.generate(
            input_ids=ids, sampling_params=sampling, lora_path=names, **options
        )
        return found


def main() -> None:
    """Build the engine that the first argument describes, then answer each line."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # SGLang's processes print to the rest
    os.dup2(2, 1)
    spec = json.loads(sys.argv[1])
    os.environ.pop("LORA_BACKENDS_SGLANG", None)
    if spec["backend"]:
        os.environ["LORA_BACKENDS_SGLANG"] = spec["backend"]
    contender = Contender(spec["options"], spec["names"])
    without = f" without {', '.join(contender.without)}" if contender.without else ""
    print(json.dumps(f"ready{without}"), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(contender, asked.pop("do"))(**asked)), file=answers)
    contender.engine.shutdown()


if __name__ == "__main__":
    main()
