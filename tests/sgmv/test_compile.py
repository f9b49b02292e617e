"""Every kernel compiles ahead of time, as it is launched, for the devices named as supported."""

import pytest
from helpers.compiling.ahead_of_time import SHARED_ALONE, TARGETS, compiled_by_a_process

KERNELS = {  # by label
    "triton bf16": ("shrink", "expand", "gather"),
    "csgmv bf16": ("shrink", "expand", "gather"),
    "experts bf16": ("shrink", "expand", "sum", "product", "dx", "sum_pairs", "outer")
    + ("compare", "count", "scatter"),
    "backward bf16": ("dh", "dx", "outer", "sum", "add_pieces", "add_planes", "add_columns"),
}


@pytest.mark.slow
@pytest.mark.parametrize("targets", TARGETS)
def test_every_launched_kernel_compiles(targets, tmp_path):
    printed = compiled_by_a_process(targets, cache=tmp_path)
    first, *others = targets.split()
    for label, kernels in KERNELS.items():
        for kernel in kernels:
            assert f"{first} compiled {label} {kernel}_kernel " in printed
    counts = {"triton": 34, "csgmv": 7, "experts": 48, "backward": 18, "blends": 4}
    for label, count in counts.items():
        assert printed.count(f"{first} compiled {label}") >= count, label
    # one of each kernel; with one segment to a group csgmv takes triton's
    for target in set(others) - {f"{backend}:{arch}" for backend, arch in SHARED_ALONE}:
        assert printed.count(f"{target} compiled ") >= 20
