"""Run SGLang's own LoRA tests against this library, and write how many pass, skip and why.

    python tools/sglang_own_tests.py FOLDER --backend triton --out sglang_own_tests.json

FOLDER holds the folder `test` of SGLang's sources, of the installed version or a close one. The
plug-in is active, and the tests' operators are those of `Operators`. On a CPU, put
tests/sglang_plugin/stand_ins in front of PYTHONPATH. Models are not fetched, so tests of servers
are not run. If a test fails, the exit status is 1; `--backend off` shows whether it also fails in
SGLang alone, e.g. because the sources are of another version.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm_own_tests import Recorder, argument_parser, pytest_options, summarized, tell

FILES = (
    "test/manual/lora/test_lora_ops.py",
    "test/registered/unit/lora",
    "test/registered/lora/test_lora_drainer.py",
)

TOLERANCE = 1e-4
"""Least `atol` of `torch.allclose`: the default, 1e-8, fails if float32 sums have another order."""

METHOD = (
    "SGLang's own LoRA tests with the plug-in active and its operators on this library; each n-th "
    f"case of a function (every). torch.allclose has an absolute tolerance of {TOLERANCE}."
)


class Operators:
    """SGLang's operators, computed by a backend of this library from stacks that SGLang packs."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def functions(self) -> dict[str, Callable[..., torch.Tensor]]:
        """Return the operators by SGLang's names; those for graphs use `max_rank` for all slots."""
        return {
            "sgemm_lora_a_fwd": self._shrink,
            "sgemm_lora_b_fwd": self._expand,
            "sgemm_lora_a_embedding_fwd": self._embed,
            "sgemm_lora_a_graph_fwd": lambda x, a, slots, lengths, scales, num_slices=1: (
                self._shrink(x, a, slots, lengths, _whole(a, num_slices), scales, num_slices)
            ),
            "sgemm_lora_b_graph_fwd": lambda h, b, slots, lengths, offsets, y=None: self._expand(
                h, b, slots, lengths, torch.full((b.shape[0],), b.shape[2]), offsets, y
            ),
            "sgemm_lora_a_embedding_graph_fwd": lambda ids, a, slots, lengths, scales, vocabulary: (
                self._embed(ids, a, slots, lengths, _whole(a, 1), scales, vocabulary)
            ),
        }

    def _plan(self, slots: Any, lengths: Any, num_slots: int) -> Any:
        from lora_backends import LoRABatch

        batch = LoRABatch.from_sequences(slots.tolist(), lengths.tolist(), num_slots)
        return self._backend.prepare_batch(batch)

    def _numbers(self, ranks: Any, num_slices: int) -> tuple[torch.Tensor, torch.Tensor]:
        ranks = ranks.to(self._backend.device, torch.int32)[:, None].repeat(1, num_slices)
        return ranks, torch.ones(ranks.shape, device=ranks.device)

    def _shrink(
        self,
        x: torch.Tensor,
        a: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        ranks: torch.Tensor,
        scales: torch.Tensor,
        num_slices: int = 1,
    ) -> torch.Tensor:
        from lora_backends import LoRAWeights
        from lora_backends.integrations.sglang.pool import spread

        device, max_rank = self._backend.device, a.shape[1] // num_slices
        stack = a.to(device, copy=True)
        for slot, rank in enumerate(ranks.tolist()):
            spread(stack[slot], rank, max_rank)
        stack = stack.view(a.shape[0], num_slices, max_rank, a.shape[2])
        widths = (1,) * num_slices  # of B, which is absent
        weights = LoRAWeights(stack, None, *self._numbers(ranks, num_slices), widths)
        h = self._backend.run_lora_a(
            x.to(device), weights, self._plan(slots, lengths, a.shape[0])
        ).cpu()
        out = torch.zeros(x.shape[0], a.shape[1], dtype=x.dtype)
        row = 0
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            r, rows = ranks[slot], slice(row, row + length)
            packed = torch.cat([each[rows, :r] for each in h], 1)
            out[rows, : packed.shape[1]] = scales[slot] * packed
            row += length
        return out

    def _expand(
        self,
        h: torch.Tensor,
        b: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        ranks: torch.Tensor,
        offsets: torch.Tensor,
        base_output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        from lora_backends import LoRAWeights

        device, num_slices = self._backend.device, len(offsets) - 1
        spaced = torch.zeros(num_slices, h.shape[0], b.shape[2])
        row = 0
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            r, rows = int(ranks[slot]), slice(row, row + length)
            for s in range(num_slices):
                spaced[s, rows, :r] = h[rows, s * r : (s + 1) * r].float()
            row += length
        widths = tuple((offsets[1:] - offsets[:-1]).tolist())
        weights = LoRAWeights(None, b.to(device), *self._numbers(ranks, num_slices), widths)
        y = None if base_output is None else base_output.to(device)
        plan = self._plan(slots, lengths, b.shape[0])
        found: torch.Tensor = self._backend.run_lora_b(spaced.to(device), weights, plan, y).cpu()
        return found if base_output is None else base_output.copy_(found)

    def _embed(
        self,
        ids: torch.Tensor,
        a: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        ranks: torch.Tensor,
        scales: torch.Tensor,
        vocabulary: int,
    ) -> torch.Tensor:
        from lora_backends import LoRAWeights

        device, width = self._backend.device, a.shape[1]
        identity = torch.eye(width, dtype=a.dtype, device=device).repeat(a.shape[0], 1, 1)
        numbers, _ = self._numbers(ranks, 1)
        scalings = scales.to(device, torch.float32)[:, None]
        weights = LoRAWeights(a.to(device)[:, None], identity, numbers, scalings, (width,))
        plan = self._plan(slots, lengths, a.shape[0])
        found: torch.Tensor = self._backend.run_embedding(ids.to(device), weights, plan).cpu()
        return found


def _whole(a: torch.Tensor, num_slices: int) -> torch.Tensor:
    return torch.full((a.shape[0],), a.shape[1] // num_slices)


class Replacing(Recorder):
    """Keeps every outcome, and puts this library's operators into the modules of tests."""

    def __init__(self, operators: dict[str, Any], every: int) -> None:
        super().__init__(every, 0, 1, float("inf"))
        self._operators = operators
        self.replaced: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep each n-th case, and replace the operators that the tests import."""
        super().pytest_collection_modifyitems(items)
        for module in {item.module for item in items}:
            for name in self._operators.keys() & vars(module).keys():
                setattr(module, name, self._operators[name])
                self.replaced.add(name)


def stand_in() -> None:
    """Define names that the tests import and do not use: of data sets and of SGLang's CI."""
    from sglang.test.ci import ci_register

    def named(name: str) -> Any:
        if name.startswith("register_"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)

    vars(ci_register)["__getattr__"] = named
    if importlib.util.find_spec("datasets") is None:
        module = sys.modules["datasets"] = types.ModuleType("datasets")
        vars(module)["load_dataset"] = None


def _close(
    original: Callable[..., bool],
    one: torch.Tensor,
    other: torch.Tensor,
    rtol: float = 1e-5,
    atol: float = 1e-8,
) -> bool:
    return original(one, other, rtol=rtol, atol=max(atol, TOLERANCE))


def main() -> None:
    """Run the tests and write the result."""
    parser = argument_parser(__doc__, "holds the folder test of SGLang's sources", ", or off")
    parser.add_argument("--files", nargs="+", default=FILES, help="files or folders in FOLDER")
    args = parser.parse_args()

    import sglang

    from lora_backends import get_backend
    from lora_backends.bench.results import new_result, write_result
    from lora_backends.integrations.sglang import register, wrapping

    device = "cuda" if torch.cuda.is_available() else "cpu"
    operators: dict[str, Any] = {}
    if args.backend != "off":
        os.environ["LORA_BACKENDS_SGLANG"] = args.backend
        register()
        wrapping.wrap()
        operators = Operators(get_backend(args.backend, device=device)).functions()
        torch.allclose = functools.partial(_close, torch.allclose)
    stand_in()
    recorder = Replacing(operators, args.every)
    options = [*pytest_options(args.folder), "--continue-on-collection-errors"]
    pytest.main([*options, *(str(args.folder / name) for name in args.files)], plugins=[recorder])
    files = summarized(recorder.found)
    result = new_result(METHOD, device, backend=args.backend, every=args.every)
    result["versions"]["sglang"] = sglang.__version__
    result["operators"] = sorted(recorder.replaced)
    result["rows"] = [{"file": name, **entry} for name, entry in files.items()]
    write_result(args.out, result)
    sys.exit(tell(files))


if __name__ == "__main__":
    main()
