"""Regular expressions of strangers, matched in a process that can be ended.

Python's `re` has no time limit: `(a+)+!` takes twice as long with every letter, and holds the
interpreter's lock meanwhile. Engines with a limit differ from `re` in corners (lookarounds, counted
repeats), which would give a module another rank than PEFT does. So `re` itself runs, in a child
process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lora_backends.errors import shown

Kind: TypeAlias = Literal["whole", "start", "layer"]


@dataclass(frozen=True)
class Expression:
    """A regular expression, and how PEFT applies it to a module's path."""

    kind: Kind  # re.fullmatch; re.match; re.match with the group "idx"
    text: str


class BrokenExpressionError(Exception):
    """An expression that `re` does not compile; the argument is its index."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


class MatchingTimeoutError(Exception):
    """The time was over before every expression was matched."""


class MatchingFailedError(Exception):
    """The process that matches could not be started, or needed too much memory."""


_MEMORY = 2**30  # bytes of address space of the child

# Results go out as one JSON list per expression: false, true or the text of the group.
_PROGRAM = """
import json, re, sys, warnings
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    # it ends by itself where the parent was killed and cannot end it
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
except (ImportError, OSError, ValueError):
    pass
warnings.simplefilter("ignore")
expressions, names = json.load(sys.stdin)
result = []
for index, (kind, text) in enumerate(expressions):
    try:
        pattern = re.compile(text)
    except (re.error, OverflowError, RecursionError, MemoryError) as error:
        result = [index, f"{type(error).__name__}: {error}"]
        break
    match = pattern.fullmatch if kind == "whole" else pattern.match
    found = map(match, names)
    result.append([m["idx"] if m and kind == "layer" else m is not None for m in found])
json.dump(result, sys.stdout)
"""


def _program(seconds: float) -> str:
    """Return the child's program; the parent ends it first, since CPU time is no more than time."""
    return _PROGRAM.replace("MEMORY", str(_MEMORY)).replace("SECONDS", str(int(seconds) + 1))


def match_all(
    expressions: Sequence[Expression], names: Sequence[str], seconds: float
) -> list[list[bool | str]]:
    """Match every expression with every name, as Python's `re` does.

    Returns:
        Per expression and name whether it matches, or the text of the group of a "layer".

    Raises:
        BrokenExpressionError: an expression does not compile.
        MatchingTimeoutError: it takes longer.
        MatchingFailedError: no process can be started, or it ended early.
    """
    if not expressions:
        return []
    if not sys.executable or getattr(sys, "frozen", False):  # it may start this program again
        raise MatchingFailedError("this program has no Python of its own")
    request = json.dumps([[[e.kind, e.text] for e in expressions], list(names)])
    program = _program(seconds)
    try:
        child = subprocess.run(
            # -I and -S: nothing of the environment, the working folder or site-packages.
            [sys.executable, "-I", "-S", "-c", program],
            input=request.encode(),
            capture_output=True,
            timeout=seconds,
            check=True,
        )
        result = json.loads(child.stdout)
    except subprocess.TimeoutExpired as error:
        raise MatchingTimeoutError from error
    except subprocess.CalledProcessError as error:
        last_line = error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise MatchingFailedError(shown(last_line or f"status {error.returncode}")) from error
    except (OSError, ValueError) as error:
        raise MatchingFailedError(shown(str(error))) from error
    if result and isinstance(result[0], int):
        raise BrokenExpressionError(*result)
    matches: list[list[bool | str]] = result
    return matches
