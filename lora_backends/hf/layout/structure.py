"""The modules of a base model, its dtype and device as they were when it was wrapped."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import accumulate, repeat
from operator import attrgetter
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from lora_backends.errors import InvalidInputError

# typed as Any, since mypy cannot see through the overloads of a dict's get
_get: Any = dict.get
_forward: Any = attrgetter("forward")
_FUNCTIONS = (FunctionType, MethodType, partial)
_DEEPEST = 4  # nested wrappers of a `forward` that are searched


def _is_wide(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point() and parameter.dtype.itemsize > 1


def _form(parameter: nn.Parameter | None) -> tuple[torch.dtype, torch.device] | None:
    return None if parameter is None else (parameter.dtype, parameter.device)


def _joined(parent: str, name: str) -> str:
    return f"{parent}.{name}"


def _holds(forward: Any, before: Any, deepest: int = _DEEPEST) -> bool:
    """Return whether a `forward` is `before` or wraps it, as Accelerate's does.

    A wrapper holds `before` in its closure, in a partial or in `__wrapped__`.
    """
    function = getattr(forward, "__func__", forward)
    if function is getattr(before, "__func__", before):
        return True
    if not deepest or not isinstance(function, _FUNCTIONS):
        return False
    held = [getattr(function, "__wrapped__", None), *getattr(function, "args", ())]
    if isinstance(function, partial):
        held.append(function.func)
    else:
        cells = function.__closure__ or ()
        held += [cell.cell_contents for cell in cells if cell != CellType()]
    return any(_holds(part, before, deepest - 1) for part in held if isinstance(part, _FUNCTIONS))


class Structure:
    """Notices that a base model is in training mode or was converted, or that modules changed.

    The checks run before every call with adapters, so they are few calls of C code.
    """

    def __init__(self, base: nn.Module) -> None:
        self._base = base
        modules = dict(base.named_modules())
        self._paths = list(modules)
        # The dicts themselves, so that a check makes no Python call per module.
        self._attributes = [vars(module) for module in modules.values()]
        parents = {path: module for path, module in modules.items() if module._modules}
        self._parents = list(parents)
        self._holders = [module._modules for module in parents.values()]
        # Copies, to compare with the live dicts.
        self._children = [dict(holder) for holder in self._holders]
        self._parameters: dict[str, nn.Parameter | None] = {}
        self._name = ""  # of a parameter that has the model's dtype and device, if there is any
        for module in modules.values():
            for name, parameter in module._parameters.items():
                if parameter is not None and not self._name and _is_wide(parameter):
                    self._parameters, self._name = module._parameters, name
        self._form = _form(self._parameters.get(self._name))
        self.watch_forwards(())

    def watch_forwards(self, paths: Iterable[str]) -> None:
        """Let `check_modules` refuse another `forward` of these modules, or of any around them."""
        # every prefix of a path names a module around the path's
        around = {name: None for path in paths for name in accumulate(path.split("."), _joined)}
        self._watched = {path: self._base.get_submodule(path) for path in around}
        self._own = [vars(module) for module in self._watched.values()]
        kinds = {type(module): None for module in self._watched.values()}
        self._classes = [kind for kind in kinds if kind is not type(self._base)]
        self._forwards, self._of_classes = self._own_forwards(), self._forwards_of_classes()

    def check_modules(self) -> None:
        """Raise InvalidInputError if a module was removed, or it or its `forward` was replaced."""
        if self._holders != self._children:  # modules compare by identity
            self._refuse_replaced()
        own = self._own_forwards()
        if own != self._forwards or self._forwards_of_classes() != self._of_classes:
            self._check_forwards(own)

    def check_state(self, may_train: bool = False) -> None:
        """Refuse to run a model that was converted, or is in training mode unless it may be.

        Raises:
            InvalidInputError: the model has another dtype or device than its adapters, or a module
                is in training mode, where dropout changes rows.
        """
        # One parameter is enough: .to() converts all of them.
        form = _form(self._parameters.get(self._name))
        if form != self._form and form is not None:
            self._refuse_converted(form)
        if not may_train and any(map(_get, self._attributes, repeat("training"))):
            self._refuse_training()

    def _refuse_training(self) -> None:
        training = [
            path
            for path, attributes in zip(self._paths, self._attributes, strict=True)
            if attributes["training"]
        ]
        where = "" if "" in training else f": module {training[0]}"
        raise InvalidInputError(
            f"{type(self._base).__name__} is in training mode{where}\n"
            f"  allowed: eval mode, because dropout changes the rows\n"
            f"  to do: model.base.eval()"
        )

    def _refuse_converted(self, form: tuple[torch.dtype, torch.device]) -> None:
        assert self._form is not None  # there was such a parameter
        is_offloaded = any("_hf_hook" in attributes for attributes in self._attributes)
        # Accelerate moves offloaded weights within a pass: the device changes, the dtype does not.
        if is_offloaded and form[0] == self._form[0]:
            return
        raise InvalidInputError(
            f"{type(self._base).__name__} was converted after it was wrapped: to {form[0]} on "
            f"{form[1]}, from {self._form[0]} on {self._form[1]}\n"
            f"  allowed: the dtype and device of its adapters\n"
            f"  to do: convert it back; or base = model.detach(), then make a new MultiLoRAModel "
            f"around it"
        )

    def _own_forwards(self) -> list[Any]:
        """Return the `forward` that each watched module has of its own; None: its class's."""
        return list(map(_get, self._own, repeat("forward")))

    def _forwards_of_classes(self) -> list[Any]:
        return list(map(_forward, self._classes))

    def _check_forwards(self, own: list[Any]) -> None:
        """Refuse a `forward` that does not hold the earlier one, and so may leave out LoRA."""
        parts = zip(self._watched.items(), own, self._forwards, strict=True)
        for (path, module), now, before in parts:
            plain = type(module).forward
            if now is not before and not _holds(now or plain, before or plain):
                self._refuse_forward(f"module {path}")
        for kind, before in zip(self._classes, self._of_classes, strict=True):
            if not _holds(kind.forward, before):
                self._refuse_forward(f"class {kind.__name__}")

    def _refuse_forward(self, changed: str) -> None:
        raise InvalidInputError(
            f"{type(self._base).__name__} was changed after it was wrapped: {changed} has another "
            f"forward, which may leave out LoRA\n"
            f"  allowed: a forward that calls the earlier one, held in its closure or __wrapped__\n"
            f"  to do: base = model.detach(), then make a new MultiLoRAModel around it"
        )

    def _refuse_replaced(self) -> None:
        changed = [
            f"{parent}.{name}" if parent else name
            for parent, holder, children in zip(
                self._parents, self._holders, self._children, strict=True
            )
            for name, child in children.items()
            if holder.get(name) is not child
        ]
        if not changed:  # modules were added
            return
        others = len(changed) - 1
        raise InvalidInputError(
            f"{type(self._base).__name__} was changed after it was wrapped: module {changed[0]}"
            f"{f' (and {others} more)' * bool(others)} was replaced or removed, so its adapters "
            f"would be lost\n"
            f"  to do: base = model.detach(), then make a new MultiLoRAModel around it"
        )
