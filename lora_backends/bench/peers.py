"""Other engines' LoRA operators, timed where those engines are installed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from lora_backends.bench.layers import Workload
from lora_backends.bench.results import versions
from lora_backends.bench.timing import Call
from lora_backends.dtypes import dtype_name
from lora_backends.errors import BackendUnavailableError, UnsupportedInputError
from lora_backends.weights import LoRAWeights

_HOMES = {"vllm": "vllm.lora.ops.triton_ops", "sglang": "sglang.srt.lora.triton_ops"}
"""The modules of the operators that are timed."""

_POINTERS = ("_LORA_A_PTR_DICT", "_LORA_B_PTR_DICT")


def peer(name: str, device: torch.device, dtype: torch.dtype) -> Callable[[Workload], Call]:
    """Return a function that prepares a workload for one of `PEERS` and returns its call.

    Raises:
        BackendUnavailableError: the engine is not installed, or does not run on the device.
        UnsupportedInputError: the dtype, or operators that are elsewhere or have other signatures.
    """
    if importlib.util.find_spec(name) is None:
        raise BackendUnavailableError(f"{name} is not installed.")
    if device.type != "cuda":
        raise BackendUnavailableError(f"{name}'s operators run on cuda, not on {device.type}.")
    if dtype not in (torch.float16, torch.bfloat16):
        raise UnsupportedInputError(f"{name} takes bfloat16, float16, not {dtype_name(dtype)}.")
    installed = f"{name} {versions(name)[name] or 'of unknown version'} is installed"
    try:
        return PEERS[name]()
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
        # a module of the engine itself has moved; any other is one that it needs
        if missing.partition(".")[0] == name:
            raise UnsupportedInputError(
                f"{installed}, but without {missing}: only releases whose LoRA operators are in "
                f"{_HOMES[name]} are timed"
            ) from error
        raise UnsupportedInputError(
            f"{installed}, but its LoRA operators cannot be imported: {missing} is not installed"
        ) from error
    except Exception as error:  # whatever another engine's import raises
        raise UnsupportedInputError(
            f"{installed}, but its LoRA operators have changed: {type(error).__name__}: {error}"
        ) from error


def _vllm() -> Callable[[Workload], Call]:
    """lora_shrink and lora_expand, from vllm/lora/ops/triton_ops of vllm-project/vllm."""
    ops: Any = importlib.import_module(_HOMES["vllm"])
    shrink, expand, meta_type = ops.lora_shrink, ops.lora_expand, ops.LoRAKernelMeta
    parameters = list(inspect.signature(meta_type.meta_args).parameters)[1:]
    make, prepare = meta_type.make, meta_type.prepare_tensors
    if parameters not in (["token_nums"], ["token_nums", "specialize_active_lora"]):
        raise TypeError(f"LoRAKernelMeta.meta_args takes {', '.join(parameters)}")
    specialize = [True] * (len(parameters) - 1)

    def bind(work: Workload) -> Call:
        _forget_addresses()
        where = work.x.device
        meta = make(work.batch.num_slots, work.batch.num_tokens, where)
        prepare(meta, work.batch.token_slots.to(where, torch.int32))
        arguments = meta.meta_args(work.batch.num_tokens, *specialize)
        layers = [_per_slice(weights) for weights in work.layers]
        first = work.layers[0]
        scaling = float(first.scalings.flatten()[0])  # one for all layers of a cell
        shape = (first.num_slices, work.batch.num_tokens, first.max_rank)
        h = torch.empty(shape, dtype=torch.float32, device=where)

        def call(layer: int) -> None:
            a, b = layers[layer]
            shrink(work.x, a, h, *arguments, scaling)
            expand(h, b, work.y, *arguments, offset_start=0, add_inputs=True)

        return call

    return bind


def _sglang() -> Callable[[Workload], Call]:
    """The chunked SGMV, in chunks of 16 tokens, from sgl-project/sglang's lora/triton_ops."""
    ops: Any = importlib.import_module(_HOMES["sglang"])
    shrink, expand = ops.chunked_sgmv_lora_shrink_forward, ops.chunked_sgmv_lora_expand_forward
    info_type = importlib.import_module("sglang.srt.lora.utils").LoRABatchInfo
    inspect.signature(shrink).bind(*range(4))
    parameters = inspect.signature(expand).bind(*range(6)).signature.parameters
    known = {field.name for field in fields(info_type)}
    info_type(**dict.fromkeys(known & _INFO_FIELDS))
    blocks_of = None
    if "slice_block_config" in parameters:  # without it, each call waits for the device
        blocks_of = sys.modules[expand.__module__].compute_slice_block_config

    def bind(work: Workload) -> Call:
        _forget_kernels(shrink, expand)
        first, where = work.layers[0], work.x.device
        values = _segments(work.batch.token_slots, where)
        values |= {
            "lora_ranks": first.ranks[:, 0].to(torch.int64),
            "scalings": first.scalings[:, 0].contiguous(),
        }
        info = info_type(**{name: value for name, value in values.items() if name in known})
        offsets = torch.tensor(first.slice_offsets, dtype=torch.int32, device=where)
        rest = {} if blocks_of is None else {"slice_block_config": blocks_of(offsets)}
        layers = [(w.lora_a.flatten(1, 2), w.lora_b.contiguous()) for w in work.layers]
        widest = max(first.output_slices)

        def call(layer: int) -> None:
            a, b = layers[layer]
            h = shrink(work.x, a, info, first.num_slices)
            expand(h, b, info, offsets, widest, work.y, **rest)

        return call

    return bind


