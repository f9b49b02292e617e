"""Every kernel compiles ahead of time, as it is launched, for the devices named as supported."""

from typing import get_args

import pytest
from helpers.compiling.ahead_of_time import (
    BLENDS,
    SHARED_ALONE,
    TARGETS,
    blend_kernels,
    compiled_by_a_process,
)

from lora_backends.sgmv.blends.launch import How
from lora_backends.sgmv.tiles.gpu import H200

KERNELS = {  # by label
    "triton bf16": ("shrink", "expand", "gather"),
    "csgmv bf16": ("shrink", "expand", "gather"),
    "wide bf16": ("left", "right"),
    "blends bf16": ("shrink", "blend_shrink", "blend_expand", "add_planes"),
    "experts bf16": ("shrink", "expand", "sum", "product", "dx", "sum_pairs", "outer")
    + ("alone", "compare", "count", "scatter"),
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
    counts = {"triton": 34, "csgmv": 7, "experts": 48, "backward": 18, "blends": 12, "wide": 8}
    for label, count in counts.items():
        assert printed.count(f"{first} compiled {label}") >= count, label
    # one of each kernel; with one segment to a group csgmv takes triton's
    for target in set(others) - {f"{backend}:{arch}" for backend, arch in SHARED_ALONE}:
        assert printed.count(f"{target} compiled ") >= 20


def test_every_way_of_a_blend_is_compiled():
    found = [blend_kernels(dtype, cases, True, H200) for dtype, cases in BLENDS.items()]
    ways = {kernel.constants.get("HOW") for kernels in found for kernel in kernels}
    assert ways == {None, *get_args(How)}  # None: of a shrink
