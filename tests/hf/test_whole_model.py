"""The benchmark's logic on the CPU: it runs where it is to be measured only once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "tokens, modes",
    [(1, ["eager", "compiled"]), pytest.param(8, ["eager"], marks=pytest.mark.slow)],
)
def test_the_benchmark_of_a_whole_model_runs_small(tokens, modes, tmp_path):
    output = tmp_path / "result.json"
    command = [sys.executable, "benchmarks/whole_model.py", "--tiny", "--fuse", "--layers", "1"]
    command += ["--rows", "6", "--prefill", "0"] if tokens == 1 else ["--rows", "--prefill", "64"]
    command += ["--ranks", "4", "--adapters", "3", "--modes", *modes]
    command += ["--backend", "torch_ref", "--samples", "1", "--output", str(output)]
    subprocess.run(
        command,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=600,
    )
    result = json.loads(output.read_text())
    assert result["failed"] == {}
    cells = [(tokens, mode) for mode in modes]
    assert [(check["tokens"], check["mode"]) for check in result["checks"]] == cells
    assert max(check["relative_error"] for check in result["checks"]) < 1e-5
    assert min(check["least_change"] for check in result["checks"]) > 0.1
    timed = {(row["tokens"], row["mode"], row["contender"]) for row in result["rows"]}
    assert timed == {(*cell, name) for cell in cells for name in ("base", "ours")}
