"""`python -m lora_backends.bench`: the command's measurements with torch alone, for bare machines.

What it writes is shown by `lora-backends bench --from-json FILE --plot DIR` elsewhere.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from lora_backends.bench.cells import Cell
from lora_backends.bench.job import make_job
from lora_backends.bench.results import summarize, writable_file
from lora_backends.errors import LoRABackendError


def main() -> int:
    """Measure, print a line a cell and the summary; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m lora_backends.bench", description=__doc__)
    parser.add_argument("--preset", dest="preset_name")
    parser.add_argument("--config-json", type=Path)
    parser.add_argument("--in-features", type=int)
    for name in ("output-slices", "tokens", "adapters", "rank", "mixes", "backends"):
        parser.add_argument(f"--{name}", help="separated by commas")
    parser.add_argument("--option", dest="options", action="append", default=[])
    parser.add_argument("--dtype")
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path, default=Path("bench.json"))
    values = vars(parser.parse_args())
    path = values.pop("json")
    result: dict[str, Any] = {}
    try:
        path = writable_file(path, "--json")
        job = make_job(**values)
        for name, reason in job.left_out.items():
            print(f"not timed: {name}: {reason}")

        def tell(index: int, cell: Cell) -> None:
            done = result["cells"]
            if done:
                print(f"  {done[-1]['limit_us']} us at best: {done[-1]['results']}")
            print(f"{index + 1}/{len(job.cells)} {cell}", flush=True)

        job.run(path, tell, result)
    except LoRABackendError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; what was measured is in {path}", file=sys.stderr)
        return 130
    for name, numbers in summarize(result).items():
        print(name, numbers)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
