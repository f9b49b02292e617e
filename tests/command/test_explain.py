"""What `explain` draws is what a call does."""

import json
import xml.etree.ElementTree as ElementTree
from itertools import product
from pathlib import Path

import pytest
import torch

from lora_backends import InvalidInputError, LoRABatch, LoRAWeights, UnsupportedInputError
from lora_backends import explain as explaining
from lora_backends.explain import Layer, Piece, Share, explain
from lora_backends.explain.job import make_batch, make_layer, ranges
from lora_backends.explain.svg import draw
from lora_backends.operations import DENSE, Input

NAMES = ["csgmv", "numba_cpu", "torch_ref", "triton"]
BATCHES = [
    LoRABatch([2, -1, 0, 2, 2], 3),
    LoRABatch([-1] * 4, 3),
    LoRABatch([], 3),
    LoRABatch([1] * 2100, 3),
    LoRABatch([t % 4 - 1 for t in range(300)], 3),
]
LAYERS = [
    Layer(77, (40, 1, 300), ((3, 0, 8), (20, 20, 20), (0, 0, 0)), 20),
    Layer(4096, (4096,), ((16,), (8,), (64,)), 64),
    Layer(512, (1024, 256), ((130, 1),) * 3, 130, 4),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: f"{batch.num_tokens} tokens")
def test_every_token_with_an_adapter_is_in_one_piece_of_its_slot(name, batch):
    slots = batch.token_slots.tolist()
    found = explain(name, batch, LAYERS[0])
    assert sorted(found.order) == [t for t, slot in enumerate(slots) if slot >= 0]
    assert [t for piece in found.pieces for t in piece.tokens] == list(found.order)
    assert all(slots[t] == piece.slot for piece in found.pieces for t in piece.tokens)
    assert all(1 <= len(piece.tokens) <= piece.places for piece in found.pieces)


@pytest.mark.parametrize("name", NAMES)
def test_products_that_count_are_those_of_the_formula(name):
    for batch, layer in product(BATCHES, LAYERS):
        ranks = [layer.ranks[slot] for slot in batch.token_slots.tolist() if slot >= 0]
        shrink = sum(sum(row) * layer.in_features for row in ranks)
        expand = sum(r * o for row in ranks for r, o in zip(row, layer.output_slices, strict=True))
        first, second = explain(name, batch, layer).launches
        assert (first.products.used, second.products.used) == (shrink, expand)
        for launch in (first, second):
            for share in (launch.rows, launch.columns, launch.ranks, launch.products):
                assert 0 <= share.used <= share.computed
            assert 0 <= launch.idle <= launch.programs


@pytest.mark.parametrize("name", ["triton", "csgmv"])
def test_programs_are_those_that_a_call_launches(name, monkeypatch):
    """The launches are recorded, not run, without those that only compile for a later capture."""
    from lora_backends.selection.registry import backend_class
    from lora_backends.sgmv import engine
    from lora_backends.sgmv.launching.kernel import SpecializedKernel

    grids = []

    def record(kernel, rows, _):
        grids.append(kernel._programs * rows)

    monkeypatch.setattr(engine, "EMPTY_ROW", 0)
    monkeypatch.setattr(engine.SgmvBackend, "_cache", lambda *_: None)
    monkeypatch.setattr(SpecializedKernel, "launch", record)
    backend = backend_class(name)("cpu")
    for batch, layer in product(BATCHES, LAYERS):
        dtype = torch.float32 if layer.item_bytes == 4 else torch.bfloat16
        slices, rank = len(layer.output_slices), layer.max_rank
        weights = LoRAWeights(
            lora_a=torch.zeros(3, slices, rank, layer.in_features, dtype=dtype),
            lora_b=torch.zeros(3, sum(layer.output_slices), rank, dtype=dtype),
            ranks=torch.tensor(layer.ranks, dtype=torch.int32),
            scalings=torch.ones(3, slices),
            output_slices=layer.output_slices,
        )
        grids.clear()
        x = torch.zeros(batch.num_tokens, layer.in_features, dtype=dtype)
        backend.run_linear(x, weights, backend.prepare_batch(batch))
        found = explain(name, batch, layer)
        assert (grids or [0, 0]) == [launch.programs for launch in found.launches]


