"""Gradients of layers and batches larger than those that are drawn."""

from __future__ import annotations

from dataclasses import replace

import torch

from lora_backends.backend import LoRABackend
from lora_backends.testing.cases.dense import LoRACase
from lora_backends.testing.cases.experts import ExpertCase
from lora_backends.testing.properties.core import (
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
from lora_backends.testing.properties.sizes.all_large import large_experts, large_layers
from lora_backends.testing.properties.sizes.layers import mixed_sizes, naming


@either_prop(
    "Gradients are right where any two sizes are large.",
    features=ANY_LAYER,
    examples=1,
    requires=(differentiable,),
)
def gradients_of_two_large_sizes_are_right(backend: LoRABackend, case: LoRACase) -> None:
    """Of tokens, slots, inputs, columns and the rank; by each operation in turn."""
    wide = (torch.float32, *backend.dtypes)[torch.float32 not in backend.dtypes]
    for turn, large in enumerate(mixed_sizes(backend, case)):
        # two of three: 8-bit stacks have no gradient, 16 bits or integers hide rounding errors
        if turn % 3 != case.seed % 3:
            large = replace(large, dtype=wide, stored=None, values="sparse")
        inputs = large.build(backend.device)
        operations = differentiated(inputs)
        operation = operations[(case.seed + turn) % len(operations)]
        plan = backend.prepare_batch(inputs.batch)
        with naming(f"{operation.name} of {inputs.weights!r}, {large.num_tokens} tokens"):
            check_gradients(backend, large, Call.of(operation, large, inputs), plan, inputs)


@prop(
    "Gradients of sizes above all thresholds of kernels are right with every dtype and option.",
    agreement=BY_CLAIM,
    examples=1,
    requires=(differentiable,),
)
def gradients_above_all_thresholds_are_right(backend: LoRABackend, case: LoRACase) -> None:
    """By run_embedding, by one of the steps of run_linear, and by one of the cases of it."""
    kinds = {
        "embedding": ("run_embedding",),
        "step": ("run_lora_a", "run_lora_b"),
        "whole": ("run_linear", "run_logits", "run_gate_up", "run_qkv"),
    }
    # a gradient has an oracle as large as its tensor
    for large, row in large_layers(backend, case, most=1 << 19, plain=True, kind=tuple(kinds)):
        inputs = large.case.build(backend.device)
        operations = [op for op in differentiated(inputs) if op.name in kinds[row["kind"]]]
        operation = operations[large.case.seed % len(operations)]
        plan = large.plan(backend, inputs)
        with naming(f"{operation.name} of {inputs.weights!r}, {inputs.batch.num_tokens} tokens"):
            call = Call.of(operation, large.case, inputs)
            check_gradients(backend, large.case, call, plan, inputs)


@prop(
    "Gradients of many experts, of wide ones, and of hundreds of pairs are right.",
    kind=ExpertCase,
    agreement=BY_CLAIM,
    examples=1,
    requires=(differentiable, no_interpreter),
)
def gradients_of_many_experts_are_right(backend: LoRABackend, case: ExpertCase) -> None:
    """The cases of `many_experts_are_right`, most with stacks that have gradients."""
    for large in large_experts(backend, case, plain=True):
        inputs = large.build(backend.device)
        with naming(f"{inputs.weights!r}, {large.num_tokens} tokens, {large.top_k} experts each"):
            check_of_experts(backend, large, inputs)
