"""The adapters of a `MultiLoRAModel`: loading, updating, pinning and unloading them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lora_backends.adapters import AdapterPool, AdapterReport, Checkpoint, Loaded
from lora_backends.adapters.describe import AdaptersReport, report
from lora_backends.adapters.files.hub import local_folder
from lora_backends.adapters.pool.tensors import copied
from lora_backends.errors import InvalidInputError, shown
from lora_backends.hf.training.loading import load_trainable
from lora_backends.hf.wrapped import WrappedModel

if TYPE_CHECKING:
    from lora_backends.adapters.pool.store import AdapterStore


class ModelAdapters:
    """The methods of `MultiLoRAModel` that change its adapters."""

    pool: AdapterPool
    store: AdapterStore | None
    _wrapped: WrappedModel

    @property
    def adapters(self) -> list[str]:
        """Names of the loaded adapters, the least recently used first."""
        return self.pool.slots.names

    def load_adapter(
        self,
        name: str,
        folder: str | Path,
        *,
        pin: bool = False,
        replace_existing: bool = False,
        trainable: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Loaded:
        """Load a PEFT checkpoint under a name.

        DoRA takes the norms of the base weights as they are now. Load the adapter again after you
        have changed them.

        Args:
            name: what rows ask for.
            folder: a PEFT checkpoint (adapter_config.json, adapter_model.safetensors or .bin), or
                the id of one on the Hugging Face hub, which is looked up in the local cache first:
                "org/name", or with a revision and a folder "org/name@main/folder".
            pin: keep it from being evicted.
            replace_existing: overwrite a loaded adapter of this name.
            trainable: train it further, as `new_adapter` does a new one.
            dtype: of the parameters that are trained, as `new_adapter`.

        Returns:
            The slot, and the name of the adapter that was evicted for it.

        Raises:
            InvalidInputError: files are missing, broken or do not fit the base model; the name is
                taken; every slot is pinned. Nothing has changed.
            UnsupportedInputError: a feature that cannot be reproduced exactly, or not trained, by
                its name. Nothing has changed.
        """
        self._wrapped.check_attached()
        if trainable:
            return self._loaded(
                load_trainable(self._wrapped, name, folder, replace_existing, dtype, self.store),
                pin,
            )
        if dtype is not None:
            raise InvalidInputError(
                f"dtype {shown(dtype)} is given for an adapter that is not trained\n"
                f"  to do: pass trainable=True, or leave dtype out"
            )
        if self.store is not None:
            return self._loaded(self.store.load(name, local_folder(folder), replace_existing), pin)
        loaded = self.pool.load(
            name, local_folder(folder), self._wrapped.check_checkpoint, replace_existing
        )
        return self._loaded(loaded, pin)

    def add_adapter(
        self,
        name: str,
        adapter: Checkpoint | Mapping[str, torch.Tensor] | nn.Module,
        config: Any | None = None,
        *,
        adapter_name: str | None = None,
        pin: bool = False,
    ) -> Loaded:
        """Put an adapter that is in memory into a slot, replacing one of the same name.

        Args:
            name: what rows ask for.
            adapter: a `PeftModel`; tensors as `peft.get_peft_model_state_dict` returns them; or a
                `Checkpoint`. Its tensors are copied.
            config: of tensors: a `peft.LoraConfig`, or what adapter_config.json holds.
            adapter_name: of a `PeftModel` with several; None takes the active one.
            pin: keep it from being evicted.

        Returns:
            As `load_adapter`.

        Raises:
            InvalidInputError: it does not fit the base model, or every slot is pinned or in use.
                Nothing has changed.
            UnsupportedInputError: as `load_adapter`.
        """
        self._wrapped.check_attached()
        checkpoint = self._from_memory(adapter, config, adapter_name)
        return self._loaded((self.store or self.pool).add(name, checkpoint), pin)

    def update_adapter(
        self,
        name: str,
        adapter: Checkpoint | Mapping[str, torch.Tensor] | nn.Module,
        config: Any | None = None,
        *,
        adapter_name: str | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        """Give a loaded adapter newer weights in its slot, e.g. after each step of its training.

        It keeps its slot and pins. Prepared adapters and captured graphs use the new weights. Do
        not replay a graph with it meanwhile.

            model.update_adapter("live", peft_model)

        Args:
            name: of a loaded adapter.
            adapter: as `add_adapter`, of the same modules.
            config: as `add_adapter`.
            adapter_name: as `add_adapter`.
            timeout_s: how long to wait, in seconds, for calls and requests that use it.

        Raises:
            InvalidInputError: it is not loaded, has other modules, or is still in use. Nothing has
                changed.
            UnsupportedInputError: as `load_adapter`.
        """
        self._wrapped.check_attached()
        self._wrapped.training.check_untrained(name)  # at once: it may be trained for long
        checkpoint = self._from_memory(adapter, config, adapter_name)
        (self.store or self.pool).update(name, checkpoint, timeout_s)

    def unload_adapter(self, name: str) -> None:
        """Free the slot of an adapter.

        The parameters of one that is trained get memory of their own, and keep their values.

        Raises:
            InvalidInputError: it is not loaded, pinned, or in use by a running call.
        """
        with self.pool.slots.lock:  # else a batch brings it back from memory in between
            if name in self._wrapped.training.adapters:
                self._wrapped.training.unload(name)
                return
            self.pool.unload(name)
            if self.store is not None:
                self.store.forget(name)

    def keep_adapters(
        self, cpu_bytes: int = 2**30, folder: str | Path | None = None, watch_s: float | None = 1.0
    ) -> AdapterStore:
        """Let adapters without a slot come back by themselves, from memory or from a folder.

        Args:
            cpu_bytes: of the adapters that stay in memory, those in slots included.
            folder: with a folder for each adapter, by its name; rows may ask for any of them.
            watch_s: seconds between two looks at the files of an adapter; None: never look.

        Returns:
            The store, whose `prefetch` writes adapters into slots while batches run.

        Raises:
            InvalidInputError: adapters are loaded already, a store exists, or `folder` is none.
        """
        from lora_backends.adapters.pool.store import AdapterStore

        self._wrapped.check_attached()
        if self.store is not None or self.adapters:
            raise InvalidInputError(
                "keep_adapters is called too late\n  given: "
                f"{'a model with a store' if self.store else f'adapters {self.adapters}'}\n"
                f"  to do: call it once, before any adapter is loaded"
            )
        self.store = AdapterStore(
            self.pool, cpu_bytes, folder, watch_s, self._wrapped.check_checkpoint
        )
        return self.store

    def adapters_report(self) -> AdaptersReport:
        """Return every adapter's rank, targets, dtype, bytes and place, and the memory they take.

        Files of adapters that are neither in a slot nor in memory are read.
        """
        return report(self.pool, self.store)

    def adapter_report(self, name: str) -> AdapterReport:
        """Return how a loaded adapter is kept: its bytes, and the error that 8 bits make.

        Raises:
            InvalidInputError: it is not loaded.
        """
        return self.pool.report(name)

    def pin_adapter(self, name: str) -> None:
        """Keep an adapter from being evicted, replaced or unloaded until `unpin_adapter`.

        Raises:
            InvalidInputError: it is not loaded.
        """
        self.pool.slots.pin(name)

    def unpin_adapter(self, name: str) -> None:
        """Take back one `pin_adapter`.

        Raises:
            InvalidInputError: it is not loaded or not pinned.
        """
        self.pool.slots.unpin(name)

    def _from_memory(self, adapter: Any, config: Any, adapter_name: str | None) -> Checkpoint:
        if isinstance(adapter, Checkpoint) and config is None and adapter_name is None:
            # The caller may go on training these tensors.
            checkpoint: Checkpoint = copied(adapter)
        else:
            from lora_backends.adapters.peft.memory import checkpoint_from_memory  # needs pydantic

            checkpoint = checkpoint_from_memory(self.pool, adapter, config, adapter_name)
        self._wrapped.check_checkpoint(checkpoint)
        return checkpoint

    def _loaded(self, loaded: Loaded, pin: bool) -> Loaded:
        if pin:
            self.pool.slots.pin(loaded.name)
        return loaded
