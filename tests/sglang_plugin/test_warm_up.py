"""Layers run before SGLang captures graphs, so that their kernels are compiled."""

from types import SimpleNamespace

import pytest
import torch

from lora_backends.integrations.sglang import warm_up, wrapping
from lora_backends.integrations.sglang.backend import BackendForSGLang

SLOTS, RANK, HIDDEN, INNER, EXPERTS = 3, 4, 12, 10, 4


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setenv("LORA_BACKENDS_SGLANG", "torch_ref")
    wrapping.wrap()
    settings = SimpleNamespace(chunked_prefill_size=-1, max_prefill_tokens=40)
    return BackendForSGLang(SLOTS, torch.device("cpu"), settings)


def linear(backend):
    from sglang.srt.lora.layers import ReplicatedLinearWithLoRA, RowParallelLinearWithLoRA

    for kind in (RowParallelLinearWithLoRA, ReplicatedLinearWithLoRA):
        layer = kind.__new__(kind)
        torch.nn.Module.__init__(layer)
        layer.lora_backend, layer.first_output_dim = backend, 0
        layer.output_offset = layer.output_offset_cpu = layer._output_offset = None
        layer.A_buffer = torch.zeros(SLOTS, RANK, HIDDEN)
        layer.B_buffer = torch.zeros(SLOTS, INNER, RANK)
        yield layer


def experts(backend):
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    layer = FusedMoEWithLoRA.__new__(FusedMoEWithLoRA)
    torch.nn.Module.__init__(layer)
    layer.lora_backend, layer.base_layer = backend, torch.nn.Module()
    layer.base_layer.top_k = 2
    layer.set_lora_info(
        torch.zeros(SLOTS, EXPERTS, 2 * RANK, HIDDEN),
        torch.zeros(SLOTS, EXPERTS, 2 * INNER, RANK),
        torch.zeros(SLOTS, EXPERTS, RANK, INNER),
        torch.zeros(SLOTS, EXPERTS, HIDDEN, RANK),
    )
    return layer


def test_every_kind_of_layer_runs_once_the_stacks_are_there(backend, monkeypatch):
    rows, kind = [], type(backend.tokens.backend)
    for name in ("run_linear", "run_experts"):
        run = getattr(kind, name)

        def noted(self, x, *args, run=run, name=name, **kwargs):
            rows.append((name, x.shape[0]))
            return run(self, x, *args, **kwargs)

        monkeypatch.setattr(kind, name, noted)
    layers = [*linear(backend), experts(backend)]
    manager = SimpleNamespace(
        lora_backend=backend, lora_modules=[{str(n): each for n, each in enumerate(layers)}]
    )
    before = backend.tokens
    assert warm_up.warm_up_after(lambda _: "made", manager) == "made"
    of_experts = [("run_experts", n) for n in (1, 2, 40, 80, 40, 80)]  # tokens, then pairs
    assert sorted(rows) == sorted([("run_linear", n) for n in (1, 40, 40)] * 2 + of_experts)
    assert backend.tokens is before and not before._is_announced

    rows.clear()
    warm_up.warm_up_after(lambda _: None, manager)
    assert not rows, "stacks that are given again need no other kernels"
