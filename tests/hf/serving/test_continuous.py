"""Requests that join and leave a batch: every one is answered as when it runs alone."""

import dataclasses
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import transformers
from helpers.adapters.deltas import random_checkpoint
from helpers.continuous import (
    TARGETS,
    begun,
    keeps_sdpa,
    needs_pause,
    prompts,
    settings,
    soon,
)
from transformers.generation.continuous_batching import ContinuousBatchingManager, continuous_api

from lora_backends import InvalidInputError, LoRABatch, UnsupportedInputError
from lora_backends.errors import RequestFailedError
from lora_backends.hf import MultiLoRAModel
from lora_backends.hf.calls.packed import RequestsCall

NEW = 6


@pytest.fixture
def model(request, make_base):
    base = make_base("llama")
    base.generation_config = transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    model = MultiLoRAModel(
        base, "torch_ref", max_adapters=3, max_rank=4, fuse=getattr(request, "param", False)
    )
    for seed, name in enumerate("ab"):
        model.add_adapter(name, random_checkpoint(base, TARGETS, seed=seed))
    return model


def alone(model, ids, adapter, new=NEW):
    ids = torch.tensor([ids])
    tokens = model.generate(adapters=[adapter], input_ids=ids, max_new_tokens=new)
    return tokens[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("model", [False, True], ids=["hooks", "fused"], indirect=True)
def test_every_request_is_answered_as_when_it_runs_alone(model):
    # 7 tokens a batch: prompts are split, and decode steps of some lie beside prompts of others
    entries = [None, "a", "b", {"a": 0.7, "b": 0.3}, "a", "b", None, "a", {"b": 0.5}]
    inputs = prompts(len(entries))
    outputs = model.generate_batch(inputs, adapters=entries, continuous_batching_config=settings())
    answers = [output.generated_tokens for output in outputs.values()]
    assert answers == [alone(model, *pair) for pair in zip(inputs, entries, strict=True)]
    assert answers[1] != alone(model, inputs[1], None)


def test_equal_prompts_with_other_adapters_share_no_cache(model):
    ids = list(range(1, 20))  # two full pages
    config = settings(allow_block_sharing=True, max_batch_tokens=32)
    with model.continuous_batching(continuous_batching_config=config) as requests:
        answers = []
        for adapter in ("a", "b", None):  # one after the other: the cache of the first is complete
            name = requests.add_request(ids, adapter=adapter)
            answers.append(requests.collect([name])[name].generated_tokens)
    assert answers == [alone(model, ids, adapter) for adapter in ("a", "b", None)]
    assert answers[0] != answers[1]


@keeps_sdpa
def test_a_pass_of_another_thread_does_not_hide_what_modules_see(model):
    threads = []

    def serve(*_):
        if not threads:
            call = {"adapters": ["a"], "input_ids": torch.arange(1, 9)[None]}
            threads.append(threading.Thread(target=model, kwargs=call))
            threads[0].start()
            threads[0].join()

    model.base.register_forward_pre_hook(serve)
    with model.continuous_batching(continuous_batching_config=settings()) as requests:
        name = requests.add_request([1, 2, 3], adapter="a")
        assert requests.collect([name])[name].generated_tokens == alone(model, [1, 2, 3], "a")


def test_a_request_may_join_while_another_runs_and_streams(model):
    first, second = prompts(2, seed=3)
    with model.continuous_batching(continuous_batching_config=settings()) as requests:
        name = requests.add_request(first, adapter="a", max_new_tokens=12, streaming=True)
        steps, joined = [], None
        for output in requests.request_id_iter(name):
            steps.append(list(output.generated_tokens))
            if joined is None:
                joined = requests.add_request(second, "mine", 3, adapter="b")
        late = requests.collect([joined])[joined]
    assert steps[-1] == alone(model, first, "a", 12)
    assert [len(tokens) for tokens in steps] == list(range(1, 13))
    assert late.generated_tokens == alone(model, second, "b", 3)


def test_outputs_of_other_requests_stay_where_they_are(model):
    with model.continuous_batching(continuous_batching_config=settings()) as requests:
        first, second = (requests.add_request([1, 2], adapter=a, streaming=True) for a in "ab")
        last = requests.add_request([3, 4], adapter="a", max_new_tokens=20)
        soon(requests.collect, [last])
        outputs = [soon(list, requests.request_id_iter(name)) for name in (first, second)]
    for found, adapter in zip(outputs, "ab", strict=True):
        steps = [output.generated_tokens for output in found]
        assert [len(tokens) for tokens in steps] == list(range(1, NEW + 1))
        assert steps[-1] == alone(model, [1, 2], adapter)


def test_an_output_that_will_not_come_is_not_waited_for(model):
    with model.continuous_batching(continuous_batching_config=settings()) as requests:
        taken = requests.add_request([1, 2], adapter="a")
        requests.collect([taken])
        cancelled = requests.add_request([1, 2], adapter="a", max_new_tokens=150)
        requests.cancel_request(cancelled)
        for name in (taken, cancelled, "unknown"):
            with pytest.raises(InvalidInputError, match=f"{name!r} has no output to come"):
                soon(requests.collect, [name])
    with pytest.raises(RuntimeError, match="no thread runs the requests"):
        soon(requests.collect, [taken])


def test_a_request_without_a_limit_ends_where_the_cache_does(model):
    model.base.generation_config.max_new_tokens = None
    config = settings(num_blocks=4)
    with model.continuous_batching(continuous_batching_config=config) as requests:
        names = [requests.add_request([1, 2, 3], adapter=own) for own in "ab"]
        names.append(requests.add_request([4, 5], adapter="b", max_new_tokens=3))
        answers = [output.generated_tokens for output in requests.collect(names).values()]
        with pytest.raises(InvalidInputError, match="needs 33 tokens, the cache holds 32"):
            requests.add_request([1] * 32)
    assert answers[0] == alone(model, [1, 2, 3], "a", 4 * 8 - 3)
    assert answers[1] == alone(model, [1, 2, 3], "b", 4 * 8 - 3)
    assert answers[2] == alone(model, [4, 5], "b", 3)


@pytest.mark.parametrize("name", [None, "unknown"])
def test_waiting_for_an_output_ends_with_the_manager(model, name):
    with model.continuous_batching(continuous_batching_config=settings()) as requests:
        waits = begun(requests.get_result, name)
        while not requests.output_router.output_queue.not_empty._waiters:
            time.sleep(0.001)
        requests.stop()
        assert waits.result(timeout=30) is None


def test_an_id_that_was_cancelled_too_late_may_be_used_again(model, monkeypatch):
    with model.continuous_batching(continuous_batching_config=settings()) as requests:
        requests.collect([requests.add_request([1, 2], "mine", adapter="a")])
        requests.cancel_request("mine")
        while not requests.cancel_queue.empty():
            time.sleep(0.001)
        put = requests.input_queue.put

        def put_after_a_step(*args, **options):
            monkeypatch.setattr(requests.input_queue, "put", put)
            requests.collect([requests.add_request([3, 4], adapter="a")])
            put(*args, **options)

        monkeypatch.setattr(requests.input_queue, "put", put_after_a_step)
        requests.add_request([1, 2], "mine", 150, adapter="b")
        answer = soon(requests.collect, ["mine"])["mine"].generated_tokens
    assert answer == alone(model, [1, 2], "b", 150)


def freed(requests):
    while requests._held:
        time.sleep(0.001)


def test_cancelled_requests_free_adapters_and_outputs_while_nothing_runs(model):
    requests = model.continuous_batching(continuous_batching_config=settings())
    names = [requests.add_request([1, 2], None, 150, adapter=n, streaming=True) for n in "ab"]
    with requests:
        for name in names:
            soon(next, requests.request_id_iter(name))
        for name in names:
            requests.cancel_request(name)
        soon(freed, requests)
        model.unload_adapter("a")
        assert not requests.output_router.output_queue.queue
        assert not requests._cancelled


def test_a_cancel_of_a_request_that_is_still_being_added_hurts_no_other(model, monkeypatch):
    with model.continuous_batching(continuous_batching_config=settings()) as requests:
        put = requests.input_queue.put

        def put_after_a_step(*args, **options):
            monkeypatch.setattr(requests.input_queue, "put", put)
            requests.cancel_request("mine")
            requests.collect([requests.add_request([3, 4], adapter="a")])
            put(*args, **options)

        monkeypatch.setattr(requests.input_queue, "put", put_after_a_step)
        requests.add_request([1, 2], "mine", adapter="b")
        name = requests.add_request([1, 2], adapter="b")
        answer = soon(requests.collect, [name])[name].generated_tokens
        soon(freed, requests)
    assert answer == alone(model, [1, 2], "b")


def test_a_request_holds_its_adapter_until_it_has_ended(model, make_base):
    requests = model.continuous_batching(continuous_batching_config=settings())
    name = requests.add_request([1, 2], adapter="a")
    with pytest.raises(InvalidInputError, match="in use by a request"):
        model.unload_adapter("a")
    with requests:
        requests.collect([name])
        model.unload_adapter("a")
        cancelled = requests.add_request([1, 2], adapter="b", max_new_tokens=150)
        requests.cancel_request(cancelled)
    model.unload_adapter("b")


def test_a_running_request_is_not_detached(model):
    refused = []

    def detach(*_):
        with pytest.raises(InvalidInputError, match="while it runs with adapters"):
            model.detach()
        refused.append(True)

    with model.continuous_batching(continuous_batching_config=settings()) as requests:
        handle = model.base.model.layers[0].register_forward_pre_hook(detach)
        name = requests.add_request([1, 2, 3], adapter="a")
        answer = requests.collect([name])[name].generated_tokens
        handle.remove()
    assert len(refused) == NEW
    assert answer == alone(model, [1, 2, 3], "a")
    model.detach()


def test_several_sequences_of_a_prompt_use_its_adapter(model):
    config = transformers.GenerationConfig(  # as good as greedy, which has one sequence alone
        max_new_tokens=4, do_sample=True, temperature=1e-5, eos_token_id=-1, num_return_sequences=2
    )
    outputs = model.generate_batch(
        [[3, 4, 5], [6]],
        adapters=["a", "b"],
        generation_config=config,
        continuous_batching_config=settings(),
    )
    answers = [output.generated_tokens for output in outputs.values()]
    expected = [alone(model, [3, 4, 5], "a", 4), alone(model, [6], "b", 4)]
    assert answers == [expected[0], expected[0], expected[1], expected[1]]
    model.unload_adapter("a")  # nothing holds it any more


@keeps_sdpa
def test_a_pass_of_requests_leaves_the_configuration_to_other_threads(model):
    seen = []

    def note(module, args):
        seen.append(dict(vars(model.base.config)))

    before = dict(vars(model.base.config))
    with model.continuous_batching(continuous_batching_config=settings()) as requests:
        handle = model.base.model.layers[0].register_forward_pre_hook(note)
        names = requests.add_requests([[3, 4, 5], [6, 7]], adapters=["a", "b"], max_new_tokens=2)
        requests.collect(names)
    handle.remove()
    assert seen and all(config == before for config in seen)


@pytest.mark.parametrize("end", ["failed", "cancelled"])
@pytest.mark.parametrize("others", [[], ["x__child#0"]], ids=["before", "behind"])
def test_a_request_of_two_sequences_that_ends_early_frees_what_no_other_sequence_uses(
    model, end, others
):
    requests = model.continuous_batching(continuous_batching_config=settings())
    requests.num_return_sequences = 2
    batch = SimpleNamespace(requests_in_batch=[])
    scheduler = SimpleNamespace(active_requests=dict.fromkeys(others), waiting_requests={})
    requests.batch_processor = SimpleNamespace(scheduler=scheduler, inputs_and_outputs=batch)

    def ends(name):
        if end == "failed":
            output = SimpleNamespace(request_id=name, is_finished=lambda: True, error="no memory")
            requests.output_router.deliver(output)
        else:
            requests._cancelled.add(name)
            requests._free_cancelled()

    requests._hold("x", "a", [1]).is_coming = False
    ends("x")
    assert model.pool.slots.is_free("a") == (not others)
    if others:
        scheduler.active_requests.clear()
        ends("x__child#0")
    assert model.pool.slots.is_free("a")


def test_a_token_whose_logits_nobody_wants_gives_its_place_to_no_other(model):
    # In a batch of as many tokens as requests, the rows of the head may be others than the tokens.
    with model.continuous_batching(continuous_batching_config=settings()) as requests:
        wrapped, packed = requests._wrapped, requests._packed
    assert packed.of_logits == {"lm_head"}
    slots = {name: model.pool.slots.slot(name) for name in "ab"}
    batch = [("a", slots, 1), ("b", slots, 1)]  # the prompt of "a" goes on in the next batch
    call = RequestsCall(wrapped, packed, lambda: batch)
    call.begin_forward({"logits_to_keep": torch.tensor([1, 0])}, 1, 2)
    layout, x = wrapped.layouts["lm_head"], torch.randn(2, 16)
    for path, order in (("lm_head", "ba"), ("model.layers.0.self_attn.q_proj", "ab")):
        plan = call.plan((1, 2), layout, [path])
        expected = model.backend.prepare_batch(LoRABatch([slots[name] for name in order], 3))
        weights = model.pool.weights(path)
        results = [model.backend.run_linear(x, weights, each) for each in (plan, expected)]
        assert torch.equal(*results)


@keeps_sdpa
def test_another_thread_may_call_the_model_meanwhile(model):
    ids = torch.tensor([[5, 6, 7]])
    expected = model(adapters=["b"], input_ids=ids).logits
    with model.continuous_batching(continuous_batching_config=settings()) as requests:
        names = requests.add_requests(prompts(6), adapters=["a"] * 6)
        results = []
        thread = threading.Thread(
            target=lambda: results.append(model(adapters=["b"], input_ids=ids).logits)
        )
        thread.start()
        thread.join()
        requests.collect(names)
    assert torch.equal(results[0], expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_cuda_graph": True}, "use_cuda_graph"),
        ({"use_cuda_graph": (False, True)}, "use_cuda_graph"),  # of decode steps alone
        ({"use_async_batching": True}, "use_async_batching"),
        ({"default_compile_level": 1}, "compile"),
    ],
)
def test_what_the_hooks_cannot_follow_is_refused_by_name(model, changes, message):
    with pytest.raises(UnsupportedInputError, match=message):
        model.continuous_batching(continuous_batching_config=settings(**changes))


