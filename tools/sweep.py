"""Compares every architecture and every variant of an adapter with PEFT; minutes on a CPU.

Writes benchmarks/results/peft_sweep.json, from which `tools/pages.py` makes the support tables.
The cases are in tests/helpers/sweeps/. Quantised bases need their packages: bitsandbytes, torchao,
optimum-quanto, hqq and compressed-tensors. The file keeps the rows of those that are missing.
Pipelines of diffusers, and encoders of sentence-transformers, have files of their own.

    python tools/sweep.py
    python tools/sweep.py bases encoders   # only these kinds: files keep the others
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lora_backends.bench.results import new_result, read_result, versions, write_result

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "peft_sweep.json"
METHOD = (
    "A mixed batch of a small random model, float32, beside PEFT with each adapter alone. worst: "
    "the largest difference of a value, relative to the largest value of its row where that is "
    "over 1; split: with split=True; refused: the error's first line. bases: of the packages; "
    "layers: with the attributes of packages that were not run."
)
PIPELINES_RESULT = RESULT.with_name("diffusion_sweep.json")
PIPELINES_METHOD = (
    "Images of a small random pipeline in one batch, float32, two steps with guidance: with one "
    "adapter, none, and a blend of two, of all linear layers and convolutions. worst: the largest "
    "difference from diffusers' load_lora_weights and set_adapters for that image alone, relative "
    "to its largest value; effect: the least difference that adapters make, in the same way."
)
ENCODERS_RESULT = RESULT.with_name("encoders_sweep.json")
ENCODERS_METHOD = (
    "Nine texts in one call of a small random encoder, float32, with one of two or five adapters, "
    "or none. worst: the largest difference from PEFT with that adapter alone, relative to the "
    "text's largest value where that is over 1; effect: the least difference from another "
    "adapter's result, in the same way."
)
PEFT_KINDS = ("architectures", "variants", "files", "bases", "layers")
sys.path.insert(0, str(ROOT / "tests"))


def outcome(case: Callable[[], Any], split: Callable[[], Any] | None = None) -> dict[str, Any]:
    """Return the outcome of a case: the worst difference of a row, or why it is refused."""
    found = case()
    if isinstance(found, float):
        return {"worst": found}
    again = None if split is None else split()
    if isinstance(again, float):
        return {"worst": again, "split": True}
    return {"refused": found}


def counted(kind: str, rows: list[dict[str, Any]]) -> dict[str, int]:
    """Return how many cases of a kind are equal, equal in a pass per adapter, and refused."""
    own = [row for row in rows if row["kind"] == kind]
    split = sum(bool(row.get("split")) for row in own)
    refused = sum("refused" in row for row in own)
    return {"equal": len(own) - split - refused, "split": split, "refused": refused}


def pipelines() -> list[str]:
    """Compare pipelines with diffusers, write their result file; return those not equal."""
    from helpers.diffusion.diffusion_loras import BOUND, compared
    from helpers.diffusion.tiny_pipelines import PIPELINES

    cases = {name: partial(compared, name) for name in PIPELINES}
    return _compare(PIPELINES_RESULT, PIPELINES_METHOD, "diffusers", BOUND, cases)


def encoders() -> list[str]:
    """Compare encoders with PEFT, write their result file; return those not equal."""
    from helpers.tiny_encoders import KINDS, TOLERANCE, compared, save

    with tempfile.TemporaryDirectory() as folder:
        saved = save(Path(folder))
        cases = {kind: partial(compared, name, saved) for name, kind in KINDS.items()}
        package = "sentence-transformers"
        return _compare(ENCODERS_RESULT, ENCODERS_METHOD, package, TOLERANCE, cases)


def _compare(
    file: Path,
    method: str,
    package: str,
    bound: float,
    cases: Mapping[str, Callable[[], tuple[float, float]]],  # each returns worst and effect
) -> list[str]:
    found = new_result(method, bound=bound)
    found["versions"] |= versions(package)
    for name, case in cases.items():
        worst, effect = case()
        found["rows"].append({"name": name, "worst": worst, "effect": effect})
        print(found["rows"][-1], flush=True)
    found["summary"] = {"worst": max(row["worst"] for row in found["rows"])}
    write_result(file, found)
    return _wrong(found)


def peft(kinds: Collection[str]) -> list[str]:
    """Compare models of some kinds with PEFT, write their result file; return those not equal."""
    import transformers
    from helpers.sweeps import sweep, sweep_bases, sweep_variants

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found = new_result(METHOD, bound=sweep.BOUND)
    before = read_result(RESULT)
    if len(kinds) < len(PEFT_KINDS) and before["versions"] != found["versions"]:
        sys.exit(f"{RESULT.name} is of other versions: run all kinds")
    cases: tuple[tuple[Any, Callable[..., Any]], ...] = (
        (sweep.NAMES, sweep.run),
        (sweep_variants.VARIANTS, sweep_variants.run),
        (sweep_variants.FILES, sweep_variants.run_file),
        (sweep_bases.BASES, sweep_bases.run),
        (sweep_bases.LAYERS, sweep_bases.run_layer),
    )
    for kind, (names, run) in zip(PEFT_KINDS, cases, strict=True):
        if kind not in kinds:
            found["rows"] += [row for row in before["rows"] if row["kind"] == kind]
            names = ()
        for name in names:
            if kind == "bases" and sweep_bases.package_of(name) is None:
                found["rows"] += [row for row in before["rows"] if row["name"] == name]
                continue
            splits = kind == "architectures" and name not in sweep.WITH_IMAGES
            again = partial(run, name, split=True) if splits else None
            row = {"kind": kind, "name": name, **outcome(partial(run, name), again)}
            if kind == "bases":
                row["package"] = sweep_bases.package_of(name)
            found["rows"].append(row)
            print(row, flush=True)
        found["summary"][kind] = counted(kind, found["rows"])
    write_result(RESULT, found)
    return _wrong(found)


def _wrong(found: Mapping[str, Any]) -> list[str]:
    """Return the names of a result's rows that are not equal."""
    return [row["name"] for row in found["rows"] if not row.get("worst", 0.0) <= found["bound"]]


def main() -> None:
    """Run the sweeps asked for, print each case and write their result files."""
    own = {"pipelines": pipelines, "encoders": encoders}
    kinds = (*own, *PEFT_KINDS)
    parser = argparse.ArgumentParser(description=main.__doc__)
    # a string: Python 3.11 checks a list default as one choice
    parser.add_argument("kinds", nargs="*", choices=(*kinds, "all"), default="all")
    asked = parser.parse_args().kinds
    asked = kinds if "all" in asked else asked
    of_peft = [kind for kind in PEFT_KINDS if kind in asked]
    wrong = peft(of_peft) if of_peft else []
    wrong += [name for kind, run in own.items() if kind in asked for name in run()]
    if wrong:
        sys.exit(f"not equal: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
