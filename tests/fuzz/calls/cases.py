"""Random calls of the interface: a valid one, and ways to spoil its arguments."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lora_backends import (
    InvalidInputError,
    LoRABatch,
    LoRAWeights,
    get_backend,
)
from lora_backends.features import (
    CAPACITY,
    OUTPUT_SCALES,
    SLICE_TENSORS,
    TOKEN_SCALES,
)
from lora_backends.operations import DENSE, Input
from lora_backends.testing import LoRACase
from lora_backends.testing.oracles import rank_mask

SCALINGS = (1.0, 2.0, 0.5, -1.0, 0.0, 0.3, -1.7)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.float64, torch.int32, torch.bool, torch.complex64, torch.uint8)


def draw_case(draw: random.Random, backend: Any, small: bool) -> LoRACase:
    """Draw the structure of a call; `small` for engines that run in an interpreter."""
    dtypes = backend.dtypes
    most_tokens, most_width, most_rank = (9, 20, 5) if small else (70, 140, 20)
    dtype, slots, slices = draw.choice(dtypes), draw.randint(1, 4), draw.choice([1, 1, 2, 3])
    tokens = draw.choice([0, 1, 2, draw.randint(1, most_tokens), draw.randint(1, most_tokens)])
    max_rank = draw.choice([1, draw.randint(1, most_rank), most_rank])
    full = draw.random() < 0.3

    def width() -> int:
        return draw.choice([1, draw.randint(1, 12), draw.randint(1, most_width)])

    def rank() -> int:
        return max_rank if full else draw.choice([0, max_rank, draw.randint(0, max_rank)])

    return LoRACase(
        slots=_slots(draw, slots, tokens),
        ranks=tuple(tuple(rank() for _ in range(slices)) for _ in range(slots)),
        max_rank=max_rank,
        in_features=width(),
        output_slices=tuple(width() for _ in range(slices)),
        scalings=tuple(tuple(draw.choice(SCALINGS) for _ in range(slices)) for _ in range(slots)),
        dtype=dtype,
        base=draw.choice([None, dtype, dtype, draw.choice(dtypes)]),
        bias=draw.random() < 0.4,
        wide_bias=draw.random() < 0.3,
        x_pad=draw.choice([0, 1, 3, 8]),
        base_pad=draw.choice([0, 1, 3, 8]),
        weights_pad=draw.choice([0, 0, 1, 8]),
        token_scales=TOKEN_SCALES in backend.features and draw.random() < 0.2,
        output_scales=OUTPUT_SCALES in backend.features and draw.random() < 0.2,
        split=draw.choice(["", "", "", "a", "b", "ab"]) if _splits(backend) else "",
        seed=draw.randrange(10**6),
    )


def _splits(backend: Any) -> bool:
    return SLICE_TENSORS in backend.features


def _slots(draw: random.Random, num_slots: int, tokens: int) -> tuple[int, ...]:
    runs = [draw.randint(-1, num_slots - 1) for _ in range(max(1, tokens // 3))]
    slots = [
        draw.choice([draw.choice(runs), draw.randint(-1, num_slots - 1)]) for _ in range(tokens)
    ]
    return tuple(sorted(slots) if draw.random() < 0.4 else slots)


class Call:
    """The arguments of one operation of a dense layer; mutations change them."""

    def __init__(self, backend: Any, draw: random.Random, small: bool) -> None:
        self.backend, self.draw, self.steps = backend, draw, []
        self.case = draw_case(draw, backend, small)
        self.planned: LoRABatch | None = None  # where x has rows after the batch
        self.capacity: Any = None
        behind = draw.randint(0, 4) if CAPACITY in backend.features else 0
        if behind and draw.random() < 0.2:
            self.case = replace(self.case, slots=(*self.case.slots, *[-1] * behind))
            self.capacity = len(self.case.slots) + draw.randint(0, 3)
        self.inputs = inputs = self.case.build("cpu")
        if self.capacity is not None:
            whole, kept = inputs.batch, slice(len(self.case.slots) - behind)
            scales = None if whole.token_scales is None else whole.token_scales[kept]
            self.planned = LoRABatch(whole.token_slots[kept], whole.num_slots, scales)
        names = [
            name
            for name, operation in DENSE.items()
            if operation.num_slices in (None, inputs.weights.num_slices)
        ]
        self.operation = DENSE[draw.choice(names)]
        self.weights: Any = inputs.weights
        self.batch: Any = inputs.batch
        self.guard = inputs.new_base() if self.operation.result == "y" else None
        self.base: Any = self.guard and self.guard.view
        self.plan: Any = None  # of the batch, unless a mutation gives another one
        self.out: Any = None  # a plan to refill
        self.grad = draw.random() < 0.35
        self.first: Any = self._first()
        for _ in range(draw.choice([0, 1, 1, 1, 2, 3])):
            step = draw.choice(MUTATIONS)
            self.steps.append(step.__name__)
            try:
                step(self)
            except (RuntimeError, TypeError):  # torch cannot do it to what an earlier step has made
                self.steps.append("not possible")

    def _first(self) -> Any:
        if self.operation.input is Input.ROWS:
            return self.inputs.x
        if self.operation.input is Input.TOKEN_IDS:
            return self.inputs.token_ids
        weights, batch = self.inputs.weights, self.inputs.batch
        generator = torch.Generator().manual_seed(self.case.seed)
        shape = (weights.num_slices, batch.num_tokens, weights.max_rank)
        h = torch.randn(shape, generator=generator)
        h[~rank_mask(weights, batch.token_slots).permute(1, 0, 2)] = torch.nan
        return h.double() if weights.dtype == torch.float64 else h

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor that the call can reach, with memory of its own or not."""
        found = [self.first, self.base]
        if isinstance(self.weights, LoRAWeights):
            found += self.weights.tensors.values()
        found += [] if self.guard is None else [self.guard._buffer]
        return [value for value in found if isinstance(value, torch.Tensor)]


