"""The backward of a random call: which tensors ask for gradients, and what happens in between."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lora_backends import (
    InvalidInputError,
    LoRABackendError,
    LoRABatch,
    LoRAWeights,
    UnsupportedInputError,
)
from lora_backends.operations import Input
from lora_backends.testing.cases.inputs import on_each, same_bits
from lora_backends.testing.gradient_oracle import expected_gradients
from lora_backends.testing.oracles import Expected
from lora_backends.testing.properties.gradients.runs import laid_out

from ..running import fault_of_message
from .cases import Call
from .experts import check_close

SHARE = 0.7  # of the calls with grad mode on
STACKS = ("lora_a", "lora_b", "bias", "output_scales")
TURNS = ("once", "once", "once", "twice", "a refill between", "create_graph")


class Backward:
    """The gradients of a call. Its tensors get to ask for some of them; all others ask for none."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.steps: list[str] = []
        self.leaves: dict[str, torch.Tensor] = {}
        self.found: dict[str, torch.Tensor] | None = None
        self.again: dict[str, torch.Tensor] = {}
        self.fault: str | None = None
        if not call.grad or call.draw.random() > SHARE:
            return
        names = ["first", "base", *STACKS]
        for name in call.draw.sample(names, call.draw.randint(1, len(names))):
            self._ask(name)
        self.turn = call.draw.choice(TURNS)
        if self.leaves:
            self.steps = [f"gradients of {', '.join(self.leaves)}, {self.turn}"]

    @property
    def outcome(self) -> str:
        """Return what stands before the outcome of a call whose backward ran."""
        return "" if self.found is None else "gradients: "

    def _ask(self, name: str) -> None:
        call = self.call
        try:
            if name == "first":
                call.first = self._leaf(name, call.first)
            elif name == "base":
                if isinstance(call.base, torch.Tensor):  # no leaf: it is written to
                    call.base = self._leaf(name, call.base).clone()
                    call.guard = None
            elif isinstance(call.weights, LoRAWeights):
                value = getattr(call.weights, name)
                if value is not None:
                    leaf = on_each(value, lambda tensor: self._leaf(name, tensor))
                    call.weights = replace(call.weights, **{name: leaf})
        except (LoRABackendError, RuntimeError, TypeError, AttributeError):
            self._forget(name)  # what an earlier step has made takes no gradient

    def _leaf(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the same memory, so that strides and guards stay."""
        leaf = tensor.detach().requires_grad_()
        count = sum(known.partition("[")[0] == name for known in self.leaves)
        self.leaves[f"{name}[{count}]"] = leaf
        return leaf

    def _forget(self, name: str) -> None:
        for known in [known for known in self.leaves if known.partition("[")[0] == name]:
            del self.leaves[known]

    def run(self, y: torch.Tensor, plan: Any) -> None:
        """Compute the gradients; an error of the library goes to the caller."""
        if not self.leaves or not y.requires_grad:
            return
        generator = torch.Generator().manual_seed(self.call.case.seed)
        values = torch.randn(y.shape, generator=generator)
        self.grad = laid_out(values.to(y.dtype), self.call.case.seed)
        if self.turn == "a refill between":
            self._refill(plan)
            self._expect(InvalidInputError, lambda: self._gradients(y))
            return  # where the operation reads no leaf, no backward runs
        self.found = self._gradients(y, retain_graph=self.turn != "once")
        if self.turn == "twice":
            self.again = self._gradients(y)
        elif self.turn == "create_graph" and self.found:
            first = self._gradients(y, create_graph=True)
            total = sum((gradient.double() ** 2).sum() for gradient in first.values())
            leaves = list(self.leaves.values())
            second = partial(torch.autograd.grad, total, leaves, allow_unused=True)
            self._expect(UnsupportedInputError, second)

    def _expect(self, error: type[LoRABackendError], run: Callable[[], Any]) -> None:
        """Run what has to be refused."""
        try:
            found = run()
        except error as refusal:
            self.fault = fault_of_message(str(refusal))
        else:
            self.fault = f"not refused: {self.turn}" if self._must_refuse(found) else None

    def _must_refuse(self, found: Any) -> bool:
        """Return whether a refill, or a second derivative that is not zero, has to be refused."""
        if self.found is None:
            return bool(found)
        names = {known.partition("[")[0] for known in self.found}
        return len(names) > 1 and not names.isdisjoint(STACKS)

    def _gradients(self, y: torch.Tensor, **options: bool) -> dict[str, torch.Tensor]:
        """Return the gradient of each leaf that the operation reads."""
        leaves = list(self.leaves.values())
        found = torch.autograd.grad(y, leaves, self.grad, allow_unused=True, **options)
        pairs = zip(self.leaves, found, strict=True)
        return {name: gradient for name, gradient in pairs if gradient is not None}

    def _refill(self, plan: Any) -> None:
        backend, batch = self.call.backend, self.call.planned or self.call.batch
        scales = batch.token_scales
        other = LoRABatch(batch.token_slots.flip(0), batch.num_slots, scales)
        backend.prepare_batch(other, out=plan)

    @torch.no_grad()
    def check(self, batch: LoRABatch, before: Callable[[Any], Any], y: torch.Tensor) -> None:
        """Compare the gradients with float64; raise AssertionError.

        Args:
            batch: of all rows of the call.
            before: returns the values that a tensor had before the call.
            y: the result.
        """
        if self.fault:
            raise AssertionError(self.fault)
        if self.found is None or not bool(y.isfinite().all()):  # NaN spreads in any way
            return
        for name, gradient in self.found.items():
            leaf = self.leaves[name]
            kind = (gradient.shape, gradient.dtype)
            assert kind == (leaf.shape, leaf.dtype), f"the gradient of {name} is {kind}"
            again = self.again.get(name, gradient)
            if self.call.backend.deterministic:
                assert same_bits(gradient, again), f"{name}: another gradient the second time"
        has_base = self.call.operation.result == "y" and self.call.base is not None
        base = before(self.call.base) if has_base else None
        for name, right in self._right(batch, base).items():
            try:
                check_close(self.found[name], right)
            except AssertionError as error:
                raise AssertionError(f"the gradient of {name}: {error}") from None

    def _right(self, batch: LoRABatch, base: torch.Tensor | None) -> dict[str, Expected]:
        """Return the right gradient of each leaf that has one."""
        call, of_h = self.call, self.call.operation.input is Input.H
        given = {Input.ROWS: {"x": call.first}, Input.TOKEN_IDS: {"token_ids": call.first}}
        own = given.get(call.operation.input, {})
        inputs = replace(call.inputs, **own, weights=call.weights, batch=batch, base=base)
        h = call.first if of_h else None
        narrow = call.backend.narrow_intermediate
        wanted = expected_gradients(call.operation.name, inputs, self.grad, h, narrow=narrow)
        found: dict[str, Expected] = {}
        for known in self.found or {}:
            name = known.partition("[")[0]
            name = {"first": "h" if of_h else "x", "base": "base_output"}.get(name, name)
            found[known] = self._part(known, wanted[name])
            if name == "base_output":  # rows without an adapter pass dL/dy on
                none = (batch.token_slots < 0)[:, None]
                found[known].value.copy_(torch.where(none, self.grad, found[known].value))
        return found

    def _part(self, known: str, whole: Expected) -> Expected:
        """Return what one tensor of a tuple gets of its stack's gradient."""
        name, _, number = known.rstrip("]").partition("[")
        weights, s = self.call.weights, int(number)
        if name not in ("lora_a", "lora_b") or not isinstance(getattr(weights, name), tuple):
            return whole
        if name == "lora_a":
            return Expected(whole.value[:, s], whole.bound[:, s])
        columns = slice(*weights.slice_offsets[s : s + 2])
        return Expected(whole.value[:, columns], whole.bound[:, columns])
