"""The operands of widened products, against those that torch makes."""

from itertools import product as each_of

import pytest
import torch
from helpers.engines import UNITS, make_engine, poisoned

from lora_backends import NO_ADAPTER, LoRABatch, LoRAWeights
from lora_backends.diffusers.widened import WidenedProducts
from lora_backends.sgmv.wide.operands import MOST_COLUMNS
from lora_backends.triton import TritonBackend

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OUTPUTS = 21


def whole(*shape, seed, dtype):
    """Return small whole numbers: their products and sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def layer(device, ranks, inputs, dtype, max_rank=None):
    """Return a stack with NaN beyond each rank, and as the scaling of rank 0."""
    max_rank = max_rank or max(1, *ranks)
    a = whole(len(ranks), 1, max_rank, inputs, seed=1, dtype=dtype)
    b = whole(len(ranks), OUTPUTS, max_rank, seed=2, dtype=dtype)
    for slot, rank in enumerate(ranks):
        a[slot, :, rank:] = b[slot, :, rank:] = torch.nan
    scalings = [[torch.nan if not rank else 2.0 ** (i % 4 - 1)] for i, rank in enumerate(ranks)]
    ranks = torch.tensor(ranks, dtype=torch.int32)[:, None]
    weights = a.to(device), b.to(device), ranks.to(device), torch.tensor(scalings).to(device)
    return LoRAWeights(*weights, (OUTPUTS,))


def operands(backend, x, weight, weights, slots, listed):
    """Return both operands as the engine makes them, and as torch does."""
    plan = backend.prepare_batch(LoRABatch(slots, weights.num_slots))
    rank = int(weights.ranks[listed].max())
    products = WidenedProducts(backend, listed, {})
    given = x, weight, weights, plan, products._slots, rank
    made = backend.widened_operands(*given)
    assert made is not None
    return made, products._by_torch(x, weight, weights, plan, rank)


SLOTS = {
    "an image each": [0] * 70 + [2] * 70 + [NO_ADAPTER] * 70 + [1] * 70,
    "mixed": [(7 * t) % 5 - 1 for t in range(131)],
    "one row": [2],
    "none": [NO_ADAPTER] * 65,
    "no rows": [],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize(
    ("ranks", "listed", "inputs"),
    [((16, 3, 0, 9), [2, 0, 1, 3], 128), ((8, 1, 5, 2), [0, 2, 1], 40), ((1, 2, 33, 4), [2], 136)],
)
def test_operands_are_those_of_torch(device, monkeypatch, dtype, slots, ranks, listed, inputs):
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    slots = [slot if slot in listed else NO_ADAPTER for slot in slots]
    x = whole(len(slots), inputs, seed=4, dtype=dtype).to(device)
    weight = whole(OUTPUTS, inputs, seed=5, dtype=dtype).to(device)
    weights = layer(device, ranks, inputs, dtype)
    made, wanted = operands(make_engine("triton", device), x, weight, weights, slots, listed)
    for one, other in zip(made, wanted, strict=True):
        assert one.is_contiguous() and torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["one stack", "tensors", "tensors apart"])
def test_slices_have_columns_of_their_own(device, form, dtype):
    widths, inputs, count = (9, 33, 3), 72, 4
    ranks = torch.tensor([[3, 0, 11], [2, 2, 2], [0, 0, 0], [16, 16, 1]], dtype=torch.int32)
    a = whole(count, len(widths), 16, inputs, seed=1, dtype=dtype)
    b = whole(count, sum(widths), 16, seed=2, dtype=dtype)
    for slot, s in each_of(range(count), range(len(widths))):
        first = sum(widths[:s])
        a[slot, s, ranks[slot, s] :] = b[slot, first : first + widths[s], ranks[slot, s] :] = (
            torch.nan
        )
    a, b = a.to(device), b.to(device)
    if form != "one stack":
        a = tuple(a[:, s].clone() if form == "tensors apart" else a[:, s] for s in range(3))
        b = tuple(part.clone() for part in b.split(widths, 1))
    scalings = whole(count, 3, seed=3, dtype=torch.float32) / 2
    weights = LoRAWeights(a, b, ranks.to(device), scalings.to(device), widths)
    slots = [0] * 70 + [2] * 20 + [NO_ADAPTER] * 30 + [1, 3] * 10
    x = whole(len(slots), inputs, seed=4, dtype=dtype).to(device)
    weight = whole(sum(widths), inputs, seed=5, dtype=dtype).to(device)
    engine = make_engine("triton", device)
    made, wanted = operands(engine, x, weight, weights, slots, [3, 0, 2, 1])
    assert all(map(torch.equal, made, wanted))
    plan, linear = engine.prepare_batch(LoRABatch(slots, count)), torch.nn.functional.linear
    x, weight = x.float(), weight.float()
    y = engine.run_linear(x.to(dtype), weights, plan, linear(x, weight).to(dtype))
    got = linear(made[0].float(), made[1].float())
    # sums are exact but for the rounding of y and of c h
    assert (got - y.float()).abs().max() <= 4 * UNITS[dtype] * got.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_h_is_rounded_once(device, dtype):
    torch.manual_seed(0)
    slots, inputs = [0] * 40 + [1] * 50 + [NO_ADAPTER] * 9, 264
    weights = layer(device, (16, 7), inputs, dtype)
    for name in ("lora_a", "lora_b"):
        getattr(weights, name).copy_(torch.randn(getattr(weights, name).shape))
    weights.scalings.copy_(torch.tensor([[1.7], [3.3]]))
    x, weight = (torch.randn(n, inputs).to(device, dtype) for n in (len(slots), OUTPUTS))
    (left, _), (wanted, _) = operands(
        make_engine("triton", device), x, weight, weights, slots, [0, 1]
    )
    bound = 2 * UNITS[dtype] * wanted.float().abs() + 1e-4
    assert ((left.float() - wanted.float()).abs() <= bound).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of numpy
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_rows_get_nothing_of_other_adapters(device, value):
    """A of another adapter, and x of another row, may be anything."""
    slots, dtype = [0] * 5 + [1] * 6 + [NO_ADAPTER] * 7 + [2] * 3, torch.bfloat16
    weights = layer(device, (4, 4, 0), 64, dtype)
    weights.lora_a[1] = value
    x = whole(len(slots), 64, seed=4, dtype=dtype).to(device)
    x[2] = value
    weight = whole(OUTPUTS, 64, seed=5, dtype=dtype).to(device)
    (left, right), _ = operands(make_engine("triton", device), x, weight, weights, slots, [0, 1, 2])
    h = left[:, 64:].view(len(slots), 3, 8)
    assert right.isfinite().all()
    assert not h[:, :, 4:].any() and not h[:5, 1:].any() and not h[5:11, ::2].any()
    assert not h[11:].any()
    finite = h.isfinite().all(-1).all(-1)
    assert finite.tolist() == [t != 2 and slot != 1 for t, slot in enumerate(slots)]


@pytest.mark.parametrize("name", ["triton", "csgmv-auto"])
def test_rows_beyond_a_plan_with_room_have_no_adapter(device, name):
    engine, dtype = make_engine(name, device), torch.bfloat16
    weights = layer(device, (4, 2), 24, dtype)
    plan = engine.prepare_batch(LoRABatch([1, 0] * 40, 2), capacity=100)
    x = whole(100, 24, seed=4, dtype=dtype).to(device)
    weight = whole(OUTPUTS, 24, seed=5, dtype=dtype).to(device)
    products = WidenedProducts(engine, [1, 0], {})
    given = x, weight, weights, plan
    made = engine.widened_operands(*given, products._slots, 4)
    wanted = products._by_torch(*given, 4)
    assert all(map(torch.equal, made, wanted)) and not made[0][80:, 24:].any()


def test_x_and_w_may_be_parts_of_larger_matrices(device):
    slots, dtype = [1, 0, NO_ADAPTER, 1] * 20, torch.float16
    weights = layer(device, (2, 5), 48, dtype, max_rank=12)
    x = whole(len(slots), 96, seed=4, dtype=dtype).to(device)[:, 16:64]
    weight = whole(OUTPUTS, 80, seed=5, dtype=dtype).to(device)[:, 3:51]
    made, wanted = operands(make_engine("triton", device), x, weight, weights, slots, [1, 0])
    assert all(map(torch.equal, made, wanted))


class Own(TritonBackend):
    """An engine with arithmetic of its own."""

    def run_lora_a(self, x, weights, plan, out=None):
        return super().run_lora_a(x, weights, plan, out)


def test_what_they_do_not_take_they_leave_to_torch(device):
    def made(engine, inputs=24, rank=3, tokens=4, dtype=torch.bfloat16, weight=None):
        weights = layer(device, (rank,), inputs, dtype)
        x = whole(4, inputs, seed=4, dtype=torch.bfloat16).to(device)
        plan = engine.prepare_batch(LoRABatch([0] * tokens, 1))
        slots = torch.zeros(1, dtype=torch.int32, device=device)
        weight = x.clone() if weight is None else weight.to(device)
        return engine.widened_operands(x, weight, weights, plan, slots, rank)

    engine = make_engine("triton", device)
    assert made(engine) and made(engine, rank=MOST_COLUMNS)
    assert made(engine, inputs=28) is None and made(engine, rank=MOST_COLUMNS + 1) is None
    assert made(make_engine("triton", device, batch_invariant=True)) is None
    assert made(Own(device)) is None
    # the plan has no slots of other rows
    assert made(engine, tokens=3) is None and made(engine, tokens=5) is None
    assert made(engine, dtype=torch.float16) is None
    weight = torch.zeros(24, OUTPUTS, dtype=torch.bfloat16)
    assert made(engine, weight=weight.t()) is None and made(engine, weight=weight.t().contiguous())
    assert made(engine, weight=weight.new_zeros(OUTPUTS, 32)) is None


def test_they_take_two_launches(device):
    engine = make_engine("csgmv-auto", device)
    weights = layer(device, (3,), 24, torch.bfloat16)
    x = whole(4, 24, seed=4, dtype=torch.bfloat16).to(device)
    plan = engine.prepare_batch(LoRABatch([0] * 4, 1))
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    with engine.recording() as noted:
        engine.widened_operands(x, x.clone(), weights, plan, slots, 3)
    assert len(noted.kernels) == 2
