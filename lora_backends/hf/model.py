"""`MultiLoRAModel`: a Transformers model whose rows each use their own PEFT adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

import torch
from torch import Tensor, nn

from lora_backends.adapters import LoadLimits
from lora_backends.backend import LoRABackend
from lora_backends.errors import InvalidInputError, UnsupportedInputError, shown
from lora_backends.hf.backend import backend_for
from lora_backends.hf.calls.alora import invoked
from lora_backends.hf.calls.entries import Entry, RowAdapters, adapter_names, is_per_token
from lora_backends.hf.calls.prepared import PreparedAdapters
from lora_backends.hf.calls.request import Request
from lora_backends.hf.calls.running import IDLE, open_block, running
from lora_backends.hf.calls.split import accepted, run_split
from lora_backends.hf.generating.checks import check_generate
from lora_backends.hf.hooks.linear import rows_and_length
from lora_backends.hf.layout.base_checks import check_base, check_fuse, dtype_and_device
from lora_backends.hf.layout.layout import UnknownRowsError, commonest
from lora_backends.hf.layout.sharded import is_sharded
from lora_backends.hf.loading import ModelAdapters
from lora_backends.hf.replacements.rows import (
    check_compiled,
    check_labels,
    label_counts,
    with_labels,
)
from lora_backends.hf.training.methods import ModelTraining
from lora_backends.hf.training.request import TrainingCall
from lora_backends.hf.words import ModelWords, OneAdapter, chosen_adapters
from lora_backends.hf.wrapped import WrappedModel

if TYPE_CHECKING:
    from lora_backends.adapters.pool.store import AdapterStore
    from lora_backends.hf.generating.continuous import RequestManager
    from lora_backends.selection.config import LoRAConfig


class MultiLoRAModel(ModelAdapters, ModelTraining, ModelWords):
    """Every row of a batch uses its own LoRA adapter, or none.

    Each row gets the result that PEFT computes with that row's adapter alone, in eval mode. The
    wrapper adds forward hooks to the modules of the base model that an adapter may touch. It never
    changes the values of weights, and `detach` removes the hooks. A call of the base model itself
    runs without adapters, except in a block of `using`. Calls run under `torch.no_grad()` unless
    they train.

        model = MultiLoRAModel(base, backend="auto", max_adapters=8, max_rank=64)
        model.load_adapter("pirate", "adapters/pirate")
        model(adapters=["pirate", None], **inputs).logits

    The constructor runs the model on a few tokens, without hooks and in eval mode, to find out how
    each module's input holds the rows. If it cannot tell for a module, calls whose rows use
    different adapters there are refused, and the error names the module. Calls with one adapter for
    all rows always run.

    Args:
        base: a Transformers model, on one device, or sharded by `fully_shard`: then every process
            makes its own wrapper, at the same point.
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
        UnsupportedInputError: `base` is compiled or a `PeftModel`, holds LoRA of its own, or is
            spread over devices, or over processes otherwise than by `fully_shard`; or 8 bits are
            asked of a backend without them.
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
        # All checks run before the base model is hooked.
        check_base(base)
        check_fuse(fuse)
        self.base = base
        dtype, device = dtype_and_device(base)
        self.backend = backend_for(backend, backend_options, device, dtype, adapter_dtype)
        fuse = device.type != "cpu" if fuse is None else fuse
        self._wrapped = WrappedModel(base, self.backend, dtype, device, fuse)
        self.store: AdapterStore | None = None
        """Adapters without a slot, after `keep_adapters`."""
        self.pool = self._wrapped.open(
            max_adapters, max_rank, limits, max_expert_rank, adapter_dtype
        )

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
        # Else the last ones would silently evict the first.
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
            # The base model must not keep hooks of a wrapper that nobody has.
            model.detach()
            raise
        return model

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
        wrapped = self._wrapped
        wrapped.check_attached()
        wrapped.hooked.drop_moved()
        layout, joined = commonest(wrapped.layouts.values()), wrapped.hooked.joined
        return PreparedAdapters(
            wrapped.key, self.pool, self.backend, adapters, tokens, layout, joined, wrapped.images
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
        self._wrapped.training.flush_rows(step.adapters)
        groups = self._wrapped.hooked.drop_moved()
        with torch.no_grad(), self._wrapped.hooked.in_use(), open_block(step):
            yield
        if step.is_traced:
            self._wrapped.hooked.check_unmoved(groups)

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

        With grad mode on and an adapter in the batch that is trained, it builds autograd's graph,
        in which every parameter gets the gradient of its own rows alone. Else it runs without one.

        Args:
            args: at most one, the base model's first argument: input_ids for most.
            adapters: per row an adapter's name, a blend or None. A blend is a dict of names to
                strengths, ``{"pirate": 0.7, "json": 0.3}``: a strength multiplies the delta of
                its adapter, and the deltas are added. A row may also be a sequence with one of
                these per token of this call, for adapters that apply to a part of the row. Or the
                adapters of all rows, from `prepare`.
            adapter_names: the same under PEFT's name; "__base__" means None in both.
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
                that the backend cannot apply; in a call that trains: blends, `split`, or adapters
                with modules of their own, or with LoRA of experts or routers.
        """
        if len(args) > 1:
            raise InvalidInputError(
                f"{len(args)} arguments by position\n  allowed: one, {self._wrapped.first_input}"
            )
        if args:
            first = self._wrapped.first_input
            if first in inputs:
                raise InvalidInputError(
                    f"{first} is given twice\n  given: by position, and by name\n"
                    f"  allowed: one of them"
                )
            inputs[first] = args[0]
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
            with torch.no_grad():
                return self._run_prepared(adapters, inputs)
        chosen = chosen_adapters(adapters, adapter_names)
        builds = torch.is_grad_enabled() and self._wrapped.training.any_of(chosen)
        if builds and split:
            raise UnsupportedInputError(
                "split=True builds no graph, and adapters of the batch are trained\n"
                "  to do: train with batches of one adapter, or call it under torch.no_grad()"
            )
        with torch.set_grad_enabled(builds):
            if split:
                return run_split(self, chosen, inputs, self._wrapped.images)
            return self._run(chosen, inputs, logits_as_list)

    def _run(
        self, chosen: Sequence[RowAdapters], inputs: dict[str, Any], logits_as_list: bool
    ) -> Any:
        try:
            with self._active(chosen, inputs, after_cache=True) as request:
                counts = label_counts(request.replacements, self.pool, request.rows)
                check_labels(counts, logits_as_list, inputs)
                output = self.base(**inputs)
                return with_labels(output, counts, logits_as_list, len(request.rows))
        except UnknownRowsError as error:
            # an adapter with an invocation differs by row even where it is the only one
            if logits_as_list or request.per_token or request.has_invocations:
                raise
            cure = "" if torch.is_grad_enabled() else self._how_to_split(len(chosen), inputs)
            raise UnsupportedInputError(f"{error}{cure}") from None

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
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
        prompts = kwargs if inputs is None else {**kwargs, self._wrapped.main_input: inputs}
        # `generate` compiles for static caches by itself.
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
            UnsupportedInputError: the model has no continuous batching, Transformers is older than
                5.17, or a configuration asks for CUDA graphs, compilation or two batches at once.
        """
        try:
            from lora_backends.hf.generating.continuous import RequestManager
        except ImportError as error:
            raise UnsupportedInputError(
                f"this version of Transformers has no continuous batching that takes adapters: "
                f"{error}\n  to do: pip install 'transformers>=5.19'"
            ) from error
        return RequestManager(self._wrapped, generation_config, continuous_batching_config)

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
        wrapped = self._wrapped
        if wrapped.hooked.handles:
            wrapped.hooked.close()
            if self.store is not None:
                self.store.close()  # first: loading ahead may hook further modules
                self.store = None
            self.pool = wrapped.close()
        return self.base

    def __repr__(self) -> str:
        return f"<MultiLoRAModel of {type(self.base).__name__}, {self.backend!r}, {self.adapters}>"

    def _how_to_split(self, rows: int, inputs: Mapping[str, Any]) -> str:
        """Return the line of an error that offers `split`, if a trial of it runs."""
        for words, changes in (("", {}), (", use_cache=False", {"use_cache": False})):
            if accepted(self, rows, {**inputs, **changes}, self._wrapped.images):
                return f"\n  to do: or pass split=True{words} in this call"
        return ""

    @contextmanager
    def _active(
        self, adapters: Sequence[RowAdapters], inputs: Mapping[str, Any], after_cache: bool
    ) -> Iterator[Request]:
        wrapped = self._wrapped
        wrapped.check(may_train=True)
        names = adapter_names(adapters)
        rows, length = rows_and_length(inputs, self._wrapped.main_input)
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
        with self.pool.slots.in_use(names) as slots, self._wrapped.hooked.in_use():
            adapters = invoked(adapters, slots, self.pool, inputs, after_cache)
            request = self._request(adapters, slots, after_cache)
            if not after_cache:
                config = getattr(self.base, "generation_config", None)
                request.begin_generate(inputs, rows, length, config)
            check_generate(self.base, request, inputs, generates=not after_cache)
            if request.replacements:
                check_compiled(self.base, "an adapter has modules of its own")
            with running(IDLE if request.idle else request):
                yield request

    def _request(
        self, adapters: Sequence[RowAdapters], slots: Mapping[str, int], after_cache: bool
    ) -> Request:
        """Return the call of a batch: with gradients or dropout if an adapter of it is trained."""
        wrapped = self._wrapped
        of_model = (
            wrapped.key,
            self.pool,
            wrapped.images,
            adapters,
            slots,
            self.backend,
            after_cache,
        )
        trained = wrapped.training.of(slots)
        drops = self.base.training and any(adapter.dropout for adapter in trained)
        if not trained or not (drops or torch.is_grad_enabled()):
            return Request(*of_model)
        check_compiled(self.base, "adapters of the batch are trained")
        wrapped.training.checkpointing.install()
        whole = any(map(is_sharded, self.base.modules()))
        return TrainingCall(*of_model, trained, drops, whole)

    def _run_prepared(self, step: PreparedAdapters, inputs: dict[str, Any]) -> Any:
        """Run the base model, of which compiled programs may be a part.

        Eager modules look for moved weights themselves. Programs cannot, so a step that has run one
        looks before and after the pass.
        """
        self._check_prepared(step)
        self._wrapped.training.flush_rows(step.adapters)
        hooked = self._wrapped.hooked
        # Only a program reads joined weights without a look.
        groups = hooked.drop_moved() if step.is_traced else len(hooked.joined)
        with hooked.in_use(), running(step):
            outputs = self.base(**inputs)
        if step.is_traced:
            hooked.check_unmoved(groups)
        return outputs

    def _check_prepared(self, step: PreparedAdapters) -> None:
        self._wrapped.check()
        if not isinstance(step, PreparedAdapters) or step.model != self._wrapped.key:
            raise InvalidInputError(
                f"these adapters are not prepared by this model\n  given: {step!r}\n"
                f"  to do: pass what prepare() of this MultiLoRAModel returned"
            )
