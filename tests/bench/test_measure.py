"""Contenders are checked before they are timed, and one that fails does not end the run."""

import importlib
import json
import os
from dataclasses import replace

import pytest
import torch
from helpers.small_layers import per_token, small_batch, small_weights

from lora_backends import LoRAWeights, get_backend
from lora_backends.bench import (
    Cell,
    Contender,
    choose,
    measure,
    read_result,
    results,
    summarize,
    timing,
)
from lora_backends.bench import layers as bench_layers
from lora_backends.bench.contenders import from_backend
from lora_backends.bench.job import make_job
from lora_backends.errors import (
    BackendUnavailableError,
    InvalidInputError,
    UnsupportedInputError,
)
from lora_backends.operations import DENSE

CELL = Cell("o", 16, (8, 4), tokens=6, adapters=3, rank=2)
measuring = importlib.import_module("lora_backends.bench.measure")


def spoiled(name, change):
    """Return torch_ref as a contender whose y is changed after each call."""
    right = from_backend(get_backend("torch_ref", "cpu"))

    def bind(work):
        call = right.bind(work)

        def wrong(layer):
            call(layer)
            change(work)

        return wrong

    return Contender(name, False, bind)


def run(contenders, cells=(CELL,), **options):
    return measure(list(cells), contenders, "cpu", torch.float32, **options)


def test_the_reference_is_the_formula():
    weights = small_weights()
    x = torch.randn(7, 10)
    expected = per_token(x, weights, small_batch(), torch.zeros(7, 14, dtype=torch.float64))
    work = bench_layers.Workload(DENSE["run_linear"], [weights], small_batch(), x, x)
    found = bench_layers.reference(work)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [1, 64])
def test_a_right_backend_passes_the_check_in_every_dtype(dtype, rank):
    cell = Cell("o", 64, (48, 16), tokens=40, adapters=5, rank=rank)
    work = bench_layers.make_workload(cell, bench_layers.make_layers(cell, "cpu", dtype))
    expected = bench_layers.reference(work)
    call = from_backend(get_backend("torch_ref", "cpu")).bind(work)
    bench_layers.check(call, work, expected)
    assert not work.y.any()


