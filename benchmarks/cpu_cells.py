"""Measures `numba_cpu` against a plain torch loop and `torch_ref`, cell by cell.

    python benchmarks/cpu_cells.py [--dtypes float32 bfloat16] [--repeats 9] [--output FILE]

A cell is one linear layer: widths, tokens, active adapters, rank. The contenders take turns to
sweep over the cell's layers; the best sweep of each gives its time. A read of 256 MiB, by the
fastest of three torch operations, empties the caches before every sweep. A second read follows
each `numba_cpu` sweep. `of_read` is the bandwidth of a `numba_cpu` sweep over the mean bandwidth
of the two reads, as the median over all sweeps, because the bandwidth of a shared machine changes
within seconds. It counts the bytes of A and B of the active adapters alone: all layers share x and
y, which stay in a cache. A floor is the time to move A and B once, x once and y twice. The copy
floor takes the bandwidth of a copy, the better of two measurements before and after the cell; the
read floor takes the median bandwidth of the reads. The summary also gives the speedup over the
loop of an ideal engine that runs at a floor and has no cost per call.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lora_backends import LoRABatch, LoRAWeights
from lora_backends.bench.results import new_result, write_result
from lora_backends.numba_cpu import NumbaCPUBackend
from lora_backends.torch_ref import TorchRefBackend

WIDTHS = ((576, 1536), (4096, 4096))
COMPOSITIONS = ((1, 1), (16, 8), (64, 8), (64, 64), (512, 8))  # tokens, active adapters
RANKS = (16, 64)
ROTATED_BYTES = 192 * 2**20
CONTENDERS = ("loop", "torch_ref", "numba_cpu")
RESULT = Path(__file__).parent / "results" / "cpu_cells.json"


class Cell:
    """One layer shape and batch, with as many layers as the rotation needs."""

    def __init__(
        self, dtype: torch.dtype, widths: tuple[int, int], batch: tuple[int, int], rank: int
    ) -> None:
        self.dtype, (self.d_in, self.d_out), (self.tokens, self.adapters) = dtype, widths, batch
        self.rank = rank
        layer_bytes = self.adapters * (self.d_in + self.d_out) * rank * dtype.itemsize
        self.num_layers = max(2, min(64, math.ceil(ROTATED_BYTES / layer_bytes)))
        self.layers = [self._layer() for _ in range(self.num_layers)]
        slots = torch.arange(self.tokens) % self.adapters  # neighbours use different adapters
        self.batch = LoRABatch(slots, self.adapters)
        self.rows = [(slots == slot).nonzero().flatten() for slot in range(self.adapters)]
        self.x = torch.randn(self.tokens, self.d_in).to(dtype)
        self.y = torch.zeros(self.tokens, self.d_out, dtype=dtype)
        self.weight_bytes = layer_bytes
        self.bytes = layer_bytes + self.tokens * (self.d_in + 2 * self.d_out) * dtype.itemsize

    def _layer(self) -> LoRAWeights:
        like = {"dtype": self.dtype}
        return LoRAWeights(
            lora_a=torch.randn(self.adapters, 1, self.rank, self.d_in).to(**like),
            lora_b=torch.randn(self.adapters, self.d_out, self.rank).to(**like) * 1e-3,
            ranks=torch.full((self.adapters, 1), self.rank, dtype=torch.int32),
            scalings=torch.ones(self.adapters, 1),
            output_slices=(self.d_out,),
        )

    def contenders(self) -> dict[str, Callable[[LoRAWeights], None]]:
        """Return a function per contender that runs one layer; plans are made beforehand."""
        calls: dict[str, Callable[[LoRAWeights], None]] = {"loop": self._loop}
        for backend in (TorchRefBackend(), NumbaCPUBackend()):
            calls[backend.name] = _linear(backend, backend.prepare_batch(self.batch), self)
        return calls

    def _loop(self, weights: LoRAWeights) -> None:
        """Two matrix products and one index_add_ per adapter."""
        for slot, rows in enumerate(self.rows):
            h = self.x[rows] @ weights.lora_a[slot, 0].T
            self.y.index_add_(0, rows, h @ weights.lora_b[slot].T)


def _linear(backend: Any, plan: Any, cell: Cell) -> Callable[[LoRAWeights], None]:
    return lambda weights: backend.run_linear(cell.x, weights, plan, cell.y)


class Memory:
    """Measures the current bandwidth of the memory, in bytes per second."""

    def __init__(self, source: torch.Tensor) -> None:
        self.source, self.target = source, torch.empty_like(source)
        matrix = source.view(-1, 4096)
        readers = (lambda: matrix @ matrix[0], source.sum, lambda: source @ source)
        # the fastest depends on the CPU: on an AMD EPYC the matrix product reads at 0.6 of the rate
        # of the others; they take turns, because a busy machine may slow one of them down
        rounds = [[_seconds(reader) for reader in readers] for _ in range(9)]
        best = [min(times) for times in zip(*rounds, strict=True)]
        self.reader = readers[best.index(min(best))]

    def copied(self) -> float:
        """Return the bandwidth of a copy, reads and writes together: the best of five."""
        return 2 * self.source.nbytes / _best_seconds(lambda: self.target.copy_(self.source))

    def read(self) -> float:
        """Return the bandwidth of one pass that only reads."""
        return self.source.nbytes / _seconds(self.reader)


def _best_seconds(call: Callable[[], Any]) -> float:
    return min(_seconds(call) for _ in range(5))


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(cell: Cell, repeats: int, memory: Memory) -> dict[str, Any]:
    """Return the results of a cell: microseconds per layer, floors, bandwidths and `of_read`."""
    calls = cell.contenders()
    sweeps: dict[str, list[float]] = {name: [] for name in calls}
    reads, shares = [], []
    copied = memory.copied()
    for call in calls.values():
        call(cell.layers[0])
    for _ in range(repeats):
        for name, call in calls.items():
            before = memory.read()
            cell.y.zero_()
            seconds = _seconds(lambda call=call: _sweep(call, cell)) / cell.num_layers
            sweeps[name].append(seconds)
            if name == "numba_cpu":
                reads.append((before + memory.read()) / 2)
                shares.append(cell.weight_bytes / seconds / reads[-1])
    best = {name: min(found) for name, found in sweeps.items()}
    copied, read = max(copied, memory.copied()), statistics.median(reads)
    return {
        "dtype": str(cell.dtype).removeprefix("torch."),
        "in_features": cell.d_in,
        "out_features": cell.d_out,
        "tokens": cell.tokens,
        "adapters": cell.adapters,
        "rank": cell.rank,
        "layers": cell.num_layers,
        "bytes": cell.bytes,
        "microseconds": {name: round(best[name] * 1e6, 2) for name in CONTENDERS},
        "copy_floor_microseconds": round(cell.bytes / copied * 1e6, 2),
        "read_floor_microseconds": round(cell.bytes / read * 1e6, 2),
        "copy_gb_per_s": round(copied / 1e9, 1),
        "read_gb_per_s": round(read / 1e9, 1),
        "times_loop": round(best["loop"] / best["numba_cpu"], 2),
        "of_read": round(statistics.median(shares), 2),
    }


def _sweep(call: Callable[[LoRAWeights], None], cell: Cell) -> None:
    for weights in cell.layers:
        call(weights)


def call_microseconds(calls: int = 5000) -> float:
    """Return the time of a call with almost no work: 1 token, 16 x 16, rank 4."""
    cell = Cell(torch.float32, (16, 16), (1, 1), 4)
    call, weights = cell.contenders()["numba_cpu"], cell.layers[0]

    def sweep() -> None:
        for _ in range(calls):
            call(weights)

    return round(_best_seconds(sweep) / calls * 1e6, 2)


def cold_call_microseconds(memory: Memory, repeats: int = 25) -> float:
    """Return the time of the call of `call_microseconds` on layers that are in no cache.

    Each repeat empties the caches and takes the mean over 64 layers; the median repeat counts.
    """
    cell = Cell(torch.float32, (16, 16), (1, 1), 4)
    call, found = cell.contenders()["numba_cpu"], []
    _sweep(call, cell)
    for _ in range(repeats):
        memory.read()
        found.append(_seconds(lambda: _sweep(call, cell)) / cell.num_layers)
    return round(statistics.median(found) * 1e6, 2)


def summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the summary of the cells, by dtype."""
    found: dict[str, Any] = {}
    for dtype in sorted({cell["dtype"] for cell in cells}):
        mine = [cell for cell in cells if cell["dtype"] == dtype]
        decode = [cell for cell in mine if cell["tokens"] <= 64]
        long = [cell for cell in mine if cell["tokens"] > 64]
        speeds = [cell["times_loop"] for cell in decode]
        found[dtype] = {
            "decode_times_loop_geometric_mean": round(statistics.geometric_mean(speeds), 2),
            "decode_times_loop_least": min(speeds),
            "decode_times_loop_at_copy_bandwidth": _at_floor(decode, "copy_floor_microseconds"),
            "decode_times_loop_at_read_bandwidth": _at_floor(decode, "read_floor_microseconds"),
            "decode_times_loop_at_copy_bandwidth_or_measured": _at_floor(
                decode, "copy_floor_microseconds", or_measured=True
            ),
            "512_tokens_times_loop_least": min(cell["times_loop"] for cell in long),
            "read_gb_per_s": statistics.median(cell["read_gb_per_s"] for cell in decode),
            "decode_of_read_least_by_adapters": {
                str(count): min(cell["of_read"] for cell in decode if cell["adapters"] == count)
                for count in sorted({cell["adapters"] for cell in decode})
            },
        }
    return found


