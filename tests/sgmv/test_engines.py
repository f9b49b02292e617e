"""The two engines have one arithmetic, and each works without the other."""

import ast
import copy
import json
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch
from helpers.engines import ENGINES, run_interpreted
from helpers.small_layers import small_batch, small_weights

import lora_backends
from lora_backends import LoRABatch, LoRAWeights
from lora_backends.sgmv import launch
from lora_backends.sgmv.launching.kernel import SpecializedKernel

PACKAGE = Path(lora_backends.__file__).parent
ROW = {"ROW"}
"""The constants by which an entry kernel finds its row."""


def random_layer(generator):
    """Return a layer whose values are never read."""
    slices = tuple(
        generator.choice([8, 77, 256, 1024, 4096]) for _ in range(generator.choice(SOME))
    )
    slots, rank = generator.choice([1, 4, 9]), generator.choice([1, 8, 16, 33, 64, 130])
    inputs = generator.choice([5, 77, 512, 4096, 9000])
    dtype = generator.choice([torch.float16, torch.bfloat16, torch.float32])
    return LoRAWeights(
        lora_a=torch.empty(slots, len(slices), rank, inputs, dtype=dtype),
        lora_b=torch.empty(slots, sum(slices), rank, dtype=dtype),
        ranks=torch.full((slots, len(slices)), rank, dtype=torch.int32),
        scalings=torch.ones(slots, len(slices)),
        output_slices=slices,
        bias=torch.empty(slots, sum(slices), dtype=dtype) if generator.random() < 0.5 else None,
    )


SOME = [1, 1, 2, 3, 5]


def random_batch(generator, num_slots):
    slots = [generator.randint(-1, num_slots - 1) for _ in range(generator.choice(LENGTHS))]
    return LoRABatch(sorted(slots) if generator.random() < 0.3 else slots, num_slots)


LENGTHS = [1, 7, 64, 300, 700, 2500]


def split(kernel):
    """Return a kernel's constants that find the row, and all else that is compiled or launched."""
    row = {name: value for name, value in kernel.constants.items() if name in ROW}
    rest = {name: value for name, value in kernel.constants.items() if name not in ROW}
    return row, (kernel.kernel.__name__, rest, kernel.options, kernel._grid(7))


@pytest.mark.parametrize("segment_size", [16, "auto"])
def test_constants_of_both_engines_agree_but_for_how_a_row_is_found(segment_size):
    generator = random.Random(0)
    for _ in range(150):
        choice = {
            "allow_tf32": generator.random() < 0.5,
            "batch_invariant": generator.random() < 0.2,
            "tiles": "rules",
        }
        triton = ENGINES["triton"]("cpu", **choice)
        csgmv = ENGINES["csgmv"]("cpu", segment_size=segment_size, **choice)
        on_hopper = {"programmatic": True, "tma": True} if generator.random() < 0.7 else {}
        weights = random_layer(generator)
        batch = random_batch(generator, weights.num_slots)
        for form in ("linear", "separate", "embedding"):
            kernels, plans = [], []
            for engine in (triton, csgmv):
                plan, options = engine.prepare_batch(batch), engine._options._replace(**on_hopper)
                found = launch.kernels_of(
                    weights, launch.stacks_of(weights), plan, plan.num_tokens, None, options, form
                )
                row = plan.row_constants(form == "separate")
                sizes = weights.num_slices, weights.max_rank
                gather = launch.gather_kernel(*sizes, 0, launch.PLAIN, row)
                kernels.append((found.split_k, found.shrink, found.expand, gather))
                plans.append(plan)
            (planes, *of_triton), (same_planes, *of_csgmv) = kernels
            assert planes == same_planes
            assert plans[0].tile_tokens == plans[1].tile_tokens
            for one, other in zip(of_triton, of_csgmv, strict=True):
                (row, rest), (other_row, other_rest) = split(one), split(other)
                assert rest == other_rest
                assert row["ROW"] == (plans[0].tile_tokens, 1, True, 1)
                assert other_row["ROW"]._asdict() == {
                    "SEGMENT": plans[1].run_tokens,
                    "GROUP": plans[1].tile_tokens // plans[1].run_tokens,
                    "BY_TOKEN": form == "separate",
                    "WIDTH": 1,
                }


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_a_copied_engine_launches_the_same_kernels(name, how):
    original = ENGINES[name]("cpu", tiles="rules", allow_tf32=True)
    weights, batch = small_weights(), small_batch()
    kernels = []
    for engine in (original, how(original)):
        plan = engine.prepare_batch(batch)
        found = launch.kernels_of(
            weights, launch.stacks_of(weights), plan, plan.num_tokens, None, engine._options
        )
        kernels.append([found.split_k, *map(split, (found.shrink, found.expand))])
    assert kernels[0] == kernels[1]


