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
from lora_backends.hf.replacements.rows import Replacement, replaced_rows
from lora_backends.hf.wrapped import WrappedModel

_LENGTH, _KEPT = 5, (1, 3)
"""Tokens of the trial pass, and the positions whose logits it asks for."""

Packed = Sequence[tuple[Entry, Mapping[str, int], int]]
"""Per request, in order: its entry, its adapters' slots by name, and its number of tokens. An aLoRA
makes two parts of a request: tokens before the invocation, with entry None, and the rest."""


@dataclass(frozen=True)
class PackedModules:
    """The tokens that modules see in a pass over [1, tokens]."""

    of_tokens: frozenset[str]  # all
    of_logits: frozenset[str]  # those whose logits are asked for
    layouts: Mapping[str, Layout]  # of the wrapper: it learns of norms when an adapter has its own
    owners: Mapping[str, str]  # path of a parameter of experts to that of its module

    def check_adapters(self, pool: AdapterPool, slots: Mapping[str, int]) -> None:
        """Raise UnsupportedInputError for modules that see anything else, and other sizes."""
        seen = self.of_tokens | self.of_logits
        for name, slot in slots.items():
            for path, own in pool.own_modules(slot).items():
                if isinstance(own, Replacement) and own.width is not None:
                    raise UnsupportedInputError(
                        f"adapter {name!r} has {path} with {own.width} outputs, and requests share "
                        f"one number of outputs\n"
                        f"  allowed: modules of the base model's sizes\n"
                        f"  to do: call the model for these rows, with logits_as_list=True"
                    )
            # A module that mixes tokens sees no order; "" is an invocation, no module.
            touched = {self.owners.get(path, path) for path in pool.modules_of(slot)} - {""}
            others = sorted(
                path for path in touched if path not in seen or not self.layouts[path].in_order
            )
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
    # Modules without LoRA, such as norms, may be an adapter's own.
    holders = {path: module for path, module in base.named_modules() if module._parameters}
    modules = {**holders, **wrapped.modules}
    # Sets, because a module may run several times in one pass.
    seen: dict[str, set[int]] = {path: set() for path in modules}

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

    handles = [m.register_forward_pre_hook(noting(path)) for path, m in modules.items()]
    try:
        with running(IDLE):
            base(**inputs, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return PackedModules(
        frozenset(path for path in seen if seen[path] == {_LENGTH}),
        frozenset(path for path in seen if seen[path] == {len(_KEPT)}),
        wrapped.layouts,
        {path: site.path for site in wrapped.experts.values() for path in site.paths},
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
        self.replacements = replaced_rows(pool, slots, self._choices)
        counts = torch.tensor([tokens for _, _, tokens in packed], device="cpu")
        numbers = torch.tensor(self._choices.first, dtype=torch.int64, device="cpu")
        self._slots = numbers.repeat_interleave(counts)
        self._kept = inputs.get("logits_to_keep")
        self._tokens.forget()
        self._logits.forget()

    def plan(self, shape: tuple[int, ...], layout: Layout, paths: Sequence[str]) -> Any:
        """Return the plan for an input of `shape`, without its last axis; positions are tokens."""
        slots = self.numbers(shape, layout, paths)
        assert self._choices is not None  # begin_forward has set it
        return (self._logits if self._keeps(paths) else self._tokens).of(self._choices, slots)

    def numbers(self, shape: tuple[int, ...], layout: Layout, paths: Sequence[str]) -> torch.Tensor:
        """Return the number of each position of such an input; errors as `plan`."""
        slots = self._slots
        if self._keeps(paths):
            assert self._kept is not None
            # `logits_to_keep` may be on the GPU, the slots are on the CPU.
            slots = slots[self._kept.to("cpu")]
        if _tokens_in(shape) != len(slots):
            raise UnsupportedInputError(
                f"module {paths[0]} sees an input of shape {list(shape)} (without its last axis) "
                f"in a forward pass of {len(slots)} tokens of requests\n"
                f"  to do: leave the module out of target_modules, or call generate()"
            )
        return slots

    def _keeps(self, paths: Sequence[str]) -> bool:
        """Return whether modules see only the tokens whose logits are asked for."""
        return self._kept is not None and paths[0] in self._packed.of_logits


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
