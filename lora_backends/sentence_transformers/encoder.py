"""`MultiLoRAEncoder`: a sentence-transformers model whose texts each use their own adapter."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel

from lora_backends.errors import InvalidInputError, UnsupportedInputError, shown
from lora_backends.hf import MultiLoRAModel
from lora_backends.hf.calls.entries import is_per_token
from lora_backends.hf.layout.twin import InsteadOf
from lora_backends.sentence_transformers.marked import Mark, marked, unmarked


class _Call(threading.local):
    """The state of this thread's call with adapters."""

    is_open = False  # whether such a call is running
    rows: list[Any] | None = None  # entries of the batch that was preprocessed last
    done = 0  # number of rows that have run
    is_inside = False  # whether the wrapped model's forward pass is running


class MultiLoRAEncoder:
    """A `SentenceTransformer`, `SparseEncoder` or `CrossEncoder` with an adapter per text.

        encoder = MultiLoRAEncoder(SentenceTransformer("my-model"), max_adapters=8)
        encoder.load_adapter("legal", "adapters/legal")
        vectors = encoder.encode(texts, adapters=["legal", None, {"legal": 0.5, "news": 0.5}])

    The encoder is changed in place. It still sorts texts by length and cuts them into batches:
    each text carries its adapter through both. Only the Transformers model has LoRA; pooling and
    dense layers behind it have none. A call of the encoder itself computes without adapters.

    Args:
        encoder: an encoder with one Transformers model, in its first module.
        options: options of `MultiLoRAModel`: backend, max_adapters, max_rank, ...

    Raises:
        InvalidInputError: `encoder` is no model of sentence-transformers, or as `MultiLoRAModel`.
        UnsupportedInputError: `encoder` has several Transformers models or is compiled,
            sentence-transformers is older than version 6, or as `MultiLoRAModel`.
    """

    def __init__(self, encoder: Any, **options: Any) -> None:
        base = _base_of(encoder)
        self.encoder: Any = encoder  # Any, because sentence-transformers is optional
        self.lora = MultiLoRAModel(base, **options)
        """The wrapped Transformers model, with all methods that manage adapters."""
        self._call = _Call()
        self._forward, self._preprocess = base.forward, self.encoder.preprocess
        # The first module calls `model.forward(...)`, which runs no hooks of the model.
        self._changes = [
            _Change(base, "forward", self._run_forward),
            _Change(encoder, "preprocess", self._run_preprocess),
        ]

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters in slots, the least recently used first."""
        return self.lora.adapters

    def load_adapter(self, name: str, folder: str | Path, **options: Any) -> None:
        """Load a PEFT checkpoint, as `MultiLoRAModel.load_adapter`."""
        self.lora.load_adapter(name, folder, **options)

    def unload_adapter(self, name: str) -> None:
        """Free the slot of an adapter, as `MultiLoRAModel.unload_adapter`."""
        self.lora.unload_adapter(name)

    def encode(self, inputs: Any, *, adapters: Any, **options: Any) -> Any:
        """Run the encoder's `encode`, every text with its own adapter.

        Args:
            inputs: a text, or a sequence of texts.
            adapters: one entry for all texts, or a list with one per text. An entry is a name, a
                blend (a dict of names to strengths) or None.
            options: keyword arguments of the encoder's method.

        Returns:
            The result of the encoder's method.

        Raises:
            InvalidInputError: the number of entries is not that of the texts, or as a call of
                `MultiLoRAModel`.
            UnsupportedInputError: inputs are not texts, the encoder spreads them over processes or
                packs several texts into one row, or as a call of `MultiLoRAModel`.
        """
        return self._served("encode", inputs, adapters, options)

    def encode_query(self, inputs: Any, *, adapters: Any, **options: Any) -> Any:
        """Run the encoder's `encode_query`; arguments and errors are those of `encode`."""
        return self._served("encode_query", inputs, adapters, options)

    def encode_document(self, inputs: Any, *, adapters: Any, **options: Any) -> Any:
        """Run the encoder's `encode_document`; arguments and errors are those of `encode`."""
        return self._served("encode_document", inputs, adapters, options)

    def predict(self, inputs: Any, *, adapters: Any, **options: Any) -> Any:
        """Run a `CrossEncoder`'s `predict` on pairs of texts; arguments and errors as `encode`."""
        return self._served("predict", inputs, adapters, options)

    def rank(self, query: str, documents: Any, *, adapters: Any, **options: Any) -> Any:
        """Run a `CrossEncoder`'s `rank`, every document with its own adapter.

        Arguments and errors are those of `encode`.
        """
        self._check_attached()
        documents = list(documents)
        given = _marked(documents, _entries(adapters, len(documents)))
        with self._open(options, len(documents)):
            ranked = self._method("rank")(query=query, documents=given, **options)
        for result in ranked:
            if isinstance(result.get("text"), Mark):
                result["text"] = result["text"].value
        return ranked

    def detach(self) -> Any:
        """Restore the encoder's own methods and return it, without adapters.

        Raises:
            InvalidInputError: a call is running.
        """
        self.lora.detach()
        for change in self._changes:
            change.undo()
        self._changes = []  # a second call must not undo the changes of a later wrapper
        return self.encoder

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse copy and pickle, as `MultiLoRAModel`."""
        raise _no_copy()

    def __repr__(self) -> str:
        return f"<MultiLoRAEncoder of {type(self.encoder).__name__}, {self.adapters}>"

    def _served(self, name: str, inputs: Any, adapters: Any, options: dict[str, Any]) -> Any:
        self._check_attached()
        method = self._method(name)
        if isinstance(inputs, Iterator):
            inputs = list(inputs)
        if self.encoder.is_singular_input(inputs):
            value = inputs.tolist() if hasattr(inputs, "tolist") else inputs
            given, count = marked(value, _entries(adapters, 1)[0]), 1
        else:
            values = inputs.tolist() if hasattr(inputs, "tolist") else list(inputs)
            given, count = _marked(values, _entries(adapters, len(values))), len(values)
        with self._open(options, count):
            return method(inputs=given, **options)

    def _check_attached(self) -> None:
        if not self._changes:
            raise InvalidInputError("the encoder was detached\n  to do: wrap it again")

    def _method(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] | None = getattr(self.encoder, name, None)
        if method is None:
            raise UnsupportedInputError(
                f"a {type(self.encoder).__name__} has no {name}()\n"
                f"  to do: use encode with an embedder, predict and rank with a CrossEncoder"
            )
        return method

    @contextmanager
    def _open(self, options: dict[str, Any], count: int) -> Iterator[None]:
        """Serve the batches of one call of the encoder with the adapters of their texts."""
        device, call = options.get("device"), self._call
        spread = getattr(self.encoder, "_distributed_inference", None) is not None
        if options.get("pool") is not None or isinstance(device, list) or (spread and not device):
            raise UnsupportedInputError(
                "adapters do not reach other processes\n"
                "  given: a pool, several devices, or distributed inference\n"
                "  to do: make a MultiLoRAEncoder in each process"
            )
        if call.is_open:
            raise InvalidInputError("a call with adapters is already running in this thread")
        call.is_open, call.rows, call.done = True, None, 0
        try:
            yield
            if call.done != count:
                raise UnsupportedInputError(
                    f"only {call.done} of {count} texts ran with their adapters\n"
                    f"  to do: use an encoder whose class does not override the called method"
                )
        finally:
            call.is_open, call.rows = False, None

    def _run_preprocess(self, inputs: Any, *args: Any, **options: Any) -> Any:
        """Keep the entries of a batch, and preprocess its texts without them."""
        if not self._call.is_open:
            return self._preprocess(inputs, *args, **options)
        pairs = [unmarked(value) for value in inputs]
        rows = [entry for _, entries in pairs for entry in entries]
        if rows:  # otherwise the encoder measures the length of a prompt
            if len(rows) != len(pairs):
                raise UnsupportedInputError(
                    f"{len(rows)} of {len(pairs)} texts of a batch carry an adapter\n"
                    f"  to do: call the methods of MultiLoRAEncoder"
                )
            self._call.rows = rows
        return self._preprocess([value for value, _ in pairs], *args, **options)

    def _run_forward(self, *args: Any, **inputs: Any) -> Any:
        """Run the model's forward pass with the entries of the batch that was preprocessed last."""
        call = self._call
        if call.is_inside or not call.is_open:
            return self._forward(*args, **inputs)
        rows, call.rows = call.rows, None
        if rows is None:
            raise UnsupportedInputError(
                "a forward pass of the encoder has no batch with adapters\n"
                "  to do: call the methods of MultiLoRAEncoder"
            )
        call.is_inside = True
        try:
            output = self.lora(*args, adapters=rows, **inputs)
        finally:
            call.is_inside = False
        call.done += len(rows)
        return output


