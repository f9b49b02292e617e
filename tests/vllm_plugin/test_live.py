"""Adapters that change in a real engine, from memory, while requests run."""

import asyncio
import json
from types import SimpleNamespace

import pytest
import torch
from helpers.adapters.peft_models import PROMPTS
from helpers.servers.vllm_engines import live_version

from lora_backends.errors import (
    BackendUnavailableError,
    InvalidInputError,
    LoRABackendError,
    UnsupportedInputError,
)
from lora_backends.integrations.vllm import live
from lora_backends.integrations.vllm.live import messages

LONG = 12


@pytest.fixture(scope="module")
def engine(make_engine):
    return make_engine(max_loras=3, max_cpu_loras=4)


@pytest.fixture
def alice(engine, adapters):
    """Yield a function that updates "alice" to the tensors of an adapter's folder."""

    def update(kind, version, **options):
        live.update(engine.llm, "alice", *live_version(adapters[kind]), version=version, **options)

    yield update
    if "alice" in live.versions(engine.llm):
        live.remove(engine.llm, "alice")


def add(engine, name, prompt, request, length=LONG):
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=length, min_tokens=length, detokenize=False, ignore_eos=True
    )
    prompt = {"prompt_token_ids": prompt}
    engine.llm.llm_engine.add_request(name, prompt, sampling, lora_request=request)


def step(engine, done, times=None):
    """Step the engine, until it has nothing to do without `times`; note the tokens of each end."""
    core = engine.llm.llm_engine
    while core.has_unfinished_requests() and times != 0:
        for out in core.step():
            if out.finished:
                done[out.request_id] = list(out.outputs[0].token_ids)
        times = None if times is None else times - 1
    return done


def tokens(engine, prompt, request, length=6):
    add(engine, "only", prompt, request, length)
    return step(engine, {})["only"]


def test_a_request_ends_under_the_version_that_it_began_under(engine, alice, peft_tokens):
    alice("all", 6)
    done = {}
    add(engine, "old", PROMPTS[0], live.request("alice"))
    add(engine, "base", PROMPTS[0], None)
    step(engine, done, 4)
    alice("small", 7)
    assert live.versions(engine.llm) == {"alice": [6, 7]}
    add(engine, "new", PROMPTS[0], live.request("alice"))
    step(engine, done)
    assert done == {
        "old": peft_tokens(PROMPTS[0], "all", LONG),
        "base": peft_tokens(PROMPTS[0], None, LONG),
        "new": peft_tokens(PROMPTS[0], "small", LONG),
    }


def test_every_request_of_the_name_takes_the_newest_version_or_the_one_it_names(
    engine, alice, adapters, peft_tokens
):
    from vllm.lora.request import LoRARequest

    alice("all", 1)
    alice("small", 2)
    of_a_file = LoRARequest("alice", 3, str(adapters["uneven"]))
    for request in (live.request("alice"), live.request("alice", 2), of_a_file):
        assert tokens(engine, PROMPTS[1], request) == peft_tokens(PROMPTS[1], "small", 6)
    assert tokens(engine, PROMPTS[1], live.request("alice", 1)) == peft_tokens(PROMPTS[1], "all", 6)
    live.rollback(engine.llm, "alice", version=1)
    assert tokens(engine, PROMPTS[1], of_a_file) == peft_tokens(PROMPTS[1], "all", 6)
    assert live.versions(engine.llm) == {"alice": [1, 2]}
    assert engine.llm.llm_engine.add_lora(live.request("alice"))  # as vLLM's server asks


def test_the_prefix_cache_never_mixes_versions(engine, alice, peft_tokens):
    prompt, hits = PROMPTS[3] * 4, engine.metric("vllm:prefix_cache_hits")
    for version, kind in enumerate(["all", "small", "some"]):
        alice(kind, version)
        for _ in range(2):
            assert tokens(engine, prompt, live.request("alice")) == peft_tokens(prompt, kind, 6)
    live.rollback(engine.llm, "alice", version=1)
    assert tokens(engine, prompt, live.request("alice")) == peft_tokens(prompt, "small", 6)
    assert engine.metric("vllm:prefix_cache_hits") > hits
    live.remove(engine.llm, "alice")  # the same number may come back with other tensors
    alice("rs", 1)
    assert tokens(engine, prompt, live.request("alice")) == peft_tokens(prompt, "rs", 6)


def test_versions_that_vllm_evicts_come_back_from_memory(engine, alice, peft_tokens):
    kinds = ["all", "small", "some", "rs", "uneven", "ends"]  # more than max_cpu_loras
    for version, kind in enumerate(kinds):
        alice(kind, version, keep=len(kinds))
    for version, kind in [*enumerate(kinds), (0, "all")]:
        live.rollback(engine.llm, "alice", version=version)
        assert tokens(engine, PROMPTS[2], live.request("alice")) == peft_tokens(PROMPTS[2], kind, 6)


