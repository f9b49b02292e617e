"""The launch tests and the conformance kit in Triton's interpreter, chosen before the import."""

from pathlib import Path

import pytest
from engines import ENGINES, INTERPRETED, run_interpreted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(INTERPRETED, reason="this process already is the interpreter's"),
]

CONFORMANCE = """
from dataclasses import replace
from lora_backends import get_backend
from lora_backends.testing import verify
from lora_backends.testing.profiles import DEFAULT

backend = get_backend({engine!r}, device="cpu", **{options!r})
print(verify(backend, profile=replace(DEFAULT, effort={effort})).to_text())
"""
SEGMENTS = "csgmv and not csgmv-64 and not csgmv-auto and not through_tma and not of_a_table"
SELECTED = {"triton": "triton", "csgmv": SEGMENTS}
"""The engines share their arithmetic: what csgmv repeats is how a row of tokens is found."""
RUNS = [
    ("triton", {}, 0.05),
    ("csgmv", {"segment_size": 16}, 0.05),
    ("csgmv", {"segment_size": 64}, 0.03),
    ("csgmv", {"segment_size": "auto"}, 0.03),
]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_launch_tests_pass_in_the_interpreter(engine):
    here = Path(__file__).parent
    launches = [
        here / "test_launch.py",
        here / "test_features.py",
        *(here.parent / engine).glob("test_launch.py"),
    ]
    printed = run_interpreted("-m", "pytest", "-q", "-k", SELECTED[engine], *map(str, launches))
    assert " passed" in printed


@pytest.mark.parametrize("engine, options, effort", RUNS)
def test_the_conformance_suite_passes_in_the_interpreter(engine, options, effort):
    printed = run_interpreted(
        "-c", CONFORMANCE.format(engine=engine, options=options, effort=effort)
    )
    assert ", 0 failed, " in printed, printed
