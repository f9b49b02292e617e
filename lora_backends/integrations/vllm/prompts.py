"""Logits whose adapters vLLM does not announce.

vLLM announces an adapter for each row of logits that it samples. For prompt logprobs it hands
slices of the batch's hidden states to the same head, so their adapters are those of the tokens
there. Its second model runner announces one adapter per request, also where speculative decoding
gives a request several rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from lora_backends.errors import UnsupportedInputError
from lora_backends.integrations.vllm.methods import FIRST, SECOND, replace, replaced_on


class _Logits(threading.local):
    """The logits that a thread computes; engines of one process may run in several threads."""

    first_token: int | None = None
    ends: Any = None  # on the host: 0, then the end of each request's rows


_logits = _Logits()


def first_token() -> int | None:
    """Return the batch's token that the first row of the logits belongs to; None for samples."""
    return _logits.first_token


def rows_per_request() -> list[int] | None:
    """Return how many rows of the logits each request has; None where each row is announced."""
    if _logits.ends is None:
        return None
    counts = [end - first for first, end in pairwise(_logits.ends.tolist())]
    return None if all(count == 1 for count in counts) else counts


def by_token(compute_logits: Callable[..., Any], hidden_states: torch.Tensor) -> Callable[..., Any]:
    """Return `compute_logits` for slices of the hidden states of a batch's tokens."""

    def compute(part: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        row = max(hidden_states.stride(0) * hidden_states.element_size(), 1)
        first, rest = divmod(part.data_ptr() - hidden_states.data_ptr(), row)
        if rest or first < 0 or first + part.shape[0] > hidden_states.shape[0]:
            raise UnsupportedInputError(
                f"prompt logprobs of this version of vLLM cannot have adapters\n"
                f"  given: {list(part.shape)}, which is no slice of the batch's hidden states\n"
                f"  to do: ask for no prompt_logprobs"
            )
        _logits.first_token = first
        try:
            return compute_logits(part, *args, **kwargs)
        finally:
            _logits.first_token = None

    return compute


def follow() -> None:
    """Let each model runner of vLLM tell which logits it computes.

    Both runners do it in private methods, and nothing public tells these logits from others.

    Raises:
        UnsupportedInputError: a runner of this version of vLLM lacks one of them.
    """
    replace(FIRST, "GPUModelRunner", "_get_prompt_logprobs_dict", _v1)
    worker = "vllm.v1.worker.gpu.sample.prompt_logprob", "PromptLogprobsWorker"
    replace(*worker, "compute_prompt_logprobs", _v2, SECOND)
    replace(*worker, "compute_prompt_token_id_logprobs", _v2, SECOND, is_optional=True)
    replace(SECOND, "GPUModelRunner", "sample", _sample)


def _v1(
    original: Callable[..., Any],
    runner: Any,
    hidden_states: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not getattr(runner, "num_prompt_logprobs", True):  # as in nearly every step
        return original(runner, hidden_states, *args, **kwargs)
    compute = by_token(runner.model.compute_logits, hidden_states)
    with replaced_on(runner.model, "compute_logits", compute):
        return original(runner, hidden_states, *args, **kwargs)


def _v2(
    original: Callable[..., Any],
    worker: Any,
    logits_fn: Callable[..., Any],
    hidden_states: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return original(worker, by_token(logits_fn, hidden_states), hidden_states, *args, **kwargs)


def _sample(
    original: Callable[..., Any],
    runner: Any,
    hidden_states: torch.Tensor,
    input_batch: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    _logits.ends = input_batch.cu_num_logits_np
    try:
        return original(runner, hidden_states, input_batch, *args, **kwargs)
    finally:
        _logits.ends = None
