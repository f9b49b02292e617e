"""Other engines' operators, against stand-ins with the same names, arguments and layouts."""

import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from lora_backends.bench import Cell
from lora_backends.bench.layers import check, make_layers, make_workload, reference
from lora_backends.bench.peers import peer
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


def add_modules(monkeypatch, whole):
    """Put empty packages where `import` finds them."""
    parts = whole.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        module = ModuleType(path)
        module.__spec__ = ModuleSpec(path, None, is_package=True)
        module.__path__ = []
        if path not in sys.modules:
            monkeypatch.setitem(sys.modules, path, module)


@pytest.fixture
def install(monkeypatch):
    """Return a function that puts a stand-in for vLLM where `import` finds it."""

    def put(**names):
        add_modules(monkeypatch, "vllm.lora.ops.triton_ops.utils")
        vars(sys.modules["vllm.lora.ops.triton_ops"]).update(names)
        sys.modules["vllm.lora.ops.triton_ops.utils"]._LORA_A_PTR_DICT = {"stale": 1}
        return sys.modules["vllm.lora.ops.triton_ops.utils"]

    return put


@pytest.mark.parametrize("meta", [Meta, OldMeta])
def test_the_operators_are_called_as_they_want_to_be(install, meta):
    utils = install(lora_shrink=shrink, lora_expand=expand, LoRAKernelMeta=meta)
    cell = Cell("qkv", 32, (16, 8, 8), tokens=6, adapters=3, rank=4)
    work = make_workload(cell, make_layers(cell, "cpu", torch.bfloat16))
    call = peer("vllm", CUDA, torch.bfloat16)(work)
    check(call, work, reference(work))
    assert utils._LORA_A_PTR_DICT == {}  # addresses of an earlier cell's weights


def test_without_vllm_there_is_a_reason():
    with pytest.raises(BackendUnavailableError, match="vllm is not installed"):
        peer("vllm", CUDA, torch.bfloat16)


def test_it_runs_on_cuda_in_16_bits(install):
    install(lora_shrink=shrink, lora_expand=expand, LoRAKernelMeta=Meta)
    with pytest.raises(BackendUnavailableError, match="not on cpu"):
        peer("vllm", torch.device("cpu"), torch.bfloat16)
    with pytest.raises(UnsupportedInputError, match="not float32"):
        peer("vllm", CUDA, torch.float32)


def test_a_release_of_another_shape_is_refused_by_what_differs(install):
    install(lora_shrink=shrink, lora_expand=expand)
    with pytest.raises(UnsupportedInputError, match="LoRAKernelMeta"):
        peer("vllm", CUDA, torch.bfloat16)

    class Changed(Meta):
        def meta_args(self, tokens, mode):
            return ()

    install(lora_shrink=shrink, lora_expand=expand, LoRAKernelMeta=Changed)
    with pytest.raises(UnsupportedInputError, match="meta_args takes tokens, mode"):
        peer("vllm", CUDA, torch.bfloat16)


@dataclass
class BatchInfo:
    use_cuda_graph: bool
    bs: int
    num_segments: int
    seg_indptr: torch.Tensor
    weight_indices: torch.Tensor
    lora_ranks: torch.Tensor
    scalings: torch.Tensor
    max_len: int | None
    seg_lens: torch.Tensor | None
    permutation: torch.Tensor | None
    has_active_lora: bool = False


def rows_of(info):
    """Yield the adapter and the tokens of every segment, after checking the layout."""
    assert info.seg_indptr.dtype == info.weight_indices.dtype == info.permutation.dtype
    assert info.seg_indptr.dtype == torch.int32 and not info.use_cuda_graph
    assert info.bs == info.num_segments == len(info.weight_indices)
    ends = info.seg_indptr.tolist()
    assert ends == [0, *info.seg_lens.cumsum(0).tolist()]
    for slot, start, end in zip(info.weight_indices.tolist(), ends, ends[1:], strict=False):
        assert 0 < end - start <= info.max_len == 16
        yield slot, info.permutation[start:end].long()


class Kernel:
    """Stands for a kernel that SGLang compiles once per key, which leaves out the rank."""

    def __init__(self):
        self.kernel_cache = {}

    def width(self, key, width):
        return self.kernel_cache.setdefault(key, width)


shrink_kernel = Kernel()


def chunked_shrink(x, weights, batch_info, num_slices):
    assert weights.is_contiguous() and weights.dim() == 3
    h = torch.full((len(x), weights.shape[1]), float("nan"))
    compiled_for = shrink_kernel.width((x.shape[1], num_slices), weights.shape[1])
    for slot, rows in rows_of(batch_info):
        used = min(compiled_for, int(batch_info.lora_ranks[slot]) * num_slices)
        h[rows, :used] = x[rows].float() @ weights[slot, :used].float().T
    return h.to(x.dtype)


