"""The backward's kernels with 16-bit weights, without tokens, and with long sums."""

import pytest
import torch
from numba import config

from lora_backends import LoRABatch, LoRAWeights
from lora_backends.numba_cpu import NumbaCPUBackend

SIXTEEN = [torch.bfloat16, torch.float16]
OUT, IN, RANK, SLOTS = 21, 35, 5, 3
needs_jit = pytest.mark.skipif(config.DISABLE_JIT, reason="torch sums where numba is off")


def layer(dtype, in_features=IN):
    torch.manual_seed(0)
    a = torch.randn(SLOTS, 1, RANK, in_features).to(dtype)
    b = torch.randn(SLOTS, OUT, RANK).to(dtype)
    ranks = torch.tensor([[RANK], [2], [0]], dtype=torch.int32)
    return LoRAWeights(a, b, ranks, torch.full((SLOTS, 1), 0.5), (OUT,))


def gradients(weights, slots, grad, h, x):
    """Return dh, dB, dx and dA, each written over NaN or added to 0."""
    backend = NumbaCPUBackend()
    plan = backend.prepare_batch(LoRABatch(torch.tensor(slots, dtype=torch.int64), SLOTS))
    b, a = torch.full_like(weights.lora_b, torch.nan), torch.full_like(weights.lora_a, torch.nan)
    dx = torch.zeros_like(x)
    dh = backend.run_lora_b_backward(grad, h, weights, plan, lora_b=b)
    backend.run_lora_a_backward(dh, x, weights, plan, dx=dx, lora_a=a)
    return dh, b, dx, a


def inputs(rows, dtype, in_features=IN):
    torch.manual_seed(1)
    grad, x = torch.randn(rows, OUT).to(dtype), torch.randn(rows, in_features).to(dtype)
    return grad, torch.randn(1, rows, RANK), x


@needs_jit
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_rows_and_weights_of_other_adapters_that_are_not_finite_change_no_bit(dtype, value):
    slots, weights = [0, 1, 0, -1, 1, 0, 2, 0, 0] * 4, layer(dtype)
    grad, h, x = inputs(len(slots), dtype)
    own = [t for t, slot in enumerate(slots) if slot == 0]
    alone = gradients(weights, [0] * len(own), grad[own], h[:, own], x[own])
    others = [t for t, slot in enumerate(slots) if slot != 0]
    for tensor in (grad, h[0], x, weights.lora_a[1:], weights.lora_b[1:]):
        tensor[others if tensor.shape[0] == len(slots) else slice(None)] = value
    dh, b, dx, a = gradients(weights, slots, grad, h, x)
    assert torch.equal(dh[:, own], alone[0])
    assert torch.equal(dx[own], alone[2])
    assert torch.equal(b[0], alone[1][0])
    assert torch.equal(a[0], alone[3][0])
    assert not b[2].any()
    assert not a[2].any()


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN])
def test_a_batch_without_tokens_has_zero_gradients(dtype):
    weights = layer(dtype)
    dh, b, dx, a = gradients(weights, [], *inputs(0, dtype))
    assert dh.shape == (1, 0, RANK)
    assert dx.shape == (0, IN)
    assert torch.equal(b, torch.zeros_like(b))
    assert torch.equal(a, torch.zeros_like(a))


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN])
def test_a_layer_without_inputs_has_the_gradients_of_its_outputs(dtype):
    slots, weights = [0, 1, 0, 0], layer(dtype, in_features=0)
    grad, h, x = inputs(len(slots), dtype, in_features=0)
    dh, b, dx, a = gradients(weights, slots, grad, h, x)
    wide = gradients(layer(dtype), slots, grad, h, inputs(len(slots), dtype)[2])
    assert dx.shape == x.shape
    assert a.shape == weights.lora_a.shape
    assert dh.shape == wide[0].shape
    assert b.any()
    total = 0.5 * torch.einsum("to,tr->or", grad[[0, 2, 3]].double(), h[0, [0, 2, 3]].double())
    torch.testing.assert_close(b[0].double(), total, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_sums_of_many_rows_are_rounded_once(dtype):
    """Of small integers, whose sums are exact in float32."""
    rows, generator = 3000, torch.Generator().manual_seed(2)
    weights = layer(dtype)
    grad, h, x = inputs(rows, dtype)
    for tensor in (grad, h, x, weights.lora_a, weights.lora_b):
        tensor.copy_(torch.randint(0, 3, tensor.shape, generator=generator))
    _, b, dx, a = gradients(weights, [0] * rows, grad, h, x)
    dh = 0.5 * grad.double() @ weights.lora_b[0].double()
    assert torch.equal(b[0], (0.5 * grad.double().T @ h[0].double()).to(dtype))
    assert torch.equal(a[0, 0], (dh.T @ x.double()).to(dtype))
    assert torch.equal(dx, (dh @ weights.lora_a[0, 0].double()).to(dtype))
