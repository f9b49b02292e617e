"""Every kernel compiles ahead of time, as it is launched, for the devices named as supported."""

import ahead_of_time
import experts_ahead_of_time
import pytest
from ahead_of_time import TARGETS, compiled_by_a_process

DENSE = ("shrink_kernel", "expand_kernel", "gather_kernel")
EXPERTS = ("shrink", "expand", "sum", "compare", "count", "scatter")


@pytest.mark.slow
def test_every_launched_kernel_compiles(tmp_path):
    printed = compiled_by_a_process(cache=tmp_path).splitlines()
    for target in TARGETS:
        for engine in ("triton", "csgmv"):
            assert {f"{target} {engine} bf16 {kernel}" for kernel in DENSE} <= {*printed}
        assert {f"{target} experts bf16 {kernel}_kernel" for kernel in EXPERTS} <= {*printed}
        assert {f"{target} experts i8 {kernel}_kernel" for kernel in EXPERTS[:2]} <= {*printed}


def test_every_case_of_a_kernel_names_a_target():
    for cases in (*ahead_of_time.CASES.values(), *experts_ahead_of_time.CASES.values()):
        for case in cases:
            assert case[4] and {*case[4]} <= {*TARGETS}
