"""Cells of experts: one mixture layer with a batch, and the steps that a timing rotates over."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lora_backends.backend import LoRABackend
from lora_backends.batch import LoRABatch
from lora_backends.bench.cells import deal
from lora_backends.experts import ExpertWeights

ROTATED_BYTES = 104e6
"""Bytes that the steps of a timing touch together, so that they do not stay in a cache."""
FEWEST_STEPS, MOST_STEPS = 3, 48
STACK_BYTES = 30e9
"""Memory for stacks; steps beyond it use the stacks of earlier ones, with other experts."""
SINGLE_TOKENS = 256  # up to here every token is a request of its own
LAUNCHES = 2  # that the limit counts


@dataclass(frozen=True)
class ExpertCell:
    """One mixture layer and one batch: gate_up and down, routing included."""

    model: str  # name of the layer in tables
    hidden: int  # width of x, and of the result of down
    intermediate: int  # width of gate, of up, and of the input of down
    experts: int
    top_k: int  # experts per token, all different
    tokens: int
    adapters: int  # dealt round-robin over tokens, or from 1024 tokens on in one run each
    rank: int  # of all adapters
    num_a: int = 2  # matrices A of gate_up: one each for gate and up, or 1 for both
    shared_outer: bool = False  # gate_up has one A for all experts, and down one B
    skewed: bool = False  # experts drawn with a popularity that falls as 1 / i

    @property
    def token_slots(self) -> list[int]:
        """The slot of every token."""
        slots = deal(self.tokens, self.adapters, skewed=False)
        return slots if self.tokens <= SINGLE_TOKENS else sorted(slots)

    def key_bytes(self, itemsize: int) -> int:
        """Return the bytes of A and B that one expert of one slot has for itself."""
        outer = 0 if self.shared_outer else (self.num_a + 1) * self.hidden
        return itemsize * self.rank * (outer + 3 * self.intermediate)

    def slot_bytes(self, itemsize: int) -> int:
        """Return the bytes of one slot's A and B."""
        return self.experts * self.key_bytes(itemsize) + self.outer_bytes(itemsize)

    def outer_bytes(self, itemsize: int) -> int:
        """Return the bytes of A and B that all experts of one slot share."""
        rows = (self.num_a + 1) * self.hidden if self.shared_outer else 0
        return itemsize * self.rank * rows

    def bytes_moved(self, active_keys: float, itemsize: int) -> float:
        """Return the bytes that a step must move.

        A and B of the (slot, expert) pairs in use are read once, and so are x and the input of
        down; both results are read and written once per pair of a token and an expert.
        """
        pairs = self.tokens * self.top_k
        slots = min(self.adapters, self.tokens)
        rows = self.tokens * self.hidden + pairs * self.intermediate
        results = pairs * (2 * self.intermediate + self.hidden)
        weights = active_keys * self.key_bytes(itemsize) + slots * self.outer_bytes(itemsize)
        return weights + itemsize * (rows + 2 * results)

    def describe(self) -> dict[str, Any]:
        """Return the cell as a row of a result file."""
        return asdict(self)


@dataclass(eq=False)
class Step:
    """The arguments of one step: of the routing, of gate_up and of down."""

    topk_ids: torch.Tensor  # [tokens, top_k] int32
    topk_weights: torch.Tensor  # [tokens, top_k] float32
    gate_up: ExpertWeights
    down: ExpertWeights
    x: torch.Tensor  # [tokens, hidden]
    y13: torch.Tensor  # [tokens, top_k, 2 * intermediate], added to
    act: torch.Tensor  # [tokens * top_k, intermediate]
    y2: torch.Tensor  # [tokens, top_k, hidden], added to

    def active_keys(self, token_slots: list[int]) -> int:
        """Return how many different pairs of a slot and an expert the tokens use."""
        slots = torch.tensor(token_slots, device=self.topk_ids.device)
        keys = slots[:, None] * self.gate_up.num_experts + self.topk_ids
        return int(torch.unique(keys).numel())


def make_steps(
    cell: ExpertCell, device: torch.device | str, dtype: torch.dtype, fewest: int = FEWEST_STEPS
) -> list[Step]:
    """Return the steps that a timing rotates over, as many as touch `ROTATED_BYTES`."""
    size, pairs = dtype.itemsize, cell.tokens * cell.top_k
    count = max(fewest, rotated_steps(cell, size))
    stacks = max(1, min(count, int(STACK_BYTES / (cell.adapters * cell.slot_bytes(size)))))
    sites = [make_sites(cell, device, dtype) for _ in range(stacks)]
    like: dict[str, Any] = {"device": device, "dtype": dtype}
    popularity = torch.ones(cell.experts, device=device)
    if cell.skewed:
        popularity = 1 / torch.arange(1, cell.experts + 1, device=device)
    steps = []
    for index in range(count):
        ids = torch.multinomial(popularity.expand(cell.tokens, -1), cell.top_k)
        gate_up, down = sites[index % stacks]
        steps.append(
            Step(
                topk_ids=ids.int(),
                topk_weights=torch.rand(cell.tokens, cell.top_k, device=device),
                gate_up=gate_up,
                down=down,
                x=torch.randn(cell.tokens, cell.hidden, **like),
                y13=torch.zeros(cell.tokens, cell.top_k, 2 * cell.intermediate, **like),
                act=torch.randn(pairs, cell.intermediate, **like),
                y2=torch.zeros(cell.tokens, cell.top_k, cell.hidden, **like),
            )
        )
    return steps


