"""Base models whose weights `torch.distributed.fsdp.fully_shard` spreads over processes.

A sharded module gathers its weights for its forward pass and for its backward; in between each of
them is a DTensor with the part of one process. Hooks meet gathered weights alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from lora_backends.common.tensors import is_distributed
from lora_backends.errors import UnsupportedInputError


def is_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` was applied to the module itself."""
    # Without an import, which takes long: a model is sharded by nobody else.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, for a sharded one that which it had before."""
    kinds = type(module).__mro__
    if not is_sharded(module):
        return kinds[0]
    names = [kind.__name__ for kind in kinds]
    return kinds[names.index("FSDPModule") + 1]


def check_spread(base: nn.Module) -> None:
    """Refuse a base model whose weights are spread over processes in another way.

    Raises:
        UnsupportedInputError: it is split by tensor parallelism, sharded by the older
            `FullyShardedDataParallel`, or sharded with weights on another device or in another
            dtype than it computes with.
    """
    problem = _spread_otherwise(base)
    if problem is not None:
        raise UnsupportedInputError(
            f"{problem}\n  allowed: a whole model in each process, or fully_shard of it or of its "
            f"layers, without a MixedPrecisionPolicy or an OffloadPolicy\n"
            f"  to do: load the model in the dtype to compute with, and shard it by fully_shard"
        )


def _spread_otherwise(base: nn.Module) -> str | None:
    shards: set[nn.Module] = set()
    for path, module in base.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            return f"the base model is sharded by FullyShardedDataParallel (FSDP1) at {path!r}"
        if is_sharded(module):
            shards.update(module.modules())
    for path, module in base.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not is_distributed(parameter):
                continue
            where = f"{path}.{name}"
            if module not in shards:
                return f"{where} is a DTensor that fully_shard did not make (tensor parallelism)"
            spec: Any = parameter
            kinds = [type(placement).__name__ for placement in spec.placements]
            if kinds.count("Shard") != 1 or {*kinds} - {"Shard", "Replicate"}:
                return f"{where} is split by tensor parallelism too: {spec.placements}"
            if parameter.device.type != spec.device_mesh.device_type:
                return f"{where} is offloaded to {parameter.device}"
    return None


def gather_for(twins: Mapping[nn.Module, nn.Module]) -> None:
    """Let the twins of all sharded modules of a model gather the weights for their forward passes.

    Every process of the model has to run them.

    Raises:
        UnsupportedInputError: from the hooks, where gathered weights have another dtype.
    """
    for module, twin in twins.items():
        if is_sharded(module):
            twin.register_forward_pre_hook(_setter(module, "unshard", twins))
            twin.register_forward_hook(_setter(module, "reshard", twins), always_call=True)


def _setter(
    module: nn.Module, method: str, twins: Mapping[nn.Module, nn.Module]
) -> Callable[..., None]:
    """Return a hook that calls a method of a sharded module, and gives its weights to the twins."""

    def set_weights(*_: Any) -> None:
        dtypes = {p.dtype for p in module.parameters()}
        getattr(module, method)()
        for each in module.modules():
            twins[each]._parameters.update(each._parameters)
        if {p.dtype for p in module.parameters()} != dtypes:
            getattr(module, "reshard")()  # noqa: B009 - of FSDP, unknown to nn.Module
            raise UnsupportedInputError(
                "the base model is sharded with a MixedPrecisionPolicy, which computes in another "
                "dtype than its weights have\n"
                "  to do: load it in that dtype, and give adapters float32 masters "
                "(new_adapter(dtype=torch.float32))"
            )

    return set_weights
