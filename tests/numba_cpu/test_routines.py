"""Which routines are compiled for a call: what it needs, and no more."""

import ctypes
import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import permutations
from types import SimpleNamespace

import pytest
import torch
from numba import cfunc, types

from lora_backends import ExpertWeights, LoRABatch, LoRAWeights
from lora_backends.numba_cpu import NumbaCPUBackend, launch, needs, routines
from lora_backends.numba_cpu.config import LONG_SEGMENT
from lora_backends.numba_cpu.kernels import (
    addressing,
    arguments,
    bias,
    dense,
    eight_bit,
    eight_bit_expand,
    eight_bit_shrink,
    scales,
    shares,
)
from lora_backends.numba_cpu.machine import compiling, plain, records
from lora_backends.numba_cpu.routing import job_of
from lora_backends.torch_ref import TorchRefBackend


def plan_of(*lengths):
    """Return a plan of one run of tokens per slot."""
    slots = [slot for slot, length in enumerate(lengths) for _ in range(length)]
    return NumbaCPUBackend().prepare_batch(LoRABatch(slots, len(lengths)))


@pytest.fixture
def asked(monkeypatch):
    """Return the routines that are asked for, by name; none is compiled."""
    names = []
    monkeypatch.setattr(
        routines, "address_of", lambda make, *dtypes: names.append(make.__name__) or 1
    )
    return names


WANTED = {
    needs.SHRINK: ["shrink_short"],
    needs.SHRINK | needs.LONG: ["shrink_short", "shrink_long", "add_block"],
    needs.GATHER: ["gather"],
    needs.EXPAND: ["expand_short"],
    needs.EXPAND | needs.MULTIPLIED: ["expand_multiplied"],
    needs.EXPAND | needs.RAGGED: ["expand_short", "expand_column"],
    needs.EXPAND | needs.LONG: ["expand_short", "expand_long", "add_stored"],
}


@pytest.mark.parametrize("flags", WANTED)
def test_a_call_compiles_what_it_needs(asked, flags):
    table = routines.table_of.__wrapped__(torch.float32, torch.bfloat16, flags)
    assert asked == WANTED[flags]
    found = dict(zip(dense.Routines._fields, table.entries.tolist(), strict=True))
    assert {name for name, address in found.items() if address} == set(asked)


@pytest.mark.parametrize("pairs", [False, True])
def test_eight_bit_calls_compile_the_way_through_registers_or_the_other(asked, monkeypatch, pairs):
    monkeypatch.setattr(routines, "has_bfloat16", lambda: pairs)
    flags, table = needs.SHRINK | needs.EXPAND, routines.eight_bit_table.__wrapped__
    for dtype_x in (torch.bfloat16, torch.float32):
        table(dtype_x, torch.bfloat16, flags | needs.IN_REGISTERS | needs.LONG)
        dots = pairs and dtype_x is torch.bfloat16
        shrink = (
            ["shrink_dots"] if dots else ["copy_x", "shrink_short", "shrink_panel", "add_block"]
        )
        assert asked == [*shrink, "expand_int8"]
        asked.clear()
    table(torch.bfloat16, torch.bfloat16, flags)
    assert asked == ["shrink_panel", "add_block", "expand_stored", "add_stored", "add_stored_one"]


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.bfloat16, dense.Routines), (torch.int8, eight_bit.EightBitRoutines)],
    ids=str,
)
def test_warmup_compiles_every_routine(asked, monkeypatch, dtype, kind):
    tables = []
    of = {name: getattr(routines, name).__wrapped__ for name in ("table_of", "eight_bit_table")}
    monkeypatch.setattr(launch, "grouping_kernel", lambda: None)
    monkeypatch.setattr(launch, "kernel_for", lambda *args: tables.append(of["table_of"](*args)))
    monkeypatch.setattr(routines, "has_bfloat16", lambda: True)
    monkeypatch.setattr(
        launch, "eight_bit_kernel", lambda *args: tables.append(of["eight_bit_table"](*args))
    )
    NumbaCPUBackend().warmup([dtype])
    ready = sum(table.entries for table in tables)
    assert dict(zip(kind._fields, ready > 0, strict=True)) == dict.fromkeys(kind._fields, True)


