"""Build the site; a warning, such as one about a broken link, is an error.

    python tools/build_site.py [mkdocs.yml] [--output site]

The site is built from a copy of the pages with long references added: every option of every
command, and every property of the conformance suite.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pages

ROOT = Path(__file__).parents[1]
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def build(config: Path, output: Path) -> int:
    """Build the site of a configuration; return the builder's status, 0 if nothing was wrong."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copy(config, copy / "mkdocs.yml")
        shutil.copytree(config.parent / "docs", copy / "docs")
        for name in ("lora_backends", "tools"):  # read for the reference
            (copy / name).symlink_to(ROOT / name)
        for page in (copy / "docs").rglob("*.md"):
            page.write_text(pages.for_the_site(page.read_text(encoding="utf-8")), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", "mkdocs.yml"],
            cwd=copy,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            print(COLOURS.sub("", done.stdout), file=sys.stderr)
        else:
            shutil.rmtree(output, ignore_errors=True)
            shutil.copytree(copy / "site", output)
    return done.returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", type=Path, default=ROOT / "mkdocs.yml")
    parser.add_argument("--output", type=Path, default=ROOT / "site")
    arguments = parser.parse_args()
    sys.exit(build(arguments.config.resolve(), arguments.output.resolve()))
