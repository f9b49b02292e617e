"""Train the three example LoRA adapters in one batch, each with its own optimizer.

Every step runs the base model once, on rows of all three adapters. Each adapter gets the gradients
that PEFT computes for it alone, has its own optimizer, learning rate and clipping, and answers a
question now and then, so that one sees it learn. The result is a PEFT checkpoint for each, and a
plot of their losses::

    make train-demo                           # about a minute on two free cores
    python examples/train_many_adapters.py    # the same in an environment of your own

This is an example and not a command, because a training loop is its user's own code: copy it, and
change it. Its base model, texts and configurations are those of ``train_adapters.py``, which trains
the same adapters one after another with PEFT.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from matplotlib.figure import Figure
from peft import PeftModel
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from train_adapters import RECIPES, TEXTS, chat_ids, collate, load_base, read_examples

from lora_backends.hf import MultiLoRAModel

QUESTION = "Why is the sky blue?"
Example = tuple[list[int], int]  # tokens, and how many of them are the prompt


@dataclass
class Learner:
    """One adapter: its texts, and its own optimizer, clipping and losses."""

    examples: list[Example]
    optimizer: torch.optim.Optimizer
    clip: float
    losses: list[float] = field(default_factory=list)

    def batches(self, rows: int) -> Iterator[list[Example]]:
        """Yield batches of its texts, in a new order each time that all were read."""
        while True:
            random.shuffle(self.examples)
            for first in range(0, len(self.examples) - rows + 1, rows):
                yield self.examples[first : first + rows]

    def step(self) -> None:
        """Change the adapter's parameters in place; the next call and `generate` see it."""
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        torch.nn.utils.clip_grad_norm_(weights, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


# Each adapter has settings of its own; nothing has to agree with the others.
OPTIMIZERS: dict[str, Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "pirate": lambda weights: torch.optim.AdamW(weights, lr=4e-3, weight_decay=0.01),
    "json": lambda weights: torch.optim.Adam(weights, lr=3e-3),
    "telegram": lambda weights: torch.optim.NAdam(weights, lr=4e-3),
}
CLIPS = {"pirate": 1.0, "json": 0.5, "telegram": 1.0}


def add_learners(model: MultiLoRAModel, tokenizer: Any) -> dict[str, Learner]:
    """Put a new adapter of each recipe into the model."""
    learners = {}
    for name, recipe in RECIPES.items():
        model.new_adapter(name, recipe.lora)
        weights = model.adapter_parameters(name).values()
        texts = read_examples(TEXTS / f"{name}.jsonl", tokenizer)
        learners[name] = Learner(texts, OPTIMIZERS[name](weights), CLIPS[name])
    return learners


def train(
    model: MultiLoRAModel,
    tokenizer: Any,
    learners: dict[str, Learner],
    steps: int,
    rows: int,
    console: Console,
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Train all adapters together, and return the last batch and the adapter of each of its rows.

    Args:
        model: with the adapters.
        tokenizer: of the model.
        learners: by the name of the adapter.
        steps: of each optimizer.
        rows: of each adapter in a batch.
        console: for the progress and the answers.
    """
    adapters = [name for name in learners for _ in range(rows)]
    sources = [learner.batches(rows) for learner in learners.values()]
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("training", total=steps)
        for step in range(steps):
            if step % max(1, steps // 3) == 0:
                show_answers(model, tokenizer, step, console)
            texts = [text for source in sources for text in next(source)]
            batch = collate(texts, tokenizer.pad_token_id)
            labels = batch.pop("labels")
            model.train()
            logits = model(adapters=adapters, **batch).logits
            losses = model.adapter_losses(logits, labels, adapters)
            sum(losses.values()).backward()  # type: ignore[union-attr]
            for name, learner in learners.items():
                learner.step()
                learner.losses.append(losses[name].item())
            now = "  ".join(f"{name} {learners[name].losses[-1]:.2f}" for name in learners)
            progress.update(task, advance=1, description=now)
    show_answers(model, tokenizer, steps, console)
    return {**batch, "labels": labels}, adapters


def show_answers(model: MultiLoRAModel, tokenizer: Any, step: int, console: Console) -> None:
    """Print what the adapters answer now, in one batch."""
    model.eval()  # without dropout
    names = list(RECIPES)
    prompt = chat_ids(tokenizer, QUESTION)
    ids = torch.tensor([prompt] * len(names))
    tokens = model.generate(
        ids,
        adapters=names,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=16,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    console.print(f"after {step} steps: {QUESTION}", style="bold", highlight=False)
    for name, row in zip(names, tokens, strict=True):
        text = tokenizer.decode(row[len(prompt) :], skip_special_tokens=True)
        line = f"  {name + ':':<10}{' '.join(text.split())}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def losses_of(model: MultiLoRAModel, batch: dict[str, torch.Tensor], adapters: list[str]) -> Any:
    """Return each adapter's loss on a batch, without gradients and dropout."""
    model.eval()
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    with torch.no_grad():
        logits = model(adapters=adapters, **inputs).logits
    return model.adapter_losses(logits, batch["labels"], adapters)


def check_with_peft(
    base: torch.nn.Module,
    folders: dict[str, Path],
    expected: dict[str, torch.Tensor],
    batch: dict[str, torch.Tensor],
    adapters: list[str],
    console: Console,
) -> bool:
    """Load the checkpoints with PEFT, and return whether each has the loss that is expected."""
    same = True
    for name, folder in folders.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = PeftModel.from_pretrained(base, folder).eval()
        own = [row for row, adapter in enumerate(adapters) if adapter == name]
        with torch.no_grad():
            loss = model(**{key: x[own] for key, x in batch.items()}).loss.item()
        ours = expected[name].item()
        # Sums of float32 in another order: far above their rounding, far below a step's change.
        same &= abs(loss - ours) <= 1e-3 * max(1.0, abs(ours))
        console.print(
            f"{folder}: loss {ours:.5f}, by PEFT {loss:.5f}", markup=False, soft_wrap=True
        )
        base = model.unload()
    return same


def plot(learners: dict[str, Learner], file: Path) -> None:
    """Draw the loss of each adapter against its steps."""
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for name, learner in learners.items():
        axes.plot(range(1, len(learner.losses) + 1), learner.losses, label=name)
    axes.set(xlabel="step", ylabel="loss", ylim=(0, None), title="Three adapters, one batch")
    axes.legend(frameon=False)
    figure.savefig(file)


def main(arguments: list[str] | None = None) -> int:
    """Train, save, plot and check; return 1 if PEFT computes another loss."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rows", type=int, default=1, help="of each adapter in a batch")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("trained_adapters"))
    chosen = parser.parse_args(arguments)
    random.seed(chosen.seed)
    torch.manual_seed(chosen.seed)
    transformers.logging.disable_progress_bar()
    console = Console()
    with console.status("loading the base model ..."):
        base, tokenizer = load_base()
        model = MultiLoRAModel(base, backend=chosen.backend, max_adapters=3, max_rank=8)
        learners = add_learners(model, tokenizer)
    batch, adapters = train(model, tokenizer, learners, chosen.steps, chosen.rows, console)
    folders = {name: model.save_adapter(name, chosen.output / name) for name in learners}
    plot(learners, chosen.output / "losses.svg")
    console.print(f"{chosen.output / 'losses.svg'}: the losses", markup=False, soft_wrap=True)
    expected = losses_of(model, batch, adapters)
    same = check_with_peft(model.detach(), folders, expected, batch, adapters, console)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
