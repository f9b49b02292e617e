"""Runs a measurement, and writes its file under benchmarks/results/ or to --output.

    python benchmarks/run.py                          # the list below
    python benchmarks/run.py cpu_cells --help         # its options
    python benchmarks/run.py cpu_cells --repeats 25

Run it from the repository root with PYTHONPATH=. where the package is not installed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from measuring import Measurement

TABLE = {
    "adapter_swaps": ("adapter_swaps:SWAPS", "swaps under load: wrong rows, memory"),
    "blends": ("blends:BLENDS", "several adapters per token: one pass, and one for each"),
    "continuous_smollm2": ("smollm2:CONTINUOUS", "continuous batching and fixed batches"),
    "cpu_cells": ("cpu_cells:CELLS", "numba_cpu, torch_ref and a loop in torch, layer by layer"),
    "cpu_eight_bit": ("cpu_cells:EIGHT_BIT", "stacks of 8 bits on numba_cpu"),
    "cpu_experts": ("cpu_experts:CELLS", "run_experts of numba_cpu and a loop in torch"),
    "decode_smollm2": ("smollm2:DECODE", "a decode step: base model, backends, PEFT"),
    "diffusion": ("diffusion:DIFFUSION", "images with an adapter each, and the base pipeline"),
    "eight_bit_quality": ("eight_bit_quality:QUALITY", "what 8 bits change in results"),
    "h200_cells": ("h200:CELLS", "one backend in the cells of the peers' file"),
    "h200_eight_bit": ("h200_eight_bit:LAYERS", "stacks of 8 and of 16 bits"),
    "h200_eight_bit_experts": ("h200_eight_bit:EXPERTS", "experts of 8 and of 16 bits"),
    "h200_features": ("h200_features:FEATURES", "factors, tensors per slice, several adapters"),
    "h200_memory": ("h200:MEMORY", "bytes that kernels read, by Nsight Compute"),
    "h200_moe": ("h200_moe:EXPERTS", "experts beside peers, and the routing alone"),
    "h200_sweep": ("h200:SWEEP", "curves along tokens and along adapters"),
    "prefetch_h200": ("prefetch_h200:PREFETCH", "a step whose adapter is prefetched, or in memory"),
    "sglang_step": ("sglang_step:STEP", "SGLang: LoRA off, its LoRA backends, this library"),
    "training": (
        "training:TRAINING",
        "a training step of one block: base, this library, PEFT's loop",
    ),
    "training_experts": ("training_experts:EXPERTS", "forward and backward of a mixture's experts"),
    "training_model": (
        "training_model:TRAINING_MODEL",
        "a training step of a whole model: base, this library, PEFT",
    ),
    "training_scale": (
        "training_scale:TRAINING_SCALE",
        "a training step on one and on two GPUs, the base whole and sharded",
    ),
    "vllm_gpu": ("vllm_gpu:STEP", "vLLM on GPUs: LoRA off, its operators, this library"),
    "vllm_live": ("vllm_live:LIVE", "vLLM: live updates under load, times beside bytes"),
    "vllm_step": ("vllm_step:STEP", "vLLM on a CPU: LoRA off, its operators, this library"),
    "whole_model": ("whole_model:WHOLE_MODEL", "a Llama of 8B shape, eager, graph, compiled"),
}
"""Where each measurement is, and what it measures."""


def main(arguments: Sequence[str]) -> None:
    """Run the measurement that the first argument names; list all without one."""
    if not arguments or arguments[0] not in TABLE:
        lines = [f"  {name:24}{about}" for name, (_, about) in TABLE.items()]
        raise SystemExit("\n".join(["python benchmarks/run.py NAME [options]", *lines]))
    module, _, attribute = TABLE[arguments[0]][0].partition(":")
    measurement: Measurement = getattr(importlib.import_module(module), attribute)
    measurement.run(arguments[0], arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
