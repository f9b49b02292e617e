"""Generation: greedy, sampling, beams, padding and cache, against rows run alone and PEFT."""

import warnings

import peft
import pytest
import torch
from transformers import GenerationConfig

from lora_backends import InvalidInputError, UnsupportedInputError
from lora_backends.hf import MultiLoRAModel

ROWS = ["first", None, "second"]
EVERYWHERE = {
    "llama": {"r": 4, "target_modules": "all-linear"},
    "gpt2": {"r": 4, "target_modules": ["c_attn", "c_proj", "wte"], "fan_in_fan_out": True},
}


@pytest.fixture(params=["llama", "gpt2"])
def job(request, make_base, save_adapter):
    """Return a model with two adapters, prompts of unequal length, and PEFT on each adapter."""
    name, config = request.param, EVERYWHERE[request.param]
    folders = {
        "first": save_adapter(name, name="first", std=0.3, seed=1, **config),
        "second": save_adapter(name, name="second", std=0.3, seed=2, **config),
    }
    model = MultiLoRAModel(make_base(name), "torch_ref", max_adapters=2, max_rank=4)
    for adapter, folder in folders.items():
        model.load_adapter(adapter, folder)

    def in_peft(adapter):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            base = make_base(name)
            if adapter is None:
                return base
            return peft.PeftModel.from_pretrained(base, folders[adapter]).eval()

    ids = torch.randint(1, 40, (3, 6), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :3] = mask[2, :1] = 0
    settings = {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None}
    return model, in_peft, {"input_ids": ids, "attention_mask": mask, **settings}


@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_tokens_are_pefts(job, use_cache):
    model, in_peft, inputs = job
    inputs |= {"use_cache": use_cache, "do_sample": False}
    tokens = model.generate(adapters=ROWS, **inputs)
    for row, adapter in enumerate(ROWS):
        assert torch.equal(tokens[row], in_peft(adapter).generate(**inputs)[row])
    assert len({tuple(row[6:].tolist()) for row in tokens}) == 3


