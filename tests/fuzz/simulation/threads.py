"""Threads that run one at a time, in an order drawn from a seed, on a simulated clock.

Each simulated thread is a real one that waits for its turn. A turn may end where the code locks,
waits, starts a thread or reads a file, and between any two lines of the files in `preempted`. The
clock moves a little with each turn, and jumps to the next deadline when all threads wait.
"""

import contextlib
import random
import sys
import threading
import traceback
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

import lora_backends

TICK = 1e-4
"""Simulated seconds per turn."""

REAL_SECONDS = 60
"""Of one simulation; more means that a thread waits outside of it."""


OWN_FILES = __file__.rpartition("/")[0]
"""Files in which no signal arrives: they stand for code in C, and for the caller's code."""


PACKAGE = lora_backends.__file__.rpartition("/")[0]
STANDARD = threading.__file__.rpartition("/")[0]


class SimulationEnd(BaseException):
    """Ends a thread after a failure was found."""


class Interrupt(KeyboardInterrupt):
    """Ctrl-C, at a moment drawn from the seed."""


class Task:
    """One simulated thread."""

    def __init__(self, name: str, number: int, weight: float) -> None:
        self.name, self.number, self.weight = name, number, weight
        self.turn = threading.Lock()  # held while another thread has the turn
        self.turn.acquire()
        self.ready: Callable[[], bool] | None = None  # None: it waits for nothing
        self.deadline: float | None = None  # of its waiting
        self.came_late = False
        self.done = False


