"""Gradients of a layer in float64 with bounds on the error, and layers and batches for them."""

from dataclasses import dataclass, replace

import torch

from lora_backends import LoRABatch, LoRAWeights
from lora_backends.defaults import gradients
from lora_backends.testing.cases.inputs import on_each
from lora_backends.testing.oracles import (
    _UNIT_ROUNDOFF,
    SMALLEST,
    Expected,
    gamma,
    rounding_bound,
    sum_unit,
)

NUM_SLOTS = 5


def layer(dtype, slices=(33,), max_rank=5, inputs=40, seed=0, tuples=False):
    """Return a layer of 5 slots: ranks differ, one slot has none, and all padding is NaN."""
    generator = torch.Generator().manual_seed(seed)
    shape, starts = (NUM_SLOTS, len(slices)), [sum(slices[:s]) for s in range(len(slices) + 1)]
    ranks = torch.randint(0, max_rank + 1, shape, generator=generator, dtype=torch.int32)
    ranks[0], ranks[1] = max_rank, 0
    a = torch.randn(*shape, max_rank, inputs, generator=generator).to(dtype)
    b = torch.randn(NUM_SLOTS, sum(slices), max_rank, generator=generator).to(dtype)
    for slot in range(NUM_SLOTS):
        for s in range(len(slices)):
            a[slot, s, ranks[slot, s] :] = float("nan")
            b[slot, starts[s] : starts[s + 1], ranks[slot, s] :] = float("nan")
    scalings = torch.randn(*shape, generator=generator)
    scalings[ranks == 0] = float("nan")
    if tuples:  # of one slice they lie apart from each other, in no order
        a = tuple(a[:, s].clone() for s in range(len(slices)))
        b = tuple(b[:, starts[s] : starts[s + 1]].clone() for s in reversed(range(len(slices))))
        b = b[::-1]
    return LoRAWeights(a, b, ranks, scalings, tuple(slices))


@dataclass
class Case:
    """The tensors of one backward; rows without an adapter are NaN."""

    weights: LoRAWeights
    batch: LoRABatch
    x: torch.Tensor
    grad: torch.Tensor
    h: torch.Tensor  # float32, NaN beyond a rank
    dh: torch.Tensor
    token_ids: torch.Tensor

    @property
    def rows(self):
        return self.x.shape[0]

    @property
    def segments(self):
        slots = self.batch.token_slots
        return [(slot, (slots == slot).nonzero()[:, 0]) for slot in range(NUM_SLOTS)]

    @property
    def has_adapter(self):
        behind = torch.zeros(self.rows - self.batch.num_tokens, dtype=torch.bool)
        return torch.cat([self.batch.token_slots >= 0, behind])


