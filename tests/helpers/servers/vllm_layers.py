"""LoRA modules whose stacks are laid out as vLLM does, and their plain products."""

from types import SimpleNamespace

import torch

SLOTS, RANK, WIDTH = 3, 4, 16
SLICES = (8, 6, 10)
IDS = [0, 7, 9, 7, 5, 0, 5]  # adapters by token; slots: 5 -> 1, 7 -> 0, 9 -> 2
INDEX_TO_ID = [7, 5, 9]
RANKS = {7: [4, 2, 0], 5: [1, 3, 4], 9: [0, 0, 2]}


def mapping(tokens, prompts=None, prefill=True):
    from vllm.lora.layers import LoRAMapping

    return LoRAMapping(tuple(tokens), tuple(tokens if prompts is None else prompts), prefill)


def make_module(wrapper, slices=SLICES, rank=RANK, **more):
    """Return a module with random stacks and the methods that the plug-in follows."""
    from lora_backends.integrations.vllm import layers

    generator = torch.Generator().manual_seed(1)
    a = tuple(torch.zeros(SLOTS, 1, rank, WIDTH) for _ in slices)
    b = tuple(torch.zeros(SLOTS, 1, width, rank) for width in slices)

    def reset_lora(index):
        for stack in (*a, *b):
            stack[index] = 0

    def set_lora(index, lora_a, lora_b):
        module.reset_lora(index)
        for i, (each_a, each_b) in enumerate(zip(lora_a, lora_b, strict=True)):
            if each_a is not None:
                a[i][index, 0, : each_a.shape[0]] = each_a
                b[i][index, 0, :, : each_b.shape[1]] = each_b

    module = SimpleNamespace(
        lora_a_stacked=a, lora_b_stacked=b, set_lora=set_lora, reset_lora=reset_lora
    )
    vars(module).update(more)
    layers.adopt(module, wrapper)
    for slot, id_ in enumerate(INDEX_TO_ID):
        ranks = RANKS[id_][: len(slices)]
        lora_a = [torch.randn(r, WIDTH, generator=generator) if r else None for r in ranks]
        lora_b = [
            torch.randn(width, r, generator=generator) if r else None
            for width, r in zip(slices, ranks, strict=True)
        ]
        module.set_lora(slot, lora_a, lora_b)
    return module


def delta(module, x, ids):
    """Return the LoRA of each row by plain products over the whole padded rank."""
    rows = []
    for row, id_ in zip(x, ids, strict=True):
        slot = INDEX_TO_ID.index(id_) if id_ else None
        parts = [
            torch.zeros(b.shape[2]) if slot is None else b[slot, 0] @ (a[slot, 0] @ row)
            for a, b in zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)
        ]
        rows.append(torch.cat(parts))
    return torch.stack(rows)
