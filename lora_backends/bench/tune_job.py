"""What a search for tile sizes is asked for, checked before anything is measured."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lora_backends.bench.cells import Cell
from lora_backends.bench.job import make_job
from lora_backends.bench.results import writable_file
from lora_backends.checks import as_device
from lora_backends.errors import (
    InvalidInputError,
    LoRABackendError,
    UnsupportedInputError,
    did_you_mean,
)
from lora_backends.gpu.choice import user_folder
from lora_backends.gpu.tables import LayerShape, file_name, read_table
from lora_backends.registry import AUTO, backend_class, backend_names, unavailable_reasons

DEFAULTS = {"tokens": "1,16,64,256,2048", "adapters": "1,8,64", "rank": "16"}
"""The batches that are tuned if none of them are given; measured ones stand for their neighbours
within a factor of two."""

MOST_JOBS = 16

_UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Point:
    """What one search finds the sizes for."""

    cell: Cell
    layer: LayerShape
    active_slots: int
    tile_tokens: int

    @property
    def key(self) -> tuple[Any, ...]:
        """What an entry of a table answers to."""
        return self.layer, self.cell.tokens, self.active_slots, self.tile_tokens


@dataclass(frozen=True)
class Tuning:
    """What is to be tuned, all of it possible here."""

    backend: str
    rules: Any  # the engine's tuning module, a TileRules
    device: torch.device
    dtype: torch.dtype
    points: list[Point]  # those of the rules' own tile sizes first
    path: Path
    budget: float  # seconds
    jobs: int = 1  # processes that compile

    @property
    def partial(self) -> Path:
        """Where results stand until the last point is done."""
        return self.path.with_name(self.path.name + ".partial")


def rules_of(backend: str) -> Any:
    """Return the tuning module of an engine whose tiles can be tuned.

    Raises:
        InvalidInputError: no backend of that name is registered.
        BackendUnavailableError: it does not import.
        UnsupportedInputError: it has no tiles to tune.
    """
    names = backend_names()
    if backend not in names:
        raise InvalidInputError(
            f"no backend named {backend!r} to tune{did_you_mean(backend, names)}\n"
            f"  registered: {', '.join(names)}"
        )
    found = _tuning_module(backend)
    if found is None:
        can = [name for name in names if _tuning_module(name, quiet=True) is not None]
        raise UnsupportedInputError(
            f"backend {backend!r} has no tiles to tune\n  allowed: {', '.join(can) or 'none here'}"
        )
    return found


def _tuning_module(backend: str, quiet: bool = False) -> Any | None:
    try:
        home = backend_class(backend).__module__
    except LoRABackendError:
        if quiet:
            return None
        raise
    found = importlib.util.find_spec(f"{home}.tuning") if _is_package(home) else None
    return importlib.import_module(found.name) if found else None


def _is_package(name: str) -> bool:
    return hasattr(sys.modules[name], "__path__")


def make_tuning(
    backend: str,
    *,
    budget: str = "10m",
    output: Path | None = None,
    jobs: int | None = None,
    device: str | None = None,
    **layers: Any,
) -> Tuning:
    """Return the job of a command line.

    Args:
        backend: an engine with tiles.
        budget: "90s", "5m", "1h".
        output: the file; in the user's folder under the device's name if None.
        jobs: processes that compile; as many as there are cores, at most 16, if None.
        device: "cuda", "cuda:1", ...; the best here if None or "auto".
        layers: as `make_job`: preset_name, config_json, in_features, output_slices, tokens,
            adapters, rank, mixes, dtype; lists are separated by commas.

    Raises:
        LoRABackendError: whatever does not fit together, an unwritable folder, or a file in the
            way that is no table of this device; nothing has been measured.
    """
    rules, seconds = rules_of(backend), parse_budget(budget)
    if jobs is not None and jobs < 1:
        raise InvalidInputError(f"--jobs {jobs}\n  allowed: 1 or more")
    where = _gpu(backend, device)
    given = layers | {key: layers.get(key) or value for key, value in DEFAULTS.items()}
    measured = make_job(
        **given,
        backends=backend,
        options=[f"{backend}.tiles=rules"],
        device=str(where),
    )
    path = writable_file(output or user_folder() / file_name(backend, where), "--output")
    if path.exists():
        read_table(path, rules, backend, where)  # what it has of other layers is kept
    points = make_points(measured.cells, rules, measured.dtype)
    cores = jobs or min(MOST_JOBS, os.cpu_count() or 1)
    return Tuning(backend, rules, where, measured.dtype, points, path, seconds, cores)


def _gpu(backend: str, device: str | None) -> torch.device:
    """Return the GPU to tune on."""
    if device in (None, AUTO):
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = as_device(device or "cpu")
    if where.type != "cuda":
        raise UnsupportedInputError(
            f"tune measures on a GPU\n  given: {where}\n"
            f"  to do: run it on a machine with a CUDA or ROCm device; "
            f"times in Triton's interpreter say nothing about one"
        )
    reasons = unavailable_reasons(backend, where)
    if reasons:
        raise UnsupportedInputError(f"{backend} cannot be tuned on {where}: {' '.join(reasons)}")
    return where


def parse_budget(text: str) -> float:
    """Return seconds of "90s", "5m" or "1h".

    Raises:
        InvalidInputError: it is none of these, or zero.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if seconds <= 0:
        raise InvalidInputError(f"--budget {text!r}\n  allowed: e.g. 90s, 5m, 1h")
    return seconds


def make_points(cells: Sequence[Cell], rules: Any, dtype: torch.dtype) -> list[Point]:
    """Return what to search: with the rules' tiles per plan first, then with twice or half of it.

    Args:
        cells: layers and batches; of those alike in all that a table knows, the first counts.
        rules: the engine's tuning module.
        dtype: of the weights.

    Returns:
        The points, none twice, those of one layer together: they share compiled kernels.
    """
    first: dict[tuple[Any, ...], Point] = {}
    others: dict[tuple[Any, ...], Point] = {}
    for cell in cells:
        slices, active = len(cell.output_slices), cell.active_adapters
        layer = LayerShape(slices, cell.rank, cell.in_features, cell.out_features, dtype.itemsize)
        tile = rules.block_tokens(cell.tokens, active)
        for size in rules.TILE_TOKENS:
            point, filled = Point(cell, layer, active, size), cell.tokens / active
            if size == tile:
                first.setdefault(point.key, point)
            elif size in (tile // 2, 2 * tile) and filled >= size / 2:
                others.setdefault(point.key, point)
    return [*first.values(), *others.values()]
