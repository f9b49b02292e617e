"""`measure`: checks and times every contender in every cell."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lora_backends.bench.cells import Cell, num_layers
from lora_backends.bench.contenders import Contender
from lora_backends.bench.layers import (
    MOST_LAYERS,
    ROTATED_BYTES,
    Workload,
    check,
    make_layers,
    make_workload,
    reference,
)
from lora_backends.bench.results import new_result, summarize, write_result
from lora_backends.bench.timing import (
    Call,
    Limits,
    copy_clock,
    eager_times,
    graph_times,
    measure_limits,
    spread,
    times_in_turns,
)
from lora_backends.common.devices import as_device
from lora_backends.dtypes import dtype_name
from lora_backends.errors import BackendUnavailableError, InvalidInputError, UnsupportedInputError
from lora_backends.weights import LoRAWeights

Progress = Callable[[int, Cell], object]

METHOD = {
    "cuda": (
        "Microseconds of one call of the operation, into an existing y where it has one, over 4 to "
        "32 layers with different weights, 240 MB in all, x and y shared. Contenders that CUDA "
        "graphs may capture: 5 timings of 10 replays of a graph that runs every layer once; the "
        "others are launched call by call, between two events, 5 times. Median and quartiles of "
        "the timings. The plan is made ahead."
    ),
    "cpu": (
        "Microseconds of one call of the operation, into an existing y where it has one, over 4 to "
        "64 layers with different weights, 192 MiB in all, x and y shared. Contenders sweep the "
        "layers in turns, up to 9 times. Median and quartiles of the sweeps. The plan is made "
        "ahead."
    ),
}
LIMIT = (
    "limit, the modelled minimum time: the bytes that must move (active adapters' A and B once at "
    "their rank, x once, y read and written) at the rate of a large copy (on the CPU measured "
    "before and after every cell), plus on a GPU a launch of a near-empty kernel in a CUDA graph "
    "for each kernel that the operation needs. Efficiency = modelled minimum time / measured time; "
    "above 1 where x and y stay in a cache. Every contender's first layer is compared with plain "
    "products (float32 for 16-bit values, else float64) before it is timed."
)


def check_device(device: torch.device | str) -> torch.device:
    """Return a device that can be timed, or raise the typed error that says why it cannot."""
    parsed = as_device(device)
    if parsed.type not in METHOD:
        raise UnsupportedInputError(f"bench times {', '.join(METHOD)}; given: {parsed}")
    try:
        torch.empty(0, device=parsed)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise BackendUnavailableError(f"torch cannot use {parsed} here: {first}") from error
    return parsed


def check_memory(cells: Sequence[Cell], device: torch.device, dtype: torch.dtype) -> None:
    """Refuse cells that do not fit into memory, before anything is measured."""
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[1]
    else:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for cell in cells:
        layers = num_layers(
            cell, dtype.itemsize, ROTATED_BYTES[device.type], MOST_LAYERS[device.type]
        )
        weights = layers * cell.num_slots * cell.adapter_bytes(dtype.itemsize)
        rows = cell.tokens * (cell.in_features + 2 * cell.out_features) * (dtype.itemsize + 8)
        if weights + rows > 0.8 * available:
            raise InvalidInputError(
                f"a cell does not fit into the memory of {device}\n  given: {cell}\n"
                f"  needed: {(weights + rows) / 1e9:.1f} GB of {available / 1e9:.1f} GB"
            )


def measure(
    cells: Sequence[Cell],
    contenders: Sequence[Contender],
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    left_out: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
    limits: Limits | None = None,
    path: Path | None = None,
    progress: Progress | None = None,
    result: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Time every contender in every cell.

    A contender that raises, or whose result is wrong, has an error in place of a time.

    Args:
        cells: what to time.
        contenders: from `choose`.
        device: "cpu", "cuda", ...
        dtype: of x, y and the weights.
        left_out: reasons by name, kept in the result.
        notes: sentences kept in the result.
        limits: of the device, if they are known; measured if None.
        path: a JSON file, written whole after every cell.
        progress: called with index and cell before each cell.
        result: filled while measuring, so that it is valid after an interruption.

    Returns:
        The result, in the format of `new_result`, with a row per cell.

    Raises:
        InvalidInputError: no such device, or a cell that does not fit into its memory.
        BackendUnavailableError: torch cannot use the device here.
        UnsupportedInputError: the device is neither a CPU nor a CUDA or ROCm GPU.
    """
    device = check_device(device)
    check_memory(cells, device, dtype)
    cells = _neighbours(cells)
    result = {} if result is None else result
    result |= new_result(
        f"{METHOD[device.type]} {LIMIT}",
        device,
        dtype=dtype_name(dtype),
        contenders={
            one.name: {"timing": _timing(one, device), "options": dict(one.options)}
            for one in contenders
        },
        left_out=dict(left_out or {}),
        notes=[*notes, *_busy(device)],
        complete=False,
        limits={},
    )
    torch.manual_seed(0)
    # -1 changes nothing on a machine without a GPU
    with torch.no_grad(), torch.cuda.device(device if device.type == "cuda" else -1):
        limits = limits or measure_limits(device, dtype)
        result["limits"] |= limits.describe()
        clock = _limits_clock(limits, device)
        numbered = enumerate(cells)
        # one set of weights at a time fits into memory
        for _, group in itertools.groupby(numbered, key=lambda pair: _same_layers(pair[1])):
            layers: list[LoRAWeights] = []
            for index, cell in group:
                if progress:
                    progress(index, cell)
                layers = layers or make_layers(cell, device, dtype)
                row = _row(cell, layers, contenders, clock)
                result["rows"].append(row)
                # the machine may be shared: the best rate seen is nearest to its limit
                result["limits"]["copy_gb_per_s"] = max(
                    result["limits"]["copy_gb_per_s"], row["copy_gb_per_s"]
                )
                result["complete"] = len(result["rows"]) == len(cells)
                result["summary"] = summarize(result)
                if path:
                    write_result(path, result)
    return result


