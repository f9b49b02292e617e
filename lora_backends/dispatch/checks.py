"""The guards: the one place where arguments of the interface are checked.

There is one guard per kind of input, and what all operations share stands in `check_operation`.
Nothing is written before every check has passed. Values that only a device knows are not looked
at, because that would wait for the device.
"""

from __future__ import annotations

from typing import Any

import torch

from lora_backends.batch import LoRABatch
from lora_backends.dispatch.engine import Engine, Layer
from lora_backends.dispatch.output import output_shape
from lora_backends.dispatch.problems import Problems, describe
from lora_backends.dtypes import accumulator_dtype, dtype_name, dtype_names
from lora_backends.operations import Input, Operation
from lora_backends.weights import LoRAWeights, extent_of


def check_prepare_batch(engine: Engine, batch: LoRABatch, out: Any | None = None) -> None:
    """Guard `prepare_batch`; the signature is the method's."""
    problems = Problems()
    if problems.check_type("batch", batch, LoRABatch, "a LoRABatch") and out is not None:
        problems.check_type("out", out, engine.plan_type, "a plan of this backend")
        for field in ("num_tokens", "num_slots"):
            planned, wanted = planned_size(out, field), getattr(batch, field)
            if planned is not None and planned != wanted:
                problems.invalid.append(
                    f"out was made for {field}={planned}, the batch has {wanted}; "
                    f"pad the batch with NO_ADAPTER, or make a new plan"
                )
    problems.raise_if_any(engine.name, "prepare_batch", batch=batch, out=out)


def check_operation(
    engine: Engine,
    operation: Operation,
    first: Any,
    weights: LoRAWeights,
    plan: Any,
    base_output: torch.Tensor | None = None,
) -> None:
    """Guard a call of an operation; an operation that returns h has no base_output."""
    problems, name = Problems(), operation.argument
    if _weights_fit(problems, engine, weights, plan):
        if operation.num_slices not in (None, weights.num_slices):
            problems.invalid.append(
                f"the layer has {weights.num_slices} slices; {operation.name} takes "
                f"{operation.num_slices}, {operation.same_as} any number"
            )
        if check_tensor(problems, engine, name, first):
            _GUARDS[operation.input](problems, name, first, weights, plan)
        if not problems.invalid:
            shape = output_shape(operation, first, weights, plan)
            check_writing(problems, engine, tensors_of(weights) | {name: first}, base_output, shape)
    problems.raise_if_any(
        engine.name,
        operation.name,
        **{name: first},
        weights=weights,
        plan=plan,
        base_output=base_output,
    )


def _check_rows(
    problems: Problems, name: str, x: torch.Tensor, weights: LoRAWeights, plan: Any
) -> None:
    """Guard x: [num_tokens, in_features], any row stride, in the weights' dtype."""
    if x.ndim != 2:
        problems.invalid.append(f"{name} is {describe(x)}; allowed: a tensor of two axes")
        return
    check_matrix(problems, name, x, weights, _planned_or(plan, x.shape[0]), "the plan's tokens")


def check_matrix(
    problems: Problems, name: str, x: torch.Tensor, weights: Layer, rows: int, meaning: str
) -> None:
    """Check that x is [rows, in_features], its last axis contiguous, in the weights' dtype."""
    shape = (rows, weights.in_features)
    if tuple(x.shape) != shape:
        problems.invalid.append(
            f"{name} is {list(x.shape)}; allowed: {list(shape)}, {meaning} and the layer's "
            f"in_features"
        )
    if x.ndim and not last_axis_is_contiguous(x):
        problems.invalid.append(
            f"the last axis of {name} is not contiguous (strides {tuple(x.stride())}); "
            f"pass {name}.contiguous()"
        )
    if x.dtype != weights.dtype:
        problems.invalid.append(
            f"{name}.dtype is {dtype_name(x.dtype)}, the weights are {dtype_name(weights.dtype)}; "
            f"allowed: one dtype for both"
        )


