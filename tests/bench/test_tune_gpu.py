"""Tuning on a GPU: a small search from end to end."""

import pytest
import torch

from lora_backends import get_backend
from lora_backends.bench.tune import make_tuning, tune_points
from lora_backends.bench.tune_gpu import gpu_lab
from lora_backends.sgmv.tiles.sizes import BatchShape, LayerShape
from lora_backends.sgmv.tiles.table import read_table

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("engine", ["triton", "csgmv"])
def test_a_search_writes_a_table_that_a_backend_takes(tmp_path, engine):
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    job = make_tuning(
        engine,
        budget="30s",
        output=tmp_path / "t.json",
        in_features=512,
        output_slices="512,128",
        tokens="16",
        adapters="4",
    )
    progress = tune_points(job, gpu_lab(job))
    assert progress.tried > 10 and not progress.skipped
    assert "WrongResultError" not in " ".join(progress.failed)
    table = read_table(job.path, engine, job.device)
    source = get_backend(engine, job.device, tiles=str(job.path)).tile_source
    tile, layer = source.tile_tokens(16, 4), LayerShape(2, 16, 512, 640, 2)
    entry = next(e for e in table.entries if e.tile_tokens == tile)
    assert source.choose_tiles(BatchShape(16, 4, tile), layer) == entry.tiles
