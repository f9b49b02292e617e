"""`PreparedAdapters`: the adapters of batches of one shape, for graphs and compiled programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch

from lora_backends.adapters import AdapterPool
from lora_backends.backend import LoRABackend
from lora_backends.batch import NO_ADAPTER, LoRABatch
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.hf.hooks import RUNNING, is_capturing, rows_and_length
from lora_backends.hf.request import adapter_names, is_per_token, tokens_per_row


class PreparedAdapters:
    """Which adapter every row uses, prepared once and refilled in place, e.g. at every step.

    Made by `MultiLoRAModel.prepare`. Its plans keep their addresses, so a CUDA graph or a program
    of `torch.compile` that was captured with it follows `update`. Adapters that it names now are
    neither evicted nor replaced until it is updated, released or collected. Keep it for as long
    as a graph that was captured with it is replayed.

    Not for several threads at once.

    Args:
        model: whose calls it is for.
        pool: of the model.
        backend: of the model.
        adapters: per row a name or None.
        tokens: tokens per row of every forward pass.
        joined: what a captured graph reads besides, of the base model.
    """

    def __init__(
        self,
        model: str,
        pool: AdapterPool,
        backend: LoRABackend,
        adapters: Sequence[str | None],
        tokens: int,
        joined: Sequence[torch.Tensor | None] = (),
    ) -> None:
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise InvalidInputError(f"tokens is {tokens!r}\n  allowed: an int, 1 or more")
        adapter_names(adapters)
        if not adapters:
            raise InvalidInputError("adapters is empty\n  allowed: one name or None per row")
        self.model = model
        # Those that a graph reads live on, whatever becomes of the model.
        self.stacks, self.shared = pool.active_weights, pool.shared_weights
        self._joined = joined
        self.backend = backend
        self.rows, self.tokens = len(adapters), tokens
        self._pool = pool
        self._shape = (self.rows, tokens)
        self._plan: Any = None  # of an input of self._shape
        self._plans: dict[int, Any] = {}  # tokens per row to plan
        self._held = ExitStack()
        self._released = False
        self.update(adapters)
        self._plan = self._plan_of(tokens)

    @property
    def adapters(self) -> list[str | None]:
        """Per row the adapter's name, or None."""
        return list(self._adapters)

    def update(self, adapters: Sequence[str | None]) -> None:
        """Give every row another adapter, or none; whatever was captured follows.

        The plans are written on the current CUDA stream, where a replay has to follow.

        Args:
            adapters: per row a name or None, for as many rows as before.

        Raises:
            InvalidInputError: an unknown name, another number of rows, or an adapter that touches
                a module that no adapter touched when this was prepared. Nothing has changed.
            UnsupportedInputError: a row has an entry per token.
        """
        self._check_usable()
        names = adapter_names(adapters)
        self._check_rows(adapters)
        with ExitStack() as held:
            slots = held.enter_context(self._pool.slots.in_use(names, by="prepared"))
            self._check_adapted(slots)
            row_slots = [NO_ADAPTER if name is None else slots[name] for name in adapters]
            RUNNING.kept = None  # it belongs to the adapters of before
            self._refill(row_slots)
            self._adapters, self._row_slots = list(adapters), row_slots
            self._held.close()
            self._held = held.pop_all()

    def release(self) -> None:
        """Let its adapters be evicted; it cannot be used any more."""
        self._released = True
        self._held.close()

    def begin_forward(self, inputs: Mapping[str, Any]) -> None:
        """Refuse a forward pass that this is not prepared for.

        Raises:
            InvalidInputError: another shape, or released.
            UnsupportedInputError: a CUDA graph captures a backend that it must not capture.
        """
        if self._released:
            self._check_usable()
        rows, length = rows_and_length(inputs)
        if rows != self.rows or length != self.tokens:
            raise InvalidInputError(
                f"adapters are prepared for {self.rows} rows of {self.tokens} tokens\n"
                f"  given: {rows} rows of {length} tokens\n"
                f"  to do: prepare one for each shape, or pad the batch with rows of None"
            )
        if not torch.compiler.is_compiling() and is_capturing(self.backend.device):
            self._check_capture()

    def plan(self, shape: tuple[int, ...], path: str) -> Any:
        """Return the plan for a module's input of `shape` [rows, tokens, ...] or [tokens, ...].

        Raises:
            UnsupportedInputError: tokens of the input cannot be told to rows of the batch.
            InvalidInputError: a graph captures a shape that no call has met before.
        """
        if shape == self._shape:
            return self._plan
        return self._plan_of(tokens_per_row(shape, self.rows, self.tokens, path))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<PreparedAdapters of {self.rows} rows of {self.tokens} tokens: {self._adapters}>"

    def _refill(self, row_slots: Sequence[int]) -> None:
        """Write all plans, or leave all as they were."""
        batches = {tokens: self._batch(row_slots, tokens) for tokens in self._plans}
        try:
            for tokens, plan in self._plans.items():
                self.backend.prepare_batch(batches[tokens], out=plan)
        except BaseException:
            for tokens, plan in self._plans.items():
                self.backend.prepare_batch(self._batch(self._row_slots, tokens), out=plan)
            raise

    def _plan_of(self, tokens: int) -> Any:
        if tokens not in self._plans:
            if torch.compiler.is_compiling() or is_capturing(self.backend.device):
                raise InvalidInputError(
                    f"no plan for {tokens} tokens per row, and none is made while a graph is\n"
                    f"  to do: warm up with model(adapters=step, ...) and the same inputs"
                )
            batch = self._batch(self._row_slots, tokens)
            self._plans[tokens] = self.backend.prepare_batch(batch)
        return self._plans[tokens]

    def _batch(self, row_slots: Sequence[int], tokens: int) -> LoRABatch:
        slots = torch.tensor(row_slots, dtype=torch.int64).repeat_interleave(tokens)
        return LoRABatch(slots, self._pool.slots.num_slots)

    def _check_usable(self) -> None:
        if self._released:
            raise InvalidInputError(
                "these prepared adapters were released\n  to do: model.prepare(...) new ones"
            )

    def _check_rows(self, adapters: Sequence[str | None]) -> None:
        if len(adapters) != self.rows:
            raise InvalidInputError(
                f"adapters has {len(adapters)} entries, prepared are {self.rows} rows\n"
                f"  to do: pad with None, or prepare for another number of rows"
            )
        if any(is_per_token(entry) for entry in adapters):
            raise UnsupportedInputError(
                "prepared adapters differ by token\n  allowed: one name or None per row\n"
                "  to do: give the list itself to a call of the model"
            )

    def _check_adapted(self, slots: Mapping[str, int]) -> None:
        """Refuse adapters that a graph captured with this would apply only in part."""
        for name, slot in slots.items():
            missed = [path for path in self._pool.modules_of(slot) if self._misses(path, slot)]
            if missed:
                raise InvalidInputError(
                    f"adapter {name!r} touches modules that were not adapted, or had no bias, when "
                    f"this was prepared: {', '.join(missed[:3])}{', ...' * (len(missed) > 3)}\n"
                    f"  to do: prepare and capture again, after loading one adapter of each kind"
                )

    def _misses(self, path: str, slot: int) -> bool:
        """Return whether a graph captured with this would leave out a module, or its bias."""
        mine, current = self.stacks.get(path), self._pool.active_weights[path]
        if mine is None or mine is current:
            return mine is None
        return mine.lora_a is not current.lora_a or self._pool.has_bias(slot, path)

    def _check_capture(self) -> None:
        if not self.backend.cuda_graphs:
            raise UnsupportedInputError(
                f"a CUDA graph cannot capture backend {self.backend.name!r}: it works on the host\n"
                f"  to do: use a backend that claims cuda_graphs, e.g. triton"
            )
