"""Which experts every token uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch

from lora_backends.dispatch.handles import Handled


@dataclass(eq=False)
class ExpertRouting(Handled):
    """The router's choice for one layer; an engine's own routing adds what its kernels read.

    Pair (t, j) is the j-th expert of token t. It is dead, so that it changes nothing and reads
    nothing, if its id is -1 or its token has no adapter.
    """

    plan: Any  # of the tokens; read when an operation runs, so a refilled plan is followed
    num_experts: int  # that ids stay below
    topk_ids: torch.Tensor  # [num_tokens, top_k] int64, -1 <= id < num_experts, on the device
    topk_weights: torch.Tensor  # [num_tokens, top_k] float32, on the device

    @property
    def num_tokens(self) -> int:
        """Tokens that are routed."""
        return self.topk_ids.shape[0]

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return self.topk_ids.shape[1]

    @classmethod
    def of(
        cls,
        plan: Any,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
    ) -> Self:
        """Return a routing with memory of its own; arguments as in `prepare_experts`."""
        local = local_ids(topk_ids, num_experts, expert_map)
        return cls(plan, num_experts, local, topk_weights.clone())

    def refill(
        self,
        plan: Any,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor | None,
    ) -> None:
        """Take another choice of as many tokens and experts; the tensors keep their addresses."""
        self.plan = plan
        self.topk_ids.copy_(local_ids(topk_ids, self.num_experts, expert_map))
        self.topk_weights.copy_(topk_weights)


def local_ids(
    topk_ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None
) -> torch.Tensor:
    """Return the id of each pair's expert on this rank, int64; -1 for dead pairs."""
    ids = topk_ids.long()
    if expert_map is not None:
        mapped = expert_map[ids.clamp(0, expert_map.shape[0] - 1)].long()
        ids = torch.where((ids >= 0) & (ids < expert_map.shape[0]), mapped, -1)
    return torch.where((ids >= 0) & (ids < num_experts), ids, -1)