def test_a_model_with_an_attention_of_its_own_is_refused():
    """Transformers warns, and lets each token attend to all that are in the batch."""
    sizes = {"vocab_size": 40, "hidden_size": 16, "n_layer": 1, "n_head": 2}
    base = transformers.BloomForCausalLM(transformers.BloomConfig(**sizes)).eval()
    with pytest.raises(UnsupportedInputError, match="BloomForCausalLM has an attention of its own"):
        MultiLoRAModel(base, "torch_ref").continuous_batching(continuous_batching_config=settings())


@keeps_sdpa
def test_a_class_whose_source_cannot_be_read_is_taken(model):
    """As of a notebook: Transformers then says that its attention cannot be set."""
    base = model.detach()
    base.__class__ = type("OfANotebook", (type(base),), {"__module__": "__main__"})
    base._can_set_attn_implementation = lambda: False
    model = MultiLoRAModel(base, "torch_ref", max_rank=4)
    with model.continuous_batching(continuous_batching_config=settings()) as requests:
        found = requests.collect(requests.add_requests(prompts(3), adapters=[None] * 3))
    for prompt, output in zip(prompts(3), found.values(), strict=True):
        ids = base.generate(torch.tensor([prompt]))[0, len(prompt) :]
        assert output.generated_tokens == ids.tolist()


