"""A repeated call launches what the first one launched, with its own addresses.

The launches are recorded: nothing is compiled or run.
"""

import copy
import gc
import pickle
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from helpers.engines import ENGINES
from helpers.noted_launches import noted_launches
from helpers.small_layers import small_weights

from lora_backends import InvalidInputError, LoRABatch, LoRAWeights, UnsupportedInputError
from lora_backends.sgmv import engine, launch
from lora_backends.sgmv.launching import call_cache
from lora_backends.sgmv.launching import kernel as launching
from lora_backends.sgmv.tiles.sizes import ExpandTiles, ShrinkTiles, TileConfig
from lora_backends.sgmv.tiles.source import fixed_source

pytestmark = pytest.mark.skipif(
    launching.INTERPRETED, reason="the interpreter has no compiled kernels to keep"
)
MIXED, SKEWED, NOBODY = [3, -1, 0, 1, 0, 2, 3], [2] * 7, [-1] * 7
CACHES = [launch._kernels, launch.gather_kernel, launching.specialized]


@pytest.fixture
def current():
    """Return what is current on the device: its stream."""
    return SimpleNamespace(stream=0)


@pytest.fixture
def log(monkeypatch, current):
    """Return the launches, in order."""
    with noted_launches(monkeypatch, current, CACHES, [call_cache]) as launches:
        yield launches


@pytest.fixture(params=ENGINES)
def backend(request):
    return ENGINES[request.param]("cpu", tiles="rules")


@pytest.fixture(params=["run_linear", "run_embedding"])
def operation(request):
    return request.param


def first_argument(operation):
    return torch.randn(7, 10) if operation == "run_linear" else torch.randint(10, (7,))


def find(plan, operation, backend, x, weights, y):
    return plan.call_cache.find(operation, backend, x, weights, y, plan)


def repeat(backend, operation, x, weights, plan, y):
    """Make a call as dispatch repeats it; return whether it was made."""
    cached = find(plan, operation, backend, x, weights, y)
    return cached is not None and cached.run(x, weights, plan, y)


def call(backend, operation, x, weights, plan, y):
    """Make a call as dispatch makes it, after the checks."""
    if not repeat(backend, operation, x, weights, plan, y):
        getattr(backend, operation)(x, weights, plan, y)


def launches(log, x, y):
    """Return the name, the grid and the arguments of both launches, h's address by its name."""
    if not log:
        return []
    first, second = log
    assert first.name in ("shrink_kernel", "gather_kernel") and second.name == "expand_kernel"
    h = second.arguments[0]
    assert h in first.arguments and h not in (x.data_ptr(), y.data_ptr())
    assert first.arguments[0] == x.data_ptr() and second.arguments[2] == y.data_ptr()
    return [(made.name, made.grid, ["h" if a == h else a for a in made.arguments]) for made in log]


def made(log, backend, operation, x, weights, plan, y):
    """Return the launches of a call of the engine."""
    log.clear()
    getattr(backend, operation)(x, weights, plan, y)
    return launches(log, x, y)


def repeated(log, backend, operation, x, weights, plan, y):
    """Return the launches of a cached call, which must be there."""
    log.clear()
    assert repeat(backend, operation, x, weights, plan, y)
    return launches(log, x, y)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("slots", [MIXED, SKEWED])
def test_a_repeated_call_launches_the_same(log, backend, operation, bias, slots):
    weights, plan = small_weights(bias=bias), backend.prepare_batch(LoRABatch(slots, 4))
    x, y = first_argument(operation), torch.zeros(7, 14)
    first = made(log, backend, operation, x, weights, plan, y)
    assert first
    for _ in range(2):
        assert repeated(log, backend, operation, x, weights, plan, y) == first


