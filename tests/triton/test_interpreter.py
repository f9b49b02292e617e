"""The launch tests in Triton's interpreter, which has to be chosen before the import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lora_backends.triton import launch


@pytest.mark.skipif(launch.INTERPRETED, reason="this process already is the interpreter's")
def test_the_launch_tests_pass_in_the_interpreter():
    tests = Path(__file__).parent / "test_launch.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(tests)],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