def test_another_failure_of_the_first_pass_keeps_its_name(model):
    """NotImplementedError is a RuntimeError, and so is a lack of memory."""

    def refuse(*_):
        raise UnsupportedInputError("a refusal of a hook")

    requests = model.continuous_batching(continuous_batching_config=settings())
    model.base.model.embed_tokens.register_forward_pre_hook(refuse)
    with requests, pytest.raises(RuntimeError, match="a refusal of a hook"):
        requests.collect(requests.add_requests(prompts(3), adapters=["a", None, "b"]))


@pytest.mark.parametrize("mask", [True, False, None])
def test_a_model_that_leaves_the_cache_alone_is_refused(model, mask):
    """As StableLM does; masks fail by their sizes. OPT asks the cache for methods that it lacks."""

    def forget(module, args, kwargs):
        if mask is None and kwargs.get("cache") is not None:
            kwargs["cache"].method_of_another_cache()
        kept = {name: value for name, value in kwargs.items() if name != "cache"}
        return args, kept if mask else {**kept, "attention_mask": None}

    for layer in model.base.model.layers:
        layer.self_attn.register_forward_pre_hook(forget, with_kwargs=True)
    with (
        model.continuous_batching(continuous_batching_config=settings()) as requests,
        pytest.raises(RuntimeError, match="LlamaForCausalLM has an attention of its own"),
    ):
        requests.collect(requests.add_requests(prompts(3), adapters=["a", None, "b"]))


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        ("`paged|sdpa` was called without a paged attention cache.", "has an attention of its own"),
        ("`sdpa` attention does not support `softcap`.", "failed: ValueError: `sdpa` attention"),
    ],
)
def test_only_a_value_error_about_the_cache_is_taken_for_an_attention_without_pages(
    model, cause, message
):
    """Both messages are those of Transformers' attention functions."""
    code = "def refuse(module, args, kwargs):\n    if kwargs.get('cache') is not None:\n"
    name = "transformers.integrations.sdpa_attention"
    exec(code + f"        raise ValueError({cause!r})", found := {"__name__": name})
    attention = model.base.model.layers[0].self_attn
    attention.register_forward_pre_hook(found["refuse"], with_kwargs=True)
    with (
        model.continuous_batching(continuous_batching_config=settings()) as requests,
        pytest.raises(RuntimeError) as raised,
    ):
        requests.collect(requests.add_requests(prompts(3), adapters=["a", None, "b"]))
    assert raised.match(message)