class Simulation:
    """The threads, the clock, the draws and the failure of one run.

    Args:
        seed: of all draws.
        preempted: ends of the paths of files whose lines may end a turn.
        most_turns: limit of a run; above it, a thread is taken to be stuck.
    """

    def __init__(
        self, seed: int, preempted: tuple[str, ...] = (), most_turns: int = 200_000
    ) -> None:
        self.seed, self.draw = seed, random.Random(seed)
        self.now, self.turns, self._most_turns = 1e6, 0, most_turns
        self.tasks: list[Task] = []
        self.failure: str | None = None
        self.check: Callable[[], None] | None = None  # checks invariants after each turn
        self.digest = 0  # of all turns: equal for two runs of a seed
        self.seen: set[str] = set()  # events that the run has met, for the counts of a long run
        self.steps: list[str] = []  # what the threads were asked to do
        self._recent: deque[str] = deque(maxlen=40)
        self._over = threading.Event()
        self._preempted = preempted
        # Some runs change threads rarely, some at each chance; some starve a thread.
        self._change = self.draw.choice((0.05, 0.3, 1.0))
        self._uneven = self.draw.random() < 0.5
        self._lines = self.draw.choice((0, 20, 200)) if preempted else 0
        self._lines_left = self._next_lines()
        self._interrupt_in: int | None = None  # signal points of the main thread until an interrupt
        self._chooses = False  # what a thread waits for may be found by code that is preempted
        self.current = self._new_task("main")

    def run(self, main: Callable[[], None]) -> str | None:
        """Run `main` and the threads that it starts to their ends; return the failure, or None."""
        task = self.current
        self._start(task, main)
        task.turn.release()
        if not self._over.wait(REAL_SECONDS):
            self._note_failure("a thread waits for something outside of the simulation")
        return self.failure

    # Threads

    def spawn(self, name: str, work: Callable[[], None]) -> Task:
        """Start a thread."""
        task = self._new_task(name)
        self._start(task, work)
        self.pause("start")
        return task

    def pause(
        self, what: str, ready: Callable[[], bool] | None = None, timeout: float | None = None
    ) -> bool:
        """Let other threads run until `ready()` holds; return False if the time is over first.

        Raises:
            Interrupt: an interrupt was due while the main thread waited.
        """
        task = self.current
        self._check_failure()
        interrupts = ready is not None and not ready() and self._is_due(task)
        if interrupts:  # sooner or later, while others go on
            timeout = self.draw.choice((0.0, 0.005, 0.5))
        task.ready, task.came_late = ready, False
        task.deadline = None if timeout is None else self.now + max(timeout, 0.0)
        self._note(what)
        self._next(task)
        if interrupts and task.came_late:
            self._interrupt_in = None
            self.seen.add("interrupted while waiting")
            raise Interrupt
        return not task.came_late

    def fail(self, message: str) -> None:
        """End the simulation with a failure."""
        self._note_failure(message)
        raise SimulationEnd

    def interrupt_after(self, points: int) -> None:
        """Interrupt the main thread, which must be the caller, after `points` checks for signals.

        As CPython, the simulation checks when a function begins, when a call has returned, and
        while a thread waits for a lock.
        """
        self._interrupt_in = points
        sys.setprofile(self._profile)

    def interrupt_no_more(self) -> None:
        """Cancel `interrupt_after`."""
        sys.setprofile(None)
        self._interrupt_in = None

    def tell(self, step: str) -> None:
        """Record a step of a thread, for the report of a failure."""
        self.steps.append(self._line(step))

    @property
    def trace(self) -> str:
        """The steps and the last turns, for the report of a failure."""
        return "\n".join(["steps:", *self.steps[-80:], "last turns:", *self._recent])

    def _line(self, what: str) -> str:
        return f"  {self.now - 1e6:9.4f} {self.current.name:<18} {what}"

    def _new_task(self, name: str) -> Task:
        weight = self.draw.choice((1.0, 1.0, 0.1, 0.01)) if self._uneven else 1.0
        task = Task(name, len(self.tasks), weight)
        self.tasks.append(task)
        return task

    def _start(self, task: Task, work: Callable[[], None]) -> None:
        def run() -> None:
            task.turn.acquire()
            try:
                self._check_failure()
                if self._lines:
                    sys.settrace(self._trace_calls)
                work()
            except SimulationEnd:
                pass
            except BaseException as error:
                told = "".join(traceback.format_exception(error)[-12:])
                self._note_failure(
                    f"{task.name} ended with {type(error).__name__}: {error}\n{told}"
                )
            finally:
                sys.settrace(None)
                task.done = True
                self._end(task)

        threading.Thread(target=run, name=task.name, daemon=True).start()

    def _end(self, task: Task) -> None:
        alive = [each for each in self.tasks if not each.done]
        if not alive:
            self._over.set()
        elif self.failure is not None:
            self._wake(alive[0])  # one after the other: they unwind through shared objects
        else:
            try:
                self._next(task)
            except SimulationEnd:
                self._wake(next(each for each in self.tasks if not each.done))

    def _next(self, task: Task) -> None:
        """Give the turn to a thread that can run, and wait for the next turn of `task`."""
        self.turns += 1
        self.now += TICK
        if self.turns > self._most_turns:
            self.fail(f"no end after {self.turns} turns")
        if self.check is not None:
            self.check()
        self._chooses = True
        chosen = self._choose(task)
        self._chooses = False
        self.digest = zlib.crc32(bytes((chosen.number & 255,)), self.digest)
        if chosen is not task:
            self._wake(chosen)
            if task.done:
                return
            task.turn.acquire()
            self._check_failure()

    def _wake(self, task: Task) -> None:
        self.current = task
        task.turn.release()

    def _choose(self, task: Task) -> Task:
        waiting = [each for each in self.tasks if not each.done]
        ready = [each for each in waiting if each.ready is None or each.ready()]
        timed = [each for each in waiting if each.deadline is not None and each not in ready]
        late = [each for each in timed if each.deadline <= self.now]
        # A timeout may end a wait first, as if the thread that is waited for were slow.
        if timed and not late and (not ready or self.draw.random() < 0.003):
            first = min(timed, key=lambda each: each.deadline)
            self.now, late = max(self.now, first.deadline), [first]
        for each in late:
            each.came_late = True
        ready += late
        if not ready:
            names = ", ".join(each.name for each in waiting)
            self.fail(f"deadlock: nothing can wake {names}\n{self._where(waiting)}")
        if task in ready and self.draw.random() >= self._change:
            return task
        return self.draw.choices(ready, [each.weight for each in ready])[0]

    def _where(self, tasks: list[Task]) -> str:
        frames = sys._current_frames()
        told = []
        by_name = {thread.name: thread.ident for thread in threading.enumerate()}
        for task in tasks:
            frame = frames.get(by_name.get(task.name))
            lines = traceback.extract_stack(frame)[-9:] if frame else []
            told += [f"{task.name}:", *(f"    {x.filename}:{x.lineno} {x.name}" for x in lines)]
        return "\n".join(told)

    def _check_failure(self) -> None:
        if self.failure is not None:
            raise SimulationEnd

    def _note_failure(self, message: str) -> None:
        if self.failure is None:
            self.failure = message

    def _note(self, what: str) -> None:
        frame = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith((OWN_FILES, STANDARD)):
            frame = frame.f_back
        place = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}" if frame else ""
        self.digest = zlib.crc32(f"{what} {place}".encode(), self.digest)
        self._recent.append(self._line(f"{what} {place}"))

    # Chances between lines, and interrupts

    def _next_lines(self) -> int:
        return 1 + int(self.draw.expovariate(1 / self._lines)) if self._lines else 0

    def _trace_calls(self, frame: Any, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_name == "<module>" or not code.co_filename.endswith(self._preempted):
            return None
        return self._trace_lines

    def _trace_lines(self, frame: Any, event: str, _: Any) -> Any:
        if event == "line" and not self._chooses:
            self._lines_left -= 1
            if self._lines_left <= 0:
                self._lines_left = self._next_lines()
                self.pause(f"before line {frame.f_lineno} of {frame.f_code.co_name},")
        return self._trace_lines

    def _profile(self, frame: Any, event: str, _: Any) -> None:
        if event == "c_call":
            return
        # Other code may have been called by the simulation itself.
        while not frame.f_code.co_filename.startswith((OWN_FILES, PACKAGE, contextlib.__file__)):
            frame = frame.f_back
        if frame.f_code.co_filename.startswith(OWN_FILES):
            return
        if self._is_due(self.current):
            self._interrupt_in = None
            self.seen.add("interrupted")
            self.tell(f"interrupt at the {event} of {frame.f_code.co_name}")
            raise Interrupt

    def _is_due(self, task: Task) -> bool:
        if self._interrupt_in is None or task.number:
            return False
        self._interrupt_in -= 1
        return self._interrupt_in <= 0
