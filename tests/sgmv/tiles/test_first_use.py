"""Tuning at first use, without a GPU: times are made up, except in the test that needs a card."""

import multiprocessing
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.engines import ENGINES

from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.sgmv.tiles import first_use, rules, source
from lora_backends.sgmv.tiles.first_use import first_use_source, rounded
from lora_backends.sgmv.tiles.gpu import H200
from lora_backends.sgmv.tiles.sizes import BatchShape, LayerShape
from lora_backends.sgmv.tiles.table import read_table

CPU = torch.device("cpu")
LAYER = LayerShape(3, 16, 4096, 6144, 2)
THREE = [BatchShape(1, 1, 16), BatchShape(16, 8, 16), BatchShape(64, 8, 16)]


class MadeUp:
    """An expand of two steps is 1.5 times as fast; each candidate takes half a second."""

    def __init__(self, clock, searched, batch, layer):
        self.clock = clock
        searched.append((batch, layer))

    def prepare(self, tiles):
        self.clock[0] += 0.5

    def sample(self, tiles):
        torch.rand(1)
        return 20.0 if tiles.expand.chunks == 2 else 30.0

    def keep(self, kept):
        pass


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A user's folder of tables."""
    monkeypatch.setenv("LORA_BACKENDS_TILES", str(tmp_path))
    return tmp_path


@pytest.fixture
def searched():
    return []


@pytest.fixture
def make(searched):
    clock = [0.0]

    def made(seconds=60.0, tables=None, lab=MadeUp, clock=clock):
        tables = tables or source.rules_for(H200)
        return first_use_source(
            "triton",
            CPU,
            seconds,
            tables,
            lambda batch, layer: lab(clock, searched, batch, layer),
            now=lambda: clock[0],
        )

    made.clock = clock
    return made


def _is_tuned(tiles):
    return tiles.expand.chunks == 2


def test_three_cells_are_tuned_in_under_a_minute(make, searched, capsys):
    chosen = make(seconds=60.0)
    found = [chosen.choose_tiles(batch, LAYER) for batch in THREE]
    assert all(map(_is_tuned, found)) and make.clock[0] < 60
    assert [batch for batch, _ in searched] == THREE
    (path, *_), shown = chosen.files, capsys.readouterr().err
    table = read_table(Path(path), "triton", CPU)
    assert [entry.tiles for entry in table.entries] == found
    assert shown.count("tuning triton: 4096 -> 6144, rank 16") == 3
    assert shown.count("rules 30.00 us -> 20.00 us") == 3


def test_a_search_is_repeated_neither_in_this_process_nor_in_the_next(make, searched):
    first = make()
    found = [first.choose_tiles(batch, LAYER) for batch in (*THREE, *THREE)]
    near = first.choose_tiles(BatchShape(90, 9, 16), LAYER)  # within 1.41 times 64 tokens
    assert near == found[2]
    second = make()
    assert [second.choose_tiles(batch, LAYER) for batch in (*THREE, *THREE)] == found
    assert len(searched) == 3


@pytest.mark.parametrize(
    "batch, other",
    [
        (BatchShape(310, 8, 16), BatchShape(330, 8, 16)),  # 256 tokens are of another kind
        (BatchShape(310, 8, 64), BatchShape(330, 8, 64)),
        (BatchShape(1200, 8, 64), BatchShape(1400, 8, 64)),  # rounded to 1,024 tokens
        (BatchShape(8, 8, 16), BatchShape(11, 8, 16)),
        (BatchShape(12, 8, 16), BatchShape(15, 8, 16)),  # 16 tokens are two for each slot
    ],
)
def test_a_batch_of_the_same_kind_nearby_is_not_searched_again(make, searched, batch, other):
    chosen = make(seconds=1e4)
    assert chosen.choose_tiles(batch, LAYER) == chosen.choose_tiles(other, LAYER)
    ((found, _),) = searched
    assert first_use._kind(found) == first_use._kind(batch)


def test_a_batch_that_is_rounded_to_one_of_a_table_takes_the_rules(make, searched):
    tables = source.rules_for(H200)
    measured = tables.choose_tiles(BatchShape(2048, 8, 64), LAYER)
    known = {BatchShape(2048, 8, 64): replace(measured, expand=replace(measured.expand, chunks=1))}
    chosen = make(tables=replace(tables, measured=lambda batch, _: known.get(batch)))
    assert chosen.choose_tiles(BatchShape(2048, 8, 64), LAYER) == known[BatchShape(2048, 8, 64)]
    near = BatchShape(2400, 8, 64)
    assert chosen.choose_tiles(near, LAYER) == tables.choose_tiles(near, LAYER)
    assert not searched


