"""Requests that wait for a slot, handlers that fail, and an eager attention."""

import asyncio
import threading
import time

import pytest
import torch
import transformers
from helpers.adapters.deltas import random_checkpoint
from helpers.continuous import begun, needs_pause, settings, soon
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from lora_backends import InvalidInputError, UnsupportedInputError
from lora_backends.errors import RequestFailedError
from lora_backends.hf import MultiLoRAModel

WORDS = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}


def wrapped(base, names="abcd", slots=2):
    base.generation_config = transformers.GenerationConfig(**WORDS)
    model = MultiLoRAModel(base, "torch_ref", max_adapters=slots, max_rank=4)
    model.keep_adapters()
    for seed, name in enumerate(names):
        model.add_adapter(name, random_checkpoint(base, ["q_proj", "down_proj"], seed=seed))
    return model


@pytest.fixture
def model(make_base):
    return wrapped(make_base("llama"))


def alone(model, ids, adapter, new=4):
    ids = torch.tensor([ids])
    tokens = model.generate(adapters=[adapter], input_ids=ids, max_new_tokens=new)
    return tokens[0, ids.shape[1] :].tolist()


def test_requests_of_more_adapters_than_slots_are_all_answered(model):
    entries = list("abcdcadb") * 2
    outputs = soon(
        lambda: model.generate_batch(
            [[1, 2, 3]] * 16, adapters=entries, continuous_batching_config=settings()
        )
    )
    expected = {name: alone(model, [1, 2, 3], name) for name in "abcd"}
    answers = [output.generated_tokens for output in outputs.values()]
    assert answers == [expected[name] for name in entries]


def waiting(requests, name, adapter):
    """Begin to add a request that finds no slot."""
    added = begun(lambda: requests.add_request([1, 2], name, 4, adapter=adapter))
    while not len(requests._line):
        time.sleep(0.001)
    return added


@needs_pause
def test_a_request_that_waits_may_be_cancelled_and_ends_with_the_manager(model):
    with model.continuous_batching(continuous_batching_config=settings()) as requests:
        with requests.pause():
            for adapter in "ab":
                requests.add_request([1, 2], adapter=adapter, max_new_tokens=150)
            with pytest.raises(InvalidInputError, match="no slot for adapter 'c'"):
                requests.add_request([1, 2], adapter="c")  # here it would wait for itself
            added = waiting(requests, "mine", "c")
            with pytest.raises(InvalidInputError, match="'mine' waits for a slot"):
                requests.add_request([1, 2], "mine")
            requests.cancel_request("mine")
            with pytest.raises(InvalidInputError, match="cancelled while it waited"):
                added.result(timeout=30)
            added = waiting(requests, "late", "c")
        requests.stop(hard_stop=True)
        with pytest.raises(InvalidInputError):
            added.result(timeout=30)


def test_a_blend_of_more_adapters_than_slots_does_not_wait(model):
    with model.continuous_batching(continuous_batching_config=settings()) as requests:
        requests.add_request([1, 2], adapter="a", max_new_tokens=150)
        blend = dict.fromkeys("abc", 0.5)
        with pytest.raises(InvalidInputError, match="no slot"):
            soon(lambda: requests.add_request([1, 2], adapter=blend))
        requests.stop(hard_stop=True)


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_a_request_that_was_put_back_runs_when_the_one_before_it_ends_early(model, end):
    """In a full cache Transformers puts one back, until another has its last token."""

    def end_the_first(*_):
        if ended or not requests.batch_processor.scheduler.block_new_requests:
            return
        ended.append(end)
        if end == "failed":
            raise RuntimeError("once")
        requests.cancel_request(names[0])

    ended, long = [], {"max_new_tokens": 24}
    config = settings(num_blocks=6, max_batch_tokens=32)
    requests = model.continuous_batching(continuous_batching_config=config)
    model.base.model.embed_tokens.register_forward_pre_hook(end_the_first)
    # Added first, so that they share passes.
    names = requests.add_requests([[3] * 16, [4] * 16], adapters=["a", "b"], **long)
    with requests:
        if end == "failed":
            with pytest.raises(RequestFailedError, match="once"):
                soon(requests.collect, names[:1])
        found = soon(requests.collect, names[1:])
    assert ended and found[names[1]].generated_tokens == alone(model, [4] * 16, "b", 24)


