"""The guards: the one place where arguments of the interface are checked.

Each kind of input has one guard; `check_operation` holds the checks of all operations.
Nothing is written before every check has passed. Values that only a device knows are not looked
at, because that would wait for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lora_backends.batch import MOST, LoRABatch
from lora_backends.common.tensors import (
    extent_of,
    has_memory,
    is_distributed,
    of_left_inference_mode,
)
from lora_backends.dispatch.engine import Engine
from lora_backends.dispatch.many_adapters import ManyAdaptersPlan
from lora_backends.dispatch.problems import Problems, describe
from lora_backends.dtypes import accumulator_dtype, dtype_name, dtype_names
from lora_backends.eight_bit import is_eight_bit
from lora_backends.errors import shown
from lora_backends.features import CAPACITY, TOKEN_SCALES
from lora_backends.layer_weights import LayerWeights
from lora_backends.operations import Input, Operation
from lora_backends.plan import LoRAPlan
from lora_backends.weights import LoRAWeights


def check_prepare_batch(
    engine: Engine, batch: LoRABatch, out: Any | None = None, capacity: int | None = None
) -> None:
    """Guard `prepare_batch`; the signature is the method's."""
    if type(batch) is LoRABatch and batch.token_scales is None and capacity is None:
        if out is None or (
            type(out) is engine.plan_type
            and isinstance(out, LoRAPlan)
            and CAPACITY in engine.features
            and out.num_slots == batch.num_slots
            and batch.num_tokens <= out.capacity
            and batch.token_slots.ndim == 1
        ):
            return  # as in nearly every step of a model
    problems = Problems(engine)
    if problems.check_type("batch", batch, LoRABatch, "a LoRABatch"):
        if batch.token_scales is not None:
            problems.need(TOKEN_SCALES, "the batch has")
        if capacity is not None:
            _check_capacity(problems, batch, capacity)
        if out is not None:
            _check_refill(problems, batch, out, capacity)
    problems.raise_if_any("prepare_batch", batch=batch, out=out)


def _check_capacity(problems: Problems, batch: LoRABatch, capacity: Any) -> None:
    if isinstance(capacity, bool) or not isinstance(capacity, int):
        problems.refuse(f"capacity is {shown(capacity)}; allowed: an int, or None")
    elif not batch.num_tokens <= capacity <= MOST:
        problems.refuse(
            f"capacity is {capacity}; allowed: {batch.num_tokens} (the batch's tokens) to {MOST}"
        )
    problems.need(CAPACITY, "the call has a")


def _check_refill(problems: Problems, batch: LoRABatch, out: Any, capacity: int | None) -> None:
    """Check that a plan can take a batch, of another number of tokens where it has room."""
    # prepare_batch of any backend returns this plan where a token may have several adapters
    kind = ManyAdaptersPlan if isinstance(out, ManyAdaptersPlan) else problems.engine.plan_type
    if not problems.check_type("out", out, kind, "a plan of this backend"):
        return
    if isinstance(out, ManyAdaptersPlan):
        problems.check_type(
            "out", out.plans[0], problems.engine.plan_type, "a plan of this backend"
        )
    most = out.adapters_per_token if isinstance(out, ManyAdaptersPlan) else 1
    if batch.adapters_per_token > most:
        problems.refuse(
            f"out was made for {most} adapters per token, the batch has "
            f"{batch.adapters_per_token}; make a new plan"
        )
    slots, (tokens, room) = planned_size(out, "num_slots"), rows_allowed(out)
    if slots is not None and slots != batch.num_slots:
        problems.refuse(
            f"out was made for num_slots={slots}, the batch has {batch.num_slots}; make a new plan"
        )
    if CAPACITY in problems.engine.features:
        if room is not None and batch.num_tokens > room:
            problems.refuse(
                f"out has room for {room} tokens, the batch has num_tokens={batch.num_tokens}; "
                f"make a plan with capacity={batch.num_tokens} or more"
            )
    # without the feature a plan is sized by its first batch
    elif tokens is not None and tokens != batch.num_tokens:
        problems.refuse(
            f"out was made for num_tokens={tokens}, the batch has {batch.num_tokens}; "
            f"pad the batch with NO_ADAPTER, or make a new plan"
        )
    if capacity is not None and room is not None and capacity != room:
        problems.refuse(
            f"capacity is {capacity}, out was made for {room}; allowed: None, since a refill "
            f"keeps the capacity"
        )


