"""Requests of several clients in one manager of continuous batching, beside loads and evictions.

Everything is drawn from the seed and repeats with it: the manager's own thread, Transformers' loop
and queues in it, the clients, the event loops of their callbacks and the reads of files run as
threads of the simulation, one at a time. The forward passes are real, of a tiny model. Two things
are outside: event loops are a stand-in for asyncio's, and the numbers of a pass are those of this
machine, so that tokens are compared with those of `generate` on the same machine.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lora_backends.errors import InvalidInputError, LoRABackendError
from lora_backends.hf import MultiLoRAModel
from lora_backends.hf.calls.running import RUNNING
from tests.helpers.continuous import settings

from . import tiny_model
from .event_loops import EventLoop
from .operations import NAMES, InjectedError, Operations
from .threads import Simulation
from .tiny_model import MOST_NEW, POSITIONS, VOCABULARY, Words

OPERATIONS = 5  # of each client
PROMPTS = ((1, 2, 3), (7,), (5, 6, 7, 8, 9, 10, 11, 12, 13), (3, 30, 4), (21, 22, 23, 24, 25))
WORDS: tuple[Words, ...] = (
    (("repetition_penalty", 1.5),),
    (("suppress_tokens", (1, 4, 9, 16, 25, 36)),),
)
WRONG: tuple[dict[str, Any], ...] = (
    {"input_ids": []},
    {"input_ids": None},
    {"input_ids": ["a"]},
    {"input_ids": [VOCABULARY]},
    {"input_ids": [-1]},
    {"input_ids": [True]},
    {"input_ids": [1] * POSITIONS},
    {"max_new_tokens": 0},
    {"max_new_tokens": POSITIONS},
    {"max_new_tokens": "four"},
    {"adapter": "nobody"},
    {"adapter": 3},
    {"adapter": ["a0", "a1", None]},
    {"adapter": {"a0": "much"}},
    {"repetition_penalty": -1.0},
    {"num_beams": 2},
    {"words": 7},
    {"repetition_penalty": "much"},
    {"eos_token_id": "end"},
    {"streaming": 1},
    {"request_id": 3},
    {"request_id": "x__child#0"},
)
STOPPED = "Generation loop finished before", "no thread runs", "the manager has stopped"
"""In the errors of requests that the manager's end has ended; none ends before its clients."""

SLACK_S = 0.05
"""Simulated seconds that a thread may need to act on what it has seen."""


@dataclass(eq=False)
class Asked:
    """One request, and what has become of it."""

    id: str
    adapter: str | None
    prompt: tuple[int, ...]
    new: int
    words: Words
    ends: tuple[int, ...]
    is_poison: bool  # each pass with it fails
    versions: set[int] = field(default_factory=set)  # of its adapter that it may have got
    may_fail: bool = False  # a pass with it alone has failed, or the device is lost
    is_cancelled: bool = False  # a cancel has begun
    is_added: bool = False
    is_read: bool = False  # its client got its end
    loop: EventLoop | None = None  # that runs its callback
    answers: list[Any] = field(default_factory=list)  # outputs that end it
    partial: list[list[int]] = field(default_factory=list)  # tokens of the others

    def note(self, output: Any) -> None:
        """Record an output."""
        if output.is_finished():
            self.answers.append(output)
        else:
            self.partial.append(list(output.generated_tokens))


