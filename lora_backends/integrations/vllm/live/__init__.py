"""Adapters that change while vLLM serves them, from memory: `update`, `versions`, `rollback`.

Each version is an adapter of its own inside vLLM. One version of each name is current: the one that
`update` or `rollback` set last. A request takes the current version when the engine receives it and
keeps it to its end. Versions share no blocks of the prefix cache. Each version that requests use
takes a slot, so set `max_loras` above the number of live adapters.

The functions take a `vllm.LLM`, an `LLMEngine`, an `AsyncLLM` (then they return an awaitable), or
the address of a server that was started with VLLM_SERVER_DEV_MODE=1. Call them from the thread that
runs the engine. Besides the errors below, every function but `request` raises:

- InvalidInputError: `engine` is none of these;
- BackendUnavailableError: the engine runs without the plug-in, or the server does not answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lora_backends.integrations.vllm.live.engines import ask
from lora_backends.integrations.vllm.live.messages import SCHEME, config_text, packed

__all__ = ["memory", "remove", "request", "rollback", "update", "versions"]


def update(
    engine: Any,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    config: Any,
    *,
    version: int,
    keep: int = 2,
) -> Any:
    """Load a version of an adapter on every worker, between two steps of the engine.

    New requests that name the adapter take this version. Its layers compute
    ``y += scaling * (x @ A.T) @ B.T``. A failed update changes nothing.

    Args:
        engine: an engine with the plug-in, or a server's address.
        name: the adapter's name. If no live adapter has it, the update creates one.
        tensors: all tensors of the adapter by PEFT's names: `lora_A` [rank, in_features], `lora_B`
            [out_features, rank], and those of other supported kinds. They may be on any device.
            The workers hold copies in vLLM's `lora_dtype`.
        config: a `peft.LoraConfig`, or the contents of `adapter_config.json` as a dict.
        version: a number, at least 0, that no version of the adapter has.
        keep: how many versions stay in host memory for `rollback`, including this one; at least 1.
            An older version also stays while requests use it.

    Raises:
        InvalidInputError: tensors are missing, not finite or of wrong shapes, the rank is above
            `max_lora_rank`, or a version has the number.
        UnsupportedInputError: the engine cannot run this adapter, which may also be too large
            (about 4 GiB), or any live adapter, as without `enable_lora` or with
            `data_parallel_size` above 1.
    """
    text, data = config_text(config), packed(tensors)
    return ask(engine, lambda answer: None, "update", name, version, keep, text, data)


def versions(engine: Any) -> Any:
    """Return the version numbers of each live adapter, ascending: ``{"alice": [6, 7]}``."""
    return ask(engine, lambda answer: answer["versions"], "versions")


def memory(engine: Any) -> Any:
    """Return the bytes of host memory that each version takes, summed over all workers.

    The result has the form ``{"alice": {6: 126976, 7: 126976}}``.
    """

    def read(answer: dict[str, Any]) -> dict[str, dict[int, int]]:
        return {
            name: {int(number): size for number, size in sizes.items()}
            for name, sizes in answer["bytes"].items()
        }

    return ask(engine, read, "versions")


def rollback(engine: Any, name: str, *, version: int) -> Any:
    """Make a version that is still in host memory the current one. No tensor is sent.

    Raises:
        InvalidInputError: the adapter has no such version.
    """
    return ask(engine, lambda answer: None, "rollback", name, version)


def remove(engine: Any, name: str) -> Any:
    """Remove a live adapter. Requests that have begun keep their version to their end.

    Raises:
        InvalidInputError: no live adapter has this name.
    """
    return ask(engine, lambda answer: None, "remove", name)


def request(name: str, version: int | None = None) -> Any:
    """Return vLLM's `LoRARequest` for a live adapter.

    Any other `LoRARequest` with the adapter's name as `lora_name` takes the current version, too.
    The engine refuses a request for an adapter or a version that it does not have.

    Args:
        name: the adapter's name.
        version: the number of a version; None: the one that is current when the engine receives
            the request.
    """
    from vllm.lora.request import LoRARequest

    text = name if version is None else f"{name}@{version}"
    return LoRARequest(text, 1, SCHEME + text)
