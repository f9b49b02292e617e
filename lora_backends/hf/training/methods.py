"""The methods of `MultiLoRAModel` that train adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lora_backends.adapters import AdapterPool, Loaded
from lora_backends.hf.calls.entries import RowAdapters
from lora_backends.hf.training.losses import adapter_losses
from lora_backends.hf.training.saving import save_checkpoint
from lora_backends.hf.training.start import new_tensors

if TYPE_CHECKING:
    from lora_backends.adapters.pool.store import AdapterStore
    from lora_backends.hf.wrapped import WrappedModel


class ModelTraining:
    """The methods of `MultiLoRAModel` that train adapters."""

    base: nn.Module
    pool: AdapterPool
    store: AdapterStore | None
    _wrapped: WrappedModel

    def new_adapter(
        self, name: str, config: Any, *, dtype: torch.dtype | None = None, pin: bool = False
    ) -> Loaded:
        """Put a new adapter into a slot, to be trained.

        Its values are PEFT's own: after ``torch.manual_seed(seed)`` they equal those of
        ``peft.get_peft_model(base, config)``, rounded to the dtype of the parameters. Like PEFT,
        this freezes the base model's parameters; `detach` takes that back. The adapter keeps its
        slot until `unload_adapter`: it is neither evicted nor replaced.

        Args:
            name: what rows ask for.
            config: a `peft.LoraConfig`.
            dtype: of the parameters. None: that of the stacks, the model's; the parameters are
                views of the adapter's slot. float32 over 16-bit stacks: masters, which are rounded
                into the slot before each call.
            pin: as `load_adapter`; a pinned adapter cannot be unloaded.

        Returns:
            As `load_adapter`.

        Raises:
            InvalidInputError: a wrong configuration or dtype; the name is taken; no slot is free;
                a rank is larger than `max_rank`. Nothing has changed.
            UnsupportedInputError: a feature that cannot be trained, by its name; adapters of 8
                bits; a model with `keep_adapters`. Nothing has changed.
        """
        self._wrapped.check_attached()
        training = self._wrapped.training
        training.check_possible(dtype, self.store is not None)
        self.pool.check_new(name, replace_existing=False)  # before torch's generator moves
        from lora_backends.adapters.peft.memory import checkpoint_from_memory  # needs pydantic

        tensors, values = new_tensors(self.base, config, name)
        # through the reader of files, so that a new adapter passes the same checks as a saved one
        checkpoint = checkpoint_from_memory(self.pool, tensors, values)
        loaded = training.add(name, checkpoint, values, dtype, replace_existing=False)
        if pin:
            self.pool.slots.pin(name)
        return loaded

    def adapter_parameters(self, name: str) -> dict[str, nn.Parameter]:
        """Return the parameters of an adapter that is trained, for an optimizer of its own.

            optimizer = torch.optim.AdamW(model.adapter_parameters("alice").values(), lr=1e-4)

        They are the same objects each time. The next call and `generate` see a change in place, as
        optimizers make it, also through `.data`. After `unload_adapter` they keep their values and
        have no effect any more.

        Args:
            name: of the adapter.

        Returns:
            By the name that PEFT saves it under: lora_A.weight [rank, in_features] and
            lora_B.weight [out_features, rank] of each module, lora_embedding_A [rank, vocabulary]
            and lora_embedding_B [dimension, rank] of the token embedding.

        Raises:
            InvalidInputError: no such adapter is trained.
        """
        return dict(self._wrapped.training.get(name).parameters)

    def adapter_losses(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        adapters: Sequence[RowAdapters],
        counts: Mapping[str, float | torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return each adapter's mean cross-entropy over the labels of its own rows.

        The logits of a position predict the label of the next one, as Transformers' causal
        language models compute it: the loss of an adapter equals that of a batch of its rows alone.

            losses = model.adapter_losses(out.logits, labels, adapters=["alice", "bob", None])
            sum(losses.values()).backward()

        Args:
            logits: [rows, tokens, vocabulary].
            labels: [rows, tokens] token ids; -100 has no loss.
            adapters: per row a name or None, as in the call.
            counts: by name, what the sum of an adapter's losses is divided by, instead of the
                number of its labels here: for a mean over several batches. See
                `TrainingModule.counts_of`.

        Returns:
            By name, in the order of the rows, a float32 (float64 for float64) scalar. An adapter
            whose rows have no label has the loss 0, which brings gradients of 0: nothing waits for
            the device to find out.

        Raises:
            InvalidInputError: shapes that do not belong together, or `counts` lacks an adapter.
            UnsupportedInputError: a row with a blend, or with an entry per token.
        """
        return adapter_losses(logits, labels, adapters, counts)

    def save_adapter(self, name: str, folder: str | Path) -> Path:
        """Write an adapter that is trained as a PEFT checkpoint.

        PEFT loads it, and so does `load_adapter`. Each file is replaced at once.

        Args:
            name: of the adapter.
            folder: for adapter_config.json and adapter_model.safetensors; made if it is missing.

        Returns:
            The folder.

        Raises:
            InvalidInputError: no such adapter is trained, or the folder cannot be written.
        """
        adapter = self._wrapped.training.get(name)
        return save_checkpoint(folder, adapter.parameters, adapter.values, self.base)
