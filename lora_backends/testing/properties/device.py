"""Tensors beyond 2^31 elements, and captured CUDA graphs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import torch

from lora_backends.backend import LoRABackend
from lora_backends.errors import InvalidInputError
from lora_backends.features import CAPACITY
from lora_backends.operations import BY_NAME
from lora_backends.testing.assertions import assert_close, assert_same_bits
from lora_backends.testing.cases.dense import LoRACase
from lora_backends.testing.cases.inputs import LoRAInputs, same_bits
from lora_backends.testing.properties.core import (
    ANY_LAYER,
    EXACT,
    NONE,
    cuda_graphs,
    declares,
    either_prop,
    no_interpreter,
    prop,
)
from lora_backends.testing.properties.plans import (
    composed,
    compositions,
    device_tensors,
    rotate_slots,
)
from lora_backends.testing.properties.runs import (
    assert_agree,
    assert_right,
    expected,
    expected_of,
    linear,
    run,
)

HALF = 1 << 31
"""Elements between a row and the one that an offset wrapped in int32 confuses with it."""
ROOM = 1 << 16
"""Elements for the rows themselves."""


def room_for_large_tensors(backend: LoRABackend) -> str | None:
    """Require memory for 2^32 elements of 2 bytes: only mapped on the CPU, real on a device."""
    needed = 4 * HALF
    if backend.device.type == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        lacks = total < needed + (2 << 30)
    elif backend.device.type == "cuda":
        lacks = torch.cuda.mem_get_info(backend.device)[0] < needed + (2 << 30)
    else:
        return f"not tried on devices of type {backend.device.type}"
    if lacks:
        return f"{backend.device} has less than {needed + (2 << 30) >> 30} GiB of memory"
    if torch.float16 not in backend.dtypes and torch.bfloat16 not in backend.dtypes:
        return "the backend supports no dtype of 16 bits"
    return None


@prop(
    "Offsets beyond 2^31 elements do not wrap.",
    agreement=EXACT,
    examples=4,
    values="integer",
    requires=(no_interpreter, room_for_large_tensors),
    num_slices=1,
    features=NONE,
)
def large_offsets_do_not_wrap(backend: LoRABackend, case: LoRACase) -> None:
    """lora_a, lora_b, x or base_output has a stride of 2^30 elements or more.

    Where the offset wraps, the memory holds NaN, and belongs to the same storage. run_linear, two
    steps, and where it takes the tensor run_embedding.
    """
    dtype = torch.float16 if torch.float16 in backend.dtypes else torch.bfloat16
    case = dataclasses.replace(
        case,
        slots=(1, 0, 1),
        ranks=((3,), (4,)),
        scalings=((1.0,), (0.5,)),
        max_rank=4,
        dtype=dtype,
        base=dtype,
    )
    small = case.build(backend.device)
    wanted = expected(backend, small)
    # on a CPU only the touched pages take memory
    storage = torch.empty(2 * (HALF + ROOM), dtype=dtype, device=backend.device)
    embedded = expected_of(backend, BY_NAME["run_embedding"], small, small.x)
    for far, inputs, base in _stretched(small, storage):
        plan, start = backend.prepare_batch(inputs.batch), base.clone()
        for name in ("run_linear", "run_lora_b", "run_embedding"):
            if name == "run_lora_b":
                h = backend.run_lora_a(inputs.x, inputs.weights, plan)
            else:
                h = inputs.x
            y = run(backend, BY_NAME[name], inputs, plan, base.copy_(start), h)
            try:
                assert_close(y, embedded if name == "run_embedding" else wanted, inputs)
            except AssertionError as error:
                raise AssertionError(
                    f"{far} is stretched beyond 2^31 elements, {name}: {error}"
                ) from None


def _stretched(
    small: LoRAInputs, storage: torch.Tensor
) -> Iterator[tuple[str, LoRAInputs, torch.Tensor]]:
    """Yield (which tensor is stretched, inputs, base_output); the storage serves one at a time."""
    weights = small.weights
    assert small.base is not None
    a = _spread(weights.lora_a, storage)
    yield "lora_a", small.replace(weights=dataclasses.replace(weights, lora_a=a)), small.base + 0
    b = _spread(weights.lora_b, storage)
    yield "lora_b", small.replace(weights=dataclasses.replace(weights, lora_b=b)), small.base + 0
    x = _spread(small.x, storage)
    yield "x", dataclasses.replace(small, x=x), small.base + 0
    yield "base_output", small, _spread(small.base, storage)


def _spread(tensor: torch.Tensor, storage: torch.Tensor) -> torch.Tensor:
    """Return a copy whose last row along the first axis begins 2^31 elements after the first.

    The first row lies where a wrapped offset of the last row leads to ROOM.
    """
    storage[: 2 * ROOM] = torch.nan
    inner = tensor[0].contiguous()
    strides = (HALF // (tensor.shape[0] - 1), *inner.stride())
    return storage.as_strided(tensor.shape, strides, HALF + ROOM).copy_(tensor)


def _capture(
    backend: LoRABackend, inputs: LoRAInputs, plan: object
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
    """Return (graph, x, y): a captured run_linear that reads x and adds to y in place."""
    assert inputs.base is not None
    x, y = inputs.x.clone(), inputs.base.clone()
    # kernels compile on their first call, which a capture forbids
    warm = torch.cuda.Stream(backend.device)  # type: ignore[no-untyped-call]
    warm.wait_stream(torch.cuda.current_stream(backend.device))
    with torch.cuda.stream(warm):
        backend.run_linear(x, inputs.weights, plan, y.clone())
    torch.cuda.current_stream(backend.device).wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.run_linear(x, inputs.weights, plan, y)
    return graph, x, y


def _replayed(graph: torch.cuda.CUDAGraph, y: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return y after a graph that adds to `base` in place."""
    y.copy_(base)
    graph.replay()
    torch.cuda.synchronize(y.device)
    return y.clone()


