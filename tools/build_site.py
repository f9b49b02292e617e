"""Build the site; a warning, as about a link that leads nowhere, is an error.

    python tools/build_site.py [mkdocs.yml] [--output site]

mkdocs counts the warnings that it prints, so `--strict` finds nothing beside `--quiet`. Its output
is kept back here instead, and shown where the build fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def build(config: Path, output: Path) -> int:
    """Build the site of a configuration; return mkdocs' status, 0 if nothing was wrong."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    command += ["--config-file", str(config), "--site-dir", str(output)]
    done = subprocess.run(
        command,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", type=Path, default=ROOT / "mkdocs.yml")
    parser.add_argument("--output", type=Path, default=ROOT / "site")
    arguments = parser.parse_args()
    sys.exit(build(arguments.config.resolve(), arguments.output.resolve()))
