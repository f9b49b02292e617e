"""Runs an operation on tensors that require gradients, and compares their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from lora_backends.backend import LoRABackend
from lora_backends.operations import BY_NAME, Input, Operation
from lora_backends.testing import oracles
from lora_backends.testing.cases.dense import LoRACase, sparse_normals
from lora_backends.testing.cases.inputs import SENTINEL, LoRAInputs, same_bits
from lora_backends.testing.gradient_oracle import expected_gradients
from lora_backends.testing.oracles import Expected
from lora_backends.testing.properties.runs import operations_for, run, strided_h

Gradients: TypeAlias = Mapping[str, torch.Tensor]
"""By the name of a tensor; those of a tuple of stacks are put together."""

MOST_IN_A_SLICE = 16
"""Elements of a row of an integer gradient that are not 0, per slice: |dh| stays exact in 16 bits,
at most 16 times 15 of lora_b."""


def differentiated(inputs: LoRAInputs) -> list[Operation]:
    """Return the dense operations that take a layer, `run_lora_a` among them."""
    return [BY_NAME["run_lora_a"], *operations_for(inputs.weights)]


def two_of(operations: list[Operation], seed: int) -> tuple[Operation, ...]:
    """Return run_linear and another operation, which differs from seed to seed."""
    others = [operation for operation in operations if operation.name != "run_linear"]
    return BY_NAME["run_linear"], others[seed % len(others)]


def one_of(operations: list[Operation], seed: int) -> Operation:
    """Return run_linear for every second seed, else another operation."""
    return two_of(operations, seed // 2)[seed % 2]


@dataclass(frozen=True, eq=False)
class Call:
    """An operation on tensors of their own that require gradients, each where it lay before."""

    operation: Operation
    inputs: LoRAInputs
    leaves: Mapping[str, torch.Tensor]  # by name, one by one where a stack is a tuple
    h: torch.Tensor | None

    @classmethod
    def of(
        cls,
        operation: Operation,
        case: LoRACase,
        inputs: LoRAInputs,
        only: str | None = None,
        h: torch.Tensor | None = None,
    ) -> Call:
        """Return a call whose tensors require gradients, all that can or one of them."""
        leaves: dict[str, torch.Tensor] = {}

        def leaf(name: str, tensor: Any) -> Any:
            if tensor is None:
                return None
            if isinstance(tensor, tuple):
                return tuple(leaf(f"{name}[{s}]", part) for s, part in enumerate(tensor))
            # the same memory, so that strides and guards stay
            own = tensor.detach()
            if only in (None, name.partition("[")[0]):
                leaves[name] = own.requires_grad_()
            return own

        weights, returns_y = inputs.weights, operation.result == "y"
        changes: dict[str, Any] = {}
        if weights.a_scales is None:
            if operation.input is not Input.H:
                changes["lora_a"] = leaf("lora_a", weights.lora_a)
            if returns_y:
                changes["lora_b"] = leaf("lora_b", weights.lora_b)
        for name in ("bias", "output_scales"):
            if returns_y:
                changes[name] = leaf(name, getattr(weights, name))
        x = leaf("x", inputs.x) if operation.input is Input.ROWS else inputs.x
        if operation.input is not Input.H:
            h = None
        else:
            h = leaf("h", strided_h(case, inputs) if h is None else h)
        base = leaf("base_output", inputs.base) if returns_y else inputs.base
        used = replace(inputs, x=x, base=base, weights=replace(weights, **changes))
        return cls(operation, used, leaves, h)

    def run(self, backend: LoRABackend, plan: Any) -> torch.Tensor:
        """Return the result, with a graph; base_output is a view of columns where it is padded."""
        inputs = self.inputs
        if self.operation.result == "h":
            return backend.run_lora_a(inputs.x, inputs.weights, plan)
        start, pad = inputs.base, inputs.base_pad
        if start is not None and pad:
            wide = torch.nn.functional.pad(start, (pad, pad), value=SENTINEL)
            start = wide[:, pad : pad + start.shape[1]]
        elif start is not None:
            start = start.clone()
        return run(backend, self.operation, inputs, plan, start, self.h)

    def gradients(
        self, backend: LoRABackend, plan: Any, make_grad: Callable[[torch.Tensor], torch.Tensor]
    ) -> Gradients:
        """Return the gradient of each leaf; `make_grad` gives that of the result."""
        if not self.leaves:
            return {}
        y = self.run(backend, plan)
        return self.gradients_of(y, make_grad(y))

    def gradients_of(self, y: Any, grad: Any, retain_graph: bool = False) -> Gradients:
        """Return the gradient of each leaf from that of a result, or of several."""
        leaves = list(self.leaves.values())
        options: dict[str, Any] = {"retain_graph": retain_graph, "allow_unused": True}
        return self.named(torch.autograd.grad(y, leaves, grad, **options)) if leaves else {}

    def named(self, gradients: tuple[torch.Tensor | None, ...]) -> Gradients:
        """Return gradients by name, and check their shapes and dtypes."""
        actual: dict[str, Any] = {}
        for (name, leaf), gradient in zip(self.leaves.items(), gradients, strict=True):
            if gradient is None:
                raise AssertionError(f"the gradient of {name} of {self.operation.name} is missing")
            check_kind(self.operation.name, name, gradient, leaf)
            actual.setdefault(name.partition("[")[0], []).append(gradient)
        put = {"lora_a": torch.stack, "lora_b": torch.cat}
        return {
            name: parts[0] if len(parts) == 1 and name in self.leaves else put[name](parts, 1)
            for name, parts in actual.items()
        }


def upstream(case: LoRACase, inputs: LoRAInputs, y: torch.Tensor) -> torch.Tensor:
    """Return a gradient of a result: contiguous, transposed in memory, or a view of columns.

    Integers are few in a row. Rows without an adapter are NaN, as are values of dL/dh that no rank
    reaches.
    """
    generator = torch.Generator().manual_seed(case.seed + 7)
    if case.values == "sparse":
        values = sparse_normals(tuple(y.shape), generator)
    elif not case.is_integer:
        values = torch.randn(y.shape, generator=generator, device="cpu")
    elif y.ndim == 3:
        values = torch.randint(-8, 9, y.shape, generator=generator, device="cpu").float()
    else:
        values = torch.randint(-1, 2, y.shape, generator=generator, device="cpu").float()
        for cols in torch.split(values, list(inputs.weights.output_slices), 1):
            order = torch.rand(cols.shape, generator=generator, device="cpu").argsort(1).argsort(1)
            cols[order >= MOST_IN_A_SLICE] = 0
    slots = inputs.batch.token_slots
    if y.ndim == 3:
        values[~oracles.rank_mask(inputs.weights, slots).permute(1, 0, 2)] = torch.nan
    else:
        values[(slots if slots.ndim == 1 else slots.amax(1)) < 0] = torch.nan
    return laid_out(values.to(y.device, y.dtype), case.seed)


def laid_out(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Return equal values in one of three layouts."""
    if seed % 3 == 0:
        return values.contiguous()
    if seed % 3 == 1:
        return values.mT.contiguous().mT
    wide = values.new_full((*values.shape[:-1], values.shape[-1] + 3), torch.nan)
    return wide[..., 1:-2].copy_(values)