def is_plain(value: Any) -> bool:
    """Return whether a value is a tensor whose elements can be copied and compared."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return not (value.is_meta or value.is_nested or value.is_quantized)


def odd_tensor(draw: random.Random, like: Any) -> Any:
    """Return something in the place of a tensor: of another kind, layout or type, or none."""
    shape = tuple(like.shape) if isinstance(like, torch.Tensor) else (3, 4)
    kinds = {
        "None": lambda: None,
        "a list": lambda: like.tolist() if like.numel() < 100 else [1],
        "an array": lambda: np.zeros(shape, np.float32),
        "text": lambda: "x",
        "a number": lambda: 3,
        "sparse": lambda: torch.zeros(shape).to_sparse(),
        "meta": lambda: like.to("meta"),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "quantized": lambda: torch.quantize_per_tensor(torch.zeros(shape), 0.1, 0, torch.qint8),
        "a module": lambda: torch.nn.Linear(2, 2),
        "a scalar": lambda: torch.tensor(1.0),
        "conjugate": lambda: torch.zeros(shape, dtype=torch.complex64).conj(),
        "csr": lambda: torch.zeros(shape[-2:]).to_sparse_csr() if len(shape) > 1 else None,
    }
    name = draw.choice(sorted(kinds))
    try:
        return kinds[name]()
    except Exception:  # torch cannot make it of this shape, or a mutation came before
        return None


def reshaped(draw: random.Random, value: Any) -> Any:
    """Return a tensor of another shape, dtype, layout or stride, or with other flags."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_nested:
        return value
    if value.is_quantized or value.is_meta or value.is_complex():
        return value
    edits = [
        lambda v: v[1:],
        lambda v: v[..., 1:],
        lambda v: v[None],
        lambda v: v.reshape(-1),
        lambda v: torch.cat([v, v]),
        lambda v: torch.cat([v, v], -1),
        lambda v: v.to(draw.choice(DTYPES)),
        lambda v: v.mT.contiguous().mT,
        lambda v: v[:1].expand(v.shape),
        lambda v: v.new_zeros(()).expand(v.shape),
        lambda v: v if v.dtype == torch.bool else torch._neg_view(v),  # torch negates no bool
        lambda v: v.repeat_interleave(2, -1)[..., ::2],
        lambda v: v.repeat_interleave(3, 0)[::3],
        lambda v: v.flip(0),
        lambda v: v.clone().requires_grad_(),
        lambda v: torch.nn.Parameter(v.clone(), requires_grad=draw.random() < 0.5),
        lambda v: v.clone().requires_grad_() * 1,
        lambda v: shifted(v),
        lambda v: v.new_empty(0),
        lambda v: v.clone().as_strided(v.shape, (1,) * v.ndim),
        lambda v: torch.cat([v.new_zeros(1, *v.shape[1:]), v])[1:],
    ]
    try:
        return draw.choice(edits)(value)
    except Exception:  # not for this shape or dtype
        return value


