"""Embeddings and encoders, whose rows are not the batch's tokens in order.

An encoder runs on the items of a multimodal model's prompts, such as images.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from lora_backends.errors import InvalidInputError
from lora_backends.integrations.plans import Plans
from lora_backends.integrations.vllm.methods import FIRST, SECOND, lacking, replace, replaced_on

TOWER, CONNECTOR = "TOWER", "CONNECTOR"
"""vLLM's names for the two parts of an encoder, each with a wrapper of its own."""


class _Encoder(threading.local):
    """Encoder state per thread: engines of one process may run in several threads."""

    is_running = False
    items: dict[str, tuple[Plans, Sequence[int]]] = {}  # the slot of each item, by part


_encoder = _Encoder()


def is_encoding() -> bool:
    """Return whether this thread runs the encoder of a multimodal model."""
    return _encoder.is_running


def announce(part: str, plans: Plans, slots: Sequence[int]) -> None:
    """Take the slots of the items that the encoder runs on next.

    Args:
        part: `TOWER`, or `CONNECTOR`, which vLLM announces after the tower.
        plans: of that part.
        slots: one per item.
    """
    earlier = {} if part == TOWER else _encoder.items
    _encoder.items = {**earlier, part: (plans, slots)}


def follow() -> None:
    """Wrap vLLM's functions that embed, encode and load drafters.

    Raises:
        UnsupportedInputError: this version of vLLM lacks one of these methods.
    """
    replace(FIRST, "GPUModelRunner", "_preprocess", _embed_every_token)
    replace(FIRST, "", "group_and_batch_mm_kwargs", _group)
    encoder = "vllm.v1.worker.gpu.mm.encoder_runner"
    replace(encoder, "", "group_and_batch_mm_kwargs", _group, SECOND)
    for place in (SECOND, "vllm.v1.worker.mm_encoder_model_runner"):
        replace(place, "", "set_active_mm_loras", _announce_encoded)
    replace("vllm.lora.model_manager", "LoRAModelManager", "set_adapter_mapping", _set_mapping)
    drafter = "vllm.v1.spec_decode.llm_base_proposer", "SpecDecodeBaseProposer"
    replace(*drafter, "load_model", _load_drafter, FIRST)
    drafter = "vllm.v1.worker.gpu.spec_decode.speculator", "DraftModelSpeculator"
    replace(*drafter, "load_model", _load_drafter, SECOND)


def _embed_every_token(
    original: Callable[..., Any], runner: Any, scheduled: Any, *args: Any, **kwargs: Any
) -> Any:
    """Embed tokens at their batch positions if other prompts come as embeddings.

    vLLM embeds the tokens alone, so that they would get the adapters of the batch's first rows. For
    a multimodal model it embeds every place of the batch.
    """
    if not runner.enable_prompt_embeds or runner.supports_mm_inputs:
        return original(runner, scheduled, *args, **kwargs)
    rows = scheduled.total_num_scheduled_tokens
    (places,) = runner.is_token_ids.np[:rows].nonzero()
    if len(places) == rows:
        return original(runner, scheduled, *args, **kwargs)
    embed = runner.model.embed_input_ids

    def embed_at_places(input_ids: torch.Tensor) -> torch.Tensor:
        at = torch.from_numpy(places).to(input_ids.device, non_blocking=True)
        every = input_ids.new_zeros(rows)
        every[at] = input_ids
        embedded: torch.Tensor = embed(every)[at]
        return embedded

    with replaced_on(runner.model, "embed_input_ids", embed_at_places):
        return original(runner, scheduled, *args, **kwargs)


def _load_drafter(original: Callable[..., Any], drafter: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the LoRA off the embedding that a drafter shares with the model.

    A drafter embeds rows other than the batch's tokens. The model verifies the drafts, so at
    worst it accepts fewer drafts.
    """
    from vllm.lora.layers import VocabParallelEmbeddingWithLoRA

    loaded = original(drafter, *args, **kwargs)
    for module in list(drafter.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, VocabParallelEmbeddingWithLoRA):
                setattr(module, name, child.base_layer)
    return loaded


def _group(
    original: Callable[..., Any], mm_kwargs: Sequence[Any], *args: Any, **kwargs: Any
) -> Iterator[Any]:
    """Yield vLLM's groups of items for an encoder; the items of a group have one adapter.

    vLLM announces the rows of all items at once, and then runs the encoder group by group. While it
    runs on a group, every row has the group's adapter.
    """
    announced, was_running = _encoder.items, _encoder.is_running
    _encoder.items, _encoder.is_running = {}, True  # a group inside a group keeps its adapter
    try:
        for slots, run in _by_adapter(mm_kwargs, announced):
            for (plans, _), slot in zip(announced.values(), slots, strict=True):
                plans.set_every(slot)
            yield from original(run, *args, **kwargs)
    finally:
        _encoder.is_running = was_running


def _by_adapter(
    mm_kwargs: Sequence[Any], announced: dict[str, tuple[Plans, Sequence[int]]]
) -> Iterator[tuple[tuple[int, ...], Sequence[Any]]]:
    """Yield (slots, items) of each run of items with equal slots; one slot per part."""
    if not announced:
        yield (), mm_kwargs
        return
    slots = list(zip(*(each for _, each in announced.values()), strict=True))
    if len(set(slots)) == 1:
        slots = slots[:1] * len(mm_kwargs)
    if len(slots) != len(mm_kwargs):
        raise InvalidInputError(
            f"an encoder gets other items than vLLM has announced\n"
            f"  given: {len(mm_kwargs)} items\n  allowed: {len(slots)} items"
        )
    for slot, run in groupby(zip(slots, mm_kwargs, strict=True), key=lambda pair: pair[0]):
        yield slot, [item for _, item in run]


def _set_mapping(original: Callable[..., Any], manager: Any, mapping: Any, *args: Any) -> Any:
    """Let vLLM announce an encoder's items even if the last ones had the same adapters."""
    if part_of(mapping):
        if not hasattr(manager, "_last_mapping"):  # renamed: equal announcements would be dropped
            raise lacking(type(manager).__module__, "LoRAModelManager._last_mapping")
        manager._last_mapping = None
    return original(manager, mapping, *args)


def _announce_encoded(original: Callable[..., Any], **kwargs: Any) -> Any:
    """Leave out items that the second runner announces but does not encode."""
    cache, scheduled = kwargs["encoder_cache"], kwargs["scheduled_encoder_inputs"]

    def is_encoded(item: Any) -> bool:
        is_known = item.identifier in cache.encoder_outputs
        return item.data is not None and not is_known and item.modality != "prompt_embeds"

    if cache is not None:
        kwargs["scheduled_encoder_inputs"] = {
            name: [i for i in items if is_encoded(cache.mm_features[name][i])]
            for name, items in scheduled.items()
        }
    return original(**kwargs)


def part_of(mapping: Any) -> str:
    """Return the part of an encoder that a mapping of vLLM is for; "" for the language model."""
    name: str = getattr(getattr(mapping, "type", None), "name", "")
    return name if name in (TOWER, CONNECTOR) else ""
