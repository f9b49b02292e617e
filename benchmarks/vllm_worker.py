"""One engine of vLLM in a process of its own, for `vllm_gpu`."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from engine_processes import prompts_of, serve

VARIABLE = "LORA_BACKENDS_VLLM"
UNITS = 64.0  # standard deviation of 8-bit weights, whose largest value is 448


class DrawnWeights:
    """An extension of vLLM's workers: vLLM's dummy weights make all logits equal."""

    def draw_weights(self) -> None:
        """Draw the weights anew, the same in every engine; vLLM leaves 8-bit ones undrawn."""
        import torch

        model: Any = self.model_runner.model  # type: ignore[attr-defined]
        while not hasattr(model, "named_parameters"):
            model = model.runnable
        with torch.inference_mode():
            for name, weight in model.named_parameters():
                seed = zlib.crc32(name.replace(".base_layer", "").encode())
                generator = torch.Generator(device=weight.device).manual_seed(seed)
                if weight.dtype == torch.float8_e4m3fn:  # in units of its scale
                    values = torch.empty(weight.shape, device=weight.device)
                    weight.data.copy_(values.normal_(0, UNITS, generator=generator))
                elif "norm" in name or "scale" in name:
                    weight.data.fill_(1 if "norm" in name else 0.02 / UNITS)
                elif weight.dtype in (torch.bfloat16, torch.float32):
                    weight.data.normal_(0, 0.02, generator=generator)


class Contender:
    """An engine, and the requests that it is timed with."""

    def __init__(self, spec: dict[str, Any]) -> None:
        os.environ[VARIABLE] = spec["backend"]
        start = time.perf_counter()
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        options = spec["options"] | {"worker_extension_cls": "vllm_worker.DrawnWeights"}
        self._engine: Any = LLM(**options)
        self._engine.collective_rpc("draw_weights")
        self.greeting = {"start_s": round(time.perf_counter() - start, 1)}
        self._requests = {
            name: LoRARequest(name, index + 1, folder)
            for index, (name, folder) in enumerate(spec["adapters"].items())
        }

    def seconds(self, rows: int, adapters: int, prompt: int, tokens: int) -> float:
        """Return the wall time of requests that arrive at once."""
        names = [f"adapter{row % adapters}" for row in range(rows)]
        ids = prompts_of(rows, prompt)
        start = time.perf_counter()
        self._generate(ids, names, tokens)
        return time.perf_counter() - start

    def stalls(self, rows: Sequence[int], prompts: Sequence[int]) -> dict[str, Any]:
        """Return by how many seconds a first batch of some sizes takes longer than a second.

        A size's prompts are prefills of so many tokens; its rows are decoded one step. Adapters are
        loaded first.
        """
        for request in self._requests.values():
            self._engine.llm_engine.add_lora(request)
        worst: dict[str, Any] = {"s": 0.0, "rows": 0, "prompt": 0}
        for count, length in self._sizes(rows, prompts):
            first, second = (self.seconds(count, count, length, 2) for _ in range(2))
            if first - second > worst["s"]:
                worst = {"s": round(first - second, 3), "rows": count, "prompt": length}
        return worst

    @staticmethod
    def _sizes(rows: Sequence[int], prompts: Sequence[int]) -> Iterator[tuple[int, int]]:
        for count in rows:
            yield count, 16
        for length in prompts:
            yield 1, length

    def answers(
        self, prompts: list[list[int]], names: Sequence[str], tokens: int
    ) -> list[dict[str, Any]]:
        """Return greedy tokens and, at each, the log-probabilities of the 20 likeliest tokens."""
        found = self._generate(prompts, names, tokens, logprobs=20)
        return [
            {
                "tokens": list(answer.outputs[0].token_ids),
                "tops": [
                    {str(token): value.logprob for token, value in top.items()}
                    for top in answer.outputs[0].logprobs
                ],
            }
            for answer in found
        ]

    def close(self) -> None:
        """Leave, with every process of the engine."""
        shutdown = getattr(self._engine.llm_engine.engine_core, "shutdown", lambda: None)
        shutdown()

    def _generate(
        self, ids: list[list[int]], names: Sequence[str], tokens: int, **options: Any
    ) -> list[Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options
        )
        requests = None
        if self._requests:
            every = list(self._requests.values())
            requests = [self._requests.get(name, every[0]) for name in names]
        found: list[Any] = self._engine.generate(
            [{"prompt_token_ids": each} for each in ids],
            sampling,
            lora_request=requests,
            use_tqdm=False,
        )
        return found


if __name__ == "__main__":
    serve(Contender)