def check_operation(
    engine: Engine,
    operation: Operation,
    first: Any,
    weights: LoRAWeights,
    plan: Any,
    base_output: Tensor | None = None,  # of an operation that returns y
    out: Tensor | None = None,  # of one that returns h
) -> None:
    """Guard a call of an operation."""
    problems, name = Problems(engine), operation.argument
    if _weights_fit(problems, weights, plan) and _has_halves(problems, operation, weights):
        if operation.num_slices not in (None, weights.num_slices):
            problems.refuse(
                f"the layer has {weights.num_slices} slices; {operation.name} takes "
                f"{operation.num_slices}, {operation.same_as} any number"
            )
        # the shape of y is known only once the input has passed
        if check_tensor(problems, name, first):
            _GUARDS[operation.input](problems, name, first, weights, plan)
            if operation.input is Input.ROWS and not problems.unsupported:
                check_input_dtype(problems, name, first)
        if not problems.invalid:
            shape = operation.output_shape(first, weights, plan)
            read = {**weights.tensors, name: first}
            check_writing(problems, read, base_output, shape)
            if out is not None:
                _check_out(problems, out, (weights.num_slices, *shape[:1]), weights, read)
    problems.raise_if_any(
        operation.name,
        **{name: first},
        weights=weights,
        plan=plan,
        base_output=base_output,
        out=out,
    )


def _has_halves(problems: Problems, operation: Operation, weights: LoRAWeights) -> bool:
    """Check that the layer has the halves that an operation reads."""
    reads = {"lora_a": operation.input is not Input.H, "lora_b": operation.result == "y"}
    for name, needed in reads.items():
        if needed and getattr(weights, name) is None:
            problems.refuse(
                f"the layer's {name} is None, which {operation.name} reads; without lora_b only "
                f"run_lora_a runs, without lora_a only run_lora_b"
            )
    return not problems.invalid


def _check_out(
    problems: Problems,
    out: Any,
    sizes: tuple[int, ...],
    weights: LoRAWeights,
    read: dict[str, Tensor],
) -> None:
    """Check the tensor that h is written to."""
    if not check_tensor(problems, "out", out):
        return
    shape, dtype = (*sizes, weights.max_rank), accumulator_dtype(weights.dtype)
    if tuple(out.shape) != shape or out.dtype != dtype:
        problems.refuse(
            f"out is {describe(out)}; allowed: {list(shape)} {dtype_name(dtype)}, "
            f"[num_slices, num_tokens, max_rank]"
        )
    elif not out.is_contiguous():
        problems.refuse(f"out is not contiguous (strides {tuple(out.stride())})")
    check_mode(problems, "out", out)
    # a copy into out would cut the graph without a word
    if out.requires_grad or (
        torch.is_grad_enabled() and any(t.requires_grad for t in read.values())
    ):
        problems.lack(
            "a gradient is wanted, which a result in out does not carry; leave out None, or call "
            "under torch.no_grad()"
        )
    _check_apart(problems, out, read, "out")


def _check_rows(problems: Problems, name: str, x: Tensor, weights: LoRAWeights, plan: Any) -> None:
    """Guard x: [num_tokens, in_features], any row stride, in the weights' dtype."""
    if x.ndim != 2:
        problems.refuse(f"{name} is {describe(x)}; allowed: a tensor of two axes")
        return
    check_matrix(problems, name, x, weights, _rows_for(plan, x.shape[0]), "the plan's tokens")


def check_matrix(
    problems: Problems, name: str, x: Tensor, weights: LayerWeights, rows: int, meaning: str
) -> None:
    """Check that x is [rows, in_features], its last axis contiguous, in the weights' dtype."""
    shape = (rows, weights.in_features)
    if tuple(x.shape) != shape:
        problems.refuse(
            f"{name} is {list(x.shape)}; allowed: {list(shape)}, {meaning} and the layer's "
            f"in_features"
        )
    if x.ndim and not last_axis_is_contiguous(x):
        problems.refuse(
            f"the last axis of {name} is not contiguous (strides {tuple(x.stride())}); "
            f"pass {name}.contiguous()"
        )
    if x.dtype not in weights.input_dtypes:
        problems.refuse(
            f"{name}.dtype is {dtype_name(x.dtype)}, the weights are {dtype_name(weights.dtype)}; "
            f"allowed: {dtype_names(weights.input_dtypes)}"
        )


