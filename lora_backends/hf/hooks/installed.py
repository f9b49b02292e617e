"""Adds hooks and joined weights to a base model for `MultiLoRAModel`, and removes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from threading import Lock
from typing import Any, cast

from torch import nn

from lora_backends.errors import InvalidInputError
from lora_backends.hf.calls.running import Joined
from lora_backends.hf.hooks.convolutions import convolution_hook
from lora_backends.hf.hooks.experts import ExpertSite, experts_forward
from lora_backends.hf.hooks.linear import Served, adder, end_hook, lora_hook
from lora_backends.hf.hooks.overlapped import linear_with_lora
from lora_backends.hf.hooks.overrides import ForwardOverride
from lora_backends.hf.hooks.routers import router_forward
from lora_backends.hf.hooks.siblings import (
    are_plain,
    find_siblings,
    leader_forward,
    linear_forward,
    sibling_forward,
)
from lora_backends.hf.layout.sites import ModuleSite


class Hooked:
    """The hooks of one wrapper on its base model."""

    def __init__(
        self,
        served: Served,
        sites: Mapping[str, ModuleSite],  # that adapters may touch, routers included
        experts: Mapping[str, ExpertSite],  # stacked parameters, by path
        routers: Mapping[str, ModuleSite],
        fuse: bool,  # join modules with one input
    ) -> None:
        self._served = served
        self._sites, self._experts, self._routers = sites, experts, routers
        self.fuse = fuse
        self.handles: list[Any] = []
        """Of all hooks; none before `register` and after `remove`."""
        self.groups = find_siblings(sites) if fuse else []
        self.slices = {path: at for group in self.groups for at, path in enumerate(group.paths)}
        """Path of a module with siblings to its slice of the stack that they share."""
        self.joined: dict[str, Joined] = {}
        """A leader's path to the weights of its group, while they lie as they were joined."""
        self._lock = Lock()  # guards _users and _closed
        self._users: set[object] = set()  # blocks of `in_use`
        self._closed = False

    def register(self, base: nn.Module, begin: Callable[..., None]) -> None:
        """Hook every module that an adapter may touch, and the start of a forward pass."""
        self.handles.append(base.register_forward_pre_hook(begin, with_kwargs=True))
        self.handles.append(base.register_forward_hook(end_hook))
        try:
            # all of them from the start: a compiled program would not notice hooks that come later
            self._add()
        except BaseException:  # no memory to join weights, for instance
            self.remove()
            raise

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the model attached while the block runs."""
        # An object per block, since one thread may be in several.
        user = object()
        try:
            with self._lock:
                self.check()
                self._users.add(user)
            yield
        finally:
            self._users.discard(user)  # one step: an interrupt leaves nothing in use

    def check(self) -> None:
        """Raise InvalidInputError for a model that was detached."""
        if self._closed:
            raise InvalidInputError(
                "this MultiLoRAModel was detached from its base model\n"
                "  to do: make a new one around the base model"
            )

    def close(self) -> None:
        """Refuse every later use of the hooks; InvalidInputError while they are in use."""
        with self._lock:
            if self._users:
                raise InvalidInputError(
                    "the model cannot be detached while it runs with adapters\n"
                    "  to do: wait until its calls, requests and blocks of `using` have ended"
                )
            # Under the lock: no call may begin between the check and this.
            self._closed = True

    def remove(self) -> None:
        """Take every hook off, and give joined weights memory of their own again."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        for group in self.groups:
            group.part()

    def drop_moved(self) -> int:
        """Drop groups whose weights were moved, and return how many are left."""
        # compiled programs run the modules of dropped groups alone; eager passes drop a group
        # themselves when they meet it
        return sum([group.are_joined() for group in self.groups])

    def check_unmoved(self, groups: int) -> None:
        """Raise InvalidInputError if fewer groups are joined than before compiled programs ran."""
        if self.drop_moved() != groups:
            raise InvalidInputError(
                "weights of the base model were moved or replaced, and a compiled program may have "
                "gone on reading those of before\n"
                "  allowed: values written in place; other weights before prepare(), or between "
                "calls and blocks of `using`\n"
                "  to do: run it again"
            )

    def _add(self) -> None:
        served = self._served
        # shared by all modules, so that they stay in the processor's cache during a step
        with_lora = cache(partial(linear_with_lora, served.backend))
        add = adder(served.backend, "run_linear")
        sites = {path: site for path, site in self._sites.items() if site.refusal is None}
        hooks = {
            path: (convolution_hook if site.is_convolution else lora_hook)(served, site, add)
            for path, site in sites.items()
        }
        for group in self.groups:
            group.join(self.joined)
            alone = [hooks.pop(path) for path in group.paths]
            forwards = [leader_forward(served, group, with_lora(group.operation), alone[0])]
            for place, hook in enumerate(alone[1:], 1):
                forwards.append(sibling_forward(served.model, group, place, hook))
            self.handles += map(ForwardOverride, group.modules, forwards)
        for expert_site in self._experts.values():
            if expert_site.refusal is None:
                forward = experts_forward(served, expert_site)
                self.handles.append(ForwardOverride(expert_site.module, forward))
        for path, hook in hooks.items():
            site, module = sites[path], sites[path].module
            # A router returns the choice of experts, where a hook would be too late.
            if path in self._routers:
                forward = router_forward(served, site)
                self.handles.append(ForwardOverride(module, forward))
            # Hooks of other code must still run, and these need torch's own call.
            elif self.fuse and are_plain((module,)):
                forward = linear_forward(served, site, with_lora("run_linear"), hook)
                self.handles.append(ForwardOverride(cast(nn.Linear, module), forward))
            else:
                self.handles.append(module.register_forward_hook(hook))
