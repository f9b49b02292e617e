"""Words of a GenerationConfig: each is followed as `generate` follows it, or refused by name."""

import pytest
import torch
import transformers
from helpers.adapters.deltas import random_checkpoint
from helpers.continuous import TARGETS, needs, prompts, settings, soon
from transformers import GenerationConfig

from lora_backends import InvalidInputError, LoRABackendError, UnsupportedInputError
from lora_backends.hf import MultiLoRAModel
from lora_backends.hf.generating.config_words import (
    FOLLOWED,
    HARMLESS,
    KEEPING_ROWS,
    WITHOUT_EFFECT,
)

NEW, ENTRIES = 10, [None, "a", {"a": 0.7, "b": 0.3}]
SCORES = {
    "repetition_penalty": {"repetition_penalty": 3.0},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 4.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[i] for i in range(0, 40, 2)] + [[1, 3]]},
    "sequence_bias": {"sequence_bias": {(7,): 0.5, (7, 8): 9.0, (8, 9): 9.0}},
    "suppress_tokens": {"suppress_tokens": list(range(0, 40, 2))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(0, 40, 2))},
    "forced_bos_token_id": {"forced_bos_token_id": 9},
    "forced_eos_token_id": {"forced_eos_token_id": 11},
    "exponential_decay_length_penalty": {
        "exponential_decay_length_penalty": (3, 1.5),
        "eos_token_id": 5,
    },
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": list(range(20))},
    "min_length": {"min_length": 12, "eos_token_id": list(range(20))},
    "eos_token_id": {"eos_token_id": list(range(0, 40, 5))},
    "max_new_tokens": {"max_new_tokens": 3},
    "max_length": {"max_new_tokens": None, "max_length": 14},
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True, "exponential_decay_length_penalty": None},
    "several": {
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 4,
        "eos_token_id": list(range(10)),
        "suppress_tokens": [30, 31],
    },
}
SAMPLED = {
    "do_sample": {},
    "temperature": {"temperature": 0.5},
    "top_k": {"top_k": 3},
    "no top_k": {"top_k": 0},
    "top_p": {"top_p": 0.4},
    "min_p": {"min_p": 0.4},
    "top_h": {"top_h": 0.4},
    "typical_p": {"typical_p": 0.4},
    "epsilon_cutoff": {"epsilon_cutoff": 0.03},
    "eta_cutoff": {"eta_cutoff": 0.2},
    "several": {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.7, "min_p": 0.01},
}
REFUSED = {
    "num_beams": 2,
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "guidance_scale": 1.5,
    "max_time": 3.0,
    "stop_strings": ["x"],
    "token_healing": True,
    "watermarking_config": {"bias": 2.0},
    "prompt_lookup_num_tokens": 2,
    "assistant_early_exit": 1,
    "is_assistant": True,
    "use_mtp": True,
    "speculation_type": "dflash",
    "constraints": [1],
    "force_words_ids": [[1]],
    "num_beam_groups": 2,
    "cache_implementation": "quantized",
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
    "a_word_of_tomorrow": 0,
}


@pytest.fixture
def model(make_base):
    base = make_base("llama")
    base.generation_config = GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=39
    )
    model = MultiLoRAModel(base, "torch_ref", max_adapters=3, max_rank=4)
    for seed, name in enumerate("ab"):
        model.add_adapter(name, random_checkpoint(base, TARGETS, seed=seed))
    return model


def alone(model, ids, adapter, config=None, **words):
    """Return what `generate` answers; its words are those of the configuration, then `words`."""
    ids = torch.tensor([ids])
    mask = torch.ones_like(ids)
    tokens = model.generate(
        adapters=[adapter], input_ids=ids, attention_mask=mask, generation_config=config, **words
    )
    return tokens[0, ids.shape[1] :].tolist()


def batched(model, inputs, config=None, **changes):
    outputs = soon(
        lambda: model.generate_batch(
            inputs,
            adapters=ENTRIES,
            generation_config=config,
            continuous_batching_config=settings(**changes),
        )
    )
    return [output.generated_tokens for output in outputs.values()]


