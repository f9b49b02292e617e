"""Every kernel compiles ahead of time for the devices that are named as supported."""

from pathlib import Path

import pytest
from ahead_of_time import TARGETS, compiled_by_a_process

KERNELS = Path(__file__).with_name("csgmv_compile.py")


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_variant_compiles(target, tmp_path):
    printed = compiled_by_a_process(KERNELS, target, tmp_path)
    assert printed.count("compiled") >= 20
