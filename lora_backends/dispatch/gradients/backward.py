"""The forward and the backward of recorded calls: which tensors each step needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lora_backends.common.tensors import has_memory
from lora_backends.dispatch.gradients import expert_backward
from lora_backends.dispatch.gradients.autocast import autocast_off
from lora_backends.dispatch.gradients.recorded import Recorded, Wanted
from lora_backends.dtypes import accumulator_dtype
from lora_backends.errors import UnsupportedInputError
from lora_backends.operations import Input
from lora_backends.weights import LoRAWeights

Gradients = tuple[Tensor | None, ...]


def run_forward(recorded: Recorded, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Run a checked call without a graph; return its result, and h if the engine keeps it."""
    if not recorded.operation.is_dense:
        return expert_backward.run_forward(recorded, x, y), None
    arguments = recorded.operation.name, x, recorded.weights, recorded.plan, y
    with autocast_off(x.device.type):  # engines choose the dtype of products
        result: tuple[Tensor, Tensor | None]
        result = recorded.engine.forward_with_h(*arguments)
        return result


class Kept(NamedTuple):
    """What a backward needs of the forward."""

    x: bool
    h: bool
    base: bool  # base_output before the call
    layer: tuple[str, ...]  # tensors of the layer that are read, by name; they are not kept


def kept_for(recorded: Recorded, wanted: Wanted, needs_x: bool, has_h: bool) -> Kept:
    """Return what the backward of a call reads; `has_h`: the engine gives h."""
    if not recorded.operation.is_dense:
        return Kept(bool(wanted), False, False, expert_backward.tensors_read(wanted, needs_x))
    reads = recorded.operation.input
    needs_scales, needs_b = "output_scales" in wanted, "lora_b" in wanted
    shrinks = needs_scales or (needs_b and not has_h and reads is not Input.H)
    if recorded.operation.result == "h":
        keeps_x, layer = "lora_a" in wanted, ["lora_a"] if needs_x else []
    else:
        keeps_x = shrinks or "lora_a" in wanted or (needs_b and reads is Input.H)
        needs_dh = needs_x or "lora_a" in wanted
        reads_a = shrinks or (needs_x and reads is Input.ROWS)
        layer = ["lora_a", "a_scales"] if reads_a else []
        layer += ["lora_b", "b_scales"] if needs_scales or needs_dh else []
    layer += ["ranks", "scalings", "output_scales"]
    return Kept(keeps_x, needs_b and has_h, needs_scales, tuple(layer))


@torch.no_grad()
def run_backward(
    recorded: Recorded,
    needed: Sequence[bool],  # of x, base_output and each recorded tensor
    grad: Tensor,
    x: Tensor | None,  # of the forward, where it was kept
    h: Tensor | None,  # from `forward_with_h`, where it was kept
    base: Tensor | None,  # base_output before the call, where it was kept
    like: tuple[torch.Size, torch.dtype],  # of x
    weight: Tensor | None = None,  # of a base product that is part of the call
) -> Gradients:
    """Return the gradients of x, base_output and the recorded tensors, None where not needed."""
    with autocast_off(grad.device.type):
        if not recorded.operation.is_dense:
            grad = _readable(grad, rows=True)
            return expert_backward.run_backward(recorded, needed, grad, x, like)
        backward = _Backward(recorded, needed[2:], like, weight)
        return backward.run(needed[0], needed[1], grad, x, h, base)


def _readable(grad: Tensor, rows: bool) -> Tensor:
    """Return a gradient in memory as kernels read it; one of h is contiguous."""
    if grad.layout is not torch.strided:
        grad = grad.to_dense()
    if not has_memory(grad):
        raise UnsupportedInputError(
            "a backward of the interface cannot run inside a transform of torch\n"
            f"  given: a gradient that is a {type(grad).__name__} without an address\n"
            "  to do: call backward once per gradient, without is_grads_batched or vmap"
        )
    grad = grad.resolve_neg()
    neighbours = grad.stride(-1) == 1 or grad.shape[-1] <= 1  # along the last axis
    return grad if rows and neighbours else grad.contiguous()


