"""Adapters that vLLM's loader refuses: in a real engine, log-probabilities are PEFT's."""

import json
import shutil

import pytest
import torch
from helpers.adapters.peft_models import LAYERS, LINEAR, PROMPTS, save_adapter, save_tiny
from helpers.servers.vllm_engines import INVOCATION, KINDS

from lora_backends import UnsupportedInputError

TOLERANCE = 1e-4  # of log-probabilities in float32; adapters change them by more than 0.1
ROWS = [*KINDS, None, "all"]
TEXTS = [list(prompt) for prompt in [*PROMPTS, PROMPTS[0][::-1], PROMPTS[1][::-1]]]
TEXTS[ROWS.index("alora")][20:22] = INVOCATION
TEXTS[ROWS.index("tokens")][3] = TEXTS[ROWS.index("tokens")][30] = 9


@pytest.fixture(scope="module")
def engine(make_engine):
    return make_engine(max_loras=len(ROWS), max_cpu_loras=16)


@pytest.fixture(scope="module")
def blend(engine):
    """Return a function that makes a request for a blend."""
    from vllm.lora.request import LoRARequest

    def make(text, adapter_id):
        return LoRARequest(text, adapter_id, f"blend:{text}")

    return make


def load_peft(base, folder):
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return (model if folder is None else peft.PeftModel.from_pretrained(model, folder)).eval()


def wanted_logprobs(model, prompt):
    ids = torch.tensor([prompt])
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
    return torch.stack([logprobs[i - 1, prompt[i]] for i in range(1, len(prompt))])


def found_logprobs(engine, prompts, requests):
    from vllm import SamplingParams

    asked = SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True
    )
    out = engine.llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        asked,
        lora_request=requests,
        use_tqdm=False,
    )
    return [
        torch.tensor([each.prompt_logprobs[i][p[i]].logprob for i in range(1, len(p))])
        for p, each in zip(prompts, out, strict=True)
    ]


def assert_close(found, wanted, name=""):
    worst = (found - wanted).abs().max().item()
    assert worst < TOLERANCE, f"{name}: {worst}"


def test_every_kind_in_one_batch_is_pefts(engine, tiny, adapters):
    found = found_logprobs(engine, TEXTS, [engine.request(name) for name in ROWS])
    for name, prompt, mine in zip(ROWS, TEXTS, found, strict=True):
        model = load_peft(tiny, adapters.get(name))
        assert_close(mine, wanted_logprobs(model, prompt), name)
    base = load_peft(tiny, None)
    for name, prompt, mine in zip(ROWS, TEXTS, found, strict=True):
        changed = (mine - wanted_logprobs(base, prompt)).abs().max().item()
        assert (changed < TOLERANCE) is (name is None), f"{name} changes nothing"


def test_every_kind_generates_as_peft_does(engine, peft_tokens):
    found = engine.tokens(TEXTS, ROWS)
    assert found == [peft_tokens(p, n, 6) for p, n in zip(TEXTS, ROWS, strict=True)]


def test_a_slot_keeps_nothing_of_an_adapter_that_left_it(make_engine, tiny, adapters):
    engine = make_engine(max_loras=1)
    for name in ("dora", "all", "bias", "small", None):
        (found,) = found_logprobs(engine, TEXTS[:1], [engine.request(name)])
        assert_close(found, wanted_logprobs(load_peft(tiny, adapters.get(name)), TEXTS[0]), name)


