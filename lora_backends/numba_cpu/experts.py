"""`run_experts`: the dense kernels over pairs of token and expert."""

from __future__ import annotations

import torch

from lora_backends.dispatch.output import new_output
from lora_backends.experts import ExpertWeights
from lora_backends.numba_cpu import launch
from lora_backends.numba_cpu.layer import Layers
from lora_backends.numba_cpu.needs import SHRINK
from lora_backends.numba_cpu.routing import NumbaRouting, job_of
from lora_backends.operations import BY_NAME


def run(
    x: torch.Tensor,
    weights: ExpertWeights,
    routing: NumbaRouting,
    base_output: torch.Tensor | None,
    layers: Layers,
    rows: str,
    weighted: bool,
    reduce: bool,
) -> torch.Tensor:
    """Run `LoRABackend.run_experts`; `layers` knows where the weights lie."""
    y = base_output
    if y is None:
        y = new_output(BY_NAME["run_experts"], x, weights, routing, {"reduce": reduce})
    scales = _scales(routing, weighted)  # has to outlive the kernel, which knows its address
    located = layers.locate(weights)
    job = job_of(routing, located, rows, scales)
    if not job.num_segments:
        return y
    blocks = located.column_blocks
    target = y if blocks == 1 and y.is_contiguous() else _row_by_row(y, blocks)
    if reduce:
        delta = torch.zeros(routing.num_pairs, weights.out_features, device="cpu")
        launch.run(SHRINK, located, job, x=x, y=delta)
        launch.reduce(target, delta, located, routing)
    else:
        launch.run(SHRINK, located, job, x=x, y=target)
    if target.data_ptr() != y.data_ptr():
        y.copy_(_column_by_column(target, blocks).view(y.shape))
    return y


def _scales(routing: NumbaRouting, weighted: bool) -> torch.Tensor | None:
    """Return the factor of each pair's delta, contiguous, or None where all are 1."""
    of_tokens: torch.Tensor | None = routing.plan.token_scales
    if of_tokens is None:
        return routing.topk_weights if weighted else None
    of_tokens = of_tokens[: routing.num_tokens, None]
    if weighted:
        return of_tokens * routing.topk_weights
    return of_tokens.expand(-1, routing.top_k).contiguous()


def _row_by_row(y: torch.Tensor, slices: int) -> torch.Tensor:
    """Return y as rows of blocks of columns, one per slice: a view where memory allows it."""
    if slices == 1:
        return y.flatten(0, -2)
    columns = y.view(*y.shape[:-1], y.shape[-1] // slices, slices)
    return columns.transpose(-1, -2).reshape(-1, y.shape[-1])


def _column_by_column(rows: torch.Tensor, slices: int) -> torch.Tensor:
    """Return rows of blocks of columns with their columns interleaved again."""
    return rows.view(len(rows), slices, -1).transpose(-1, -2).flatten(1)
