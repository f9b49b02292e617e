"""Random batches of many architectures: every row is PEFT's, or a module is refused by name."""

import random

import pytest
import torch
from helpers.sweeps.architectures import KNOWN, TOKENS_PER_IMAGE, build, in_peft, inputs_of
from transformers.pytorch_utils import Conv1D

from lora_backends import UnsupportedInputError
from lora_backends.hf import MultiLoRAModel

BOUND = 2e-5
"""Most that a logit may differ, relative to the largest of its row where that is over 1: batches of
other shapes sum float32 in another order. Another row's adapter changes 0.1 and more."""

NOT_ALWAYS = [n for n in KNOWN if n in ("clip", "rwkv", "deberta", "vipllava")]
"""Architectures with a module whose rows cannot be known."""

ROW_BY_ROW = [name for name in KNOWN if name not in ("t5", *NOT_ALWAYS)]
"""Architectures of which nothing may be refused."""

GENERATES = {"llama", "gpt2", "opt", "mixtral", "xlnet", "rwkv", "deepseek_v3", *TOKENS_PER_IMAGE}
NEW_TOKENS = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


class Case:
    """A random model, two adapters of random modules, and a batch."""

    def __init__(self, name, seed):
        self.name, self.chance = name, random.Random(f"{name} {seed}")
        base, self.seed = build(name, seed), seed
        targets = self.targets(base)
        adapters = {adapter: in_peft(base, targets, 2 * seed + i) for i, adapter in enumerate("ab")}
        self.peft = {None: build(name, seed), **{n: model for n, (model, _) in adapters.items()}}
        self.model = MultiLoRAModel(base, "torch_ref", max_rank=3, fuse=self.chance.random() < 0.5)
        for adapter, (_, checkpoint) in adapters.items():
            self.model.add_adapter(adapter, checkpoint)
        rows = self.chance.randint(2, 4)
        images = None
        if name in TOKENS_PER_IMAGE:
            images = [self.chance.randint(0, 3) for _ in range(rows)]
        length = self.chance.choice([rows, rows, self.chance.randint(2, 7)])
        self.inputs = inputs_of(name, rows, length, seed, images)
        self.rows = [self.chance.choice([None, "a", "b"]) for _ in range(rows)]
        if self.chance.random() < 0.2:
            self.rows = [self.rows[0]] * rows

    def targets(self, base):
        embedding = self.model_embedding(base)
        fused = self.name.startswith("deepseek")  # PEFT takes names of the mlp for experts there
        paths = [
            path
            for path, module in base.named_modules()
            if isinstance(module, (torch.nn.Linear, Conv1D)) or module is embedding
            if not (fused and ".mlp." in path)
        ]
        if self.chance.random() < 0.4:
            return paths
        return self.chance.sample(paths, self.chance.randint(1, len(paths)))

    def model_embedding(self, base):
        if self.name in ("clip", "wav2vec2") or self.chance.random() < 0.5:
            return None
        return base.get_input_embeddings()

    def check(self):
        if self.chance.random() < 0.5 and "pixel_values" not in self.inputs:
            tokens = next(iter(self.inputs.values())).shape[1]
            with self.model.prepare(self.rows[::-1], tokens=tokens) as step:
                step.update(self.rows)
                logits = self.logits(self.model, adapters=step)
        else:
            logits = self.logits(self.model, adapters=self.rows)
        alone = {adapter: self.logits(self.peft[adapter]) for adapter in {*self.rows}}
        for row, adapter in enumerate(self.rows):
            expected = alone[adapter][row]
            bound = BOUND * max(1.0, expected.abs().max().item())
            torch.testing.assert_close(logits[row], expected, rtol=0, atol=bound)
        if self.name in GENERATES and self.chance.random() < 0.3:
            tokens = self.model.generate(adapters=self.rows, **self.inputs, **NEW_TOKENS)
            for row, adapter in enumerate(self.rows):
                expected = self.peft[adapter].generate(**self.inputs, **NEW_TOKENS)
                assert torch.equal(tokens[row], expected[row])

    @torch.no_grad()
    def logits(self, model, **adapters):
        return model(**adapters, **self.inputs)[
            "logits_per_text" if self.name == "clip" else "logits"
        ]


def check(name, seed, may_refuse):
    try:
        case = Case(name, seed)
        case.check()
    except UnsupportedInputError as error:
        assert may_refuse and len(set(case.rows)) > 1, error
        assert str(error).startswith("module ") and "to do: split the batch" in str(error)


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_every_row_is_pefts(name):
    check(name, 0, may_refuse=False)


@pytest.mark.parametrize("name", NOT_ALWAYS)
def test_every_row_is_pefts_or_refused_by_name(name):
    check(name, 0, may_refuse=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROW_BY_ROW + NOT_ALWAYS)
def test_every_row_is_pefts_in_many_batches(name):
    for seed in range(1, 4):
        check(name, seed, may_refuse=name in NOT_ALWAYS)
