"""The way into the methods of experts: guards, and one routing for each adapter of a token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from lora_backends.common.tensors import has_memory
from lora_backends.dispatch import checks
from lora_backends.dispatch.cached import accept, is_accepted, marked_to_store_calls
from lora_backends.dispatch.engine import Engine
from lora_backends.dispatch.gradients.autocast import for_autocast, is_any_autocast, run_outside
from lora_backends.dispatch.gradients.differentiate import record_routed, requires_graph
from lora_backends.dispatch.gradients.recorded import count_refill
from lora_backends.dispatch.library import call_outside, trace_add
from lora_backends.dispatch.many_adapters import ManyAdaptersPlan
from lora_backends.dispatch.problems import Problems, describe
from lora_backends.dispatch.tracing import is_jit_traced, is_traced, refuse_jit_trace
from lora_backends.errors import InvalidInputError, shown
from lora_backends.experts import ExpertRouting, ExpertWeights
from lora_backends.layer_weights import MOST
from lora_backends.operations import Operation
from lora_backends.plan import LoRAPlan

_is_compiling = torch.compiler.is_compiling


@dataclass(eq=False)
class ManyAdaptersRouting:
    """The routing of a batch whose tokens have several adapters: one for each of its plans."""

    routings: tuple[Any, ...]  # of the backend

    @property
    def num_tokens(self) -> int:
        """Tokens that are routed."""
        return int(self.routings[0].num_tokens)

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return int(self.routings[0].top_k)


def wrap_prepare_experts(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the wrapper that takes the place of a class's `prepare_experts`."""

    def call(
        self: Engine,
        plan: Any,
        topk_ids: Any,
        topk_weights: Any,
        num_experts: Any,
        expert_map: Any = None,
        out: Any = None,
    ) -> Any:
        choice = (topk_ids, topk_weights, num_experts, expert_map)
        if _is_compiling() and is_traced():
            return call_outside(call, self, plan, *choice, out)
        if isinstance(plan, ManyAdaptersPlan):
            outs = [None] * len(plan.plans) if out is None else _routings_of(out, plan)
            pairs = zip(plan.plans, outs, strict=True)
            # `call`, not `method`: every part is checked like a routing of its own
            made = tuple([call(self, part, *choice, refilled) for part, refilled in pairs])
            return ManyAdaptersRouting(made) if out is None else out
        kind = _choice_kind(self, *choice)
        if not _is_accepted_refill(plan, *choice, out, kind):
            _check_prepare(self, plan, *choice, out)
        if out is not None:
            count_refill(out)
        kept = None
        if torch.is_grad_enabled() and _is_recorded(self, topk_weights):
            # the copy holds values alone, or refills would add to autograd's graph without end
            kept, topk_weights = topk_weights, topk_weights.detach()
        routing = method(self, plan, topk_ids, topk_weights, num_experts, expert_map, out=out)
        routing.differentiable_weights, routing.accepted = kept, kind
        return routing

    return call


def _is_recorded(engine: Engine, topk_weights: torch.Tensor) -> bool:
    """Return whether recorded calls give the router's weights their gradient."""
    if not topk_weights.requires_grad:
        return False
    # transforms and traces of torch see through the copy that such an engine makes
    return not (engine.plain_torch and (is_jit_traced() or not has_memory(topk_weights)))


