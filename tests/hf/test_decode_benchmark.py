"""The benchmark's logic on the CPU: it runs where it is to be measured only once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fuse", ["--fuse", "--no-fuse"])
def test_the_benchmark_of_a_decode_step_runs_small(tmp_path, fuse):
    output = tmp_path / "result.json"
    command = [sys.executable, "benchmarks/decode_llama_h200.py", "--tiny", "--no-compile", fuse]
    command += ["--backend", "torch_ref", "--steps", "16", "--output", output]
    subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=True, timeout=600)
    result = json.loads(output.read_text())
    assert result["failed"] == {}
    assert result["fused"] is (fuse == "--fuse")
    assert result["checks"]["no_adapter_relative_error"] < 1e-6
    assert max(error["torch_ref"] for error in result["checks"]["relative_error"]) < 1e-5
    assert {(row["kind"], row["contender"]) for row in result["rows"]} >= {("eager", "ours")}
    assert min(result["host_us"][name] for name in ("layer_fused_nothing", "layer_base")) > 0
