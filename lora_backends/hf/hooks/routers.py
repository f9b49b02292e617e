"""Routers of experts: a linear layer inside a module that also chooses the experts.

The module returns the choice, so the LoRA of its weight has to enter before, at the one product
that the module computes with the weight. A mode of torch sees that product.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from lora_backends.adapters.specs import ModuleSpec
from lora_backends.backend import LoRABackend
from lora_backends.dispatch.any_axes import as_rows
from lora_backends.errors import told
from lora_backends.hf.calls.running import RUNNING, check_thread
from lora_backends.hf.hooks.experts import refuse_training
from lora_backends.hf.hooks.linear import Served, add_deltas, first_argument
from lora_backends.hf.layout.quantized_base import is_plain, packed_size
from lora_backends.hf.layout.sites import ModuleSite
from lora_backends.hf.layout.twin import twin_of
from lora_backends.weights import LoRAWeights


class _AtProduct(TorchFunctionMode):
    """Sees every `functional.linear` in its block."""

    def at_product(self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
        """Called with the arguments and the result, which may be changed in place."""
        raise NotImplementedError

    def __torch_function__(
        self,
        function: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        y = function(*args, **(kwargs or {}))
        if function is functional.linear:
            self.at_product(args[0], args[1], y)
        return y


class _Noting(_AtProduct):
    """Notes whether each product is that of an input and a weight."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        super().__init__()
        self._expected = x, weight
        self.products: list[bool] = []

    def at_product(self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
        """Compare the values, which may have been widened."""
        pairs = zip((x, weight), self._expected, strict=True)
        same = (a.shape == b.shape and bool(a.eq(b.to(a.dtype)).all()) for a, b in pairs)
        self.products.append(all(same))


class _Adding(_AtProduct):
    """Adds the LoRA of a router to its logits."""

    def __init__(self, backend: LoRABackend, weights: LoRAWeights, plan: Any) -> None:
        TorchFunctionMode.__init__(self)  # torch.compile cannot trace super() here
        self._backend, self._weights, self._plan = backend, weights, plan

    def at_product(self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
        """Add to y; the model may have widened x to float32."""
        x = as_rows(x).to(self._weights.compute_dtype)  # the model's dtype
        y = y.view(-1, y.shape[-1])
        add_deltas(self._backend.run_linear, x, self._weights, self._plan, y)


def find_routers(
    base: nn.Module, experts: Iterable[str], dtype: torch.dtype, device: torch.device
) -> dict[str, ModuleSite]:
    """Return the modules beside `experts` that multiply by a weight and choose, by their paths."""
    sites = {}
    for path in experts:
        parent, dot, _ = path.rpartition(".")
        block = base.get_submodule(parent)
        for name, module in block.named_children():
            # Not by attribute: a module without a weight may raise any error.
            weight = module._parameters.get("weight")
            is_layer = isinstance(module, (Conv1D, nn.Embedding)) or packed_size(module) is not None
            if isinstance(module, nn.Linear):  # or a quantised layer in the place of one
                is_layer = type(module).forward is nn.Linear.forward or not is_plain(weight)
            # Layers get LoRA at their output, and need no mode.
            if weight is None or weight.ndim != 2 or is_layer:
                continue
            high, wide = weight.shape
            refusal = _refusal(module, block, dtype, device)
            spec = ModuleSpec("linear", wide, high)
            sites[f"{parent}{dot}{name}"] = ModuleSite(
                f"{parent}{dot}{name}", module, spec, refusal
            )
    return sites


def _refusal(
    module: nn.Module, block: nn.Module, dtype: torch.dtype, device: torch.device
) -> str | None:
    weight: Any = module._parameters["weight"]
    if "forward" in vars(module):
        return "its forward was replaced"
    if type(weight.data) is not torch.Tensor or weight.dtype != dtype:
        return f"its weight is {weight.dtype}, the model's dtype is {dtype}"
    if weight.device != device:
        return f"its weight is on {weight.device}, the model on {device}"
    return _failed_trial(module, block)


@torch.no_grad()
def _failed_trial(module: nn.Module, block: nn.Module) -> str | None:
    """Return why a router is more than one product with its weight, or None."""
    twin: Any = twin_of(module)[0]
    weight: Any = module._parameters["weight"]
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(3, weight.shape[1], generator=generator, device="cpu")
    x = x.to(weight.device, weight.dtype)
    noting = _Noting(x, weight)
    parameters = list(inspect.signature(type(module).forward).parameters.values())[2:]
    try:
        # a correction of the scores for instance, which the block holds under the same name
        others = [getattr(block, p.name) for p in parameters if p.default is p.empty]
        with noting:
            type(module).forward(twin, x, *others)
    except Exception as error:  # whatever a class of any author raises
        return f"a trial of it failed ({told(error)[:200]})"
    is_one = noting.products == [True]
    return None if is_one else "it is not one product of its input and its weight"


def router_forward(served: Served, site: ModuleSite) -> Callable[..., Any]:
    """Return the `forward` of a router, which takes the module and its arguments."""
    model, backend, layout = served.model, served.backend, served.layouts[site.path]
    plain, path = type(site.module).forward, site.path

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = RUNNING.call
        if call.model != model:
            if call.trains == model:
                refuse_training(call, (path,))
            else:
                check_thread(model)
            return plain(self, *args, **kwargs)
        weights = call.stacks.get(path)
        if weights is None:
            return plain(self, *args, **kwargs)
        x = first_argument(args, f"router {path}")
        plan = call.plan(x.shape[:-1], layout, (path,))
        # A mode belongs to its thread: others may run the same router meanwhile.
        with _Adding(backend, weights, plan):
            return plain(self, *args, **kwargs)

    return forward
