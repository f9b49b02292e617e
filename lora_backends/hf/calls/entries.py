"""The entry of a row: one adapter, a blend of several with a strength for each, or none."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from lora_backends.adapters import AdapterPool
from lora_backends.backend import LoRABackend
from lora_backends.batch import NO_ADAPTER, LoRABatch
from lora_backends.errors import InvalidInputError, UnsupportedInputError, shown
from lora_backends.features import TOKEN_SCALES

Entry: TypeAlias = str | Mapping[str, float] | None
"""An adapter's name, or names with the strengths that multiply their deltas, or None."""

RowAdapters: TypeAlias = Entry | Sequence[Entry]
"""One row's entry, or one for each token of the row."""

ALLOWED = "an adapter's name, a dict of names to strengths, or None"

MOST = torch.finfo(torch.float32).max


def adapter_names(adapters: Sequence[RowAdapters]) -> set[str]:
    """Return the distinct names in `adapters`; InvalidInputError unless one right entry per row."""
    if isinstance(adapters, str) or not isinstance(adapters, Sequence):
        raise InvalidInputError(
            f"adapters is {adapters!r}\n  allowed: a list with one adapter name or None per row, "
            f"e.g. adapters=[{adapters!r}]"
        )
    names: set[str] = set()
    for row, entry in enumerate(adapters):
        for chosen in entries_of(entry):
            if isinstance(chosen, Mapping):
                _check_blend(row, chosen)
                names.update(chosen)
            elif isinstance(chosen, str):
                names.add(chosen)
            elif chosen is not None:
                raise InvalidInputError(
                    f"adapters[{row}] holds {shown(chosen)}\n  allowed: {ALLOWED}"
                )
    return names


def is_per_token(entry: RowAdapters) -> bool:
    """Return whether a row has an entry for each token."""
    return isinstance(entry, Sequence) and not isinstance(entry, str)


def entries_of(entry: RowAdapters) -> Sequence[Any]:
    """Return the entries of a row's tokens, or the one of all of them."""
    return entry if is_per_token(entry) else [entry]  # type: ignore[return-value]


def _check_blend(row: int, blend: Mapping[Any, Any]) -> None:
    if not blend:
        raise InvalidInputError(
            f"adapters[{row}] holds an empty dict\n"
            f"  allowed: one adapter or more, with strengths; None for the base model alone"
        )
    for name, strength in blend.items():
        if not isinstance(name, str) or not _is_strength(strength):
            raise InvalidInputError(
                f"adapters[{row}] holds a blend with {shown(name)}: {shown(strength)}\n"
                f"  allowed: names of adapters to finite numbers, e.g. "
                f'{{"pirate": 0.7, "json": 0.3}}'
            )