def _forget_kernels(*functions: Callable[..., Any]) -> None:
    """Empty SGLang's caches of compiled kernels: their keys do not include the rank."""
    for function in functions:
        for value in list(vars(sys.modules[function.__module__]).values()):
            cache = getattr(value, "kernel_cache", None)
            if isinstance(cache, dict):
                cache.clear()


_CHUNK = 16
_INFO_FIELDS = {"use_cuda_graph", "bs", "num_segments", "seg_indptr", "weight_indices"}
_INFO_FIELDS |= {"lora_ranks", "scalings", "max_len", "seg_lens", "permutation"}


def _segments(token_slots: torch.Tensor, device: torch.device) -> dict[str, Any]:
    """Return the fields of SGLang's batch: the tokens sorted by adapter and cut into chunks."""
    adapted = (token_slots >= 0).nonzero().flatten()
    order = adapted[token_slots[adapted].argsort(stable=True)]
    slots, counts = torch.unique_consecutive(token_slots[order], return_counts=True)
    chunks = [
        (slot, min(_CHUNK, count - done))
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True)
        for done in range(0, count, _CHUNK)
    ]
    lengths = torch.tensor([length for _, length in chunks], dtype=torch.int32, device="cpu")
    ends = torch.cat(
        [torch.zeros(1, dtype=torch.int32, device="cpu"), lengths.cumsum(0, dtype=torch.int32)]
    )
    return {
        "use_cuda_graph": False,  # a grid as large as the batch, in a captured graph too
        "bs": len(chunks),
        "num_segments": len(chunks),
        "seg_indptr": ends.to(device),
        "weight_indices": torch.tensor([s for s, _ in chunks], dtype=torch.int32, device=device),
        "max_len": _CHUNK,
        "seg_lens": lengths.to(device),
        "permutation": order.to(device, torch.int32),
    }


PEERS: dict[str, Callable[[], Callable[[Workload], Call]]] = {"vllm": _vllm, "sglang": _sglang}
"""Engines by the name of their package."""


def _per_slice(weights: LoRAWeights) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return A [slots, rank, in] and B [slots, out, rank] of every slice, as vLLM stacks them."""
    a = [part.contiguous() for part in weights.lora_a.unbind(1)]
    b = [
        part.contiguous()
        for part in torch.split_with_sizes(weights.lora_b, weights.output_slices, 1)
    ]
    return a, b


def _forget_addresses() -> None:
    """Empty vLLM's caches keyed by address: later cells reuse the memory of earlier ones."""
    utils = importlib.import_module(f"{_HOMES['vllm']}.utils")
    for name in _POINTERS:
        getattr(utils, name, {}).clear()
