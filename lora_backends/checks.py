"""The one place where arguments of the interface are checked, before anything is written.

Every check has the signature of the method it guards. It collects all that is wrong, so that one
error tells the whole story. A value that only a device knows is not looked at: that would wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lora_backends.batch import LoRABatch
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.weights import LoRAWeights, extent_of

if TYPE_CHECKING:
    from lora_backends.backend import LoRABackend


class Problems:
    """What is wrong with one call: contradictions, and what the backend does not support."""

    def __init__(self) -> None:
        self.invalid: list[str] = []
        self.unsupported: list[str] = []

    def raise_if_any(self, backend: LoRABackend, operation: str, **given: Any) -> None:
        """Raise the typed error that lists the problems and what was given."""
        if not self.invalid and not self.unsupported:
            return
        lines = [f"backend {backend.name!r} cannot run {operation}:"]
        lines += [f"  - {problem}" for problem in self.invalid + self.unsupported]
        described = ", ".join(f"{k} {describe(v)}" for k, v in given.items() if v is not None)
        lines.append(f"  given: {described}")
        error = InvalidInputError if self.invalid else UnsupportedInputError
        raise error("\n".join(lines))


def describe(value: Any) -> str:
    """Return ``[12, 4096] float64 cuda:0`` for a tensor, a short text for anything else."""
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {dtype_name(value.dtype)} {value.device}"
    if isinstance(value, LoRAWeights):
        return f"lora_a {describe(value.lora_a)}, output_slices {value.output_slices}"
    if isinstance(getattr(value, "num_tokens", None), int):
        return f"of {value.num_tokens} tokens, {getattr(value, 'num_slots', '?')} slots"
    return f"({type(value).__name__})"


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def dtype_names(dtypes: Sequence[torch.dtype]) -> str:
    """Return the names in alphabetical order, separated by commas."""
    return ", ".join(sorted(dtype_name(dtype) for dtype in dtypes))


def as_device(device: torch.device | str) -> torch.device:
    """Return the `torch.device` that tensors on `device` tell: with a number on CUDA alone."""
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInputError(
            f"no such device\n  given: {device!r}\n  allowed: cpu, cuda, cuda:N, ...\n  {error}"
        ) from error
    if parsed.type == "cpu":
        return torch.device("cpu")  # tensors on "cpu:0" say "cpu"
    if parsed.type == "cuda" and parsed.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return parsed


def device_reasons(name: str, device_types: Sequence[str], device: torch.device | str) -> list[str]:
    """Return why a backend for `device_types` cannot run on `device`; [] if it can."""
    parsed = as_device(device)
    reasons = []
    if parsed.type not in device_types:
        reasons.append(f"{name} runs on {', '.join(device_types)}, not on {parsed.type}.")
    if parsed.type == "cuda" and not torch.cuda.is_available():
        reasons.append("torch finds no CUDA or ROCm device here.")
    elif parsed.type == "cuda" and parsed.index >= torch.cuda.device_count():
        reasons.append(f"there is no {parsed}; torch finds {torch.cuda.device_count()} device(s).")
    return reasons


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums over `dtype` are kept in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_prepare_batch(backend: LoRABackend, batch: LoRABatch, out: Any | None = None) -> None:
    """Guard `prepare_batch`."""
    problems = Problems()
    if not isinstance(batch, LoRABatch):
        problems.invalid.append(f"batch is a {type(batch).__name__}; allowed: a LoRABatch")
    elif out is not None:
        if not isinstance(out, backend.plan_type):
            problems.invalid.append(
                f"out is a {type(out).__name__}; allowed: a plan of this backend "
                f"({backend.plan_type.__name__})"
            )
        for field in ("num_tokens", "num_slots"):
            planned, wanted = _planned(out, field), getattr(batch, field)
            if planned is not None and planned != wanted:
                problems.invalid.append(
                    f"out was made for {field}={planned}, the batch has {wanted}; "
                    f"pad the batch with NO_ADAPTER, or make a new plan"
                )
    problems.raise_if_any(backend, "prepare_batch", batch=batch, out=out)


def check_run_lora_a(
    backend: LoRABackend, x: torch.Tensor, weights: LoRAWeights, plan: Any
) -> None:
    """Guard `run_lora_a`."""
    problems = Problems()
    if _weights_fit(problems, backend, weights, plan):
        _check_rows(problems, backend, "x", x, weights.in_features, plan)
        _check_same_dtype(problems, "x", x, weights)
        _check_gradients(problems, backend, x, weights)
    problems.raise_if_any(backend, "run_lora_a", x=x, weights=weights, plan=plan)


def check_run_lora_b(
    backend: LoRABackend,
    h: torch.Tensor,
    weights: LoRAWeights,
    plan: Any,
    base_output: torch.Tensor | None = None,
) -> None:
    """Guard `run_lora_b`."""
    problems = Problems()
    if _weights_fit(problems, backend, weights, plan):
        shape_of_h = h.shape if isinstance(h, torch.Tensor) and h.ndim == 3 else (0, 0, 0)
        tokens = _planned_or(_planned(plan, "num_tokens"), shape_of_h[1])
        shape = (weights.num_slices, tokens, weights.max_rank)
        if not isinstance(h, torch.Tensor) or tuple(h.shape) != shape:
            problems.invalid.append(
                f"h is {describe(h)}; allowed: {list(shape)}, [num_slices, num_tokens, max_rank]"
            )
        else:
            if h.dtype not in (torch.float32, accumulator_dtype(weights.dtype)):
                problems.invalid.append(f"h.dtype is {dtype_name(h.dtype)}; allowed: float32")
            if not _last_axis_contiguous(h):
                problems.invalid.append("the last axis of h is not contiguous")
            _check_not_negated(problems, "h", h)
            _check_device(problems, backend, "h", h)
            _check_base(problems, backend, base_output, weights, tokens)
            _check_not_shared(problems, base_output, h=h)
            if not problems.invalid:
                _check_gradients(problems, backend, h, weights, base_output)
    problems.raise_if_any(
        backend, "run_lora_b", h=h, weights=weights, plan=plan, base_output=base_output
    )


def _check_linear(
    backend: LoRABackend,
    operation: str,
    x: torch.Tensor,
    weights: LoRAWeights,
    plan: Any,
    base_output: torch.Tensor | None,
    num_slices: int | None = None,
    x_name: str = "x",
) -> None:
    if _is_ordinary(backend, x, weights, plan, base_output, num_slices):
        return
    problems = Problems()
    if _weights_fit(problems, backend, weights, plan):
        if num_slices is not None and weights.num_slices != num_slices:
            problems.invalid.append(
                f"the layer has {weights.num_slices} slices; {operation} takes {num_slices}, "
                f"run_linear any number"
            )
        _check_rows(problems, backend, x_name, x, weights.in_features, plan)
        _check_same_dtype(problems, x_name, x, weights)
        if not problems.invalid:
            _check_base(problems, backend, base_output, weights, x.shape[0])
        if not problems.invalid:
            if base_output is not None and _overlap(x, base_output):
                problems.invalid.append(
                    f"{x_name} and base_output overlap in memory; pass a copy of one of them"
                )
            _check_gradients(problems, backend, x, weights, base_output)
    problems.raise_if_any(
        backend, operation, **{x_name: x}, weights=weights, plan=plan, base_output=base_output
    )


def _is_ordinary(
    backend: LoRABackend,
    x: torch.Tensor,
    weights: LoRAWeights,
    plan: Any,
    base_output: torch.Tensor | None,
    num_slices: int | None,
) -> bool:
    """Return True only where `_check_linear` would find nothing, as for most calls, in 3 us.

    It knows contiguous tensors and no gradients. Whatever else there is, right or wrong, is left
    to the checks that can say what is wrong with it.
    """
    if (
        torch.is_grad_enabled()
        or not isinstance(weights, LoRAWeights)
        or not isinstance(plan, backend.plan_type)
        or not isinstance(x, torch.Tensor)
    ):
        return False
    tokens, num_slots = _planned(plan, "num_tokens"), _planned(plan, "num_slots")
    device, dtype = backend.device, weights.lora_a.dtype
    if (
        x.shape != (tokens, weights.in_features)
        or num_slots != weights.num_slots
        or num_slices not in (None, weights.num_slices)
        or x.dtype != dtype
        or dtype not in backend.dtypes
        or x.device != device
        or weights.lora_a.device != device
        or not x.is_contiguous()
        or x.is_neg()
    ):
        return False
    if base_output is None:
        return True
    return (
        isinstance(base_output, torch.Tensor)
        and base_output.shape == (tokens, weights.out_features)
        and base_output.dtype in backend.dtypes
        and base_output.device == device
        and base_output.is_contiguous()
        and not base_output.is_neg()
        and not _is_shared(base_output, x, weights)
    )


def _is_shared(y: torch.Tensor, x: torch.Tensor, weights: LoRAWeights) -> bool:
    """Return whether contiguous y lies within the extent of contiguous x or of a weight."""
    first, x_first, bias = y.data_ptr(), x.data_ptr(), weights.bias
    end = first + y.nbytes
    if x_first < end and first < x_first + x.nbytes:
        return True
    a, b = weights.lora_a.data_ptr(), weights.lora_b.data_ptr()
    ranks, scalings = weights.ranks.data_ptr(), weights.scalings.data_ptr()
    of_a, of_b, of_ranks, of_scalings, of_bias = weights.extents
    return (
        (a < end and first < a + of_a)
        or (b < end and first < b + of_b)
        or (ranks < end and first < ranks + of_ranks)
        or (scalings < end and first < scalings + of_scalings)
        or (bias is not None and bias.data_ptr() < end and first < bias.data_ptr() + of_bias)
    )


def check_run_linear(
    backend: LoRABackend,
    x: torch.Tensor,
    weights: LoRAWeights,
    plan: Any,
    base_output: torch.Tensor | None = None,
) -> None:
    """Guard `run_linear`."""
    _check_linear(backend, "run_linear", x, weights, plan, base_output)


def check_run_qkv(
    backend: LoRABackend,
    x: torch.Tensor,
    weights: LoRAWeights,
    plan: Any,
    base_output: torch.Tensor | None = None,
) -> None:
    """Guard `run_qkv`."""
    _check_linear(backend, "run_qkv", x, weights, plan, base_output, num_slices=3)


def check_run_gate_up(
    backend: LoRABackend,
    x: torch.Tensor,
    weights: LoRAWeights,
    plan: Any,
    base_output: torch.Tensor | None = None,
) -> None:
    """Guard `run_gate_up`."""
    _check_linear(backend, "run_gate_up", x, weights, plan, base_output, num_slices=2)


def check_run_logits(
    backend: LoRABackend,
    hidden: torch.Tensor,
    weights: LoRAWeights,
    plan: Any,
    base_output: torch.Tensor | None = None,
) -> None:
    """Guard `run_logits`."""
    _check_linear(backend, "run_logits", hidden, weights, plan, base_output, x_name="hidden")


def check_run_embedding(
    backend: LoRABackend,
    token_ids: torch.Tensor,
    weights: LoRAWeights,
    plan: Any,
    base_output: torch.Tensor | None = None,
) -> None:
    """Guard `run_embedding`."""
    problems = Problems()
    if _weights_fit(problems, backend, weights, plan):
        is_vector = isinstance(token_ids, torch.Tensor) and token_ids.ndim == 1
        tokens = _planned_or(_planned(plan, "num_tokens"), token_ids.shape[0] if is_vector else 0)
        if (
            not is_vector
            or token_ids.dtype not in (torch.int32, torch.int64)
            or token_ids.shape[0] != tokens
            or not token_ids.is_contiguous()
        ):
            problems.invalid.append(
                f"token_ids is {describe(token_ids)}; allowed: [{tokens}] int32 or int64, "
                f"contiguous"
            )
        else:
            _check_device(problems, backend, "token_ids", token_ids)
            _check_not_negated(problems, "token_ids", token_ids)
            _check_token_range(problems, token_ids, weights.in_features)
            _check_base(problems, backend, base_output, weights, tokens)
            _check_not_shared(problems, base_output, token_ids=token_ids)
            if not problems.invalid:
                _check_gradients(problems, backend, None, weights, base_output)
    problems.raise_if_any(
        backend,
        "run_embedding",
        token_ids=token_ids,
        weights=weights,
        plan=plan,
        base_output=base_output,
    )


CHECKS: dict[str, Callable[..., None]] = {
    "prepare_batch": check_prepare_batch,
    "run_lora_a": check_run_lora_a,
    "run_lora_b": check_run_lora_b,
    "run_linear": check_run_linear,
    "run_qkv": check_run_qkv,
    "run_gate_up": check_run_gate_up,
    "run_embedding": check_run_embedding,
    "run_logits": check_run_logits,
}
"""Every method of the interface, and the check that runs before it."""


def _planned(plan: Any, field: str) -> int | None:
    """Return a plan's num_tokens or num_slots; a plan that does not tell is not checked."""
    value = getattr(plan, field, None)
    return value if isinstance(value, int) else None


