"""A repeated call launches what the first one launched, with its own addresses."""

import copy
import gc
import inspect
import threading
import weakref

import pytest
import torch
from layers import small_weights
from lora_backends.gpu import boxes, launching, ready
from lora_backends.gpu.choice import fixed_choice
from lora_backends.gpu.tiles import ExpandTiles, ShrinkTiles, TileConfig

from lora_backends import (
    InvalidInputError,
    LoRABatch,
    LoRAWeights,
    UnsupportedInputError,
    checks,
)
from lora_backends.csgmv import CsgmvBackend
from lora_backends.csgmv import launch as csgmv_launch
from lora_backends.triton import TritonBackend
from lora_backends.triton import launch as triton_launch

pytestmark = pytest.mark.skipif(
    launching.INTERPRETED, reason="the interpreter has no compiled kernels to keep"
)
MIXED, SKEWED, NOBODY = [3, -1, 0, 1, 0, 2, 3], [2] * 7, [-1] * 7
CACHES = [
    triton_launch._shrink_variant,
    triton_launch._expand_variant,
    csgmv_launch._kernels,
    csgmv_launch._shrink,
    csgmv_launch._expand,
]


class Compiled:
    """Stands for a compiled kernel: notes its launches."""

    function = packed_metadata = None

    def __init__(self, name, log):
        self.name, self.log = name, log

    def run(self, x, y, z, stream, function, metadata, told, enter, leave, *arguments):
        self.log.append((self.name, (x, y), list(arguments)))


@pytest.fixture
def log(monkeypatch):
    """Return the launches, in order; nothing is compiled or run."""
    launches = []

    def launch(self, device, grid, arguments):
        tensors, numbers, boxes = arguments
        pointers = [tensor.data_ptr() for tensor in tensors]
        kind, name = launching._kind(tensors, pointers, numbers), self._kernel.__name__
        self._compiled.setdefault(kind, Compiled(name, launches))
        launches.append((name, tuple(grid), [*pointers, *boxes, *numbers, *self._constants]))

    def clear():
        for cache in CACHES:
            cache.cache_clear()

    monkeypatch.setattr(launching.Variant, "_launch", launch)
    monkeypatch.setattr(launching, "_several_devices", lambda: False)
    monkeypatch.setattr(launching, "_stream_of", lambda: lambda device: 0)
    clear()
    yield launches
    clear()


@pytest.fixture(params=[TritonBackend, CsgmvBackend], ids=["triton", "csgmv"])
def backend(request):
    return request.param("cpu", tiles="rules")


def calls(log, backend, weights, plan, x, y):
    """Return the two launches of a call, h's address replaced by its name."""
    del log[:]
    backend.run_linear(x, weights, plan, y)
    if not log:
        return []
    (first, first_grid, shrink), (second, second_grid, expand) = log
    assert (first, second) == ("shrink_kernel", "expand_kernel")
    h = expand[0]
    assert h in shrink and h not in (x.data_ptr(), y.data_ptr())
    named = [["h" if argument == h else argument for argument in a] for a in (shrink, expand)]
    return [(first_grid, named[0]), (second_grid, named[1])]


def fresh(backend, batch):
    """Return a plan that has met no layer yet."""
    return backend.prepare_batch(batch)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("slots", [MIXED, SKEWED])
def test_a_repeated_call_launches_the_same(log, backend, bias, slots):
    weights, plan = small_weights(bias=bias), fresh(backend, LoRABatch(slots, 4))
    x, y = torch.randn(7, 10), torch.zeros(7, 14)
    first = calls(log, backend, weights, plan, x, y)
    assert first and plan._ready
    assert calls(log, backend, weights, plan, x, y) == first


@pytest.mark.parametrize("bias", [False, True])
def test_a_repeated_call_takes_its_own_x_and_y(log, backend, bias):
    weights, batch = small_weights(bias=bias), LoRABatch(MIXED, 4)
    plan = fresh(backend, batch)
    calls(log, backend, weights, plan, torch.randn(7, 10), torch.zeros(7, 14))
    for x, y in (
        (torch.randn(7, 10), torch.zeros(7, 14)),
        (torch.randn(7, 30)[:, 3:13], torch.zeros(7, 40)[:, 8:22]),  # strided, unaligned
        (torch.randn(7, 10), torch.zeros(7, 14, dtype=torch.bfloat16)),
    ):
        first = calls(log, backend, weights, plan, x, y)
        again = calls(log, backend, weights, plan, x, y)
        other = fresh(backend, batch)
        expected = calls(log, backend, weights, other, x, y)
        tables = {t.data_ptr() for t in vars(plan).values() if isinstance(t, torch.Tensor)}
        own = {t.data_ptr() for t in vars(other).values() if isinstance(t, torch.Tensor)}

        def blind(found, addresses):
            return [
                (grid, ["plan" if a in addresses else a for a in arguments])
                for grid, arguments in found
            ]

        assert first == again
        assert blind(first, tables) == blind(expected, own)


