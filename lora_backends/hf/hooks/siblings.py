"""Modules that are called with one input, as one layer: q, k and v, or gate and up.

Their weights become rows of one matrix. The first of them to be called, the leader, multiplies by
all of it, adds the LoRA of all in one call of the backend, and keeps what belongs to its siblings.
A sibling that is called with the very same tensor takes its part and computes nothing; called with
anything else it runs alone. So a model may call them in any order and with any input.

`torch.compile` traces the same: the program has one product and one operation for all of them. It
does not notice when a weight is moved. So `MultiLoRAModel` looks before and after programs run. A
group whose weights were moved leaves `ModelCall.joined`, which the programs guard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.dlpack import from_dlpack

from lora_backends.dispatch.tracing import is_traced
from lora_backends.dispatch.wrap import stored_as
from lora_backends.hf.calls.running import RUNNING, Joined, SiblingOutputs, check_thread
from lora_backends.hf.hooks import trace_guards as traced
from lora_backends.hf.hooks.addresses import Place
from lora_backends.hf.hooks.linear import Hook, Served
from lora_backends.hf.layout.sites import ModuleSite
from lora_backends.hf.training.joined import run_joined

GROUPS = (
    (("q_proj", "k_proj", "v_proj"), "run_qkv"),
    (("gate_proj", "up_proj"), "run_gate_up"),
    # self-attention of UNets; diffusion transformers normalise q and k, which copies parts of rows
    (("attn1.to_q", "attn1.to_k", "attn1.to_v"), "run_qkv"),
)
"""Ends of the paths of modules, the leader first, and the operation that runs them."""

TRACED = -1
"""Version of an input in a traced program, which an eager call never meets."""


class Siblings:
    """Linear modules of one parent that a leader may run, once they are joined.

    `paths` has the leader's first, in the order of the slices. The weights have one width, dtype
    and device; all modules have a bias, or none has.
    """

    def __init__(
        self, paths: tuple[str, ...], modules: tuple[nn.Linear, ...], operation: str
    ) -> None:
        self.paths, self.modules, self.operation = paths, modules, operation
        self.widths = [module.out_features for module in modules]
        self.apart = False  # whether the model was seen to call them with different inputs
        self.joined: Joined | None = None
        self.places: list[Place] = []  # of each module's parameters, once they are joined
        self._all: dict[str, Joined] = {}  # `joined` of all groups, by the leader's path

    @torch.inference_mode(False)  # parameters made of inference tensors could not be trained again
    @torch.no_grad()
    def join(self, joined: dict[str, Joined]) -> None:
        """Lay the modules' weights out as one, and their biases; their values stay.

        The group adds itself to `joined`, which has all joined groups by the leader's path.
        """
        weight = self._join("weight")
        assert weight is not None  # every nn.Linear has one
        self.joined = joined[self.paths[0]] = Joined(weight, self._join("bias"))
        self._all = joined

    def are_joined(self) -> bool:
        """Return whether the modules' parameters are still parts of `joined`; if not, forget it."""
        if self.joined is None:
            return False
        # All of them: one moved weight makes the joined one stale.
        for place, module in zip(self.places, self.modules, strict=True):
            if not place.is_kept_by(module):
                self._forget()
                return False
        return True

    @torch.inference_mode(False)
    @torch.no_grad()
    def part(self) -> None:
        """Give each parameter that is a part memory of its own again."""
        for place in self.places:
            place.part()
        self._forget()
        self.places, self.modules = [], ()

    def _forget(self) -> None:
        self.joined = None  # frees the memory, unless other code holds a part
        self._all.pop(self.paths[0], None)  # another thread may have been first

    def _join(self, name: str) -> nn.Parameter | None:
        """Return one tensor of all modules' parameters, which become its rows."""
        holders = [module._parameters for module in self.modules]
        parameters = [p for holder in holders if (p := holder[name]) is not None]
        if not parameters:
            return None
        # One group at a time, so that only its weights exist twice.
        joined = torch.cat([parameter.detach() for parameter in parameters])
        rows = torch.split_with_sizes(joined, self.widths)
        try:
            for parameter, part in zip(parameters, rows, strict=True):
                # a storage of its own: code that saves models takes tensors of one storage for tied
                parameter.data = from_dlpack(part)
        finally:
            self.places = [Place(module) for module in self.modules]
        return nn.Parameter(joined, requires_grad=False)


def find_siblings(sites: Mapping[str, ModuleSite]) -> list[Siblings]:
    """Return the groups of plain linear modules, without foreign hooks or a replaced `forward`."""
    groups = []
    for path in sites:
        for names, operation in GROUPS:
            # Only from the leader, so that each group comes once.
            parent = path.removesuffix(names[0])
            is_leader = parent != path and (not parent or parent.endswith("."))
            paths = tuple(f"{parent}{name}" for name in names)
            if is_leader and all(other in sites for other in paths):
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
    parameters = [parameter for module in modules for parameter in module.parameters()]
    # a tied one cannot be two parts of a tensor
    return len(kinds) == 1 and len({*parameters}) == len(parameters)


def _is_special(parameter: nn.Parameter) -> bool:
    """Return whether a parameter cannot be given other memory."""
    is_plain = type(parameter.data) is torch.Tensor
    return not is_plain or parameter.is_meta or parameter.is_inference()