def chunked_expand(x, weights, batch_info, slice_offsets, max_slice_size, base_output):
    assert weights.is_contiguous() and slice_offsets.dtype == torch.int32
    offsets = slice_offsets.tolist()
    assert max_slice_size == max(b - a for a, b in zip(offsets, offsets[1:], strict=False))
    for slot, rows in rows_of(batch_info):
        rank, scaling = int(batch_info.lora_ranks[slot]), float(batch_info.scalings[slot])
        for s, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
            h = x[rows, s * rank : (s + 1) * rank].float()
            delta = scaling * (h @ weights[slot, start:end, :rank].float().T)
            base_output[rows, start:end] += delta.to(base_output.dtype)
    return base_output


def newer_expand(
    x, weights, batch_info, slice_offsets, max_slice_size, base_output, slice_block_config=None
):
    assert slice_block_config == "blocks"
    return chunked_expand(x, weights, batch_info, slice_offsets, max_slice_size, base_output)


@pytest.fixture
def install_sglang(monkeypatch):
    def put(expand=chunked_expand, info=BatchInfo):
        add_modules(monkeypatch, "sglang.srt.lora.triton_ops")
        add_modules(monkeypatch, "sglang.srt.lora.utils")
        names = {"chunked_sgmv_lora_shrink_forward": chunked_shrink}
        names["chunked_sgmv_lora_expand_forward"] = expand
        vars(sys.modules["sglang.srt.lora.triton_ops"]).update(names)
        sys.modules["sglang.srt.lora.utils"].LoRABatchInfo = info
        monkeypatch.setattr(
            sys.modules[__name__], "compute_slice_block_config", lambda _: "blocks", raising=False
        )

    return put


@pytest.mark.parametrize("expand", [chunked_expand, newer_expand])
@pytest.mark.parametrize("mix", ["uniform", "skewed", "identical"])
def test_sglangs_operators_are_called_as_they_want_to_be(install_sglang, expand, mix):
    install_sglang(expand)
    cell = Cell("qkv", 32, (16, 8, 8), tokens=40, adapters=3, rank=4, mix=mix)
    work = make_workload(cell, make_layers(cell, "cpu", torch.bfloat16))
    call = peer("sglang", CUDA, torch.bfloat16)(work)
    check(call, work, reference(work))


def test_sglangs_kernels_of_another_rank_are_forgotten(install_sglang):
    install_sglang()
    bind = peer("sglang", CUDA, torch.bfloat16)
    for rank in (4, 8, 4):
        cell = Cell("qkv", 32, (16, 8, 8), tokens=40, adapters=3, rank=rank)
        work = make_workload(cell, make_layers(cell, "cpu", torch.bfloat16))
        check(bind(work), work, reference(work))


def test_without_sglang_there_is_a_reason():
    with pytest.raises(BackendUnavailableError, match="sglang is not installed"):
        peer("sglang", CUDA, torch.bfloat16)


def test_another_sglang_is_refused_by_what_differs(install_sglang):
    def narrow(x, weights, batch_info):
        return x

    @dataclass
    class More:
        routes: torch.Tensor

    install_sglang(info=More)
    with pytest.raises(UnsupportedInputError, match="sglang .* have changed: .*routes"):
        peer("sglang", CUDA, torch.bfloat16)
    install_sglang(expand=narrow)
    with pytest.raises(UnsupportedInputError, match="too many positional arguments"):
        peer("sglang", CUDA, torch.bfloat16)


HOMES = {"vllm": "vllm.lora.ops.triton_ops", "sglang": "sglang.srt.lora.triton_ops"}


@pytest.mark.parametrize("name", HOMES)
def test_a_release_without_the_operators_is_refused_by_the_module_that_is_missing(
    monkeypatch, name
):
    add_modules(monkeypatch, HOMES[name].rpartition(".")[0])
    told = f"is installed, but without {HOMES[name]}: only releases whose .* in {HOMES[name]}"
    with pytest.raises(UnsupportedInputError, match=told):
        peer(name, CUDA, torch.bfloat16)
    if name == "sglang":  # of its operators' modules, this one has not moved
        add_modules(monkeypatch, HOMES[name])
        for each in ("chunked_sgmv_lora_shrink_forward", "chunked_sgmv_lora_expand_forward"):
            setattr(sys.modules[HOMES[name]], each, chunked_shrink)
        with pytest.raises(UnsupportedInputError, match=r"without sglang\.srt\.lora\.utils"):
            peer(name, CUDA, torch.bfloat16)


@pytest.mark.parametrize("name", HOMES)
def test_a_package_that_an_engine_lacks_is_named(monkeypatch, tmp_path, name):
    add_modules(monkeypatch, HOMES[name].rpartition(".")[0])
    parent = sys.modules[HOMES[name].rpartition(".")[0]]
    parent.__path__ = [str(tmp_path)]
    (tmp_path / "triton_ops.py").write_text("import no_such_module_here\n")
    with pytest.raises(UnsupportedInputError, match="no_such_module_here is not installed"):
        peer(name, CUDA, torch.bfloat16)