def test_the_interface_makes_the_cached_launches(log, backend, operation, monkeypatch):
    """Nothing is chosen anew, whatever the way in which a call is written."""
    weights, plan = small_weights(), backend.prepare_batch(LoRABatch(MIXED, 4))
    x, y = first_argument(operation), torch.zeros(7, 14)
    first = made(log, backend, operation, x, weights, plan, y)
    monkeypatch.setattr(launch, "kernels_of", lambda *_: pytest.fail("kernels were chosen anew"))
    run = getattr(backend, operation)
    log.clear()
    assert run(x, weights, plan, y) is y
    assert launches(log, x, y) == first
    log.clear()
    name = "x" if operation == "run_linear" else "token_ids"
    with torch.no_grad():
        run(**{name: x}, weights=weights, plan=plan, base_output=y)
    assert launches(log, x, y) == first
    log.clear()
    started = run(x, weights, plan)
    assert len(launches(log, x, started)) == 2
    if operation == "run_linear":
        log.clear()
        backend.run_qkv(x, weights, plan, y)
        assert launches(log, x, y) == first


CALLS = {
    "run_linear": [
        (torch.randn(7, 10), torch.zeros(7, 14)),
        (torch.randn(7, 30)[:, 3:13], torch.zeros(7, 40)[:, 8:22]),  # strided, unaligned
        (torch.randn(7, 10), torch.zeros(7, 14, dtype=torch.bfloat16)),
    ],
    "run_embedding": [
        (torch.arange(7), torch.zeros(7, 14)),
        (torch.arange(9)[2:], torch.zeros(7, 40)[:, 8:22]),
        (torch.arange(10)[3:], torch.zeros(7, 14)),  # unaligned
        (torch.arange(7).int(), torch.zeros(7, 14, dtype=torch.bfloat16)),
    ],
}


@pytest.mark.parametrize("bias", [False, True])
def test_a_repeated_call_takes_its_own_x_and_y(log, backend, operation, bias):
    weights, batch = small_weights(bias=bias), LoRABatch(MIXED, 4)
    plan = backend.prepare_batch(batch)
    made(log, backend, operation, first_argument(operation), weights, plan, torch.zeros(7, 14))
    for x, y in CALLS[operation]:
        first = made(log, backend, operation, x, weights, plan, y)
        assert repeated(log, backend, operation, x, weights, plan, y) == first
        other = backend.prepare_batch(batch)
        expected = made(log, backend, operation, x, weights, other, y)
        named = {tensor.data_ptr(): "x or y" for tensor in (x, y)}
        assert blind(first, plan, named) == blind(expected, other, named)


def blind(found, plan, named):
    """Return launches with a plan's tables, and other addresses, by their names."""
    tables = {table.data_ptr(): f"table {i}" for i, table in enumerate(plan.tables())}
    named = {**named, **tables}
    return [(name, grid, [named.get(a, a) for a in given]) for name, grid, given in found]


def test_a_repeated_call_with_other_values_launches_at_their_addresses(log, backend, operation):
    weights, plan = small_weights(), backend.prepare_batch(LoRABatch(MIXED, 4))
    x, y = first_argument(operation), torch.zeros(7, 14)
    first = made(log, backend, operation, x, weights, plan, y)
    kept = [x, y]  # so that no address is given twice
    for _ in range(3):
        x, y = first_argument(operation), torch.zeros(7, 14)
        kept += [x, y]
        again = repeated(log, backend, operation, x, weights, plan, y)
        for (_, _, given), (_, _, before), place in zip(again, first, (0, 2), strict=True):
            pairs = enumerate(zip(given, before, strict=True))
            assert [i for i, (now, then) in pairs if now != then] == [place]


