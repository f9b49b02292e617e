"""Machine code of the CPU engine on disk: no older code is loaded after a change of any source."""

import shutil
from pathlib import Path

import pytest

kernels = pytest.importorskip("lora_backends.numba_cpu.kernels", exc_type=ImportError)
from lora_backends.numba_cpu import kernels_eight_bit, kernels_experts  # noqa: E402

FOLDER = Path(kernels.__file__).parent
NAMES = sorted(path.name for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_the_digest_differs_if_any_source_does(name, tmp_path):
    for source in NAMES:
        shutil.copy(FOLDER / source, tmp_path)
    assert kernels.digest_of(tmp_path) == kernels.SOURCES
    changed = tmp_path / name
    changed.write_text(changed.read_text() + "\n")
    assert kernels.digest_of(tmp_path) != kernels.SOURCES


ENTRIES = {
    "dense": (kernels, lambda: kernels.entry(0, 0)),
    "dense, first half": (kernels, lambda: kernels.first_entry(0)),
    "eight bits": (kernels_eight_bit, kernels_eight_bit.entry),
    "eight bits, first half": (kernels_eight_bit, kernels_eight_bit.first_entry),
    "grouping": (kernels_experts, kernels_experts.grouping_entry),
    "reduction": (kernels_experts, lambda: kernels_experts.reduction_entry(0)),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_the_key_of_machine_code_holds_the_digest(name, monkeypatch):
    module, entry = ENTRIES[name]
    given = []
    monkeypatch.setattr(module, "compiled", lambda signature, run: given.append(run))
    entry()
    assert [
        kernels.SOURCES in [cell.cell_contents for cell in run.__closure__] for run in given
    ] == [True]


def test_no_other_function_is_kept_on_disk():
    kept = {name for name in NAMES if "cache=True" in (FOLDER / name).read_text()}
    assert kept == {"kernels.py"}
    calls = sum((FOLDER / name).read_text().count("return compiled(") for name in NAMES)
    assert calls == len(ENTRIES)
