"""Experts: what their weights and routing refuse, and the default that every backend has."""

import copy
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch
from helpers.small_experts import FACTORS, IDS, small_experts
from helpers.small_layers import ByAddress, small_batch, small_weights
from torch.utils._python_dispatch import TorchDispatchMode

from lora_backends import (
    ExpertWeights,
    InvalidInputError,
    LoRABackend,
    LoRABackendError,
    LoRABatch,
    LoRAPlan,
    UnsupportedInputError,
    backend_names,
    get_backend,
    quantize_weights,
    unavailable_reasons,
)
from lora_backends.defaults import experts as default
from lora_backends.dispatch import experts as way_in
from lora_backends.dispatch.wrap import unchecked
from lora_backends.experts import local_ids
from lora_backends.torch_ref import TorchRefBackend


@pytest.fixture
def job():
    """Return a function that runs experts on torch_ref with some arguments changed."""
    backend = TorchRefBackend()
    plan = backend.prepare_batch(small_batch())
    good = {
        "x": torch.randn(7, 5),
        "weights": small_experts(),
        "routing": backend.prepare_experts(plan, IDS, FACTORS, 3),
        "base_output": torch.zeros(7, 2, 6),
    }
    return lambda **change: backend.run_experts(**good | change)


def test_the_formula_gives_what_is_worked_out_by_hand():
    weights = ExpertWeights(
        lora_a=torch.tensor([[[[[1.0, 2.0]]], [[[0.0, 1.0]]]]]),  # one slot, two experts, rank 1
        lora_b=torch.tensor([[[[1.0], [3.0]], [[2.0], [-1.0]]]]),
        ranks=torch.ones(1, 2, 1, dtype=torch.int32),
        scalings=torch.tensor([[[0.5], [2.0]]]),
        output_slices=(2,),
        num_experts=2,
    )
    backend = TorchRefBackend()
    plan = backend.prepare_batch(LoRABatch([0, -1], 1))
    routing = backend.prepare_experts(
        plan, torch.tensor([[0, 1], [0, 1]]), torch.tensor([[0.5, 2.0]] * 2), 2
    )
    x = torch.tensor([[1.0, 1.0], [torch.nan, torch.nan]])
    y = backend.run_experts(x, weights, routing)
    assert y.tolist() == [[[1.5, 4.5], [4.0, -2.0]], [[0.0, 0.0], [0.0, 0.0]]]
    y = backend.run_experts(x, weights, routing, torch.ones(2, 2), weighted=True, reduce=True)
    assert y.tolist() == [[1 + 0.75 + 8.0, 1 + 2.25 - 4.0], [1.0, 1.0]]


BAD_WEIGHTS = [
    ({"lora_a": torch.zeros(4, 3, 2, 5)}, r"lora_a has the wrong axes"),
    ({"lora_a": torch.zeros(4, 2, 1, 2, 5)}, r"lora_a has the wrong shape"),
    ({"lora_a": torch.zeros(4, 3, 3, 2, 5)}, r"third axis of lora_a is 1 or 2"),
    ({"lora_a": torch.zeros(4, 3, 1, 5, 2).transpose(3, 4)}, r"last axis of lora_a"),
    ({"lora_a": torch.zeros(4, 3, 1, 2, 5).half()}, r"differ in dtype"),
    ({"lora_a": torch._neg_view(torch.zeros(4, 3, 1, 2, 5))}, r"lora_a is a lazy negation"),
    ({"lora_b": torch.zeros(4, 3, 7, 2)}, r"lora_b has the wrong shape"),
    ({"lora_b": "b"}, r"lora_b is not a floating-point tensor"),
    ({"ranks": torch.full((4, 3, 1), 3)}, r"rank is out of range"),
    ({"ranks": torch.zeros(4, 3, 2)}, r"ranks has the wrong dtype"),
    ({"ranks": torch.zeros(4, 3, 2).int()}, r"ranks has the wrong shape"),
    ({"scalings": torch.zeros(4, 3)}, r"scalings has the wrong shape"),
    ({"num_experts": 0}, r"not a number of experts"),
    ({"num_experts": True}, r"not a number of experts"),
    ({"output_slices": (2, 4), "interleaved": True}, r"interleaved slices differ in width"),
    ({"output_slices": ()}, r"output_slices is not a tuple of widths"),
]