@pytest.fixture
def unchecked(monkeypatch):
    """Return a list that notes which calls had their arguments checked."""
    noted = []

    def note(self, *args, **kwargs):
        noted.append(args)

    monkeypatch.setattr(checks, "_is_ordinary", lambda *args: bool(note(*args)))
    return noted


def test_a_repeated_call_is_not_checked_again(log, backend, unchecked):
    weights, plan = small_weights(), fresh(backend, LoRABatch(MIXED, 4))
    x, y = torch.randn(7, 10), torch.zeros(7, 14)
    backend.run_linear(x, weights, plan, y)
    assert len(unchecked) == 1
    assert backend.run_linear(x.clone(), weights, plan, y) is y
    with torch.no_grad():
        backend.run_linear(x, weights, plan, torch.zeros(7, 14))
    backend.run_linear(x=x, weights=weights, plan=plan, base_output=y)
    assert len(unchecked) == 1 and len(log) == 8


@pytest.mark.parametrize("offset", [0, 3], ids=["aligned", "unaligned"])
def test_every_kind_of_call_is_prepared_once(log, backend, offset, monkeypatch):
    prepared, remember = [], ready.RememberingPlan.remember
    monkeypatch.setattr(
        ready.RememberingPlan, "remember", lambda *args, **k: prepared.append(remember(*args, **k))
    )
    weights, plan = small_weights(), fresh(backend, LoRABatch(MIXED, 4))
    x = torch.zeros(200)[offset:].as_strided((7, 10), (10, 1))
    wide = torch.zeros(7, 40)[:, 8 + offset : 22 + offset]
    for _ in range(3):
        for y in (torch.zeros(7, 14), wide, None):
            backend.run_linear(x, weights, plan, y)
    assert len(log) == 18
    assert len(prepared) <= 3  # with and without y are one kind, if they are aligned alike


