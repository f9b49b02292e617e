"""aLoRA: adapters that apply to a request from its invocation tokens on.

Tokens before the last invocation in the prompt, and requests without one, run on the base model, as
in PEFT. Their keys and values are the base model's and share its prefix cache.

Source: Greenewald et al., "Activated LoRA", arXiv:2504.12397.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from lora_backends.adapters.files.formats import CONFIG_FILE
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.integrations.vllm.adapters.blends import Term, terms_of
from lora_backends.integrations.vllm.adapters.load import Extras, extras_of
from lora_backends.integrations.vllm.methods import SECOND, replace

HASHES = "vllm.v1.core.kv_cache_utils"
USERS_OF_HASHES = ("vllm.v1.core.block_pool", "vllm.v1.simple_kv_offload.manager")
"""Modules that import the function for a block's keys by name."""

EXECUTOR = "vllm.v1.executor.abstract"
SEARCHES = (
    ("vllm.entrypoints.generate.beam_search.offline", "BeamSearchOfflineMixin"),
    ("vllm.entrypoints.generate.beam_search.online", "BeamSearchOnlineMixin"),
    ("vllm.entrypoints.llm", "LLM"),
    ("vllm.entrypoints.openai.engine.serving", "OpenAIServing"),
)
"""Beam searches of `LLM` and of the server; vLLM before 0.30 has those of the last two."""

_paths: dict[str, str] = {}
"""By an adapter's name: the path of its latest load that the scheduler's process has seen."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """The tokens that one request has in a batch."""

    request: str
    prompt: Sequence[int]  # its token ids
    first: int  # place of the first token in the request
    count: int  # of tokens
    sampled: int  # rows of logits


class _Batch(threading.local):
    """The batch that a thread is announcing to the LoRA layers."""

    rows: Callable[[], list[Rows]] | None = None  # called only if an adapter has an invocation


_batch = _Batch()


def start_of(prompt: Sequence[int], invocation: Sequence[int]) -> int | None:
    """Return the position where a prompt's last invocation starts; None without one."""
    wanted, size = list(invocation), len(invocation)
    for start in range(len(prompt) - size, -1, -1):
        if list(prompt[start : start + size]) == wanted:
            return start
    return None


def follow() -> None:
    """Wrap the methods of vLLM that announce a batch's adapters.

    Raises:
        UnsupportedInputError: this version of vLLM lacks one of them.
    """
    mixin = "vllm.v1.worker.lora_model_runner_mixin", "LoRAModelRunnerMixin"
    replace(*mixin, "set_active_loras", _first_runner)
    replace(*mixin, "_set_active_loras", _done)
    replace(SECOND, "GPUModelRunner", "add_requests", _note_prompts)
    replace(SECOND, "GPUModelRunner", "prepare_inputs", _second_runner)
    manager = "vllm.lora.model_manager", "LoRAModelManager"
    replace(*manager, "set_adapter_mapping", _from_invocation)


def follow_hashes() -> None:
    """Wrap vLLM's function for the extra keys of a block in the prefix cache.

    Raises:
        UnsupportedInputError: this version of vLLM lacks it.
    """
    import_module(HASHES)
    import_module(EXECUTOR)
    replace(EXECUTOR, "Executor", "add_lora", _note_path)
    for module in (HASHES, *USERS_OF_HASHES):
        replace(module, "", "generate_block_hash_extra_keys", _keys)
    for module, owner in SEARCHES:
        if owner.endswith("Mixin"):  # of newer versions; the others are heavy to import
            with suppress(ModuleNotFoundError):
                import_module(module)
        replace(module, owner, "beam_search", _without_invocation, is_optional=True)


def _first_runner(
    original: Callable[..., Any], runner: Any, batch: Any, counts: Any, *args: Any, **kwargs: Any
) -> Any:
    sampled = args[0] if args else kwargs.get("num_sampled_tokens")
    _batch.rows = lambda: [
        Rows(
            request=batch.req_ids[i],
            prompt=batch.token_ids_cpu[i, : batch.num_prompt_tokens[i]],
            first=int(batch.num_computed_tokens_cpu[i]),
            count=int(counts[i]),
            sampled=1 if sampled is None else int(sampled[i]),
        )
        for i in range(batch.num_reqs)
    ]
    return original(runner, batch, counts, *args, **kwargs)