def _base_of(encoder: Any) -> Any:
    """Return the only Transformers model of an encoder."""
    name = type(encoder).__name__
    if not isinstance(encoder, nn.Module) or not callable(getattr(encoder, "tokenize", None)):
        raise InvalidInputError(
            f"encoder is no model of sentence-transformers\n  given: {shown(encoder)}\n"
            f"  allowed: a SentenceTransformer, SparseEncoder or CrossEncoder"
        )
    if not (
        callable(getattr(encoder, "preprocess", None)) and hasattr(encoder, "is_singular_input")
    ):
        raise UnsupportedInputError(
            f"this version of sentence-transformers is not supported\n"
            f"  given: a {name} without preprocess() or is_singular_input()\n"
            f"  to do: install sentence-transformers>=6"
        )
    if getattr(encoder, "_compiled_call_impl", None) is not None:
        raise UnsupportedInputError(
            f"the {name} is compiled\n  to do: wrap an encoder without torch.compile"
        )
    models = [m for m in encoder.modules() if isinstance(m, PreTrainedModel)]
    inner = {id(part) for m in models for part in m.modules() if part is not m}
    outer = [m for m in models if id(m) not in inner]
    first = getattr(next(iter(encoder.children()), None), "model", None)
    if len(outer) != 1 or outer[0] is not first:
        kinds = ", ".join(type(m).__name__ for m in outer) or "none"
        raise UnsupportedInputError(
            f"adapters need an encoder with one Transformers model, in its first module\n"
            f"  given: a {name} with {kinds}\n  to do: wrap the parts of a Router one by one"
        )
    return outer[0]


