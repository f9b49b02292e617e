"""Adapters that wait in memory and in a folder come into slots by themselves."""

import contextlib
import gc
import os
import random
import shutil
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from helpers.adapters.deltas import random_checkpoint

import lora_backends.adapters.pool.store as store_module
from lora_backends import InvalidInputError
from lora_backends.adapters.files.folders import adapter_folders
from lora_backends.adapters.pool.slots import NoFreeSlotError
from lora_backends.hf import MultiLoRAModel

IDS = torch.arange(8)[None] + 1
PLAIN = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
TARGETS = ["q_proj", "v_proj"]


@pytest.fixture
def model(make_base):
    model = MultiLoRAModel(make_base("llama"), "torch_ref", max_adapters=2, max_rank=4)
    yield model
    model.detach()


def logits(model, *names):
    return model(adapters=list(names), input_ids=IDS.expand(len(names), -1)).logits


def alone(make_base, checkpoint):
    """Return the logits of one adapter in a model of its own."""
    model = MultiLoRAModel(make_base("llama"), "torch_ref", max_adapters=1, max_rank=4)
    model.add_adapter("a", checkpoint)
    return logits(model, "a")


def close(result, expected):
    return bool((result - expected).abs().max() <= 2e-5 * expected.abs().max())


@pytest.fixture
def checkpoints(make_base):
    base = make_base("llama")
    return {f"a{i}": random_checkpoint(base, TARGETS, rank=1 + i % 4, seed=i) for i in range(6)}


@pytest.fixture
def folder(save_adapter):
    """Return a folder of three adapters."""
    for seed, name in enumerate("abc"):
        path = save_adapter(name=f"adapters/{name}", seed=seed, **PLAIN)
    return path.parent


@pytest.fixture
def later(monkeypatch):
    """Return a function after which every file was written a while ago."""

    def pass_time(seconds=100.0):
        now = SimpleNamespace(time=lambda: time.time() + seconds, monotonic=time.monotonic)
        monkeypatch.setattr(store_module, "time", now)

    return pass_time


def test_an_evicted_adapter_comes_back_from_memory(model, make_base, checkpoints):
    store = model.keep_adapters()
    for name, checkpoint in checkpoints.items():
        model.add_adapter(name, checkpoint)
    expected = {name: alone(make_base, each) for name, each in checkpoints.items()}
    assert len(model.adapters) == 2
    for name in [*checkpoints, *reversed(checkpoints)]:
        assert close(logits(model, name), expected[name])
    assert store.swaps == 10 and store.disk_reads == 0  # a5 and a4 lay in slots on the way back


def test_a_batch_never_evicts_its_own_adapters(model, make_base, checkpoints):
    model.keep_adapters()
    for name, checkpoint in checkpoints.items():
        model.add_adapter(name, checkpoint)
    result = logits(model, "a4", "a0")  # a4 is the least recently used of those in slots
    assert close(result[0], alone(make_base, checkpoints["a4"])[0])
    assert close(result[1], alone(make_base, checkpoints["a0"])[0])
    with pytest.raises(InvalidInputError, match="all 2 are pinned or in use"):
        logits(model, "a0", "a1", "a2")
    assert close(logits(model, "a1")[0], alone(make_base, checkpoints["a1"])[0])


def test_the_budget_holds_and_what_is_dropped_is_told(model, checkpoints):
    size = sum(
        t.numel() * 4 for d in checkpoints["a3"].modules.values() for t in (d.lora_a, d.lora_b)
    )
    store = model.keep_adapters(cpu_bytes=size)
    for name, checkpoint in checkpoints.items():
        model.add_adapter(name, checkpoint)
        assert store.kept_bytes <= size
    with pytest.raises(InvalidInputError, match="adapter 'a0' was evicted"):
        logits(model, "a0")


def test_rows_may_ask_for_any_adapter_of_a_folder(model, folder, save_adapter):
    store = model.keep_adapters(folder=folder)
    assert store.names() == ["a", "b", "c"] and model.adapters == []
    first = logits(model, "a")
    logits(model, "b", "c")
    assert store.disk_reads == 3
    assert torch.equal(logits(model, "a"), first) and store.disk_reads == 3
    save_adapter(name="adapters/late", seed=9, **PLAIN)
    assert not torch.equal(logits(model, "late"), first)
    with pytest.raises(InvalidInputError, match="no adapter named 'nobody'"):
        logits(model, "nobody")


