"""Experts of a Transformers model: modules with the weights of all experts in one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from lora_backends.adapters.specs import ExpertSpec, ModuleSpec
from lora_backends.backend import LoRABackend
from lora_backends.errors import UnsupportedInputError, told
from lora_backends.experts import ExpertWeights
from lora_backends.hf.calls.running import RUNNING, ModelCall, check_thread
from lora_backends.hf.hooks.expert_products import eager, forward_of, parameter_names
from lora_backends.hf.hooks.linear import Served
from lora_backends.hf.layout.sites import ModuleSite
from lora_backends.hf.layout.twin import twin_of

FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts", "config")
"""Attributes that Transformers' `use_experts_implementation` and its classes set on a module."""

TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Most that a trial may differ, relative to the largest value; of 16-bit dtypes `ROUNDING`."""

ROUNDING = 0.05


@dataclass(frozen=True)
class ExpertSite:
    """A module of stacked experts."""

    path: str
    module: nn.Module
    names: tuple[str, str]  # of the parameters before and after the activation
    specs: tuple[ExpertSpec, ExpertSpec]
    refusal: str | None  # reason against adding LoRA to its experts

    @property
    def paths(self) -> tuple[str, str]:
        """Paths of the parameters."""
        return f"{self.path}.{self.names[0]}", f"{self.path}.{self.names[1]}"

    def refused(self, reason: str) -> ExpertSite:
        """Return the same site, whose LoRA is refused."""
        specs = _specs(self.module, self.names, reason)
        return replace(self, specs=specs, refusal=reason)

    @property
    def as_module(self) -> ModuleSite:
        """The module as one that takes hidden states."""
        width = self.specs[0].in_features
        return ModuleSite(self.path, self.module, ModuleSpec("linear", width, width), self.refusal)


def find_experts(
    base: nn.Module, dtype: torch.dtype, device: torch.device
) -> dict[str, ExpertSite]:
    """Return every module of stacked experts by its path, for stacks of this dtype and device."""
    sites = {}
    for path, module in base.named_modules():
        held = module._parameters
        names = ("gate_up_proj" if "gate_up_proj" in held else "up_proj", "down_proj")
        parameters = [p for name in names if (p := held.get(name)) is not None]
        # Two stacks of matrices: parameters of another form are no stacks of experts.
        if len(parameters) == 2 and all(p.ndim == 3 for p in parameters):
            refusal = _refusal(module, dtype, device)
            specs = _specs(module, names, refusal)
            sites[path] = ExpertSite(path, module, names, specs, refusal)
    return sites


def _specs(
    module: Any, names: tuple[str, str], refusal: str | None
) -> tuple[ExpertSpec, ExpertSpec]:
    if refusal is not None:
        unknown = ExpertSpec(1, 1, (1,), refusal=refusal)
        return unknown, unknown
    transposed = bool(module.is_transposed)
    made = []
    for name in names:
        experts, high, wide = getattr(module, name).shape
        if transposed:
            high, wide = wide, high
        gated = name == "gate_up_proj"
        slices = (high // 2, high // 2) if gated else (high,)
        interleaved = gated and not module.is_concatenated
        made.append(ExpertSpec(experts, wide, slices, interleaved, transposed))
    return made[0], made[1]


def _refusal(module: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the LoRA of a module's experts cannot be added, or None."""
    forward = type(module).forward
    missing = [flag for flag in FLAGS if not hasattr(module, flag)]
    # The decorator's `__wrapped__` is the class's own forward, which the trial runs.
    if missing or not hasattr(forward, "__wrapped__") or len(_arguments(forward)) != 3:
        lacking = f" (it has no {', '.join(missing)})" if missing else ""
        return f"its class does not go through Transformers' interface for experts{lacking}"
    if "forward" in vars(module):
        return "its forward was replaced"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are spread over processes"
    if getattr(module, "has_post_expert_norm", False):
        return "it normalises what an expert returns, and LoRA would enter before that"
    known = {name + end for name in parameter_names(module) for end in ("", "_bias")}
    strange = sorted(set(module._parameters) - known)
    if strange:
        return f"it has parameters of an unknown meaning: {', '.join(strange)}"
    for name, parameter in module._parameters.items():
        # A subclass may hold bits, which products here would misread.
        if type(parameter.data) is not torch.Tensor or parameter.dtype != dtype:
            kind = type(parameter.data).__name__
            return f"its {name} is a {kind} of {parameter.dtype}, the model's dtype is {dtype}"
        if parameter.device != device:
            return f"its {name} is on {parameter.device}, the model on {device}"
    return _failed_trial(module)


class _Nothing:
    """Adds nothing."""

    def add_up(self, x: torch.Tensor, pre: torch.Tensor) -> None:
        """Leave the products before the activation alone."""

    def add_down(self, act: torch.Tensor, out: torch.Tensor) -> None:
        """Leave the output alone."""