class _Method(InsteadOf):
    """A replacement for a bound method, with its signature.

    It refuses to be copied: a copy of the encoder would run the original's weights through it.
    """

    def __init__(self, original: Callable[..., Any], instead: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self.original, self._instead = original, instead

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._instead(*args, **options)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _no_copy()


class _Change:
    """Replaces a method of one object until `undo`."""

    def __init__(self, holder: Any, name: str, instead: Callable[..., Any]) -> None:
        self._holder, self._name = holder, name
        # Another library, such as Accelerate, may have replaced the method already.
        self._before = vars(holder).get(name)
        self._made = _Method(getattr(holder, name), instead)
        setattr(holder, name, self._made)

    def undo(self) -> None:
        attributes = vars(self._holder)
        if attributes.get(self._name) is not self._made:
            return  # replaced again since
        del attributes[self._name]
        if self._before is not None:
            attributes[self._name] = self._before


def _no_copy() -> UnsupportedInputError:
    return UnsupportedInputError(
        "an encoder with adapters cannot be copied or pickled\n"
        "  to do: copy the encoder before it is wrapped, or after detach()"
    )


def _entries(adapters: Any, count: int) -> list[Any]:
    """Return one entry for each of `count` texts."""
    if adapters is None or isinstance(adapters, (str, dict)):
        return [adapters] * count
    if hasattr(adapters, "tolist"):  # an array
        adapters = adapters.tolist()
    is_list = isinstance(adapters, Sequence)
    if not is_list or len(adapters) != count:
        given = f"has {len(adapters)} entries" if is_list else f"is {shown(adapters)}"
        raise InvalidInputError(
            f"adapters {given} for {count} texts\n"
            f"  allowed: one name, blend or None per text, or one for all"
        )
    for at, entry in enumerate(adapters):
        if is_per_token(entry):  # the encoder pads and truncates the tokens
            raise InvalidInputError(
                f"adapters[{at}] is {shown(entry)}\n"
                f"  allowed: an adapter's name, a dict of names to strengths, or None"
            )
    return list(adapters)


def _marked(values: Sequence[Any], entries: Sequence[Any]) -> list[Any]:
    return [marked(value, entry) for value, entry in zip(values, entries, strict=True)]
