"""Tables of tile sizes: what is taken from them, and what is refused and how."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from lora_backends.gpu import choice, tables
from lora_backends.gpu.tables import BatchTiles, Entry, LayerShape, TileTable, table_text
from lora_backends.gpu.tiles import ExpandTiles, ShrinkTiles, TileConfig

from lora_backends.errors import InvalidInputError
from lora_backends.triton import TritonBackend
from lora_backends.triton import tuning as config

CPU = torch.device("cpu")
LAYER = LayerShape(3, 16, 4096, 6144, 2)
TILES = TileConfig(ShrinkTiles(32, 64, 5, 2, 8, 5), ExpandTiles(32, 16, 8, 2))
OTHER = TileConfig(ShrinkTiles(16, 32, 7), ExpandTiles(64, 16))


def _entry(tokens, active, tiles=TILES, layer=LAYER, tile=16):
    return Entry(layer, tokens, active, tile, tiles, 5.0, 6.5)


PLANS = (BatchTiles(64, 8, 32),)


def _table(*entries, batches=PLANS, **changes):
    table = TileTable(
        schema=tables.SCHEMA,
        backend="triton",
        device="cpu",
        capability="none",
        versions={"torch": "2", "triton": "3"},
        date="2026-11-21",
        batches=tuple(batches),
        entries=entries or (_entry(64, 8), _entry(256, 8, OTHER)),
    )
    return replace(table, **changes)


@pytest.fixture
def write(tmp_path):
    def write(table, name="table.json"):
        path = tmp_path / name
        path.write_text(table if isinstance(table, str) else table_text(table))
        return path

    return write


def _choice(path, **options):
    return choice.tile_choice(config, "triton", CPU, path, **options)


def _tiles(chosen, tokens, active, tile=16, layer=LAYER):
    return chosen.choose_tiles(tokens, active, tile, *asdict(layer).values())


def _rules(tokens, active, tile=16, layer=LAYER):
    return config.choose_tiles(tokens, active, tile, *asdict(layer).values())


def test_a_table_is_read_as_it_was_written(write):
    table = _table()
    assert tables.read_table(write(table), config, "triton", CPU) == table
    empty = _table(batches=())
    empty = replace(empty, entries=())
    assert tables.read_table(write(empty), config, "triton", CPU) == empty


@pytest.mark.parametrize(
    "tokens, active, expected",
    [(64, 8, TILES), (32, 4, TILES), (100, 9, TILES), (129, 8, OTHER), (512, 16, OTHER)],
)
def test_the_nearest_measured_batch_of_a_layer_is_taken(write, tokens, active, expected):
    assert _tiles(_choice(write(_table())), tokens, active) == expected


@pytest.mark.parametrize("tokens, active", [(64, 64), (31, 8), (2048, 8), (1, 1), (0, 0)])
def test_a_batch_far_from_all_measured_ones_follows_the_rules(write, tokens, active):
    assert _tiles(_choice(write(_table())), tokens, active) == _rules(tokens, active)


def test_another_layer_or_tile_follows_the_rules(write):
    chosen = _choice(write(_table()))
    for field in ("num_slices", "max_rank", "in_features", "out_features"):
        layer = replace(LAYER, **{field: 2 * getattr(LAYER, field)})
        assert _tiles(chosen, 64, 8, layer=layer) == _rules(64, 8, layer=layer)
    assert _tiles(chosen, 64, 8, tile=32) == _rules(64, 8, tile=32)


def test_the_tile_of_a_plan_comes_from_the_table(write):
    chosen = _choice(write(_table()))
    assert chosen.block_tokens(64, 8) == 32 != config.block_tokens(64, 8)
    assert chosen.block_tokens(2048, 8) == config.block_tokens(2048, 8)


def test_the_users_table_goes_before_the_rules(write, tmp_path, monkeypatch):
    write(_table(), "triton-cpu.json")
    monkeypatch.setenv("LORA_BACKENDS_TILES", str(tmp_path))
    backend = TritonBackend("cpu")
    assert backend.tile_choice.sources == (str(tmp_path / "triton-cpu.json"),)
    assert _tiles(backend.tile_choice, 64, 8) == TILES
    assert _tiles(TritonBackend("cpu", tiles="rules").tile_choice, 64, 8) == _rules(64, 8)
    invariant = TritonBackend("cpu", batch_invariant=True)
    assert invariant.tile_choice.sources == ()


def test_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert choice.user_folder() == tmp_path / "lora_backends" / "tiles"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(choice.user_folder()) == "/home/someone/.cache/lora_backends/tiles"


def test_the_users_table_goes_before_the_librarys_own(write, tmp_path, monkeypatch):
    own = write(_table(_entry(64, 8, OTHER), _entry(1, 1, OTHER), batches=()), "own.json")
    users = write(_table(), "users.json")
    monkeypatch.setattr(choice, "_automatic", lambda *_: [users, tmp_path / "none.json", own])
    chosen = _choice("auto")
    assert _tiles(chosen, 64, 8) == TILES and _tiles(chosen, 1, 1) == OTHER


def test_a_table_of_another_device_is_not_this_devices_file(write, tmp_path, monkeypatch):
    write(_table(device="NVIDIA A100"), "triton-nvidia-a100.json")
    monkeypatch.setenv("LORA_BACKENDS_TILES", str(tmp_path))
    assert TritonBackend("cpu").tile_choice.sources == ()


def test_a_folder_that_is_none_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("LORA_BACKENDS_TILES", str(tmp_path / "none"))
    with pytest.raises(InvalidInputError, match="LORA_BACKENDS_TILES names no folder"):
        TritonBackend("cpu")


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
    "newer schema": (_edited(_set("schema", 3)), "its schema is 3, this version reads 2"),
    "twins": ('{"schema": 1, "schema": 1}', "a key stands twice"),
    "deep": ("[" * 100_000, "recursion"),
    "missing": (_edited(lambda t: t["entries"][0].pop("tiles")), r"entries\[0\] lacks tiles"),
    "unknown": (_edited(_set("entries", 0, "speed", 3)), "unknown keys: speed"),
    "text": (_edited(_set("entries", 0, "num_tokens", "64")), "num_tokens is not a whole"),
    "bool": (_edited(_set("entries", 0, "num_tokens", True)), "num_tokens is not a whole"),
    "fraction": (_edited(_set("entries", 0, "tile_tokens", 16.0)), "tile_tokens is not a whole"),
    "nan": (_edited(_set("entries", 0, "tuned_us", float("nan"))), "NaN is no number"),
    "no time": (_edited(_set("entries", 0, "tuned_us", 0)), "microseconds are numbers above 0"),
    "too long": (_edited(_set("entries", 0, "tuned_us", 10**400)), "too large"),
    "no layer": (_edited(_set("entries", 0, "layer", "max_rank", 0)), "is no layer"),
    "float64": (_edited(_set("entries", 0, "layer", "item_bytes", 8)), "is no layer"),
    "active": (_edited(_set("entries", 0, "active_slots", 65)), "active_slots <= num_tokens"),
    "tile": (_edited(_set("batches", 0, "tile_tokens", 24)), "allowed: 16, 32, 64"),
    "twice": (_edited(lambda t: t["entries"].append(t["entries"][0])), "repeats an earlier one"),
    "backend": (_edited(_set("backend", "csgmv")), "of backend 'csgmv', not of 'triton'"),
    "device": (_edited(_set("device", "NVIDIA A100")), "measured on 'NVIDIA A100'"),
    "capability": (_edited(_set("capability", "8.0")), "capability 8.0"),
}


@pytest.mark.parametrize("text, told", BROKEN.values(), ids=BROKEN)
def test_a_table_that_is_wrong_is_refused_with_its_name(write, text, told):
    path = write(text)
    with pytest.raises(InvalidInputError, match=told) as caught:
        TritonBackend("cpu", tiles=path)
    assert str(path) in str(caught.value) and "to do:" in str(caught.value)


def test_a_broken_table_of_this_device_is_an_error_in_auto(write, tmp_path, monkeypatch):
    write("{", "triton-cpu.json")
    monkeypatch.setenv("LORA_BACKENDS_TILES", str(tmp_path))
    with pytest.raises(InvalidInputError, match="triton-cpu.json"):
        TritonBackend("cpu")


ILLEGAL = {
    "block_n": {"shrink": {"block_n": 48}},
    "narrow block_k": {"shrink": {"block_k": 16}},  # less than 16 for each of two warps
    "warps": {"shrink": {"num_warps": 1}},
    "no part": {"shrink": {"split_k": 0}},
    "stages": {"shrink": {"num_stages": 0}},
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
        _choice(write(_table(_entry(64, 8, tiles))))


def test_chunks_with_a_narrow_block_of_ranks_are_refused(write):
    """The kernel would skip columns."""
    layer = replace(LAYER, max_rank=64)
    tiles = replace(TILES, expand=ExpandTiles(64, 32, 2))
    with pytest.raises(InvalidInputError, match="chunks is above 1"):
        _choice(write(_table(_entry(64, 8, tiles, layer))))


@pytest.mark.parametrize("tiles", [None, 3, True])
def test_tiles_of_another_kind_are_refused(tiles):
    with pytest.raises(InvalidInputError, match="allowed: 'auto', 'rules', or the file"):
        TritonBackend("cpu", tiles=tiles)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InvalidInputError, match=r"none.json cannot be used: cannot be read"):
        TritonBackend("cpu", tiles=tmp_path / "none.json")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        TritonBackend("cpu", tiles=tmp_path)


def test_a_batch_invariant_backend_refuses_a_table_by_name(write):
    with pytest.raises(InvalidInputError, match="reads no table of tiles"):
        TritonBackend("cpu", tiles=write(_table()), batch_invariant=True)


def test_a_lookup_that_was_made_before_searches_no_table(write, monkeypatch):
    chosen, searches = _choice(write(_table())), []
    nearest = choice.nearest
    monkeypatch.setattr(choice, "nearest", lambda *a: searches.append(a) or nearest(*a))
    assert [_tiles(chosen, 64, 8) for _ in range(3)] == [TILES] * 3
    assert [chosen.block_tokens(64, 8) for _ in range(3)] == [32] * 3
    assert len(searches) == 2


def test_the_rules_and_every_candidate_can_be_run():
    for tokens, active, *layer in [
        (1, 1, 1, 8, 77, 1001, 4),
        (64, 8, 3, 16, 4096, 6144, 2),
        (2048, 8, 2, 130, 4096, 28672, 2),
    ]:
        tile = config.block_tokens(tokens, active)
        for tiles in (
            config.choose_tiles(tokens, active, tile, *layer),
            *config.candidates(tokens, active, tile, *layer),
        ):
            assert config.tile_faults(tiles, tile, *layer) == []
