"""Checks of the base model that a wrapper is given, and its dtype and device."""

from __future__ import annotations

import torch
from torch import nn

from lora_backends.adapters.files.formats import BY_TASK, PARAMETRIZED
from lora_backends.errors import InvalidInputError, UnsupportedInputError, shown
from lora_backends.hf.layout.sharded import check_spread


def check_base(base: object) -> None:
    """Refuse a base model whose modules do not have the names that adapters were trained for.

    Raises:
        InvalidInputError: it is no torch module.
        UnsupportedInputError: a model inside another module: that of torch.compile, of PEFT or
            of a parallel wrapper; one with modules of PEFT; or one whose weights are yet to be
            decompressed; or one that is spread over processes, unless by `fully_shard`.
    """
    name = type(base).__name__
    if not isinstance(base, nn.Module):
        raise InvalidInputError(
            f"base is no model\n  given: {shown(base)}\n  allowed: a Transformers model\n"
            f"  to do: pass what AutoModelForCausalLM.from_pretrained(...) returns"
        )
    # By children and module names: PEFT need not be installed.
    children = dict(base.named_children())
    kind, problem, to_do = name, "", ""
    inside = [path for path, module in base.named_modules() if _is_of_peft(module)]
    packed = [found for found in base.named_parameters() if PARAMETRIZED.search(found[0])]
    if "_orig_mod" in children:  # the only mark that torch.compile leaves on its module
        problem = "was compiled"
        to_do = "wrap the model first, and compile model.base: see prepare() and using()"
    elif _is_of_peft(base):
        problem, to_do = "holds adapters of PEFT already", "pass base.unload(), or the model itself"
    elif inside:  # PEFT replaces modules in place: of get_base_model(), and of what it was given
        kind = f"{name} with PEFT's modules at {inside[0]} and {len(inside) - 1} other paths"
        problem = "holds adapters of PEFT already, which every row would get"
        to_do = "pass unload() of the PeftModel, or load the model again"
    elif packed:
        (key, parameter), others = packed[0], len(packed) - 1
        kind = f"{name} with {key} {list(parameter.shape)} and {others} other such tensors"
        problem = "holds LoRA as torch parametrizations, which cannot differ per row"
        to_do = (
            f"{BY_TASK}. With another model, afterwards call torch.nn.utils.parametrize."
            f'remove_parametrizations(layer, "weight", leave_parametrized=False) on each layer'
        )
    elif isinstance(base, nn.DataParallel | nn.parallel.DistributedDataParallel):
        problem, to_do = "is wrapped for parallel training", "pass base.module"
    elif hasattr(base, "ct_decompress_hook"):  # which puts other weights in at the first pass
        problem = "is compressed (compressed-tensors) until its first forward pass"
        to_do = "call the model once before it is wrapped"
    if problem:
        raise UnsupportedInputError(
            f"the base model {problem}\n  given: {kind}\n  allowed: a Transformers model itself\n"
            f"  to do: {to_do}"
        )
    check_spread(base)


def check_fuse(fuse: object) -> None:
    """Raise InvalidInputError unless `fuse` is True, False or None."""
    if not (fuse is None or isinstance(fuse, bool)):
        raise InvalidInputError(f"fuse is {shown(fuse)}\n  allowed: True, False or None")


def _is_of_peft(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "peft"


def dtype_and_device(base: nn.Module) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and device of the base model's parameters of 16 bits or more."""
    # 8-bit floats are weights of a quantised layer, and no dtype to compute in.
    floating = [p for p in base.parameters() if p.is_floating_point() and p.dtype.itemsize > 1]
    if not floating:
        raise UnsupportedInputError(f"{type(base).__name__} has no floating-point parameters")
    devices = {parameter.device for parameter in floating}
    if len(devices) > 1:
        raise UnsupportedInputError(
            f"{type(base).__name__} is spread over {', '.join(sorted(map(str, devices)))}\n"
            f"  allowed: a model on one device"
        )
    dtype: torch.dtype = getattr(base, "dtype", floating[0].dtype)
    if dtype.itemsize == 1:  # that of a quantised embedding
        dtype = floating[0].dtype
    return dtype, floating[0].device