def wrap_routed(
    operation: Operation, method: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """Return the wrapper that takes the place of a class's method for routed rows."""
    defaults = {option.name: option.values[0] for option in operation.options}
    stores = marked_to_store_calls(method)

    def call(
        self: Engine,
        x: Any,
        weights: ExpertWeights,
        routing: Any,
        base_output: Any = None,
        **options: Any,
    ) -> torch.Tensor:
        unknown = options.keys() - defaults.keys()
        if unknown:
            raise TypeError(f"{operation.name}() got unexpected keyword arguments {unknown}")
        options = {**defaults, **options}
        if _is_compiling() and is_traced():
            if torch.is_grad_enabled() and _differentiates_router(routing, options):
                return call_outside(  # type: ignore[no-any-return]
                    call, self, x, weights, routing, base_output, **options
                )
            return trace_add(operation, call, self, x, weights, routing, base_output, options)
        if is_jit_traced() and not self.plain_torch:
            refuse_jit_trace(operation.name, self)
        if stores and base_output is not None:
            given = tuple(options.values())
            cached = self.routed_calls.find(self, x, weights, routing, base_output, given)
            if cached is not None and cached.run(x, weights, routing, base_output):
                return base_output  # type: ignore[no-any-return]
        if isinstance(routing, ManyAdaptersRouting):
            y: torch.Tensor | None = base_output
            for part in routing.routings:
                y = call(self, x, weights, part, y, **options)
            assert y is not None  # a token has an adapter or more
            return y
        if is_any_autocast():
            x = for_autocast(operation, x, weights)
        router = _router_weights(routing, options)
        if requires_graph(self, x, weights, base_output, *router):
            with torch.no_grad():
                _check(self, operation, x, weights, routing, base_output, options)
            return record_routed(self, operation, x, weights, routing, base_output, options)
        _check(self, operation, x, weights, routing, base_output, options)
        if is_any_autocast():
            return run_outside(method, self, x, weights, routing, base_output, **options)
        return method(self, x, weights, routing, base_output, **options)

    return call


def _router_weights(routing: Any, options: Mapping[str, Any]) -> tuple[torch.Tensor | None, ...]:
    """Return the tensors of the router's weights that a call reads; arguments are unchecked."""
    if not options["weighted"] or not isinstance(routing, ExpertRouting):
        return ()
    return routing.topk_weights, routing.differentiable_weights


def _differentiates_router(routing: Any, options: Mapping[str, Any]) -> bool:
    """Return whether the router's weights get a gradient; arguments are unchecked."""
    tensors = _router_weights(routing, options)
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _routings_of(out: Any, plan: ManyAdaptersPlan) -> tuple[Any, ...]:
    """Return the routings of `out`, which has as many adapters per token as the plan."""
    count = plan.adapters_per_token
    if not isinstance(out, ManyAdaptersRouting) or len(out.routings) != count:
        refused = f"a {type(out).__name__}"
        if isinstance(out, ManyAdaptersRouting):
            refused = f"a routing of {len(out.routings)} adapters per token"
        raise InvalidInputError(
            f"prepare_experts cannot refill out\n  given: {refused}\n"
            f"  allowed: a routing made for a plan of {count} adapters per token, as this one"
        )
    return out.routings


def _check(
    engine: Engine,
    operation: Operation,
    x: Any,
    weights: Any,
    routing: Any,
    y: Any,
    options: Mapping[str, Any],
) -> None:
    """Check a call by its kind, or explain its problems."""
    if not isinstance(routing, ExpertRouting) or not isinstance(routing, engine.routing_type):
        return _check_routed(engine, operation, x, weights, routing, y, options)
    tokens, top_k = routing.topk_ids.shape
    rows = tokens * top_k if options["rows"] == "pairs" else tokens
    # options select kernels, so they belong to the kind of a call
    detail = (top_k, routing.num_experts, *options.values())
    if not is_accepted(engine, operation, x, weights, routing.plan, y, (rows, tokens), detail):
        _check_routed(engine, operation, x, weights, routing, y, options)
        accept(engine, operation, x, weights, y, detail)


def _choice_kind(
    engine: Engine, topk_ids: Any, topk_weights: Any, num_experts: Any, expert_map: Any
) -> Any:
    """Return all that the guards of a choice depend on besides plan, values and gradients.

    None, so that the guards run: an argument is no plain strided tensor, has no memory, or is a
    lazy negation.
    """
    # lists compare in order: a difference in type keeps an array from being compared
    kind: list[Any] = [engine.handle, type(num_experts), num_experts, expert_map is None]
    try:
        for tensor in (topk_ids, topk_weights, expert_map):
            if tensor is expert_map is None:
                continue
            if type(tensor) is not torch.Tensor or not tensor.data_ptr() or tensor.is_neg():
                return None
            kind += tensor.shape, tensor.dtype, tensor.device
    except RuntimeError:  # a sparse tensor
        return None
    return kind


def _is_accepted_refill(
    plan: Any,
    topk_ids: Any,
    topk_weights: Any,
    num_experts: Any,
    expert_map: Any,
    out: Any,
    kind: Any,
) -> bool:
    """Return True only where the guards would find no problem in a refill; nothing is explained."""
    if kind is None or not isinstance(out, ExpertRouting) or out.accepted != kind:
        return False
    # the kind holds this engine's handle, so `out` is of its type; the plan is unchecked
    return (
        type(plan) is type(out.plan)
        and isinstance(plan, LoRAPlan)
        and plan.num_tokens <= topk_ids.shape[0] <= plan.capacity
        and forward_ad._current_level < 0
        and not (torch.is_grad_enabled() and topk_weights.requires_grad)
        and (expert_map is None or expert_map.is_contiguous())
        and _is_below(topk_ids, num_experts if expert_map is None else expert_map.shape[0])
        and (expert_map is None or _is_below(expert_map, num_experts))
    )


def _check_prepare(
    engine: Engine,
    plan: Any,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    out: ExpertRouting | None = None,
) -> None:
    """Guard `prepare_experts`; the signature is the method's."""
    problems = Problems(engine)
    problems.check_type("plan", plan, engine.plan_type, "a plan of this backend")
    is_count = isinstance(num_experts, int) and not isinstance(num_experts, bool)
    if not is_count or not 1 <= num_experts <= MOST:
        problems.refuse(f"num_experts is {shown(num_experts)}; allowed: 1 to {MOST}")
    _check_pairs(problems, plan, topk_ids, topk_weights)
    if expert_map is not None and checks.check_tensor(problems, "expert_map", expert_map):
        if expert_map.dtype != torch.int32 or expert_map.ndim != 1 or not expert_map.numel():
            problems.refuse(
                f"expert_map is {describe(expert_map)}; allowed: [global experts] int32"
            )
        elif not expert_map.is_contiguous():  # kernels read it by address
            problems.refuse("expert_map is not contiguous; pass expert_map.contiguous()")
    if not problems.invalid:
        # with a map the router's ids are global
        highest = num_experts if expert_map is None else expert_map.shape[0]
        _check_ids(problems, "topk_ids", topk_ids, highest)
        if expert_map is not None:
            _check_ids(problems, "expert_map", expert_map, num_experts)
        if torch.is_grad_enabled():
            checks.check_gradients(problems, [topk_weights], None)
    if not problems.invalid and out is not None:
        _check_refill(problems, topk_ids, num_experts, out)
    problems.raise_if_any(
        "prepare_experts",
        plan=plan,
        topk_ids=topk_ids,
        topk_weights=topk_weights,
        expert_map=expert_map,
        out=out,
    )


def _check_pairs(problems: Problems, plan: Any, topk_ids: Any, topk_weights: Any) -> None:
    if not checks.check_tensor(problems, "topk_ids", topk_ids):
        return
    tokens, room = checks.rows_allowed(plan)
    shape = topk_ids.shape
    if (
        len(shape) != 2
        or shape[1] < 1
        or not (tokens is None or room is None or tokens <= shape[0] <= room)
        or topk_ids.dtype not in (torch.int32, torch.int64)
    ):
        planned = "num_tokens" if tokens is None else tokens
        problems.refuse(
            f"topk_ids is {describe(topk_ids)}; allowed: [{planned}, k] int32 or int64, k >= 1"
        )
    if not checks.check_tensor(problems, "topk_weights", topk_weights):
        return
    if topk_weights.dtype != torch.float32 or topk_weights.shape != shape:
        problems.refuse(
            f"topk_weights is {describe(topk_weights)}; allowed: {list(shape)} float32, "
            f"one weight per id"
        )


def _check_ids(problems: Problems, name: str, ids: torch.Tensor, limit: int) -> None:
    """Refuse ids that are too high, on a CPU; a device's values are not looked at."""
    if not _is_below(ids, limit):
        problems.refuse(
            f"{name} holds {int(ids.max())}; allowed: 0..{limit - 1}, or a negative id for none"
        )


def _is_below(ids: torch.Tensor, limit: int) -> bool:
    """Return whether all ids are below a limit; True on a device, whose values are not read."""
    return ids.device.type != "cpu" or not ids.numel() or int(ids.max()) < limit


def _check_refill(problems: Problems, topk_ids: torch.Tensor, num_experts: int, out: Any) -> None:
    if not problems.check_type(
        "out", out, problems.engine.routing_type, "a routing of this backend"
    ):
        return
    text = "out was made for {} = {}, the call has {}; make a new routing"
    if out.topk_ids.shape != topk_ids.shape:
        sizes = list(out.topk_ids.shape), list(topk_ids.shape)
        problems.refuse(text.format("num_tokens, k", *sizes))
    if out.num_experts != num_experts:
        problems.refuse(text.format("num_experts", out.num_experts, num_experts))


def _check_routed(
    engine: Engine,
    operation: Operation,
    x: torch.Tensor,
    weights: ExpertWeights,
    routing: ExpertRouting,
    base_output: torch.Tensor | None,
    options: Mapping[str, Any],
) -> None:
    """Guard an operation on routed rows; arguments and errors as in `check_operation`."""
    problems = Problems(engine)
    for option in operation.options:
        if options[option.name] not in option.values:
            allowed = ", ".join(map(repr, option.values))
            problems.refuse(f"{option.name} is {options[option.name]!r}; allowed: {allowed}")
    if _layer_fits(problems, weights, routing):
        if not problems.invalid and checks.check_tensor(problems, operation.argument, x):
            rows = routing.num_tokens * (routing.top_k if options["rows"] == "pairs" else 1)
            meaning = f"a row for each of the routing's {options['rows']}"
            checks.check_matrix(problems, operation.argument, x, weights, rows, meaning)
            checks.check_input_dtype(problems, operation.argument, x)
        if not problems.invalid:
            shape = operation.output_shape(x, weights, routing, options)
            read = {**weights.tensors, operation.argument: x}
            checks.check_writing(problems, read, base_output, shape)
    problems.raise_if_any(
        operation.name,
        **{operation.argument: x},
        weights=weights,
        routing=routing,
        base_output=base_output,
    )


def _layer_fits(problems: Problems, weights: Any, routing: Any) -> bool:
    """Check weights and routing against the engine; False if nothing else can be checked."""
    made = "what prepare_experts of this backend returned"
    if not problems.check_type("weights", weights, ExpertWeights, "ExpertWeights"):
        return False
    if not problems.check_type("routing", routing, problems.engine.routing_type, made):
        return False
    tokens = checks.planned_size(routing.plan, "num_tokens")
    # fewer are fine: pairs of tokens after the batch are dead
    if tokens is not None and tokens > routing.num_tokens:
        problems.refuse(
            f"the routing is for {routing.num_tokens} tokens, its plan was refilled with {tokens}; "
            f"make a new routing"
        )
    if routing.num_experts != weights.num_experts:
        problems.refuse(
            f"the routing is for {routing.num_experts} experts, the weights have "
            f"{weights.num_experts}"
        )
    checks.check_weights(problems, weights, routing.plan)
    return True
