"""Moves the rows of A in SGLang's memory pool to this library's layout after each load.

SGLang packs the slices of a fused layer by the adapter's rank: slice s of rank r begins at row
``s * r`` of the slot. In this library it begins at row ``s * max_rank``. SGLang's experts have
this layout already. Rows beyond a rank may hold an earlier adapter's values; they are never read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from lora_backends.common.names import SGLANG_VARIABLE
from lora_backends.errors import UnsupportedInputError
from lora_backends.integrations.sglang import experts, places
from lora_backends.integrations.sglang.backend import BackendForSGLang

KNOWN = frozenset(
    f"{name}WithLoRA"
    for name in (
        "ColumnParallelLinear",
        "FusedMoE",
        "InklingQKVRLinear",
        "MergedColumnParallelLinear",
        "ParallelLMHead",
        "QKVParallelLinear",
        "ReplicatedLinear",
        "RowParallelLinear",
        "VocabParallelEmbedding",
    )
)
"""SGLang's LoRA layers whose every call `BackendForSGLang` implements."""

REFUSED_TARGETS = ("kv_b_proj",)
"""Multi-head latent attention absorbs this weight, and adds its LoRA with SGLang's own kernels."""


def adopt_after(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Adopt the pool of a `LoRAManager` that runs on this library's backend."""
    made = original(manager, *args, **kwargs)
    if isinstance(manager.lora_backend, BackendForSGLang):
        adopt(manager)
    return made


def adopt(manager: Any) -> None:
    """Check the LoRA layers, and let each load into the pool spread its rows.

    Raises:
        UnsupportedInputError: the backend does not run one of the layers, or an adapter has a
            weight without a place.
    """
    for modules in manager.lora_modules:
        leave_towers(modules)
        for name, module in modules.items():
            _check_module(name, module)
    pool = manager.memory_pool
    ends = {
        "embed_tokens": getattr(manager, "embed_tokens_module", None),
        "lm_head": getattr(manager, "lm_head_module", None),
    }
    check = places.Places(pool, manager.lora_modules, ends).check
    for adapter in getattr(manager, "loras", {}).values():
        check(adapter)  # from --lora-paths, read before the pool is made
    load = pool.load_lora_weight_to_buffer

    @functools.wraps(load)
    def load_and_spread(uid: Any, buffer_id: int, adapter: Any, *args: Any, **kwargs: Any) -> Any:
        if uid is not None:
            clear_ends(pool, buffer_id)
        loaded = load(uid, buffer_id, adapter, *args, **kwargs)
        if uid is not None:
            spread_slot(pool, buffer_id, adapter.config.r)
        return loaded

    pool.load_lora_weight_to_buffer = load_and_spread
    manager.lora_backend.check_places = check
    manager.lora_backend.adopt(pool, modules_of(manager))


def modules_of(manager: Any) -> list[Any]:
    """Return the LoRA layers of a manager's model, without embedding and head."""
    return [module for modules in manager.lora_modules for module in modules.values()]


def leave_towers(modules: dict[str, Any]) -> None:
    """Remove the layers of encoders from SGLang's LoRA layers; their base layers run alone.

    Otherwise SGLang would add the LoRA of the language model's layer of the same number.
    `places.check_name` refuses adapters for them.
    """
    for name in list(modules):
        if places.is_tower(name.partition("layers.")[0]):
            del modules[name]


def clear_ends(pool: Any, slot: int) -> None:
    """Zero B of embedding and head in a slot.

    Otherwise the head of the slot's last adapter would stay if the next one has only an embedding,
    and the reverse.
    """
    for stacks in (pool.embedding_B_buffer, pool.lm_head_B_buffer):
        for stack in stacks.values():
            stack[slot].zero_()


def spread_slot(pool: Any, slot: int, rank: int) -> None:
    """Move the slices of every A in a slot from rows ``s * rank`` to ``s * max_rank``.

    It runs on the stream that SGLang loads on.
    """
    if rank == pool.max_lora_rank:
        return
    for stacks in pool.A_buffer.values():
        for stack in stacks:
            if stack is not None and stack.dim() == 3:  # else experts'
                spread(stack[slot], rank, pool.max_lora_rank)


def spread(rows: torch.Tensor, rank: int, max_rank: int) -> None:
    """Move slices in place, the last one first, so that no move overwrites a later slice.

    Args:
        rows: [num_slices * max_rank, in_features]; slice s begins at row ``s * rank``, and
            then at row ``s * max_rank``.
        rank: rows of each slice.
        max_rank: rows between the starts of two slices.
    """
    for s in range(rows.shape[0] // max_rank - 1, 0, -1):
        # a copy: source and target overlap where the rank is above half of max_rank
        rows[s * max_rank : s * max_rank + rank] = rows[s * rank : (s + 1) * rank].clone()


def _check_module(name: str, module: Any) -> None:
    kind = type(module).__name__
    reason = "" if kind in KNOWN else f"its class {kind} is not known"
    if name.rsplit(".", 1)[-1] in REFUSED_TARGETS:
        reason = "multi-head latent attention adds its LoRA with SGLang's own kernels"
    if kind == "FusedMoEWithLoRA":
        reason = experts.not_supported_reason(module)
    if reason:
        raise UnsupportedInputError(
            f"the plug-in for SGLang cannot run LoRA on a layer\n"
            f"  given: {name}: {reason}\n"
            f"  to do: leave it out of --lora-target-modules, or unset {SGLANG_VARIABLE}"
        )
