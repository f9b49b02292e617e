"""`lora-backends list`: every registered backend, and whether it runs here."""

from __future__ import annotations

import json
from typing import Annotated, Any

import torch
import typer

from lora_backends.backend import LoRABackend
from lora_backends.cli.console import output_of_plugins_aside, table
from lora_backends.cli.options import JsonFlag
from lora_backends.dtypes import dtype_name
from lora_backends.errors import BackendUnavailableError
from lora_backends.selection.registry import (
    auto_priority,
    backend_class,
    backend_names,
    faulty_entries,
    plugin_code,
    resolve_device,
    unavailable_reasons,
)

CAPABILITIES = ("deterministic", "batch_invariant", "differentiable", "cuda_graphs")


def list_backends(
    device: Annotated[str | None, typer.Option(help="Default: the best one here.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """List every registered backend: whether it runs here, or why not, and what it supports."""
    with output_of_plugins_aside():
        backends = [_describe(name, resolve_device(device)) for name in backend_names()]
    for fault in faulty_entries():
        typer.echo(f"warning: {fault}", err=True)
    if as_json:
        typer.echo(json.dumps(backends, indent=2))
        return
    columns = ["backend", "runs here", "devices", "dtypes", "capabilities"]
    table("", columns, [_row(backend) for backend in backends])


def _describe(name: str, device: torch.device) -> dict[str, Any]:
    reasons = unavailable_reasons(name, device)
    try:
        engine = backend_class(name)
        # an attribute may be a property of the plugin that raises
        with plugin_code(f"backend {name!r} cannot be described"):
            capabilities = {each: bool(getattr(engine, each)) for each in CAPABILITIES}
    except BackendUnavailableError as error:
        return {"name": name, "runs_here": False, "reasons": reasons or [str(error)]}
    return {
        "name": name,
        "runs_here": not reasons,
        "reasons": reasons,
        "not_in_auto": _fault_of_priority(name, engine, device),
        "device_types": list(engine.device_types),
        "dtypes": [dtype_name(dtype) for dtype in engine.dtypes],
        **capabilities,
    }


def _fault_of_priority(name: str, engine: type[LoRABackend], device: torch.device) -> str | None:
    """Return why "auto" passes over a backend that declares its priority wrongly."""
    try:
        auto_priority(name, engine, device)
    except BackendUnavailableError as error:
        return str(error)
    return None


def _row(backend: dict[str, Any]) -> list[str]:
    runs = "yes" if backend["runs_here"] else "no: " + " ".join(backend["reasons"])
    fault = backend.get("not_in_auto")
    return [
        backend["name"],
        f'{runs}; never taken by "auto": {fault}' if fault else runs,
        ", ".join(backend.get("device_types", [])),
        ", ".join(backend.get("dtypes", [])),
        ", ".join(each.replace("_", "-") for each in CAPABILITIES if backend.get(each)),
    ]
