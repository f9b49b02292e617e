"""Stacks of 8 bits for cases: stored values and scales, and the filling that none may use."""

from __future__ import annotations

from typing import Any

import torch

from lora_backends.eight_bit import LARGEST, ScaleBlock, b_row_groups, groups_of
from lora_backends.testing.cases.inputs import guarded

ANY_BYTE = 0x7F
"""The byte beyond ranks and around stacks: NaN in both float8, the largest value of int8."""

_UNITS = {torch.int8: 40.0, torch.float8_e4m3fn: 150.0, torch.float8_e5m2: 20_000.0}
"""Factor of normal values; their largest reach the largest value of the dtype."""
_SMALL = {torch.float8_e4m3fn: 2.0**-14, torch.float8_e5m2: 2.0**-29}
"""Further factor that makes denormals of most values."""


class StoredLayer:
    """Stored values as bytes, and their scales, in place of drawn A and B.

    Scales differ from group to group, so that another group's shows: powers of two for integers,
    whose products are exact. A group that lies beyond its rank has the scale NaN.

    Args:
        case: a `LoRACase` or `ExpertCase` with `stored`.
        a: [..., num_slices, max_rank, in_features], drawn.
        b: [..., out_features, max_rank], drawn; slices are blocks of rows.
        a_ranks: [..., num_slices], of a.
        b_ranks: [..., num_slices], of b.
    """

    def __init__(
        self,
        case: Any,
        a: torch.Tensor,
        b: torch.Tensor,
        a_ranks: torch.Tensor,
        b_ranks: torch.Tensor,
    ) -> None:
        self._case, block = case, case.scale_block
        widths, self._generator = case.output_slices, torch.Generator().manual_seed(case.seed + 3)
        self._all_small = case.seed % 3 == 0 and case.stored in _SMALL and not case.is_integer
        counted = torch.arange(case.max_rank, device="cpu")
        within_a, within_b = (counted < ranks[..., None] for ranks in (a_ranks, b_ranks))
        self.a = self._bytes(a, within_a[..., None])
        self.b = self._bytes(b, _each(within_b, widths))
        used_a = within_a[..., _firsts(case.max_rank, block[0])]
        used_b = within_b[..., _firsts(case.max_rank, block[1])]
        columns = groups_of(case.in_features, block[1])
        self._a_scales = self._scales(used_a[..., None].expand(*used_a.shape, columns))
        self._b_scales = self._scales(_each(used_b, b_row_groups(widths, block)))

    def fields(self, device: torch.device | str, pad: int) -> dict[str, Any]:
        """Return the other fields of the layer, NaN around the scales."""
        block: ScaleBlock = self._case.scale_block
        return {
            "a_scales": guarded(self._a_scales.to(device), pad, float("nan")),
            "b_scales": guarded(self._b_scales.to(device), pad, float("nan")),
            "scale_block": block,
            "compute_dtype": self._case.dtype,
        }

    def _bytes(self, values: torch.Tensor, within: torch.Tensor) -> torch.Tensor:
        dtype = self._case.stored
        if not self._case.is_integer:
            few = torch.rand(values.shape, generator=self._generator, device="cpu") < 0.125
            values = values * _UNITS[dtype]
            if dtype == torch.int8:
                values = values.round().clamp(-127, 127)
                values[few & (values < 0)] = -128  # a quantiser of one's own may use it
            else:
                values = values.clamp(-LARGEST[dtype], LARGEST[dtype])
                few |= self._all_small  # else their part of a sum hardly shows
                values = torch.where(few, values * _SMALL[dtype], values)
        stored = values.to(dtype).view(torch.uint8)
        return torch.where(within, stored, ANY_BYTE)

    def _scales(self, used: torch.Tensor) -> torch.Tensor:
        draw = torch.rand(used.shape, generator=self._generator, device="cpu")
        if self._case.is_integer:
            scales = torch.where(draw < 0.5, 1.0, 2.0)
        else:
            unit = _UNITS[self._case.stored]
            scales = (0.5 + draw) / (unit * _SMALL[self._case.stored] if self._all_small else unit)
        return torch.where(used, scales, float("nan"))


def _each(per_slice: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
    """Return [..., sum(counts), size] from [..., num_slices, size]."""
    return per_slice.repeat_interleave(torch.tensor(counts, device="cpu"), -2)


def _firsts(max_rank: int, size: int | None) -> torch.Tensor:
    """Return the first rank of every group."""
    return torch.arange(groups_of(max_rank, size), device="cpu") * (size or max_rank)
