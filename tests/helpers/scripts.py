"""Runs scripts of benchmarks/ in this process: another would import torch once more."""

import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"


def run_script(monkeypatch, name, *arguments):
    """Run a script with arguments, as from the command line, on small copies."""
    from lora_backends.bench import timing

    monkeypatch.setitem(timing.COPIED_VALUES, "cpu", 2**12)
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(FOLDER / name), run_name="__main__")
