"""The gradients of an adapter have the same bits whatever else is in the batch."""

import pytest
import torch
from helpers.engines import INTERPRETED
from helpers.gradients import Run, case, layer

from lora_backends import LoRABatch
from lora_backends.testing.cases.inputs import same_bits

TOKENS = 50 if INTERPRETED else 150  # an interpreted program takes milliseconds
OWN, OF_SLOTS = 2, ("lora_b", "lora_a", "embedding", "sums")


def own_rows(made, results):
    """Return the gradients of slot OWN and of its tokens, in order."""
    own = made.batch.token_slots == OWN
    own = torch.cat([own, torch.zeros(made.rows - len(own), dtype=torch.bool)])
    parts = {name: results[name].cpu()[OWN] for name in OF_SLOTS}
    return parts | {"dh": results["dh"].cpu()[:, own], "dx": results["dx"].cpu()[own]}


def assert_same(first, second):
    for name, values in first.items():
        assert same_bits(values, second[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_adapters_rows_reach_nothing(make, dtype):
    backend = make(batch_invariant=True)
    made = case(layer(dtype, (20, 7), 12, 40), tokens=TOKENS, scales=True)
    alone = own_rows(made, Run(backend, made, dtype).all())
    others = made.batch.token_slots != OWN
    made.x[others], made.grad[others], made.token_ids[others] = float("nan"), float("inf"), 0
    made.h[:, others], made.dh[:, others] = float("nan"), float("nan")
    for stack in (made.weights.lora_a, made.weights.lora_b):
        stack[torch.arange(5) != OWN] = float("nan")
    assert_same(alone, own_rows(made, Run(backend, made, dtype).all()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_adapter_alone_has_the_same_gradients(make, dtype):
    backend = make(batch_invariant=True)
    made = case(layer(dtype, (20, 7), 12, 40), tokens=TOKENS, scales=True)
    together = own_rows(made, Run(backend, made, dtype).all())
    own = made.batch.token_slots == OWN
    scales = made.batch.token_scales[own]
    made.batch = LoRABatch(made.batch.token_slots[own], 5, scales)
    made.x, made.grad, made.token_ids = made.x[own], made.grad[own], made.token_ids[own]
    made.h, made.dh = made.h[:, own], made.dh[:, own]
    assert_same(together, own_rows(made, Run(backend, made, dtype).all()))


@pytest.mark.skipif(INTERPRETED, reason="programs of the interpreter run one after another")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_two_runs_have_the_same_bits(backend, dtype):
    made = case(layer(dtype, (200, 7), 12, 40), tokens=TOKENS)
    first, second = (Run(backend, made, dtype).all() for _ in range(2))
    assert_same(first, second)


def test_triton_and_csgmv_have_the_same_sums_with_any_tiles(device):
    from helpers.engines import VARIANTS, make_engine

    made = case(layer(torch.bfloat16, (20, 7), 12, 40), tokens=TOKENS)
    results = [
        Run(make_engine(variant, device), made, torch.bfloat16).all() for variant in VARIANTS
    ]
    for other in results[1:]:
        assert_same({name: results[0][name] for name in OF_SLOTS}, other)