def leader_forward(
    served: Served, group: Siblings, run: Callable[..., torch.Tensor], alone: Hook
) -> Callable[..., torch.Tensor]:
    """Return the leader's `forward`, a function of the module and its input.

    `run` is `linear_with_lora` of the group's operation, the same for all groups; `alone` is the
    leader's hook where it runs without the others.
    """
    model, backend, layout = served.model, served.backend, served.layouts[group.paths[0]]
    paths, widths, operation = group.paths, group.widths, stored_as(backend, group.operation)
    device_type = group.modules[0].weight.device.type
    siblings = len(widths) - 1

    def in_full(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        call = RUNNING.call
        if call.model != model:
            if call.trains == model:
                y = run_joined(layout, group, call, self, input)
                return _run_alone(self, input, alone) if y is None else keep(input, y)
            check_thread(model)
            return functional.linear(input, self.weight, self.bias)
        tracing = is_traced()
        if not tracing:
            # Left-over outputs mean that the siblings got another input.
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
        if tracing:
            joined = call.joined.get(paths[0])
        else:
            # tensors of inference mode have no version; a weight may have been moved
            joined = None if input.is_inference() or not group.are_joined() else group.joined
        if joined is None:
            return _run_alone(self, input, alone)
        plan = call.plan(input.shape[:-1], layout, paths)
        y = run(call, tracing, input, weights, plan, *joined)
        if tracing:
            call.is_traced = True
            traced.note(input)
        else:
            RUNNING.repeats.keep(alone, backend, operation, input, weights, plan, y)
        outputs = _columns(y, widths)
        version = TRACED if tracing else input._version
        RUNNING.kept = SiblingOutputs(group, input, version, [*outputs], siblings)
        return outputs[0]

    def keep(input: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        outputs = _columns(y, widths)
        RUNNING.kept = SiblingOutputs(group, input, input._version, [*outputs], siblings)
        return outputs[0]

    place = group.places[0]  # each sibling looks at its own, when it is called

    def forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling():
            return in_full(self, input)
        # The short way of later passes: the stored call without any look at plans.
        repeat = RUNNING.repeats.get(alone)
        if (
            repeat is None
            or RUNNING.kept is not None
            or group.apart
            or (joined := group.joined) is None
            or input.is_inference()
            or not place.is_kept_by(self)
            or (y := repeat.run(input, *joined)) is None
        ):
            return in_full(self, input)
        outputs = _columns(y, widths)
        RUNNING.kept = SiblingOutputs(group, input, input._version, [*outputs], siblings)
        return outputs[0]

    return forward


def _columns(y: torch.Tensor, widths: list[int]) -> tuple[torch.Tensor, ...]:
    """Return the columns of every module."""
    # Views: on a GPU the outputs share one buffer.
    columns = torch.split_with_sizes(y, widths, -1)
    # on a CPU torch's activations round the ends of strided rows in another way than contiguous
    # ones
    return tuple(c.contiguous() for c in columns) if y.is_cpu else columns


def sibling_forward(
    model: str, group: Siblings, index: int, alone: Hook
) -> Callable[..., torch.Tensor]:
    """Return a sibling's `forward`: it returns the output that the leader kept, or runs alone.

    `index` is its place in the group, whose leader has 0; `alone` is its hook where it runs alone.
    """
    place = group.places[index]

    def forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        left = RUNNING.kept  # in the running call of this model: calls begin and end with None
        if left is not None and left.group is group and left.x is input:
            output = left.outputs[index]
            # leader and sibling are both traced, or neither is
            if output is not None and (
                is_traced() and group.modules[index] is self and traced.is_unchanged(input)
                if left.version == TRACED
                else not torch.compiler.is_dynamo_compiling()
                and left.version == input._version
                and place.is_kept_by(self)
            ):
                left.outputs[index] = None
                left.left -= 1
                if not left.left:
                    RUNNING.kept = None
                return output
            if not is_traced():
                group.are_joined()  # notes a sibling that was moved
        call = RUNNING.call
        if call.model != model and call.trains != model:
            check_thread(model)
            return functional.linear(input, self.weight, self.bias)
        return _run_alone(self, input, alone)

    return forward


def linear_forward(
    served: Served, site: ModuleSite, run: Callable[..., torch.Tensor], alone: Hook
) -> Callable[..., torch.Tensor]:
    """Return a `forward` that does the same as a hook, in less time than torch's hooks take.

    `run` is `linear_with_lora` of `run_linear`, the same for all modules; `alone` is the hook.
    """
    model, backend, layout = served.model, served.backend, served.layouts[site.path]
    path, paths, operation = site.path, (site.path,), stored_as(backend, "run_linear")

    def in_full(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        call = RUNNING.call
        if call.model != model:
            if call.trains == model:
                return _run_alone(self, input, alone)
            check_thread(model)
            return functional.linear(input, self.weight, self.bias)
        weights = call.stacks.get(path)
        tracing = is_traced()
        if weights is None or (tracing and not call.multiplies_bases):
            return _run_alone(self, input, alone)
        if tracing:
            plan = call.plan(input.shape[:-1], layout, paths)
            return run(call, tracing, input, weights, plan, self.weight, self.bias)
        parameters: dict[str, Any] = self._parameters  # not by nn.Module's slow `__getattr__`
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:  # other code has put something else in its place: pruning for instance
            return _run_alone(self, input, alone)
        plan = call.plan(input.shape[:-1], layout, paths)
        y = run(call, tracing, input, weights, plan, weight, bias)
        RUNNING.repeats.keep(alone, backend, operation, input, weights, plan, y)
        return y

    def forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling():
            return in_full(self, input)
        repeat = RUNNING.repeats.get(alone)
        parameters: dict[str, Any] = self._parameters
        if repeat is not None and "weight" in parameters and "bias" in parameters:
            y = repeat.run(input, parameters["weight"], parameters["bias"])
            if y is not None:
                return y
        return in_full(self, input)

    return forward


def _run_alone(module: nn.Linear, input: torch.Tensor, hook: Hook) -> torch.Tensor:
    output = nn.Linear.forward(module, input)
    changed = hook(module, (input,), output)
    return output if changed is None else changed
