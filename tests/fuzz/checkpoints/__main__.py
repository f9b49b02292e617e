"""Reads random checkpoint folders; each must soon give the right result or a typed error.

    python -m tests.fuzz.checkpoints --cases 20000 --seed 0 --result results.json

The same command goes on where the last one ended. A case is made anew from its number alone:
`--only NUMBER` repeats one.
"""

import sys

from ..running import main
from .run import opened

sys.exit(main("checkpoints", __doc__, opened))
