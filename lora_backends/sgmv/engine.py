"""The base class of `triton` and `csgmv`: a shrink and an expand launch per layer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lora_backends.backend import LoRABackend
from lora_backends.batch import LoRABatch
from lora_backends.common.devices import as_device, is_capturing
from lora_backends.defaults.expert_gradients import ExpertGradients
from lora_backends.dispatch.cached import RoutedCalls, stores_calls
from lora_backends.dispatch.checks import check_prepare_batch
from lora_backends.dispatch.gradients.recorded import count_refill
from lora_backends.dispatch.output import added_to, new_output
from lora_backends.dispatch.wrap import runs, stands_for
from lora_backends.experts import ExpertWeights
from lora_backends.features import FEATURES
from lora_backends.operations import BY_NAME, OPERATIONS
from lora_backends.sgmv import launch
from lora_backends.sgmv.backward import launch as backward
from lora_backends.sgmv.backward.slots import slots_on
from lora_backends.sgmv.base.product import MOST_ROWS, base_arguments, base_kernel_of
from lora_backends.sgmv.blends import launch as blends
from lora_backends.sgmv.blends.plan import Blend, fill_blend, new_blend
from lora_backends.sgmv.experts.backward import Backward
from lora_backends.sgmv.experts.cached import CachedSite
from lora_backends.sgmv.experts.launch import add_experts
from lora_backends.sgmv.experts.routing import SgmvRouting, follow_plan, make_routing, sort_pairs
from lora_backends.sgmv.experts.rules import PairShape
from lora_backends.sgmv.launch import EMPTY_ROW
from lora_backends.sgmv.launching.ahead import Noted, recording
from lora_backends.sgmv.launching.call_cache import CachedLaunches, Launched
from lora_backends.sgmv.launching.kernel import (
    INTERPRETED,
    RECORD,
    has_programmatic_launch,
)
from lora_backends.sgmv.launching.tma import has_tma
from lora_backends.sgmv.layout import SgmvPlan, fill_plans
from lora_backends.sgmv.runs import Counted, count_tokens
from lora_backends.sgmv.tiles.first_use import asked_source
from lora_backends.sgmv.tiles.gpu import gpu_of
from lora_backends.sgmv.tiles.sizes import TILE_TOKENS
from lora_backends.sgmv.tiles.source import TileSource
from lora_backends.sgmv.wide.operands import takes, wide_left, wide_right
from lora_backends.weights import LoRAWeights

INVARIANT_PAIRS = PairShape(pairs=256, keys=64, tile=16)
"""A batch-invariant backend takes the sizes for this routing, always."""


_LINEAR = {op.name for op in OPERATIONS if "run_linear" in (op.name, op.same_as)}
"""The operations in whose place `run_with_base` is called."""


class SgmvBackend(LoRABackend):
    """Segmented gather matrix-vector products in Triton: two launches a layer.

    A subclass names its package and cuts batches into rows of the grid. It documents the
    options; `tiles` may also be a `TileSource`.
    """

    package: ClassVar[str]
    """The package whose folder `tables` has the tables of tuned tile sizes."""

    device_types: ClassVar[tuple[str, ...]] = ("cuda", "cpu")
    plan_type: ClassVar[type[SgmvPlan]] = SgmvPlan
    features = frozenset(FEATURES)
    routing_type = SgmvRouting
    cuda_graphs = True
    deterministic = True
    narrow_intermediate = True
    most_base_rows: ClassVar[int] = MOST_ROWS
    """Rows that `run_with_base` takes."""

    def __init__(
        self,
        device: torch.device | str = "cuda",
        *,
        allow_tf32: bool = False,
        batch_invariant: bool = False,
        tiles: str | os.PathLike[str] | TileSource = "auto",
    ) -> None:
        super().__init__(device)
        source = asked_source(type(self), self.device, tiles, batch_invariant)
        self.allow_tf32 = allow_tf32
        self._is_cuda = self.device.type == "cuda"
        self.batch_invariant = batch_invariant
        self.routed_calls = RoutedCalls()
        self._options = launch.Options(
            precision="tf32" if allow_tf32 else "ieee",
            programmatic=has_programmatic_launch(self.device),
            batch_invariant=batch_invariant,
            source=source,
            tma=has_tma(self.device),
            gpu=gpu_of(self.device),
        )

    @property
    def tile_source(self) -> TileSource:
        """Where tile sizes come from."""
        return self._options.source

    @classmethod
    @override
    def unavailable_reasons(cls, device: torch.device | str) -> list[str]:
        reasons = super().unavailable_reasons(device)
        if as_device(device).type == "cpu" and not INTERPRETED:
            reasons.append(
                "Triton runs on the CPU only where TRITON_INTERPRET=1 is set before the import."
            )
        return reasons

    def recording(self, recorded: Noted | None = None) -> AbstractContextManager[Noted]:
        """Note the kernels that this thread's calls need instead of launching them.

        Calls select kernels and arguments as always, so that nothing else has to know how. What
        they return is undefined. Kernels are added to `recorded`, or to a new record.
        """
        return recording(recorded)

    def _cut(self, num_tokens: int, counted: Counted) -> tuple[int, ...]:
        """Return the sizes that `plan_type.stage` cuts a batch by; the run's comes first."""
        if self.batch_invariant:
            return (self.tile_source.tile_tokens(*launch.INVARIANT_BATCH),)
        return (self.tile_source.tile_for(num_tokens, counted),)

    def _run_sizes(self) -> tuple[int, ...]:
        """Return every number of tokens per run that `_cut` may choose."""
        return TILE_TOKENS

    @override
    def prepare_batch(
        self, batch: LoRABatch, out: SgmvPlan | None = None, capacity: int | None = None
    ) -> SgmvPlan:
        counted = count_tokens(batch)
        cut = self._cut(batch.num_tokens, counted)
        plan = out
        if plan is None:
            sizes = (cut[0],) if capacity is None else (*self._run_sizes(), cut[0])
            plan = self.plan_type.with_room(batch, capacity, sizes, self.device)
        plan.fill(batch, counted, *cut)
        return plan

    def _prepares_otherwise(self) -> bool:
        """Return whether a subclass overrides `prepare_batch`, which may do more."""
        return type(self).prepare_batch is not SgmvBackend.prepare_batch

    def prepare_rooms(self, num_slots: int, capacities: Sequence[int]) -> list[SgmvPlan]:
        """Return a plan with room for each number of tokens; `refill` fills them together.

        They lie side by side in one buffer, so that one copy sends a batch to all of them.
        """
        if self._prepares_otherwise():
            empty = LoRABatch([], num_slots)
            return [self.prepare_batch(empty, capacity=each) for each in capacities]
        sizes = self._run_sizes()
        with torch.inference_mode(False):  # so that they can be refilled outside of it, too
            return self.plan_type.in_one_buffer(num_slots, capacities, sizes, self.device)

    def refill(self, batch: LoRABatch, plans: Sequence[SgmvPlan]) -> None:
        """Refill plans as ``prepare_batch(batch, out=plan)`` does; the batch is sorted once.

        Args:
            batch: one adapter per token.
            plans: of this backend; neighbours from `prepare_rooms` share a copy.

        Raises:
            InvalidInputError: as `prepare_batch`; plans keep their batch.
        """
        if self._prepares_otherwise():
            for plan in plans:
                self.prepare_batch(batch, out=plan)
            return
        for plan in plans:
            check_prepare_batch(self, batch, plan)
        for plan in plans:
            count_refill(plan)
        counted = count_tokens(batch)
        fill_plans(plans, batch, counted, self._cut(batch.num_tokens, counted))

    @override
    def run_lora_a(
        self, x: Tensor, weights: LoRAWeights, plan: SgmvPlan, out: Tensor | None = None
    ) -> Tensor:
        tokens, rows = x.shape[0], self._rows(plan, x.shape[0])
        stacks = launch.stacks_of(weights)
        kernels = launch.kernels_of(
            weights, stacks, plan, tokens, x.dtype, self._options, "separate"
        )
        if out is not None and kernels.split_k == 1:
            h = out[None].zero_()
        else:
            h = self._planes(weights, kernels.split_k, tokens, weights.max_rank).zero_()
        if rows:
            launch.shrink(x, stacks, plan, h, rows, kernels.shrink)
        if kernels.split_k == 1:
            return h[0] if out is None else out
        return torch.sum(h, 0, out=out)

    @override
    def run_lora_b(
        self, h: Tensor, weights: LoRAWeights, plan: SgmvPlan, base_output: Tensor | None = None
    ) -> Tensor:
        tokens = h.shape[1]
        y, rows = added_to(base_output, weights, tokens), self._rows(plan, tokens)
        if rows:
            dtype, stacks = weights.compute_dtype, launch.stacks_of(weights)
            kernels = launch.kernels_of(
                weights, stacks, plan, tokens, dtype, self._options, "separate"
            )
            launch.expand(h.float()[None], stacks, plan, y, rows, kernels.expand)
        return y

    @override
    @stores_calls
    def run_linear(
        self, x: Tensor, weights: LoRAWeights, plan: SgmvPlan, base_output: Tensor | None = None
    ) -> Tensor:
        tokens = x.shape[0]
        y = added_to(None, weights, tokens) if base_output is None else base_output
        rows = self._rows(plan, tokens)
        if rows:
            self._shrink_and_expand(x, weights, plan, y, rows)
        return y

    def _shrink_and_expand(
        self, x: Tensor, weights: LoRAWeights, plan: SgmvPlan, y: Tensor, rows: int
    ) -> Tensor:
        """Launch both kernels of `run_linear`, and return the planes of h."""
        tokens, stacks = x.shape[0], launch.stacks_of(weights)
        kernels = launch.kernels_of(weights, stacks, plan, tokens, x.dtype, self._options)
        h = self._planes(weights, kernels.split_k, plan.h_rows(tokens), stacks.h_width)
        first = launch.shrink_arguments(x, stacks, plan.tables(), h)
        kernels.shrink.launch(rows, first)
        second = launch.expand_arguments(h, stacks, plan, y, kernels.expand)
        kernels.expand.launch(rows, second)
        if not INTERPRETED and stacks.in_place and RECORD.get() is None:
            shrink, expand = Launched(kernels.shrink, first), Launched(kernels.expand, second)
            self._cache("run_linear", plan, x, weights, y, shrink, expand)
        return h

    @property
    def multiplies_bases(self) -> bool:
        """Whether `run_with_base` can multiply on the device, and adds what `run_linear` adds."""
        # the sizes of the product's kernel depend on the rows of the batch
        if not self._options.tma or self.batch_invariant:
            return False
        return stands_for(self, "run_with_base", _LINEAR)

    def run_with_base(
        self,
        x: Tensor,
        base_weight: Tensor,
        base_bias: Tensor | None,
        weights: LoRAWeights,
        plan: SgmvPlan,
    ) -> Tensor | None:
        """Return ``x @ base_weight.T + base_bias`` with the LoRA of x added.

        Three kernels overlap: the base product runs beside the shrink, and the expand reads B
        before the product has ended. The product is rounded to x's dtype before the LoRA is added,
        as torch's is, but its sums may have another order.

        Args:
            x: [rows, in_features] bfloat16 or float16, up to `most_base_rows` rows.
            base_weight: [out_features, in_features] of x's dtype.
            base_bias: [out_features] of x's dtype, or None.
            weights: of the layer.
            plan: of the batch.

        Returns:
            [rows, out_features] of x's dtype. None if nothing was launched, so that torch has to
            multiply: `run_linear` may refuse an argument or has to copy one, the base's tensors are
            not as above or need a gradient, cuBLAS is faster (more rows, few columns), the device
            has no TMA, the backend is batch-invariant, or a graph captures a kernel that is not
            compiled yet.
        """
        if base_weight.shape[0] != weights.out_features or not self.multiplies_bases:
            return None
        y = x.new_empty((x.shape[0], weights.out_features))
        if type(x) is not Tensor or not runs(self, "run_linear", x, weights, plan, y):
            return None
        options = self._options
        base = base_kernel_of(x, base_weight, base_bias, options.gpu, options.programmatic)
        stacks = launch.stacks_of(weights)
        if base is None or not stacks.in_place:
            return None  # no copy of a table may come between the kernels
        tokens, rows = x.shape[0], self._rows(plan, x.shape[0])
        kernels = launch.kernels_of(weights, stacks, plan, tokens, x.dtype, options, "beside")
        h = self._planes(weights, kernels.split_k, plan.h_rows(tokens), stacks.h_width)
        launches = (
            (rows, kernels.shrink, launch.shrink_arguments(x, stacks, plan.tables(), h)),
            (1, base, base_arguments(x, base_weight, base_bias, y, base)),
            (rows, kernels.expand, launch.expand_arguments(h, stacks, plan, y, kernels.expand)),
        )
        if is_capturing(self.device) and not all(
            kernel.is_compiled(arguments) for _, kernel, arguments in launches
        ):
            return None
        for programs, kernel, arguments in launches:
            kernel.launch(programs, arguments)
        return y

    def widened_operands(
        self,
        x: Tensor,
        weight: Tensor,
        weights: LoRAWeights,
        plan: SgmvPlan,
        slots: Tensor,
        rank: int,
    ) -> tuple[Tensor, Tensor] | None:
        """Return both operands of a widened product, made by one launch each.

        Args:
            x: [rows, in_features], float32, float16 or bfloat16.
            weight: of the base layer, [out_features, in_features] of x's dtype.
            weights: of the layer, of x's dtype, without LoRA bias and output scales.
            plan: of the batch, one adapter per row.
            slots: of all adapters of the batch, [adapters] int32 on the device.
            rank: the largest of their ranks.

        Returns:
            The results of `wide_left` and `wide_right`. None if `run_lora_a` is overridden, the
            engine is batch-invariant, or the kernels do not take the layer or the number of rows.
        """
        if self.batch_invariant or not stands_for(self, "widened_operands", {"run_lora_a"}):
            return None
        if not takes(x, weight, weights, rank):
            return None
        if not plan.num_tokens <= x.shape[0] <= plan.capacity:  # of other rows it has no slots
            return None
        left = wide_left(x, weights, plan.token_slots(), slots, rank)
        return left, wide_right(weight, weights, slots, rank)

    @override
    @stores_calls
    def run_embedding(
        self,
        token_ids: Tensor,
        weights: LoRAWeights,
        plan: SgmvPlan,
        base_output: Tensor | None = None,
    ) -> Tensor:
        tokens = token_ids.shape[0]
        y, rows = added_to(base_output, weights, tokens), self._rows(plan, tokens)
        if rows:
            self._gather_and_expand(token_ids, weights, plan, y, rows)
        return y

    def _gather_and_expand(
        self, token_ids: Tensor, weights: LoRAWeights, plan: SgmvPlan, y: Tensor, rows: int
    ) -> Tensor:
        """Launch both kernels of `run_embedding`, and return the plane of h."""
        tokens, dtype = token_ids.shape[0], weights.compute_dtype
        stacks = launch.stacks_of(weights)
        kernel = launch.gather_kernel_of(weights, plan, self._options)
        kernels = launch.kernels_of(
            weights, stacks, plan, tokens, dtype, self._options, "embedding"
        )
        h = self._planes(weights, 1, plan.h_rows(tokens), stacks.h_width)
        gather = launch.gather(token_ids, stacks, plan, h, rows, kernel)
        expand = launch.expand(h, stacks, plan, y, rows, kernels.expand)
        if not INTERPRETED and stacks.in_place and RECORD.get() is None:
            self._cache("run_embedding", plan, token_ids, weights, y, gather, expand)
        return h

    @override
    def token_slots(self, plan: SgmvPlan, num_rows: int, num_slots: int) -> Tensor:
        return plan.token_slots()[:num_rows].long()

    @override
    def forward_with_h(
        self,
        operation: str,
        x: Tensor,
        weights: LoRAWeights,
        plan: SgmvPlan,
        base_output: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        called = "run_linear" if operation in _LINEAR else operation
        fuses = called in ("run_linear", "run_embedding")
        if not fuses or not stands_for(self, "forward_with_h", {operation, called}):
            return super().forward_with_h(operation, x, weights, plan, base_output)
        tokens = x.shape[0]
        y, rows = added_to(base_output, weights, tokens), self._rows(plan, tokens)
        if not rows:
            return y, self._planes(weights, 1, plan.h_rows(tokens), weights.max_rank)
        # as dispatch does for a call that is not recorded
        cached = plan.call_cache.find(called, self, x, weights, y, plan)
        h = cached.run_with_h(x, y, plan, rows) if isinstance(cached, CachedLaunches) else None
        if h is None:
            run = self._shrink_and_expand if called == "run_linear" else self._gather_and_expand
            h = run(x, weights, plan, y, rows)
        # the axis of planes tells it from the h of `run_lora_a`
        h = h if h.shape[0] == 1 else backward.sum_planes(h)
        return y, h[..., : weights.max_rank]

    @override
    def embedding_h(self, token_ids: Tensor, weights: LoRAWeights, plan: SgmvPlan) -> Tensor:
        tokens = token_ids.shape[0]
        h = self._planes(weights, 1, tokens, weights.max_rank).zero_()
        if rows := self._rows(plan, tokens):
            kernel = launch.gather_kernel_of(weights, plan, self._options, by_token=True)
            launch.gather(token_ids, launch.stacks_of(weights), plan, h, rows, kernel)
        return h[0]

    @override
    def run_lora_b_backward(
        self,
        grad: Tensor,
        h: Tensor | None,
        weights: LoRAWeights,
        plan: SgmvPlan,
        *,
        needs_h: bool = True,
        narrow: bool = False,
        lora_b: Tensor | None = None,
        slots: Sequence[int] | None = None,
    ) -> Tensor | None:
        dh, rows = None, self._rows(plan, grad.shape[0])
        if needs_h:
            dh = backward.run_dh(grad, weights, plan, rows, narrow, self._options)
        if lora_b is not None:
            assert h is not None
            by_place = h.ndim == 4 and plan.has_places  # from `forward_with_h`
            h = backward.readable(h[0] if h.ndim == 4 else h)
            wanted = self._wanted(plan, grad.shape[0], slots)
            backward.sum_outer_b(h, by_place, grad, weights, plan, wanted, lora_b, self._options)
        return dh

    @override
    def run_lora_a_backward(
        self,
        dh: Tensor,
        x: Tensor | None,
        weights: LoRAWeights,
        plan: SgmvPlan,
        *,
        dx: Tensor | None = None,
        adds: bool = False,
        lora_a: Tensor | None = None,
        slots: Sequence[int] | None = None,
    ) -> None:
        dh, rows = backward.readable(dh, weights.dtype), self._rows(plan, dh.shape[1])
        if dx is not None:
            backward.run_dx(dh, dx, weights, plan, rows, adds, self._options)
        if lora_a is not None:
            assert x is not None
            wanted = self._wanted(plan, dh.shape[1], slots)
            backward.sum_outer_a(dh, x, weights, plan, wanted, lora_a, self._options)

    @override
    def run_embedding_backward(
        self,
        dh: Tensor,
        token_ids: Tensor,
        weights: LoRAWeights,
        plan: SgmvPlan,
        *,
        lora_a: Tensor,
        slots: Sequence[int] | None = None,
    ) -> None:
        tokens = token_ids.shape[0]
        wanted = self._wanted(plan, tokens, slots)
        of_tokens = self.token_slots(plan, tokens, weights.num_slots)
        backward.sum_ids(backward.readable(dh), token_ids, of_tokens, weights, wanted, lora_a)

    @override
    def sum_tokens(
        self,
        values: Tensor,
        weights: LoRAWeights,
        plan: SgmvPlan,
        out: Tensor,
        slots: Sequence[int] | None = None,
    ) -> None:
        if values.stride(-1) != 1 and values.shape[-1] > 1:
            values = values.contiguous()
        backward.sum_rows(values, plan, self._wanted(plan, values.shape[0], slots), out)

    def _wanted(self, plan: SgmvPlan, rows: int, slots: Sequence[int] | None) -> backward.Wanted:
        """Return the slots whose gradients are wanted, and the runs to look through."""
        capturing = self._is_cuda and self._note_capture(plan)
        count = plan.num_slots if slots is None else len(slots)
        listed = None if slots is None else slots_on(self.device, slots)
        return backward.Wanted(listed, count, plan.runs(capturing, rows))

    @override
    def prepare_together(
        self, batch: LoRABatch, out: Blend | None, capacity: int | None
    ) -> Blend | None:
        # batch_invariant: a token with one adapter must get the same bits here as in a batch of one
        # adapter per token, which other kernels compute
        if self.batch_invariant:
            return None
        # With two adapters one pass takes about 1.4 times one adapter's time in decode, and 1.25
        # times in prefill, on an H200. A pass for each takes 2.1 times and rounds y twice.
        blend = new_blend(batch, capacity, self.device) if out is None else out
        return fill_blend(blend, batch, self._options.source.tile_tokens)

    @override
    def add_together(
        self, operation: str, x: Tensor, weights: LoRAWeights, joint: Blend, y: Tensor
    ) -> Any:
        # a pass for each adapter costs little there: the shrink only gathers columns of A
        if operation == "run_embedding":
            return False
        return blends.run(x, weights, joint, y, self._options)

    @override
    def prepare_experts(
        self,
        plan: Any,
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_experts: int,
        expert_map: Tensor | None = None,
        out: SgmvRouting | None = None,
    ) -> SgmvRouting:
        if out is None:
            fixed = INVARIANT_PAIRS if self.batch_invariant else None
            out = make_routing(plan, topk_ids, num_experts, fixed)
        sort_pairs(out, plan, topk_ids, topk_weights, expert_map, self._options.programmatic)
        return out

    @override
    @stores_calls
    def run_experts(
        self,
        x: Tensor,
        weights: ExpertWeights,
        routing: SgmvRouting,
        base_output: Tensor | None = None,
        *,
        rows: str = "tokens",
        weighted: bool = False,
        reduce: bool = False,
    ) -> Tensor:
        how: dict[str, Any] = {"rows": rows, "weighted": weighted, "reduce": reduce}
        y = base_output
        if y is None:
            y = new_output(BY_NAME["run_experts"], x, weights, routing, how)
        if routing.num_pairs == 0:
            return y
        options = self._options
        self._note_capture(routing.plan)
        follow_plan(routing, options.programmatic)
        made = add_experts(y, x, weights, routing, options, **how)
        if made is not None and not INTERPRETED and RECORD.get() is None:
            given = x, weights, routing, y, tuple(how.values())
            self.routed_calls.keep(*given, made, lambda: CachedSite(made, weighted))
        return y

    @override
    def run_experts_backward(
        self,
        grad: Tensor,
        x: Tensor | None,
        weights: ExpertWeights,
        routing: SgmvRouting,
        out: ExpertGradients,
        *,
        rows: str = "tokens",
        weighted: bool = False,
        reduce: bool = False,
        slots: Sequence[int] | None = None,
    ) -> None:
        self._note_capture(routing.plan)
        call = grad, x, weights, routing, self._options, rows == "pairs", weighted, reduce
        Backward(*call).write(out, slots)

    def _rows(self, plan: SgmvPlan, tokens: int) -> int:
        """Return the rows of the grid; a plan that a graph captures keeps its tile sizes."""
        capturing = self._is_cuda and self._note_capture(plan)
        return plan.grid_rows(capturing, tokens) or EMPTY_ROW

    def _note_capture(self, plan: SgmvPlan) -> bool:
        """Return whether a CUDA graph captures the call, and with it the plan's tables."""
        capturing = is_capturing(self.device)
        plan.is_captured |= capturing
        return capturing

    def _cache(
        self,
        operation: str,
        plan: SgmvPlan,
        x: Tensor,
        weights: LoRAWeights,
        y: Tensor,
        first: Launched,
        second: Launched,
    ) -> None:
        """Keep both launches, which read the layer's tables in place, for the next call."""
        plan.call_cache.store(operation, self, x, weights, y, CachedLaunches.of(first, second))

    def _planes(self, weights: LoRAWeights, split_k: int, rows: int, width: int) -> Tensor:
        shape = (split_k, weights.num_slices, rows, width)
        return torch.empty(shape, dtype=torch.float32, device=self.device)
