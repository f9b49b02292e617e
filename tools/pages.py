"""Writes what README and docs quote from the code and from measurements.

Such a part stands between two comments, and the tests compare it with what this script makes::

    <!-- generated: support -->
    <!-- /generated -->

    python tools/pages.py
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import figures
import reference_blocks

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- /generated -->)", re.DOTALL)

BLOCKS: dict[str, Callable[[], str]] = {
    "support": reference_blocks.support,
    "backends": reference_blocks.backends,
    "configuration": reference_blocks.configuration,
    "generate-configuration": reference_blocks.generate_configuration,
    "command-line": reference_blocks.command_line,
    "h200-phases": figures.phases,
    "h200-projections": figures.projections,
    "h200-cells": figures.cells,
    "at-a-glance": figures.at_a_glance,
    "arithmetic-example": figures.worked_example,
}


def pages() -> list[Path]:
    """Return every page that has a generated part."""
    candidates = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in candidates if BLOCK.search(page.read_text(encoding="utf-8"))]


def updated(text: str) -> str:
    """Return a page with its generated parts made anew."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]]().strip()}\n\n{found[3]}", text)


def main() -> None:
    """Rewrite the pages that have changed, and name them."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if updated(text) != text:
            page.write_text(updated(text), encoding="utf-8")
            print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
