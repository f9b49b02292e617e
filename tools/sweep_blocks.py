"""The generated parts on Transformers models: what the sweep against PEFT found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_backends.bench.results import read_result

RESULT = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "peft_sweep.json"

DORA = " with DoRA"


def architectures() -> str:
    """Return the models of the sweep by the outcome of a mixed batch."""
    found = read_result(RESULT)
    return f"{_listed(found, 'architectures')}\n\n{_versions(found)}"


def variants() -> str:
    """Return the kinds of adapters and of their files, in the same way."""
    return _listed(read_result(RESULT), "variants", "files")


def bases() -> str:
    """Return the quantised bases: those that were run, and those of which only a layer was."""
    rows = [row for row in read_result(RESULT)["rows"] if row["kind"] in ("bases", "layers")]
    equal = [row for row in rows if "worst" in row]
    packages: dict[str, list[str]] = {row["package"]: [] for row in equal if "package" in row}
    names = {row["name"] for row in equal}
    for row in equal:
        if "package" in row and not row["name"].endswith(DORA):
            also = " (and DoRA)" * (row["name"] + DORA in names)
            packages[row["package"]].append(row["name"].partition(" ")[2] + also)
    lines = [f"**{package}:** {'; '.join(found)}." for package, found in packages.items()]
    layers = [row["name"] for row in equal if "package" not in row]
    refused = [row["name"] for row in rows if "refused" in row]
    return (
        "Equal to PEFT, row by row:\n\n"
        + "\n\n".join(lines)
        + f"\n\n**Equal by a layer with the same attributes, the package itself not run:** "
        f"{'; '.join(layers)}.\n\n**Refused by name:** {'; '.join(refused)}."
    )


def pipelines() -> str:
    """Return the pipelines of diffusers that were compared with diffusers' own adapters."""
    to = "diffusers' `set_adapters`, image by image"
    return _compared("diffusion_sweep", to, " of an image's largest value", "diffusers")


def encoders() -> str:
    """Return the kinds of encoders that were compared with PEFT."""
    return _compared("encoders_sweep", "PEFT, text by text", "", "sentence-transformers")


def _compared(file: str, to: str, of: str, package: str) -> str:
    found = read_result(RESULT.with_name(f"{file}.json"))
    names = "; ".join(row["name"] for row in found["rows"])
    return (
        f"**Equal to {to}:** {names}. Worst difference: {found['summary']['worst']:.1e}{of} "
        f"({package} {found['versions'][package]})."
    )


def _listed(found: Mapping[str, Any], *kinds: str) -> str:
    cases = {row["name"]: row for row in found["rows"] if row["kind"] in kinds}
    equal = [name for name, case in cases.items() if "worst" in case and not case.get("split")]
    split = [name for name, case in cases.items() if case.get("split")]
    lines = [f"**Equal to PEFT, row by row ({len(equal)}):** {'; '.join(equal)}."]
    if split:
        lines.append(f"**Equal with `split=True` ({len(split)}):** {'; '.join(split)}.")
    refused = [name for name, case in cases.items() if "refused" in case]
    lines.append(f"**Refused by name ({len(refused)}):** {'; '.join(refused)}.")
    return "\n\n".join(lines)


def _versions(found: Mapping[str, Any]) -> str:
    named = {name: found["versions"][name] for name in ("torch", "transformers", "peft")}
    versions = ", ".join(f"{name} {version}" for name, version in named.items())
    worst = max(r.get("worst", 0.0) for r in found["rows"] if r["kind"] == "architectures")
    return (
        f"The worst difference of a value is {worst:.1e}, where {found['bound']:.0e} is allowed; "
        f"it is relative to the largest value of its row where that is over 1 ({versions})."
    )
