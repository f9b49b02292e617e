"""`make_job`: checks a command line before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lora_backends.bench.cells import MOST, Cell, make_cells
from lora_backends.bench.contenders import Contender, choose
from lora_backends.bench.measure import Progress, check_device, check_memory, measure
from lora_backends.common.devices import as_device
from lora_backends.common.names import AUTO
from lora_backends.dtypes import dtype_name
from lora_backends.errors import InvalidInputError, did_you_mean, shown
from lora_backends.layer_weights import DTYPES
from lora_backends.model_shapes import LAYER, Projections, preset, read_config
from lora_backends.operations import DENSE
from lora_backends.selection.option_text import EXAMPLE, read_options

ALL = "all"
DEFAULTS = {"cpu": ("smollm2", torch.float32), "cuda": ("llama3-8b", torch.bfloat16)}
"""Preset and dtype by type of device."""


@dataclass(frozen=True)
class BenchRun:
    """A checked run of `measure`; the fields are its arguments."""

    cells: list[Cell]
    contenders: list[Contender]
    left_out: dict[str, str]  # name: why it is not timed
    notes: list[str]
    device: torch.device
    dtype: torch.dtype

    def run(
        self,
        path: Path | None = None,
        progress: Progress | None = None,
        result: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Measure, as `measure` does."""
        return measure(**vars(self), path=path, progress=progress, result=result)


def make_job(
    *,
    preset_name: str | None = None,
    config_json: Path | None = None,
    in_features: int | None = None,
    output_slices: str | None = None,
    tokens: str | None = None,
    adapters: str | None = None,
    rank: str | None = None,
    mixes: str | None = None,
    operations: str | None = None,
    backends: str | None = None,
    options: Sequence[str] = (),
    dtype: str | None = None,
    device: str | None = None,
) -> BenchRun:
    """Return the run that a command line asks for; lists are separated by commas.

    Layers come from one source: a preset (the device's default if no source is given), a
    config.json, or both widths. With tokens, adapters, rank or mixes, every combination is timed.
    `operations` is run_linear if None, and "all" is each that is not a case of another. An item of
    `options` is ``NAME.KEY=VALUE``, the value JSON or a string. `device` may be "auto".

    Raises:
        LoRABackendError: contradictory or unknown arguments; nothing has been measured.
    """
    where = check_device(best_device(device))
    default_preset, default_dtype = DEFAULTS[where.type]
    sources = (preset_name, config_json, in_features if in_features is not None else output_slices)
    # a silent precedence would time other layers than intended
    if sum(source is not None for source in sources) > 1:
        raise InvalidInputError(
            "which layers?\n  given: more than one of a preset, a config.json and widths\n"
            "  allowed: one of the three"
        )
    projections, notes = _projections(
        preset_name or default_preset, config_json, in_features, output_slices
    )
    cells = make_cells(
        projections,
        where.type,
        _ints(tokens, "tokens"),
        _ints(adapters, "adapters"),
        _ints(rank, "rank"),
        _words(mixes),
        _operations(operations),
    )
    kind = default_dtype if dtype is None else _dtype(dtype)
    # before anything is measured, which takes minutes
    check_memory(cells, where, kind)
    names = None if backends is None else _words(backends)
    if names == []:
        raise InvalidInputError("no backends\n  given: ''\n  allowed: names separated by commas")
    contenders, left_out = choose(names, where, kind, _options(options))
    return BenchRun(cells, contenders, left_out, notes, where, kind)


def best_device(device: str | None) -> torch.device:
    """Return the device of a command line; a GPU if there is one, for None and "auto"."""
    if device is None or device == AUTO:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return as_device(device)


def _projections(
    name: str, config_json: Path | None, in_features: int | None, output_slices: str | None
) -> tuple[Projections, list[str]]:
    if (in_features is None) != (output_slices is None):
        raise InvalidInputError(
            f"in_features and output_slices belong together\n"
            f"  given: in_features={in_features}, output_slices={output_slices}\n"
            f"  allowed: both, e.g. 4096 and 4096,1024,1024"
        )
    if in_features is not None:
        return {LAYER: (in_features, tuple(_ints(output_slices, "output_slices")))}, []
    return read_config(config_json) if config_json else preset(name)


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _ints(text: str | None, what: str) -> list[int]:
    if text is None:
        return []
    sizes = [_size(word) for word in _words(text)]
    if not sizes or min(sizes) < 1:
        raise InvalidInputError(
            f"{what} is not a list of sizes\n  given: {shown(text)}\n"
            f"  allowed: 1 to {MOST} each, e.g. 1,16,256"
        )
    return sizes


def _size(word: str) -> int:
    """Return a size, or 0 for other text; Python converts no more than 4300 digits."""
    size = int(word) if word.isdecimal() and len(word) < 20 else 0
    return size if size <= MOST else 0


def _operations(text: str | None) -> list[str]:
    if text == ALL:
        return [operation.name for operation in DENSE.values() if operation.same_as is None]
    names = _words("run_linear" if text is None else text)
    if not names:
        raise InvalidInputError(
            f"no operations\n  given: {text!r}\n  allowed: {ALL}, or some of {', '.join(DENSE)}"
        )
    return names


def _dtype(name: str) -> torch.dtype:
    known = {dtype_name(dtype): dtype for dtype in DTYPES}
    if name not in known:
        raise InvalidInputError(
            f"no dtype named {name!r}{did_you_mean(name, known)}\n  allowed: {', '.join(known)}"
        )
    return known[name]


def _options(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    items: dict[str, list[str]] = {}
    for item in texts:
        name, dot, setting = item.partition(".")
        if not (name and dot) or "=" in name:
            raise InvalidInputError(
                f"option {shown(item)}\n  allowed: NAME.KEY=VALUE, e.g. triton.{EXAMPLE}"
            )
        items.setdefault(name, []).append(setting)
    return {name: read_options(settings, f"{name}.") for name, settings in items.items()}
