"""Tables of tile sizes: what is taken from them, and what is refused and how."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.engines import ENGINES

from lora_backends import LoRABatch
from lora_backends.errors import InvalidInputError
from lora_backends.sgmv.runs import count_tokens
from lora_backends.sgmv.tiles import alike, rules, source
from lora_backends.sgmv.tiles.gpu import H200, Gpu
from lora_backends.sgmv.tiles.sizes import (
    BatchShape,
    ExpandTiles,
    LayerShape,
    ShrinkTiles,
    TileConfig,
    tile_faults,
)
from lora_backends.sgmv.tiles.table import (
    SCHEMA,
    BatchTiles,
    Entry,
    TileTable,
    read_table,
    table_text,
)

CPU = torch.device("cpu")
LAYER = LayerShape(3, 16, 4096, 6144, 2)
TILES = TileConfig(ShrinkTiles(32, 64, 5, 2, 8, 5), ExpandTiles(32, 16, 8, 2))
OTHER = TileConfig(ShrinkTiles(16, 32, 7), ExpandTiles(64, 16))


def _entry(tokens, active, tiles=TILES, layer=LAYER, tile=16):
    return Entry(layer, tokens, active, tile, tiles, 5.0, 6.5)


PLANS = (BatchTiles(64, 8, 32),)


def _table(*entries, batches=PLANS, **changes):
    table = TileTable(
        schema=SCHEMA,
        backend="triton",
        device="cpu",
        capability="none",
        multiprocessors=132,
        versions={"torch": "2", "triton": "3"},
        date="2026-11-21",
        batches=tuple(batches),
        entries=entries or (_entry(64, 8), _entry(256, 8, OTHER)),
    )
    return replace(table, **changes)


@pytest.fixture(params=ENGINES)
def engine(request):
    """Return the name of an engine."""
    return request.param


@pytest.fixture
def write(tmp_path):
    def write(table, name="table.json"):
        path = tmp_path / name
        path.write_text(table if isinstance(table, str) else table_text(table))
        return path

    return write


def _source(path, backend="triton"):
    return source.tile_source(backend, f"lora_backends.{backend}", CPU, path)


def _tiles(chosen, tokens, active, tile=16, layer=LAYER):
    return chosen.choose_tiles(BatchShape(tokens, active, tile), layer)


def _rules(tokens, active, tile=16, layer=LAYER):
    return rules.choose_tiles(BatchShape(tokens, active, tile), layer)


def test_a_table_is_read_as_it_was_written(write):
    table = _table()
    assert read_table(write(table), "triton", CPU) == table
    empty = replace(_table(batches=()), entries=())
    assert read_table(write(empty), "triton", CPU) == empty


@pytest.mark.parametrize(
    "tokens, active, expected",
    [(64, 8, TILES), (46, 6, TILES), (90, 9, TILES), (182, 8, OTHER), (299, 11, OTHER)],
)
def test_the_nearest_measured_batch_of_a_layer_is_taken(write, tokens, active, expected):
    assert _tiles(_source(write(_table())), tokens, active) == expected


@pytest.mark.parametrize(
    "tokens, active", [(64, 64), (45, 8), (128, 8), (2048, 8), (1, 1), (0, 0), (300, 8)]
)
def test_a_batch_far_from_all_measured_ones_follows_the_rules(write, tokens, active):
    assert _tiles(_source(write(_table())), tokens, active) == _rules(tokens, active)


@pytest.mark.parametrize(
    "measured, batch, stands",
    [
        ((1, 1), (2, 1), False),  # the entry's token is alone
        ((100, 64), (128, 64), False),
        ((64, 64), (90, 64), True),
        ((2048, 8), (2355, 8), True),
        ((2048, 8), (2356, 8), False),  # from 300 tokens on
        ((300, 8), (299, 8), False),
        ((256, 8), (299, 8), True),
    ],
)
def test_a_measured_batch_stands_for_those_of_its_kind(write, measured, batch, stands):
    table = _table(batches=())
    entry = replace(table.entries[0], num_tokens=measured[0], active_slots=measured[1])
    chosen = _source(write(replace(table, entries=(entry,))))
    assert (_tiles(chosen, *batch) == entry.tiles) == stands


def test_another_layer_or_tile_follows_the_rules(write):
    chosen = _source(write(_table()))
    for field in ("num_slices", "max_rank", "in_features", "out_features", "item_bytes"):
        layer = replace(LAYER, **{field: 2 * getattr(LAYER, field)})
        assert _tiles(chosen, 64, 8, layer=layer) == _rules(64, 8, layer=layer)
    assert _tiles(chosen, 64, 8, tile=32) == _rules(64, 8, tile=32)


def test_the_tile_of_a_plan_comes_from_the_table(write):
    chosen = _source(write(_table()))
    assert chosen.tile_tokens(64, 8) == 32 != rules.tile_tokens(64, 8)
    assert chosen.tile_tokens(2048, 8) == rules.tile_tokens(2048, 8)


def test_a_tile_that_a_table_names_is_kept_for_uneven_batches(write):
    table = _table()
    table = replace(table, batches=(replace(table.batches[0], num_tokens=512, active_slots=16),))
    counted = count_tokens(LoRABatch([i % 16 for i in range(448)] + [0, 2, 4, 6] * 16, 17))
    assert _source(write(table)).tile_for(512, counted) == table.batches[0].tile_tokens == 32
    assert source.rules_for().tile_for(512, counted) == 64


def test_the_users_table_goes_before_the_rules(write, tmp_path, monkeypatch, engine):
    write(_table(backend=engine), f"{engine}-cpu.json")
    monkeypatch.setenv("LORA_BACKENDS_TILES", str(tmp_path))
    make = ENGINES[engine]
    backend = make("cpu")
    assert backend.tile_source.files == (str(tmp_path / f"{engine}-cpu.json"),)
    assert _tiles(backend.tile_source, 64, 8) == TILES
    assert _tiles(make("cpu", tiles="rules").tile_source, 64, 8) == _rules(64, 8)
    assert make("cpu", batch_invariant=True).tile_source.files == ()


def test_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert source.user_folder() == tmp_path / "lora_backends" / "tiles"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(source.user_folder()) == "/home/someone/.cache/lora_backends/tiles"


def test_the_users_table_goes_before_the_librarys_own(write, monkeypatch):
    own = write(_table(_entry(64, 8, OTHER), _entry(1, 1, OTHER), batches=()), "own.json")
    users = write(_table(), "users.json")
    monkeypatch.setattr(source, "_automatic", lambda *_: (users, own))
    chosen = _source("auto")
    assert _tiles(chosen, 64, 8) == TILES and _tiles(chosen, 1, 1) == OTHER


def test_the_librarys_own_table_lies_in_the_folder_of_its_engine(engine, tmp_path, monkeypatch):
    """It is read where the device has the name that it was measured on."""
    monkeypatch.setenv("LORA_BACKENDS_TILES", str(tmp_path))
    described = ("NVIDIA H200", "9.0")
    monkeypatch.setattr("lora_backends.sgmv.tiles.table.device_of", lambda device: described)
    monkeypatch.setattr("lora_backends.sgmv.tiles.table.gpu_of", lambda device: H200)
    chosen = _source("auto", engine)
    (path,) = chosen.files
    assert path.endswith(f"{engine}/tables/{engine}-nvidia-h200.json")
    entry = read_table(Path(path), engine, "cuda").entries[0]
    assert _tiles(chosen, entry.num_tokens, entry.active_slots, entry.tile_tokens, entry.layer) == (
        entry.tiles
    )


H100_PCIE = (("NVIDIA H100 PCIe", "9.0"), Gpu(114, H200.shared_bytes))


@pytest.fixture
def on(monkeypatch):
    """Let the CPU pass for a card: its name and capability, and its figures."""

    def pass_for(described, gpu):
        for module in ("source", "table"):
            monkeypatch.setattr(f"lora_backends.sgmv.tiles.{module}.device_of", lambda _: described)
            monkeypatch.setattr(f"lora_backends.sgmv.tiles.{module}.gpu_of", lambda _: gpu)

    return pass_for


@pytest.mark.parametrize("name, count", [("NVIDIA H100 80GB HBM3", 132), ("NVIDIA H100 PCIe", 114)])
def test_a_card_without_a_table_takes_that_of_a_like_card(
    engine, name, count, on, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("LORA_BACKENDS_TILES", str(tmp_path))
    on(("NVIDIA H200", "9.0"), H200)
    own = _source("auto", engine)
    entries = read_table(Path(own.files[0]), engine, "cuda").entries
    on((name, "9.0"), Gpu(count, H200.shared_bytes))
    with caplog.at_level("INFO", "lora_backends.tiles"):
        chosen = _source("auto", engine)
    assert chosen.files == own.files and chosen.like == "NVIDIA H200"
    assert "(measured on NVIDIA H200, a like card), then the rules" in caplog.text
    assert name in caplog.text
    different = 0
    for entry in entries:
        batch = BatchShape(entry.num_tokens, entry.active_slots, entry.tile_tokens)
        tiles = chosen.choose_tiles(batch, entry.layer)
        split_k = tiles.shrink.split_k
        different += tiles != rules.choose_tiles(batch, entry.layer, Gpu(count, 227 << 10))
        assert replace(tiles, shrink=entry.tiles.shrink) == entry.tiles
        assert replace(tiles.shrink, split_k=entry.tiles.shrink.split_k) == entry.tiles.shrink
        if count == 132:
            assert split_k == entry.tiles.shrink.split_k
        assert 1 <= entry.tiles.shrink.split_k / split_k <= 1.5
    # many entries equal the rules, where those were within 1% of the fastest
    assert different > len(entries) / 4


@pytest.mark.parametrize(
    "described, gpu",
    [
        (("NVIDIA H20", "9.0"), Gpu(78, 227 << 10)),
        (("NVIDIA A100-SXM4-80GB", "8.0"), Gpu(108, 163 << 10)),
        (("NVIDIA B200", "10.0"), Gpu(148, 227 << 10)),
        (("AMD Instinct MI250X", "gfx90a"), Gpu(110, 64 << 10)),
    ],
)
def test_a_card_that_is_not_alike_takes_the_rules(
    engine, described, gpu, on, tmp_path, monkeypatch
):
    monkeypatch.setenv("LORA_BACKENDS_TILES", str(tmp_path))
    on(described, gpu)
    chosen = _source("auto", engine)
    assert chosen.files == () and chosen.origin == "the rules"
    assert _tiles(chosen, 64, 8) == rules.choose_tiles(BatchShape(64, 8, 16), LAYER, gpu)


def test_the_users_table_goes_before_that_of_a_like_card(engine, write, on, tmp_path, monkeypatch):
    own = {"device": H100_PCIE[0][0], "capability": "9.0", "multiprocessors": 114}
    on(*H100_PCIE)
    write(_table(backend=engine, **own), f"{engine}-nvidia-h100-pcie.json")
    monkeypatch.setenv("LORA_BACKENDS_TILES", str(tmp_path))
    chosen = _source("auto", engine)
    assert [Path(file).name for file in chosen.files] == [
        f"{engine}-nvidia-h100-pcie.json",
        f"{engine}-nvidia-h200.json",
    ]
    assert _tiles(chosen, 64, 8) == TILES
    assert _source("rules", engine).files == ()


def test_a_table_of_a_like_card_may_be_named_and_what_does_not_fit_is_left_out(write, on):
    of_h200 = {"device": "NVIDIA H200", "capability": "9.0"}
    large = replace(TILES, shrink=ShrinkTiles(64, 512, 4, num_stages=8))
    entries = _entry(64, 8), _entry(256, 8, large)
    path = write(_table(*entries, **of_h200))
    on(*H100_PCIE)
    chosen = _source(path)
    assert _tiles(chosen, 64, 8) == replace(TILES, shrink=replace(TILES.shrink, split_k=4))
    assert _tiles(chosen, 256, 8) == rules.choose_tiles(BatchShape(256, 8, 16), LAYER, H100_PCIE[1])
    assert chosen.origin == f"{path} (measured on NVIDIA H200, a like card), then the rules"
    on(("NVIDIA H20", "9.0"), Gpu(78, 227 << 10))
    with pytest.raises(InvalidInputError, match="132 multi.*'NVIDIA H20' .9.0, 78., which is not"):
        _source(path)


def test_of_several_like_cards_the_nearest_counts(write, on, tmp_path):
    for name, count in (("a", 150), ("b", 120), ("c", 132), ("d", 99)):
        write(_table(device=name, capability="9.0", multiprocessors=count), f"triton-{name}.json")
    on(*H100_PCIE)
    (found,) = source._of_like_card(tmp_path, "triton", CPU).values()
    assert found.device == "b"


def test_parts_of_the_inputs_follow_the_multiprocessors():
    """A step of 256 inputs: 14336 have 56 steps, 4096 have 16."""
    layer, sizes = LayerShape(1, 16, 14336, 4096, 2), ShrinkTiles(16, 256, 28)
    for count, expected in ((132, 28), (114, 28), (100, 19), (180, 28)):
        tiles = alike.scaled(replace(TILES, shrink=sizes), layer, 132, Gpu(count, 227 << 10))
        assert tiles == replace(TILES, shrink=replace(sizes, split_k=expected))


def test_a_table_of_another_device_is_not_this_devices_file(write, tmp_path, monkeypatch, engine):
    write(_table(backend=engine, device="NVIDIA A100"), f"{engine}-nvidia-a100.json")
    monkeypatch.setenv("LORA_BACKENDS_TILES", str(tmp_path))
    assert ENGINES[engine]("cpu").tile_source.files == ()


def test_a_folder_that_is_none_is_an_error(tmp_path, monkeypatch, engine):
    monkeypatch.setenv("LORA_BACKENDS_TILES", str(tmp_path / "none"))
    with pytest.raises(InvalidInputError, match="LORA_BACKENDS_TILES does not name a folder"):
        ENGINES[engine]("cpu")


def _edited(edit):
    value = json.loads(table_text(_table()))
    edit(value)
    return json.dumps(value)


def _set(*path_and_value):
    *path, last, value = path_and_value

    def edit(table):
        for key in path:
            table = table[key]
        table[last] = value

    return edit


BROKEN = {
    "not JSON": ("{", "Expecting property name"),
    "a list": ("[]", "the table is not an object"),
    "no schema": (_edited(lambda t: t.pop("schema")), "its schema is None"),
    "newer schema": (_edited(_set("schema", 4)), "its schema is 4, this version reads 3"),
    "twins": ('{"schema": 1, "schema": 1}', "an object repeats a key"),
    "deep": ("[" * 100_000, "recursion"),
    "missing": (_edited(lambda t: t["entries"][0].pop("tiles")), r"entries\[0\] lacks tiles"),
    "unknown": (_edited(_set("entries", 0, "speed", 3)), "unknown keys: speed"),
    "text": (_edited(_set("entries", 0, "num_tokens", "64")), "num_tokens is not a whole"),
    "bool": (_edited(_set("entries", 0, "num_tokens", True)), "num_tokens is not a whole"),
    "fraction": (_edited(_set("entries", 0, "tile_tokens", 16.0)), "tile_tokens is not a whole"),
    "nan": (_edited(_set("entries", 0, "tuned_us", float("nan"))), "NaN is not a number"),
    "no time": (_edited(_set("entries", 0, "tuned_us", 0)), "microseconds are numbers above 0"),
    "too long": (_edited(_set("entries", 0, "tuned_us", 10**400)), "too large"),
    "no layer": (_edited(_set("entries", 0, "layer", "max_rank", 0)), "is not a layer"),
    "float64": (_edited(_set("entries", 0, "layer", "item_bytes", 8)), "is not a layer"),
    "active": (_edited(_set("entries", 0, "active_slots", 65)), "active_slots <= num_tokens"),
    "tile": (_edited(_set("batches", 0, "tile_tokens", 24)), "allowed: 16, 32, 64"),
    "twice": (_edited(lambda t: t["entries"].append(t["entries"][0])), "repeats an earlier one"),
    "backend": (_edited(_set("backend", "csgmv")), "of backend 'csgmv', not of 'triton'"),
    "device": (_edited(_set("device", "NVIDIA A100")), "measured on 'NVIDIA A100'"),
    "no count": (_edited(_set("multiprocessors", 0)), "its multiprocessors are 0"),
    "count": (_edited(_set("multiprocessors", 114)), "114 multiprocessors.*132., which is not al"),
    "capability": (_edited(_set("capability", "8.0")), "capability 8.0"),
}


@pytest.mark.parametrize("text, told", BROKEN.values(), ids=BROKEN)
def test_a_table_that_is_wrong_is_refused_with_its_name(write, text, told):
    path = write(text)
    with pytest.raises(InvalidInputError, match=told) as caught:
        ENGINES["triton"]("cpu", tiles=path)
    assert str(path) in str(caught.value) and "to do:" in str(caught.value)


def test_a_table_of_the_other_engine_is_refused(write, engine):
    other = next(name for name in ENGINES if name != engine)
    with pytest.raises(InvalidInputError, match=f"of backend '{other}', not of '{engine}'"):
        ENGINES[engine]("cpu", tiles=write(_table(backend=other)))


def test_a_broken_table_of_this_device_is_an_error_in_auto(write, tmp_path, monkeypatch, engine):
    write("{", f"{engine}-cpu.json")
    monkeypatch.setenv("LORA_BACKENDS_TILES", str(tmp_path))
    with pytest.raises(InvalidInputError, match=f"{engine}-cpu.json"):
        ENGINES[engine]("cpu")


ILLEGAL = {
    "block_n": {"shrink": {"block_n": 48}},
    "narrow block_k": {"shrink": {"block_k": 16}},  # less than 16 for each of two warps
    "warps": {"shrink": {"num_warps": 1}},
    "no part": {"shrink": {"split_k": 0}},
    "stages": {"shrink": {"num_stages": 0}},
    "fewer stages than none": {"expand": {"num_stages": -1}},
    "negative groups": {"shrink": {"warps_k": -1}},
    "shared memory": {"shrink": {"block_k": 1024, "block_n": 256}},
    "block_c": {"expand": {"block_c": 8}},
    "block_r": {"expand": {"block_r": 32}},  # wider than the padded rank of 16
    "chunks": {"expand": {"chunks": 3}},
}


@pytest.mark.parametrize("change", ILLEGAL.values(), ids=ILLEGAL)
def test_sizes_that_kernels_cannot_take_are_refused(write, change):
    (half, sizes), *_ = change.items()
    tiles = replace(TILES, **{half: replace(getattr(TILES, half), **sizes)})
    with pytest.raises(InvalidInputError, match=r"entries\[0\].tiles cannot be run"):
        _source(write(_table(_entry(64, 8, tiles))))


def test_sizes_that_the_gpu_has_no_room_for_are_refused(write, monkeypatch):
    small = Gpu(132, 16 * 1024)
    monkeypatch.setattr("lora_backends.sgmv.tiles.table.gpu_of", lambda device: small)
    with pytest.raises(InvalidInputError, match="30720 bytes of shared memory; the GPU has 16384"):
        _source(write(_table()))


def test_chunks_with_a_narrow_block_of_ranks_are_refused(write):
    """The kernel would skip columns."""
    layer = replace(LAYER, max_rank=64)
    tiles = replace(TILES, expand=ExpandTiles(64, 32, 2))
    with pytest.raises(InvalidInputError, match="chunks is above 1"):
        _source(write(_table(_entry(64, 8, tiles, layer))))


@pytest.mark.parametrize("tiles", [None, 3, True])
def test_tiles_of_another_kind_are_refused(tiles, engine):
    with pytest.raises(InvalidInputError, match="allowed: 'auto', 'rules', 'tune:60s'"):
        ENGINES[engine]("cpu", tiles=tiles)


def test_a_file_that_is_not_there_is_named(tmp_path, engine):
    with pytest.raises(InvalidInputError, match=r"none.json cannot be used: cannot read"):
        ENGINES[engine]("cpu", tiles=tmp_path / "none.json")
    with pytest.raises(InvalidInputError, match="cannot read"):
        ENGINES[engine]("cpu", tiles=tmp_path)


def test_a_batch_invariant_backend_refuses_a_table_by_name(write, engine):
    with pytest.raises(InvalidInputError, match="reads no table of tiles"):
        path = write(_table(backend=engine))
        ENGINES[engine]("cpu", tiles=path, batch_invariant=True)


def test_a_lookup_that_was_made_before_searches_no_table(write, monkeypatch):
    searches, nearest = [], source.nearest
    monkeypatch.setattr(source, "nearest", lambda *a: searches.append(a) or nearest(*a))
    chosen = _source(write(_table()))
    for _ in range(3):
        assert _tiles(chosen, 64, 8) == TILES and chosen.tile_tokens(64, 8) == 32
    assert len(searches) == 2


def test_the_rules_can_be_run():
    for tokens, active, *sizes in [
        (1, 1, 1, 8, 77, 1001, 4),
        (64, 8, 3, 16, 4096, 6144, 2),
        (2048, 8, 2, 130, 4096, 28672, 2),
    ]:
        layer = LayerShape(*sizes)
        batch = BatchShape(tokens, active, rules.tile_tokens(tokens, active))
        assert tile_faults(rules.choose_tiles(batch, layer), batch.tile_tokens, layer) == []


def test_a_table_that_is_no_regular_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "table.json")
    with pytest.raises(InvalidInputError, match="FIFO"):
        source.tile_source("triton", "lora_backends.triton", CPU, tmp_path / "table.json")


def test_a_path_of_an_unknown_user_is_refused(monkeypatch):
    with pytest.raises(InvalidInputError, match="nosuchuser"):
        source.tile_source("triton", "lora_backends.triton", CPU, "~nosuchuser/table.json")
    monkeypatch.setenv("LORA_BACKENDS_TILES", "~nosuchuser/tiles")
    with pytest.raises(InvalidInputError, match="nosuchuser"):
        source.tile_source("triton", "lora_backends.triton", CPU, "auto")
