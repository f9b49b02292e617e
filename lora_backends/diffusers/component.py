"""One wrapped component of a pipeline: its denoiser or a text encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lora_backends.adapters import AdapterPool, Checkpoint, LoadLimits
from lora_backends.backend import LoRABackend
from lora_backends.diffusers.calls import ComponentCall, PipelineCall
from lora_backends.diffusers.trials import DenoiserTrial
from lora_backends.errors import UnsupportedInputError
from lora_backends.hf.calls.entries import Entry
from lora_backends.hf.calls.running import RUNNING
from lora_backends.hf.layout.base_checks import check_base, dtype_and_device
from lora_backends.hf.layout.probe import UNREACHED
from lora_backends.hf.wrapped import WrappedModel


@dataclass(frozen=True)
class Room:
    """Size, limits and dtype of every component's pool."""

    max_adapters: int
    max_rank: int
    limits: LoadLimits
    adapter_dtype: torch.dtype | str | None


class Component:
    """One component of a pipeline, with its adapters and hooks.

    Raises:
        UnsupportedInputError: the component is on another device than the backend.
    """

    def __init__(
        self,
        name: str,
        base: nn.Module,  # that `check_component` accepts
        backend: LoRABackend,
        copies: Sequence[int],  # as `ComponentCall`
        trial: DenoiserTrial | None,  # as `ComponentCall`
    ) -> None:
        self.name, self._copies, self._trial = name, copies, trial
        dtype, device = dtype_and_device(base)
        if device != backend.device:
            raise UnsupportedInputError(
                f"the pipeline's {name} is on another device than its denoiser\n"
                f"  given: {device}, {backend.device}\n  allowed: one device\n"
                f"  to do: pipe.to(device) before it is wrapped"
            )
        self.wrapped = WrappedModel(base, backend, dtype, device, device.type != "cpu", trial)

    def open(self, room: Room) -> None:
        """Make the pool, and hook the component."""
        self.wrapped.open(room.max_adapters, room.max_rank, room.limits, None, room.adapter_dtype)
        base, key = self.wrapped.base, self.wrapped.key
        handles = self.wrapped.hooked.handles  # all of which are removed together

        def enter(*_: Any) -> None:
            outer = RUNNING.call
            # a component without adapters in this call keeps the pipeline's, and runs plain
            if isinstance(outer, PipelineCall) and key in outer.calls:
                RUNNING.call = outer.calls[key]

        def leave(*_: Any) -> None:
            inner = RUNNING.call
            if isinstance(inner, ComponentCall) and inner.model == key and inner.outer is not None:
                RUNNING.call = inner.outer

        # In front of the hook that tells the running call about the pass.
        handles.append(base.register_forward_pre_hook(enter, prepend=True))
        handles.append(base.register_forward_hook(leave, always_call=True))

    @property
    def pool(self) -> AdapterPool:
        """The adapters of this component."""
        return self.wrapped.pool

    def check(self, current: object) -> None:
        """Refuse to run a component that has changed since it was wrapped.

        Raises:
            InvalidInputError: the component was detached or changed, or is in training mode.
            UnsupportedInputError: it is not `current`, the pipeline's component of this name, or as
                `check_component`.
        """
        self.wrapped.check()
        if current is not self.wrapped.base:
            raise UnsupportedInputError(
                f"the pipeline has another {self.name} than when it was wrapped\n"
                f"  to do: detach() this MultiLoRAPipeline, and wrap the pipeline again"
            )
        check_component(self.name, self.wrapped.base)

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Raise UnsupportedInputError for LoRA that would not act as trained.

        It cannot be reproduced, or it adapts a module that the denoiser's trial pass did not call.
        """
        self.wrapped.check_checkpoint(checkpoint)
        layouts = self.wrapped.layouts
        unused = [path for path in checkpoint.modules if layouts[path].reason == UNREACHED]
        if unused and self._trial is not None:
            raise UnsupportedInputError(
                f"{checkpoint.folder} adapts modules that the {self.name} does not call, so their "
                f"LoRA would have no effect\n  given: {', '.join(unused[:3])}\n"
                f"  to do: wrap the pipeline before projections are fused"
            )

    def call(self, entries: Sequence[Entry], slots: Mapping[str, int]) -> ComponentCall:
        """Return the call in which row i has `entries[i]`."""
        return ComponentCall(self.name, self.wrapped, entries, slots, self._copies, self._trial)


def check_component(name: str, base: nn.Module) -> None:
    """Refuse a component whose modules may run without their hooks, or that has other adapters.

    Raises:
        UnsupportedInputError: it holds adapters of PEFT, is compiled or offloaded, or has fused
            projections or hooks of diffusers (caching, layerwise casting, group offloading); or
            as `check_base`.
    """
    problem = to_do = ""
    # they would be in every row
    if getattr(base, "peft_config", None):
        problem = "holds adapters of PEFT already"
        to_do = "pipe.unload_lora_weights(), and load them into the MultiLoRAPipeline"
    for path, module in base.named_modules():
        hooks = getattr(vars(module).get("_diffusers_hook"), "hooks", None)
        where = f" at {path}" * bool(path)
        if vars(module).get("_compiled_call_impl") is not None:
            problem, to_do = f"is compiled{where}", "use it without torch.compile"
        elif vars(module).get("_hf_hook") is not None:
            problem = f"is offloaded{where}"
            to_do = "call pipe.to(device) instead of offloading"
        elif hooks:
            problem = f"has hooks of diffusers{where}: {', '.join(hooks)}"
            to_do = "use it without caching, layerwise casting and group offloading"
        elif vars(module).get("fused_projections"):
            problem = f"has fused projections{where}, which bypass the adapted modules"
            to_do = "pipe.unfuse_qkv_projections()"
        if problem:
            break
    if problem:
        raise UnsupportedInputError(f"the pipeline's {name} {problem}\n  to do: {to_do}")
    check_base(base)
