"""The site: what its pages quote is true, and every public name is in the reference."""

import importlib
import json
import pkgutil
import re
import statistics
from pathlib import Path

import pytest

pytest.importorskip("griffe", reason="the site's tools are not installed: pip install '.[docs]'")
pytest.importorskip("typer")

import build_site
import figures
import pages

import lora_backends
from lora_backends.registry import backend_class, backend_names

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_generated_parts_are_what_code_and_results_give(page):
    assert page.read_text() == pages.updated(page.read_text()), "run `make docs`"


def test_a_stale_part_shows():
    page = (REFERENCE / "support.md").read_text()
    stale = page.replace("| deterministic | yes", "| deterministic | no")
    assert stale != page
    assert pages.updated(stale) == page


def test_every_public_name_is_in_the_reference():
    described = set()
    for page in REFERENCE.glob("*.md"):
        described.update(re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE))
    missing = [
        f"{package}.{name}"
        for package, name, home in public_names()
        if f"{package}.{name}" not in described and f"{home}.{name}" not in described
    ]
    assert missing == []


def public_names():
    """Yield what the package and its subpackages export, and the backends' classes.

    Each with the package, the name and the module that it is defined in.
    """
    packages = ["lora_backends"]
    for found in pkgutil.iter_modules(lora_backends.__path__, "lora_backends."):
        if found.ispkg:
            packages.append(found.name)
    for package in packages:
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", []):
            yield package, name, getattr(getattr(module, name), "__module__", package)
    for name in backend_names():
        cls = backend_class(name)
        if cls.__module__.startswith("lora_backends."):
            yield cls.__module__, cls.__qualname__, cls.__module__


FAULTS = {
    "": None,
    "[a page](nowhere.md)": "nowhere.md",
    "[a file](../mkdocs.yml)": "../mkdocs.yml",
    "[a heading](#nowhere)": "#nowhere",
    "::: lora_backends.nowhere": "lora_backends.nowhere",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_site_is_built_only_without_a_warning(fault, tmp_path, capfd):
    pytest.importorskip("mkdocs")
    for name in ("tools", "lora_backends"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "mkdocs.yml").write_bytes((ROOT / "mkdocs.yml").read_bytes())
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Home\n\n{fault}\n")
    status = build_site.build(tmp_path / "mkdocs.yml", tmp_path / "site")
    shown = capfd.readouterr().err
    if FAULTS[fault] is None:
        assert (status, shown) == (0, "")
    else:
        assert status != 0 and FAULTS[fault] in shown


def test_docstrings_are_markdown():
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in (ROOT / "lora_backends").rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.endswith("::")
    ]
    assert wrong == [], "end the line before an indented example in one colon"


def test_the_picture_is_drawn_from_the_results():
    picture = (ROOT / "docs" / "images" / "h200.svg").read_text()
    assert figures.digest() in picture, "run tools/draw_h200.py"


def quotes_of_the_readme():
    smollm2 = figures.smollm2_ratios()
    mean = figures.mean_efficiency
    yield (
        f"`triton` reaches {mean('decode'):.2f} of the limit in decode and "
        f"{mean('prefill'):.2f} in prefill (geometric means), against "
        f"{mean('decode', None):.2f} and {mean('prefill', None):.2f} for the best"
    )
    assert all(
        cell["times"][own] < cell["best_peer_us"]
        for cell in figures.measured()
        for own in figures.RESULTS
    )
    yield (
        f"`csgmv` reaches {mean('decode', 'csgmv'):.2f} and {mean('prefill', 'csgmv'):.2f}. "
        f"In no cell is either slower than the best peer"
    )
    yield (
        f"{smollm2['numba_cpu']:.2f} times the base model's with `numba_cpu`, "
        f"{smollm2['torch_ref']:.2f} with `torch_ref` and "
        f"{smollm2['PEFT mixed batch']:.2f} with PEFT's mixed batch"
    )