def _check_h(problems: Problems, name: str, h: Tensor, weights: LoRAWeights, plan: Any) -> None:
    """Guard h: [num_slices, num_tokens, max_rank], in the dtype of sums."""
    tokens = _rows_for(plan, h.shape[1] if h.ndim == 3 else 0)
    shape = (weights.num_slices, tokens, weights.max_rank)
    if tuple(h.shape) != shape:
        problems.refuse(
            f"{name} is {describe(h)}; allowed: {list(shape)}, [num_slices, num_tokens, max_rank]"
        )
    elif not last_axis_is_contiguous(h):
        problems.refuse(f"the last axis of {name} is not contiguous")
    if h.dtype not in (torch.float32, accumulator_dtype(weights.dtype)):
        problems.refuse(f"{name}.dtype is {dtype_name(h.dtype)}; allowed: float32")


def _check_token_ids(
    problems: Problems, name: str, token_ids: Tensor, weights: LoRAWeights, plan: Any
) -> None:
    """Guard token ids: [num_tokens] integers, contiguous; on a CPU their range too."""
    tokens = _rows_for(plan, token_ids.shape[0] if token_ids.ndim == 1 else 0)
    if (
        tuple(token_ids.shape) != (tokens,)
        or token_ids.dtype not in (torch.int32, torch.int64)
        or not token_ids.is_contiguous()
    ):
        problems.refuse(
            f"{name} is {describe(token_ids)}; allowed: [{tokens}] int32 or int64, contiguous"
        )
    # an id beyond the vocabulary would read memory outside of its matrix
    elif token_ids.device.type == "cpu" and token_ids.numel():
        low, high = (int(value) for value in token_ids.aminmax())
        if low < 0 or high >= weights.in_features:
            problems.refuse(
                f"{name} range over {low}..{high}; allowed: 0..{weights.in_features - 1} "
                f"(in_features)"
            )


_GUARDS = {Input.ROWS: _check_rows, Input.H: _check_h, Input.TOKEN_IDS: _check_token_ids}


def _weights_fit(problems: Problems, weights: LoRAWeights, plan: Any) -> bool:
    """Check weights and plan against the engine; False if nothing else can be checked."""
    made = "what prepare_batch of this backend returned"
    if not problems.check_type("weights", weights, LoRAWeights, "LoRAWeights"):
        return False
    if not problems.check_type("plan", plan, problems.engine.plan_type, made):
        return False
    check_weights(problems, weights, plan)
    return True


def check_input_dtype(problems: Problems, name: str, x: Tensor) -> None:
    """Check that the engine takes x of a dtype that 8-bit weights allow."""
    if x.is_floating_point() and x.dtype not in problems.engine.dtypes:
        problems.lack(f"{name}.dtype is {dtype_name(x.dtype)}; supported: {problems.dtypes}")


def check_weights(problems: Problems, weights: LayerWeights, plan: Any) -> None:
    """Check the number of slots, dtype and device of a layer."""
    num_slots = planned_size(plan, "num_slots")
    for feature in sorted(weights.needs):
        problems.need(feature, "the layer has")
    if num_slots is not None and num_slots != weights.num_slots:
        problems.refuse(
            f"the plan is for {num_slots} slots, the weights have {weights.num_slots}; "
            f"prepare the batch with num_slots={weights.num_slots}"
        )
    # stacks of 8 bits are a feature, which `needs` names
    if weights.dtype not in problems.engine.dtypes and not is_eight_bit(weights.dtype):
        problems.lack(f"lora_a.dtype is {dtype_name(weights.dtype)}; supported: {problems.dtypes}")
    for name, tensor in weights.tensors.items():
        check_memory(problems, name, tensor)
    # kernels keep the sizes of the layer as it was made
    for name in weights.changed():
        problems.refuse(
            f"{name} is {describe(weights.tensors[name])}, and had another shape, dtype or device "
            f"when its layer was made; make a new {type(weights).__name__}"
        )
    check_device(problems, "weights", weights)


