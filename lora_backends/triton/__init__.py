"""`triton`: kernels over tiles of one adapter's tokens, two launches a layer."""

from __future__ import annotations

import os
from typing import ClassVar

import torch
from typing_extensions import override

from lora_backends.backend import LoRABackend
from lora_backends.batch import LoRABatch
from lora_backends.gpu.boxes import has_boxes
from lora_backends.gpu.choice import tile_choice
from lora_backends.gpu.launching import (
    has_programmatic_launch,
    interpreter_reasons,
    is_capturing,
)
from lora_backends.gpu.ready import EMPTY_ROW, with_contiguous_tables
from lora_backends.gpu.tiles import TileConfig
from lora_backends.triton import launch, tuning
from lora_backends.triton import plan as plans
from lora_backends.triton.plan import TritonPlan
from lora_backends.weights import LoRAWeights

_INVARIANT_TOKENS = 64  # tile sizes of a batch-invariant backend are those of this many tokens
_INVARIANT_SLOTS = 8  # and of this many active slots


class TritonBackend(LoRABackend):
    """Shrinks and expands with two Triton kernels over tiles of tokens that share a slot.

    Tokens are sorted by slot once per batch; a program takes one tile, so that each adapter's A
    and B are read by few programs, and reads no further than the adapter's own rank. The shrink
    writes partial sums that the expand adds up in order, so results are deterministic.

    `run_linear` rounds h to the dtype of the weights between the two products; `run_lora_a` and
    `run_lora_b` keep it in float32. For float16 weights, h beyond 65504 overflows in run_linear.

    Args:
        device: a CUDA or ROCm device, or the CPU under ``TRITON_INTERPRET=1``.
        allow_tf32: multiply float32 values as tf32, faster and with 10 bits of mantissa.
        batch_invariant: take the same tile sizes for every batch, so that a row's result does
            not depend on the rest of its batch. They are the rules': no table is read.
        tiles: "auto" takes tile sizes from the user's table for this device, else from the
            library's own, else from the rules; "rules" reads no table; else the file of a table.

    Raises:
        InvalidInputError: a table that is broken or another device's.

    Source:
        Punica: Multi-Tenant LoRA Serving, arXiv 2310.18547.
    """

    name = "triton"
    device_types: ClassVar[tuple[str, ...]] = ("cuda", "cpu")
    auto_priority = {"cuda": 100}
    plan_type = TritonPlan
    cuda_graphs = True
    deterministic = True
    narrow_intermediate = True

    def __init__(
        self,
        device: torch.device | str = "cuda",
        *,
        allow_tf32: bool = False,
        batch_invariant: bool = False,
        tiles: str | os.PathLike[str] = "auto",
    ) -> None:
        super().__init__(device)
        self.tile_choice = tile_choice(tuning, "triton", self.device, tiles, batch_invariant)
        self.allow_tf32 = allow_tf32
        self.batch_invariant = batch_invariant
        self._precision = "tf32" if allow_tf32 else "ieee"
        self._programmatic = has_programmatic_launch(self.device)
        self._boxes = has_boxes(self.device)

    @classmethod
    @override
    def unavailable_reasons(cls, device: torch.device | str) -> list[str]:
        return super().unavailable_reasons(device) + interpreter_reasons(device)

    @override
    def prepare_batch(self, batch: LoRABatch, out: TritonPlan | None = None) -> TritonPlan:
        counts = plans.count_tokens(batch)
        if out is not None:
            return plans.refill(out, batch, counts)
        if self.batch_invariant:
            tile = self.tile_choice.block_tokens(_INVARIANT_TOKENS, _INVARIANT_SLOTS)
        else:
            tile = self.tile_choice.block_tokens(batch.num_tokens, plans.count_active(counts))
        return plans.make_plan(batch, counts, tile, self.device)

    @override
    def run_lora_a(self, x: torch.Tensor, weights: LoRAWeights, plan: TritonPlan) -> torch.Tensor:
        tiles = self._tiles(weights, plan, x.element_size())
        h = self._planes(weights, plan, tiles.shrink.split_k).zero_()
        count = launch.grid_tiles(plan, is_capturing(self.device)) or EMPTY_ROW
        if count:
            laid = with_contiguous_tables(weights)
            precision, early = self._precision, self._programmatic
            launch.shrink(x, laid, plan, h, count, tiles.shrink, precision, early, exact=True)
        return h[0] if h.shape[0] == 1 else h.sum(0)

    @override
    def run_lora_b(
        self,
        h: torch.Tensor,
        weights: LoRAWeights,
        plan: TritonPlan,
        base_output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        y = self._output(weights, plan, weights.dtype) if base_output is None else base_output
        count = launch.grid_tiles(plan, is_capturing(self.device)) or EMPTY_ROW
        if count:
            laid = with_contiguous_tables(weights)
            tiles = self._tiles(weights, plan, torch.float32.itemsize)
            sizes = tiles.expand
            launch.expand(h.float()[None], laid, plan, y, count, sizes, "ieee", True, False, False)
        return y

    @override
    def run_linear(
        self,
        x: torch.Tensor,
        weights: LoRAWeights,
        plan: TritonPlan,
        base_output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        y = self._output(weights, plan, x.dtype) if base_output is None else base_output
        if base_output is None and self._repeat_linear(x, weights, plan, y):
            return y
        count = launch.grid_tiles(plan, is_capturing(self.device)) or EMPTY_ROW
        if not count:
            return y
        tiles = self._tiles(weights, plan, x.element_size())
        h = self._planes(weights, plan, tiles.shrink.split_k)
        precision, early = self._precision, self._programmatic
        laid = with_contiguous_tables(weights)
        shrink = launch.shrink(x, laid, plan, h, count, tiles.shrink, precision, early)
        expand = launch.expand(
            h, laid, plan, y, count, tiles.expand, precision, False, early, self._boxes
        )
        handles = self.handle, weights.handle
        plan.remember(handles, self.tile_choice, x, weights, y, shrink, expand)
        return y

    @override
    def _repeat_linear(
        self,
        x: torch.Tensor,
        weights: LoRAWeights,
        plan: TritonPlan,
        base_output: torch.Tensor,
        keep: bool = False,
    ) -> bool:
        if type(plan) is not TritonPlan or type(weights) is not LoRAWeights:
            return False
        capturing = is_capturing(self.device)
        handles, count = (self.handle, weights.handle), launch.grid_tiles(plan, capturing)
        arguments = (x, weights, base_output, keep)
        return plan.repeat(handles, self.tile_choice, count, capturing, *arguments)

    @override
    def run_embedding(
        self,
        token_ids: torch.Tensor,
        weights: LoRAWeights,
        plan: TritonPlan,
        base_output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        y = self._output(weights, plan, weights.dtype) if base_output is None else base_output
        count = launch.grid_tiles(plan, is_capturing(self.device)) or EMPTY_ROW
        if count:
            h, laid = self._planes(weights, plan, 1), with_contiguous_tables(weights)
            launch.gather(token_ids, laid, plan, h, count)
            tiles = self._tiles(weights, plan, weights.lora_b.element_size())
            launch.expand(
                h, laid, plan, y, count, tiles.expand, self._precision, False, False, self._boxes
            )
        return y

    def _tiles(self, weights: LoRAWeights, plan: TritonPlan, item_bytes: int) -> TileConfig:
        fixed, (_, slices, max_rank, in_features) = self.batch_invariant, weights.lora_a.shape
        return self.tile_choice.choose_tiles(  # type: ignore[no-any-return]
            _INVARIANT_TOKENS if fixed else plan.num_tokens,
            _INVARIANT_SLOTS if fixed else plan.active_slots,
            plan.block_tokens,
            slices,
            max_rank,
            in_features,
            weights.lora_b.shape[1],
            item_bytes,
        )

    def _planes(self, weights: LoRAWeights, plan: TritonPlan, split_k: int) -> torch.Tensor:
        shape = (split_k, weights.num_slices, plan.num_tokens, weights.max_rank)
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def _output(self, weights: LoRAWeights, plan: TritonPlan, dtype: torch.dtype) -> torch.Tensor:
        shape = (plan.num_tokens, weights.out_features)
        return torch.zeros(shape, dtype=dtype, device=self.device)
