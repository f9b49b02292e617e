"""The running call of each thread, and the models with an open block of `using`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lora_backends.adapters import AdapterPool
from lora_backends.dispatch.repeats import NO_REPEATS, Repeats
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.experts import ExpertWeights
from lora_backends.hf.layout.layout import Layout
from lora_backends.hf.layout.sites import ModuleSite
from lora_backends.hf.replacements.rows import ReplacedRows
from lora_backends.weights import LoRAWeights


class Joined(NamedTuple):
    """The weights and biases of a leader and its siblings, rows of one tensor each.

    Parameters, though no module holds them: compiled programs read parameters where they lie, and
    copy other tensors into a CUDA graph.
    """

    weight: nn.Parameter  # [sum of widths, in_features]
    bias: nn.Parameter | None  # [sum of widths]


class ModelCall:
    """The adapters of one call of a model, as its hooks see them.

    By itself it is a call of no model: every hook leaves its module's output alone. `pool` is None
    for a call without adapters.
    """

    def __init__(self, model: str = "", pool: AdapterPool | None = None) -> None:
        self.model = model  # a string, because a compiled program always guards strings
        self.reads_pages = False  # whether it is a pass of continuous batching
        self.trains = ""  # key of the model of a call that trains, whose `model` is ""
        # keys of models that a pipeline will call; their adapters are not known before that call
        self.waiting: Collection[str] = ()
        self.stacks: Mapping[str, LoRAWeights] = {}  # by path, of the modules that are adapted
        self.shared: Mapping[str, LoRAWeights] = {}  # by a leader's path: of it and its siblings
        # by path of a parameter of experts
        self.experts: Mapping[str, tuple[ExpertWeights, ...]] = {}
        if pool is not None:
            self.stacks, self.shared, self.experts = pool.active
        self.replacements: Mapping[str, ReplacedRows] = {}  # by path of the base's module
        # by a leader's path: the weights that a compiled program may use
        self.joined: Mapping[str, Joined] = {}
        self.is_traced = False  # whether a compiled program uses those
        self.multiplies_bases = False  # graphs of its programs leave base products to the backend
        # The same for this pass alone: a graph captures it, or its kernels are not compiled yet.
        self.asks_backend = False
        # Computes a linear layer with its LoRA, or returns None for `linear_with_lora` to do it.
        self.widened: Callable[..., Tensor | None] | None = None

    def begin_forward(self, inputs: Mapping[str, Any], rows: int, length: int) -> None:
        """Note the shape of the forward pass that starts, or refuse it."""
        raise AssertionError("this call has no model")  # no model has the key ""

    def repeats(self) -> Repeats:
        """Return the stored calls that modules may repeat in the forward pass that starts."""
        return NO_REPEATS

    def plan(self, shape: tuple[int, ...], layout: Layout, paths: Sequence[str]) -> Any:
        """Return the plan for an input of `shape` (without its last axis), of modules."""
        raise AssertionError("this call has no model")

    def numbers(self, shape: tuple[int, ...], layout: Layout, paths: Sequence[str]) -> Tensor:
        """Return the slot of each position of such an input, on the CPU."""
        raise AssertionError("this call replaces no modules")

    def touches(self, paths: Sequence[str]) -> bool:
        """Return whether an adapter of the batch touches one of the modules."""
        raise AssertionError("this call trains nothing")

    def add(
        self, site: ModuleSite, layout: Layout, module: nn.Module, x: Tensor, output: Tensor
    ) -> Tensor | None:
        """Return a module's output with LoRA, as a node of autograd's graph; None: as it is."""
        raise AssertionError("this call trains nothing")

    def check_recomputation(self) -> None:
        """Refuse to compute a part of the pass again where that would give something else."""


NOTHING = ModelCall()
"""No call runs in this thread."""

IDLE = ModelCall()
"""A call runs whose rows all have no adapter."""


class Group(Protocol):
    """Modules that one of them, the leader, computes together."""

    apart: bool  # whether the model was seen to call them with different inputs


@dataclass(eq=False, slots=True)
class SiblingOutputs:
    """Outputs that a leader has computed for its siblings, until they are called."""

    group: Group
    x: Tensor  # the input that they belong to, this very tensor
    version: int  # of x: counts changes in place; less than 0 in a traced program
    outputs: list[Tensor | None]  # with LoRA, of the group; None: the sibling was called
    left: int  # siblings that have not been called


class _Running(threading.local):
    # A thread-local, because torch.compile traces no context variables, and a forward pass never
    # awaits. `call` is no class attribute: torch 2.11 would trace that instead of the thread's own.
    def __init__(self) -> None:
        self.call = NOTHING
        self.kept: SiblingOutputs | None = None
        self.repeats = NO_REPEATS  # of the forward pass that runs


RUNNING = _Running()
"""The call that is running in this thread.

