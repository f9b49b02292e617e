"""Modules that are called with one input, as one layer: q, k and v, or gate and up.

Their weights become rows of one matrix. The first of them to be called, the leader, multiplies by
all of it, adds the LoRA of all in one call of the backend, and keeps what belongs to its siblings.
A sibling that is called with the very same tensor takes its part and computes nothing; called with
anything else it runs alone. So a model may call them in any order and with any input.

`torch.compile` traces the same: the program has one product and one operation for all of them. It
does not notice when a weight is moved. So `MultiLoRAModel` looks before each call. It takes groups
whose weights were moved out of `Call.joined`, which the program guards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.dlpack import from_dlpack

from lora_backends.hf import traced
from lora_backends.hf.hooks import Hook
from lora_backends.hf.layout import Layout
from lora_backends.hf.running import RUNNING, Joined, Kept, check_thread
from lora_backends.hf.sites import Site

GROUPS = (
    (("q_proj", "k_proj", "v_proj"), "run_qkv"),
    (("gate_proj", "up_proj"), "run_gate_up"),
)
"""Names of modules under one parent, the leader first, and the operation that runs them."""


TRACED = -1
"""Version of an input in a traced program, which an eager call never meets."""

_Part = tuple[dict[str, nn.Parameter | None], str, nn.Parameter, int]
"""A module's dict of parameters, the name there, the parameter, and the address of its values."""


class Siblings:
    """Linear modules of one parent that a leader may run, once they are joined.

    Args:
        paths: of the modules, the leader's first, in the order of the slices.
        modules: with weights of one width, dtype and device; all have a bias, or none has.
        operation: of the interface.
    """

    def __init__(
        self, paths: tuple[str, ...], modules: tuple[nn.Linear, ...], operation: str
    ) -> None:
        self.paths, self.modules, self.operation = paths, modules, operation
        self.widths = [module.out_features for module in modules]
        self.apart = False  # whether the model was seen to call them with different inputs
        self.joined: Joined | None = None
        self._parts: list[_Part] = []

    @torch.inference_mode(False)  # parameters made of inference tensors could not be trained again
    @torch.no_grad()
    def join(self) -> Joined:
        """Lay the modules' weights out as one, and their biases; their values stay."""
        weight = self._join("weight")
        assert weight is not None  # every nn.Linear has one
        self.joined = Joined(weight, self._join("bias"))
        return self.joined

    def are_joined(self) -> bool:
        """Return whether the modules' parameters are still parts of `joined`."""
        if self.joined is None:
            return False
        for holder, name, parameter, address in self._parts:
            moved = parameter.data_ptr() != address or not parameter.is_contiguous()
            if moved or holder.get(name) is not parameter:
                self.joined = None  # frees the memory, unless other code holds a part
                return False
        return True

    @torch.inference_mode(False)
    @torch.no_grad()
    def part(self) -> None:
        """Give each parameter that is a part memory of its own again."""
        for _, _, parameter, address in self._parts:
            if parameter.data_ptr() == address:
                parameter.data = parameter.data.clone()
        self.joined = None
        self._parts.clear()
        self.modules = ()

    def _join(self, name: str) -> nn.Parameter | None:
        """Return one tensor of all modules' parameters, which become its rows."""
        holders = [module._parameters for module in self.modules]
        parameters = [p for holder in holders if (p := holder[name]) is not None]
        if not parameters:
            return None
        joined = torch.cat([parameter.detach() for parameter in parameters])
        rows = torch.split_with_sizes(joined, self.widths)
        for holder, parameter, part in zip(holders, parameters, rows, strict=True):
            # a storage of its own: savers of models take tensors of one storage for tied ones
            parameter.data = from_dlpack(part)
            self._parts.append((holder, name, parameter, part.data_ptr()))
        return nn.Parameter(joined, requires_grad=False)


def find_siblings(sites: Mapping[str, Site]) -> list[Siblings]:
    """Return the groups of plain linear modules, without foreign hooks or a replaced `forward`."""
    groups = []
    for path in sites:
        parent, dot, name = path.rpartition(".")
        for names, operation in GROUPS:
            paths = tuple(f"{parent}{dot}{other}" for other in names)
            if name == names[0] and all(other in sites for other in paths):
                modules = tuple(sites[other].module for other in paths)
                if all(sites[other].refusal is None for other in paths) and are_plain(modules):
                    groups.append(Siblings(paths, modules, operation))  # type: ignore[arg-type]
    return groups


def are_plain(modules: tuple[nn.Module, ...]) -> bool:
    """Return whether one product gives the same as calling each of the modules."""
    kinds = set()
    for module in modules:
        if (
            type(module) is not nn.Linear
            or "forward" in vars(module)
            or module._forward_hooks
            or module._forward_pre_hooks
            or set(module._parameters) != {"weight", "bias"}
            or any(map(_is_special, module.parameters()))
        ):
            return False
        bias = None if module.bias is None else module.bias.dtype
        kinds.add((module.in_features, module.weight.dtype, module.weight.device, bias))
    return len(kinds) == 1


def _is_special(parameter: nn.Parameter) -> bool:
    """Return whether a parameter cannot be given other memory."""
    is_plain = type(parameter.data) is torch.Tensor
    return not is_plain or parameter.is_meta or parameter.is_inference()


