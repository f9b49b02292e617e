"""Addresses of modules' parameters, to notice that other code has moved or replaced them."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any, cast

import torch
from torch import nn

from lora_backends.hf.structure import get_item

_NAMES = ("weight", "bias")


class Places:
    """Parameters of many modules, and the addresses of their values.

    The check maps over flat lists, since every call with prepared adapters makes it.

    Args:
        modules: with a weight, and a bias or None.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found = [(m._parameters, name, m._parameters[name]) for m in modules for name in _NAMES]
        self._holders = [holder for holder, _, _ in found]
        self._names = [name for _, name, _ in found]
        self._parameters = [parameter for _, _, parameter in found]
        self._tensors = [parameter for parameter in self._parameters if parameter is not None]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]

    def are_kept(self) -> bool:
        """Return whether all modules keep these parameters, contiguous, at the same addresses."""
        return (
            [*map(torch.Tensor.data_ptr, self._tensors)] == self._addresses
            and all(map(torch.Tensor.is_contiguous, self._tensors))
            and all(map(is_, map(get_item, self._holders, self._names), self._parameters))
        )


class Place:
    """The weight and the bias of one module, and their addresses.

    The check reads few objects, since the module makes it each time it runs.
    """

    __slots__ = ("_bias", "_bias_at", "_holder", "_weight", "_weight_at")

    def __init__(self, module: nn.Module) -> None:
        self._holder = cast(dict[str, Any], module._parameters)
        self._weight: torch.Tensor = self._holder["weight"]
        self._bias: torch.Tensor | None = self._holder["bias"]
        self._weight_at = self._weight.data_ptr()
        self._bias_at = 0 if self._bias is None else self._bias.data_ptr()

    def is_kept_by(self, module: nn.Module) -> bool:
        """Return whether `module` is the one, with both parameters contiguous where they were.

        A copy of the module is not: it has parameters of its own.
        """
        holder, weight, bias = self._holder, self._weight, self._bias
        get = holder.get
        return (
            module._parameters is holder
            and get("weight") is weight
            and get("bias") is bias
            and weight.data_ptr() == self._weight_at
            and weight.is_contiguous()
            and (bias is None or (bias.data_ptr() == self._bias_at and bias.is_contiguous()))
        )

    def part(self) -> None:
        """Copy weight and bias to memory of their own, unless they were moved already."""
        for parameter, address in ((self._weight, self._weight_at), (self._bias, self._bias_at)):
            if parameter is not None and parameter.data_ptr() == address:
                parameter.data = parameter.data.clone()
