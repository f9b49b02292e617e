"""A repeated call of experts launches what the first one launched, with its own addresses.

The launches are recorded: nothing is compiled or run.
"""

import copy
import dataclasses
import gc
import pickle
import weakref
from types import SimpleNamespace

import pytest
import torch
from helpers.engines import ENGINES
from helpers.noted_launches import noted_launches

from lora_backends import ExpertWeights, InvalidInputError, LoRABatch, quantize_weights
from lora_backends.sgmv.experts import cached, launch, routing, rules
from lora_backends.sgmv.launching import call_cache
from lora_backends.sgmv.launching import kernel as launching

pytestmark = pytest.mark.skipif(
    launching.INTERPRETED, reason="the interpreter has no compiled kernels to keep"
)
SLOTS, EXPERTS, TOP_K, INPUTS = 3, 4, 2, 48
CACHES = [
    *(launch.kernels_of, launch.choice_of, rules.choose_tiles, launching.specialized),
    *(routing._alone, routing._compare, routing._count, routing._scatter),
]


@pytest.fixture
def current():
    """Return what is current on the device: its stream."""
    return SimpleNamespace(stream=0)


@pytest.fixture
def log(monkeypatch, current):
    """Return the launches, in order."""
    with noted_launches(monkeypatch, current, CACHES, [call_cache, cached, routing]) as launches:
        yield launches


@pytest.fixture(params=ENGINES)
def new(request):
    """Return a function to an engine that has cached nothing; it may have a GPU's options."""

    def make(**options):
        backend = ENGINES[request.param]("cpu", tiles="rules")
        backend._options = backend._options._replace(**options)
        return backend

    return make


def layer(rank=16, num_a=2, shared=False, storage=None):
    """Return gate and up of some experts."""
    generator = torch.Generator().manual_seed(3)
    one = 1 if shared else EXPERTS
    weights = ExpertWeights(
        lora_a=torch.randn(SLOTS, one, num_a, rank, INPUTS, generator=generator).bfloat16(),
        lora_b=torch.randn(SLOTS, EXPERTS, 256, rank, generator=generator).bfloat16(),
        ranks=torch.full((SLOTS, EXPERTS, num_a), rank),
        scalings=torch.ones(SLOTS, EXPERTS, num_a),
        output_slices=(128, 128),
        num_experts=EXPERTS,
    )
    return quantize_weights(weights, storage) if storage else weights


class Batch:
    """What a layer of experts gets: a routing, x and y."""

    def __init__(self, backend, tokens=7, seed=0, rows="tokens", scaled=False, capacity=None):
        generator = torch.Generator().manual_seed(seed)
        scales = torch.rand(tokens, generator=generator) if scaled else None
        slots = torch.randint(-1, SLOTS, (tokens,), generator=generator)
        slots[:SLOTS] = torch.arange(SLOTS)[:tokens]  # as many active ones in each batch
        self.batch = LoRABatch(slots, SLOTS, scales)
        self.ids = torch.randint(-1, EXPERTS, (tokens, TOP_K), generator=generator)
        self.factors = torch.rand(tokens, TOP_K, generator=generator)
        plan = backend.prepare_batch(self.batch, capacity=capacity or tokens)
        self.routing = backend.prepare_experts(plan, self.ids, self.factors, EXPERTS)
        count = tokens * TOP_K if rows == "pairs" else tokens
        self.x = torch.randn(count, INPUTS).bfloat16()
        self.y = torch.zeros(tokens, TOP_K, 256).bfloat16()

    def run(self, backend, weights, **options):
        return backend.run_experts(self.x, weights, self.routing, self.y, **options)


def launches(log, batch, weights):
    """Return launches with addresses by their names; those of h and factors differ each time."""
    names = {batch.x.data_ptr(): "x", batch.y.data_ptr(): "y"}
    names |= {tensor.data_ptr(): name for name, tensor in weights.tensors.items()}
    for part, of in ((batch.routing, "pairs"), (batch.routing.tokens, "tokens")):
        if part is not None:
            tables = (part.order, part.tiles, part.singles, part.count, part.topk_ids)
            names |= {table.data_ptr(): f"table {i} of {of}" for i, table in enumerate(tables)}
            names |= {table.data_ptr(): f"scratch {i}" for i, table in enumerate(part.scratch)}
    found = []
    for made in log:
        given = [getattr(a, "base", a) for a in made.arguments]
        given = [a.data_ptr() if hasattr(a, "data_ptr") else a for a in given]
        for name, place in (
            ("h_ptr", {"shrink_kernel": 7, "expand_kernel": 0}),
            ("factors", {"expand_kernel": 6}),
        ):
            if made.name in place:
                assert given[place[made.name]] not in (0, batch.x.data_ptr(), batch.y.data_ptr())
                given[place[made.name]] = name
        found.append((made.name, made.grid, [names.get(a, a) for a in given], made.stream))
    hs = [made.arguments[7 if made.name == "shrink_kernel" else 0] for made in log[-2:]]
    assert not log or hs[0] == hs[1], "the expand reads the h that the shrink writes"
    return found


