"""`MultiLoRAModel`: a Transformers model whose rows each use their own PEFT adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import nn

from lora_backends.adapters import AdapterPool, Checkpoint, Loaded
from lora_backends.backend import LoRABackend
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.hf.request import Request, RowAdapters, adapter_names
from lora_backends.hf.sites import Site, find_sites
from lora_backends.registry import get_backend

if TYPE_CHECKING:
    from lora_backends.config import LoRAConfig

_ACTIVE: ContextVar[tuple[MultiLoRAModel, Request] | None] = ContextVar("_ACTIVE", default=None)
"""The call that is running in this thread or task."""


class MultiLoRAModel:
    """Every row of a batch uses its own LoRA adapter, or none.

    The base model is changed in place by forward hooks on the modules that a loaded adapter
    touches; its weights are never written, `detach` takes the hooks off, and a call of the base
    model itself runs without adapters. Row by row the result is what PEFT computes with that
    row's adapter alone, in eval mode. Everything runs under `torch.no_grad()`.

        model = MultiLoRAModel(base, backend="auto", max_adapters=8, max_rank=64)
        model.load_adapter("pirate", "adapters/pirate")
        model(adapters=["pirate", None], **inputs).logits

    Args:
        base: a Transformers causal language model, on one device.
        backend: a backend's name, "auto", a `LoRABackend`, or None for the environment's choice.
        max_adapters: slots; loading more evicts the least recently used that is not pinned.
        max_rank: the largest rank of an adapter.
        backend_options: the backend's own options.

    Raises:
        UnsupportedInputError: `base` is an encoder-decoder, or spread over devices.
        BackendUnavailableError: the backend does not run on the model's device.
    """

    def __init__(
        self,
        base: nn.Module,
        backend: str | LoRABackend | None = "auto",
        max_adapters: int = 8,
        max_rank: int = 64,
        backend_options: Mapping[str, Any] | None = None,
    ) -> None:
        if getattr(base.config, "is_encoder_decoder", False):
            raise UnsupportedInputError(
                f"{type(base).__name__} is an encoder-decoder\n  allowed: causal language models"
            )
        self.base = base
        dtype, device = _dtype_and_device(base)
        if not isinstance(backend, LoRABackend):
            backend = get_backend(backend, device=device, **(backend_options or {}))
        elif backend_options:
            raise InvalidInputError(
                f"backend_options {dict(backend_options)} for a backend that is made already\n"
                f"  to do: give its name with the options, or the backend without"
            )
        self.backend = backend
        self._sites = find_sites(base, dtype, device)
        specs = {path: site.spec for path, site in self._sites.items()}
        self.pool = AdapterPool(specs, max_adapters, max_rank, dtype, backend.device)
        self._hooks: dict[str, Any] = {}
        self._forward_hook: Any = base.register_forward_pre_hook(_begin, with_kwargs=True)

    @classmethod
    def from_config(cls, base: nn.Module, config: LoRAConfig) -> Self:
        """Wrap `base` as a `LoRAConfig` says, and load its adapters.

        Args:
            base: a Transformers causal language model.
            config: backend, slots and adapters; its device and dtype are the model's own.

        Returns:
            The model, all adapters loaded.

        Raises:
            InvalidInputError: as `load_adapter`, or more adapters than slots; `base` is as it was.
            UnsupportedInputError: as `load_adapter`; `base` is as it was.
        """
        if len(config.adapters) > config.max_adapters:
            raise InvalidInputError(
                f"the configuration names {len(config.adapters)} adapters for "
                f"{config.max_adapters} slots\n  to do: raise max_adapters"
            )
        model = cls(
            base,
            backend=config.backend,
            max_adapters=config.max_adapters,
            max_rank=config.max_rank,
            backend_options=config.backend_options,
        )
        try:
            for name, folder in config.adapters.items():
                model.load_adapter(name, folder)
        except BaseException:
            model.detach()
            raise
        return model

    @property
    def adapters(self) -> list[str]:
        """Names of the loaded adapters, the least recently used first."""
        return self.pool.slots.names

    def load_adapter(
        self, name: str, folder: str | Path, *, pin: bool = False, replace_existing: bool = False
    ) -> Loaded:
        """Load a PEFT checkpoint under a name.

        Args:
            name: what rows ask for.
            folder: a PEFT checkpoint (adapter_config.json, adapter_model.safetensors or .bin).
            pin: keep it from being evicted.
            replace_existing: overwrite a loaded adapter of this name.

        Returns:
            The slot, and the name of the adapter that was evicted for it.

        Raises:
            InvalidInputError: files are missing, broken or do not fit the base model; the name is
                taken; every slot is pinned. Nothing has changed.
            UnsupportedInputError: a feature that cannot be reproduced exactly, by its name.
                Nothing has changed.
        """
        self._check_attached()
        loaded = self.pool.load(name, folder, self._accept, replace_existing)
        if pin:
            self.pool.slots.pin(name)
        self._update_hooks()
        return loaded

    def unload_adapter(self, name: str) -> None:
        """Free the slot of an adapter.

        Raises:
            InvalidInputError: it is not loaded, pinned, or in use by a running call.
        """
        self.pool.unload(name)
        self._update_hooks()

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

    @torch.no_grad()
    def __call__(self, *, adapters: Sequence[RowAdapters], **inputs: Any) -> Any:
        """Run the base model's forward pass, every row with its own adapter.

        Args:
            adapters: per row an adapter's name or None. A row may also be a sequence with a name
                or None per token of this call, for adapters that apply to a part of the row.
            inputs: of the base model, at least input_ids or inputs_embeds.

        Returns:
            What the base model returns.

        Raises:
            InvalidInputError: an unknown name, or not one entry per row (or token).
        """
        with self._active(adapters, _rows_and_length(inputs), after_cache=True):
            return self.base(**inputs)

    @torch.no_grad()
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        *,
        adapters: Sequence[RowAdapters],
        **kwargs: Any,
    ) -> Any:
        """Run the base model's `generate`, every prompt with its own adapter.

        Args:
            inputs: token ids of the prompts, unless input_ids is given by name.
            adapters: as in a call, entries per token from the start of the prompt, what a given
                cache holds included; tokens after the prompt use the last entry of their row.
            kwargs: of the base model's `generate`.

        Returns:
            What the base model returns.

        Raises:
            InvalidInputError: as a call.
        """
        prompts = kwargs if inputs is None else {**kwargs, "input_ids": inputs}
        with self._active(adapters, _rows_and_length(prompts), after_cache=False):
            return cast(Any, self.base).generate(**prompts)

    def detach(self) -> nn.Module:
        """Take every hook off, drop the adapters and return the base model as it was."""
        if self._forward_hook is None:
            return self.base
        for hook in [*self._hooks.values(), self._forward_hook]:
            hook.remove()
        self._hooks.clear()
        self.pool = AdapterPool({}, 1, 1, self.pool.dtype, self.pool.device)
        self._forward_hook = None
        return self.base

    def __repr__(self) -> str:
        return f"<MultiLoRAModel of {type(self.base).__name__}, {self.backend!r}, {self.adapters}>"

    @contextmanager
    def _active(
        self,
        adapters: Sequence[RowAdapters],
        rows_and_length: tuple[int, int],
        after_cache: bool,
    ) -> Iterator[None]:
        self._check_attached()
        names = adapter_names(adapters)
        rows, length = rows_and_length
        if len(adapters) != rows:
            raise InvalidInputError(
                f"adapters has {len(adapters)} entries for a batch of {rows} rows\n"
                f"  allowed: one adapter name or None per row"
            )
        for row, entry in enumerate(adapters):
            if entry is not None and not isinstance(entry, str) and len(entry) != length:
                raise InvalidInputError(
                    f"adapters[{row}] has {len(entry)} entries for a row of {length} tokens\n"
                    f"  allowed: one name or None for the row, or one per token"
                )
        with self.pool.slots.in_use(names) as slots:
            num_slots = self.pool.slots.num_slots
            request = Request(adapters, slots, num_slots, self.backend, after_cache)
            token = _ACTIVE.set((self, request))
            try:
                yield
            finally:
                _ACTIVE.reset(token)

    def _check_attached(self) -> None:
        if self._forward_hook is None:
            raise InvalidInputError(
                "this MultiLoRAModel was detached from its base model\n"
                "  to do: make a new one around the base model"
            )

    def _accept(self, checkpoint: Checkpoint) -> None:
        """Refuse what a row-by-row delta cannot reproduce."""
        refused = [
            f"\n  - {path}: {site.refusal}"
            for path in checkpoint.modules
            if (site := self._sites[path]).refusal is not None
        ]
        if refused:
            raise UnsupportedInputError(
                f"{checkpoint.folder} adapts modules that cannot be reproduced row by row:"
                + "".join(refused)
            )
        for path, saved in checkpoint.base_weights.items():
            weight = self._sites[path].module.get_parameter("weight").detach()
            if weight.shape != saved.shape or not weight.equal(saved.to(weight)):
                raise UnsupportedInputError(
                    f"{checkpoint.folder} replaces a base weight: {path}.base_layer.weight differs "
                    f"from the base model's\n"
                    f"  allowed: a copy of it, since all rows share one base model\n"
                    f"  to do: load the base model that the adapter was trained on"
                )

    def _update_hooks(self) -> None:
        """Hook exactly the modules that a loaded adapter touches; others cost nothing."""
        wanted = set(self.pool.active_modules)
        for path in set(self._hooks) - wanted:
            self._hooks.pop(path).remove()
        for path in wanted - set(self._hooks):
            site = self._sites[path]
            self._hooks[path] = site.module.register_forward_hook(self._hook(site))

    def _hook(self, site: Site) -> Callable[[nn.Module, tuple[Any, ...], torch.Tensor], Any]:
        def add_lora(
            module: nn.Module, args: tuple[Any, ...], output: torch.Tensor
        ) -> torch.Tensor | None:
            active = _ACTIVE.get()
            if active is None or active[0] is not self or active[1].idle:
                return None
            weights = self.pool.weights(site.path)
            if weights is None:
                return None
            output = output.contiguous()
            y = output.view(-1, site.spec.out_features)
            if site.spec.kind == "embedding":
                plan = active[1].plan(args[0].shape, site.path)
                self.backend.run_embedding(args[0].reshape(-1), weights, plan, y)
            else:
                plan = active[1].plan(args[0].shape[:-1], site.path)
                x = args[0].reshape(-1, site.spec.in_features)
                self.backend.run_linear(x, weights, plan, y)
            return output

        return add_lora


def _begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell the running request the shape of the forward pass that starts on the base model."""
    active = _ACTIVE.get()
    if active is None or active[0].base is not module:
        return
    inputs = {**kwargs, "input_ids": args[0]} if args else kwargs
    rows, length = _rows_and_length(inputs)
    active[1].begin_forward(rows, length, _past(kwargs) if active[1].per_token else 0)