def test_an_invocation_starts_each_request_in_its_own_place_and_cached_prefixes_do_not_mix(
    make_engine, peft_tokens
):
    engine = make_engine(max_num_batched_tokens=72, max_model_len=250, block_size=32)
    filler = [token for prompt in PROMPTS[:3] for token in prompt]
    once = filler[:40] + INVOCATION + filler[42:90]
    twice = [*once, *filler[90:100], *INVOCATION, *filler[100:110]]  # the last one counts
    never = filler[:100]
    for prompts, names in (
        ([once], ["alora"]),  # its blocks behind the invocation are the adapter's
        ([twice], ["alora"]),  # the same tokens there run on the base model
        ([twice, once, never], ["alora", None, "alora"]),
        ([once, once[:60], never], ["alora", "all", None]),
        ([once], ["alora"]),
    ):
        wanted = [peft_tokens(p, n, 4) for p, n in zip(prompts, names, strict=True)]
        assert engine.tokens(prompts, names, length=4) == wanted


def test_a_beam_search_with_an_alora_is_refused(make_engine):
    from vllm.sampling_params import BeamSearchParams

    engine = make_engine(max_model_len=250, block_size=32)
    prompts = [{"prompt_token_ids": PROMPTS[0][:9] + INVOCATION}]
    search = BeamSearchParams(beam_width=2, max_tokens=2, ignore_eos=True)
    with pytest.raises(UnsupportedInputError, match="beam search .*alora_invocation_tokens"):
        engine.llm.beam_search(prompts, search, lora_request=engine.request("alora"))
    with pytest.raises(UnsupportedInputError, match="'alora'"):
        engine.llm.beam_search(prompts, search, lora_request=[engine.request("alora")])
    with pytest.raises(Exception, match="[Tt]okenizer"):  # vLLM's own: these engines have none
        engine.llm.beam_search(prompts, search, lora_request=engine.request("all"))


def test_prefixes_before_an_invocation_are_the_base_models(make_engine):
    engine = make_engine(max_model_len=250, block_size=32)
    text = [token for prompt in PROMPTS[:3] for token in prompt]
    engine.tokens([text[:80]], [None], length=1)
    before = engine.metric("vllm:prefix_cache_hits")
    engine.tokens([text[:70] + INVOCATION + text[:5]], ["alora"], length=1)
    assert engine.metric("vllm:prefix_cache_hits") - before >= 64


def blended(tiny, adapters, factors):
    """Return PEFT's model with several adapters, each scaled."""
    model = load_peft(tiny, adapters[next(iter(factors))])
    for name in factors:
        model.load_adapter(adapters[name], name)
    model.base_model.set_adapter([*factors])
    for module in model.modules():
        for name, factor in factors.items():
            if isinstance(getattr(module, "scaling", None), dict) and name in module.scaling:
                module.scaling[name] *= factor
    return model.eval()


@pytest.mark.parametrize(
    "factors", [{"small": 0.5}, {"some": 0.75, "small": -0.5, "uneven": 2.0}], ids=str
)
def test_strengths_and_blends_are_pefts_sums(make_engine, tiny, adapters, factors):
    from vllm.lora.request import LoRARequest

    engine = make_engine(max_lora_rank=16)
    found_logprobs(engine, TEXTS[:1], [engine.request("small")])  # its name is known, others' not
    text = "+".join(
        f"{name if name == 'small' else adapters[name]}*{factor}"
        for name, factor in factors.items()
    )
    request = LoRARequest(text, 50, f"blend:{text}")
    rows = [request, engine.request("small"), None]
    found = found_logprobs(engine, TEXTS[:3], rows)
    assert_close(found[0], wanted_logprobs(blended(tiny, adapters, factors), TEXTS[0]))
    assert_close(found[1], wanted_logprobs(load_peft(tiny, adapters["small"]), TEXTS[1]))
    assert_close(found[2], wanted_logprobs(load_peft(tiny, None), TEXTS[2]))


