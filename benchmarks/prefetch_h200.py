"""Times a decode step with a new adapter that is in its slot, prefetched, or in memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import llama
import torch
from measuring import Measurement, Options, Result, Row, flag

from lora_backends.hf import MultiLoRAModel

ROWS, SLOTS, ADAPTERS, RANK = 16, 8, 24, 16
KINDS = ("in its slot", "prefetched", "from memory")


def measure(model: MultiLoRAModel, names: list[str], steps: int) -> dict[str, list[float]]:
    """Time decode steps of `ROWS` rows, of which the first may have another adapter; in ms."""
    device = model.backend.device
    ids = torch.randint(0, 60, (ROWS, 1), device=device)
    store, times = model.store, {kind: [] for kind in KINDS}
    assert store is not None

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def step(name: str) -> float:
        rows = [name] + [names[1 + row % (SLOTS - 2)] for row in range(ROWS - 1)]
        wait()
        start = time.perf_counter()
        model(adapters=rows, input_ids=ids)
        wait()
        return 1e3 * (time.perf_counter() - start)

    others = [names[0], *names[SLOTS - 1 :]]  # the other rows' adapters stay in their slots
    for turn in range(steps + 3):
        for kind in KINDS:
            following = others[(3 * turn + KINDS.index(kind)) % len(others)]
            if kind == "prefetched":
                store.prefetch([following])
            for _ in range(3):  # batches beside which the copies go on
                taken = step(names[1])
            if kind == "in its slot":
                following = names[1]
            taken = step(following)
            if turn >= 3:
                times[kind].append(taken)
    return times


def device_of(options: Options) -> torch.device:
    """Return where the model is."""
    return torch.device("cpu" if options.tiny else "cuda")


def measure_kinds(options: Options, result: Result) -> Iterator[Row]:
    """Yield a row for each place of the adapter."""
    base = llama.make_base(device_of(options), layers_of(options), options.tiny, vocab_size=32000)
    model = MultiLoRAModel(base, options.backend, SLOTS, RANK)
    model.keep_adapters(cpu_bytes=64 * 2**30)
    names = [f"adapter{index}" for index in range(ADAPTERS)]
    for seed, name in enumerate(names):
        model.add_adapter(name, llama.random_adapter(base, RANK, seed, "cpu"))
    result |= {"dtype": str(base.dtype).removeprefix("torch."), "backend": model.backend.name}
    for kind, series in measure(model, names, options.steps).items():
        yield {
            "kind": kind,
            "ms": round(statistics.median(series), 3),
            "ms_min": round(min(series), 3),
        }


def layers_of(options: Options) -> int:
    """Return the layers of the model."""
    return 2 if options.tiny else options.layers


def settings(options: Options) -> dict[str, Any]:
    """Return what the result says besides its rows."""
    method = (
        f"A pass of {ROWS} rows of one token, eager, 7 or 8 adapters of rank {RANK} on all linear "
        f"layers of {layers_of(options)} layers; the adapter of the first row lies in its slot, "
        f"was prefetched into a slot during the 3 passes before, or comes from memory at that "
        f"moment. Milliseconds from a synchronised start to the end, medians."
    )
    return {"method": method, "device": device_of(options), "dtype": None, "backend": None}


PREFETCH = Measurement(
    rows=measure_kinds,
    file="h200_prefetch.json",
    settings=settings,
    summary=lambda result: {row["kind"]: row["ms"] for row in result["rows"]},
    options={
        "--layers": flag(16),
        "--steps": flag(40),
        "--tiny": flag(False, "a small model on the CPU, to try it"),
        "--backend": flag("auto"),
    },
)
