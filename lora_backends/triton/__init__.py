"""`triton`: the per-LoRA grid, kernels over tiles of one adapter's tokens."""

from __future__ import annotations

from lora_backends.sgmv.engine import SgmvBackend
from lora_backends.triton.plan import TritonPlan


class TritonBackend(SgmvBackend):
    """Shrinks and expands with two Triton kernels over tiles of tokens that share a slot.

    Tokens are sorted by slot once per batch. A program takes one tile, so few programs read each
    adapter's A and B. It computes with nothing beyond the adapter's own rank, and loads next to
    nothing there. The shrink writes partial sums that the expand adds up in order, so results are
    deterministic.

    `run_linear` rounds h to the dtype of the weights between the two products; `run_lora_a` and
    `run_lora_b` keep it in float32. With float16 weights, h beyond 65504 overflows in run_linear.

    Args:
        device: a CUDA or ROCm device, or the CPU under ``TRITON_INTERPRET=1``.
        allow_tf32: multiply float32 values as tf32: faster, with 10 bits of mantissa.
        batch_invariant: take the same tile sizes for every batch, so that a row's result does not
            depend on the rest of its batch. These sizes come from the rules; no table is read.
        tiles: "auto" takes tile sizes from the user's table for this device, else from the shipped
            one, or that of a like card (`sgmv.tiles.alike`), else from the rules; "rules" reads no
            table; "tune:60s" also searches layers that no table of this card has, when they first
            run, for 60 s in all (`sgmv.tiles.first_use`); else the file of a table.

    Raises:
        InvalidInputError: a table is broken or belongs to a device that is not alike.

    Source:
        Punica: Multi-Tenant LoRA Serving, arXiv 2310.18547; the grid is that of vLLM's kernels.
    """

    name = "triton"
    auto_priority = {"cuda": 100}
    plan_type = TritonPlan
    package = __name__