def quotes_on_performance():
    cells = figures.measured()
    one = [c for c in cells if (c["tokens"], c["active_adapters"], c["rank"]) == (1, 1, 16)]
    floors, times = [c["byte_floor_us"] for c in one], [c["times"]["triton"] for c in one]
    launches = one[0]["limit_us"] - one[0]["byte_floor_us"]
    yield (
        f"between {min(floors):.2f} and {max(floors):.2f} us for its bytes and {launches:.2f} us "
        f"for two launches; the rest of the {min(times):.1f} to {max(times):.1f} us"
    )
    below = [c for c in cells if c["limit_us"] > c["times"]["triton"]]
    assert [(c["projection"], c["tokens"], c["rank"]) for c in below] == [("o", 2048, 16)]
    yield "`o` with 2048 tokens at rank 16 does"
    large = next(
        c
        for c in cells
        if (c["projection"], c["tokens"], c["active_adapters"], c["rank"])
        == ("gate_up", 64, 64, 64)
    )
    yield (
        f"64 tokens then takes {large['times']['triton']:.1f} us, longer than the base product's "
        f"{large['base_gemm']:.1f} us"
    )
    rules = figures.result("h200_triton_rules")["summary"]
    means = [rules[phase]["geometric_mean"] for phase in figures.PHASES]
    yield f"`triton` reaches {means[0]:.2f} and {means[1]:.2f}"
    joined, alone = (
        {(row["kind"], row["contender"]): row for row in figures.result(name)["rows"]}
        for name in ("h200_llama_decode", "h200_llama_decode_alone")
    )
    for kind, label in (("graph", "CUDA graph"), ("eager", "eager")):
        ratios = [rows[kind, "ours"]["ratio_to_base"] for rows in (joined, alone)]
        base = joined[kind, "base"]["ms"]
        yield f"| `triton`, {label} | {base:.2f} ms | {ratios[0]:.2f} | {ratios[1]:.2f} |"
    for kind, contender, label, last in (
        (
            "compiled",
            "ours",
            '`triton`, `torch.compile(mode="reduce-overhead")`',
            "the same program",
        ),
        ("peft", "peft", "PEFT's mixed batch, eager", ""),
    ):
        ratio, base = joined[kind, contender]["ratio_to_base"], joined[kind, "base"]["ms"]
        yield " ".join(f"| {label} | {base:.2f} ms | {ratio:.2f} | {last} |".split())
    yield f"takes {figures.result('h200_triton')['host_us']['run_linear']:.0f} us of it alone"
    others = [figures.result(f"h200_llama_decode_{number}")["rows"] for number in (2, 3)]
    eager = [
        row["ratio_to_base"]
        for rows in others
        for row in rows
        if (row["kind"], row["contender"]) == ("eager", "ours")
    ]
    yield f"took {eager[0]:.2f} and {eager[1]:.2f} times the base model's in two other"
    checks = figures.result("h200_llama_decode")["checks"]
    worst = max(found["torch_ref"] for found in checks["relative_error"])
    yield f"Logits with adapters are `torch_ref`'s within {worst:.3f} in the Frobenius norm"
    yield f"without any adapter differ by {checks['base_relative_error']:.3f}"
    yield f"eager ones by up to {checks['compiled_relative_error']:.3f}"