def test_what_another_process_has_found_meanwhile_is_taken_and_kept(make, searched):
    one, other = make(), make()
    found = one.choose_tiles(THREE[0], LAYER)
    assert other.choose_tiles(THREE[0], LAYER) == found and len(searched) == 1
    other.choose_tiles(THREE[1], LAYER)
    one.choose_tiles(THREE[2], LAYER)
    entries = read_table(Path(one.files[0]), "triton", CPU).entries
    assert [entry.num_tokens for entry in entries] == [1, 16, 64]


def _add_many(seconds, first):
    clock = [0.0]
    made = first_use_source(
        "triton",
        CPU,
        seconds,
        source.rules_for(H200),
        lambda batch, layer: MadeUp(clock, [], batch, layer),
        now=time.monotonic,
    )
    for i in range(12):
        made.choose_tiles(THREE[0], LayerShape(1, 16, 4096 + 256 * (2 * i + first), 64, 2))


def test_two_processes_lose_nothing_of_each_other():
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=_add_many, args=(1e4, first)) for first in (0, 1)]
    for each in both:
        each.start()
    for each in both:
        each.join(60)
        assert each.exitcode == 0
    path = source.user_folder() / _cache_name()
    assert len(read_table(path, "triton", CPU).entries) == 24
    assert list(path.parent.iterdir()) == [path]


def _cache_name():
    (path,) = source.user_folder().glob("triton-cpu-*.json")
    return path.name


@pytest.mark.parametrize("cut", [0, 40, 400])
def test_a_torn_file_is_ignored_by_name_and_written_anew(make, searched, cut):
    found = make().choose_tiles(THREE[0], LAYER)
    path = Path(make().files[0])
    path.write_text(path.read_text()[:cut])
    with pytest.warns(UserWarning, match=f"ignored, and to be written anew.*{path}"):
        again = make()
    with pytest.warns(UserWarning, match="ignored"):
        assert again.choose_tiles(THREE[0], LAYER) == found
    assert len(searched) == 2 and len(read_table(path, "triton", CPU).entries) == 1


def test_a_file_of_other_software_is_ignored_by_name(make):
    make().choose_tiles(THREE[0], LAYER)
    path = Path(make().files[0])
    path.write_text(path.read_text().replace('"torch": "', '"torch": "0.'))
    with pytest.warns(UserWarning, match=f"other versions: {path}"):
        make()


def test_the_file_names_the_card_and_all_versions():
    software = {"torch": "2.11.0+cu128", "triton": "3.6.0", "lora-backends": "0.1.0"}
    name = first_use.cache_name("csgmv", CPU, software)
    assert name == "csgmv-cpu-torch-2.11.0-cu128-triton-3.6.0-lora-backends-0.1.0.json"


def test_when_the_time_is_used_up_layers_take_table_or_rules(make, searched, capsys):
    chosen = make(seconds=12.0)
    for batch in (BatchShape(4**i, 1, 16) for i in range(12)):
        chosen.choose_tiles(batch, LAYER)
    assert 1 <= len(searched) < 12 and make.clock[0] <= 12 + 2
    assert "the time to tune is used up" in capsys.readouterr().err
    assert chosen.choose_tiles(BatchShape(4**11, 1, 16), LAYER) == rules.choose_tiles(
        BatchShape(4**11, 1, 16), LAYER
    )


def test_what_a_table_of_this_card_has_is_not_searched(make, searched):
    own = replace(rules.choose_tiles(THREE[0], LAYER))
    tables = source.TileSource(
        rules.tile_tokens,
        rules.choose_tiles,
        measured=lambda *of: own if of[0] == THREE[0] else None,
    )
    chosen = make(tables=tables)
    assert chosen.choose_tiles(THREE[0], LAYER) is own and not searched
    chosen.choose_tiles(THREE[2], LAYER)
    assert len(searched) == 1


@pytest.mark.parametrize(
    "batch, layer",
    [
        (BatchShape(0, 0, 16), LAYER),
        (BatchShape(512, 1, 128), LAYER),
        (THREE[0], LayerShape(3, 16, 4096, 6144, 1)),
    ],
    ids=["empty", "a tile of 128", "8 bits"],
)
def test_what_no_search_can_measure_follows_the_rules(make, searched, batch, layer):
    assert make().choose_tiles(batch, layer) == rules.choose_tiles(batch, layer) and not searched


def test_nothing_is_searched_while_a_graph_is_captured(make, searched, monkeypatch):
    chosen = make()
    monkeypatch.setattr(first_use, "is_capturing", lambda _: True)
    assert chosen.choose_tiles(THREE[0], LAYER) == rules.choose_tiles(THREE[0], LAYER)
    monkeypatch.setattr(first_use, "is_capturing", lambda _: False)
    assert not searched and _is_tuned(chosen.choose_tiles(THREE[0], LAYER))


