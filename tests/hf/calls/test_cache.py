"""A state of earlier tokens is followed under any name, or refused; it is never taken for none."""

import inspect

import pytest
import torch
import transformers
from helpers.sweeps import sweep, sweep_variants
from helpers.sweeps.architectures import build, in_peft

from lora_backends import UnsupportedInputError
from lora_backends.hf import MultiLoRAModel
from lora_backends.hf.calls.cache import STATELESS, carried, past_tokens, states_of

SETTINGS = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
IDS = torch.tensor([[4, 9, 17, 23, 5, 31], [8, 2, 40, 11, 6, 29]])
ROWS = [[None] * 4 + ["a"] * 2, ["b"] * 3 + ["a"] * 3]


def named(forward):
    """Return this Transformers' name of the cache, an argument of a model's forward."""
    names = inspect.signature(forward).parameters
    return next(name for name in ("cache", "past_key_values", "cache_params") if name in names)


def known(name):
    try:
        return sweep.build(name)
    except AttributeError as error:
        pytest.skip(f"this Transformers lacks it: {error}")


def wrapped(base, *targets):
    model = MultiLoRAModel(base, "torch_ref", max_rank=3)
    for seed, name in enumerate("ab"):
        model.add_adapter(name, in_peft(base, list(targets) or "all-linear", seed)[1])
    return model


def renamed(base, unseen=False):
    """Let a model take its cache as `memory`, or keep it from one pass to the next by itself."""
    kind, real = type(base), named(base.forward)

    class Renamed(kind):
        def forward(self, input_ids=None, memory=None, start=None, **inputs):
            cache = self.held if unseen else memory
            output = super().forward(input_ids, **{real: cache}, **inputs)
            if not unseen and output.get(real) is not None:
                output["memory"] = output[real]
            return output

        def prepare_inputs_for_generation(self, input_ids, **kwargs):
            inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
            cache = inputs.pop(real, None)
            if unseen:
                self.held = cache
                return inputs
            return inputs | {"memory": cache}

    base.__class__ = Renamed
    base.held = None
    return base


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("change", [lambda base: base, renamed], ids=["known", "renamed"])
def test_entries_per_token_follow_a_cache_of_any_name(name, change):
    model = wrapped(change(build(name)))
    cached = model.generate(IDS, adapters=ROWS, **SETTINGS)
    whole = wrapped(build(name)).generate(IDS, adapters=ROWS, use_cache=False, **SETTINGS)
    assert torch.equal(cached, whole)


@pytest.mark.parametrize("name", ["Gemma3", "Qwen3_5", "Jamba", "Lfm2"])
def test_entries_per_token_follow_a_cache_of_several_kinds_of_layers(name):
    model = wrapped(known(name))
    cached = model.generate(IDS, adapters=ROWS, **SETTINGS)
    assert torch.equal(cached, model.generate(IDS, adapters=ROWS, use_cache=False, **SETTINGS))


def test_entries_per_token_follow_a_model_with_states_of_its_own_or_are_refused():
    """RecurrentGemma's first versions take no cache: all state is in its modules."""
    model = wrapped(known("RecurrentGemma"))
    whole = model.generate(IDS, adapters=ROWS, use_cache=False, **SETTINGS)
    if not {"cache", "past_key_values"} & {*inspect.signature(model.base.forward).parameters}:
        with pytest.raises(UnsupportedInputError, match="1 tokens of each row and no cache"):
            model.generate(IDS, adapters=ROWS, **SETTINGS)
        return
    assert torch.equal(model.generate(IDS, adapters=ROWS, **SETTINGS), whole)


