"""The modules of a base model, its dtype and device as they were when it was wrapped."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import torch
from torch import nn

from lora_backends.errors import InvalidInputError

# typed as Any, since mypy cannot see through the overloads of a dict's get
_get: Any = dict.get


def _is_wide(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point() and parameter.dtype.itemsize > 1


def _form(parameter: nn.Parameter | None) -> tuple[torch.dtype, torch.device] | None:
    return None if parameter is None else (parameter.dtype, parameter.device)


class Structure:
    """Notices that a base model is in training mode, was converted, or lacks modules it had.

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

    def check_modules(self) -> None:
        """Raise InvalidInputError if a module was replaced or removed."""
        if self._holders != self._children:  # modules compare by identity
            self._refuse_replaced()

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
