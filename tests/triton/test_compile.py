"""Every kernel compiles ahead of time, as it is launched, for the devices named as supported."""

import pytest
from ahead_of_time import TARGETS, compiled_by_a_process


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_launched_kernel_compiles(target, tmp_path):
    printed = compiled_by_a_process("triton", target, tmp_path)
    assert printed.count("compiled") >= 20