def test_a_blend_follows_a_part_that_is_loaded_again_and_one_that_left(
    make_engine, adapters, peft_tokens
):
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    engine = make_engine(max_loras=4, block_size=32)
    core = engine.llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=4, min_tokens=4, detokenize=False)
    prompt = PROMPTS[0] + PROMPTS[1]  # two blocks of the prefix cache

    def tokens(request):
        given = {"prompt_token_ids": prompt}
        out = engine.llm.generate([given], sampling, lora_request=request, use_tqdm=False)
        return list(out[0].outputs[0].token_ids)

    def load(name, in_place=False):
        path = str(adapters[name])
        assert core.add_lora(LoRARequest("part", 70, path, load_inplace=in_place))

    load("small")
    blends = [LoRARequest("part*2", 71, "blend:part*2")]
    blends.append(LoRARequest("part*2*0.5", 72, "blend:part*2*0.5"))
    tokens(blends[0])
    assert tokens(blends[1]) == peft_tokens(prompt, "small", 4)
    load("all", in_place=True)
    wanted = peft_tokens(prompt, "all", 4)
    assert wanted != peft_tokens(prompt, "small", 4)
    assert tokens(blends[1]) == wanted
    for adapter_id in (70, 71, 72):
        core.remove_lora(adapter_id)
    assert tokens(blends[1]) == wanted


def test_rows_of_tokens_count_at_a_tied_head_too(make_engine, tmp_path):
    base = save_tiny(tmp_path / "tied", tie_word_embeddings=True, attention_bias=True)
    folder = save_adapter(
        tmp_path / "rows", base, 3, trainable_token_indices=[5, 9], target_modules=["q_proj"]
    )
    engine = make_engine(model=base, adapters={"rows": folder})
    prompt = [5, *PROMPTS[0][:10], 9, *PROMPTS[0][10:20], 5]
    found = found_logprobs(engine, [prompt, prompt], [engine.request("rows"), None])
    assert_close(found[0], wanted_logprobs(load_peft(base, folder), prompt))
    assert_close(found[1], wanted_logprobs(load_peft(base, None), prompt))