def quotes_on_triton():
    for phase, named in (("decode", "1 to 256"), ("prefill", "2048 and 8192")):
        part = figures.of_phase(phase)
        ratios = [c["times"]["triton"] / c["best_peer_us"] for c in part]
        yield (
            f"| {phase}, {named} tokens | {len(part)} | {figures.mean_efficiency(phase):.2f} | "
            f"{min(figures.efficiency(part, 'triton')):.2f} | "
            f"{figures.geometric_mean(ratios):.2f} |"
        )
    table, rules = figures.result("h200_triton"), figures.result("h200_triton_rules")
    means = [rules["summary"][phase]["geometric_mean"] for phase in figures.PHASES]
    yield f"it is {means[0]:.2f} in decode and {means[1]:.2f} in prefill"
    host = table["host_us"]
    yield f"the GPU idle, is {host['run_linear']:.0f} us"
    yield f"64 slots takes {host['prepare_batch']:.0f} us"
    yield f"a refill {host['prepare_batch_refill']:.0f}."
    fixed = figures.result("h200_triton_batch_invariant")
    others = [rules["host_us"], fixed["host_us"]]
    calls, plans = ([each[name] for each in others] for name in ("run_linear", "prepare_batch"))
    yield f"took {calls[0]:.0f} and {plans[0]:.0f} us"
    yield f"and {calls[1]:.0f} and {plans[1]:.0f} ("
    ratios = [row["ratio"] for row in table["mixed_ranks"] + rules["mixed_ranks"]]
    yield (
        f"{ratios[0]:.2f} times the time with 8 adapters, {ratios[1]:.2f} with 64; by the rules "
        f"{ratios[2]:.2f} and {ratios[3]:.2f}"
    )
    limits = [figures.ratio_of_limits(adapters) for adapters in (8, 64)]
    yield f"{limits[0]:.2f} times as high with 8 adapters and {limits[1]:.2f} with 64"
    expand = {
        row["max_rank"]: row["bytes_read"] / 1e6
        for row in figures.result("h200_mixed_ranks")["kernels"]
        if (row["backend"], row["kernel"]) == ("triton", "expand")
    }
    yield f"reads {expand[64]:.1f} MB where it reads {expand[8]:.1f} in the narrow stack"
    ruled = {figures.key(cell): cell["us"] for cell in rules["cells"]}
    costs = [
        figures.geometric_mean(
            cell["us"] / ruled[figures.key(cell)] for cell in fixed["cells"] if of(cell["tokens"])
        )
        for of in figures.PHASES.values()
    ]
    means = [fixed["summary"][phase]["geometric_mean"] for phase in figures.PHASES]
    yield (
        f"{means[0]:.2f} of the limit in decode and {means[1]:.2f} in prefill, {costs[0]:.2f} and "
        f"{costs[1]:.2f} times the time by the rules"
    )

    low = [
        next(
            cell
            for cell in figures.measured()
            if (cell["projection"], cell["tokens"], cell["active_adapters"], cell["rank"]) == key
        )
        for key in (("gate_up", 16, 8, 64), ("qkv", 16, 8, 16), ("qkv", 64, 8, 16))
    ]
    shares = [cell["limit_us"] / cell["times"]["triton"] for cell in low]
    yield f"rank 64 on gate_up, 16 tokens** ({shares[0]:.2f})"
    yield f"rank 16 on qkv, 16 and 64 tokens** ({shares[1]:.2f} and {shares[2]:.2f})"
    ratios = [cell["times"]["csgmv"] / cell["times"]["triton"] for cell in low]
    yield f"`csgmv` takes {ratios[1]:.2f} and {ratios[2]:.2f} times the time"
    tuned = figures.result("h200_tune_triton")
    over = tuned["gains"]
    yield (
        f"{over['rules over found']:.2f} times as fast as the rules over "
        f"{len(tuned['cells'])} cells of 64 and 2048 tokens in "
        f"{tuned['tuning']['budget_s']:.0f} s, and "
        f"{over['in use over found']:.2f} times as fast as the shipped table was"
    )
    axes = [one_axis_over_two(name) for name in ("triton", "csgmv")]
    yield (
        f"decode {axes[0]:.2f} times the time for `triton`, with sizes that were tuned for two "
        f"axes, and {axes[1]:.2f} for `csgmv`"
    )


def one_axis_over_two(name):
    """Return the time in grids of one axis over that of two in decode, geometric mean."""
    two = {
        figures.key(cell): cell["us"] for cell in figures.result(f"h200_{name}_two_axes")["cells"]
    }
    return figures.geometric_mean(
        cell["us"] / two[figures.key(cell)]
        for cell in figures.result(f"h200_{name}")["cells"]
        if figures.PHASES["decode"](cell["tokens"])
    )


