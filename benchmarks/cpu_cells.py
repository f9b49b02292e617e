"""Measures `numba_cpu` layer by layer: beside a torch loop and `torch_ref`, and with 8 bits."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from measuring import Measurement, Options, Result, Row, flag, mean_and_least, seconds

from lora_backends import LoRABatch, LoRAWeights, quantize_weights
from lora_backends.dtypes import dtype_name
from lora_backends.numba_cpu import NumbaCPUBackend
from lora_backends.torch_ref import TorchRefBackend

WIDTHS = ((576, 1536), (4096, 4096))
COMPOSITIONS = ((1, 1), (16, 8), (64, 8), (64, 64), (512, 8))  # tokens, active adapters
RANKS = (16, 64)
ROTATED_BYTES = 192 * 2**20
CONTENDERS = ("loop", "torch_ref", "numba_cpu")
STORED = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
METHOD = (
    "A cell is one linear layer: widths, tokens, active adapters, rank. The contenders take turns "
    "to sweep over the cell's layers; the best sweep of each gives its time. A read of 256 MiB, "
    "by the fastest of three torch operations, empties the caches before every sweep. A second "
    "read follows each `numba_cpu` sweep. `of_read` is the bandwidth of a `numba_cpu` sweep over "
    "the mean bandwidth of the two reads, as the median over all sweeps, because the bandwidth of "
    "a shared machine changes within seconds. It counts the bytes of A and B of the active "
    "adapters alone: all layers share x and y, which stay in a cache. A floor is the time to move "
    "A and B once, x once and y twice. The copy floor takes the bandwidth of a copy, the better "
    "of two measurements before and after the cell; the read floor takes the median bandwidth of "
    "the reads. The summary also gives the speedup over the loop of an ideal engine that runs at "
    "a floor and has no cost per call."
)
EIGHT_BIT_METHOD = (
    "A cell is one linear layer of the decode cells of `cpu_cells.py` with at least 8 adapters. "
    "Each cell rotates over enough layers that the weights of each dtype do not stay in the "
    "second-level cache. x and y have the dtype of the stacks, and are bfloat16 for those of 8 "
    "bits. The dtypes take turns call by call for some seconds, so that a busy machine slows all "
    "of them; the time that a tenth of the calls stays below counts."
)


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
        rounds = [[seconds(reader) for reader in readers] for _ in range(9)]
        best = [min(times) for times in zip(*rounds, strict=True)]
        self.reader = readers[best.index(min(best))]

    def copied(self) -> float:
        """Return the bandwidth of a copy, reads and writes together: the best of five."""
        return 2 * self.source.nbytes / _best_seconds(lambda: self.target.copy_(self.source))

    def read(self) -> float:
        """Return the bandwidth of one pass that only reads."""
        return self.source.nbytes / seconds(self.reader)


def _best_seconds(call: Callable[[], Any]) -> float:
    return min(seconds(call) for _ in range(5))


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
            taken = seconds(lambda call=call: _sweep(call, cell)) / cell.num_layers
            sweeps[name].append(taken)
            if name == "numba_cpu":
                reads.append((before + memory.read()) / 2)
                shares.append(cell.weight_bytes / taken / reads[-1])
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
        found.append(seconds(lambda: _sweep(call, cell)) / cell.num_layers)
    return round(statistics.median(found) * 1e6, 2)


def summary(result: Result) -> dict[str, Any]:
    """Return the summary of the cells, by dtype."""
    cells, found = result["rows"], {}
    for dtype in sorted({cell["dtype"] for cell in cells}):
        mine = [cell for cell in cells if cell["dtype"] == dtype]
        decode = [cell for cell in mine if cell["tokens"] <= 64]
        long = [cell for cell in mine if cell["tokens"] > 64]
        mean, least = mean_and_least([cell["times_loop"] for cell in decode])
        found[dtype] = {
            "decode_times_loop_geometric_mean": mean,
            "decode_times_loop_least": least,
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


def measure_cells(options: Options, result: Result) -> Iterator[Row]:
    """Yield a row per cell, then measure the time of a call alone."""
    dtypes = [getattr(torch, name) for name in options.dtypes]
    NumbaCPUBackend().warmup(dtypes)
    memory = Memory(torch.ones(64 * 2**20))
    for cell in itertools.product(dtypes, WIDTHS, COMPOSITIONS, RANKS):
        yield measure(Cell(*cell), options.repeats, memory)
    result["call_microseconds"] = call_microseconds()
    result["cold_call_microseconds"] = cold_call_microseconds(memory)


def layers_of(cell: Cell, stored: torch.dtype) -> list[LoRAWeights]:
    """Return the layers of a cell with other stacks, as many as fill the rotation."""
    if stored == cell.dtype:
        return cell.layers
    ratio = cell.dtype.itemsize // stored.itemsize
    return [quantize_weights(layer, stored) for layer in cell.layers for _ in range(ratio)]


def measure_stored(
    widths: tuple[int, int], batch: tuple[int, int], rank: int, limit: float, stored: list[Any]
) -> dict[str, Any]:
    """Return microseconds per layer of every dtype."""
    backend = NumbaCPUBackend()
    cells = {torch.float32: Cell(torch.float32, widths, batch, rank)}
    cells[torch.bfloat16] = Cell(torch.bfloat16, widths, batch, rank)
    layers = {dtype: layers_of(cells.get(dtype, cells[torch.bfloat16]), dtype) for dtype in stored}
    times: dict[Any, list[float]] = {dtype: [] for dtype in stored}
    plan = backend.prepare_batch(cells[torch.float32].batch)
    end, turn = time.perf_counter() + limit, 0
    while time.perf_counter() < end or turn < 20:
        for dtype in stored:
            cell = cells.get(dtype, cells[torch.bfloat16])
            weights = layers[dtype][turn % len(layers[dtype])]
            call = partial(backend.run_linear, cell.x, weights, plan, cell.y)
            times[dtype].append(seconds(call))
        turn += 1
    best = {dtype: sorted(taken)[len(taken) // 10] for dtype, taken in times.items()}
    found: dict[str, Any] = {"in_features": widths[0], "out_features": widths[1]}
    found |= {"tokens": batch[0], "adapters": batch[1], "rank": rank}
    found["microseconds"] = {dtype_name(dtype): round(best[dtype] * 1e6, 2) for dtype in stored}
    for other in (torch.bfloat16, torch.float32):
        found[f"int8_times_{dtype_name(other)}"] = round(best[other] / best[torch.int8], 2)
    return found


def measure_eight_bit(options: Options, _: Result) -> Iterator[Row]:
    """Yield a row per cell of decode with 8 adapters at least."""
    stored = list(STORED if options.all else STORED[:3])
    NumbaCPUBackend().warmup(stored)
    for widths, batch, rank in itertools.product(WIDTHS, COMPOSITIONS, RANKS):
        if batch[1] >= 8 and batch[0] <= 64:
            yield measure_stored(widths, batch, rank, options.seconds, stored)


def eight_bit_summary(result: Result) -> dict[str, float]:
    """Return the geometric mean and the least of int8's speed over the wider dtypes."""
    found = {}
    for name in ("int8_times_bfloat16", "int8_times_float32"):
        mean, least = mean_and_least([row[name] for row in result["rows"]])
        found |= {f"{name}_geometric_mean": mean, f"{name}_least": least}
    return found


DTYPES = flag(["float32", "bfloat16"])
THREADS = flag(2)

CELLS = Measurement(
    rows=measure_cells,
    file="cpu_cells.json",
    method=METHOD,
    settings=lambda _: {"call_microseconds": None, "cold_call_microseconds": None},
    summary=summary,
    options={"--dtypes": DTYPES, "--repeats": flag(9), "--threads": THREADS},
)

EIGHT_BIT = Measurement(
    rows=measure_eight_bit,
    file="cpu_eight_bit.json",
    method=EIGHT_BIT_METHOD,
    summary=eight_bit_summary,
    options={
        "--seconds": flag(8.0, "of each cell"),
        "--threads": THREADS,
        "--all": flag(False, "measure float8 as well"),
    },
)
