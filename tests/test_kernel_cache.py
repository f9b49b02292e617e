"""Machine code of the CPU engine on disk: no older code is loaded after a change of any source."""

import shutil
from pathlib import Path

import pytest

kernels = pytest.importorskip("lora_backends.numba_cpu.kernels", exc_type=ImportError)
from lora_backends.numba_cpu import (  # noqa: E402
    compiling,
    kernels_eight_bit,
    kernels_experts,
    kernels_long,
    kernels_short,
)

FOLDER = Path(kernels.__file__).parent
NAMES = sorted(path.name for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_the_digest_differs_if_any_source_does(name, tmp_path):
    for source in NAMES:
        shutil.copy(FOLDER / source, tmp_path)
    assert compiling.digest_of(tmp_path) == compiling.SOURCES
    changed = tmp_path / name
    changed.write_text(changed.read_text() + "\n")
    assert compiling.digest_of(tmp_path) != compiling.SOURCES


ENTRIES = {
    "dense": (kernels, kernels.entry),
    "shrink_short": (kernels_short, lambda: kernels_short.shrink_short(0, 0)),
    "gather": (kernels_short, lambda: kernels_short.gather(0)),
    "expand_short": (kernels_short, lambda: kernels_short.expand_short(0, 0)),
    "expand_multiplied": (kernels_short, lambda: kernels_short.expand_multiplied(0, 0)),
    "expand_column": (kernels_short, lambda: kernels_short.expand_column(0, 0)),
    "shrink_long": (kernels_long, lambda: kernels_long.shrink_long(0)),
    "add_block": (kernels_long, lambda: kernels_long.add_block(0)),
    "expand_long": (kernels_long, lambda: kernels_long.expand_long(0)),
    "add_stored": (kernels_long, lambda: kernels_long.add_stored(0)),
    "eight bits": (kernels_eight_bit, kernels_eight_bit.entry),
    "eight bits, gather": (kernels_eight_bit, kernels_eight_bit.gather),
    "shrink_panel": (kernels_eight_bit, kernels_eight_bit.shrink_panel),
    "shrink_dots": (kernels_eight_bit, kernels_eight_bit.shrink_dots),
    "copy_x": (kernels_eight_bit, kernels_eight_bit.copy_x),
    "expand_int8": (kernels_eight_bit, lambda: kernels_eight_bit.expand_int8(0)),
    "expand_stored": (kernels_eight_bit, kernels_eight_bit.expand_stored),
    "expand_ragged": (kernels_eight_bit, kernels_eight_bit.expand_ragged),
    "grouping": (kernels_experts, kernels_experts.grouping_entry),
    "reduction": (kernels_experts, lambda: kernels_experts.reduction_entry(0)),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_the_key_of_machine_code_holds_the_digest(name, monkeypatch):
    module, entry = ENTRIES[name]
    given = []
    monkeypatch.setattr(module, "compiled", given.append)
    entry()
    assert [
        compiling.SOURCES in [cell.cell_contents for cell in run.__closure__] for run in given
    ] == [True]


def test_no_other_function_is_kept_on_disk():
    kept = {name for name in NAMES if "cache=True" in (FOLDER / name).read_text()}
    assert kept == {"compiling.py"}
    calls = sum((FOLDER / name).read_text().count("return compiled(") for name in NAMES)
    assert calls == len(ENTRIES)
