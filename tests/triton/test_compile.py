"""Every kernel compiles ahead of time for the devices that are named as supported."""

import os
import subprocess
import sys

import pytest

TARGETS = ["cuda:80", "cuda:90", "cuda:100", "hip:gfx942"]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_variant_compiles(target, tmp_path):
    # a process of its own: under TRITON_INTERPRET=1 this one holds no compiler
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "triton_compile", target],
        cwd=os.path.dirname(__file__),
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("compiled") >= 20
