"""The store on a GPU: pinned memory, and copies on a stream of its own while batches run."""

import pytest
import torch
from deltas import random_checkpoint

from lora_backends.adapters.tensors import tensors_of
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


def test_a_prefetch_copies_on_a_stream_of_its_own(model):
    default = torch.cuda.current_stream()
    model.store.prefetch(["a0"])
    model.store._worker.submit(int).result()
    ahead = model.store._ahead["a0"].result()
    assert model.store._stream is not None and model.store._stream != default
    assert ahead.event is not None and all(d.lora_a.is_cuda for d in ahead.staged.deltas)
