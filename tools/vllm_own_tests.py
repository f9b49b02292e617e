"""Run vLLM's own LoRA tests against this library, and write how many pass, skip and why.

    python tools/vllm_own_tests.py FOLDER --backend triton --out vllm_own_tests.json

FOLDER is an unpacked source distribution of vLLM, of which tests/lora is run, with the vLLM that is
installed. Its operators are replaced by those of tools/vllm_ops, its wrapper by the plug-in. A test
that fails makes the exit status 1, unless it is listed in CONTRADICTIONS.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import types
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

FILES = (
    "test_layers.py",
    "test_moe_lora_align_sum.py",
    "test_fused_moe_lora_kernel.py",
    "test_punica_ops_fp8.py",
    "test_punica_ops.py",
)
"""In the order in which they run: the fewest cases first."""

NOT_RUN = "not run: the time was over"

WRAPPER_CHECK = "check_punica_wrapper"  # what asks in test_layers.py for vLLM's own wrapper

DENSE = ("lora_shrink", "lora_expand", "lora_shrink_fp8", "lora_expand_fp8")

CONTRADICTIONS = {
    "test_fused_moe_lora_kernel_rejects_bad_block_size_m*": (
        "expects an AssertionError; the same call is refused with InvalidInputError, a ValueError"
    ),
}
"""Cases that contradict this library's contract, by name, and the proof."""

NOT_REPLACED = {
    "test_torch_ops_bgmv_skips_no_lora_tokens": "tests vLLM's operators in torch, which stay",
}
"""Tests of what this library does not replace."""

SHARDED = ("fully_shard", "fully_sharded")
"""Parameters of cases with fully_sharded_loras, which the plug-in does not follow."""


class Recorder:
    """A plugin of pytest that keeps every outcome and picks a sample."""

    def __init__(self, every: int, shard: int, shards: int, limit: float) -> None:
        self.every, self.shard, self.shards = every, shard, shards
        self.start, self.limit = time.monotonic(), limit
        self.ends: dict[str, float] = {}  # of each file, by its path
        self.found: dict[str, tuple[str, str]] = {}  # outcome and reason by test

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep each n-th case of a test function, and of those this process's share.

        A file's cases run in an order without a pattern, and the k-th of n files stops at k/n of
        the limit, so what has run when the time is over is a sample of every file.
        """
        seen: Counter[str] = Counter()
        kept = []
        for item in items:
            name = item.nodeid.partition("[")[0]
            if seen[name] % self.every == 0:
                item.add_marker("skip_global_cleanup")  # theirs shuts Ray down after each test
                if item.name in NOT_REPLACED:
                    item.add_marker(pytest.mark.skip(reason=NOT_REPLACED[item.name]))
                given = item.callspec.params if hasattr(item, "callspec") else {}
                if any(given.get(name) is True for name in SHARDED):
                    item.add_marker(pytest.mark.skip(reason="fully_sharded_loras"))
                kept.append(item)
            seen[name] += 1
        items[:] = kept[self.shard :: self.shards]
        files = list(dict.fromkeys(str(item.path) for item in items))
        items.sort(key=lambda item: (files.index(str(item.path)), zlib.crc32(item.name.encode())))
        for k, file in enumerate(files, 1):
            self.ends[file] = self.start + self.limit * k / len(files)
        for module in {item.module for item in items if hasattr(item.module, WRAPPER_CHECK)}:
            setattr(module, WRAPPER_CHECK, lambda found: type(found).__name__ == "BackendWrapper")

    def pytest_runtest_setup(self, item: Any) -> None:
        """Skip what the time is over for."""
        if time.monotonic() > self.ends[str(item.path)]:
            pytest.skip(NOT_RUN)

    def pytest_collectreport(self, report: Any) -> None:
        """Keep a file that cannot be collected as a failure."""
        if report.failed:
            self.found[report.nodeid] = "failed", str(report.longrepr)[-2000:]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the outcome of a test; a fixture that fails counts as its test."""
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            self.found[report.nodeid] = "skipped", reason.removeprefix("Skipped: ")
        elif report.failed:
            self.found[report.nodeid] = "failed", str(report.longrepr)[-2000:]
        elif report.when == "call":
            self.found.setdefault(report.nodeid, ("passed", ""))


