"""`verify`: every property, on cases drawn by Hypothesis from one seed."""

from __future__ import annotations

import shlex
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, Verbosity, given
from hypothesis.stateful import run_state_machine_as_test

from lora_backends.backend import LoRABackend
from lora_backends.batch import NO_ADAPTER
from lora_backends.errors import InvalidInputError, did_you_mean
from lora_backends.selection.choice import get_backend
from lora_backends.selection.option_text import option_texts
from lora_backends.testing.cases.kinds import KINDS, Case
from lora_backends.testing.cases.strategies import KINDS_OF_VALUES
from lora_backends.testing.machine import machine_for
from lora_backends.testing.profiles import DEFAULT, PROFILES, Profile
from lora_backends.testing.properties import PROPERTIES, Property
from lora_backends.testing.report import Failure, PropertyResult, Report

Progress: TypeAlias = Callable[[Property, PropertyResult | None], None]

MACHINE = Property(
    name="pool_machine",
    rule="Adapters may be loaded, replaced and evicted while plans are made, refilled and run.",
    agreement="within the bound",
    check=lambda backend, case: None,  # drawn as steps, not as cases
    examples=25,
)
ONE_CASE = replace(DEFAULT, name="one case")
"""The profile of `check_case`, which draws no cases."""

STEPS = 30
"""Steps of one run of the machine."""


def properties() -> dict[str, Property]:
    """Return every property by name, in the order in which they run."""
    return {**PROPERTIES, MACHINE.name: MACHINE}


def verify(
    backend: LoRABackend | str,
    device: torch.device | str | None = None,
    profile: Profile | str = DEFAULT,
    seed: int = 0,
    *,
    only: Iterable[str] | None = None,
    fail_fast: bool = False,
    shrink: bool = True,
    progress: Progress | None = None,
) -> Report:
    """Check that a backend computes what the interface says.

    Args:
        backend: a registered name, or an instance.
        device: where a backend given by name runs; None: as `get_backend`.
        profile: "default", "thorough", or sizes of your own.
        seed: from which all cases follow.
        only: names of properties; None: all of `properties`.
        fail_fast: stop after the first property that fails.
        shrink: look for the smallest failing case, for `Profile.shrink_seconds` at most.
        progress: called with each property and None before it runs, and with its result after it.

    Returns:
        The report; `Report.passed` says whether every property that applies holds.

    Raises:
        BackendUnavailableError: the name is not registered or does not run on the device.
        InvalidInputError: an unknown property or profile.
    """
    if isinstance(backend, str):
        backend = get_backend(backend, device=device)
    sizes = PROFILES[_known(profile, PROFILES, "profile")] if isinstance(profile, str) else profile
    every = properties()
    names = list(every if only is None else only)
    edges: Counter[str] = Counter()
    results = []
    for name in names:
        selected = every[_known(name, every, "property")]
        if progress:
            progress(selected, None)
        attempt = _Attempt(selected, backend, sizes, seed, shrink, edges)
        result = _run(attempt, _run_machine if selected is MACHINE else _run_cases)
        results.append(result)
        if progress:
            progress(selected, result)
        if fail_fast and result.status == "failed":
            break
    where, options = str(backend.device), option_texts(backend._made_with)
    return Report(backend.name, where, sizes.name, seed, tuple(results), dict(edges), options)


def _known(name: str, allowed: Iterable[str], kind: str) -> str:
    if name not in allowed:
        raise InvalidInputError(
            f"there is no {kind} named {name!r}{did_you_mean(name, allowed)}\n"
            f"  allowed: {', '.join(allowed)}"
        )
    return name


def check_case(backend: LoRABackend, name: str, case: Case) -> Report:
    """Check one property on one case, e.g. the smallest of a report; the report has one result.

    Raises:
        InvalidInputError: an unknown property, the machine, which takes no case, or a case that
            does not fit the property.
    """
    selected = PROPERTIES[_known(name, PROPERTIES, "property on cases")]
    _check_fits(case, selected, backend)
    attempt = _Attempt(selected, backend, ONE_CASE, 0, False, Counter())
    result = _run(attempt, lambda running: running.check(case))
    where, options = str(backend.device), option_texts(backend._made_with)
    return Report(backend.name, where, ONE_CASE.name, 0, (result,), dict(attempt.edges), options)


def _check_fits(case: Case, prop: Property, backend: LoRABackend) -> None:
    """Refuse a case that the backend cannot run, or that the property is not about."""
    try:
        case.build("cpu")
    except Exception as error:
        raise InvalidInputError(
            f"the case contradicts itself\n  given: {case}\n  {type(error).__name__}: {error}"
        ) from error
    lacking = [f"{prop.kind.__name__}(...)"] if not isinstance(case, prop.kind) else []
    for name, wanted in prop.cases.items() if not lacking else ():
        if wanted is not None and not _has(case, name, wanted):
            lacking.append(f"{name}={wanted!r}")
    if not lacking:
        lacking = [f"without {name}" for name in sorted(case.needs() - prop.features)]
    if not lacking:
        lacking = [
            f"without {name}, which {backend.name} does not declare"
            for name in sorted(case.needs() - backend.features)
        ]
    if lacking:
        raise InvalidInputError(
            f"the property {prop.name} takes other cases\n  given: {case}\n"
            f"  allowed: {', '.join(lacking)}"
        )


