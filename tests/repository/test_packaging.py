"""What pyproject.toml promises: the oldest versions, which `make test-floors` installs."""

from pathlib import Path

import floors
import pytest

PYPROJECT = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")


def test_every_requirement_has_a_floor():
    found = floors.floors(PYPROJECT)
    names = [line.partition("==")[0] for line in found]
    assert {"torch", "numba", "typer", "transformers", "pytest"} <= set(names)
    assert len(names) == len(set(names))
    assert any(line.startswith("triton==") and "sys_platform == 'linux'" in line for line in found)


def test_a_requirement_without_a_floor_is_refused():
    text = PYPROJECT.replace('"rich>=13"', '"rich"')
    assert text != PYPROJECT
    with pytest.raises(ValueError, match="no floor in 'rich'"):
        floors.floors(text)
