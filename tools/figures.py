"""Figures that the pages quote from benchmarks/results and benchmarks/peers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from reference_blocks import table

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
PEERS = BENCHMARKS / "peers" / "h200.json"
RESULTS = {
    backend: BENCHMARKS / "results" / f"h200_{backend}.json" for backend in ("triton", "csgmv")
}
PROJECTIONS = ("qkv", "o", "gate_up", "down")
KEY = ("projection", "tokens", "active_adapters", "rank", "mix")
CONTENDERS = {
    "SGLang 0.5.23 triton_v2": ("sglang_0.5.23_triton_v2",),
    "SGLang 0.5.23 csgmv": ("sglang_0.5.23_csgmv", "sglang_0.5.23_csgmv_chunk128"),
    "vLLM 0.33": ("vllm_0.33",),
}
"""Fields of each peer, by name; of two settings of one peer, the faster counts."""
PHASES: dict[str, Callable[[int], bool]] = {
    "decode": lambda tokens: tokens <= 256,
    "prefill": lambda tokens: tokens > 256,
}
BEST_PEER = "best peer, cell by cell"
Cell = dict[str, Any]


def measured() -> list[Cell]:
    """Return the cells of the H200, each with microseconds by contender under "times"."""
    own = {
        backend: {
            key(row): row["results"][backend]["us"] for row in json.loads(file.read_text())["rows"]
        }
        for backend, file in RESULTS.items()
    }
    cells = []
    for row in json.loads(PEERS.read_text())["rows"]:
        times = {backend: by_key[key(row)] for backend, by_key in own.items()}
        times |= {name: min(row[f] for f in fields) for name, fields in CONTENDERS.items()}
        cells.append({**row, "times": times})
    return cells


def key(cell: Cell) -> tuple[Any, ...]:
    """Return the key of a cell."""
    return tuple(cell[name] for name in KEY)


def efficiency(cells: Iterable[Cell], contender: str | None = None) -> list[float]:
    """Return the efficiency in each cell, of a contender or of the best peer."""
    return [
        cell["limit_us"] / (cell["times"][contender] if contender else cell["best_peer_us"])
        for cell in cells
    ]


def mean_efficiency(phase: str, contender: str | None = "triton") -> float:
    """Return the geometric mean over the cells of a phase."""
    return geometric_mean(efficiency(of_phase(phase), contender))


def result(name: str) -> dict[str, Any]:
    """Return a file of benchmarks/results."""
    found: dict[str, Any] = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())
    return found


def sweep_ratios() -> list[float]:
    """Return the time of csgmv over that of triton in every cell of the sweep, sorted."""
    cells = [cell["results"] for cell in result("h200_sweep")["rows"]]
    return sorted(cell["csgmv"]["us"] / cell["triton"]["us"] for cell in cells)


def smollm2_ratios() -> dict[str, float]:
    """Return the time of a decode step on the CPU over the base model's, by contender."""
    rows = json.loads((BENCHMARKS / "results" / "decode_smollm2_cpu.json").read_text())["rows"]
    return {row["contender"]: row["ratio_to_base"] for row in rows}


def digest() -> str:
    """Return a digest of the measurements, to see if a picture is up to date."""
    return hashlib.sha256(json.dumps(measured()).encode()).hexdigest()


def phases() -> str:
    """Return the efficiency of each backend by phase."""
    rows = []
    for phase in PHASES:
        for backend in RESULTS:
            found = efficiency(of_phase(phase), backend)
            three = geometric_mean(found), min(found), max(found)
            rows.append([phase, f"`{backend}`", *(f"{value:.2f}" for value in three)])
    return table(["", "", ">mean", ">lowest", ">highest"], rows)


def of_phase(phase: str) -> list[Cell]:
    """Return the cells of a phase."""
    return [cell for cell in measured() if PHASES[phase](cell["tokens"])]


def cells(backend: str = "triton") -> str:
    """Return microseconds of every cell, one line per batch and one column per projection."""
    by_key = {key(cell): cell for cell in measured()}
    rows = []
    for batch in sorted({found[1:] for found in by_key}):
        texts = []
        for projection in PROJECTIONS:
            cell = by_key[(projection, *batch)]
            times = (cell["times"][backend], cell["best_peer_us"], cell["limit_us"])
            texts.append(" / ".join(f"{time:.1f}" for time in times))
        tokens, active, rank, mix = batch
        rows.append([str(tokens), f"{active}{', skewed' if mix == 'skewed' else ''}", str(rank)])
        rows[-1] += texts
    names = [f">`{projection}`" for projection in PROJECTIONS]
    return table([">tokens", ">adapters", ">rank", *names], rows)


def worked_example() -> str:
    """Return bytes, operations and the limit of a few cells of the o projection, bfloat16."""
    width_in, slices = json.loads(PEERS.read_text())["projections"]["o"]
    width_out = sum(slices)
    by_key = {key(cell): cell for cell in measured()}
    rows = []
    for tokens, active, rank in ((1, 1, 16), (64, 8, 16), (256, 64, 64), (8192, 1, 16)):
        cell = by_key["o", tokens, active, rank, "uniform"]
        weights = 2 * active * rank * (width_in + width_out)
        activations = 2 * tokens * (width_in + 2 * width_out)
        operations = 2 * tokens * rank * (width_in + width_out)
        rows.append(
            [str(tokens), str(active), str(rank)]
            + [f"{value / 1e6:,.2f}" for value in (weights, activations, operations)]
            + [f"{operations / (weights + activations):.1f}"]
            + [f"{cell['byte_floor_us']:.2f}", f"{cell['limit_us']:.2f}"]
        )
    return table(
        [">tokens", ">adapters", ">rank", ">A and B, MB", ">x and y, MB", ">MFLOP"]
        + [">FLOP per byte", ">bytes alone, us", ">limit, us"],
        rows,
    )
