"""`lora-backends list`: every registered backend, and whether it runs here."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from lora_backends.cli.console import table
from lora_backends.dtypes import dtype_name
from lora_backends.errors import BackendUnavailableError
from lora_backends.registry import backend_class, backend_names, unavailable_reasons


def list_backends(
    device: Annotated[
        str | None, typer.Option(help="Device to ask for; the best one here if left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List every registered backend: whether it runs here, or why not, and what it supports."""
    backends = [_describe(name, device) for name in backend_names()]
    if as_json:
        typer.echo(json.dumps(backends, indent=2))
        return
    columns = ["backend", "runs here", "devices", "dtypes", "capabilities"]
    table("", columns, [_row(backend) for backend in backends])


def _describe(name: str, device: str | None) -> dict[str, Any]:
    reasons = unavailable_reasons(name, device)
    try:
        found = backend_class(name)
    except BackendUnavailableError:
        return {"name": name, "runs_here": False, "reasons": reasons}
    return {
        "name": name,
        "runs_here": not reasons,
        "reasons": reasons,
        "device_types": list(found.device_types),
        "dtypes": [dtype_name(dtype) for dtype in found.dtypes],
        "differentiable": found.differentiable,
        "deterministic": found.deterministic,
        "batch_invariant": found.batch_invariant,
        "cuda_graphs": found.cuda_graphs,
    }


def _row(backend: dict[str, Any]) -> list[str]:
    capabilities = ("deterministic", "batch_invariant", "differentiable", "cuda_graphs")
    return [
        backend["name"],
        "yes" if backend["runs_here"] else "no: " + " ".join(backend["reasons"]),
        ", ".join(backend.get("device_types", [])),
        ", ".join(backend.get("dtypes", [])),
        ", ".join(c.replace("_", "-") for c in capabilities if backend.get(c)),
    ]
