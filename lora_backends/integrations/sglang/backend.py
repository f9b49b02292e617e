"""Implements SGLang's interface for LoRA kernels on a backend of this library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from sglang.srt.lora.backend.base_backend import BaseLoRABackend
from sglang.srt.lora.utils import (
    generate_sequence_lengths,
    get_lm_head_pruned_lens,
)

from lora_backends import features
from lora_backends.batch import NO_ADAPTER
from lora_backends.common.names import SGLANG_VARIABLE
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.integrations.asked import backend_asked_for
from lora_backends.integrations.plans import Plans
from lora_backends.integrations.sglang.fusing import Fused
from lora_backends.integrations.sglang.numbers import Numbers
from lora_backends.integrations.sglang.settings import (
    check_settings,
    logger,
    most_rows,
    setting,
)
from lora_backends.selection.choice import get_backend
from lora_backends.weights import LoRAWeights

ROWS = 8192
"""Rows that plans have room for at first; they grow."""


@dataclass(eq=False)
class Announced:
    """The fields of a batch that SGLang's layers and manager read and write."""

    bs: int  # requests
    use_cuda_graph: bool = False
    has_active_lora: bool = False  # the manager writes this and the next
    is_prefill: bool = False


@dataclass(eq=False)
class HeadRows:
    """The rows that a head computes logits of, outside of graphs."""

    slots: Sequence[int]  # per row
    expected_tokens: int  # SGLang compares it with the rows that it passes
    use_cuda_graph: bool = field(default=False, init=False)


class Deferred(NamedTuple):
    """The inputs of a deferred shrink; SGLang passes it to the expand, which runs both."""

    x: torch.Tensor  # hidden states, or token ids of an embedding
    a: torch.Tensor  # [slots, max_rank, in_features]


