"""aLoRA: adapters that act on a row from their invocation tokens on.

Source: Greenewald et al., "Activated LoRA", arXiv:2504.12397, as PEFT computes it: the last place
of the tokens counts, and a row without them is the base model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lora_backends.adapters import AdapterPool
from lora_backends.errors import UnsupportedInputError, shown
from lora_backends.hf.calls.cache import past_tokens
from lora_backends.hf.calls.entries import Entry, RowAdapters
from lora_backends.hf.replacements.modules import Invocation


def invoked(
    adapters: Sequence[RowAdapters],  # per row
    slots: Mapping[str, int],
    pool: AdapterPool,
    inputs: Mapping[str, Any],  # of the forward pass, or of `generate`
    after_cache: bool,  # the tokens of a given cache are not among its ids
) -> Sequence[RowAdapters]:
    """Return the entries of rows, one per token where an adapter has to be invoked.

    On a GPU this waits for the device.

    Raises:
        UnsupportedInputError: there are no token ids to find the invocation in, or it may lie in
            the cache.
    """
    invocations = {name: pool.own_modules(slot).get("") for name, slot in slots.items()}
    # Most calls have no aLoRA, and must not wait for token ids on a device.
    if not any(isinstance(invocation, Invocation) for invocation in invocations.values()):
        return adapters
    rows: list[RowAdapters] = []
    for row, row_entry in enumerate(adapters):
        entry = _alone(row_entry)
        invocation = invocations.get(entry) if isinstance(entry, str) else None
        if not isinstance(invocation, Invocation) or not isinstance(entry, str):
            rows.append(row_entry)
            continue
        ids = inputs.get("input_ids")
        if not isinstance(ids, torch.Tensor):
            raise UnsupportedInputError(
                f"adapter {entry!r} acts from its invocation tokens on (aLoRA), and there are no "
                f"input_ids to find them in\n  to do: pass input_ids, or one entry per token"
            )
        # The last place counts, as in PEFT: a chat repeats its invocation in every turn.
        chosen = _from_invocation(entry, ids[row].tolist(), list(invocation.tokens))
        # Only a missing invocation is in doubt. Asking the cache may wait for the device.
        if chosen is None and after_cache and past_tokens(inputs):
            raise UnsupportedInputError(
                f"adapter {entry!r} acts from its invocation tokens on (aLoRA), which are not in "
                f"adapters[{row}]'s input_ids and may be in the key-value cache\n"
                f"  to do: pass one entry per token, {entry!r} from the first invocation token on "
                f"and None before it"
            )
        rows.append(chosen)
    return rows


def invocation_in(
    entry: Entry, slots: Mapping[str, int], pool: AdapterPool, ids: Sequence[int]
) -> int | None:
    """Return the position in a request's prompt from which its entry, no blend of aLoRA, applies.

    It is 0 for plain LoRA; for an aLoRA, the start of the last invocation, or None without one.
    """
    invocations = {name: pool.own_modules(slot).get("") for name, slot in slots.items()}
    for name, invocation in invocations.items():
        if not isinstance(invocation, Invocation):
            continue
        if _alone(entry) != name:
            raise UnsupportedInputError(
                f"adapter {name!r} acts from its invocation tokens on (aLoRA), and is part of a "
                f"blend\n  given: {shown(entry)}\n  allowed: its name alone, without a strength"
            )
        return _last_place(list(ids), list(invocation.tokens))
    return 0


def _alone(entry: RowAdapters) -> RowAdapters:
    """Return the name that a blend of one adapter with strength 1 means."""
    if isinstance(entry, Mapping) and len(entry) == 1:
        name, strength = next(iter(entry.items()))
        return name if strength == 1 else entry
    return entry


def _from_invocation(name: str, ids: list[int], tokens: list[int]) -> RowAdapters:
    start = _last_place(ids, tokens)
    if start is None:
        return None  # no name: a cache may go before
    return [None] * start + [name] * (len(ids) - start)


def _last_place(ids: list[int], tokens: list[int]) -> int | None:
    """Return where the last invocation in a prompt starts; None: there is none."""
    places = range(len(ids) - len(tokens), -1, -1)
    return next((i for i in places if ids[i : i + len(tokens)] == tokens), None)