Hooks read from it whatever may change. A compiled program guards what it reads from globals, but
neither the variables of a hook's closure nor the presence of hooks.
"""

_OPEN: dict[str, int] = {}  # key of a model to its open blocks of `using`, in all threads
_OPEN_LOCK = threading.Lock()


@contextmanager
def running(call: ModelCall) -> Iterator[None]:
    """Let the forward passes of this thread belong to `call`."""
    # A hook or callback may run a call within a call.
    outer = RUNNING.call, RUNNING.kept
    RUNNING.call, RUNNING.kept, RUNNING.repeats = call, None, NO_REPEATS
    try:
        yield
    finally:
        RUNNING.call, RUNNING.kept = outer
        RUNNING.repeats = NO_REPEATS  # other code has run since the outer pass began


@contextmanager
def open_block(call: ModelCall) -> Iterator[None]:
    """Let the forward passes of this thread belong to `call`."""
    # Counted, since several threads may be in blocks of the same model.
    # Meanwhile `check_thread` refuses a thread that runs the model without a call. Code such as
    # `generate_batch` starts threads that the caller does not know of, and these would compute the
    # base model's answers without an error.
    with _OPEN_LOCK:
        _OPEN[call.model] = _OPEN.get(call.model, 0) + 1
    try:
        with running(call):
            yield
    finally:
        with _OPEN_LOCK:
            _OPEN[call.model] -= 1
            if not _OPEN[call.model]:
                del _OPEN[call.model]


def is_open(model: str) -> bool:
    """Return whether any thread is in a block of `using` of a model."""
    return model in _OPEN


TRAINED: set[str] = set()
"""Keys of the models that have adapters in training."""


def check_thread(model: str) -> None:
    """Refuse to run a model without adapters where it may be expected to use some.

    Raises:
        InvalidInputError: no call runs in this thread, while a block of `using` is open in another;
            or a backward computes a part of a forward pass again whose adapters are not known.
        UnsupportedInputError: a pipeline runs a module outside of its model's forward pass.
    """
    if model in RUNNING.call.waiting:
        raise UnsupportedInputError(
            "a pipeline runs a module of a wrapped model outside of the model's forward pass, so "
            "the adapter of each row is not known\n  allowed: calls of the whole model"
        )
    if TRAINED and RUNNING.call is NOTHING and model in TRAINED and _in_backward():
        raise InvalidInputError(
            "a backward runs a part of the base model again, and it is not known with which "
            "adapters\n  given: activation checkpointing by other code than the model's own\n"
            "  to do: model.base.gradient_checkpointing_enable(), or checkpoint whole calls of the "
            "MultiLoRAModel; for the base model's own answers model(adapters=[None] * rows, ...)"
        )
    if _OPEN and RUNNING.call is NOTHING and model in _OPEN:
        raise InvalidInputError(
            f"thread {threading.current_thread().name!r} runs the base model without adapters "
            f"while another thread is in `with model.using(step)`\n"
            f"  allowed: adapters apply in the thread that enters the block\n"
            f"  to do: enter `with model.using(step)` in the thread that runs the model; for the "
            f"base model's own answers call model(adapters=[None] * rows, ...)"
        )


def _in_backward() -> bool:
    return not torch.compiler.is_dynamo_compiling() and torch._C._current_graph_task_id() != -1