def _planned_or(planned: int | None, otherwise: int) -> int:
    return otherwise if planned is None else planned


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two matrices share an element; columns of one buffer may lie side by side."""
    x_first, y_first = x.data_ptr(), y.data_ptr()
    x_row, y_row = x.stride(0) * x.element_size(), y.stride(0) * y.element_size()
    x_width, y_width = x.shape[1] * x.element_size(), y.shape[1] * y.element_size()
    x_end = x_first + (x.shape[0] - 1) * x_row + x_width
    y_end = y_first + (y.shape[0] - 1) * y_row + y_width
    if x_first >= y_end or y_first >= x_end or not x.numel() or not y.numel():
        return False
    if x_row != y_row or x_row == 0:
        return True
    apart = (y_first - x_first) % x_row  # where a row of y starts within a row of x's buffer
    return apart < x_width or apart + y_width > x_row


def _last_axis_contiguous(tensor: torch.Tensor) -> bool:
    return tensor.shape[-1] <= 1 or tensor.stride(-1) == 1 or not tensor.numel()


def _weights_fit(problems: Problems, backend: LoRABackend, weights: LoRAWeights, plan: Any) -> bool:
    """Check weights and plan against the backend; False if nothing else can be checked."""
    if not isinstance(weights, LoRAWeights):
        problems.invalid.append(f"weights is a {type(weights).__name__}; allowed: LoRAWeights")
        return False
    if not isinstance(plan, backend.plan_type):
        problems.invalid.append(
            f"plan is a {type(plan).__name__}; allowed: what prepare_batch of this backend "
            f"returned ({backend.plan_type.__name__})"
        )
        return False
    num_slots = _planned(plan, "num_slots")
    if num_slots is not None and num_slots != weights.num_slots:
        problems.invalid.append(
            f"the plan is for {num_slots} slots, the weights have {weights.num_slots}; "
            f"prepare the batch with num_slots={weights.num_slots}"
        )
    if weights.dtype not in backend.dtypes:
        problems.unsupported.append(
            f"lora_a.dtype is {dtype_name(weights.dtype)}; supported: {dtype_names(backend.dtypes)}"
        )
    _check_device(problems, backend, "weights", weights.lora_a)
    return True


def _check_device(
    problems: Problems, backend: LoRABackend, name: str, tensor: torch.Tensor
) -> None:
    if tensor.device != backend.device:
        problems.invalid.append(
            f"{name} is on {tensor.device}, the backend on {backend.device}; move one of them"
        )


def _check_rows(
    problems: Problems, backend: LoRABackend, name: str, x: torch.Tensor, width: int, plan: Any
) -> None:
    """Check that x is [num_tokens, width] on the backend's device, its last axis contiguous."""
    if not isinstance(x, torch.Tensor) or x.ndim != 2:
        problems.invalid.append(f"{name} is {describe(x)}; allowed: a tensor of two axes")
        return
    tokens = _planned_or(_planned(plan, "num_tokens"), x.shape[0])
    if tuple(x.shape) != (tokens, width):
        problems.invalid.append(
            f"{name} is {list(x.shape)}; allowed: [{tokens}, {width}], the plan's tokens and the "
            f"layer's in_features"
        )
    if not _last_axis_contiguous(x):
        problems.invalid.append(
            f"the last axis of {name} is not contiguous (strides {tuple(x.stride())}); "
            f"pass {name}.contiguous()"
        )
    _check_not_negated(problems, name, x)
    _check_device(problems, backend, name, x)


