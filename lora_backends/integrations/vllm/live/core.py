"""Live adapters in an engine's core, which schedules requests and calls the workers.

An update is one call between two steps: every worker reads and checks the tensors, then every
worker commits them, and then the core gives the version to new requests. vLLM runs each version as
an adapter of its own. So a running request keeps the version that it began with, and versions share
no blocks of the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from lora_backends.errors import InvalidInputError, LoRABackendError, UnsupportedInputError, shown
from lora_backends.integrations.vllm.adapters.invocations import live_invocations
from lora_backends.integrations.vllm.live import worker
from lora_backends.integrations.vllm.live.held import Hold, Version, Versions, numbers, request_name
from lora_backends.integrations.vllm.live.messages import (
    METHOD,
    SCHEME,
    checked,
    config_of,
    failure,
)
from lora_backends.integrations.vllm.methods import replace

CORE = "vllm.v1.engine.core"
"""vLLM's module of `EngineCore`, which runs in an engine's own process or in the caller's."""
ENGINE = "vllm.v1.engine.llm_engine"
"""vLLM's module of `LLMEngine`, which callers step themselves."""


def follow() -> None:
    """Let the engines and workers of this process answer calls of `METHOD`.

    Raises:
        UnsupportedInputError: this version of vLLM lacks a method that is wrapped.
    """
    for module in (CORE, ENGINE):
        import_module(module)
    replace(CORE, "EngineCore", "collective_rpc", _collective_rpc)
    replace(CORE, "EngineCore", "preprocess_add_request", _preprocess)
    replace(CORE, "EngineCore", "add_lora", _add_lora)
    replace(ENGINE, "LLMEngine", "add_request", _add_request)
    worker.follow()


def _collective_rpc(
    original: Callable[..., Any],
    core: Any,
    method: Any,
    timeout: float | None = None,
    args: Sequence[Any] = (),
    kwargs: Any = None,
) -> Any:
    """Answer calls about live adapters; vLLM has no other public way into its core."""
    if method != METHOD:
        return original(core, method, timeout, args, kwargs)
    try:
        return [_answer(core, *args)]
    except Exception as error:
        return [failure(error)]


def _answer(core: Any, action: str = "", name: str = "", *more: Any) -> dict[str, Any]:
    state = _versions(core)
    if action == "update":
        _update(core, state, name, *more)
    elif action == "rollback":
        state.put(name, state.find(name, _number(*more)))
    elif action == "remove":
        state.remove(name)
    elif action != "versions":
        raise InvalidInputError(
            f"live adapters have no action {shown(action)}\n"
            f"  allowed: update, rollback, remove, versions"
        )
    unused = state.take_unused()
    if unused:
        _ask_workers(core, "drop", [version.id for version in unused])
        for version in unused:
            live_invocations.pop(version.request.lora_path, None)
    held = state.held()
    return {
        "versions": {each: numbers(versions) for each, versions in held.items()},
        "bytes": {
            each: {str(version.number): version.num_bytes for version in versions}
            for each, versions in held.items()
        },
    }


def _versions(core: Any) -> Versions:
    found: Versions = core.__dict__.setdefault("lora_backends_live", Versions())
    return found


def _update(
    core: Any, state: Versions, name: str, version: Any, keep: Any, config: str, tensors: Any
) -> None:
    from vllm.lora.request import LoRARequest

    number, keep = _number(version), _number(keep)
    if not isinstance(name, str) or not name or keep < 1:
        raise InvalidInputError(
            f"a live adapter needs a name and a version to keep\n"
            f"  given: name {shown(name)}, keep {keep}\n"
            f"  allowed: a nonempty name, keep of at least 1"
        )
    _check_settings(core.vllm_config)
    state.check_new(name, number)
    id_ = state.new_id()
    try:
        found = _ask_workers(core, "prepare", id_, name, number, config, tensors)
    except Exception:
        _ask_workers(core, "drop", [id_])
        raise
    _ask_workers(core, "commit", id_)  # only moves a reference, so it cannot fail
    internal = request_name(name, number, id_)
    request = LoRARequest(internal, id_, SCHEME + internal)
    invocation = config_of(config).get("alora_invocation_tokens") or ()
    live_invocations[request.lora_path] = tuple(map(int, invocation))
    size = sum(each["bytes"] for each in found)
    state.put(name, Version(number, id_, request, size), keep)


def _ask_workers(core: Any, action: str, *args: Any) -> list[dict[str, Any]]:
    answers = core.model_executor.collective_rpc(METHOD, args=(action, *args))
    return [checked(answer) for answer in answers]


def _check_settings(config: Any) -> None:
    refused = ""
    if config.lora_config is None:
        refused = "an engine without enable_lora"
    elif config.parallel_config.data_parallel_size > 1:
        refused = "data_parallel_size above 1: each of its engines would change by itself"
    elif getattr(config.lora_config, "enable_tower_connector_lora", False):
        refused = "enable_tower_connector_lora: vLLM caches an encoder's rows by an adapter's name"
    if refused:
        raise UnsupportedInputError(f"live adapters do not run here\n  given: {refused}")


def _number(value: Any) -> int:
    text = str(value)
    if isinstance(value, bool) or not text.isdecimal():
        raise InvalidInputError(
            f"version and keep of a live adapter are numbers\n  given: {shown(value)}\n"
            f"  allowed: an int, at least 0"
        )
    return int(text)


def _preprocess(original: Callable[..., Any], core: Any, request: Any, *args: Any) -> Any:
    """Give a new request the version that it keeps to its end."""
    lora, state = request.lora_request, core.__dict__.get("lora_backends_live")
    if lora is None:
        return original(core, request, *args)
    if state is None:
        state = _versions(core)
    hold = Hold()
    with state.lock:
        version = state.asked_for(lora.lora_name, lora.lora_path, request.request_id)
        if version is not None:
            version.users.add(hold)
    if version is None:
        _check_blend(state, lora)
        return original(core, request, *args)
    request.lora_request = version.request
    result = original(core, request, *args)
    with state.lock:
        version.users.add(result[0])
    return result


def _add_request(
    original: Callable[..., Any], engine: Any, request_id: str, *args: Any, **kwargs: Any
) -> Any:
    """Abort a request that is refused: vLLM has registered it and would wait for its answer."""
    try:
        return original(engine, request_id, *args, **kwargs)
    except LoRABackendError:
        engine.abort_request([request_id])
        raise


def _check_blend(state: Versions, lora: Any) -> None:
    """Refuse a blend of live adapters: it would keep the versions that it was made from."""
    from lora_backends.integrations.vllm.adapters.blends import terms_of

    held = state.held()
    live = [term.name for term in terms_of(lora.lora_path) or () if term.name in held]
    if live:
        raise UnsupportedInputError(
            f"a blend takes no live adapter\n  given: {', '.join(live)} in {lora.lora_path!r}\n"
            f"  to do: load the adapter from a folder under another name"
        )


def _add_lora(original: Callable[..., Any], core: Any, request: Any) -> Any:
    """Let vLLM's server register a live adapter, whose tensors the workers have already."""
    if _versions(core).asked_for(request.lora_name, request.lora_path) is not None:
        return True
    _check_blend(_versions(core), request)
    return original(core, request)
