"""`numba_cpu`: compiled kernels for CPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lora_backends.backend import LoRABackend
from lora_backends.batch import NO_ADAPTER, LoRABatch
from lora_backends.defaults.gradients import Segments
from lora_backends.dispatch.cached import CachedCall, stores_calls
from lora_backends.dispatch.output import added_to
from lora_backends.dispatch.wrap import unchecked
from lora_backends.eight_bit import is_eight_bit
from lora_backends.errors import BackendUnavailableError
from lora_backends.experts import ExpertWeights
from lora_backends.features import FEATURES
from lora_backends.numba_cpu import experts, launch
from lora_backends.numba_cpu.blends import BlendedRun, NumbaBlend
from lora_backends.numba_cpu.call_cache import CachedRun
from lora_backends.numba_cpu.gradients import launch as backward
from lora_backends.numba_cpu.layer import Layers, require_memory
from lora_backends.numba_cpu.machine.cpu import missing_features
from lora_backends.numba_cpu.needs import (
    BIAS,
    EXPAND,
    GATHER,
    IN_REGISTERS,
    LONG,
    MULTIPLIED,
    RAGGED,
    SHRINK,
)
from lora_backends.numba_cpu.plan import NumbaPlan, order_and_segments
from lora_backends.numba_cpu.routing import NumbaRouting
from lora_backends.plan import padded
from lora_backends.weights import LoRAWeights

_FUSED = frozenset({"run_linear", "run_qkv", "run_gate_up", "run_logits"})
"""Operations that one kernel runs, shrink and expand."""


class NumbaCPUBackend(LoRABackend):
    """Reads each active adapter's weights once per batch, at their true rank, on torch's threads.

    What a call runs is compiled when it is first needed (`warmup` does it ahead) and kept on disk.
    No matrix library takes part, and sums run in one order whatever the batch and the number of
    threads: results are deterministic and batch-invariant, always.

    Args:
        device: the CPU.
        batch_invariant: whether to promise it. The kernels are the same ones either way, so the
            promise costs nothing.
    """

    name = "numba_cpu"
    device_types: ClassVar[tuple[str, ...]] = ("cpu",)
    auto_priority = {"cpu": 20}
    plan_type = NumbaPlan
    routing_type = NumbaRouting
    features = frozenset(FEATURES)
    deterministic = True
    batch_invariant = True

    def __init__(self, device: torch.device | str = "cpu", *, batch_invariant: bool = True) -> None:
        super().__init__(device)
        if missing := missing_features():  # compiling would end the process
            raise BackendUnavailableError(" ".join(missing))
        self.batch_invariant = batch_invariant
        self._layers = Layers()

    @classmethod
    @override
    def unavailable_reasons(cls, device: torch.device | str) -> list[str]:
        return super().unavailable_reasons(device) + missing_features()

    def warmup(self, dtypes: Iterable[torch.dtype] | None = None) -> None:
        """Compile, or load from the cache on disk, what layers of these dtypes run.

        None stands for all dtypes but those of 8 bits, which may be named. Experts whose pairs
        are summed (`reduce`) compile more at their first call.
        """
        launch.grouping_kernel()
        for dtype in self.dtypes if dtypes is None else dtypes:
            for flags in (SHRINK, GATHER, MULTIPLIED):
                needs = flags | EXPAND | LONG | RAGGED
                if is_eight_bit(dtype):  # one kernel for all
                    needs |= IN_REGISTERS if dtype is torch.int8 else 0
                    for wide in self.dtypes:  # of x and y
                        launch.eight_bit_kernel(wide, wide, needs | BIAS)
                else:
                    launch.kernel_for(dtype, dtype, needs)

    @override
    def prepare_batch(
        self, batch: LoRABatch, out: NumbaPlan | None = None, capacity: int | None = None
    ) -> NumbaPlan:
        require_memory()
        order, segments = order_and_segments(batch)
        if out is None:
            sizes = (batch.num_tokens, batch.num_slots)
            out = NumbaPlan(*sizes, order, segments, capacity=capacity or 0)
            out.call_cache = self._layers.calls
        scales = batch.token_scales
        out.num_tokens = batch.num_tokens
        out.refill(order, segments, None if scales is None else padded(scales, out.capacity))
        return out

    @override
    def forward_with_h(
        self, operation: str, x: Tensor, weights: LoRAWeights, plan: Any, base_output: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if operation not in _FUSED or base_output is None or is_eight_bit(weights.dtype):
            return super().forward_with_h(operation, x, weights, plan, base_output)
        # The fused kernel has h for one segment at a time.
        h = unchecked(self, "run_lora_a")(x, weights, plan)
        return unchecked(self, "run_lora_b")(h, weights, plan, base_output), h

    @override
    def run_lora_b_backward(
        self,
        grad: Tensor,
        h: Tensor | None,
        weights: LoRAWeights,
        plan: Any,
        *,
        needs_h: bool = True,
        narrow: bool = False,
        lora_b: Tensor | None = None,
        slots: Sequence[int] | None = None,
    ) -> Tensor | None:
        options: dict[str, Any] = {"needs_h": needs_h, "lora_b": lora_b, "slots": slots}
        if is_eight_bit(weights.dtype) or not backward.runs(grad, h):
            return super().run_lora_b_backward(grad, h, weights, plan, narrow=narrow, **options)
        located = self._layers.locate(weights)
        return backward.run_b(located, plan, weights, grad, h, **options)

    @override
    def run_lora_a_backward(
        self,
        dh: Tensor,
        x: Tensor | None,
        weights: LoRAWeights,
        plan: Any,
        *,
        dx: Tensor | None = None,
        adds: bool = False,
        lora_a: Tensor | None = None,
        slots: Sequence[int] | None = None,
    ) -> None:
        options: dict[str, Any] = {"dx": dx, "lora_a": lora_a, "slots": slots}
        if is_eight_bit(weights.dtype) or not backward.runs(dh, x, dx):
            super().run_lora_a_backward(dh, x, weights, plan, adds=adds, **options)
            return
        if dx is not None and not adds:
            dx.zero_()
        backward.run_a(self._layers.locate(weights), plan, weights, dh, x, **options)

    @override
    def slot_rows(self, plan: NumbaPlan, num_rows: int, num_slots: int) -> Segments:
        return plan.rows_by_slot()

    @override
    def token_slots(self, plan: NumbaPlan, num_rows: int, num_slots: int) -> Tensor:
        slots = torch.full((num_rows,), NO_ADAPTER, dtype=torch.int64, device="cpu")
        for slot, rows in plan.rows_by_slot():
            slots[rows] = slot
        return slots

    @override
    def run_lora_a(
        self, x: Tensor, weights: LoRAWeights, plan: Any, out: Tensor | None = None
    ) -> Tensor:
        located, h = self._layers.locate(weights), out
        if h is None:
            h = torch.empty(weights.num_slices, x.shape[0], weights.max_rank, device="cpu")
        h.zero_()
        launch.run(SHRINK, located, plan, x=x, h=h)
        return h

    @override
    def run_lora_b(
        self, h: Tensor, weights: LoRAWeights, plan: Any, base_output: Tensor | None = None
    ) -> Tensor:
        y = added_to(base_output, weights, h.shape[1])
        launch.run(0, self._layers.locate(weights), plan, h=h, y=y)
        return y

    @override
    @stores_calls
    def run_linear(
        self, x: Tensor, weights: LoRAWeights, plan: Any, base_output: Tensor | None = None
    ) -> Tensor:
        y = added_to(base_output, weights, x.shape[0])
        if plan.num_segments:
            bound = launch.bind(SHRINK, self._layers.locate(weights), plan.needs, x, None, y)
            launch.start(bound, plan, x.data_ptr(), y.data_ptr())
            cached = CachedRun(bound, x.shape[0], plan.num_slots, plan.needs)
            plan.call_cache.store("run_linear", self, x, weights, y, cached)
        return y

    @override
    def prepare_together(self, batch: LoRABatch, out: Any, capacity: int | None) -> NumbaBlend:
        if out is None:
            return NumbaBlend(batch)
        out.refill(batch)
        return out  # type: ignore[no-any-return]

    @override
    def add_together(
        self, operation: str, x: Tensor, weights: LoRAWeights, joint: Any, y: Tensor
    ) -> CachedCall | bool:
        located, first = self._layers.locate(weights), SHRINK
        if operation == "run_embedding":
            first, x = GATHER, x.to(torch.int64).reshape(-1, 1)
        call = BlendedRun.of(first, located, joint, x, y)
        call.run(x, weights, joint, y)
        return call if first == SHRINK else True

    @override
    def run_experts(
        self,
        x: Tensor,
        weights: ExpertWeights,
        routing: Any,
        base_output: Tensor | None = None,
        *,
        rows: str = "tokens",
        weighted: bool = False,
        reduce: bool = False,
    ) -> Tensor:
        return experts.run(x, weights, routing, base_output, self._layers, rows, weighted, reduce)

    @override
    def run_embedding(
        self, token_ids: Tensor, weights: LoRAWeights, plan: Any, base_output: Tensor | None = None
    ) -> Tensor:
        y = added_to(base_output, weights, token_ids.shape[0])
        ids = token_ids.to(torch.int64).reshape(-1, 1)
        launch.run(GATHER, self._layers.locate(weights), plan, x=ids, y=y)
        return y