@pytest.mark.parametrize("operation", DENSE.values(), ids=lambda operation: operation.name)
@pytest.mark.parametrize("name", NAMES)
def test_an_operation_has_the_launches_of_its_products(name, operation):
    slices = operation.num_slices or 2
    layer = Layer(64, (32,) * slices, ((4,) * slices,) * 3, 4)
    whole = {launch.name: launch for launch in explain(name, BATCHES[0], layer).launches}
    found = explain(name, BATCHES[0], layer, operation.name)
    products = [operation.input is Input.ROWS, operation.result == "y"]
    expected = [half for half, has in zip(("shrink", "expand"), products, strict=True) if has]
    assert found.operation == operation.name
    assert found.launches == tuple(whole[half] for half in expected)


def test_an_operation_that_does_not_take_the_layer_is_refused():
    layer = Layer(64, (32, 32), ((4, 4),) * 3, 4)
    with pytest.raises(InvalidInputError, match="run_qkv does not run a layer of 2 slices"):
        explain("triton", BATCHES[0], layer, "run_qkv")
    with pytest.raises(InvalidInputError, match="did you mean 'run_qkv'"):
        explain("triton", BATCHES[0], layer, "run_qk")


def test_padded_ranks_and_empty_places_are_counted():
    layer = Layer(4096, (4096,), ((8,),), 16)
    shrink, expand = explain("triton", LoRABatch([0, 0, 0, 0], 1), layer).launches
    assert shrink.ranks.wasted == expand.ranks.wasted == 0.5
    assert shrink.rows.wasted == 0.75 and shrink.columns.wasted == 0
    assert shrink.products.wasted == 1 - 0.5 * 0.25


@pytest.mark.parametrize("max_rank, lanes", [(64, 64), (16, 16), (8, 8), (5, 8)])
def test_kernels_without_a_matrix_product_compute_no_empty_places(max_rank, lanes):
    from lora_backends.sgmv.explain import Cut, explanation
    from lora_backends.sgmv.tiles.sizes import ExpandTiles, ShrinkTiles, TileConfig
    from lora_backends.sgmv.tiles.source import fixed_source

    batch, rank = LoRABatch([0, 0, 0], 1), min(8, max_rank)
    layer = Layer(512, (256,), ((rank,),), max_rank)
    tiles = TileConfig(ShrinkTiles(16, 256, 2, warps_k=0), ExpandTiles(64, 16, num_stages=0))
    cut = Cut("tile", (Piece(0, (0, 1, 2), 16),), 16, 1)
    found = explanation("triton", batch, layer, cut, fixed_source(16, tiles), "", "")
    shrink, expand = found.launches
    assert shrink.rows.wasted == expand.rows.wasted == 0
    assert expand.ranks == Share(4 * rank, 4 * lanes)
    assert found.facts[1].count("token by token") == 2


@pytest.mark.parametrize("name", ["triton", "csgmv"])
def test_a_low_rank_occupies_16_lanes_in_a_stack_of_any_width(name):
    batch = LoRABatch([0], 1)
    for width in (64, 256):
        expand = explain(name, batch, Layer(512, (256,), ((8,),), width)).launches[1]
        assert expand.ranks.computed == 16 * (expand.programs - expand.idle)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: f"{batch.num_tokens} tokens")
def test_a_drawing_is_valid_svg(name, batch):
    root = ElementTree.fromstring(draw(explain(name, batch, LAYERS[0])))
    width, height = float(root.get("width")), float(root.get("height"))
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        right = float(box.get("x", 0)) + float(box.get("width"))
        assert right <= width and float(box.get("y", 0)) + float(box.get("height")) <= height


def test_explaining_needs_no_benchmarks():
    files = list(Path(explaining.__file__).parent.glob("*.py"))
    assert files and not [file for file in files if "lora_backends.bench" in file.read_text()]


