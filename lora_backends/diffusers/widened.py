"""A linear layer and its LoRA as one product of widened matrices, for layers with many rows.

    y = [x | c_1 h | ... | c_n h] @ [W | B_1 | ... | B_n].T + bias

h [tokens, rank] is the output of `run_lora_a`, and c_i the scaling of adapter i in the rows that
have it, else 0. A denoiser has tens of thousands of rows and few inputs. There, adding LoRA to y
reads and writes y once more, which may take as long as the base product. The widened product writes
y once, but it copies x and W, and also multiplies the zeros. Both operands are made for each
product: keeping the right one for the next step would gain little, and miss writes to W. The
engine's `widened_operands` makes them, or torch if the engine has none.

In a layer of several slices, such as queries, keys and values, h and B_i have columns for each
slice. In B_i these are zero outside the slice's rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from lora_backends.adapters import AdapterPool
from lora_backends.dispatch.any_axes import as_rows
from lora_backends.weights import LoRAWeights

FLOPS_PER_BYTE = 230
"""Products of 16 bits that a GPU can compute while it moves a byte: an H100 has 700 TFLOP/s and
3.0 TB/s."""

LEAST_BYTES = 64_000_000
"""Bytes that adding LoRA to y must move: below, more launches cost more than they save."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_cheaper(rows: int, in_features: int, out_features: int, columns: int, itemsize: int) -> bool:
    """Return whether a product that is `columns` wider costs less than adding to y.

    No float32 product does: it is many times slower than `FLOPS_PER_BYTE` says.

    >>> is_cheaper(65536, 640, 640, 64, 2), is_cheaper(65536, 2560, 640, 64, 2)
    (True, False)
    """
    # each in elements: x for h; y read and written
    added = rows * (in_features + 2 * out_features)
    # x read once for h and the copy, as kernels do; W copied; columns written, read and multiplied
    widened = rows * (2 * in_features + 2 * columns) + 2 * in_features * out_features
    widened += 2 * rows * columns * out_features // (FLOPS_PER_BYTE * itemsize)
    return itemsize == 2 and added * itemsize >= LEAST_BYTES and widened < added


def ranks_by_stack(
    pool: AdapterPool, slots: Sequence[int], stacks: Iterable[tuple[LoRAWeights, Sequence[str]]]
) -> dict[int, int]:
    """Return the largest rank of the adapters in `slots`, by id of a stack that may be widened.

    `stacks` come with the paths of their modules. c h is rounded to x's dtype. Float16 ends at
    65504, so there c may not enlarge h: stacks with a scaling beyond 1 are left out.
    """
    ranks = {}
    for stack, paths in stacks:
        loras = [pool.lora_of(slot, path) for slot in slots for path in paths]
        if pool.dtype is not torch.float16 or all(abs(scaling) <= 1 for _, scaling in loras):
            ranks[id(stack)] = max(rank for rank, _ in loras)
    return ranks


class WidenedProducts:
    """The widened products of one call, whose rows have one adapter with strength 1, or none.

    Args:
        engine: has `widened_operands`, or computes h by `run_lora_a`.
        slots: of the adapters in the call.
        ranks: by `ranks_by_stack`, of stacks that the call holds.
    """

    def __init__(self, engine: Any, slots: Sequence[int], ranks: Mapping[int, int]) -> None:
        self._engine, self._ranks = engine, ranks
        self._slots = torch.tensor(slots, device=engine.device, dtype=torch.int32)
        # engines with kernels for the operands; others leave them to torch
        self._operands = getattr(engine, "widened_operands", None)

    def run(
        self, x: Tensor, weights: LoRAWeights, plan: Any, weight: Tensor, bias: Tensor | None
    ) -> Tensor | None:
        """Return y [..., out_features], or None where LoRA has to be added to y.

        x [..., in_features], weight [out_features, in_features] and bias [out_features] are those
        of a linear layer.
        """
        (out_features, in_features), count = weight.shape, len(self._slots)
        rows, rank = x.numel() // in_features, self._ranks.get(id(weights), 0)
        columns = count * weights.num_slices * _columns_of(rank)
        if not (
            rank
            and is_cheaper(rows, in_features, out_features, columns, x.element_size())
            and _is_plain(x, weights, weight, bias)
        ):
            return None
        flat = as_rows(x)
        if self._operands is None:
            wide = self._by_torch(flat, weight, weights, plan, rank)
        else:
            wide = self._operands(flat, weight, weights, plan, self._slots, rank)
        if wide is None:  # adding LoRA takes less time than making the operands by torch
            return None
        return functional.linear(wide[0], wide[1], bias).view(*x.shape[:-1], out_features)

    def _by_torch(
        self, x: Tensor, weight: Tensor, weights: LoRAWeights, plan: Any, rank: int
    ) -> tuple[Tensor, Tensor]:
        """Return [x | c_1 h | ... | c_n h] and [W | B_1 | ... | B_n] for x [rows, in_features]."""
        shape = len(self._slots), weights.num_slices, _columns_of(rank)
        token_slots = self._engine.token_slots(plan, x.shape[0], weights.num_slots)
        has_adapter = token_slots[:, None, None] == self._slots[:, None]  # [rows, adapters, 1]
        # the scaling of rank 0 may be NaN
        has_lora = has_adapter & (weights.ranks[self._slots] > 0)  # [rows, adapters, slices]
        factors = torch.where(has_lora, weights.scalings[self._slots], 0)
        # [rows, slices, rank]
        h = self._engine.run_lora_a(x, weights, plan)[:, :, :rank].transpose(0, 1)
        left, of_x = _beside(x, shape)
        torch.mul(h[:, None], factors[:, :, :, None], out=of_x[..., :rank])
        of_x[..., rank:] = 0
        right, of_w = _beside(weight, shape)
        of_w.zero_()
        for s, (first, end) in enumerate(pairwise(weights.slice_offsets)):
            # [width of the slice, adapters, rank]
            b = weights.b_of(s)[self._slots, :, :rank].transpose(0, 1)
            # values beyond an adapter's own rank may be anything
            is_own = torch.arange(rank, device=x.device) < weights.ranks[self._slots, s, None]
            of_w[first:end, :, s, :rank] = torch.where(is_own, b, 0)
        return left, right


def _columns_of(rank: int) -> int:
    """Return the columns of an adapter's slice: 16 bytes, to which products are aligned."""
    return -(-rank // 8) * 8


def _beside(matrix: Tensor, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Return a copy with room for more columns, and these as [rows, adapters, slices, columns]."""
    rows, columns = matrix.shape
    wide = matrix.new_empty(rows, columns + prod(shape))
    wide[:, :columns] = matrix
    return wide, wide[:, columns:].view(rows, *shape)


def _is_plain(x: Tensor, weights: LoRAWeights, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether the formula holds: no DoRA, LoRA bias, 8-bit stacks, autograd or autocast."""
    terms = weights.bias, weights.output_scales, weights.a_scales, weights.b_scales
    return (
        all(term is None for term in terms)
        and all(tensor is None or type(tensor) in _PLAIN for tensor in (x, weight, bias))
        and x.dtype == weight.dtype
        and not (x.is_neg() or weight.is_neg())  # kernels would read the values without the sign
        and forward_ad._current_level < 0  # kernels would drop tangents
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(x.device.type)
    )
