"""Makes random calls of the interface: what float64 says, or a typed error and nothing written.

    TRITON_INTERPRET=1 python -m tests.fuzz.calls --cases 50000 --seed 0 --result results.json

The same command goes on where the last one ended; `--only NUMBER` repeats one case. Of 20 calls, 9
go to torch_ref, 9 to numba_cpu and one each to triton and csgmv, which run small layers in
Triton's interpreter. A case is one call with what it needs: a batch, a layer, a plan. Where it asks
for gradients, the backward runs, too.
"""

import sys

from ..running import main
from .run import opened

sys.exit(main("calls", __doc__, opened))