def test_an_adapter_is_invoked_behind_a_cache_of_any_name(tmp_path):
    config = sweep_variants.VARIANTS["aLoRA"][1]
    sweep.adapt(build("llama"), str(tmp_path), 3, **config)
    tokens = {}
    for change in (lambda base: base, renamed):
        for use_cache in (True, False):
            model = MultiLoRAModel(change(build("llama")), "torch_ref", max_rank=3)
            model.load_adapter("own", tmp_path)
            ids = sweep_variants.inputs("llama")["input_ids"]
            key = change is renamed, use_cache
            tokens[key] = model.generate(
                ids, adapters=["own"] * len(ids), use_cache=use_cache, **SETTINGS
            )
    assert all(torch.equal(tokens[False, False], found) for found in tokens.values())


def test_an_invocation_that_may_lie_in_a_cache_of_any_name_is_refused(tmp_path):
    sweep.adapt(build("llama"), str(tmp_path), 3, **sweep_variants.VARIANTS["aLoRA"][1])
    model = MultiLoRAModel(renamed(build("llama")), "torch_ref", max_rank=3)
    model.load_adapter("own", tmp_path)
    ids = sweep_variants.inputs("llama")["input_ids"][:1]
    output = model(adapters=["own"], input_ids=ids[:, :-1], use_cache=True)
    cache = getattr(output, named(build("llama").forward))
    unseen = (
        r"may be in the key-value cache[\s\S]*from the first invocation token on and None before"
    )
    for memory, message in ((cache, unseen), ([cache], "memory does not")):
        with pytest.raises(UnsupportedInputError, match=message):
            model(adapters=["own"], input_ids=ids[:, -1:], memory=memory)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("memory", (torch.ones(2, 3),)),
        ("memory", torch.ones(2, 3)),
        ("start", 3),
        ("num_logits_to_keep", 2),
    ],
)
def test_a_word_of_unknown_meaning_is_refused_where_adapters_differ_by_token(word, value):
    model = wrapped(renamed(build("llama")))
    with pytest.raises(UnsupportedInputError, match=f"^{word} does not tell how many tokens"):
        model(adapters=ROWS, input_ids=IDS, **{word: value})
    if word != "memory":
        model(adapters=["a", None], input_ids=IDS, **{word: value})


def test_a_state_that_no_input_shows_is_refused_where_adapters_differ_by_token():
    model = wrapped(renamed(build("llama"), unseen=True))
    with pytest.raises(UnsupportedInputError, match="1 tokens of each row and no cache"):
        model.generate(IDS, adapters=ROWS, **SETTINGS)
    whole = model.generate(IDS, adapters=ROWS, use_cache=False, **SETTINGS)
    assert torch.equal(whole[:, :6], IDS)


def test_caches_of_different_lengths_are_refused():
    class Cache:
        def __init__(self, length):
            self.get_seq_length = lambda: length

    assert past_tokens({"one": Cache(3), "other": Cache(3), "input_ids": IDS}) == 3
    with pytest.raises(UnsupportedInputError, match="one: 3, other: 4"):
        past_tokens({"one": Cache(3), "other": Cache(4)})


def test_a_word_without_state_that_holds_a_cache_is_a_cache():
    cache = transformers.DynamicCache()
    assert carried({"encoder_outputs": cache, "labels": IDS, "use_cache": True}) == {
        "encoder_outputs": cache
    }


def parameters(text):
    return inspect.signature(eval(f"lambda {text}: None")).parameters


@pytest.mark.parametrize(
    ("takes", "output", "found"),
    [
        ("input_ids, memory=None", {"logits": IDS, "memory": [IDS]}, ["memory"]),
        ("input_ids, memory=None", {"logits": IDS, "memory": IDS}, ["memory"]),
        ("input_ids, cache=None, use_cache=None", {"logits": IDS}, []),
        ("input_ids", {"logits": IDS, "boxes": [IDS]}, []),
        ("input_ids", (IDS, IDS), []),
        ("input_ids, memory=None", IDS, []),
        ("input_ids, memory=None", {"logits": IDS}, None),
        ("input_ids, memory=None, use_cache=None", {"logits": IDS, "present": [IDS]}, None),
        ("input_ids, memory=None, use_cache=None", (IDS, IDS), None),
        ("input_ids, **more", {"logits": IDS, "c": transformers.DynamicCache()}, None),
    ],
)
def test_what_one_pass_hands_to_the_next_has_a_name_or_is_refused(takes, output, found):
    if found is None:
        with pytest.raises(TypeError, match="takes a state is not known"):
            states_of(output, parameters(takes))
    else:
        assert [*states_of(output, parameters(takes))] == found


