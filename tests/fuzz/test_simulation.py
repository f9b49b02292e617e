"""A few runs of the simulation, and planted bugs that as few runs must find."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("peft", reason="the world's model has PEFT's adapters")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RUNS = 5
PLANTED = (
    "a hold is not released",
    "a slot is settled without the lock's condition",
    "an unpin takes all pins",
    "the old name stays while a slot is written",
    "ranks of the evicted adapter stay",
    "a failed prefetch stays",
    "memory grows beyond its budget",
    "an adapter from memory leaves its files readable",
)
"""Some mutants of mutants.py that the first runs find; each change of the code draws other runs."""

REQUESTS_RUNS = (0, 1, 2, 3, 10)
"""Numbers of runs. Run 10 finds the failure that is read as an answer."""

REQUESTS_PLANTED = (
    "a slot is freed with the first token",
    "an answer goes to the callback and into the queue",
    "a pass has the adapters of the pass before",
    "a failed pass ends all of its requests",
    "a failed pass ends the manager",
    "a pass runs again at later positions",
    "a pass runs again without its tokens",
    "the failure of a pass is read as an answer",
    "a failed request raises an error without a type",
)
"""Some mutants of requests_mutants.py that `REQUESTS_RUNS` find."""


def printed_by(*arguments):
    environment = os.environ | {"PYTHONHASHSEED": "0"}  # the order of sets is a part of a run
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_some_runs_hold_and_each_is_the_same_again():
    code = f"""
import logging
from tests.fuzz.simulation.runs import run
found = [run(number) for number in range({RUNS})]
assert not [one.failure for one in found if one.failure], found
assert run(0).digest == found[0].digest
logging.disable()
asked = [run(number, world="requests") for number in {REQUESTS_RUNS}]
assert not [one.failure for one in asked if one.failure], asked
assert run(0, world="requests").digest == asked[0].digest
print(sum(one.turns for one in found))
"""
    assert int(printed_by("-c", code)) > 1000


def test_planted_bugs_are_found():
    code = f"""
import logging
from tests.fuzz.simulation.mutants import MUTANTS, planted
from tests.fuzz.simulation.requests_mutants import MUTANTS as REQUESTS_MUTANTS
from tests.fuzz.simulation.runs import run
for name in {PLANTED}:
    with planted(MUTANTS[name]):
        if not any(run(number).failure for number in range({RUNS})):
            print("not found:", name)
logging.disable()
for name in {REQUESTS_PLANTED}:
    with planted(REQUESTS_MUTANTS[name]):
        if not any(run(n, world="requests").failure for n in {REQUESTS_RUNS}):
            print("not found:", name)
"""
    assert printed_by("-c", code) == ""