def test_changed_files_are_loaded_between_batches(model, folder, save_adapter):
    store = model.keep_adapters(folder=folder, watch_s=0.0)
    before = logits(model, "a")
    assert torch.equal(logits(model, "a"), before) and store.disk_reads == 1
    save_adapter(name="adapters/a", seed=77, **PLAIN)
    with model.prepare(["a"], tokens=8) as step:  # read by this, but a batch must not change
        after = model(adapters=step, input_ids=IDS).logits
        save_adapter(name="adapters/a", seed=78, **PLAIN)
        logits(model, "a")
        assert torch.equal(model(adapters=step, input_ids=IDS).logits, after)
    assert not torch.equal(after, before)
    assert not torch.equal(logits(model, "a"), after)


def test_files_that_are_being_written_are_not_loaded(model, folder, save_adapter, later):
    store = model.keep_adapters(folder=folder, watch_s=60.0)
    before = logits(model, "a")
    save_adapter(name="adapters/a", seed=77, **PLAIN)
    store._looked.clear()  # as after a minute
    assert torch.equal(logits(model, "a"), before)
    later()
    store._looked.clear()
    assert not torch.equal(logits(model, "a"), before)


def test_old_files_that_are_moved_one_by_one_are_not_loaded_in_between(
    model, folder, save_adapter, later
):
    store = model.keep_adapters(folder=folder, watch_s=60.0)
    before = logits(model, "a")
    other = save_adapter(name="elsewhere", seed=77, lora_alpha=80, **PLAIN)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        os.utime(other / name, (time.time() - 1000,) * 2)
        os.replace(other / name, folder / "a" / name)  # keeps the time
        store._looked.clear()
        assert torch.equal(logits(model, "a"), before)
    later()
    store._looked.clear()
    assert not torch.equal(logits(model, "a"), before)


