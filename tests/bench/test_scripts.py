"""The scripts for a bare GPU machine, here on the CPU with another clock."""

import importlib
import json
import sys
import time
from pathlib import Path

import pytest
import torch

from lora_backends.errors import UnknownBackendError

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


def cpu_clock(call, num_layers, **_):
    start = time.perf_counter()
    for layer in range(num_layers):
        call(layer)
    return [(time.perf_counter() - start) / num_layers * 1e6] * 3


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Return a function that imports a script of benchmarks/ for the CPU and gives it arguments."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "no GPU")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.chdir(tmp_path)

    def load(name, *arguments):
        cells = importlib.import_module("h200_cells")
        module = importlib.import_module(name)
        monkeypatch.setattr(cells, "DEVICE", "cpu")
        monkeypatch.setattr(module, "DEVICE", "cpu")
        monkeypatch.setattr(cells, "graph_times", cpu_clock)
        monkeypatch.setattr(cells, "O_PROJECTION", ("o", 16, (16,)))
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        return module

    return load


@pytest.fixture
def peers(tmp_path):
    file = tmp_path / "peers.json"
    row = {"rank": 4, "limit_us": 1.0, "best_peer_us": 9.0}
    batches = [("qkv", 4, 2, "uniform"), ("o", 300, 3, "skewed")]
    keys = ("projection", "tokens", "active_adapters", "mix")
    rows = [dict(zip(keys, batch, strict=True)) | row for batch in batches]
    projections = {"qkv": [16, [8, 4, 4]], "o": [16, [16]]}
    file.write_text(json.dumps({"method": "as told", "projections": projections, "rows": rows}))
    return file


def test_h200_cells_times_any_backend_with_options_and_writes_its_schema(
    script, peers, monkeypatch, tmp_path
):
    file = tmp_path / "out.json"
    arguments = ["--peers", peers, "--output", file, "--option", "tile=8", "--option", "mode=auto"]
    module = script("h200_cells", "--backend", "csgmv", *arguments)
    asked = []
    backend = module.create("torch_ref", {})
    monkeypatch.setattr(module, "create", lambda *given: asked.append(given) or backend)
    module.main()
    found = json.loads(file.read_text())
    assert asked == [("csgmv", {"tile": 8, "mode": "auto"})]
    assert found["backend"] == "csgmv" and found["options"] == asked[0][1]
    assert list(found["cells"][0]) == [
        "projection", "active_adapters", "rank", "tokens", "mix", "limit_us", "best_peer_us",
        "us", "efficiency",
    ]  # fmt: skip
    assert set(found["host_us"]) == {"run_linear", "prepare_batch", "prepare_batch_refill"}
    assert [row["active_adapters"] for row in found["mixed_ranks"]] == [8, 64]
    assert found["summary"]["decode"]["cells"] == found["summary"]["prefill"]["cells"] == 1


def test_h200_cells_keeps_what_was_measured_when_a_cell_fails(script, peers, monkeypatch, tmp_path):
    module = script("h200_cells", "--backend", "torch_ref", "--peers", peers)
    right = module.check

    def check(call, work, expected):
        if work.batch.num_tokens == 300:
            raise RuntimeError("illegal address")
        right(call, work, expected)

    monkeypatch.setattr(module, "check", check)
    module.main()
    found = json.loads((tmp_path / "h200_torch_ref.json").read_text())
    assert found["summary"]["failed"][0]["error"] == "RuntimeError: illegal address"
    assert found["summary"]["decode"]["cells"] == 1


def test_h200_cells_makes_a_backend_that_is_not_registered_here(script, monkeypatch):
    module = script("h200_cells")
    monkeypatch.setattr("lora_backends.registry.entry_points", lambda **_: [])
    assert module.create("torch_ref", {}).name == "torch_ref"
    with pytest.raises(UnknownBackendError):
        module.create("nothing", {})


def test_h200_sweep_measures_keeps_the_other_sweeps_and_draws(script, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "sweep.json"
    given = ["--backends", "torch_ref", "--output", file]
    module = script("h200_sweep", *given, "--sweep", "tokens")
    small = {"active": [(8, 1), (8, 4)], "tokens": [(1, 2), (3, 2)], "adapters": [(6, 1), (6, 2)]}
    monkeypatch.setattr(module, "SWEEPS", small)
    monkeypatch.setattr(module, "preset", lambda name: ({"qkv": (8, (6, 3)), "o": (8, (8,))}, []))
    module.main()
    assert len(json.loads(file.read_text())["cells"]) == 4
    script("h200_sweep", *given, "--sweep", "active", "--sweep", "adapters").main()
    assert len(json.loads(file.read_text())["cells"]) == 12
    script("h200_sweep", "--output", file, "--plot", tmp_path / "images").main()
    assert {one.name for one in (tmp_path / "images").iterdir()} == {
        f"h200_sweep_{name}.svg" for name in small
    }


def test_the_full_sweep_has_its_cells(script):
    module = script("h200_sweep")
    cells = module.sweep_cells(module.SWEEPS)
    assert {c.tokens for c in cells if c.adapters == 8} >= {1, 3, 777, 16384}
    assert {c.adapters for c in cells if c.tokens == 512} >= {1, 64, 512}
    assert {c.adapters for c in cells if c.tokens == 256} == {1, 4, 8, 16, 64, 256}
