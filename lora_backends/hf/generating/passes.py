"""Runs the requests of a failed forward pass again one by one; only those that fail alone end.

By itself, Transformers ends all requests and its thread when a pass fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lora_backends.errors import LoRABackendError, RequestFailedError, told

_DEVICE_LOST: Any = getattr(torch, "AcceleratorError", ())
"""After this error every later pass fails. Running out of memory raises another type."""


class Passes:
    """Runs the passes of one processor of Transformers' manager.

    A failed pass can be repeated: until the new tokens are read, it changes nothing but keys and
    values at the positions of its own tokens. A request that fails alone ends with that error.

    Args:
        processor: a `ContinuousBatchProcessor` without asynchronous batching.
        cleared: called after the scheduler has cleared cancelled requests, which it does before
            each pass and while nothing runs.
    """

    def __init__(self, processor: Any, cleared: Callable[[], None]) -> None:
        self._processor = processor
        inputs = processor.inputs_and_outputs
        # The class's method: a manager that starts again keeps its processor, wrapped below.
        self._prepare = type(inputs).prepare_batch_tensors
        self._batch: list[tuple[Any, list[int]]] = []  # requests of the pass, and their tokens
        self._options: dict[str, Any] = {}  # of `prepare_batch_tensors`, the same for all requests

        def preparing(requests_in_batch: list[Any], **options: Any) -> None:
            # Copied first: preparing removes the tokens from the states.
            self._batch = [(each, list(each.state.tokens_to_process)) for each in requests_in_batch]
            self._options = options
            self._prepare(inputs, requests_in_batch=requests_in_batch, **options)

        inputs.prepare_batch_tensors = preparing
        scheduler = processor.scheduler
        clear = type(scheduler).clear_cancelled_requests

        def clearing() -> Any:
            states = clear(scheduler)
            cleared()
            # If the cache is full, Transformers holds requests back until one has its last token.
            # A request that fails or is cancelled ends without that token.
            if not scheduler.active_requests:
                scheduler.block_new_requests = False
            return states

        scheduler.clear_cancelled_requests = clearing

    def run(self, run_pass: Callable[[], None]) -> None:
        """Run the pass that was prepared.

        Args:
            run_pass: runs the model, and writes the new tokens.

        Raises:
            AcceleratorError: the device is lost.
        """
        # A prompt of one token that several sequences share has no token to run in its own pass.
        if not any(request.query_length for request, _ in self._batch):
            return
        try:
            run_pass()
        except _DEVICE_LOST:
            raise
        except Exception as error:
            self._run_one_by_one(run_pass, error)

    def _run_one_by_one(self, run_pass: Callable[[], None], error: Exception) -> None:
        processor, batch, options = self._processor, self._batch, self._options
        inputs, scheduler = processor.inputs_and_outputs, processor.scheduler
        # Requests for several sequences, whose cache Transformers copies at the end of this pass.
        forks, scheduler._requests_to_fork = scheduler._requests_to_fork, []
        for request, tokens in batch:
            state, failure = request.state, error
            if len(batch) > 1:
                state.tokens_to_process = tokens
                state.position_offset -= request.query_length  # preparing adds it again
                words = {**options, "num_q_tokens": request.query_length}
                self._prepare(inputs, requests_in_batch=[request], **words)
                try:
                    if request.query_length:
                        run_pass()
                except _DEVICE_LOST:
                    raise
                except Exception as alone:
                    failure = alone
                else:
                    scheduler._requests_to_fork = [each for each in forks if each is state]
                    processor.update_batch()
                    continue
            if not isinstance(failure, LoRABackendError):
                failure = RequestFailedError(told(failure))
            processor._handle_request_error(failure, state)
            scheduler.finish_request(state.request_id)
        inputs.requests_in_batch = []  # the manager updates the batch once more
