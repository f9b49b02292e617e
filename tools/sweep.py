"""Compares every architecture and every variant of an adapter with PEFT; minutes on a CPU.

Writes benchmarks/results/peft_sweep.json, from which `tools/pages.py` makes the support tables.
The cases are in tests/sweep.py and tests/sweep_variants.py.

    python tools/sweep.py
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "peft_sweep.json"
sys.path.insert(0, str(ROOT / "tests"))


def outcome(case: Callable[[], Any], split: Callable[[], Any] | None = None) -> dict[str, Any]:
    """Return what a case gives: the worst difference of a row, or why it is refused."""
    found = case()
    if isinstance(found, float):
        return {"worst": found}
    again = None if split is None else split()
    if isinstance(again, float):
        return {"worst": again, "split": True}
    return {"refused": found}


def main() -> None:
    """Run the sweep, print each case and write the result file."""
    import peft
    import sweep
    import sweep_variants
    import torch
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found: dict[str, Any] = {
        "bound": sweep.BOUND,
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, peft)},
        "architectures": {},
        "variants": {},
        "files": {},
    }
    cases: tuple[tuple[str, Any, Callable[..., Any]], ...] = (
        ("architectures", sweep.NAMES, sweep.run),
        ("variants", sweep_variants.VARIANTS, sweep_variants.run),
        ("files", sweep_variants.FILES, sweep_variants.run_file),
    )
    for kind, names, run in cases:
        for name in names:
            splits = kind == "architectures" and name not in sweep.WITH_IMAGES
            again = partial(run, name, split=True) if splits else None
            found[kind][name] = outcome(partial(run, name), again)
            print(kind, name, found[kind][name], flush=True)
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    wrong = [
        name
        for kind in ("architectures", "variants", "files")
        for name, case in found[kind].items()
        if case.get("worst", 0.0) > sweep.BOUND
    ]
    if wrong:
        sys.exit(f"not equal: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
