"""The option `segment_size`, and h by place; `tests/sgmv/test_launch.py` has the arithmetic."""

import pytest
import torch
from helpers.engines import on
from helpers.small_layers import small_batch, small_weights

from lora_backends import InvalidInputError, get_backend
from lora_backends.csgmv import CsgmvBackend
from lora_backends.csgmv.plan import CsgmvPlan
from lora_backends.sgmv import launch
from lora_backends.sgmv.runs import count_tokens


def test_rows_of_h_follow_the_permutation(device):
    """The shrink writes the token at place p to row p, and nothing where there is no token."""
    weights, batch = on(device, small_weights()), small_batch()
    backend = CsgmvBackend(device, tiles="rules")
    plan = CsgmvPlan.with_room(batch, batch.num_tokens, (16,), device)
    plan.fill(batch, count_tokens(batch), 16, 1)
    options = backend._options._replace(programmatic=False)
    kernels = launch.kernels_of(
        weights, launch.stacks_of(weights), plan, plan.num_tokens, None, options
    )
    x = torch.randn(7, 10, device=device)
    rows, places = plan.grid_rows(False, plan.num_tokens), plan.h_rows(plan.num_tokens)
    assert (rows, places) == (4, 64)
    h = torch.full((kernels.split_k, 3, places, 3), float("nan"), device=device)
    launch.shrink(x, launch.stacks_of(weights), plan, h, rows, kernels.shrink)
    by_token = CsgmvBackend(device).run_lora_a(x, weights, plan)
    tokens = plan.token_table.flatten()[:places].long()
    rank_of_slice_0 = {0: 3, 1: 1, 2: 0, 3: 2}
    for place, token in enumerate(tokens.tolist()):
        rank = rank_of_slice_0[int(batch.token_slots[token])] if token >= 0 else 0
        assert torch.equal(h.sum(0)[0, place, :rank], by_token[0, token, :rank])
        assert h[:, 0, place, rank:].isnan().all()


@pytest.mark.parametrize("given", [0, 17, 48, 256, True, "16", "automatic", None, 16.0])
def test_other_segment_sizes_are_refused(given):
    with pytest.raises(InvalidInputError, match=r"segment_size=.*\n  allowed: 16, 32, 64, 128"):
        CsgmvBackend("cpu", segment_size=given)


@pytest.mark.parametrize("size", [16, 128, "auto"])
def test_the_option_is_taken_by_name(device, size):
    assert get_backend("csgmv", device, segment_size=size).segment_size == size
