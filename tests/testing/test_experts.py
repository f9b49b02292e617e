"""Cases of experts, and their oracle."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from mutants import MUTANTS

from lora_backends import InvalidInputError
from lora_backends.features import EIGHT_BIT
from lora_backends.testing import (
    DEFAULT,
    ExpertCase,
    case_from,
    check_case,
    expected_experts,
    expert_cases,
    verify,
)

QUICK = settings(max_examples=40, deadline=None, database=None)


def test_dead_pairs_have_no_values():
    case = ExpertCase(
        slots=(0, -1, 1),
        ids=((0, -1), (1, 0), (1, 1)),
        num_experts=2,
        ranks=(((2,), (1,)), ((0,), (2,))),
        max_rank=2,
        in_features=3,
        output_slices=(2, 2),
        scalings=(((1.0,), (0.5,)), ((2.0,), (1.0,))),
        rows="pairs",
        mapped=True,
        weights_pad=1,
    )
    inputs = case.build()
    dead = [False, True, True, True, False, False]
    assert inputs.x.isnan().all(1).tolist() == dead
    assert inputs.topk_weights.isnan().flatten().tolist() == dead
    assert inputs.expert_map[inputs.topk_ids.long()].tolist() == [[0, -1], [1, 0], [1, 1]]
    assert inputs.weights.lora_a[1, 0].isnan().all() and inputs.weights.lora_b[1, 0].isnan().all()
    assert not inputs.weights.lora_b[0, 0].isnan().any()
    assert inputs.weights.lora_b[0, 1].isnan().tolist() == [[False, True]] * 4


def own_scales(own, weights, a=None, s=None):
    """Return the scale of every element of one A, or of one slice's B."""
    rows, columns = weights.scale_block
    if a is not None:
        shape = (weights.max_rank, weights.in_features)
    else:
        shape = (weights.output_slices[s], weights.max_rank)
    rows, columns = rows or shape[0], columns or shape[1]
    if weights.a_scales is None:
        return torch.ones(shape)
    if a is not None:
        scales = own["a_scales"][a]
    else:  # the groups of each slice begin anew
        first = sum(-(-width // rows) for width in weights.output_slices[:s])
        if weights.scale_block[0] is None:
            first = s
        scales = own["b_scales"][first:]
    return torch.tensor(
        [[float(scales[i // rows, j // columns]) for j in range(shape[1])] for i in range(shape[0])]
    ).reshape(shape)


def pair_by_pair(inputs):
    """Return y of experts in float64, straight from the formula."""
    weights, options = inputs.weights, inputs.options
    base = torch.zeros(inputs.output_shape()) if inputs.base is None else inputs.base
    y, top_k = base.double().clone(), inputs.ids.shape[1]
    for t, j in inputs.live.nonzero().tolist():
        slot, expert = int(inputs.batch.token_slots[t]), int(inputs.ids[t, j])
        own = {
            name: getattr(weights, name)[slot, expert % getattr(weights, name).shape[1]]
            for name in ("lora_a", "lora_b", "ranks", "scalings", "a_scales", "b_scales")
            if getattr(weights, name) is not None
        }
        x = inputs.x[t if options["rows"] == "tokens" else t * top_k + j].double()
        row = y[t] if options["reduce"] else y[t, j]
        for s in range(weights.num_slices):
            a = s if weights.num_a > 1 else 0
            r = int(own["ranks"][a])
            if r:
                factor = float(inputs.topk_weights[t, j]) if options["weighted"] else 1.0
                h = (own["lora_a"][a].double() * own_scales(own, weights, a=a))[:r] @ x
                columns = range(weights.out_features)[weights.columns(s)]
                b_scales = own_scales(own, weights, s=s)
                for row_of_b, o in enumerate(columns):
                    delta = (own["lora_b"][o].double() * b_scales[row_of_b])[:r] @ h
                    row[o] += factor * float(own["scalings"][a]) * delta
    return y


@QUICK
@given(expert_cases(values="either", features=(EIGHT_BIT,)))
def test_the_oracle_of_experts_is_the_formula_pair_by_pair(case):
    inputs = case.build()
    torch.testing.assert_close(
        expected_experts(inputs).value, pair_by_pair(inputs), rtol=1e-9, atol=1e-9
    )


def test_a_case_of_experts_that_fails_is_small_and_fails_alone():
    mutant = MUTANTS["WrongExpert"]
    # the smallest case does not depend on how fast the machine finds it
    unhurried = dataclasses.replace(DEFAULT, shrink_seconds=float("inf"))
    report = verify(mutant.backend("cpu"), profile=unhurried, only=[mutant.caught_by])
    (result,) = report.failures
    case = case_from(result.failure.case)
    # the search for a smaller case may stop beside the smallest, 1 token; it starts from up to 40
    assert case.num_tokens <= 4 and case.num_experts == 2
    again = check_case(mutant.backend("cpu"), result.name, case)
    assert again.failures[0].failure.message == result.failure.message
    with pytest.raises(InvalidInputError, match=r"allowed: LoRACase\(\.\.\.\)"):
        check_case(mutant.backend("cpu"), "integers_are_exact", case)
