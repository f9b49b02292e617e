"""The addresses of a module's parameters, to notice that other code has moved or replaced them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn


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
