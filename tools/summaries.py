"""Tables that sum up measurements: one figure per backend, for README and the explanations."""

from __future__ import annotations

from statistics import geometric_mean
from typing import Any

import figures
from reference_blocks import table

STEPS = {
    ("compiled", "ours"): "`triton`, `torch.compile`",
    ("graph", "ours"): "`triton`, CUDA graph",
    ("eager", "ours"): "`triton`, eager",
    ("peft", "peft"): "PEFT's mixed batch, eager",
}
STEP_OF = {"rows": 64, "tokens": 1, "rank": 16, "adapters": 8}
FACTORS = {
    "token_scales": "a scale per token",
    "output_scales": "a scale per output column",
    "slice_tensors": "a tensor per slice",
    "room": "a plan with room",
}
TRAINING = "training_gpu"
CPU_ROWS = {
    "speed over the loop in decode, geometric mean": "decode_times_loop_geometric_mean",
    "the same, slowest cell": "decode_times_loop_least",
    "speed over the loop at 512 tokens, slowest cell": "512_tokens_times_loop_least",
    "the loop's time over the copy limit in decode, geometric mean": (
        "decode_times_loop_at_copy_bandwidth"
    ),
}


def h200() -> str:
    """Return the efficiency of every contender by phase, and the cells a peer wins."""
    cells = figures.measured()
    rows = []
    for backend in figures.RESULTS:
        slower = sum(cell["times"][backend] > cell["best_peer_us"] for cell in cells)
        rows.append([f"`{backend}`", *_efficiencies(backend), f"{slower} of {len(cells)}"])
    rows.append([figures.BEST_PEER, *_efficiencies(None), ""])
    rows += [[name, *_efficiencies(name), ""] for name in figures.CONTENDERS]
    return table(["", ">decode", ">prefill", ">cells slower than the best peer"], rows)


def decode_step_on_a_cpu() -> str:
    """Return the cost of LoRA in a decode step of a small model on the CPU."""
    ratios = figures.smollm2_ratios()
    rows = [
        [name if "PEFT" in name else f"`{name}`", f"{ratio:.2f}"]
        for name, ratio in ratios.items()
        if name != "base"
    ]
    return table(["", ">time of a step / base model's"], rows)


def decode_step_on_the_h200() -> str:
    """Return the cost of LoRA in a decode step of a Llama of 8B shape on the GPU."""
    measured = figures.result("h200_whole_model")["rows"]
    by_name = {
        (row["mode"], row["contender"]): row
        for row in measured
        if all(row[key] == size for key, size in STEP_OF.items())
    }
    rows = []
    for (mode, contender), label in STEPS.items():
        base, ratio = by_name[mode, "base"], by_name[mode, contender]["ratio_to_base"]
        rows.append([label, f"{base['ms']:.2f}", f"{ratio:.2f}"])
    return table(["", ">base model, ms", ">with adapters / base model"], rows)


OF_VLLM = {
    "own": "vLLM's operators",
    "triton": "`triton`",
    "triton+graphs": "`triton`, captured prefills",
    "off+graphs": "off, captured prefills",
}
OF_SGLANG = {
    "csgmv": "SGLang's `csgmv`",
    "triton": "SGLang's `triton`",
    "auto": "ours",
}


def vllm_steps() -> str:
    """Return the time of a decode step inside vLLM on the GPU, over the time with LoRA off."""
    return _steps({"": "vllm_step_gpu"}, OF_VLLM)


def vllm_models() -> str:
    """Return the same for an FP8 base, two GPUs and mixtures of experts.

    A short prefill waits for the host unless it is captured: where LoRA off was not captured, the
    row is left out.
    """
    results = {
        "FP8 8B": "vllm_step_gpu_fp8",
        "8B on two GPUs": "vllm_step_gpu_sharded",
        "Qwen3": "vllm_step_gpu_experts",
        "Mixtral": "vllm_step_gpu_mixtral",
    }
    return _steps(results, OF_VLLM)


def sglang_steps() -> str:
    """Return the times of decode steps and a prefill inside SGLang, over those with LoRA off."""
    return _steps({"": "sglang_step_gpu"}, OF_SGLANG)


