"""Small random models of many architectures, what an adapter may name in them, and their inputs."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from helpers.sweeps import sweep, sweep_variants
from torch import nn
from transformers.pytorch_utils import Conv1D

COMMON = (
    "Llama", "Llama", "tied llama", "llama with biases", "Qwen2", "Qwen3", "Gemma", "Gemma2",
    "gemma3", "GPT2", "GPT2", "Mistral", "Phi3", "GPTNeoX", "OPT", "Bloom", "Cohere", "Olmo2",
    "mixtral", "mixtral", "Qwen2Moe", "GptOss", "Llama (classes)", "Qwen2 (classes)",
    "GPT2 (classes)", "Llama (tokens)", "Bert", "Roberta", "ModernBert", "DebertaV2",
    "Bert (tokens)", "Bert (hidden states)", "Llama (hidden states)", "Qwen2 (hidden states)",
    "T5", "Bart",
)  # fmt: skip
OTHERS = sorted(
    name
    for name, (_, _, _, kind) in sweep.CASES.items()
    if kind in ("text", "seq2seq") and name not in COMMON
)
OTHER_SHARE = 0.15
CHANGES_ITSELF = "BigBird"
"""It replaces its attention at the first short pass; from then on the wrapper refuses all calls."""

HIDDEN = " (hidden states)"
IDS = (10, 58)  # of ordinary tokens; the lower ones are padding, ends and invocations
INVOCATION = [9, 8]


@dataclass
class Base:
    """A model, and the names that an adapter's configuration may use."""

    name: str
    model: Any
    linear: list[str]  # paths
    embeddings: list[str]
    norms: list[str]
    experts: list[str]  # paths of parameters with an expert axis
    layers: str | None  # the list of the layers
    is_causal: bool  # a language model with a cache of keys and values
    takes_decoder_ids: bool

    @property
    def names(self) -> list[str]:
        """Return the last parts of the paths of the linear layers."""
        return sorted({path.rpartition(".")[2] for path in self.linear})


def draw_base(draw: random.Random) -> Base:
    name = draw.choice(OTHERS) if draw.random() < OTHER_SHARE else draw.choice(COMMON)
    name = "Bert" if name == CHANGES_ITSELF else name
    return describe(name, build(name))


def build(name: str) -> Any:
    if name.endswith(HIDDEN):
        return sweep.build(name.removesuffix(HIDDEN)).base_model.eval()
    return sweep_variants.build(name) if name in sweep_variants.BASES else sweep.build(name)


def describe(name: str, model: Any) -> Base:
    modules = dict(model.named_modules())
    kind = type(model).__name__
    return Base(
        name,
        model,
        [p for p, m in modules.items() if isinstance(m, nn.Linear | Conv1D)],
        [p for p, m in modules.items() if isinstance(m, nn.Embedding) and "position" not in p],
        [
            p
            for p, m in modules.items()
            if "norm" in p.lower() and next(m.parameters(), None) is not None
        ],
        [p for p, q in model.named_parameters() if q.ndim == 3 and "expert" in p],
        next(
            (p.rpartition(".")[2] for p, m in modules.items() if isinstance(m, nn.ModuleList)), None
        ),
        is_causal=kind.endswith(("ForCausalLM", "LMHeadModel")) and _has_plain_cache(model),
        takes_decoder_ids=bool(model.config.is_encoder_decoder),
    )


def _has_plain_cache(model: Any) -> bool:
    """Return whether a second call goes on from a cache of keys and values alone."""
    ids = torch.tensor([[11, 12]])
    with torch.no_grad():
        cache = getattr(model(input_ids=ids, use_cache=True), "past_key_values", None)
    kinds = {type(layer).__name__ for layer in getattr(cache, "layers", ())}
    return bool(kinds) and kinds <= {"DynamicLayer", "DynamicSlidingWindowLayer"}


def draw_inputs(draw: random.Random, base: Base, rows: int) -> dict[str, torch.Tensor]:
    """Return ids of some rows, often padded on the left, some with an invocation of aLoRA."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    length = draw.choice([1, 2, rows, draw.randint(2, 9), draw.randint(4, 9)])
    ids = torch.randint(*IDS, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    padded = draw.random() < 0.5
    for row in range(rows):
        if draw.random() < 0.5 and length > 3:
            at = draw.randint(1, length - 2)
            ids[row, at : at + 2] = torch.tensor(INVOCATION)
        if padded:
            mask[row, : draw.randint(0, (length - 1) // 2)] = 0
    given = {"input_ids": ids}
    if padded or draw.random() < 0.7:
        given["attention_mask"] = mask
    if base.takes_decoder_ids:
        given["decoder_input_ids"] = torch.randint(*IDS, (rows, 3), generator=generator)
    return given