def test_ranges():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2 5 7-8" and ranges([]) == ""
    assert ranges(range(0, 10, 2), 2) == "0 2 ..."


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("b.json", json.dumps({"slots": [2, -1, 0, 2, 2], "num_slots": 3, "ranks": [4, 8, 16]})),
        ("b.toml", "sequences = [[2, 1], [-1, 1], [0, 1], [2, 2]]\nranks = [4, 8, 16]\n"),
    ],
)
def test_a_batch_in_a_file(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    batch, ranks = make_batch(None, None, None, tmp_path / name)
    assert batch.token_slots.tolist() == [2, -1, 0, 2, 2] and batch.num_slots == 3
    assert make_layer(3, ranks=ranks).ranks[1] == (8, 8, 8)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((None, None, None, None), "which batch"),
        (("0", "0:1", None, None), "which batch"),
        (("0,x", None, None, None), "allowed: e.g. 2,-1,0"),
        (("0,-2", None, None, None), "names a slot that does not exist"),
        (("5", None, 3, None), "names a slot that does not exist"),
        (("0", None, 0, None), "num_slots is not a number of slots"),
        ((None, "0-5", None, None), "allowed: SLOT:LENGTH"),
        ((None, "0:-5", None, None), "negative length"),
    ],
)
def test_a_batch_that_is_none_is_refused(given, told):
    with pytest.raises(InvalidInputError, match=told):
        make_batch(*given)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("b.json", "{", "is not valid JSON"),
        ("b.toml", "slots = ", "is not valid TOML"),
        ("b.json", "[]", "holds no batch"),
        ("b.json", "{}", "holds no batch"),
        ("b.json", '{"slots": [0], "slot": 3}', "holds no batch"),
        ("b.json", '{"slots": "0"}', "token_slots"),
        ("b.json", '{"sequences": [[0]]}', "sequences are no list"),
        ("none.txt", None, "cannot read"),
    ],
)
def test_a_file_that_holds_no_batch_is_refused(tmp_path, name, text, told):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInputError, match=told):
        make_batch(None, None, None, tmp_path / name)


@pytest.mark.parametrize(
    ("slots", "sequences", "num_slots", "told"),
    [
        (None, "999999999:1", None, "given: 1000000000 slots\n  allowed: at most 1024"),
        (None, "0:999999999", None, "given: 999999999 tokens\n  allowed: at most 65536"),
        (None, "0:60000,1:60000", None, "given: 120000 tokens"),
        (None, "0:5", 10**9, "given: 1000000000 slots"),
        ("0,999999999", None, None, "given: 1000000000 slots"),
        (None, f"0:{'9' * 4000}", None, "999... tokens"),
        (None, f"0:{'9' * 5000}", None, "allowed: SLOT:LENGTH"),
    ],
    ids=["slot", "length", "lengths", "slots", "token", "4000 digits", "5000 digits"],
)
def test_a_batch_that_is_too_large_to_be_drawn_is_refused_at_once(
    slots, sequences, num_slots, told
):
    with pytest.raises(InvalidInputError) as raised:
        make_batch(slots, sequences, num_slots, None)
    assert told in str(raised.value) and len(str(raised.value)) < 500


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"preset_name": "llama9"}, "no preset"),
        ({"projection": "qvk"}, "did you mean 'qkv'"),
        ({"in_features": 3}, "go together"),
        ({"in_features": 3, "output_slices": "0"}, "not a layer"),
        ({"ranks": "1,2"}, "one for each of 3 slots"),
        ({"ranks": [1.5]}, "ranks do not fit the batch"),
        ({"ranks": [[1, 2]]}, "ranks do not fit the layer"),
        ({"ranks": "64", "max_rank": 16}, "0 to 16"),
        ({"ranks": "-1"}, "ranks do not fit"),
        ({"dtype": "int8"}, "allowed: float16"),
        ({"max_rank": 10**6}, "given: 1000000 rank\n  allowed: at most 2048"),
        ({"in_features": 10**9, "output_slices": "1"}, "given: 1000000000 width"),
        ({"in_features": 1, "output_slices": "1,1000000000"}, "given: 1000000000 width"),
        ({"in_features": 1, "output_slices": ",".join(["1"] * 9999)}, "given: 9999 slices"),
    ],
)
def test_a_layer_that_is_none_is_refused(given, told):
    with pytest.raises(InvalidInputError, match=told):
        make_layer(3, **given)


def test_an_engine_that_does_not_offer_it_is_named(monkeypatch):
    from lora_backends import explain as module

    real = module._explainer
    monkeypatch.setattr(module, "_explainer", lambda n: None if n == "csgmv" else real(n))
    with pytest.raises(UnsupportedInputError, match="allowed: numba_cpu, torch_ref, triton"):
        explain("csgmv", BATCHES[0], LAYERS[0])
    with pytest.raises(InvalidInputError, match="did you mean 'triton'"):
        explain("tritn", BATCHES[0], LAYERS[0])
    with pytest.raises(InvalidInputError, match="num_slots=4"):
        explain("triton", LoRABatch([0], 4), LAYERS[0])
