"""The slots of a batch's rows, from the ids by which vLLM names adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lora_backends.errors import InvalidInputError

SHORT = 512
"""Batches of fewer rows look up every id. Larger ones, mostly prefills, look up one id per run of
equal ids."""


def slots_of(ids: Sequence[int], slot_of: Mapping[int, int]) -> npt.NDArray[np.int64]:
    """Return the slot of each row, [rows] int64.

    Args:
        ids: the adapter id of each row; 0: no adapter.
        slot_of: the slot of each id; that of 0 is `NO_ADAPTER`.

    Raises:
        InvalidInputError: an id has no slot.
    """
    try:
        if len(ids) < SHORT:
            return np.fromiter(map(slot_of.__getitem__, ids), np.int64, len(ids))
        # the tokens of a prompt are a run of equal ids
        every = np.fromiter(ids, np.int64, len(ids))
        firsts = np.flatnonzero(np.diff(every, prepend=every[0] - 1))
        slots = [slot_of[id_] for id_ in every[firsts].tolist()]
    except KeyError as error:
        raise InvalidInputError(
            f"vLLM has put no adapter of this id into a slot\n  given: {error.args[0]}\n"
            f"  allowed: {', '.join(map(str, sorted(slot_of)))}, where 0 is no adapter"
        ) from error
    return np.repeat(slots, np.diff(firsts, append=len(every)))
