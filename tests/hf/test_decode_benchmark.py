"""The benchmark's logic on the CPU: it runs where it is to be measured only once."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_benchmark_of_a_decode_step_runs_small(tmp_path):
    output = tmp_path / "result.json"
    command = [sys.executable, "benchmarks/decode_llama_h200.py", "--tiny", "--no-compile"]
    command += ["--backend", "torch_ref", "--steps", "16", "--output", output]
    subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=True, timeout=120)
    result = json.loads(output.read_text())
    assert result["failed"] == {}
    assert result["checks"]["no_adapter_relative_error"] == 0
    assert {(row["kind"], row["contender"]) for row in result["rows"]} >= {("eager", "ours")}
    assert result["host_us"]["hook_and_empty_backend"] > 0
