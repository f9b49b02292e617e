import threading

import pytest
import torch

from lora_backends import InvalidInputError
from lora_backends.adapters import AdapterPool, Checkpoint, ModuleDelta, ModuleSpec

SPECS = {"q": ModuleSpec("linear", 6, 4), "v": ModuleSpec("linear", 6, 5)}


def checkpoint(tmp_path, modules=("q", "v"), rank=2, bias=False, value=1.0):
    deltas = {
        name: ModuleDelta(
            module=name,
            kind="linear",
            rank=rank,
            scaling=0.5,
            lora_a=torch.full((rank, 6), value),
            lora_b=torch.full((SPECS[name].out_features, rank), value),
            bias=torch.ones(SPECS[name].out_features) if bias else None,
        )
        for name in modules
    }
    return Checkpoint(tmp_path, deltas, {})


@pytest.fixture
def pool():
    return AdapterPool(SPECS, max_adapters=2, max_rank=3)


def snapshot(pool):
    return {
        module: [t.clone() for t in (w.lora_a, w.lora_b, w.ranks, w.scalings)]
        for module in SPECS
        if (w := pool.weights(module)) is not None
    }


def same(left, right):
    return left.keys() == right.keys() and all(
        torch.equal(a, b) for m in left for a, b in zip(left[m], right[m], strict=True)
    )


def test_a_load_fills_its_slot_only(pool, tmp_path):
    pool.add("a", checkpoint(tmp_path))
    pool.add("b", checkpoint(tmp_path, modules=("q",), rank=3, value=2.0))
    q, v = pool.weights("q"), pool.weights("v")
    assert q.ranks.tolist() == [[2], [3]] and v.ranks.tolist() == [[2], [0]]
    assert (q.lora_a[0, 0, :2] == 1).all() and (q.lora_a[1, 0] == 2).all()
    assert q.scalings.tolist() == [[0.5], [0.5]]


def test_a_module_that_no_adapter_touches_has_no_weights(pool, tmp_path):
    pool.add("a", checkpoint(tmp_path, modules=("q",)))
    assert pool.weights("v") is None and list(pool.active_weights) == ["q"]
    pool.unload("a")
    assert pool.weights("q") is None and pool.active_weights == {}


def test_a_stack_keeps_its_address(pool, tmp_path):
    pool.add("a", checkpoint(tmp_path))
    address = pool.weights("q").lora_a.data_ptr()
    pool.add("b", checkpoint(tmp_path, bias=True))
    pool.unload("a")
    assert pool.weights("q").lora_a.data_ptr() == address


def test_an_evicted_adapter_leaves_nothing_in_its_slot(pool, tmp_path):
    pool.add("a", checkpoint(tmp_path, bias=True))
    pool.add("b", checkpoint(tmp_path))
    loaded = pool.add("c", checkpoint(tmp_path, modules=("v",), rank=1))
    assert (loaded.slot, loaded.evicted) == (0, "a")
    assert pool.weights("q").ranks.tolist() == [[0], [2]]
    assert (pool.weights("q").bias == 0).all()
    assert pool.weights("v").ranks.tolist() == [[1], [2]]


def test_replacing_an_adapter_keeps_its_slot(pool, tmp_path):
    pool.add("a", checkpoint(tmp_path))
    assert pool.add("a", checkpoint(tmp_path, rank=1)).slot == 0
    assert pool.weights("q").ranks.tolist() == [[1], [0]]


def test_a_failed_load_leaves_everything_as_it_was(tmp_path):
    pool = AdapterPool(SPECS, max_adapters=1, max_rank=3, dtype=torch.float16)
    pool.add("a", checkpoint(tmp_path))
    before = snapshot(pool)
    with pytest.raises(InvalidInputError, match="does not fit torch.float16"):
        pool.add("b", checkpoint(tmp_path, value=1e6))
    with pytest.raises(InvalidInputError):
        pool.load("b", tmp_path / "nothing")
    with pytest.raises(InvalidInputError, match="loaded already"):
        pool.load("a", tmp_path)
    with pytest.raises(InvalidInputError, match="non-empty str"):
        pool.load("", tmp_path)
    with pytest.raises(InvalidInputError, match="no adapter can be named '__base__'"):
        pool.load("__base__", tmp_path, replace_existing=True)
    with pytest.raises(InvalidInputError, match="no adapter can be named '__base__'"):
        pool.add("__base__", checkpoint(tmp_path))
    assert same(before, snapshot(pool)) and pool.slots.names == ["a"]


def test_a_load_that_finds_every_slot_pinned_changes_nothing(pool, tmp_path):
    for name in ("a", "b"):
        pool.add(name, checkpoint(tmp_path))
        pool.slots.pin(name)
    before = snapshot(pool)
    with pytest.raises(InvalidInputError, match="all 2 are pinned"):
        pool.add("c", checkpoint(tmp_path))
    assert same(before, snapshot(pool))


def test_a_slot_that_is_written_cannot_be_taken_by_a_starting_call(pool, tmp_path, monkeypatch):
    """A call that starts while its adapter is being evicted waits, and then finds it gone."""
    for name in ("a", "b"):
        pool.add(name, checkpoint(tmp_path))
    began, outcomes = threading.Event(), []

    def start_call():
        began.wait()
        try:
            with pool.slots.in_use(["a"]):
                outcomes.append("ran")
        except InvalidInputError:
            outcomes.append("refused")

    thread = threading.Thread(target=start_call)
    write = pool._stacks.write

    def slow_write(*arguments):
        began.set()
        thread.join(timeout=0.2)
        write(*arguments)

    monkeypatch.setattr(pool._stacks, "write", slow_write)
    thread.start()
    pool.add("c", checkpoint(tmp_path))
    thread.join()
    assert outcomes == ["refused"]


@pytest.mark.parametrize(
    "numbers", [(0, 1), (1, 0), ("2", 1), (1, "8"), (True, 1), (10**5000, 1), (1, 2**31)]
)
def test_sizes_are_positive_ints(numbers):
    with pytest.raises(InvalidInputError, match="an int, 1 or more"):
        AdapterPool(SPECS, *numbers)


@pytest.mark.parametrize("folder", [None, 3])
def test_a_folder_is_a_path(pool, folder):
    with pytest.raises(InvalidInputError, match="the folder of a checkpoint is no path"):
        pool.load("a", folder)