def _has(case: Case, name: str, wanted: Any) -> bool:
    """Return whether a strategy would draw this case, given one of its arguments."""
    if name == "num_slices":
        return len(case.output_slices) == wanted  # type: ignore[no-any-return]
    if name == "min_tokens":
        return case.num_tokens >= wanted  # type: ignore[no-any-return]
    if name == "every_slot":
        return {NO_ADAPTER, *range(case.num_slots)} <= set(case.slots) or not wanted
    if name == "base":
        return (case.base is not None) is wanted
    if name == "values":
        return wanted == "real" or case.values in KINDS_OF_VALUES[wanted]
    return getattr(case, name) == wanted  # type: ignore[no-any-return]


class _TimeIsUp(BaseException):
    """Ends a search for smaller failing cases; Hypothesis lets it pass."""


@dataclass
class _Attempt:
    """One property on one backend: what to draw, and the smallest failure so far."""

    prop: Property
    backend: LoRABackend
    profile: Profile
    seed: int
    shrink: bool
    edges: Counter[str]
    examples: int = 0
    smallest: tuple[int, int, str] | None = None  # tokens or steps, length, case
    error: BaseException | None = None
    shrink_until: float = field(default=float("inf"))

    def settings(self) -> hypothesis.settings:
        phases = [Phase.generate, *([Phase.shrink] if self.shrink else [])]
        return hypothesis.settings(
            max_examples=max(1, round(self.prop.examples * self.profile.effort)),
            # a report repeats a case by its seed and text alone
            database=None,
            deadline=None,
            derandomize=False,
            phases=phases,
            print_blob=False,
            report_multiple_bugs=False,
            stateful_step_count=STEPS,
            # large cases are slow to draw, which says nothing about the backend
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
        )

    def begin(self) -> None:
        """Count an example; raise if the time to shrink is up."""
        if time.monotonic() > self.shrink_until:
            raise _TimeIsUp
        if self.error is None:
            self.examples += 1

    def check(self, case: Case) -> None:
        """Run the property on one case."""
        self.begin()
        if self.error is None:
            self.edges.update(case.edges())
        try:
            self.prop.check(self.backend, case)
        except KeyboardInterrupt:
            raise  # of the user
        except BaseException as error:  # SystemExit, or a panic of Rust, would end the suite
            self.failed(error, case.num_tokens, repr(case))
            raise RuntimeError("the case fails") from error

    def failed(self, error: BaseException, size: int, case: str) -> None:
        """Keep a failing case if it is the smallest so far."""
        if self.error is None:
            self.shrink_until = time.monotonic() + self.profile.shrink_seconds
        key = (size, len(case), case)
        if self.smallest is None or key <= self.smallest:
            self.smallest, self.error = key, error


def _run(attempt: _Attempt, execute: Callable[[_Attempt], None]) -> PropertyResult:
    prop, start = attempt.prop, time.perf_counter()
    reason = prop.not_applicable(attempt.backend)
    if reason:
        return PropertyResult(prop.name, prop.rule, "not applicable", 0, 0.0, reason)
    try:
        execute(attempt)
    except (Exception, _TimeIsUp):
        if attempt.error is None:
            raise  # of the suite itself: no case has failed
    seconds = time.perf_counter() - start
    if attempt.error is None or attempt.smallest is None:
        return PropertyResult(prop.name, prop.rule, "passed", attempt.examples, seconds)
    failure = _failure(attempt, attempt.error, attempt.smallest[2])
    return PropertyResult(
        prop.name, prop.rule, "failed", attempt.examples, seconds, failure=failure
    )


def _seed_of(attempt: _Attempt) -> int:
    """Return a seed of the property's own, so that it draws the same cases when it runs alone."""
    # hash() of a text differs from process to process
    return zlib.crc32(f"{attempt.seed}/{attempt.prop.name}".encode())


def _run_cases(attempt: _Attempt) -> None:
    dtypes = attempt.backend.dtypes
    strategy = KINDS[attempt.prop.kind].strategy
    features = attempt.backend.features & attempt.prop.features
    cases = strategy(dtypes, profile=attempt.profile, features=features, **attempt.prop.cases)
    settings = attempt.settings()
    # Hypothesis begins with the simplest case, whatever the seed: to run one case, run the second.
    # With less effort run the simplest, which takes the least time.
    skips = settings.max_examples == 1 <= attempt.profile.effort
    if skips:
        settings = hypothesis.settings(settings, max_examples=2)

    @hypothesis.seed(_seed_of(attempt))
    @settings
    @given(cases)
    def check(case: Case) -> None:
        nonlocal skips
        if skips:
            skips = False
        else:
            attempt.check(case)

    check()


def _run_machine(attempt: _Attempt) -> None:
    machine: Any = machine_for(attempt.backend, attempt)
    hypothesis.seed(_seed_of(attempt))(machine)
    run_state_machine_as_test(machine, settings=attempt.settings())


def _failure(attempt: _Attempt, error: BaseException, case: str) -> Failure:
    name, backend = attempt.prop.name, attempt.backend
    options = [f"--option {shlex.quote(text)} " for text in option_texts(backend._made_with)]
    made = f"{backend.name} {''.join(options)}--device {backend.device}"
    where = f"lora-backends verify {made} --property {name}"
    thorough = " --thorough" if attempt.profile.name == "thorough" else ""
    return Failure(
        message=_message(error),
        case=case,
        command="" if attempt.profile is ONE_CASE else f"{where} --seed {attempt.seed}{thorough}",
        replay=""
        if attempt.prop is MACHINE
        else f'{where} --case "{case}"',  # a case has no double quotes
    )


def _message(error: BaseException) -> str:
    """Return the message of an assertion; of other exceptions, the type and where it was raised."""
    if isinstance(error, AssertionError):
        return str(error)
    # the innermost frame is the backend's
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{type(error).__name__}: {error}\n  raised at {last.filename}:{last.lineno} ({last.name})"
    )
