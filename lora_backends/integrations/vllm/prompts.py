"""Logits whose adapters vLLM does not announce.

vLLM announces an adapter for each row of logits that it samples. For prompt logprobs it hands
slices of the batch's hidden states to the same head, so their adapters are those of the tokens
there. Its second model runner announces one adapter per request, also where speculative decoding
gives a request several rows.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from lora_backends.errors import UnsupportedInputError
from lora_backends.names import VLLM_VARIABLE


class _Logits(threading.local):
    """The logits that a thread computes; engines of one process may run in several threads."""

    first_token: int | None = None
    rows_per_request: list[int] | None = None


_logits = _Logits()


def first_token() -> int | None:
    """Return the batch's token that the first row of the logits belongs to; None for samples."""
    return _logits.first_token


def rows_per_request() -> list[int] | None:
    """Return how many rows of the logits each request has; None where each row is announced."""
    return _logits.rows_per_request


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
    _replace("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "_get_prompt_logprobs_dict", _v1)
    worker = "vllm.v1.worker.gpu.sample.prompt_logprob", "PromptLogprobsWorker"
    _replace(*worker, "compute_prompt_logprobs", _v2)
    _replace(*worker, "compute_prompt_token_id_logprobs", _v2, is_optional=True)
    _replace("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "sample", _sample)


def _v1(
    own: Callable[..., Any], runner: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    state, name = vars(runner.model), "compute_logits"
    before = state.get(name)
    state[name] = by_token(runner.model.compute_logits, hidden_states)
    try:
        return own(runner, hidden_states, *args, **kwargs)
    finally:
        state.pop(name) if before is None else state.update({name: before})


def _v2(
    own: Callable[..., Any],
    worker: Any,
    logits_fn: Callable[..., Any],
    hidden_states: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return own(worker, by_token(logits_fn, hidden_states), hidden_states, *args, **kwargs)


def _sample(
    own: Callable[..., Any],
    runner: Any,
    hidden_states: torch.Tensor,
    input_batch: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    ends = input_batch.cu_num_logits_np.tolist()  # from 0, on the host
    _logits.rows_per_request = [end - first for first, end in pairwise(ends)]
    try:
        return own(runner, hidden_states, input_batch, *args, **kwargs)
    finally:
        _logits.rows_per_request = None


def _replace(
    module: str, owner: str, name: str, around: Callable[..., Any], is_optional: bool = False
) -> None:
    """Wrap a method of a runner that is imported; a second call changes nothing."""
    if module not in sys.modules:  # a runner is imported before its LoRA
        return
    found = getattr(sys.modules[module], owner, None)
    own = getattr(found, name, None)
    if own is None and not is_optional:  # its logits would get the adapters of other rows
        raise UnsupportedInputError(
            f"this version of vLLM computes logits in an unknown way\n"
            f"  given: {module} without {owner}.{name}\n"
            f"  to do: install a version of vLLM that is tested, or unset {VLLM_VARIABLE}"
        )
    if own is None or getattr(own, "follows_tokens", False):
        return

    @functools.wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(own, self, *args, **kwargs)

    method.follows_tokens = True  # type: ignore[attr-defined]
    setattr(found, name, method)
