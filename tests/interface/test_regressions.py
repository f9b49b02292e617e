"""Faults that other multi-LoRA engines shipped: each a case that every backend here passes.

Named by the project and the number of its issue where there is one. Out of scope, because the
library has no such code yet: block-wise FP8 weights. rsLoRA and alpha_pattern (sglang 40835) are
the loader's: a backend takes the scaling of every slot and slice as it is given.
"""

import dataclasses

import pytest
import torch

from lora_backends import (
    NO_ADAPTER,
    InvalidInputError,
    LoRABatch,
    backend_names,
    get_backend,
    unavailable_reasons,
)
from lora_backends.testing import (
    ExpertCase,
    LoRACase,
    assert_close,
    assert_same_bits,
    check_case,
    expected_linear,
    properties,
)

MARKS = {"cpu": [], "cuda": [pytest.mark.gpu]}
RUNNABLE = [
    pytest.param(
        (name, device),
        marks=[
            *MARKS[device],
            *([pytest.mark.slow] if name == "numba_cpu" else []),  # compiles for each dtype
        ],
        id=f"{name}-{device}",
    )
    for name in backend_names()
    for device in MARKS
    if not unavailable_reasons(name, device)
]


@pytest.fixture(params=RUNNABLE)
def backend(request):
    name, device = request.param
    return get_backend(name, device=device)


def make(slots, *, rank=4, num_slots=4, in_features=24, widths=(20,), **changes):
    """Return a case whose adapters are all of one rank, each slot with a scaling of its own."""
    scalings = tuple((0.5 + slot,) * len(widths) for slot in range(num_slots))
    return LoRACase(
        slots=tuple(slots),
        ranks=((rank,) * len(widths),) * num_slots,
        max_rank=changes.pop("max_rank", rank),
        in_features=in_features,
        output_slices=tuple(widths),
        scalings=scalings,
        **changes,
    )


def run(backend, inputs, plan=None):
    base = inputs.new_base()
    if plan is None:
        plan = backend.prepare_batch(inputs.batch)
    view = None if base is None else base.view
    return backend.run_linear(inputs.x, inputs.weights, plan, view)


def check(backend, inputs, plan=None):
    """Run run_linear and compare it with float64."""
    y = run(backend, inputs, plan)
    wanted = expected_linear(
        inputs.x,
        inputs.weights,
        inputs.batch,
        inputs.base,
        intermediate=inputs.weights.dtype if backend.narrow_intermediate else torch.float32,
    )
    assert_close(y, wanted, inputs)
    return y


def refilled(inputs, slots):
    """Return the inputs for another composition, x finite wherever a row gains an adapter."""
    return inputs.replace(x=inputs.x.nan_to_num(nan=1.0), slots=slots)


def test_sglang_28371_another_composition_in_the_same_plan(backend):
    """A captured graph kept the adapters of the batch that it was captured with."""
    inputs = make([0, 0, 1, 1, 2, 2, 3, 3]).build(backend.device)
    plan = backend.prepare_batch(inputs.batch)
    for slots in (
        [3] * 8,
        [0, 1, 2, 3] * 2,
        [-1, 3, -1, 2, -1, 1, -1, 0],
        [0, 0, 1, 1, 2, 2, 3, 3],
    ):
        turned = refilled(inputs, slots)
        assert backend.prepare_batch(turned.batch, out=plan) is plan
        check(backend, turned, plan)


def test_sglang_29157_more_segments_than_the_plan_was_made_with(backend):
    """A graph captured with few segments computed garbage for a batch of many."""
    inputs = make([NO_ADAPTER] * 33, num_slots=8).build(backend.device)
    plan = backend.prepare_batch(inputs.batch)
    turned = refilled(inputs, [token % 8 for token in range(33)])
    backend.prepare_batch(turned.batch, out=plan)
    check(backend, turned, plan)


def test_sglang_17692_layers_that_differ_in_output_width_alone(backend):
    """The key of a kernel cache left out the output width."""
    for width in (48, 80, 16, 48):
        check(backend, make([0, 1, 2, 3], widths=(width,)).build(backend.device))