def test_a_search_leaves_the_callers_random_numbers_and_modes(make):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with torch.inference_mode():
        make().choose_tiles(THREE[0], LAYER)
        assert torch.is_inference_mode_enabled()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    "error", ["OutOfResources: shared memory", torch.cuda.OutOfMemoryError("16 GiB")]
)
def test_a_search_that_fails_says_why_and_the_layer_takes_the_rules(make, error, capsys):
    class Failing(MadeUp):
        def prepare(self, tiles):
            if isinstance(error, Exception):
                raise error
            return error

    found = make(lab=Failing).choose_tiles(THREE[0], LAYER)
    assert found == rules.choose_tiles(THREE[0], LAYER)
    assert f"not tuned: {error}" in capsys.readouterr().err


def test_batches_are_measured_in_powers_of_two():
    for tokens in (1, 2, 3, 5, 6, 11, 12, 90, 91, 2048, 5000):
        size = rounded(BatchShape(tokens, tokens, 16)).num_tokens
        assert size & (size - 1) == 0 and tokens / 2**0.5 <= size <= tokens * 2**0.5
    assert rounded(BatchShape(6, 6, 16)) == BatchShape(8, 8, 16)


@pytest.mark.parametrize("text", ["tune:", "tune:soon", "tune:0s", "tune:-5s"])
def test_a_time_that_is_none_is_refused(text):
    with pytest.raises(InvalidInputError, match="tiles of backend 'triton'.*\n  allowed: e.g. 90s"):
        ENGINES["triton"]("cpu", tiles=text)


def test_a_variable_that_is_no_time_is_refused(monkeypatch):
    monkeypatch.setenv("LORA_BACKENDS_TUNE", "yes")
    with pytest.raises(InvalidInputError, match="LORA_BACKENDS_TUNE 'yes'"):
        ENGINES["triton"]("cpu")


def test_a_device_that_is_no_gpu_is_refused(monkeypatch):
    with pytest.raises(UnsupportedInputError, match="measures on a GPU"):
        ENGINES["triton"]("cpu", tiles="tune:60s")
    monkeypatch.setenv("LORA_BACKENDS_TUNE", "60s")
    with pytest.raises(UnsupportedInputError, match="unset LORA_BACKENDS_TUNE"):
        ENGINES["csgmv"]("cpu")
    assert ENGINES["triton"]("cpu", tiles="rules").tile_source.files == ()
    assert ENGINES["triton"]("cpu", batch_invariant=True).tile_source.files == ()


def test_a_batch_invariant_backend_refuses_to_tune():
    with pytest.raises(InvalidInputError, match="reads no table of tiles"):
        ENGINES["triton"]("cpu", batch_invariant=True, tiles="tune:60s")


def test_a_folder_that_cannot_be_written_to_is_refused(make, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LORA_BACKENDS_TILES", str(tmp_path / "file" / "folder"))
    with pytest.raises(InvalidInputError, match="cannot write to"):
        make()


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["triton", "csgmv"])
def test_three_cells_are_tuned_on_a_card_in_under_a_minute(engine, folder, capsys):
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    from lora_backends import LoRABatch, LoRAWeights, get_backend

    layer = LoRAWeights(
        torch.randn(8, 3, 16, 512, device="cuda", dtype=torch.bfloat16),
        torch.randn(8, 768, 16, device="cuda", dtype=torch.bfloat16),
        torch.full((8, 3), 16, dtype=torch.int32),
        torch.ones(8, 3),
        (512, 128, 128),
    )

    def run(backend):
        for tokens, active in ((1, 1), (16, 8), (64, 8)):
            batch = LoRABatch([token % active for token in range(tokens)], 8)
            x = torch.ones(tokens, 512, device="cuda", dtype=torch.bfloat16)
            results.append(backend.run_linear(x, layer, backend.prepare_batch(batch)))

    results = []
    began = time.monotonic()
    backend = get_backend(engine, "cuda", tiles="tune:60s")
    run(backend)
    torch.cuda.synchronize()
    assert time.monotonic() - began < 60
    table = read_table(Path(backend.tile_source.files[0]), engine, backend.device)
    assert len(table.entries) == 3 and capsys.readouterr().err.count("sizes timed") == 3
    run(get_backend(engine, "cuda", tiles="rules"))
    for tuned, by_rules in zip(results[:3], results[3:], strict=True):
        torch.testing.assert_close(tuned, by_rules, rtol=2e-2, atol=2e-2 * float(by_rules.std()))
