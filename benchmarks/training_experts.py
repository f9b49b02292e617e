"""Times forward and backward of a mixture's experts, beside the time that their bytes take."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import NamedTuple

import torch
from measuring import Measurement, Options, Result, Row, flag
from training import clock, device_of

from lora_backends import ExpertWeights, LoRABatch, get_backend
from lora_backends.bench.timing import measure_limits


class Site(NamedTuple):
    """One site of a mixture."""

    inputs: int
    widths: tuple[int, ...]
    experts: int
    top_k: int
    rows: str  # of x: tokens or pairs


SITES = {
    "Qwen3-30B-A3B, gate and up": Site(2048, (768, 768), 128, 8, "tokens"),
    "Qwen3-30B-A3B, down": Site(768, (2048,), 128, 8, "pairs"),
    "Mixtral-8x7B, gate and up": Site(4096, (14336, 14336), 8, 2, "tokens"),
    "Mixtral-8x7B, down": Site(14336, (4096,), 8, 2, "pairs"),
}
TINY = {"tiny": Site(32, (16, 16), 4, 2, "tokens")}


def measure(arguments: Options, result: Result) -> Iterator[Row]:
    """Yield a row per site and rank."""
    device = device_of()
    if device.type == "cpu" and not arguments.tiny:
        raise SystemExit("needs a GPU; --tiny runs a small site on the CPU")
    result["limits"] = measure_limits(device, torch.bfloat16).describe()
    for rank in arguments.ranks:
        for name, site in (TINY if arguments.tiny else SITES).items():
            yield {"site": name, "rank": rank, **timed(arguments, result, site, rank)}


def timed(arguments: Options, result: Result, site: Site, rank: int) -> Row:
    """Return the milliseconds of one site and their shares of a copy."""
    device, tokens, slots = device_of(), arguments.rows * arguments.tokens, 8
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, by: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, generator=generator) * by

    outputs, pairs = sum(site.widths), tokens * site.top_k
    a = random(slots, site.experts, len(site.widths), rank, site.inputs, by=site.inputs**-0.5)
    b = random(slots, site.experts, outputs, rank, by=rank**-0.5)
    ranks = torch.full((slots, site.experts, len(site.widths)), rank, device=device)
    scalings = torch.full(ranks.shape, 0.5, device=device)
    weights = ExpertWeights(
        a.requires_grad_(), b.requires_grad_(), ranks, scalings, site.widths, site.experts
    )
    engine = get_backend(arguments.backend, device=device)
    per_row = [row % slots for row in range(arguments.rows)]
    of_tokens = [slot for slot in per_row for _ in range(arguments.tokens)]
    plan = engine.prepare_batch(LoRABatch(of_tokens, num_slots=slots))
    scores = torch.rand(tokens, site.experts, device=device, generator=generator)
    chosen = scores.topk(site.top_k)
    factors = chosen.values.softmax(-1).float()
    routing = engine.prepare_experts(plan, chosen.indices, factors, site.experts)
    x = random(tokens if site.rows == "tokens" else pairs, site.inputs).requires_grad_()
    base = random(tokens, site.top_k, outputs)
    grad = random(tokens, site.top_k, outputs)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return engine.run_experts(x, weights, routing, base, rows=site.rows)

    with torch.enable_grad():
        y = engine.run_experts(x, weights, routing, base.clone(), rows=site.rows)

    def backward() -> None:
        with torch.enable_grad():
            torch.autograd.grad(y, (x, a, b), grad, retain_graph=True)

    time = clock(device)
    series: dict[str, list[float]] = {"forward": [], "backward": []}
    for turn in range(arguments.samples + 2):
        for key, call in (("forward", forward), ("backward", backward)):
            taken = time(call)
            if turn >= 2:
                series[key].append(taken)
    ms = {key: statistics.median(times) for key, times in series.items()}
    narrow = 4 * pairs * rank * len(site.widths)
    moved = {
        "forward": x.nbytes + 2 * base.nbytes + a.nbytes + b.nbytes + 2 * narrow,
        "backward": 2 * x.nbytes + grad.nbytes + 2 * (a.nbytes + b.nbytes) + 4 * narrow,
    }
    copy = result["limits"]["copy_gb_per_s"] * 1e6  # bytes a millisecond
    return {
        "ms": {key: round(value, 3) for key, value in ms.items()},
        "share_of_copy": {key: round(moved[key] / copy / ms[key], 3) for key in ms},
    }


def summary(result: Result) -> dict[str, object]:
    """Return the shares of each site and rank."""
    return {f"{row['site']}, rank {row['rank']}": row["share_of_copy"] for row in result["rows"]}


EXPERTS = Measurement(
    rows=measure,
    file="h100_training_experts.json",
    method=(
        "Forward and backward of run_experts alone, 8 adapters, bfloat16, experts drawn evenly. "
        "Milliseconds between CUDA events, medians. share_of_copy: the bytes that have to move (x, "
        "y or dL/dy, A, B, h, and what is written) at the rate of a copy, over the time."
    ),
    settings=lambda o: {"device": device_of(), "backend": o.backend, "limits": {}},
    summary=summary,
    partial=True,
    options={
        "--backend": flag("triton"),
        "--ranks": flag([16, 64]),
        "--rows": flag(32),
        "--tokens": flag(512, "per row"),
        "--samples": flag(5),
        "--tiny": flag(False, "a small site, on the CPU"),
    },
)