def _check_same_dtype(problems: Problems, name: str, x: torch.Tensor, weights: LoRAWeights) -> None:
    if isinstance(x, torch.Tensor) and x.dtype != weights.dtype:
        problems.invalid.append(
            f"{name}.dtype is {dtype_name(x.dtype)}, the weights are {dtype_name(weights.dtype)}; "
            f"allowed: one dtype for both"
        )


def _check_base(
    problems: Problems,
    backend: LoRABackend,
    base_output: torch.Tensor | None,
    weights: LoRAWeights,
    tokens: int,
) -> None:
    """Check that base_output can be added to in place, row by row."""
    if base_output is None:
        return
    shape = (tokens, weights.out_features)
    if not isinstance(base_output, torch.Tensor) or tuple(base_output.shape) != shape:
        problems.invalid.append(
            f"base_output is {describe(base_output)}; allowed: {list(shape)}, the plan's tokens "
            f"and the layer's out_features"
        )
        return
    if base_output.dtype not in backend.dtypes:
        problems.unsupported.append(
            f"base_output.dtype is {dtype_name(base_output.dtype)}; "
            f"supported: {dtype_names(backend.dtypes)}"
        )
    if not _last_axis_contiguous(base_output):
        problems.invalid.append(
            f"the last axis of base_output is not contiguous (strides {base_output.stride()})"
        )
    if tokens > 1 and abs(base_output.stride(0)) < weights.out_features:
        problems.invalid.append(
            f"rows of base_output overlap (strides {base_output.stride()}); pass a copy"
        )
    _check_not_negated(problems, "base_output", base_output)
    _check_device(problems, backend, "base_output", base_output)
    _check_not_shared(
        problems,
        base_output,
        lora_a=weights.lora_a,
        lora_b=weights.lora_b,
        ranks=weights.ranks,
        scalings=weights.scalings,
        bias=weights.bias,
    )