def sglang_experts() -> str:
    """Return the same for a mixture of experts."""
    return _steps({"": "sglang_step_gpu_experts"}, OF_SGLANG)


def _steps(results: dict[str, str], contenders: dict[str, str]) -> str:
    """Return a table of steps.

    Args:
        results: names of files by the model that begins their rows; "": none.
        contenders: titles of columns, where measured.

    Raises:
        ValueError: two rows of a file belong in one cell.
    """
    measured = {model: figures.result(name)["rows"] for model, name in results.items()}
    names = {row["contender"] for rows in measured.values() for row in rows}
    contenders = {name: title for name, title in contenders.items() if name in names}
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    for model, rows in measured.items():
        for row in rows:
            name = f"{row['rows']} rows"
            if not model:  # with several models, all decode steps have one number of adapters
                name += f", {row['adapters']} adapter{'s' * (row['adapters'] > 1)}"
            if row.get("step") == "prefill":
                name = f"prefill, {row['prompt']:,} tokens"
            name, contender = ", ".join(filter(None, (model, name))), row["contender"]
            found = cells.setdefault(name, {})
            if contender in found:
                raise ValueError(f"two rows of {contender!r} for {name!r} in {results[model]}.json")
            found[contender] = row
    rows = [
        [name, f"{found['off']['ms']:.2f}", *(_ratio(found.get(c)) for c in contenders)]
        for name, found in cells.items()
        if "off+graphs" not in contenders or "off+graphs" in found or not _waits(found["off"])
    ]
    return table(["", ">LoRA off, ms", *(f">{title}" for title in contenders.values())], rows)


def _waits(row: dict[str, Any]) -> bool:
    """Return whether a step is a short prefill."""
    return row["step"] == "prefill" and row["prompt"] <= 1024


def _ratio(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['ratio']:.2f}"


def host_time() -> str:
    """Return microseconds of host time of each GPU backend's calls."""
    columns = ("run_linear", "prepare_batch", "prepare_batch_refill")
    rows = []
    for backend in figures.RESULTS:
        host = figures.result(f"h200_{backend}")["host_us"]
        rows.append([f"`{backend}`", *(f"{host[column]:.0f}" for column in columns)])
    return table(["", ">`run_linear`", ">`prepare_batch`", ">refill"], rows)


def csgmv_over_triton() -> str:
    """Return how the two GPU backends compare, phase by phase and over the sweep."""
    ratios = {
        f"{len(figures.of_phase(phase))} of {phase}": [
            cell["times"]["csgmv"] / cell["times"]["triton"] for cell in figures.of_phase(phase)
        ]
        for phase in figures.PHASES
    }
    sweep = figures.sweep_ratios()
    ratios[f"{len(sweep)} of the sweep"] = sweep
    rows = [
        [cells, f"{geometric_mean(found):.2f}", f"{min(found):.2f} to {max(found):.2f}"]
        + [str(sum(ratio < 0.98 for ratio in found)), str(sum(ratio > 1.02 for ratio in found))]
        for cells, found in ratios.items()
    ]
    return table(
        ["cells", ">`csgmv` time / `triton` time", ">range"]
        + [">`csgmv` 2% faster", ">`triton` 2% faster"],
        rows,
    )


def factors() -> str:
    """Return the mean time of calls with a feature over that of plain ones."""
    summary = figures.result("h200_features")["summary"]
    rows = [
        [label, *(f"{backend[name]['mean']:.2f}" for backend in summary.values())]
        for name, label in FACTORS.items()
    ]
    return table(["", *(f">`{backend}`" for backend in summary)], rows)