@torch.no_grad()
def _failed_trial(module: Any) -> str | None:
    """Return why a module's own eager forward computes something else than ours, or None."""
    # a class may have a forward of its own kind, a later version of Transformers another flag
    twin: Any = twin_of(module)[0]
    weight = module.down_proj
    width = weight.shape[2 if module.is_transposed else 1]
    generator = torch.Generator("cpu").manual_seed(0)
    tokens, top_k = 3, min(2, module.num_experts)
    # Small values pass a clamp unchanged, large ones show it.
    for size in (1.0, 30.0):
        x = size * torch.randn(tokens, width, generator=generator, device="cpu")
        chosen = torch.rand(tokens, module.num_experts, generator=generator, device="cpu")
        factors = torch.rand(tokens, top_k, generator=generator, device="cpu")
        ids = chosen.topk(top_k).indices.to(weight.device)
        x, factors = (t.to(weight.device, weight.dtype) for t in (x, factors))
        try:
            theirs = type(module).forward.__wrapped__(twin, x, ids, factors)
            ours = eager(twin, x, ids, factors, _Nothing())
        except Exception as error:  # whatever a class of any author raises
            return f"a trial of its experts failed ({told(error)[:200]})"
        room = TOLERANCES.get(weight.dtype, ROUNDING) * theirs.abs().max().item()
        if not torch.allclose(ours, theirs, rtol=0, atol=room, equal_nan=True):
            return "its own forward computes something else than experts with an activation"
    return None


def _arguments(forward: Any) -> tuple[str, ...]:
    """Return the names of the arguments of an experts' forward, without self."""
    return tuple(inspect.signature(forward).parameters)[1:]


class _Deltas:
    """The LoRA of the experts of one layer in one call."""

    def __init__(
        self,
        backend: LoRABackend,
        routing: Any,
        up: tuple[ExpertWeights, ...],
        down: tuple[ExpertWeights, ...],
    ) -> None:
        self._backend, self._routing = backend, routing
        self._up, self._down = up, down

    def add_up(self, x: torch.Tensor, pre: torch.Tensor) -> None:
        """Add the LoRA before the activation."""
        # [tokens, top_k, width], as the operation takes it.
        y = pre.view(x.shape[0], -1, pre.shape[1])
        for weights in self._up:
            self._backend.run_experts(x, weights, self._routing, y)

    def add_down(self, act: torch.Tensor, out: torch.Tensor) -> None:
        """Add the LoRA after it, with the router's weights."""
        for weights in self._down:
            self._backend.run_experts(
                act, weights, self._routing, out, rows="pairs", weighted=True, reduce=True
            )


def experts_forward(served: Served, site: ExpertSite) -> Callable[..., torch.Tensor]:
    """Return the `forward` of a module of experts, of x [tokens, hidden], ids and weights."""
    model, backend, layout = served.model, served.backend, served.layouts[site.path]
    plain, paths = type(site.module).forward, site.paths
    names = _arguments(plain)

    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        call = RUNNING.call
        if call.model != model:
            if call.trains == model:
                refuse_training(call, paths)
            else:
                check_thread(model)
            return plain(self, *args, **kwargs)  # type: ignore[no-any-return]
        up, down = call.experts.get(paths[0], ()), call.experts.get(paths[1], ())
        if not up and not down:
            return plain(self, *args, **kwargs)  # type: ignore[no-any-return]
        values = [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
        if len(values) != 3 or len(args) + len(kwargs) != 3:
            raise _unknown_call(site.path, f"{len(args)} arguments and {', '.join(kwargs)}")
        x, ids, factors = values
        if x.ndim != 2 or ids.ndim != 2 or len(ids) != len(x) or factors.shape != ids.shape:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in values)
            raise _unknown_call(site.path, f"arguments of shapes {shapes}")
        run = forward_of(site.path, self)
        plan = call.plan(x.shape[:-1], layout, paths)
        # The backend takes rows whose elements follow each other.
        x = x if x.stride(-1) == 1 else x.contiguous()
        routing = backend.prepare_experts(plan, ids, factors.float(), self.num_experts)
        return run(self, x, ids, factors, _Deltas(backend, routing, up, down))

    return forward


def refuse_training(call: ModelCall, paths: Sequence[str]) -> None:
    """Raise UnsupportedInputError if a trained adapter of the batch adapts experts or a router."""
    if call.touches(paths):
        raise UnsupportedInputError(
            f"an adapter of a batch that is trained adapts {' and '.join(paths)}, whose LoRA has "
            f"no gradient here\n"
            f"  to do: leave its rows out, or run them in a call of their own under torch.no_grad()"
        )


def _unknown_call(path: str, arguments: str) -> UnsupportedInputError:
    return UnsupportedInputError(
        f"the experts {path} are called in a way that is not known\n  given: {arguments}\n"
        f"  allowed: hidden states [tokens, hidden], ids and weights [tokens, top_k]\n"
        f"  to do: leave the experts out of the adapters"
    )


def expert_specs(sites: Mapping[str, ExpertSite]) -> dict[str, ExpertSpec]:
    """Return the layout of each stacked parameter, by its path."""
    pairs = (zip(site.paths, site.specs, strict=True) for site in sites.values())
    return dict(chain.from_iterable(pairs))
