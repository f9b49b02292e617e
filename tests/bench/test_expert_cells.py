"""Cells of experts: the limit, the steps of a timing, and the script for an H200."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from expert_cells import ExpertCell, Steps, make_steps, reference

from lora_backends import get_backend
from lora_backends.bench import read_result

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
SMALL = ExpertCell("small", 32, 16, 4, 2, tokens=6, adapters=3, rank=4)


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = importlib.import_module("h200_moe")
    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(module, "DTYPE", torch.float32)
    return module


def test_the_limits_of_the_peers_file_are_those_of_the_cells(script):
    peers = json.loads(script.PEERS.read_text())
    cells = script.all_cells(peers)
    assert len(peers["cells"]) == 60 and len(set(cells)) == len(cells)
    for row in peers["cells"]:
        moved = script.cell_of(peers, row).bytes_moved(row["active_pairs"], 2)
        limit = moved / peers["copy_tb_per_s"] / 1e6 + script.LAUNCHES * script.LAUNCH_US
        assert limit == pytest.approx(row["limit_us"], rel=2e-3)


@pytest.mark.parametrize(
    "cell", [SMALL, replace(SMALL, num_a=1), replace(SMALL, shared_outer=True, skewed=True)]
)
def test_steps_compute_the_reference(cell):
    torch.manual_seed(0)
    steps = make_steps(cell, "cpu", torch.float32, fewest=2)
    calls = Steps(get_backend("torch_ref", device="cpu"), cell, steps[:2])
    for index, step in enumerate(calls.steps):
        calls.run(index)
        for y, wanted in zip((step.y13, step.y2), reference(step, cell.token_slots), strict=True):
            assert torch.allclose(y, wanted, atol=1e-4)
            assert bool((wanted.flatten(0, 1).norm(dim=1) > 0).all())


def test_tokens_of_large_batches_lie_in_runs_of_one_adapter():
    assert SMALL.token_slots == [0, 1, 2, 0, 1, 2]
    slots = replace(SMALL, tokens=1024).token_slots
    assert slots == sorted(slots) and set(slots) == {0, 1, 2}


def test_the_script_checks_times_and_compares(script, monkeypatch, tmp_path):
    def times(call, count, **_):
        call(0)
        return [2.0] * 5

    row = {"model": "small", "tokens": 3, "adapters": 2, "rank": 4}
    peers = {
        "method": "as told",
        "copy_tb_per_s": 4.0,
        "shapes": {"small": {"hidden": 32, "intermediate": 16, "experts": 4, "top_k": 2}},
        "cells": [row | {"limit_us": 1.0, "best_peer_us": 9.0}],
        "shared_outer": [row],
    }
    (tmp_path / "peers.json").write_text(json.dumps(peers))
    monkeypatch.setattr(script, "graph_times", times)
    monkeypatch.setattr(script, "create", lambda *_: get_backend("torch_ref", device="cpu"))
    monkeypatch.setattr(script, "ROUTED", [(4, 2, 4, 2)])
    output = tmp_path / "out.json"
    given = ["--peers", tmp_path / "peers.json", "--output", output]
    importlib.import_module("run").main(["h200_moe", *map(str, given)])
    found = read_result(output)
    assert found["summary"]["cells"] == 1 and found["summary"]["slower_than_best_peer"] == 0
    assert found["rows"][0]["best_peer_us"] == 9.0 and found["rows"][0]["largest_error"] < 1e-4
    assert found["routing_us"] == [{"pairs": 8, "keys": 8, "us": 2.0}]


def test_the_script_refuses_a_wrong_result(script):
    steps = make_steps(SMALL, "cpu", torch.float32, fewest=1)[:1]
    calls = Steps(get_backend("torch_ref", device="cpu"), SMALL, steps)
    right = calls.run

    def wrong(index):
        right(index)
        steps[0].y2[2, 1] *= 1.1

    calls.run = wrong
    with pytest.raises(SystemExit, match="off by"):
        script.check(calls, SMALL)
