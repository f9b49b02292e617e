"""`csgmv`: chunked segmented gather kernels, over segments of permuted tokens."""

from __future__ import annotations

import os
from typing import Literal

import torch
from typing_extensions import override

from lora_backends.csgmv.plan import CsgmvPlan
from lora_backends.errors import InvalidInputError
from lora_backends.sgmv.engine import SgmvBackend
from lora_backends.sgmv.runs import Counted
from lora_backends.sgmv.tiles.source import TileSource

SEGMENT_SIZES = (16, 32, 64, 128)
"""Tokens per segment that the option `segment_size` allows besides "auto"."""


class CsgmvBackend(SgmvBackend):
    """Shrinks and expands with two kernels over segments: chunks of one adapter's tokens.

    Tokens are permuted once per batch so that those of one adapter lie together, and cut into
    segments of `segment_size`. h lies in the permuted order between the kernels. A program serves
    one segment, or a group of neighbouring segments of one slot where a batch has many tokens. It
    computes with nothing beyond the adapter's own rank, and loads next to nothing there. The shrink
    writes partial sums that the expand adds up in order, so results are deterministic.

    `run_linear` rounds h to the dtype of the weights between the two products; `run_lora_a` and
    `run_lora_b` keep it in float32. With float16 weights, h beyond 65504 overflows in run_linear.

    Args:
        device: a CUDA or ROCm device, or the CPU under ``TRITON_INTERPRET=1``.
        segment_size: tokens per segment, 16, 32, 64 or 128; "auto" follows the batch.
        allow_tf32: multiply float32 values as tf32: faster, with 10 bits of mantissa.
        batch_invariant: take the same sizes for every batch, so that a row's result does not
            depend on the rest of its batch. These sizes come from the rules; no table is read.
        tiles: "auto" takes tile sizes from the user's table for this device, else from the shipped
            one, or that of a like card (`sgmv.tiles.alike`), else from the rules; "rules" reads no
            table; "tune:60s" also searches layers that no table of this card has, when they first
            run, for 60 s in all (`sgmv.tiles.first_use`); else the file of a table.

    Raises:
        InvalidInputError: another segment_size; a table is broken or belongs to a device that is
            not alike.

    Source:
        The chunked backend of SGLang (chunked segmented gather matrix-vector multiplication).
    """

    name = "csgmv"
    auto_priority = {"cuda": 90}
    plan_type = CsgmvPlan
    package = __name__

    def __init__(
        self,
        device: torch.device | str = "cuda",
        *,
        segment_size: int | Literal["auto"] = 16,
        allow_tf32: bool = False,
        batch_invariant: bool = False,
        tiles: str | os.PathLike[str] | TileSource = "auto",
    ) -> None:
        super().__init__(
            device, allow_tf32=allow_tf32, batch_invariant=batch_invariant, tiles=tiles
        )
        self.segment_size = _checked_segment_size(segment_size)

    @override
    def _cut(self, num_tokens: int, counted: Counted) -> tuple[int, ...]:
        (tile_tokens,) = super()._cut(num_tokens, counted)
        return segment_and_group(self.segment_size, tile_tokens)

    @override
    def _run_sizes(self) -> tuple[int, ...]:
        return super()._run_sizes() if self.segment_size == "auto" else (self.segment_size,)


def segment_and_group(segment_size: int | Literal["auto"], tile_tokens: int) -> tuple[int, int]:
    """Return the tokens per segment and the segments per group for tiles of `tile_tokens`.

    "auto" makes a segment a whole tile; shorter segments of a fixed size are grouped.

    >>> segment_and_group("auto", 64), segment_and_group(16, 64), segment_and_group(128, 64)
    ((64, 1), (16, 4), (128, 1))
    """
    if segment_size == "auto":
        return tile_tokens, 1
    return segment_size, max(1, tile_tokens // segment_size)


def _checked_segment_size(given: object) -> int | Literal["auto"]:
    if given == "auto":
        return "auto"
    if isinstance(given, int) and not isinstance(given, bool) and given in SEGMENT_SIZES:
        return given
    raise InvalidInputError(
        f"backend 'csgmv' has no segments of this size\n"
        f"  given: segment_size={given!r}\n"
        f'  allowed: {", ".join(map(str, SEGMENT_SIZES))}, or "auto" to follow the batch'
    )
