"""Plans with room: refills of other sizes, and x with more rows than the batch has tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lora_backends.backend import LoRABackend
from lora_backends.features import CAPACITY
from lora_backends.operations import BY_NAME, Operation
from lora_backends.testing import oracles
from lora_backends.testing.assertions import assert_same_bits
from lora_backends.testing.cases.dense import LoRACase
from lora_backends.testing.cases.inputs import GuardedOutput, LoRAInputs, guarded, same_bits
from lora_backends.testing.properties.core import ANY_LAYER, declares, either_prop
from lora_backends.testing.properties.runs import (
    assert_right,
    expected_of,
    operations_for,
    run,
    strided_h,
)


@dataclass(frozen=True, eq=False)
class Roomy:
    """The arguments of a call on a plan with room: the rows of a batch, and rows after them."""

    inputs: LoRAInputs  # of the batch alone
    rows: int  # of x, h, token_ids and base_output, at least the tokens of the batch

    def longer(self, tensor: torch.Tensor, axis: int = 0) -> torch.Tensor:
        """Return a tensor with further rows, of NaN, or of 0 for integers."""
        shape = list(tensor.shape)
        shape[axis] = self.rows - shape[axis]
        # ids must stay within the vocabulary
        filler = float("nan") if tensor.is_floating_point() else 0
        return torch.cat([tensor, tensor.new_full(shape, filler)], axis)

    def run(
        self, backend: LoRABackend, operation: Operation, plan: Any, h: torch.Tensor | None
    ) -> torch.Tensor:
        """Return y of the batch's rows, and check that later rows keep their bits."""
        inputs = self.inputs
        used = LoRAInputs(
            x=guarded(self.longer(inputs.x), inputs.x_pad, float("nan")),
            token_ids=self.longer(inputs.token_ids),
            weights=inputs.weights,
            batch=inputs.batch,
            base=None if inputs.base is None else _with_odd_rows(inputs.base, self.rows),
            x_pad=inputs.x_pad,
            base_pad=inputs.base_pad,
        )
        base = None if used.base is None else GuardedOutput(used.base, used.base_pad)
        view = None if base is None else base.view
        y = run(backend, operation, used, plan, view, None if h is None else self.longer(h, 1))
        if base is not None:
            base.assert_untouched()
        tokens = inputs.batch.num_tokens
        shape = self.rows, inputs.weights.out_features
        wanted = y.new_zeros(shape) if used.base is None else used.base
        if y.shape != wanted.shape or not same_bits(y[tokens:], wanted[tokens:]):
            raise AssertionError(
                f"{operation.name} of {self.rows} rows on a plan of {tokens} tokens changed or "
                f"left out rows after the batch\n  given: {inputs!r}"
            )
        return y[:tokens]


def _with_odd_rows(base: torch.Tensor, rows: int) -> torch.Tensor:
    """Return base_output with further rows of -0.0, NaN and infinity."""
    odd = torch.tensor([-0.0, torch.nan, torch.inf], dtype=base.dtype, device="cpu")
    extra = rows - len(base), base.shape[1]
    turns = torch.arange(extra[0] * extra[1], device="cpu").remainder(3).reshape(extra)
    return torch.cat([base, odd[turns].to(base.device)])


@either_prop(
    "A plan with room takes batches of any size, and x of more rows, which keep their bits.",
    examples=12,
    requires=(declares(CAPACITY),),
    features=ANY_LAYER,
    min_tokens=1,
)
def a_plan_with_room_takes_batches_of_any_size(backend: LoRABackend, case: LoRACase) -> None:
    """One plan refilled with fewer and more tokens; every operation on some of the batches."""
    inputs, plan = case.build(backend.device), None
    tokens, operations = case.num_tokens, operations_for(inputs.weights)
    capacity = tokens + (0, 7, 9 * tokens + 70)[case.seed % 3]
    for turn, count in enumerate(((tokens + 1) // 2, tokens, 0, tokens - 1)):
        part = inputs.select(range(count))
        if plan is None:
            plan = backend.prepare_batch(part.batch, capacity=capacity)
        elif backend.prepare_batch(part.batch, out=plan) is not plan:
            raise AssertionError("prepare_batch(batch, out=plan) returned another plan")
        # all, none and some of the room
        rows = (capacity, count, (count + capacity) // 2)[(turn + case.seed) % 3]
        roomy, h = Roomy(part, rows), strided_h(case, part)
        others = [op for op in operations if op.name != "run_linear"]
        for operation in (BY_NAME["run_linear"], others[(turn + case.seed) % len(others)]):
            y = roomy.run(backend, operation, plan, h)
            assert_right(y, expected_of(backend, operation, part, h), part, case.is_integer)
            if operation.name == "run_linear" and turn % 2:
                _compare_with_fresh(backend, roomy, y, capacity)
        _check_h(backend, case, roomy, plan)


def _compare_with_fresh(backend: LoRABackend, roomy: Roomy, y: torch.Tensor, capacity: int) -> None:
    """Compare y of run_linear with plans that were never refilled, as far as is claimed."""
    part, operation = roomy.inputs, BY_NAME["run_linear"]
    if backend.deterministic:
        fresh = backend.prepare_batch(part.batch, capacity=capacity)
        assert_same_bits(y, roomy.run(backend, operation, fresh, None), part)
    # a plan without room may choose other tiles
    if backend.deterministic and backend.batch_invariant:
        tight, plan = Roomy(part, part.batch.num_tokens), backend.prepare_batch(part.batch)
        assert_same_bits(y, tight.run(backend, operation, plan, None), part)


def _check_h(backend: LoRABackend, case: LoRACase, roomy: Roomy, plan: Any) -> None:
    """Check h of the batch against the oracle, and that it is zero after the batch."""
    part, tokens = roomy.inputs, roomy.inputs.batch.num_tokens
    h = backend.run_lora_a(roomy.longer(part.x), part.weights, plan)
    if h.shape[1] != roomy.rows or bool((h[:, tokens:] != 0).any()):
        raise AssertionError(
            f"run_lora_a of {roomy.rows} rows on a plan of {tokens} tokens returned other than "
            f"zeros after the batch\n  given: {part!r}"
        )
    wanted = oracles.expected_shrink(part.x, part.weights, part.batch)
    assert_right(h[:, :tokens], wanted, part, case.is_integer)
