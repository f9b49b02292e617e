"""The calls that a module repeats after torch's product: those that would pass every check."""

import pytest
import torch
from helpers.small_layers import small_batch, small_weights
from helpers.storing import Storing
from torch.autograd import forward_ad
from torch.nn import functional

from lora_backends import LoRABatch
from lora_backends.dispatch.repeats import NO_REPEATS, Repeats

WEIGHT = torch.randn(14, 10, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def kept():
    """Return (repeats, x, weights, plan, backend) of a call that is kept under "module"."""
    backend, weights = Storing(), small_weights(bias=True)
    plan, x = backend.prepare_batch(small_batch()), torch.randn(7, 1, 10)
    repeats = Repeats()
    repeats.plan = plan
    keep(repeats, backend, x, weights, plan)
    assert "module" in repeats
    return repeats, x, weights, plan, backend


def keep(repeats, backend, x, weights, plan, y=None, operation="run_linear"):
    """Store a call of the engine for rows, and keep it for x and y of a model."""
    y = torch.zeros(*x.shape[:-1], 14) if y is None else y
    if x.is_contiguous() and y.is_contiguous():
        plan.call_cache.store("run_linear", backend, x, weights, y, backend.call)
    repeats.keep("module", backend, operation, x, weights, plan, y)


@torch.no_grad()
def test_a_repeat_adds_to_the_bits_of_torchs_product(kept):
    repeats, x, _, _, backend = kept
    for bias in (None, torch.randn(14)):
        other = x + 1
        y = repeats["module"].run(other, WEIGHT, bias)
        assert torch.equal(y, functional.linear(other, WEIGHT, bias) + 1)
    assert backend.call.repeated == 2


def shifted(x):
    """Return a copy that begins 4 bytes after a multiple of 16."""
    return x.new_zeros(x.numel() + 1)[1:].view_as(x).copy_(x)


class Tensor(torch.Tensor):
    pass


OTHER_X = {
    "another shape of as many rows": lambda x: x.view(1, 7, 10),
    "fewer rows": lambda x: x[1:],
    "another dtype": lambda x: x.double(),
    "another device": lambda x: x.to("meta"),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "unaligned": shifted,
    "a lazy negation": torch._neg_view,
    "a subclass": lambda x: x.as_subclass(Tensor),
    "sparse": lambda x: x.to_sparse(),
    "of a transform": torch._to_functional_tensor,
}


@pytest.mark.parametrize("other", OTHER_X)
@torch.no_grad()
def test_an_input_of_another_kind_is_not_multiplied(kept, other, monkeypatch):
    repeats, x, _, _, backend = kept
    monkeypatch.setattr(functional, "linear", lambda *_: pytest.fail("was multiplied"))
    assert repeats["module"].run(OTHER_X[other](x), WEIGHT, None) is None
    assert backend.call.repeated == 0


@torch.no_grad()
def test_an_input_on_another_gpu_is_not_multiplied(kept):
    repeats, x, _, _, backend = kept
    repeats["module"]._device = 1  # as if it had been kept there
    assert repeats["module"].run(x, WEIGHT, None) is None
    assert backend.call.repeated == 0


def test_nothing_is_repeated_with_gradients(kept):
    repeats, x, _, _, backend = kept
    with torch.enable_grad():
        assert repeats["module"].run(x, WEIGHT, None) is None
    assert backend.call.repeated == 0


OTHER_Y = {
    "fewer columns": lambda y: y[..., :13].contiguous(),
    "another dtype, as of autocast": lambda y: y.bfloat16(),
    "strided": lambda y: y.transpose(0, 2).contiguous().transpose(0, 2),
    "unaligned": shifted,
    "a subclass": lambda y: y.as_subclass(Tensor),
    "sparse": lambda y: y.to_sparse(),
    "of a transform": torch._to_functional_tensor,
}


@pytest.mark.parametrize("other", OTHER_Y)
@torch.no_grad()
def test_nothing_is_added_to_a_product_of_another_kind(kept, other, monkeypatch):
    repeats, x, _, _, backend = kept
    product = OTHER_Y[other](functional.linear(x, WEIGHT))
    monkeypatch.setattr(functional, "linear", lambda *_: product)
    assert repeats["module"].run(x, WEIGHT, None) is None
    assert backend.call.repeated == 0


@torch.no_grad()
def test_nothing_is_added_to_the_products_of_many_weights(kept):
    repeats, x, _, _, backend = kept
    found = []
    torch.vmap(lambda weight: found.append(repeats["module"].run(x, weight, None)) or weight)(
        WEIGHT.expand(3, *WEIGHT.shape)
    )
    assert found == [None] and backend.call.repeated == 0


@torch.no_grad()
def test_a_product_with_a_tangent_is_left_to_the_checks(kept):
    repeats, x, _, _, backend = kept
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        assert repeats["module"].run(dual, WEIGHT, None) is None
    assert backend.call.repeated == 0


@torch.no_grad()
def test_a_refill_with_other_tiles_or_more_tokens_repeats_nothing(kept):
    repeats, x, _, plan, backend = kept
    plan.call_cache.key = ("other tiles",)
    assert repeats["module"].run(x, WEIGHT, None) is None
    plan.call_cache.key = None
    plan.num_tokens = 8
    assert repeats["module"].run(x, WEIGHT, None) is None
    plan.num_tokens = 6
    assert repeats["module"].run(x, WEIGHT, None) is not None
    assert backend.call.repeated == 1


@torch.no_grad()
def test_a_call_that_has_to_run_in_full_adds_nothing(kept, monkeypatch):
    repeats, x, _, _, backend = kept
    monkeypatch.setattr(backend.call, "run", lambda *_: False, raising=False)
    assert repeats["module"].run(x, WEIGHT, None) is None


def test_nothing_is_repeated_while_another_gpu_is_current(kept, monkeypatch):
    repeats, device = kept[0], torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert repeats.of_pass(device) is NO_REPEATS
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert repeats.of_pass(device) is repeats and "module" in repeats


KEPT_NOT = {
    "another plan": lambda r, b, x, w, p: keep(r, b, x, w, b.prepare_batch(small_batch())),
    "an operation that stores none": lambda r, b, x, w, p: keep(r, b, x, w, p, operation=None),
    "strided x": lambda r, b, x, w, p: keep(r, b, torch.stack([x, x], -1)[..., 0], w, p),
    "unaligned x": lambda r, b, x, w, p: keep(r, b, shifted(x), w, p),
    "unaligned y": lambda r, b, x, w, p: keep(r, b, x, w, p, shifted(torch.zeros(7, 1, 14))),
}


@pytest.mark.parametrize("case", KEPT_NOT)
def test_calls_that_are_not_kept(kept, case):
    repeats, x, weights, plan, backend = kept
    repeats.clear()
    KEPT_NOT[case](repeats, backend, x, weights, plan)
    assert not repeats


def test_a_call_that_the_engine_has_not_stored_is_not_kept(kept):
    repeats, x, weights, _, backend = kept
    repeats.clear()
    repeats.plan = plan = backend.prepare_batch(LoRABatch([0] * 7, 4))
    repeats.keep("module", backend, "run_linear", x, weights, plan, torch.zeros(7, 1, 14))
    assert not repeats


def test_nothing_is_ever_kept_where_nothing_may_be_repeated(kept):
    _, x, weights, plan, backend = kept
    keep(NO_REPEATS, backend, x, weights, plan)
    assert not NO_REPEATS and NO_REPEATS.plan is None