def _note_prompts(original: Callable[..., Any], runner: Any, scheduled: Any) -> Any:
    """Keep the prompts of requests with adapters: this runner has them only on the device."""
    result = original(runner, scheduled)
    if not scheduled.scheduled_new_reqs:
        return result
    known = runner.__dict__.setdefault("lora_backends_prompts", {})
    for name in [name for name in known if name not in runner.req_states.req_id_to_index]:
        del known[name]
    for new in scheduled.scheduled_new_reqs:
        if new.lora_request is not None:
            known[new.req_id] = new.prompt_token_ids or ()
        else:
            known.pop(new.req_id, None)  # of a finished request with the same id
    return result


def _second_runner(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    batch = original(runner, *args, **kwargs)
    prompts = runner.__dict__.get("lora_backends_prompts", {})
    firsts, counts = batch.num_computed_tokens_np, batch.num_scheduled_tokens
    _batch.rows = lambda: [
        Rows(name, prompts.get(name, ()), int(firsts[i]), int(counts[i]), sampled=1)
        for i, name in enumerate(batch.req_ids)
    ]
    return batch


def _done(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Announce a batch's adapters, then forget its rows: the next batch may have none."""
    try:
        return original(runner, *args, **kwargs)
    finally:
        _batch.rows = None


def note_activated(manager: Any, extras: Extras) -> None:
    """Note whether an adapter that vLLM has written into a slot has an invocation."""
    if extras.invocation:
        manager.lora_backends_has_invocations = True  # until then a step looks at no row


def _from_invocation(original: Callable[..., Any], manager: Any, mapping: Any, *args: Any) -> Any:
    """Remove the adapter from the tokens before a request's invocation."""
    rows = _batch.rows
    if rows is not None and manager.__dict__.get("lora_backends_has_invocations"):
        mapping = _changed(manager, mapping, rows)
    return original(manager, mapping, *args)


def _changed(manager: Any, mapping: Any, rows: Callable[[], list[Rows]]) -> Any:
    ids = {id_ for id_ in mapping.index_mapping if id_ > 0}
    invocations = {id_: _invocation(manager, id_) for id_ in ids}
    if not any(invocations.values()):
        return mapping
    tokens, samples = list(mapping.index_mapping), list(mapping.prompt_mapping)
    before = manager.__dict__.get("lora_backends_starts", {})
    starts: dict[tuple[str, int], tuple[int, int | None]] = {}  # next token, start
    token = sample = 0
    for row in rows():
        id_ = tokens[token] if row.count else 0
        invocation = invocations.get(id_)
        if invocation:
            key = row.request, id_
            next_, start = before.get(key, (-1, None))
            if row.first != next_:  # a new request, maybe with the id of an old one; or preempted
                start = start_of(row.prompt, invocation)
            starts[key] = row.first + row.count, start
            end = row.count if start is None else min(max(start - row.first, 0), row.count)
            tokens[token : token + end] = [0] * end
            if end == row.count:
                samples[sample : sample + row.sampled] = [0] * row.sampled
        token, sample = token + row.count, sample + row.sampled
    manager.lora_backends_starts = starts
    return dataclasses.replace(mapping, index_mapping=tuple(tokens), prompt_mapping=tuple(samples))


def _invocation(manager: Any, adapter_id: int) -> tuple[int, ...]:
    lora = manager._registered_adapters.cache.get(adapter_id)
    return () if lora is None else extras_of(lora).invocation


def _without_invocation(original: Callable[..., Any], search: Any, *args: Any, **given: Any) -> Any:
    """Refuse a beam search with an aLoRA.

    It sends each beam as a prompt of its own, where a generated invocation would count; in PEFT,
    only those of the prompt do.
    """
    for value in (*args, *given.values()):
        for request in value if isinstance(value, list) else [value]:
            path = getattr(request, "lora_path", None)
            if path and invocation_at(path):
                raise UnsupportedInputError(
                    f"beam search does not run with an aLoRA (alora_invocation_tokens)\n"
                    f"  given: adapter {request.lora_name!r}\n  to do: sample, or decode greedily"
                )
    return original(search, *args, **given)


def _note_path(original: Callable[..., Any], executor: Any, request: Any) -> Any:
    """Note the path of an adapter that is loaded before any request names it."""
    result = original(executor, request)
    _paths[request.lora_name] = request.lora_path
    return result


class _Adapter(NamedTuple):
    """A request's adapter, for the keys of its blocks; reading it takes system calls."""

    terms: Sequence[Term]  # of a blend
    invocation: tuple[int, ...]


def _adapter_of(request: Any) -> _Adapter:
    """Return the adapter of a request as it was when its first block was hashed."""
    found: _Adapter | None = getattr(request, "lora_backends_adapter", None)
    if found is None:
        lora = request.lora_request
        _paths[lora.lora_name] = lora.lora_path
        terms = _terms_of(lora.lora_path)
        found = _Adapter(terms, () if terms else invocation_at(lora.lora_path))
        request.lora_backends_adapter = found
    return found


def _keys(
    original: Callable[..., Any], request: Any, first: int, end: int, *args: Any
) -> tuple[tuple[Any, ...] | None, int]:
    """Return a block's extra keys.

    A block before an aLoRA's invocation gets the base model's keys. Later blocks get the position
    of the invocation as well, because equal tokens have other keys and values if the invocation is
    elsewhere. Blocks of a blend get the paths of its parts, which may be loaded again from others.
    """
    keys, place = original(request, first, end, *args)
    if not request.lora_request:
        return keys, place
    terms, invocation = _adapter_of(request)
    if terms:
        return (*(keys or ()), ("blend_of", *_paths_of_parts(terms))), place
    if not invocation:
        return keys, place
    start = getattr(request, "lora_backends_start", -1)
    if start == -1:
        prompt = request.prompt_token_ids
        start = None if prompt is None else start_of(prompt, invocation)
        request.lora_backends_start = start
    own = import_module(HASHES)._gen_lora_extra_hash_keys(request)
    rest = tuple(keys or ())[len(own) :]
    if start is not None and start < end:
        rest = (*own, ("alora_start", start), *rest)
    return rest or None, place


live_invocations: dict[str, tuple[int, ...]] = {}
"""Invocation tokens of live adapters, which have no folder, by `lora_path`."""


def _terms_of(path: str) -> Sequence[Term]:
    """Return the terms of a blend; () for another adapter."""
    try:
        return terms_of(path) or ()
    except InvalidInputError:
        return ()  # the worker refuses it


def _paths_of_parts(terms: Sequence[Term]) -> list[str]:
    """Return the paths of a blend's parts, and of blends among them."""
    names = [term.name for term in terms]
    for name in names:  # grows by the names of blends in a blend
        nested = _terms_of(_paths.get(name, ""))
        names += [term.name for term in nested if term.name not in names]
    return [_paths.get(name, name) for name in names]


def invocation_at(path: str) -> tuple[int, ...]:
    """Return the invocation tokens of the adapter at a path; () for another kind of adapter."""
    return live_invocations[path] if path in live_invocations else _invocation_of_folder(path)


def _invocation_of_folder(path: str) -> tuple[int, ...]:
    if terms_of(path) is not None:
        return ()  # a blend has none
    file = Path(_folder_of(path)) / CONFIG_FILE
    try:
        status = file.stat()
        # a trainer may write another adapter to the same path
        return _invocation_of_file(file, status.st_mtime_ns, status.st_size, status.st_ino)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return ()  # the worker reports the error


_downloaded: dict[str, str] = {}
"""The folder of each downloaded adapter, by its name in the hub."""


def _folder_of(path: str) -> str:
    """Return the folder of an adapter; vLLM would ask the hub in every call."""
    from vllm.lora.utils import get_adapter_absolute_path

    if path not in _downloaded:
        folder: str = get_adapter_absolute_path(path)
        if Path(path).exists() or not Path(folder).is_dir():
            return folder
        _downloaded[path] = folder
    return _downloaded[path]


@lru_cache(maxsize=4096)
def _invocation_of_file(file: Path, *version: int) -> tuple[int, ...]:
    values = json.loads(file.read_bytes())
    return tuple(int(token) for token in values.get("alora_invocation_tokens") or ())
