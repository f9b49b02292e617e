"""The how-to shows the example package as it is, and the reference the figures that hold."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CUSTOM = ROOT / "examples" / "custom_backend"


@pytest.mark.parametrize("name", ["lora_gather.py", "pyproject.toml", "test_gather.py"])
def test_the_how_to_quotes_every_file_of_the_example(name):
    page = (ROOT / "docs" / "how-to" / "write-a-backend.md").read_text()
    language = "toml" if name.endswith(".toml") else "python"
    assert f"`{name}`:\n\n```{language}\n{(CUSTOM / name).read_text()}```" in page
