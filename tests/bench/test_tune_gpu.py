"""Tuning on a GPU: a small search from end to end."""

import pytest
import torch

from lora_backends import LoRABatch, get_backend
from lora_backends.bench.tune import gpu_lab_of, tune_points
from lora_backends.bench.tune_job import make_tuning
from lora_backends.gpu.tables import read_table

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_search_writes_a_table_that_a_backend_takes(tmp_path, jobs):
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    job = make_tuning(
        "triton",
        budget="30s",
        output=tmp_path / "t.json",
        jobs=jobs,
        in_features=512,
        output_slices="512,128",
        tokens="16",
        adapters="4",
    )
    progress = tune_points(job, gpu_lab_of)
    assert progress.tried > 10 and not progress.skipped
    assert "WrongResultError" not in " ".join(progress.failed)
    table = read_table(job.path, job.rules, "triton", job.device)
    backend = get_backend("triton", job.device, tiles=str(job.path))
    plan = backend.prepare_batch(LoRABatch([t % 4 for t in range(16)], 8))
    entry = next(e for e in table.entries if e.tile_tokens == plan.block_tokens)
    assert backend.tile_choice.choose_tiles(16, 4, 16, 2, 16, 512, 640, 2) == entry.tiles
