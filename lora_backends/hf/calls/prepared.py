"""`PreparedAdapters`: the adapters of batches of one shape, for graphs and compiled programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeAlias

from lora_backends.adapters import AdapterPool
from lora_backends.backend import LoRABackend
from lora_backends.batch import LoRABatch
from lora_backends.common.devices import is_capturing
from lora_backends.dispatch.repeats import NO_REPEATS, Repeats
from lora_backends.dispatch.tracing import is_traced
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.hf.calls.entries import Choices, Entry, adapter_names, is_per_token
from lora_backends.hf.calls.rows import RowsCall, slot_of_all, spread_slots, uses_one_slot
from lora_backends.hf.calls.running import RUNNING, Joined
from lora_backends.hf.hooks.overlapped import multiplies_bases
from lora_backends.hf.layout.images import Images
from lora_backends.hf.layout.layout import Layout, Spread, Untried, unknown_rows

MOST_PLANS = 16
"""Most plans that a step keeps, unless a graph has captured them."""

_Key: TypeAlias = Spread | int
"""Spread of the rows in an input; its number of positions if all rows use one slot."""

_Paths: TypeAlias = tuple[str, ...]
_Input: TypeAlias = tuple[tuple[int, ...], str]
"""Modules with one input; its shape, and the reason against its rows."""


class PreparedAdapters(RowsCall):
    """The adapter of every row, prepared once and refilled in place, e.g. at every step.

    Made by `MultiLoRAModel.prepare`. Its plans keep their addresses, so a CUDA graph or a program
    of `torch.compile` that was captured with it follows `update`. Adapters that it names now are
    neither evicted nor replaced until it is updated, released or collected. Keep it for as long
    as a graph that was captured with it is replayed.

    Not for several threads at once.

    Args:
        model: whose calls it is for.
        pool: of the model.
        backend: of the model.
        adapters: per row a name, a blend or None.
        tokens: tokens per row of every forward pass.
        layout: of most modules' inputs.
        joined: the model's, whose weights a captured graph or a program reads besides.
        images: of the model.
    """

    def __init__(
        self,
        model: str,
        pool: AdapterPool,
        backend: LoRABackend,
        adapters: Sequence[Entry],
        tokens: int,
        layout: Layout,
        joined: Mapping[str, Joined],
        images: Images,
    ) -> None:
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise InvalidInputError(f"tokens is {tokens!r}\n  allowed: an int, 1 or more")
        adapter_names(adapters)
        if not adapters:
            raise InvalidInputError("adapters is empty\n  allowed: one name or None per row")
        # The stacks that a graph reads live on, whatever becomes of the model. `replacements` stays
        # empty: `_check_adapted` refuses them.
        super().__init__(model, pool, images, backend)
        self.joined, self._read = joined, list(joined.values())
        # Fixed: a captured graph has addresses and sizes of these plans.
        self.rows, self.tokens = len(adapters), tokens
        self.multiplies_bases = multiplies_bases(backend, self.rows * tokens)
        self.asks_backend = self.multiplies_bases
        self._compiled: set[int] = set()  # active slots whose kernels are compiled
        self._layout = layout
        self._repeats = Repeats()
        self._plans: dict[_Key, Any] = {}
        self._unknown: dict[_Paths, _Input] = {}  # inputs whose rows are not known
        self._captured = False
        self._choices: Choices | None = None  # of the rows
        self._held = ExitStack()
        self._released = False
        self.update(adapters)
        # One plan is made at once, so that a capture without a warm-up has it.
        for shape in ((self.rows, tokens), (tokens, self.rows), (self.rows * tokens,)):
            if self._shape is None and layout.spread(shape, self.rows, tokens) is not None:
                self._shape, self._plan = shape, self._find_plan(shape, layout, ())
        self._repeats.plan = self._plan

    @property
    def adapters(self) -> list[Entry]:
        """Per row the adapter's name, its blend, or None."""
        return list(self._adapters)

    def update(self, adapters: Sequence[Entry]) -> None:
        """Give every row another adapter, or none; whatever was captured follows.

        The plans are written on the current CUDA stream, where a replay has to follow.

        Args:
            adapters: per row a name, a blend or None, for as many rows as before.

        Raises:
            InvalidInputError: an unknown name, another number of rows, an adapter that touches
                a module that no adapter touched when this was prepared, a blend of more adapters
                than any then, or strengths where there were none. Nothing has changed.
            UnsupportedInputError: a row has an entry per token, or rows differ in a module of
                whose input the rows are not known, or a blend as in a call. Nothing has changed.
        """
        self._check_usable()
        names = adapter_names(adapters)
        self._check_rows(adapters)
        with ExitStack() as held:
            slots = held.enter_context(self._pool.slots.in_use(names, by="prepared"))
            self._check_adapted(slots)
            # The new adapters are held before anything is written, the old ones until after that.
            before, rows = self._choices, [[entry] for entry in adapters]
            sizes = (1, False) if before is None else (before.width, before.scaled)
            choices = Choices(self._pool, slots, self.backend, rows, *sizes)
            if before is not None:
                self._check_room(before, choices)
            # Inputs without known rows have plans of one slot, which a graph may have captured.
            self._check_unknown(choices, self._unknown)
            RUNNING.kept = None  # it belongs to the adapters of before
            # After all checks: a plan that is half written would mix adapters.
            self._refill(before, choices)
            # copies: the caller may change a blend and pass it again
            self._adapters = [dict(e) if isinstance(e, Mapping) else e for e in adapters]
            self._choices = choices
            before_held, self._held = self._held, held.pop_all()
            before_held.close()  # last: an interrupt leaves too much held, never too little

    def release(self) -> None:
        """Let its adapters be evicted; it cannot be used any more."""
        self._released = True
        self._held.close()

    def begin_forward(self, inputs: Mapping[str, Any], rows: int, length: int) -> None:
        """Refuse a forward pass that this is not prepared for.

        Raises:
            InvalidInputError: another shape, or released.
            UnsupportedInputError: a CUDA graph captures a backend that it must not capture; a
                program is compiled with images or sound among its inputs.
        """
        if self._released:
            self._check_usable()
        if rows != self.rows or length != self.tokens:
            raise InvalidInputError(
                f"adapters are prepared for {self.rows} rows of {self.tokens} tokens\n"
                f"  given: {rows} rows of {length} tokens\n"
                f"  to do: prepare one for each shape, or pad the batch with rows of None"
            )
        untried = self._images.untried(inputs)
        self._untried = untried and self._counted(untried)
        if not is_traced():
            capturing = is_capturing(self.backend.device)
            if capturing:
                self._check_capture()
                self._captured = True
            if self.multiplies_bases:  # eager passes are host-bound: they ask only to compile
                active = getattr(self._plan, "active_slots", 0)
                self.asks_backend = capturing or active not in self._compiled
                if not capturing:  # a capture compiles nothing
                    self._compiled.add(active)

    def repeats(self) -> Repeats:
        """Return the stored calls that modules may repeat in the forward pass that starts."""
        if self.asks_backend or self._untried is not None:
            return NO_REPEATS
        return self._repeats.of_pass(self.backend.device)

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

    def _refill(self, before: Choices | None, choices: Choices) -> None:
        """Write all plans, or leave all as they were."""
        # All batches first: a failure here has written nothing.
        batches = {key: _batch(choices, key) for key in self._plans}
        try:
            for key, plan in self._plans.items():
                self.backend.prepare_batch(batches[key], out=plan)
        except BaseException:
            if before is not None:
                for key, plan in self._plans.items():
                    self.backend.prepare_batch(_batch(before, key), out=plan)
            raise

    def _find_plan(self, shape: tuple[int, ...], layout: Layout, paths: Sequence[str]) -> Any:
        """Return the plan for an input, made now if there is none yet."""
        assert self._choices is not None  # __init__ has updated it
        key: Any = layout.spread(shape, self.rows, self.tokens)
        reason = self._reason_against(key, layout, paths[0] if paths else "", layout.calls)
        if key is None or reason is not None:
            unknown = {tuple(paths): (shape, reason or "")}
            if not unknown.items() <= self._unknown.items():  # else every update has checked it
                self._check_unknown(self._choices, unknown)
                self._unknown |= unknown
            # One slot for all positions, whatever rows they belong to.
            key = math.prod(shape)
        if key not in self._plans:
            # A plan that a capture makes would lie in memory that its next replay reuses.
            if is_traced() or is_capturing(self.backend.device):
                raise InvalidInputError(
                    f"no plan for an input of shape {list(shape)}, and none is made while a graph "
                    f"is\n  to do: warm up with model(adapters=step, ...) and the same inputs"
                )
            self._drop_plans()
            self._plans[key] = self.backend.prepare_batch(_batch(self._choices, key))
        return self._plans[key]

    def _counted(self, untried: tuple[str, bool]) -> Untried:
        """Return a counter of modules' calls, which a compiled program cannot have."""
        if is_traced():
            raise UnsupportedInputError(
                f"a compiled program with {untried[0]} cannot use prepared adapters: images or "
                f"sound may reach modules of text\n"
                f"  to do: run this pass without torch.compile, and compile decode steps"
            )
        return Untried(*untried)

    def _drop_plans(self) -> None:
        """Make room for a plan: an input of all cached tokens needs another in every step."""
        for key in list(self._plans)[: len(self._plans) + 1 - MOST_PLANS]:
            if not self._captured and self._plans[key] is not self._plan:
                del self._plans[key]

    def _check_room(self, before: Choices, choices: Choices) -> None:
        """Refuse blends that plans, which a graph may have captured, have no room for."""
        if (choices.width, choices.scaled) != (before.width, before.scaled):
            size = f"{choices.width} adapters of a row{', strengths' * choices.scaled}"
            allowed = "strengths" if before.scaled else "no strengths but 1"
            raise InvalidInputError(
                f"these adapters were prepared without room for such a blend\n  given: {size}\n"
                f"  allowed: at most {before.width} adapters of a row, {allowed}\n"
                f"  to do: prepare and capture again with a blend of as many adapters"
            )

    def _check_unknown(self, choices: Choices, inputs: Mapping[_Paths, _Input]) -> None:
        """Refuse rows that differ in modules of whose inputs the rows are not known."""
        chosen = choices.first
        touched = choices.touched_modules(self._pool, chosen) if inputs else {}
        for paths, (shape, reason) in inputs.items():
            if not uses_one_slot(touched, chosen, paths):
                raise unknown_rows(paths[0], shape, self.rows, self.tokens, reason)

    def _check_usable(self) -> None:
        if self._released:
            raise InvalidInputError(
                "these prepared adapters were released\n  to do: model.prepare(...) new ones"
            )

    def _check_rows(self, adapters: Sequence[Entry]) -> None:
        if len(adapters) != self.rows:
            raise InvalidInputError(
                f"adapters has {len(adapters)} entries, prepared are {self.rows} rows\n"
                f"  to do: pad with None, or prepare for another number of rows"
            )
        if any(is_per_token(entry) for entry in adapters):
            raise UnsupportedInputError(
                "prepared adapters differ by token\n  allowed: one entry per row\n"
                "  to do: give the list itself to a call of the model"
            )

    def _check_adapted(self, slots: Mapping[str, int]) -> None:
        """Refuse adapters that a graph captured with this would apply only in part."""
        for name, slot in slots.items():
            if self._pool.own_modules(slot):
                raise UnsupportedInputError(
                    f"adapter {name!r} has modules of its own (modules_to_save, biases, tokens or "
                    f"an invocation), which cannot be prepared\n"
                    f"  to do: give its name to a call of the model"
                )
            missed = [path for path in self._pool.modules_of(slot) if self._misses(path, slot)]
            if missed:
                raise InvalidInputError(
                    f"adapter {name!r} touches modules that were not adapted, or had no bias or "
                    f"no output_scales (DoRA), when this was prepared: "
                    f"{', '.join(missed[:3])}{', ...' * (len(missed) > 3)}\n"
                    f"  to do: prepare and capture again, after loading one adapter of each kind"
                )

    def _misses(self, path: str, slot: int) -> bool:
        """Return whether a graph captured with this would leave out a part of a module's LoRA."""
        # Experts have several stacks by rank, so the pool compares them.
        if path in self._pool.active_experts:
            return not self._pool.is_active(slot, path, self.experts.get(path, ()))
        mine, current = self.stacks.get(path), self._pool.active_weights[path]
        # The pool replaces a stack when it grows a bias or scales. A graph keeps the old one.
        if mine is None or mine is current:
            return mine is None
        lacks_bias = mine.bias is None and self._pool.has_bias(slot, path)
        lacks_scales = mine.output_scales is None and self._pool.has_output_scales(slot, path)
        return mine.lora_a is not current.lora_a or lacks_bias or lacks_scales

    def _check_capture(self) -> None:
        if not self.backend.cuda_graphs:
            raise UnsupportedInputError(
                f"a CUDA graph cannot capture backend {self.backend.name!r}: it works on the host\n"
                f"  to do: use a backend that claims cuda_graphs, e.g. triton"
            )


def _batch(choices: Choices, key: _Key) -> LoRABatch:
    """Return the batch of the inputs that have a plan under `key`."""
    if isinstance(key, int):
        return choices.batch(spread_slots([slot_of_all(choices.first)], (1, key)))
    return choices.batch(spread_slots(choices.first, key))