def case(weights, tokens=70, room=0, scales=False, grad_dtype=None, seed=0, slots=None):
    """Return a case whose x has `room` rows behind the batch; slot 3 has no token."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    if slots is None:
        slots = torch.randint(-1, NUM_SLOTS, (tokens,), generator=generator)
        slots[slots == 3] = 0
    tokens = len(slots)
    batch = LoRABatch(slots, NUM_SLOTS, randn(tokens) if scales else None)
    rows, dtype = tokens + room, weights.compute_dtype
    made = Case(
        weights,
        batch,
        randn(rows, weights.in_features).to(dtype),
        randn(rows, weights.out_features).to(grad_dtype or dtype),
        randn(weights.num_slices, rows, weights.max_rank),
        randn(weights.num_slices, rows, weights.max_rank),
        torch.randint(0, weights.in_features, (rows,), generator=generator),
    )
    for values in (made.x, made.grad):
        values[~made.has_adapter] = float("nan")
    for values in (made.h, made.dh):
        values[:, ~made.has_adapter] = float("nan")
        for slot, own in made.segments:
            for s, rank in enumerate(weights.ranks[slot].tolist()):
                values[s, own, rank:] = float("nan")
    return made


def magnitudes(made):
    """Return the case of absolute values, with the sum of whose products errors grow."""

    def absolute(values):
        return values.float().abs().to(values.dtype)

    weights, scales = made.weights, made.batch.token_scales
    stored = {
        name: None if (stack := getattr(weights, name)) is None else on_each(stack, absolute)
        for name in ("lora_a", "lora_b", "scalings", "a_scales", "b_scales")
    }
    batch = LoRABatch(made.batch.token_slots, NUM_SLOTS, None if scales is None else scales.abs())
    values = {name: getattr(made, name).abs() for name in ("x", "grad", "h", "dh")}
    return replace(made, weights=replace(weights, **stored), batch=batch, **values)


def compute(made, name, slots=None, start=None):
    """Return a gradient in float64, by the definition."""
    weights, segments, scales = made.weights, made.segments, made.batch.token_scales
    number = NUM_SLOTS if slots is None else len(slots)
    if name in ("dh", "lora_b"):
        lora_b = torch.empty(number, weights.out_features, weights.max_rank, dtype=torch.float64)
        dh = gradients.b_backward(
            made.grad.double(), made.h, weights, segments, scales,
            needs_h=True, lora_b=lora_b, slots=slots,
        )  # fmt: skip
        return dh if name == "dh" else lora_b
    if name == "dx":
        dx = torch.zeros(made.rows, weights.in_features, dtype=torch.float64)
        dx = dx if start is None else start.double()
        gradients.a_backward(
            made.dh.double(), None, weights, segments, dx=dx, lora_a=None, slots=None
        )
        return dx
    if name == "sums":
        sums = torch.empty(number, weights.out_features, dtype=torch.float64)
        gradients.sum_rows(made.grad.double(), segments, sums, slots)
        return sums
    shape = number, weights.num_slices, weights.max_rank, weights.in_features
    lora_a = torch.empty(shape, dtype=torch.float64)
    if name == "embedding":
        gradients.add_columns(
            made.dh.double(), made.token_ids, weights, segments, lora_a=lora_a, slots=slots
        )
    else:
        gradients.a_backward(
            made.dh.double(), made.x, weights, segments, dx=None, lora_a=lora_a, slots=slots
        )
    return lora_a


def expected(made, name, out_dtype, slots=None, start=None):
    """Return a gradient and its bound; 0 where it has to be exactly zero.

    The products of a sum have up to `narrowed` factors that are rounded to the dtype of the stack,
    each with a relative error u: together ``(1 + u)**narrowed - 1``. The sum of n products in
    float32 adds ``gamma(2 n)``, as `lora_backends.testing.oracles` derives it. scaling,
    token_scale and the scale of an 8-bit value are three factors more, in float32.
    """
    weights, dtype = made.weights, made.weights.compute_dtype
    terms = {
        "dh": max(weights.output_slices),
        "dx": weights.num_slices * weights.max_rank + 1,  # and the value that dx had
    }.get(name, made.rows)
    narrowed = {"sums": 0, "embedding": 0, "dh": 1, "dx": 1, "lora_a": 1, "lora_b": 2}[name]
    unit = _UNIT_ROUNDOFF[dtype]
    value = compute(made, name, slots, start)
    magnitude = compute(magnitudes(made), name, slots, None if start is None else start.abs())
    relative = (1 + unit) ** narrowed * (1 + gamma(2 * terms + 3, sum_unit(dtype))) - 1
    # a narrowed factor may underflow: its error multiplies at most two other factors
    lost = narrowed * terms * SMALLEST[dtype] * _largest(made) ** 2
    bound = relative * magnitude + lost
    bound = bound + rounding_bound(value, bound, out_dtype)
    return Expected(value, torch.where(magnitude == 0, 0.0, bound))


def _largest(made):
    """Return the largest magnitude of a factor."""
    weights = made.weights
    parts = [weights.a_of(s) for s in range(weights.num_slices)]
    parts += [weights.b_of(s) for s in range(weights.num_slices)]
    parts += [made.x, made.grad, made.h, made.dh, weights.scalings]
    return max([1.0, *(float(v.float().nan_to_num(0).abs().max()) for v in parts if v.numel())])


def assert_within(result, wanted):
    """Check a result against its bounds."""
    error = (result.detach().cpu().double() - wanted.value).abs()
    assert bool((error <= wanted.bound).all()), (
        f"error {error.max():.3g}, at most {(error - wanted.bound).max():.3g} above the bound"
    )


def moved(made, device):
    """Return a case on a device; the batch stays on the CPU."""
    names = ("x", "grad", "h", "dh", "token_ids")
    tensors = {name: getattr(made, name).to(device) for name in names}
    fields = {}
    for name in ("lora_a", "lora_b", "ranks", "scalings", "bias", "a_scales", "b_scales"):
        stack = getattr(made.weights, name)
        fields[name] = None if stack is None else on_each(stack, lambda t: t.to(device))
    return replace(made, weights=replace(made.weights, **fields), **tensors)


class Run:
    """The gradients of a case by an engine; memory that it overwrites begins as NaN."""

    def __init__(self, engine, made, out_dtype, slots=None, plan=None):
        self.engine, self.slots, self.out_dtype = engine, slots, out_dtype
        self.made = moved(made, engine.device)
        self.plan = plan or engine.prepare_batch(made.batch, capacity=made.rows or None)
        self.number = NUM_SLOTS if slots is None else len(slots)

    def _new(self, *shape, dtype=None):
        shape = (self.number, *shape)
        options = {"dtype": dtype or self.out_dtype, "device": self.engine.device}
        return torch.full(shape, float("nan"), **options)

    def dh(self, h=None):
        made = self.made
        return self.engine.run_lora_b_backward(made.grad, h, made.weights, self.plan)

    def lora_b(self, h=None):
        made, weights = self.made, self.made.weights
        out = self._new(weights.out_features, weights.max_rank)
        self.engine.run_lora_b_backward(
            made.grad, made.h if h is None else h, weights, self.plan,
            needs_h=False, lora_b=out, slots=self.slots,
        )  # fmt: skip
        return out

    def dx(self, start=None):
        made = self.made
        dx = torch.full_like(made.x, float("nan")) if start is None else start.clone()
        self.engine.run_lora_a_backward(
            made.dh, None, made.weights, self.plan, dx=dx, adds=start is not None
        )
        return dx

    def lora_a(self):
        made, weights = self.made, self.made.weights
        out = self._new(weights.num_slices, weights.max_rank, weights.in_features)
        self.engine.run_lora_a_backward(
            made.dh, made.x, weights, self.plan, lora_a=out, slots=self.slots
        )
        return out

    def embedding(self):
        made, weights = self.made, self.made.weights
        out = self._new(weights.num_slices, weights.max_rank, weights.in_features)
        self.engine.run_embedding_backward(
            made.dh, made.token_ids, weights, self.plan, lora_a=out, slots=self.slots
        )
        return out

    def sums(self):
        out = self._new(self.made.weights.out_features, dtype=torch.float32)
        self.engine.sum_tokens(self.made.grad, self.made.weights, self.plan, out, self.slots)
        return out

    def all(self):
        """Return every gradient by name."""
        names = ("dh", "lora_b", "dx", "lora_a", "embedding", "sums")
        return {name: getattr(self, name)() for name in names}