FAULTS = {
    "one row is another's": lambda work: work.y[3].copy_(work.y[2]),
    "one row is left out": lambda work: work.y[5].fill_(1),
    "overwrites": lambda work: work.y.sub_(1),
    "scaling is dropped": lambda work: work.y.mul_(2).sub_(1),
    "not a number": lambda work: work.y[0, 0].fill_(float("nan")),
    "two percent off": lambda work: work.y.sub_(1).mul_(1.02).add_(1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_result_is_an_error_in_the_row_and_no_time(fault):
    result = run([spoiled("bad", FAULTS[fault]), from_backend(get_backend("torch_ref", "cpu"))])
    found = result["rows"][0]["results"]
    assert "wrong result" in found["bad"]["error"] and "us" not in found["bad"]
    assert found["torch_ref"]["us"] > 0
    assert result["summary"]["bad"] == {"cells": 0, "fastest": 0, "errors": 1}


def test_a_contender_that_raises_is_a_row_too():
    def bind(work):
        raise MemoryError("no room")

    result = run([Contender("bad", False, bind), from_backend(get_backend("torch_ref", "cpu"))])
    assert result["rows"][0]["results"]["bad"] == {"error": "MemoryError: no room"}
    assert result["complete"] and summarize(result)["torch_ref"]["fastest"] == 1


def test_contenders_take_turns():
    order = []
    calls = {name: lambda layer, name=name: order.append((name, layer)) for name in "ab"}
    found = timing.times_in_turns(calls, 2, lambda: order.append("zero"), turns=2)
    sweep = ["zero", ("a", 0), ("a", 1), "zero", ("b", 0), ("b", 1)]
    assert order == sweep * 2
    assert [len(series) for series in found.values()] == [2, 2]


def test_a_slow_cell_takes_fewer_turns(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS_A_CELL", 0.0)
    found = timing.times_in_turns({"a": lambda layer: None}, 1, lambda: None)
    assert len(found["a"]) == timing.FEWEST_TURNS


def test_spread_is_median_and_quartiles():
    assert timing.spread([1.0, 2.0, 3.0, 4.0, 100.0]) == {"us": 3.0, "us_q1": 2.0, "us_q3": 4.0}
    assert timing.spread([7.0]) == {"us": 7.0, "us_q1": 7.0, "us_q3": 7.0}


def test_the_limit_is_bytes_over_copy_rate_and_launches():
    limits = timing.Limits(copy_gb_per_s=4000, launch_us=1.0, gemm_gflop_per_s=1)
    assert limits.microseconds(8_000_000, 2) == pytest.approx(2 + 2)


@pytest.mark.parametrize("operation", DENSE)
@pytest.mark.parametrize("name", ["torch_ref", "numba_cpu"])
def test_every_operation_is_checked_and_timed(operation, name):
    slices = (4,) * (DENSE[operation].num_slices or 2)
    cell = Cell("layer", 16, slices, tokens=6, adapters=3, rank=2, operation=operation)
    result = run([from_backend(get_backend(name, "cpu"))], [cell])
    row = result["rows"][0]
    assert row["operation"] == operation and row["results"][name].get("us", 0) > 0, row
    assert row["bytes"] == cell.bytes_moved(4) and row["limit_us"] > 0


@pytest.mark.parametrize("operation", DENSE)
def test_a_wrong_row_of_any_operation_is_found(operation):
    slices = (4,) * (DENSE[operation].num_slices or 2)
    cell = Cell("layer", 16, slices, tokens=6, adapters=3, rank=2, operation=operation)
    work = bench_layers.make_workload(cell, bench_layers.make_layers(cell, "cpu", torch.float32))
    call = from_backend(get_backend("torch_ref", "cpu")).bind(work)

    def wrong(layer):
        found = call(layer)
        found[..., 3, :] = found[..., 2, :].clone()
        return found

    bench_layers.check(call, work, bench_layers.reference(work))
    with pytest.raises(bench_layers.WrongResultError):
        bench_layers.check(wrong, work, bench_layers.reference(work))


def test_peers_are_timed_in_whole_layers_of_rows_alone(monkeypatch):
    """The peer is a stand-in: its operators would add the delta of rows to y."""
    contenders = importlib.import_module("lora_backends.bench.contenders")
    right = from_backend(get_backend("torch_ref", "cpu"))
    monkeypatch.setattr(contenders, "peer", lambda *_: right.bind)
    peer = choose(["vllm"], "cpu", torch.float32)[0]
    cells = [replace(CELL, operation=name) for name in ("run_linear", "run_lora_a")]
    linear, half = run(peer, cells)["rows"]
    assert linear["results"]["vllm"]["us"] > 0
    assert "timed in run_linear, not run_lora_a" in half["results"]["vllm"]["error"]


def test_efficiency_is_limit_over_time():
    cell = run([from_backend(get_backend("torch_ref", "cpu"))])["rows"][0]
    found = cell["results"]["torch_ref"]
    assert found["us_q1"] <= found["us"] <= found["us_q3"]
    assert found["efficiency"] == pytest.approx(cell["limit_us"] / found["us"], rel=0.2, abs=1e-3)


def test_a_contender_far_from_the_limit_is_summed_up_too(monkeypatch):
    monkeypatch.setattr(measuring, "spread", lambda _: {"us": 1e9, "us_q1": 1e9, "us_q3": 1e9})
    result = run([from_backend(get_backend("torch_ref", "cpu"))])
    assert 0 < result["rows"][0]["results"]["torch_ref"]["efficiency"] < 1e-4
    assert summarize(result)["torch_ref"]["efficiency_decode"] >= 0


def test_layers_of_a_timing_have_one_shape_and_different_weights():
    made = bench_layers.make_layers(CELL, "cpu", torch.float32, max_rank=5)
    assert len(made) == 4 and all(isinstance(one, LoRAWeights) for one in made)
    assert {(one.num_slots, one.max_rank, one.output_slices) for one in made} == {(8, 5, (8, 4))}
    assert made[0].ranks.unique().tolist() == [2]
    assert not torch.equal(made[0].lora_a, made[1].lora_a)


def test_every_cell_is_written_whole_and_an_interruption_keeps_those_before(tmp_path):
    file = tmp_path / "bench.json"
    cells = [CELL, Cell("o", 16, (8, 4), tokens=9, adapters=3, rank=2)]
    seen = {}

    def interrupt(index, cell):
        if index == 1:
            seen.update(json.loads(file.read_text()))
            raise KeyboardInterrupt

    kept = {}
    with pytest.raises(KeyboardInterrupt):
        run(
            [from_backend(get_backend("torch_ref", "cpu"))],
            cells, path=file, progress=interrupt, result=kept,
        )  # fmt: skip
    assert len(seen["rows"]) == 1 and seen["complete"] is False
    assert read_result(file)["rows"] == kept["rows"]
    assert os.listdir(tmp_path) == ["bench.json"]


def test_a_file_is_left_as_it_was_if_writing_fails(tmp_path):
    file = tmp_path / "bench.json"
    results.write_result(file, {"old": 1})
    with pytest.raises(TypeError):
        results.write_result(file, {"new": object()})
    assert json.loads(file.read_text()) == {"old": 1} and os.listdir(tmp_path) == ["bench.json"]


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": "other"}', "not json"])
def test_a_file_of_another_kind_is_refused(tmp_path, content):
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(InvalidInputError, match="other.json"):
        read_result(file)


def test_all_that_run_are_timed_and_the_others_have_a_reason():
    contenders, left_out = choose(None, "cpu", torch.float32)
    names = [contender.name for contender in contenders]
    assert "torch_ref" in names and not set(names) & set(left_out)
    assert "not installed" in left_out["vllm"] and "not installed" in left_out["sglang"]


def test_one_that_does_not_take_the_dtype_has_that_as_its_reason():
    contenders, left_out = choose(None, "cpu", torch.float64)
    assert [contender.name for contender in contenders] == ["torch_ref"]
    assert "does not take float64" in left_out["numba_cpu"]


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"backends": "torch_reff"}, InvalidInputError, "did you mean 'torch_ref'"),
        ({"backends": ","}, InvalidInputError, "no backends"),
        ({"backends": "vllm"}, BackendUnavailableError, "vllm is not installed"),
        ({"backends": "numba_cpu", "dtype": "float64"}, UnsupportedInputError, "float64"),
        ({"device": "banana"}, InvalidInputError, "no such device"),
        ({"device": "cuda:99"}, BackendUnavailableError, "cannot use cuda:99"),
        ({"device": "meta"}, UnsupportedInputError, "bench times cuda, cpu"),
        ({"dtype": "float8"}, InvalidInputError, "no dtype named"),
        ({"preset_name": "gpt"}, InvalidInputError, "no preset named"),
        ({"tokens": "1,x"}, InvalidInputError, "tokens is not a list of sizes"),
        ({"tokens": ""}, InvalidInputError, "tokens is not a list of sizes"),
        ({"rank": "0"}, InvalidInputError, "rank is not a list of sizes"),
        ({"mixes": "even"}, InvalidInputError, "no mix of adapters"),
        ({"operations": "run_linar"}, InvalidInputError, "did you mean 'run_linear'"),
        ({"operations": ","}, InvalidInputError, "no operations"),
        (
            {"operations": "run_qkv", "in_features": 8, "output_slices": "8"},
            InvalidInputError,
            "takes none of the layers",
        ),
        ({"in_features": 8}, InvalidInputError, "belong together"),
        ({"in_features": 0, "output_slices": "8"}, InvalidInputError, "sizes from 1 to"),
        ({"preset_name": "smollm2", "in_features": 8}, InvalidInputError, "one of the three"),
        (
            {"adapters": "100000000", "tokens": "1"},
            InvalidInputError,
            "does not fit into the memory",
        ),
        ({"options": ["triton"]}, InvalidInputError, "NAME.KEY=VALUE"),
        ({"options": ["torch_ref.x=1"]}, InvalidInputError, "has no option 'x'"),
        ({"options": ["torch_ref=1.5"]}, InvalidInputError, "allowed: NAME.KEY=VALUE"),
        ({"options": ["torch_ref.x"]}, InvalidInputError, "allowed: torch_ref.KEY=VALUE"),
        ({"options": ["torch_ref.device=cpu"]}, InvalidInputError, "allowed: torch_ref.KEY"),
        ({"options": ["torch_ref.x=1", "torch_ref.x=2"]}, InvalidInputError, "x has a value"),
        (
            {"backends": "torch_ref", "options": ["numba_cpu.batch_invariant=true"]},
            InvalidInputError,
            "which is no contender",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_is_measured(arguments, error, told):
    with pytest.raises(error, match=told):
        make_job(**{"device": "cpu", **arguments})


def test_a_device_of_its_own_has_its_preset_and_dtype():
    job = make_job(device="cpu")
    assert job.dtype == torch.float32 and job.cells[0].in_features == 576


def test_options_reach_their_backend():
    job = make_job(
        device="cpu",
        backends="numba_cpu",
        options=["numba_cpu.batch_invariant=false"],
        in_features=16,
        output_slices="8,4",
        tokens="3",
    )
    assert job.contenders[0].options == {"batch_invariant": False}
    assert job.cells == [Cell("layer", 16, (8, 4), tokens=3, adapters=8, rank=16)]


def test_a_backend_made_for_other_devices_is_timed_only_if_it_is_named(monkeypatch):
    found = pytest.importorskip("lora_backends.triton").TritonBackend
    monkeypatch.setattr(found, "unavailable_reasons", classmethod(lambda cls, device: []))
    _, left_out = choose(None, "cpu", torch.float32)
    assert left_out["triton"].startswith("made for cuda")
    assert [c.name for c in choose(["triton"], "cpu", torch.float32)[0]] == ["triton"]


def test_a_copy_that_was_slow_once_does_not_stand_for_the_device(monkeypatch):
    rates = iter([5.0, 9.0, 20.0, 20.0, 3.0])  # at first, then around every cell
    for module in (timing, measuring):
        monkeypatch.setattr(module, "copy_clock", lambda: lambda: next(rates))
    cells = [CELL, Cell("o", 16, (8, 4), tokens=9, adapters=3, rank=2)]
    result = run([from_backend(get_backend("torch_ref", "cpu"))], cells)
    assert [cell["copy_gb_per_s"] for cell in result["rows"]] == [20.0, 20.0]
    assert result["limits"]["copy_gb_per_s"] == 20.0
    cell = result["rows"][0]
    assert cell["limit_us"] == pytest.approx(cell["bytes"] / 20e3, abs=1e-3)


@pytest.mark.parametrize(("load", "told"), [(0.1, False), (5000.0, True)])
def test_a_busy_machine_is_noted(monkeypatch, load, told):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    notes = run([from_backend(get_backend("torch_ref", "cpu"))])["notes"]
    assert bool(notes) is told