@pytest.mark.parametrize("slots", [[-1, 0, 1, 2, 3], [0, -1, 3], [3, -1], [-1, -1, 3, 3]])
def test_vllm_40038_40131_tokens_without_adapter_push_no_adapter_out(backend, slots):
    """-1 took a place in the list of active adapters, so that the last one was skipped."""
    check(backend, make(slots).build(backend.device))


def test_vllm_stale_token_map_after_a_batch_without_adapters(backend):
    """A batch without adapters returned early and left the former batch's token map."""
    inputs = make([0, 1, 2, 3, 3, 2, 1, 0], base=torch.float32).build(backend.device)
    plan = backend.prepare_batch(inputs.batch)
    check(backend, inputs, plan)
    idle = inputs.replace(slots=[NO_ADAPTER] * 8)
    backend.prepare_batch(idle.batch, out=plan)
    assert_same_bits(run(backend, idle, plan), inputs.base, idle)
    turned = refilled(inputs, [1, -1, 1, -1, 3, 3, 0, 0])
    backend.prepare_batch(turned.batch, out=plan)
    check(backend, turned, plan)


def test_vllm_pointer_cache_keyed_by_address_only(backend):
    """A layer at the same address, of another shape or offset, used the first's pointers."""
    inputs = make([0, 1, 2, 3], widths=(16, 24), bias=True).build(backend.device)
    weights = inputs.weights
    check(backend, inputs)
    narrow = dataclasses.replace(weights, lora_a=weights.lora_a[..., :8])
    check(backend, inputs.replace(x=inputs.x[:, :8], weights=narrow))
    first = dataclasses.replace(
        weights,
        lora_a=weights.lora_a[:, :1],
        lora_b=weights.lora_b[:, :16],
        ranks=weights.ranks[:, :1],
        scalings=weights.scalings[:, :1],
        output_slices=(16,),
        bias=weights.bias[:, :16],
    )
    check(backend, inputs.replace(weights=first))
    check(backend, inputs)


def test_vllm_adapter_replaced_in_the_same_memory(backend):
    """What was derived from a slot's tensors outlived the adapter in it."""
    inputs = make([0, 1, 0, 1]).build(backend.device)
    plan = backend.prepare_batch(inputs.batch)
    check(backend, inputs, plan)
    for tensor in (inputs.weights.lora_a, inputs.weights.lora_b, inputs.weights.scalings):
        tensor[0] = tensor[2].clone()
    inputs.weights.ranks[1] = 2
    check(backend, inputs, plan)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_vllm_several_slices_into_float32_output(backend, dtype):
    """A multi-slice expand into a float32 output gave NaN."""
    case = make([0, 1, -1, 3], widths=(16, 8, 8), dtype=dtype, base=torch.float32)
    check(backend, case.build(backend.device))


@pytest.mark.parametrize("rank", [8, 16, 31, 32, 33, 64])
def test_lorax_70_rank_32(backend, rank):
    """One rank went through a kernel of its own, which was wrong."""
    check(backend, make([0, 1, 2, 3, 0], rank=rank).build(backend.device))
    check(backend, make([0, 1, 2, 3, 0], rank=rank, max_rank=64).build(backend.device))


def test_punica_35_skewed_segments(backend):
    """One segment far longer than the others waited forever."""
    slots = [0] * 130 + [1] + [2] + [3] * 2
    check(backend, make(slots).build(backend.device))
    check(backend, make(slots[::-1]).build(backend.device))


def test_tensorrt_llm_2096_base_and_lora_requests_share_a_batch(backend):
    """The rows of requests without an adapter came out at random."""
    case = make([-1, 2, -1, -1, 0, -1], base=torch.float32, bias=True)
    inputs = case.build(backend.device)
    y = check(backend, inputs)
    for token in (0, 2, 3, 5):
        assert torch.equal(y[token], inputs.base[token])


def test_sglang_40835_every_slot_and_slice_keeps_its_own_scaling(backend):
    """rsLoRA and alpha_pattern give each module a scaling of its own; one was used for all."""
    scalings = ((16 / 8**0.5, 2.0, 0.25), (-1.0, 4.0, 0.0))
    case = make([0, 1, 0, 1, -1], num_slots=2, widths=(8, 8, 8))
    check(backend, dataclasses.replace(case, scalings=scalings).build(backend.device))


