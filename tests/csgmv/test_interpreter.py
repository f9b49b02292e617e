"""The launch tests and the conformance kit in Triton's interpreter."""

from pathlib import Path

import pytest
from engines import INTERPRETED, run_interpreted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(INTERPRETED, reason="this process already is the interpreter's"),
]

CONFORMANCE = """
from dataclasses import replace
from lora_backends.csgmv import CsgmvBackend
from lora_backends.testing import verify
from lora_backends.testing.profiles import DEFAULT

profile = replace(DEFAULT, effort={effort})
print(verify(CsgmvBackend("cpu", segment_size={size!r}), profile=profile).to_text())
"""


def test_the_launch_tests_pass_in_the_interpreter():
    tests = Path(__file__).parent / "test_launch.py"
    assert "passed" in run_interpreted("-m", "pytest", "-q", str(tests))


@pytest.mark.parametrize("size, effort", [(16, 1.0), (64, 0.1), ("auto", 0.1)])
def test_the_conformance_suite_passes_in_the_interpreter(size, effort):
    printed = run_interpreted("-c", CONFORMANCE.format(size=size, effort=effort))
    assert ", 0 failed, " in printed, printed
