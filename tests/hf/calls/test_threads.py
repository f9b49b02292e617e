"""Adapters belong to the thread that asks for them; no other thread loses them in silence."""

import threading

import pytest
import torch
import transformers
from helpers.adapters.deltas import random_checkpoint

from lora_backends import InvalidInputError
from lora_backends.hf import MultiLoRAModel
from lora_backends.torch_ref import TorchRefBackend

IDS = torch.randint(0, 40, (2, 5), generator=torch.Generator().manual_seed(1))
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


@pytest.fixture(params=[False, True], ids=["hooks", "fused"])
def model(request, make_base):
    base = make_base("llama")
    model = MultiLoRAModel(base, TorchRefBackend(), max_rank=4, fuse=request.param)
    model.add_adapter("a", random_checkpoint(base, TARGETS))
    return model


def in_thread(function):
    """Return the result of `function` in a thread of its own, or its exception."""
    results = []

    @torch.no_grad()
    def run():
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, name="worker")
    thread.start()
    thread.join()
    return results[0]


def run_base(model):
    return model.base(input_ids=IDS).logits


@torch.no_grad()
def plain(make_base):
    return make_base("llama")(input_ids=IDS).logits


def test_a_thread_without_adapters_is_refused_while_a_block_is_open(model, make_base):
    runs = [
        lambda: run_base(model),
        lambda: model.base.model(input_ids=IDS),  # without the hook of the whole model
        lambda: model.base.model.layers[0].mlp(torch.zeros(2, 5, 16)),
    ]
    with model.prepare(["a", None], tokens=5) as step:
        with model.using(step):
            for run in runs:
                refused = in_thread(run)
                assert isinstance(refused, InvalidInputError)
                assert "thread 'worker' runs the base model without adapters" in str(refused)
            adapted = run_base(model)
        assert torch.equal(in_thread(lambda: run_base(model)), plain(make_base))
    assert not torch.equal(adapted[0], plain(make_base)[0])


@pytest.mark.skipif(
    not hasattr(transformers, "ContinuousBatchingConfig"),
    reason="this Transformers has no continuous batching that can be configured",
)
def test_the_thread_of_continuous_batching_is_refused(model):
    config = transformers.GenerationConfig(
        max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    cache = transformers.ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=16)
    with model.prepare(["a"], tokens=3) as step, model.using(step):
        results = model.base.generate_batch([[1, 2, 3]], config, cache, warmup=False)
    assert results and not any(result.generated_tokens for result in results.values())
    assert all("without adapters" in str(result.error) for result in results.values())


def test_a_thread_may_ask_for_base_answers_or_for_adapters_while_a_block_is_open(model, make_base):
    inputs = {"input_ids": IDS, "use_cache": False}
    expected = model(adapters=["a", None], **inputs).logits
    with model.prepare([None, "a"], tokens=5) as step, model.using(step):
        none = in_thread(lambda: model(adapters=[None, None], **inputs).logits)
        assert torch.equal(none, plain(make_base))
        assert torch.equal(
            in_thread(lambda: model(adapters=["a", None], **inputs).logits), expected
        )
        with model.prepare(["a", None], tokens=5) as other:

            def in_a_block_of_its_own():
                with model.using(other):
                    return run_base(model)

            assert torch.equal(in_thread(in_a_block_of_its_own), expected)
        # an idle call inside the block is a call, too
        assert torch.equal(model(adapters=[None, None], **inputs).logits, plain(make_base))


def test_a_thread_runs_the_base_model_while_another_calls_with_adapters(model, make_base):
    """A call computes in its own thread, so another thread's plain call is no part of it."""
    others = []
    handle = model.base.lm_head.register_forward_pre_hook(
        lambda module, args: handle.remove() or others.append(in_thread(lambda: run_base(model)))
    )
    model(adapters=["a", None], input_ids=IDS)
    assert torch.equal(others[0], plain(make_base))


def test_two_open_blocks_are_both_closed(model):
    step = model.prepare(["a", None], tokens=5)
    with model.using(step):
        with model.using(step):
            pass
        assert isinstance(in_thread(lambda: run_base(model)), InvalidInputError)
    assert isinstance(in_thread(lambda: run_base(model)), torch.Tensor)


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
def test_a_compiled_model_is_refused_in_another_thread(model):
    torch._dynamo.reset()
    compiled = torch.compile(model.base, backend="eager")
    inputs = {"input_ids": IDS, "use_cache": False}
    expected = in_thread(lambda: compiled(**inputs).logits)
    with model.prepare(["a", None], tokens=5) as step, model.using(step):
        assert isinstance(in_thread(lambda: compiled(**inputs)), Exception)
    assert torch.equal(in_thread(lambda: compiled(**inputs).logits), expected)