def answers(model, inputs, config=None):
    return [alone(model, *pair, config) for pair in zip(inputs, ENTRIES, strict=True)]


@pytest.mark.parametrize("name", SCORES)
def test_requests_follow_a_word_as_generate_does(model, name):
    inputs = [*prompts(len(ENTRIES) - 1), [3]]  # some words act on prompts of one token alone
    plain = answers(model, inputs)
    config = GenerationConfig(**SCORES[name])
    if "max_length" in SCORES[name]:
        model.base.generation_config.max_new_tokens = None
    expected = answers(model, inputs, config)
    assert batched(model, inputs, config) == expected
    changes = not {"remove_invalid_values", "renormalize_logits"} & SCORES[name].keys()
    assert (expected != plain) == changes


def test_requests_follow_words_of_the_models_own_configuration(model):
    inputs = prompts(len(ENTRIES))
    model.base.generation_config.update(repetition_penalty=3.0, eos_token_id=[1, 5, 9, 13])
    config = GenerationConfig(no_repeat_ngram_size=2)
    for given in (None, config):
        assert batched(model, inputs, given) == answers(model, inputs, given)


@pytest.mark.parametrize("name", SAMPLED)
def test_a_request_alone_is_sampled_as_by_generate(model, name):
    config = GenerationConfig(do_sample=True, **SAMPLED[name])
    with model.continuous_batching(config, settings(seed=3)) as requests:
        request = requests.add_request([3, 4, 5], adapter="a")
        answer = soon(requests.collect, [request])[request].generated_tokens
    torch.manual_seed(3)
    assert answer == alone(model, [3, 4, 5], "a", config)


def test_every_sequence_of_a_request_follows_its_words(model):
    words = {"repetition_penalty": 3.0, "no_repeat_ngram_size": 1, "temperature": 1e-5}
    config = GenerationConfig(do_sample=True, num_return_sequences=2, **words)
    outputs = soon(
        lambda: model.generate_batch(
            [[3, 4, 5], [6]],
            adapters=["a", "b"],
            generation_config=config,
            continuous_batching_config=settings(),
        )
    )
    config.num_return_sequences = 1
    first, second = alone(model, [3, 4, 5], "a", config), alone(model, [6], "b", config)
    assert [o.generated_tokens for o in outputs.values()] == [first, first, second, second]


def test_a_request_that_gives_its_place_away_follows_its_words(model):
    """Where the cache is full, Transformers begins a request again, with its tokens as a prompt."""
    words = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "min_new_tokens": 20}
    config = GenerationConfig(max_new_tokens=24, **words)
    inputs = [[1, 2, 3, 4, 5], [6, 7, 8, 9], [5, 4, 3, 2, 1]]
    assert batched(model, inputs, config, num_blocks=5) == answers(model, inputs, config)


def test_every_followed_word_is_tried_here():
    tried = {word for words in (*SCORES.values(), *SAMPLED.values()) for word in words}
    assert tried | {"do_sample", "num_return_sequences"} == FOLLOWED


def test_words_that_do_not_matter_change_no_token(model):
    inputs, config = prompts(len(ENTRIES)), GenerationConfig()
    plain = batched(model, inputs)
    words = {
        "use_cache": False,
        "cache_implementation": "hybrid",
        "early_stopping": True,
        "length_penalty": 2.0,
        "num_assistant_tokens": 5,
        "disable_compile": True,
        "bos_token_id": 1,
        "pad_token_id": 2,
        "return_dict_in_generate": True,
        "guidance_scale": 1.0,
    }
    assert words.keys() <= WITHOUT_EFFECT | HARMLESS.keys()
    config.update(**words)
    assert batched(model, inputs, config) == plain


