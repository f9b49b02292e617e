"""A model's twin: its tensors in modules of its own, to be run without effect on the model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from lora_backends.hf.layout.sharded import class_of

_LEFT_OUT = ("_compiled_call_impl", "_output_capturing_hooks_installed")
"""The first runs the original; by the second Transformers takes a twin's hooks for installed."""


class InsteadOf:
    """A callable in place of a module's method.

    A twin gets the original method, because the callable would run the module itself.
    """

    original: Any  # the bound method


def twin_of(base: nn.Module) -> tuple[nn.Module, dict[nn.Module, nn.Module]]:
    """Return a model that computes the same as `base` in eval mode, and the twin of every module.

    Tensors and whatever else the modules hold are not copied.
    """
    # A forward pass may change a module, as BigBird's does with its kind of attention after a short
    # one, and hooks of others may have any effect. The twin changes alone and has no hooks.
    twins = {module: without_hooks(module) for module in base.modules()}
    for module, twin in twins.items():
        for name, value in vars(twin).items():
            vars(twin)[name] = _rebound(value, twins)
        twin._modules = {n: child and twins[child] for n, child in module._modules.items()}
        # Dropout would make equal rows unequal.
        twin.training = False
    return twins[base], twins


def without_hooks(module: nn.Module) -> nn.Module:
    """Return a module with the tensors, attributes and children of another, and no hooks."""
    # Through __dict__, as torch's own replicas are made: a constructor would make tensors.
    kind = class_of(module)
    copy: nn.Module = kind.__new__(kind)
    for name, value in vars(module).items():
        # Only torch's own dicts: a copy of diffusers' FrozenDict loses its attributes.
        if type(value) in (dict, OrderedDict) and name.startswith("_"):
            vars(copy)[name] = value.__class__() if "hooks" in name else value.copy()
        elif name not in _LEFT_OUT:
            vars(copy)[name] = value
    return copy


def _rebound(value: Any, twins: Mapping[nn.Module, nn.Module]) -> Any:
    """Return a module's own `forward` for its twin; Accelerate sets partial ones."""

    def twin(owner: Any) -> Any:
        return twins.get(owner, owner) if isinstance(owner, nn.Module) else owner

    while isinstance(value, InsteadOf):
        value = value.original
    # A bound method would run the original module.
    if isinstance(value, MethodType):
        return MethodType(value.__func__, twin(value.__self__))
    if isinstance(value, partial):
        return partial(value.func, *map(twin, value.args), **value.keywords)
    return value
