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
from lora_backends.sentence_transformers.marked import Mark, marked, unmarked


class _Call(threading.local):
    """The call with adapters that a thread is in."""

    is_open = False
    rows: list[Any] | None = None  # adapters of the batch that was read last
    done = 0  # rows that have run
    is_inside = False  # of the model's own forward pass


class MultiLoRAEncoder:
    """A `SentenceTransformer`, `SparseEncoder` or `CrossEncoder` with an adapter per text.

        encoder = MultiLoRAEncoder(SentenceTransformer("my-model"), max_adapters=8)
        encoder.load_adapter("legal", "adapters/legal")
        vectors = encoder.encode(texts, adapters=["legal", None, {"legal": 0.5, "news": 0.5}])

    The encoder is changed in place. It sorts texts by length and cuts batches as ever: a text
    carries its adapter. Pooling, dense layers and what else follows the Transformers model have no
    LoRA. A call of the encoder itself computes without adapters.

    Args:
        encoder: whose only Transformers model is that of its first module.
        options: of `MultiLoRAModel`: backend, max_adapters, max_rank, ...

    Raises:
        InvalidInputError: `encoder` is no such model, or as `MultiLoRAModel`.
        UnsupportedInputError: it has several Transformers models, or was compiled, or its
            package is too old; or as `MultiLoRAModel`.
    """

    def __init__(self, encoder: Any, **options: Any) -> None:
        base = _base_of(encoder)
        self.encoder: Any = encoder  # without types: the package is optional
        self.lora = MultiLoRAModel(base, **options)
        """The wrapped Transformers model, with every method for adapters."""
        self._call = _Call()
        self._forward, self._preprocess = base.forward, self.encoder.preprocess
        # The first module calls `forward` by its name, so hooks of the model would not see it.
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
        """Return the encoder's `encode`, every text with its own adapter.

        Args:
            inputs: a text, or a sequence of texts.
            adapters: for each text a name, a blend (a dict of names to strengths) or None; one of
                these for all texts, too.
            options: of the encoder's method, by name.

        Raises:
            InvalidInputError: not one entry per text, or as a call of `MultiLoRAModel`.
            UnsupportedInputError: inputs that are no texts, several processes, texts that are
                packed into one row, or as a call of `MultiLoRAModel`.
        """
        return self._served("encode", inputs, adapters, options)

    def encode_query(self, inputs: Any, *, adapters: Any, **options: Any) -> Any:
        """Return the encoder's `encode_query`; arguments and errors as of `encode`."""
        return self._served("encode_query", inputs, adapters, options)

    def encode_document(self, inputs: Any, *, adapters: Any, **options: Any) -> Any:
        """Return the encoder's `encode_document`; arguments and errors as of `encode`."""
        return self._served("encode_document", inputs, adapters, options)

    def predict(self, inputs: Any, *, adapters: Any, **options: Any) -> Any:
        """Return a `CrossEncoder`'s `predict`; arguments, of pairs, and errors as of `encode`."""
        return self._served("predict", inputs, adapters, options)

    def rank(self, query: str, documents: Any, *, adapters: Any, **options: Any) -> Any:
        """Return a `CrossEncoder`'s `rank`, every document with its own adapter.

        Arguments and errors as of `encode`.
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
        """Return the encoder as it was, without adapters.

        Raises:
            InvalidInputError: a call is running.
        """
        self.lora.detach()
        for change in self._changes:
            change.undo()
        self._changes = []  # a second wrapper may have come by the next call
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
                f"a {type(self.encoder).__name__} has no {name}\n"
                f"  to do: encode with embedders, predict and rank with a CrossEncoder"
            )
        return method

    @contextmanager
    def _open(self, options: dict[str, Any], count: int) -> Iterator[None]:
        """Let the batches of a call take the adapters of their texts."""
        device, call = options.get("device"), self._call
        spread = getattr(self.encoder, "_distributed_inference", None) is not None
        if options.get("pool") is not None or isinstance(device, list) or (spread and not device):
            raise UnsupportedInputError(
                "adapters do not go to the processes of a pool\n"
                "  given: pool, several devices, or distributed inference\n"
                "  to do: make an encoder with adapters in each process"
            )
        if call.is_open:
            raise InvalidInputError("a call with adapters is running in this thread")
        call.is_open, call.rows, call.done = True, None, 0
        try:
            yield
            if call.done != count:
                raise UnsupportedInputError(
                    f"{call.done} of {count} texts met their adapters\n"
                    f"  to do: call this encoder's own methods, without subclasses that change them"
                )
        finally:
            call.is_open, call.rows = False, None

    def _run_preprocess(self, inputs: Any, *args: Any, **options: Any) -> Any:
        """Note the adapters of a batch, and read it as its user gave it."""
        if not self._call.is_open:
            return self._preprocess(inputs, *args, **options)
        pairs = [unmarked(value) for value in inputs]
        rows = [entry for _, entries in pairs for entry in entries]
        if rows:  # else a prompt alone, of which only the length is asked
            if len(rows) != len(pairs):
                raise UnsupportedInputError(
                    f"{len(rows)} of a batch's {len(pairs)} texts carry an adapter\n"
                    f"  to do: call the methods of MultiLoRAEncoder"
                )
            self._call.rows = rows
        return self._preprocess([value for value, _ in pairs], *args, **options)

    def _run_forward(self, *args: Any, **inputs: Any) -> Any:
        """Run the model's forward pass with the adapters of the batch that was read last."""
        call = self._call
        if call.is_inside or not call.is_open:
            return self._forward(*args, **inputs)
        rows, call.rows = call.rows, None
        if rows is None:
            raise UnsupportedInputError(
                "a pass of the encoder has no batch with adapters\n"
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
            f"  given: a {name} without preprocess()\n  to do: install sentence-transformers>=6"
        )
    if getattr(encoder, "_compiled_call_impl", None) is not None:
        raise UnsupportedInputError(
            f"the {name} was compiled\n  to do: wrap it first; adapters run without its compile()"
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


class _Method:
    """A function in place of a method, with its signature.

    A copy of the encoder would hold this very function, and run the weights of the original.
    """

    def __init__(self, original: Callable[..., Any], instead: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self._instead = instead

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._instead(*args, **options)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _no_copy()


class _Change:
    """A method of one object that was replaced, until `undo`."""

    def __init__(self, holder: Any, name: str, instead: Callable[..., Any]) -> None:
        self._holder, self._name = holder, name
        # Other libraries replace methods, too: Accelerate does.
        self._before = vars(holder).get(name)
        self._made = _Method(getattr(holder, name), instead)
        setattr(holder, name, self._made)

    def undo(self) -> None:
        own = vars(self._holder)
        if own.get(self._name) is not self._made:
            return  # replaced by somebody else since
        del own[self._name]
        if self._before is not None:
            own[self._name] = self._before


def _no_copy() -> UnsupportedInputError:
    return UnsupportedInputError(
        "an encoder with adapters cannot be copied or pickled\n"
        "  to do: detach it first, or copy the encoder before it is wrapped"
    )


def _entries(adapters: Any, count: int) -> list[Any]:
    """Return an entry for each of `count` texts."""
    if adapters is None or isinstance(adapters, (str, dict)):
        return [adapters] * count
    if hasattr(adapters, "tolist"):  # an array
        adapters = adapters.tolist()
    if not isinstance(adapters, Sequence) or len(adapters) != count:
        given = (
            f"has {len(adapters)} entries" if isinstance(adapters, Sequence)
            else f"is {shown(adapters)}"
        )  # fmt: skip
        raise InvalidInputError(
            f"adapters {given} for {count} texts\n"
            f"  allowed: one name, blend or None per text, or one for all"
        )
    return list(adapters)


def _marked(values: Sequence[Any], entries: Sequence[Any]) -> list[Any]:
    return [marked(value, entry) for value, entry in zip(values, entries, strict=True)]
