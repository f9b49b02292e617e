"""What is timed: presets, config.json, mixes of adapters, bytes and operations."""

import json

import pytest
import torch

from lora_backends.bench import Cell, cells, preset, projections_from, read_config
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.model_shapes import PRESETS
from lora_backends.operations import DENSE, Input


def test_llama3_8b_has_the_shapes_of_its_layers():
    assert preset("llama3-8b") == (
        {
            "qkv": (4096, (4096, 1024, 1024)),
            "o": (4096, (4096,)),
            "gate_up": (4096, (14336, 14336)),
            "down": (14336, (4096,)),
            "embedding": (128256, (4096,)),
        },
        [],
    )


def test_heads_may_be_wider_than_the_hidden_size_tells():
    projections, _ = preset("qwen3-30b-a3b")
    assert projections == {
        "qkv": (2048, (4096, 512, 512)),
        "o": (4096, (2048,)),
        "embedding": (151936, (2048,)),
    }


def test_experts_are_left_out_with_a_note():
    _, notes = preset("qwen3-30b-a3b")
    assert notes == ["128 experts are left out: only attention projections are timed"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_gives_at_most_44_cells_on_each_device(name):
    for device in cells.COMPOSITIONS:
        found = cells.make_cells(preset(name)[0], device)
        assert 0 < len(found) <= 44 and len(set(found)) == len(found)


def test_without_its_own_key_heads_a_model_has_as_many_as_heads():
    keys = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    assert projections_from(keys, "here")[0]["qkv"] == (64, (64, 64, 64))


def write(folder, content):
    file = folder / "config.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_the_text_part_of_a_model_that_sees_is_read(tmp_path):
    text = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    projections, _ = read_config(write(tmp_path, {"text_config": text, "hidden_size": 7}))
    assert projections["down"] == (96, (64,))


@pytest.mark.parametrize(
    ("content", "error", "told"),
    [
        ("{", InvalidInputError, "not valid JSON"),
        ([], InvalidInputError, "holds no JSON object"),
        ({"n_embd": 8}, InvalidInputError, "lacks hidden_size, num_attention_heads, intermediate"),
        (
            {"hidden_size": 8, "num_attention_heads": 2},
            InvalidInputError,
            "lacks intermediate_size",
        ),
        (
            {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": [4, 4]},
            InvalidInputError,
            "intermediate_size in",
        ),
        ({"hidden_size": 8, "kv_lora_rank": 4}, UnsupportedInputError, "latent attention"),
    ],
)
def test_a_config_that_does_not_tell_the_widths_is_refused(tmp_path, content, error, told):
    with pytest.raises(error, match=told):
        read_config(write(tmp_path, content))


def test_a_missing_config_is_named(tmp_path):
    with pytest.raises(InvalidInputError, match="nowhere.json"):
        read_config(tmp_path / "nowhere.json")


def test_unknown_names_are_refused_with_a_guess():
    with pytest.raises(InvalidInputError, match="did you mean 'llama3-8b'"):
        preset("llama3-8bb")
    with pytest.raises(InvalidInputError, match="did you mean 'skewed'"):
        cell(mix="skew")
    with pytest.raises(InvalidInputError, match="sizes from 1 to"):
        cell(tokens=0)


def cell(**changes):
    given = {"tokens": 12, "adapters": 4, "rank": 2, "mix": "uniform"} | changes
    return Cell("qkv", 8, (6, 3), **given)


def test_mixes_deal_tokens_as_they_say():
    assert cell(mix="identical").token_slots == [0] * 12
    assert cell(mix="distinct").token_slots == list(range(12))
    assert cell(mix="uniform").token_slots == [0, 1, 2, 3] * 3


def test_a_skewed_mix_is_grouped_and_falls_off_as_zipf():
    skewed = cell(mix="skewed", tokens=20_000, adapters=3)
    counts = torch.bincount(torch.tensor(skewed.token_slots)).double()
    expected = torch.tensor([1, 2, 3]).double() ** -1.5
    assert torch.allclose(counts / counts.sum(), expected / expected.sum(), atol=0.02)
    assert (
        skewed.token_slots
        == sorted(skewed.token_slots)
        == cell(mix="skewed", tokens=20_000, adapters=3).token_slots
    )


def test_adapters_without_a_token_are_not_active():
    few = cell(tokens=2, adapters=5)
    assert few.active_adapters == 2 and few.num_slots == 8
    assert cell(tokens=20, adapters=20).num_slots == 20


def test_bytes_and_operations_are_those_of_the_formula():
    one = cell()
    adapter = 2 * (2 * 2 * 8 + 2 * 9)  # 2 bytes; A: slices x rank x in, B: rank x out
    rows = 2 * 12 * (8 + 9 + 9)
    assert one.bytes_moved(2) == 4 * adapter + rows
    assert one.flop == 2 * 12 * (2 * 2 * 8 + 2 * 9)


def test_bytes_and_operations_of_a_part_are_its_own():
    part = {name: cell(operation=name) for name in ("run_lora_a", "run_lora_b", "run_embedding")}
    h = 4 * 2 * 12 * 2  # 4 bytes; slices x tokens x rank
    a, b = 2 * 4 * 2 * 2 * 8, 2 * 4 * 2 * 9  # 2 bytes, 4 adapters; slices x rank x in, rank x out
    x, y = 2 * 12 * 8, 2 * 2 * 12 * 9  # y is read and written
    assert part["run_lora_a"].bytes_moved(2) == a + x + h
    assert part["run_lora_b"].bytes_moved(2) == h + b + y
    ids, columns = 8 * 12, 2 * 2 * 12 * 2  # a column of A per token and slice
    assert part["run_embedding"].bytes_moved(2) == ids + columns + b + y
    assert [one.launches for one in part.values()] == [1, 1, 2] and cell().launches == 2
    assert part["run_lora_a"].flop + part["run_lora_b"].flop == cell().flop
    assert part["run_embedding"].flop == part["run_lora_b"].flop


@pytest.mark.parametrize("operation", DENSE.values(), ids=lambda operation: operation.name)
def test_every_operation_has_cells_of_the_layers_it_takes(operation):
    found = cells.make_cells(preset("llama3-8b")[0], "cpu", [4], operations=[operation.name])
    names = [one.projection for one in found]
    if operation.input is Input.TOKEN_IDS:
        assert names == ["embedding"]
    else:
        by_slices = {None: ["qkv", "o", "gate_up", "down"], 2: ["gate_up"], 3: ["qkv"]}
        assert names == by_slices[operation.num_slices]
    assert {one.operation for one in found} == {operation.name}


def test_an_operation_for_another_number_of_slices_is_refused():
    with pytest.raises(InvalidInputError, match="run_qkv does not run a layer of 2 slices"):
        cell(operation="run_qkv")


def test_a_model_without_a_vocabulary_has_no_embedding():
    keys = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    with pytest.raises(InvalidInputError, match="run_embedding takes none of the layers"):
        cells.make_cells(projections_from(keys, "here")[0], "cpu", operations=["run_embedding"])


def test_sizes_given_by_hand_are_combined_and_none_is_timed_twice():
    layer = {"layer": (8, (4,))}
    found = cells.make_cells(layer, "cpu", [1, 16], [2, 4], [8], ["uniform", "identical"])
    assert len(found) == 6  # identical has one adapter, whatever is given
    assert {(c.tokens, c.adapters, c.mix) for c in found} == {
        (1, 2, "uniform"), (1, 4, "uniform"), (1, 1, "identical"),
        (16, 2, "uniform"), (16, 4, "uniform"), (16, 1, "identical"),
    }  # fmt: skip


def test_layers_hold_what_is_rotated_but_are_not_too_many():
    one = cell()  # 8 slots of 100 bytes
    assert cells.num_layers(one, 2, 8_000, 32) == 10
    assert cells.num_layers(one, 2, 1, 32) == 4
    assert cells.num_layers(one, 2, 1e9, 32) == 32