def _check_h(
    problems: Problems, name: str, h: torch.Tensor, weights: LoRAWeights, plan: Any
) -> None:
    """Guard h: [num_slices, num_tokens, max_rank], in the dtype of sums."""
    tokens = _planned_or(plan, h.shape[1] if h.ndim == 3 else 0)
    shape = (weights.num_slices, tokens, weights.max_rank)
    if tuple(h.shape) != shape:
        problems.invalid.append(
            f"{name} is {describe(h)}; allowed: {list(shape)}, [num_slices, num_tokens, max_rank]"
        )
    elif not last_axis_is_contiguous(h):
        problems.invalid.append(f"the last axis of {name} is not contiguous")
    if h.dtype not in (torch.float32, accumulator_dtype(weights.dtype)):
        problems.invalid.append(f"{name}.dtype is {dtype_name(h.dtype)}; allowed: float32")


def _check_token_ids(
    problems: Problems, name: str, token_ids: torch.Tensor, weights: LoRAWeights, plan: Any
) -> None:
    """Guard token ids: [num_tokens] integers, contiguous; on a CPU their range too."""
    tokens = _planned_or(plan, token_ids.shape[0] if token_ids.ndim == 1 else 0)
    if (
        tuple(token_ids.shape) != (tokens,)
        or token_ids.dtype not in (torch.int32, torch.int64)
        or not token_ids.is_contiguous()
    ):
        problems.invalid.append(
            f"{name} is {describe(token_ids)}; allowed: [{tokens}] int32 or int64, contiguous"
        )
    elif token_ids.device.type == "cpu" and token_ids.numel():
        low, high = (int(value) for value in token_ids.aminmax())
        if low < 0 or high >= weights.in_features:
            problems.invalid.append(
                f"{name} range over {low}..{high}; allowed: 0..{weights.in_features - 1} "
                f"(in_features)"
            )


_GUARDS = {
    Input.ROWS: _check_rows,
    Input.H: _check_h,
    Input.TOKEN_IDS: _check_token_ids,
}


def _weights_fit(problems: Problems, engine: Engine, weights: LoRAWeights, plan: Any) -> bool:
    """Check weights and plan against the engine; False if nothing else can be checked."""
    made = "what prepare_batch of this backend returned"
    if not problems.check_type("weights", weights, LoRAWeights, "LoRAWeights"):
        return False
    if not problems.check_type("plan", plan, engine.plan_type, made):
        return False
    check_weights(problems, engine, weights, plan)
    return True


def check_weights(problems: Problems, engine: Engine, weights: Layer, plan: Any) -> None:
    """Check the number of slots, dtype and device of a layer."""
    num_slots = planned_size(plan, "num_slots")
    if num_slots is not None and num_slots != weights.num_slots:
        problems.invalid.append(
            f"the plan is for {num_slots} slots, the weights have {weights.num_slots}; "
            f"prepare the batch with num_slots={weights.num_slots}"
        )
    if weights.dtype not in engine.dtypes:
        problems.unsupported.append(
            f"lora_a.dtype is {dtype_name(weights.dtype)}; supported: {dtype_names(engine.dtypes)}"
        )
    check_device(problems, engine, "weights", weights.lora_a)


def planned_size(plan: Any, field: str) -> int | None:
    """Return a plan's num_tokens or num_slots, or None from a plan that does not have it."""
    value = getattr(plan, field, None)
    return value if isinstance(value, int) else None


def _planned_or(plan: Any, otherwise: int) -> int:
    tokens = planned_size(plan, "num_tokens")
    return otherwise if tokens is None else tokens


def tensors_of(weights: Layer) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer by name."""
    names = ("lora_a", "lora_b", "ranks", "scalings", "bias")
    tensors = {name: getattr(weights, name, None) for name in names}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def check_tensor(problems: Problems, engine: Engine, name: str, value: Any) -> bool:
    """Check that a value is plain memory on the engine's device; False if it has no shape."""
    if not isinstance(value, torch.Tensor):
        problems.invalid.append(f"{name} is {describe(value)}; allowed: a tensor")
        return False
    if value.layout != torch.strided or value.is_nested:
        problems.invalid.append(f"{name} is {describe(value)}; allowed: a dense tensor")
        return False
    if value.is_neg():
        problems.invalid.append(
            f"{name} is a lazy negation (torch's negative bit is set), so its memory holds the "
            f"negated values; pass {name}.resolve_neg()"
        )
    check_device(problems, engine, name, value)
    return True


