"""The one format of measurements: JSON files that say where, when and how they were made."""

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

from lora_backends.common.files import as_path, new_file, read_text
from lora_backends.errors import InvalidInputError, UnsupportedInputError

PACKAGES = ("torch", "triton", "numba", "numpy", "transformers", "peft")
FORMAT = "lora-backends results 2"
"""The format of every result file; `read_result` refuses others."""
DECODE_TOKENS = 256
"""Batches of up to this many tokens count as decode, larger ones as prefill."""


def new_result(method: str, device: torch.device | str = "cpu", **settings: Any) -> dict[str, Any]:
    """Return a result without rows: where, when and how it is measured, and the given settings."""
    device = torch.device(device)
    return {
        "format": FORMAT,
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), **versions(*PACKAGES)},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "method": method,
        **settings,
        "rows": [],
        "summary": {},
    }


def versions(*packages: str) -> dict[str, str | None]:
    """Return the versions of some packages, None for one that is not installed."""
    return {package: _version(package) for package in packages}


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result whole or not at all: an interrupted run leaves the last whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, result_text(result))


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    # in the same folder: a rename across file systems is not atomic
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def result_text(result: Mapping[str, Any]) -> str:
    """Return a result as JSON, a row a line."""
    lines = ",\n".join("  " + json.dumps(row) for row in result.get("rows", ()))
    values = {key: json.dumps(value) for key, value in result.items()}
    if lines:
        values["rows"] = f"[\n{lines}\n ]"
    return "{\n" + ",\n".join(f' "{key}": {value}' for key, value in values.items()) + "\n}\n"


def writable_file(path: Path, option: str) -> Path:
    """Return where a result goes, after its folder has been made and tried."""
    file = new_file(path, option)
    check_writable(file.absolute().parent, option)
    return file


def check_plots(option: str) -> None:
    """Refuse plots if matplotlib is missing, before any work: plots come last."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise UnsupportedInputError(
            f"{option} needs a package that is not installed: {error.name}\n"
            f"  to do: pip install 'lora-backends[bench]'"
        ) from error


def check_writable(folder: Path, option: str) -> None:
    """Make a folder and try to write to it, before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # permission bits say nothing about a read-only file system
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidInputError(
            f"{option}: cannot write to {folder}: {error.strerror or error}\n"
            f"  to do: give a folder that can be written to; nothing has been measured"
        ) from error


def read_result(path: Path) -> dict[str, Any]:
    """Return the contents of a result file, e.g. what `measure` wrote.

    Raises:
        InvalidInputError: no such file, or another kind of file.
    """
    try:
        result = json.loads(read_text(as_path(path, "--from-json")))
    except InvalidInputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path} is not valid JSON: {error}") from error
    format_ = result.get("format") if isinstance(result, dict) else None
    if format_ != FORMAT:
        raise InvalidInputError(
            f"{path} is no result file of this version of lora-backends\n"
            f"  given: format {format_!r}\n  allowed: {FORMAT!r}"
        )
    checked: dict[str, Any] = result
    return checked


def times(result: Mapping[str, Any], name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return every row in which a contender has a time, with that time."""
    pairs = [(row, row["results"].get(name, {})) for row in result["rows"]]
    return [(row, timing) for row, timing in pairs if "us" in timing]


def summarize(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return for each contender its efficiency by phase, the cells it is fastest in, and errors.

    Efficiency = modelled minimum time / measured time: its geometric mean over cells, and the
    lowest of them.
    """
    summary = {}
    for name in result["contenders"]:
        mine = times(result, name)
        shares: dict[str, Any] = {}
        for phase in ("decode", "prefill"):
            values = [
                time["efficiency"]
                for row, time in mine
                if (row["tokens"] <= DECODE_TOKENS) is (phase == "decode")
            ]
            if values:
                shares[f"efficiency_{phase}"] = round(statistics.geometric_mean(values), 3)
                shares[f"lowest_{phase}"] = min(values)
        summary[name] = shares | {
            "cells": len(mine),
            "fastest": sum(time["us"] == _fastest(row) for row, time in mine),
            "errors": sum("error" in row["results"].get(name, {}) for row in result["rows"]),
        }
    return summary


def layer_name(row: Mapping[str, Any]) -> str:
    """Return the name of a row's layer, and its operation where that is not the usual one."""
    projection, operation = str(row["projection"]), str(row["operation"])
    return projection if operation == "run_linear" else f"{projection}, {operation}"


def _fastest(row: Mapping[str, Any]) -> float:
    return min(float(timing["us"]) for timing in row["results"].values() if "us" in timing)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({len(names)} cores)" if names else platform.machine()
