"""Compiles the kernels for every batch that the engine may run, before it serves.

Otherwise a kernel would be compiled by the first batch that needs it, and every request would wait
for seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from lora_backends.integrations.plans import Plans
from lora_backends.integrations.vllm import experts, operation, plugin
from lora_backends.integrations.vllm.layers import AdoptedLayer
from lora_backends.integrations.vllm.methods import replace

PROGRESS = 10.0
"""Seconds between lines of progress in the log."""


class Batch(NamedTuple):
    """The sizes of a batch that select its kernels."""

    rows: int
    slots: int  # that have rows


def batches(most_rows: int, num_slots: int) -> list[Batch]:
    """Return batches of all sizes up to `most_rows` rows, a quarter of an octave apart.

    >>> batches(2, 4)
    [Batch(rows=1, slots=1), Batch(rows=2, slots=1), Batch(rows=2, slots=2)]
    """
    return _combined(_steps(most_rows), _steps(num_slots))


def _steps(most: int) -> list[int]:
    powers = range(4 * (most.bit_length() + 1))
    return sorted({min(most, round(2 ** (power / 4))) for power in powers})


def _combined(rows: Iterable[int], slots: Iterable[int]) -> list[Batch]:
    return [Batch(each, active) for each in rows for active in slots if active <= each]


def distinct(most_rows: int, num_slots: int, sizes: Callable[[int, int], Any]) -> list[Batch]:
    """Return one batch of each kind among all batches of up to `most_rows` rows.

    Rows above 256 and slots above 16 are sampled in steps.

    Args:
        most_rows: of a batch.
        num_slots: that may have rows.
        sizes: returns a key for rows and slots; equal keys need the same kernels.
    """
    rows = [*range(1, 256), *range(256, 1024, 8), *range(1024, most_rows, 32), most_rows]
    slots = range(1, num_slots + 1) if num_slots <= 16 else _steps(num_slots)
    found: dict[Any, Batch] = {}
    for batch in _combined(sorted({min(each, most_rows) for each in rows}), slots):
        found.setdefault(sizes(batch.rows, batch.slots), batch)
    return list(found.values())


def follow() -> None:
    """Let vLLM's workers compile before they measure the free memory for caches."""
    for module, owner in (("gpu_worker", "Worker"), ("cpu_worker", "CPUWorker")):
        place = f"vllm.v1.worker.{module}", owner
        replace(*place, "determine_available_memory", _warm_up_first, is_optional=True)


def _warm_up_first(original: Callable[..., Any], worker: Any) -> Any:
    manager = getattr(worker.model_runner, "lora_manager", None)
    if manager is not None:
        warm_up(manager._adapter_manager)
    return original(worker)


def warm_up(manager: Any) -> None:
    """Run every kind of layer on every kind of batch, with empty slots.

    Args:
        manager: vLLM's `LoRAModelManager`, after it has made its layers.
    """
    trials: dict[Any, Trial] = {}
    for module in manager.modules.values():
        trials |= _trials(module, manager.max_num_seqs)
    jobs = [(trial, batch) for trial in trials.values() for batch in trial.batches()]
    if not jobs:
        return
    log = plugin.logger()
    log.info("compiling LoRA kernels: %d kinds of layers, %d calls", len(trials), len(jobs))
    began = said = time.monotonic()
    for done, (trial, batch) in enumerate(jobs, 1):
        trial.plans.set_slots([row % batch.slots for row in range(batch.rows)])
        with torch.inference_mode():
            trial.call(batch.rows)
        if time.monotonic() - said > PROGRESS:
            said = time.monotonic()
            log.info("compiling LoRA kernels: %d of %d calls", done, len(jobs))
    for trial in trials.values():
        trial.plans.forget()
    if any(trial.plans.backend.device.type == "cuda" for trial in trials.values()):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # vLLM measures the memory that is left
    log.info("LoRA kernels are compiled: %.1f s", time.monotonic() - began)


@dataclass(frozen=True)
class Trial:
    """One kind of layer, and a call that runs it."""

    plans: Plans
    most_rows: int
    call: Callable[[int], None]  # runs the layer on so many rows of zeros
    weights: Any = None  # of the layer, for `kernel_sizes` of the backend
    halves: bool = False  # whether A and B run apart

    def batches(self) -> list[Batch]:
        """Return batches that together need every kernel of the engine's batches."""
        backend, slots, most = self.plans.backend, self.plans.num_slots, self.most_rows
        if backend.device.type == "cpu":  # only the rows per slot select routines
            few = min(most, 64)
            return [*dict.fromkeys([Batch(1, 1), Batch(few, min(few, slots)), Batch(few, 1)])]
        kernel_sizes = getattr(backend, "kernel_sizes", None)
        if kernel_sizes is None or self.weights is None:
            return batches(most, slots)
        return distinct(
            most, slots, partial(kernel_sizes, weights=self.weights, halves=self.halves)
        )


def _trials(module: Any, most_requests: int) -> dict[Any, Trial]:
    """Return the trials of a module, by keys of what selects their kernels."""
    layers = getattr(module, "lora_backends_layers", None)
    if not layers:
        return {}
    wrapper = module.punica_wrapper
    plans, dtype = wrapper.tokens, wrapper.model_dtype
    if experts.is_experts(module):
        top_k = module.moe_config.experts_per_token
        kind = ("experts", top_k, *map(_kind, layers))
        return {kind: Trial(plans, plans.most_rows, experts.trial(plans, layers, top_k, dtype))}
    layer: AdoptedLayer = layers[0]
    if layer.a is layer.b:
        whole = operation.LINEAR, plans, plans.most_rows, False
        if hasattr(module, "sharded_to_full_mapping") or hasattr(module, "full_weight_stacked"):
            sampled = wrapper.sampled
            whole = operation.LOGITS, sampled, min(most_requests, sampled.most_rows), False
        parts = [(layer.b, *whole)]
    else:
        parts = [
            (half, name, plans, plans.most_rows, True)
            for name, half in ((operation.SHRINK, layer.a), (operation.EXPAND, layer.b))
        ]
    return {
        (name, _kind(half)): Trial(
            own, most, operation.trial(layer, own, name, dtype), half, halves
        )
        for half, name, own, most, halves in parts
        if half is not None
    }


def _kind(weights: Any) -> tuple[Any, ...]:
    """Return a key of everything in a layer that selects its kernels."""
    a, b = (
        None if stack is None else (stack[0] if isinstance(stack, tuple) else stack)
        for stack in (weights.lora_a, weights.lora_b)
    )
    strides = tuple(None if each is None else each.stride()[-2:] for each in (a, b))
    has_factors = getattr(weights, "output_scales", None) is not None
    return (
        weights.output_slices,
        weights.max_rank,
        weights.in_features,
        weights.dtype,
        strides,
        has_factors,
    )
