"""Runs SGLang's LoRA layers before it captures graphs, so that their kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from lora_backends.integrations import warm_up as common
from lora_backends.integrations.sglang import experts
from lora_backends.integrations.sglang.backend import BackendForSGLang
from lora_backends.integrations.sglang.settings import logger
from lora_backends.integrations.warm_up import Trial

STACKS = ("A_buffer_qkv", "A_buffer", "lm_head_A_buffer", "embedding_A_buffer")
"""Where SGLang's layers keep A; B has the same name with a B."""


def warm_up_after(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Warm up once a `LoRAManager` has given its layers their stacks, the first time."""
    made = original(manager, *args, **kwargs)
    backend = manager.lora_backend
    if isinstance(backend, BackendForSGLang) and not backend.is_warm:
        backend.is_warm = True
        with backend.prefilling():
            common.warm_up(list(_trials(manager, backend)), logger())
    return made


def _trials(manager: Any, backend: BackendForSGLang) -> Iterator[Trial]:
    ends = (getattr(manager, f"{name}_module", None) for name in ("embed_tokens", "lm_head"))
    layers = [module for modules in manager.lora_modules for module in modules.values()]
    for module in (*layers, *ends):
        call, kind = _call(module, backend)
        if call is not None:
            yield Trial(backend.tokens, backend.most_rows, call, kind)


def _call(
    module: Any, backend: BackendForSGLang
) -> tuple[Callable[[int], None] | None, tuple[Any, ...]]:
    """Return a function that runs a layer on placeholder inputs, and its kind; None: no LoRA."""
    if hasattr(module, "gate_up_lora_a_weights"):
        return _call_experts(module, backend)
    name = next((name for name in STACKS if getattr(module, name, None) is not None), None)
    if name is None:
        return None, ()
    a, b = getattr(module, name), getattr(module, name.replace("A", "B", 1))

    def run(rows: int) -> None:
        y = b.new_empty(rows, b.shape[1])
        if name == "embedding_A_buffer":
            module.apply_lora(y, torch.zeros(rows, dtype=torch.int64, device=a.device), None)
        else:
            module.apply_lora(y, b.new_empty(rows, a.shape[2]))

    slices = getattr(module, "output_offset_cpu", None)
    ends = None if slices is None else tuple(slices.tolist())
    return run, (type(module).__name__, a.shape, b.shape, a.dtype, ends)


def _call_experts(
    module: Any, backend: BackendForSGLang
) -> tuple[Callable[[int], None], tuple[Any, ...]]:
    found = module._get_lora_info()
    first, second, top_k = found.first, found.second, module.base_layer.top_k
    stack = second.lora_b

    def run(rows: int) -> None:
        pairs = torch.arange(rows * top_k, device=stack.device).view(rows, top_k)
        ids = (pairs % second.num_experts).to(torch.int32)
        weights = torch.zeros(rows, top_k, dtype=torch.float32, device=stack.device)
        hooks = experts.build_hooks(lambda *_: None, None, found, ids)
        x, y = (stack.new_empty(rows * top_k, n) for n in (first.in_features, first.out_features))
        hooks.after_gate_up(x[:rows], y, weights, ids)
        x, y = (stack.new_empty(rows * top_k, n) for n in (second.in_features, second.out_features))
        hooks.after_down(x, y, weights, ids)

    shapes = [site.lora_a.shape + site.lora_b.shape for site in (first, second)]
    return run, ("experts", top_k, *shapes, first.interleaved, stack.dtype)
