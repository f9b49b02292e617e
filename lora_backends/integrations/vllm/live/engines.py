"""Calls from a client to an engine about live adapters, through vLLM's `collective_rpc`."""

from __future__ import annotations

import base64
import inspect
import json
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from lora_backends.common.names import VLLM_VARIABLE
from lora_backends.errors import BackendUnavailableError, InvalidInputError
from lora_backends.integrations.vllm.live.messages import METHOD, checked

ROUTE = "/collective_rpc"
"""The route of vLLM's server, which exists with VLLM_SERVER_DEV_MODE=1."""


def ask(engine: Any, read: Callable[[dict[str, Any]], Any], *args: Any) -> Any:
    """Call an engine, and return `read` of its answer; for an AsyncLLM an awaitable.

    Raises:
        InvalidInputError: `engine` is not an engine of vLLM.
        BackendUnavailableError: it runs without the plug-in, or the server does not answer.
        LoRABackendError: the error that the engine answers with, by its type.
    """
    if isinstance(engine, str):
        return read(checked(_posted(engine, args)))
    target = getattr(engine, "llm_engine", engine)
    collective_rpc = getattr(target, "collective_rpc", None)
    if collective_rpc is None:
        raise InvalidInputError(
            f"live adapters need an engine of vLLM\n  given: {type(engine).__name__}\n"
            f"  allowed: vllm.LLM, LLMEngine, AsyncLLM, or the address of a server"
        )
    if not _is_followed():
        raise _without_plugin()
    if inspect.iscoroutinefunction(collective_rpc):
        return _awaited(collective_rpc(METHOD, args=args), read)
    return read(checked(collective_rpc(METHOD, args=args)[0]))


async def _awaited(answers: Awaitable[Sequence[Any]], read: Callable[[dict[str, Any]], Any]) -> Any:
    return read(checked((await answers)[0]))


def _is_followed() -> bool:
    """Return whether the plug-in is active in this process, and so in the engine's."""
    from vllm.v1.worker.worker_base import WorkerBase

    return hasattr(WorkerBase, METHOD)


def _without_plugin() -> BackendUnavailableError:
    return BackendUnavailableError(
        f"the engine runs without the plug-in\n"
        f"  to do: set {VLLM_VARIABLE} before the engine is built"
    )


def _posted(address: str, args: Sequence[Any]) -> Any:
    """Return the answer of a server."""
    texts = [base64.b64encode(a).decode() if isinstance(a, bytes) else a for a in args]
    body = json.dumps({"method": METHOD, "args": texts}).encode()
    post = urllib.request.Request(
        address.rstrip("/") + ROUTE, body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(post) as answer:
            return json.loads(answer.read())["results"][0]
    except urllib.error.HTTPError as error:
        raise BackendUnavailableError(
            f"the server does not take calls about live adapters\n"
            f"  given: HTTP status {error.code} from {address}{ROUTE}\n"
            f"  to do: start it with VLLM_SERVER_DEV_MODE=1 and {VLLM_VARIABLE}"
        ) from error
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise BackendUnavailableError(
            f"the server did not answer a call about live adapters\n"
            f"  given: {address}, {type(error).__name__}: {error}"
        ) from error