class RequestsWorld(Operations):
    """The threads of one run, and what must hold.

    Args:
        simulation: that runs.
        root: a folder for the files.
    """

    def __init__(self, simulation: Simulation, root: Path) -> None:
        super().__init__(simulation, root, tiny_model.files_of, tiny_model.checkpoints())
        draw = simulation.draw
        self.pass_s = draw.choice((0.0, 0.02, 0.1))
        self._pass_errors = draw.choice((0.0, 0.0, 0.05, 0.3))
        self._poison = draw.choice((0.0, 0.0, 0.1))
        self._loses_device = draw.choice((0.0,) * 7 + (0.03,))
        self._is_lost = False  # the device
        self._cancelling: list[str] = []  # ids of cancels that run
        self._is_ending = False  # the manager is stopped, or has ended by an error
        self._asked: dict[str, Asked] = {}  # the last of each id
        self._all: list[Asked] = []
        self._calls: list[tuple[str | None, set[int], tuple[int, ...], int]] = []
        self._of_callback: dict[Callable[..., object], Asked] = {}
        self._loop_of: dict[object, EventLoop] = {}  # thread to the loop that runs in it

    @property
    def asyncio(self) -> Any:
        """Takes the place of the module."""
        return SimpleNamespace(get_running_loop=self._running_loop)

    def run(self) -> None:
        """Serve several clients, end the manager, and check what is left."""
        sim, draw = self._sim, self._draw
        for name in NAMES[:4]:  # the last comes from memory, if at all
            self.disk.save(name, self.disk.new_version(name), "moved")
        sim.now += 10
        base = tiny_model.make_base()
        slots, rank = draw.choice((1, 2, 2, 3)), tiny_model.MAX_RANK
        self._model = model = MultiLoRAModel(base, "torch_ref", max_adapters=slots, max_rank=rank)
        watch_s = draw.choice((None, 0.0, 0.05))
        self.store = model.keep_adapters(draw.choice((0, 10**6)), self.disk.root, watch_s)
        self.pool = model.pool
        base.model.layers[0].register_forward_pre_hook(self._before_layer)
        self._has_words = draw.random() < 0.5
        config = settings(
            num_blocks=draw.choice((3, 6, 24)),
            max_batch_tokens=draw.choice((5, 7, 16)),
            max_queue_size=draw.choice((0, 0, 2)),
            scheduler_type=draw.choice(("fifo", "prefill_first")),
            per_request_processors=self._has_words,
        )
        self.manager = model.continuous_batching(continuous_batching_config=config)
        self._watch_line()
        self._loops = [EventLoop(sim, number) for number in range(2)]
        self.manager.start()
        clients = draw.choice((1, 2, 3, 4))
        self._left = clients
        for number in range(clients):
            sim.spawn(f"client {number}", self._work)
        ends_early, hard = draw.random() < 0.25, draw.random() < 0.5
        for _ in range(draw.choice((0, OPERATIONS)) if ends_early else OPERATIONS):
            self._attempt(self._any_operation())
        if not ends_early:
            sim.pause("wait for clients", lambda: not self._left)
            self._wait_for_answers()
        self._is_ending = True
        sim.tell(f"stop{', hard' * hard}")
        self.manager.stop(hard_stop=hard)
        sim.pause("wait for clients", lambda: not self._left)
        sim.pause("wait for loops", lambda: all(loop.is_idle for loop in self._loops))
        for loop in self._loops:
            loop.close()
        self._finish()

    # Operations

    def _work(self) -> None:
        for _ in range(OPERATIONS):
            self._attempt(self._any_operation())
        self._left -= 1

    def _any_operation(self) -> Callable[[], None]:
        draw, name = self._draw, self._draw.choice(NAMES)
        loaded = draw.choice(self.pool.slots.names or [name])
        operations = {
            self._request: 9,
            self._wrong_request: 1.5,
            self._cancel: 1.5,
            self._close_loop: 0.2,
            self._pause: 0.7,
            lambda: self._call(draw.choice((None, *NAMES))): 1,
            lambda: self._prefetch(draw.sample(NAMES, 2)): 0.5,
            lambda: self._load(name): 0.5,
            lambda: self._give(name, "add"): 1,
            lambda: self._give(loaded, "update"): 0.5,
            lambda: self._unload(loaded): 0.5,
            lambda: self._pin(loaded): 0.3,
            lambda: self._write_files(name): 0.5,
        }
        return draw.choices([*operations], [*operations.values()])[0]

    def _request(self, waits: bool = True) -> None:
        """Add a request, and wait for its answer in one of several ways, or not at all."""
        draw = self._draw
        ways = ("collect", "collect", "handler", "handler", "iterate", "results", "nothing")
        way = draw.choice(ways) if waits else "nothing"
        asked = self._new_request()
        if way == "handler" and asked.id in self._asked:
            way = "collect"  # an output of the earlier request could reach the new handler
        words, options = tiny_model.as_options(asked.words), {"streaming": draw.random() < 0.4}
        if asked.ends:
            options["eos_token_id"] = list(asked.ends)
        self._sim.tell(f"request {asked.id} of {asked.adapter}, {way}")
        if way == "handler":
            self._register(asked)
        allowed = self._expected.open()
        entry = asked.adapter
        if entry is not None and draw.random() < 0.1:
            entry = {entry: 1.0}
        before = self._asked.get(asked.id)
        self._asked[asked.id] = asked
        try:
            self.manager.add_request(
                list(asked.prompt), asked.id, asked.new, adapter=entry, **options, **words
            )
        except (LoRABackendError, InjectedError) as error:
            self._sim.tell(f"request {asked.id} refused: {str(error).splitlines()[0]}")
            if before is not None:
                self._asked[asked.id] = before
            if isinstance(error, LoRABackendError):
                self._check_refusal(asked, before, error)
            if way == "handler":
                self.manager.output_router.forget(asked.id)
            raise
        finally:
            self._expected.close(allowed)
            asked.versions = set(allowed.get(asked.adapter, {0}))
        asked.is_added = True
        self._all.append(asked)
        self._read(asked, way)

    def _new_request(self) -> Asked:
        draw = self._draw
        name = f"r{len(self._all)} {self._sim.turns}"
        again = [
            each.id
            for each in self._asked.values()
            if (each.is_read or each.is_cancelled) and each.id not in self._cancelling
        ]
        if again and draw.random() < 0.1:
            name = draw.choice(again)
        return Asked(
            name,
            draw.choice((None, *NAMES)),
            draw.choice(PROMPTS),
            draw.randint(1, MOST_NEW),
            draw.choice(WORDS) if self._has_words and draw.random() < 0.3 else (),
            tuple(draw.sample(range(VOCABULARY), 6)) if draw.random() < 0.3 else (),
            draw.random() < self._poison,
        )

    def _check_refusal(self, asked: Asked, before: Asked | None, error: LoRABackendError) -> None:
        """Fail where nothing was wrong with a request without an adapter."""
        known = self._is_ending or self._is_lost or asked.is_cancelled or before is not None
        if asked.adapter is None and not known and "queue was full" not in str(error):
            self._sim.fail(f"request {asked.id} is refused: {error}")

    def _read(self, asked: Asked, way: str) -> None:
        """Take the answer of a request; an error must be typed, and the request's own."""
        manager, sim = self.manager, self._sim
        try:
            if way == "collect":
                asked.note(manager.collect([asked.id])[asked.id])
            elif way == "iterate":
                for output in manager.request_id_iter(asked.id):
                    asked.note(output)
            elif way == "results":
                while not asked.answers and manager.is_running() and not asked.is_cancelled:
                    output = manager.get_result(asked.id, 0.1)
                    if output is not None:
                        asked.note(output)
            elif way == "handler":
                sim.pause(
                    "wait for a callback",
                    lambda: (
                        asked.answers
                        or asked.is_cancelled
                        or asked.loop.is_closed
                        or not manager.is_running()
                    ),
                )
        except LoRABackendError as error:
            sim.tell(f"request {asked.id}: {type(error).__name__}: {error}")
            gone = isinstance(error, InvalidInputError)
            if gone and not asked.is_cancelled:
                sim.fail(f"request {asked.id} lost its answer: {error}")
            if not gone:
                asked.answers.append(SimpleNamespace(error=str(error), request_id=asked.id))
        asked.is_read = bool(asked.answers)

    def _register(self, asked: Asked) -> None:
        loop = self._draw.choice(self._loops[-2:])
        raises = self._draw.random() < 0.2

        def callback(output: Any) -> None:
            if output.prompt_ids != list(asked.prompt) or output.request_id != asked.id:
                self._sim.fail(f"{asked} got {output}")
            asked.note(output)
            if raises:
                raise InjectedError("a callback")

        self._of_callback[callback], asked.loop = asked, loop
        self._loop_of[self._sim.current] = loop
        try:
            self.manager.register_result_handler(asked.id, callback)
        finally:
            del self._loop_of[self._sim.current]

    def _running_loop(self) -> EventLoop:
        loop = self._loop_of.get(self._sim.current)
        if loop is None:
            raise RuntimeError("no running event loop")
        return loop

    def _wrong_request(self) -> None:
        wrong = self._draw.choice(WRONG)
        self._sim.tell(f"wrong request {wrong}")
        options = {"input_ids": [1, 2, 3], "max_new_tokens": 4, **wrong}
        name = self.manager.add_request(**options)  # raises an error, which `_attempt` takes
        self._sim.fail(f"request {name} was added with {wrong}")

    def _cancel(self) -> None:
        live = [each for each in self._asked.values() if not each.is_read]
        asked = self._draw.choice(live or [None])
        if asked is not None:
            self._sim.tell(f"cancel {asked.id}")
            asked.is_cancelled = True
        name = "unknown" if asked is None else asked.id
        self._cancelling.append(name)
        try:
            self.manager.cancel_request(name)
        finally:
            self._cancelling.remove(name)

    def _close_loop(self) -> None:
        self._draw.choice(self._loops).close()
        self._loops.append(EventLoop(self._sim, len(self._loops)))

    def _pause(self) -> None:
        self._sim.tell("pause")
        with self.manager.pause():
            for _ in range(self._draw.choice((1, 2))):
                self._attempt(self._draw.choice((lambda: self._request(waits=False), self._cancel)))

    def _call(self, name: str | None) -> None:
        """Run a forward pass of the model beside the manager's."""
        prompt = self._draw.choice(PROMPTS)
        self._sim.tell(f"call {name}")
        allowed = self._expected.open()
        try:
            logits = self._model(adapters=[name], input_ids=torch.tensor([prompt])).logits
        finally:
            self._expected.close(allowed)
        token = int(logits[0, -1].argmax())
        self._calls.append((name, set(allowed.get(name, {0})), prompt, token))

    # Failures

    def _before_layer(self, module: torch.nn.Module, args: Any) -> None:
        """Let a pass of requests fail now and then, and each pass of a poisoned request."""
        self._sim.pause("layer")
        if not RUNNING.call.reads_pages or not self._is_faulty:
            return
        draw = self._draw
        ids = [each.state.request_id for each in self._batch()]
        asked = [self._asked[name] for name in ids]
        if self._is_lost or draw.random() < self._loses_device:
            self._is_lost = True
            for each in self._asked.values():
                each.may_fail = True
            raise torch.AcceleratorError("the device is lost")
        if draw.random() < self._pass_errors or any(each.is_poison for each in asked):
            self._sim.tell(f"the pass of {', '.join(ids)} fails")
            self._sim.seen.add(f"failed pass of {min(len(ids), 2)}")
            if len(ids) == 1:
                asked[0].may_fail = True
            raise InjectedError("a pass")

    def _batch(self) -> list[Any]:
        return self.manager.batch_processor.inputs_and_outputs.requests_in_batch

    # What must hold

    def _watch_line(self) -> None:
        """Fail where a request passes one that has waited for long."""
        manager, hold = self.manager, self.manager._hold

        def holding(request_id: str, adapter: Any, ids: list[int]) -> Any:
            held = hold(request_id, adapter, ids)
            for other, since in list(manager._line._since.items()):
                if other == request_id or threading.get_ident() in manager._pausing:
                    break
                if since is not None and self._sim.now - since > self.pass_s + SLACK_S:
                    self._sim.fail(f"request {request_id} gets a slot before {other} in the line")
            return held

        manager._hold = holding

    def _wait_for_answers(self) -> None:
        """Wait until the manager has ended all requests, as it must."""
        manager, sim = self.manager, self._sim
        end = sim.now + 10
        while manager._held and manager.is_running():
            sim.pause("wait for answers", lambda: not manager._held, 0.1)
            if sim.now > end:
                sim.fail(f"requests never end: {', '.join(manager._held)}")

    def _finish(self) -> None:
        """Check what is left when nothing runs, and that the adapters can still be served."""
        sim, manager, table = self._sim, self.manager, self.pool.slots
        self.disk.is_faulty = self._is_faulty = False
        for output in list(manager.output_router.output_queue.queue):
            self._asked[output.request_id].note(output)
        for asked in self._all:
            self._check_end(asked)
        if manager._held or len(manager._line) or manager.output_router.result_handlers:
            sim.fail(
                f"left in the manager: {[*manager._held]}, {manager._line._since}, "
                f"{manager.output_router.result_handlers}"
            )
        for name in list(self.store._ahead):  # the error of a prefetch is raised once
            self._attempt(lambda name=name: self._call(name))
        if table._holds:
            sim.fail(f"held at the end: {table._holds}")
        for name in table.names:
            while table._pins[name]:
                table.unpin(name)
        sim.now += 100
        for name in NAMES:
            if self.disk.versions.get(name) is not None:
                self._attempt(lambda name=name: self._call(name))
        self.store.close()
        for name in table.names:
            self._model.unload_adapter(name)
        self._model.detach()

    def _check_end(self, asked: Asked) -> None:
        """Check that a request has ended once, and that an error is its own."""
        lost = [self._of_callback[c] for loop in self._loops for c in loop.lost]
        ends, sim = len(asked.answers), self._sim
        if ends > 1 or not (ends or asked.is_cancelled or asked in lost):
            sim.fail(f"request {asked.id} has {ends} ends: {asked.answers}")
        for output in asked.answers:
            if output.error is None:
                continue
            if not output.error:
                sim.fail(f"request {asked.id} ended with an empty error")
            is_stopped = any(words in output.error for words in STOPPED)
            if not (asked.may_fail or is_stopped):
                sim.fail(f"request {asked.id} ended by another's failure: {output.error}")

    def check_tokens(self) -> str | None:
        """Return a request with wrong tokens, once the simulation has ended."""
        for name, versions, prompt, token in self._calls:
            if token not in {tiny_model.alone(name, v, prompt)[0] for v in versions}:
                return f"a call with {name} of {versions} and {prompt} gives token {token}"
        for asked in self._all:
            wanted = [self._tokens(asked, version) for version in sorted(asked.versions)]
            given = [list(each.generated_tokens) for each in asked.answers if each.error is None]
            if any(tokens not in wanted for tokens in given) or any(
                all(tokens != each[: len(tokens)] for each in wanted) for tokens in asked.partial
            ):
                return f"{asked}\n  gets {given}, and not one of {wanted}"
        return None

    def _tokens(self, asked: Asked, version: int) -> list[int]:
        tokens = list(tiny_model.alone(asked.adapter, version, asked.prompt, asked.words))
        tokens = tokens[: asked.new]
        ends = [place for place, token in enumerate(tokens) if token in asked.ends]
        return tokens[: ends[0] + 1] if ends else tokens