def check_device(problems: Problems, engine: Engine, name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor is where the engine runs."""
    if tensor.device != engine.device:
        problems.invalid.append(
            f"{name} is on {tensor.device}, the backend on {engine.device}; move one of them"
        )


def last_axis_is_contiguous(tensor: torch.Tensor) -> bool:
    """Return whether neighbours along the last axis are neighbours in memory."""
    return tensor.shape[-1] <= 1 or tensor.stride(-1) == 1 or not tensor.numel()


def check_writing(
    problems: Problems,
    engine: Engine,
    read: dict[str, torch.Tensor],
    base_output: Any,
    shape: tuple[int, ...],
) -> None:
    """Check base_output, if there is one, and gradients against the tensors that a call reads."""
    if base_output is not None:
        _check_base(problems, engine, base_output, shape)
        _check_apart(problems, base_output, read)
    if not problems.invalid:
        check_gradients(problems, engine, list(read.values()), base_output)


def _check_base(
    problems: Problems, engine: Engine, base_output: Any, shape: tuple[int, ...]
) -> None:
    """Check that base_output can be added to in place, row by row."""
    if not check_tensor(problems, engine, "base_output", base_output):
        return
    if tuple(base_output.shape) != shape:
        problems.invalid.append(
            f"base_output is {describe(base_output)}; allowed: {list(shape)}, the plan's tokens "
            f"and the layer's out_features"
        )
        return
    if base_output.dtype not in engine.dtypes:
        problems.unsupported.append(
            f"base_output.dtype is {dtype_name(base_output.dtype)}; "
            f"supported: {dtype_names(engine.dtypes)}"
        )
    if not last_axis_is_contiguous(base_output):
        problems.invalid.append(
            f"the last axis of base_output is not contiguous (strides {base_output.stride()})"
        )
    if _rows_overlap(base_output):
        problems.invalid.append(
            f"rows of base_output overlap (strides {base_output.stride()}); pass a copy"
        )


def _rows_overlap(tensor: torch.Tensor) -> bool:
    """Return whether two elements may share memory: no axis steps over all that lies within it."""
    axes = zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
    inner = tensor.shape[-1]
    for stride, size in sorted(axes):
        if size > 1 and stride < inner:
            return True
        inner += (size - 1) * stride
    return False


def _check_apart(
    problems: Problems, base_output: torch.Tensor, others: dict[str, torch.Tensor]
) -> None:
    """Refuse a base_output that lies on what the call reads: writing would change it."""
    if problems.invalid or not base_output.numel():
        return
    for name, tensor in others.items():
        if tensor.numel() and _overlap(tensor, base_output):
            problems.invalid.append(
                f"base_output overlaps {name} in memory; pass a copy of one of them"
            )


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two tensors overlap; columns of one buffer may lie side by side."""
    first = y.data_ptr() - x.data_ptr()
    if first >= extent_of(x) or -first >= extent_of(y):
        return False
    if x.ndim != 2 or y.ndim != 2:
        return True
    x_row, y_row = x.stride(0) * x.element_size(), y.stride(0) * y.element_size()
    if x_row != y_row or x_row == 0:
        return True
    apart = first % x_row  # where a row of y starts within a row of x's buffer
    x_width, y_width = x.shape[1] * x.element_size(), y.shape[1] * y.element_size()
    return apart < x_width or apart + y_width > x_row


def check_gradients(
    problems: Problems,
    engine: Engine,
    tensors: list[torch.Tensor],
    base_output: torch.Tensor | None,
) -> None:
    """Refuse to lose a gradient silently, and to write to a leaf of the graph."""
    if not torch.is_grad_enabled():
        return
    if base_output is not None:
        tensors = [*tensors, base_output]
        if base_output.requires_grad and base_output.is_leaf:
            problems.invalid.append(
                "base_output is a leaf that requires a gradient, so it cannot be added to in "
                "place; pass base_output.clone(), or call under torch.no_grad()"
            )
    if not engine.differentiable and any(tensor.requires_grad for tensor in tensors):
        problems.unsupported.append(
            "a tensor requires a gradient, which this backend does not compute; "
            "call under torch.no_grad(), or use torch_ref"
        )