def test_a_transformers_without_continuous_batching_is_named(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "lora_backends.hf.generating.continuous", None)
    with pytest.raises(UnsupportedInputError, match="this version of Transformers"):
        model.continuous_batching()


def test_a_transformers_whose_requests_all_fail_together_is_named(model, monkeypatch):
    monkeypatch.delattr(continuous_api.OutputRouter, "fail_and_deliver")
    for name in ("continuous", "outputs"):
        monkeypatch.delitem(sys.modules, f"lora_backends.hf.generating.{name}", raising=False)
    with pytest.raises(UnsupportedInputError, match="this version .*fail_and_deliver"):
        model.continuous_batching()


def test_a_transformers_without_a_pause_is_named(model, monkeypatch):
    monkeypatch.delattr(ContinuousBatchingManager, "pause", raising=False)
    requests = model.continuous_batching(continuous_batching_config=settings())
    with pytest.raises(UnsupportedInputError, match="cannot pause .*\n.*transformers>=5.18"):
        requests.pause().__enter__()


def test_a_pass_that_fails_ends_only_the_request_that_fails_alone(model):
    """One request's tokens fail; those beside it run on, split prompts and streams among them."""

    def fail(module, args):
        if (args[0] == 39).any():
            raise RuntimeError("a token that fails")

    asked = [([1, 2, 3], "a"), ([4, 39], "b"), ([5] * 11, "b"), ([6], None)]
    model.base.model.embed_tokens.register_forward_pre_hook(fail)
    requests = model.continuous_batching(continuous_batching_config=settings())
    # Added first, so that they share passes.
    names = [requests.add_request(ids, adapter=own) for ids, own in asked]
    with requests:
        with pytest.raises(RequestFailedError, match="RuntimeError: a token that fails"):
            soon(requests.collect, [names.pop(1)])
        del asked[1]
        found = soon(requests.collect, names)
        later = requests.add_request([1, 2], adapter="a")
        answer = soon(requests.collect, [later])[later].generated_tokens
    assert [each.generated_tokens for each in found.values()] == [
        alone(model, *pair) for pair in asked
    ]
    assert answer == alone(model, [1, 2], "a")


