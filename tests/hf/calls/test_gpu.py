"""A model on a GPU computes what it computes on the CPU, with every backend that runs there."""

import pytest
import torch
from helpers.adapters.deltas import random_checkpoint
from helpers.graphs import captured_logits

from lora_backends import UnsupportedInputError, backend_names, unavailable_reasons
from lora_backends.hf import MultiLoRAModel
from lora_backends.selection.registry import backend_class

CUDA = "cuda"
BACKENDS = [
    name
    for name in backend_names()
    if torch.cuda.is_available() and not unavailable_reasons(name, CUDA)
]
ROWS = ["a", None, "b", "a"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


TARGETS = ("q_proj", "v_proj", "down_proj")
CAPTURED = [name for name in BACKENDS if backend_class(name).cuda_graphs]


def wrapped(base, backend):
    model = MultiLoRAModel(base, backend, max_adapters=2, max_rank=4)
    for seed, (name, rank) in enumerate({"a": 4, "b": 3}.items()):
        model.add_adapter(name, random_checkpoint(base, TARGETS, rank, seed))
    return model


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_on_the_gpu_are_those_on_the_cpu(backend, make_base):
    ids = torch.randint(0, 40, (4, 9), generator=torch.Generator().manual_seed(3))
    expected = wrapped(make_base("llama"), "torch_ref")(adapters=ROWS, input_ids=ids)
    model = wrapped(make_base("llama").to(CUDA), backend)
    logits = model(adapters=ROWS, input_ids=ids.to(CUDA)).logits.cpu()
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=2e-4)
    plain = model(adapters=[None] * 4, input_ids=ids.to(CUDA)).logits.cpu()
    assert torch.equal(logits[1], plain[1])
    assert (logits[0] - plain[0]).abs().max() > 0.01


@pytest.mark.parametrize("backend", BACKENDS)
def test_generation_on_the_gpu_keeps_the_adapter_of_each_row(backend, make_base):
    ids = torch.randint(1, 40, (4, 6), generator=torch.Generator().manual_seed(5)).to(CUDA)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model = wrapped(make_base("llama").to(CUDA), backend)
    tokens = model.generate(ids, adapters=ROWS, **settings)
    for row, name in enumerate(ROWS):
        alone = model.generate(ids[row : row + 1], adapters=[name], **settings)
        assert torch.equal(tokens[row], alone[0])


SAME = 1e-5
"""In a graph the base model's own products may run as other kernels: sums of 32 terms below 1 in
another order differ by up to 32 * 2^-24 = 2e-6, in three layers. An adapter changes 1e-2."""


@pytest.mark.parametrize("backend", CAPTURED)
def test_a_captured_step_follows_updates(backend, make_base):
    model = wrapped(make_base("llama").to(CUDA), backend)
    ids = torch.randint(0, 40, (4, 1), generator=torch.Generator().manual_seed(3)).to(CUDA)
    step = model.prepare(ROWS)
    inputs = {"adapters": step, "input_ids": ids, "use_cache": False}
    graph, captured = captured_logits(model, **inputs)
    for rows in (ROWS, ["b"] * 4, [None] * 4, [None, "a", "a", "b"]):
        step.update(rows)
        graph.replay()
        torch.testing.assert_close(captured, model(**inputs).logits, rtol=0, atol=SAME)
    step.update([None, None, "b", "b"])
    model.add_adapter("a", random_checkpoint(model.base, TARGETS, 4, seed=9))  # in place
    step.update(ROWS)
    graph.replay()
    torch.testing.assert_close(captured, model(**inputs).logits, rtol=0, atol=SAME)


def test_a_backend_of_the_host_refuses_to_be_captured(make_base):
    model = wrapped(make_base("llama").to(CUDA), "torch_ref")
    step = model.prepare(ROWS)
    ids = torch.ones((4, 1), dtype=torch.int64, device=CUDA)
    with (
        pytest.raises(UnsupportedInputError, match="cannot capture backend 'torch_ref'"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        model(adapters=step, input_ids=ids, use_cache=False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["llama", "llama_bias", "gemma"])
def test_siblings_run_together_give_what_they_give_alone(name, backend, make_base):
    ids = torch.randint(0, 40, (4, 9), generator=torch.Generator().manual_seed(3)).to(CUDA)
    linear = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    found = {}
    for fuse in (True, False):
        model = MultiLoRAModel(make_base(name).to(CUDA), backend, 2, 4, fuse=fuse)
        for seed, adapter in enumerate("ab"):
            model.add_adapter(adapter, random_checkpoint(model.base, linear, 4 - seed, seed))
        with model.prepare(ROWS, tokens=9) as step:
            assert bool(step.shared) is fuse
            found[fuse] = model(adapters=step, input_ids=ids, use_cache=False).logits
            step.update([None] * 4)
            unadapted = model(adapters=step, input_ids=ids, use_cache=False).logits
        with torch.no_grad():
            assert torch.equal(unadapted, model.base(input_ids=ids, use_cache=False).logits)
    torch.testing.assert_close(found[True], found[False], rtol=0, atol=2e-4)
