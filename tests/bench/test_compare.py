"""The comparison of two source trees, here on the CPU with tiny cells."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "h200_compare.py"
NEW = """
import os

from lora_backends.torch_ref import TorchRefBackend


class New(TorchRefBackend):
    def run_linear(self, x, weights, plan, base_output=None):
        if plan.num_tokens == 300:
            os._exit(3)
        y = super().run_linear(x, weights, plan, base_output)
        return y.mul_(1.1) if plan.num_tokens == 5 else y
"""


def test_trees_are_compared_and_a_wrong_or_dead_one_is_recorded(tmp_path):
    """The new tree is this one with an engine that is wrong at 5 tokens and ends at 300."""
    tree, peers, output = tmp_path / "new", tmp_path / "peers.json", tmp_path / "out.json"
    tree.mkdir()
    (tree / "lora_backends").symlink_to(ROOT / "lora_backends")
    (tree / "other.py").write_text(NEW)
    registered = '[project.entry-points.lora_backends]\ntorch_ref = "other:New"\n'
    (tree / "pyproject.toml").write_text(registered)
    row = {"projection": "qkv", "active_adapters": 2, "rank": 4, "mix": "skewed", "limit_us": 1.0}
    rows = [row | {"tokens": tokens} for tokens in (4, 5, 300, 301)]
    peers.write_text(json.dumps({"projections": {"qkv": [16, [8, 4, 4]]}, "rows": rows}))
    given = [ROOT, tree, "--backend", "torch_ref", "--peers", peers, "--output", output]
    small = ["--jobs", "1", "--host-rounds", "1", "--host-calls", "10", "--replays", "1"]
    command = [sys.executable, SCRIPT, *given, *small, "--device", "cpu"]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=tmp_path, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    right, wrong, dead, after = found["rows"]
    for cell in (right, after):
        assert cell["same_bits"] and cell["old_us"] > 0 and cell["new_us"] > 0
        assert cell["ratio"] > 0
    assert "wrong result" in wrong["new_error"] and "ratio" not in wrong
    assert "the process has ended" in dead["new_error"] and dead["old_us"] > 0
    summary = found["summary"]["torch_ref"]
    assert summary["decode"]["cells"] == summary["prefill"]["cells"] == 1
    assert [cell["tokens"] for cell in summary["failed"]] == [5, 300]
    assert found["host_us"]["torch_ref"]["prepare_batch_256"]["new"] > 0
    assert "1 failed, first: the process has ended" in found["compiling"]
    assert "new/old" in done.stdout
