"""Promises of pyproject.toml: the oldest versions, and an index page whose links work."""

import re
import runpy
from pathlib import Path

import floors
import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


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


@pytest.mark.parametrize("repository", [None, "https://code.example/us/lora"])
def test_no_link_of_the_index_page_is_relative(repository):
    index_page = runpy.run_path(str(ROOT / "setup.py"))["index_page"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = index_page(readme, repository)
    targets = re.findall(r"\]\(([^)\s]+)\)", page)
    assert all(target.startswith("https://") for target in targets)
    assert len(re.findall(r"\]\(([^)\s]+)\)", readme)) > 20  # else nothing was looked at
    if repository:
        assert "![Efficiency" in page and f"({repository}/raw/main/docs/images/h200.svg)" in page
        assert f"({repository}/blob/main/docs/how-to/use-inside-vllm.md)" in page
    else:
        assert "Use it inside vLLM" in page and "h200.svg" not in page
