"""`lora_shrink` and `lora_expand`, of 16 bits."""

from __future__ import annotations

from typing import Any

import torch

from lora_backends.backend import LoRABackend
from lora_backends.batch import NO_ADAPTER
from lora_backends.errors import InvalidInputError
from lora_backends.weights import LoRAWeights
from vllm_ops.metadata import (
    FLOATS,
    Metadata,
    backend_for,
    check_output,
    columns,
    layer_stacks,
    plan_of,
)


def lora_shrink(
    inputs: torch.Tensor,
    lora_a_weights: list[torch.Tensor],
    output_tensor: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    token_indices_sorted_by_lora_ids: torch.Tensor,
    num_tokens_per_lora: torch.Tensor,
    lora_token_start_loc: torch.Tensor,
    lora_ids: torch.Tensor,
    no_lora_flag_cpu: torch.Tensor,
    num_active_loras: torch.Tensor | int,
    scaling: float,
    *,
    backend: LoRABackend | None = None,
) -> None:
    """Write ``scaling * x @ A.T`` of each token's own A; zero for tokens without adapter.

    Nothing is written where `no_lora_flag_cpu` is set, as in vLLM.

    Args:
        inputs: x, [tokens, in_features], float16, bfloat16 or float32.
        lora_a_weights: A per slice, [slots, rank, in_features] in the dtype of x.
        output_tensor: [slices, tokens, rank], float16, bfloat16 or float32.
        token_lora_mapping: with the next six, what `LoRAKernelMeta.meta_args` returns.
        token_indices_sorted_by_lora_ids: see above.
        num_tokens_per_lora: see above.
        lora_token_start_loc: see above.
        lora_ids: see above.
        no_lora_flag_cpu: see above.
        num_active_loras: see above.
        scaling: a factor of the result.
        backend: that runs it; None: what `get_backend` chooses for the device.

    Raises:
        InvalidInputError: the arguments contradict each other; nothing has been written.
        UnsupportedInputError: the backend lacks what it needs, or a CUDA graph is captured.
    """
    meta = Metadata(
        token_lora_mapping,
        token_indices_sorted_by_lora_ids,
        num_tokens_per_lora,
        lora_token_start_loc,
        lora_ids,
        no_lora_flag_cpu,
        num_active_loras,
    )
    if not meta.is_idle:
        a = layer_stacks("lora_a_weights", lora_a_weights)
        shrink(inputs, half(a, ()), output_tensor, meta, scaling, backend)


def lora_expand(
    inputs: torch.Tensor,
    lora_b_weights: list[torch.Tensor],
    output_tensor: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    token_indices_sorted_by_lora_ids: torch.Tensor,
    num_tokens_per_lora: torch.Tensor,
    lora_token_start_loc: torch.Tensor,
    lora_ids: torch.Tensor,
    no_lora_flag_cpu: torch.Tensor,
    num_active_loras: torch.Tensor | int,
    offset_start: int = 0,
    add_inputs: bool = False,
    *,
    backend: LoRABackend | None = None,
) -> None:
    """Add ``h @ B.T`` of each token's own B to the slices' columns, or write it over them.

    Rows of tokens without adapter keep their bits in both cases.

    Args:
        inputs: h, [slices, tokens, rank], float16, bfloat16 or float32.
        lora_b_weights: B per slice, [slots, width of the slice, rank].
        output_tensor: [tokens, columns], float16, bfloat16 or float32.
        token_lora_mapping: with the next six, what `LoRAKernelMeta.meta_args` returns.
        token_indices_sorted_by_lora_ids: see above.
        num_tokens_per_lora: see above.
        lora_token_start_loc: see above.
        lora_ids: see above.
        no_lora_flag_cpu: see above.
        num_active_loras: see above.
        offset_start: the first column of the first slice; the others follow it.
        add_inputs: add to what the output holds.
        backend: as in `lora_shrink`.

    Raises:
        InvalidInputError: as in `lora_shrink`.
        UnsupportedInputError: as in `lora_shrink`.
    """
    meta = Metadata(
        token_lora_mapping,
        token_indices_sorted_by_lora_ids,
        num_tokens_per_lora,
        lora_token_start_loc,
        lora_ids,
        no_lora_flag_cpu,
        num_active_loras,
    )
    if not meta.is_idle:
        b = layer_stacks("lora_b_weights", lora_b_weights)
        if inputs.dtype not in FLOATS:
            raise InvalidInputError(
                f"inputs have the wrong dtype\n  given: {inputs.dtype}\n"
                f"  allowed: float16, bfloat16 or float32"
            )
        expand(inputs, half((), b), output_tensor, meta, offset_start, add_inputs, backend)


def half(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...], **scales: Any) -> LoRAWeights:
    """Return the stacks of one half of a layer as weights of full rank and scaling 1."""
    stacks = a or b
    rank, first = stacks[0].shape[1 if a else 2], stacks[0]
    shape = (first.shape[0], len(stacks))
    lora_a: Any = a or None
    lora_b: Any = b or None
    if len(stacks) == 1:  # one tensor, which every backend takes
        lora_a, lora_b = a[0][:, None] if a else None, b[0] if b else None
    return LoRAWeights(
        lora_a=lora_a,
        lora_b=lora_b,
        ranks=torch.full(shape, rank, dtype=torch.int32, device=first.device),
        scalings=torch.ones(shape, dtype=torch.float32, device=first.device),
        output_slices=tuple(part.shape[1] for part in stacks),
        **scales,
    )


def shrink(
    x: torch.Tensor,
    weights: LoRAWeights,
    output: torch.Tensor,
    meta: Metadata,
    scaling: float | torch.Tensor,
    backend: LoRABackend | None,
) -> None:
    """Write ``scaling * x @ A.T``; scaling may be a tensor that broadcasts over [tokens, rank]."""
    backend = backend_for(x.device, backend)
    check_output(output, (weights.num_slices, x.shape[0], weights.max_rank), x)
    slots = meta.slots(x.shape[0], weights.num_slots)
    if isinstance(scaling, torch.Tensor):  # that of a token without adapter may be NaN
        live = torch.tensor([slot != NO_ADAPTER for slot in slots], device=x.device)
        scaling = torch.where(live[:, None], scaling, 0)
    plan = plan_of(backend, slots, weights.num_slots)
    output.copy_(backend.run_lora_a(x, weights, plan) * scaling)


def expand(
    h: torch.Tensor,
    weights: LoRAWeights,
    output: torch.Tensor,
    meta: Metadata,
    offset: int,
    add_inputs: bool,
    backend: LoRABackend | None,
) -> None:
    """Add ``h @ B.T`` to the columns from `offset` on, or write it."""
    backend = backend_for(h.device, backend)
    allowed = weights.num_slices, output.shape[0], weights.max_rank
    if h.shape != allowed:
        raise InvalidInputError(
            f"inputs do not fit\n  given: {list(h.shape)}\n  allowed: {list(allowed)}, from "
            f"lora_b_weights and the rows of output_tensor"
        )
    check_output(output, (h.shape[1], None), h)
    part = columns(output, offset, weights.out_features)
    slots = meta.slots(h.shape[1], weights.num_slots)
    plan = plan_of(backend, slots, weights.num_slots)
    if add_inputs:
        backend.run_lora_b(h.to(torch.float32), weights, plan, part)
        return
    written = torch.zeros_like(part)
    backend.run_lora_b(h.to(torch.float32), weights, plan, written)
    live = [token for token, slot in enumerate(slots) if slot != NO_ADAPTER]
    rows = torch.tensor(live, dtype=torch.int64, device=part.device)
    part[rows] = written[rows]