def stand_in(backend: str) -> None:
    """Put this library in the place of vLLM's operators and wrapper."""
    os.environ["LORA_BACKENDS_VLLM"] = backend
    import torch
    import vllm._custom_ops as custom_ops
    import vllm_ops as ops
    from torch.nn.functional import linear
    from vllm.lora.ops import triton_ops
    from vllm.lora.punica_wrapper import punica_gpu
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    from lora_backends import get_backend
    from lora_backends.integrations.vllm import register

    device = torch.device(current_platform.device_type)
    chosen = get_backend(backend, device=device)
    punica_gpu.LoRAKernelMeta = triton_ops.LoRAKernelMeta  # it imports these on a GPU alone
    for name in (*DENSE, "fused_moe_lora"):
        replacement = functools.partial(getattr(ops, name), backend=chosen)
        setattr(triton_ops, name, replacement)
        setattr(punica_gpu, name, replacement)
    custom_ops.moe_lora_align_block_size = ops.moe_lora_align_block_size
    register()
    if importlib.util.find_spec("ray") is None:  # what tears their tests down shuts Ray down
        sys.modules["ray"] = types.ModuleType("ray")
        vars(sys.modules["ray"])["shutdown"] = lambda: None
    if device.type == "cpu":  # their tests select a GPU by its index, and prepare no base layers
        torch.accelerator.set_device_index = lambda index: None
        utils.cpu_unquantized_gemm = lambda _, x, weight, bias=None: linear(x, weight, bias)


def helpers_of_vllm() -> dict[str, Any]:
    """Return what their tests take from modules that import web clients."""
    import torch
    from vllm.config import VllmConfig, get_current_vllm_config_or_none, set_current_vllm_config

    @contextlib.contextmanager
    def ensure_current_vllm_config() -> Any:
        if get_current_vllm_config_or_none() is not None:
            yield
            return
        with set_current_vllm_config(VllmConfig()):
            yield

    def multi_gpu_test(*, num_gpus: int) -> Any:
        few = torch.cuda.device_count() < num_gpus
        return pytest.mark.skipif(few, reason=f"needs {num_gpus} GPUs")

    @pytest.fixture
    def default_vllm_config() -> Any:
        with set_current_vllm_config(VllmConfig()):
            yield

    return {
        "ensure_current_vllm_config": ensure_current_vllm_config,
        "multi_gpu_test": multi_gpu_test,
        "default_vllm_config": default_vllm_config,
    }


def pytest_options(folder: Path) -> list[str]:
    """Return options that keep this repository's settings out of another project's tests."""
    options = ["-q", "--no-header", "-c", os.devnull, "--rootdir", str(folder), "--tb=short"]
    return [*options, "-p", "no:cacheprovider", "-W", "ignore"]


