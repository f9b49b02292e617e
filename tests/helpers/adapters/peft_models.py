"""A tiny model, its PEFT adapters, and what PEFT answers, for the tests inside real engines.

This module is imported by the processes of an engine, too: it imports neither torch nor an engine.
"""

import os
import warnings
from pathlib import Path

VOCAB, HIDDEN, LAYERS = 256, 128, 2
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPTS = [[(13 * row + 7 * i * i + i) % (VOCAB - 8) + 4 for i in range(40)] for row in range(8)]


def save_tiny(folder, **options):
    """Save a random Llama, small enough to be quick, and return its folder."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=192,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        dtype="float32",
        **{"tie_word_embeddings": False, "eos_token_id": 1, "bos_token_id": 0, **options},
    )
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


def save_adapter(folder, base, seed, **options):
    """Save a random adapter of PEFT for the model in a folder, and return its own."""
    import peft
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    starts_from_base = isinstance(options.get("init_lora_weights"), str)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
        for path, parameter in model.named_parameters():
            change = torch.randn(parameter.shape, generator=generator)
            if "lora_magnitude" in path:
                parameter.data.mul_(1 + 0.2 * change)
            elif "trainable_tokens" in path or ("lora_" in path and starts_from_base):
                parameter.data.add_(0.15 * change)
            elif "lora_" in path:
                parameter.data.copy_(0.15 * change)
        model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def greedy_tokens(model, prompt, length):
    """Return the greedy tokens of Transformers' model, or PEFT's."""
    import torch

    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


class PeftAnswers:
    """A base model with each adapter, or None, and its greedy tokens, each made once.

    Args:
        base: the model's folder.
        adapters: the folder of each adapter by name.
    """

    def __init__(self, base, adapters):
        self.base, self.adapters = base, adapters
        self._models, self._tokens = {}, {}

    def model(self, name):
        import peft
        import torch
        import transformers

        if name not in self._models:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                self.base, dtype=torch.float32
            )
            if name is not None:
                model = peft.PeftModel.from_pretrained(model, self.adapters[name])
            self._models[name] = model.eval()
        return self._models[name]

    def tokens(self, prompt, name, length=6):
        key = tuple(prompt), name, length
        if key not in self._tokens:
            self._tokens[key] = greedy_tokens(self.model(name), prompt, length)
        return self._tokens[key]


def smollm2_in(environment):
    """Return the folder of SmolLM2 as safetensors, which `make test-ENVIRONMENT` has saved."""
    import pytest

    root = Path(__file__).parents[3]
    folder = Path(os.environ.get("SMOLLM2", root / f".venv-{environment}" / "smollm2"))
    if not (folder / "model.safetensors").exists():
        pytest.skip(f"SmolLM2 is not saved as safetensors: run `make test-{environment}`")
    return folder
