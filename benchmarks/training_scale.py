"""Times a training step on several GPUs: the base sharded by `fully_shard`, adapters replicated.

Each number of GPUs runs in processes of its own, which this script starts. Every process has the
same number of rows, so with perfect scaling the milliseconds stay those of one.
"""

from __future__ import annotations

import datetime
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama
import torch
import torch.distributed as dist
import torch.multiprocessing
from measuring import Measurement, Options, Result, Row, flag
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training_model import ADAPTERS, Batch, config_of

from lora_backends.hf import MultiLoRAModel, TrainingModule

TIMEOUT = datetime.timedelta(minutes=5)
BASES = ("whole", "sharded")


def device_of(rank: int) -> torch.device:
    """Return the device of a process."""
    return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")


class Worker:
    """One process: its part of the model and its own rows.

    Args:
        rank: of the process.
        size: number of processes.
        kind: "sharded", or "whole" for a copy of the base in each process.
        options: of the command line.
    """

    def __init__(self, rank: int, size: int, kind: str, options: Options) -> None:
        self.device = device_of(rank)
        layers = 2 if options.tiny else options.layers
        base = llama.make_base(self.device, layers, options.tiny)
        base.gradient_checkpointing_enable({"use_reentrant": False})
        base.train()
        if kind == "sharded":
            for layer in base.model.layers:
                fully_shard(layer)
            fully_shard(base)
        self.batch = Batch(base, options.rows, options.tokens)
        names = list(dict.fromkeys(self.batch.names))
        model = MultiLoRAModel(base, options.backend, ADAPTERS, options.rank)
        for name in names:
            model.new_adapter(name, config_of(options.rank))
        self.module = TrainingModule(model, names).train()
        # A bucket view saves a copy of every gradient.
        self.wrapper = DistributedDataParallel(self.module, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.wrapper.parameters(), lr=1e-5)
        self.size = size

    def step(self) -> None:
        """Run forward, backward, the reduction of gradients and the optimizer."""
        batch = self.batch
        counts = self.module.counts_of(batch.ids, batch.names)
        dist.all_reduce(counts)
        words = {"labels": batch.ids, "counts": counts / self.size, "use_cache": False}
        self.wrapper(adapters=batch.names, input_ids=batch.ids, **words).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def time(self) -> float:
        """Return the milliseconds of a step, which all processes begin together."""
        dist.barrier()
        llama.synchronize(self.device)
        start = time.perf_counter()
        self.step()
        llama.synchronize(self.device)
        return 1e3 * (time.perf_counter() - start)


def work(rank: int, size: int, options: Options, folder: str) -> None:
    """Run one of the processes; the first writes the results of each kind of base."""
    device = device_of(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(f"{folder}/store", size),
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
    )
    found = {kind: measured(Worker(rank, size, kind, options), options.samples) for kind in BASES}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measured(worker: Worker, samples: int) -> dict[str, Any]:
    """Return the milliseconds of a worker's steps, and its peak memory on a GPU."""
    on_gpu = worker.device.type == "cuda"
    for _ in range(2):
        worker.step()
    if on_gpu:
        gc.collect()  # the model before this one
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    found: dict[str, Any] = {"ms": [worker.time() for _ in range(samples)]}
    if on_gpu:
        found["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    return found


def measure(options: Options, result: Result) -> Iterator[Row]:
    """Yield a row per number of processes and kind of base."""
    if not torch.cuda.is_available() and not options.tiny:
        raise SystemExit("needs a GPU; --tiny runs a small model on the CPU")
    for size in options.processes:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(work, (size, options, folder), nprocs=size)
            every = json.loads(Path(folder, "found.json").read_text())
        for kind, found in every.items():
            ms = statistics.median(found.pop("ms"))
            tokens = size * options.rows * options.tokens
            yield {
                "processes": size,
                "base": kind,
                "ms": round(ms, 2),
                "tokens_per_s": round(1e3 * tokens / ms),
                **found,
            }


def summary(result: Result) -> dict[str, float]:
    """Return the tokens a second of each row, beside those of one process with a whole base."""
    rows = result["rows"]
    return {
        f"{row['processes']} processes, {row['base']} base": round(
            row["tokens_per_s"] / rows[0]["tokens_per_s"], 3
        )
        for row in rows
    }


def settings(options: Options) -> dict[str, Any]:
    """Return how it is measured."""
    method = (
        f"A training step (forward, backward, reduction, AdamW) of a Llama of 8B shape with "
        f"{options.layers} layers, bfloat16, gradient checkpointing on; {options.rows} rows of "
        f"{options.tokens} tokens in each process, row i has adapter i mod {ADAPTERS} of rank "
        f"{options.rank}. sharded: fully_shard of each layer and the rest; whole: a copy in each "
        f"process. DDP averages the gradients of the adapters. Medians of wall times of the first "
        f"process; the summary has tokens a second relative to the first row."
    )
    return {"method": method, "device": device_of(0), "backend": options.backend}


TRAINING_SCALE = Measurement(
    rows=measure,
    file="h100_training_scale.json",
    settings=settings,
    summary=summary,
    options={
        "--backend": flag("auto"),
        "--processes": flag([1, 2], "a GPU each"),
        "--rank": flag(16),
        "--rows": flag(16, "of each process"),
        "--tokens": flag(512, "per row"),
        "--layers": flag(8),
        "--samples": flag(9),
        "--tiny": flag(False, "a small model"),
    },
)
