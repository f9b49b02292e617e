"""vLLM's operators, against a stand-in with the same names, arguments and layouts."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from lora_backends.bench import Cell
from lora_backends.bench.layers import check, make_layers, make_workload, reference
from lora_backends.bench.peers import vllm
from lora_backends.errors import BackendUnavailableError, UnsupportedInputError

CUDA = torch.device("cuda")


class Meta:
    """Keeps the slots; the operators below look at nothing else."""

    @classmethod
    def make(cls, max_loras, max_num_tokens, device, captured_lora_counts=None):
        meta = cls()
        meta.slots = torch.full((max_num_tokens,), -1, dtype=torch.int32, device=device)
        meta.max_loras = max_loras
        return meta

    def prepare_tensors(self, token_lora_mapping):
        assert token_lora_mapping.dtype == torch.int32
        self.slots[: token_lora_mapping.size(0)].copy_(token_lora_mapping)

    def meta_args(self, token_nums, specialize_active_lora):
        assert specialize_active_lora is True
        rest = [torch.zeros(self.max_loras + 1)] * 6
        return (self.slots[:token_nums], *rest)


class OldMeta(Meta):
    """An earlier release, without the number of active adapters."""

    def meta_args(self, token_nums):
        return (self.slots[:token_nums], *[torch.zeros(self.max_loras + 1)] * 5)


def shrink(inputs, lora_a_weights, output_tensor, token_lora_mapping, *rest):
    scaling = rest[-1]
    for s, a in enumerate(lora_a_weights):
        assert a.is_contiguous() and a.dim() == 3
        for t, slot in enumerate(token_lora_mapping.tolist()):
            output_tensor[s, t] = scaling * (a[slot].float() @ inputs[t].float())


def expand(inputs, lora_b_weights, output_tensor, mapping, *rest, offset_start, add_inputs):
    assert offset_start == 0 and add_inputs and inputs.dtype == torch.float32
    for t, slot in enumerate(mapping.tolist()):
        parts = [b[slot].float() @ inputs[s, t] for s, b in enumerate(lora_b_weights)]
        output_tensor[t] += torch.cat(parts).to(output_tensor.dtype)


@pytest.fixture
def install(monkeypatch):
    """Return a function that puts a stand-in for vLLM where `import` finds it."""

    def put(**names):
        parts = ["vllm", "lora", "ops", "triton_ops", "utils"]
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            module = ModuleType(path)
            module.__spec__ = ModuleSpec(path, None, is_package=True)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, path, module)
        ops = sys.modules["vllm.lora.ops.triton_ops"]
        for name, value in names.items():
            setattr(ops, name, value)
        sys.modules["vllm.lora.ops.triton_ops.utils"]._LORA_A_PTR_DICT = {"stale": 1}
        return sys.modules["vllm.lora.ops.triton_ops.utils"]

    return put


@pytest.mark.parametrize("meta", [Meta, OldMeta])
def test_the_operators_are_called_as_they_want_to_be(install, meta):
    utils = install(lora_shrink=shrink, lora_expand=expand, LoRAKernelMeta=meta)
    cell = Cell("qkv", 32, (16, 8, 8), tokens=6, adapters=3, rank=4)
    work = make_workload(cell, make_layers(cell, "cpu", torch.bfloat16))
    call = vllm(CUDA, torch.bfloat16)(work)
    check(call, work, reference(work.x, work.layers[0], work.batch))
    assert utils._LORA_A_PTR_DICT == {}  # addresses of an earlier cell's weights


def test_without_vllm_there_is_a_reason():
    with pytest.raises(BackendUnavailableError, match="vllm is not installed"):
        vllm(CUDA, torch.bfloat16)


def test_it_runs_on_cuda_in_16_bits(install):
    install(lora_shrink=shrink, lora_expand=expand, LoRAKernelMeta=Meta)
    with pytest.raises(BackendUnavailableError, match="not on cpu"):
        vllm(torch.device("cpu"), torch.bfloat16)
    with pytest.raises(UnsupportedInputError, match="not float32"):
        vllm(CUDA, torch.float32)


def test_a_release_of_another_shape_is_refused_by_what_differs(install):
    install(lora_shrink=shrink, lora_expand=expand)
    with pytest.raises(UnsupportedInputError, match="LoRAKernelMeta"):
        vllm(CUDA, torch.bfloat16)

    class Changed(Meta):
        def meta_args(self, tokens, mode):
            return ()

    install(lora_shrink=shrink, lora_expand=expand, LoRAKernelMeta=Changed)
    with pytest.raises(UnsupportedInputError, match="meta_args takes tokens, mode"):
        vllm(CUDA, torch.bfloat16)