def experts(*, num_experts=3, rank=2, max_rank=2, num_a=2, ids=((0, 2), (1, 0), (2, 1), (0, 1))):
    """Return a case of gate and up for tokens of two adapters."""
    experts = ((rank,) * num_a,) * num_experts
    return ExpertCase(
        slots=(0, 1, 0, 1),
        ids=ids,
        num_experts=num_experts,
        ranks=(experts, experts),
        max_rank=max_rank,
        in_features=24,
        output_slices=(8, 8),
        scalings=(((0.5,) * num_a,) * num_experts, ((2.0,) * num_a,) * num_experts),
        base=torch.float32,
    )


EXPERTS = {
    "sglang_27274_up_has_an_a_of_its_own": experts(),
    "sglang_21864_gate_and_up_of_less_than_the_largest_rank": experts(rank=2, max_rank=8),
    "sglang_23632_experts_that_live_elsewhere": experts(ids=((-1, 2), (-1, -1), (2, -1), (0, 1))),
    "vllm_42718_two_slices_of_rank_1": experts(rank=1, max_rank=1),
    "vllm_55158_stacks_of_more_than_rank_128": experts(rank=4, max_rank=160),
    "vllm_21229_more_than_64_experts": experts(
        num_experts=70, rank=1, num_a=1, ids=((69, 64), (63, 0), (65, 69), (1, 68))
    ),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts(backend, name):
    """Each was wrong, or ended the engine."""
    report = check_case(backend, "run_experts_is_within_the_bound", EXPERTS[name])
    assert report.passed, report.to_text()


def test_vllm_int32_overflow_of_slot_times_stride(backend):
    """Offsets of more than 2^31 elements wrapped."""
    reason = properties()["large_offsets_do_not_wrap"].not_applicable(backend)
    if reason:
        pytest.skip(reason)
    case = make([1, 0, 1], num_slots=2, values="integer")
    report = check_case(backend, "large_offsets_do_not_wrap", case)
    assert report.passed, report.to_text()


def test_unsynchronised_updates_of_y(backend):
    """Programs that added to the same element of y lost each other's sums."""
    case = make([0] * 70, rank=16, in_features=130, widths=(65,), base=torch.float32)
    inputs = case.build(backend.device)
    first = check(backend, inputs)
    for _ in range(5):
        again = check(backend, inputs)
        if backend.deterministic:
            assert_same_bits(again, first, inputs)


def test_a_scaling_five_percent_off_is_outside_the_bound(backend):
    """vLLM's tolerance of 6e-2 on values in [0, 1) passes it."""
    inputs = make([0, 1, 2, 3] * 4, rank=16, in_features=64).build(backend.device)
    weights = dataclasses.replace(inputs.weights, scalings=1.05 * inputs.weights.scalings)
    y = run(backend, inputs.replace(weights=weights))
    with pytest.raises(AssertionError, match="exceed the bound"):
        assert_close(y, expected_linear(inputs.x, inputs.weights, inputs.batch), inputs)


def test_a_refill_of_another_size_is_refused(backend):
    """Instead of reading past what the plan holds."""
    plan = backend.prepare_batch(LoRABatch([0, 1], num_slots=2))
    with pytest.raises(InvalidInputError, match="room for 2 tokens"):
        backend.prepare_batch(LoRABatch([0, 1, 1], num_slots=2), out=plan)
    with pytest.raises(InvalidInputError, match="num_slots=2, the batch has 3; make a new plan"):
        backend.prepare_batch(LoRABatch([0, 1], num_slots=3), out=plan)


def negated(tensor):
    """Return a tensor of equal values whose memory holds them negated."""
    return torch._neg_view(-tensor)


ARGUMENTS = {"run_linear": "x", "run_logits": "hidden", "run_lora_a": "x", "run_lora_b": "h"}
ARGUMENTS |= {"run_embedding": "token_ids"}


def first_arguments(inputs):
    weights, tokens = inputs.weights, inputs.x.shape[0]
    h = torch.ones(weights.num_slices, tokens, weights.max_rank, device=weights.device)
    ids = torch.arange(tokens, device=weights.device)
    return {"x": inputs.x, "hidden": inputs.x, "h": h, "token_ids": ids}


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("operation", ARGUMENTS)
def test_a_lazy_negation_is_refused_by_every_operation(backend, operation, gradients):
    """Engines that read by address took the values with the wrong sign."""
    inputs = make([0, 1, -1, 2], base=torch.float32).build(backend.device)
    plan, name = backend.prepare_batch(inputs.batch), ARGUMENTS[operation]
    value, y = first_arguments(inputs)[name], inputs.base.clone()
    given = {"weights": inputs.weights, "plan": plan}
    given |= {} if operation == "run_lora_a" else {"base_output": y}
    call = getattr(backend, operation)
    with torch.set_grad_enabled(gradients):
        with pytest.raises(InvalidInputError, match=rf"{name} is a lazy negation.*resolve_neg"):
            call(**given | {name: negated(value)})
        assert torch.equal(y, inputs.base)
        if "base_output" in given:
            with pytest.raises(InvalidInputError, match="base_output is a lazy negation"):
                call(**given | {name: value, "base_output": negated(y)})
            assert torch.equal(y, inputs.base)
        call(**given | {name: negated(value).resolve_neg()})


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("owner", ["lora_a", "lora_b", "ranks", "scalings", "bias"])
def test_base_output_may_not_lie_on_the_weights(backend, owner, gradients):
    """The result was wrong, and the weights were overwritten."""
    weights = make([0, 1], bias=True, in_features=8, widths=(2,)).build(backend.device).weights
    x = torch.ones(2, 8, device=backend.device)
    ids = torch.zeros(2, dtype=torch.int64, device=backend.device)
    h = torch.ones(1, 2, 4, device=backend.device)
    plan = backend.prepare_batch(LoRABatch([0, 1], 4))
    before = getattr(weights, owner).clone()
    values = getattr(weights, owner).view(torch.float32).flatten()
    with torch.set_grad_enabled(gradients):
        for y in (values[-4:].view(2, 2), values[:4].view(2, 2)):
            for operation, value in (
                ("run_linear", x),
                ("run_logits", x),
                ("run_embedding", ids),
                ("run_lora_b", h),
            ):
                with pytest.raises(InvalidInputError, match=f"base_output overlaps {owner}"):
                    getattr(backend, operation)(value, weights, plan, y)
    assert torch.equal(getattr(weights, owner), before)


def test_base_output_may_not_lie_on_h_or_token_ids(backend):
    """Writing a row changed what the next rows read."""
    inputs = make([0, 1], in_features=8, widths=(4,)).build(backend.device)
    plan = backend.prepare_batch(inputs.batch)
    h = torch.ones(1, 2, 4, device=backend.device)
    with pytest.raises(InvalidInputError, match="base_output overlaps h in memory"):
        backend.run_lora_b(h, inputs.weights, plan, h[0])
    ids = torch.zeros(4, dtype=torch.int64, device=backend.device)
    y = ids.view(torch.float32).view(2, 4)
    with pytest.raises(InvalidInputError, match="base_output overlaps token_ids in memory"):
        backend.run_embedding(ids[:2], inputs.weights, plan, y)


def test_base_output_may_follow_the_weights_in_one_buffer(backend):
    """Neighbours are no overlap."""
    case = make([0, 1], in_features=8, widths=(2,), values="integer")  # exact in any order of sums
    inputs = case.build(backend.device)
    size = inputs.weights.lora_b.numel()
    arena = torch.zeros(size + 8, device=backend.device)
    lora_b = arena[2 : 2 + size].view_as(inputs.weights.lora_b)
    lora_b.copy_(inputs.weights.lora_b)
    moved = inputs.replace(weights=dataclasses.replace(inputs.weights, lora_b=lora_b))
    plan = backend.prepare_batch(inputs.batch)
    wanted = backend.run_linear(inputs.x, inputs.weights, plan)
    assert torch.equal(
        backend.run_linear(inputs.x, moved.weights, plan, arena[-4:].view(2, 2)), wanted
    )
    with pytest.raises(InvalidInputError, match="base_output overlaps lora_b"):
        backend.run_linear(inputs.x, moved.weights, plan, arena[1:5].view(2, 2))