def shifted(value: torch.Tensor) -> torch.Tensor:
    """Return a copy that starts one element after the start of its storage."""
    flat = torch.empty(value.numel() + 1, dtype=value.dtype)
    return flat[1:].view(value.shape).copy_(value)


# Mutations


def spoil_first(call: Call) -> None:
    call.first = reshaped(call.draw, call.first)


def replace_first(call: Call) -> None:
    call.first = odd_tensor(call.draw, call.first)


def spoil_base(call: Call) -> None:
    call.base = reshaped(call.draw, call.base)


def replace_base(call: Call) -> None:
    if call.operation.result == "y":
        call.base = odd_tensor(call.draw, call.base)


def change_ids(call: Call) -> None:
    if call.operation.input is not Input.TOKEN_IDS or not isinstance(call.first, torch.Tensor):
        return
    first = call.first.clone()
    if first.numel() and not first.is_floating_point():
        most = call.inputs.weights.in_features
        first.view(-1)[call.draw.randrange(first.numel())] = call.draw.choice(
            [-1, most, most - 1, 0, 2**31 - 1, -(2**31)]
        )
    call.first = first.to(call.draw.choice([torch.int32, torch.int64, torch.int16]))


def share_memory(call: Call) -> None:
    """Let base_output lie on, or beside, what the call reads."""
    if call.operation.result != "y" or not isinstance(call.base, torch.Tensor):
        return
    shape = tuple(call.base.shape)
    source = call.draw.choice([t for t in call.tensors() if t is not call.base] or [call.base])
    if source.layout != torch.strided or source.is_nested or source.is_meta or len(shape) != 2:
        return
    rows, width = shape
    if call.draw.random() < 0.4 and isinstance(call.first, torch.Tensor) and call.first.ndim == 2:
        beside(call, rows, width)
        return
    try:
        storage = source.untyped_storage()
        flat = torch.empty(0, dtype=source.dtype).set_(storage).detach()
        room = flat.numel() - rows * width
        if room >= 0 and rows * width:
            offset = call.draw.choice([0, room, call.draw.randint(0, room)])
            call.base, call.guard = flat.as_strided(shape, (width, 1), offset), None
    except RuntimeError:
        return


def beside(call: Call, rows: int, width: int) -> None:
    """Put x and base_output side by side into one buffer, sometimes so that columns are shared."""
    first = call.first
    if first.shape[0] != rows or not first.is_floating_point() or first.is_meta:
        return
    inner, shared = first.shape[1], call.draw.choice([0, 0, 1, -2])
    if inner + width - shared <= 0 or shared > min(inner, width):
        return
    buffer = torch.zeros(rows, inner + width - shared, dtype=first.dtype)
    buffer[:, :inner] = first.detach()
    buffer = buffer.nan_to_num(0.5)
    call.first = buffer[:, :inner]
    call.base, call.guard = buffer[:, inner - shared : inner - shared + width], None


def use_x_as_base(call: Call) -> None:
    if call.operation.result == "y":
        call.base, call.guard = call.first, None


def spoil_weights(call: Call) -> None:
    """Make the layer anew with one field changed; the constructor may refuse it."""
    if not isinstance(call.weights, LoRAWeights):
        return
    names = ["lora_a", "lora_b", "ranks", "scalings", "bias", "output_slices"]
    name = call.draw.choice(names)
    value = getattr(call.weights, name)
    if name == "output_slices":
        value = call.draw.choice([value[1:], [*value], (0, *value), value[0], "ab", None,
                                  (1.5,), (10**30,), (True,), value[::-1]])  # fmt: skip
    elif call.draw.random() < 0.3:
        value = odd_tensor(call.draw, value)
    else:
        value = reshaped(call.draw, value)
    try:
        call.weights = replace(call.weights, **{name: value})
    except InvalidInputError:
        call.steps.append(f"{name} refused")


def replace_weights(call: Call) -> None:
    weights = call.weights
    if not isinstance(weights, LoRAWeights):
        return
    other = call.draw.choice([
        lambda: None, lambda: weights.lora_a, lambda: {"lora_a": weights.lora_a},
        lambda: SimpleNamespace(lora_a=weights.lora_a, lora_b=weights.lora_b),
        lambda: LoRAWeights, lambda: "weights",
        lambda: LoRAWeights(
            torch.cat([weights.lora_a] * 2), torch.cat([weights.lora_b] * 2),
            torch.cat([weights.ranks] * 2), torch.cat([weights.scalings] * 2),
            weights.output_slices,
        ),
    ])  # fmt: skip
    call.weights = other()