def test_a_pass_that_fails_repeats_what_copies_its_cache(model):
    """Two sequences of a prompt, as good as greedy, whose first pass fails once."""
    failures = ["once"]

    def fail(*_):
        if failures:
            raise RuntimeError(failures.pop())

    config = transformers.GenerationConfig(
        max_new_tokens=4, do_sample=True, temperature=1e-5, eos_token_id=-1, num_return_sequences=2
    )
    requests = model.continuous_batching(config, settings())
    model.base.model.layers[0].register_forward_pre_hook(fail)
    names = requests.add_requests([[3, 4, 5], [6]], adapters=["a", "b"])
    with requests:
        found = soon(requests.collect, names)
    expected = [alone(model, [3, 4, 5], "a", 4), alone(model, [6], "b", 4)]
    answers = [output.generated_tokens for output in found.values()]
    assert answers == [expected[0]] * 2 + [expected[1]] * 2


def test_several_sequences_of_one_token_alone_in_their_pass(model):
    config = transformers.GenerationConfig(
        max_new_tokens=4, do_sample=True, temperature=1e-5, eos_token_id=-1, num_return_sequences=2
    )
    words = {"generation_config": config, "continuous_batching_config": settings()}
    found = soon(lambda: model.generate_batch([[6]], adapters=["b"], **words))
    answers = [output.generated_tokens for output in found.values()]
    assert answers == [alone(model, [6], "b", 4)] * 2