def rotated_steps(cell: ExpertCell, itemsize: int) -> int:
    """Return how many steps touch `ROTATED_BYTES` together, or `MOST_STEPS`."""
    slots = min(cell.adapters, cell.tokens)
    missed = (1 - cell.top_k / cell.experts) ** (cell.tokens / slots)
    touched = cell.bytes_moved(slots * cell.experts * (1 - missed), itemsize)
    return min(MOST_STEPS, math.ceil(ROTATED_BYTES / touched))


def make_sites(
    cell: ExpertCell, device: torch.device | str, dtype: torch.dtype
) -> tuple[ExpertWeights, ExpertWeights]:
    """Return gate_up and down of one layer; h and the deltas are of order 1."""
    outer = 1 if cell.shared_outer else cell.experts

    def site(
        of_a: int, of_b: int, num_a: int, inputs: int, slices: tuple[int, ...]
    ) -> ExpertWeights:
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        a = torch.empty(cell.adapters, of_a, num_a, cell.rank, inputs, **like)
        b = torch.empty(cell.adapters, of_b, sum(slices), cell.rank, **like)
        table = (cell.adapters, cell.experts, num_a)
        return ExpertWeights(
            lora_a=a.normal_(0, 1 / math.sqrt(inputs)),
            lora_b=b.normal_(0, 1 / math.sqrt(cell.rank)),
            ranks=torch.full(table, cell.rank, dtype=torch.int32, device=device),
            scalings=torch.full(table, 0.5, device=device),
            output_slices=slices,
            num_experts=cell.experts,
        )

    width = cell.intermediate
    return (
        site(outer, cell.experts, cell.num_a, cell.hidden, (width, width)),
        site(cell.experts, outer, 1, width, (cell.hidden,)),
    )


class Steps:
    """Runs a backend on the steps of a cell, one routing in place for all of them."""

    def __init__(self, backend: LoRABackend, cell: ExpertCell, steps: list[Step]) -> None:
        self.backend, self.steps = backend, steps
        self.experts = cell.experts
        self.plan = backend.prepare_batch(LoRABatch(cell.token_slots, cell.adapters))
        self.routing: Any = None

    def route(self, index: int) -> None:
        """Make the routing of a step."""
        step = self.steps[index]
        self.routing = self.backend.prepare_experts(
            self.plan, step.topk_ids, step.topk_weights, self.experts, out=self.routing
        )

    def run(self, index: int) -> None:
        """Make the routing and run both sites."""
        step = self.steps[index]
        self.route(index)
        self.backend.run_experts(step.x, step.gate_up, self.routing, step.y13)
        self.backend.run_experts(
            step.act, step.down, self.routing, step.y2, rows="pairs", weighted=True
        )


def reference(step: Step, token_slots: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the deltas of gate_up and of down by plain products, in float32."""
    tokens, top_k = step.topk_ids.shape
    slots = torch.tensor(token_slots, device=step.x.device)[:, None].expand(tokens, top_k)
    rows = torch.arange(tokens, device=step.x.device).repeat_interleave(top_k)
    gate_up = _deltas(step.x.float()[rows], step.gate_up, slots, step.topk_ids)
    down = _deltas(step.act.float(), step.down, slots, step.topk_ids)
    factors = step.topk_weights.flatten()[:, None]
    return gate_up.view(step.y13.shape), (factors * down).view(step.y2.shape)


def _deltas(
    x: torch.Tensor, weights: ExpertWeights, slots: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    keys = (slots * weights.num_experts + experts).flatten()
    delta = torch.zeros(len(keys), weights.out_features, device=x.device)
    for key in torch.unique(keys).tolist():
        slot, expert = divmod(key, weights.num_experts)
        pairs = (keys == key).nonzero().flatten()
        for s in range(weights.num_slices):
            nth = s if weights.num_a > 1 else 0
            a = weights.lora_a[slot, expert % weights.lora_a.shape[1], nth].float()
            b = weights.lora_b[slot, expert % weights.lora_b.shape[1], weights.columns(s)].float()
            scaling = weights.scalings[slot, expert, nth]
            delta[pairs, weights.columns(s)] = scaling * ((x[pairs] @ a.T) @ b.T)
    return delta
