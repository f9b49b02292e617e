"""Adapters that change while vLLM serves them, from memory: `update`, `versions`, `rollback`.

Each version is an adapter of its own inside vLLM. A request takes the newest version when the
engine receives it and ends under it; the prefix cache tells versions apart. A version that requests
use needs a slot, so an engine needs more `max_loras` than it has names of adapters.

The functions take a `vllm.LLM`, an `LLMEngine`, an `AsyncLLM` (then they return an awaitable), or
the address of a server that was started with VLLM_SERVER_DEV_MODE=1. Call them from the thread that
runs the engine.
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
    """Give an adapter a new version, on every worker, between two steps of the engine.

    A failed update changes nothing. From then on, requests that name the adapter take the version.

    Args:
        engine: that runs with the plug-in.
        name: of the adapter; a new one is made.
        tensors: by PEFT's names, on any device; they are copied.
        config: a `peft.LoraConfig`, or the contents of `adapter_config.json`.
        version: a number that the adapter's versions do not have.
        keep: versions that stay in host memory for `rollback`, the new one among them. More stay
            while requests use them.

    Raises:
        InvalidInputError: the tensors are incomplete, not finite or of wrong shapes, or the version
            is there.
        UnsupportedInputError: a feature of the adapter or a setting of the engine.
        BackendUnavailableError: the engine runs without the plug-in.
    """
    text, data = config_text(config), packed(tensors)
    return ask(engine, lambda answer: None, "update", name, version, keep, text, data)


def versions(engine: Any) -> Any:
    """Return the numbers of the versions of each live adapter, by name."""
    return ask(engine, lambda answer: answer["versions"], "versions")


def memory(engine: Any) -> Any:
    """Return the bytes that each version has on the host, of all workers: by name and number."""

    def read(answer: dict[str, Any]) -> dict[str, dict[int, int]]:
        return {
            name: {int(number): size for number, size in sizes.items()}
            for name, sizes in answer["bytes"].items()
        }

    return ask(engine, read, "versions")


def rollback(engine: Any, name: str, *, version: int) -> Any:
    """Let new requests take a version that is still kept.

    Raises:
        InvalidInputError: the adapter has no such version.
    """
    return ask(engine, lambda answer: None, "rollback", name, version)


def remove(engine: Any, name: str) -> Any:
    """Forget an adapter. Requests that have begun end under their version.

    Raises:
        InvalidInputError: there is none of this name.
    """
    return ask(engine, lambda answer: None, "remove", name)


def request(name: str, version: int | None = None) -> Any:
    """Return vLLM's `LoRARequest` for the newest version of an adapter, or for one of its versions.

    Any other `LoRARequest` of the same `lora_name` takes the newest version too.
    """
    from vllm.lora.request import LoRARequest

    text = name if version is None else f"{name}@{version}"
    return LoRARequest(text, 1, SCHEME + text)