def test_steps_after_a_cache_of_any_name_are_tried():
    """The rows of one-token passes are known from such a pass, not from one over the prompt."""
    for base in (build("deepseek_v3"), sweep.build("Mamba")):
        model = MultiLoRAModel(base, "torch_ref")
        steps = [form.step for layout in model._wrapped.layouts.values() for form in layout.forms]
        assert True in steps


def test_rows_of_steps_whose_cache_is_not_known_are_refused():
    class Hidden(transformers.LlamaForCausalLM):
        def forward(self, input_ids, memory=None):
            output = super().forward(input_ids, use_cache=True)
            return output.logits, getattr(output, named(super().forward))

    base = build("llama")
    base.__class__ = Hidden
    model = wrapped(base)
    model(adapters=["a", "b"], input_ids=IDS)
    with pytest.raises(UnsupportedInputError, match="which of memory takes a state is not known"):
        model(adapters=["a", "b"], input_ids=IDS[:, :1])


def test_arguments_by_position_are_seen():
    """An encoder-decoder's tokens are those of its decoder."""
    base = sweep.build("T5")
    model = wrapped(base, "q", "v")
    decoded = IDS[:, :2]
    expected = model(adapters=["a", "b"], input_ids=IDS, decoder_input_ids=decoded).logits
    with model.prepare(["a", "b"], tokens=2) as step, model.using(step):
        found = base(IDS, None, decoded).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_words_without_state_name_no_cache_of_transformers():
    """Its own list of caches, and what models take as a cache, must not be among them."""
    from transformers.generation.utils import ALL_CACHE_NAMES

    assert not STATELESS & {*ALL_CACHE_NAMES}
    for name in ("llama", "rwkv", "xlnet", "deepseek_v3"):
        taken = inspect.signature(build(name).forward).parameters
        assert {*taken} & {*ALL_CACHE_NAMES, "past_key_values"} - STATELESS


def test_entries_of_a_pass_do_not_reach_the_tokens_of_its_cache():
    """DeepSeek expands the latent vectors of all tokens again, by a module that may have LoRA."""
    model = wrapped(build("deepseek_v3"), "kv_b_proj")
    name = named(model.base.forward)
    first = {"adapters": [row[:4] for row in ROWS], "input_ids": IDS[:, :4]}
    for rows in (["a", "a"], [None, None], ["a", "b"]):
        cache = {name: model(**first)[name]}
        by_list = {"adapters": [[entry] for entry in rows], "input_ids": IDS[:, 4:5]}
        with pytest.raises(UnsupportedInputError, match=r"kv_b_proj sees .* the cache's tokens"):
            model(**by_list, **cache)
        model(**{**by_list, "adapters": rows}, **cache)
    whole = model(adapters=[[entry] for entry in "ab"], input_ids=IDS[:, :1]).logits
    assert torch.equal(whole, model(adapters=["a", "b"], input_ids=IDS[:, :1]).logits)


def test_entries_of_a_pass_follow_its_cache_where_modules_see_its_tokens_alone():
    model = wrapped(build("deepseek_v3"), "q_a_proj", "kv_a_proj_with_mqa", "o_proj")
    name, cache, steps = named(model.base.forward), {}, []
    for token in range(IDS.shape[1]):
        rows = [row[token : token + 1] for row in ROWS]
        output = model(adapters=rows, input_ids=IDS[:, token : token + 1], **cache)
        cache = {name: output[name]}
        steps.append(output.logits)
    whole = model(adapters=ROWS, input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(torch.cat(steps, 1), whole)
