"""Machine code of the CPU engine on disk: no older code is loaded after a change of any source."""

import ctypes
import errno
import shutil
from pathlib import Path

import numpy as np
import pytest

dense = pytest.importorskip("lora_backends.numba_cpu.kernels.dense", exc_type=ImportError)
from numba import config  # noqa: E402
from numba.core.caching import IndexDataCacheFile  # noqa: E402

from lora_backends.numba_cpu.config import DotBlocks  # noqa: E402
from lora_backends.numba_cpu.gradients import kernels, products  # noqa: E402
from lora_backends.numba_cpu.kernels import (  # noqa: E402
    eight_bit,
    eight_bit_expand,
    eight_bit_shrink,
    experts,
    long,
    short,
)
from lora_backends.numba_cpu.machine import compiling  # noqa: E402
from lora_backends.numba_cpu.machine import vectors as v  # noqa: E402

FOLDER = Path(dense.__file__).parents[1]
NAMES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_the_digest_differs_if_any_source_does(name, tmp_path):
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    assert compiling.digest_of(tmp_path) == compiling.SOURCES
    changed = tmp_path / name
    changed.write_text(changed.read_text() + "\n")
    assert compiling.digest_of(tmp_path) != compiling.SOURCES


ENTRIES = {
    "dense": (dense, dense.entry),
    "shrink_short": (short, lambda: short.shrink_short(0, 0)),
    "gather": (short, lambda: short.gather(0)),
    "expand_short": (short, lambda: short.expand_short(0, 0)),
    "expand_multiplied": (short, lambda: short.expand_multiplied(0, 0)),
    "expand_column": (short, lambda: short.expand_column(0, 0)),
    "shrink_long": (long, lambda: long.shrink_long(0)),
    "add_block": (long, lambda: long.add_block(0)),
    "expand_long": (long, lambda: long.expand_long(0)),
    "add_stored": (long, lambda: long.add_stored(0)),
    "eight bits": (eight_bit, eight_bit.entry),
    "eight bits, gather": (eight_bit_shrink, eight_bit_shrink.gather),
    "shrink_panel": (eight_bit_shrink, eight_bit_shrink.shrink_panel),
    "shrink_dots": (eight_bit_shrink, lambda: eight_bit_shrink.shrink_dots(v.FLOAT32)),
    "copy_x": (eight_bit_shrink, eight_bit_shrink.copy_x),
    "expand_int8": (eight_bit_expand, lambda: eight_bit_expand.expand_int8(0)),
    "expand_stored": (eight_bit_expand, eight_bit_expand.expand_stored),
    "expand_ragged": (eight_bit_expand, eight_bit_expand.expand_ragged),
    "grouping": (experts, experts.grouping_entry),
    "reduction": (experts, lambda: experts.reduction_entry(0)),
    "blend": (dense, dense.blend_entry),
    "blend, eight bits": (eight_bit, eight_bit.blend_entry),
    "backward of B": (kernels, kernels.b_entry),
    "backward of A": (kernels, kernels.a_entry),
    "with_weights": (products, lambda: products.with_weights(0, 0)),
    "over_rows": (products, lambda: products.over_rows(0, 0)),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def writer(kind, value):
    """Return a compiled function that writes a value; kinds are its variants."""

    def run(address):
        v.write(kind, address, np.float32(value))

    return compiling.compiled(run)


def written_by(made):
    to = np.zeros(1, np.float32)
    ctypes.CFUNCTYPE(None, ctypes.c_int64)(made.address)(to.ctypes.data)
    return to.item()


@pytest.mark.parametrize("name", ENTRIES)
def test_files_are_named_after_the_sources_and_the_cpu(name, monkeypatch):
    module, entry = ENTRIES[name]
    given = []
    monkeypatch.setattr(module, "compiled", given.append)
    entry()
    (run,) = given
    found = {compiling.kept_name(run)}
    codegen = compiling.cpu_target.target_context.codegen()
    for place, attribute, value in (
        (compiling, "SOURCES", 1),
        (type(codegen), "magic_tuple", lambda self: ("another", "CPU", "")),
        (compiling.numba, "__version__", "0"),
        (compiling.llvmlite, "__version__", "0"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(place, attribute, value)
            found.add(compiling.kept_name(run))
    assert len(found) == 5


@pytest.mark.parametrize("name", ENTRIES)
def test_no_compiled_function_closes_over_another(name, monkeypatch):
    """numba pickles closures for the key of a file, and functions differently in every process."""
    module, entry = ENTRIES[name]
    functions = []
    monkeypatch.setattr(module, "compiled", functions.append)
    entry()
    cells = [cell.cell_contents for run in functions for cell in run.__closure__ or ()]
    assert len(functions) == 1
    assert not any(map(callable, cells))


def test_variants_of_a_function_share_no_file(monkeypatch):
    names = []
    monkeypatch.setattr(short, "compiled", lambda run: names.append(compiling.kept_name(run)))
    kinds = [v.FLOAT32, v.BFLOAT16, v.FLOAT16, v.INT8, v.E4M3, v.E5M2]
    for kind in kinds:
        short.gather(kind)
    assert len(set(names)) == len(kinds)


def test_ways_to_shrink_int8_share_no_file(monkeypatch):
    """Two kinds of CPUs with one cache folder choose different ways, or different blocks."""
    names, record = [], lambda run: names.append(compiling.kept_name(run))
    monkeypatch.setattr(eight_bit_shrink, "compiled", record)
    for blocks in (eight_bit_shrink.FLOAT32_BLOCKS, DotBlocks(64, 64, in_order=True)):
        monkeypatch.setattr(eight_bit_shrink, "FLOAT32_BLOCKS", blocks)
        eight_bit_shrink.shrink_dots(v.FLOAT32)
    eight_bit_shrink.shrink_dots(v.BFLOAT16)
    assert len(set(names)) == 3


def test_processes_that_save_at_once_never_mix_their_variants(folder, monkeypatch):
    """numba saves an index and then the file that it names; another process may come between."""
    save = IndexDataCacheFile._save_data

    def save_late(self, name, data):
        with monkeypatch.context() as other:
            other.setattr(IndexDataCacheFile, "_save_data", save)
            other.setattr(IndexDataCacheFile, "_load_index", lambda self: {})  # read before
            writer(v.FLOAT32, 2.0)
        save(self, name, data)

    with monkeypatch.context() as first:
        first.setattr(IndexDataCacheFile, "_save_data", save_late)
        writer(v.FLOAT32, 1.0)
    found = [writer(v.FLOAT32, value) for value in (1.0, 2.0)]
    assert [(written_by(made), made.cache_hits) for made in found] == [(1.0, 1), (2.0, 1)]


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("left", [0, 20])
def test_a_damaged_file_is_written_again(folder, kind, left):
    """A power cut leaves files empty or short."""
    writer(v.FLOAT32, 3.0)
    (file,) = folder.rglob("*." + kind)
    file.write_bytes(file.read_bytes()[:left])
    assert written_by(writer(v.FLOAT32, 3.0)) == 3.0
    assert writer(v.FLOAT32, 3.0).cache_hits == 1


@pytest.mark.parametrize("method", ["_save_index", "_save_data"])
def test_a_full_disk_keeps_nothing_and_fails_no_call(folder, monkeypatch, method):
    def fail(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(IndexDataCacheFile, method, fail)
        assert written_by(writer(v.FLOAT32, 4.0)) == 4.0
    made = writer(v.FLOAT32, 4.0)
    assert (written_by(made), made.cache_hits) == (4.0, 0)


def test_no_other_function_is_kept_on_disk():
    kept = {name for name in NAMES if "cache=True" in (FOLDER / name).read_text()}
    assert kept == {"machine/compiling.py"}
    calls = sum((FOLDER / name).read_text().count("return compiled(") for name in NAMES)
    assert calls == len(ENTRIES)