@pytest.mark.parametrize(("change", "told"), BAD_WEIGHTS)
def test_contradictory_weights_are_refused(change, told):
    with pytest.raises(InvalidInputError, match=told):
        small_experts(**change)


@pytest.mark.parametrize("interleaved", [False, True])
def test_columns_belong_to_a_block_or_to_every_second_place(interleaved):
    weights = small_experts(interleaved=interleaved)
    columns = [list(range(6))[weights.columns(s)] for s in range(2)]
    assert columns == ([[0, 2, 4], [1, 3, 5]] if interleaved else [[0, 1, 2], [3, 4, 5]])


BAD_CALLS = [
    ({"x": torch.zeros(7, 4)}, r"x is \[7, 4\]; allowed: \[7, 5\]"),
    ({"x": torch.zeros(14, 5)}, r"x is \[14, 5\]; allowed: \[7, 5\]"),
    ({"x": torch.zeros(7, 5), "rows": "pairs"}, r"allowed: \[14, 5\]"),
    ({"x": torch.zeros(7, 5).half()}, "weights are float32; allowed: float32"),
    ({"x": torch.zeros(5, 7).T}, "last axis of x"),
    ({"x": "rows"}, r"x is \(str\); allowed: a tensor"),
    ({"x": torch.zeros(7, 5).to_sparse()}, "allowed: a dense tensor"),
    ({"x": torch.zeros(7, 5, device="meta")}, "x is on meta"),
    ({"base_output": torch.zeros(7, 6)}, r"allowed: \[7, 2, 6\]"),
    ({"reduce": True}, r"allowed: \[7, 6\]"),
    ({"base_output": torch.zeros(7, 1, 6).expand(7, 2, 6)}, "rows of base_output overlap"),
    ({"base_output": torch.zeros(1, 2, 6).expand(7, 2, 6)}, "rows of base_output overlap"),
    ({"weights": small_weights()}, "LoRAWeights; allowed: ExpertWeights"),
    ({"routing": 3}, "int; allowed: what prepare_experts"),
    ({"rows": "experts"}, "rows is 'experts'; allowed: 'tokens', 'pairs'"),
    ({"reduce": "yes"}, "reduce is 'yes'; allowed: False, True"),
]


@pytest.mark.parametrize(("change", "told"), BAD_CALLS)
def test_contradictory_arguments_are_refused_before_anything_is_written(job, change, told):
    base = change.get("base_output", torch.zeros(7, 2, 6))
    with pytest.raises(InvalidInputError, match=told) as raised:
        job(**{"base_output": base} | change)
    assert "backend 'torch_ref' cannot run run_experts" in str(raised.value)
    assert (base == 0).all()


def test_base_output_may_not_lie_on_what_is_read(job):
    weights = small_experts()
    for name, tensor in (("lora_a", weights.lora_a), ("lora_b", weights.lora_b)):
        base = tensor.as_strided((7, 2, 6), (12, 6, 1))
        with pytest.raises(InvalidInputError, match=f"base_output overlaps {name}"):
            job(weights=weights, base_output=base)


def test_base_output_may_not_lie_on_scales(job):
    weights = quantize_weights(small_experts(), torch.int8, (1, 1))
    base = weights.a_scales.as_strided((7, 2, 6), (12, 6, 1))
    with pytest.raises(InvalidInputError, match="base_output overlaps a_scales"):
        job(weights=weights, base_output=base)


def test_an_unknown_option_is_a_type_error(job):
    with pytest.raises(TypeError, match="weigthed"):
        job(weigthed=True)


