"""`ExpertCase`: the structure of a call of experts and a seed, from which all tensors follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lora_backends.batch import NO_ADAPTER, LoRABatch
from lora_backends.eight_bit import ScaleBlock
from lora_backends.experts import ExpertWeights
from lora_backends.testing.cases.dense import (
    LARGEST_EXACT,
    ReproducibleCase,
    Values,
    base_values,
    integers,
    normals,
)
from lora_backends.testing.cases.inputs import GuardedOutput, guarded

Table = tuple[tuple[tuple[int, ...], ...], ...]
Scalings = tuple[tuple[tuple[float, ...], ...], ...]


@dataclass(frozen=True, eq=False)
class ExpertInputs:
    """The arguments of one call of experts, on one device."""

    x: torch.Tensor  # [num_tokens or num_tokens * k, in_features]; rows of dead pairs are NaN
    weights: ExpertWeights
    batch: LoRABatch
    ids: torch.Tensor  # [num_tokens, k] int64, CPU: the expert of each pair, -1 for none
    topk_ids: torch.Tensor  # [num_tokens, k], as the router gives them; global if there is a map
    topk_weights: torch.Tensor  # [num_tokens, k] float32; NaN for dead pairs
    expert_map: torch.Tensor | None  # [global experts] int32
    base: torch.Tensor | None  # the values of base_output
    base_pad: int  # guard columns beside base_output
    options: Mapping[str, Any]  # keyword arguments of run_experts

    @property
    def live(self) -> torch.Tensor:
        """Which pairs have an expert and an adapter: [num_tokens, k] bool, CPU."""
        return (self.ids >= 0) & (self.batch.token_slots >= 0)[:, None]

    def output_shape(self) -> tuple[int, ...]:
        """Return the shape of y."""
        pairs = self.ids.shape[:1] if self.options["reduce"] else self.ids.shape
        return (*pairs, self.weights.out_features)

    def new_base(self) -> tuple[GuardedOutput, torch.Tensor] | None:
        """Return guarded memory and base_output, a view of it; None if the case has none."""
        if self.base is None:
            return None
        guard = GuardedOutput(self.base.reshape(-1, self.base.shape[-1]), self.base_pad)
        return guard, guard.view.view(self.base.shape)


@dataclass(frozen=True, repr=False)
class ExpertCase(ReproducibleCase):
    """One call of experts, reproducible from its ``repr``.

    Two tokens, each with its adapter's matrices of two of three experts; the last pair is dead:

        ExpertCase(slots=(0, 1), ids=((0, 2), (1, -1)), num_experts=3,
                   ranks=(((2,), (1,), (0,)), ((2,), (2,), (2,))), max_rank=2, in_features=5,
                   output_slices=(4, 4), scalings=(((1.0,), (0.5,), (1.0,)), ((2.0,),) * 3))

    NaN fills values beyond each rank, rows of x and weights of dead pairs, and the guards.
    """

    slots: tuple[int, ...]  # slot per token, -1 for none
    ids: tuple[tuple[int, ...], ...]  # [num_tokens][k], -1 for none
    num_experts: int
    ranks: Table  # [num_slots][num_experts or 1][num_slices or 1], 0..max_rank
    max_rank: int  # padded rank width
    in_features: int  # width of x
    output_slices: tuple[int, ...]  # width per slice
    scalings: Scalings  # as ranks
    top_k: int = 2  # experts per token
    shared_a: bool = False  # all experts have one lora_a
    shared_b: bool = False  # all experts have one lora_b
    interleaved: bool = False  # column o belongs to slice o % num_slices
    mapped: bool = False  # ids are given as global ones, with an expert_map
    rows: Literal["tokens", "pairs"] = "tokens"  # whether each token or each pair has a row of x
    weighted: bool = False
    reduce: bool = False
    dtype: torch.dtype = torch.float32  # of x and the weights
    base: torch.dtype | None = None  # of base_output; None: without one
    x_pad: int = 0  # guard columns on either side of x, topk_ids and topk_weights
    base_pad: int = 0  # guard columns on either side of base_output
    weights_pad: int = 0  # guard columns beside the rows of lora_a and lora_b
    token_scales: bool = False  # the batch has a scale for each token
    stored: torch.dtype | None = None  # 8-bit dtype of lora_a and lora_b, which have scales then
    scale_block: ScaleBlock = (1, None)  # rows and columns that share a scale
    values: Values = "real"
    seed: int = 0

    def build(self, device: torch.device | str = "cpu") -> ExpertInputs:
        """Return the tensors; they depend on the case alone, never on the device."""
        generator = torch.Generator().manual_seed(self.seed)
        draw = integers if self.is_integer else normals
        tokens = self.num_tokens
        ids = torch.tensor(self.ids, dtype=torch.int64, device="cpu").reshape(tokens, self.top_k)
        batch = self.batch()
        live = (ids >= 0) & (batch.token_slots != NO_ADAPTER)[:, None]
        rows = live.flatten() if self.rows == "pairs" else live.any(1)
        x = self.draw_x(len(rows), self.in_features, generator)
        if self.stored is not None and self.is_integer:
            x[:, LARGEST_EXACT // 2 :] = 0  # sums of products with scales up to 2 stay exact
        x[~rows] = float("nan")
        factors = torch.rand(tokens, self.top_k, generator=generator, device="cpu")
        if self.is_integer:
            factors = (4 * factors).floor() / 2  # 0, 0.5, 1, 1.5
        # weights of dead pairs may hold anything
        factors[~live] = float("nan")
        width, results = sum(self.output_slices), 1 if self.reduce else self.top_k
        base = base_values((tokens * results, width), generator, self.is_integer)
        if not self.reduce:
            base = base.reshape(tokens, self.top_k, width)
        weights = self._weights(draw, generator, device)
        topk_ids, expert_map = self._as_routed(ids, generator)
        return ExpertInputs(
            x=guarded(x.to(device, self.dtype), self.x_pad, float("nan")),
            weights=weights,
            batch=batch,
            ids=ids,
            topk_ids=guarded(
                topk_ids.to(device, torch.int32 if self.seed % 2 else torch.int64), self.x_pad, 0
            ),
            topk_weights=guarded(factors.to(device), self.x_pad, float("nan")),
            expert_map=None if expert_map is None else expert_map.to(device),
            base=None if self.base is None else base.to(device, self.base),
            base_pad=self.base_pad,
            options={"rows": self.rows, "weighted": self.weighted, "reduce": self.reduce},
        )

    def _weights(
        self,
        draw: Callable[..., torch.Tensor],
        generator: torch.Generator,
        device: torch.device | str,
    ) -> ExpertWeights:
        slots, slices, width = self.num_slots, len(self.output_slices), sum(self.output_slices)
        ranks = torch.tensor(
            self.ranks, dtype=torch.int32, device="cpu"
        )  # [slots, experts or 1, num_a]
        of_a, of_b = (
            1 if shared else self.num_experts for shared in (self.shared_a, self.shared_b)
        )
        a = draw((slots, of_a, ranks.shape[2], self.max_rank, self.in_features), generator)
        largest = 3 if self.token_scales else 15  # sums stay exact
        largest = largest if self.stored is None else largest // 3  # also where a scale is 2
        b = draw((slots, of_b, width, self.max_rank), generator, largest)
        a_ranks, b_ranks = _over(ranks, of_a), _over(ranks, of_b).expand(-1, -1, slices)
        a, b, eight = self.stacks_of(a, b, a_ranks, b_ranks, device)
        if self.interleaved:
            b = b.reshape(*b.shape[:2], slices, -1, self.max_rank).transpose(2, 3).flatten(2, 3)
        scalings = torch.tensor(self.scalings, device="cpu").masked_fill(ranks == 0, float("nan"))
        return ExpertWeights(
            lora_a=self.guarded_stack(a, device, self.weights_pad),
            lora_b=self.guarded_stack(b, device, self.weights_pad),
            ranks=ranks.to(device),
            scalings=scalings.to(device),
            output_slices=self.output_slices,
            num_experts=self.num_experts,
            interleaved=self.interleaved,
            **eight,
        )

    def _as_routed(
        self, ids: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the ids as a router gives them, and the map that makes them local."""
        if not self.mapped:
            return ids, None
        local = torch.arange(2 * self.num_experts, device="cpu")
        local[self.num_experts :] = -1  # these experts live elsewhere
        expert_map = local[torch.randperm(len(local), generator=generator, device="cpu")]
        order = expert_map.argsort()  # those elsewhere first, then the local ones by their ids
        # negative and unmapped ids must both count as dead
        places = torch.cat([order[self.num_experts :], order[:1]])  # the last is for id -1
        return places[ids], expert_map.int()

    def edges(self) -> frozenset[str]:
        """Return the names of the edges of `EXPERT_EDGES` that this case covers."""
        return frozenset(name for name, covers in EXPERT_EDGES.items() if covers(self))