def check_gradients(
    backend: LoRABackend, case: LoRACase, call: Call, plan: Any, inputs: LoRAInputs
) -> None:
    """Compare the gradients of a call with the oracle: by value on integers, else in the bound."""
    grads: list[torch.Tensor] = []

    def make(y: torch.Tensor) -> torch.Tensor:
        grads.append(upstream(case, inputs, y))
        return grads[0]

    actual = call.gradients(backend, plan, make)
    if actual:
        check_against_oracle(backend, case, call, actual, grads[0])


def check_against_oracle(
    backend: LoRABackend,
    case: LoRACase,
    call: Call,
    actual: Gradients,
    grad: torch.Tensor,
) -> None:
    """Compare gradients with the oracle; `grad` is the gradient of the result."""
    wanted = expected_gradients(
        call.operation.name, call.inputs, grad, call.h, narrow=backend.narrow_intermediate
    )
    exact = case.is_integer and call.inputs.batch.adapters_per_token == 1
    for name, gradient in actual.items():
        if name == "base_output":
            _check_base(call, gradient, grad, wanted[name], exact)
        else:
            assert_gradient(call.operation.name, name, gradient, wanted[name], exact)


def _check_base(
    call: Call, gradient: torch.Tensor, grad: torch.Tensor, wanted: Expected, exact: bool
) -> None:
    """Check dL/dbase_output: dL/dy itself, bit for bit, but for output_scales."""
    if call.inputs.weights.output_scales is None:
        if not same_bits(gradient, grad):
            raise AssertionError(f"the gradient of base_output of {call.operation.name} is not g")
        return
    has = call.inputs.batch.token_slots >= 0
    if not same_bits(gradient[~has], grad[~has]):
        raise AssertionError(
            f"the gradient of base_output of {call.operation.name} is not g in rows without adapter"
        )
    own = Expected(wanted.value[has], wanted.bound[has])
    assert_gradient(call.operation.name, "base_output", gradient[has], own, exact)


def check_kind(operation: str, name: str, gradient: torch.Tensor, leaf: torch.Tensor) -> None:
    """Check that a gradient has the shape and dtype of its tensor."""
    if gradient.shape != leaf.shape or gradient.dtype != leaf.dtype:
        raise AssertionError(
            f"the gradient of {name} of {operation} is {list(gradient.shape)} {gradient.dtype}, "
            f"not {list(leaf.shape)} {leaf.dtype}"
        )


def assert_gradient(
    operation: str, name: str, gradient: torch.Tensor, wanted: Expected, exact: bool
) -> None:
    """Check a gradient: its one value on integers, else within the bound; NaN never is."""
    result = gradient.detach().cpu().double()
    if exact:
        right = oracles.rounded_exactly(wanted, gradient.dtype).double()
        wanted = Expected(right, torch.zeros_like(right))
    error = (result - wanted.value).abs()
    wrong = ~(error <= wanted.bound)
    if not bool(wrong.any()):
        return
    excess = torch.where(wrong, (error / wanted.bound.clamp(min=1e-300)).nan_to_num(1e300), 0)
    index = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    place = ", ".join(map(str, index))
    raise AssertionError(
        f"{int(wrong.sum())} of {wrong.numel()} elements of the gradient of {name} of "
        f"{operation} are wrong; the worst:\n"
        f"  {name}[{place}]\n"
        f"  actual   {result[index].item():.9g}\n"
        f"  expected {wanted.value[index].item():.9g}\n"
        f"  error    {error[index].item():.3g}, bound {wanted.bound[index].item():.3g}"
    )


def assert_same_gradients(left: Gradients, right: Gradients, how: str, *, bitwise: bool) -> None:
    """Check that two runs gave the same gradients, by bits or by value."""
    for name, gradient in left.items():
        other = right[name]
        if same_bits(gradient, other) or (not bitwise and torch.equal(gradient, other)):
            continue
        raise AssertionError(f"the gradient of {name} differs {how}")