def _is_strength(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return abs(float(value)) <= MOST  # False for NaN
    except OverflowError:
        return False


class Choices:
    """The entries of a batch as numbers, which layouts spread over positions as they do slots.

    `NO_ADAPTER` is no adapter, a slot is its adapter with strength 1, and every other blend has a
    number from num_slots on.

    Raises:
        UnsupportedInputError: strengths that `backend` cannot apply, a strength of an adapter with
            a LoRA bias, or a blend of an adapter that uses DoRA with another one.
    """

    def __init__(
        self,
        pool: AdapterPool,
        slots: Mapping[str, int],
        backend: LoRABackend,
        rows: Iterable[Sequence[Entry]],  # checked by `adapter_names`
        width: int = 1,  # adapters per token that a batch has at least
        scaled: bool = False,  # strengths even if all of them are 1
    ) -> None:
        self._num_slots = pool.slots.num_slots
        self._blends: dict[tuple[tuple[int, float], ...], int] = {}  # slots, strengths -> number
        self.rows = [[self._number(entry, slots) for entry in row] for row in rows]
        """The numbers of each row."""
        # A plan that is refilled keeps its width, so a narrower blend is padded.
        self.width = max([width, *map(len, self._blends)])
        self.scaled = scaled or any(scale != 1 for blend in self._blends for _, scale in blend)
        if self._blends:
            names = {slot: name for name, slot in slots.items()}
            self._check(pool, names, backend)
        # Without blends the numbers are slots already: no table and no wider batch.
        self._table = self._as_table() if self.scaled or self.width > 1 else None

    @property
    def first(self) -> list[int]:
        """The number of each row, or of the first token where a row has one for each."""
        return [row[0] for row in self.rows]

    @property
    def is_plain(self) -> bool:
        """Whether every row has one adapter with strength 1 at most: numbers are slots."""
        return self._table is None

    def batch(self, positions: torch.Tensor) -> LoRABatch:
        """Return the batch of the numbers at each position."""
        if self._table is None:
            return LoRABatch(positions, self._num_slots)
        slots, scales = (column[positions + 1] for column in self._table)
        return LoRABatch(slots, self._num_slots, scales if self.scaled else None)

    def slots_of(self, number: int) -> Sequence[int]:
        """Return the slots of the adapters of one number."""
        if number < self._num_slots:
            return () if number == NO_ADAPTER else (number,)
        blend = list(self._blends)[number - self._num_slots]
        return [slot for slot, _ in blend]

    def touched_modules(self, pool: AdapterPool, chosen: Iterable[int]) -> dict[int, set[str]]:
        """Return, for each number, the paths of the modules that its adapters touch."""
        return {
            number: {path for slot in self.slots_of(number) for path in pool.modules_of(slot)}
            for number in {*chosen}
        }

    def _number(self, entry: Entry, slots: Mapping[str, int]) -> int:
        if entry is None:
            return NO_ADAPTER
        if isinstance(entry, str):
            return slots[entry]
        # By name, so that a blend is summed in one order whatever the order it is written in.
        blend = tuple((slots[name], float(entry[name])) for name in sorted(entry))
        # A blend that equals one adapter takes its slot, and with it DoRA and a LoRA bias.
        if len(blend) == 1 and blend[0][1] == 1:
            return blend[0][0]
        return self._blends.setdefault(blend, self._num_slots + len(self._blends))

    def _check(self, pool: AdapterPool, names: Mapping[int, str], backend: LoRABackend) -> None:
        if self.scaled and TOKEN_SCALES not in backend.features:
            raise UnsupportedInputError(
                f"backend {backend.name!r} cannot apply strengths: it lacks {TOKEN_SCALES}\n"
                f"  to do: use another backend, e.g. torch_ref, or strengths of 1"
            )
        for blend in self._blends:
            text = " + ".join(f"{scale:g} {names[slot]!r}" for slot, scale in blend)
            for slot, scale in blend:
                if len(blend) > 1 and pool.has_dora(slot):
                    raise UnsupportedInputError(
                        f"adapter {names[slot]!r} uses DoRA, which rescales the base model's "
                        f"output and adds up with no other adapter\n  given: {text}\n"
                        f"  allowed: one adapter with DoRA per token, with a strength or without"
                    )
                if scale != 1 and pool.has_lora_bias(slot):
                    raise UnsupportedInputError(
                        f"adapter {names[slot]!r} has a LoRA bias (lora_bias), which no strength "
                        f"scales\n  given: {text}\n  allowed: strength 1"
                    )

    def _as_table(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return slots and strengths [2 + highest number, width]; the first row is NO_ADAPTER."""
        count = 1 + self._num_slots + len(self._blends)
        slots = torch.full((count, self.width), NO_ADAPTER, dtype=torch.int64, device="cpu")
        # Row n + 1 has number n, so that -1 (NO_ADAPTER) indexes the first row.
        slots[: self._num_slots + 1, 0] = torch.arange(-1, self._num_slots, device="cpu")
        scales = torch.ones((count, self.width), dtype=torch.float32, device="cpu")
        for row, blend in enumerate(self._blends, 1 + self._num_slots):
            for column, (slot, scale) in enumerate(blend):
                slots[row, column], scales[row, column] = slot, scale
        return slots, scales