KINDS = {
    "gate and up": ({}, {}, {}),
    "down": ({"num_a": 1}, {"rows": "pairs"}, {"rows": "pairs", "weighted": True}),
    "odd rank": ({"rank": 5}, {}, {}),
    "one A for all": ({"shared": True}, {}, {"weighted": True}),
    "8 bits": ({"storage": torch.int8}, {}, {}),
    "scaled tokens": ({}, {"scaled": True}, {"weighted": True}),
    "scaled tokens alone": ({"num_a": 1}, {"scaled": True}, {}),
}


@pytest.fixture
def found_kernels(monkeypatch):
    """Return a function: fail if a call from now on takes the slow way."""

    def refuse():
        monkeypatch.setattr(
            "lora_backends.sgmv.engine.add_experts", lambda *_, **__: pytest.fail("not repeated")
        )

    return refuse


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("tokens", [1, 7, 600])
def test_a_repeated_call_launches_the_same(log, new, kind, tokens, found_kernels):
    """For another x, y and routing."""
    of_layer, of_batch, options = kind
    weights, backend, expected = layer(**of_layer), new(tma=True), []
    batches = [Batch(backend, tokens, seed, **of_batch) for seed in range(3)]
    for batch in batches:
        log.clear()
        batch.run(new(tma=True), weights, **options)
        expected.append(launches(log, batch, weights))
    batches[0].run(backend, weights, **options)
    found_kernels()
    for batch, wanted in zip(batches, expected, strict=True):
        log.clear()
        assert batch.run(backend, weights, **options) is batch.y
        assert launches(log, batch, weights) == wanted
        assert [name for name, *_ in wanted][-2:] == ["shrink_kernel", "expand_kernel"]


def test_a_repeated_call_serves_other_rows_where_the_kernels_are_the_same(log, new, found_kernels):
    weights, backend = layer(), new()
    first = Batch(backend, 600)
    first.run(backend, weights)
    others = [Batch(backend, tokens, 1) for tokens in (601, 640, 700)]
    expected = []
    for batch in others:
        log.clear()
        batch.run(new(), weights)
        expected.append(launches(log, batch, weights))
    found_kernels()
    for batch, wanted in zip(others, expected, strict=True):
        log.clear()
        batch.run(backend, weights)
        assert launches(log, batch, weights) == wanted
    assert len({grid for made in expected for _, grid, *_ in made}) > 2


def test_a_descriptor_keeps_no_layer_alive(log, new):
    weights, backend = layer(), new(tma=True)
    batch, found = Batch(backend, 600), []
    for _ in range(2):
        log.clear()
        batch.run(backend, weights)
        found += [a for a in log[1].arguments if hasattr(a, "block_shape")]
    first, second = found
    assert first.block_shape == second.block_shape
    assert first.base.data_ptr() == second.base.data_ptr() == weights.lora_b.data_ptr()
    alive = [weakref.ref(tensor) for tensor in (weights.lora_a, weights.lora_b, batch.x)]
    log.clear()
    del weights, batch, found, first, second
    gc.collect()
    assert len(backend.routed_calls) and not any(reference() is not None for reference in alive)


def test_calls_with_other_kernels_are_kept_beside_each_other(log, new, found_kernels):
    weights, backend = layer(), new()
    batches = [Batch(backend, tokens) for tokens in (1, 7, 600, 5000)]
    for _ in range(2):
        for batch in batches:
            batch.run(backend, weights)
    assert len(backend.routed_calls) == 1
    found_kernels()
    for batch in batches:
        log.clear()
        batch.run(backend, weights)
        assert len(log) == 2