def test_a_stream_of_a_cancelled_request_ends(model):
    with model.continuous_batching(continuous_batching_config=settings()) as requests:
        name = requests.add_request([1, 2], None, 150, adapter="a")
        requests.cancel_request(name)
        with pytest.raises(InvalidInputError, match="has no output to come"):
            soon(list, requests.request_id_iter(name))


def test_requests_that_transformers_drops_when_it_stops_end_with_an_error(model, monkeypatch):
    """A hard stop drops what the loop has taken from the queue in that step."""
    requests = model.continuous_batching(continuous_batching_config=settings())
    drained = threading.Event()
    drain = continuous_api.drain_queue

    def draining(queue):
        taken = drain(queue)
        if taken and not drained.is_set():
            drained.set()
            requests.background_thread_status.request_stop(2, 0)
        return taken

    monkeypatch.setattr(continuous_api, "drain_queue", draining)
    with requests:
        name = requests.add_request([1, 2], adapter="a")
        assert drained.wait(30)
        with pytest.raises(RequestFailedError, match="the manager has stopped"):
            soon(requests.collect, [name])
    model.unload_adapter("a")


def test_a_request_that_comes_after_the_end_of_the_thread_is_refused(model, monkeypatch):
    """Transformers looks at its thread first, and puts the request into the queue later."""
    requests = model.continuous_batching(continuous_batching_config=settings())
    requests.start()
    put = requests.input_queue.put

    def put_late(*args, **options):
        requests.stop()
        put(*args, **options)

    monkeypatch.setattr(requests.input_queue, "put", put_late)
    with pytest.raises(InvalidInputError, match="comes too late"):
        requests.add_request([1, 2], adapter="a")
    model.unload_adapter("a")
    assert requests.input_queue.empty()


@needs_pause
def test_a_cancel_that_came_too_late_does_not_end_the_next_request_of_its_id(model, monkeypatch):
    with model.continuous_batching(continuous_batching_config=settings()) as requests:
        requests.collect([requests.add_request([1, 2], "mine", adapter="a")])
        with requests.pause():
            requests.cancel_request("mine")
            requests.add_request([1, 2], "mine", adapter="b")
        answer = soon(requests.collect, ["mine"])["mine"].generated_tokens
    assert answer == alone(model, [1, 2], "b")