def test_changed_files_that_are_damaged_leave_the_adapter_and_warn_once(model, folder):
    model.keep_adapters(folder=folder, watch_s=0.0)
    before = logits(model, "a")
    (folder / "a" / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.warns(RuntimeWarning, match="'a' changed and cannot be loaded") as warned:
        assert torch.equal(logits(model, "a"), before)
        assert torch.equal(logits(model, "a"), before)
    assert len(warned) == 1


def prefetched(store, *names):
    """Wait until a prefetch is over."""
    store.prefetch(names)
    store._worker.submit(int).result()


class Paused:
    """Holds the worker at its first write of a slot, from `begun` until `go` is set."""

    def __init__(self, model, monkeypatch):
        self.begun, self.go = threading.Event(), threading.Event()
        write = model.pool._write

        def paused(slot, deltas):
            if threading.current_thread().name.startswith("adapter prefetch"):
                self.begun.set()
                assert self.go.wait(30)
            write(slot, deltas)

        monkeypatch.setattr(model.pool, "_write", paused)

    def begin(self, store, name):
        store.prefetch([name])
        assert self.begun.wait(30)


def test_a_prefetched_adapter_needs_neither_a_read_nor_a_write(model, folder, monkeypatch):
    store = model.keep_adapters(folder=folder)
    expected = logits(model, "a")
    model.unload_adapter("a")
    prefetched(store, "a", "b")
    assert model.adapters == ["a", "b"]
    done = []
    for method in ("stage", "put", "put_ahead"):
        monkeypatch.setattr(model.pool, method, lambda *given: done.append(given))
    reads, swaps = store.disk_reads, store.swaps
    assert torch.equal(logits(model, "a"), expected)
    assert not done and (store.disk_reads, store.swaps) == (reads, swaps)


@pytest.fixture
def full(model, checkpoints, make_base):
    """Return a store of six adapters, a0 and a1 in the slots, and what each gives."""
    store = model.keep_adapters()
    for name in reversed(checkpoints):
        model.add_adapter(name, checkpoints[name])
    return store, {name: alone(make_base, each) for name, each in checkpoints.items()}


def test_a_prefetch_evicts_what_no_batch_uses_and_no_prefetch_brought(model, full):
    store, expected = full
    logits(model, "a0")
    prefetched(store, "a2", "a3", "a4")
    assert model.adapters == ["a0", "a2"]  # a0 is the last batch's; a3 and a4 wait on the device
    prefetched(store, "a0")
    assert close(logits(model, "a2"), expected["a2"])
    prefetched(store, "a5")
    assert set(model.adapters) == {"a2", "a0"}  # asked for again, and found in its slot
    for name in expected:
        assert close(logits(model, name), expected[name])


def test_a_prefetch_leaves_pinned_and_prepared_adapters_in_their_slots(model, full):
    store, expected = full
    model.pin_adapter("a0")
    with model.prepare(["a1"], tokens=8):
        prefetched(store, "a2")
        assert set(model.adapters) == {"a0", "a1"}
        model.unpin_adapter("a0")
        assert store._ahead["a2"].result.result() is not None  # on the device
        prefetched(store, "a3")
        assert set(model.adapters) == {"a1", "a3"}
        assert close(logits(model, "a2"), expected["a2"])


def test_batches_run_while_a_slot_is_written_ahead_and_wait_for_it_where_they_need_it(
    model, full, monkeypatch
):
    store, expected = full
    logits(model, "a1")
    paused = Paused(model, monkeypatch)
    paused.begin(store, "a2")
    assert model.adapters == ["a1"]  # a0 lost its name before the first write
    assert close(logits(model, "a1"), expected["a1"])
    results = []
    waiting = threading.Thread(target=lambda: results.append(logits(model, "a1", "a3")))
    waiting.start()  # needs the slot that is being written
    waiting.join(0.1)
    assert waiting.is_alive() and not results
    paused.go.set()
    waiting.join(30)
    assert close(results[0][1], expected["a3"][0]) and close(results[0][0], expected["a1"][0])
    assert close(logits(model, "a2"), expected["a2"])


def test_an_adapter_given_while_a_batch_waits_for_a_slot_is_what_the_batch_uses(
    model, full, make_base, monkeypatch
):
    store, expected = full
    logits(model, "a1")
    newer = random_checkpoint(make_base("llama"), TARGETS, seed=50)
    paused, results = Paused(model, monkeypatch), []
    paused.begin(store, "a2")
    waiting = threading.Thread(target=lambda: results.append(logits(model, "a1", "a3")))
    waiting.start()
    waiting.join(0.1)
    adding = threading.Thread(target=lambda: model.add_adapter("a3", newer))
    adding.start()
    adding.join(5)  # takes a1's slot: the batch that waits holds none
    assert model.adapters == ["a3"]
    paused.go.set()
    waiting.join(30)
    assert close(results[0][0], expected["a1"][0])
    assert close(results[0][1], alone(make_base, newer)[0])


def test_an_adapter_given_while_an_older_one_of_its_name_is_written_ahead_stays(
    model, full, make_base, monkeypatch
):
    store, expected = full
    logits(model, "a1")
    newer = random_checkpoint(make_base("llama"), TARGETS, seed=50)
    paused = Paused(model, monkeypatch)
    paused.begin(store, "a2")
    adding = threading.Thread(target=lambda: model.add_adapter("a2", newer))
    adding.start()
    adding.join(10)  # takes a1's slot, which no call uses
    assert model.adapters == ["a2"]
    paused.go.set()
    store._worker.submit(int).result()
    assert model.adapters == ["a2"] and model.pool.slots._written_ahead == set()
    for name in ("a1", "a2", "a3", "a2"):
        right = alone(make_base, newer) if name == "a2" else expected[name]
        assert close(logits(model, name), right)


def test_a_prefetch_of_a_name_that_came_into_a_slot_meanwhile_keeps_no_memory(model, full):
    store, _ = full
    begun, go = threading.Event(), threading.Event()
    store._worker.submit(lambda: begun.set() or go.wait(30))
    assert begun.wait(30)
    store.prefetch(["a2"])
    job = store._ahead["a2"]
    model.pool.add("a2", store.kept()["a2"].checkpoint)  # as a batch, with the job just submitted
    go.set()
    assert job.result.result() is None and store._ahead == {}


def test_detach_ends_a_prefetch_that_is_being_written(model, full, monkeypatch):
    store, _ = full
    pool, paused = model.pool, Paused(model, monkeypatch)
    paused.begin(store, "a2")
    detaching = threading.Thread(target=model.detach)
    detaching.start()
    while not store._closed:
        time.sleep(0.001)
    paused.go.set()
    detaching.join(30)
    assert not detaching.is_alive() and "a2" not in pool.slots
    assert pool.slots._written_ahead == set()


@pytest.mark.parametrize("method", ["reserve", "zero", "write", "write_tables"])
def test_a_prefetch_that_fails_leaves_a_slot_without_a_name_and_with_ranks_of_0(
    model, full, monkeypatch, method
):
    store, expected = full
    original, calls = getattr(model.pool._stacks, method), []

    def fails(*arguments):
        calls.append(arguments)
        if len(calls) == (3 if method == "write" else 1):
            raise RuntimeError("the device is full")
        original(*arguments)

    monkeypatch.setattr(model.pool._stacks, method, fails)
    prefetched(store, "a2")
    monkeypatch.undo()
    assert model.adapters == ["a0"]
    free = 1 - model.pool.slots.place("a0")
    assert not any(stack.ranks[free].any() for stack in model.pool.active_weights.values())
    assert not model.pool.modules_of(free)
    with pytest.raises(RuntimeError, match="the device is full"):
        logits(model, "a2")
    for name in ("a2", "a0", "a1"):
        assert close(logits(model, name), expected[name])


def test_slots_that_were_first_used_in_inference_mode_are_written_ahead(model, folder):
    store = model.keep_adapters(folder=folder)
    with torch.inference_mode():
        expected = logits(model, "a").clone()
    model.unload_adapter("a")
    prefetched(store, "b", "a")
    assert torch.equal(logits(model, "a"), expected)


def test_threads_that_prefetch_and_replace_random_names_serve_no_wrong_row(make_base, checkpoints):
    model = MultiLoRAModel(make_base("llama"), "torch_ref", max_adapters=4, max_rank=4)
    store = model.keep_adapters()
    for name, checkpoint in checkpoints.items():
        model.add_adapter(name, checkpoint)
    expected = {name: alone(make_base, each)[0] for name, each in checkpoints.items()}
    problems, rows, end = [], [], time.monotonic() + 2

    def serve(seed):
        draw, names = random.Random(seed), list(checkpoints)
        try:
            while time.monotonic() < end and not problems:
                chosen, following = draw.choice(names), draw.sample(names, 2)
                store.prefetch(following)
                if not close(logits(model, chosen)[0], expected[chosen]):
                    problems.append(chosen)
                rows.append(chosen)
                if draw.random() < 0.1:
                    given = draw.choice(names)
                    with contextlib.suppress(InvalidInputError):  # a batch uses it
                        model.add_adapter(given, checkpoints[given])
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    model.detach()
    assert not problems and len(rows) > 10 and store.swaps > 5


def test_what_fails_in_a_prefetch_is_told_to_the_batch_that_asks(model, folder):
    store = model.keep_adapters(folder=folder)
    (folder / "b" / "adapter_model.safetensors").write_bytes(b"damaged")
    store.prefetch(["b"])
    with pytest.raises(InvalidInputError, match="damaged"):
        logits(model, "b")
    assert logits(model, "a") is not None


def test_an_adapter_from_memory_takes_the_place_of_files_of_its_name(
    model, make_base, folder, checkpoints
):
    store = model.keep_adapters(folder=folder, watch_s=0.0)
    files = logits(model, "a")
    store.prefetch(["b"])
    model.add_adapter("a", checkpoints["a1"])
    model.add_adapter("b", checkpoints["a2"])
    for _ in range(2):
        logits(model, "c")  # evicts one of them
        assert close(logits(model, "a"), alone(make_base, checkpoints["a1"]))
        assert close(logits(model, "b"), alone(make_base, checkpoints["a2"]))
    model.update_adapter("b", checkpoints["a2"])
    model.unload_adapter("a")
    assert torch.equal(logits(model, "a"), files)


def test_what_was_made_ready_never_replaces_an_adapter_that_came_since(
    model, make_base, folder, save_adapter, checkpoints
):
    store = model.keep_adapters(folder=folder, watch_s=0.0)
    new = alone(make_base, checkpoints["a1"])
    logits(model, "a")
    save_adapter(name="adapters/a", seed=77, **PLAIN)
    changed = store.provide(["a"])
    model.add_adapter("a", checkpoints["a1"])
    changed(lambda: None)
    assert close(logits(model, "a"), new)
    logits(model, "b", "c")
    missing = store.provide(["a"])  # a1
    model.add_adapter("a", checkpoints["a2"])
    logits(model, "b", "c")
    missing(lambda: None)
    assert close(logits(model, "a"), alone(make_base, checkpoints["a2"]))


def test_an_updated_adapter_evicted_at_once_comes_back_with_its_last_weights(
    model, make_base, checkpoints, monkeypatch
):
    store = model.keep_adapters()
    old, new = (random_checkpoint(make_base("llama"), TARGETS, seed=seed) for seed in (40, 41))
    model.add_adapter("live", old)
    locked, note = [], store._note

    def noting(*given):
        other = threading.Thread(target=lambda: locked.append(free(model.pool.slots.lock)))
        other.start()
        other.join()
        note(*given)

    monkeypatch.setattr(store, "_note", noting)
    model.update_adapter("live", new)
    assert locked == [False]  # no other thread could evict it between the write and the note
    assert close(logits(model, "live"), alone(make_base, new))


def free(lock):
    """Return whether this thread can take a lock at once."""
    taken = lock.acquire(blocking=False)
    if taken:
        lock.release()
    return taken


def test_an_updated_adapter_comes_back_with_its_last_weights(model, make_base, checkpoints):
    model.keep_adapters()
    base = make_base("llama")
    old, new = (random_checkpoint(base, TARGETS, seed=seed) for seed in (40, 41))
    model.add_adapter("live", old)
    model.update_adapter("live", new)
    for name in ("a1", "a2"):
        model.add_adapter(name, checkpoints[name])
    assert "live" not in model.adapters
    assert close(logits(model, "live"), alone(make_base, new))


def test_the_report_tells_rank_targets_dtype_bytes_and_place(model, folder, checkpoints):
    (folder / "c" / "adapter_model.safetensors").write_bytes(b"damaged")
    model.keep_adapters(folder=folder)
    for name in ("a3", "a1", "a0"):
        model.add_adapter(name, checkpoints[name])
    report = model.adapters_report()
    found = {info.name: info for info in report.adapters}
    assert [(n, i.place) for n, i in found.items()] == [
        ("a1", "slot 1"), ("a0", "slot 0"), ("a3", "memory"), ("a", "disk"), ("b", "disk"),
        ("c", "disk"),
    ]  # fmt: skip
    assert [found[name].rank for name in ("a1", "a0", "a3", "a", "c")] == [2, 1, 4, 4, 0]
    assert found["a1"].targets == found["a3"].targets == ("q_proj", "v_proj")
    assert found["a1"].dtype == found["a3"].dtype == "float32" and found["a1"].modules == 6
    # 3 layers, q 16 by 16 and v 8 by 16, rank 2
    assert found["a1"].bytes == 3 * 4 * 2 * (16 + 16 + 16 + 8)
    assert found["a3"].bytes == 2 * found["a1"].bytes
    assert "damaged" in found["c"].problem
    assert report.stack_bytes == 2 * found["a3"].bytes  # two slots of rank 4
    assert 0 < report.cpu_bytes <= report.cpu_budget


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_bytes": -1}, "cpu_bytes is -1"),
        ({"watch_s": "often"}, "watch_s is 'often'"),
        ({"folder": "/nowhere"}, "no folder of adapters"),
    ],
)
def test_wrong_settings_of_a_store_are_refused(model, options, message):
    with pytest.raises(InvalidInputError, match=message):
        model.keep_adapters(**options)
    assert model.store is None


