"""The launch tests in Triton's interpreter, which has to be chosen before the import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lora_backends.triton import launch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(launch.INTERPRETED, reason="this process already is the interpreter's"),
]


def run_interpreted(*arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )


def test_the_launch_tests_pass_in_the_interpreter():
    tests = Path(__file__).parent / "test_launch.py"
    done = run_interpreted("-m", "pytest", "-q", str(tests))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


def test_the_conformance_suite_passes_in_the_interpreter():
    code = "from lora_backends.cli import main; main()"
    done = run_interpreted("-c", code, "verify", "triton", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 failed, " in done.stdout