def test_old_versions_leave_once_no_request_uses_them(engine, alice):
    for version in range(3):
        alice("all", version, keep=1)
        if version == 0:
            add(engine, "old", PROMPTS[0], live.request("alice"))
            step(engine, {}, 2)
    assert live.versions(engine.llm) == {"alice": [0, 2]}
    sizes = live.memory(engine.llm)["alice"]
    assert sizes[0] == sizes[2] > 0
    step(engine, {})
    assert live.versions(engine.llm) == {"alice": [2]}
    assert len(store_of(engine).held) == 1
    live.remove(engine.llm, "alice")
    assert live.versions(engine.llm) == {}
    assert not store_of(engine).held


def store_of(engine):
    from lora_backends.integrations.vllm.live.worker import store_of as store

    worker = engine.llm.llm_engine.model_executor.driver_worker.worker
    return store(worker.model_runner.lora_manager)


def without(tensors, part):
    return {key: value for key, value in tensors.items() if part not in key}


def reshaped(tensors, key, width):
    return {k: v[..., :width] if key in k and "lora_A" in k else v for k, v in tensors.items()}


def with_value(tensors, value):
    first, *_ = tensors
    return {**tensors, first: torch.full_like(tensors[first], value)}


Q = "self_attn.q_proj"
INVALID = InvalidInputError
BAD = {
    "a version that exists": (dict(version=1), {}, INVALID, "has a version 1"),
    "no number": (dict(version="new"), {}, INVALID, "are numbers"),
    "nothing kept": (dict(keep=0), {}, INVALID, "at least 1"),
    "no tensors": (dict(tensors={}), {}, INVALID, "dict of tensors"),
    "no configuration": (dict(config=None), {}, INVALID, "configuration"),
    "half of a pair": (lambda t: without(t, f"0.{Q}.lora_A"), {}, INVALID, "lora_A"),
    "no q_proj": (lambda t: without(t, f"1.{Q}"), {}, INVALID, f"layers.1.{Q}"),
    "a shape": (lambda t: reshaped(t, "down_proj", 191), {}, INVALID, "191"),
    "a rank": ({}, dict(r=4), INVALID, "rank 4"),
    "too high a rank": ({}, dict(rank_pattern={"q_proj": 16}), LoRABackendError, "16"),
    "nan": (lambda t: with_value(t, float("nan")), {}, INVALID, "NaN or infinity"),
    "infinity": (lambda t: with_value(t, float("inf")), {}, INVALID, "NaN or infinity"),
    "another method": ({}, dict(peft_type="LOHA"), UnsupportedInputError, "LOHA"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_failing_update_says_why_and_changes_nothing(engine, alice, adapters, peft_tokens, case):
    change, config_change, error, match = BAD[case]
    alice("small", 1)
    tensors, config = live_version(adapters["all"])
    options = {"version": 2, "tensors": tensors, "config": {**config, **config_change}}
    options |= {"tensors": change(tensors)} if callable(change) else change
    before = store_of(engine).held.copy()
    with pytest.raises(error, match=match):
        live.update(engine.llm, "alice", **options)
    assert live.versions(engine.llm) == {"alice": [1]}
    assert store_of(engine).held == before
    assert not store_of(engine).prepared
    assert tokens(engine, PROMPTS[1], live.request("alice")) == peft_tokens(PROMPTS[1], "small", 6)


def test_a_name_that_is_not_there_fails_alone(engine, alice, peft_tokens):
    alice("all", 1)
    for request in (live.request("alicia"), live.request("alice", 9)):
        with pytest.raises(InvalidInputError, match=r"alicia.*did you mean 'alice'|no version 9"):
            add(engine, "lost", PROMPTS[0], request)
        assert not engine.llm.llm_engine.has_unfinished_requests()
    with pytest.raises(InvalidInputError, match="alicia"):
        live.rollback(engine.llm, "alicia", version=1)
    with pytest.raises(InvalidInputError, match="no version 2"):
        live.rollback(engine.llm, "alice", version=2)
    assert tokens(engine, PROMPTS[0], live.request("alice")) == peft_tokens(PROMPTS[0], "all", 6)


def test_a_blend_of_a_live_adapter_is_refused(engine, alice):
    from vllm.lora.request import LoRARequest

    alice("all", 1)
    with pytest.raises(UnsupportedInputError, match="a blend takes no live adapter"):
        add(engine, "blend", PROMPTS[0], LoRARequest("half", 9, "blend:alice*0.5"))


@pytest.mark.parametrize("kind", ["dora", "bias", "alora", "pissa", "tokens", "ranks"])
def test_every_kind_may_be_live(engine, alice, peft_tokens, kind):
    prompt = [*PROMPTS[4], 200, 201, *PROMPTS[5]]  # with an invocation
    alice("all", 1)
    assert tokens(engine, prompt, live.request("alice")) == peft_tokens(prompt, "all", 6)
    alice(kind, 2)
    for _ in range(2):  # the second time from cached prefixes
        assert tokens(engine, prompt, live.request("alice")) == peft_tokens(prompt, kind, 6)
    assert tokens(engine, prompt, live.request("alice", 1)) == peft_tokens(prompt, "all", 6)


def test_samples_of_one_request_have_one_version(engine, alice):
    core = engine.llm.llm_engine.engine_core.engine_core
    alice("all", 1)
    add(engine, "first", PROMPTS[0], live.request("alice"))
    (user,) = core.scheduler.requests.values()
    user.request_id, name = "0_parent", user.request_id
    alice("small", 2)
    state = core.lora_backends_live
    assert state.asked_for("alice", "", "1_parent").number == 1
    assert state.asked_for("alice", "", "1_other").number == 2
    user.request_id = name
    step(engine, {})


class Workers:
    """Workers of which the second one fails to prepare."""

    def __init__(self):
        self.asked = []

    def collective_rpc(self, method, args):
        self.asked.append(args[:2])
        bad = {"error": {"type": "UnsupportedInputError", "message": "rank 1 has no room"}}
        return [{"bytes": 5}, bad if args[0] == "prepare" else {}]


def test_no_worker_commits_if_one_fails():
    from lora_backends.integrations.vllm.live import core

    config = SimpleNamespace(
        lora_config=SimpleNamespace(),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )
    fake = SimpleNamespace(model_executor=Workers(), vllm_config=config)
    update = ("update", "alice", 1, 2, "{}", b"")
    answer = core._collective_rpc(None, fake, core.METHOD, args=update)
    assert answer[0]["error"] == {"type": "UnsupportedInputError", "message": "rank 1 has no room"}
    (prepare, id_), dropped = fake.model_executor.asked
    assert (prepare, dropped) == ("prepare", ("drop", [id_]))
    assert not fake.lora_backends_live.held()
    config.parallel_config.data_parallel_size = 2
    answer = core._collective_rpc(None, fake, core.METHOD, args=update)
    assert "data_parallel_size" in answer[0]["error"]["message"]


def test_an_engine_without_the_plug_in_is_refused(make_engine, adapters):
    engine = make_engine(None)
    with pytest.raises(BackendUnavailableError, match="set LORA_BACKENDS_VLLM"):
        live.update(engine.llm, "alice", *live_version(adapters["all"]), version=1)
    with pytest.raises(InvalidInputError, match="AsyncLLM"):
        live.versions(object())


class Awaited:
    """As an AsyncLLM answers."""

    asked = ()

    async def collective_rpc(self, method, args):
        self.asked = (method, *args)
        return [{"versions": {"alice": [1]}, "bytes": {"alice": {"1": 8}}}]


def test_an_engine_that_is_awaited_gives_an_awaitable(engine):
    other = Awaited()
    assert asyncio.run(live.versions(other)) == {"alice": [1]}
    assert asyncio.run(live.memory(other)) == {"alice": {1: 8}}
    asyncio.run(live.update(other, "alice", {"a": torch.ones(1)}, {"r": 1}, version=2))
    method, action, name, version, keep, config, data = other.asked
    assert (method, action, name, version, keep) == (messages.METHOD, "update", "alice", 2, 2)
    assert messages.config_of(config) == {"r": 1}
    assert messages.unpacked(data)["a"].tolist() == [1]


def test_tensors_are_copied(engine, adapters, peft_tokens):
    tensors, config = live_version(adapters["all"])
    live.update(engine.llm, "copied", tensors, config, version=1)
    for tensor in tensors.values():
        tensor.zero_()
    found = tokens(engine, PROMPTS[0], live.request("copied"))
    live.remove(engine.llm, "copied")
    assert found == peft_tokens(PROMPTS[0], "all", 6)


def test_a_configuration_of_peft_is_what_peft_saves(tmp_path):
    import peft

    config = peft.LoraConfig(r=4, target_modules={"q_proj", "v_proj"}, task_type="CAUSAL_LM")
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    sent = messages.config_of(messages.config_text(config))
    assert sorted(sent.pop("target_modules")) == sorted(saved.pop("target_modules"))
    assert {key: sent[key] for key in saved} == saved
