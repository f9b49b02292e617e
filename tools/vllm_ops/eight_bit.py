"""`lora_shrink_fp8` and `lora_expand_fp8`: 8-bit weights and activations with their scales.

Three modes, told by the arguments as in vLLM:

| mode | asked for by | weight scale, per slice | activation scale |
| --- | --- | --- | --- |
| tensor | neither of the two | [slots] | [1] |
| channel | per_channel_quant | [slots, rows of the matrix] | [tokens, 1], for all slices |
| block | group_n, group_k > 0 | [slots, blocks of rows, blocks of columns] | [tokens, blocks] |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from lora_backends.backend import LoRABackend
from lora_backends.errors import InvalidInputError
from vllm_ops.dense import expand, half, lora_expand, lora_shrink, shrink
from vllm_ops.metadata import Metadata, layer_stacks

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


def lora_shrink_fp8(
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
    b_scale: list[torch.Tensor],
    a_scale: torch.Tensor | None = None,
    group_k: int = 0,
    group_n: int = 0,
    use_fp8_w8a8: bool = False,
    per_channel_quant: bool = False,
    *,
    backend: LoRABackend | None = None,
) -> None:
    """Write ``scaling * x @ A.T``, where x and A are stored values times their scales.

    Args:
        inputs: x, [tokens, in_features], float8_e4m3fn or float8_e5m2.
        lora_a_weights: A per slice, [slots, rank, in_features], likewise; dtypes may differ.
        output_tensor: as in `lora_shrink`.
        token_lora_mapping: as in `lora_shrink`, and the next six.
        token_indices_sorted_by_lora_ids: see above.
        num_tokens_per_lora: see above.
        lora_token_start_loc: see above.
        lora_ids: see above.
        no_lora_flag_cpu: see above.
        num_active_loras: see above.
        scaling: a factor of the result.
        b_scale: scales of A per slice, float32; shapes in the table of this module. Axes of 1 may
            be missing or added.
        a_scale: scales of x, float32, likewise.
        group_k: columns of a block.
        group_n: rows of a block.
        use_fp8_w8a8: whether x and A have 8 bits; without it they have 16, and no scales.
        per_channel_quant: the mode with a scale per row and per token.
        backend: as in `lora_shrink`.

    Raises:
        InvalidInputError: the arguments contradict each other; nothing has been written.
        UnsupportedInputError: as in `lora_shrink`.
    """
    meta = (
        token_lora_mapping,
        token_indices_sorted_by_lora_ids,
        num_tokens_per_lora,
        lora_token_start_loc,
        lora_ids,
        no_lora_flag_cpu,
        num_active_loras,
    )
    if not use_fp8_w8a8:
        _check_wide("lora_a_weights", lora_a_weights)
        lora_shrink(inputs, lora_a_weights, output_tensor, *meta, scaling, backend=backend)
        return
    if Metadata(*meta).is_idle:
        return
    a = layer_stacks("lora_a_weights", lora_a_weights)
    mode = _Mode.of(group_k, group_n, per_channel_quant)
    _check_stored("inputs", inputs, 2)
    weights = half(a, (), a_scales=mode.scales_of_a(a, b_scale), scale_block=mode.block)
    scales = mode.activation_scales(a_scale, inputs.shape[0], inputs.shape[1])
    if mode.name == "block":
        x, factor = inputs.to(torch.float32) * scales, torch.ones_like(scales[:, :1])
    else:  # bfloat16 holds every 8-bit float exactly; one scale of a row goes to the result
        x, factor = inputs.to(torch.bfloat16), scales
    shrink(x, weights, output_tensor, Metadata(*meta), factor * scaling, backend)


def lora_expand_fp8(
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
    b_scale: list[torch.Tensor],
    a_scale: torch.Tensor | None = None,
    offset_start: int = 0,
    add_inputs: bool = False,
    group_k: int = 0,
    group_n: int = 0,
    use_fp8_w8a8: bool = False,
    per_channel_quant: bool = False,
    *,
    backend: LoRABackend | None = None,
) -> None:
    """Add or write ``h @ B.T``, where h and B are stored values times their scales.

    Args:
        inputs: h, [slices, tokens, rank], float8_e4m3fn or float8_e5m2.
        lora_b_weights: B per slice, [slots, width of the slice, rank], likewise.
        output_tensor: as in `lora_expand`.
        token_lora_mapping: as in `lora_shrink`, and the next six.
        token_indices_sorted_by_lora_ids: see above.
        num_tokens_per_lora: see above.
        lora_token_start_loc: see above.
        lora_ids: see above.
        no_lora_flag_cpu: see above.
        num_active_loras: see above.
        b_scale: scales of B per slice, as in `lora_shrink_fp8`; each slice has its own shape.
        a_scale: scales of h, for all slices.
        offset_start: as in `lora_expand`.
        add_inputs: as in `lora_expand`.
        group_k: columns of a block.
        group_n: rows of a block.
        use_fp8_w8a8: whether h and B have 8 bits; without it they have no scales.
        per_channel_quant: the mode with a scale per row and per token.
        backend: as in `lora_shrink`.

    Raises:
        InvalidInputError: the arguments contradict each other; nothing has been written.
        UnsupportedInputError: as in `lora_shrink`.
    """
    meta = (
        token_lora_mapping,
        token_indices_sorted_by_lora_ids,
        num_tokens_per_lora,
        lora_token_start_loc,
        lora_ids,
        no_lora_flag_cpu,
        num_active_loras,
    )
    if not use_fp8_w8a8:
        _check_wide("lora_b_weights", lora_b_weights)
        places = offset_start, add_inputs
        lora_expand(inputs, lora_b_weights, output_tensor, *meta, *places, backend=backend)
        return
    if Metadata(*meta).is_idle:
        return
    b = layer_stacks("lora_b_weights", lora_b_weights)
    mode = _Mode.of(group_k, group_n, per_channel_quant)
    _check_stored("inputs", inputs, 3)
    weights = half((), b, b_scales=mode.scales_of_b(b, b_scale), scale_block=mode.block)
    scales = mode.activation_scales(a_scale, inputs.shape[1], inputs.shape[2])
    h = inputs.to(torch.float32) * scales
    expand(h, weights, output_tensor, Metadata(*meta), offset_start, add_inputs, backend)


@dataclass(frozen=True)
class _Mode:
    """The groups of elements that share a scale."""

    name: str  # tensor, channel or block
    block: tuple[int | None, int | None]  # rows and columns of a matrix that share a scale

    @classmethod
    def of(cls, group_k: int, group_n: int, per_channel: bool) -> _Mode:
        mixed = (group_k > 0) != (group_n > 0) or (group_k > 0 and per_channel)
        if mixed or group_k < 0 or group_n < 0:
            raise InvalidInputError(
                f"the mode of the scales is contradictory\n"
                f"  given: group_k={group_k}, group_n={group_n}, per_channel_quant={per_channel}\n"
                f"  allowed: both groups positive, or per_channel_quant, or neither"
            )
        if group_k > 0:
            return cls("block", (group_n, group_k))
        return cls("channel", (1, None)) if per_channel else cls("tensor", (None, None))

    def _groups(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the axes of a weight scale after the slots."""
        (n, k) = self.block
        if self.name == "block":
            return math.ceil(rows / (n or 1)), math.ceil(columns / (k or 1))
        return (rows,) if self.name == "channel" else ()

    def _of_slices(self, stacks: tuple[torch.Tensor, ...], given: Any) -> list[torch.Tensor]:
        """Return the scale of each slice as [slots, groups of rows, groups of columns]."""
        scales = list(given) if isinstance(given, list | tuple) else []
        if len(scales) != len(stacks):
            raise InvalidInputError(
                f"b_scale does not fit the slices\n  given: {len(scales)} tensors\n"
                f"  allowed: a list of {len(stacks)}"
            )
        found = []
        for s, (stack, scale) in enumerate(zip(stacks, scales, strict=True)):
            slots, rows, columns = stack.shape
            _check_stored(f"the weights of slice {s}", stack, 3)
            axes = (slots, *self._groups(rows, columns))
            shaped = _shaped(f"b_scale[{s}]", scale, axes, self.name)
            found.append(shaped.reshape(*axes, *[1] * (3 - len(axes))))
        return found

    def scales_of_a(self, stacks: tuple[torch.Tensor, ...], given: Any) -> torch.Tensor:
        """Return a_scales, [slots, slices, groups of rank, groups of in_features]."""
        if len({stack.shape for stack in stacks}) > 1:
            raise InvalidInputError(
                f"the slices of lora_a_weights differ\n"
                f"  given: {[list(stack.shape) for stack in stacks]}\n  allowed: one shape"
            )
        return torch.stack(self._of_slices(stacks, given), 1)

    def scales_of_b(self, stacks: tuple[torch.Tensor, ...], given: Any) -> torch.Tensor:
        """Return b_scales, [slots, groups of rows of all slices, groups of rank]."""
        return torch.cat(self._of_slices(stacks, given), 1)

    def activation_scales(self, given: Any, tokens: int, width: int) -> torch.Tensor:
        """Return the factors of x or h: [1, 1], [tokens, 1] or [tokens, width]."""
        group = self.block[1] or 1
        axes = {
            "tensor": (1,),
            "channel": (tokens,),
            "block": (tokens, math.ceil(width / group)),
        }[self.name]
        scales = _shaped("a_scale", given, axes, self.name)
        if self.name != "block":
            return scales.reshape(-1, 1)
        return scales.reshape(axes).repeat_interleave(group, 1)[:, :width]


