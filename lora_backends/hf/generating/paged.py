"""The model as continuous batching runs it, and which models it can run."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from lora_backends.errors import UnsupportedInputError, told
from lora_backends.hf.calls.packed import RequestsCall
from lora_backends.hf.calls.running import running
from lora_backends.hf.wrapped import WrappedModel

EAGER_ARGUMENTS = frozenset(
    """module query key value attention_mask scaling dropout sinks kwargs""".split()
)
"""Arguments of an `eager_attention_forward` that the paged attention can replace. It reads sinks
from the module and needs no dropout."""

_WITHOUT_PAGES = (RuntimeError, AttributeError, TypeError, KeyError)
"""Errors of a first pass whose attention was written for another cache."""


class PagedModel:
    """Takes the place of the base model in the manager, and runs the adapters of the requests.

    Args:
        wrapped: the model.
        call: of the requests.
        processors: of the scores of all requests.
    """

    def __init__(
        self, wrapped: WrappedModel, call: RequestsCall, processors: Sequence[Any]
    ) -> None:
        self._wrapped, self._call, self._processors = wrapped, call, processors
        self._reads_cache = False  # until a pass has shown it
        self.paged_attention: str | None = None
        """The attention that the manager's passes need, if other calls cannot run with it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped.base, name)

    def eval(self) -> Self:
        """Put the base model into eval mode."""
        self._wrapped.base.eval()
        return self

    def set_attn_implementation(self, name: str) -> None:
        """Exchange the attention of the base model; a paged one only while a manager runs."""
        if name.startswith("paged|"):
            _check_same_products(self._wrapped.base)
            self.paged_attention = name
        else:
            base: Any = self._wrapped.base
            base.set_attn_implementation(name)

    def _get_logits_processor(self, *_: Any) -> LogitsProcessorList:
        """Return the processors to the manager, which would ask for those of one prompt."""
        return LogitsProcessorList(self._processors)

    def __call__(self, **inputs: Any) -> Any:
        """Run a forward pass with the adapters of the requests."""
        self._wrapped.check()
        # Transformers writes is_causal (False with SDPA) into the model's configuration for the
        # time of the pass, and passes of other threads would then attend to later tokens. The masks
        # that the manager passes need no flag.
        inputs.pop("is_causal", None)
        with running(self._call):
            try:
                if self._reads_cache:
                    return self._wrapped.base(**inputs)
                return self._first_pass(inputs)
            finally:
                # Between passes an adapter may be unloaded, and its modules be freed.
                self._call.replacements = {}

    def _first_pass(self, inputs: Mapping[str, Any]) -> Any:
        """Run the model, and refuse one that does not use the cache.

        Its tokens would attend to those of other requests, and not to their own earlier ones.

        Raises:
            UnsupportedInputError: no layer has updated the cache, or the pass failed before one
                did.
        """
        base, cache, update = self._wrapped.base, inputs["cache"], inputs["cache"].update

        def noting(*args: Any, **kwargs: Any) -> Any:
            updated = update(*args, **kwargs)
            self._reads_cache = True
            return updated

        # On the instance, for this pass: the class serves other managers, too.
        cache.update = noting
        try:
            output = base(**inputs)
        except Exception as error:
            # Attention for another cache fails at the mask's size, or at a method or argument that
            # the paged cache lacks. Subclasses of RuntimeError have other causes, e.g. memory.
            lacks_pages = type(error) in _WITHOUT_PAGES or _lacks_cache(error)
            if self._reads_cache or not lacks_pages:
                raise
            raise no_paged_attention(base, f"\n  the pass ended with: {told(error)}") from error
        finally:
            del cache.update
        if not self._reads_cache:
            raise no_paged_attention(base)
        return output


def _lacks_cache(error: Exception) -> bool:
    """Return whether a paged attention of Transformers 5.17 to 5.19 failed without its cache."""
    return type(error) is ValueError and "without a paged attention cache" in str(error)


def check_model(base: Any) -> None:
    """Refuse a model that cannot run the tokens of several requests in one row.

    Raises:
        UnsupportedInputError: it generates no text, is an encoder-decoder, keeps a state per row,
            or its attention does not read the cache.
    """
    if not hasattr(base, "init_continuous_batching"):
        raise UnsupportedInputError(
            f"{type(base).__name__} has no continuous batching\n"
            f"  allowed: a model that generates text, e.g. of AutoModelForCausalLM"
        )
    reasons = {
        "is an encoder-decoder": base.config.is_encoder_decoder,
        "keeps a state per row": getattr(base, "_is_stateful", False),
    }
    for reason, holds in reasons.items():
        if holds:
            raise no_batching(base, reason)
    if not any(map(_uses_interface, base.modules())):
        raise no_paged_attention(base)


def _check_same_products(base: Any) -> None:
    """Refuse an eager attention that computes more than the paged one, which takes its place.

    Transformers' paged attention ignores what it does not know, e.g. Gemma 2's `softcap`.

    Raises:
        UnsupportedInputError: it is such an attention.
    """
    config = base.config.get_text_config()
    for source in {type(module).__module__ for module in base.modules()}:
        eager = getattr(sys.modules.get(source), "eager_attention_forward", None)
        if eager is None:
            continue
        more = inspect.signature(eager).parameters.keys() - EAGER_ARGUMENTS
        if getattr(config, "attn_logit_softcapping", None) is None:
            more -= {"softcap"}
        if more:
            raise UnsupportedInputError(
                f"{type(base).__name__} runs with attn_implementation='eager', whose "
                f"{', '.join(sorted(more))} is not part of Transformers' paged attention\n"
                f"  allowed: an attn_implementation that continuous batching runs as it is, e.g. "
                f"'flash_attention_2'\n  to do: call generate() for these rows"
            )


def no_batching(base: torch.nn.Module, reason: str) -> UnsupportedInputError:
    """Return the error of a model that continuous batching does not run."""
    return UnsupportedInputError(
        f"{type(base).__name__} cannot run in continuous batching: it {reason}\n"
        f"  allowed: a decoder all of whose layers attend\n"
        f"  to do: call generate() for these rows"
    )


def _uses_interface(module: torch.nn.Module) -> bool:
    """Return whether a part of a model may use Transformers' interface for attention.

    Transformers looks for the interface in the source, and may miss it in the code of others.
    """
    if not isinstance(module, PreTrainedModel):
        return False
    is_foreign = not type(module).__module__.startswith("transformers.")
    return is_foreign or module._can_set_attn_implementation()


def no_paged_attention(base: torch.nn.Module, failure: str = "") -> UnsupportedInputError:
    """Return the error of a model whose attention does not read the cache."""
    return UnsupportedInputError(
        f"{type(base).__name__} has an attention of its own, which does not read the cache of "
        f"continuous batching: requests would see each other's tokens{failure}\n"
        f"  allowed: a model with Transformers' interface for attention\n"
        f"  to do: call generate() for these rows"
    )