@pytest.mark.parametrize("names", ["a", 3, [None], [["a"]]])
def test_what_is_no_name_is_not_loaded_ahead(model, folder, names):
    store = model.keep_adapters(folder=folder)
    with pytest.raises(InvalidInputError, match="names is"):
        store.prefetch(names)
    model.detach()
    with pytest.raises(InvalidInputError, match="the store is closed"):
        store.prefetch(["a"])


def test_a_store_is_made_once_and_before_any_adapter(model, checkpoints):
    model.add_adapter("a0", checkpoints["a0"])
    with pytest.raises(InvalidInputError, match="called too late"):
        model.keep_adapters()
    model.unload_adapter("a0")
    model.keep_adapters()
    with pytest.raises(InvalidInputError, match="a model with a store"):
        model.keep_adapters()


def test_a_folder_of_adapters_is_listed_by_name(folder):
    (folder / "empty").mkdir()
    (folder / ".hidden").mkdir()
    (folder / "file").touch()
    assert list(adapter_folders(folder)) == ["a", "b", "c"]


def test_swaps_under_load_serve_no_wrong_row_and_keep_no_memory(model, make_base, checkpoints):
    """The short form of benchmarks/adapter_swaps.py."""
    store = model.keep_adapters()
    for name, checkpoint in checkpoints.items():
        model.add_adapter(name, checkpoint)
    expected = {name: alone(make_base, each)[0] for name, each in checkpoints.items()}
    names, wrong, turn = list(checkpoints), [], iter(range(120))

    def serve():
        for i in turn:
            name = names[i * 5 % 6]
            store.prefetch([names[(i + 1) * 5 % 6]])
            if not close(logits(model, name)[0], expected[name]):
                wrong.append(name)

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and store.swaps > 60
    store._worker.submit(int).result()
    gc.collect()
    tables = (store._in_slots, store._looked, store._warned, store._ahead)
    assert all(len(table) <= len(names) for table in tables)
    assert model.pool.slots._holds == {}


