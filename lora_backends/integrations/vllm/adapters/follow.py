"""Wraps vLLM's methods that load adapters and write them into slots."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from lora_backends.adapters.files.formats import CONFIG_FILE
from lora_backends.adapters.files.limits import LoadLimits
from lora_backends.adapters.peft.checkpoint import read_tensors
from lora_backends.adapters.peft.config import read_json_object
from lora_backends.errors import LoRABackendError
from lora_backends.integrations.vllm.adapters import blends, invocations
from lora_backends.integrations.vllm.adapters.load import check, extras_of, load, needs_our_reader
from lora_backends.integrations.vllm.layers import set_factors
from lora_backends.integrations.vllm.live.reading import pack_once
from lora_backends.integrations.vllm.live.worker import found
from lora_backends.integrations.vllm.methods import replace

_id_of = attrgetter("lora_int_id")


def follow() -> None:
    """Wrap the methods of vLLM that load adapters and write them into slots.

    Raises:
        UnsupportedInputError: this version of vLLM lacks one of them.
    """
    worker = "vllm.lora.worker_manager"
    replace(worker, "WorkerLoRAManager", "_load_adapter", _load_adapter)
    replace(worker, "WorkerLoRAManager", "set_active_adapters", _in_order)
    manager = "vllm.lora.model_manager", "LoRAModelManager"
    replace(*manager, "activate_adapter", _activate)
    replace(*manager, "_create_merged_loras_inplace", pack_once)


def _load_adapter(original: Callable[..., Any], worker: Any, request: Any) -> Any:
    """Load an adapter: live, from files by vLLM or by our reader, or as a blend."""
    live = found(worker, request)
    if live is not None:
        return live
    terms = blends.terms_of(request.lora_path)
    lora = _read(original, worker, request) if terms is None else _blend(worker, request, terms)
    known = worker.__dict__.setdefault("lora_backends_requests", {})
    known[request.lora_name] = request
    blended: set[int] = worker.__dict__.setdefault("lora_backends_blended", set())
    if extras_of(lora).parts:
        blended.add(request.lora_int_id)
    else:
        blended.discard(request.lora_int_id)
    return lora


def _read(original: Callable[..., Any], worker: Any, request: Any) -> Any:
    from vllm.lora.utils import get_adapter_absolute_path

    folder = Path(get_adapter_absolute_path(request.lora_path))
    config = folder / CONFIG_FILE
    try:
        text = config.read_bytes() if config.is_file() else b""
        values = json.loads(text) if text else None
    except (OSError, ValueError, RecursionError):
        values = None  # vLLM's loader reports the error
    if not isinstance(values, dict) or not needs_our_reader(values):
        lora = original(worker, request)
        check(worker, lora, folder)
        return lora
    limits = LoadLimits.of(None)
    values = read_json_object(config, limits)
    _, tensors = read_tensors(folder, limits)
    return load(
        values,
        tensors,
        worker,
        request.lora_int_id,
        folder,
        getattr(request, "is_3d_lora_weight", False),
    )


def _blend(worker: Any, request: Any, terms: list[blends.Term]) -> Any:
    """Load the parts of a blend that are not loaded, and join all parts."""
    from vllm.lora.request import LoRARequest

    manager = worker._adapter_manager
    known = worker.__dict__.get("lora_backends_requests", {})
    blends.check_names(request.lora_path, known)
    parts = []
    sources: dict[str, Any] = {}
    for term in terms:
        mine = known.get(term.name)
        lora = None if mine is None else manager.get_adapter(mine.lora_int_id)
        if lora is None or _is_outdated(lora, known):
            is_served = request.lora_path.startswith(blends.SERVED)
            if mine is None and (is_served or not Path(term.name).is_dir()):
                raise blends.unknown(request.lora_path, term.name, known)
            source = mine or LoRARequest(term.name, request.lora_int_id, term.name)
            lora = _load_part(worker, source)
        parts.append((term, lora))
        sources |= {term.name: mine, **extras_of(lora).parts}
    blends.check_parts(request, sources)
    return blends.added(parts, request.lora_int_id, worker.lora_config.max_lora_rank, sources)


def _load_part(worker: Any, request: Any) -> Any:
    """Load an adapter that is not registered, its modules packed as vLLM keeps them."""
    terms = blends.terms_of(request.lora_path)
    if terms is not None:
        return _blend(worker, request, terms)
    load_by_vllm = type(worker)._load_adapter.__wrapped__
    lora = _read(load_by_vllm, worker, request)
    worker._adapter_manager._create_merged_loras_inplace(lora)
    return lora


def _is_outdated(lora: Any, known: Mapping[str, Any]) -> bool:
    """Return whether a part of a blend has been loaded again since the blend was made."""
    return any(known.get(name) is not before for name, before in extras_of(lora).parts.items())


def _in_order(
    original: Callable[..., Any], worker: Any, requests: Iterable[Any], mapping: Any
) -> Any:
    """Load new adapters in the same order on all workers, because some gather base weights.

    vLLM passes a set, whose order differs between processes. Outdated blends are loaded again.
    """
    ordered = sorted(filter(None, requests), key=_id_of)
    blended = worker.__dict__.get("lora_backends_blended", ())
    asked = [id_ for id_ in map(_id_of, ordered) if id_ in blended] if blended else ()
    if asked:  # a step with blends
        known, held = worker.lora_backends_requests, worker._adapter_manager.list_adapters()
        for id_ in asked:
            if id_ in held and _is_outdated(held[id_], known):
                worker._adapter_manager.remove_adapter(id_)
    return original(worker, ordered, mapping)


def _activate(original: Callable[..., Any], manager: Any, lora_id: int) -> Any:
    """Let vLLM write A and B into a slot, then write the adapter's scales and biases."""
    was_activated = original(manager, lora_id)
    if not was_activated:
        return was_activated  # it has its slot, as in nearly every step
    extras = extras_of(manager._registered_adapters.cache[lora_id])
    invocations.note_activated(manager, extras)
    if extras.factors:
        slot = manager.lora_index_to_id.index(lora_id)
        try:
            for target, factors in extras.factors.items():
                set_factors(manager.modules[target.layer], slot, target.piece, factors)
        except LoRABackendError:
            manager.deactivate_adapter(lora_id)
            raise
    return was_activated
