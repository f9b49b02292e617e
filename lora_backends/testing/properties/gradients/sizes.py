"""Gradients of layers and batches larger than those that are drawn."""

from __future__ import annotations

from lora_backends.backend import LoRABackend
from lora_backends.testing.cases.dense import LoRACase
from lora_backends.testing.cases.experts import ExpertCase
from lora_backends.testing.properties.core import (
    ANY_EXPERTS,
    ANY_LAYER,
    BY_CLAIM,
    differentiable,
    either_prop,
    no_interpreter,
    prop,
)
from lora_backends.testing.properties.gradients.experts import check_gradients as check_of_experts
from lora_backends.testing.properties.gradients.runs import (
    Call,
    check_gradients,
    differentiated,
)
from lora_backends.testing.properties.sizes import large_experts, mixed_sizes, naming


@either_prop(
    "Gradients are right where any two sizes are large.",
    features=ANY_LAYER,
    examples=3,
    requires=(differentiable,),
)
def gradients_of_two_large_sizes_are_right(backend: LoRABackend, case: LoRACase) -> None:
    """Of tokens, slots, inputs, columns and the rank; by each operation in turn."""
    for turn, large in enumerate(mixed_sizes(backend, case)):
        inputs = large.build(backend.device)
        operations = differentiated(inputs)
        operation = operations[(case.seed + turn) % len(operations)]
        plan = backend.prepare_batch(inputs.batch)
        with naming(f"{operation.name} of {inputs.weights!r}, {large.num_tokens} tokens"):
            check_gradients(backend, large, Call.of(operation, large, inputs), plan, inputs)


@prop(
    "Gradients of many experts, of wide ones, and of hundreds of pairs are right.",
    kind=ExpertCase,
    agreement=BY_CLAIM,
    values="either",
    examples=2,
    requires=(differentiable, no_interpreter),
    min_tokens=1,
    features=ANY_EXPERTS,
)
def gradients_of_many_experts_are_right(backend: LoRABackend, case: ExpertCase) -> None:
    """The cases of `many_experts_are_right`."""
    for large in large_experts(backend, case):
        inputs = large.build(backend.device)
        with naming(f"{inputs.weights!r}, {large.num_tokens} tokens, {large.top_k} experts each"):
            check_of_experts(backend, large, inputs)
