"""Random runs of threads, files, failures and interrupts on pool and store.

python -m tests.fuzz.simulation --cases 10000 --result tests/fuzz/results.json
python -m tests.fuzz.simulation --only 1234
"""

import contextlib
import os
import sys
from collections.abc import Iterator

from ..running import Ran, RunCase, main
from .runs import run


@contextlib.contextmanager
def opened(seed: int) -> Iterator[RunCase]:
    def case(number: int) -> Ran:
        found = run(number, seed)
        return Ran("failed" if found.failure else "held", found.failure, sorted(found.seen))

    yield case


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is a part of a run
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main("simulation", __doc__, opened))
