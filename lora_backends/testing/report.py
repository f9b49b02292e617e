"""The report of `verify`: one result per property, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["passed", "failed", "not applicable"]


@dataclass(frozen=True)
class Failure:
    """The smallest case found that breaks a property."""

    message: str  # what differed, where and by how much
    case: str  # a runnable expression, or the steps of the machine
    command: str  # draws the same cases again; "" where none were drawn
    replay: str  # runs the smallest case alone; "" for the steps of the machine


@dataclass(frozen=True)
class PropertyResult:
    """The result of one property on a backend."""

    name: str
    rule: str
    status: Status
    examples: int  # cases that ran
    seconds: float
    reason: str = ""  # why it does not apply
    failure: Failure | None = None


@dataclass(frozen=True)
class Report:
    """The results of one run of the suite."""

    backend: str
    device: str
    profile: str
    seed: int
    results: tuple[PropertyResult, ...]
    edges: dict[str, int] = field(default_factory=dict)  # cases of each edge
    options: tuple[str, ...] = ()  # KEY=VALUE, those that `get_backend` made the backend with

    @property
    def passed(self) -> bool:
        """Whether no property failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[PropertyResult, ...]:
        """The results of the properties that failed."""
        return tuple(result for result in self.results if result.status == "failed")

    @property
    def seconds(self) -> float:
        """Time spent in all properties."""
        return sum(result.seconds for result in self.results)

    def to_json(self) -> str:
        """Return the report as a JSON object, its fields and `passed`."""
        values: dict[str, Any] = dataclasses.asdict(self)
        return json.dumps({"passed": self.passed, **values}, indent=2)

    def to_text(self) -> str:
        """Return the report as text: a line per property, then every failure."""
        lines = [result_line(result) for result in self.results]
        lines += [failure_text(result) for result in self.failures]
        return "\n".join([*lines, self.summary()])

    def summary(self) -> str:
        """Return one sentence: how many passed, of which backend, with which seed."""
        counts = Counter(result.status for result in self.results)
        examples = sum(result.examples for result in self.results)
        parts = [f"{counts[status]} {status}" for status in ("passed", "failed", "not applicable")]
        made = " ".join([self.backend, *self.options])
        return (
            f"{made} on {self.device}: {', '.join(parts)}; {examples} cases in "
            f"{self.seconds:.1f} s (profile {self.profile}, seed {self.seed})"
        )


_MARKS: dict[Status, str] = {"passed": "ok", "failed": "FAILED", "not applicable": "n/a"}


def result_line(result: PropertyResult) -> str:
    """Return one line on a property: mark, name, and cases and time, or why it does not apply."""
    detail = result.reason or f"{result.examples} cases, {result.seconds:.1f} s"
    return f"{_MARKS[result.status]:<6} {result.name}: {detail}"


def failure_text(result: PropertyResult) -> str:
    """Return the failure of a property as a paragraph: rule, case, message, how to repeat it."""
    failure = result.failure
    assert failure is not None
    blocks = {
        "rule": result.rule,
        "smallest case": failure.case,
        "what differs": failure.message,
        "this case alone": failure.replay,
        "the same cases again": failure.command,
    }
    lines = [f"\nFAILED {result.name}"]
    for title, block in blocks.items():
        # a failure of the machine has no case to replay
        if not block:
            continue
        lines.append(f"  {title}:")
        lines += [f"    {line}" for line in block.splitlines()]
    return "\n".join(lines)
