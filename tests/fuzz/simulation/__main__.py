"""Random runs of threads, files and failures: on pool and store, or of requests.

python -m tests.fuzz.simulation --cases 10000 --result tests/fuzz/results.json
python -m tests.fuzz.simulation --only 1234
python -m tests.fuzz.simulation requests --cases 10000
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

from ..running import Ran, RunCase, main
from .runs import run

WORLD = "requests" if sys.argv[1:2] == ["requests"] else "pool"


@contextlib.contextmanager
def opened(seed: int) -> Iterator[RunCase]:
    def case(number: int) -> Ran:
        found = run(number, seed, WORLD)
        return Ran("failed" if found.failure else "held", found.failure, sorted(found.seen))

    yield case


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is a part of a run
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "PYTHONHASHSEED": "0"})
    logging.disable()  # Transformers logs each failure that is drawn
    if WORLD == "requests":
        del sys.argv[1]
    sys.exit(main("simulation" if WORLD == "pool" else "simulation requests", __doc__, opened))