def test_an_answer_that_came_with_the_end_of_the_thread_is_found(model, monkeypatch):
    requests = model.continuous_batching(continuous_batching_config=settings())
    requests.start()
    name = requests.add_request([1, 2], adapter="a")
    take = requests.output_router.take

    def take_late(*args):
        monkeypatch.setattr(requests.output_router, "take", take)
        requests.stop()  # its last output comes now

    monkeypatch.setattr(requests.output_router, "take", take_late)
    assert requests.collect([name])[name].generated_tokens == alone(model, [1, 2], "a")


@pytest.mark.parametrize("tokens", [4, 32])
def test_an_alora_acts_from_its_own_invocation_on(model, tokens):
    """In prompts that are split, or not; the last place counts, and without one nothing acts."""
    checkpoint = random_checkpoint(model.base, TARGETS, seed=5)
    own = dataclasses.replace(checkpoint.own, invocation=(7, 8), task_type="CAUSAL_LM")
    model.add_adapter("c", dataclasses.replace(checkpoint, own=own))
    inputs = [
        [7, 8, 1, 2, 3],
        [1, 2, 3, 4, 5, 6, 7, 8],
        [7, 8, 1, 2, 3, 7, 8, 9, 10],
        [1, 2, 3, 7],
        [8, 7],
        [7, 8],
    ]
    entries = ["c", "c", {"c": 1.0}, "c", "a", "c"]
    config = settings(max_batch_tokens=tokens)
    requests = model.continuous_batching(continuous_batching_config=config)
    names = requests.add_requests(inputs, adapters=entries)  # first: they share passes
    with pytest.raises(UnsupportedInputError, match="part of a blend"):
        requests.add_request([7, 8], adapter={"c": 0.5, "a": 0.5})
    with requests:
        found = soon(requests.collect, names)
    answers = [output.generated_tokens for output in found.values()]
    assert answers == [alone(model, *pair) for pair in zip(inputs, entries, strict=True)]
    assert answers[3] == alone(model, inputs[3], None)
    assert answers[1] != alone(model, inputs[1], None)


WRONG = {
    "input_ids is": {"input_ids": []},
    "input_ids is None": {"input_ids": None},
    "less than 40": {"input_ids": [40]},
    "no adapter named 'c'": {"input_ids": [1], "adapter": "c"},
    "max_new_tokens is 0": {"input_ids": [1], "max_new_tokens": 0},
    "the cache holds 192": {"input_ids": [1], "max_new_tokens": 1000},
    "an entry per token": {"input_ids": [1], "adapter": ["a"]},
}


def test_a_wrong_request_is_refused_and_hurts_no_other(model):
    with model.continuous_batching(continuous_batching_config=settings()) as requests:
        name = requests.add_request([1, 2, 3], adapter="a")
        for message, arguments in WRONG.items():
            with pytest.raises((InvalidInputError, UnsupportedInputError), match=message):
                requests.add_request(**arguments)
        with pytest.raises(InvalidInputError, match="adapters is 3 for 1 prompts"):
            requests.add_requests([[1]], adapters=3)
        answer = requests.collect([name])[name].generated_tokens
    assert answer == alone(model, [1, 2, 3], "a")
    with pytest.raises(InvalidInputError, match="has stopped"):
        requests.add_request([1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_requests_on_a_gpu_use_adapters_that_were_just_loaded(make_base):
    base = make_base("llama").cuda()
    base.generation_config = transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    model = MultiLoRAModel(base, max_adapters=1, max_rank=4)
    checkpoints = [random_checkpoint(make_base("llama"), TARGETS, seed=seed) for seed in range(8)]
    answers = []
    with model.continuous_batching(continuous_batching_config=settings()) as requests:
        for checkpoint in checkpoints:
            model.add_adapter("a", checkpoint)  # on another stream than the manager's
            name = requests.add_request([3, 4, 5], adapter="a")
            answers.append(requests.collect([name])[name].generated_tokens)
    ids = torch.tensor([[3, 4, 5]]).cuda()
    for checkpoint, answer in zip(checkpoints, answers, strict=True):
        model.add_adapter("a", checkpoint)
        tokens = model.generate(adapters=["a"], input_ids=ids, max_new_tokens=NEW)
        assert answer == tokens[0, 3:].tolist()
