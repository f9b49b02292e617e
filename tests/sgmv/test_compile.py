"""Every kernel compiles ahead of time, as it is launched, for the devices named as supported."""

import re
from typing import get_args

import pytest
import torch
from helpers.compiling.ahead_of_time import (
    BLENDS,
    SHARED_ALONE,
    TARGETS,
    blend_kernels,
    code_of_launch,
    compiled_by_a_process,
)

from lora_backends import LoRABatch, LoRAWeights
from lora_backends.sgmv import engine
from lora_backends.sgmv.blends.launch import How
from lora_backends.sgmv.launching.kernel import INTERPRETED, SpecializedKernel
from lora_backends.sgmv.tiles.gpu import H200
from lora_backends.triton import TritonBackend

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
    counts = {"triton": 34, "csgmv": 7, "experts": 54, "backward": 18, "blends": 12, "wide": 8}
    for label, count in counts.items():
        assert printed.count(f"{first} compiled {label}") >= count, label
    # one of each kernel; with one segment to a group csgmv takes triton's
    for target in set(others) - {f"{backend}:{arch}" for backend, arch in SHARED_ALONE}:
        assert printed.count(f"{target} compiled ") >= 20


def test_every_way_of_a_blend_is_compiled():
    found = [blend_kernels(dtype, cases, True, H200) for dtype, cases in BLENDS.items()]
    ways = {kernel.constants.get("HOW") for kernels in found for kernel in kernels}
    assert ways == {None, *get_args(How)}  # None: of a shrink


def expand_of(rank, tokens, slots, monkeypatch):
    """Return the kernel and the arguments of the expand that a layer of `rank` launches."""
    launched = {}
    monkeypatch.setattr(
        SpecializedKernel, "launch", lambda kernel, _, given: launched.update({kernel: given})
    )
    monkeypatch.setattr(engine, "INTERPRETED", True)  # no call is stored: nothing was compiled
    weights = LoRAWeights(
        lora_a=torch.zeros(slots, 1, rank, 4096, dtype=torch.bfloat16),
        lora_b=torch.zeros(slots, 512, rank, dtype=torch.bfloat16),
        ranks=torch.full((slots, 1), rank, dtype=torch.int32),
        scalings=torch.ones(slots, 1),
        output_slices=(512,),
    )
    backend = TritonBackend("cpu")
    plan = backend.prepare_batch(LoRABatch(torch.arange(tokens) % slots, slots))
    backend.run_linear(torch.zeros(tokens, 4096, dtype=torch.bfloat16), weights, plan)
    _, expand = launched.items()
    return expand


@pytest.mark.skipif(INTERPRETED, reason="the interpreter's kernels cannot be compiled")
@pytest.mark.parametrize("tokens, slots", [(32, 32), (32, 4)])  # without and with a matrix product
@pytest.mark.parametrize("rank", [8, 24])
def test_rows_of_8_ranks_are_loaded_16_bytes_at_a_time(tokens, slots, rank, monkeypatch):
    """Triton compiles for strides that are multiples of 16: of B in bytes, of h in padded rows."""
    expand, given = expand_of(rank, tokens, slots, monkeypatch)
    assert (expand.sizes.STAGES == 0) == (tokens == slots and rank == 8)
    ptx = code_of_launch(expand, given)["ptx"]
    assert "ld.global.b16" not in ptx
    # tables of the batch and the layer; loads of unpadded rows of h would add 16 or more
    assert ptx.count("ld.global.b32") <= 10


@pytest.mark.skipif(INTERPRETED, reason="the interpreter's kernels cannot be compiled")
def test_a_warp_loads_neighbouring_columns_of_one_rank(monkeypatch):
    """Triton knows that columns are contiguous only where their stride is the constant 1."""
    expand, given = expand_of(1, 32, 4, monkeypatch)
    code = code_of_launch(expand, given)["ttgir"]
    block = rf"tensor<{expand.sizes.BLOCK_R}x{expand.sizes.BLOCK_C}x"  # [R, C]
    (layout,) = re.findall(rf"%b_\d+ = tt\.load .*{block}.*, (#\w+)>", code)
    assert re.search(rf"{layout} = .*order = \[1, 0\]", code)  # lanes along C
