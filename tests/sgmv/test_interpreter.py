"""The launch tests and the conformance kit in Triton's interpreter, chosen before the import."""

from pathlib import Path

import pytest
from helpers.engines import INTERPRETED, run_interpreted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(INTERPRETED, reason="this process already is the interpreter's"),
]

RUNS = [
    ("triton", {}, 0.05, ()),
    ("csgmv", {"segment_size": 16}, 0.03, ("large_layers_are_right", "many_experts_are_right")),
    ("csgmv", {"segment_size": "auto"}, 0.02, ("large_layers_are_right", "many_experts_are_right")),
]
CONFORMANCE = f"""
from dataclasses import replace
from lora_backends import get_backend
from lora_backends.testing import properties, verify
from lora_backends.testing.profiles import DEFAULT

for engine, options, effort, left_out in {RUNS}:
    backend = get_backend(engine, device="cpu", **options)
    only = [name for name in properties() if name not in left_out]
    print(verify(backend, profile=replace(DEFAULT, effort=effort), only=only).to_text())
"""
REPEATED = "csgmv-64 or csgmv-auto or through_tma or of_a_table or 8_bit or backward"
SELECTED = {
    "by engine": f"triton or csgmv and not ({REPEATED})",
    # row by row, that test takes a quarter of the time of all others
    "without an engine": "not triton and not csgmv and not (row and serves_batches_of_every_size)",
}
"""Tests selected by name. Some runs of csgmv are left out: the engines share their arithmetic and
differ in how they find a row's tokens, which the other runs of csgmv test. A test of all engines
together compares the bits of gradients of csgmv with those of triton."""


@pytest.mark.parametrize("selected", SELECTED)
def test_the_launch_tests_pass_in_the_interpreter(selected):
    here = Path(__file__).parent
    files = [here / f"test_{name}.py" for name in ("launch", "features", "base_product")]
    files += [here / "backward" / f"test_{name}.py" for name in ("values", "isolation", "autograd")]
    if selected == "by engine":  # the other tests in these run without the interpreter
        files += [here.parent / "interface" / "test_foreign_tensors.py"]
        files += [here.parent / "hf" / "layers" / "test_beside.py"]
        files += [here.parent / "csgmv" / "test_launch.py"]
    printed = run_interpreted("-m", "pytest", "-q", "-k", SELECTED[selected], *map(str, files))
    assert " passed" in printed


def test_the_conformance_suite_passes_in_the_interpreter():
    printed = run_interpreted("-c", CONFORMANCE)
    assert printed.count(", 0 failed, ") == len(RUNS), printed
