"""Requests that join and leave a running batch, each with its own adapter.

Transformers' continuous batching packs the tokens of all requests into one row, [1, tokens], and
runs the model in a thread of its own. `RequestManager` is its manager, which also knows the adapter
of every request. `RequestsCall` tells the hooks, at every forward pass, which adapter each of those
tokens uses, by two plans that it refills: one for all tokens, one for those whose logits are asked
for.
"""

from __future__ import annotations

import asyncio
import copy
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, Self

import torch
import transformers
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import RequestState

from lora_backends.errors import (
    InvalidInputError,
    LoRABackendError,
    RequestFailedError,
    UnsupportedInputError,
    shown,
    told,
)
from lora_backends.hf.calls.alora import invocation_in
from lora_backends.hf.calls.entries import ALLOWED, Entry, adapter_names, is_per_token
from lora_backends.hf.calls.packed import RequestsCall, find_packed
from lora_backends.hf.generating.batching_config import check_resolved, checked
from lora_backends.hf.generating.line import Line
from lora_backends.hf.generating.outputs import Outputs, remove
from lora_backends.hf.generating.paged import PagedModel, check_model, no_batching
from lora_backends.hf.generating.passes import Passes
from lora_backends.hf.generating.request_words import RequestWords, RowProcessors
from lora_backends.hf.layout.sites import vocabulary_of
from lora_backends.hf.replacements.rows import check_compiled, replaced_rows
from lora_backends.hf.wrapped import WrappedModel

CHILD = "__child#"
"""In the ids that Transformers gives further sequences of a request."""

DELIVERY = ("streaming", "record_timestamps")
"""Options of a request that change none of its tokens."""


@dataclass
class _Held:
    """One request, until it has ended."""

    ids: list[int]  # of its prompt
    entry: Entry
    start: int | None  # position from which the entry acts; None: nowhere
    slots: Mapping[str, int]  # name to slot of its adapters, which keep them
    hold: ExitStack
    remaining: int  # sequences that have not ended
    written: Any  # event after the last write to its slots; None: on a CPU, or waited for
    processors: Any = None  # of its scores, as `generate` makes them
    is_coming: bool = True  # not in the manager's input queue yet