def test_the_oldest_kernels_go(log, new, monkeypatch):
    monkeypatch.setattr(cached, "MOST_SIZES", 2)
    weights, backend = layer(), new()
    batches = [Batch(backend, tokens) for tokens in (1, 600, 5000)]
    for batch in batches:
        batch.run(backend, weights)
    ((entry,),) = backend.routed_calls._calls.values()
    assert len(entry.call._pairs) == 2
    assert entry.call.run(batches[2].x, weights, batches[2].routing, batches[2].y)
    assert not entry.call.run(batches[0].x, weights, batches[0].routing, batches[0].y)


def hit(backend, batch, weights, x=None, y=None, options=("tokens", False, False), **changes):
    x, y = batch.x if x is None else x, batch.y if y is None else y
    given = changes.get("routing", batch.routing)
    return backend.routed_calls.find(backend, x, weights, given, y, options) is not None


def test_other_strides_dtypes_and_alignments_are_other_calls(log, new):
    weights, backend = layer(), new()
    batch = Batch(backend)
    batch.run(backend, weights)
    x, y = batch.x, batch.y
    assert hit(backend, batch, weights) and hit(backend, batch, weights, x.clone(), y.clone())
    wide = torch.zeros(7, TOP_K, 300).bfloat16()
    for other in (
        {"x": x.float()},
        {"x": torch.zeros(7, 2 * INPUTS).bfloat16()[:, :INPUTS]},
        {"x": torch.zeros(7 * INPUTS + 1).bfloat16()[1:].view(7, INPUTS)},
        {"y": y.float()},
        {"y": wide[..., :256]},
        {"y": torch.zeros(7 * TOP_K * 256 + 1).bfloat16()[1:].view(7, TOP_K, 256)},
        {"options": ("tokens", True, False)},
        {"options": ("tokens", False, True)},
        {"routing": Batch(backend, scaled=True).routing},
    ):
        assert not hit(backend, batch, weights, **other)
    assert not hit(backend, batch, layer())
    assert not hit(new(), batch, weights)


def test_a_call_of_one_token_with_odd_strides_serves_no_others(log, new):
    """Axes of length 1 may have any stride, which the stored arguments would hold."""
    weights, backend = layer(), new()
    batch = Batch(backend, 1)
    for x, y in (
        (batch.x.as_strided((1, INPUTS), (7, 1)), batch.y),
        (batch.x, batch.y.as_strided((1, TOP_K, 256), (13, 256, 1))),
    ):
        assert x.is_contiguous() and y.is_contiguous()
        backend.run_experts(x, weights, batch.routing, y)
        assert len(backend.routed_calls) == 0
    batch.run(backend, weights)
    assert len(backend.routed_calls) == 1


def test_odd_strides_of_one_token_are_not_added_to_a_call_of_more(log, new):
    """A call of two tokens may have the same kernels as that of one."""
    weights, backend = layer(), new()
    Batch(backend, 600).run(backend, weights)
    one, two = Batch(backend, 1), Batch(backend, 2)
    x = torch.zeros(1, INPUTS).bfloat16().as_strided((1, INPUTS), (7, 1))
    y = torch.zeros(1, TOP_K, 256).bfloat16().as_strided((1, TOP_K, 256), (13, 256, 1))
    backend.run_experts(x, weights, one.routing, y)
    found = []
    for engine in (backend, new()):
        log.clear()
        two.run(engine, weights)
        found.append(launches(log, two, weights))
    assert found[0] == found[1]