def _shaped(name: str, scale: Any, axes: tuple[int, ...], mode: str) -> torch.Tensor:
    """Return scales as float32 of shape `axes`; those given may have other axes of size 1."""
    given = list(scale.shape) if isinstance(scale, torch.Tensor) else None
    wide = [size for size in axes if size != 1]
    if given is None or [size for size in given if size != 1] != wide:
        raise InvalidInputError(
            f"{name} has the wrong shape\n"
            f"  given: {type(scale).__name__ if given is None else given}\n"
            f"  allowed: {list(axes)} for scales per {mode}"
        )
    if not scale.is_floating_point():
        raise InvalidInputError(
            f"{name} has the wrong dtype\n  given: {scale.dtype}\n  allowed: float32"
        )
    shaped: torch.Tensor = scale.to(torch.float32).reshape(axes)
    return shaped


def _check_stored(name: str, tensor: torch.Tensor, ndim: int) -> None:
    if tensor.dtype not in EIGHT_BITS or tensor.ndim != ndim:
        raise InvalidInputError(
            f"{name} cannot be used with use_fp8_w8a8\n"
            f"  given: {list(tensor.shape)} {tensor.dtype}\n"
            f"  allowed: {ndim} axes of float8_e4m3fn or float8_e5m2"
        )


def _check_wide(name: str, stacks: Any) -> None:
    for s, stack in enumerate(layer_stacks(name, stacks)):
        if stack.dtype.itemsize < 2:
            raise InvalidInputError(
                f"{name}[{s}] needs its scales\n  given: {stack.dtype}, use_fp8_w8a8=False\n"
                f"  to do: pass use_fp8_w8a8=True, with 8-bit inputs and their scales"
            )