def _at_floor(cells: list[dict[str, Any]], floor: str, or_measured: bool = False) -> float:
    """Return the geometric mean of the loop's time over the floor, or over less if measured."""
    ratios = []
    for cell in cells:
        times = cell["microseconds"]
        least = min(cell[floor], times["numba_cpu"]) if or_measured else cell[floor]
        ratios.append(times["loop"] / least)
    return round(statistics.geometric_mean(ratios), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    dtypes = [getattr(torch, name) for name in options.dtypes]
    NumbaCPUBackend().warmup(dtypes)
    memory = Memory(torch.ones(64 * 2**20))
    cells = []
    for dtype in dtypes:
        for widths in WIDTHS:
            for batch in COMPOSITIONS:
                for rank in RANKS:
                    with torch.no_grad():
                        found = measure(Cell(dtype, widths, batch, rank), options.repeats, memory)
                    cells.append(found)
                    print(json.dumps(found), flush=True)
    with torch.no_grad():
        call, cold = call_microseconds(), cold_call_microseconds(memory)
    method = " ".join((__doc__ or "").split("\n\n")[2].split())
    result = new_result(method, call_microseconds=call, cold_call_microseconds=cold)
    result |= {"rows": cells, "summary": summary(cells)}
    write_result(options.output, result)
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