@either_prop(
    "A captured graph follows its refilled plan.",
    examples=20,
    base=True,
    requires=(cuda_graphs,),
    min_tokens=1,
)
def graph_replay_equals_eager(backend: LoRABackend, case: LoRACase) -> None:
    """Captured once, replayed over changing compositions and x; weights are rewritten too.

    A graph keeps the tile sizes of the batch it was captured on, so only a batch-invariant backend
    gives the bits of another plan. Two replays are equal wherever two runs are.
    """
    inputs = case.build(backend.device)
    assert inputs.base is not None
    quiet = inputs.replace(slots=compositions(case)[1])
    plan = backend.prepare_batch(quiet.batch)
    addresses = device_tensors(plan)
    graph, x, y = _capture(backend, quiet, plan)
    for turn, slots in enumerate(compositions(case)):
        turned = composed(inputs, slots, case.seed + turn)
        backend.prepare_batch(turned.batch, out=plan)
        if device_tensors(plan) != addresses:
            raise AssertionError("a refill moved tensors of the plan that the graph reads")
        if turn == 3:  # ranks and scalings change in place, among all else
            rotate_slots(inputs)
        x.copy_(turned.x)
        first = _replayed(graph, y, inputs.base)
        if backend.deterministic:
            assert_same_bits(_replayed(graph, y, inputs.base), first, turned)
        wanted = linear(backend, turned)
        bound = 2 * expected(backend, turned).bound
        claimed = backend.deterministic and backend.batch_invariant
        assert_agree(first, wanted, bound, turned, exact=case.is_integer, claimed=claimed)


@either_prop(
    "A graph captured on a plan with room follows refills of no more tokens than it has rows.",
    examples=15,
    base=True,
    requires=(cuda_graphs, declares(CAPACITY)),
    features=ANY_LAYER,
    min_tokens=2,
)
def graph_replay_follows_a_plan_with_room(backend: LoRABackend, case: LoRACase) -> None:
    """Rows after the batch keep their bits; scales come and go; ranks and scalings change.

    Scales that a graph captured without any cannot follow are refused.
    """
    inputs = case.build(backend.device)
    assert inputs.base is not None
    tokens = case.num_tokens
    captured = inputs.scaled(None) if case.seed % 4 == 0 else inputs
    plan = backend.prepare_batch(captured.batch, capacity=tokens + case.seed % 9)
    graph, x, y = _capture(backend, captured, plan)
    for turn, count in enumerate((tokens // 2, tokens, 0, 1, tokens)):
        if turn == 2:
            rotate_slots(inputs)
        part = composed(inputs, compositions(case)[turn], case.seed + turn).select(range(count))
        if turn % 2:
            part = part.scaled(None)
        try:
            backend.prepare_batch(part.batch, out=plan)
        except InvalidInputError:
            if captured.batch.token_scales is not None or part.batch.token_scales is None:
                raise
            continue
        # rows after the batch must not be read
        x.fill_(float("nan"))
        x[:count] = part.x
        y.copy_(inputs.base)
        graph.replay()
        torch.cuda.synchronize(backend.device)
        assert_right(y[:count], expected(backend, part), part, case.is_integer)
        if not same_bits(y[count:], inputs.base[count:]):
            raise AssertionError(f"a replay of {count} tokens changed the rows after them")
