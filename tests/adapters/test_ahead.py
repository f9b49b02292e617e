"""Slots that are written ahead: which slot, what is written, and in which order of streams."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lora_backends.adapters import (
    AdapterPool,
    BaseLayer,
    Checkpoint,
    ExpertSpec,
    ModuleDelta,
    ModuleSpec,
    SlotTable,
)
from lora_backends.adapters.pool import streams
from lora_backends.adapters.pool.rank_tables import ALIGNED, Tables
from lora_backends.adapters.pool.streams import SlotStreams
from lora_backends.adapters.pool.tensors import in_one_copy, side_by_side
from lora_backends.adapters.specs import ExpertDelta
from lora_backends.errors import InvalidInputError

CPU = torch.device("cpu")
WIDE, HIGH = 6, {"q": 4, "k": 3, "o": 5}
SPECS = {name: ModuleSpec("linear", WIDE, high) for name, high in HIGH.items()}
EXPERTS = {"experts": ExpertSpec(3, WIDE, (4,))}


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def delta(name, seed, rank, form):
    high = HIGH[name]
    return ModuleDelta(
        name,
        "linear",
        rank,
        0.5 + seed,
        random(rank, WIDE, seed=seed),
        random(high, rank, seed=seed),
        bias=random(high, seed=seed) if form == "bias" else None,
        magnitude=random(high, seed=seed).abs() if form == "dora" else None,
    )


def adapter(tmp_path, seed, form, names=("q", "k", "o"), rank=2):
    modules = {name: delta(name, seed, rank, form) for name in names}
    experts = ExpertDelta(
        "experts",
        random(3, 1, rank, WIDE, seed=seed),
        random(3, 4, rank, seed=seed),
        torch.full((3, 1), rank, dtype=torch.int32),
        torch.full((3, 1), 0.5),
    )
    return Checkpoint(tmp_path, modules, {"experts": experts} if form == "experts" else {})


def make_pool(form):
    base = {name: BaseLayer(random(high, WIDE), None) for name, high in HIGH.items()}
    dtype = form if form in ("int8", "float8_e4m3fn") else None
    return AdapterPool(
        SPECS,
        2,
        4,
        groups=[("q", "k")],
        experts=EXPERTS,
        base_layers=base.__getitem__,
        adapter_dtype=dtype,
    )


def held(pool, slot):
    """Return everything that a slot holds within its ranks."""
    stacks = [*pool.active_weights.values(), *pool.shared_weights.values()]
    stacks += [stack for found in pool.active_experts.values() for stack in found]
    found = []
    for stack in stacks:
        ranks = stack.ranks[slot]
        found += [ranks, stack.scalings[slot] * (ranks > 0)]
        most = int(ranks.max())
        found += [stack.lora_a[slot][..., :most, :], stack.lora_b[slot][..., :most]]
        for part in ("bias", "output_scales", "a_scales", "b_scales"):
            tensor = getattr(stack, part, None)
            if tensor is not None:
                found.append(tensor[slot][..., :most, :] if part == "a_scales" else tensor[slot])
    return found


def ahead(pool, name, checkpoint, wanted=lambda: True):
    return pool.put_ahead(name, pool.stage(name, checkpoint), wanted, lambda: None)


@pytest.mark.parametrize("form", ["plain", "bias", "dora", "experts", "int8", "float8_e4m3fn"])
def test_a_slot_written_ahead_holds_what_a_load_writes(form, tmp_path):
    loads, prefetches = make_pool(form), make_pool(form)
    first, second = adapter(tmp_path, 1, form, rank=3), adapter(tmp_path, 2, form, ("q", "o"))
    for pool in (loads, prefetches):
        pool.add("first", first)
        pool.add("other", first)
    assert loads.add("second", second).slot == 0
    assert ahead(prefetches, "second", second)
    assert prefetches.slots.place("second") == 0
    for one, two in zip(held(loads, 0), held(prefetches, 0), strict=True):
        assert torch.equal(one, two)
    assert prefetches.modules_of(0) == loads.modules_of(0)
    assert prefetches.has_dora(0) == loads.has_dora(0)


def test_an_adapter_with_modules_of_its_own_is_not_written_ahead(tmp_path):
    pool = make_pool("plain")
    staged = pool.stage("a", adapter(tmp_path, 1, "plain"))
    record = replace(staged.record, replacements={"head": random(2)})
    staged = replace(staged, record=record)
    assert not pool.put_ahead("a", staged, lambda: True, lambda: None)
    assert pool.slots.names == []


def test_what_is_not_wanted_any_more_gets_no_name(tmp_path):
    pool = make_pool("plain")
    pool.add("a", adapter(tmp_path, 1, "plain"))
    answers = iter([True, False])
    assert not ahead(pool, "b", adapter(tmp_path, 2, "plain"), lambda: next(answers))
    assert pool.slots.names == ["a"] and not pool.modules_of(1)
    assert not any(stack.ranks[1].any() for stack in pool.active_weights.values())
    assert not ahead(pool, "b", adapter(tmp_path, 2, "plain"), lambda: False)


def filled(num_slots, *names):
    table = SlotTable(num_slots)
    for slot, name in enumerate(names):
        table.assign(name, slot)
    return table


def test_a_free_slot_is_reserved_first_and_no_load_takes_it():
    table = filled(2, "a")
    assert table.reserve("b") == 1
    assert table.candidate("c") == (0, "a")
    table.settle(1, "b")
    assert table.names == ["a", "b"]


@pytest.mark.parametrize("by", ["call", "prepared", "request"])
def test_no_slot_is_reserved_that_is_in_use(by):
    table = filled(2, "a", "b")
    table.pin("b")
    with table.in_use(["a"], by):
        assert table.reserve("c") is None
    table.unpin("b")
    assert table.reserve("c") is not None


def test_no_slot_is_reserved_of_a_name_that_a_batch_is_about_to_take():
    table, found = filled(1, "a"), []

    def provider(names):
        found.append(table.reserve("b"))
        table.settle(0)
        return lambda hold: hold()

    table.provider = provider
    with table.in_use(["a"]):
        pass
    assert found == [None]


def test_no_slot_is_reserved_that_the_last_batch_used_or_a_prefetch_brought():
    table = filled(3, "a", "b", "c")
    with table.in_use(["a"]):
        pass
    table.expect("b")
    assert table.reserve("d") == 2
    table.settle(2, "d")
    assert table.reserve("e") is None
    table.slot("d")  # a use
    assert table.reserve("e") == 2


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_event(self, event):
        self.log.append(("wait", self.name, event.name))


class Event:
    log: list

    def __init__(self, blocking=False):
        self.name = None

    def record(self, stream):
        self.name = stream.name
        self.log.append(("record", stream.name))

    def synchronize(self):
        self.log.append(("host", self.name))


@pytest.fixture
def cuda(monkeypatch):
    """Return a stand-in of torch.cuda, whose current stream is `now`, and its log."""
    log = Event.log = []
    fake = SimpleNamespace(log=log, Event=Event, capturing=False)
    made = {name: Stream(name, log) for name in ("one", "two")}
    fake.now = "one"
    fake.current_stream = lambda device: made[fake.now]
    fake.is_current_stream_capturing = lambda: fake.capturing
    fake.synchronize = lambda device: log.append(("device",))
    monkeypatch.setattr(streams, "torch", SimpleNamespace(cuda=fake))
    return fake


def test_a_write_waits_for_uses_on_other_streams(cuda):
    order = SlotStreams("cuda")
    order.after_use([0], True)
    cuda.log.clear()
    with order.writing(0):
        assert cuda.log == []  # one stream runs in its order
    cuda.log.clear()
    cuda.now = "two"
    order.before_write_ahead(0)
    assert cuda.log == [("wait", "two", "one"), ("wait", "two", "one")]  # the use, and the write


def test_a_use_waits_for_a_write_on_another_stream(cuda):
    order = SlotStreams("cuda")
    with order.writing(0):
        pass
    cuda.log.clear()
    order.before_use([0, 1])
    assert cuda.log == []
    cuda.now = "two"
    order.before_use([1])
    assert cuda.log == []
    order.before_use([0])
    assert cuda.log == [("wait", "two", "one")]
    order.after_write_ahead(0)
    cuda.log.clear()
    order.before_use([0])
    assert cuda.log == []  # the host has waited


def test_a_slot_of_a_graph_is_written_ahead_after_the_whole_device(cuda):
    order = SlotStreams("cuda")
    order.after_use([0], False)
    cuda.log.clear()
    order.before_write_ahead(0)
    order.before_write_ahead(0)
    assert cuda.log == [("device",)]


def test_nothing_is_loaded_or_waited_for_in_a_capture(cuda):
    order = SlotStreams("cuda")
    with order.writing(0):
        pass
    cuda.log.clear()
    cuda.now, cuda.capturing = "two", True
    order.before_use([0])
    order.after_use([0], True)
    assert cuda.log == []
    with pytest.raises(InvalidInputError, match="'a' cannot be loaded, updated or unloaded while"):
        order.check_not_capturing("a")


def test_tensors_that_fill_one_piece_of_memory_are_moved_in_one_copy():
    tensors = [random(2, 3), random(4, 2).t(), random(5)]
    copies = side_by_side(tensors, pin=False)
    whole, views = in_one_copy(copies, CPU, torch.bfloat16)
    assert whole.shape == (19,)
    for tensor, view in zip(tensors, views, strict=True):
        assert torch.equal(view, tensor.bfloat16())
        assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert in_one_copy(tensors, CPU, torch.float32) is None
    assert in_one_copy(copies[:2], CPU, torch.float32) is None  # not all of it


def test_an_adapter_in_one_piece_of_memory_is_staged_as_any_other(tmp_path):
    pool, given = make_pool("plain"), adapter(tmp_path, 1, "plain")
    matrices = [m for d in given.modules.values() for m in (d.lora_a, d.lora_b)]
    copies = iter(side_by_side(matrices, pin=False))
    deltas = {
        path: replace(d, lora_a=next(copies), lora_b=next(copies))
        for path, d in given.modules.items()
    }
    together = replace(given, modules=deltas)
    one, two = pool.stage("a", given), pool.stage("a", together)
    for left, right in zip(one.modules, two.modules, strict=True):
        assert torch.equal(left.lora_a, right.lora_a) and torch.equal(left.lora_b, right.lora_b)
    deltas["k"].lora_b[1, 1] = torch.inf
    with pytest.raises(InvalidInputError, match="lora_B of k"):
        pool.stage("a", together)


def test_tables_are_contiguous_aligned_and_written_together():
    group = ("q", "k")
    tables = Tables({"q": group, "k": group, "o": ("o",)}, 3, CPU)
    tables.write(1, {"k": (2, 0.5), "o": (3, 0.25)})
    expected = {group: [0, 2], ("q",): [0], ("k",): [2], ("o",): [3]}
    for paths, row in expected.items():
        ranks, scalings = tables.of(*paths)
        assert ranks.is_contiguous() and ranks.storage_offset() % ALIGNED == 0
        assert ranks.tolist() == [[0] * len(row), row, [0] * len(row)]
        assert bool((scalings[1] > 0).eq(ranks[1] > 0).all())
    tables.zero(1)
    assert not any(tables.of(*paths)[0].any() for paths in expected)


@pytest.mark.parametrize("method", ["update", "unload"])
def test_no_slot_is_changed_in_a_capture(method, cuda, tmp_path):
    pool, given = make_pool("plain"), adapter(tmp_path, 1, "plain")
    pool.add("a", given)
    pool._streams, cuda.capturing = SlotStreams("cuda"), True
    with pytest.raises(InvalidInputError, match="while a CUDA graph is captured"):
        getattr(pool, method)("a", *[given] * (method == "update"))
    assert pool.slots.names == ["a"] and pool.modules_of(0)


def test_a_slot_is_settled_whatever_fails_when_it_is_given_up(tmp_path, monkeypatch):
    pool = make_pool("plain")

    def fails(*given):
        raise RuntimeError("the device is lost")

    for method in ("_zero", "_note_active"):
        monkeypatch.setattr(pool, method, fails)
    with pytest.raises(RuntimeError, match="lost"):
        ahead(pool, "a", adapter(tmp_path, 1, "plain"))
    assert pool.slots._written_ahead == set()


def test_a_slot_whose_update_failed_is_nobody_elses_while_something_holds_it(tmp_path, monkeypatch):
    pool, given = make_pool("plain"), adapter(tmp_path, 1, "plain")
    pool.add("a", given)

    def fails(*arguments):
        raise RuntimeError("the device is lost")

    with pool.slots.in_use(["a"], "prepared"):
        with monkeypatch.context() as patch:
            patch.setattr(pool, "_write", fails)
            with pytest.raises(RuntimeError, match="lost"):
                pool.update("a", given)
        assert pool.slots.names == []
        assert pool.add("b", given).slot == 1
        assert pool.slots.reserve("c") == 1
        pool.slots.settle(1)
    assert pool.slots.candidate("d") == (0, None)


def test_a_call_that_begins_while_the_model_is_detached_runs_with_what_is_loaded():
    class Detaching(SlotTable):
        answers = iter(())

        @property
        def provider(self):
            return next(self.answers, None)

        @provider.setter
        def provider(self, value):
            pass

    table = Detaching(1)
    table.assign("a", 0)
    table.answers = iter([lambda names: lambda hold: hold()])
    with table.in_use(["a"]) as slots:
        assert slots == {"a": 0}


def test_an_adapter_loaded_by_another_thread_meanwhile_is_not_replaced(tmp_path, monkeypatch):
    pool, given = make_pool("plain"), adapter(tmp_path, 1, "plain")
    monkeypatch.setattr(pool, "read", lambda folder: given)
    with pytest.raises(InvalidInputError, match="'a' is loaded already"):
        pool.load("a", tmp_path, accept=lambda checkpoint: pool.add("a", checkpoint))


def test_no_interrupt_comes_between_an_update_and_its_note(tmp_path):
    pool, given, threads = make_pool("plain"), adapter(tmp_path, 1, "plain"), []
    pool.add("a", given)
    pool.update("a", given, then=lambda: threads.append(threading.current_thread()))
    assert len(threads) == 1 and threads[0] is not threading.main_thread()
