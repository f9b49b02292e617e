"""Live adapters in a worker of an engine: the tensors that its slots are filled from."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from lora_backends.common.names import VLLM_VARIABLE
from lora_backends.errors import BackendUnavailableError, InvalidInputError, UnsupportedInputError
from lora_backends.integrations.plans import Plans
from lora_backends.integrations.vllm.live.messages import (
    METHOD,
    SCHEME,
    config_of,
    failure,
    unpacked,
)

WORKER = "vllm.v1.worker.worker_base"


def follow() -> None:
    """Give vLLM's workers the method `METHOD`."""
    setattr(import_module(WORKER).WorkerBase, METHOD, _answer)


class Store:
    """The live adapters of one worker, by vLLM's id. vLLM may evict its own reference to one."""

    def __init__(self) -> None:
        self.prepared: dict[int, Any] = {}  # checked here, not yet by every worker
        self.held: dict[int, Any] = {}


def store_of(manager: Any) -> Store:
    """Return the live adapters of a worker's `WorkerLoRAManager`."""
    store: Store = manager.__dict__.setdefault("lora_backends_live", Store())
    return store


def found(manager: Any, request: Any) -> Any:
    """Return the `LoRAModel` of a request for a live adapter; None if the adapter is a file.

    Raises:
        InvalidInputError: this worker does not have the live adapter.
    """
    if not request.lora_path.startswith(SCHEME):
        return None
    lora = store_of(manager).held.get(request.lora_int_id)
    if lora is None:
        raise InvalidInputError(
            f"no live adapter {request.lora_path.removeprefix(SCHEME)!r} in this worker\n"
            f"  to do: call live.update first"
        )
    return lora


def _answer(worker: Any, action: str, *args: Any) -> dict[str, Any]:
    """Run one step of an update; an error becomes an answer (`failure`)."""
    try:
        manager = _manager(worker)
        if action == "prepare":
            return {"bytes": _prepare(manager, *args)}
        if action == "commit":
            _commit(manager, *args)
        elif action == "drop":
            _drop(manager, *args)
    except Exception as error:
        return failure(error)
    return {}


def _manager(worker: Any) -> Any:
    manager = getattr(worker.model_runner, "lora_manager", None)
    if manager is None:
        raise UnsupportedInputError(
            "live adapters do not run here\n  given: an engine without enable_lora"
        )
    wrappers = manager._adapter_manager.punica_wrapper_mapping.values()
    if not all(isinstance(getattr(wrapper, "tokens", None), Plans) for wrapper in wrappers):
        raise BackendUnavailableError(
            f"the engine runs without the plug-in\n"
            f"  to do: set {VLLM_VARIABLE} before the engine is built"
        )
    return manager


def _prepare(
    manager: Any, id_: int, name: str, number: int, config: str, tensors: bytes | str
) -> int:
    """Read and check a version, and return its bytes on the host. Nothing of the engine changes."""
    from lora_backends.integrations.vllm.live.reading import read

    source = Path(f"<live adapter {name!r} version {number}>")
    lora = read(config_of(config), unpacked(tensors), manager, id_, source)
    store_of(manager).prepared[id_] = lora
    return _num_bytes(lora)


def _commit(manager: Any, id_: int) -> None:
    store = store_of(manager)
    store.held[id_] = store.prepared.pop(id_)


def _drop(manager: Any, ids: Iterable[int]) -> None:
    store = store_of(manager)
    for id_ in ids:
        store.prepared.pop(id_, None)
        if store.held.pop(id_, None) is not None:
            manager._adapter_manager.remove_adapter(id_)


def _num_bytes(lora: Any) -> int:
    """Return the bytes of a `LoRAModel` and of its `Extras`."""
    from lora_backends.integrations.vllm.adapters.load import extras_of

    tensors: list[Any] = []
    for layer in lora.loras.values():
        for each in (layer.lora_a, layer.lora_b):
            tensors += each if isinstance(each, list) else [each]
    for factors in extras_of(lora).factors.values():
        tensors += [factors.scales, factors.bias]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