def test_a_handler_that_fails_takes_no_output_of_others(model):
    """Callbacks of one pass: one raises, one's loop is closed, two have other loops."""
    answers, reported = {}, []
    closed = asyncio.new_event_loop()

    async def register(requests, name, callback):
        requests.register_result_handler(name, callback)

    def fail(output):
        raise RuntimeError("a callback of one client")

    def keep(output):
        answers[output.request_id] = output.generated_tokens, threading.get_ident()

    expected = alone(model, [1, 2], "a", 3)
    requests = model.continuous_batching(continuous_batching_config=settings())
    closed.run_until_complete(register(requests, "closed", keep))
    closed.close()
    loops = [asyncio.new_event_loop() for _ in range(2)]
    threads = [threading.Thread(target=loop.run_forever) for loop in loops]
    for loop, thread in zip(loops, threads, strict=True):
        loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
        thread.start()
    for name, callback, loop in (
        ("raises", fail, loops[0]),
        ("first", keep, loops[0]),
        ("second", keep, loops[1]),
    ):
        asyncio.run_coroutine_threadsafe(register(requests, name, callback), loop).result()
    for name in ("raises", "closed", "first", "second", "none"):  # all end in one pass
        requests.add_request([1, 2], name, 3, adapter="a")
    with requests:
        queued = soon(requests.collect, ["closed", "none"])
        assert [output.generated_tokens for output in queued.values()] == [expected] * 2
        deadline = time.monotonic() + 30
        while len(answers) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert answers == {
            "first": (expected, threads[0].ident),
            "second": (expected, threads[1].ident),
        }
        assert [str(error) for error in reported] == ["a callback of one client"]
        assert not requests.output_router.result_handlers
        for loop, thread in zip(loops, threads, strict=True):
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


def eager_base(**words):
    torch.manual_seed(3)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8}
    config = transformers.Gemma2Config(
        **sizes, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, **words
    )
    config._attn_implementation = "eager"
    return transformers.Gemma2ForCausalLM(config).eval()


def test_an_eager_attention_is_exchanged_only_while_requests_run():
    message = r"attention 'eager'.*continuous[\s\S]*'sdpa'.*: transformers>=5.19 keeps it"
    base = eager_base(attn_logit_softcapping=None)
    model = wrapped(base, "ab")
    ids = torch.tensor([[1, 2, 3]])
    before = model(adapters=["a"], input_ids=ids).logits
    expected = alone(model, [1, 2, 3], "a")
    first, second = (
        model.continuous_batching(continuous_batching_config=settings()) for _ in range(2)
    )
    assert torch.equal(model(adapters=["a"], input_ids=ids).logits, before)
    with second:
        with first:
            name = first.add_request([1, 2, 3], adapter="a")
            assert soon(first.collect, [name])[name].generated_tokens == expected
        # The first has ended, and the second still needs the cache.
        name = second.add_request([1, 2, 3], adapter="a")
        assert soon(second.collect, [name])[name].generated_tokens == expected
        for call in (
            lambda: model(adapters=["a"], input_ids=ids),
            lambda: model.generate(adapters=["a"], input_ids=ids, max_new_tokens=2),
            lambda: model.continuous_batching(continuous_batching_config=settings()),
        ):
            with pytest.raises(UnsupportedInputError, match=message):
                call()
        with pytest.raises(InvalidInputError, match="cannot be detached while it runs"):
            model.detach()
    assert torch.equal(model(adapters=["a"], input_ids=ids).logits, before)
    model.continuous_batching(continuous_batching_config=settings())  # never started
    assert model.detach().config._attn_implementation == "eager"
    base(input_ids=ids)


def test_an_eager_attention_with_a_cap_is_refused():
    """Transformers' paged attention has no cap, and its tokens would be others."""
    model = wrapped(eager_base(), "a")
    with pytest.raises(UnsupportedInputError, match="softcap is not part of"):
        model.continuous_batching(continuous_batching_config=settings())
    assert model.base.config._attn_implementation == "eager"


@needs_pause
def test_a_thread_in_its_own_pause_does_not_wait_behind_others(model):
    with model.continuous_batching(continuous_batching_config=settings()) as requests:
        with requests.pause():
            for adapter in "ab":
                requests.add_request([1, 2], adapter=adapter, max_new_tokens=150)
            added = waiting(requests, "first", "c")
        with requests.pause(), pytest.raises(InvalidInputError, match="no slot"):
            requests.add_request([1, 2], "mine", adapter="d")
        added.result(timeout=30)


def test_a_thread_that_ends_by_an_error_gives_the_attention_back(monkeypatch):
    model = wrapped(eager_base(attn_logit_softcapping=None), "ab")
    ids = torch.tensor([[1, 2, 3]])
    before = model(adapters=["a"], input_ids=ids).logits

    def fail(*_):
        raise RuntimeError("a schedule fails")

    monkeypatch.setattr(FIFOScheduler, "schedule_batch", fail)
    requests = model.continuous_batching(continuous_batching_config=settings())
    requests.start()
    name = requests.add_request([1, 2], adapter="a")
    with pytest.raises(RuntimeError, match="a schedule fails"):
        soon(requests.collect, [name])
    requests._generation_thread.join()
    assert torch.equal(model(adapters=["a"], input_ids=ids).logits, before)
    requests.stop()