def _past(kwargs: Mapping[str, Any]) -> int:
    """Return how many tokens of each row went before: asked only where slots differ by token.

    On a GPU the answer may wait for the device.
    """
    if isinstance(kwargs.get("logits_to_keep"), torch.Tensor):
        raise UnsupportedInputError(
            "logits_to_keep is a tensor of positions and adapters differ by token\n"
            "  allowed: an int, or one adapter per row"
        )
    cache = kwargs.get("past_key_values")
    return int(cache.get_seq_length()) if cache is not None else 0


def _rows_and_length(inputs: Mapping[str, Any]) -> tuple[int, int]:
    for key in ("input_ids", "inputs_embeds"):
        tokens = inputs.get(key)
        if isinstance(tokens, torch.Tensor) and tokens.ndim >= 2 and tokens.shape[1]:
            return tokens.shape[0], tokens.shape[1]
    raise InvalidInputError(
        f"no tokens to run on\n  given: {', '.join(inputs) or 'nothing'}\n"
        f"  allowed: input_ids [rows, tokens] or inputs_embeds [rows, tokens, hidden]"
    )


def _dtype_and_device(base: nn.Module) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and device of the base model's floating-point parameters."""
    floating = [p for p in base.parameters() if p.is_floating_point()]
    if not floating:
        raise UnsupportedInputError(f"{type(base).__name__} has no floating-point parameters")
    devices = {parameter.device for parameter in floating}
    if len(devices) > 1:
        raise UnsupportedInputError(
            f"{type(base).__name__} is spread over {', '.join(sorted(map(str, devices)))}\n"
            f"  allowed: a model on one device"
        )
    dtype = getattr(base, "dtype", floating[0].dtype)
    return dtype, floating[0].device