def _over(ranks: torch.Tensor, experts: int) -> torch.Tensor:
    """Return the ranks of matrices of 1 or all experts; a shared one has the highest rank."""
    if experts == 1:
        return ranks.amax(1, keepdim=True)
    return ranks.expand(-1, experts, -1)


EXPERT_EDGES: Mapping[str, Callable[[ExpertCase], bool]] = {
    "experts: no tokens": lambda case: case.num_tokens == 0,
    "experts: dead pair": lambda case: any(-1 in ids for ids in case.ids),
    "experts: no live pair": lambda case: case.num_tokens > 0 and not _live_pairs(case),
    "experts: token without adapter": lambda case: NO_ADAPTER in case.slots,
    "experts: one expert twice": lambda case: any(
        len({i for i in ids if i >= 0}) < sum(i >= 0 for i in ids) for ids in case.ids
    ),
    "experts: one expert per token": lambda case: case.top_k == 1,
    "experts: rank 0": lambda case: any(
        0 in case.ranks[slot][expert % len(case.ranks[slot])] for slot, expert in _live_pairs(case)
    ),
    "experts: one A for all slices": lambda case: (
        len(case.output_slices) > 1 and len(case.ranks[0][0]) == 1
    ),
    "experts: one A for all experts": lambda case: case.shared_a and case.num_experts > 1,
    "experts: one B for all experts": lambda case: case.shared_b and case.num_experts > 1,
    "experts: interleaved": lambda case: case.interleaved,
    "experts: map": lambda case: case.mapped,
    "experts: row per pair": lambda case: case.rows == "pairs",
    "experts: weighted": lambda case: case.weighted,
    "experts: reduced": lambda case: case.reduce,
    "experts: scale per token": lambda case: case.token_scales and bool(_live_pairs(case)),
    "experts: stacks of 8 bits": lambda case: case.stored is not None and bool(_live_pairs(case)),
}
"""Name of every edge to the predicate on a case; the report of `verify` counts them."""


def _live_pairs(case: ExpertCase) -> list[tuple[int, int]]:
    return [
        (slot, expert)
        for slot, ids in zip(case.slots, case.ids, strict=True)
        for expert in ids
        if slot != NO_ADAPTER and expert >= 0
    ]
