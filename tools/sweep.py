"""Compares every architecture and every variant of an adapter with PEFT; minutes on a CPU.

Writes benchmarks/results/peft_sweep.json, from which `tools/pages.py` makes the support tables.
The cases are in tests/helpers/sweeps/. Quantised bases need their packages: bitsandbytes, torchao,
optimum-quanto, hqq and compressed-tensors. The file keeps the rows of those that are missing.

    python tools/sweep.py
    python tools/sweep.py bases layers   # these kinds alone: the file keeps the others
    python tools/sweep.py pipelines      # of diffusers, which have a file of their own
    python tools/sweep.py encoders       # of sentence-transformers, likewise
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
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
    "Nine texts in one call of a small random encoder, float32, with one of two adapters or none. "
    "worst: the largest difference from PEFT with that adapter alone, relative to the text's "
    "largest value where that is over 1; effect: the least difference from another adapter's "
    "result, in the same way."
)
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


def pipelines() -> None:
    """Compare pipelines with diffusers, print each case and write their result file."""
    from helpers.diffusion.diffusion_loras import BOUND, compared
    from helpers.diffusion.tiny_pipelines import PIPELINES

    cases = {name: partial(compared, name) for name in PIPELINES}
    _compare(PIPELINES_RESULT, PIPELINES_METHOD, "diffusers", BOUND, cases)


def encoders() -> None:
    """Compare encoders with PEFT, print each case and write their result file."""
    from helpers.tiny_encoders import KINDS, TOLERANCE, compared, save

    with tempfile.TemporaryDirectory() as folder:
        saved = save(Path(folder))
        cases = {kind: partial(compared, name, saved) for name, kind in KINDS.items()}
        _compare(ENCODERS_RESULT, ENCODERS_METHOD, "sentence-transformers", TOLERANCE, cases)


def _compare(
    file: Path,
    method: str,
    package: str,
    bound: float,
    cases: Mapping[str, Callable[[], tuple[float, float]]],  # that return worst and effect
) -> None:
    found = new_result(method, bound=bound)
    found["versions"] |= versions(package)
    for name, case in cases.items():
        worst, effect = case()
        found["rows"].append({"name": name, "worst": worst, "effect": effect})
        print(found["rows"][-1], flush=True)
    found["summary"] = {"worst": max(row["worst"] for row in found["rows"])}
    write_result(file, found)
    if found["summary"]["worst"] > bound:
        sys.exit("not equal")


def main() -> None:
    """Run the sweep, print each case and write the result file."""
    for name, run in (("pipelines", pipelines), ("encoders", encoders)):
        if sys.argv[1:] in ([], [name]):
            run()
    if sys.argv[1:] in (["pipelines"], ["encoders"]):
        return
    import transformers
    from helpers.sweeps import sweep, sweep_bases, sweep_variants

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found, kinds = new_result(METHOD, bound=sweep.BOUND), sys.argv[1:]
    before = read_result(RESULT)
    if kinds and before["versions"] != found["versions"]:
        sys.exit(f"{RESULT.name} is of other versions: run all kinds")
    cases: tuple[tuple[str, Any, Callable[..., Any]], ...] = (
        ("architectures", sweep.NAMES, sweep.run),
        ("variants", sweep_variants.VARIANTS, sweep_variants.run),
        ("files", sweep_variants.FILES, sweep_variants.run_file),
        ("bases", sweep_bases.BASES, sweep_bases.run),
        ("layers", sweep_bases.LAYERS, sweep_bases.run_layer),
    )
    for kind, names, run in cases:
        if kinds and kind not in kinds:
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
    wrong = [row["name"] for row in found["rows"] if row.get("worst", 0.0) > sweep.BOUND]
    if wrong:
        sys.exit(f"not equal: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
