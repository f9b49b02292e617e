"""The store on a GPU: pinned memory, and copies on a stream of its own while batches run."""

import pytest
import torch
from helpers.adapters.deltas import random_checkpoint
from helpers.graphs import captured_logits

from lora_backends.adapters.pool.tensors import tensors_of
from lora_backends.hf import MultiLoRAModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

IDS = torch.arange(8)[None] + 1
NAMES = [f"a{i}" for i in range(6)]


@pytest.fixture
def model(make_base):
    base = make_base("llama")
    checkpoints = {
        n: random_checkpoint(base, ["q_proj", "v_proj"], seed=i) for i, n in enumerate(NAMES)
    }
    model = MultiLoRAModel(base.cuda(), "auto", max_adapters=2, max_rank=4)
    model.keep_adapters()
    for name, checkpoint in checkpoints.items():
        model.add_adapter(name, checkpoint)
    yield model
    model.detach()


def logits(model, name):
    return model(adapters=[name], input_ids=IDS.cuda()).logits


def test_adapters_in_memory_are_pinned(model):
    matrices = [
        tensor
        for kept in model.store.kept().values()
        for tensor in tensors_of(kept.checkpoint)
        if tensor.ndim > 1
    ]
    assert matrices and all(tensor.is_pinned() for tensor in matrices)


def test_a_prefetched_adapter_is_right_while_batches_run(model):
    expected = {name: logits(model, name).clone() for name in NAMES}
    for turn in range(60):
        name, following = NAMES[turn % 6], NAMES[(turn + 1) % 6]
        model.store.prefetch([following])
        for _ in range(3):  # the copies go on beside these
            result = logits(model, name)
        torch.testing.assert_close(result, expected[name])


def prefetched(model, name):
    model.store.prefetch([name])
    model.store._worker.submit(int).result()


def test_a_prefetch_writes_the_slot_on_a_stream_of_its_own(model):
    expected = {name: logits(model, name).clone() for name in NAMES}
    prefetched(model, "a0")
    assert model.store._stream not in (None, torch.cuda.current_stream())
    assert model.adapters == ["a5", "a0"] and "a0" not in model.store._ahead
    swaps = model.store.swaps
    torch.testing.assert_close(logits(model, "a0"), expected["a0"])
    assert model.store.swaps == swaps


def test_a_prefetch_waits_for_batches_that_still_run_on_any_stream(model):
    expected = {name: logits(model, name).clone() for name in NAMES}
    side, wide = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for turn in range(4):
        late, following = NAMES[turn], NAMES[turn + 2]
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            logits(model, late)  # whatever is new to this stream is done with
            for _ in range(200):  # the device is late, and the host is not
                wide = wide @ wide / 64
            results = logits(model, late)
        logits(model, NAMES[turn + 1])  # `late` is free, and the last call's is another
        prefetched(model, following)
        assert late not in model.adapters
        side.synchronize()
        torch.testing.assert_close(results, expected[late])
        torch.testing.assert_close(logits(model, following), expected[following])


def test_a_graph_follows_to_an_adapter_that_was_prefetched(model):
    expected = {name: logits(model, name).clone() for name in NAMES}
    step = model.prepare(["a0"], tokens=IDS.shape[1])
    inputs = {"adapters": step, "input_ids": IDS.cuda(), "use_cache": False}
    graph, result = captured_logits(model, **inputs)
    for name in ("a1", "a2", "a3", "a0"):
        prefetched(model, name)
        swaps = model.store.swaps
        step.update([name])
        graph.replay()
        assert model.store.swaps == swaps
        torch.testing.assert_close(result, expected[name], rtol=1e-3, atol=1e-4)
    step.release()
