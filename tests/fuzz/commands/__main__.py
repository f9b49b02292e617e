"""Runs random configurations and command lines: each works, or ends with a message of one screen.

    python -m tests.fuzz.commands --cases 20000 --seed 0 --result results.json

The same command goes on where the last one ended; `--only NUMBER` repeats one case. Commands run
in this process, as `lora-backends` runs them; only the slow parts are left out: `bench` measures
nothing, and `verify` draws no cases.
"""

import sys

from ..running import main
from .run import opened

sys.exit(main("commands", __doc__, opened))
