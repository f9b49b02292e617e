"""`csgmv`: kernels over segments of permuted tokens, in chunks of one adapter's tokens."""

from __future__ import annotations

import os
from typing import ClassVar, Literal

import torch
from typing_extensions import override

from lora_backends.backend import LoRABackend
from lora_backends.batch import LoRABatch
from lora_backends.csgmv import launch, tuning
from lora_backends.csgmv import plan as plans
from lora_backends.csgmv.config import check_segment_size, segment_and_group
from lora_backends.csgmv.plan import CsgmvPlan
from lora_backends.gpu.boxes import has_boxes
from lora_backends.gpu.choice import TileChoice, tile_choice
from lora_backends.gpu.launching import (
    has_programmatic_launch,
    interpreter_reasons,
    is_capturing,
)
from lora_backends.gpu.ready import with_contiguous_tables
from lora_backends.weights import LoRAWeights


class CsgmvBackend(LoRABackend):
    """Shrinks and expands with two kernels over segments: chunks of one adapter's tokens.

    Tokens are permuted once per batch so that those of one adapter stand together, and cut into
    segments of `segment_size`. h lies between the kernels in the permuted order. A program serves
    a segment, or a group of neighbouring segments of one slot where a batch has many, and reads
    no further than the adapter's own rank. The shrink writes partial sums that the expand adds
    up in order, so results are deterministic.

    `run_linear` rounds h to the dtype of the weights between the two products; `run_lora_a` and
    `run_lora_b` keep it in float32. For float16 weights, h beyond 65504 overflows in run_linear.

    Args:
        device: a CUDA or ROCm device, or the CPU under ``TRITON_INTERPRET=1``.
        segment_size: tokens per segment, 16, 32, 64 or 128; "auto" follows the batch.
        allow_tf32: multiply float32 values as tf32, faster and with 10 bits of mantissa.
        batch_invariant: take the same sizes for every batch, so that a row's result does not
            depend on the rest of its batch. They are the rules': no table is read.
        tiles: "auto" takes tile sizes from the user's table for this device, else from the
            library's own, else from the rules; "rules" reads no table; else the file of a table.

    Raises:
        InvalidInputError: another segment_size, a table that is broken or another device's.

    Source:
        The chunked backend of SGLang (chunked segmented gather matrix-vector multiplication).
    """

    name = "csgmv"
    device_types: ClassVar[tuple[str, ...]] = ("cuda", "cpu")
    auto_priority = {"cuda": 90}
    plan_type = CsgmvPlan
    cuda_graphs = True
    deterministic = True
    narrow_intermediate = True

    def __init__(
        self,
        device: torch.device | str = "cuda",
        *,
        segment_size: int | Literal["auto"] = 16,
        allow_tf32: bool = False,
        batch_invariant: bool = False,
        tiles: str | os.PathLike[str] = "auto",
    ) -> None:
        super().__init__(device)
        self.segment_size = check_segment_size(segment_size)
        self.allow_tf32 = allow_tf32
        self.batch_invariant = batch_invariant
        self._options = launch.Options(
            precision="tf32" if allow_tf32 else "ieee",
            programmatic=has_programmatic_launch(self.device),
            batch_invariant=batch_invariant,
            choice=tile_choice(tuning, "csgmv", self.device, tiles, batch_invariant),
            boxes=has_boxes(self.device),
        )

    @property
    def tile_choice(self) -> TileChoice:
        """Where sizes come from."""
        return self._options.choice

    @tile_choice.setter
    def tile_choice(self, choice: TileChoice) -> None:
        self._options = self._options._replace(choice=choice)

    @classmethod
    @override
    def unavailable_reasons(cls, device: torch.device | str) -> list[str]:
        return super().unavailable_reasons(device) + interpreter_reasons(device)

    @override
    def prepare_batch(self, batch: LoRABatch, out: CsgmvPlan | None = None) -> CsgmvPlan:
        if out is not None:
            return plans.refill(out, batch)
        counts = plans.count_tokens(batch.token_slots.numpy(), batch.num_slots)
        active = int((counts > 0).sum())
        tokens = (batch.num_tokens, active)
        sizes = launch.INVARIANT_BATCH if self.batch_invariant else tokens
        row = self.tile_choice.block_tokens(*sizes)
        segment_size, group_size = segment_and_group(self.segment_size, *sizes, row)
        return plans.make_plan(batch, segment_size, group_size, active, self.device)

    @override
    def run_lora_a(self, x: torch.Tensor, weights: LoRAWeights, plan: CsgmvPlan) -> torch.Tensor:
        kernels = launch.kernels_of(weights, plan, self._options, "separate")
        h = self._planes(weights, kernels.split_k, plan.num_tokens).zero_()
        rows = launch.grid_of(plan, is_capturing(self.device)).rows
        if rows:
            launch.shrink(x, with_contiguous_tables(weights), plan, h, rows, kernels.shrink)
        return h[0] if kernels.split_k == 1 else h.sum(0)

    @override
    def run_lora_b(
        self,
        h: torch.Tensor,
        weights: LoRAWeights,
        plan: CsgmvPlan,
        base_output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        y = self._output(weights, plan, weights.dtype) if base_output is None else base_output
        rows = launch.grid_of(plan, is_capturing(self.device)).rows
        if rows:
            kernels = launch.kernels_of(weights, plan, self._options, "separate")
            laid = with_contiguous_tables(weights)
            launch.expand(h.float()[None], laid, plan, y, rows, kernels.expand)
        return y

    @override
    def run_linear(
        self,
        x: torch.Tensor,
        weights: LoRAWeights,
        plan: CsgmvPlan,
        base_output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        y = self._output(weights, plan, x.dtype) if base_output is None else base_output
        if base_output is None and self._repeat_linear(x, weights, plan, y):
            return y
        rows, places = launch.grid_of(plan, is_capturing(self.device))
        if not rows:
            return y
        kernels = launch.kernels_of(weights, plan, self._options)
        h = self._planes(weights, kernels.split_k, places)
        laid = with_contiguous_tables(weights)
        shrink = launch.shrink(x, laid, plan, h, rows, kernels.shrink)
        expand = launch.expand(h, laid, plan, y, rows, kernels.expand)
        handles = self.handle, weights.handle, places
        plan.remember(handles, self._options, x, weights, y, shrink, expand)
        return y

    @override
    def _repeat_linear(
        self,
        x: torch.Tensor,
        weights: LoRAWeights,
        plan: CsgmvPlan,
        base_output: torch.Tensor,
        keep: bool = False,
    ) -> bool:
        if type(plan) is not CsgmvPlan or type(weights) is not LoRAWeights:
            return False
        capturing = is_capturing(self.device)
        rows, places = launch.grid_of(plan, capturing)
        if not plan.num_groups and not capturing:
            rows = 0  # grid_of has one empty row, which the call that is remembered has launched
        handles = self.handle, weights.handle, places
        arguments = (x, weights, base_output, keep)
        return plan.repeat(handles, self._options, rows, capturing, *arguments)

    @override
    def run_embedding(
        self,
        token_ids: torch.Tensor,
        weights: LoRAWeights,
        plan: CsgmvPlan,
        base_output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        y = self._output(weights, plan, weights.dtype) if base_output is None else base_output
        rows, places = launch.grid_of(plan, is_capturing(self.device))
        if rows:
            h, laid = self._planes(weights, 1, places), with_contiguous_tables(weights)
            launch.gather(token_ids, laid, plan, h, rows)
            kernels = launch.kernels_of(weights, plan, self._options, "embedding")
            launch.expand(h, laid, plan, y, rows, kernels.expand)
        return y

    def _planes(self, weights: LoRAWeights, split_k: int, rows: int) -> torch.Tensor:
        shape = (split_k, weights.num_slices, rows, weights.max_rank)
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def _output(self, weights: LoRAWeights, plan: CsgmvPlan, dtype: torch.dtype) -> torch.Tensor:
        shape = (plan.num_tokens, weights.out_features)
        return torch.zeros(shape, dtype=dtype, device=self.device)
