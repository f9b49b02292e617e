"""The forward pass of Transformers' experts, with room for LoRA before and after the activation.

A module of stacked experts computes, for pair p of token t and its j-th expert e:

    pre[p] = W_up[e] x[t] (+ bias)      act[p] = activation(pre[p])
    out[t] = sum over j of weight[t, j] * (W_down[e] act[p] (+ bias))

Transformers has several implementations of it, chosen by `config._experts_implementation`, and none
lets anything in between: an expert's LoRA enters `pre` and, with the router's weight, `out`. So the
functions here follow them step by step, with the same products in the same order. Pairs are in the
order p = t * top_k + j where LoRA is added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers.integrations import moe

from lora_backends.errors import UnsupportedInputError

Experts = Any
"""A module with stacked parameters, whose class Transformers' `use_experts_implementation` made."""


class Additions(Protocol):
    """Adds to the products of experts, in place."""

    def add_up(self, x: torch.Tensor, pre: torch.Tensor) -> None:
        """Add to pre [tokens * top_k, width]; x [tokens, in_features]."""

    def add_down(self, act: torch.Tensor, out: torch.Tensor) -> None:
        """Add to out [tokens, out_features]; act [tokens * top_k, in_features]."""


Forward = Callable[[Experts, torch.Tensor, torch.Tensor, torch.Tensor, Additions], torch.Tensor]
"""Takes a module, x [tokens, in_features], ids and weights [tokens, top_k], and what is added."""


def parameter_names(module: Experts) -> tuple[str, str]:
    """Return the names of the parameters before and after the activation."""
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def activated(module: Experts, pre: torch.Tensor) -> torch.Tensor:
    """Return act [pairs, width]."""
    act: torch.Tensor = module._apply_gate(pre) if module.has_gate else module.act_fn(pre)
    # The backend takes contiguous rows, and a class may leave strided ones.
    return act.contiguous()


def eager(
    module: Experts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, additions: Additions
) -> torch.Tensor:
    """One product per expert, as the classes' own forward."""
    up, down = parameter_names(module)
    flat, top_k = ids.reshape(-1), ids.shape[1]
    # Experts without tokens have no product, as in the classes' own loop.
    pairs = {e: (flat == e).nonzero()[:, 0] for e in torch.unique(flat).tolist()}
    pre = x.new_zeros(len(flat), _width(module, up))
    for expert, of_expert in pairs.items():
        pre[of_expert] = _one_expert(module, up, expert, x[of_expert // top_k])
    additions.add_up(x, pre)
    act = activated(module, pre)
    out = torch.zeros_like(x)
    for expert, of_expert in pairs.items():
        y = _one_expert(module, down, expert, act[of_expert]) * weights.reshape(-1)[of_expert, None]
        # One expert after another: another order of sums would round differently.
        out.index_add_(0, of_expert // top_k, y.to(out.dtype))
    additions.add_down(act, out)
    return out


def batched_mm(
    module: Experts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, additions: Additions
) -> torch.Tensor:
    """One product for all pairs, each with its own copy of an expert's weight."""
    flat = ids.reshape(-1)

    def product(name: str, rows: torch.Tensor, per_row: int) -> torch.Tensor:
        rows = rows.repeat_interleave(per_row, dim=0) if per_row > 1 else rows.contiguous()
        y: torch.Tensor = moe._batched_linear(
            rows, getattr(module, name)[flat], _bias(module, name, flat), module.is_transposed
        )
        return y

    return _by_pairs(module, x, ids, weights, additions, product)


def grouped_mm(
    module: Experts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, additions: Additions
) -> torch.Tensor:
    """One product over the pairs of every expert, which are sorted by expert for it."""
    experts = module.num_experts
    in_order, order = torch.sort(ids.reshape(-1))
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    # histc rather than bincount, whose size waits for the device; on a CPU it has floats only
    counted = in_order.float() if x.device.type == "cpu" else in_order.int()
    ends = torch.histc(counted, bins=experts, min=0, max=experts - 1).cumsum(0, dtype=torch.int32)

    def product(name: str, rows: torch.Tensor, per_row: int) -> torch.Tensor:
        bias = _bias(module, name, in_order)
        rows = rows[order // per_row if per_row > 1 else order]
        weight = getattr(module, name)
        y: torch.Tensor = moe._grouped_linear(rows, weight, ends, bias, module.is_transposed)
        return y[back]  # in the order of pairs, as the LoRA has them

    return _by_pairs(module, x, ids, weights, additions, product)


def _by_pairs(
    module: Experts,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    additions: Additions,
    product: Callable[[str, torch.Tensor, int], torch.Tensor],
) -> torch.Tensor:
    """Run the forward of experts with `product` for its two matrix products."""
    up, down = parameter_names(module)
    # it takes a parameter's name, rows, and the pairs of each row, and returns a row per pair
    pre = product(up, x, ids.shape[1])
    additions.add_up(x, pre)
    act = activated(module, pre)
    y = product(down, act, 1) * weights.reshape(-1, 1)
    out = y.view(*ids.shape, -1).sum(dim=1).to(x.dtype)
    additions.add_down(act, out)
    return out


FORWARDS: dict[str, Forward] = {"eager": eager}
"""By the name of the implementation."""

# Private names: products of the very functions that the model would call, with their own choice of
# kernels by device and dtype, cannot be had otherwise.
if hasattr(moe, "_batched_linear"):
    FORWARDS["batched_mm"] = batched_mm
if hasattr(moe, "_grouped_linear"):
    FORWARDS["grouped_mm"] = grouped_mm


def forward_of(path: str, module: Experts) -> Forward:
    """Return the function for the implementation that a module's configuration names now."""
    name = module.config._experts_implementation
    forward = FORWARDS.get("eager" if name is None else name)
    if forward is None:
        raise UnsupportedInputError(
            f"the experts {path} run by the implementation {name!r}, which lets no LoRA in\n"
            f"  allowed: {', '.join(map(repr, FORWARDS))}\n"
            f"  to do: base.set_experts_implementation('eager'), or another of these"
        )
    return forward


def _width(module: Experts, name: str) -> int:
    parameter = getattr(module, name)
    width: int = parameter.shape[2 if module.is_transposed else 1]
    return width


def _one_expert(module: Experts, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
    weight = getattr(module, name)[expert]
    y = rows @ weight if module.is_transposed else functional.linear(rows, weight)
    bias = _bias(module, name, expert)
    return y if bias is None else y + bias


def _bias(module: Experts, name: str, experts: torch.Tensor | int) -> torch.Tensor | None:
    if not module.has_bias:
        return None
    bias: torch.Tensor = getattr(module, f"{name}_bias")[experts]
    return bias
