"""The modules of a base model as they were when it was wrapped."""

from __future__ import annotations

from itertools import repeat
from typing import Any

from torch import nn

from lora_backends.errors import InvalidInputError

# typed as Any, since mypy cannot see through the overloads of a dict's get
get_item: Any = dict.get


class Structure:
    """Notices that a base model is in training mode, or no longer has the modules it had.

    The checks run before every call with adapters, so they map over flat lists: 25 us for the 423
    modules of a Llama-3-8B on a slow core.

    Args:
        base: the model.
    """

    def __init__(self, base: nn.Module) -> None:
        self._base = base
        modules = dict(base.named_modules())
        self._paths = list(modules)
        self._attributes = [vars(module) for module in modules.values()]
        self._holders: list[dict[str, nn.Module | None]] = []
        self._names: list[str] = []
        self._children: list[nn.Module | None] = []
        self._child_paths: list[str] = []
        for path, module in modules.items():
            for name, child in module._modules.items():
                self._holders.append(module._modules)
                self._names.append(name)
                self._children.append(child)
                self._child_paths.append(f"{path}.{name}" if path else name)

    def check_modules(self) -> None:
        """Refuse a model that has other modules than it had.

        Raises:
            InvalidInputError: a module was replaced or removed.
        """
        children = list(map(get_item, self._holders, self._names))
        if children != self._children:  # modules compare by identity
            self._refuse_replaced(children)

    def check_mode(self) -> None:
        """Refuse a model in training mode, where dropout changes rows.

        Raises:
            InvalidInputError: a module is in training mode.
        """
        if any(map(get_item, self._attributes, repeat("training"))):
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

    def _refuse_replaced(self, children: list[Any]) -> None:
        changed = [
            path
            for path, before, now in zip(self._child_paths, self._children, children, strict=True)
            if before is not now
        ]
        others = len(changed) - 1
        raise InvalidInputError(
            f"{type(self._base).__name__} was changed after it was wrapped: module {changed[0]}"
            f"{f' (and {others} more)' * bool(others)} was replaced or removed, so its adapters "
            f"would be lost\n"
            f"  to do: base = model.detach(), then make a new MultiLoRAModel around it"
        )
