"""Tuning without a GPU: points, budgets, files; the lab is made up."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lora_backends.bench import tune
from lora_backends.bench.cells import Cell
from lora_backends.bench.tune import (
    Tuning,
    best_tiles,
    engine_with_tiles,
    gains,
    make_points,
    make_tuning,
    summary_lines,
    tune_points,
)
from lora_backends.common.durations import seconds_of
from lora_backends.errors import InvalidInputError, UnknownBackendError, UnsupportedInputError
from lora_backends.selection.registry import backend_class
from lora_backends.sgmv.tiles import rules
from lora_backends.sgmv.tiles.sizes import BatchShape, LayerShape
from lora_backends.sgmv.tiles.source import fixed_source
from lora_backends.sgmv.tiles.table import Entry, file_name, read_table
from lora_backends.triton import TritonBackend

CPU = torch.device("cpu")
CELLS = [
    Cell("o", 64, (64,), 16, 8, 16),
    Cell("o", 64, (64,), 128, 8, 16),
    Cell("qkv", 64, (64, 32), 128, 8, 16),
    Cell("qkv", 64, (64, 32), 128, 8, 16, "skewed"),  # has fewer active adapters
]


class FakeLab:
    """Tiles of 32 tokens are 1.5 times as fast, and so is a shrink with two warps."""

    def __init__(self, point, clock):
        self.point, self.clock = point, clock

    def prepare(self, tiles):
        self.clock[0] += 1
        return None

    def sample(self, tiles):
        faster = (1.5 if self.point.tile_tokens == 32 else 1) * (
            1.5 if tiles.shrink.num_warps == 8 else 1
        )
        return 30.0 / faster

    def keep(self, kept):
        pass


@pytest.fixture
def job(tmp_path):
    points = make_points(CELLS, torch.bfloat16)
    return Tuning("triton", CPU, torch.bfloat16, points, tmp_path / "t.json", 1e6)


def _tune(job, clock=None, lab=FakeLab, **options):
    clock = clock or [0.0]
    return tune_points(job, lambda point: lab(point, clock), now=lambda: clock[0], **options)


def test_points_begin_with_the_rules_tiles_and_leave_out_empty_ones():
    points = make_points(CELLS, torch.bfloat16)
    assert len({point.key for point in points}) == len(points)
    own = [rules.tile_tokens(p.cell.tokens, p.active_slots) == p.tile_tokens for p in points]
    assert own == sorted(own, reverse=True) and not all(own)
    assert all(
        p.tile_tokens <= 16 or p.cell.tokens / p.active_slots >= p.tile_tokens / 2 for p in points
    )


def test_the_table_has_what_was_found_and_is_read_by_a_backend(job):
    progress = _tune(job)
    table = read_table(job.path, "triton", CPU)
    assert len(table.entries) == len(job.points) == len(progress.entries)
    source = TritonBackend("cpu", tiles=job.path).tile_source
    layer = LayerShape(1, 16, 64, 64, 2)
    assert source.choose_tiles(BatchShape(128, 8, 32), layer).shrink.num_warps == 8
    assert source.tile_tokens(128, 8) == 32 != rules.tile_tokens(128, 8)
    assert source.tile_tokens(16, 8) == 16  # 2 tokens a slot: 32 was not tried


def test_a_search_begins_with_the_table_that_backends_read(job, tmp_path, monkeypatch):
    """The second run has time for one candidate a point, and finds no less than the first."""
    first = _tune(job)
    folder = tmp_path / "tiles"
    folder.mkdir()
    monkeypatch.setenv("LORA_BACKENDS_TILES", str(folder))
    job.path.rename(folder / file_name("triton", CPU))
    tried = []

    class One(FakeLab):
        def prepare(self, tiles):
            tried.append(tiles)
            self.clock[0] += 5  # of a share of 10 seconds: the rules and the sizes in use
            return None

    second = _tune(replace(job, budget=10.0 * len(job.points)), lab=One)
    assert {key: entry.tiles for key, entry in second.entries.items()} == {
        key: entry.tiles for key, entry in first.entries.items()
    }
    assert second.tried <= len(job.points)


def test_a_search_does_not_tune_at_first_use(job, monkeypatch):
    monkeypatch.setenv("LORA_BACKENDS_TUNE", "60s")
    assert len(_tune(job).entries) == len(job.points)


def test_a_broken_table_in_use_is_an_error_before_anything_is_searched(job, tmp_path, monkeypatch):
    monkeypatch.setenv("LORA_BACKENDS_TILES", str(tmp_path))
    (tmp_path / file_name("triton", CPU)).write_text('{"schema": 1}')
    with pytest.raises(InvalidInputError, match="to do: delete the file"):
        _tune(job, lab=None)


@pytest.mark.parametrize("engine", ["triton", "csgmv"])
def test_a_candidate_is_a_backend_made_with_its_tiles(engine):
    tiles = rules.choose_tiles(BatchShape(64, 8, 32), LayerShape(1, 16, 64, 64, 2))
    source = fixed_source(32, tiles)
    backend = backend_class(engine)("cpu", tiles=source)
    assert backend.tile_source is source and source.tile_tokens(1, 1) == 32


def test_the_tile_of_a_plan_is_that_of_the_least_time_over_all_layers():
    def entry(tile, us, layer):
        return Entry(LayerShape(1, 16, layer, 64, 2), 64, 8, tile, None, us, us)

    slow_in_one = [entry(16, 10, 1), entry(16, 10, 2), entry(32, 5, 1), entry(32, 17, 2)]
    assert best_tiles(slow_in_one)[64, 8].tile_tokens == 16
    faster = [*slow_in_one[:3], entry(32, 14, 2)]
    assert best_tiles(faster)[64, 8].tile_tokens == 32
    half_measured = slow_in_one[:3]
    assert best_tiles(half_measured)[64, 8].tile_tokens == 16


def test_gains_against_the_rules_with_their_own_tiles(job):
    progress = _tune(job)
    ratios = {(p.cell.tokens, p.tile_tokens): gain for p, gain in gains(job, progress).items()}
    assert ratios[16, 16] == pytest.approx(1.5, rel=1e-3)
    assert ratios[128, 32] == pytest.approx(2.25, rel=1e-3)
    text = "\n".join(summary_lines(job, progress))
    assert "times as fast as the rules" in text and str(job.path) in text


def test_an_interrupted_search_goes_on_where_it_was(job):
    class Interrupted(FakeLab):
        def prepare(self, tiles):
            if self.point == job.points[2]:
                raise KeyboardInterrupt
            return super().prepare(tiles)

    with pytest.raises(KeyboardInterrupt):
        _tune(job, lab=Interrupted)
    assert len(read_table(job.path, "triton", CPU).entries) == 2
    searched = []
    progress = _tune(job, notify=lambda i, point, found: found or searched.append((i, point)))
    assert progress.resumed == 2 and searched == list(enumerate(job.points))[2:]
    assert len(read_table(job.path, "triton", CPU).entries) == len(job.points)


def test_what_other_software_has_measured_is_searched_again_and_kept_meanwhile(job):
    _tune(job)
    text = job.path.read_text()
    job.path.write_text(text.replace('"torch": "', '"torch": "0.'))
    searched = []
    short = replace(job, budget=1.0)
    progress = _tune(short, notify=lambda i, point, found: found or searched.append(point))
    assert progress.resumed == 0 and searched == job.points[:1]
    assert len(read_table(job.path, "triton", CPU).entries) == len(job.points)


def test_a_table_is_left_as_it_was_if_writing_fails(job, monkeypatch):
    _tune(replace(job, budget=1.0))
    before = job.path.read_text()

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(type(job.path), "replace", full)
    with pytest.raises(OSError, match="no space"):
        _tune(job)
    assert job.path.read_text() == before and [job.path] == list(job.path.parent.iterdir())


def test_a_budget_ends_the_search_and_every_point_has_a_share(job):
    clock = [0.0]
    short = replace(job, budget=12.0)
    progress = _tune(short, clock)
    assert 12 <= clock[0] <= 12 + len(job.points)
    assert len(progress.entries) >= 3


def test_points_beyond_the_budget_are_left_for_the_next_run(job):
    progress = _tune(replace(job, budget=2.0))
    assert 0 < len(progress.entries) < len(job.points)
    left = len(job.points) - len(progress.entries)
    assert f"{left} of {len(job.points)} points are left: run the same command" in "\n".join(
        summary_lines(job, progress)
    )


def test_what_a_table_has_of_other_layers_is_kept(job):
    _tune(job)
    other = Cell("down", 128, (64,), 64, 8, 16)
    points = make_points([other], torch.bfloat16)
    more = replace(job, points=points)
    _tune(more)
    table = read_table(job.path, "triton", CPU)
    assert len(table.entries) == len(job.points) + len(points)


def test_rules_that_cannot_be_run_are_skipped_and_named(job):
    class Broken(FakeLab):
        def prepare(self, tiles):
            return "OutOfResources: shared memory"

    progress = _tune(job, lab=Broken)
    assert not job.path.exists()
    assert "shared memory" in "\n".join(summary_lines(job, progress))


@pytest.mark.parametrize("text, seconds", [("90s", 90), ("5m", 300), ("1.5h", 5400)])
def test_budgets(text, seconds):
    assert seconds_of(text, "--budget") == seconds


@pytest.mark.parametrize("text", ["", "5", "m", "-5m", "0s", "5 days"])
def test_a_budget_that_is_none_is_refused(text):
    with pytest.raises(InvalidInputError, match="allowed: e.g. 90s, 5m, 1h"):
        seconds_of(text, "--budget")


def test_an_engine_without_tiles_is_refused():
    with pytest.raises(UnsupportedInputError, match="'torch_ref' has no tiles to tune"):
        engine_with_tiles("torch_ref")
    with pytest.raises(UnknownBackendError, match="did you mean 'triton'"):
        engine_with_tiles("tritn")


def test_a_machine_without_a_gpu_is_refused():
    with pytest.raises(UnsupportedInputError, match="tune measures on a GPU"):
        make_tuning("triton", device="cpu")


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Let the checks that come after the one for a GPU be reached."""
    monkeypatch.setattr(tune, "_gpu", lambda *_: CPU)
    made = type("Made", (), {"cells": CELLS, "dtype": torch.bfloat16})
    monkeypatch.setattr(tune, "make_job", lambda **_: made)


def test_an_unwritable_folder_is_refused_before_anything_is_measured(on_a_gpu, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError, match="cannot write to"):
        make_tuning("triton", output=tmp_path / "file" / "t.json")
    with pytest.raises(InvalidInputError, match="is a folder"):
        make_tuning("triton", output=tmp_path)


@pytest.mark.parametrize("path", ["~nosuchuser/x", "x" * 300])
def test_an_output_that_is_no_path_is_refused(on_a_gpu, path):
    with pytest.raises(InvalidInputError, match="of a user that|cannot read"):
        make_tuning("triton", output=Path(path))


def test_a_file_in_the_way_that_is_no_table_of_this_device_is_refused(on_a_gpu, tmp_path):
    path = tmp_path / "t.json"
    path.write_text("{}")
    with pytest.raises(InvalidInputError, match="its schema is None"):
        make_tuning("triton", output=path)


def test_the_table_goes_to_the_users_folder(on_a_gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("LORA_BACKENDS_TILES", str(tmp_path / "new"))
    job = make_tuning("triton", budget="1m")
    assert job.path == tmp_path / "new" / "triton-cpu.json" and job.path.parent.is_dir()
    assert job.budget == 60
