"""Runs measurements of benchmarks/ in this process: another would import torch once more."""

import importlib
from pathlib import Path

import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


def run_script(monkeypatch, name, *arguments):
    """Run a measurement with arguments, as from the command line, on small copies."""
    from lora_backends.bench import timing

    monkeypatch.setitem(timing.COPIED_VALUES, "cpu", 2**12)
    monkeypatch.syspath_prepend(FOLDER)
    # two processes of tests share the cores: threads of one spin while they wait for another's
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    importlib.import_module("run").main([name, *map(str, arguments)])
