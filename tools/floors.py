"""Print the oldest versions that pyproject.toml allows, as constraints for pip.

python tools/floors.py > floors.txt
pip install -c floors.txt '.[hf,test]'
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
EXTRAS = ("hf", "test")
"""The extras whose floors are tested, besides what the package itself requires."""


def floors(pyproject: str) -> list[str]:
    """Return ``name==version`` for each requirement ``name>=version``, with its marker."""
    project = tomllib.loads(pyproject)["project"]
    requirements = list(project["dependencies"])
    for extra in EXTRAS:
        requirements += project["optional-dependencies"][extra]
    lines = []
    for requirement in requirements:
        found = re.fullmatch(r"([\w.-]+)>=([\w.]+)(,[^;]*)?(\s*;.*)?", requirement)
        if found is None:
            raise ValueError(f"no floor in {requirement!r}; allowed: name>=version")
        name, version, _, marker = found.groups()
        lines.append(f"{name}=={version}{marker or ''}")
    return lines


if __name__ == "__main__":
    print("\n".join(floors(PYPROJECT.read_text(encoding="utf-8"))))