@pytest.mark.parametrize("name", ENGINES)
def test_an_entry_kernel_refuses_constants_that_it_does_not_take_and_misses_those_it_does(name):
    engine, generator = ENGINES[name]("cpu", tiles="rules"), random.Random(0)
    weights = random_layer(generator)
    plan = engine.prepare_batch(random_batch(generator, weights.num_slots))
    found, row = (
        launch.kernels_of(
            weights, launch.stacks_of(weights), plan, plan.num_tokens, None, engine._options
        ),
        plan.row_constants(False),
    )
    gather = launch.gather_kernel(1, 16, 0, launch.PLAIN, row)
    for kernel in (found.shrink, found.expand, gather):
        signature = {name for name in kernel.kernel.arg_names if name.isupper()}
        assert set(kernel.constants) == signature
        json.dumps(list(kernel.constants.values()))  # as Triton does where a compile hook is set
        SpecializedKernel(kernel.kernel, kernel.constants, 1)
        for missing in signature:
            rest = {name: value for name, value in kernel.constants.items() if name != missing}
            with pytest.raises(TypeError, match=missing):
                SpecializedKernel(kernel.kernel, rest, 1)
        with pytest.raises(TypeError, match="BLOCK_X"):
            SpecializedKernel(kernel.kernel, kernel.constants | {"BLOCK_X": 16}, 1)


def imports_of(path):
    """Yield the names that a file imports, anywhere in it, with their modules."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(
    "folder, others",
    [("triton", ["csgmv"]), ("csgmv", ["triton"]), ("sgmv", ["triton", "csgmv"])],
)
def test_an_engine_imports_nothing_of_the_other(folder, others):
    files = sorted((PACKAGE / folder).rglob("*.py"))
    imported = {(path.name, name) for path in files for name in imports_of(path)}
    assert any(name.startswith("lora_backends.sgmv.") for _, name in imported)
    for other in others:
        other = f"lora_backends.{other}"
        assert not {i for i in imported if f"{i[1]}.".startswith(f"{other}.")}


def test_kernels_use_nothing_of_triton_that_another_package_replaces():
    """SGLang replaces functions of the module `triton`, which kernels would then see."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or not any(
                "triton.jit" in ast.unparse(of) for of in node.decorator_list
            ):
                continue
            names = [n for line in node.body for n in ast.walk(line) if isinstance(n, ast.Name)]
            assert "triton" not in {name.id for name in names}, f"{path}: {node.name}"


ALONE = """
import importlib.util
import sys

# an editable install finds the folder that the copy lacks
sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]

import torch
import lora_backends
from helpers.small_layers import per_token, small_batch, small_weights
from lora_backends.{engine} import {backend}
from lora_backends.explain import Layer
from lora_backends.{engine}.explain import explain

assert lora_backends.__file__.startswith({copy!r}), lora_backends.__file__
assert importlib.util.find_spec("lora_backends.{other}") is None
backend, weights, batch = {backend}("cpu"), small_weights(bias=True), small_batch()
plan, x, base = backend.prepare_batch(batch), torch.randn(7, 10), torch.randn(7, 14)
expected = per_token(x, weights, batch, base)
for y in (
    backend.run_linear(x, weights, plan, base.clone()),
    backend.run_lora_b(backend.run_lora_a(x, weights, plan), weights, plan, base.clone()),
):
    assert torch.allclose(y.double(), expected, atol=1e-5)
token_ids = torch.tensor([0, 3, 9, 9, 1, 2, 5])
y = backend.run_embedding(token_ids, weights, plan, base.clone())
expected = per_token(torch.eye(10)[token_ids], weights, batch, base)
assert torch.allclose(y.double(), expected, atol=1e-5)
assert explain(batch, Layer(10, (6, 3, 5), ((3, 2, 0),) * 4, 3)).backend == "{engine}"
print("ran alone")
"""


@pytest.mark.parametrize("engine, other", [("triton", "csgmv"), ("csgmv", "triton")])
def test_an_engine_runs_where_the_folder_of_the_other_is_deleted(engine, other, tmp_path):
    copied = tmp_path / "lora_backends"
    shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(copied / other)
    names = {"engine": engine, "backend": ENGINES[engine].__name__, "other": other}
    code = tmp_path / "alone.py"
    code.write_text(ALONE.format(copy=str(tmp_path), **names))
    helpers = tmp_path / "helpers"
    helpers.mkdir()
    shutil.copy(Path(__file__).parent.parent / "helpers" / "small_layers.py", helpers)
    printed = run_interpreted(str(code), PYTHONPATH=str(tmp_path))
    assert printed == "ran alone\n"