class BackendForSGLang(BaseLoRABackend):  # type: ignore[misc]  # SGLang is not a dependency
    """Takes each batch of SGLang, and runs its LoRA layers.

    Args:
        max_loras_per_batch: the number of slots.
        device: of the model.
        server_args: SGLang's settings.
        kwargs: arguments of later versions, ignored.

    Raises:
        BackendUnavailableError: the backend asked for does not run on the device.
        UnsupportedInputError: the backend lacks a feature, or a setting of SGLang is refused.
    """

    name = "lora_backends"
    supports_prefill_cuda_graph = True

    def __init__(
        self,
        max_loras_per_batch: int,
        device: torch.device | str,
        server_args: Any = None,
        **kwargs: Any,
    ) -> None:
        check_settings(server_args)
        super().__init__(max_loras_per_batch, device)
        backend = get_backend(backend_asked_for(SGLANG_VARIABLE), device=device)
        if features.CAPACITY not in backend.features:
            raise UnsupportedInputError(
                f"backend {backend.name!r} cannot run inside SGLang\n"
                f"  it lacks: {features.CAPACITY}\n  to do: choose another backend"
            )
        self.most_rows = most_rows(server_args) or ROWS
        self.is_warm = False  # whether kernels were compiled ahead
        # prefills have plans of their own: each batch refills the captured plans of its kind only
        self._decoded = Plans(backend, max_loras_per_batch, ROWS, grows=True)
        self._prefilled = Plans(backend, max_loras_per_batch, ROWS, grows=True)
        self._head = Plans(backend, max_loras_per_batch, ROWS, grows=True)
        self._head_rows: HeadRows | None = None  # the rows that `_head` holds
        self.tokens = self._decoded
        self.numbers = Numbers(max_loras_per_batch, backend.device)
        self._weights: dict[tuple[int, int], LoRAWeights] = {}  # by the addresses of A and B, which
        # live as long as the pool
        self._pool: Any = None
        # checks an adapter's weights; set once the pool is made
        self.check_places: Callable[[Any], None] | None = None
        self._is_for_graph = False  # whether the batch may be captured, or replayed
        self._is_capturing = False  # whether it is one that SGLang makes up to capture
        # before `forward_with_base`, SGLang sums h over processes between shrink and expand
        sums_h = not hasattr(BaseLoRABackend, "forward_with_base")
        self._defers = not sums_h or (setting(server_args, "tp_size") or 1) == 1
        self._fused = Fused(self)
        self._fuses = self._defers and not setting(server_args, "enable_deterministic_inference")
        logger().info("LoRA runs on backend %r on %s", backend.name, backend.device)

    # Batches

    def adopt(self, pool: Any, modules: Sequence[Any] = ()) -> None:
        """Take SGLang's memory pool, which holds the stacks of the LoRA layers."""
        self._pool = pool
        self._weights.clear()
        if self._fuses and self.tokens.multiplies_bases:
            self._fused.adopt(list(modules))

    @contextmanager
    def prefilling(self) -> Iterator[None]:
        """Run layers on the plans of prefills while a block runs."""
        before, self.tokens = self.tokens, self._prefilled
        try:
            yield
        finally:
            self.tokens = before

    def init_cuda_graph_batch_info(self, *args: Any, **kwargs: Any) -> None:
        """Allocate nothing: plans have room."""

    init_decode_cuda_graph_batch_info = init_cuda_graph_batch_info
    init_cuda_graph_moe_buffers = init_cuda_graph_batch_info

    def init_prefill_cuda_graph_batch_info(
        self, max_num_tokens: int, max_num_requests: int | None = None
    ) -> None:
        """Note the largest batch of a captured prefill graph."""
        self.prefill_cuda_graph_max_tokens = max_num_tokens
        self.prefill_cuda_graph_max_bs = max_num_requests or max_num_tokens

    def prepare_lora_batch(
        self,
        forward_batch: Any,
        weight_indices: list[int],
        lora_ranks: list[int],
        scalings: list[float],
        use_decode_cuda_graph: bool = False,
        use_prefill_cuda_graph: bool = False,
        *,
        use_cuda_graph: bool = False,
    ) -> None:
        """Take the next batch: one slot per request, and the rank and scaling of every slot.

        Raises:
            InvalidInputError: a request's adapter is not in its slot.
            UnsupportedInputError: SGLang's memory pool was not adopted, so rows of A are packed.
        """
        if self._pool is None:
            raise UnsupportedInputError(
                f"the plug-in did not see SGLang make its memory pool for LoRA\n"
                f"  to do: unset {SGLANG_VARIABLE}, or report which other plug-ins are installed"
            )
        decodes = use_decode_cuda_graph or use_cuda_graph
        self._is_for_graph = decodes or use_prefill_cuda_graph
        requests = self._slots(forward_batch.lora_ids, weight_indices, lora_ranks)
        lengths = generate_sequence_lengths(forward_batch, device="cpu").tolist()
        rows = _repeated(requests, lengths)
        made_up = self._is_for_graph and not any(id_ is not None for id_ in forward_batch.lora_ids)
        self._is_capturing = made_up and _is_capturing_shapes()
        if self._is_capturing:
            # SGLang captures without adapters, but tile sizes must suit batches with all of them
            rows = [row % self.max_loras_per_batch for row in range(len(rows))]
        is_prefill = forward_batch.forward_mode.is_extend() and not decodes
        self.tokens = self._prefilled if is_prefill else self._decoded
        self.tokens.set_slots(rows)
        active = {slot for slot in requests if slot != NO_ADAPTER}
        self.numbers.set(sorted(active), lora_ranks, scalings)
        self.batch_info = Announced(len(requests), self._is_for_graph)
        self._announce_head(forward_batch, requests)

    def _slots(self, ids: Sequence[Any], indices: Sequence[int], ranks: Sequence[int]) -> list[int]:
        for id_, index in zip(ids, indices, strict=True):
            if id_ is not None and self._pool.uid_to_buffer_id.get(id_) != index:
                raise InvalidInputError(
                    f"an adapter of the batch is in no slot\n  given: {id_}\n"
                    f"  allowed: {sorted(map(str, self._pool.uid_to_buffer_id))}"
                )
        return [
            NO_ADAPTER if id_ is None or ranks[index] == 0 else index
            for id_, index in zip(ids, indices, strict=True)
        ]

    def _announce_head(self, forward_batch: Any, requests: Sequence[int]) -> None:
        """Announce the rows that a prefill computes logits of, in passes if they are many."""
        self.lm_head_batch_info = self.lm_head_pass_batch_infos = self._head_rows = None
        lengths = get_lm_head_pruned_lens(forward_batch)
        if lengths is None:
            return
        slots = _repeated(requests, lengths)
        self.lm_head_batch_info = HeadRows(slots, len(slots))
        passes = self._get_lm_head_pass_segments(requests, lengths)
        if passes is not None:
            rows = [_repeated(*each) for each in passes]
            self.lm_head_pass_batch_infos = [HeadRows(each, len(each)) for each in rows]

    # Layers

    def run_lora_a_embedding(
        self,
        input_ids: torch.Tensor,
        weights: torch.Tensor,
        vocab_size: int,
        extra_embeddings: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Deferred:
        """Return the inputs of an embedding's LoRA for `run_lora_b_sgemm`.

        Raises:
            UnsupportedInputError: an adapter adds tokens to the vocabulary.
        """
        if extra_embeddings is not None:
            raise UnsupportedInputError(
                "adapters that add tokens are not supported\n"
                "  given: embeddings of added tokens\n  allowed: tokens of the base model"
            )
        # as SGLang does: placeholders of images have ids beyond the vocabulary
        return Deferred(input_ids.masked_fill(input_ids >= vocab_size, 0), weights)

    def run_lora_a_sgemm(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        pruned_batch_info: HeadRows | None = None,
        stack_num: int = 1,
        *args: Any,
        **kwargs: Any,
    ) -> Deferred | torch.Tensor:
        """Return h [1, rows, max_rank] float32, or its inputs for `run_lora_b_sgemm`."""
        if stack_num != 1:
            raise UnsupportedInputError(
                f"the shrink of a fused layer cannot run by itself\n"
                f"  given: {stack_num} slices\n  allowed: 1, or all of run_qkv_lora"
            )
        if self._defers:
            return Deferred(x, weights)
        plans = self._plans(pruned_batch_info, x.shape[0])
        return plans.backend.run_lora_a(x, self._layer(weights, None), plans.of(x.shape[0]))

    def run_lora_b_sgemm(
        self,
        x: Deferred | torch.Tensor,
        weights: torch.Tensor,
        output_offset: Any = None,
        output_offset_cpu: Any = None,
        base_output: torch.Tensor | None = None,
        pruned_batch_info: HeadRows | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Add the LoRA of a layer of one slice to the base's output, in place."""
        y = _required(base_output)
        if isinstance(x, Deferred):
            return self._add(x.x, x.a, weights, None, y, pruned_batch_info)
        plans = self._plans(pruned_batch_info, x.shape[1])
        layer = self._layer(None, weights)
        plans.backend.run_lora_b(x, layer, plans.of(x.shape[1]), _columns(y, layer))
        return y

    def run_qkv_lora(
        self,
        x: torch.Tensor,
        qkv_lora_a: torch.Tensor,
        qkv_lora_b: torch.Tensor,
        output_offset: torch.Tensor | None = None,
        output_offset_cpu: torch.Tensor | None = None,
        max_qkv_out_dim: int = 0,
        base_output: torch.Tensor | None = None,
        n_slices: int = 3,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Add the LoRA of a layer of several slices to the base's output, in place."""
        offsets = output_offset if output_offset_cpu is None else output_offset_cpu
        return self._add(x, qkv_lora_a, qkv_lora_b, offsets, _required(base_output))

    def run_gate_up_lora(
        self,
        x: torch.Tensor,
        gate_up_lora_a: torch.Tensor,
        gate_up_lora_b: torch.Tensor,
        output_offset: torch.Tensor | None = None,
        output_offset_cpu: torch.Tensor | None = None,
        base_output: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Add the LoRA of gate and up to the base's output, in place."""
        offsets = output_offset if output_offset_cpu is None else output_offset_cpu
        return self._add(x, gate_up_lora_a, gate_up_lora_b, offsets, _required(base_output))

    def forward_with_base(
        self,
        layer: Any,
        x: torch.Tensor,
        base_fn: Any,
        lora_a: torch.Tensor,
        lora_b: torch.Tensor,
        output_offset: Any,
        offsets: Any,
        *,
        all_reduce: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the base's output with the LoRA added, summed over processes once.

        Each process adds the LoRA of its own columns of A, so one sum serves both.
        """
        output: torch.Tensor = layer.apply_lora(base_fn(), x)
        return output if all_reduce is None else all_reduce(output)

    def adds_nothing(self) -> bool:
        """Return whether no row has an adapter and no graph needs the kernels."""
        return self.tokens.is_idle and not self._is_for_graph

    def keeps_kernels(self) -> bool:
        """Return whether SGLang captures graphs now, or warms up for them."""
        return self._is_for_graph and self._is_capturing

    def run_with_base(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        offsets: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Return a base product with its LoRA; None if SGLang must compute the product."""
        if x.ndim != 2:
            return None
        self.check_rows(x.shape[0])
        plain = weight.data, None if bias is None else bias.data  # classes that load weights
        plans, layer = self.tokens, self._layer(a, b, offsets)
        y: torch.Tensor | None = plans.backend.run_with_base(x, *plain, layer, plans.of(x.shape[0]))  # type: ignore[attr-defined]
        return y

    def check_rows(self, rows: int) -> None:
        """Refuse x with another number of rows than the batch; only graphs pad rows.

        Raises:
            InvalidInputError: x has more or fewer rows.
        """
        if not self._is_for_graph and rows != self.tokens.num_rows:
            raise _other_rows(rows, self.tokens.num_rows)

    def _add(
        self,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        offsets: torch.Tensor | None,
        y: torch.Tensor,
        head: HeadRows | None = None,
    ) -> torch.Tensor:
        if self._fused.takes(y):
            return y
        plans = self._plans(head, x.shape[0])
        if plans.is_idle and (head is not None or not self._is_for_graph):
            return y
        layer, plan = self._layer(a, b, offsets), plans.of(x.shape[0])
        if x.is_floating_point():
            plans.backend.run_linear(x, layer, plan, _columns(y, layer))
        else:
            plans.backend.run_embedding(x, layer, plan, _columns(y, layer))
        return y

    def _plans(self, head: HeadRows | None, rows: int) -> Plans:
        """Return the plans for the rows of a layer."""
        if head is None:
            self.check_rows(rows)
            return self.tokens
        if rows != head.expected_tokens:
            raise _other_rows(rows, head.expected_tokens)
        if self._head_rows is not head:
            self._head.set_slots(head.slots)
            self._head_rows = head
        return self._head

    def _layer(
        self,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        offsets: torch.Tensor | None = None,
    ) -> LoRAWeights:
        """Return the weights with stacks a and b, made when their layer first runs."""
        key = 0 if a is None else a.data_ptr(), 0 if b is None else b.data_ptr()
        layer = self._weights.get(key)
        if layer is None:
            layer = self._weights[key] = self._new_layer(a, b, offsets)
        return layer

    def _new_layer(
        self,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        offsets: torch.Tensor | None,
    ) -> LoRAWeights:
        if b is None:  # h of one slice
            assert a is not None
            widths: tuple[int, ...] = (a.shape[1],)
        elif offsets is None:
            widths = (b.shape[1],)
        else:
            ends = offsets.tolist()
            widths = tuple(end - first for first, end in zip(ends, ends[1:], strict=False))
        max_rank = a.shape[1] // len(widths) if b is None and a is not None else _rank(b)
        ranks, scalings = self.numbers.of_linear(len(widths))
        return LoRAWeights(
            lora_a=None if a is None else a.view(a.shape[0], len(widths), max_rank, a.shape[2]),
            lora_b=b,
            ranks=ranks,
            scalings=scalings,
            output_slices=widths,
        )


def _rank(b: torch.Tensor | None) -> int:
    assert b is not None
    return b.shape[2]


def _columns(y: torch.Tensor, layer: LoRAWeights) -> torch.Tensor:
    """Return the columns of y that a layer adds to; a padded head's are more."""
    return y if y.shape[1] == layer.out_features else y[:, : layer.out_features]


def _required(base_output: torch.Tensor | None) -> torch.Tensor:
    if base_output is None:
        raise UnsupportedInputError(
            "LoRA without the output of the base layer is not supported\n  given: base_output None"
        )
    return base_output


def _repeated(slots: Sequence[int], lengths: Sequence[int]) -> list[int]:
    pairs = zip(slots, lengths, strict=True)
    return [slot for slot, length in pairs for _ in range(length)]


def _other_rows(given: int, allowed: int) -> InvalidInputError:
    return InvalidInputError(
        f"x of a LoRA layer has other rows than SGLang has announced\n"
        f"  given: {given} rows\n  allowed: {allowed} rows"
    )


def _is_capturing_shapes() -> bool:
    """Return whether SGLang captures graphs now, or warms up for them, without requests.

    SGLang's own function is also true inside a prefill graph with breaks while it serves batches.
    """
    from sglang.srt.model_executor.runner_utils import capture_mode

    if capture_mode.is_capture_mode:
        return True
    try:
        from sglang.srt.runtime_context import get_flags

        return bool(get_flags().dp.capturing_prefill_graph)
    except (ImportError, AttributeError):  # a version whose prefill graphs take no LoRA
        return False
