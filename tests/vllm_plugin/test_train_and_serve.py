"""A trainer of this library and a running vLLM agree on every token, update after update."""

import importlib.util
import sys
from pathlib import Path

import torch
from helpers.adapters.peft_models import PROMPTS

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_and_serve.py"


def load_example():
    spec = importlib.util.spec_from_file_location("train_and_serve", EXAMPLE)
    module = sys.modules["train_and_serve"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_trainer_and_server_agree_token_by_token(make_engine, tiny):
    from transformers import AutoModelForCausalLM

    from lora_backends.hf import MultiLoRAModel
    from lora_backends.integrations.vllm import live

    example = load_example()
    engine = make_engine(max_loras=4)
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    torch.manual_seed(0)
    model = MultiLoRAModel(base, max_adapters=2, max_rank=8)
    rewards = {
        "even": lambda tokens: sum(token % 2 == 0 for token in tokens) / len(tokens),
        "small": lambda tokens: sum(token < 128 for token in tokens) / len(tokens),
    }
    prompts = [prompt[:8] for prompt in PROMPTS[:2]]
    done = example.train(
        engine.llm, model, prompts, rewards, steps=6, samples=4, length=8, learning_rate=2e-2
    )
    assert max(step.difference for step in done) < 1e-3
    # versions differ by far more than trainer and server do
    rollout = example.answers(engine.llm, prompts, ["even", "small"], 1, 8)
    now = example.logprobs_of(model, rollout)
    live.rollback(engine.llm, "even", version=5)
    later = example.answers(engine.llm, prompts, ["even"], 4, 8)
    with torch.no_grad():
        stale = example.logprobs_of(model, later)
    pairs = zip(stale, later.logprobs, strict=True)
    assert max(float((a - torch.tensor(b)).abs().max()) for a, b in pairs) > 1e-2
    assert len(now) == 4
    assert live.versions(engine.llm) == {"even": [5, 6], "small": [5, 6]}
