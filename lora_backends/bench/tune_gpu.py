"""The labs of a tuning run: `GpuLab`s for its points."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lora_backends.backend import LoRABackend
from lora_backends.bench.lab import GpuLab
from lora_backends.bench.layers import make_layers, make_workload
from lora_backends.bench.tune import Point, Tuning
from lora_backends.selection.choice import get_backend
from lora_backends.sgmv.tiles.source import fixed_source
from lora_backends.weights import LoRAWeights


def gpu_lab(job: Tuning) -> Callable[[Point], GpuLab]:
    """Return a function that makes the lab of a point; points of one layer share its weights."""
    torch.cuda.set_device(job.device)
    made: dict[tuple[Any, ...], list[LoRAWeights]] = {}

    def lab_of(point: Point) -> GpuLab:
        key = (point.layer, point.cell.output_slices, point.cell.num_slots)
        if key not in made:
            made.clear()  # the next weights may need the memory
            made[key] = make_layers(point.cell, job.device, job.dtype)
        return GpuLab(partial(_backend, job, point), make_workload(point.cell, made[key]))

    return lab_of


def _backend(job: Tuning, point: Point, tiles: Any) -> LoRABackend:
    return get_backend(job.backend, job.device, tiles=fixed_source(point.tile_tokens, tiles))