BAD_ROUTINGS = [
    ({"plan": 3}, "plan is a int"),
    ({"topk_ids": IDS[1:]}, r"topk_ids is \[6, 2\] int64 cpu; allowed: \[7, k\]"),
    ({"topk_ids": IDS.float()}, "int32 or int64"),
    ({"topk_ids": IDS.tolist()}, r"topk_ids is \(list\)"),
    ({"topk_ids": IDS[:, :0], "topk_weights": FACTORS[:, :0]}, "k >= 1"),
    ({"topk_ids": IDS + 1}, r"topk_ids holds 3; allowed: 0..2, or a negative id for none"),
    ({"topk_weights": FACTORS[:, :1]}, "one weight per id"),
    ({"topk_weights": FACTORS.double()}, "float32, one weight per id"),
    ({"topk_weights": FACTORS.to_sparse()}, "allowed: a dense tensor"),
    ({"topk_weights": torch._neg_view(FACTORS)}, "topk_weights is a lazy negation"),
    ({"topk_ids": IDS.to("meta")}, "topk_ids is on meta"),
    ({"num_experts": True}, "num_experts is True"),
    ({"num_experts": 0}, "num_experts is 0"),
    ({"num_experts": 10**30}, "allowed: 1 to 2147483647"),
    ({"expert_map": torch.zeros(2, dtype=torch.int32)}, "topk_ids holds 2; allowed: 0..1"),
    ({"expert_map": torch.full((3,), 3, dtype=torch.int32)}, "expert_map holds 3"),
    ({"expert_map": torch.zeros(1, dtype=torch.int32).expand(3)}, "expert_map is not contiguous"),
    ({"expert_map": torch.zeros(3)}, r"\[global experts\] int32"),
    ({"out": "routing"}, "out is a str; allowed: a routing"),
]


def good_choice(backend):
    """Return arguments of `prepare_experts`."""
    plan = backend.prepare_batch(small_batch())
    return {"plan": plan, "topk_ids": IDS, "topk_weights": FACTORS, "num_experts": 3}


@pytest.mark.parametrize(("change", "told"), BAD_ROUTINGS)
def test_contradictory_routings_are_refused(change, told):
    backend = TorchRefBackend()
    with pytest.raises(InvalidInputError, match=told):
        backend.prepare_experts(**good_choice(backend) | change)


@pytest.mark.parametrize(("change", "told"), BAD_ROUTINGS)
@pytest.mark.parametrize("mapped", [False, True])
def test_refills_are_refused_as_well_after_one_that_was_accepted(change, told, mapped, monkeypatch):
    backend = TorchRefBackend()
    good = good_choice(backend)
    good["expert_map"] = torch.arange(3, dtype=torch.int32) if mapped else None
    routing = backend.prepare_experts(**good)
    with monkeypatch.context() as patch:
        patch.setattr(way_in, "_check_prepare", lambda *_: pytest.fail("checked again"))
        assert backend.prepare_experts(**good | {"topk_ids": IDS.flip(0)}, out=routing) is routing
    assert torch.equal(routing.topk_ids, IDS.flip(0))
    with pytest.raises(InvalidInputError, match=told):
        backend.prepare_experts(**{"out": routing} | good | change)
    assert torch.equal(routing.topk_ids, IDS.flip(0))


def test_a_refill_for_more_tokens_or_another_backend_is_refused_after_an_accepted_one():
    backend = TorchRefBackend()
    plan = backend.prepare_batch(small_batch())
    routing = backend.prepare_experts(plan, IDS, FACTORS, 3)
    larger = backend.prepare_batch(LoRABatch([0] * 8, 4))
    with pytest.raises(InvalidInputError, match=r"allowed: \[8, k\]"):
        backend.prepare_experts(larger, IDS, FACTORS, 3, out=routing)
    other = get_backend("numba_cpu", device="cpu")
    with pytest.raises(InvalidInputError, match="out is a"):
        other.prepare_experts(other.prepare_batch(small_batch()), IDS, FACTORS, 3, out=routing)


def test_a_routing_of_another_process_is_refilled_after_all_checks():
    """Where another backend may have the handle of the one that made it."""
    backend, other = TorchRefBackend(), get_backend("numba_cpu", device="cpu")
    plan = backend.prepare_batch(small_batch())
    routing = backend.prepare_experts(plan, IDS, FACTORS, 3)
    plan, routing = pickle.loads(pickle.dumps((plan, routing)))
    vars(other)["handle"] = backend.handle
    with pytest.raises(InvalidInputError, match="plan is a"):
        other.prepare_experts(plan, IDS, FACTORS, 3, out=routing)


def test_an_array_is_no_number_of_experts_of_a_refill():
    backend = TorchRefBackend()
    plan = backend.prepare_batch(small_batch())
    routing = backend.prepare_experts(plan, IDS, FACTORS, 3)
    with pytest.raises(InvalidInputError, match="num_experts is"):
        backend.prepare_experts(plan, IDS, FACTORS, torch.tensor([3, 3]), out=routing)


