"""The generated parts on Transformers models: what the sweep against PEFT found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULT = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "peft_sweep.json"


def architectures() -> str:
    """Return the models of the sweep by what a mixed batch of them gives."""
    found = _result()
    return f"{_listed(found['architectures'])}\n\n{_versions(found)}"


def variants() -> str:
    """Return the kinds of adapters and of their files, in the same way."""
    found = _result()
    return _listed({**found["variants"], **found["files"]})


def _result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    return found


def _listed(cases: Mapping[str, Mapping[str, Any]]) -> str:
    equal = [name for name, case in cases.items() if "worst" in case and not case.get("split")]
    split = [name for name, case in cases.items() if case.get("split")]
    lines = [f"**Equal to PEFT, row by row ({len(equal)}):** {'; '.join(equal)}."]
    if split:
        lines.append(f"**Equal with `split=True` ({len(split)}):** {'; '.join(split)}.")
    refused = [name for name, case in cases.items() if "refused" in case]
    lines.append(f"**Refused by name ({len(refused)}):** {'; '.join(refused)}.")
    return "\n\n".join(lines)


def _versions(found: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    worst = max(case.get("worst", 0.0) for case in found["architectures"].values())
    return (
        f"The worst difference of a value is {worst:.1e}, where {found['bound']:.0e} is allowed; "
        f"it is relative to the largest value of its row where that is over 1 ({versions})."
    )
