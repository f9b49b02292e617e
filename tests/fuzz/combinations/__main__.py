"""Runs random models with random adapters of PEFT in mixed batches: PEFT's rows, or a typed error.

    TRITON_INTERPRET=1 python -m tests.fuzz.combinations --cases 10000 --result results.json

The same command goes on where the last one ended; `--only NUMBER` repeats one case. Cases come in
worlds of 40: one small random model, 16 adapters with random features that PEFT saved, and one
wrapper, into whose slots they are loaded in turn. A case repeats those before it in its world.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # of helpers.sweeps

from ..running import RunCase, main
from .runs import CASES, opened


@contextmanager
def warmed_up(seed: int) -> Iterator[RunCase]:
    """Run a case before the first, which would take seconds for what it imports."""
    with opened(seed) as run:
        run(-CASES)
        yield run


sys.exit(main("combinations", __doc__, warmed_up))
