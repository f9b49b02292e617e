"""What needs a process of its own: numba switched off, and where compiled kernels are kept."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lora_backends
from lora_backends.numba_cpu.machine.cpu import is_x86

PACKAGE = Path(lora_backends.__file__).parent

GROUP = """
import torch
from lora_backends import LoRABatch
from lora_backends.numba_cpu import NumbaCPUBackend, launch
backend = NumbaCPUBackend()
plan = backend.prepare_batch(LoRABatch([0, -1, 0], 1))
ids, weights = torch.tensor([[1], [0], [-1]]), torch.ones(3, 1)
print(backend.prepare_experts(plan, ids, weights, 2).groups().num_pairs)
"""
"""Uses the kernel that compiles fastest; all are kept in the same way."""

VERIFY = """
from lora_backends.numba_cpu import NumbaCPUBackend
from lora_backends.testing import verify
from lora_backends.testing.profiles import Profile
profile = Profile("tiny", 0.05, 6, 3, 3, (17, 33), (1, 3, 9), (3, 17), 5.0)
names = ["integers_are_exact", "run_linear_is_within_the_bound", "run_embedding_is_right",
         "shrink_is_right", "expand_is_right", "padding_beyond_a_rank_is_never_read",
         "only_the_view_is_written", "untouched_elements_keep_their_bits"]
report = verify(NumbaCPUBackend(), profile=profile, only=names)
print([(result.name, result.failure) for result in report.results if result.status != "passed"])
"""

REDUCE = """
import torch
from lora_backends import ExpertWeights, LoRABatch
from lora_backends.numba_cpu import NumbaCPUBackend, launch
torch.set_num_threads(2)
launch.SERIAL_BYTES = 0
stacks, ranks = (torch.ones(1, 2, 1, 1, 3), torch.ones(1, 2, 5, 1)), torch.ones(1, 2, 1).int()
weights = ExpertWeights(*stacks, ranks, ranks.float(), (5,), 2)
backend, factors = NumbaCPUBackend(), torch.ones(1, 2)
plan = backend.prepare_batch(LoRABatch([0], 1))
routing = backend.prepare_experts(plan, torch.tensor([[0, 1]]), factors, 2)
print(backend.run_experts(torch.ones(1, 3), weights, routing, reduce=True).tolist())
"""

INSTRUCTIONS = """
from llvmlite import binding
from lora_backends.numba_cpu.kernels import eight_bit_shrink
from lora_backends.numba_cpu.machine.cpu import has_fast_pairs
from lora_backends.numba_cpu.machine.vectors import BFLOAT16, FLOAT32
made = eight_bit_shrink.shrink_dots(KIND)
code = binding.parse_assembly(made.inspect_llvm())
target = binding.Target.from_triple(binding.get_process_triple())
print(target.create_target_machine(cpu="sapphirerapids", opt=3).emit_assembly(code))
"""
"""The CPU need not be one of these: the code is compiled, not run."""

FEATURES = "+f16c,+fma,+avx,+avx2,+avx512f,+avx512bw,+avx512vl,+avx512bf16,+avx512fp16"
SAPPHIRE_RAPIDS = {"NUMBA_CPU_NAME": "sapphirerapids", "NUMBA_CPU_FEATURES": FEATURES}


def python(code, folder, **settings):
    """Run code in a new process that imports the package from `folder`."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA_")}
    env |= {"PYTHONPATH": str(folder), "HOME": str(folder / "home"), **settings}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def copy_of_the_package(folder):
    shutil.copytree(PACKAGE, folder / "lora_backends", ignore=shutil.ignore_patterns("__pycache__"))


def test_plain_twins_pass_the_kit(tmp_path):
    assert python(VERIFY, PACKAGE.parent, NUMBA_DISABLE_JIT="1") == "[]"


def test_plain_twins_start_no_threads():
    found = python(REDUCE, PACKAGE.parent, NUMBA_DISABLE_JIT="1", OMP_NUM_THREADS="2")
    assert found == "[[6.0, 6.0, 6.0, 6.0, 6.0]]"


def test_kernels_are_compiled_once(tmp_path):
    copy_of_the_package(tmp_path)
    code = GROUP + "print(launch.grouping_kernel().compiled.cache_hits)\n"
    code += "print(launch._dense_kernel().cache_hits)"
    cache = str(tmp_path / "cache")
    assert python(code, tmp_path, NUMBA_CACHE_DIR=cache) == "1\n0\n0"
    assert python(code, tmp_path, NUMBA_CACHE_DIR=cache) == "1\n1\n1"


@pytest.mark.parametrize("home", ["writable", "nowhere"])
def test_a_package_folder_that_cannot_be_written_still_works(tmp_path, home):
    """A file where the folder of compiled code would be made stands for a read-only folder."""
    copy_of_the_package(tmp_path)
    (tmp_path / "lora_backends" / "numba_cpu" / "kernels" / "__pycache__").write_text("")
    settings = {"PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(tmp_path / "caches")}
    if home == "nowhere":
        (tmp_path / "caches").write_text("")
        (tmp_path / "home").write_text("")
    assert python(GROUP, tmp_path, **settings) == "1"
    assert any((tmp_path / "caches").rglob("*.nbi")) == (home == "writable")


@pytest.mark.skipif(not is_x86(), reason="LLVM does not compile for x86 here")
def test_int8_becomes_bfloat16_by_whole_vectors_where_vectors_of_float16_exist(tmp_path):
    settings = SAPPHIRE_RAPIDS | {"NUMBA_CACHE_DIR": str(tmp_path)}
    instructions = python(INSTRUCTIONS.replace("KIND", "BFLOAT16"), PACKAGE.parent, **settings)
    assert "vdpbf16ps" in instructions
    assert "vpextrw" not in instructions  # an element at a time


@pytest.mark.skipif(not is_x86(), reason="LLVM does not compile for x86 here")
def test_int8_is_widened_once_for_8_tokens_and_multiplied_as_float32_on_intel(tmp_path):
    settings = SAPPHIRE_RAPIDS | {"NUMBA_CACHE_DIR": str(tmp_path)}
    code = INSTRUCTIONS.replace("KIND", "BFLOAT16 if has_fast_pairs() else FLOAT32")
    instructions = python(code, PACKAGE.parent, **settings)
    assert "vdpbf16ps" not in instructions
    loops = [part for part in re.split(r"\n\.L\w+:", instructions) if "vcvtdq2ps" in part]
    counts = {(loop.count("vfmadd231ps"), loop.count("vcvtdq2ps")) for loop in loops}
    assert (32, 4) in counts  # 2 rows of 32 elements by 8 tokens
