"""The guards of experts: of making a routing, and of running on one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lora_backends.dispatch import checks
from lora_backends.dispatch.engine import Engine
from lora_backends.dispatch.output import output_shape
from lora_backends.dispatch.problems import Problems, describe
from lora_backends.errors import shown
from lora_backends.experts import ExpertRouting, ExpertWeights
from lora_backends.operations import Operation
from lora_backends.weights import MOST


def check_prepare_experts(
    engine: Engine,
    plan: Any,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    out: ExpertRouting | None = None,
) -> None:
    """Guard `prepare_experts`; the signature is the method's."""
    problems = Problems()
    problems.check_type("plan", plan, engine.plan_type, "a plan of this backend")
    whole = isinstance(num_experts, int) and not isinstance(num_experts, bool)
    if not whole or not 1 <= num_experts <= MOST:
        problems.invalid.append(f"num_experts is {shown(num_experts)}; allowed: 1 to {MOST}")
    _check_pairs(problems, engine, plan, topk_ids, topk_weights)
    if expert_map is not None and checks.check_tensor(problems, engine, "expert_map", expert_map):
        if expert_map.dtype != torch.int32 or expert_map.ndim != 1 or not expert_map.numel():
            problems.invalid.append(
                f"expert_map is {describe(expert_map)}; allowed: [global experts] int32"
            )
        elif not expert_map.is_contiguous():  # kernels read it by address
            problems.invalid.append("expert_map is not contiguous; pass expert_map.contiguous()")
    if not problems.invalid:
        _check_ids(problems, topk_ids, num_experts, expert_map)
        checks.check_gradients(problems, engine, [topk_weights], None)
    if not problems.invalid and out is not None:
        _check_refill(problems, engine, topk_ids, num_experts, out)
    problems.raise_if_any(
        engine.name,
        "prepare_experts",
        plan=plan,
        topk_ids=topk_ids,
        topk_weights=topk_weights,
        expert_map=expert_map,
        out=out,
    )


def _check_pairs(
    problems: Problems, engine: Engine, plan: Any, topk_ids: Any, topk_weights: Any
) -> None:
    if not checks.check_tensor(problems, engine, "topk_ids", topk_ids):
        return
    tokens, room = checks.planned_size(plan, "num_tokens"), checks.capacity_of(plan)
    if (
        topk_ids.ndim != 2
        or topk_ids.shape[1] < 1
        or not (tokens is None or room is None or tokens <= topk_ids.shape[0] <= room)
        or topk_ids.dtype not in (torch.int32, torch.int64)
    ):
        planned = "num_tokens" if tokens is None else tokens
        problems.invalid.append(
            f"topk_ids is {describe(topk_ids)}; allowed: [{planned}, k] int32 or int64, k >= 1"
        )
    if not checks.check_tensor(problems, engine, "topk_weights", topk_weights):
        return
    if topk_weights.dtype != torch.float32 or topk_weights.shape != topk_ids.shape:
        problems.invalid.append(
            f"topk_weights is {describe(topk_weights)}; allowed: {list(topk_ids.shape)} float32, "
            f"one weight per id"
        )


def _check_ids(
    problems: Problems, topk_ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None
) -> None:
    """Refuse ids that are too high, on a CPU; a device's values are not looked at."""
    highest = num_experts if expert_map is None else expert_map.shape[0]
    named = {"topk_ids": (topk_ids, highest)}
    if expert_map is not None:
        named["expert_map"] = (expert_map, num_experts)
    for name, (ids, limit) in named.items():
        if ids.device.type == "cpu" and ids.numel() and int(ids.max()) >= limit:
            problems.invalid.append(
                f"{name} holds {int(ids.max())}; allowed: 0..{limit - 1}, or a negative id for none"
            )


def _check_refill(
    problems: Problems, engine: Engine, topk_ids: torch.Tensor, num_experts: int, out: Any
) -> None:
    if not problems.check_type("out", out, engine.routing_type, "a routing of this backend"):
        return
    for name, made, wanted in (
        ("num_tokens, k", list(out.topk_ids.shape), list(topk_ids.shape)),
        ("num_experts", out.num_experts, num_experts),
    ):
        if made != wanted:
            problems.invalid.append(
                f"out was made for {name} = {made}, the call has {wanted}; make a new routing"
            )


def check_experts(
    engine: Engine,
    operation: Operation,
    x: torch.Tensor,
    weights: ExpertWeights,
    routing: ExpertRouting,
    base_output: torch.Tensor | None,
    options: Mapping[str, Any],
) -> None:
    """Guard an operation on routed rows; arguments and errors as in `check_operation`."""
    problems = Problems()
    for option in operation.options:
        if options[option.name] not in option.values:
            allowed = ", ".join(map(repr, option.values))
            problems.invalid.append(
                f"{option.name} is {options[option.name]!r}; allowed: {allowed}"
            )
    if _layer_fits(problems, engine, weights, routing):
        if not problems.invalid and checks.check_tensor(problems, engine, operation.argument, x):
            rows = routing.num_tokens * (routing.top_k if options["rows"] == "pairs" else 1)
            meaning = f"a row for each of the routing's {options['rows']}"
            checks.check_matrix(problems, operation.argument, x, weights, rows, meaning)
            checks.check_input_dtype(problems, engine, operation.argument, x)
        if not problems.invalid:
            shape = output_shape(operation, x, weights, routing, options)
            read = {**weights.tensors, operation.argument: x}
            checks.check_writing(problems, engine, read, base_output, shape)
    problems.raise_if_any(
        engine.name,
        operation.name,
        **{operation.argument: x},
        weights=weights,
        routing=routing,
        base_output=base_output,
    )


def _layer_fits(problems: Problems, engine: Engine, weights: Any, routing: Any) -> bool:
    """Check weights and routing against the engine; False if nothing else can be checked."""
    made = "what prepare_experts of this backend returned"
    if not problems.check_type("weights", weights, ExpertWeights, "ExpertWeights"):
        return False
    if not problems.check_type("routing", routing, engine.routing_type, made):
        return False
    tokens = checks.planned_size(routing.plan, "num_tokens")
    if tokens is not None and tokens > routing.num_tokens:
        problems.invalid.append(
            f"the routing is for {routing.num_tokens} tokens, its plan was refilled with {tokens}; "
            f"make a new routing"
        )
    if routing.num_experts != weights.num_experts:
        problems.invalid.append(
            f"the routing is for {routing.num_experts} experts, the weights have "
            f"{weights.num_experts}"
        )
    checks.check_weights(problems, engine, weights, routing.plan)
    return True
