"""`TrainingModule`: trained adapters as an `nn.Module`, for trainers that want one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import nn

from lora_backends.errors import InvalidInputError, UnsupportedInputError, shown
from lora_backends.hf.calls.entries import RowAdapters, adapter_names
from lora_backends.hf.training.losses import adapter_losses, label_counts

if TYPE_CHECKING:
    from lora_backends.hf.model import MultiLoRAModel


class TrainingModule(nn.Module):
    """The parameters of adapters that a `MultiLoRAModel` trains, and its forward pass.

    For `torch.nn.parallel.DistributedDataParallel`, `accelerate` and Transformers' `Trainer`. The
    base model is no part of it, so that only adapters are moved, averaged and saved.

        module = TrainingModule(model, ["alice", "bob"])
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
        module(adapters=["alice", "bob", None], labels=labels, **inputs).loss.backward()

    Keys of its `state_dict` are the adapter's name, a dot and the name that PEFT saves. The tensors
    there are copies, and `load_state_dict` writes into the parameters.

    Args:
        model: with the adapters.
        names: of adapters that are trained.

    Raises:
        InvalidInputError: no names, one that comes twice, or one that is not trained.
    """

    accepts_loss_kwargs = False
    """Tells `Trainer` that the loss is a mean, which it divides by its accumulation steps."""

    def __init__(self, model: MultiLoRAModel, names: Sequence[str]) -> None:
        super().__init__()
        if isinstance(names, str) or not names or len({*names}) < len(names):
            raise InvalidInputError(
                f"names is {shown(names)}\n  allowed: a list of names of adapters, each once"
            )
        training = model._wrapped.training
        self.model, self.names = model, tuple(names)
        self._trained = [training.get(name) for name in self.names]
        self._held: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        for adapter in self._trained:
            for key, parameter in adapter.parameters.items():
                *path, last = f"{adapter.name}.{key}".split(".")
                part = _part_at(self, path)
                part.register_parameter(last, parameter)
                self._held.append((part._parameters, last, parameter))
        self.train(model.training)

    @property
    def config(self) -> Any:
        """The base model's configuration."""
        return self.model.config

    @property
    def main_input_name(self) -> str:
        """The name of the base model's first argument."""
        return self.model.main_input_name

    def forward(
        self,
        *,
        adapters: Sequence[RowAdapters],
        labels: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """Run a forward pass, and with labels compute the loss of this module's adapters.

        The loss is the sum of the adapters' mean losses, so the gradient of each adapter is that of
        training it alone. Rows of other adapters and rows with None have none.

        Args:
            adapters: per row a name or None.
            labels: [rows, tokens] token ids; -100 has no loss.
            counts: [number of names], what the sum of each adapter's losses is divided by, instead
                of the number of its labels here: for means over several batches, see `counts_of`.
            inputs: of the base model.

        Returns:
            What the base model returns, with labels also `loss`, a scalar.

        Raises:
            InvalidInputError: as a call of the model, or of `adapter_losses`; an adapter of this
                module was unloaded; its parameters were replaced. With labels, and grad mode on: no
                row has an adapter of this module, or one has another adapter that is trained.
            UnsupportedInputError: as a call of the model; this is a replica of `DataParallel`.
        """
        self._check_held()
        if labels is None:
            return self.model(adapters=adapters, **inputs)
        if torch.is_grad_enabled():
            self._check_rows(adapters)
        output = self.model(adapters=adapters, **inputs)
        if not hasattr(output, "logits"):
            raise InvalidInputError(
                f"the base model returns {type(output).__name__}, without logits by name\n"
                f"  to do: return_dict=True, or a model with a language model's head"
            )
        by_name = None if counts is None else self._by_name(counts)
        entries = [
            None if isinstance(entry, str) and entry not in self.names else entry
            for entry in adapters
        ]
        losses = adapter_losses(output.logits, labels, entries, by_name)
        # The start keeps a graph out of the loss of a batch without rows of this module.
        loss = sum(losses.values(), start=torch.zeros((), device=output.logits.device))
        return type(output)(**{**output, "loss": loss})

    def counts_of(self, labels: torch.Tensor, adapters: Sequence[RowAdapters]) -> torch.Tensor:
        """Return the number of labels that each adapter's mean is over, [number of names] float32.

        Sum it over the batches of one step, whether they run one after another (gradients
        accumulate) or on several processes (`torch.distributed.all_reduce`). Divided by the number
        of processes where gradients are averaged over them, as DDP does, it is the `counts` of
        each batch with which the gradient is that of one batch with all rows.

        Args:
            labels: [rows, tokens] token ids; -100 has no loss.
            adapters: per row a name or None.

        Raises:
            InvalidInputError: not one adapter per row of labels.
            UnsupportedInputError: a row with a blend, or with an entry per token.
        """
        counts = label_counts(labels, adapters)
        zero = torch.zeros((), device=labels.device)
        return torch.stack([counts.get(name, zero) for name in self.names]).float()

    def train(self, mode: bool = True) -> Self:
        """Put the base model into training mode, or with False into eval mode."""
        self.model.train(mode)
        return super().train(mode)

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Enable the base model's gradient checkpointing, as `Trainer` does."""
        base: Any = self.model.base
        if hasattr(base, "activation_checkpointing_enable"):
            base.activation_checkpointing_enable(activation_checkpointing_kwargs, **options)
        else:
            base.gradient_checkpointing_enable(activation_checkpointing_kwargs)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Enable the base model's gradient checkpointing, as older versions of `Trainer` do."""
        base: Any = self.model.base
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse copy and pickle, as the model does; save `state_dict()`."""
        self.model.__reduce_ex__(protocol)

    def _check_rows(self, adapters: Sequence[RowAdapters]) -> None:
        """Refuse a batch whose loss has no graph, or that trains an adapter without a loss."""
        named = adapter_names(adapters)
        others = named & self.model._wrapped.training.adapters.keys() - {*self.names}
        if others or not named & {*self.names}:
            given = ", ".join(sorted(map(repr, named))) or "no adapter in any row"
            raise InvalidInputError(
                f"the batch does not train the adapters of this module\n  given: {given}\n"
                f"  allowed: at least one row of {', '.join(self.names)}; others of None and of "
                f"adapters that are not trained\n"
                f"  to do: another batch, torch.no_grad(), or a TrainingModule with these names"
            )

    def _check_held(self) -> None:
        """Refuse to run where the parameters of this module are not those that the model reads."""
        if getattr(self, "_is_replica", False):
            raise UnsupportedInputError(
                "torch.nn.DataParallel replicates parameters, and the model reads its own\n"
                "  to do: torch.nn.parallel.DistributedDataParallel with a process per device"
            )
        adapters = self.model._wrapped.training.adapters
        gone = [each.name for each in self._trained if adapters.get(each.name) is not each]
        if gone:
            raise InvalidInputError(
                f"adapter {gone[0]!r} was unloaded since this module was made\n"
                f"  to do: make a new TrainingModule, and a new optimizer"
            )
        if not all(holder.get(key) is parameter for holder, key, parameter in self._held):
            raise InvalidInputError(
                "parameters of this module were replaced, and the model reads the old ones\n"
                "  allowed: changes in place; fully_shard and load_state_dict(assign=True) put "
                "other tensors in their place\n"
                "  to do: make a new TrainingModule; shard the base model alone"
            )

    def _by_name(self, counts: torch.Tensor) -> dict[str, torch.Tensor]:
        if not isinstance(counts, torch.Tensor) or counts.shape != (len(self.names),):
            given = list(counts.shape) if isinstance(counts, torch.Tensor) else shown(counts)
            raise InvalidInputError(
                f"counts is {given}\n  allowed: a tensor [{len(self.names)}], as of counts_of"
            )
        return dict(zip(self.names, counts.unbind(), strict=True))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Refuse conversions: the model reads the parameters where they are."""
        first = self._held[0][2]
        address = first.data_ptr()
        with torch.no_grad():
            made = fn(first)
        if made.data_ptr() != address:
            raise InvalidInputError(
                f"the adapters are {first.dtype} on {first.device}, and cannot be moved to "
                f"{made.dtype} on {made.device}\n"
                f"  to do: move the base model before it is wrapped; new_adapter(dtype=...)"
            )
        return self


def _part_at(module: nn.Module, path: Sequence[str]) -> nn.Module:
    """Return the module at a path, made of empty ones where there is none."""
    for name in path:
        # Not by add_module: an adapter's name may be that of a method, as "train".
        module = module._modules.setdefault(name, _NamePart())  # type: ignore[assignment]
    return module


class _NamePart(nn.Module):
    """A part of the name of a parameter."""

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Save copies: the parameters of all adapters are views of the same stacks."""
        for name, parameter in self._parameters.items():
            if parameter is not None:
                tensor = (
                    parameter
                    if keep_vars
                    else parameter.detach().clone(memory_format=torch.contiguous_format)
                )
                destination[prefix + name] = tensor
