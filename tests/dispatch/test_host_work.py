"""The Python that runs on the host for a call whose layer and sizes are known."""

import os
import sys

import numpy as np
import pytest
import torch
from helpers.engines import ENGINES
from helpers.small_layers import small_batch, small_weights
from numba import config

import lora_backends
from lora_backends import get_backend
from lora_backends.integrations import plans
from lora_backends.sgmv import engine
from lora_backends.sgmv.launching.kernel import SpecializedKernel

ROOT = os.path.dirname(lora_backends.__file__)
MOST_CALLS, MOST_FILES = 25, 9
LAUNCHES = 4  # calls of `launch` and of what it finds the grid by, for two launches


def calls_of(run):
    """Return (file, function) of each call of the package's own functions."""
    calls = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            calls.append((frame.f_code.co_filename, frame.f_code.co_name))

    outer = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(outer)
    return calls


def calls_of_linear(backend):
    """Return the calls of a second `run_linear` whose launches are not stored."""
    weights, plan = small_weights(), backend.prepare_batch(small_batch())
    x, y = torch.randn(7, 10), torch.zeros(7, 14)
    for _ in range(2):
        backend.run_linear(x, weights, plan, y)
    plan.call_cache._calls.clear()
    return calls_of(lambda: backend.run_linear(x, weights, plan, y))


@pytest.mark.skipif(bool(config.DISABLE_JIT), reason="kernels are Python")
def test_numba_cpu_runs_a_known_layer_in_few_calls():
    calls = calls_of_linear(get_backend("numba_cpu", device="cpu"))
    assert len(calls) <= MOST_CALLS and len({file for file, _ in calls}) <= MOST_FILES, calls


@pytest.mark.parametrize("has_grad_mode", [True, False])
@pytest.mark.parametrize("name", ENGINES)
def test_the_triton_engines_run_a_known_layer_in_few_calls(name, has_grad_mode, monkeypatch):
    monkeypatch.setattr(SpecializedKernel, "launch", lambda *_: None)
    monkeypatch.setattr(engine, "INTERPRETED", True)  # no call is stored: nothing was compiled
    with torch.set_grad_enabled(has_grad_mode):
        calls = calls_of_linear(ENGINES[name]("cpu"))
    files = {file for file, _ in calls} | {sys.modules[SpecializedKernel.__module__].__file__}
    assert len(calls) + LAUNCHES <= MOST_CALLS and len(files) <= MOST_FILES, calls


@pytest.mark.parametrize("name", ENGINES)
def test_a_changed_batch_reaches_eight_captured_plans_in_few_calls(name, monkeypatch):
    """As at nearly every step of a server, where requests come and end."""
    monkeypatch.setattr(plans, "_sizes", lambda *_: [64 << bits for bits in range(8)])
    rooms = plans.Plans(ENGINES[name]("cpu"), 64, 8192)
    rooms.set_slots([row % 64 for row in range(64)])
    held = [rooms.of(room.capacity) for room in rooms._rooms]
    for room in rooms._rooms:
        room.is_captured = room.plan.is_captured = True
    ids = np.arange(64)[::-1]
    calls = calls_of(lambda: rooms.set_slots(ids))
    assert all(plan.token_slots()[:64].tolist() == ids.tolist() for plan in held)
    assert len(calls) <= 30 + 8 * len(held), calls
