"""What tests of the Triton engines share: the engines, where they run, and layers for them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lora_backends import LoRAWeights
from lora_backends.csgmv import CsgmvBackend
from lora_backends.sgmv.launching.kernel import INTERPRETED
from lora_backends.triton import TritonBackend

ON_GPU = torch.cuda.is_available() and not INTERPRETED
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
UNITS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-22}

ENGINES = {"triton": TritonBackend, "csgmv": CsgmvBackend}
VARIANTS = {
    "triton": (TritonBackend, {}),
    "csgmv-16": (CsgmvBackend, {"segment_size": 16}),
    "csgmv-64": (CsgmvBackend, {"segment_size": 64}),
    "csgmv-auto": (CsgmvBackend, {"segment_size": "auto"}),
}


def make_engine(variant, device, **options):
    """Return an engine as `VARIANTS` names it."""
    engine, own = VARIANTS[variant]
    return engine(device, **own, **options)


def device_or_skip():
    """Return the GPU, or the CPU in the interpreter."""
    if ON_GPU:
        return torch.device("cuda", torch.cuda.current_device())
    if INTERPRETED:
        return torch.device("cpu")
    pytest.skip("Triton needs a GPU, or TRITON_INTERPRET=1 set before the import")


def mark_gpu(items, conftest):
    """Mark tests beside a conftest that run on the GPU, so that `-m gpu` selects them."""
    for item in items:
        here = item.path.is_relative_to(Path(conftest).parent)
        if ON_GPU and here and "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)


def run_interpreted(*arguments, **environment):
    """Run Python where Triton's interpreter is chosen before the import; return its output."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def on(device, weights):
    """Return a layer on a device."""
    moved = {
        name: getattr(weights, name).to(device)
        for name in ("lora_a", "lora_b", "ranks", "scalings")
    }
    bias = None if weights.bias is None else weights.bias.to(device)
    return LoRAWeights(**moved, output_slices=weights.output_slices, bias=bias)


def ones(num_slots, slices, max_rank, inputs, device, dtype=torch.bfloat16):
    """Return a layer of ones whose adapters all have the highest rank."""
    return LoRAWeights(
        lora_a=torch.ones(num_slots, len(slices), max_rank, inputs, dtype=dtype, device=device),
        lora_b=torch.ones(num_slots, sum(slices), max_rank, dtype=dtype, device=device),
        ranks=torch.full((num_slots, len(slices)), max_rank, dtype=torch.int32),
        scalings=torch.ones(num_slots, len(slices)),
        output_slices=slices,
    )


def poisoned(empty):
    """Return `torch.empty` that gives NaN: memory that no kernel wrote must not reach a result."""

    def make(*size, **options):
        made = empty(*size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    return make
