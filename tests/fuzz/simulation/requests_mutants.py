"""Bugs planted into continuous batching; a few runs of its world must find each of them."""

import lora_backends.hf.calls.packed as packed
import lora_backends.hf.generating.continuous as continuous
import lora_backends.hf.generating.line as line
import lora_backends.hf.generating.outputs as outputs
import lora_backends.hf.generating.passes as passes

from .mutants import Mutant

MANAGER = continuous.RequestManager
MUTANTS = {
    "a slot is freed with the first token": Mutant(
        outputs.Outputs, "deliver_batch", "if output.is_finished():", "if True:"
    ),
    "a request does not hold its slot": Mutant(MANAGER, "_hold", "hold.pop_all(),", "ExitStack(),"),
    "a closed event loop ends the manager": Mutant(
        outputs.Outputs, "_route", "except RuntimeError:", "except KeyError:"
    ),
    "a cancelled request keeps its slot": Mutant(
        MANAGER, "_free_cancelled", "self._release([request_id], whole=", "bool("
    ),
    "an answer goes to the callback and into the queue": Mutant(
        outputs.Outputs,
        "_route",
        "loop.call_soon_threadsafe(callback, output)\n            return",
        "loop.call_soon_threadsafe(callback, output)",
    ),
    "a pass has the adapters of the pass before": Mutant(packed._Plan, "forget", "False", "True"),
    "a failed pass ends all of its requests": Mutant(
        passes.Passes, "_run_one_by_one", "if len(batch) > 1:", "if False:"
    ),
    "a failed pass ends the manager": Mutant(
        passes.Passes, "run", "self._run_one_by_one(run_pass, error)", "raise"
    ),
    "a pass runs again without its tokens": Mutant(
        passes.Passes, "_run_one_by_one", "state.tokens_to_process = tokens", "pass"
    ),
    "a pass runs again at later positions": Mutant(
        passes.Passes, "_run_one_by_one", "state.position_offset -= request.query_length", "pass"
    ),
    "the failure of a pass is read as an answer": Mutant(
        passes.Passes, "_run_one_by_one", "inputs.requests_in_batch = []", "pass"
    ),
    "a waiting request starves": Mutant(
        line, "may_try", "(is_loaded and now - first_refused < PASS_S)", "True"
    ),
    "a cancelled request waits on": Mutant(
        line.Line, "wait", "if request_id in self._cancelled:", "if False:"
    ),
    "a thread waits for itself in its own pause": Mutant(
        line.Line, "wait", "if not may_wait or self._is_turn", "if self._is_turn"
    ),
    "a failed request raises an error without a type": Mutant(
        MANAGER,
        "collect",
        'raise RequestFailedError(f"request {output.request_id!r}',
        'raise RuntimeError(f"request {output.request_id!r}',
    ),
    "tokens are not checked": Mutant(
        MANAGER, "_check_tokens", "not ids or not all(", "not ids and all("
    ),
    "two requests may have one id": Mutant(
        MANAGER, "_hold", "if request_id in self._held:", "if False:"
    ),
    "a cancel ends the next request of its id": Mutant(
        MANAGER, "_hold", "remove(self.cancel_queue, lambda name: name == request_id)", "pass"
    ),
    "an output of an earlier request comes late": Mutant(
        MANAGER, "_hold", "self.output_router.delivery, self._held_lock", "self._held_lock"
    ),
    "a request that Transformers drops has no end": Mutant(
        MANAGER, "_run_generation_loop", "self._fail_left()", "pass"
    ),
    "a request added too late has no end": Mutant(
        MANAGER, "add_request", "left = self._has_ended_thread and", "left = False and"
    ),
    "a last answer is missed": Mutant(
        MANAGER, "_check_coming", "if missing and not runs:", "if not self.is_running():"
    ),
    "a stream of a cancelled request has no end": Mutant(
        MANAGER, "request_id_iter", "self._check_coming([request_id])", "pass"
    ),
    "words of a request go to others": Mutant(
        MANAGER, "_scored", "if future.has_new_token]", "if future.has_new_token][::-1]"
    ),
}
