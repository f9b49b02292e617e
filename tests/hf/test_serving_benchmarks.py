"""The scripts that measure serving run, on small models."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def summary_of(tmp_path, script, *arguments):
    output = tmp_path / "result.json"
    command = [sys.executable, f"benchmarks/{script}", *arguments, "--output", output]
    subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=True, timeout=600)
    return json.loads(output.read_text())["summary"]


def test_continuous_batching_answers_as_alone(tmp_path):
    arguments = ("--tiny", "--rounds", "1", "--backend", "torch_ref")
    summary = summary_of(tmp_path, "continuous_smollm2.py", *arguments)
    assert summary["answers_as_alone"] == summary["requests"] == 12


def test_swaps_serve_no_wrong_row(tmp_path):
    summary = summary_of(tmp_path, "adapter_swaps.py", "--swaps", "60")
    assert summary["wrong_rows"] == 0 and summary["swaps"] >= 60
    assert summary["rows"] > summary["swaps"] / 2


def test_the_cost_of_a_swap_is_measured(tmp_path):
    arguments = ("--tiny", "--steps", "2", "--backend", "torch_ref")
    assert min(summary_of(tmp_path, "prefetch_h200.py", *arguments).values()) > 0
