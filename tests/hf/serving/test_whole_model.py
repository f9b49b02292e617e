"""The benchmark's logic on the CPU: it runs where it is to be measured only once."""

import json

import pytest
from helpers.scripts import run_script


@pytest.mark.parametrize(
    "tokens, modes",
    [(1, ["eager", "compiled"]), (8, ["eager"])],
)
def test_the_benchmark_of_a_whole_model_runs_small(tokens, modes, tmp_path, monkeypatch):
    output = tmp_path / "result.json"
    given = ["--tiny", "--fuse", "--layers", "1", "--ranks", "4", "--adapters", "3"]
    given += ["--rows", "6", "--prefill", "0"] if tokens == 1 else ["--rows", "--prefill", "64"]
    given += ["--modes", *modes, "--backend", "torch_ref", "--samples", "1", "--output", output]
    run_script(monkeypatch, "whole_model", *given)
    result = json.loads(output.read_text())
    assert result["failed"] == {}
    cells = [(tokens, mode) for mode in modes]
    assert [(check["tokens"], check["mode"]) for check in result["checks"]] == cells
    assert max(check["relative_error"] for check in result["checks"]) < 1e-5
    assert min(check["least_change"] for check in result["checks"]) > 0.1
    timed = {(row["tokens"], row["mode"], row["contender"]) for row in result["rows"]}
    assert timed == {(*cell, name) for cell in cells for name in ("base", "ours")}