def run_share(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run one process's share of the tests in this process."""
    stand_in(args.backend)
    helpers = helpers_of_vllm()
    module = types.ModuleType("tests.utils")
    vars(module).update(helpers)
    sys.path.insert(0, str(folder))
    sys.modules["tests.utils"] = module
    fixtures = types.ModuleType("fixtures_of_vllm")
    vars(fixtures)["default_vllm_config"] = helpers["default_vllm_config"]
    recorder = Recorder(args.every, args.shard, args.shards, args.limit)
    lora = folder / "tests" / "lora"
    options = [*pytest_options(folder), "--confcutdir", str(lora)]
    if args.match:
        options += ["-k", args.match]
    files = [str(lora / name) for name in args.files]
    pytest.main([*options, *files], plugins=[recorder, fixtures])
    return recorder.found


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """Run the shares side by side, each in a process of its own."""
    with tempfile.TemporaryDirectory() as place:
        processes, results = [], []
        for shard in range(args.shards):
            results.append(Path(place) / f"{shard}.json")
            own = ["--shard", str(shard), "--out", str(results[-1])]
            processes.append(subprocess.Popen([sys.executable, *sys.argv, *own]))
        codes = [process.wait() for process in processes]
        if any(codes) or not all(path.exists() for path in results):
            raise SystemExit(f"a process ended without a result: exit statuses {codes}")
        found: dict[str, Any] = {}
        for path in results:
            found |= json.loads(path.read_text())
    return found


def summarized(found: dict[str, Any]) -> dict[str, Any]:
    """Return counts by file, the reasons of skips, and each failure."""
    files: dict[str, Any] = {}
    for test, (outcome, reason) in sorted(found.items()):
        name = test.partition("::")[0].rpartition("/")[2]
        entry = files.setdefault(
            name, {"passed": 0, "skipped": {}, "contradicts": {}, "failed": {}}
        )
        case = test.rpartition("::")[2]
        proof = next((p for n, p in CONTRADICTIONS.items() if fnmatch.fnmatch(case, n)), None)
        if outcome == "passed":
            entry["passed"] += 1
        elif outcome == "skipped":
            entry["skipped"][reason] = entry["skipped"].get(reason, 0) + 1
        else:
            entry["failed" if proof is None else "contradicts"][case] = proof or reason
    return files


METHOD = (
    "vLLM's own LoRA tests with its operators and wrapper replaced by this library's; each n-th "
    "case of a function (every). contradicts: a case whose expectation is wrong, with the proof."
)


def result_of(args: argparse.Namespace, files: dict[str, Any]) -> dict[str, Any]:
    """Return the result: a row per file of tests."""
    import torch
    import vllm

    from lora_backends.bench.results import new_result

    result = new_result(
        METHOD,
        "cuda" if torch.cuda.is_available() else "cpu",
        vllm=vllm.__version__,
        tests_of=version_of(args.folder),
        backend=args.backend,
        every=args.every,
    )
    result["rows"] = [{"file": name, **entry} for name, entry in files.items()]
    kinds = ("passed", "skipped", "contradicts", "failed")
    result["summary"] = {
        kind: sum(_count(entry[kind]) for entry in files.values()) for kind in kinds
    }
    return result


def _count(found: Any) -> int:
    if isinstance(found, int):
        return found
    return sum(n if isinstance(n, int) else 1 for n in found.values())


def version_of(folder: Path) -> str:
    """Return the version of a source distribution, or its folder's name."""
    info = folder / "PKG-INFO"
    found = re.search(r"^Version: (\S+)", info.read_text(), re.M) if info.exists() else None
    return found[1] if found else folder.name


def argument_parser(about: str, folder: str, backend: str = "") -> argparse.ArgumentParser:
    """Return a parser of the arguments that the tools for engines' own tests share.

    Args:
        about: the tool's docstring.
        folder: describes its first argument.
        backend: describes further values of --backend.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("folder", type=Path, help=folder)
    parser.add_argument("--backend", default="auto", help=f"a backend's name, or auto{backend}")
    parser.add_argument("--out", type=Path, required=True, help="the result file")
    parser.add_argument("--every", type=int, default=1, help="run each n-th case of a function")
    return parser


def tell(files: dict[str, Any]) -> int:
    """Print the counts of each file; return 1 if a case has failed, for the exit status."""
    for name, entry in files.items():
        skipped = sum(entry["skipped"].values())
        print(
            f"{name}: {entry['passed']} passed, {skipped} skipped, "
            f"{len(entry['contradicts'])} contradict, {len(entry['failed'])} failed"
        )
    return int(any(entry["failed"] for entry in files.values()))


def main() -> None:
    """Run the tests and write the result."""
    parser = argument_parser(__doc__, "an unpacked source distribution of vLLM")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds; the rest is skipped")
    parser.add_argument("--shards", type=int, default=1, help="processes side by side")
    parser.add_argument("--shard", type=int, help="run one share alone (used by itself)")
    parser.add_argument("-k", dest="match", default="", help="as pytest's -k")
    parser.add_argument("--files", nargs="+", default=FILES, help="of tests/lora")
    args = parser.parse_args()
    if args.shard is not None:
        args.out.write_text(json.dumps(run_share(args, args.folder.resolve())))
        return
    files = summarized(run_all(args))
    result = result_of(args, files)
    from lora_backends.bench.results import write_result

    write_result(args.out, result)
    raise SystemExit(tell(files))


if __name__ == "__main__":
    main()
