"""Checks of a file of timed cells before it is shown: it may come from anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError

from lora_backends.errors import InvalidInputError, shown

_MOST_PROBLEMS = 5

Size = Annotated[int, Field(strict=True, ge=1, le=2**53)]
Time = Annotated[FiniteFloat, Field(strict=True, gt=1e-6, lt=1e15)]  # microseconds
Rate = Annotated[FiniteFloat, Field(strict=True, gt=0, lt=1e15)]
Text = Annotated[str, Field(strict=True, max_length=1000)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _Timed(_Section):
    """A contender in a cell: a time with its efficiency."""

    us: Time
    us_q1: Time = 1.0  # may be missing, as all defaults here; null is no number
    us_q3: Time = 1.0
    efficiency: Rate


class _Failed(_Section):
    """A contender in a cell: why there is no time."""

    error: Text


class _CellRow(_Section):
    projection: Text
    operation: Text
    in_features: Size
    output_slices: list[Size] = Field(min_length=1)
    tokens: Size
    active_adapters: Size
    rank: Size
    mix: Text
    limit_us: Time
    bytes: Size
    flop: Size
    results: dict[Text, _Timed | _Failed]


class _ContenderRow(_Section):
    timing: Text


class _LimitsRow(_Section):
    copy_gb_per_s: Rate
    launch_us: Annotated[FiniteFloat, Field(strict=True, ge=0, lt=1e15)]
    gemm_gflop_per_s: Rate = 1.0


class _Result(_Section):
    device: Text
    dtype: Text
    date: Text
    contenders: dict[Text, _ContenderRow]
    limits: _LimitsRow
    notes: list[Text]
    left_out: dict[Text, Text]
    rows: list[_CellRow]


def check_cells(result: dict[str, Any], path: Path) -> None:
    """Raise InvalidInputError unless a result holds whole cells of `lora-backends bench`."""
    try:
        TypeAdapter(_Result).validate_python(result)
    except ValidationError as error:
        details = error.errors(include_url=False)
        lines = [
            f"  - {_place(detail['loc'])}: {detail['msg']} (given: {shown(detail['input'], 80)})"
            for detail in details[:_MOST_PROBLEMS]
        ]
        if len(details) > _MOST_PROBLEMS:
            lines.append(f"  - and {len(details) - _MOST_PROBLEMS} more")
        raise InvalidInputError(
            "\n".join([f"{path} holds no cells of lora-backends bench:", *lines])
        ) from error


def _place(location: tuple[str | int, ...]) -> str:
    """Return the path of a value, without the names of classes that pydantic puts into it."""
    return ".".join(str(part) for part in location if not str(part).startswith("_"))[:80]
