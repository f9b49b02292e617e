"""A real engine of SGLang answers each row as PEFT does with that row's adapter alone."""

import json
import shutil

import pytest
import torch
from helpers.adapters.peft_models import PROMPTS, greedy_tokens, save_adapter
from helpers.servers.sglang_engines import ADAPTERS, MOE_TARGETS, merge

ROWS = [None, "all", "small", "qv", "gate", "ends", "rs", "layer"]


@pytest.fixture(scope="module")
def engine(make_engine, adapters):
    # four slots for seven adapters and base rows; prompts of 40 tokens in chunks of 24
    early = {name: folder for name, folder in adapters.items() if name != "layer"}
    engine = make_engine(adapters=early, chunked_prefill_size=24)
    assert engine.load("layer", adapters["layer"]).success
    return engine


def check(engine, of_peft, prompts, names, length=6):
    found = engine.tokens(prompts, names, length)
    pairs = zip(prompts, names, strict=True)
    assert found == [of_peft.tokens(prompt, name, length) for prompt, name in pairs]
    return found


def test_rows_of_mixed_ranks_are_pefts_and_base_rows_stay(engine, of_peft):
    check(engine, of_peft, PROMPTS, ROWS)
    same = check(engine, of_peft, [PROMPTS[0]] * 4, [None, "all", "small", "ends"])
    assert len({tuple(tokens) for tokens in same}) == 4, "the adapters do nothing"


def test_slots_are_reloaded_with_larger_and_smaller_ranks(engine, of_peft):
    for names in (["all", "ends", "layer"], ["small", "gate", "rs"], ["qv", "all", "small"]):
        check(engine, of_peft, PROMPTS[:3], names, length=3)


def test_prompt_logprobs_are_pefts_with_adapters_on_embedding_and_head(engine, of_peft):
    names = ["ends", "all", None, "ends"]
    answers = engine.answers(PROMPTS[:4], names, length=2, return_logprob=True, logprob_start_len=0)
    for prompt, name, answer in zip(PROMPTS, names, answers, strict=False):
        with torch.no_grad():
            wanted = of_peft.model(name)(torch.tensor([prompt])).logits[0].log_softmax(-1)
        found = answer["meta_info"]["input_token_logprobs"]
        assert [token for _, token, *_ in found] == prompt
        for position, (logprob, token, *_) in enumerate(found[1:]):
            assert abs(logprob - wanted[position, token].item()) < 1e-3


def test_cached_prefixes_belong_to_one_adapter(engine, of_peft):
    for name in ("all", None, "small", "all", None):
        check(engine, of_peft, [PROMPTS[3]], [name])