def _check_not_negated(problems: Problems, name: str, tensor: torch.Tensor) -> None:
    """Refuse torch's negative bit: engines read and write memory, which holds other values."""
    if tensor.is_neg():
        problems.invalid.append(
            f"{name} is a lazy negation (torch's negative bit is set), so its memory holds the "
            f"negated values; pass {name}.resolve_neg()"
        )


def _check_not_shared(
    problems: Problems, base_output: torch.Tensor | None, **others: torch.Tensor | None
) -> None:
    """Refuse a base_output that lies within what the call reads: writing would change it."""
    if problems.invalid or base_output is None or not base_output.numel():
        return
    first = base_output.data_ptr()
    end = first + extent_of(base_output)
    for name, tensor in others.items():
        if tensor is None or not tensor.numel():
            continue
        if tensor.data_ptr() < end and first < tensor.data_ptr() + extent_of(tensor):
            problems.invalid.append(
                f"base_output overlaps {name} in memory; pass a base_output of its own memory"
            )


def _check_token_range(problems: Problems, token_ids: torch.Tensor, vocabulary: int) -> None:
    if token_ids.device.type != "cpu" or not token_ids.numel():
        return
    low, high = (int(value) for value in token_ids.aminmax())
    if low < 0 or high >= vocabulary:
        problems.invalid.append(
            f"token_ids range over {low}..{high}; allowed: 0..{vocabulary - 1} (in_features)"
        )


def _check_gradients(
    problems: Problems,
    backend: LoRABackend,
    x: torch.Tensor | None,
    weights: LoRAWeights,
    base_output: torch.Tensor | None = None,
) -> None:
    """Refuse to lose a gradient silently, and to write to a leaf of the graph."""
    if not torch.is_grad_enabled():
        return
    if base_output is not None and base_output.requires_grad and base_output.is_leaf:
        problems.invalid.append(
            "base_output is a leaf that requires a gradient, so it cannot be added to in place; "
            "pass base_output.clone(), or call under torch.no_grad()"
        )
    if backend.differentiable:
        return
    tensors = (x, weights.lora_a, weights.lora_b, weights.bias, base_output)
    if any(tensor is not None and tensor.requires_grad for tensor in tensors):
        problems.unsupported.append(
            "a tensor requires a gradient, which this backend does not compute; "
            "call under torch.no_grad(), or use torch_ref"
        )