def planned_size(plan: Any, field: str) -> int | None:
    """Return a plan's num_tokens or num_slots, or None from a plan that does not have it."""
    # a plan of a foreign backend need not have the fields of `LoRAPlan`
    value = getattr(plan, field, None)
    return value if isinstance(value, int) else None


def rows_allowed(plan: Any) -> tuple[int | None, int | None]:
    """Return the fewest and the most rows of a call; None from a plan that does not say."""
    if isinstance(plan, LoRAPlan):
        return plan.num_tokens, plan.capacity
    room, tokens = planned_size(plan, "capacity"), planned_size(plan, "num_tokens")
    return tokens, tokens if room is None or tokens is None else max(room, tokens)


def _rows_for(plan: Any, rows: int) -> int:
    """Return the rows that a call is expected to have: those of x, if the plan allows them."""
    tokens, room = rows_allowed(plan)
    if tokens is None or room is None or tokens <= rows <= room:
        return rows
    return tokens


def check_tensor(problems: Problems, name: str, value: Any) -> bool:
    """Check that a value is plain memory on the engine's device; False if no check may follow."""
    try:
        if (
            type(value) is Tensor
            and value.device == problems.engine.device
            and value.layout is torch.strided
            and not (value.is_nested or value.is_neg())
            and value.data_ptr()
            and forward_ad._current_level < 0
        ):
            return True
    except RuntimeError:  # it has no address; `check_memory` says so
        pass
    if not isinstance(value, Tensor):
        problems.refuse(f"{name} is {describe(value)}; allowed: a tensor")
        return False
    if value.layout != torch.strided or value.is_nested:
        problems.refuse(f"{name} is {describe(value)}; allowed: a dense tensor")
        return False
    # kernels read memory, where the sign is still missing
    if value.is_neg():
        problems.refuse(
            f"{name} is a lazy negation (torch's negative bit is set), so its memory holds the "
            f"negated values; pass {name}.resolve_neg()"
        )
    check_device(problems, name, value)
    return check_memory(problems, name, value)


def check_memory(problems: Problems, name: str, tensor: Tensor) -> bool:
    """Check that the engine can read a tensor by its address; False if it has none."""
    if is_distributed(tensor):
        problems.refuse(
            f"{name} is a DTensor, spread over processes; pass {name}.full_tensor() or "
            f"{name}.to_local()"
        )
        return False
    # torch's operators need no address
    if problems.engine.plain_torch or tensor.device != problems.engine.device:
        return True  # another device is refused by its name
    if forward_ad._current_level >= 0 and _has_tangent(tensor):
        problems.refuse(
            f"{name} has a tangent, which this backend would lose; call it outside of "
            f"torch.autograd.forward_ad, or use torch_ref"
        )
        return False
    if has_memory(tensor):
        return True
    problems.refuse(
        f"{name} has no address: its memory was freed, or it is a {type(tensor).__name__} that a "
        f"transform or mode of torch made; call the backend outside of that, or use torch_ref"
    )
    return False


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def check_device(problems: Problems, name: str, value: Tensor | LayerWeights) -> None:
    """Check that a tensor or a layer is where the engine runs."""
    if value.device != problems.engine.device:
        problems.refuse(
            f"{name} is on {value.device}, the backend on {problems.engine.device}; "
            f"move one of them"
        )


def check_mode(problems: Problems, name: str, written: Tensor) -> None:
    """Refuse to write, with torch's operators, to a tensor of inference mode outside of it."""
    if problems.engine.plain_torch and of_left_inference_mode(written):
        problems.refuse(
            f"{name} was made in inference mode, outside of which torch does not write to it; "
            f"pass {name}.clone(), or call under torch.inference_mode()"
        )


def last_axis_is_contiguous(tensor: Tensor) -> bool:
    """Return whether neighbours along the last axis are neighbours in memory."""
    return tensor.shape[-1] <= 1 or tensor.stride(-1) == 1 or not tensor.numel()


def check_writing(
    problems: Problems, read: dict[str, Tensor], base_output: Any, shape: tuple[int, ...]
) -> None:
    """Check base_output, if there is one, and gradients against the tensors that a call reads."""
    if base_output is not None:
        _check_base(problems, base_output, shape)
        _check_apart(problems, base_output, read)
    if not problems.invalid:
        check_gradients(problems, list(read.values()), base_output)