def leader_forward(
    model: str, group: Siblings, layout: Layout, run: Callable[..., torch.Tensor], alone: Hook
) -> Callable[..., torch.Tensor]:
    """Return the leader's `forward`.

    Args:
        model: whose calls it serves.
        group: the leader and its siblings.
        layout: of the leader's input.
        run: `linear_with_lora` of the group's operation, the same for all groups.
        alone: the leader's hook where it runs without the others.

    Returns:
        A function of the module and its input.
    """
    paths, widths = group.paths, group.widths
    device_type = group.modules[0].weight.device.type

    def forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        call = RUNNING.call
        if call.model != model:
            check_thread(model)
            return functional.linear(input, self.weight, self.bias)
        is_traced = torch.compiler.is_compiling()
        if not is_traced:
            left, RUNNING.kept = RUNNING.kept, None
            if left is not None:
                left.group.apart = True
        weights = call.shared.get(paths[0])
        if (
            weights is None
            or group.apart
            or torch.is_grad_enabled()  # the joined weight is no parameter of the model
            or torch.is_autocast_enabled(device_type)  # and would be cast in every call
            or self is not group.modules[0]
        ):
            return _run_alone(self, input, alone)
        if is_traced:
            joined = call.joined.get(paths[0])
        else:
            # tensors of inference mode have no version; a weight may have been moved
            joined = None if input.is_inference() or not group.are_joined() else group.joined
        if joined is None:
            return _run_alone(self, input, alone)
        plan = call.plan(input.shape[:-1], layout, paths)
        y = run(call, is_traced, input, weights, plan, *joined)
        outputs: dict[nn.Module, torch.Tensor] = dict(
            zip(group.modules, _columns(y, widths), strict=True)
        )
        mine = outputs.pop(self)
        if is_traced:
            call.is_traced = True
            traced.note(input)
        RUNNING.kept = Kept(group, input, TRACED if is_traced else input._version, outputs)
        return mine

    return forward


def _columns(y: torch.Tensor, widths: list[int]) -> tuple[torch.Tensor, ...]:
    """Return the columns of every module.

    On a CPU they are copied: there torch's activations round the ends of strided rows differently
    from the ends of contiguous ones.
    """
    columns = torch.split_with_sizes(y, widths, -1)
    return tuple(c.contiguous() for c in columns) if y.device.type == "cpu" else columns


def sibling_forward(model: str, alone: Hook) -> Callable[..., torch.Tensor]:
    """Return a sibling's `forward`: it returns the output that the leader kept, or runs alone.

    Args:
        model: whose calls it serves.
        alone: the sibling's hook where it runs alone.

    Returns:
        A function of the module and its input.
    """

    def forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        if RUNNING.call.model != model:
            check_thread(model)
            return functional.linear(input, self.weight, self.bias)
        kept = RUNNING.kept
        if kept is not None and kept.x is input and _is_unchanged(kept, input):
            output = kept.outputs.pop(self, None)
            if not kept.outputs:
                RUNNING.kept = None
            if output is not None:
                return output
        return _run_alone(self, input, alone)

    return forward


def _is_unchanged(kept: Kept, input: torch.Tensor) -> bool:
    """Return whether a leader's input is unchanged; both calls are traced, or neither is."""
    if torch.compiler.is_compiling():
        return kept.version == TRACED and traced.is_unchanged(input)
    return kept.version == input._version


def linear_forward(
    model: str, site: Site, layout: Layout, run: Callable[..., torch.Tensor], alone: Hook
) -> Callable[..., torch.Tensor]:
    """Return a `forward` that does the same as a hook, in less time than torch's hooks take.

    Args:
        model: whose calls it serves.
        site: a plain linear module.
        layout: of its input.
        run: `linear_with_lora` of `run_linear`, the same for all modules.
        alone: its hook.

    Returns:
        A function of the module and its input.
    """
    path, paths = site.path, (site.path,)

    def forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        call = RUNNING.call
        if call.model != model:
            check_thread(model)
            return functional.linear(input, self.weight, self.bias)
        weights = call.stacks.get(path)
        is_traced = torch.compiler.is_compiling()
        if weights is None or (is_traced and not call.multiplies_bases):
            return _run_alone(self, input, alone)
        if is_traced:
            plan = call.plan(input.shape[:-1], layout, paths)
            return run(call, is_traced, input, weights, plan, self.weight, self.bias)
        parameters: dict[str, Any] = self._parameters  # not by nn.Module's slow `__getattr__`
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:  # other code has put something else in its place: pruning for instance
            return _run_alone(self, input, alone)
        plan = call.plan(input.shape[:-1], layout, paths)
        return run(call, is_traced, input, weights, plan, weight, bias)

    return forward


def _run_alone(module: nn.Linear, input: torch.Tensor, hook: Hook) -> torch.Tensor:
    output = nn.Linear.forward(module, input)
    changed = hook(module, (input,), output)
    return output if changed is None else changed


class ForwardOverride:
    """The `forward` of one module, until it is removed.

    A bound method, so that a deep copy of the model computes with its own weights.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module, self._forward = module, MethodType(forward, module)
        module.forward = self._forward

    def remove(self) -> None:
        """Give the module its own `forward` back, unless other code has replaced this one."""
        if vars(self._module).get("forward") is self._forward:
            del self._module.forward