def change_the_plan(call: Call) -> None:
    """Make the plan for another batch, by another backend, by a refill, or of something else."""
    slots, num_slots = call.inputs.slots, call.inputs.batch.num_slots
    edit, call.planned = call.draw.randrange(8), None
    if edit == 0:
        call.batch = LoRABatch([*slots, 0], num_slots)
    elif edit == 1:
        call.batch = LoRABatch(slots, num_slots + 1)
    elif edit == 2:
        call.batch = LoRABatch([call.draw.randint(-1, num_slots - 1) for _ in slots], num_slots)
        if isinstance(call.first, torch.Tensor) and call.first.is_floating_point():
            call.first = call.first.detach().nan_to_num(0.25)  # of rows without an adapter before
    elif edit == 3:
        call.plan = call.draw.choice([None, 3, call.inputs.batch, [], "plan", torch.zeros(3)])
        call.plan = call if call.plan is None else call.plan
    elif edit == 4:
        others = [name for name in ("torch_ref", "numba_cpu") if name != call.backend.name]
        call.plan = get_backend(call.draw.choice(others), "cpu").prepare_batch(call.inputs.batch)
    elif edit == 5:
        call.batch = call.draw.choice([None, slots, call.inputs, torch.tensor(slots), "batch"])
    elif edit == 6:
        shuffled = list(slots)
        call.draw.shuffle(shuffled)
        call.out = call.backend.prepare_batch(LoRABatch(shuffled, num_slots))
    else:
        call.out = call.draw.choice([
            3, [], call.inputs.batch, torch.zeros(2),
            call.backend.prepare_batch(LoRABatch([*slots, 0], num_slots)),
            call.backend.prepare_batch(LoRABatch(slots, num_slots + 1)),
        ])  # fmt: skip


def change_the_operation(call: Call) -> None:
    """Call an operation for another number of slices, or with another kind of input."""
    call.operation = DENSE[call.draw.choice(sorted(DENSE))]


MUTATIONS = [
    spoil_first, spoil_first, spoil_first, replace_first, spoil_base, spoil_base, spoil_base,
    replace_base, change_ids, share_memory, share_memory, use_x_as_base, spoil_weights,
    spoil_weights, replace_weights, change_the_plan, change_the_plan, change_the_operation,
]  # fmt: skip

SLOT_VALUES: list[Any] = [
    None, 3, "ab", [], [[]], [[0, 1]], [0.5], [0, 0.0], [True], [None], [10**30], [2**63], [-2],
    [5], [0, -1, 2], (0, 1), range(3), {0: 1}, {0, 1}, "0", b"\0", [[0], [1]], [0, [1]],
    np.array([0, 1]),
    np.array([1, 0, 2])[::-1], np.array([0.0]), np.array([0], dtype=object), np.array(["a"]),
    np.ma.masked_array([0, 1], [0, 1]), np.array([2**63], np.uint64), np.array([], np.float32),
    np.zeros((2, 2), int), torch.tensor([0, 1]), torch.tensor([0, 1], dtype=torch.uint8),
    torch.tensor([0.0]), torch.tensor([True]), torch.tensor([0]).to_sparse(), torch.tensor(3),
    torch.tensor([0, 2]).to("meta"), torch.tensor([0, 1, 2, 0])[::2], torch.zeros(2, 0).long(),
    torch._neg_view(torch.tensor([1, 0])), [float("nan")], [float("inf")], [1j], [np.int8(2)],
    [torch.tensor(1)], [np.bool_(True)], object(), [object()], lambda: 3, slice(3), "9" * 5000,
    [[0, 1], [2]], torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), iter([0, 1]),
]  # fmt: skip
COUNTS: list[Any] = [
    3, 3, 3, 1, 0, -1, 2**31 - 1, 2**31, 10**30, 10**5000, None, "3", 3.0, True, [3], np.int64(3),
    torch.tensor(3), torch.tensor([3]), float("nan"), np.uint8(3), object(), 3j, b"3",
]  # fmt: skip
LENGTHS: list[Any] = [*SLOT_VALUES, [2, 0, 1], [1, 2], [0, 0], [2**62, 2**62], [2**40], [-1, 3]]
