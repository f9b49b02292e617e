"""Measurements for an H200, here on the CPU, the table of all, and the files of results."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from lora_backends.bench import read_result, summarize
from lora_backends.errors import UnknownBackendError

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch, tmp_path):
    """Return a function that runs a measurement of benchmarks/h200.py on the CPU."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    module = importlib.import_module("h200")
    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(module, "O_PROJECTION", ("o", 16, (16,)))

    def run(name, *arguments):
        importlib.import_module("run").main([f"h200_{name}", *map(str, arguments)])

    run.module = module
    return run


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


def test_cells_times_any_backend_with_options_beside_the_peers(
    script, peers, monkeypatch, tmp_path
):
    file, asked = tmp_path / "out.json", []
    backend = script.module.create("torch_ref", {})
    monkeypatch.setattr(script.module, "create", lambda *given: asked.append(given) or backend)
    options = ["--option", "tile=8", "--option", "mode=auto"]
    script("cells", "--backend", "csgmv", "--peers", peers, "--output", file, *options)
    found = read_result(file)
    assert asked == [("csgmv", {"tile": 8, "mode": "auto"})]
    assert found["contenders"]["csgmv"]["options"] == asked[0][1]
    for row in found["rows"]:
        assert row["limit_us"] == 1.0 and row["best_peer_us"] == 9.0
        one = row["results"]["csgmv"]
        assert one["efficiency"] == pytest.approx(1 / one["us"], rel=1e-3)
    assert set(found["host_us"]) == {"run_linear", "prepare_batch", "prepare_batch_refill"}
    assert [row["active_adapters"] for row in found["mixed_ranks"]] == [8, 64]
    assert found["summary"]["csgmv"]["cells"] == 2


def test_cells_keeps_the_others_when_a_cell_fails(script, peers, monkeypatch, tmp_path):
    measuring = importlib.import_module("lora_backends.bench.measure")
    right, file = measuring.check, tmp_path / "out.json"

    def check(call, work, expected):
        if work.batch.num_tokens == 300:
            raise RuntimeError("illegal address")
        right(call, work, expected)

    monkeypatch.setattr(measuring, "check", check)
    script("cells", "--backend", "torch_ref", "--peers", peers, "--output", file)
    found = read_result(file)
    assert [row["results"]["torch_ref"].get("error") for row in found["rows"]] == [
        None,
        "RuntimeError: illegal address",
    ]
    assert found["summary"]["torch_ref"]["cells"] == found["summary"]["torch_ref"]["errors"] == 1


def test_a_backend_that_is_not_registered_comes_from_the_source_tree(script, monkeypatch):
    monkeypatch.setattr("lora_backends.selection.registry.entry_points", lambda **_: [])
    assert script.module.create("torch_ref", {}).name == "torch_ref"
    with pytest.raises(UnknownBackendError):
        script.module.create("nothing", {})


def test_a_sweep_keeps_the_other_sweeps_and_is_drawn(script, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "sweep.json"
    given = ["sweep", "--backends", "torch_ref", "--output", file]
    small = {"active": [(8, 1), (8, 4)], "tokens": [(1, 2), (3, 2)], "adapters": [(6, 1), (6, 2)]}
    for sweep, batches in small.items():
        monkeypatch.setitem(script.module.SWEEPS, sweep, batches)
    widths = {"qkv": (8, (6, 3)), "o": (8, (8,))}
    monkeypatch.setattr(script.module, "preset", lambda name: (widths, []))
    script(*given, "--sweep", "tokens")
    assert len(read_result(file)["rows"]) == 4
    script(*given, "--sweep", "active", "adapters")
    found = read_result(file)
    assert len(found["rows"]) == found["summary"]["torch_ref"]["cells"] == 12
    importlib.import_module("plot_sweep").draw(tmp_path / "images", file)
    assert {one.name for one in (tmp_path / "images").iterdir()} == {
        f"h200_sweep_{name}.svg" for name in small
    }


def test_the_full_sweep_has_its_cells(script):
    cells = script.module.sweep_cells(script.module.SWEEPS)
    assert {c.tokens for c in cells if c.adapters == 8} >= {1, 3, 777, 16384}
    assert {c.adapters for c in cells if c.tokens == 512} >= {1, 64, 512}
    assert {c.adapters for c in cells if c.tokens == 256} == {1, 4, 8, 16, 64, 256}


def test_memory_takes_the_median_of_each_kernel_and_stack(script, monkeypatch, tmp_path):
    file = tmp_path / "memory.json"
    launches = [
        {"Kernel Name": f"{kernel}_kernel", "Metric Value": f"{width},{run:03}"}
        for width in script.module.WIDTHS
        for run in range(3)
        for kernel in ("shrink", "expand")
    ]
    monkeypatch.setattr(script.module, "profile", lambda names: launches)
    script("memory", "--backends", "triton", "--output", file)
    rows = [(r["max_rank"], r["kernel"], r["bytes_read"]) for r in read_result(file)["rows"]]
    assert rows == [
        (8, "shrink", 8001), (8, "expand", 8001), (64, "shrink", 64001), (64, "expand", 64001),
    ]  # fmt: skip


def test_every_measurement_of_the_table_shows_its_options(script, capsys):
    table = importlib.import_module("run").TABLE
    for name, (place, _) in table.items():
        module = place.partition(":")[0]
        if module in ("smollm2", "eight_bit_quality", "training_model", "training_scale"):
            pytest.importorskip("peft")
        if module == "diffusion":
            pytest.importorskip("diffusers")
        with pytest.raises(SystemExit, match="0"):
            importlib.import_module("run").main([name, "--help"])
        assert f"run.py {name}" in capsys.readouterr().out


def test_a_measurement_that_is_not_in_the_table_is_refused_with_those_that_are(script):
    with pytest.raises(SystemExit, match="cpu_cells"):
        importlib.import_module("run").main(["nothing"])


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks" / "results").glob("*.json")))
def test_every_result_file_has_the_one_format(file):
    found = read_result(file)
    assert found["rows"] and {"device", "versions", "date", "method", "summary"} <= set(found)
    if "contenders" in found:
        assert found["summary"] == summarize(found)
