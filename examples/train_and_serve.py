"""Train two LoRA adapters by reinforcement, with every sample drawn by a running vLLM.

Each step, vLLM answers the prompts with both adapters in one batch, this library computes the
log-probabilities of those answers again, changes each adapter by its own rewards (REINFORCE, with
the group's mean as baseline), and pushes both into vLLM from memory. Server and trainer must
agree token by token, or the gradient would be that of another policy. The largest difference of a
step is printed; the exit status is 1 if one is above 1e-3::

    LORA_BACKENDS_VLLM=auto python examples/train_and_serve.py --model FOLDER

FOLDER holds a Transformers model with its tokenizer. It needs vLLM with the plug-in and the extra
`hf`. The two rewards are toys: many digits, and many capital letters.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams

from lora_backends.hf import MultiLoRAModel
from lora_backends.integrations.vllm import live

Reward = Callable[[list[int]], float]
CONFIG = LoraConfig(
    r=8,
    lora_alpha=16,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
)


@dataclass
class Rollout:
    """Answers of one step: a row per prompt and sample of each adapter."""

    adapters: list[str]  # of each row
    rows: list[list[int]]  # prompt and answer
    starts: list[int]  # where the answer begins
    logprobs: list[list[float]]  # the server's, of the answer's tokens


@dataclass(frozen=True)
class Step:
    """The results of one step."""

    version: int  # of the adapters that answered
    rewards: dict[str, float]  # mean by adapter
    difference: float  # largest |server's - trainer's| log-probability of a token


def answers(
    llm: LLM, prompts: Sequence[list[int]], names: Sequence[str], samples: int, length: int
) -> Rollout:
    """Let the server answer every prompt with every adapter."""
    asked = [(name, prompt) for name in names for prompt in prompts for _ in range(samples)]
    sampling = SamplingParams(temperature=1.0, max_tokens=length, logprobs=0, detokenize=False)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for _, prompt in asked],
        sampling,
        lora_request=[live.request(name) for name, _ in asked],
        use_tqdm=False,
    )
    found = Rollout([name for name, _ in asked], [], [len(prompt) for _, prompt in asked], [])
    for (_, prompt), output in zip(asked, outputs, strict=True):
        answer = output.outputs[0]
        found.rows.append([*prompt, *answer.token_ids])
        pairs = zip(answer.token_ids, answer.logprobs, strict=True)
        found.logprobs.append([logprobs[token].logprob for token, logprobs in pairs])
    return found


def logprobs_of(model: MultiLoRAModel, rollout: Rollout) -> list[torch.Tensor]:
    """Return the trainer's log-probabilities of each answer's tokens, with gradients."""
    width = max(map(len, rollout.rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rollout.rows])
    lengths = torch.tensor([len(row) for row in rollout.rows])
    mask = (torch.arange(width) < lengths[:, None]).long()
    logits = model(adapters=rollout.adapters, input_ids=ids, attention_mask=mask).logits
    # logits of a position predict the next token
    every = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    spans = zip(every, rollout.starts, rollout.rows, strict=True)
    return [row[start - 1 : len(tokens) - 1] for row, start, tokens in spans]


def loss_of(rollout: Rollout, logprobs: list[torch.Tensor], name: str, rewards: Any) -> Any:
    """Return REINFORCE's loss of one adapter."""
    own = [row for row, adapter in enumerate(rollout.adapters) if adapter == name]
    values = torch.tensor([rewards[row] for row in own])
    advantages = (values - values.mean()) / (values.std() + 1e-4)
    return -sum(a * logprobs[row].mean() for a, row in zip(advantages, own, strict=True)) / len(own)


def push(llm: LLM, model: MultiLoRAModel, names: Sequence[str], version: int) -> None:
    """Give the server the adapters as they are now."""
    for name in names:
        live.update(llm, name, model.adapter_parameters(name), CONFIG, version=version)


def train(
    llm: LLM,
    model: MultiLoRAModel,
    prompts: Sequence[list[int]],
    rewards: Mapping[str, Reward],
    *,
    steps: int = 8,
    samples: int = 4,
    length: int = 16,
    learning_rate: float = 2e-3,
) -> list[Step]:
    """Train an adapter for each reward, and return the results of every step."""
    optimizers = {}
    for name in rewards:
        model.new_adapter(name, CONFIG)
        weights = model.adapter_parameters(name).values()
        optimizers[name] = torch.optim.Adam(weights, lr=learning_rate)
    push(llm, model, list(rewards), version=0)
    done = []
    for version in range(steps):
        rollout = answers(llm, prompts, list(rewards), samples, length)
        ours = logprobs_of(model, rollout)
        pairs = zip(ours, rollout.logprobs, strict=True)
        difference = max(float((a.detach() - torch.tensor(b)).abs().max()) for a, b in pairs)
        rows = zip(rollout.adapters, rollout.rows, rollout.starts, strict=True)
        earned = [rewards[name](row[start:]) for name, row, start in rows]
        sum(loss_of(rollout, ours, name, earned) for name in rewards).backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        push(llm, model, list(rewards), version + 1)
        means = {
            name: sum(e for e, a in zip(earned, rollout.adapters, strict=True) if a == name)
            / rollout.adapters.count(name)
            for name in rewards
        }
        done.append(Step(version, means, difference))
        text = "  ".join(f"{name} {mean:.3f}" for name, mean in means.items())
        print(f"version {version}: rewards {text}  largest difference {difference:.1e}", flush=True)
    return done


def main(arguments: list[str] | None = None) -> int:
    """Train on a model's own answers; return 1 if server and trainer do not agree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a model and its tokenizer")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args(arguments)
    if not os.environ.get("LORA_BACKENDS_VLLM"):
        parser.error("set LORA_BACKENDS_VLLM=auto: vLLM takes live adapters through the plug-in")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    llm = LLM(  # two adapters, each with the version that answers and the next one
        options.model, dtype="float32", enable_lora=True, max_loras=4, max_lora_rank=8,
        max_model_len=128, max_num_seqs=32,
    )  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    model = MultiLoRAModel(base, max_adapters=2, max_rank=8)

    def share(kind: Callable[[str], bool]) -> Reward:
        def reward(tokens: list[int]) -> float:
            text = tokenizer.decode(tokens)
            return sum(map(kind, text)) / max(len(text), 1)

        return reward

    texts = ["My phone number is", "The name of the town is"]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    rewards = {"digits": share(str.isdigit), "capitals": share(str.isupper)}
    done = train(llm, model, prompts, rewards, steps=options.steps)
    return int(max(step.difference for step in done) > 1e-3)  # float32, sums in another order


if __name__ == "__main__":
    sys.exit(main())