def test_a_checkpoint_that_changes_after_it_was_given_changes_no_row(model, make_base, checkpoints):
    model.keep_adapters()
    expected = alone(make_base, checkpoints["a0"])
    model.add_adapter("a0", checkpoints["a0"])
    for delta in checkpoints["a0"].modules.values():
        delta.lora_b.mul_(2)
    for name in ("a1", "a2"):
        model.add_adapter(name, checkpoints[name])
    assert close(logits(model, "a0"), expected)


def test_changed_files_of_an_evicted_adapter_are_seen_when_it_comes_back(
    model, folder, save_adapter, later
):
    store = model.keep_adapters(folder=folder, watch_s=50.0)
    before = logits(model, "a")
    logits(model, "b", "c")
    save_adapter(name="adapters/a", seed=77, **PLAIN)
    later()
    assert torch.equal(logits(model, "a"), before)  # within watch_s
    logits(model, "b", "c")
    store._looked = {name: then - 60.0 for name, then in store._looked.items()}  # a minute later
    logits(model, "b", "c")
    assert not torch.equal(logits(model, "a"), before)


def test_swaps_from_memory_put_off_no_look_at_the_files(model, folder):
    store = model.keep_adapters(folder=folder)
    logits(model, "a")
    looked = store._looked["a"]
    logits(model, "b", "c")
    logits(model, "a")
    assert store._looked["a"] == looked


