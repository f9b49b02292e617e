"""Clocks for GPU and CPU, and the limits of the device."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

Call = Callable[[int], object]  # runs one layer, by index

TIMINGS = 5
REPLAYS = 10
TURNS = 9
FEWEST_TURNS = 3
COPIED_VALUES = {"cpu": 2**26, "cuda": 2**27}  # float32, more than caches hold
SECONDS_A_CELL = 6.0
"""Limit for a cell on the CPU, or run call by call on a GPU: no turn starts after it."""


def graph_times(
    call: Call, num_layers: int, timings: int = TIMINGS, replays: int = REPLAYS
) -> list[float]:
    """Return microseconds of one call in a CUDA graph that runs every layer once, per timing."""
    graph = captured(call, num_layers)
    graph.replay()
    torch.cuda.synchronize()

    # several replays between two events: one is too short for their resolution
    def some_replays() -> None:
        for _ in range(replays):
            graph.replay()

    return [between_events(some_replays) / (replays * num_layers) for _ in range(timings)]


def captured(call: Call, num_layers: int) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph that runs every layer once."""
    # compiling and other work of a first call stays outside of the capture
    for layer in range(num_layers):
        call(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local: a program that tunes at first use may allocate in other threads meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for layer in range(num_layers):
            call(layer)
    return graph


def eager_times(call: Call, num_layers: int, timings: int = TIMINGS) -> list[float]:
    """Return microseconds of one call, launched call by call over every layer, per timing."""

    def sweep() -> None:
        for layer in range(num_layers):
            call(layer)

    sweep()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < timings:
        if len(times) >= FEWEST_TURNS and time.perf_counter() - begin > SECONDS_A_CELL:
            break
        times.append(between_events(sweep) / num_layers)
    return times


def between_events(run: Callable[[], object]) -> float:
    """Return the GPU's microseconds for the work that `run` launches."""
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000


def times_in_turns(
    calls: Mapping[str, Call],
    num_layers: int,
    before_sweep: Callable[[], object],
    turns: int = TURNS,
) -> dict[str, list[float]]:
    """Return microseconds of one call on the CPU, per turn: contenders take turns at the layers."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    begin = time.perf_counter()
    for turn in range(turns):
        if turn >= FEWEST_TURNS and time.perf_counter() - begin > SECONDS_A_CELL:
            break
        # so that other load on the machine slows all contenders alike
        for name, call in calls.items():
            # y would grow from sweep to sweep, in 16 bits up to infinity
            before_sweep()
            start = time.perf_counter()
            for layer in range(num_layers):
                call(layer)
            times[name].append((time.perf_counter() - start) / num_layers * 1e6)
    return times


def spread(times: list[float]) -> dict[str, float]:
    """Return the median and the quartiles of some timings."""
    if len(times) < 2:
        return {"us": round(times[0], 3), "us_q1": round(times[0], 3), "us_q3": round(times[0], 3)}
    q1, median, q3 = statistics.quantiles(times, n=4, method="inclusive")
    return {"us": round(median, 3), "us_q1": round(q1, 3), "us_q3": round(q3, 3)}


@dataclass(frozen=True)
class Limits:
    """Rates of the device, measured where the contenders run."""

    copy_gb_per_s: float  # bytes read and written by a copy
    launch_us: float  # one near-empty kernel in a CUDA graph; 0 on a CPU
    gemm_gflop_per_s: float  # one large matrix product in the cells' dtype

    def microseconds(self, num_bytes: int, launches: int) -> float:
        """Return the modelled minimum time of a number of bytes and launches."""
        return num_bytes / self.copy_gb_per_s / 1e3 + launches * self.launch_us

    def describe(self) -> dict[str, Any]:
        """Return the limits as a table of a result file."""
        return {key: round(value, 3) for key, value in asdict(self).items()}


def measure_limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """Measure copy bandwidth, launch cost and the rate of a large matrix product."""
    if device.type == "cpu":
        gemm = _gemm_rate(_cpu_microseconds, device, dtype, 1024)
        return Limits(copy_clock()(), 0.0, gemm)
    source = torch.empty(COPIED_VALUES["cuda"], dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    copy_us = statistics.median(
        between_events(lambda: target.copy_(source)) for _ in range(2 * TIMINGS)
    )
    one = torch.zeros(1, device=device)
    launch_us = statistics.median(graph_times(lambda _: one.add_(1), 200))
    gemm = _gemm_rate(between_events, device, dtype, 8192 if dtype.itemsize == 2 else 2048)
    return Limits(2 * source.nbytes / copy_us / 1e3, launch_us, gemm)


def copy_clock() -> Callable[[], float]:
    """Return a function that measures the CPU's copy rate, in GB/s read and written."""
    source, target = (torch.ones(COPIED_VALUES["cpu"], device="cpu") for _ in range(2))

    # on a shared machine the rate changes, so it is measured before and after each cell
    def gigabytes() -> float:
        # the least time is the one with the least other load
        fastest = min(_cpu_microseconds(lambda: target.copy_(source)) for _ in range(3))
        return 2 * source.nbytes / fastest / 1e3

    return gigabytes


def _gemm_rate(
    clock: Callable[[Callable[[], object]], float],
    device: torch.device,
    dtype: torch.dtype,
    size: int,
) -> float:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    torch.mm(a, b)
    fastest = min(clock(lambda: torch.mm(a, b)) for _ in range(TIMINGS))
    return 2 * math.pow(size, 3) / fastest / 1e3


def _cpu_microseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6
