"""Other engines' LoRA operators, timed where those engines are installed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from lora_backends.bench.layers import Workload
from lora_backends.bench.timing import Call
from lora_backends.checks import dtype_name
from lora_backends.errors import BackendUnavailableError, UnsupportedInputError
from lora_backends.weights import LoRAWeights

_OPS = "vllm.lora.ops.triton_ops"
_POINTERS = ("_LORA_A_PTR_DICT", "_LORA_B_PTR_DICT")


def vllm(device: torch.device, dtype: torch.dtype) -> Callable[[Workload], Call]:
    """Return a binder for vLLM's lora_shrink and lora_expand, its metadata made ahead.

    Args:
        device: a CUDA device.
        dtype: float16 or bfloat16.

    Raises:
        BackendUnavailableError: vLLM is not installed, or does not run on the device.
        UnsupportedInputError: the dtype, or operators of another shape than those known here.

    Source:
        vllm/lora/ops/triton_ops of vllm-project/vllm.
    """
    if importlib.util.find_spec("vllm") is None:
        raise BackendUnavailableError("vllm is not installed.")
    if device.type != "cuda":
        raise BackendUnavailableError(f"vllm's operators run on cuda, not on {device.type}.")
    if dtype not in (torch.float16, torch.bfloat16):
        raise UnsupportedInputError(f"vllm takes bfloat16, float16, not {dtype_name(dtype)}.")
    try:
        ops: Any = importlib.import_module(_OPS)
        shrink, expand, meta_type = ops.lora_shrink, ops.lora_expand, ops.LoRAKernelMeta
        parameters = list(inspect.signature(meta_type.meta_args).parameters)[1:]
        make, prepare = meta_type.make, meta_type.prepare_tensors
    except Exception as error:  # whatever another engine's import raises
        raise _other_shape(f"{type(error).__name__}: {error}") from error
    if parameters not in (["token_nums"], ["token_nums", "specialize_active_lora"]):
        raise _other_shape(f"LoRAKernelMeta.meta_args takes {', '.join(parameters)}")
    specialize = [True] * (len(parameters) - 1)

    def bind(work: Workload) -> Call:
        _forget_addresses()
        where = work.x.device
        meta = make(work.batch.num_slots, work.batch.num_tokens, where)
        prepare(meta, work.batch.token_slots.to(where, torch.int32))
        arguments = meta.meta_args(work.batch.num_tokens, *specialize)
        layers = [_per_slice(weights) for weights in work.layers]
        first = work.layers[0]
        scaling = float(first.scalings.flatten()[0])  # the layers of a cell have one
        shape = (first.num_slices, work.batch.num_tokens, first.max_rank)
        h = torch.empty(shape, dtype=torch.float32, device=where)

        def call(layer: int) -> None:
            a, b = layers[layer]
            shrink(work.x, a, h, *arguments, scaling)
            expand(h, b, work.y, *arguments, offset_start=0, add_inputs=True)

        return call

    return bind


PEERS: dict[str, Callable[[torch.device, torch.dtype], Callable[[Workload], Call]]] = {"vllm": vllm}


def _per_slice(weights: LoRAWeights) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return A [slots, rank, in] and B [slots, out, rank] of every slice, as vLLM stacks them."""
    a = [part.contiguous() for part in weights.lora_a.unbind(1)]
    b = [
        part.contiguous()
        for part in torch.split_with_sizes(weights.lora_b, weights.output_slices, 1)
    ]
    return a, b


def _forget_addresses() -> None:
    """Empty vLLM's tables of tensors by address: memory of an earlier cell is used again."""
    utils = importlib.import_module(f"{_OPS}.utils")
    for name in _POINTERS:
        getattr(utils, name, {}).clear()


def _other_shape(what: str) -> UnsupportedInputError:
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        installed = "of unknown version"
    return UnsupportedInputError(
        f"vllm {installed} is installed, but its LoRA operators are not as known here: {what}"
    )