def test_a_prefetch_that_cannot_begin_leaves_the_name_to_the_batch(model, full, monkeypatch):
    store, expected = full

    def fails(*given):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(store._worker, "submit", fails)
    with pytest.raises(RuntimeError, match="new thread"):
        store.prefetch(["a2"])
    assert close(logits(model, "a2"), expected["a2"])


def test_a_load_that_waits_for_a_slot_replaces_no_adapter_of_its_name(
    model, full, folder, make_base, checkpoints, monkeypatch
):
    store, expected = full
    model.pin_adapter("a1")
    paused, errors = Paused(model, monkeypatch), []
    paused.begin(store, "a2")  # into the slot of a0

    def load():
        try:
            model.load_adapter("new", folder / "a")
        except InvalidInputError as error:
            errors.append(str(error))

    loading = threading.Thread(target=load)
    loading.start()
    while not model.pool.slots._settled._waiters:
        time.sleep(0.001)
    model.unpin_adapter("a1")
    model.add_adapter("new", checkpoints["a5"])
    paused.go.set()
    loading.join(30)
    assert len(errors) == 1 and "'new' is loaded already" in errors[0]
    assert close(logits(model, "new"), expected["a5"])


@pytest.mark.parametrize("method", ["_note", "_counted"])
def test_an_adapter_that_memory_does_not_take_does_not_come_back_as_the_one_before(
    model, make_base, checkpoints, monkeypatch, method
):
    from lora_backends.adapters.pool import store as module

    store = model.keep_adapters()
    model.add_adapter("a", checkpoints["a0"])

    def fails(*given):
        raise MemoryError("no pinned memory")

    with monkeypatch.context() as patch:
        patch.setattr(store if method == "_note" else module, method, fails)
        with pytest.raises(MemoryError):
            model.add_adapter("a", checkpoints["a1"])
    assert close(logits(model, "a"), alone(make_base, checkpoints["a0"]))