def test_beams_keep_the_adapter_of_their_row(job):
    model, in_peft, inputs = job
    inputs |= {"num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    tokens = model.generate(adapters=ROWS, **inputs)
    assert tokens.shape[0] == 6
    for row, adapter in enumerate(ROWS):
        expected = in_peft(adapter).generate(**inputs)[2 * row : 2 * row + 2]
        assert torch.equal(tokens[2 * row : 2 * row + 2], expected)


def test_an_embedding_takes_a_column_of_token_ids(make_base, save_adapter):
    """Guidance passes the last column of all ids, which is not contiguous."""
    folder = save_adapter(r=4, target_modules=["embed_tokens", "q_proj"], std=0.3)
    model = MultiLoRAModel(make_base("llama"), "torch_ref", max_adapters=1, max_rank=4)
    model.load_adapter("first", folder)
    alone = peft.PeftModel.from_pretrained(make_base("llama"), folder).eval()
    ids = torch.randint(1, 40, (2, 6), generator=torch.Generator().manual_seed(5))
    settings = {"max_new_tokens": 4, "guidance_scale": 1.5, "do_sample": False, "pad_token_id": 0}
    tokens = model.generate(ids, adapters=["first"] * 2, **settings)
    assert torch.equal(tokens, alone.generate(input_ids=ids, **settings))


def test_guidance_is_refused_where_adapters_differ_by_token(job):
    """Its other prompt, the last token alone unless one is given, has no entries."""
    model, in_peft, inputs = job
    by_token = [["first"] + [None] * 5, None, None]
    settings = GenerationConfig(guidance_scale=1.5)
    for given in ({"guidance_scale": 1.5}, {"generation_config": settings}):
        with pytest.raises(UnsupportedInputError, match="guidance_scale=1.5"):
            model.generate(adapters=by_token, **inputs, **given)
    model.generate(adapters=by_token, **inputs, guidance_scale=1)
    inputs |= {"guidance_scale": 1.5, "do_sample": False}
    tokens = model.generate(adapters=ROWS, **inputs)
    for row, adapter in enumerate(ROWS):
        assert torch.equal(tokens[row], in_peft(adapter).generate(**inputs)[row])


def test_sampled_rows_keep_their_adapter(job):
    model, in_peft, inputs = job
    inputs |= {"do_sample": True, "num_return_sequences": 2}
    for adapter in ROWS:  # one generator state: a batch of one adapter samples as PEFT does
        torch.manual_seed(1)
        tokens = model.generate(adapters=[adapter] * 3, **inputs)
        alone = in_peft(adapter)
        torch.manual_seed(1)
        assert torch.equal(tokens, alone.generate(**inputs))


def test_prompts_may_be_given_by_position(job):
    model, _, inputs = job
    ids = inputs.pop("input_ids")
    by_name = model.generate(adapters=ROWS, input_ids=ids, **inputs, do_sample=False)
    assert torch.equal(model.generate(ids, adapters=ROWS, **inputs, do_sample=False), by_name)


def test_slots_per_token_are_the_rows_where_they_agree(job):
    model, _, inputs = job
    ids = {"input_ids": inputs["input_ids"]}
    per_row = model(adapters=ROWS, **ids).logits
    per_token = model(adapters=[[name] * 6 for name in ROWS], **ids).logits
    assert torch.equal(per_row, per_token)


def test_an_adapter_may_begin_inside_a_row(job):
    """Causal attention: tokens before the change see nothing of the adapter."""
    model, _, inputs = job
    ids = {"input_ids": inputs["input_ids"][:1]}
    mixed = model(adapters=[[None] * 4 + ["first"] * 2], **ids).logits[0]
    plain = model(adapters=[None], **ids).logits[0]
    assert torch.equal(mixed[:4], plain[:4])
    assert (mixed[4:] - plain[4:]).abs().max() > 1e-3


def test_entries_per_token_count_from_what_a_callers_cache_holds(job):
    model, _, inputs = job
    ids = inputs["input_ids"]
    rows = [[None] * 5 + ["first"], ["second"] * 3 + [None] * 3, ["first", None] * 3]
    full = model(adapters=rows, input_ids=ids).logits
    head = model(adapters=[row[:3] for row in rows], input_ids=ids[:, :3], use_cache=True)
    tail = model(
        adapters=[row[3:] for row in rows],
        input_ids=ids[:, 3:],
        past_key_values=head.past_key_values,
    )
    torch.testing.assert_close(tail.logits, full[:, 3:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("use_cache", [True, False])
def test_new_tokens_use_the_last_entry_of_their_row(job, use_cache):
    model, _, inputs = job
    rows = [[None] * 4 + [name] * 2 for name in ROWS]
    inputs |= {"do_sample": False, "use_cache": use_cache, "attention_mask": None}
    tokens = model.generate(adapters=rows, **inputs)
    for length in range(6, 14):  # each token follows from a forward pass over all before it
        entries = [row + [row[-1]] * (length - 6) for row in rows]
        logits = model(adapters=entries, input_ids=tokens[:, :length]).logits[:, -1]
        assert torch.equal(logits.argmax(-1), tokens[:, length])


def test_hidden_rows_of_the_head_keep_their_adapter(job):
    model, _, inputs = job
    ids = {"input_ids": inputs["input_ids"]}
    for rows in (ROWS, [[None] * 5 + [name] for name in ROWS]):
        full = model(adapters=rows, **ids).logits
        last = model(adapters=rows, **ids, logits_to_keep=2).logits
        torch.testing.assert_close(last, full[:, -2:], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (["first"], "1 entries for a batch of 3 rows"),
        (["first"] * 4, "4 entries for a batch of 3 rows"),
        ([], "0 entries"),
        ("first", "a list with one adapter name or None per row"),
        (["first", None, "secnd"], "no adapter named 'secnd'; did you mean 'second'"),
        (["first", None, 3], r"adapters\[2\] holds 3"),
        (["first", None, [3] * 6], r"adapters\[2\] holds 3"),
        (["first", None, ["first"] * 5], r"adapters\[2\] has 5 entries for a row of 6 tokens"),
    ],
)
def test_wrong_adapters_are_refused(job, rows, told):
    model, _, inputs = job
    for call in (model, model.generate):
        with pytest.raises(InvalidInputError, match=told):
            call(adapters=rows, **inputs)


def test_a_call_without_tokens_is_refused(job):
    model, _, _ = job
    with pytest.raises(InvalidInputError, match="no tokens to run on"):
        model(adapters=ROWS, attention_mask=torch.ones(3, 6))