WRONG = {
    "x of fewer rows": lambda b: {"x": b.x[:6]},
    "x of another width": lambda b: {"x": b.x[:, :8]},
    "x of another dtype": lambda b: {"x": b.x.half()},
    "x on another device": lambda b: {"x": b.x.to("meta")},
    "x without memory": lambda b: {"x": b.x.to_sparse()},
    "a lazy negation": lambda b: {"x": torch._neg_view(b.x)},
    "no x": lambda b: {"x": None},
    "a scalar": lambda b: {"x": torch.zeros(())},
    "y of fewer rows": lambda b: {"base_output": b.y[:6]},
    "y a list": lambda b: {"base_output": [b.y]},
    "y of two axes": lambda b: {"base_output": b.y.view(14, 256)},
    "y over x": lambda b: {"x": b.y.view(-1)[: 7 * INPUTS].view(7, INPUTS)},
    "no routing": lambda b: {"routing": None},
    "no weights": lambda b: {"weights": None},
    "y over B": lambda b: {"base_output": b.b.view(-1)[: b.y.numel()].view(b.y.shape)},
    "too many tokens": lambda b: {"routing": b.grown()},
    "an option": lambda b: {"rows": "columns"},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_call_is_refused_after_a_right_one(log, new, wrong):
    weights, backend = layer(), new()
    batch = Batch(backend, capacity=16)

    def grown():
        """Return the routing after its plan was refilled with more tokens."""
        backend.prepare_batch(LoRABatch([0] * 8, SLOTS), out=batch.routing.plan)
        return batch.routing

    batch.b, batch.grown = weights.lora_b, grown
    right = {"x": batch.x, "weights": weights, "routing": batch.routing, "base_output": batch.y}
    for _ in range(2):
        backend.run_experts(**right)
    given = right | wrong(batch)
    log.clear()
    with pytest.raises(InvalidInputError):
        backend.run_experts(**given)
    assert not log


def test_a_repeated_call_follows_its_plan(log, new, found_kernels):
    """Pairs are sorted again after a refill."""
    weights, backend = layer(), new()
    batch = Batch(backend)
    for _ in range(2):
        batch.run(backend, weights)
    backend.prepare_batch(Batch(backend, 7, 1).batch, out=batch.routing.plan)
    found_kernels()
    log.clear()
    for _ in range(2):
        batch.run(backend, weights)
    names = [made.name for made in log]
    assert names == ["compare_kernel", *["shrink_kernel", "expand_kernel"] * 2]


def test_launches_that_are_noted_are_not_made(log, new):
    weights, backend = layer(), new()
    batch = Batch(backend)
    batch.run(backend, weights)
    log.clear()
    with backend.recording() as recorded:
        batch.run(backend, weights)
    assert not log and len(recorded.kernels) == 2


def test_pairs_that_were_only_noted_are_sorted_later(log, new):
    """A plan is refilled, and the first call after it is noted."""
    weights, backend = layer(), new()
    batch = Batch(backend)
    for _ in range(2):
        batch.run(backend, weights)
    backend.prepare_batch(Batch(backend, 7, 1).batch, out=batch.routing.plan)
    log.clear()
    with backend.recording():
        batch.run(backend, weights)
    assert not log
    for _ in range(2):
        batch.run(backend, weights)
    names = [made.name for made in log]
    assert names == ["compare_kernel", *["shrink_kernel", "expand_kernel"] * 2]


@pytest.mark.parametrize("repeats", [False, True])
def test_memory_that_a_graph_clears_serves_no_other_calls(log, new, monkeypatch, repeats):
    """Tokens by slot need zeros, which are there only after a replay."""
    weights, backend = layer(shared=True), new()
    if repeats:
        Batch(backend).run(backend, weights)
    batch = Batch(backend)
    with monkeypatch.context() as captured:
        captured.setattr(routing, "is_capturing", lambda device: True)
        batch.run(backend, weights)
    assert batch.routing.tokens is None
    batch.run(backend, weights)
    assert (tokens := batch.routing.tokens) is not None
    batch.run(backend, weights)
    assert batch.routing.tokens is tokens


@pytest.mark.parametrize("capturing", [False, True])
def test_a_graph_has_h_of_its_own_and_keeps_the_plan(log, new, monkeypatch, current, capturing):
    weights, backend = layer(), new()
    batch = Batch(backend)
    batch.run(backend, weights)
    current.stream, made, make = 5, [], call_cache.Scratch.new
    monkeypatch.setattr(cached, "is_capturing", lambda device: capturing)
    monkeypatch.setattr(
        call_cache.Scratch, "new", lambda *given: made.append(make(*given)) or made[-1]
    )
    log.clear()
    for _ in range(2):
        batch.run(backend, weights)
    assert batch.routing.plan.is_captured is capturing
    assert [launch.arguments[7] for launch in log[::2]] == [each.address for each in made]
    assert all(launch.stream == 5 for launch in log)


def test_a_layer_whose_tables_are_copied_is_not_stored(log, new):
    weights, backend = layer(), new()
    spread = torch.stack([weights.scalings, weights.scalings], -1)[..., 0]
    batch = Batch(backend)
    batch.run(backend, dataclasses.replace(weights, scalings=spread))
    assert len(backend.routed_calls) == 0


def test_a_layer_that_has_moved_is_another(log, new):
    weights, backend = layer(), new()
    batch = Batch(backend)
    batch.run(backend, weights)
    assert hit(backend, batch, weights)
    weights.lora_b.data = weights.lora_b.clone()
    assert not hit(backend, batch, weights)
    log.clear()
    for _ in range(2):
        batch.run(backend, weights)
    assert [made.arguments[1] for made in log[1::2]] == [weights.lora_b.data_ptr()] * 2


def test_a_call_that_autograd_records_is_not_repeated(log, new):
    weights, backend = layer(), new()
    batch = Batch(backend)
    batch.run(backend, weights)
    batch.x.requires_grad_()
    assert not hit(backend, batch, weights)
    with torch.no_grad():
        assert hit(backend, batch, weights)
    batch.x.requires_grad_(False)
    batch.routing.differentiable_weights = batch.factors.requires_grad_()
    assert not hit(backend, batch, weights)


def test_a_subclass_that_adds_to_run_experts_is_asked_at_every_call(log, new):
    class Counting(type(new())):
        calls = 0

        def run_experts(self, *args, **options):
            self.calls += 1
            return super().run_experts(*args, **options)

    backend, weights = Counting("cpu", tiles="rules"), layer()
    batch = Batch(backend)
    for _ in range(3):
        batch.run(backend, weights)
    assert backend.calls == 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_have_no_addresses_of_the_original(log, new, copied):
    weights, backend = layer(), new()
    batch = Batch(backend)
    batch.run(backend, weights)
    assert batch.routing.chosen and copied(batch.routing).chosen is None
    assert len(copied(backend.routed_calls)) == 0


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(
    ("tokens", "kernels"),
    [(1, ["alone_kernel"]), (7, ["compare_kernel"]), (600, ["count_kernel", "scatter_kernel"])],
)
def test_a_repeated_sort_launches_the_same(log, new, monkeypatch, tokens, kernels, mapped):
    """For another choice, at other addresses, and another plan."""
    backend = new()
    batches = [Batch(backend, tokens, seed) for seed in range(4)]
    made = batches[0].routing
    expert_map = torch.arange(EXPERTS, dtype=torch.int32) if mapped else None

    def sort(batch, ids=None):
        log.clear()
        ids = batch.ids.int() if ids is None else ids
        given = (batch.routing.plan, ids, batch.factors, EXPERTS, expert_map)
        assert backend.prepare_experts(*given, out=made) is made
        assert made.plan is batch.routing.plan
        return [
            (launch.name, launch.grid, launch.stream, launch.arguments[:4], launch.arguments[4:])
            for launch in log
        ], [each.data_ptr() for each in (ids, batch.factors, expert_map if mapped else ids)]

    for batch in batches[:2]:
        sort(batch)
    slow = routing._launches
    monkeypatch.setattr(routing, "_launches", lambda *_: pytest.fail("not repeated"))
    repeated, given = sort(batches[2])
    slots = batches[2].routing.plan.token_slots().data_ptr()
    assert repeated[0][3] == [*given, slots]
    monkeypatch.setattr(routing, "_launches", slow)
    made.sorters = None
    expected, given = sort(batches[2])
    assert expected[0][3] == [*given, slots]
    assert [name for name, *_ in repeated] == [name for name, *_ in expected] == kernels
    for first, second in zip(repeated, expected, strict=True):
        assert (*first[:3], first[4]) == (*second[:3], second[4])
    assert repeated[1:] == expected[1:]


def test_a_choice_of_another_kind_is_sorted_in_full(log, new):
    backend = new()
    batch = Batch(backend)
    made, plan = batch.routing, batch.routing.plan
    for _ in range(2):
        backend.prepare_experts(plan, batch.ids, batch.factors, EXPERTS, out=made)
    unaligned = torch.zeros(15, dtype=torch.int64)[1:].view(7, TOP_K)
    strided = torch.zeros(7, 2 * TOP_K, dtype=torch.int64)[:, ::2]
    for ids in (batch.ids.int(), strided, unaligned):
        log.clear()
        backend.prepare_experts(plan, ids, batch.factors, EXPERTS, out=made)
        ((_, _, arguments, _, _),) = log
        assert arguments[0] == ids.data_ptr()
        assert arguments[arguments.index(batch.ids.numel()) :][1:3] == [*ids.stride()]
    log.clear()
    with backend.recording() as recorded:
        backend.prepare_experts(plan, batch.ids, batch.factors, EXPERTS, out=made)
    assert not log and len(recorded.kernels) == 1


def test_a_copied_routing_sorts_into_its_own_memory(log, new):
    backend = new()
    batch = Batch(backend)
    for _ in range(2):
        backend.prepare_experts(
            batch.routing.plan, batch.ids, batch.factors, EXPERTS, out=batch.routing
        )
    copied = copy.deepcopy(batch.routing)
    log.clear()
    backend.prepare_experts(copied.plan, batch.ids, batch.factors, EXPERTS, out=copied)
    ((_, _, arguments, _, _),) = log
    assert copied.order.data_ptr() in arguments
    assert batch.routing.order.data_ptr() not in arguments


@pytest.fixture
def capture(monkeypatch, current):
    """Return a function that says whether a graph captures the current stream from now on."""

    def set_capture(on):
        for module in (cached, launch, routing):
            monkeypatch.setattr(module, "is_capturing", lambda device: on)

    current.stream = 5
    return set_capture


def settled(log):
    """Return, for each shrink, whether it reads the routing before it waits."""
    found = [made.arguments[-2].SETTLED for made in log if made.name == "shrink_kernel"]
    log.clear()
    return found


@pytest.mark.parametrize("tokens", [1, 7, 600])
def test_later_sites_read_the_routing_before_they_wait(log, new, tokens):
    backend, up, down = new(programmatic=True), layer(), layer(rank=5)
    batch = Batch(backend, tokens)
    for _ in range(2):  # launched in full, and from the cache
        backend.prepare_experts(
            batch.routing.plan, batch.ids, batch.factors, EXPERTS, out=batch.routing
        )
        for weights in (up, down, up):
            batch.run(backend, weights)
        assert settled(log) == [False, True, True]
    assert len(batch.routing.chosen) == 3
    backend.prepare_batch(Batch(backend, tokens, 1).batch, out=batch.routing.plan)
    for weights in (down, up):
        batch.run(backend, weights)
    assert settled(log) == [False, True]
    for each in (copy.deepcopy(batch.routing), pickle.loads(pickle.dumps(batch.routing))):
        assert each.settled is None


def test_each_of_several_routings_is_settled_for_itself(log, new):
    backend, weights = new(programmatic=True), layer()
    first, second = Batch(backend), Batch(backend)
    for batch in (first, second, first, second):
        batch.run(backend, weights)
    assert settled(log) == [False, False, True, True]


def test_without_early_launches_there_is_one_shrink(log, new):
    backend, weights = new(), layer()
    batch = Batch(backend)
    for _ in range(3):
        batch.run(backend, weights)
    assert settled(log) == [False] * 3
    assert len(batch.routing.chosen) == 1 and batch.routing.settled is None


def test_tokens_sorted_before_each_call_and_sums_wait(log, new):
    backend, weights, shared = new(programmatic=True), layer(), layer(shared=True)
    batch, sums = Batch(backend), torch.zeros(7, 256).bfloat16()
    for _ in range(3):
        batch.run(backend, shared)
        backend.run_experts(batch.x, weights, batch.routing, sums, reduce=True)
    assert settled(log) == [False] * 6
    batch.run(backend, weights)
    assert settled(log) == [True]


def test_a_sum_settles_the_routing_for_the_next_site(log, new):
    backend, weights = new(programmatic=True), layer()
    batch, sums = Batch(backend), torch.zeros(7, 256).bfloat16()
    backend.run_experts(batch.x, weights, batch.routing, sums, reduce=True)
    batch.run(backend, weights)
    assert settled(log) == [False, True]


def test_a_routing_is_settled_for_one_stream_capture_or_record(log, new, current, capture):
    backend, weights, later = new(programmatic=True), layer(), layer(rank=5)
    batch = Batch(backend)
    with backend.recording() as recorded:
        for each in (weights, later):
            batch.run(backend, each)
    noted = {
        kernel.constants["SITE"].MAX_RANK: kernel.constants["SITE"].SETTLED
        for kernel, _ in recorded.kernels
        if kernel.kernel.__name__ == "shrink_kernel"
    }
    assert noted == {16: False, 5: True}
    for stream, capturing in ((5, False), (5, True), (5, False), (6, False), (6, False)):
        current.stream = stream
        capture(capturing)
        batch.run(backend, weights)
    assert settled(log) == [False, False, False, False, True]


def test_a_capture_takes_a_shrink_that_is_compiled(log, new, capture):
    """The warm-up may be one call, but the one that a graph captures a later one."""
    backend, weights = new(programmatic=True), layer()
    batch = Batch(backend)
    for capturing in (False, True, True, False, False, True, True):
        capture(capturing)
        batch.run(backend, weights)
    # the third call alone has a settled routing and no compiled kernel for it
    assert settled(log) == [False, False, False, False, True, False, True]
