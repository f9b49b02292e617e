"""One call of a model: which adapter every row uses, and the plans of its batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from lora_backends.backend import LoRABackend
from lora_backends.batch import NO_ADAPTER, LoRABatch
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.hf.hooks import is_capturing, rows_and_length
from lora_backends.weights import LoRAWeights

RowAdapters: TypeAlias = str | None | Sequence[str | None]
"""One row's adapter: a name, None, or one of those per token of the row."""


def adapter_names(adapters: Sequence[RowAdapters]) -> set[str]:
    """Return the distinct names in `adapters`.

    Raises:
        InvalidInputError: `adapters` is not one entry per row.
    """
    if isinstance(adapters, str) or not isinstance(adapters, Sequence):
        raise InvalidInputError(
            f"adapters is {adapters!r}\n  allowed: a list with one adapter name or None per row, "
            f"e.g. adapters=[{adapters!r}]"
        )
    names: set[str] = set()
    for row, entry in enumerate(adapters):
        for name in entry if is_per_token(entry) else [entry]:  # type: ignore[union-attr]
            if name is not None and not isinstance(name, str):
                raise InvalidInputError(
                    f"adapters[{row}] holds {name!r}\n  allowed: an adapter's name or None"
                )
            if name is not None:
                names.add(name)
    return names


def is_per_token(entry: RowAdapters) -> bool:
    """Return whether a row's entry is one name or None per token."""
    return isinstance(entry, Sequence) and not isinstance(entry, str)


def tokens_per_row(shape: Sequence[int], rows: int, length: int, path: str) -> int:
    """Return the tokens per row in a module's input of `shape`, without its last axis.

    Args:
        shape: [rows, tokens, ...] or [rows * length].
        rows: of the forward pass.
        length: tokens per row of the forward pass.
        path: of the module.

    Raises:
        UnsupportedInputError: tokens of the input cannot be told to rows of the batch.
    """
    if len(shape) >= 2 and shape[0] == rows:
        return int(torch.Size(shape[1:]).numel())
    if len(shape) == 1 and shape[0] == rows * length:
        return length
    raise UnsupportedInputError(
        f"module {path} sees an input of shape {list(shape)} (without its last axis) in "
        f"a forward pass of {rows} rows of {length} tokens\n"
        f"  allowed: [rows, tokens] or [rows * tokens], so that each token has a row"
    )


class Request:
    """The slots of one call, cut into the batches that its forward passes see.

    Args:
        model: whose call it is.
        stacks: path to stack of the modules that are adapted now.
        shared: a leader's path to the stack of it and its siblings.
        adapters: per row a name or None, or one of those per token.
        slots: name to slot.
        num_slots: slots of the stacked weights.
        backend: what makes the plans.
        after_cache: entries per token start behind what the key-value cache holds when the call
            begins; otherwise they count from the start of the row.
    """

    def __init__(
        self,
        model: str,
        stacks: Mapping[str, LoRAWeights],
        shared: Mapping[str, LoRAWeights],
        adapters: Sequence[RowAdapters],
        slots: Mapping[str, int],
        num_slots: int,
        backend: LoRABackend,
        after_cache: bool,
    ) -> None:
        self.model = model
        self.stacks = stacks
        self.shared = shared
        self.backend = backend
        self._first: int | None = None if after_cache else 0  # position of the first entry
        self.num_slots = num_slots
        lookup: dict[str | None, int] = {None: NO_ADAPTER}
        lookup.update(slots)
        self.per_token = any(is_per_token(entry) for entry in adapters)
        self.row_slots = [
            [lookup[name] for name in ([e] if e is None or isinstance(e, str) else e)]
            for e in adapters
        ]
        if any(not row for row in self.row_slots):
            raise InvalidInputError("a row of adapters is empty; allowed: one entry per token")
        self.idle = all(slot == NO_ADAPTER for row in self.row_slots for slot in row)
        self.rows = self.length = self.past = 0
        self._shape: tuple[int, ...] = (0, 0)
        self._plan: Any = None  # of an input of self._shape
        self._plans: dict[tuple[int, int, int], Any] = {}

    def begin_forward(self, inputs: Mapping[str, Any]) -> None:
        """Note the shape of the forward pass that starts.

        Beams and several returned sequences repeat every row next to itself.

        Raises:
            InvalidInputError: its rows are no multiple of the number of adapters given, or a
                CUDA graph captures it.
        """
        if is_capturing(self.backend.device):
            raise InvalidInputError(
                "a CUDA graph cannot capture a call that makes its plan as it runs\n"
                "  given: adapters by name\n  to do: step = model.prepare(adapters), then capture "
                "model(adapters=step, ...)"
            )
        rows, length = rows_and_length(inputs)
        if not self.row_slots or rows % len(self.row_slots):
            raise InvalidInputError(
                f"adapters has {len(self.row_slots)} entries for a batch of {rows} rows\n"
                f"  allowed: one adapter name or None per row"
            )
        past = _past(inputs) if self.per_token else 0
        if self._first is None:
            self._first = past
        self.rows, self.length, self.past = rows, length, past - self._first
        self._plan = None

    def plan(self, shape: tuple[int, ...], path: str) -> Any:
        """Return the plan for a module's input of `shape` [rows, tokens, ...] or [tokens, ...].

        Raises:
            UnsupportedInputError: tokens of the input cannot be told to rows of the batch.
        """
        if self._plan is None or shape != self._shape:
            tokens = tokens_per_row(shape, self.rows, self.length, path)
            self._shape, self._plan = shape, self._plan_of(tokens)
        return self._plan

    def _plan_of(self, tokens: int) -> Any:
        key = (self.rows, tokens, self.past if self.per_token else 0)
        if key not in self._plans:
            if self.per_token:
                self._plans.clear()  # every step has its own; do not keep them all
            batch = LoRABatch(self._token_slots(tokens), self.num_slots)
            self._plans[key] = self.backend.prepare_batch(batch)
        return self._plans[key]

    def _token_slots(self, tokens: int) -> torch.Tensor:
        """Return the slots of the last `tokens` tokens of each row, row after row."""
        repeats = self.rows // len(self.row_slots)
        end = self.past + self.length
        chosen = []
        for row in self.row_slots:
            padded = row + [row[-1]] * (end - len(row))
            chosen += [padded[end - tokens : end]] * repeats
        return torch.tensor(chosen, dtype=torch.int64).flatten()


def _past(inputs: Mapping[str, Any]) -> int:
    """Return how many tokens of each row went before: asked only where slots differ by token.

    On a GPU the answer may wait for the device.
    """
    if isinstance(inputs.get("logits_to_keep"), torch.Tensor):
        raise UnsupportedInputError(
            "logits_to_keep is a tensor of positions and adapters differ by token\n"
            "  allowed: an int, or one adapter per row"
        )
    cache = inputs.get("past_key_values")
    return int(cache.get_seq_length()) if cache is not None else 0