def test_a_plan_knows_whether_a_segment_is_long():
    assert plan_of(LONG_SEGMENT - 1, LONG_SEGMENT - 1).needs == 0
    assert plan_of(2, LONG_SEGMENT).needs == needs.LONG
    assert NumbaCPUBackend().prepare_batch(LoRABatch([-1], 1)).needs == 0
    plan = plan_of(LONG_SEGMENT)
    NumbaCPUBackend().prepare_batch(LoRABatch([0], 1), out=plan)
    assert plan.needs == 0


def test_a_layer_knows_its_ragged_slices_and_factors():
    def flags(widths, **options):
        out = sum(widths)
        rest = {name: torch.ones(1, out) for name in options}
        weights = LoRAWeights(
            torch.ones(1, len(widths), 1, 3),
            torch.ones(1, out, 1),
            torch.ones(1, len(widths), dtype=torch.int32),
            torch.ones(1, len(widths)),
            widths,
            **rest,
        )
        return NumbaCPUBackend()._layers.locate(weights).needs

    assert flags((32, 16)) == 0
    assert flags((24, 8)) == needs.RAGGED  # no slice is whole, though their sum is
    assert flags((16,), bias=True, output_scales=True) == needs.BIAS | needs.MULTIPLIED


def two_experts(of_a=2):
    """Return weights of two experts in one slot; with `of_a=1` they share A."""
    return ExpertWeights(
        lora_a=torch.randn(1, of_a, 1, 4, 20),
        lora_b=torch.randn(1, 2, 16, 4),
        ranks=torch.full((1, 2, 1), 4, dtype=torch.int32),
        scalings=torch.ones(1, 2, 1),
        output_slices=(16,),
        num_experts=2,
    )


def test_dead_pairs_do_not_hide_a_long_segment_of_tokens():
    """Where experts share A, tokens are shrunk by the plan's segments, however few pairs live."""
    tokens = LONG_SEGMENT + 1
    weights = two_experts(of_a=1)
    x, ids = torch.randn(tokens, 20), torch.full((tokens, 1), -1)
    ids[3] = 1
    results = []
    for backend in (NumbaCPUBackend(), TorchRefBackend()):
        plan = backend.prepare_batch(LoRABatch([0] * tokens, 1))
        routing = backend.prepare_experts(plan, ids, torch.ones(tokens, 1), 2)
        if isinstance(backend, NumbaCPUBackend):
            located = backend._layers.locate(weights)
            assert job_of(routing, located, "tokens", None).needs == needs.LONG
        results.append(backend.run_experts(x, weights, routing))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_rows_and_fields_of_plain_python_are_those_of_kernels():
    table = torch.tensor([7, 1, 2, 5, 0], dtype=torch.int64)
    at = table.data_ptr()
    assert plain.rows((100, 10, at), 1, (0, 0)) == (110, 120)
    assert plain.fields(arguments.Segment, at + 8) == (1, 2, 5)
    assert plain.fields(arguments.SumFactors, at) == (7, 1, (2, 5, 0))


