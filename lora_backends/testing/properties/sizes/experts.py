"""Experts of larger sizes."""

from __future__ import annotations

from lora_backends.backend import LoRABackend
from lora_backends.testing.cases.experts import ExpertCase
from lora_backends.testing.properties.core import BY_CLAIM, prop
from lora_backends.testing.properties.experts import check_experts
from lora_backends.testing.properties.sizes.all_large import large_experts
from lora_backends.testing.properties.sizes.layers import naming


@prop(
    "Hundreds of experts, 17 for a token, wide ones, many slots and hundreds of pairs are right.",
    kind=ExpertCase,
    agreement=BY_CLAIM,
    examples=1,
)
def many_experts_are_right(backend: LoRABackend, case: ExpertCase) -> None:
    """Two sizes are large together, with every dtype and option."""
    for large in large_experts(backend, case):
        inputs = large.build(backend.device)
        with naming(f"{inputs.weights!r}, {large.num_tokens} tokens, {large.top_k} experts each"):
            check_experts(backend, large, inputs)
