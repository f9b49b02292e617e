"""A stateful machine: adapters come and go in a pool while plans are made, refilled and run.

The model is a dictionary of float64 deltas, one per slot and layer; the backend sees tensors that
are rewritten in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from lora_backends.backend import LoRABackend
from lora_backends.batch import NO_ADAPTER, LoRABatch
from lora_backends.features import CAPACITY, TOKEN_SCALES
from lora_backends.testing.assertions import assert_close
from lora_backends.testing.cases.inputs import LoRAInputs
from lora_backends.testing.oracles import Expected
from lora_backends.testing.properties.runs import expected, linear
from lora_backends.weights import LoRAWeights

NUM_SLOTS = 3
MAX_RANK = 4
LAYERS = ((7, (6, 3), True), (16, (17,), False))  # in_features, output_slices, bias


@dataclass
class Pool:
    """The slots of two layers on the device, and a dictionary of their adapters."""

    dtype: torch.dtype
    device: torch.device
    layers: list[LoRAWeights] = field(default_factory=list)
    deltas: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # (slot, layer)
    biases: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for in_features, slices, bias in LAYERS:
            shape = (NUM_SLOTS, len(slices), MAX_RANK, in_features)
            self.layers.append(
                LoRAWeights(
                    lora_a=self._nan(*shape),
                    lora_b=self._nan(NUM_SLOTS, sum(slices), MAX_RANK),
                    ranks=torch.zeros(shape[:2], dtype=torch.int32, device=self.device),
                    scalings=torch.zeros(shape[:2], device=self.device),
                    output_slices=slices,
                    bias=self._nan(NUM_SLOTS, sum(slices)).zero_() if bias else None,
                )
            )

    def _nan(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)

    def load(self, slot: int, rank: int, scaling: float, seed: int) -> None:
        """Write an adapter into a slot of every layer, over the old values."""
        self.evict(slot)
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cpu").to(self.dtype)

        for index, weights in enumerate(self.layers):
            delta = torch.zeros(
                weights.out_features, weights.in_features, dtype=torch.float64, device="cpu"
            )
            for s in range(weights.num_slices):
                slice_rank = max(0, rank - s)  # unequal, and 0 in a later slice of rank 1
                cols = slice(weights.slice_offsets[s], weights.slice_offsets[s + 1])
                a = drawn(slice_rank, weights.in_features)
                b = drawn(cols.stop - cols.start, slice_rank)
                weights.lora_a[slot, s, :slice_rank] = a.to(self.device)
                weights.lora_b[slot, cols, :slice_rank] = b.to(self.device)
                weights.ranks[slot, s], weights.scalings[slot, s] = slice_rank, scaling
                delta[cols] = scaling * b.double() @ a.double()
            # in float64 from the rounded A and B, so that only the backend's own error counts
            self.deltas[slot, index] = delta
            if weights.bias is not None:
                bias = drawn(weights.out_features)
                weights.bias[slot] = bias.to(self.device)
                self.biases[slot, index] = bias.double()

    def evict(self, slot: int) -> None:
        """Free a slot of every layer: rank 0, no bias, and garbage in its matrices."""
        for index, weights in enumerate(self.layers):
            weights.lora_a[slot] = torch.nan
            weights.lora_b[slot] = torch.nan
            weights.ranks[slot], weights.scalings[slot] = 0, 0.0
            if weights.bias is not None:
                # a bias acts at rank 0 too, and a freed slot must add nothing
                weights.bias[slot] = 0.0
            self.deltas.pop((slot, index), None)
            self.biases.pop((slot, index), None)

    def wanted(self, inputs: LoRAInputs, layer: int) -> torch.Tensor:
        """Return y in float64, from the dictionary alone."""
        assert inputs.base is not None
        y, scales = inputs.base.cpu().double(), inputs.batch.token_scales
        x = inputs.x.cpu().double()
        for token, slot in enumerate(inputs.slots):
            if (slot, layer) in self.deltas:
                factor = 1.0 if scales is None else float(scales[token])
                y[token] += factor * (self.deltas[slot, layer] @ x[token])
            if (slot, layer) in self.biases:
                y[token] += self.biases[slot, layer]
        return y


@dataclass
class Flight:
    """A plan and its current batch."""

    plan: Any
    slots: list[int]
    scales: list[float] | None = None
    capacity: int = 0  # tokens that a refill may have

    @property
    def batch(self) -> LoRABatch:
        """The batch."""
        return LoRABatch(self.slots, NUM_SLOTS, self.scales)


class Observer(Protocol):
    """Follows every run of the machine, and the steps of failing runs."""

    def begin(self) -> None:
        """Note that a run begins."""

    def failed(self, error: BaseException, size: int, case: str) -> None:
        """Note that a run failed after `size` steps; `case` lists them."""


class PoolMachine(RuleBasedStateMachine):
    """Load, replace and evict adapters; prepare and refill plans; run them, interleaved."""

    backend: LoRABackend
    observer: Observer

    def __init__(self) -> None:
        super().__init__()
        self.observer.begin()
        self.steps: list[str] = []
        self.flights: dict[int, Flight] = {}
        dtypes = self.backend.dtypes
        # the widest common dtype gives the tightest bound
        dtype = torch.float32 if torch.float32 in dtypes else dtypes[0]
        self.pool = Pool(dtype, self.backend.device)

    @contextmanager
    def _step(self, text: str) -> Iterator[None]:
        self.steps.append(text)
        try:
            yield
        except KeyboardInterrupt:
            raise  # of the user
        except BaseException as error:  # as in the suite
            self.observer.failed(error, len(self.steps), "\n".join(self.steps))
            raise RuntimeError("the step fails") from error

    @rule(
        slot=st.integers(0, NUM_SLOTS - 1),
        rank=st.sampled_from((MAX_RANK, 1)),
        scaling=st.sampled_from((1.0, 2.0, -0.5)),
        seed=st.integers(0, 99),
    )
    def load(self, slot: int, rank: int, scaling: float, seed: int) -> None:
        """Load an adapter into a slot, or replace the one there."""
        with self._step(f"load slot {slot}: rank {rank}, scaling {scaling}, seed {seed}"):
            self.pool.load(slot, rank, scaling, seed)

    @rule(slot=st.integers(0, NUM_SLOTS - 1))
    def evict(self, slot: int) -> None:
        """Free a slot; plans in flight may still name it."""
        with self._step(f"evict slot {slot}"):
            self.pool.evict(slot)

    @rule(
        name=st.integers(0, 1),
        slots=st.lists(st.integers(NO_ADAPTER, NUM_SLOTS - 1), min_size=0, max_size=20),
        room=st.sampled_from((0, 0, 3, 20)),
    )
    def prepare(self, name: int, slots: list[int], room: int = 0) -> None:
        """Make plan 0 or 1 anew, of any size, with room for more tokens where there is any."""
        room = room if CAPACITY in self.backend.features else 0
        with self._step(f"plan {name} = prepare {slots}" + f", room for {room} more" * (room > 0)):
            options = {"capacity": len(slots) + room} if room else {}
            plan = self.backend.prepare_batch(LoRABatch(slots, NUM_SLOTS), **options)
            self.flights[name] = Flight(plan, slots, capacity=len(slots) + room)

    @initialize()
    def begin(self) -> None:
        """Make both plans, so that everything can be run from the first step on."""
        self.prepare(0, [0, 1, 2])
        self.prepare(1, [2, 0, NO_ADAPTER, 1])

    @rule(name=st.integers(0, 1), data=st.data())
    def refill(self, name: int, data: st.DataObject) -> None:
        """Refill a plan in place, with an equal number of tokens or, where it has room, any number.

        Where the backend has token_scales, a batch may bring them.
        """
        flight = self.flights[name]
        least = most = len(flight.slots)
        # without room a refill keeps the number of tokens
        if CAPACITY in self.backend.features:
            least, most = 0, flight.capacity
        one = st.integers(NO_ADAPTER, NUM_SLOTS - 1)
        flight.slots = data.draw(st.lists(one, min_size=least, max_size=most))
        flight.scales = None
        if TOKEN_SCALES in self.backend.features and data.draw(st.booleans()):
            flight.scales = [(0.5, 1.0, -2.0)[token % 3] for token in range(len(flight.slots))]
        scaled = "" if flight.scales is None else ", scales 0.5, 1, -2 in turn"
        with self._step(f"refill plan {name}: {flight.slots}{scaled}"):
            if self.backend.prepare_batch(flight.batch, out=flight.plan) is not flight.plan:
                raise AssertionError("prepare_batch(batch, out=plan) returned another plan")

    @rule(name=st.integers(0, 1), seed=st.integers(0, 9))
    def run(self, name: int, seed: int) -> None:
        """Run every layer on one plan and compare with the dictionary."""
        with self._step(f"run plan {name}, seed {seed}"):
            for layer in range(len(LAYERS)):
                self._check_run(self.flights[name], layer, seed)

    def _check_run(self, flight: Flight, layer: int, seed: int) -> None:
        inputs = _layer_inputs(self.pool.layers[layer], flight.batch, seed)
        bound = expected(self.backend, inputs).bound
        y = linear(self.backend, inputs, flight.plan)
        slack = 1e-12 * (1 + bound)  # the dictionary's own sums, in another order
        wanted = self.pool.wanted(inputs, layer)
        assert_close(y, Expected(wanted, bound + slack * (bound > 0)), inputs)


def _layer_inputs(weights: LoRAWeights, batch: LoRABatch, seed: int) -> LoRAInputs:
    """Return random x and base_output for one layer of the pool."""
    generator = torch.Generator().manual_seed(seed)
    tokens = batch.num_tokens
    x = torch.randn(tokens, weights.in_features, generator=generator, device="cpu")
    base = torch.randn(tokens, weights.out_features, generator=generator, device="cpu")
    return LoRAInputs(
        x=x.to(weights.device, weights.dtype),
        token_ids=torch.zeros(tokens, dtype=torch.int64, device=weights.device),
        weights=weights,
        batch=batch,
        base=base.to(weights.device, weights.dtype),
        x_pad=0,
        base_pad=1,
    )


def machine_for(backend: LoRABackend, observer: Observer) -> type[PoolMachine]:
    """Return the machine's class for one backend; `observer` follows its runs."""
    return type("PoolMachine", (PoolMachine,), {"backend": backend, "observer": observer})
