"""Greedy answers to a batch of prompts, with this library or with PEFT's own mixed batch."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import StoppingCriteria

from lora_backends.common.names import PEFT_BASE
from lora_backends.hf.calls.entries import RowAdapters
from lora_backends.hf.model import MultiLoRAModel


@dataclass(frozen=True)
class Prompts:
    """Prompts as the model takes them, padded on the left."""

    input_ids: torch.Tensor  # [rows, tokens] int64
    attention_mask: torch.Tensor  # [rows, tokens] int64
    tokenizer: Any

    def row(self, index: int) -> Prompts:
        """Return one prompt alone, without its padding."""
        is_token = self.attention_mask[index].bool()
        ids = self.input_ids[index][is_token][None]
        return Prompts(ids, torch.ones_like(ids), self.tokenizer)

    def inputs(self, max_new_tokens: int, min_new_tokens: int | None = None) -> dict[str, Any]:
        """Return the arguments of a greedy `generate`."""
        return {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "max_new_tokens": max_new_tokens,
            "min_new_tokens": min_new_tokens,
            "do_sample": False,
            "pad_token_id": self.tokenizer.pad_token_id,
        }

    def answers(self, sequences: torch.Tensor) -> list[list[int]]:
        """Return the new tokens of each row, without end and padding."""
        new = sequences[:, self.input_ids.shape[1] :].tolist()
        ends = {self.tokenizer.eos_token_id, self.tokenizer.pad_token_id}
        return [row[: next((i for i, t in enumerate(row) if t in ends), len(row))] for row in new]


class Watch(StoppingCriteria):  # type: ignore[misc]
    """Reports each new token of a batch and the end of each row's answer; stops nothing.

    Args:
        prompts: of the batch.
        on_token: gets the number of new tokens per row.
        on_answer: gets a row and its new tokens when its answer ends; not called for a row that
            reaches the maximal length.
    """

    def __init__(
        self,
        prompts: Prompts,
        on_token: Callable[[int], None],
        on_answer: Callable[[int, list[int]], None],
    ) -> None:
        self._prompts, self._on_token, self._on_answer = prompts, on_token, on_answer
        self._ended: set[int] = set()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Look at the tokens so far."""
        goes_on = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        rows, length = self._prompts.input_ids.shape
        if len(input_ids) != rows:  # beams
            return goes_on
        new_tokens = input_ids.shape[1] - length
        self._on_token(new_tokens)
        for row, answer in enumerate(self._prompts.answers(input_ids)):
            if len(answer) < new_tokens and row not in self._ended:
                self._ended.add(row)
                self._on_answer(row, answer)
        return goes_on


def encode(tokenizer: Any, texts: Sequence[str], chat: bool, device: torch.device) -> Prompts:
    """Tokenize prompts into one batch, padded on the left.

    Args:
        tokenizer: a Transformers tokenizer.
        texts: one prompt per row.
        chat: whether to apply the tokenizer's chat template, where it has one.
        device: of the model.

    Returns:
        The batch.
    """
    # Llama's tokenizers have none. The mask hides padding, so any token will do.
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat and tokenizer.chat_template is not None:
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
            for text in texts
        ]
    encoded = tokenizer(
        list(texts),
        return_tensors="pt",
        padding=True,
        padding_side="left",
        # A chat template writes them itself.
        add_special_tokens=not chat,
    )
    return Prompts(encoded["input_ids"].to(device), encoded["attention_mask"].to(device), tokenizer)


def rows_that_differ_alone(
    model: MultiLoRAModel,
    prompts: Prompts,
    adapters: Sequence[RowAdapters],
    answers: Sequence[list[int]],
    max_new_tokens: int,
) -> list[int]:
    """Run every row in a batch of its own; return the rows whose tokens are not the same."""
    different = []
    for row, (adapter, answer) in enumerate(zip(adapters, answers, strict=True)):
        alone = prompts.row(row)
        sequences = model.generate(adapters=[adapter], **alone.inputs(max_new_tokens))
        if alone.answers(sequences)[0] != answer:
            different.append(row)
    return different


def tokens_per_second(generate: Any, rows: int, new_tokens: int, repeats: int = 2) -> float:
    """Return the best of some timings of `generate()`, which makes rows * new_tokens tokens."""
    # A warm-up: the first run compiles kernels.
    generate()
    best = float("inf")
    # The best, because other load only adds time.
    for _ in range(repeats):
        start = time.perf_counter()
        generate()
        best = min(best, time.perf_counter() - start)
    return rows * new_tokens / best


@contextmanager
def peft_mixed_batch(
    base: nn.Module, folders: Mapping[str, Path], adapters: Sequence[str | None]
) -> Iterator[Any]:
    """Yield `base` wrapped by PEFT, and the names that its mixed batch takes; unwrap at the end.

    Args:
        base: a Transformers model.
        folders: adapter name to checkpoint, at least one.
        adapters: per row a name or None.

    Yields:
        The PEFT model and `adapter_names`.
    """
    from peft import PeftModel

    (first, folder), *others = folders.items()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(base, str(folder), adapter_name=first)
        for name, other in others:
            model.load_adapter(str(other), adapter_name=name)
    try:
        yield model.eval(), [name or PEFT_BASE for name in adapters]
    finally:
        model.unload()
