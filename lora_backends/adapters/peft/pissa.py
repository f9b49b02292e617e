"""PiSSA and OLoRA: adapters that start from a part of the base weight, which the base then lacks.

PEFT takes B0 A0 off the weight as it loads: (W - scaling B0 A0) x + scaling B A x. Rows share one
base here, so the adapter brings the difference: W x + (scaling B A - scaling B0 A0) x, twice the
rank. A0 and B0 follow from the base weight.

Sources: Meng et al., "PiSSA", arXiv:2404.02948; Büyükakyüz, "OLoRA", arXiv:2406.01775; both as
PEFT computes them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lora_backends.adapters.peft.dora import BaseLayers
from lora_backends.adapters.specs import ModuleDelta
from lora_backends.errors import InvalidInputError, UnsupportedInputError

INITS_FROM_BASE = frozenset({"pissa", "olora"})
"""Values of `init_lora_weights` that are undone exactly; others draw random numbers or data."""

SMALLEST_GAP = 1e-3
"""Least distance of the singular values on either side of the rank, relative to the largest: the
part that PiSSA takes off is not determined where they are equal."""


def without_start(delta: ModuleDelta, base_layers: BaseLayers | None, max_rank: int) -> ModuleDelta:
    """Return the LoRA of twice the rank that adds the trained matrices and subtracts their start.

    Raises:
        UnsupportedInputError: there are no base weights, or they do not determine the start.
        InvalidInputError: the rank is too large.
    """
    if base_layers is None:
        raise UnsupportedInputError(
            f"init_lora_weights = {delta.init!r} changes the base weights, and this pool knows "
            f"none\n  to do: make the pool with base_layers=..., a function of a module's path; or "
            f"save the adapter with path_initial_model_for_weight_conversion"
        )
    rank = 2 * delta.rank
    if rank > max_rank:
        raise InvalidInputError(
            f"init_lora_weights = {delta.init!r} doubles the rank of {delta.module!r}\n"
            f"  given: rank {delta.rank}, which takes {rank}\n  allowed: at most {max_rank} "
            f"(max_rank)\n  to do: set max_rank to {rank} or more"
        )
    # PEFT decomposes in float32, whatever the dtype of the model.
    weight = base_layers(delta.module).weight.detach().float()
    if delta.rank > min(weight.shape):
        raise InvalidInputError(
            f"init_lora_weights = {delta.init!r} of rank {delta.rank} at {delta.module!r}, whose "
            f"weight is {list(weight.shape)}\n  allowed: at most rank {min(weight.shape)}"
        )
    # B0 comes with the scaling, so the pairs share a scaling of 1.
    a0, b0 = _svd(delta, weight) if delta.init == "pissa" else _qr(delta, weight)
    a, b = delta.lora_a.to(a0), delta.lora_b.to(b0)
    return replace(
        delta,
        rank=rank,
        scaling=1.0,
        lora_a=torch.cat([a, a0]),
        lora_b=torch.cat([delta.scaling * b, -b0], dim=1),
        init=None,
    )


def _svd(delta: ModuleDelta, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return A0 and scaling B0: the largest singular values and their vectors."""
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    # After the last singular value comes 0.
    inner, outer = values[delta.rank - 1 : delta.rank + 1].tolist() + [0.0] * (
        delta.rank == len(values)
    )
    if inner - outer < SMALLEST_GAP * float(values[0]):
        raise UnsupportedInputError(
            f"init_lora_weights = 'pissa' is not determined at {delta.module!r}: singular values "
            f"{inner} and {outer} are equal or nearly so\n"
            f"  to do: save the adapter with path_initial_model_for_weight_conversion"
        )
    return right[: delta.rank], left[:, : delta.rank] * values[: delta.rank]


def _qr(delta: ModuleDelta, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return A0 and scaling B0: the first columns of Q and rows of R."""
    q, r = torch.linalg.qr(weight)
    return r[: delta.rank], delta.scaling * q[:, : delta.rank]
