"""Addresses of parameters, to detect that other code has moved, cut or replaced them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn


class Place:
    """The weight and the bias of one module, their addresses and sizes.

    The check reads few objects, since the module makes it each time it runs.
    """

    __slots__ = (
        "_bias",
        "_bias_at",
        "_bias_size",
        "_holder",
        "_weight",
        "_weight_at",
        "_weight_size",
    )

    def __init__(self, module: nn.Module) -> None:
        # The dict itself: a lookup through nn.Module's attributes is slow.
        self._holder = cast(dict[str, Any], module._parameters)
        self._weight: torch.Tensor = self._holder["weight"]
        self._bias: torch.Tensor | None = self._holder["bias"]
        # Addresses, because `.data` may be set without a new parameter.
        self._weight_at = self._weight.data_ptr()
        self._bias_at = 0 if self._bias is None else self._bias.data_ptr()
        # a parameter that was cut may still begin here
        self._weight_size = self._weight.numel()
        self._bias_size = 0 if self._bias is None else self._bias.numel()

    def is_kept_by(self, module: nn.Module) -> bool:
        """Return whether `module` is the one, its parameters contiguous, uncut and not moved."""
        holder, weight, bias = self._holder, self._weight, self._bias
        get = holder.get
        return (
            # a copy of the module has parameters of its own
            module._parameters is holder
            and get("weight") is weight
            and get("bias") is bias
            and weight.data_ptr() == self._weight_at
            and weight.numel() == self._weight_size
            and weight.is_contiguous()
            and (
                bias is None
                or (
                    bias.data_ptr() == self._bias_at
                    and bias.numel() == self._bias_size
                    and bias.is_contiguous()
                )
            )
        )

    def part(self) -> None:
        """Copy weight and bias to memory of their own, unless they were moved already."""
        for parameter, address in ((self._weight, self._weight_at), (self._bias, self._bias_at)):
            # A moved parameter has memory of its own already.
            if parameter is not None and parameter.data_ptr() == address:
                parameter.data = parameter.data.clone()
