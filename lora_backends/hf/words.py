"""Attributes and methods that other code expects of a model: PEFT's, and those of `pipeline`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol, Self, cast

import torch
from torch import nn

from lora_backends.common.devices import as_device
from lora_backends.common.names import PEFT_BASE
from lora_backends.errors import InvalidInputError
from lora_backends.hf.calls.entries import RowAdapters, is_per_token
from lora_backends.hf.hooks.linear import rows_and_length
from lora_backends.hf.layout.sharded import class_of


class ModelWords:
    """The attributes of a Transformers model that other code reads."""

    base: nn.Module

    @property
    def config(self) -> Any:
        """The base model's configuration."""
        return cast(Any, self.base).config

    @property
    def generation_config(self) -> Any:
        """The base model's settings of `generate`."""
        return cast(Any, self.base).generation_config

    @property
    def device(self) -> torch.device:
        """The base model's device."""
        return next(self.base.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The base model's dtype."""
        return cast(Any, self.base).dtype  # type: ignore[no-any-return]

    @property
    def main_input_name(self) -> str:
        """The name of the base model's first argument."""
        return getattr(self.base, "main_input_name", "input_ids")

    @property
    def training(self) -> bool:
        """Whether the base model is in training mode."""
        return self.base.training

    def train(self, mode: bool = True) -> Self:
        """Put the base model into training mode, or with False into eval mode.

        In training mode `lora_dropout` of adapters that are trained acts on their own rows, and the
        base model's own dropout as torch's. Calls run in it only while adapters are trained.
        """
        self.base.train(mode)
        return self

    def eval(self) -> Self:
        """Put the base model into eval mode."""
        self.base.eval()
        return self

    def can_generate(self) -> bool:
        """Return whether the base model has a `generate`."""
        return bool(cast(Any, self.base).can_generate())

    def to(
        self, device: Any = None, dtype: torch.dtype | None = None, non_blocking: bool = False
    ) -> Self:
        """Return the model if it has this device and dtype already; refuse any other.

        As `torch.nn.Module.to`, it takes a device, a dtype, both, or a tensor that has them.

        Raises:
            InvalidInputError: `device` is invalid, or the model has another device or dtype.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        elif isinstance(device, torch.Tensor):
            device, dtype = device.device, device.dtype
        if device is not None:
            as_device(device)  # raises if it is not a device
            wanted = torch.device(device)
            if wanted.type != self.device.type or wanted.index not in (None, self.device.index):
                _refuse_to("move", f"on {self.device}, and cannot be moved to {wanted}")
        if dtype not in (None, self.dtype):
            _refuse_to("convert", f"of {self.dtype}, and cannot be converted to {dtype}")
        return self


def _refuse_to(verb: str, why: str) -> NoReturn:
    raise InvalidInputError(
        f"the model and its adapters are {why}\n  to do: {verb} the base model, then wrap it"
    )


class Adapted(Protocol):
    """A model that takes the adapter of every row, as `MultiLoRAModel` does."""

    base: nn.Module

    def __call__(self, *args: Any, adapters: Any, **inputs: Any) -> Any:
        """Run a forward pass."""

    def generate(self, inputs: Any = None, *, adapters: Any, **kwargs: Any) -> Any:
        """Run `generate`."""


class OneAdapter(ModelWords):
    """A model whose rows all use one adapter, for code that calls it without `adapters`.

    Made by `MultiLoRAModel.as_adapter`, e.g. for `transformers.pipeline(model=...)` and
    `Trainer(...).predict`.

    Args:
        model: with the adapter.
        name: of the adapter; None for the base model.
    """

    def __init__(self, model: Adapted, name: str | None) -> None:
        self.model, self.base, self.name = model, model.base, name
        # A pipeline looks for its task in the name of the class, and warns of others.
        kind = class_of(self.base)
        self.__class__ = type(kind.__name__, (OneAdapter,), {"forward": _forward_as(kind)})

    _modules: Mapping[str, nn.Module] = {}  # Trainer asks whether one of them is compiled

    def modules(self) -> Iterator[nn.Module]:
        """Return the base model's modules, as Trainer asks for their devices."""
        return self.base.modules()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the base model's parameters, as Trainer asks for their kinds."""
        return self.base.parameters()

    def train(self, mode: bool = True) -> Self:
        """Refuse training mode, in which no call runs.

        Raises:
            InvalidInputError: `mode` is not False.
        """
        return self.eval() if not mode else self._refuse_training()

    def named_children(self) -> NoReturn:
        """Refuse `Trainer(...).train`, which looks here for the parameters to train."""
        self._refuse_training()

    def _refuse_training(self) -> NoReturn:
        raise InvalidInputError(
            f"adapter {self.name!r} of this model cannot be trained\n"
            f"  allowed: forward passes and generate, e.g. Trainer(...).predict\n"
            f"  to do: new_adapter or load_adapter(trainable=True), then a TrainingModule of it"
        )

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Run the base model's forward pass with the adapter in every row."""
        return self.model(*args, adapters=self._adapters(args, inputs), **inputs)

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """As a call: code looks here for the names of the inputs."""
        return self(*args, **inputs)

    def generate(self, *args: Any, **inputs: Any) -> Any:
        """Run the base model's `generate` with the adapter in every row."""
        return self.model.generate(*args, adapters=self._adapters(args, inputs), **inputs)

    def _adapters(self, args: Sequence[Any], inputs: Mapping[str, Any]) -> list[str | None]:
        # Rows are counted before the model binds its arguments.
        named = {self.main_input_name: args[0], **inputs} if args else inputs
        return [self.name] * rows_and_length(named, self.main_input_name)[0]


def _forward_as(kind: type[nn.Module]) -> Any:
    """Return `OneAdapter.forward` with a model's signature: Trainer drops inputs that it lacks."""

    def forward(self: OneAdapter, *args: Any, **inputs: Any) -> Any:
        return self(*args, **inputs)

    forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    return forward


def chosen_adapters(adapters: Any, adapter_names: Any) -> Any:
    """Return the entries of rows, which are given under this library's name or under PEFT's."""
    if (adapters is None) is (adapter_names is None):
        raise InvalidInputError(
            f"{'no adapters are' if adapters is None else 'adapters and adapter_names are both'} "
            f"given\n  allowed: adapters=[...] with one name or None per row\n"
            f"  to do: for code that calls a model without them, e.g. a pipeline, pass "
            f"model.as_adapter(name)"
        )
    # PEFT's name for the base model is allowed in both arguments.
    chosen = adapters if adapter_names is None else adapter_names
    if isinstance(chosen, str) or not isinstance(chosen, Sequence):
        return chosen  # refused with the entries
    return [without_base(entry) for entry in chosen]


def without_base(entry: RowAdapters) -> RowAdapters:
    """Return an entry with None where PEFT's name for the base model stands."""
    if is_per_token(entry):
        return [None if each == PEFT_BASE else each for each in entry]  # type: ignore[union-attr]
    return None if isinstance(entry, str) and entry == PEFT_BASE else entry
