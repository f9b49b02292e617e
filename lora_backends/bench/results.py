"""Results of measurements as JSON files that say where and when they were made."""

from __future__ import annotations

import datetime
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "numba", "numpy", "transformers", "peft")


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
    result = {"method": method, "environment": environment(device), **content}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


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