def changed(source, folder, config=None, rename=None):
    """Copy an adapter, with other words in its configuration or other keys in its file."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **(config or {})}))
    if rename:
        path = folder / "adapter_model.safetensors"
        save_file({rename(key): value for key, value in load_file(path).items()}, path)
    return folder


def of_another_layer(key):
    return key.replace("layers.1.", f"layers.{LAYERS}.")


def of_another_module(key):
    return key.replace("q_proj.lora", "q_proj.lora_extra.lora")


REFUSED = {
    "a layer that the model lacks": ("all", {}, of_another_layer, f"layers.{LAYERS}."),
    "a layer that the model lacks, DoRA": ("dora", {}, of_another_layer, f"layers.{LAYERS}."),
    "a tensor of no module": ("dora", {}, of_another_module, "lora_extra"),
    "whole modules": ("dora", {"modules_to_save": ["lm_head"]}, None, "modules_to_save"),
    "QALoRA": ("all", {"use_qalora": True}, None, "use_qalora"),
    "an unknown start": ("all", {"init_lora_weights": "corda"}, None, "corda"),
    "an unknown field": ("all", {"use_new": True}, None, "use_new"),
    "replicated layers": ("all", {"layer_replication": [[0, 2]]}, None, "layer_replication"),
    "biases of the base": ("all", {"bias": "all"}, None, "bias"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_reproduced_is_refused_by_name(engine, adapters, tmp_path, case):
    from vllm.lora.request import LoRARequest

    name, config, rename, match = REFUSED[case]
    if config.get("modules_to_save"):
        folder = save_saved_head(engine, tmp_path)
    else:
        folder = changed(adapters[name], tmp_path / "changed", config, rename)
    before = list(engine.manager.lora_index_to_id)
    with pytest.raises(Exception, match=match):
        engine.llm.llm_engine.add_lora(LoRARequest(case, 90, str(folder)))
    assert 90 not in engine.manager.lora_index_to_id
    assert engine.manager.lora_index_to_id == before


def save_saved_head(engine, folder):
    base = engine.llm.llm_engine.model_config.model
    return save_adapter(
        folder / "head", base, 1, modules_to_save=["lm_head"], target_modules=["q_proj"]
    )


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("nobody*0.5", "nobody"),
        ("dora*0.5+small*1", "DoRA"),
        ("bias*0.5", "lora_bias"),
        ("alora*0.5", "aLoRA"),
        ("tokens*1+small*1", "trainable tokens"),
        ("all*1+olora*1", "max_lora_rank"),
        ("small", "name\\*number"),
    ],
)
def test_blends_that_mean_nothing_here_are_refused_by_name(engine, blend, text, match):
    names = ["dora", "small", "bias", "alora", "tokens", "all", "olora"]
    engine.tokens(TEXTS[:7], names, length=1)
    with pytest.raises(Exception, match=match):
        engine.llm.llm_engine.add_lora(blend(text, 91))
    assert 91 not in engine.manager.lora_index_to_id


def test_a_name_that_came_through_the_server_is_no_folder(engine, adapters):
    from vllm.lora.request import LoRARequest

    text = f"{adapters['rs']}*0.5"
    with pytest.raises(Exception, match="no adapter"):
        engine.llm.llm_engine.add_lora(LoRARequest(text, 91, f"blend-by-name:{text}"))
    assert engine.llm.llm_engine.add_lora(LoRARequest(text, 93, f"blend:{text}"))


def test_a_strength_of_dora_scales_its_delta_alone(engine, blend, tiny, adapters):
    engine.tokens(TEXTS[:1], ["ranks"], length=1)
    (found,) = found_logprobs(engine, TEXTS[:1], [blend("ranks*1.0", 60)])
    assert_close(found, wanted_logprobs(load_peft(tiny, adapters["ranks"]), TEXTS[0]))
    slot = engine.manager.lora_index_to_id.index(60)
    twin = engine.manager.lora_index_to_id.index(engine.request("ranks").lora_int_id)
    half = blend("ranks*0.5", 61)
    engine.llm.llm_engine.add_lora(half)
    other = engine.manager.lora_index_to_id.index(61)
    layer = (
        engine.manager.modules["model.layers.0.self_attn.qkv_proj"].lora_backends_layers[0].weights
    )
    assert torch.equal(layer.output_scales[slot], layer.output_scales[twin])
    assert torch.equal(layer.output_scales[other], layer.output_scales[twin])
    assert torch.allclose(layer.b_of(0)[other], 0.5 * layer.b_of(0)[twin])


def test_a_module_that_the_model_does_not_call_is_refused(engine, adapters, monkeypatch):
    from vllm.lora.request import LoRARequest

    layer = engine.manager.modules["model.layers.1.mlp.down_proj"].lora_backends_layers[0]
    assert layer.is_called
    monkeypatch.setattr(layer, "is_called", False)
    with pytest.raises(Exception, match="layers.1.mlp.down_proj: the model holds its weight"):
        engine.llm.llm_engine.add_lora(LoRARequest("twin", 92, str(adapters["all"])))


def test_the_model_has_run_before_any_adapter_is_loaded(make_engine):
    engine = make_engine(max_loras=1)
    assert engine.wrapper.was_run
    layers = [module.lora_backends_layers[0] for module in engine.manager.modules.values()]
    assert sum(layer.is_called for layer in layers) >= 4 * LAYERS


def test_targets_of_plain_adapters_stay_vllms(engine):
    from lora_backends.integrations.vllm.adapters.load import needs_our_reader

    plain = {"r": 8, "lora_alpha": 16, "target_modules": LINEAR, "init_lora_weights": True}
    assert not needs_our_reader(plain)
    assert not needs_our_reader({**plain, "init_lora_weights": "gaussian", "bias": "none"})
    assert all(needs_our_reader({**plain, **KINDS[name]}) for name in KINDS)
    assert not needs_our_reader({**plain, "peft_type": "LORA", "revision": "main"})
    assert needs_our_reader({**plain, "use_a_kind_of_tomorrow": True})
    assert needs_our_reader({**plain, "peft_type": "ADALORA"})
