"""`MultiLoRAModel`: a Transformers model whose rows each use their own PEFT adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

import torch
from torch import nn

from lora_backends.adapters import (
    AdapterPool,
    AdapterReport,
    Checkpoint,
    Loaded,
    LoadLimits,
)
from lora_backends.adapters.describe import AdaptersReport, report
from lora_backends.adapters.files.hub import local_folder
from lora_backends.adapters.pool.tensors import copied
from lora_backends.backend import LoRABackend
from lora_backends.errors import InvalidInputError, UnsupportedInputError, shown
from lora_backends.features import OUTPUT_SCALES
from lora_backends.hf.calls.alora import invoked
from lora_backends.hf.calls.entries import Entry, RowAdapters, adapter_names, is_per_token
from lora_backends.hf.calls.packed import Wrapped
from lora_backends.hf.calls.prepared import PreparedAdapters
from lora_backends.hf.calls.request import Request
from lora_backends.hf.calls.running import IDLE, open_block, running
from lora_backends.hf.calls.split import accepted, run_split
from lora_backends.hf.generating.checks import check_generate
from lora_backends.hf.hooks.experts import ExpertSite, expert_specs, find_experts
from lora_backends.hf.hooks.installed import Hooked
from lora_backends.hf.hooks.linear import begin_hook, first_input, rows_and_length
from lora_backends.hf.hooks.routers import find_routers
from lora_backends.hf.layout.base_checks import (
    check_adapter_dtype,
    check_base,
    check_options,
    dtype_and_device,
)
from lora_backends.hf.layout.images import Images
from lora_backends.hf.layout.layout import UnknownRowsError, commonest
from lora_backends.hf.layout.probe import UNREACHED, probe
from lora_backends.hf.layout.sites import base_layer, check_start, find_sites
from lora_backends.hf.layout.structure import Structure
from lora_backends.hf.layout.trial import tried_input
from lora_backends.hf.replacements.modules import OwnModules
from lora_backends.hf.replacements.rows import (
    check_compiled,
    check_labels,
    label_counts,
    with_labels,
)
from lora_backends.hf.words import ModelWords, OneAdapter, chosen_adapters
from lora_backends.selection.choice import get_backend

if TYPE_CHECKING:
    from lora_backends.adapters.pool.store import AdapterStore
    from lora_backends.hf.generating.continuous import RequestManager
    from lora_backends.selection.config import LoRAConfig


_NUMBERS = count()


class MultiLoRAModel(ModelWords):
    """Every row of a batch uses its own LoRA adapter, or none.

    Each row gets the result that PEFT computes with that row's adapter alone, in eval mode. The
    wrapper adds forward hooks to the modules of the base model that an adapter may touch. It never
    changes the values of weights, and `detach` removes the hooks. A call of the base model itself
    runs without adapters, except in a block of `using`. Everything runs under `torch.no_grad()`.

        model = MultiLoRAModel(base, backend="auto", max_adapters=8, max_rank=64)
        model.load_adapter("pirate", "adapters/pirate")
        model(adapters=["pirate", None], **inputs).logits

    The constructor runs the model on a few tokens, without hooks and in eval mode, to find out how
    each module's input holds the rows. If it cannot tell for a module, calls whose rows use
    different adapters there are refused, and the error names the module. Calls with one adapter for
    all rows always run.

    Args:
        base: a Transformers model, on one device.
        backend: a backend's name, "auto", a `LoRABackend`, or None for the environment's choice.
        max_adapters: slots; loading more evicts the least recently used adapter that is not pinned.
        max_rank: the largest rank of an adapter.
        backend_options: the backend's own options.
        fuse: compute q, k and v of a layer with one matrix product, and gate and up with another,
            and add their LoRA in one call of the backend. Until `detach` their weights are parts of
            one tensor: the same parameters with the same values. A larger product may round
            differently. On a GPU the outputs are columns of one buffer, so a model can view them by
            heads, but not flatten them. None: on a GPU only, because it is slower on a CPU.
        limits: of the size and cost of an adapter's files; None takes the defaults.
        max_expert_rank: the largest rank of an adapter at a mixture's experts, whose stacks are
            large: they have room for that rank times the number of experts. None: `max_rank`.
        adapter_dtype: "int8", "float8_e4m3fn" or "float8_e5m2": adapters are quantised to it when
            they are loaded, with a scale per row, and take half the bytes of 16 bits. None keeps
            the model's dtype.

    Raises:
        InvalidInputError: `base` is no model, sizes are out of range, `adapter_dtype` is another
            dtype or does not go with the model's, or an option has the wrong type.
        UnsupportedInputError: `base` is compiled, a `PeftModel` or spread over devices; or
            8 bits are asked of a backend without them.
        BackendUnavailableError: the backend does not run on the model's device.
    """

    def __init__(
        self,
        base: nn.Module,
        backend: str | LoRABackend | None = "auto",
        max_adapters: int = 8,
        max_rank: int = 64,
        backend_options: Mapping[str, Any] | None = None,
        fuse: bool | None = None,
        limits: LoadLimits | None = None,
        max_expert_rank: int | None = None,
        adapter_dtype: torch.dtype | str | None = None,
    ) -> None:
        check_base(base)
        check_options(backend_options, fuse)
        self.base = base
        dtype, device = dtype_and_device(base)
        if not isinstance(backend, LoRABackend):
            backend = get_backend(backend, device=device, **(backend_options or {}))
        elif backend_options:
            raise InvalidInputError(
                f"backend_options {dict(backend_options)} for a backend that is made already\n"
                f"  to do: give its name with the options, or the backend without"
            )
        self.backend = backend
        check_adapter_dtype(backend, adapter_dtype, dtype)
        self._sites = find_sites(base, dtype, device)
        self._experts = find_experts(base, dtype, device)
        self._routers = find_routers(base, self._experts, dtype, device)
        self._sites |= self._routers
        self._layouts = probe(
            base, self._sites | {path: site.as_module for path, site in self._experts.items()}
        )
        self._key = f"model {next(_NUMBERS)}"
        specs = {path: site.spec for path, site in self._sites.items()}
        self._hooked = Hooked(
            self._key,
            backend,
            self._sites,
            self._experts,
            self._routers,
            self._layouts,
            device.type != "cpu" if fuse is None else fuse,
        )
        groups = [group.paths for group in self._hooked.groups]
        self._own = OwnModules(
            self._key,
            base,
            self._sites,
            self._layouts,
            self._hooked.handles,
            self._hooked.fuse,
        )
        self.pool = AdapterPool(
            specs,
            max_adapters,
            max_rank,
            dtype,
            backend.device,
            groups,
            limits,
            expert_specs(self._reached_experts()),
            max_expert_rank,
            base_layers=partial(base_layer, self._sites),
            adapter_dtype=adapter_dtype,
            own_modules=self._own,
        )
        self.store: AdapterStore | None = None
        """Adapters without a slot, after `keep_adapters`."""
        self._structure = Structure(base)
        self._main_input: str = getattr(base, "main_input_name", "input_ids")
        self._first_input = first_input(base.forward, self._main_input)
        self._images = Images(getattr(base, "config", None), tried_input(base))
        begin = begin_hook(self._key, self._structure, self._main_input, base.forward)
        self._hooked.register(base, begin)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse copy and pickle: hooks on the base model and locks belong to this object alone."""
        raise UnsupportedInputError(
            "a wrapped model cannot be copied or pickled\n"
            "  to do: copy the base model, and wrap the copy"
        )

    @classmethod
    def from_config(cls, base: nn.Module, config: LoRAConfig) -> Self:
        """Wrap `base` as a `LoRAConfig` says, and load its adapters.

        Args:
            base: a Transformers causal language model.
            config: backend, slots and adapters; its device and dtype are the model's own.

        Returns:
            The model, all adapters loaded.

        Raises:
            InvalidInputError: as `load_adapter`, no LoRAConfig, or more adapters than slots; `base`
                is as it was.
            UnsupportedInputError: as `load_adapter`; `base` is as it was.
        """
        from lora_backends.selection.config import LoRAConfig  # wrapping needs no settings library

        if not isinstance(config, LoRAConfig):
            raise InvalidInputError(
                f"config is {shown(config)}\n"
                f"  allowed: a LoRAConfig, e.g. LoRAConfig.from_file(path)"
            )
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
            limits=config.limits,
            adapter_dtype=config.adapter_dtype,
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

        DoRA takes the norms of the base weights as they are now. Load the adapter again after you
        have changed them.

        Args:
            name: what rows ask for.
            folder: a PEFT checkpoint (adapter_config.json, adapter_model.safetensors or .bin), or
                the id of one on the Hugging Face hub, which is looked up in the local cache first.
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
        if self.store is not None:
            return self._loaded(self.store.load(name, local_folder(folder), replace_existing), pin)
        loaded = self.pool.load(name, local_folder(folder), self._accept, replace_existing)
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
        self._check_attached()
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
        self._check_attached()
        checkpoint = self._from_memory(adapter, config, adapter_name)
        (self.store or self.pool).update(name, checkpoint, timeout_s)

    def _from_memory(self, adapter: Any, config: Any, adapter_name: str | None) -> Checkpoint:
        if isinstance(adapter, Checkpoint) and config is None and adapter_name is None:
            checkpoint: Checkpoint = copied(adapter)
        else:
            from lora_backends.adapters.peft.memory import checkpoint_from_memory  # needs pydantic

            checkpoint = checkpoint_from_memory(self.pool, adapter, config, adapter_name)
        self._accept(checkpoint)
        return checkpoint

    def unload_adapter(self, name: str) -> None:
        """Free the slot of an adapter.

        Raises:
            InvalidInputError: it is not loaded, pinned, or in use by a running call.
        """
        with self.pool.slots.lock:  # else a batch brings it back from memory in between
            self.pool.unload(name)
            if self.store is not None:
                self.store.forget(name)

    def keep_adapters(
        self,
        cpu_bytes: int = 2**30,
        folder: str | Path | None = None,
        watch_s: float | None = 1.0,
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

        self._check_attached()
        if self.store is not None or self.adapters:
            raise InvalidInputError(
                "keep_adapters is called too late\n  given: "
                f"{'a model with a store' if self.store else f'adapters {self.adapters}'}\n"
                f"  to do: call it once, before any adapter is loaded"
            )
        self.store = AdapterStore(self.pool, cpu_bytes, folder, watch_s, self._accept)
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

    def prepare(self, adapters: Sequence[Entry], *, tokens: int = 1) -> PreparedAdapters:
        """Prepare the adapters of forward passes of one shape, to be refilled in place.

        A CUDA graph or a program of `torch.compile` that captures a call with the prepared adapters
        follows their `update`. A loop of decode steps also saves the time of a plan for each call.

            step = model.prepare(["pirate", None])
            model(adapters=step, **inputs)
            step.update(["json", "pirate"])

        Args:
            adapters: per row a name, a blend or None, as in a call. An engine may choose its tiles
                by them, so name as many adapters as later batches will, and a blend of as many
                adapters as later blends.
            tokens: tokens per row of every forward pass, 1 for decode steps.

        Returns:
            Prepared adapters, for `adapters` of a call and for `using`.

        Raises:
            InvalidInputError: an unknown name, or not one entry per row.
            UnsupportedInputError: a row has an entry per token, or a blend as in a call.
        """
        self._check_attached()
        self._hooked.drop_moved()
        layout = commonest(self._layouts.values())
        return PreparedAdapters(
            self._key,
            self.pool,
            self.backend,
            adapters,
            tokens,
            layout,
            self._hooked.joined,
            self._images,
        )

    @contextmanager
    def using(self, step: PreparedAdapters) -> Iterator[None]:
        """Let every forward pass of the base model in this block use prepared adapters.

        The base model may be called in any way, e.g. as ``torch.compile(model.base)``. The block
        belongs to the thread that enters it and is under `torch.no_grad()`. While it is open, other
        threads that run the base model without a call or a block of their own are refused:
        `base.generate_batch` and servers run the model in threads of their own, which would compute
        without adapters and without an error. For the base model's answers such a thread calls
        ``model(adapters=[None] * rows, ...)``.

        Args:
            step: from `prepare` of this model.

        Raises:
            InvalidInputError: `step` belongs to another model, or as a call; at the end of the
                block, weights were moved in it after a compiled program had read them.
        """
        self._check_prepared(step)
        groups = self._hooked.drop_moved()
        with torch.no_grad(), self._hooked.in_use(), open_block(step):
            yield
        if step.is_traced:
            self._hooked.check_unmoved(groups)

    @torch.no_grad()
    def __call__(
        self,
        *args: Any,
        adapters: Sequence[RowAdapters] | PreparedAdapters | None = None,
        adapter_names: Sequence[RowAdapters] | None = None,
        logits_as_list: bool = False,
        split: bool = False,
        **inputs: Any,
    ) -> Any:
        """Run the base model's forward pass, every row with its own adapter.

        Args:
            args: at most one, the base model's first argument: input_ids for most.
            adapters: per row an adapter's name, a blend or None. A blend is a dict of names to
                strengths, ``{"pirate": 0.7, "json": 0.3}``: a strength multiplies the delta of
                its adapter, and the deltas are added. A row may also be a sequence with one of
                these per token of this call, for adapters that apply to a part of the row. Or the
                adapters of all rows, from `prepare`.
            adapter_names: the same under PEFT's name; "__base__" stands for None in both.
            logits_as_list: return the logits as a list with a tensor per row, for adapters whose
                heads have different numbers of labels.
            split: run the batch once for each adapter, and take each row from the pass of its
                adapter, for models in which a module does not show which row an input belongs to
                (DeBERTa). Outputs of image, video and sound encoders that differ between the passes
                are None.
            inputs: of the base model, at least input_ids or inputs_embeds.

        Returns:
            What the base model returns.

        Raises:
            InvalidInputError: an unknown name, a strength that is not finite, or not one entry per
                row (or token); the base model is in training mode, or one of its modules was
                replaced.
            UnsupportedInputError: rows differ in a module whose input's rows are not known; a blend
                of an adapter that uses DoRA with another; a strength of one with a LoRA bias, or
                that the backend cannot apply.
        """
        if len(args) > 1:
            raise InvalidInputError(
                f"{len(args)} arguments by position\n  allowed: one, {self._first_input}"
            )
        if args:
            if self._first_input in inputs:
                raise InvalidInputError(
                    f"{self._first_input} is given twice\n  given: by position, and by name\n"
                    f"  allowed: one of them"
                )
            inputs[self._first_input] = args[0]
        if (
            split
            and logits_as_list
            or isinstance(adapters, PreparedAdapters)
            and (split or logits_as_list)
        ):
            raise InvalidInputError(
                "split=True and logits_as_list=True go with adapters by name, and not together\n"
                "  to do: split the batch by the number of labels"
            )
        if isinstance(adapters, PreparedAdapters) and adapter_names is None:
            return self._run_prepared(adapters, inputs)
        chosen = chosen_adapters(adapters, adapter_names)
        if split:
            return run_split(self, chosen, inputs, self._images)
        try:
            with self._active(chosen, inputs, after_cache=True) as request:
                counts = label_counts(request.own, self.pool, request.rows)
                check_labels(counts, logits_as_list, inputs)
                output = self.base(**inputs)
                return with_labels(output, counts, logits_as_list, len(request.rows))
        except UnknownRowsError as error:
            # as the only adapter, too, one with an invocation would differ by row
            if logits_as_list or request.per_token or request.has_invocations:
                raise
            cure = self._how_to_split(len(chosen), inputs)
            raise UnsupportedInputError(f"{error}{cure}") from None

    @torch.no_grad()
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        *,
        adapters: Sequence[RowAdapters] | None = None,
        adapter_names: Sequence[RowAdapters] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the base model's `generate`, every prompt with its own adapter.

        Args:
            inputs: token ids of the prompts, unless input_ids is given by name.
            adapters: as in a call, entries per token from the start of the prompt, what a given
                cache holds included; tokens after the prompt use the last entry of their row.
            adapter_names: the same under PEFT's name.
            kwargs: of the base model's `generate`. It does not compile the model by itself, since
                every call has plans of its own.

        Returns:
            What the base model returns.

        Raises:
            InvalidInputError: as a call.
            UnsupportedInputError: as a call.
        """
        prompts = kwargs if inputs is None else {**kwargs, self._main_input: inputs}
        prompts.setdefault("disable_compile", True)
        chosen = chosen_adapters(adapters, adapter_names)
        with self._active(chosen, prompts, after_cache=False):
            return cast(Any, self.base).generate(**prompts)

    def continuous_batching(
        self, generation_config: Any | None = None, continuous_batching_config: Any | None = None
    ) -> RequestManager:
        """Return a manager of requests that join and leave the batch, each with its own adapter.

            with model.continuous_batching() as requests:
                name = requests.add_request(ids, adapter="pirate", max_new_tokens=20)

        Args:
            generation_config: of all requests; None takes the base model's.
            continuous_batching_config: Transformers' `ContinuousBatchingConfig`. On a CPU it has 64
                blocks and batches of 256 tokens unless it says otherwise.

        Returns:
            The manager; a block of `with` starts and stops its thread.

        Raises:
            InvalidInputError: the model was detached or changed, or is in training mode.
            UnsupportedInputError: the model has no continuous batching, or a configuration with
                CUDA graphs, compilation or two batches at a time.
        """
        try:
            from lora_backends.hf.generating.continuous import RequestManager
        except ImportError as error:
            raise UnsupportedInputError(
                f"this version of Transformers has no continuous batching that takes adapters: "
                f"{error}\n  to do: pip install 'transformers>=5.23'"
            ) from error

        def check() -> None:
            self._check_attached()
            self._structure.check_state()

        sites = {path: site.module for path, site in self._sites.items()}
        experts = {path: site.module for path, site in self._experts.items()}
        wrapped = Wrapped(
            self._key,
            self.base,
            self.pool,
            self.backend,
            sites | experts,
            self._layouts,
            check,
            self._hooked.in_use,
        )
        return RequestManager(wrapped, generation_config, continuous_batching_config)

    def generate_batch(
        self,
        inputs: Sequence[Sequence[int]],
        *,
        adapters: Sequence[Entry],
        generation_config: Any | None = None,
        continuous_batching_config: Any | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Run Transformers' `generate_batch`, every prompt with its own adapter.

        Args:
            inputs: token ids of the prompts, of any lengths and without padding.
            adapters: per prompt an adapter's name, a blend or None.
            generation_config: as `continuous_batching`.
            continuous_batching_config: as `continuous_batching`.
            options: of each request, e.g. max_new_tokens.

        Returns:
            Request id to `GenerationOutput`, in the order of the prompts.

        Raises:
            InvalidInputError: as `RequestManager.add_requests`.
            UnsupportedInputError: as `continuous_batching`, and as `RequestManager.add_request`.
            RuntimeError: a request failed.
        """
        with self.continuous_batching(generation_config, continuous_batching_config) as requests:
            return requests.collect(requests.add_requests(inputs, adapters=adapters, **options))

    def as_adapter(self, name: str | None) -> OneAdapter:
        """Return this model with one adapter in every row, for code that names none.

            pipe = transformers.pipeline("text-generation", model=model.as_adapter("pirate"), ...)

        Args:
            name: of an adapter, loaded now or when it is used; None for the base model.
        """
        return OneAdapter(self, name)

    def detach(self) -> nn.Module:
        """Take every hook off, drop the adapters and return the base model as it was.

        Raises:
            InvalidInputError: a call, a request or a block of `using` is running, which would go
                on without its adapters. Nothing has changed.
        """
        if self._hooked.handles:
            self._hooked.close()
            if self.store is not None:
                self.store.close()  # first: loading ahead may hook further modules
                self.store = None
            self._hooked.remove()
            self.pool = AdapterPool({}, 1, 1, self.pool.dtype, self.pool.device)
        return self.base

    def __repr__(self) -> str:
        return f"<MultiLoRAModel of {type(self.base).__name__}, {self.backend!r}, {self.adapters}>"

    def _how_to_split(self, rows: int, inputs: Mapping[str, Any]) -> str:
        """Return the line of an error that offers `split`, if a trial of it runs."""
        for words, changes in (("", {}), (", use_cache=False", {"use_cache": False})):
            if accepted(self, rows, {**inputs, **changes}, self._images):
                return f"\n  to do: or pass split=True{words} in this call"
        return ""

    @contextmanager
    def _active(
        self,
        adapters: Sequence[RowAdapters],
        inputs: Mapping[str, Any],
        after_cache: bool,
    ) -> Iterator[Request]:
        self._check_attached()
        self._structure.check_state()
        names = adapter_names(adapters)
        rows, length = rows_and_length(inputs, self._main_input)
        if len(adapters) != rows:
            raise InvalidInputError(
                f"adapters has {len(adapters)} entries for a batch of {rows} rows\n"
                f"  allowed: one adapter name or None per row"
            )
        for row, entry in enumerate(adapters):
            if is_per_token(entry) and len(entry) != length:  # type: ignore[arg-type]
                raise InvalidInputError(
                    f"adapters[{row}] has {len(entry)} entries for a row of {length} tokens\n"  # type: ignore[arg-type]
                    f"  allowed: one entry for the row, or one per token"
                )
        with self.pool.slots.in_use(names) as slots, self._hooked.in_use():
            adapters = invoked(adapters, slots, self.pool, inputs, after_cache)
            request = Request(
                self._key, self.pool, self._images, adapters, slots, self.backend, after_cache
            )
            if not after_cache:
                config = getattr(self.base, "generation_config", None)
                request.begin_generate(inputs, rows, length, config)
            check_generate(self.base, request, inputs, generates=not after_cache)
            if request.own:
                check_compiled(self.base)
            with running(IDLE if request.idle else request):
                yield request

    def _run_prepared(self, step: PreparedAdapters, inputs: dict[str, Any]) -> Any:
        """Run the base model, of which compiled programs may be a part.

        Eager modules look for moved weights themselves. Programs cannot, so a step that has run one
        looks before and after the pass.
        """
        self._check_prepared(step)
        hooked = self._hooked
        groups = hooked.drop_moved() if step.is_traced else len(hooked.joined)
        with hooked.in_use(), running(step):
            outputs = self.base(**inputs)
        if step.is_traced:
            hooked.check_unmoved(groups)
        return outputs

    def _check_prepared(self, step: PreparedAdapters) -> None:
        self._check_attached()
        self._structure.check_state()
        if not isinstance(step, PreparedAdapters) or step.model != self._key:
            raise InvalidInputError(
                f"these adapters are not prepared by this model\n  given: {step!r}\n"
                f"  to do: pass what prepare() of this MultiLoRAModel returned"
            )

    def _check_attached(self) -> None:
        self._hooked.check()
        self._structure.check_modules()

    def _accept(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint that row-by-row deltas cannot reproduce."""
        refused = [
            f"\n  - {path}: {site.refusal}"
            for path in checkpoint.modules
            if (site := self._sites.get(path)) is not None and site.refusal is not None
        ]
        if refused:
            raise UnsupportedInputError(
                f"{checkpoint.folder} adapts modules that cannot be reproduced row by row:"
                + "".join(refused)
            )
        unreached = {
            path
            for path, layout in self._layouts.items()
            if layout.reason == UNREACHED and not self._images.hold(path)
        }
        check_start(checkpoint, self._sites, unreached)
        scaled = any(delta.magnitude is not None for delta in checkpoint.modules.values())
        if scaled and OUTPUT_SCALES not in self.backend.features:
            raise UnsupportedInputError(
                f"{checkpoint.folder} uses DoRA (use_dora), which backend {self.backend.name!r} "
                f"cannot run: it lacks {OUTPUT_SCALES}\n"
                f"  to do: use another backend, e.g. torch_ref"
            )
        unknown = sorted(set(checkpoint.base_weights) - set(self._sites))
        if unknown:
            raise InvalidInputError(
                f"{checkpoint.folder} holds base weights of modules that the base model lacks: "
                f"{', '.join(unknown[:3])}"
            )

    def _reached_experts(self) -> dict[str, ExpertSite]:
        """Return the experts; those that the model passes by, as a kernel of all may, refused."""
        return {
            path: site.refused(UNREACHED) if self._layouts[path].reason == UNREACHED else site
            for path, site in self._experts.items()
        }

    def _loaded(self, loaded: Loaded, pin: bool) -> Loaded:
        if pin:
            self.pool.slots.pin(loaded.name)
        return loaded
