"""One call of a model: which adapter every row uses, and the plans of its batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lora_backends.adapters import AdapterPool
from lora_backends.backend import LoRABackend
from lora_backends.batch import NO_ADAPTER
from lora_backends.common.devices import is_capturing
from lora_backends.dispatch.repeats import NO_REPEATS, Repeats
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.hf.calls.cache import carried, past_tokens
from lora_backends.hf.calls.entries import Choices, RowAdapters, entries_of, is_per_token
from lora_backends.hf.calls.rows import RowsCall, spread_slots, uses_one_slot
from lora_backends.hf.layout.images import Images
from lora_backends.hf.layout.layout import Layout, Spread, Untried, unknown_rows
from lora_backends.hf.replacements.rows import replaced_rows

MOST_PLANS = 8
"""Plans that a call keeps. A pass meets a few shapes; one that grows with the cache is new in
every step."""


@dataclass(frozen=True, eq=False)
class _Planned:
    numbers: Any  # [positions] int64 on the CPU: numbers in `Choices`
    plan: Any  # the backend's


class Request(RowsCall):
    """The slots of one call, cut into the batches that its forward passes see.

    Raises:
        InvalidInputError: a row has an empty list.
        UnsupportedInputError: a blend or a strength that cannot be applied.
    """

    def __init__(
        self,
        model: str,
        pool: AdapterPool,
        images: Images,
        adapters: Sequence[RowAdapters],  # the entry of each row, or of each of its tokens
        slots: Mapping[str, int],
        backend: LoRABackend,
        after_cache: bool,  # entries per token start after the cache's tokens
    ) -> None:
        # `joined` stays empty: the plans of one call cannot be part of a compiled program.
        super().__init__(model, pool, images, backend)
        self._choices = Choices(pool, slots, backend, map(entries_of, adapters))
        self.rows = self._choices.rows  # numbers in `Choices`, of each row
        if any(not row for row in self.rows):
            raise InvalidInputError("a row of adapters is empty; allowed: one entry per token")
        self.per_token = any(len(set(row)) > 1 for row in self.rows)
        # else entries per token count from the start of the row
        self._lists_tokens = after_cache and any(map(is_per_token, adapters))
        self._every_slot = {slot for row in self.rows for slot in row}
        self.differ = len(self._every_slot) > 1
        self.idle = self._every_slot <= {NO_ADAPTER} and not self._lists_tokens
        self.replacements = replaced_rows(pool, slots, self._choices)
        self.has_invocations = any("" in pool.own_modules(slot) for slot in slots.values())
        # Made on the first miss: most calls know the rows of every input.
        self._touched: dict[int, set[str]] | None = None  # by the adapters of this call
        self._first: int | None = None if after_cache else 0  # position of the first entry
        self._plans: dict[Any, _Planned] = {}
        # by (rows, tokens) of a pass, which fix its plans; unused where slots differ by token
        self._repeats: dict[tuple[int, int], Repeats | None] = {}
        self._may_repeat: Repeats | None = None  # in this pass
        self._rows = self._length = self._past = 0
        self._row_slots: list[int] = []
        self._continues = False  # whether there is a cache, and entries only for tokens after it
        self._inputs: Mapping[str, Any] = {}
        self._forget()

    def begin_forward(self, inputs: Mapping[str, Any], rows: int, length: int) -> None:
        """Note the shape of the forward pass that starts.

        Beams and several returned sequences repeat every row next to itself.

        Raises:
            InvalidInputError: its rows are no multiple of the number of adapters given, or a
                CUDA graph captures it.
            UnsupportedInputError: adapters differ by token, and it is not known how many tokens
                of each row went before, or which positions have logits.
        """
        self.begin(inputs, rows, length)
        past = self._past_tokens(inputs, length) if self.per_token else 0
        self._continues = self._lists_tokens and bool(carried(inputs))
        # The first pass of a call with a cache sets where its entries begin.
        self._first = past if self._first is None else self._first
        self._past = past - self._first

    def begin(self, inputs: Mapping[str, Any], rows: int, length: int) -> None:
        """Note the rows and tokens of a call of `generate`, or of a pass; errors as there."""
        if is_capturing(self.backend.device):
            raise InvalidInputError(
                "a CUDA graph cannot capture a call that makes its plan as it runs\n"
                "  given: adapters by name\n  to do: step = model.prepare(adapters), then capture "
                "model(adapters=step, ...)"
            )
        row_slots = self._slots_of_rows(rows)
        self._forget()
        self._inputs, self._rows, self._length = inputs, rows, length
        self._note_untried(inputs)
        self._row_slots = row_slots

    def _slots_of_rows(self, rows: int) -> list[int]:
        """Return the number in `Choices` of every row of a pass, or refuse its rows."""
        if not self.rows or rows % len(self.rows):
            raise InvalidInputError(
                f"adapters has {len(self.rows)} entries for a batch of {rows} rows\n"
                f"  allowed: one adapter name or None per row"
            )
        return [row[0] for row in self.rows for _ in range(rows // len(self.rows))]

    def begin_generate(
        self, inputs: Mapping[str, Any], rows: int, length: int, config: Any
    ) -> None:
        """Note the prompts: `generate` encodes images and sound before its first forward pass."""
        self.begin(inputs, rows, length)
        # words of the `GenerationConfig` are no inputs of the model
        inputs = {name: x for name, x in inputs.items() if not hasattr(config, name)}
        # Encoders run before the first pass, so modules may see them without token ids.
        self._note_untried(inputs, alone=True)

    def _note_untried(self, inputs: Mapping[str, Any], alone: bool = False) -> None:
        untried = self._images.untried(inputs) if self.differ else None
        self._untried = untried and Untried(untried[0], alone or untried[1])

    def repeats(self) -> Repeats:
        """Return the stored calls that modules may repeat in the forward pass that starts."""
        size = self._rows, self._length
        if self.per_token or self._untried is not None:
            return NO_REPEATS
        # Calls are stored from the second pass of a size on: a prompt's size rarely comes again.
        if size not in self._repeats:
            if len(self._repeats) >= MOST_PLANS:  # they keep plans alive
                self._repeats.clear()
            self._repeats[size] = None
            return NO_REPEATS
        repeats = self._repeats[size]
        if repeats is None:
            repeats = self._repeats[size] = Repeats()
        self._may_repeat = repeats
        return repeats.of_pass(self.backend.device)

    def numbers(self, shape: tuple[int, ...], layout: Layout, paths: Sequence[str]) -> torch.Tensor:
        """Return the slot of each position of such an input; arguments and errors as `plan`."""
        key, calls = f"{paths[0]} replaced", 2 * layout.calls  # asked before LoRA and after it
        numbers: torch.Tensor = self._find(shape, layout, paths, key, calls).numbers
        return numbers

    def _find_plan(self, shape: tuple[int, ...], layout: Layout, paths: Sequence[str]) -> Any:
        return self._find(shape, layout, paths, paths[0], layout.calls).plan

    def _past_tokens(self, inputs: Mapping[str, Any], length: int) -> int:
        """Return how many tokens of each row went before a pass."""
        if isinstance(inputs.get("logits_to_keep"), torch.Tensor):
            raise UnsupportedInputError(
                "logits_to_keep is a tensor of positions and adapters differ by token\n"
                "  allowed: an int, or one adapter per row"
            )
        # `generate` passes all tokens of the prompt, unless something holds the earlier ones.
        is_whole = self._first is None or length >= max(map(len, self.rows))
        if not is_whole and not carried(inputs):
            raise UnsupportedInputError(
                f"a pass of generate has {length} tokens of each row and no cache, and adapters "
                f"differ by token\n  given: {', '.join(inputs)}\n"
                f"  allowed: a cache among the inputs, or all tokens\n"
                f"  to do: use one adapter per row, or use_cache=False"
            )
        return past_tokens(inputs)

    def _forget(self) -> None:
        """Forget the previous forward pass."""
        self._may_repeat = None
        self._image_plans: dict[tuple[int, ...], _Planned | None] = {}  # None: rows not known
        self._layout = None

    def _find(
        self, shape: tuple[int, ...], layout: Layout, paths: Sequence[str], key: str, calls: int
    ) -> _Planned:
        if self._continues and math.prod(shape) > self._rows * self._length:
            # DeepSeek expands the latent vectors of all tokens in every pass.
            earlier = "it sees the cache's tokens again, and lists have no entries for them"
            earlier += " (a name for the whole row applies to them, too)"
            raise unknown_rows(paths[0], shape, self._rows, self._length, earlier, True)
        spread: Spread | None = (1, math.prod(shape))
        if self.differ:
            spread = layout.spread(shape, self._rows, self._length)
        reason = self._reason_against(spread, layout, key, calls)
        # Refused only if rows differ here: one slot for all rows needs no spread.
        if spread is None or reason is not None:
            return self._plan_without_spread(shape, paths, reason or "")
        if self.per_token:
            planned = self._plan_by_token(shape, layout, spread, paths)
        else:
            # With one slot for all, rows need no order: any input has a plan.
            slots = self._row_slots if self.differ else self._row_slots[:1]
            planned = self._keep((len(slots), spread), lambda: spread_slots(slots, spread))
        self._layout, self._shape, self._plan = layout, shape, planned.plan
        if self._may_repeat is not None:
            self._may_repeat.plan = planned.plan
        return planned

    def _keep(self, key: Any, token_slots: Callable[[], torch.Tensor]) -> _Planned:
        """Return the plan of a batch, an earlier one if there is one under `key`."""
        if key not in self._plans:
            if len(self._plans) >= MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = self._prepare(token_slots())
        return self._plans[key]

    def _prepare(self, token_slots: torch.Tensor) -> _Planned:
        batch = self._choices.batch(token_slots)
        return _Planned(token_slots, self.backend.prepare_batch(batch))

    def _plan_without_spread(
        self, shape: tuple[int, ...], paths: Sequence[str], reason: str
    ) -> _Planned:
        """Return the plan for an input of images, or of modules that no adapter here touches."""
        if self._images.hold(paths[0]) and shape and not self.per_token:
            if shape not in self._image_plans:
                self._image_plans[shape] = self._plan_of_images(shape)
            planned = self._image_plans[shape]
            if planned is not None:
                return planned
            reason = "the placeholder tokens in input_ids do not show which row has which image"
        if self._touched is None:
            self._touched = self._choices.touched_modules(self._pool, self._every_slot)
        if not uses_one_slot(self._touched, self._every_slot, paths):
            raise unknown_rows(paths[0], shape, self._rows, self._length, reason, self.per_token)
        spread = (1, math.prod(shape))
        return self._keep(("none", spread), lambda: spread_slots([NO_ADAPTER], spread))

    def _plan_of_images(self, shape: tuple[int, ...]) -> _Planned | None:
        """Return the plan for an input with images on its first axis, or None."""
        # None: rows are not known; the caller refuses the pass with the reason.
        elements = self._images.elements(self._inputs, shape[0])
        if elements is None:
            return None
        pairs = zip(self._row_slots, elements, strict=True)
        slots = [slot for slot, count in pairs for _ in range(count)]
        return self._prepare(spread_slots(slots, (1, math.prod(shape[1:]))))

    def _plan_by_token(
        self, shape: tuple[int, ...], layout: Layout, spread: Spread, paths: Sequence[str]
    ) -> _Planned:
        """Return the plan where the slots of a row differ by token."""
        rows, tokens = self._rows, math.prod(shape) // self._rows
        start = self._first_token(tokens)
        # Axes of one element change no order of the others.
        sizes = [size for size in shape if size != 1]
        in_order = (layout.in_order or self._length == tokens == 1) and sizes in [
            [size for size in allowed if size != 1]
            for allowed in ((rows, tokens), (tokens, rows), (rows * tokens,))
        ]
        if start is None or not in_order:
            reason = "adapters differ by token, and it is not known which token each position is"
            raise unknown_rows(paths[0], shape, rows, self._length, reason, True)

        def token_slots() -> torch.Tensor:
            # Tokens after the last entry of a row repeat it.
            chosen = [
                (row + row[-1:] * (start + tokens))[start : start + tokens] for row in self.rows
            ]
            slots = torch.tensor(chosen, dtype=torch.int64, device="cpu")
            slots = slots.repeat_interleave(rows // len(self.rows), dim=0)
            return (slots if spread[0] == 1 else slots.t()).flatten()

        return self._keep(("tokens", rows, start, tokens, spread), token_slots)

    def _first_token(self, tokens: int) -> int | None:
        """Return the entry of the first of `tokens` positions of each row, or None."""
        end = self._past + self._length
        if tokens == self._length:
            return self._past
        # A head sees the last tokens only.
        if tokens == self._inputs.get("logits_to_keep"):
            return end - tokens
        return 0 if tokens == end and self._first == 0 else None