class _Backward:
    """One backward; methods return None for what nobody needs."""

    def __init__(
        self,
        recorded: Recorded,
        needed: Sequence[bool],
        like: tuple[torch.Size, torch.dtype],
        weight: Tensor | None,
    ) -> None:
        self.recorded, self.like, self.weight = recorded, like, weight
        self.engine, self.plan = recorded.engine, recorded.plan
        self.weights: LoRAWeights = recorded.weights
        self.wanted = recorded.wants(needed)
        self.slots = recorded.slots_of(self.wanted)

    def run(
        self,
        needs_x: bool,
        needs_base: bool,
        grad: Tensor,
        x: Tensor | None,
        h: Tensor | None,
        base: Tensor | None,
    ) -> Gradients:
        operation = self.recorded.operation
        grad = _readable(grad, rows=operation.result == "y")
        if operation.result == "h":
            through, a = self._through_a(grad, x, needs_x)
            return through, None, *self._share({"lora_a": a})
        scaled = self._scaled(grad)
        outs: dict[str, Tensor | None] = {}
        needs_dh = "lora_a" in self.wanted or (needs_x and operation.input is not Input.TOKEN_IDS)
        if needs_dh or "lora_b" in self.wanted:
            outs["lora_b"] = b = self._new("lora_b", (self.weights.out_features, self._rank))
            # shrunk again: the forward kept no h
            if b is not None and h is None:
                assert x is not None
                h = x if operation.input is Input.H else self._shrunk(x)
            dh = self.engine.run_lora_b_backward(
                scaled,
                h,
                self.weights,
                self.plan,
                needs_h=needs_dh,
                narrow=operation.input is Input.ROWS,
                lora_b=b,
                slots=self.slots,
            )
        dx = None
        if operation.input is Input.H:
            dx = dh.to(self.like[1]) if needs_x else None
        elif needs_dh:
            through_base = scaled @ self.weight if needs_x and self.weight is not None else None
            dx, outs["lora_a"] = self._through_a(dh, x, needs_x, through_base)
        # one adapter's bias may sum over many tokens before it is rounded
        sums = accumulator_dtype(grad.dtype)
        if (bias := self._new("bias", (self.weights.out_features,), sums)) is not None:
            self.engine.sum_tokens(grad, self.weights, self.plan, bias, self.slots)
            outs["bias"] = bias
        if (scales := self._new("output_scales", (self.weights.out_features,))) is not None:
            terms = grad * self._unscaled(x, base, grad)
            self.engine.sum_tokens(terms, self.weights, self.plan, scales, self.slots)
            outs["output_scales"] = scales
        return dx, scaled if needs_base else None, *self._share(outs)

    @property
    def _rank(self) -> int:
        return self.weights.max_rank

    def _through_a(
        self, dh: Tensor, x: Tensor | None, needs_x: bool, through_base: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return dx, which `through_base` becomes where it is given, and dlora_a from dh."""
        weights = self.weights
        a = self._new("lora_a", (weights.num_slices, self._rank, weights.in_features))
        if self.recorded.operation.input is Input.TOKEN_IDS:
            if a is not None:
                self.engine.run_embedding_backward(
                    dh, x, weights, self.plan, lora_a=a, slots=self.slots
                )
            return None, a
        shape, dtype = self.like
        dx, adds = through_base, through_base is not None
        if needs_x and dx is None:
            dx = dh.new_empty(shape, dtype=dtype)
        if dx is not None or a is not None:
            self.engine.run_lora_a_backward(
                dh, x, weights, self.plan, dx=dx, adds=adds, lora_a=a, slots=self.slots
            )
        return dx, a

    def _shrunk(self, x: Tensor) -> Tensor:
        h: Tensor
        if self.recorded.operation.input is Input.TOKEN_IDS:
            h = self.engine.embedding_h(x, self.weights, self.plan)
        else:
            h, _ = self.engine.forward_with_h("run_lora_a", x, self.weights, self.plan, None)
        return h

    def _scaled(self, grad: Tensor) -> Tensor:
        """Return dL/dbase_output: grad times the output_scales of each token's slot."""
        scales = self.weights.output_scales
        if scales is None:
            return grad
        slots = self.engine.token_slots(self.plan, grad.shape[0], self.weights.num_slots)[:, None]
        # slot -1 would read the last slot
        product = scales[slots[:, 0].clamp(min=0)] * grad
        # rows without adapter keep their bits
        return torch.where(slots >= 0, product.to(grad.dtype), grad)

    def _unscaled(self, x: Tensor | None, base: Tensor | None, grad: Tensor) -> Tensor:
        """Return y before output_scales and bias, in float32 or wider."""
        sums = torch.promote_types(grad.dtype, torch.float32)
        start = torch.zeros_like(grad, dtype=sums) if base is None else base.to(sums, copy=True)
        # the gradient of output_scales needs what they multiplied
        plain = self.recorded.without_factors()
        name = self.recorded.operation.name
        y, _ = self.engine.forward_with_h(name, x, plain, self.plan, start)
        return y  # type: ignore[no-any-return]

    def _new(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Tensor | None:
        """Return memory for the gradients of a stack's wanted slots; None if nobody wants them."""
        if name not in self.wanted:
            return None
        count = self.weights.num_slots if self.slots is None else len(self.slots)
        kind = dtype or self.recorded.dtype_of(name)
        return torch.empty(count, *shape, dtype=kind, device=self.weights.device)

    def _share(self, outs: dict[str, Tensor | None]) -> Gradients:
        """Return the part of each recorded tensor."""
        parts: list[Tensor | None] = [None] * len(self.recorded.targets)
        for name, places in self.wanted.items():
            out = outs[name]
            assert out is not None
            of_places = self.recorded.parts_of(out, places, self.slots)
            for at, part in zip(places, of_places, strict=True):
                parts[at] = part
        return tuple(parts)