WRONG = {
    "x of fewer rows": lambda x, w, p, y: (x[:6], w, p, y),
    "x of another width": lambda x, w, p, y: (x[:, :8], w, p, y),
    "x of another dtype": lambda x, w, p, y: (x.bfloat16(), w, p, y),
    "x on another device": lambda x, w, p, y: (x.to("meta"), w, p, y),
    "x not contiguous": lambda x, w, p, y: (x.T.contiguous().T, w, p, y),
    "no x": lambda x, w, p, y: (None, w, p, y),
    "y of fewer rows": lambda x, w, p, y: (x, w, p, y[:6]),
    "y of another device": lambda x, w, p, y: (x, w, p, y.to("meta")),
    "y a list": lambda x, w, p, y: (x, w, p, [y]),
    "no weights": lambda x, w, p, y: (x, None, p, y),
    "no plan": lambda x, w, p, y: (x, w, None, y),
    "x without memory": lambda x, w, p, y: (x.to_sparse(), w, p, y),
    "a gradient": lambda x, w, p, y: (x.requires_grad_(), w, p, y),
    "a plan of other slots": lambda x, w, p, y: (x, w, copy.copy(p), y),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_call_is_refused_after_a_right_one(log, backend, wrong):
    weights, plan = small_weights(), fresh(backend, LoRABatch(MIXED, 4))
    x, y = torch.randn(7, 10), torch.zeros(7, 14)
    backend.run_linear(x, weights, plan, y)
    assert plan._ready
    arguments = wrong(x, weights, plan, y)
    if arguments[2] not in (None, plan):
        arguments[2].num_slots = 5
    del log[:]
    with pytest.raises((InvalidInputError, UnsupportedInputError)):
        backend.run_linear(*arguments)
    assert not log


@pytest.mark.parametrize("shift", [0, 8, 16])
def test_a_repeated_call_may_not_write_over_its_x(log, backend, shift):
    weights, plan = small_weights(slices=(4, 4, 4)), fresh(backend, LoRABatch(MIXED, 4))
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
    weights, plan = small_weights(), fresh(counting, LoRABatch(MIXED, 4))
    x, y = torch.randn(7, 10), torch.zeros(7, 14)
    for _ in range(3):
        counting.run_linear(x, weights, plan, y)
    assert counting.calls == 3 and len(log) == 6 and plan._ready


def test_the_grid_follows_a_refilled_plan(log, backend):
    weights = small_weights()
    x, y = torch.randn(96, 10), torch.zeros(96, 14)
    plan = fresh(backend, LoRABatch([3] * 96, 4))
    for slots in ([3] * 96, [0, 1, 2, 3] * 24, [-1] * 95 + [2], [1] * 40 + [3] * 56):
        batch = LoRABatch(slots, 4)
        backend.prepare_batch(batch, out=plan)
        grids = [grid for grid, _ in calls(log, backend, weights, plan, x, y)]
        again = [grid for grid, _ in calls(log, backend, weights, plan, x, y)]
        slow = copy.deepcopy(plan)  # remembers nothing
        assert grids == again == [g for g, _ in calls(log, backend, weights, slow, x, y)]


def test_a_batch_without_adapters_launches_once_what_a_capture_may_need(log, backend):
    weights, plan = small_weights(), fresh(backend, LoRABatch(NOBODY, 4))
    x, y = torch.randn(7, 10), torch.zeros(7, 14)
    assert len(calls(log, backend, weights, plan, x, y)) == 2
    assert calls(log, backend, weights, plan, x, y) == []
    backend.prepare_batch(LoRABatch(MIXED, 4), out=plan)
    assert len(calls(log, backend, weights, plan, x, y)) == 2


def test_a_layer_that_has_moved_is_launched_anew(log, backend):
    weights, plan = small_weights(), fresh(backend, LoRABatch(MIXED, 4))
    x, y = torch.randn(7, 10), torch.zeros(7, 14)
    calls(log, backend, weights, plan, x, y)
    weights.lora_b.data = weights.lora_b.clone()
    for _ in range(2):
        _, (_, arguments) = calls(log, backend, weights, plan, x, y)
        assert weights.lora_b.data_ptr() in arguments


def test_copies_of_strided_tables_are_never_kept(log, backend):
    whole = small_weights()
    weights = LoRAWeights(
        lora_a=whole.lora_a,
        lora_b=whole.lora_b,
        ranks=whole.ranks.repeat_interleave(2, 1)[:, ::2],
        scalings=whole.scalings,
        output_slices=whole.output_slices,
    )
    plan = fresh(backend, LoRABatch(MIXED, 4))
    x, y = torch.randn(7, 10), torch.zeros(7, 14)
    assert len(calls(log, backend, weights, plan, x, y)) == 2
    assert not plan._ready


def test_layers_backends_and_choices_are_told_apart(log, backend):
    plan = fresh(backend, LoRABatch(MIXED, 4))
    x, y = torch.randn(7, 10), torch.zeros(7, 14)
    first, second = small_weights(seed=1), small_weights(seed=2)
    for weights in (first, second):
        _, (_, arguments) = calls(log, backend, weights, plan, x, y)
        assert weights.lora_b.data_ptr() in arguments
    kept = len(plan._ready)
    calls(log, type(backend)("cpu", tiles="rules", allow_tf32=True), first, plan, x, y)
    assert len(plan._ready) == kept + 1


def test_a_plan_keeps_no_weights_alive(log, backend):
    weights, plan, x, y = call_with_boxes(backend)
    for _ in range(2):
        log.clear()
        backend.run_linear(x, weights, plan, y)
        (copied,) = [a for a in log[1][2] if hasattr(a, "block_shape")]
        assert copied.base.data_ptr() == weights.lora_b.data_ptr()
        assert copied.block_shape == [16, 16]
    alive = weakref.ref(weights.lora_b)
    log.clear()
    del weights, copied
    gc.collect()
    assert plan._ready and alive() is None


@pytest.mark.parametrize("over", [False, True])
def test_rows_beyond_a_grid_of_two_axes_take_one(log, backend, monkeypatch, over):
    weights, plan, x, y = call_with_boxes(backend)
    rows, most = (
        (plan.num_tiles, plan.max_tiles)
        if isinstance(backend, TritonBackend)
        else (plan.num_groups, plan.max_groups)
    )
    assert rows < most  # what a refill may need counts
    monkeypatch.setattr(boxes, "MOST_ROWS", most - over)
    for _ in range(2):
        log.clear()
        backend.run_linear(x, weights, plan, y)
        (_, shrink, _), (_, expand, arguments) = log
        assert shrink == (rows, 1)
        assert expand == ((2 * rows, 1) if over else (2, rows))
        assert any(hasattr(a, "block_shape") for a in arguments) is not over


def call_with_boxes(backend):
    """Return weights, plan, x and y, after making a backend copy boxes as on a device for it."""
    backend.tile_choice = fixed_choice(
        64, TileConfig(ShrinkTiles(16, 16, 1), ExpandTiles(16, 16, 2, num_stages=2))
    )
    if isinstance(backend, TritonBackend):
        backend._boxes = True
    else:
        backend._options = backend._options._replace(boxes=True)
    weights = LoRAWeights(
        lora_a=torch.randn(2, 1, 16, 32).bfloat16(),
        lora_b=torch.randn(2, 64, 16).bfloat16(),
        ranks=torch.full((2, 1), 16),
        scalings=torch.ones(2, 1),
        output_slices=(64,),
    )
    plan = backend.prepare_batch(LoRABatch([0, 1] * 40, 2))
    return weights, plan, torch.randn(80, 32).bfloat16(), torch.zeros(80, 64).bfloat16()


def test_what_a_plan_keeps_is_bounded(log, backend, monkeypatch):
    monkeypatch.setattr(ready, "MOST_KEPT", 3)
    plan = fresh(backend, LoRABatch(MIXED, 4))
    x, y = torch.randn(7, 10), torch.zeros(7, 14)
    for seed in range(8):
        weights = small_weights(seed=seed)
        calls(log, backend, weights, plan, x, y)
        assert backend._repeat_linear(x[:, None], weights, plan, y[:, None])
        assert 1 <= len(plan._ready) <= 3


def kept_calls(log, backend, weights, plan, x, y):
    """Return where both kernels find h, in a repeated call that may keep its memory."""
    del log[:]
    assert backend._repeat_linear(x, weights, plan, y, True)
    (_, _, shrink), (_, _, expand) = log
    assert expand[0] in shrink
    return expand[0]


def test_layers_share_the_memory_of_h(log, backend):
    plan = fresh(backend, LoRABatch(MIXED, 4))
    x, y, layers = torch.randn(7, 10), torch.zeros(7, 14), [small_weights(seed=s) for s in range(3)]
    for weights in layers:
        calls(log, backend, weights, plan, x, y)
    used = {kept_calls(log, backend, weights, plan, x, y) for weights in layers * 2}
    ((_, kept),) = plan._memory.values()
    assert used == {kept.data_ptr()}
    assert not copy.deepcopy(plan)._memory


def test_memory_of_h_grows_with_the_layers(log, backend, monkeypatch):
    weights, plan = small_weights(), fresh(backend, LoRABatch(MIXED, 4))
    x, y = torch.randn(7, 10), torch.zeros(7, 14)
    calls(log, backend, weights, plan, x, y)
    kept_calls(log, backend, weights, plan, x, y)
    (found,) = plan._ready.values()
    place, (values, kept) = plan._memory.popitem()
    assert values == len(kept) == found.h_values
    plan._memory[place] = values - 1, kept[1:]
    kept_calls(log, backend, weights, plan, x, y)
    assert plan._memory[place][0] == len(plan._memory[place][1]) == values
    monkeypatch.setattr(ready, "MOST_STREAMS", 2)
    for stream in range(5):
        monkeypatch.setattr(launching, "_stream_of", lambda s=stream: lambda device: s)
        kept_calls(log, backend, weights, plan, x, y)
        assert 1 <= len(plan._memory) <= 2


def capturing(monkeypatch, backend):
    monkeypatch.setattr(inspect.getmodule(type(backend)), "is_capturing", lambda device: True)


def long_batches(monkeypatch, backend):
    monkeypatch.setattr(ready, "LARGEST_KEPT", 1)


@pytest.mark.parametrize("among", [capturing, long_batches])
def test_memory_of_h_is_taken_anew(log, backend, monkeypatch, among):
    """Where a graph owns what is allocated, or where it would be much."""
    weights, plan = small_weights(), fresh(backend, LoRABatch(MIXED, 4))
    x, y = torch.randn(7, 10), torch.zeros(7, 14)
    among(monkeypatch, backend)
    calls(log, backend, weights, plan, x, y)
    for _ in range(3):
        kept_calls(log, backend, weights, plan, x, y)
    assert not plan._memory


def test_a_call_of_the_interface_keeps_no_memory(log, backend):
    """It may run inside of whatever counts what is allocated."""
    weights, plan = small_weights(), fresh(backend, LoRABatch(MIXED, 4))
    x, y = torch.randn(7, 10), torch.zeros(7, 14)
    calls(log, backend, weights, plan, x, y)
    kept = {kept_calls(log, backend, weights, plan, x, y)}
    calls(log, backend, weights, plan, x, y)
    assert log[1][2][0] not in kept and len(plan._memory) == 1


def test_threads_have_memory_of_their_own(log, backend):
    weights, plan = small_weights(), fresh(backend, LoRABatch(MIXED, 4))
    x, y = torch.randn(7, 10), torch.zeros(7, 14)
    calls(log, backend, weights, plan, x, y)
    barrier, used = threading.Barrier(2), {}

    def run(name):
        barrier.wait()  # both live at once: a thread's number is given again after its end
        for _ in range(3):
            backend._repeat_linear(x, weights, plan, y, True)
        used[name] = plan._memory[0, threading.get_ident()][1].data_ptr()
        barrier.wait()

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert used["a"] != used["b"]


def changed_choice(backend, weights):
    backend.tile_choice = fixed_choice(
        16, TileConfig(ShrinkTiles(16, 16, 1), ExpandTiles(16, 16, 1))
    )


def moved_weights(backend, weights):
    weights.lora_b.data = weights.lora_b.clone()


@pytest.mark.parametrize("change", [changed_choice, moved_weights])
def test_rows_with_more_axes_are_repeated_again_after_a_change(log, backend, change):
    weights, plan = small_weights(), fresh(backend, LoRABatch(MIXED, 4))
    x, y = torch.randn(7, 1, 10), torch.zeros(7, 1, 14)
    for _ in range(2):
        calls(log, backend, weights, plan, x.view(7, 10), y.view(7, 14))
        assert backend._repeat_linear(x, weights, plan, y)
        change(backend, weights)
        assert not backend._repeat_linear(x, weights, plan, y)


@pytest.mark.parametrize("shape", [(7, 1), (1, 7)])
def test_rows_with_more_axes_are_repeated_as_they_are(log, backend, shape):
    weights, plan = small_weights(), fresh(backend, LoRABatch(MIXED, 4))
    x, y = torch.randn(*shape, 10), torch.zeros(*shape, 14)
    assert not backend._repeat_linear(x, weights, plan, y)  # nothing to repeat
    expected = calls(log, backend, weights, plan, x.view(7, 10), y.view(7, 14))
    for _ in range(2):
        log.clear()
        assert backend._repeat_linear(x, weights, plan, y)
        assert [entry[1] for entry in log] == [grid for grid, _ in expected]
        assert log[0][2][0] == x.data_ptr() and log[1][2][2] == y.data_ptr()
    log.clear()
    for other in (
        (x.transpose(0, 1).contiguous(), y),
        (x.expand(2, *shape, 10)[0], y[..., :13]),
        (x[..., :9], y),
        (torch.randn(7, 2, 10)[:, :1], y.view(7, 1, 14)),
        (x, torch.zeros(7, 2, 14)[:, :1]),
        (x, y.view(7, 14)),
        (x.view(7, 10), y),
        (x.bfloat16(), y),
    ):
        assert not backend._repeat_linear(other[0], weights, plan, other[1])
    assert not log


def test_the_interface_takes_rows_alone(log, backend):
    weights, plan = small_weights(), fresh(backend, LoRABatch(MIXED, 4))
    x, y = torch.randn(7, 1, 10), torch.zeros(7, 1, 14)
    calls(log, backend, weights, plan, x.view(7, 10), y.view(7, 14))
    assert backend._repeat_linear(x, weights, plan, y)
    log.clear()
    for wrong in ((x, y), (x.view(7, 10), y), (x, y.view(7, 14))):
        with pytest.raises(InvalidInputError):
            backend.run_linear(wrong[0], weights, plan, wrong[1])
    assert not log
