"""A load that ends in the middle: no name may be left with the weights of another adapter."""

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fuzz.interrupts import interrupt_loads
from fuzz.simulation.adapters import SPECS, faults, make_pool, save_adapter

import lora_backends.adapters
from lora_backends import InvalidInputError
from lora_backends.adapters import read_checkpoint
from lora_backends.adapters.pool.stacks import ModuleStacks
from lora_backends.hf import MultiLoRAModel

PACKAGE = str(Path(lora_backends.adapters.__file__).parent)
NAMES = ("adapter0", "adapter1", "adapter2", "adapter3", "adapter7")


@pytest.fixture
def adapters(tmp_path):
    folders = {name: save_adapter(tmp_path, name, patterns=True) for name in NAMES}
    return {name: read_checkpoint(folder, SPECS) for name, folder in folders.items()}


def full_pool(adapters):
    pool = make_pool(max_adapters=3)
    for name in NAMES[:3]:
        pool.add(name, adapters[name])
    return pool


class Stop(BaseException):
    """What no handler of errors may catch, as KeyboardInterrupt."""


@pytest.mark.parametrize("error", [Stop, RuntimeError])
@pytest.mark.parametrize("method", ["write", "write_tables", "zero", "reserve"])
@pytest.mark.parametrize("name", [NAMES[0], NAMES[4]], ids=["replaces", "evicts"])
def test_a_load_that_fails_at_any_write_leaves_no_name_with_torn_weights(
    name, method, error, adapters, monkeypatch
):
    original, calls = getattr(ModuleStacks, method), 0

    def fail_at(number):
        def write(*arguments):
            nonlocal calls
            if calls == number:
                raise error
            calls += 1
            return original(*arguments)

        return write

    failures = 0
    for number in range(20):
        pool, calls = full_pool(adapters), 0
        monkeypatch.setattr(ModuleStacks, method, fail_at(number))
        try:
            pool.add(name, adapters[name])
            break
        except error:
            failures += 1
        finally:
            monkeypatch.setattr(ModuleStacks, method, original)
        assert faults(pool, adapters) == []
        assert pool.slots.names == list(NAMES[method != "reserve" : 3])
        pool.add(NAMES[3], adapters[NAMES[3]])
        assert faults(pool, adapters) == []
    assert failures == (len(adapters[name].modules) if method == "write" else max(failures, 1))


@contextmanager
def interrupted_at(line):
    """Raise at the `line`-th line that the package of adapters runs; yields the lines run."""
    run = [0]

    def trace(frame, event, _argument):
        if frame.f_code.co_filename.startswith(PACKAGE):
            if event == "line":
                run[0] += 1
                if run[0] == line:
                    raise Stop
            return trace
        return None

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield run
    finally:
        sys.settrace(previous)


@pytest.mark.parametrize("name", [NAMES[0], NAMES[4]], ids=["replaces", "evicts"])
def test_a_load_interrupted_at_any_line_leaves_no_name_with_torn_weights(name, adapters):
    line, finished = 0, False
    while not finished:
        line += 1
        pool = full_pool(adapters)
        try:
            with interrupted_at(line):
                pool.add(name, adapters[name])
            finished = True
        except Stop:
            pass
        assert faults(pool, adapters) == []
        assert set(NAMES[1:3]) <= set(pool.slots.names)
        assert NAMES[0] in pool.slots or name in pool.slots or len(pool.slots.names) == 2
        pool.add(NAMES[3], adapters[NAMES[3]])
        assert faults(pool, adapters) == []
    assert line > 50


def test_an_unload_interrupted_at_any_line_leaves_no_name_with_torn_weights(adapters):
    for line in range(1, 200):
        pool = full_pool(adapters)
        try:
            with interrupted_at(line):
                pool.unload(NAMES[1])
            break
        except Stop:
            assert faults(pool, adapters) == []
            pool.add(NAMES[3], adapters[NAMES[3]])
            assert faults(pool, adapters) == []
    assert 5 < line < 199


def test_an_adapter_whose_replacement_was_interrupted_is_named_as_lost(adapters, monkeypatch):
    pool = full_pool(adapters)
    monkeypatch.setattr(ModuleStacks, "write", lambda *_: (_ for _ in ()).throw(Stop))
    with pytest.raises(Stop):
        pool.add(NAMES[1], adapters[NAMES[1]])
    with pytest.raises(InvalidInputError, match="lost when loading its replacement"):
        pool.slots.slot(NAMES[1])


def test_loads_that_signals_interrupt_leave_no_name_with_torn_weights(tmp_path):
    interrupted, wrong = interrupt_loads(tmp_path, loads=100)
    assert wrong == []
    assert interrupted > 5


def test_a_row_is_never_served_by_the_weights_of_an_interrupted_load(
    make_base, save_adapter, monkeypatch
):
    folders = [
        save_adapter(name=name, seed=seed, std=0.3, r=4, target_modules="all-linear")
        for seed, name in enumerate(("first", "second", "third"))
    ]
    model = MultiLoRAModel(make_base("llama"), "torch_ref", max_adapters=2, max_rank=4)
    model.load_adapter("first", folders[0])
    model.load_adapter("second", folders[1])
    ids = torch.arange(1, 6)[None]
    expected = model(adapters=["second"], input_ids=ids).logits
    write, calls = ModuleStacks.write, []

    def interrupt(self, slot, delta):
        calls.append(slot)
        if len(calls) == 8:
            raise KeyboardInterrupt
        write(self, slot, delta)

    monkeypatch.setattr(ModuleStacks, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.load_adapter("third", folders[2])  # evicts the first
    assert len(calls) == 8 and model.adapters == ["second"]
    for name in ("first", "third"):
        with pytest.raises(InvalidInputError, match=f"adapter (named )?'{name}'"):
            model(adapters=[name], input_ids=ids)
    assert torch.equal(model(adapters=["second"], input_ids=ids).logits, expected)
    monkeypatch.setattr(ModuleStacks, "write", write)
    assert model.load_adapter("third", folders[2]).slot == 0