@pytest.mark.parametrize("source", ["given", "of the model"])
@pytest.mark.parametrize("word", REFUSED)
def test_a_word_that_requests_do_not_follow_is_refused_by_name(model, word, source):
    config = GenerationConfig()
    wears = config if source == "given" else model.base.generation_config
    setattr(wears, word, REFUSED[word])
    if word == "watermarking_config":
        wears.watermarking_config = transformers.WatermarkingConfig(**REFUSED[word])
    with pytest.raises(UnsupportedInputError, match=f"does not follow {word}="):
        model.continuous_batching(config, settings())
    assert model.base.config._attn_implementation == "sdpa"


def test_every_word_of_transformers_is_followed_or_refused(model):
    """Also one that a later version adds: it is in no list of this library."""
    for word in vars(GenerationConfig()):
        if word.startswith("_") or word in FOLLOWED | WITHOUT_EFFECT | {"watermarking_config"}:
            continue
        config = GenerationConfig()
        setattr(config, word, object())
        with pytest.raises(LoRABackendError, match=word):
            model.continuous_batching(config, settings())


def test_what_generate_refuses_is_refused(model):
    for config, message in (
        (GenerationConfig(top_p=-1.0, do_sample=True), "top_p"),
        (GenerationConfig(sequence_bias={(40,): 1.0}), "sequence_bias"),
        (GenerationConfig(temperature="hot", do_sample=True), "temperature"),
        (GenerationConfig(bad_words_ids=[3]), "bad_words_ids"),
        (GenerationConfig(eos_token_id="x"), "eos_token_id is 'x'"),
        (GenerationConfig(eos_token_id=[1.5]), "eos_token_id is"),
        ({"top_k": 1}, "generation_config is"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            model.continuous_batching(config, settings())
    model.base.generation_config.num_return_sequences = 2  # of a greedy search
    with pytest.raises(InvalidInputError, match="num_return_sequences"):
        model.continuous_batching(None, settings())


def test_requests_may_have_words_of_their_own(model):
    own = [{}, {"repetition_penalty": 3.0}, {"no_repeat_ngram_size": 1}, {"eos_token_id": [1, 5]}]
    own += [{"suppress_tokens": list(range(20)), "max_new_tokens": 4}, {"min_new_tokens": 3}]
    inputs, entries = prompts(len(own)), ENTRIES * 2
    config = settings(per_request_processors=True)
    with model.continuous_batching(None, config) as requests:
        added = zip(inputs, entries, own, strict=True)
        names = [requests.add_request(ids, adapter=who, **words) for ids, who, words in added]
        found = soon(requests.collect, names)
    for name, ids, who, words in zip(names, inputs, entries, own, strict=True):
        assert found[name].generated_tokens == alone(model, ids, who, **words)


def test_requests_of_a_manager_that_samples_may_be_greedy(model):
    """Also where the best scores are equal, as those of 16-bit models often are."""
    head = model.base.lm_head.weight
    head.data[20:] = head.data[:20]
    inputs, entries = prompts(6), [None] * 6
    config = GenerationConfig(do_sample=True, temperature=2.0, top_k=0)
    own = [{"do_sample": False}] * 4 + [{"do_sample": False, "repetition_penalty": 3.0}, {}]
    with model.continuous_batching(config, settings(per_request_processors=True)) as requests:
        added = zip(inputs, entries, own, strict=True)
        names = [requests.add_request(ids, adapter=who, **words) for ids, who, words in added]
        found = soon(requests.collect, names)
    for name, ids, who, words in zip(names[:5], inputs, entries, own, strict=False):
        assert found[name].generated_tokens == alone(model, ids, who, **words)


WRONG = {
    "temperature=1e-40": {"temperature": 1e-40},
    "suppress_tokens=": {"suppress_tokens": list(range(40))},
    "num_return_sequences of a request is 2": {"num_return_sequences": 2},
    "needs 65 tokens, the model has 64 positions": {"input_ids": [1] * 40, "max_new_tokens": 25},
    "temperature=0.0": {"temperature": 0.0},
    "does not follow num_beams=3": {"num_beams": 3},
    "'stop'": {"stop": ["x"]},
    "'logits_processor'": {"logits_processor": []},
    "do_sample of a request is 0": {"do_sample": 0},
    "eos_token_id is '5'": {"eos_token_id": "5"},
    "eos_token_id is True": {"eos_token_id": True},
    "request_id is 7": {"request_id": 7},
    "request_id is 'x__child#0'": {"request_id": "x__child#0"},
    "streaming is 'no'": {"streaming": "no"},
    "forced_eos_token_id": {"forced_eos_token_id": "x"},
    "forced_eos_token_id=40": {"forced_eos_token_id": 40},
    "forced_bos_token_id=40": {"input_ids": [1], "forced_bos_token_id": 40},
    "exponential_decay_length_penalty": {
        "exponential_decay_length_penalty": (2, 1.5),
        "eos_token_id": 40,
    },
    "max_new_tokens is '5'": {"max_new_tokens": "5"},
}


def test_a_wrong_word_of_a_request_hurts_no_other(model):
    model.base.config.max_position_embeddings = 64
    config = GenerationConfig(do_sample=True, top_k=1)
    with model.continuous_batching(config, settings(per_request_processors=True)) as requests:
        name = requests.add_request([1, 2, 3], adapter="a")
        for message, wrong in WRONG.items():
            with pytest.raises(LoRABackendError, match=message):
                requests.add_request(**{"input_ids": [1, 2], **wrong})
        answer = soon(requests.collect, [name])[name].generated_tokens
    assert answer == alone(model, [1, 2, 3], "a")


def test_words_of_a_request_without_processors_of_its_own_are_refused(model):
    with model.continuous_batching(None, settings()) as requests:
        with pytest.raises(UnsupportedInputError, match=r"temperature[\s\S]*per_request_proc"):
            requests.add_request([1, 2], temperature=0.5)


def test_a_prompt_of_as_many_tokens_as_max_length_is_refused(model):
    config = GenerationConfig(max_length=5)
    model.base.generation_config.max_new_tokens = None
    with model.continuous_batching(config, settings()) as requests:
        with pytest.raises(InvalidInputError, match="max_length is 5 for a prompt of 5"):
            requests.add_request([1] * 5)


def test_a_request_beyond_the_positions_of_the_model_is_refused(make_base):
    """In a table of positions it would end the pass, and so all other requests."""
    sizes = {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    base = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    base.generation_config = GenerationConfig(eos_token_id=-1)
    model = MultiLoRAModel(base, "torch_ref", max_rank=4)
    with model.continuous_batching(continuous_batching_config=settings()) as requests:
        fits = requests.add_request([1] * 30, max_new_tokens=2)
        unlimited = requests.add_request([1] * 30)
        for ids, new in ((40, None), (30, 20), (32, 1)):
            with pytest.raises(InvalidInputError, match="the model has 32 positions"):
                requests.add_request([1] * ids, max_new_tokens=new)
        found = soon(requests.collect, [fits, unlimited])
    for name in (fits, unlimited):
        assert found[name].generated_tokens == alone(model, [1] * 30, None, max_new_tokens=2)


def test_a_request_that_changes_the_positions_of_others_is_refused():
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    lengths = {"original_max_position_embeddings": 16, "max_position_embeddings": 64}
    config = transformers.Phi3Config(**sizes, **heads, **lengths, rope_scaling=rope)
    model = MultiLoRAModel(transformers.Phi3ForCausalLM(config).eval(), "torch_ref", max_rank=4)
    with model.continuous_batching(continuous_batching_config=settings()) as requests:
        with pytest.raises(InvalidInputError, match="needs 17 tokens, the model has 16 positions"):
            requests.add_request([1] * 10, max_new_tokens=7)


STATEFUL = {
    "Mamba": {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
    "Lfm2": {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "layer_types": ["conv", "full_attention"],
    },
}


LATE = {"Lfm2": needs("5.18", "layers of another kind are refused before the start")}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=LATE.get(name, ())) for name in STATEFUL]
)
def test_a_model_with_states_is_refused_and_left_as_it_was(family):
    config = getattr(transformers, f"{family}Config")(**STATEFUL[family])
    base = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    before = base.config._attn_implementation
    model = MultiLoRAModel(base, "torch_ref", max_rank=4)
    message = f"{family}ForCausalLM cannot run in continuous batching"
    with pytest.raises(UnsupportedInputError, match=message):
        model.continuous_batching(continuous_batching_config=settings())
    assert base.config._attn_implementation == before


MOVING = {
    "custom_generate": lambda model, input_ids, **_: input_ids,
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "num_beam_groups": 2,
    "constraints": [1],
    "token_healing": True,
    "use_mtp": True,
}


@pytest.mark.parametrize("rows", [["a", "b"], [["a", "a", None], None]], ids=["rows", "tokens"])
@pytest.mark.parametrize("word", MOVING)
def test_a_word_by_which_generate_may_move_rows_is_refused(model, word, rows):
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    with pytest.raises(UnsupportedInputError, match=word):
        model.generate(ids, adapters=rows, **{word: MOVING[word]})
    if word != "custom_generate":
        model.base.generation_config.update(**{word: MOVING[word]})
        with pytest.raises(UnsupportedInputError, match=word):
            model.generate(ids, adapters=rows)


def test_a_word_that_a_later_generate_reads_is_refused_where_rows_differ(model, monkeypatch):
    made = GenerationConfig.__init__

    def later(self, **words):
        made(self, **words)
        self.rows_move = words.get("rows_move")

    monkeypatch.setattr(GenerationConfig, "__init__", later)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    with pytest.raises(UnsupportedInputError, match="rows_move=1"):
        model.generate(ids, adapters=["a", "b"], rows_move=1)


def test_a_generate_that_replaced_the_models_is_refused_where_rows_differ(model):
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    theirs = model.base.generate
    model.base.generate = lambda **inputs: theirs(**inputs).flip(0)
    with pytest.raises(UnsupportedInputError, match="generate of its own"):
        model.generate(ids, adapters=["a", "b"])


def test_generate_does_not_leave_the_thread_of_its_adapters(model):
    """Transformers' continuous batching would answer as the base model."""
    with pytest.raises(UnsupportedInputError, match=r"paged[\s\S]*generate_batch"):
        model.generate(torch.tensor([[1, 2, 3]]), adapters=["a"], cache_implementation="paged")


@pytest.mark.parametrize(
    "words",
    [
        {"stop_strings": None, "max_time": 100.0},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 2},
        {"watermarking_config": transformers.WatermarkingConfig(bias=5.0)},
        {"repetition_penalty": 2.0, "min_new_tokens": 3},
        {"num_beams": 2, "length_penalty": 2.0, "early_stopping": True},
        {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    ],
    ids=lambda words: next(iter(words)),
)
def test_rows_keep_their_adapter_with_the_words_that_keep_rows(model, words):
    assert words.keys() <= KEEPING_ROWS
    ids = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    tokens = model.generate(ids, adapters=["a", None, "b"], **words)
    tokens = tokens if isinstance(tokens, torch.Tensor) else tokens.sequences
    for row, adapter in enumerate(["a", None, "b"]):
        same = model.generate(ids, adapters=[adapter] * 3, **words)
        same = same if isinstance(same, torch.Tensor) else same.sequences
        assert torch.equal(tokens[row], same[row])
    assert len({tuple(row.tolist()[3:]) for row in tokens}) == 3


@pytest.mark.parametrize("words", [{"prompt_lookup_num_tokens": 2}, {"assistant_early_exit": 1}])
def test_an_assistant_keeps_the_entries_of_tokens(model, words):
    ids, rows = torch.tensor([[1, 2, 1, 2, 1]]), [[None, "a", "a", None, "b"]]
    plain = model.generate(ids, adapters=rows)
    assert torch.equal(model.generate(ids, adapters=rows, **words), plain)