def _check_base(problems: Problems, base_output: Any, shape: tuple[int, ...]) -> None:
    """Check that base_output can be added to in place, row by row."""
    if not check_tensor(problems, "base_output", base_output):
        return
    if tuple(base_output.shape) != shape:
        problems.refuse(
            f"base_output is {describe(base_output)}; allowed: {list(shape)}, the plan's tokens "
            f"and the layer's out_features"
        )
        return
    if base_output.dtype not in problems.engine.dtypes:
        problems.lack(
            f"base_output.dtype is {dtype_name(base_output.dtype)}; supported: {problems.dtypes}"
        )
    check_mode(problems, "base_output", base_output)
    if not last_axis_is_contiguous(base_output):
        problems.refuse(
            f"the last axis of base_output is not contiguous (strides {base_output.stride()})"
        )
    # programs add to rows in any order, so a shared element would lose an update
    if _rows_overlap(base_output):
        problems.refuse(
            f"rows of base_output overlap (strides {base_output.stride()}); pass a copy"
        )


def _rows_overlap(tensor: Tensor) -> bool:
    """Return whether two elements may share memory: no axis steps over all that lies within it."""
    axes = zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
    inner = tensor.shape[-1]
    # from the innermost axis outwards: each must step over the extent so far
    for stride, size in sorted(axes):
        if size > 1 and stride < inner:
            return True
        inner += (size - 1) * stride
    return False


def _check_apart(
    problems: Problems, base_output: Tensor, others: dict[str, Tensor], written: str = "base_output"
) -> None:
    """Refuse to write to a tensor that overlaps one that the call reads."""
    if problems.invalid or not base_output.numel():
        return
    for name, tensor in others.items():
        if tensor.numel() and _overlap(tensor, base_output):
            problems.refuse(f"{written} overlaps {name} in memory; pass a copy of one of them")


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors overlap; columns of one buffer may lie side by side."""
    if not (has_memory(x) and has_memory(y)):
        return False
    first = y.data_ptr() - x.data_ptr()
    if first >= extent_of(x) or -first >= extent_of(y):
        return False
    # extents overlap; only two matrices of one row stride can still be interleaved
    if x.ndim != 2 or y.ndim != 2:
        return True
    x_row, y_row = x.stride(0) * x.element_size(), y.stride(0) * y.element_size()
    if x_row != y_row or x_row == 0:
        return True
    apart = first % x_row  # where a row of y starts within a row of x's buffer
    x_width, y_width = x.shape[1] * x.element_size(), y.shape[1] * y.element_size()
    return apart < x_width or apart + y_width > x_row


def _may_change(view: Tensor) -> bool:
    """Return whether autograd allows in-place changes of a view."""
    made = torch._C._autograd._get_creation_meta(view)
    return bool(made == torch._C._autograd.CreationMeta.DEFAULT)


def check_gradients(problems: Problems, tensors: list[Tensor], base_output: Tensor | None) -> None:
    """Refuse a call that would lose a gradient, or write where autograd forbids it."""
    if not torch.is_grad_enabled():
        return
    if base_output is not None:
        tensors = [*tensors, base_output]
    if not any(tensor.requires_grad for tensor in tensors):
        return
    if not problems.engine.differentiable:
        problems.lack(
            "a tensor requires a gradient, which this backend does not compute; "
            "call under torch.no_grad(), or use torch_ref"
        )
    if base_output is None:
        return
    whole = base_output if base_output._base is None else base_output._base
    if base_output.is_inference():
        problems.refuse(
            "base_output was made in inference mode, and autograd does not record a change of it; "
            "pass base_output.clone(), or call under torch.no_grad()"
        )
    elif base_output.requires_grad and (base_output.is_leaf or whole.is_leaf):
        problems.refuse(
            "base_output is a leaf that requires a gradient, or a view of one, so it cannot be "
            "added to in place; pass base_output.clone(), or call under torch.no_grad()"
        )
    elif base_output._is_view() and not _may_change(base_output):
        problems.refuse(
            "base_output is a view that autograd does not let change in place: one of several that "
            "chunk, split or unbind returned, or one made under torch.no_grad(), in inference mode "
            "or by a torch.autograd.Function; pass base_output.clone()"
        )