@pytest.mark.parametrize("first", [40, 64])
def test_a_call_serves_other_rows_of_the_same_power_of_two(log, backend, operation, first):
    weights, kept = small_weights(max_rank=16), []
    plan = backend.prepare_batch(LoRABatch([3, 0] * 35, 4), capacity=70)
    backend.prepare_batch(LoRABatch([3, 0] * 20, 4), out=plan)

    def of_rows(count):
        ids = torch.arange(count) % 10
        kept.append(torch.randn(count, 10) if operation == "run_linear" else ids)
        kept.append(torch.zeros(count, 14))
        return kept[-2:]

    x, y = of_rows(first)
    made(log, backend, operation, x, weights, plan, y)
    for count in (51, 64, 40):
        x, y = of_rows(count)
        again = repeated(log, backend, operation, x, weights, plan, y)
        slow = copy.deepcopy(plan)  # has no cached calls
        expected = made(log, backend, operation, x, weights, slow, y)
        assert blind(again, plan, {}) == blind(expected, slow, {})
    for count in (32, 39, 65, 71):  # another power of two, fewer than the plan's, beyond its room
        x, y = of_rows(count)
        assert not find(plan, operation, backend, x, weights, y)
    x, y = of_rows(50)
    assert not find(plan, operation, backend, x, weights, y[:49]), "rows that differ"
    backend.prepare_batch(LoRABatch([3, 0] * 22, 4), out=plan)
    assert not find(plan, operation, backend, x[:41], weights, y[:41]), "fewer than a refill's"


def test_a_repeated_call_is_noted_where_launches_are_not_made(log, backend, operation):
    weights, plan = small_weights(), backend.prepare_batch(LoRABatch(MIXED, 4))
    x, y = first_argument(operation), torch.zeros(7, 14)
    made(log, backend, operation, x, weights, plan, y)
    log.clear()
    with backend.recording() as noted:
        call(backend, operation, x, weights, plan, y)
    assert not log and len(noted.kernels) == 2
    with backend.recording() as noted:
        backend.forward_with_h(operation, x, weights, plan, y)
    assert not log and len(noted.kernels) == 2


def test_a_stride_that_triton_compiles_in_is_that_of_one_number_of_rows(log, backend, operation):
    weights = small_weights(max_rank=3)
    plan = backend.prepare_batch(LoRABatch([3, 0] * 20, 4), capacity=70)
    x = torch.randn(64, 10) if operation == "run_linear" else torch.arange(64) % 10
    y = torch.zeros(64, 14)
    made(log, backend, operation, x, weights, plan, y)
    assert find(plan, operation, backend, x, weights, y)
    assert not find(plan, operation, backend, x[:60], weights, y[:60])


def test_one_row_of_any_stride_serves_no_other_rows(log, backend):
    weights, plan = small_weights(max_rank=16), backend.prepare_batch(LoRABatch([3], 4), capacity=2)
    x, y = torch.randn(1, 10), torch.zeros(2, 14)
    strange = torch.zeros(40).as_strided((1, 14), (16, 1))
    assert strange.is_contiguous()
    made(log, backend, "run_linear", x, weights, plan, strange)
    stored = find(plan, "run_linear", backend, x, weights, strange)
    assert stored and find(plan, "run_linear", backend, x, weights, y[:1]) is stored


def test_other_strides_dtypes_and_alignments_are_other_calls(log, backend):
    weights, plan = small_weights(), backend.prepare_batch(LoRABatch(MIXED, 4))
    x, y = torch.randn(7, 10), torch.zeros(7, 14)
    made(log, backend, "run_linear", x, weights, plan, y)
    assert find(plan, "run_linear", backend, x.clone(), weights, y.clone())
    wide, ids = torch.zeros(7, 48), torch.arange(7)
    for other_x, other_y in (
        (torch.randn(7, 30)[:, :10], y),
        (x.bfloat16(), y),
        (torch.randn(71)[1:].view(7, 10), y),
        (x, wide[:, :14]),
        (x, y.bfloat16()),
        (x, torch.zeros(99)[1:].view(7, 14)),
    ):
        assert not find(plan, "run_linear", backend, other_x, weights, other_y)
    made(log, backend, "run_embedding", ids, weights, plan, y)
    assert find(plan, "run_embedding", backend, ids.clone(), weights, y)
    for other_ids in (ids.int(), torch.arange(14)[::2], torch.arange(8)[1:]):
        assert not find(plan, "run_embedding", backend, other_ids, weights, y)