def test_no_batch_brings_an_adapter_back_while_it_is_unloaded(model, full, monkeypatch):
    store, _ = full
    forget, free_then = store.forget, []

    def forgetting(name):
        other = threading.Thread(target=lambda: free_then.append(free(model.pool.slots.lock)))
        other.start()
        other.join()
        forget(name)

    monkeypatch.setattr(store, "forget", forgetting)
    model.unload_adapter("a0")
    assert free_then == [False] and "a0" not in store.names()


def test_warnings_are_noted_with_the_tables_locked(model, folder):
    store = model.keep_adapters(folder=folder, watch_s=0.0)
    locked = []

    class Noted(dict):
        def __setitem__(self, name, stamp):
            locked.append(store._lock.locked())
            super().__setitem__(name, stamp)

    store._warned = Noted()
    logits(model, "a")
    (folder / "a" / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.warns(RuntimeWarning, match="changed and cannot be loaded"):
        logits(model, "a")
    assert locked and all(locked)


def test_a_slot_waits_for_its_copies_on_the_stream_of_its_own_device(monkeypatch):
    from lora_backends.adapters.pool import store as module

    log, device = [], torch.device("cuda:1")
    stream = type("Stream", (), {"wait_event": lambda self, event: log.append(event)})()
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda given=None: log.append(given) or stream
    )
    module._wait_for(module._Ready(None, None, "copied"), device)
    assert log == [device, "copied"]


def test_an_interrupt_at_the_end_of_an_update_leaves_the_new_adapters_held(model, full):
    class Stop(BaseException):
        pass

    def stops():
        raise Stop

    with model.prepare(["a0"], tokens=8) as step:
        step._held.callback(stops)
        with pytest.raises(Stop):
            step.update(["a1"])
        assert step.adapters == ["a1"] and not model.pool.slots.is_free("a1")


def test_a_call_whose_model_is_detached_while_it_waits_is_refused(model, full):
    store, _ = full
    provide = model.pool.slots.provider

    def detaching(names):
        commit = provide(names)
        model.detach()
        return commit

    model.pool.slots.provider = detaching
    with pytest.raises(InvalidInputError, match="was detached"):
        logits(model, "a0")


def test_names_of_folders_that_are_gone_are_forgotten(model, folder, checkpoints):
    store = model.keep_adapters(cpu_bytes=0, folder=folder)
    logits(model, "a")
    shutil.rmtree(folder / "a")
    shutil.rmtree(folder / "c")
    assert store.names() == ["a", "b"]  # a is in its slot
    assert "c" not in store.folders()
    model.add_adapter("m", checkpoints["a1"])
    model.add_adapter("n", checkpoints["a2"])
    logits(model, "b", None)  # evicts m, which no memory keeps
    assert store.names() == ["b", "n"]
    assert "m" not in store._only_in_memory and "n" in store._only_in_memory


def test_names_of_failed_prefetches_do_not_add_up(model, folder):
    store = model.keep_adapters(folder=folder)
    names = [f"none{number}" for number in range(store_module.MOST_FAILED + 20)]
    store.prefetch([*names, "b"])
    with pytest.raises(InvalidInputError, match=f"no adapter named '{names[-1]}'"):
        logits(model, names[-1])
    logits(model, "b")
    store._worker.submit(int).result()  # the last in its queue
    assert len(store._ahead) <= store_module.MOST_FAILED


def test_an_adapter_is_not_read_while_requests_hold_every_slot(model, folder):
    """A request that waits tries again and again."""
    store, slots = model.keep_adapters(folder=folder), model.pool.slots
    with slots.in_use(["a", "b"], by="request"):
        reads = store.disk_reads
        for _ in range(3):
            with pytest.raises(NoFreeSlotError, match="'c'"), slots.in_use(["c"], by="request"):
                pass
        assert store.disk_reads == reads == 2
    # a name that comes twice needs one slot
    with slots.in_use(["c"], by="request"), slots.in_use(["a", "a"]):
        assert "b" not in slots
