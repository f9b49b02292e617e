"""Makes one random call of an engine, and judges its result, its gradients or its refusal."""

import itertools
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lora_backends import LoRABackendError, LoRABatch, get_backend
from lora_backends.operations import Input
from lora_backends.testing import LoRACase, oracles
from lora_backends.testing.cases.inputs import bits

from ..running import Ran, RunCase, ending_hangs, fault_of_message, untyped
from .cases import COUNTS, FLOATS, LENGTHS, SLOT_VALUES, Call, is_plain
from .experts import check_close, run_experts
from .gradients import Backward

SHARES = ("torch_ref", "numba_cpu") * 9 + ("triton", "csgmv")
INTERPRETED = ("triton", "csgmv")


@contextmanager
def opened(seed: int, shares: Sequence[str] = SHARES) -> Iterator[RunCase]:
    """Yield a function that makes one call; an engine that does not run here is an error."""
    backends = {name: get_backend(name, "cpu") for name in dict.fromkeys(shares)}
    if "numba_cpu" in backends:
        _compile(backends["numba_cpu"])

    def run(number: int) -> Ran:
        backend = backends[shares[number % len(shares)]]
        ran = _run(backend, random.Random(f"{seed}/{number}"))
        return ran._replace(outcome=f"{backend.name}: {ran.outcome}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield run


def _compile(backend: Any) -> None:
    """Compile what the calls need, which takes minutes where nothing is kept on disk."""
    for dtype, base in itertools.product(FLOATS, FLOATS):
        case = LoRACase((0,), ((1,),), 1, 1, (1,), ((1.0,),), dtype, base)
        inputs = case.build()
        plan = backend.prepare_batch(inputs.batch)
        backend.run_linear(inputs.x, inputs.weights, plan, inputs.new_view())


def _run(backend: Any, draw: random.Random) -> Ran:
    kind = draw.random()
    if kind < 0.06:
        return _make_batch(draw)
    small = backend.name in INTERPRETED
    if kind < 0.16:
        return run_experts(backend, draw, small)
    return run_dense(Call(backend, draw, small))


def run_dense(call: Call) -> Ran:
    """Make one call of an operation of a dense layer, and judge it."""
    backward = Backward(call)
    steps = [call.operation.name, *call.steps, *backward.steps, repr(call.case)]
    written_to = {t.untyped_storage().data_ptr() for t in [call.base] if is_plain(t)}
    memory = Memory(call.tensors())
    try:
        with ending_hangs(), torch.set_grad_enabled(call.grad):
            plan = call.plan
            if plan is None:
                batch = call.batch if call.planned is None else call.planned
                plan = call.backend.prepare_batch(batch, out=call.out, capacity=call.capacity)
            run = getattr(call.backend, call.operation.name)
            base = () if call.operation.result == "h" else (call.base,)
            y = run(call.first, call.weights, plan, *base)
            backward.run(y, plan)
    except LoRABackendError as error:
        fault = memory.fault() or fault_of_message(str(error))
        if not call.steps:
            fault = f"a valid call is refused: {error}"
        return Ran(type(error).__name__, fault, steps)
    except BaseException as error:
        return untyped(error, steps)
    try:
        fault = memory.fault(except_for=written_to)
        if call.guard is not None and not fault:
            call.guard.assert_untouched()
        _check(call, y, memory)
        rows = _with_rows_behind(call.planned or call.batch, y.shape[-2])
        backward.check(rows, memory.before, y)
    except AssertionError as error:
        fault = f"{fault or ''} {error}"
    except Exception as error:  # the oracle has no answer to what was accepted
        fault = f"accepted, but {type(error).__name__}: {error}"
    return Ran(f"{backward.outcome}right" if not fault else "wrong", fault, steps)


class Memory:
    """The values of tensors before a call, and of the memory that they are views of."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._values = [(t, t.detach().clone()) for t in tensors if is_plain(t)]
        owners = {t.untyped_storage().data_ptr(): t for t, _ in self._values}
        self._bytes = [(t, _memory(t), _memory(t).clone()) for t in owners.values()]

    def before(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values that a tensor had."""
        return next(values for known, values in self._values if known is tensor)

    def fault(self, except_for: set[int] = frozenset()) -> str | None:  # type: ignore[assignment]
        """Return what has been written to."""
        for tensor, now, before in self._bytes:
            if now.data_ptr() not in except_for and not torch.equal(now, before):
                return f"the memory of {list(tensor.shape)} {tensor.dtype} was written to"
        return None


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _check(call: Call, y: torch.Tensor, memory: Memory) -> None:
    """Compare a result with float64; raise AssertionError."""
    weights, base = call.weights, call.base
    batch = _with_rows_behind(call.planned or call.batch, y.shape[-2])
    first = memory.before(call.first)
    narrow = call.backend.narrow_intermediate
    middle = weights.dtype if narrow else torch.float32
    if call.operation.result == "h":
        h = oracles.expected_shrink(first, weights, batch)
        beyond = ~oracles.rank_mask(weights, batch.token_slots).permute(1, 0, 2)
        parts = (part.masked_fill(beyond, 0) for part in (h.value, h.bound))  # for an x with NaN
        check_close(y, oracles.Expected(*parts))
        return
    before = None if base is None else memory.before(base)
    assert base is None or y is base, "base_output was given, and another tensor returned"
    if call.operation.input is Input.H:
        zero = torch.zeros(first.shape, dtype=torch.float64)
        h = oracles.Expected(first.double(), zero)
        dtype = weights.dtype if base is None else base.dtype
        expected = oracles.expected_expand(h, weights, batch, before, dtype)
        if first.dtype != weights.dtype == torch.float64:  # an h of float32 is summed in float32
            expected.bound.add_(1e-6 * (1 + expected.value.abs()) * (expected.bound > 0))
    elif call.operation.input is Input.TOKEN_IDS:
        expected = oracles.expected_embedding(first, weights, batch, before, intermediate=middle)
    else:
        expected = oracles.expected_linear(first, weights, batch, before, intermediate=middle)
    check_close(y, expected)
    if before is not None:  # rows without an adapter keep their bits, -0.0 among them
        kept = batch.token_slots == -1
        assert torch.equal(bits(y[kept]), bits(before[kept])), "a row without adapter changed"


def _with_rows_behind(batch: LoRABatch, rows: int) -> LoRABatch:
    """Return a batch whose last tokens, up to `rows`, have no adapter."""
    behind = rows - batch.num_tokens
    if behind <= 0:
        return batch
    scales = batch.token_scales
    if scales is not None:
        scales = torch.cat([scales, torch.ones(behind)])
    return LoRABatch([*batch.token_slots.tolist(), *[-1] * behind], batch.num_slots, scales)


def _make_batch(draw: random.Random) -> Ran:
    """Make a batch of odd values; what is accepted holds them."""
    slots, count = draw.choice(SLOT_VALUES), draw.choice(COUNTS)
    lengths = draw.choice([None, None, *LENGTHS])
    steps = ["LoRABatch", repr(slots)[:80], repr(lengths)[:80], type(count).__name__]
    try:
        with ending_hangs():
            if lengths is None:
                batch = LoRABatch(slots, count)
                wanted = _plain(slots)
            else:
                batch = LoRABatch.from_sequences(slots, lengths, count)
                pairs = zip(_plain(slots), _plain(lengths), strict=True)
                wanted = [slot for slot, length in pairs for _ in range(int(length))]
    except LoRABackendError as error:
        return Ran(f"batch: {type(error).__name__}", fault_of_message(str(error)), steps)
    except BaseException as error:
        return untyped(error, steps)
    same = batch.token_slots.tolist() == _whole(wanted)
    return Ran("batch: made", None if same else f"{batch} of {wanted}", steps)


def _whole(values: Any) -> Any:
    """Return slots, one or several per token, as the ints that they are."""
    if not isinstance(values, list):
        return int(values)
    return [_whole(v[0] if isinstance(v, list) and len(v) == 1 else v) for v in values]


def _plain(values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        return values.resolve_neg().tolist()
    return values.tolist() if hasattr(values, "tolist") else list(values)
