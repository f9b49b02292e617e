"""Every kernel compiles ahead of time, as it is launched, for the devices named as supported."""

import pytest
from helpers.ahead_of_time import TARGETS, compiled_by_a_process


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_launched_kernel_compiles(target, tmp_path):
    printed = compiled_by_a_process(target, cache=tmp_path)
    for engine in ("triton", "csgmv"):
        for kernel in ("shrink_kernel", "expand_kernel", "gather_kernel"):
            assert f"compiled {engine} bf16 {kernel}\n" in printed
    assert printed.count("compiled triton") >= 19
    assert printed.count("compiled csgmv") >= 10
    assert printed.count("compiled blends") == 2
    assert printed.count("compiled experts") == 54
    for kernel in ("dh", "dx", "outer", "sum", "add_pieces", "add_planes", "add_columns"):
        assert f"compiled backward bf16 {kernel}_kernel " in printed