def test_adapters_are_loaded_and_unloaded_while_others_are_served(
    engine, of_peft, adapters, tmp_path
):
    copy = shutil.copytree(adapters["rs"], tmp_path / "late")
    served, late = engine.together(
        engine.later_tokens(PROMPTS[:3], ["all", None, "ends"], 40),
        engine.load_and_ask("late", copy, PROMPTS[4:6], 6),
    )
    pairs = zip(PROMPTS, ["all", None, "ends"], strict=False)
    assert served == [of_peft.tokens(prompt, name, 40) for prompt, name in pairs]
    assert late == [of_peft.tokens(prompt, "rs", 6) for prompt in PROMPTS[4:6]]
    check(engine, of_peft, PROMPTS[:2], ["all", "small"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
        ({"rank_pattern": {"q_proj": 3}}, "rank_pattern"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_an_adapter_that_is_refused_fails_alone(engine, of_peft, adapters, tmp_path, change, named):
    copy = shutil.copytree(adapters["all"], tmp_path / "refused")
    config = copy / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    loaded = engine.load("refused", copy)
    assert not loaded.success and named in loaded.error_message
    check(engine, of_peft, PROMPTS[:2], ["all", None], length=2)


def test_adapters_from_memory_are_those_of_files_and_are_checked_as_they_are(
    engine, of_peft, adapters
):
    from safetensors.torch import load_file

    tensors = load_file(adapters["all"] / "adapter_model.safetensors")
    config = json.loads((adapters["all"] / "adapter_config.json").read_text())
    wider = {name: torch.cat([each, each]) for name, each in tensors.items()}
    for named, change, weights in (
        ("use_dora", {"use_dora": True}, tensors),
        ("rank_pattern", {"rank_pattern": {"q_proj": 3}}, tensors),
        ("its shape is", {}, wider),
    ):
        loaded = engine.load_from_memory("refused", weights, config | change)
        assert not loaded.success and named in loaded.error_message
    assert engine.load_from_memory("memory", tensors, config).success
    for each in tensors.values():
        each.zero_()  # a trainer goes on before the first request
    found = engine.tokens(PROMPTS[:3], ["memory", "small", None])
    pairs = zip(PROMPTS, ["all", "small", None], strict=False)
    assert found == [of_peft.tokens(prompt, name) for prompt, name in pairs]
    assert engine.unload("memory").success


def test_projections_that_sglang_cannot_fuse_are_refused_by_name(engine, tiny, tmp_path):
    for name, targets in (("q", ["q_proj"]), ("kv", ["k_proj", "v_proj"]), ("up", ["up_proj"])):
        config = dict(r=2, lora_alpha=4, target_modules=targets)
        loaded = engine.load(name, save_adapter(tmp_path / name, tiny, 1, **config))
        assert not loaded.success and targets[0] in loaded.error_message


@pytest.mark.parametrize("backend", ["torch_ref"])
def test_a_backend_is_chosen_by_name_and_adapters_load_beside_others(
    make_engine, of_peft, adapters, backend
):
    some = {name: adapters[name] for name in ("all", "small", "qv", "ends", "rs")}
    engine = make_engine(
        backend, adapters=some, enable_lora_overlap_loading=True, max_loaded_loras=8
    )
    names = [None, "all", "small", "qv", "ends", "rs", "all", None]
    check(engine, of_peft, PROMPTS, names)
    check(engine, of_peft, PROMPTS[:5], ["rs", "ends", "small", "qv", "all"], length=2)


def test_experts_have_adapters(make_engine, moe):
    import transformers

    folder, adapters = moe
    engine = make_engine(model=folder, adapters=adapters, targets=MOE_TARGETS)
    names = [None, "four", "two", "four"]
    found = engine.tokens(PROMPTS[:4], names)
    for prompt, name, tokens in zip(PROMPTS, names, found, strict=False):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if name is not None:
            merge(model, adapters[name])
        assert tokens == greedy_tokens(model.eval(), prompt, 6)


def test_layers_are_sharded_over_two_processes(make_engine, of_peft, adapters, monkeypatch):
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")  # the core of each process
    some = {name: adapters[name] for name in ("all", "small", "ends")}
    engine = make_engine(adapters=some, tp_size=2)
    check(engine, of_peft, PROMPTS[:4], ["all", None, "ends", "small"])


def test_smollm2_answers_with_mixed_ranks_as_peft_does(make_engine, smollm2, tmp_path):
    import peft
    import transformers

    configs = {name: ADAPTERS[name] for name in ("all", "small", "qv")}
    adapters = {
        name: save_adapter(tmp_path / name, smollm2, seed, **config)
        for seed, (name, config) in enumerate(configs.items())
    }
    engine = make_engine(model=smollm2, adapters=adapters)
    names = [None, "all", "small", "qv", "all", None]
    prompts = [[token + 900 for token in prompt] for prompt in PROMPTS[:6]]
    found = engine.answers(prompts, names, length=1, return_logprob=True, top_logprobs_num=5)
    for prompt, name, answer in zip(prompts, names, found, strict=True):
        model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
        if name is not None:
            model = peft.PeftModel.from_pretrained(model, adapters[name])
        with torch.no_grad():
            wanted = model.eval()(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        assert answer["output_ids"] == [wanted.argmax().item()]
        (top,) = answer["meta_info"]["output_top_logprobs"]
        for logprob, token, *_ in top:
            assert abs(logprob - wanted[token].item()) < 1e-3
