"""The adapters of a batch whose requests are packed into one row, token after token."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lora_backends.adapters import AdapterPool
from lora_backends.backend import LoRABackend
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.hf.calls.entries import Choices, Entry
from lora_backends.hf.calls.running import IDLE, ModelCall, running
from lora_backends.hf.layout.layout import Layout
from lora_backends.hf.wrapped import WrappedModel

_LENGTH, _KEPT = 5, (1, 3)
"""Tokens of the trial pass, and the positions whose logits it asks for."""

Packed = Sequence[tuple[Entry, Mapping[str, int], int]]
"""Per request, in order: its entry, its adapters' slots by name, and its number of tokens. An aLoRA
makes two parts of a request: tokens before the invocation, with entry None, and the rest."""


@dataclass(frozen=True)
class PackedModules:
    """The tokens that modules see in a pass over [1, tokens]."""

    of_tokens: frozenset[str]  # all, in their order
    of_logits: frozenset[str]  # those whose logits are asked for

    def check_adapters(self, pool: AdapterPool, slots: Mapping[str, int]) -> None:
        """Raise UnsupportedInputError for adapters of modules that see anything else."""
        for name, slot in slots.items():
            if pool.own_modules(slot).keys() - {""}:  # "" is an invocation, no module
                raise UnsupportedInputError(
                    f"adapter {name!r} has modules of its own, which no request can use\n"
                    f"  allowed: plain LoRA or aLoRA\n"
                    f"  to do: call generate() for these rows"
                )
            others = sorted({*pool.modules_of(slot)} - {""} - self.of_tokens - self.of_logits)
            if others:
                raise UnsupportedInputError(
                    f"adapter {name!r} touches modules that do not see the tokens of a row in "
                    f"their order: {', '.join(others[:3])}{', ...' * (len(others) > 3)}\n"
                    f"  allowed: adapters without them\n  to do: call generate() for these rows"
                )

    def choices(
        self, wrapped: WrappedModel, entries: Sequence[Entry], slots: Mapping[str, int]
    ) -> Choices:
        """Return entries as numbers, or refuse a blend that the backend cannot run."""
        return Choices(wrapped.pool, slots, wrapped.backend, [[entry] for entry in entries])


@torch.no_grad()
def find_packed(wrapped: WrappedModel) -> PackedModules:
    """Return the modules that see all tokens of a row, and those that see tokens with logits."""
    base: Any = wrapped.base
    device = next(base.parameters()).device
    # In a batch both kinds of modules may see the same number of tokens, so a number does not tell
    # them apart. One trial pass, which asks for fewer logits than it has tokens, does.
    inputs = {"input_ids": torch.arange(1, _LENGTH + 1, device=device)[None]}
    if (
        callable(getattr(base, "_supports_logits_to_keep", None))
        and base._supports_logits_to_keep()
    ):
        # As Transformers' own model runner asks. Under another name it would be missed here and in
        # `begin_forward`, and `plan` would refuse a head that sees fewer positions than tokens.
        inputs["logits_to_keep"] = torch.tensor(_KEPT, device=device)
    # Sets, because a module may run several times in one pass.
    seen: dict[str, set[int]] = {path: set() for path in wrapped.modules}

    mine = threading.get_ident()

    def noting(path: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if threading.get_ident() != mine:  # another thread serves a batch
                return
            x = args[0] if args and isinstance(args[0], torch.Tensor) else None
            shape = () if x is None else x.shape
            is_embedding = x is not None and not x.is_floating_point()
            seen[path].add(_tokens_in(shape if is_embedding else shape[:-1]))

        return hook

    handles = [m.register_forward_pre_hook(noting(path)) for path, m in wrapped.modules.items()]
    try:
        with running(IDLE):
            base(**inputs, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    # A module that mixes tokens, or was not seen in a trial, gets no adapter.
    in_order = {path for path in seen if wrapped.layouts[path].in_order}
    return PackedModules(
        frozenset(path for path in in_order if seen[path] == {_LENGTH}),
        frozenset(path for path in in_order if seen[path] == {len(_KEPT)}),
    )


def _tokens_in(shape: Sequence[int]) -> int:
    """Return the positions of an input with one axis of them, -1 for others."""
    return math.prod(shape) if sum(size != 1 for size in shape) <= 1 else -1


class RequestsCall(ModelCall):
    """The adapters of the tokens of each forward pass, as the hooks see them.

    `packed` says which tokens the modules see; `batch` returns the requests of the pass that
    starts.
    """

    def __init__(
        self, wrapped: WrappedModel, packed: PackedModules, batch: Callable[[], Packed]
    ) -> None:
        super().__init__(wrapped.key, wrapped.pool)
        self.reads_pages = True
        self._wrapped, self._packed, self._batch = wrapped, packed, batch
        self._tokens = _Plan(wrapped.backend)
        self._logits = _Plan(wrapped.backend)
        self._choices: Choices | None = None
        self._slots = torch.empty(0, dtype=torch.int64, device="cpu")  # number of each token
        self._kept: torch.Tensor | None = None  # positions whose logits are asked for

    def begin_forward(self, inputs: Mapping[str, Any], rows: int, length: int) -> None:
        """Note which adapter every token of the forward pass uses; refuse tokens of no request."""
        pool = self._wrapped.pool  # its stacks may have grown since the last pass
        self.stacks, self.shared, self.experts = pool.active
        packed = self._batch()
        if rows != 1 or sum(tokens for _, _, tokens in packed) != length:
            raise InvalidInputError(
                f"a forward pass of {rows} rows of {length} tokens\n"
                f"  allowed: one row with the {sum(tokens for _, _, tokens in packed)} tokens of "
                f"{len(packed)} requests"
            )
        # The requests hold their adapters, so a name has one slot in all of them.
        slots = {name: slot for _, by_name, _ in packed for name, slot in by_name.items()}
        entries = [entry for entry, _, _ in packed]
        self._choices = self._packed.choices(self._wrapped, entries, slots)
        counts = torch.tensor([tokens for _, _, tokens in packed], device="cpu")
        numbers = torch.tensor(self._choices.first, dtype=torch.int64, device="cpu")
        self._slots = numbers.repeat_interleave(counts)
        self._kept = inputs.get("logits_to_keep")
        self._tokens.forget()
        self._logits.forget()

    def plan(self, shape: tuple[int, ...], layout: Layout, paths: Sequence[str]) -> Any:
        """Return the plan for an input of `shape`, without its last axis; positions are tokens."""
        wanted = self._kept if paths[0] in self._packed.of_logits else None
        # `logits_to_keep` may be on the GPU, the slots are on the CPU.
        slots = self._slots if wanted is None else self._slots[wanted.to("cpu")]
        if _tokens_in(shape) != len(slots):
            raise UnsupportedInputError(
                f"module {paths[0]} sees an input of shape {list(shape)} (without its last axis) "
                f"in a forward pass of {len(slots)} tokens of requests\n"
                f"  to do: leave the module out of target_modules, or call generate()"
            )
        assert self._choices is not None  # begin_forward has set it
        return (self._tokens if wanted is None else self._logits).of(self._choices, slots)


class _Plan:
    """A plan with room, refilled for every forward pass.

    Another one takes its place when there are more tokens, or blends of another form.
    """

    def __init__(self, backend: LoRABackend) -> None:
        self._backend = backend
        self._plan: Any = None
        self._room: tuple[int, int, bool] = (0, 0, False)  # tokens, adapters per token, strengths
        self._is_current = False

    def forget(self) -> None:
        """Let the next use write the plan."""
        self._is_current = False

    def of(self, choices: Choices, slots: torch.Tensor) -> Any:
        """Return the plan of this pass; every module of it gets the same."""
        if self._is_current:
            return self._plan
        batch, tokens = choices.batch(slots), len(slots)
        capacity, *kind = self._room
        # A plan's blends have a fixed width: others need a plan of their own.
        if self._plan is None or tokens > capacity or kind != [choices.width, choices.scaled]:
            # A power of two, so that a growing batch rarely makes another plan.
            capacity = max(capacity, 1 << max(tokens - 1, 0).bit_length())
            self._plan = self._backend.prepare_batch(batch, capacity=capacity)
            self._room = capacity, choices.width, choices.scaled
        else:
            self._backend.prepare_batch(batch, out=self._plan)
        self._is_current = True
        return self._plan