def test_a_routing_is_refilled_for_as_many_adapters_per_token_alone():
    backend = TorchRefBackend()
    batches = [small_batch(), LoRABatch([[0, 1]] * 7, 4), LoRABatch([[0, 1, 2]] * 7, 4)]
    plans = [backend.prepare_batch(batch) for batch in batches]
    routings = [backend.prepare_experts(plan, IDS, FACTORS, 3) for plan in plans]
    for i, plan in enumerate(plans):
        for j, routing in enumerate(routings):
            if i == j:
                assert backend.prepare_experts(plan, IDS, FACTORS, 3, out=routing) is routing
            else:
                with pytest.raises(InvalidInputError, match="given:"):
                    backend.prepare_experts(plan, IDS, FACTORS, 3, out=routing)


def test_a_routing_is_refilled_for_as_many_tokens_and_experts_alone(job):
    backend = TorchRefBackend()
    plan = backend.prepare_batch(small_batch())
    routing = backend.prepare_experts(plan, IDS, FACTORS, 3)
    address = routing.topk_ids.data_ptr()
    assert backend.prepare_experts(plan, IDS.flip(0), FACTORS, 3, out=routing) is routing
    assert routing.topk_ids.tolist() == IDS.flip(0).tolist()
    assert routing.topk_ids.data_ptr() == address
    with pytest.raises(InvalidInputError, match="num_experts = 3, the call has 4"):
        backend.prepare_experts(plan, IDS, FACTORS, 4, out=routing)
    with pytest.raises(InvalidInputError, match=r"= \[7, 2\], the call has \[7, 1\]"):
        backend.prepare_experts(plan, IDS[:, :1], FACTORS[:, :1], 3, out=routing)


def test_a_routing_keeps_its_own_memory(job):
    backend, ids, factors = TorchRefBackend(), IDS.clone(), FACTORS.clone()
    plan = backend.prepare_batch(small_batch())
    routing = backend.prepare_experts(plan, ids, factors, 3)
    expected = job(routing=routing, weighted=True, base_output=None)
    ids.fill_(0)
    factors.fill_(0)
    assert torch.equal(job(routing=routing, weighted=True, base_output=None), expected)


def test_ids_that_are_negative_too_high_or_elsewhere_are_dead():
    ids = torch.tensor([[0, 5, -3], [3, 1, 9]])
    assert local_ids(ids, 4, None).tolist() == [[0, -1, -1], [3, 1, -1]]
    expert_map = torch.tensor([2, -1, 7, 0, 1, 3], dtype=torch.int32)
    assert local_ids(ids, 4, expert_map).tolist() == [[2, 3, -1], [0, -1, -1]]


