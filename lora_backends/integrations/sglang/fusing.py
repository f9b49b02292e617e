"""Base products that the backend computes together with their LoRA, in graphs of few rows.

The backend multiplies by the base weight while the shrink runs. SGLang's layers first call the
base's `quant_method`, and then the backend with its output. A fused product runs in the first call;
the second finds its output noted here and adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lora_backends.common.devices import is_capturing

KINDS = frozenset(
    f"{name}LinearWithLoRA"
    for name in ("ColumnParallel", "MergedColumnParallel", "QKVParallel", "Replicated")
) | {"RowParallelLinearWithLoRA"}
"""SGLang's LoRA layers that multiply by the `quant_method` of their base layer."""

UNQUANTIZED = "UnquantizedLinearMethod"
"""SGLang's name for weights that are not quantized."""


class Fused:
    """The fused products of one engine.

    Args:
        backend: a `BackendForSGLang`.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._running: Any = None  # the LoRA layer whose forward runs
        self._output: torch.Tensor | None = None  # of a product that has its LoRA already

    def adopt(self, modules: list[Any]) -> None:
        """Fuse what can be fused of some LoRA layers.

        SGLang multiplies by quantized weights, by weights for which it does not use torch's linear,
        and by those of a `quant_method` that several layers share.
        """
        fitting = [each for each in modules if type(each).__name__ in KINDS and _fits(each)]
        methods = [id(each.base_layer.quant_method) for each in fitting]
        for module, method in zip(fitting, methods, strict=True):
            if methods.count(method) == 1:
                self._fuse(module)

    def takes(self, y: torch.Tensor) -> bool:
        """Return whether y is the output of a fused product, once per product."""
        is_fused, self._output = y is self._output, None
        return is_fused

    def _fuse(self, module: Any) -> None:
        forward, method = module.forward, module.base_layer.quant_method
        apply = method.apply

        def forward_noted(*args: Any, **kwargs: Any) -> Any:
            self._running = module  # only this call adds the LoRA to the base product
            try:
                return forward(*args, **kwargs)
            finally:
                self._running = self._output = None

        def apply_fused(
            layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            if self._running is not module or not self._backend.keeps_kernels():
                y: torch.Tensor = apply(layer, x, bias)
                return y
            return self._multiply(module, apply, layer, x, bias)

        module.forward, method.apply = forward_noted, apply_fused

    def _multiply(
        self,
        module: Any,
        apply: Callable[..., torch.Tensor],
        layer: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the product for a graph; before the capture, compile its kernels."""
        fused: torch.Tensor | None
        fused = self._backend.run_with_base(x, layer.weight, bias, *_stacks(module))
        if fused is None or not is_capturing(x.device):
            return apply(layer, x, bias)
        self._output = fused
        return fused


def _stacks(module: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return A, B and the first column of each slice; None for a single slice."""
    name = "A_buffer_qkv" if hasattr(module, "A_buffer_qkv") else "A_buffer"
    a, b = getattr(module, name), getattr(module, name.replace("A", "B", 1))
    if a.shape[1] == b.shape[2]:
        return a, b, None
    offsets = getattr(module, "output_offset_cpu", None)
    return a, b, module._output_offset_cpu if offsets is None else offsets


def _fits(module: Any) -> bool:
    from sglang.srt.layers.quantization import unquant

    base = module.base_layer
    if type(getattr(base, "quant_method", None)).__name__ != UNQUANTIZED:
        return False
    chosen = getattr(unquant, "get_bf16_gemm_backend", lambda: None)()
    others = ("is_cutedsl", "is_gemv")
    return not any(getattr(chosen, name, lambda: False)() for name in others)
