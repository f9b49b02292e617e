"""Every kernel compiles ahead of time, as it is launched, for the devices named as supported."""

import pytest
from ahead_of_time import TARGETS, compiled_by_a_process
from engines import ENGINES


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_launched_kernel_compiles(engine, target, tmp_path):
    printed = compiled_by_a_process(engine, target, cache=tmp_path)
    assert printed.count("compiled") >= 19


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_of_experts_compiles(target, tmp_path):
    printed = compiled_by_a_process(target, cache=tmp_path, module="experts_ahead_of_time")
    assert printed.count("compiled") == 17
