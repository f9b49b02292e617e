"""A batch with an adapter per image equals diffusers' own adapters, run image by image."""

import runpy
from pathlib import Path

import pytest
from helpers.diffusion.diffusion_loras import BOUND, compared
from helpers.diffusion.tiny_pipelines import PIPELINES, TASKS

from lora_backends.bench.results import read_result
from lora_backends.diffusers import calls

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PIPELINES)
def test_each_image_is_that_of_its_adapter_alone(name):
    worst, effect = compared(name)
    assert worst < BOUND
    assert effect > 1000 * BOUND  # so that a lost or exchanged adapter would show


@pytest.mark.sweep
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_with_an_image_keep_the_rows_too(name, task):
    worst, effect = compared(name, task)
    assert worst < BOUND
    assert effect > 1000 * BOUND


def test_images_in_the_wrong_order_fail(monkeypatch):
    real = calls.ComponentCall._slots_of_rows
    monkeypatch.setattr(
        calls.ComponentCall, "_slots_of_rows", lambda self, rows: real(self, rows)[::-1]
    )
    assert compared("Qwen-Image")[0] > 1000 * BOUND


def test_the_result_file_is_of_these_pipelines():
    rows = read_result(ROOT / "benchmarks" / "results" / "diffusion_sweep.json")["rows"]
    assert [row["name"] for row in rows] == [*PIPELINES]
    assert all(row["worst"] < BOUND < row["effect"] for row in rows)
    assert callable(runpy.run_path(str(ROOT / "tools" / "sweep.py"))["pipelines"])
