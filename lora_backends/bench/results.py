"""Results of measurements as JSON files that say where and when they were made."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lora_backends.errors import InvalidInputError
from lora_backends.files import as_path, kind_of, read_text

PACKAGES = ("torch", "triton", "numba", "numpy", "transformers", "peft")
FORMAT = "lora-backends bench 1"
"""What `read_result` understands."""
DECODE_TOKENS = 256
"""Batches of at most as many tokens are counted as decode, larger ones as prefill."""


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the device, its software and the date, for a result file."""
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def write_result(path: Path, method: str, device: torch.device | str, **content: Any) -> None:
    """Write a result file: how it was measured, where, when, and the content."""
    write_json(path, {"method": method, "environment": environment(device), **content})


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file whole or not at all: an interrupted run leaves the last whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def writable_file(path: Path, option: str) -> Path:
    """Return where a result goes, after its folder has been made and tried.

    Raises:
        InvalidInputError: it is a folder or no path, or its folder cannot be written to.
    """
    file = as_path(path, option)
    if kind_of(file) == "a folder":
        raise InvalidInputError(f"{option}: {file} is a folder\n  allowed: a file")
    check_writable(file.absolute().parent, option)
    return file


def check_writable(folder: Path, option: str) -> None:
    """Make a folder and try it, before anything is measured that could not be kept.

    Raises:
        InvalidInputError: the folder cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidInputError(
            f"{option}: cannot write to {folder}: {error.strerror or error}\n"
            f"  to do: give a folder that can be written to; nothing has been measured"
        ) from error


def read_result(path: Path) -> dict[str, Any]:
    """Return what `measure` wrote.

    Raises:
        InvalidInputError: no such file, or another kind of file.
    """
    try:
        result = json.loads(read_text(as_path(path, "--from-json")))
    except InvalidInputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path} is not valid JSON: {error}") from error
    given = result.get("format") if isinstance(result, dict) else None
    if given != FORMAT:
        raise InvalidInputError(
            f"{path} was not written by lora-backends bench\n"
            f"  given: format {given!r}\n  allowed: {FORMAT!r}"
        )
    found: dict[str, Any] = result
    return found


def times(result: Mapping[str, Any], name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return every cell in which a contender has a time, with what was measured."""
    pairs = [(cell, cell["results"].get(name, {})) for cell in result["cells"]]
    return [(cell, found) for cell, found in pairs if "us" in found]


def summarize(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return per contender its efficiency (geometric mean), cells won, and errors."""
    summary = {}
    for name in result["contenders"]:
        mine = times(result, name)
        phases: dict[str, list[float]] = {"decode": [], "prefill": []}
        for cell, found in mine:
            phase = "decode" if cell["tokens"] <= DECODE_TOKENS else "prefill"
            phases[phase].append(found["efficiency"])
        summary[name] = {
            **{
                f"efficiency_{phase}": round(statistics.geometric_mean(values), 3)
                for phase, values in phases.items()
                if values
            },
            "cells": len(mine),
            "fastest": sum(found["us"] == _fastest(cell) for cell, found in mine),
            "errors": sum("error" in cell["results"].get(name, {}) for cell in result["cells"]),
        }
    return summary


def _fastest(cell: Mapping[str, Any]) -> float:
    return min(float(found["us"]) for found in cell["results"].values() if "us" in found)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({len(names)} cores)" if names else platform.machine()
