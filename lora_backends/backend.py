"""`LoRABackend`: the interface that every engine implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lora_backends.batch import LoRABatch
from lora_backends.common.devices import as_device, device_reasons
from lora_backends.defaults import expert_gradients, gradients
from lora_backends.defaults.embedding import columns_of_tokens
from lora_backends.defaults.experts import add_experts, token_slots
from lora_backends.dispatch.output import new_output
from lora_backends.dispatch.wrap import Dispatched, unchecked
from lora_backends.experts import ExpertRouting, ExpertWeights
from lora_backends.operations import BY_NAME
from lora_backends.plan import LoRAPlan
from lora_backends.weights import LoRAWeights

__all__ = ["LoRABackend", "LoRAPlan"]


class LoRABackend(Dispatched, ABC):
    r"""Adds the LoRA of each token's own adapter to the output of a layer.

    For token t with slot l, and slice s with the output columns [o, o'):

        h[s, t, :r]  = x[t] @ lora_a[l, s, :r].T          r = ranks[l, s]
        delta[t, o:o'] = scalings[l, s] * (h[s, t, :r] @ lora_b[l, o:o', :r].T)
        y[t, o]      = output_scales[l, o] * (base_output[t, o] + token_scales[t] * delta[t, o])
                     + bias[l, o]

    where scales that are not given are 1, and a bias that is not given is 0. A token of several
    adapters adds the delta and the bias of each.

    A token whose slot is ``NO_ADAPTER`` keeps its row of `base_output` bit for bit, and so does a
    slice of rank 0 where there is neither bias nor output_scales. Sums are kept in float32 or
    wider, and each element of y is rounded once.

    A subclass implements `prepare_batch`, `run_lora_a` and `run_lora_b`, and overrides the other
    methods only to fuse. Each method of the interface that it defines is wrapped, so that the
    arguments are checked before its body runs: a backend need not check them and cannot forget to.
    The attributes below declare its support.

    Args:
        device: where weights and activations live. Options of a backend are keyword arguments of
            its constructor.

    Raises:
        InvalidInputError: arguments that contradict each other; nothing has been written.
        UnsupportedInputError: arguments that this backend cannot run; nothing has been written.
    """

    name: str = ""
    """Registered name; defaults to the class name."""
    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    """Types of `torch.device` it runs on; ROCm devices are of type cuda."""
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16, torch.float32)
    """Dtypes of x, the weights and base_output."""
    features: ClassVar[frozenset[str]] = frozenset()
    """Names of `lora_backends.features` that it supports; calls that need another are refused."""
    differentiable: ClassVar[bool] = True
    """Whether gradients flow to x or h, lora_a, lora_b, bias, output_scales, topk_weights and
    base_output. The defaults of the backward methods are right for any backend."""
    plain_torch: ClassVar[bool] = False
    """Whether it computes with torch's operators alone, so that transforms and traces of torch see
    through its calls. Any other backend reads tensors by address, and refuses those without one, as
    inside vmap."""
    cuda_graphs: ClassVar[bool] = False
    """Whether a CUDA graph may capture its calls, and follows the plan when that is refilled."""
    narrow_intermediate: ClassVar[bool] = False
    """Whether `run_linear` rounds h to the weights' dtype; `run_lora_a` returns float32. The
    backward may round h, dh and dL/dy so too, before it multiplies them."""
    auto_priority: ClassVar[Mapping[str, int]] = {}
    """Device type to priority for "auto", the highest wins; a type not listed is never chosen."""
    plan_type: ClassVar[type] = object
    """The type of plan that `prepare_batch` returns; another type is refused."""
    routing_type: ClassVar[type[ExpertRouting]] = ExpertRouting
    """The type of routing that `prepare_experts` returns; another type is refused."""

    deterministic: bool = False
    """Whether two runs on equal inputs are equal bit for bit. An option may set it."""
    batch_invariant: bool = False
    """Whether a row's result has the same bits in any batch. An option may set it."""
    _made_with: Mapping[str, Any] = {}
    """The options that `get_backend` made it with, for reports."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = as_device(device)

    @classmethod
    def unavailable_reasons(cls, device: torch.device | str) -> list[str]:
        """Return why this backend cannot run on `device`, one sentence a reason; [] if it can.

        Override it to add reasons to those of ``super().unavailable_reasons(device)``.
        """
        return device_reasons(cls.name, cls.device_types, device)

    @abstractmethod
    def prepare_batch(
        self, batch: LoRABatch, out: Any | None = None, capacity: int | None = None
    ) -> Any:
        """Make the plan of a batch, once per batch, for every layer.

        Operations take x of m rows, where num_tokens <= m <= capacity; rows after the batch have
        no adapter. A CUDA graph that was captured with m rows follows every refill of at most m
        tokens, and so does a compiled program.

        Args:
            batch: the slots of the tokens.
            out: a plan of this backend for equal num_slots, with room for the batch. It is refilled
                in place and returned. Where the backend claims `cuda_graphs`, its device tensors
                keep their addresses, so that a captured graph follows the new composition. The
                backward of a call from before the refill is refused, except under a reentrant
                `torch.utils.checkpoint`, which repeats the call with the new batch unnoticed.
            capacity: tokens that refills may have, at least those of the batch; None: as many as
                the batch. A refill keeps the capacity of `out`.

        Returns:
            The plan. It has at least `num_tokens` and `num_slots`, as `LoRAPlan`.

        Raises:
            InvalidInputError: `out` is no plan of this backend, or the batch does not fit.
            UnsupportedInputError: the batch or `capacity` needs a feature that is missing.
        """

    @abstractmethod
    def run_lora_a(
        self, x: Tensor, weights: LoRAWeights, plan: Any, out: Tensor | None = None
    ) -> Tensor:
        """Shrink: ``h[s, t, :r] = x[t] @ lora_a[l, s, :r].T``, zero beyond r and without adapter.

        Args:
            x: [num_tokens, in_features], any row stride, dtype of the weights.
            weights: the layer.
            plan: from `prepare_batch`.
            out: a tensor of the result's shape and dtype, contiguous, that is overwritten and
                returned. A backend need not take it: the interface then copies the result.

        Returns:
            [num_slices, num_tokens, max_rank] float32 (float64 for float64 weights).
        """

    @abstractmethod
    def run_lora_b(
        self, h: Tensor, weights: LoRAWeights, plan: Any, base_output: Tensor | None = None
    ) -> Tensor:
        """Expand: ``y[t, o:o'] += scalings[l, s] * (h[s, t, :r] @ lora_b[l, o:o', :r].T) + bias``.

        Args:
            h: [num_slices, num_tokens, max_rank], from `run_lora_a`. Values beyond a rank may be
                anything, NaN included.
            weights: the layer.
            plan: from `prepare_batch`.
            base_output: [num_tokens, out_features], any row stride: added to in place and
                returned. Without it y starts from zero, in the weights' dtype.

        Returns:
            [num_tokens, out_features].
        """

    def run_linear(
        self, x: Tensor, weights: LoRAWeights, plan: Any, base_output: Tensor | None = None
    ) -> Tensor:
        """Shrink and expand: the LoRA of a linear layer with any number of slices.

        Args:
            x: [num_tokens, in_features], any row stride, dtype of the weights.
            weights: the layer.
            plan: from `prepare_batch`.
            base_output: [num_tokens, out_features], any row stride: added to in place and
                returned. Without it y starts from zero, in the dtype of x.

        Returns:
            [num_tokens, out_features].
        """
        h = unchecked(self, "run_lora_a")(x, weights, plan)
        return unchecked(self, "run_lora_b")(h, weights, plan, base_output)

    def run_qkv(
        self, x: Tensor, weights: LoRAWeights, plan: Any, base_output: Tensor | None = None
    ) -> Tensor:
        """`run_linear` for the three slices q, k and v of a fused attention projection."""
        return unchecked(self, "run_linear")(x, weights, plan, base_output)

    def run_gate_up(
        self, x: Tensor, weights: LoRAWeights, plan: Any, base_output: Tensor | None = None
    ) -> Tensor:
        """`run_linear` for the two slices gate and up of a fused MLP projection."""
        return unchecked(self, "run_linear")(x, weights, plan, base_output)

    def run_embedding(
        self, token_ids: Tensor, weights: LoRAWeights, plan: Any, base_output: Tensor | None = None
    ) -> Tensor:
        """Run the LoRA of an embedding: ``run_linear`` with ``x = one_hot(token_ids)``.

        This default picks the columns of lora_a that the batch needs and shrinks an identity, so
        it takes memory for num_tokens x num_tokens values and waits for the device once; a
        backend that gathers overrides it.

        Args:
            token_ids: [num_tokens] int32 or int64, 0 <= id < in_features (the vocabulary). The
                range is checked on the CPU only: looking at a device's values would wait for it.
            weights: the layer; ``in_features`` is the vocabulary.
            plan: from `prepare_batch`.
            base_output: as in `run_linear`; without it the result has lora_b's dtype.

        Returns:
            [num_tokens, out_features].
        """
        used = columns_of_tokens(token_ids, weights)
        x = torch.eye(token_ids.shape[0], dtype=weights.compute_dtype, device=weights.device)
        return unchecked(self, "run_linear")(x, used, plan, base_output)

    def run_logits(
        self, hidden: Tensor, weights: LoRAWeights, plan: Any, base_output: Tensor | None = None
    ) -> Tensor:
        """`run_linear` for the language-model head, on the rows whose logits are wanted.

        The plan is made of the slots of those rows.
        """
        return unchecked(self, "run_linear")(hidden, weights, plan, base_output)

    def prepare_experts(
        self,
        plan: Any,
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_experts: int,
        expert_map: Tensor | None = None,
        out: Any | None = None,
    ) -> Any:
        """Make the routing of one layer's experts, for every site of that layer.

        Args:
            plan: from `prepare_batch`.
            topk_ids: [m, k] int32 or int64, num_tokens <= m <= capacity of the plan: the experts
                of each token. A pair is dead if its id is negative, unmapped or not below
                `num_experts`; on the CPU an id that is too high is an error.
            topk_weights: [num_tokens, k] float32, the router's weights.
            num_experts: experts of this rank.
            expert_map: [global experts] int32, the local id of each expert, or -1 where it lives
                on another rank.
            out: a routing of this backend for equal tokens, k and experts. It is refilled in
                place and returned; its tensors keep their addresses.

        Returns:
            The routing, at least an `ExpertRouting`.
        """
        if out is not None:
            out.refill(plan, topk_ids, topk_weights, expert_map)
            return out
        return self.routing_type.of(plan, topk_ids, topk_weights, num_experts, expert_map)

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
        """Run the LoRA of a mixture's experts, each pair of token and expert with its own A and B.

        For pair (t, j) with slot l, expert e, slice s, a = s (0 where one A feeds every slice),
        r = ranks[l, e, a], and f = topk_weights[t, j] if `weighted` else 1:

            h           = x_row @ lora_a[l, e, a, :r].T
            y[t, j, o] += f * scalings[l, e, a] * (h @ lora_b[l, e, o, :r].T)

        for the columns o of slice s. With `reduce`, y[t, o] gains the sum over j. Dead pairs change
        nothing and read nothing.

        This default gathers the matrices of each pair, so it is slow. It waits for the device once
        for each number of slots.

        Args:
            x: [num_tokens, in_features], or [num_tokens * k, in_features] for rows="pairs".
            weights: the experts.
            routing: from `prepare_experts`.
            base_output: [num_tokens, k, out_features], or [num_tokens, out_features] with
                `reduce`: added to in place and returned. Without it y starts from zero, in the
                dtype of x.
            rows: "tokens": each token has a row of x; "pairs": each pair has one, (t, j) the row
                t * k + j.
            weighted: multiply by the router's weights.
            reduce: sum over the pairs of a token, in float32.

        Returns:
            As base_output.
        """
        options: dict[str, Any] = {"rows": rows, "weighted": weighted, "reduce": reduce}
        y = base_output
        if y is None:
            y = new_output(BY_NAME["run_experts"], x, weights, routing, options)
        slots = self.token_slots(routing.plan, routing.num_tokens, weights.num_slots)
        scales = getattr(routing.plan, "token_scales", None)
        options |= {"slots": slots, "token_scales": scales}
        add_experts(y, x, weights, routing, **options)
        return y

    def token_slots(self, plan: Any, num_rows: int, num_slots: int) -> Tensor:
        """Return the slot of each row of x, [num_rows] int64 on the device, -1 for none.

        This default lets `run_lora_a` answer, since it cannot look into a plan. It waits for the
        device once for each number of slots; a backend whose plan has the slots overrides it.
        """
        dtype = torch.float32 if torch.float32 in self.dtypes else self.dtypes[0]
        shrink = unchecked(self, "run_lora_a")
        return token_slots(shrink, dtype, self.device, plan, num_slots, num_rows)

    def slot_rows(self, plan: Any, num_rows: int, num_slots: int) -> gradients.Segments:
        """Return each slot that has tokens, ascending, and their rows of x, a slice or indices.

        The defaults of the backward methods loop over it. It waits for the device.
        """
        return gradients.segments_of(self.token_slots(plan, num_rows, num_slots))

    def forward_with_h(
        self, operation: str, x: Tensor, weights: LoRAWeights, plan: Any, base_output: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run an operation on a dense layer, and return h too, where the backward can use it.

        The result has the bits of the operation itself. A backend whose `run_linear` has h in
        memory overrides it: without h, the backward of lora_b shrinks again.

        Args:
            operation: name of the method.
            x: its first argument, checked as all others.
            weights: the layer.
            plan: of the batch.
            base_output: as in the operation; None for `run_lora_a`.

        Returns:
            The result, and h in a form that `run_lora_b_backward` of this backend takes, or None.
        """
        run = unchecked(self, operation)
        if operation == "run_lora_a":
            return run(x, weights, plan), None
        return run(x, weights, plan, base_output), None

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
        """Return dh and write dlora_b: the backward of the expand.

        With grad = dL/dy and c = scalings[l, s] * token_scales[t]:

            dh[s, t, :r]       = c * grad[t, o:o'] @ lora_b[l, o:o', :r]
            dlora_b[l, o:o', :r] = sum over t of slot l of c * grad[t, o:o'].T h[s, t, :r]

        Both are zero beyond a rank and where no token of the batch takes part. bias and
        output_scales play no role: the caller multiplies grad by output_scales.

        Args:
            grad: [rows, out_features], any row stride, the last axis contiguous.
            h: [num_slices, rows, max_rank], or what `forward_with_h` returned; may be None without
                `lora_b`. Values beyond a rank and without adapter may be anything.
            weights: the layer.
            plan: from `prepare_batch`.
            needs_h: whether dh is wanted.
            narrow: whether dh goes to `run_lora_a_backward` of this backend alone, so that it may
                have the dtype in which that multiplies.
            lora_b: [len(slots), out_features, max_rank], overwritten with dlora_b. Its dtype may be
                wider than the stack's.
            slots: whose dlora_b are wanted, ascending; None: all.

        Returns:
            dh [num_slices, rows, max_rank] float32 (float64 for float64; narrower if `narrow`), or
            None.
        """
        segments = self.slot_rows(plan, grad.shape[0], weights.num_slots)
        scales = getattr(plan, "token_scales", None)
        options: dict[str, Any] = {"needs_h": needs_h, "lora_b": lora_b, "slots": slots}
        return gradients.b_backward(grad, h, weights, segments, scales, **options)

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
        """Write dx and dlora_a: the backward of the shrink.

            dx[t]             = sum over s of dh[s, t, :r] @ lora_a[l, s, :r]
            dlora_a[l, s, :r] = sum over t of slot l of dh[s, t, :r].T x[t]

        Args:
            dh: [num_slices, rows, max_rank] float32; values beyond a rank may be anything.
            x: [rows, in_features], as in `run_lora_a`; may be None without `lora_a`.
            weights: the layer.
            plan: from `prepare_batch`.
            dx: [rows, in_features], rows without adapter become zero; None: not wanted.
            adds: add to dx, whose rows without adapter keep their bits, instead of overwriting it.
            lora_a: [len(slots), num_slices, max_rank, in_features], overwritten with dlora_a. Its
                dtype may be wider than the stack's.
            slots: whose dlora_a are wanted, ascending; None: all.
        """
        if dx is not None and not adds:
            dx.zero_()
        segments = self.slot_rows(plan, dh.shape[1], weights.num_slots)
        gradients.a_backward(dh, x, weights, segments, dx=dx, lora_a=lora_a, slots=slots)

    def run_embedding_backward(
        self,
        dh: Tensor,
        token_ids: Tensor,
        weights: LoRAWeights,
        plan: Any,
        *,
        lora_a: Tensor,
        slots: Sequence[int] | None = None,
    ) -> None:
        """`run_lora_a_backward` of lora_a for ``x = one_hot(token_ids)``.

        Column v of dlora_a is the sum of the dh of the tokens with id v.
        """
        segments = self.slot_rows(plan, dh.shape[1], weights.num_slots)
        gradients.add_columns(dh, token_ids, weights, segments, lora_a=lora_a, slots=slots)

    def embedding_h(self, token_ids: Tensor, weights: LoRAWeights, plan: Any) -> Tensor:
        """Return h of ``x = one_hot(token_ids)``, [num_slices, rows, max_rank] float32."""
        segments = self.slot_rows(plan, token_ids.shape[0], weights.num_slots)
        return gradients.one_hot_h(token_ids, weights, segments)

    def routed_pairs(self, routing: Any, num_slots: int) -> expert_gradients.Groups:
        """Return each slot and expert that has pairs, ascending, and its pairs [n] int64.

        Pair (t, j) is t * k + j; pairs ascend, and dead ones are left out. The default of
        `run_experts_backward` loops over it. It waits for the device.
        """
        slots = self.token_slots(routing.plan, routing.num_tokens, num_slots)
        return expert_gradients.groups_of(slots, routing.topk_ids, routing.num_experts)

    def run_experts_backward(
        self,
        grad: Tensor,
        x: Tensor | None,
        weights: ExpertWeights,
        routing: Any,
        out: expert_gradients.ExpertGradients,
        *,
        rows: str = "tokens",
        weighted: bool = False,
        reduce: bool = False,
        slots: Sequence[int] | None = None,
    ) -> None:
        """Write the gradients of `run_experts` that are wanted: its backward.

        With gy = dL/dy[t, j] (dL/dy[t] with `reduce`), f = topk_weights[t, j] if `weighted` else 1,
        c = scalings[l, e, a] * token_scales[t], and sums over the slices s of a:

            u                    = sum of c * gy[o of s] @ lora_b[l, e, o of s, :r]
            dx_row               = sum over a of f * u @ lora_a[l, e, a, :r]
            dlora_a[l, e, a, :r] = sum over the pairs of (l, e) of (f * u).T x_row
            dlora_b[l, e, o, :r] = sum over the pairs of (l, e) of f * c * gy[o] * h
            dtopk_weights[t, j]  = sum over a of u . h

        With rows="tokens" a row of dx is the sum over the pairs of its token. Where an expert axis
        is 1, a gradient is the sum over all experts. All are zero beyond a rank, for dead pairs,
        and where no pair of the batch takes part.

        Args:
            grad: of the result, any strides, the last axis contiguous.
            x: as in `run_experts`; may be None where only `out.x` is wanted.
            weights: the experts.
            routing: from `prepare_experts`.
            out: the gradients, overwritten. dtypes of the stacks' may be wider than the stacks'.
            rows: as in `run_experts`.
            weighted: as in `run_experts`.
            reduce: as in `run_experts`.
            slots: whose gradients of stacks are wanted, ascending; None: all.
        """
        scales = getattr(routing.plan, "token_scales", None)
        call = expert_gradients.RoutedCall(x, weights, routing, scales, rows, weighted, reduce)
        groups = self.routed_pairs(routing, weights.num_slots)
        expert_gradients.backward(grad, call, groups, out, slots)

    def sum_tokens(
        self,
        values: Tensor,
        weights: LoRAWeights,
        plan: Any,
        out: Tensor,
        slots: Sequence[int] | None = None,
    ) -> None:
        """Write the sum of each slot's rows of `values` [rows, n] to `out` [len(slots), n].

        It makes dbias and doutput_scales. Slots without tokens get zeros.
        """
        segments = self.slot_rows(plan, values.shape[0], weights.num_slots)
        gradients.sum_rows(values, segments, out, slots)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} on {self.device}>"
