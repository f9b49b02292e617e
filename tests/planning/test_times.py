"""Planned step times are close to measured ones of whole models."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lora_backends import InvalidInputError
from lora_backends.planning.cards import Measured, card_of, find_card, read_card, table_of
from lora_backends.planning.shapes import LayerGroup, ModelShapes

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
WITHIN = 0.15  # of the measured step
LLAMA_8B, SMOLLM2 = (4096, 14336, 1024), (576, 1536, 192)


def rows_of(name):
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def llama(sizes, layers, rank, dtype="bfloat16"):
    hidden, inner, kv = sizes
    shapes = [(hidden, (hidden, kv, kv)), (hidden, (hidden,))]
    shapes += [(hidden, (inner, inner)), (inner, (hidden,))]
    parts = tuple(LayerGroup(width, slices, layers) for width, slices in shapes)
    return ModelShapes("", 0, 0, 0.0, 0, 0, 0, parts, rank, rank, dtype, dtype)


def cells():
    """Yield measured steps: name, model, card, tokens, adapters, base ms, ms with LoRA, eager."""
    h200, cpu = find_card("h200"), read_card(RESULTS / "bench_smollm2_cpu.json", 2**34)
    base = {}
    for row in rows_of("h200_whole_model"):
        key = (row["rows"], row["rank"], row["adapters"], row["mode"])
        if row["contender"] == "base":
            base[key] = row["ms"]
        elif row["contender"] == "ours" and row["tokens"] == 1:
            model, eager = llama(LLAMA_8B, 16, row["rank"]), row["mode"] == "eager"
            yield f"whole model {key}", model, h200, key[0], key[2], base[key], row["ms"], eager
    for row in rows_of("vllm_step_gpu"):
        if row["step"] == "prefill":
            continue
        key = (row["rows"], row["adapters"])
        if row["contender"] == "off":
            base[key] = row["ms"]
        elif row["contender"] == "triton":
            model = llama(LLAMA_8B, 32, row["rank"])
            yield f"vLLM {key}", model, h200, *key, base[key], row["ms"], False
    steps = {row["contender"]: row["ms"] for row in rows_of("decode_smollm2_cpu")}
    model = llama(SMOLLM2, 30, 8, "float32")
    yield "SmolLM2 on a CPU", model, cpu, 32, 8, steps["base"], steps["numba_cpu"], False


@pytest.mark.parametrize("cell", list(cells()), ids=lambda cell: cell[0])
def test_a_step_takes_the_measured_time(cell):
    _, model, card, tokens, adapters, base, measured, eager = cell
    planned = base + 1e3 * card.lora_s(model, tokens, adapters, eager)
    assert abs(planned - measured) <= WITHIN * measured
    assert planned > base


def test_the_table_of_cards_is_what_the_results_say():
    result = json.loads((RESULTS / "h200_triton.json").read_text())
    card = find_card("NVIDIA H200")
    again = card_of(result, card.memory_bytes, card.source)
    assert json.loads(table_of([card])) == json.loads(table_of([again]))
    assert len(card.cells) == len(result["rows"])


def test_more_work_never_takes_less_time():
    card, model = find_card("h200"), llama(LLAMA_8B, 1, 16)
    assert card.lora_s(model, 0, 0) == 0.0
    small, wide, many = (card.lora_s(model, *s) for s in ((1, 1), (64, 1), (64, 64)))
    assert 0 < small < many and small < wide < many
    assert card.lora_s(model, 64, 8, eager=True) == pytest.approx(
        card.lora_s(model, 64, 8) + 4 * card.host_s
    )


def test_eight_bits_shrink_the_matrices_and_not_the_activations():
    card, layer = find_card("h200"), LayerGroup(4096, (4096,), 1)
    wide, narrow = (card.linear_s(layer, 64, 8, 16, 2, eight_bit) for eight_bit in (False, True))
    like = (4096, 4096, 1, 64, 8, 16, 1.0)
    efficiency = min(card.cells, key=Measured(*like).distance).efficiency
    saved = 8 * 16 * 2 * 4096 - 4 * 8 * (16 + 4096)  # bytes of A and B, less their scales
    assert wide - narrow == pytest.approx(saved / card.copy_bytes_per_s / efficiency)
    eight = replace(llama(LLAMA_8B, 1, 16), adapter_dtype="int8")
    assert card.lora_s(eight, 64, 8) > 0.5 * card.lora_s(llama(LLAMA_8B, 1, 16), 64, 8)


def test_cards_that_are_refused(tmp_path):
    with pytest.raises(InvalidInputError, match=r"h201.*did you mean|NVIDIA H200"):
        find_card("h201")
    file = tmp_path / "bench.json"
    result = json.loads((RESULTS / "bench_smollm2_cpu.json").read_text())
    file.write_text(json.dumps({**result, "rows": []}))
    with pytest.raises(InvalidInputError, match="no time of run_linear"):
        read_card(file, 2**34)
