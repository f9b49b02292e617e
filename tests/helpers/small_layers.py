"""A small layer, a batch for it, and its arithmetic written token by token."""

import torch

from lora_backends import LoRABatch, LoRAWeights
from lora_backends.torch_ref import TorchRefBackend


class ByAddress(TorchRefBackend):
    """torch_ref as a backend that would read tensors by their addresses, without a backward."""

    differentiable = False
    plain_torch = False


def small_weights(dtype=torch.float32, bias=False, slices=(6, 3, 5), seed=0, max_rank=3):
    """Return a layer of 4 slots whose ranks differ and whose padding is NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_slices, out_features = len(slices), sum(slices)
    ranks = torch.tensor([[3, 2, 0], [1, 1, 1], [0, 0, 0], [2, 3, 1]], dtype=torch.int32)
    ranks = ranks[:, :num_slices].contiguous()
    lora_a = torch.randn(4, num_slices, max_rank, 10, generator=generator).to(dtype)
    lora_b = torch.randn(4, out_features, max_rank, generator=generator).to(dtype)
    offsets = [sum(slices[:s]) for s in range(num_slices + 1)]
    for slot in range(4):
        for s in range(num_slices):
            lora_a[slot, s, ranks[slot, s] :] = float("nan")
            lora_b[slot, offsets[s] : offsets[s + 1], ranks[slot, s] :] = float("nan")
    return LoRAWeights(
        lora_a=lora_a,
        lora_b=lora_b,
        ranks=ranks,
        scalings=torch.randn(4, num_slices, generator=generator),
        output_slices=slices,
        bias=torch.randn(4, out_features, generator=generator).to(dtype) if bias else None,
    )


def small_batch():
    return LoRABatch([3, -1, 0, 1, 0, 2, 3], num_slots=4)


def per_token(x, weights, batch, base_output):
    """Return y in float64, straight from the formula, token by token."""
    y = base_output.double().clone()
    offsets = weights.slice_offsets
    scales = (
        torch.ones(batch.token_slots.shape) if batch.token_scales is None else batch.token_scales
    )
    pairs = zip(batch.token_slots.view(-1).tolist(), scales.view(-1).tolist(), strict=True)
    for i, (slot, token_scale) in enumerate(pairs):
        t = i // batch.adapters_per_token
        if slot == -1:
            continue
        for s in range(weights.num_slices):
            r = int(weights.ranks[slot, s])
            columns = slice(offsets[s], offsets[s + 1])
            h = weights.a_of(s)[slot, :r].double() @ x[t].double()
            delta = weights.b_of(s)[slot, :, :r].double() @ h
            y[t, columns] += token_scale * weights.scalings[slot, s].double() * delta
        if weights.output_scales is not None:
            y[t] *= weights.output_scales[slot].double()
        if weights.bias is not None:
            y[t] += weights.bias[slot].double()
    return y