@pytest.mark.parametrize("offset", [0, 3], ids=["aligned", "unaligned"])
def test_every_kind_of_call_is_stored_once(log, backend, offset, monkeypatch):
    stored, of = [], call_cache.CachedLaunches.of
    monkeypatch.setattr(call_cache.CachedLaunches, "of", lambda *a: stored.append(a) or of(*a))
    weights, plan = small_weights(), backend.prepare_batch(LoRABatch(MIXED, 4))
    x = torch.zeros(200)[offset:].as_strided((7, 10), (10, 1))
    wide = torch.zeros(7, 40)[:, 8 + offset : 22 + offset]
    for _ in range(3):
        for y in (torch.zeros(7, 14), wide, torch.zeros(7, 14)):
            call(backend, "run_linear", x, weights, plan, y)
    assert len(log) == 18 and len(stored) == 2


WRONG = {
    "x of fewer rows": lambda x, w, p, y: (x[:6], w, p, y),
    "x of another width": lambda x, w, p, y: (x[:, :8], w, p, y),
    "x of another dtype": lambda x, w, p, y: (x.bfloat16(), w, p, y),
    "x on another device": lambda x, w, p, y: (x.to("meta"), w, p, y),
    "x not contiguous": lambda x, w, p, y: (x.T.contiguous().T, w, p, y),
    "x of more axes": lambda x, w, p, y: (x[:, None], w, p, y),
    "no x": lambda x, w, p, y: (None, w, p, y),
    "y of fewer rows": lambda x, w, p, y: (x, w, p, y[:6]),
    "y of another device": lambda x, w, p, y: (x, w, p, y.to("meta")),
    "y of more axes": lambda x, w, p, y: (x, w, p, y[:, None]),
    "x and y of more axes": lambda x, w, p, y: (x[:, None], w, p, y[:, None]),
    "y a list": lambda x, w, p, y: (x, w, p, [y]),
    "no weights": lambda x, w, p, y: (x, None, p, y),
    "no plan": lambda x, w, p, y: (x, w, None, y),
    "x without memory": lambda x, w, p, y: (x.to_sparse(), w, p, y),
    "a plan of other slots": lambda x, w, p, y: (x, w, copy.copy(p), y),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_call_is_refused_after_a_right_one(log, backend, wrong):
    weights, plan = small_weights(), backend.prepare_batch(LoRABatch(MIXED, 4))
    x, y = torch.randn(7, 10), torch.zeros(7, 14)
    made(log, backend, "run_linear", x, weights, plan, y)
    repeated(log, backend, "run_linear", x, weights, plan, y)
    arguments = wrong(x, weights, plan, y)
    if arguments[2] not in (None, plan):
        arguments[2].num_slots = 5
    log.clear()
    with pytest.raises((InvalidInputError, UnsupportedInputError)):
        backend.run_linear(*arguments)
    assert not log


@pytest.mark.parametrize("shift", [0, 8, 16])
def test_a_repeated_call_may_not_write_over_its_x(log, backend, shift):
    weights = small_weights(slices=(4, 4, 4))
    plan = backend.prepare_batch(LoRABatch(MIXED, 4))
    x, y = torch.randn(7, 10), torch.zeros(7, 12)
    backend.run_linear(x, weights, plan, y)
    buffer = torch.zeros(400)
    x = buffer.as_strided((7, 10), (10, 1), 64)
    with pytest.raises(InvalidInputError, match="overlap"):
        backend.run_linear(x, weights, plan, buffer.as_strided((7, 12), (12, 1), shift))
    backend.run_linear(x, weights, plan, buffer.as_strided((7, 12), (12, 1), 64 + 72))
    assert len(log) == 4


def test_a_subclass_that_adds_to_run_linear_is_asked_at_every_call(log, backend):
    class Counting(type(backend)):
        calls = 0

        def run_linear(self, x, weights, plan, base_output=None):
            self.calls += 1
            return super().run_linear(x, weights, plan, base_output)

    counting = Counting("cpu", tiles="rules")
    weights, plan = small_weights(), counting.prepare_batch(LoRABatch(MIXED, 4))
    x, y = torch.randn(7, 10), torch.zeros(7, 14)
    for _ in range(3):
        counting.run_linear(x, weights, plan, y)
    assert counting.calls == 3 and len(log) == 6


def test_the_grid_follows_a_refilled_plan(log, backend, operation):
    weights = small_weights()
    x = torch.randn(96, 10) if operation == "run_linear" else torch.randint(10, (96,))
    y, plan = torch.zeros(96, 14), backend.prepare_batch(LoRABatch([3] * 96, 4))
    made(log, backend, operation, x, weights, plan, y)
    sizes = set()
    for slots in ([3] * 96, [0, 1, 2, 3] * 24, [-1] * 95 + [2], [1] * 40 + [3] * 56):
        backend.prepare_batch(LoRABatch(slots, 4), out=plan)
        again = repeated(log, backend, operation, x, weights, plan, y)
        slow = copy.deepcopy(plan)  # has no cached calls
        first = made(log, backend, operation, x, weights, slow, y)
        assert blind(again, plan, {}) == blind(first, slow, {})
        sizes.add(again[0][1])
    assert len(sizes) >= 3


def test_a_refill_of_the_same_sizes_keeps_the_key_of_stored_calls(backend):
    plan = backend.prepare_batch(LoRABatch(MIXED, 4), capacity=96)
    key = plan.call_cache.key
    backend.prepare_batch(LoRABatch(MIXED[::-1], 4), out=plan)
    assert plan.call_cache.key is key, "`Repeat` compares it by identity"
    backend.prepare_batch(LoRABatch([3] * 96, 4), out=plan)
    assert plan.call_cache.key != key


def test_a_capture_launches_all_rows_that_a_refill_can_use(
    log, backend, operation, current, monkeypatch
):
    weights = small_weights()
    x = torch.randn(96, 10) if operation == "run_linear" else torch.randint(10, (96,))
    y, plan = torch.zeros(96, 14), backend.prepare_batch(LoRABatch([3] * 96, 4))
    eager = made(log, backend, operation, x, weights, plan, y)
    current.stream = 7
    for module in (engine, call_cache):
        monkeypatch.setattr(module, "is_capturing", lambda device: True)
    captured = repeated(log, backend, operation, x, weights, plan, y)
    programs = [grid[0] // plan.grid_rows(False, plan.num_tokens) for _, grid, _ in eager]
    rows = plan.grid_rows(True, plan.num_tokens)
    assert rows > plan.grid_rows(False, plan.num_tokens)
    assert [grid for _, grid, _ in captured] == [(rows * p, 1, 1) for p in programs]
    assert captured == made(log, backend, operation, x, weights, plan, y)
    backend.prepare_batch(LoRABatch([-1] * 96, 4), out=plan)
    assert repeated(log, backend, operation, x, weights, plan, y) == captured


def test_a_batch_without_adapters_launches_once_what_a_capture_may_need(log, backend, operation):
    weights, plan = small_weights(), backend.prepare_batch(LoRABatch(NOBODY, 4))
    x, y = first_argument(operation), torch.zeros(7, 14)
    assert len(made(log, backend, operation, x, weights, plan, y)) == 2
    assert repeated(log, backend, operation, x, weights, plan, y) == []
    backend.prepare_batch(LoRABatch(MIXED, 4), out=plan)
    assert len(repeated(log, backend, operation, x, weights, plan, y)) == 2


@pytest.mark.parametrize("name", ["lora_a", "lora_b", "ranks", "scalings", "bias"])
def test_a_layer_that_has_moved_is_launched_anew(log, backend, operation, name):
    weights, plan = small_weights(bias=True), backend.prepare_batch(LoRABatch(MIXED, 4))
    x, y = first_argument(operation), torch.zeros(7, 14)
    made(log, backend, operation, x, weights, plan, y)
    tensor = getattr(weights, name)
    before = tensor.data_ptr()
    tensor.data = tensor.clone()
    assert tensor.data_ptr() != before
    log.clear()
    assert not repeat(backend, operation, x, weights, plan, y) and not log
    for how in (made, repeated):
        found = how(log, backend, operation, x, weights, plan, y)
        addresses = [address for *_, given in found for address in given]
        assert tensor.data_ptr() in addresses and before not in addresses


def test_a_layer_with_strided_tables_is_never_cached(log, backend, operation):
    """Its kernels read copies, which live as long as the call."""
    whole = small_weights()
    for name in ("ranks", "scalings"):
        tables = {"ranks": whole.ranks, "scalings": whole.scalings}
        tables[name] = tables[name].repeat_interleave(2, 1)[:, ::2]
        weights = LoRAWeights(
            lora_a=whole.lora_a,
            lora_b=whole.lora_b,
            output_slices=whole.output_slices,
            **tables,
        )
        plan = backend.prepare_batch(LoRABatch(MIXED, 4))
        x, y = first_argument(operation), torch.zeros(7, 14)
        assert len(made(log, backend, operation, x, weights, plan, y)) == 2
        assert not find(plan, operation, backend, x, weights, y)


def test_layers_backends_and_operations_are_told_apart(log, backend):
    plan = backend.prepare_batch(LoRABatch(MIXED, 4))
    x, y = torch.randn(7, 10), torch.zeros(7, 14)
    layers = [small_weights(seed=1), small_weights(seed=2)]
    for weights in layers:
        made(log, backend, "run_linear", x, weights, plan, y)
    for weights in layers:
        _, (_, _, given) = repeated(log, backend, "run_linear", x, weights, plan, y)
        assert weights.lora_b.data_ptr() in given
    other = type(backend)("cpu", tiles="rules", allow_tf32=True)
    assert not find(plan, "run_linear", other, x, layers[0], y)
    assert not find(plan, "run_embedding", backend, x, layers[0], y)
    for owner, precision in ((other, "tf32"), (backend, "ieee")):
        first = made(log, owner, "run_linear", x, layers[0], plan, y)
        assert repeated(log, owner, "run_linear", x, layers[0], plan, y) == first
        assert all(given[-1].PRECISION == precision for *_, given in first)  # of SIZES


@pytest.mark.parametrize("how", [copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_a_copied_plan_has_no_cached_calls(log, backend, operation, how):
    """They hold the addresses of the original's tables."""
    weights, plan = small_weights(), backend.prepare_batch(LoRABatch(MIXED, 4))
    x, y = first_argument(operation), torch.zeros(7, 14)
    made(log, backend, operation, x, weights, plan, y)
    copied = how(plan)
    assert not find(copied, operation, backend, x, weights, y)
    assert find(plan, operation, backend, x, weights, y)
    (_, _, given), _ = made(log, backend, operation, x, weights, copied, y)
    assert all(table.data_ptr() in given for table in copied.tables())


def test_the_interpreter_stores_no_calls(log, backend, operation, monkeypatch):
    monkeypatch.setattr(engine, "INTERPRETED", True)
    weights, plan = small_weights(), backend.prepare_batch(LoRABatch(MIXED, 4))
    x, y = first_argument(operation), torch.zeros(7, 14)
    assert made(log, backend, operation, x, weights, plan, y)
    assert not find(plan, operation, backend, x, weights, y)


def call_with_tma(engine_type):
    """Return a backend, weights, plan, x and y whose expand loads B through TMA."""
    tiles = TileConfig(ShrinkTiles(16, 16, 1), ExpandTiles(16, 16, 2, num_stages=2))
    backend = engine_type("cpu", tiles=fixed_source(64, tiles))
    backend._options = backend._options._replace(tma=True)  # as on a device that has it
    weights = LoRAWeights(
        lora_a=torch.randn(2, 1, 16, 32).bfloat16(),
        lora_b=torch.randn(2, 64, 16).bfloat16(),
        ranks=torch.full((2, 1), 16),
        scalings=torch.ones(2, 1),
        output_slices=(64,),
    )
    plan = backend.prepare_batch(LoRABatch([0, 1] * 40, 2))
    return backend, weights, plan, torch.randn(80, 32).bfloat16(), torch.zeros(80, 64).bfloat16()


def descriptors(log):
    return [a for made in log for a in made.arguments if hasattr(a, "block_shape")]


def test_a_plan_keeps_no_weights_alive(log, backend):
    backend, weights, plan, x, y = call_with_tma(type(backend))
    for how in (made, repeated):
        how(log, backend, "run_linear", x, weights, plan, y)
        (described,) = descriptors(log)
        assert described.base.data_ptr() == weights.lora_b.data_ptr()
        assert described.block_shape == [16, 16]
    alive = [weakref.ref(tensor) for tensor in (weights.lora_a, weights.lora_b, x, y)]
    log.clear()
    del weights, described, x, y
    gc.collect()
    assert len(plan.call_cache) and not any(reference() is not None for reference in alive)


@pytest.mark.parametrize("over", [False, True])
def test_rows_beyond_a_grid_of_two_axes_take_one(log, backend, monkeypatch, over):
    backend, weights, plan, x, y = call_with_tma(type(backend))
    rows, most = plan.grid_rows(False, plan.num_tokens), plan.grid_rows(True, plan.num_tokens)
    assert rows < most  # the bound is on the rows that a refill can use
    monkeypatch.setattr(launch, "MAX_GRID_ROWS", most - over)
    for how in (made, repeated):
        (_, shrink, _), (_, expand, _) = how(log, backend, "run_linear", x, weights, plan, y)
        assert shrink == (rows, 1, 1)
        assert expand == ((2 * rows, 1, 1) if over else (2, rows, 1))
        assert bool(descriptors(log)) is not over


@pytest.mark.parametrize("planes", [1, 3])
def test_h_has_memory_for_all_planes(log, backend, operation, planes, monkeypatch):
    asked, take = [], call_cache.Scratch.take
    monkeypatch.setattr(call_cache.Scratch, "take", lambda *a: asked.append(a[1]) or take(*a))
    tiles = TileConfig(ShrinkTiles(16, 16, planes), ExpandTiles(16, 16))
    backend = type(backend)("cpu", tiles=fixed_source(16, tiles))
    weights, plan = small_weights(), backend.prepare_batch(LoRABatch(MIXED, 4))
    x, y = first_argument(operation), torch.zeros(7, 14)
    made(log, backend, operation, x, weights, plan, y)
    values = weights.num_slices * plan.h_rows(plan.num_tokens) * weights.max_rank
    values *= planes if operation == "run_linear" else 1
    repeated(log, backend, operation, x, weights, plan, y)
    assert asked == [values]
    h = call_cache.scratch_of(x.device).take(values)
    assert h.address == h.tensor.data_ptr() == log[1].arguments[0]
    assert h.tensor.dtype == torch.float32 and h.tensor.numel() >= values


@pytest.fixture
def scratch():
    return call_cache.Scratch(torch.device("cpu"))


def test_memory_of_h_is_kept_for_the_next_call(scratch):
    first = scratch.take(100)
    scratch.give_back(first)
    assert scratch.take(50) is first and scratch.take(50) is not first, "in use by a call"


def test_memory_of_h_that_is_too_small_is_replaced_and_large_memory_is_not_kept(scratch):
    for values in (100, call_cache.MOST_KEPT_VALUES + 1):
        scratch.give_back(scratch.take(values))
    small = scratch.take(100)
    assert small.tensor.numel() == 100
    scratch.give_back(small)
    larger = scratch.take(101)
    assert larger.tensor.numel() == 101
    scratch.give_back(larger)
    assert scratch.take(1) is larger


@pytest.mark.parametrize("capturing", [False, True])
def test_h_of_a_call_on_another_stream_lives_as_long_as_the_call(
    log, backend, operation, current, capturing, monkeypatch
):
    """It may lie in the pool of a CUDA graph, whose memory nothing else may keep or use."""
    weights, plan = small_weights(), backend.prepare_batch(LoRABatch(MIXED, 4))
    x, y, taken = first_argument(operation), torch.zeros(7, 14), []
    new = call_cache.Scratch.new

    def noting(self, values):
        memory = new(self, values)
        taken.append(weakref.ref(memory.tensor))
        return memory

    made(log, backend, operation, x, weights, plan, y)
    repeated(log, backend, operation, x, weights, plan, y)
    kept = log[1].arguments[0]
    monkeypatch.setattr(call_cache.Scratch, "new", noting)
    monkeypatch.setattr(call_cache, "is_capturing", lambda device: capturing)
    current.stream = 7
    repeated(log, backend, operation, x, weights, plan, y)
    assert log[1].arguments[0] != kept, "the default stream's"
    assert len(taken) == 1 and taken[0]() is None
    current.stream = 0
    repeated(log, backend, operation, x, weights, plan, y)
    assert log[1].arguments[0] == kept and len(taken) == 1


def test_a_repeated_call_runs_on_the_stream_that_is_current(log, backend, operation, current):
    weights, plan = small_weights(), backend.prepare_batch(LoRABatch(MIXED, 4))
    x, y = first_argument(operation), torch.zeros(7, 14)
    for stream in (7, 8, 7):
        current.stream = stream
        if stream == 7 and not log:
            made(log, backend, operation, x, weights, plan, y)
        repeated(log, backend, operation, x, weights, plan, y)
        assert [launched.stream for launched in log] == [stream, stream]


def test_a_cached_call_is_not_repeated_while_another_device_is_current(
    log, backend, operation, monkeypatch
):
    weights, plan = small_weights(), backend.prepare_batch(LoRABatch(MIXED, 4))
    x, y = first_argument(operation), torch.zeros(7, 14)
    for module in (launching, call_cache):
        monkeypatch.setattr(module, "several_devices", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: x.device.index)
    first = made(log, backend, operation, x, weights, plan, y)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    log.clear()
    assert not repeat(backend, operation, x, weights, plan, y) and not log
    monkeypatch.setattr(torch.cuda, "current_device", lambda: x.device.index)
    assert repeated(log, backend, operation, x, weights, plan, y) == first


class Hook:
    """Stands for Triton's chain of launch hooks with a profiler in it."""

    calls = (print,)


def test_a_profiler_is_told_of_repeated_launches(log, backend, operation, monkeypatch):
    weights, plan = small_weights(), backend.prepare_batch(LoRABatch(MIXED, 4))
    x, y = first_argument(operation), torch.zeros(7, 14)
    made(log, backend, operation, x, weights, plan, y)
    runtime = launching.knobs.runtime
    for hook in (Hook(), runtime.launch_enter_hook, Hook()):
        monkeypatch.setattr(runtime, "launch_enter_hook", hook)
        repeated(log, backend, operation, x, weights, plan, y)
        for launched in log:
            if not isinstance(hook, Hook):
                assert launched.told == (None, None, None)
                continue
            about = (launched.name, launched.grid, launched.stream, tuple(launched.arguments))
            assert launched.told == (("metadata of", *about), hook, runtime.launch_exit_hook)


def test_threads_repeat_one_call_with_their_own_arguments(log, backend, operation, monkeypatch):
    weights, plan = small_weights(), backend.prepare_batch(LoRABatch(MIXED, 4))
    calls = [(first_argument(operation), torch.zeros(7, 14)) for _ in range(2)]
    barrier, found = threading.Barrier(2), {"0": [], "1": []}

    def note(*given):
        barrier.wait(timeout=30)  # both threads have set their addresses, neither has launched
        found[threading.current_thread().name].append(given[9:])

    made(log, backend, operation, calls[0][0], weights, plan, calls[0][1])
    cached = find(plan, operation, backend, calls[0][0], weights, calls[0][1])
    for bound in (cached.shrink, cached.expand):
        monkeypatch.setattr(bound, "_run", note)
    threads = [
        threading.Thread(
            target=repeat,
            name=str(i),
            args=(backend, operation, x, weights, plan, y),
        )
        for i, (x, y) in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (x, y) in enumerate(calls):
        first, second = found[str(i)]
        assert first[0] == x.data_ptr() and second[2] == y.data_ptr() and second[0] in first
    assert found["0"][1][0] != found["1"][1][0]  # h