def test_a_kernel_keeps_its_table_when_another_thread_replaces_it_in_the_cache(asked, monkeypatch):
    monkeypatch.setattr(launch, "_dense_kernel", lambda: SimpleNamespace(address=1))
    made = []

    def table_of(*args):
        table = routines.table_of.__wrapped__(*args)
        made.append(weakref.ref(table))
        return table

    monkeypatch.setattr(launch, "table_of", table_of)
    kernel = launch.kernel_for.__wrapped__(torch.float32, torch.float32, needs.SHRINK)
    gc.collect()
    assert made[0]().address == kernel.routines


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_compiling_pauses_garbage_collection_and_leaves_it_as_it_was(monkeypatch, enabled, fails):
    meanwhile = []

    def compile_it(run):
        meanwhile.append(gc.isenabled())
        if fails:
            raise RuntimeError("no folder")

    monkeypatch.setattr(compiling.config, "DISABLE_JIT", 0)
    monkeypatch.setattr(compiling, "cfunc", lambda *args, **options: compile_it)
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(RuntimeError) if fails else nullcontext():
            compiling.compiled(lambda: None)
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
    assert meanwhile == [False] * (2 if fails else 1)


@pytest.fixture
def no_cache(monkeypatch):
    monkeypatch.setattr(
        compiling, "cfunc", lambda signature, cache=False, **options: cfunc(signature, **options)
    )


def test_a_function_becomes_code_in_its_callers_alone(no_cache):
    @compiling.function
    def fib(count):
        low, high = 0, 1
        for _ in range(count):
            low, high = high, low + high
        return low

    def run(address):
        records.write_id(address, fib(records.read_id(address)))

    number = torch.tensor([10])
    routine = compiling.compiled(run)
    ctypes.CFUNCTYPE(None, ctypes.c_int64)(routine.address)(number.data_ptr())
    assert number.item() == 55
    (found,) = fib.overloads.values()
    assert found.library.get_pointer_to_function(found.fndesc.llvm_func_name) == 0
    passes = str(found.metadata["pipeline_times"])
    assert "native_lowering" in passes
    for name in ("inline_closure_likes", "reconstruct_ssa", "strip_phis", "nopython_rewrites"):
        assert name not in passes


@pytest.fixture
def functions(no_cache):
    """The functions of kernels, compiled for what the entry routines and 8-bit stacks need."""
    shrink, expand = eight_bit_shrink, eight_bit_expand
    makers = (shrink.copy_x, shrink.shrink_panel, expand.expand_stored, expand.expand_ragged)
    for make in (dense.entry, eight_bit.entry, *makers):
        make()
    modules = (shares, addressing, scales, dense, eight_bit, shrink, expand)
    found = {f for module in modules for f in vars(module).values() if hasattr(f, "overloads")}
    assert shares.units_of in found
    return found


def test_no_variable_holds_values_of_two_types(functions):
    # numba would unify an int64 and a float32 of one name to float64, which only biases use
    others = [f for f in functions if f.py_func.__module__ != bias.__name__]
    kinds = [o.type_annotation.typemap for f in others for o in f.overloads.values()]
    assert any(types.int64 in found.values() for found in kinds)
    assert not any(types.float64 in found.values() for found in kinds)


def test_no_function_is_compiled_for_a_literal_and_for_its_type(functions):
    twice = [
        (function.__name__, one, other)
        for function in functions
        for one, other in permutations(function.overloads, 2)
        if all(a == b or types.unliteral(a) == b for a, b in zip(one, other, strict=True))
    ]
    assert twice == []


def test_threads_that_need_a_routine_at_once_compile_it_once():
    made = []

    def make():
        made.append(1)
        time.sleep(0.05)
        return SimpleNamespace(address=7)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: routines.address_of(make), range(4))) == [7] * 4
    assert len(made) == 1


def test_a_call_of_experts_keeps_its_pairs_when_another_thread_groups_them_anew():
    weights = two_experts()
    backend = NumbaCPUBackend()
    plan = backend.prepare_batch(LoRABatch([0, 0], 1))
    routing = backend.prepare_experts(plan, torch.tensor([[0], [1]]), torch.ones(2, 1), 2)
    job = job_of(routing, backend._layers.locate(weights), "tokens", None)
    buffer = weakref.ref(routing.groups().buffer)
    backend.prepare_batch(LoRABatch([0], 1), out=plan)
    routing.groups()
    assert buffer() is job.buffer
