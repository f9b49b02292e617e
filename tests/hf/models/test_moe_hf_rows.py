"""Random batches of many mixtures of experts: every row is PEFT's."""

import random

import pytest
import torch
from helpers.sweeps.mixtures import ATTENTION, KNOWN, UP, build, in_peft

from lora_backends.hf import MultiLoRAModel
from lora_backends.hf.hooks.expert_products import FORWARDS

BOUND = 2e-5
"""Most that a logit may differ, relative to the largest of its row where that is over 1."""

NEW_TOKENS = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def check(name, seed, folder):
    """Compare a random batch of two random adapters with PEFT."""
    chance = random.Random(f"{name} {seed}")
    router = "router" if name in ("gpt_oss", "phimoe") else "gate"
    parameters = [
        f"experts.{UP.get(name, 'gate_up_proj')}",
        "experts.down_proj",
        f"{router}.weight",
    ]
    implementation = chance.choice([*FORWARDS])
    bases = {}
    model = MultiLoRAModel(build(name, seed), "torch_ref", max_rank=5, fuse=chance.random() < 0.5)
    chosen = chance.sample(parameters, chance.randint(1, 3))  # PEFT loads others in other models
    for adapter in "ab":
        config = {
            "r": chance.randint(1, 5),
            "lora_alpha": chance.randint(1, 8),
            "use_rslora": chance.random() < 0.5,
            "target_modules": [ATTENTION.get(name, "q_proj")] * chance.randint(0, 1),
            "target_parameters": chosen,
        }
        bases[adapter] = in_peft(build(name, seed), folder / adapter, seed, std=0.2, **config)
        model.load_adapter(adapter, folder / adapter)
    bases[None] = build(name, seed)
    for base in (model.base, *bases.values()):
        base.set_experts_implementation(implementation)
    rows = [chance.choice([None, "a", "b"]) for _ in range(chance.randint(2, 4))]
    length = chance.choice([len(rows), chance.randint(1, 7)])
    ids = torch.randint(1, 60, (len(rows), length), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        logits = model(adapters=rows, input_ids=ids).logits
        alone = {adapter: bases[adapter](input_ids=ids).logits for adapter in {*rows}}
        for row, adapter in enumerate(rows):
            expected = alone[adapter][row]
            bound = BOUND * max(1.0, expected.abs().max().item())
            torch.testing.assert_close(logits[row], expected, rtol=0, atol=bound)
    if chance.random() < 0.4:
        tokens = model.generate(adapters=rows, input_ids=ids, **NEW_TOKENS)
        for row, adapter in enumerate(rows):
            expected = bases[adapter].generate(input_ids=ids, **NEW_TOKENS)
            assert torch.equal(tokens[row], expected[row])


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_every_row_is_pefts_in_many_batches(name, tmp_path):
    for seed in range(3):
        check(name, seed, tmp_path / str(seed))


def one_layer():
    base = build("qwen3_moe")
    del base.model.layers[1:]
    return base


@pytest.mark.slow
def test_a_compiled_model_follows_an_update(tmp_path):
    config = {
        "target_modules": ["q_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "gate.weight"],
    }
    model = MultiLoRAModel(one_layer(), "torch_ref", max_rank=8)
    bases = {None: one_layer()}
    for seed, adapter in enumerate("ab"):
        folder = tmp_path / adapter
        bases[adapter] = in_peft(one_layer(), folder, seed, **config)
        model.load_adapter(adapter, folder)
    ids = torch.randint(1, 60, (3, 5), generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(model.base, backend="eager")
    rows = ["a", None, "b"]
    with model.prepare(rows[::-1], tokens=5) as step:
        model(adapters=step, input_ids=ids)
        with model.using(step):
            compiled(input_ids=ids)
            step.update(rows)
            logits = compiled(input_ids=ids).logits
    with torch.no_grad():
        expected = [bases[adapter](input_ids=ids).logits[row] for row, adapter in enumerate(rows)]
    torch.testing.assert_close(logits, torch.stack(expected), rtol=0, atol=BOUND)