@pytest.mark.parametrize("num_slots", [1, 126, 127, 128, 300, 17000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_slot_of_every_token_is_asked_of_the_plan(num_slots, dtype):
    slots = [-1, 0, num_slots - 1, num_slots // 2, 0]
    backend = TorchRefBackend()
    plan, shrink = backend.prepare_batch(LoRABatch(slots, num_slots)), backend.run_lora_a
    found = default.token_slots(shrink, dtype, backend.device, plan, num_slots, 5)
    assert found.tolist() == slots


def test_a_backend_whose_plan_tells_nothing_has_experts(job):
    class ListPlans(LoRABackend):
        plan_type = list

        def prepare_batch(self, batch, out=None):
            return [TorchRefBackend().prepare_batch(batch)]

        def run_lora_a(self, x, weights, plan):
            return TorchRefBackend().run_lora_a(x, weights, plan[0])

        def run_lora_b(self, h, weights, plan, base_output=None):
            raise NotImplementedError

    backend, x = ListPlans(), torch.randn(7, 5)
    routing = backend.prepare_experts(backend.prepare_batch(small_batch()), IDS, FACTORS, 3)
    y = backend.run_experts(x, small_experts(), routing)
    assert torch.equal(y, job(x=x, base_output=None))


def test_a_refilled_plan_is_followed(job):
    backend = TorchRefBackend()
    plan = backend.prepare_batch(small_batch())
    routing = backend.prepare_experts(plan, IDS, FACTORS, 3)
    x = torch.randn(7, 5)
    before = job(x=x, routing=routing, base_output=None)
    backend.prepare_batch(LoRABatch([-1, 3, 0, 1, 0, 2, 3], 4), out=plan)
    after = job(x=x, routing=routing, base_output=None)
    assert (after[0] == 0).all() and not torch.equal(after[1], before[1])
    assert torch.equal(after[2:], before[2:])


def test_chunks_of_tokens_change_no_bit(job, monkeypatch):
    x = torch.randn(7, 5)
    whole = job(x=x, base_output=None, weighted=True)
    monkeypatch.setattr(default, "VALUES_AT_ONCE", 1)
    assert torch.equal(job(x=x, base_output=None, weighted=True), whole)


class Gathering(LoRABackend):
    """Shrinks without looking at a value."""

    def prepare_batch(self, batch, out=None):
        plan = LoRAPlan(batch.num_tokens, batch.num_slots)
        plan.slots = batch.token_slots
        return plan

    def run_lora_a(self, x, weights, plan):
        slots = plan.slots.clamp(min=0)
        h = torch.einsum("tsri,ti->str", weights.lora_a[slots].float(), x.float())
        return torch.where((plan.slots >= 0)[None, :, None], h, 0)

    def run_lora_b(self, h, weights, plan, base_output=None):
        raise NotImplementedError


class NoWaiting(TorchDispatchMode):
    """Fails where a value of a tensor is looked at, which waits for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "unique", "masked_select"), name
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device_after_the_first_call():
    backend, weights = Gathering(), small_experts()
    plan, x, y = backend.prepare_batch(small_batch()), torch.randn(7, 5), torch.zeros(7, 2, 6)
    prepare = backend.prepare_experts.__func__.wrapped.method  # on a CPU the check reads the ids
    expert_map = torch.tensor([1, -1, 0, 2], dtype=torch.int32)
    routing = prepare(backend, plan, IDS, FACTORS, 3, expert_map)
    run = unchecked(backend, "run_experts")
    run(x, weights, routing, y)
    with NoWaiting():
        prepare(backend, plan, IDS, FACTORS, 3, expert_map, out=routing)
        for reduce in (False, True):
            base = torch.zeros(7, 6) if reduce else y
            run(x, weights, routing, base, rows="tokens", weighted=True, reduce=reduce)


def test_gradients_flow_to_x_both_matrices_and_the_routers_weights():
    backend = TorchRefBackend()
    plan = backend.prepare_batch(small_batch())
    plain = small_experts(torch.float64)
    a, b = plain.lora_a.clone().requires_grad_(), plain.lora_b.clone().requires_grad_()
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    base = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    routing = backend.prepare_experts(plan, IDS, FACTORS, 3)

    def run(x, a, b, base):
        weights = small_experts(torch.float64, lora_a=a, lora_b=b)
        return backend.run_experts(x, weights, routing, base * 1.0, weighted=True, reduce=True)

    assert torch.autograd.gradcheck(run, (x, a, b, base), fast_mode=True)
    factors = FACTORS.clone().requires_grad_()
    routing = backend.prepare_experts(plan, IDS, factors, 3)
    y = backend.run_experts(x.detach(), plain, routing, weighted=True)
    (found,) = torch.autograd.grad(y.sum(), factors)
    unweighted = backend.run_experts(x.detach(), plain, routing).sum(-1)
    torch.testing.assert_close(found.double(), unweighted.detach(), rtol=1e-6, atol=1e-6)


def test_a_gradient_is_not_lost():
    class Constant(TorchRefBackend):
        differentiable = False

    backend = Constant()
    plan = backend.prepare_batch(small_batch())
    with pytest.raises(UnsupportedInputError, match="requires a gradient"):
        backend.prepare_experts(plan, IDS, FACTORS.clone().requires_grad_(), 3)
    routing = backend.prepare_experts(plan, IDS, FACTORS, 3)
    with pytest.raises(UnsupportedInputError, match="requires a gradient"):
        backend.run_experts(torch.randn(7, 5, requires_grad=True), small_experts(), routing)


@pytest.mark.parametrize(
    "how", [copy.copy, copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))]
)
def test_copies_of_weights_and_routing_live_on_their_own(job, how):
    backend = TorchRefBackend()
    plan = backend.prepare_batch(small_batch())
    routing, weights = backend.prepare_experts(plan, IDS, FACTORS, 3), small_experts()
    x = torch.randn(7, 5)
    expected = job(x=x, weights=weights, routing=routing, base_output=None)
    copies = how(weights), how(routing)
    assert copies[0].handle != weights.handle and copies[1].handle != routing.handle
    del weights, routing
    assert torch.equal(job(x=x, weights=copies[0], routing=copies[1], base_output=None), expected)


ON_THE_CPU = [name for name in backend_names() if not unavailable_reasons(name, "cpu")]


@pytest.mark.parametrize("name", ON_THE_CPU)
@pytest.mark.usefixtures("fresh_programs")
def test_experts_are_part_of_one_graph_and_follow_a_refilled_routing(name):
    backend, generator = get_backend(name, device="cpu"), torch.Generator().manual_seed(1)
    weights = ExpertWeights(
        lora_a=torch.randn(4, 3, 1, 2, 10, generator=generator),
        lora_b=torch.randn(4, 3, 6, 2, generator=generator),
        ranks=torch.tensor([[[2], [1], [0]]] * 4),
        scalings=torch.rand(4, 3, 1, generator=generator),
        output_slices=(3, 3),
        num_experts=3,
    )
    x = torch.randn(7, 10, generator=generator)
    ids = torch.randint(-1, 3, (7, 2), generator=generator)
    factors = torch.rand(7, 2, generator=generator)

    def layer(x, routing):
        pairs = backend.run_experts(x, weights, routing)
        y = pairs.sum(1) * 2
        backend.run_experts(x, weights, routing, base_output=y, weighted=True, reduce=True)
        return y + backend.run_experts(pairs.new_ones(14, 10), weights, routing, rows="pairs").sum(
            1
        )

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    plan = backend.prepare_batch(small_batch())
    routing = backend.prepare_experts(plan, ids, factors, 3)
    assert torch.equal(compiled(x, routing), layer(x, routing))
    backend.prepare_batch(LoRABatch([1, 1, -1, 3, 2, 0, -1], 4), out=plan)
    backend.prepare_experts(plan, ids.flip(0), factors, 3, out=routing)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(compiled(x, routing), layer(x, routing))


@pytest.mark.usefixtures("fresh_programs")
def test_a_routing_is_made_between_the_graphs_of_a_compiled_program():
    backend, weights = TorchRefBackend(), small_experts()
    plan, x = backend.prepare_batch(small_batch()), torch.randn(7, 5)

    def layer(x, ids, factors):
        routing = backend.prepare_experts(plan, ids, factors * 2, 3)
        return backend.run_experts(x, weights, routing, weighted=True, reduce=True) + 1

    compiled = torch.compile(layer, backend="eager")
    for ids in (IDS, IDS.flip(0)):
        assert torch.equal(compiled(x, ids, FACTORS), layer(x, ids, FACTORS))


# A kind of call that has passed the guards is recognised; whatever they refuse is not.


@pytest.fixture
def guarded(monkeypatch):
    """Return the list of backends whose calls the guards have looked at."""
    backends, guard = [], way_in._check_routed
    monkeypatch.setattr(
        way_in,
        "_check_routed",
        lambda engine, *args: backends.append(engine) or guard(engine, *args),
    )
    return backends


@pytest.fixture
def call():
    """Return the arguments of an ordinary call, to be spoiled."""
    backend = TorchRefBackend()
    plan = backend.prepare_batch(LoRABatch([0, 1, -1], 2), capacity=4)
    ids = torch.tensor([[0, 2], [1, 1], [0, 1]])
    weights = ExpertWeights(
        torch.randn(2, 3, 1, 4, 6),
        torch.randn(2, 3, 8, 4),
        torch.full((2, 3, 1), 4),
        torch.ones(2, 3, 1),
        (8,),
        3,
    )
    routing = backend.prepare_experts(plan, ids, torch.rand(3, 2), 3)
    y, x = torch.zeros(3, 2, 8), torch.randn(3, 6)
    return SimpleNamespace(backend=backend, x=x, weights=weights, routing=routing, y=y, options={})


def run(call):
    options = {"rows": "tokens", "weighted": False, "reduce": False} | call.options
    return call.backend.run_experts(call.x, call.weights, call.routing, call.y, **options)


def pairs(call):
    call.x, call.options["rows"] = torch.randn(6, 6), "pairs"


def reduced(call):
    call.y, call.options["reduce"] = torch.zeros(3, 8), True


def eight_bit(call):
    call.weights = quantize_weights(call.weights, torch.int8)


@pytest.mark.parametrize("change", [lambda call: None, pairs, reduced, eight_bit])
@pytest.mark.parametrize("with_base", [True, False])
def test_a_kind_of_call_that_has_passed_meets_no_guard_again(call, guarded, change, with_base):
    change(call)
    call.y = call.y if with_base else None
    run(call), run(call)
    assert len(guarded) == 1
    call.routing = call.backend.prepare_experts(
        call.routing.plan, torch.zeros(4, 2, dtype=torch.int64), torch.rand(4, 2), 3
    )  # rows are no part of a kind
    call.x = torch.randn(len(call.x) // 3 * 4, 6)
    call.y = None if call.y is None else torch.zeros(4, *call.y.shape[1:])
    run(call)
    assert len(guarded) == 1


def nested():
    with warnings.catch_warnings(action="ignore"):  # torch says that they are new
        return torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(1, 6)])


SPOILED = {
    "x of another dtype": lambda call: setattr(call, "x", call.x.double()),
    "x too wide": lambda call: setattr(call, "x", torch.randn(3, 7)),
    "x for pairs": lambda call: setattr(call, "x", torch.randn(6, 6)),
    "x negated": lambda call: setattr(call, "x", torch._neg_view(call.x)),
    "x nested": lambda call: setattr(call, "x", nested()),
    "y nested": lambda call: setattr(call, "y", nested()),
    "y of another shape": lambda call: setattr(call, "y", torch.zeros(3, 8)),
    "y an integer": lambda call: setattr(call, "y", call.y.long()),
    "y on x": lambda call: setattr(call, "x", call.y.flatten()[:18].view(3, 6)),
    "y on lora_b": lambda call: setattr(
        call, "y", call.weights.lora_b.flatten()[8:56].view(3, 2, 8)
    ),
    "y on a scale": lambda call: (
        eight_bit(call),
        setattr(call, "y", call.weights.b_scales.as_strided((3, 2, 8), (16, 8, 1))),
    ),
    "y a leaf": lambda call: setattr(call, "y", call.y.requires_grad_()),
    "rows unknown": lambda call: call.options.update(rows="experts"),
    "weighted an int": lambda call: call.options.update(weighted=2),
    "a plan of more tokens": lambda call: call.backend.prepare_batch(
        LoRABatch([0] * 4, 2), out=call.routing.plan
    ),
    "another number of experts": lambda call: setattr(call.routing, "num_experts", 4),
    "no routing": lambda call: setattr(call, "routing", call.routing.plan),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_spoiled_call_is_refused_where_a_call_of_its_kind_has_passed(call, spoil):
    run(call)
    spoil(call)
    with pytest.raises(LoRABackendError):
        run(call)


@pytest.mark.parametrize("name", ["x", "y"])
def test_other_strides_are_another_kind(call, guarded, name):
    run(call)
    setattr(call, name, getattr(call, name).repeat_interleave(2, 0)[::2])
    run(call), run(call)
    assert len(guarded) == 2


@pytest.mark.parametrize("name", ["x", "base_output", "lora_b"])
def test_experts_without_an_address_are_refused_by_a_backend_that_reads_it(call, name):
    call.backend = ByAddress()
    if name == "lora_b":
        call.weights.lora_b.untyped_storage().resize_(0)
    else:
        field = name[0].replace("b", "y")
        setattr(call, field, torch._to_functional_tensor(getattr(call, field)))
    for y in (call.y, None)[: 2 if name != "base_output" else 1]:
        with pytest.raises(InvalidInputError, match=f"{name} has no address.*torch_ref"):
            call.backend.run_experts(call.x, call.weights, call.routing, y, **call.options)


@pytest.mark.parametrize("place", [0, 1])
def test_a_choice_without_an_address_is_refused_by_a_backend_that_reads_it(call, place):
    choice = [torch.tensor([[0, 2], [1, 1], [0, 1]]), torch.rand(3, 2)]
    choice[place] = torch._to_functional_tensor(choice[place])
    name = ("topk_ids", "topk_weights")[place]
    with pytest.raises(InvalidInputError, match=f"{name} has no address"):
        ByAddress().prepare_experts(call.routing.plan, *choice, 3)