def _busy(device: torch.device) -> list[str]:
    """Return a note if other programs are using the CPU to be timed."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if device.type == "cuda" or load < cores / 2:
        return []
    return [f"other programs were running: load {load:.1f} on {cores} cores at the beginning"]


def _neighbours(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells with those of equal layers side by side, so that layers are made once."""
    first: dict[tuple[Any, ...], int] = {}
    for index, cell in enumerate(cells):
        first.setdefault(_same_layers(cell), index)
    return sorted(cells, key=lambda cell: first[_same_layers(cell)])


def _same_layers(cell: Cell) -> tuple[Any, ...]:
    return cell.projection, cell.in_features, cell.output_slices, cell.rank, cell.num_slots


def _timing(contender: Contender, device: torch.device) -> str:
    if device.type != "cuda":
        return "in turns"
    return "CUDA graph" if contender.graphs else "call by call"


def _limits_clock(limits: Limits, device: torch.device) -> Callable[[], Limits]:
    """Return a function that returns the limits of the moment; on a GPU they are constant."""
    if device.type == "cuda":
        return lambda: limits
    gigabytes = copy_clock()
    return lambda: replace(limits, copy_gb_per_s=gigabytes())


def _row(
    cell: Cell,
    layers: list[LoRAWeights],
    contenders: Sequence[Contender],
    clock: Callable[[], Limits],
) -> dict[str, Any]:
    begin = time.perf_counter()
    work = make_workload(cell, layers)
    num_bytes = cell.bytes_moved(layers[0].dtype.itemsize)
    before = clock()
    results = time_contenders(contenders, work)
    # other load during one of the two copies must not flatter the efficiency
    limits = max(before, clock(), key=lambda limits: limits.copy_gb_per_s)
    limit = limits.microseconds(num_bytes, cell.launches)
    for outcome in results.values():
        if "us" in outcome:
            # significant digits, so that it is never 0
            outcome["efficiency"] = float(f"{limit / outcome['us']:.4g}")
    return cell.describe() | {
        "layers": len(layers),
        "bytes": num_bytes,
        "flop": cell.flop,
        "copy_gb_per_s": round(limits.copy_gb_per_s, 1),
        "limit_us": round(limit, 3),
        "results": results,
        "seconds": round(time.perf_counter() - begin, 2),
    }


def time_contenders(contenders: Sequence[Contender], work: Workload) -> dict[str, dict[str, Any]]:
    """Return the median and quartiles of each contender's timings, or its error."""
    expected = reference(work)
    on_cpu = work.x.device.type == "cpu"
    results: dict[str, dict[str, Any]] = {}
    calls: dict[str, Call] = {}
    for contender in contenders:
        try:
            call = contender.bind(work)
            check(call, work, expected)
            calls[contender.name] = call
            results[contender.name] = {}
            if on_cpu:
                for layer in range(len(work.layers)):
                    call(layer)
            else:
                clock = graph_times if contender.graphs else eager_times
                results[contender.name] = spread(clock(call, len(work.layers)))
                del calls[contender.name], call  # frees its buffers for the next one
        except Exception as error:  # a plugin may raise anything; the run continues
            calls.pop(contender.name, None)
            results[contender.name] = {"error": _first_line(error)}
    for name, series in times_in_turns(calls, len(work.layers), work.y.zero_).items():
        results[name] = spread(series)
    return results


def _first_line(error: Exception) -> str:
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first}"
