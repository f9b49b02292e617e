"""Watch reports each row of a batch when its answer ends."""

from types import SimpleNamespace

import torch

from lora_backends.hf.generating.greedy import Prompts, Watch

END, PAD = 2, 0


def test_each_row_is_told_of_once_when_it_ends():
    prompts = Prompts(
        torch.ones(3, 2, dtype=torch.int64),
        torch.ones(3, 2, dtype=torch.int64),
        SimpleNamespace(eos_token_id=END, pad_token_id=PAD),
    )
    told, counts = [], []
    watch = Watch(prompts, counts.append, lambda row, tokens: told.append((row, tokens)))
    new = torch.tensor([[5, 6, 7], [5, END, PAD], [END, PAD, PAD]])
    for length, expected in ((1, [(2, [])]), (2, [(2, []), (1, [5])]), (3, [(2, []), (1, [5])])):
        stops = watch(torch.cat([prompts.input_ids, new[:, :length]], dim=1), None)
        assert told == expected
        assert stops.tolist() == [False] * 3
    assert counts == [1, 2, 3]
    watch(torch.ones(6, 3, dtype=torch.int64), None)  # beams: not rows of the batch
    assert counts == [1, 2, 3]