class RequestManager(ContinuousBatchingManager):  # type: ignore[misc]  # has no types
    """Transformers' `ContinuousBatchingManager` with an adapter per request.

    Made by `MultiLoRAModel.continuous_batching`. What is not written here is as in Transformers:
    `request_id_iter`, `register_result_handler`, `pause` and the rest.

        with model.continuous_batching() as requests:
            name = requests.add_request(ids, adapter="pirate", max_new_tokens=20, streaming=True)
            for output in requests.request_id_iter(name):
                print(output.generated_tokens)

    The adapters of a request are neither evicted nor replaced before it has ended; a request that
    is cancelled frees them once the thread has taken it out. Requests share no blocks of the cache,
    whatever the configuration says: equal prompts have other keys and values with another adapter.
    """

    def __init__(
        self,
        wrapped: WrappedModel,
        generation_config: Any | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
    ) -> None:
        base: Any = wrapped.base
        # First: later steps change the model's attention. A refused model stays as it was.
        check_model(base)
        wrapped.check()
        config = checked(continuous_batching_config, base.device)
        self._words = RequestWords(base, generation_config, config.per_request_processors)
        # A copy: the words of the requests keep None for no end.
        generation_config = copy.copy(self._words.config)
        if generation_config.eos_token_id is None:
            generation_config.eos_token_id = -1  # Transformers' word for none
        # One trial pass serves all requests.
        self._wrapped, self._packed = wrapped, find_packed(wrapped)
        self._held: dict[str, _Held] = {}
        # Re-entrant: `_free_cancelled` releases requests under it.
        self._held_lock = threading.RLock()
        self._line = Line()
        self._pausing: set[int] = set()  # threads inside of pause()
        self._attention = ExitStack()  # open while the thread needs another attention
        self._cancelled: set[str] = set()
        self._has_ended_thread = False  # since the last start
        self._numbers = count()
        self._vocabulary = vocabulary_of(base)
        call = RequestsCall(wrapped, self._packed, self._entries_of_batch)
        processors = [RowProcessors(self._scored)] if self._words.change_scores else []
        paged = PagedModel(wrapped, call, processors)
        try:
            super().__init__(
                model=paged,
                generation_config=generation_config,
                continuous_batching_config=config,
            )
            check_resolved(self.continuous_batching_config)
        except Exception as error:
            # It may have been switched to FlashAttention.
            original = getattr(self, "_original_attn_impl", None)
            if original is not None and not paged.paged_attention:
                base.set_attn_implementation(original)
            if isinstance(error, LoRABackendError):
                raise
            raise no_batching(base, f"ends with {told(error)}") from error
        if paged.paged_attention:
            self._original_attn_impl = None  # `stop` has nothing to restore
        # Transformers reports the end of a request only through its outputs.
        self.output_router = Outputs(self._note_end)

    def start(self) -> None:
        """Start the thread that runs the requests.

        Raises:
            UnsupportedInputError: another manager runs the model with another attention.
        """
        if (name := self.model.paged_attention) is not None and not self.is_running():
            with ExitStack() as attention:
                # A model that is detached must have its own attention.
                attention.enter_context(self._wrapped.hooked.in_use())
                attention.enter_context(self._wrapped.attention.paged(name))
                self._attention = attention.pop_all()
        self._has_ended_thread = False
        try:
            super().start()
        except BaseException:
            self._attention.close()
            raise

    def _run_generation_loop(self, *args: Any, **options: Any) -> None:
        try:
            super()._run_generation_loop(*args, **options)
        finally:
            # Not in `stop`, because an error may have ended the thread.
            self._attention.close()
            with self._held_lock:
                self._has_ended_thread = True
            self._fail_left()

    def _fail_left(self) -> None:
        """End the requests that no thread will run: Transformers drops some when it stops."""
        with self._held_lock:
            left = {name: held for name, held in self._held.items() if not held.is_coming}
        error = RequestFailedError("the manager has stopped before this request ended")
        for name, held in left.items():
            self.output_router.fail_and_deliver(RequestState(name, list(held.ids)), error)
            self._release([name])

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Pause between two passes, as Transformers' `pause` does.

        Raises:
            RequestFailedError: no thread runs the requests.
            UnsupportedInputError: this version of Transformers has no `pause`.
        """
        if not hasattr(super(), "pause"):
            raise UnsupportedInputError(
                f"Transformers {transformers.__version__} cannot pause between two passes\n"
                f"  to do: pip install 'transformers>=5.18', or stop() and start() the manager"
            )
        with ExitStack() as end:
            try:
                end.enter_context(super().pause())
            except RuntimeError as error:
                raise RequestFailedError(f"{error}{self._reason()}") from error
            end.callback(self._pausing.discard, threading.get_ident())
            self._pausing.add(threading.get_ident())
            yield

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        # After an error nobody waits for the answers.
        self.stop(block=True, hard_stop=error[0] is not None)
        self.destroy()

    def add_request(  # noqa: D417  # the rest is Transformers'
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        *,
        adapter: Entry = None,
        **options: Any,
    ) -> str:
        """Add a request to the batch, at its next step.

        Where requests hold all slots of the pool, it waits until one comes free.

        Args:
            input_ids: of the prompt, at least one.
            request_id: None makes one.
            max_new_tokens: None takes that of the generation configuration, or, where it has none
                and the number of blocks is known, as many as the cache holds.
            adapter: an adapter's name, a blend of several, or None.
            options: streaming, record_timestamps, eos_token_id; with per_request_processors in
                the ContinuousBatchingConfig also words of a GenerationConfig, e.g. temperature, or
                do_sample=False where the manager samples.

        Returns:
            The id of the request.

        Raises:
            InvalidInputError: an unknown adapter, a wrong token, id or option, more tokens than
                the cache or the model's positions hold, it was cancelled while it waited, no slot
                will come free, or the manager has stopped.
            UnsupportedInputError: entries per token, an adapter of a module that does not see the
                tokens in their order, or with a head of other labels; a blend that a call would
                refuse or that includes an aLoRA, or an option that is not followed.
        """
        # All checks run in the caller's thread: an error in the manager's ends all requests.
        ids = self._check_tokens(input_ids)
        delivery = {name: options.pop(name) for name in DELIVERY if name in options}
        for name, value in delivery.items():
            if type(value) is not bool:
                raise InvalidInputError(f"{name} is {shown(value)}\n  allowed: True or False")
        asked = self._words.of_request(ids, max_new_tokens, self._room(), options)
        request_id = f"lora_{next(self._numbers)}" if request_id is None else request_id
        if not isinstance(request_id, str) or CHILD in request_id:
            raise InvalidInputError(
                f"request_id is {shown(request_id)}\n  allowed: a str without {CHILD!r}, or None"
            )
        # Before the queue: the thread may take the request at once.
        held = self._hold_in_line(request_id, adapter, ids)
        held.processors = asked.processors
        try:
            added = super().add_request(
                ids, request_id, asked.max_new_tokens, eos_token_id=asked.ends, **delivery
            )
        except BaseException as error:
            self._release([request_id])
            if isinstance(error, queue.Full):
                raise InvalidInputError(
                    "the queue was full for 10 s\n  to do: raise max_queue_size, or add it later"
                ) from error
            raise
        with self._held_lock:
            held.is_coming = False
            # The thread may have ended since Transformers checked: then nothing reads the queue.
            left = self._has_ended_thread and self._held.get(request_id) is held
        if added is None or left:
            remove(self.input_queue, lambda state: state.request_id == request_id)
            self._release([request_id])
            raise InvalidInputError(
                f"request {request_id!r} comes too late: the manager has stopped"
                f"{self._reason()}\n  to do: start another one"
            )
        return request_id

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot of the pool."""
        return len(self._line)

    def _hold_in_line(self, request_id: str, adapter: Entry, ids: list[int]) -> _Held:
        """Keep the adapters of a request in their slots, once there are some for them."""
        if is_per_token(adapter):
            raise UnsupportedInputError(
                f"a request has an entry per token\n  given: {shown(adapter)}\n  allowed: {ALLOWED}"
            )
        return self._line.wait(
            request_id,
            adapter_names([adapter]),
            self._wrapped.pool.slots,
            lambda: self._hold(request_id, adapter, ids),
            self._may_free,
            # A thread in its own pause must not wait for a slot or its turn: no request can end.
            may_wait=threading.get_ident() not in self._pausing,
        )

    def _may_free(self) -> bool:
        """Return whether a request runs that will free a slot."""
        return self.is_running() and any(held.slots for held in list(self._held.values()))

    def _hold(self, request_id: str, adapter: Entry, ids: list[int]) -> _Held:
        """Keep the adapters of a request in their slots, or refuse it."""
        with ExitStack() as hold:
            # First: a model that was detached has a pool without adapters, whose error misleads.
            hold.enter_context(self._wrapped.hooked.in_use())
            in_use = self._wrapped.pool.slots.in_use
            slots = hold.enter_context(in_use(adapter_names([adapter]), by="request"))
            self._packed.check_adapters(self._wrapped.pool, slots)
            start = invocation_in(adapter, slots, self._wrapped.pool, ids)
            # A blend that cannot run is refused here, and not in the thread that runs all requests.
            choices = self._packed.choices(self._wrapped, [adapter], slots)
            if replaced_rows(self._wrapped.pool, slots, choices):
                check_compiled(self._wrapped.base, "the adapter has modules of its own")
            # `delivery`: no output of an earlier request of this id may arrive from here on.
            with self.output_router.delivery, self._held_lock:
                if request_id in self._held:
                    raise InvalidInputError(
                        f"a request {request_id!r} is running\n  to do: give each its own id"
                    )
                if request_id in self._cancelled:
                    # That cancel was for an earlier request.
                    self.output_router.drop({request_id})
                    remove(self.cancel_queue, lambda name: name == request_id)
                    self._cancelled.discard(request_id)
                # A copy: the caller may change a blend and pass it again.
                entry = dict(adapter) if isinstance(adapter, Mapping) else adapter
                sequences, written = self.num_return_sequences, self._written()
                held = _Held(ids, entry, start, slots, hold.pop_all(), sequences, written)
                self._held[request_id] = held
                return held

    def add_requests(  # noqa: D417
        self, inputs: Sequence[Sequence[int]], *, adapters: Sequence[Entry], **options: Any
    ) -> list[str]:
        """Add several requests with the same options.

        Args:
            inputs: token ids of each prompt.
            adapters: as many entries.
            options: of `add_request`.

        Returns:
            Their ids.

        Raises:
            InvalidInputError: as `add_request`, or not one entry per prompt. Requests before the
                one at fault have been added.
        """
        lists = isinstance(adapters, Sequence) and not isinstance(adapters, str)
        if not lists or len(adapters) != len(inputs):
            raise InvalidInputError(
                f"adapters is {shown(adapters)} for {len(inputs)} prompts\n"
                f"  allowed: one adapter's name or None per prompt"
            )
        pairs = zip(inputs, adapters, strict=True)
        return [self.add_request(ids, adapter=adapter, **options) for ids, adapter in pairs]

    def cancel_request(self, request_id: str) -> None:
        """Take a request out of the batch; what it has generated is not delivered."""
        self.output_router.forget(request_id)
        if self._line.cancel(request_id):
            return  # its `add_request` raises
        # Noted first: the thread may take the request out before the next line.
        self._cancelled.add(request_id)
        super().cancel_request(request_id)

    def stop(self, *args: Any, **options: Any) -> None:
        """Stop the thread, after the requests that are running or, with hard_stop, at once."""
        super().stop(*args, **options)
        # Only then: a thread that still runs uses the adapters.
        if not self.is_running():
            self._fail_left()

    def register_result_handler(self, request_id: str, callback: Callable[[Any], object]) -> None:
        """Let the event loop that runs now call `callback` with each output of a request.

        The loop reports what it raises. Outputs for a closed loop go into the queue.

        Raises:
            InvalidInputError: no event loop runs in this thread.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError as error:
            raise InvalidInputError(
                "no event loop runs in this thread\n  to do: call it in a coroutine"
            ) from error
        self.output_router.register(request_id, callback, loop)

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> Any:
        """Return the next output, of one request or of any.

        Outputs of other requests keep their order; Transformers' own moves them after later ones.

        Args:
            request_id: None takes any.
            timeout: in seconds; None waits as long as the manager runs.

        Returns:
            A `GenerationOutput`, or None where none has come.
        """
        names = None if request_id is None else [request_id]
        return self.output_router.take(names, timeout, self.is_running)

    def request_id_iter(self, request_id: str) -> Iterator[Any]:
        """Yield each output of a request, up to its last.

        Raises:
            InvalidInputError: it has no output to come, e.g. it was cancelled.
            RequestFailedError: no thread runs it.
        """
        while True:
            output = self.output_router.take([request_id], 0.1, self.is_running)
            if output is None:
                self._check_coming([request_id])
                continue
            yield output
            if output.is_finished():
                return

    def collect(self, names: Iterable[str]) -> dict[str, Any]:
        """Wait for requests and return their outputs by id, in the order of `names`.

        Raises:
            InvalidInputError: a request has no output to come: it was cancelled, something else
                took its output, or it was never added.
            RequestFailedError: a request failed, or no thread runs them: none was started, or it
                ended.
        """
        children = range(self.num_return_sequences - 1)
        wanted = [[*(f"{name}{CHILD}{i}" for i in children), name] for name in names]
        ids = list(chain.from_iterable(wanted))
        outputs: dict[str, Any] = {}
        while missing := [name for name in ids if name not in outputs]:
            output = self.output_router.take({*missing}, 0.1, self.is_running)
            if output is None:
                self._check_coming(missing)
            elif output.error is not None:
                raise RequestFailedError(f"request {output.request_id!r} failed: {output.error}")
            elif output.is_finished():
                outputs[output.request_id] = output
        return {name: outputs[name] for name in ids}

    def _check_coming(self, names: Sequence[str]) -> None:
        """Refuse to wait for requests that will have no output."""
        runs = self.is_running()  # read first: the last outputs come before the thread's end
        outputs = self.output_router.output_queue
        # Both locks: an output is either not ended yet, or in the queue.
        with self.output_router.delivery, outputs.mutex:
            there = {output.request_id for output in outputs.queue}
            missing = [name for name in names if name not in there]
            gone = [name for name in missing if self._has_ended(name)]
        if missing and not runs:
            raise RequestFailedError(f"no thread runs the requests{self._reason()}")
        if gone:
            raise InvalidInputError(
                f"request {gone[0]!r} has no output to come\n"
                f"  allowed: requests that were added and not cancelled, each collected once"
            )

    def _has_ended(self, request_id: str) -> bool:
        name = request_id if request_id in self._held else _parent(request_id)
        return name not in self._held or name in self._dropped()

    def _dropped(self) -> set[str]:
        """Return the requests that were cancelled, and neither wait nor run any more."""
        processor = self.batch_processor
        if not self._cancelled or processor is None:
            return set()
        # Read in the order in which a request moves on, or it could slip past all three.
        coming = {name for name, held in list(self._held.items()) if held.is_coming}
        waiting = {state.request_id for state in list(self.input_queue.queue)}
        scheduler = processor.scheduler
        known = {*list(scheduler.active_requests), *list(scheduler.waiting_requests)}
        return self._cancelled - coming - waiting - known

    def _create_batch_processor(self) -> Any:
        """Return Transformers' processor, which also frees the adapters of cancelled requests."""
        processor = super()._create_batch_processor()
        self._passes = Passes(processor, self._free_cancelled)
        return processor

    def _generation_step(self) -> None:
        self._passes.run(super()._generation_step)

    def _free_cancelled(self) -> None:
        with self._held_lock:
            gone = self._dropped()
            if not gone:
                return
            self._cancelled -= gone
            self.output_router.drop(gone)
            for request_id in gone:
                self._release([request_id], whole=self._is_whole(request_id))

    def _entries_of_batch(self) -> list[tuple[Entry, Mapping[str, int], int]]:
        """Return the entry, the slots and the tokens of every request in the batch, in order."""
        batch = self.batch_processor.inputs_and_outputs.requests_in_batch
        held = [self._find(future.state.request_id) for future in batch]
        for each in held:
            # The manager's stream waits once for each write, not in every pass.
            if each.written is not None:
                torch.cuda.current_stream(self._wrapped.backend.device).wait_event(each.written)
                each.written = None
        packed: list[tuple[Entry, Mapping[str, int], int]] = []
        for future, each in zip(batch, held, strict=True):
            tokens = future.query_length
            past = future.state.position_offset - tokens  # it counts this pass, too
            before = tokens
            if each.start is not None:
                before = min(max(each.start - past, 0), tokens)
            parts = (None, before), (each.entry, tokens - before)
            packed += [(entry, each.slots, n) for entry, n in parts if n]
        return packed

    def _written(self) -> Any:
        """Return an event of the caller's stream, where its adapters may just have been loaded.

        The manager runs the model on a stream of its own.
        """
        if self._wrapped.backend.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._wrapped.backend.device))
        return event

    def _find(self, request_id: str) -> _Held:
        held = self._held.get(request_id) or self._held.get(_parent(request_id))
        if held is None:
            raise InvalidInputError(f"request {request_id!r} was not added by add_request")
        return held

    def _release(self, ids: Iterable[str], whole: bool = True) -> None:
        for request_id in ids:
            with self._held_lock:
                name = request_id if request_id in self._held else _parent(request_id)
                held = self._held.get(name)
                if held is None:
                    continue
                # A request with several sequences ends with the last of them.
                held.remaining -= 1
                if whole or not held.remaining:
                    del self._held[name]
                    held.hold.close()
                    self._line.move()

    def _is_whole(self, request_id: str) -> bool:
        """Return whether a request that failed or was cancelled leaves no sequence running.

        Its further sequences are made after its first token; before that, there is none to come.
        """
        scheduler = None if self.batch_processor is None else self.batch_processor.scheduler
        known = scheduler and [*scheduler.active_requests, *scheduler.waiting_requests]
        return request_id in self._held and request_id not in map(_parent, known or ())

    def _note_end(self, output: Any) -> None:
        # One that failed may have no further sequences yet: then all of it ends.
        whole = output.error is not None and self._is_whole(output.request_id)
        self._release([output.request_id], whole)

    def _reason(self) -> str:
        error = self.background_thread_status.fatal_error
        return "" if error is None else f": {type(error).__name__}: {error}"

    def _scored(self) -> list[tuple[Any, list[int]]]:
        """Return the processors and the tokens of each request that gets a token in this pass."""
        batch = self.batch_processor.inputs_and_outputs.requests_in_batch
        states = [future.state for future in batch if future.has_new_token]
        return [
            (self._find(state.request_id).processors, state.initial_tokens + state.generated_tokens)
            for state in states
        ]

    def _check_tokens(self, input_ids: Any) -> list[int]:
        """Return a prompt as a list; a wrong token would end all requests."""
        tokens = input_ids.tolist() if isinstance(input_ids, torch.Tensor) else input_ids
        ids = list(tokens) if isinstance(tokens, Iterable) else []
        if not ids or not all(type(i) is int and 0 <= i < self._vocabulary for i in ids):
            raise InvalidInputError(
                f"input_ids is {shown(input_ids)}\n  allowed: one or more ints, 0 or more and "
                f"less than {self._vocabulary}; each prompt on its own, without padding"
            )
        return ids

    def _room(self) -> int | None:
        """Return how many tokens the cache holds, if that is known."""
        config = self.continuous_batching_config
        page = vars(config).get("page_size") or vars(config).get("block_size")  # the older name
        return None if config.num_blocks is None or page is None else config.num_blocks * page


def _parent(request_id: str) -> str:
    """Return the request of which Transformers made this one, for num_return_sequences."""
    return request_id.rpartition(CHILD)[0]