def experts() -> str:
    """Return the efficiency of experts by phase, and of the cells that no peer was timed on."""
    found = figures.result("h200_experts")
    summary = found["summary"]
    rows = [
        [label, *(f"{summary[phase + rank]:.2f}" for phase in figures.PHASES)]
        for label, rank in (
            (f"{summary['cells']} cells beside peers", ""),
            ("those of rank 16", " rank 16"),
            ("those of rank 64", " rank 64"),
        )
    ]
    alone = [row for row in found["rows"] if "best_peer_us" not in row]
    means = [
        geometric_mean(row["efficiency"] for row in alone if is_of(row["tokens"]))
        for is_of in figures.PHASES.values()
    ]
    rows.append([f"{len(alone)} other cells", *(f"{mean:.2f}" for mean in means)])
    return table(["", *(f">{phase}" for phase in figures.PHASES)], rows)


def numba_cpu() -> str:
    """Return the speed of `numba_cpu` over a plain torch loop, and its share of the limit."""
    summary = figures.result("cpu_cells")["summary"]
    dtypes = sorted(summary, reverse=True)
    rows = [
        [label, *(f"{summary[dtype][field]:.2f}" for dtype in dtypes)]
        for label, field in CPU_ROWS.items()
    ]
    read = [f"{summary[dtype]['read_gb_per_s']:.0f}" for dtype in dtypes]
    rows.append(["read bandwidth in decode, GB/s, median", *read])
    shares = {dtype: summary[dtype]["decode_of_read_least_by_adapters"] for dtype in dtypes}
    for count in sorted(shares[dtypes[0]], key=int, reverse=True):
        label = "lowest share of the read bandwidth in decode, {} adapter{}"
        values = [f"{shares[dtype][count]:.2f}" for dtype in dtypes]
        rows.append([label.format(count, "" if count == "1" else "s"), *values])
    return table(["", *(f">{dtype}" for dtype in dtypes)], rows)


def eight_bit_quality() -> str:
    """Return the errors of 8-bit adapters, by dtype."""
    found = figures.result("eight_bit_quality")
    rows = []
    for dtype in ("int8", "float8_e4m3fn", "float8_e5m2"):
        own = [row for row in found["rows"] if row["dtype"] == dtype]
        adapters = [row for row in own if "adapter" in row]
        (error,) = (row["error"] for row in own if row.get("scale_per") == "row")
        worst = max(row["error"] for row in adapters)
        distance = max(row["distance"] for row in adapters)
        rows.append([f"`{dtype}`", f"{error:.3f}", f"{worst:.3f}", f"{distance:.4f}"])
    return table(
        ["", ">normal weights", ">the example's adapters", ">their logits"],
        rows,
    )


def prefetch() -> str:
    """Return the time of a decode step by where the adapter of one of its rows was."""
    summary = figures.result("h200_prefetch")["summary"]
    return table([f">{place}" for place in summary], [[f"{ms:.1f} ms" for ms in summary.values()]])


def training() -> str:
    """Return the time of training steps over the frozen base's, of two GPUs, and on a CPU."""
    names = {"in_model": "a model", "ours": "`run_linear`", "loop": "PEFT's loop"}
    rows = []
    for cell, found in figures.result(TRAINING)["summary"].items():
        ratios = found["ratio_to_base"]
        rows.append([cell, *(f"{ratios[n]:.2f}" if n in ratios else "" for n in names)])
    whole = figures.result("training_model_h100")["summary"]
    rows.append(["a whole model, 8 of rank 16, checkpointing", f"{whole['ours']:.2f}", "", ""])
    scale = figures.result("training_scale_h100")["summary"]
    found = scale["2 processes, whole base"], scale["2 processes, sharded base"]
    text = "Tokens a second of two H100 over one: {:.2f} times with DDP, {:.2f} with `fully_shard`."
    cpu = figures.result("training_model_cpu")
    on_cpu = (
        "SmolLM2 in float32 on an {}, 8 adapters: `numba_cpu` takes {:.2f} times the frozen "
        "base's step; PEFT, one adapter after another, {:.2f} times as long as `numba_cpu`."
    ).format(cpu["device"], cpu["summary"]["ours"], cpu["summary"]["PEFT over ours"])
    steps = table(["", *(f">{name}" for name in names.values())], rows)
    return "\n\n".join([steps, text.format(*found), on_cpu])


def _efficiencies(contender: str | None) -> list[str]:
    return [f"{figures.mean_efficiency(phase, contender):.2f}" for phase in figures.PHASES]
