"""The launch tests in Triton's interpreter, which has to be chosen before the import."""

from pathlib import Path

import pytest
from engines import INTERPRETED, run_interpreted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(INTERPRETED, reason="this process already is the interpreter's"),
]


def test_the_launch_tests_pass_in_the_interpreter():
    tests = Path(__file__).parent / "test_launch.py"
    assert "passed" in run_interpreted("-m", "pytest", "-q", str(tests))


def test_the_conformance_suite_passes_in_the_interpreter():
    code = "from lora_backends.cli import main; main()"
    printed = run_interpreted("-c", code, "verify", "triton", "--device", "cpu")
    assert ", 0 failed, " in printed