def quotes_on_csgmv():
    boxes = figures.result("h200_csgmv_boxes")["summary"]["prefill"]["geometric_mean"]
    yield f"{boxes:.2f} in prefill (`h200_csgmv_boxes.json`)"
    tuned = figures.result("h200_tune_csgmv")
    over = tuned["gains"]
    yield (
        f"{over['in use over found']:.2f} times as fast as the table before, "
        f"{over['rules over found']:.2f} times as fast as the rules"
    )
    peer = "SGLang 0.5.23 csgmv"
    for phase in figures.PHASES:
        for size, file in (("16", "h200_csgmv"), ('"auto"', "h200_csgmv_auto")):
            us = {figures.key(cell): cell["us"] for cell in figures.result(file)["cells"]}
            pairs = [(cell, us[figures.key(cell)]) for cell in figures.of_phase(phase)]
            shares = [cell["limit_us"] / time for cell, time in pairs]
            to_best = figures.geometric_mean(time / cell["best_peer_us"] for cell, time in pairs)
            faster = figures.geometric_mean(cell["times"][peer] / time for cell, time in pairs)
            yield (
                f"| {phase} | {size} | {figures.geometric_mean(shares):.2f} | {min(shares):.2f} | "
                f"{to_best:.2f} | {faster:.2f} |"
            )
    host = figures.result("h200_csgmv")["host_us"]
    mixed = [row["ratio"] for row in figures.result("h200_csgmv")["mixed_ranks"]]
    yield (
        f"is {host['run_linear']:.0f} us; `prepare_batch` of 256 tokens and 64 slots takes "
        f"{host['prepare_batch']:.0f} us, a refill {host['prepare_batch_refill']:.0f}."
    )
    yield f"{mixed[0]:.2f} times the time with 8 adapters, {mixed[1]:.2f} with 64"
    yield f"is {figures.ratio_of_limits(64):.2f} times as high"
    compared = {
        f"{len(figures.of_phase(phase))} of {phase}": [
            cell["times"]["csgmv"] / cell["times"]["triton"] for cell in figures.of_phase(phase)
        ]
        for phase in figures.PHASES
    }
    sweep = figures.sweep_ratios()
    for cells, ratios in {**compared, f"{len(sweep)} of the sweep": sweep}.items():
        yield (
            f"| {cells} | {figures.geometric_mean(ratios):.2f} ({min(ratios):.2f} to "
            f"{max(ratios):.2f}) | {sum(ratio < 0.98 for ratio in ratios)} | "
            f"{sum(ratio > 1.02 for ratio in ratios)} |"
        )
    us = {
        (c["projection"], c["tokens"], c["active_adapters"]): [
            f"{c['results'][name]['us']:.1f}" for name in ("triton", "csgmv")
        ]
        for c in figures.result("h200_sweep")["cells"]
    }
    yield f"from {us['qkv', 256, 8][0]} to {us['qkv', 512, 8][0]} us"
    yield f"`csgmv` from {us['qkv', 256, 8][1]} to {us['qkv', 512, 8][1]}."
    triton, csgmv = us["o", 512, 256]
    yield f"`o` takes {triton} us with `triton` and {csgmv} with `csgmv`"
    yield f"take {us['o', 256, 256][0]} and {us['o', 256, 256][1]}."
    yield f"{us['qkv', 256, 16][0]} us against {us['qkv', 256, 16][1]}"


def quotes_on_numba_cpu():
    report = json.loads((ROOT / "benchmarks" / "results" / "cpu_cells.json").read_text())
    by_dtype = [report["summary"][dtype] for dtype in ("float32", "bfloat16")]
    for label, field in (
        ("times the loop's speed: geometric mean", "decode_times_loop_geometric_mean"),
        ("the same, least cell", "decode_times_loop_least"),
        ("that ran at the copy bandwidth", "decode_times_loop_at_copy_bandwidth"),
        ("what is faster in a cell", "decode_times_loop_at_copy_bandwidth_or_measured"),
        ("at the read bandwidth", "decode_times_loop_at_read_bandwidth"),
        ("512 tokens, least cell", "512_tokens_times_loop_least"),
        ("whose floor is above 50 us", "decode_of_floor_least_where_above_50_us"),
    ):
        yield f"{label} | {by_dtype[0][field]:.2f} | {by_dtype[1][field]:.2f} |"
    medians = [
        statistics.median(cell[f"{what}_gb_per_s"] for cell in report["cells"])
        for what in ("copy", "read")
    ]
    yield f"copy at {medians[0]:.0f} GB/s and read at {medians[1]:.0f} GB/s"
    several = [c for c in report["cells"] if c["adapters"] > 1 and c["tokens"] <= 64]
    for dtype, text in (
        ("float32", "decode runs at {:.2f} to {:.2f}"),
        ("bfloat16", "at {:.2f} to {:.2f} in bfloat16"),
    ):
        shares = [cell["of_floor"] for cell in several if cell["dtype"] == dtype]
        yield text.format(min(shares), max(shares))
    bound = next(
        c
        for c in several
        if (c["dtype"], c["in_features"], c["tokens"], c["adapters"], c["rank"])
        == ("float32", 4096, 16, 8, 64)
    )
    floor, loop = bound["floor_microseconds"], bound["microseconds"]["loop"]
    yield f"the bytes take {floor:.0f} us at that bandwidth and the loop {loop:.0f} us"
    yield f"us, {loop / floor:.2f} times as long"


QUOTES = {
    "docs/explanation/numba-cpu-backend.md": quotes_on_numba_cpu,
    "README.md": quotes_of_the_readme,
    "docs/explanation/performance.md": quotes_on_performance,
    "docs/explanation/triton-backend.md": quotes_on_triton,
    "docs/explanation/csgmv-backend.md": quotes_on_csgmv,
}


@pytest.mark.parametrize("page", QUOTES)
def test_quoted_figures_are_those_of_the_results(page):
    text = " ".join((ROOT / page).read_text().split())
    missing = [quote for quote in QUOTES[page]() if quote not in text]
    assert missing == []
