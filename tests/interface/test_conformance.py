"""Every registered backend that runs here keeps every property of the conformance suite."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lora_backends import backend_names, get_backend, unavailable_reasons
from lora_backends.testing import DEFAULT, properties, verify
from lora_backends.testing.report import failure_text

COMPILED = ("csgmv", "numba_cpu", "triton")
"""Backends that compile a kernel for every combination of dtypes that the suite draws."""
EFFORTS = {("torch_ref", "cpu"): 0.15}
"""Part of the examples, where tests/testing/test_suite.py draws all of them."""
CUSTOM = Path(__file__).parents[2] / "examples" / "custom_backend"
GPU = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Run small cases on one thread: faster than two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("prop", list(properties()))
@pytest.mark.parametrize("device", ["cpu", *GPU])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in COMPILED else [])
        for name in backend_names()
    ],
)
def test_a_registered_backend_keeps(name, device, prop):
    reasons = unavailable_reasons(name, device)
    if reasons:
        pytest.skip(" ".join(reasons))
    profile = replace(DEFAULT, effort=EFFORTS.get((name, device), 1.0))
    (result,) = verify(name, device, profile, only=[prop]).results
    if result.status == "not applicable":
        pytest.skip(result.reason)
    if result.status == "failed":
        pytest.fail(failure_text(result), pytrace=False)


OPTIONS = {
    "csgmv-64": ("csgmv", {"segment_size": 64}),
    "csgmv-auto": ("csgmv", {"segment_size": "auto"}),
    "csgmv-invariant": ("csgmv", {"batch_invariant": True}),
    "triton-invariant": ("triton", {"batch_invariant": True}),
}
"""Options that choose other grids or tile sizes. In the interpreter each engine's own tests have
them."""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
@pytest.mark.parametrize("prop", list(properties()))
@pytest.mark.parametrize("option", OPTIONS)
def test_a_backend_with_options_keeps(option, prop):
    name, options = OPTIONS[option]
    backend = get_backend(name, device="cuda", **options)
    (result,) = verify(backend, "cuda", only=[prop]).results
    if result.status == "not applicable":
        pytest.skip(result.reason)
    if result.status == "failed":
        pytest.fail(failure_text(result), pytrace=False)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Install the example package as a distribution and return the environment that sees it."""
    source = tmp_path_factory.mktemp("source") / "custom_backend"
    shutil.copytree(CUSTOM, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    pip += ["--no-build-isolation", "--disable-pip-version-check", "--target", str(target)]
    done = subprocess.run([*pip, str(source)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}


FOUND = """
from dataclasses import replace

from lora_backends import backend_names, get_backend
from lora_backends.testing import DEFAULT, properties, verify


def test_it_is_found_by_its_entry_point_and_passes_verify_by_its_name():
    assert "gather" in backend_names()
    assert repr(get_backend("gather", "cpu")) == "<GatherBackend 'gather' on cpu>"
    few = [name for name in properties() if name.startswith("run_")]
    report = verify("gather", "cpu", replace(DEFAULT, effort=0.04), only=few)
    assert report.passed, report.to_text()
"""


def test_an_installed_package_is_found_and_its_own_test_file_runs_the_suite(installed, tmp_path):
    test_file = tmp_path / "test_gather.py"
    test_file.write_text((CUSTOM / "test_gather.py").read_text() + FOUND)
    only = "run_qkv_is_right or graph_replay_equals_eager or found_by_its_entry_point"
    command = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-k", only]
    done = subprocess.run(
        [sys.executable, *command, f"--rootdir={tmp_path}", str(test_file)],
        env=installed,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=installed["PYTHONPATH"],
    )
    assert "2 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "graphs are captured on CUDA devices" in done.stdout


def test_without_the_package_its_name_is_unknown():
    assert "gather" not in backend_names()
