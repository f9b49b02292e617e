"""Tunes the tiles of one engine from a source tree, on a machine with torch and Triton alone.

    python benchmarks/h200_tune.py triton --budget 9m --output triton-nvidia-h200.json

The options are those of ``python -m lora_backends.bench.tune``. Where the package is not installed,
its entry points are written beside it first, so that this and the compiling processes find them.
A table that is to be shipped goes to lora_backends/ENGINE/tables/ under the name that
`lora_backends.gpu.tables.file_name` gives it.
"""

from __future__ import annotations

import importlib
import os
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def register() -> None:
    """Make the backends of this tree known by name, here and in processes that are started."""
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    from lora_backends.registry import GROUP, backend_names

    if backend_names():
        return
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = ROOT / "lora_backends.egg-info"
    folder.mkdir(exist_ok=True)
    lines = [f"{name} = {target}" for name, target in project["entry-points"][GROUP].items()]
    (folder / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (folder / "PKG-INFO").write_text(head)
    importlib.invalidate_caches()


if __name__ == "__main__":
    register()
    from lora_backends.bench.tune import main

    raise SystemExit(main())
