"""`Training`: the adapters of a model that are trained."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from lora_backends.adapters import AdapterPool, Checkpoint, Loaded
from lora_backends.backend import LoRABackend
from lora_backends.errors import InvalidInputError, UnsupportedInputError, did_you_mean
from lora_backends.hf.calls.entries import RowAdapters, adapter_names
from lora_backends.hf.calls.running import TRAINED
from lora_backends.hf.training.adapter import TrainedAdapter, check_dtype
from lora_backends.hf.training.checkpointing import Checkpointing
from lora_backends.hf.training.features import check_checkpoint


class Trainable(Protocol):
    """A wrapped model, as training uses it."""

    base: nn.Module
    backend: LoRABackend
    key: str
    pool: AdapterPool
    routers: frozenset[str]

    @property
    def slices(self) -> Mapping[str, int]:
        """Path of a module with siblings to its slice of the stack that they share."""

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Refuse an adapter that deltas of rows cannot reproduce."""


class Training:
    """The adapters of a wrapped model that are trained."""

    def __init__(self, wrapped: Trainable) -> None:
        self._wrapped = wrapped
        self.adapters: dict[str, TrainedAdapter] = {}
        """By name."""
        self.checkpointing = Checkpointing(wrapped.base, wrapped.key)
        weakref.finalize(self, TRAINED.discard, wrapped.key)
        self._frozen: list[nn.Parameter] = []  # of the base, that required a gradient before

    def check_possible(self, dtype: torch.dtype | None, has_store: bool) -> None:
        """Refuse to train where the model, its backend or its adapters' dtype do not allow it.

        Raises:
            InvalidInputError: parameters cannot have `dtype`.
            UnsupportedInputError: 8-bit adapters, a store, or a backend without gradients.
        """
        pool, backend = self._wrapped.pool, self._wrapped.backend
        problem = None
        if pool.stored_dtype.itemsize == 1:
            problem = f"adapters of {pool.stored_dtype} (adapter_dtype) cannot be trained"
        elif has_store:
            problem = (
                "a model with keep_adapters() cannot train: its store holds copies of adapters"
            )
        elif not backend.differentiable:
            problem = f"backend {backend.name!r} computes no gradients"
        if problem is not None:
            raise UnsupportedInputError(
                f"{problem}\n  to do: make another MultiLoRAModel for training"
            )
        check_dtype(dtype, pool.stored_dtype)

    def add(
        self,
        name: str,
        checkpoint: Checkpoint,
        values: Mapping[str, Any],
        dtype: torch.dtype | None,
        replace_existing: bool,
    ) -> Loaded:
        """Put an adapter into a slot, and make its parameters.

        Raises:
            InvalidInputError: it does not fit, or there is no slot. Nothing has changed.
            UnsupportedInputError: parts that cannot be trained. Nothing has changed.
        """
        wrapped = self._wrapped
        pool, slots = wrapped.pool, wrapped.pool.slots
        check_checkpoint(checkpoint, wrapped.routers)
        wrapped.check_checkpoint(checkpoint)
        # all checks come before the slot changes
        staged = pool.stage(name, checkpoint)
        with slots.lock:
            pool.check_new(name, replace_existing)
            loaded = pool.put(name, staged)
            slots.begin_training(name)
            self.adapters[name] = TrainedAdapter(
                name, loaded.slot, pool, checkpoint, values, wrapped.slices, dtype
            )
            # a call reads masters as the last step left them
            slots.before_use = self.flush
        TRAINED.add(wrapped.key)
        self._freeze()
        return loaded

    def of(self, names: Iterable[str]) -> list[TrainedAdapter]:
        """Return those of the names that are trained."""
        adapters = self.adapters
        return [adapters[name] for name in names if name in adapters]

    def any_of(self, entries: Sequence[RowAdapters]) -> bool:
        """Return whether an adapter that the entries of rows name is trained."""
        return bool(self.adapters) and not self.adapters.keys().isdisjoint(adapter_names(entries))

    def get(self, name: str) -> TrainedAdapter:
        """Return an adapter that is trained; InvalidInputError if there is none of this name."""
        adapter = self.adapters.get(name)
        if adapter is None:
            loaded = name in self._wrapped.pool.slots
            raise InvalidInputError(
                f"adapter {name!r} is {'loaded, and not trained' if loaded else 'not loaded'}"
                f"{did_you_mean(str(name), self.adapters)}\n"
                f"  trained: {', '.join(self.adapters) or 'none'}\n"
                f"  to do: new_adapter(name, config), or load_adapter(name, folder, trainable=True)"
            )
        return adapter

    def check_untrained(self, name: str) -> None:
        """Raise InvalidInputError if an adapter is trained, and must not get other weights."""
        if name in self.adapters:
            raise InvalidInputError(
                f"adapter {name!r} is being trained, so it cannot be updated\n"
                f"  to do: copy values into its adapter_parameters() under torch.no_grad()"
            )

    def flush_rows(self, entries: Sequence[RowAdapters]) -> None:
        """Bring masters into the slots of the adapters that the rows' entries name."""
        if self.adapters:
            self.flush(adapter_names(entries))

    def flush(self, names: Iterable[str]) -> None:
        """Bring masters into the slots of adapters."""
        for adapter in self.of(names):
            if adapter.has_masters:
                # masters are copied into the slot, which streams may still read
                with self._wrapped.pool.writing(adapter.slot):
                    adapter.flush()
            else:
                adapter.flush()

    def unload(self, name: str) -> None:
        """Free the slot of a trained adapter; its parameters keep their values, without effect.

        Raises:
            InvalidInputError: it is pinned, or in use. Nothing has changed.
        """
        slots = self._wrapped.pool.slots
        with slots.lock:
            adapter = self.adapters[name]
            # a trained adapter holds its slot, which the pool would refuse to free
            slots.end_training(name)
            try:
                self._wrapped.pool.unload(name)
            except BaseException:
                if name in slots:
                    # still in its slot, because a call uses it
                    slots.begin_training(name)
                raise
            del self.adapters[name]
            adapter.leave_slot()  # before another adapter may take the slot
            for other in self.adapters.values():
                other.of_batches.clear()  # they hold this adapter's parameters
            self._note_empty()

    def close(self) -> None:
        """Let all parameters leave their slots, and the base model's require gradients again."""
        for name in list(self.adapters):
            self._wrapped.pool.slots.end_training(name)
            # parameters outlive the wrapper, and its slots do not
            self.adapters.pop(name).leave_slot()
        self._note_empty()
        self.checkpointing.remove()
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._frozen.clear()

    def _note_empty(self) -> None:
        if not self.adapters:
            self._wrapped.pool.slots.before_use = None
            TRAINED.discard(self._wrapped.key)

    def _freeze(self) -> None:
        for parameter in self._wrapped.base.parameters():
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                self._frozen.append(parameter)
