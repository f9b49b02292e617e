"""A model of one layer, adapters for it in several versions, and the tokens that each gives."""

import copy
import functools
import json
import tempfile
from pathlib import Path
from zlib import crc32

import torch
import transformers
from safetensors.torch import save

from lora_backends.adapters import Checkpoint, ModuleSpec, read_checkpoint
from lora_backends.hf import MultiLoRAModel

from .adapters import CONFIG, WEIGHTS
from .operations import NAMES, VERSIONS

VOCABULARY, POSITIONS, MAX_RANK, MOST_NEW = 40, 48, 3, 6
ATTENTION = "model.layers.0.self_attn"
SHAPES = {  # of the weights of modules with LoRA
    f"{ATTENTION}.q_proj": (8, 8),
    f"{ATTENTION}.v_proj": (8, 8),
    "model.layers.0.mlp.down_proj": (8, 12),
    "lm_head": (VOCABULARY, 8),
}

Words = tuple[tuple[str, object], ...]
"""Words of a GenerationConfig with their values; tuples stand for lists."""


def as_options(words: Words) -> dict[str, object]:
    """Return words as the arguments of a call."""
    return {word: list(v) if isinstance(v, tuple) else v for word, v in words}


@functools.cache
def _template() -> torch.nn.Module:
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=POSITIONS,
    )
    base = transformers.LlamaForCausalLM(config).eval()
    base.generation_config = transformers.GenerationConfig(
        max_new_tokens=MOST_NEW, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return base


def make_base() -> torch.nn.Module:
    """Return a new model, the same each time."""
    return copy.deepcopy(_template())


def files_of(name: str, version: int) -> dict[str, bytes]:
    """Return the files of an adapter; versions of a name differ in their values alone."""
    seed = crc32(name.encode())
    generator = torch.Generator().manual_seed(seed + version)
    rank = 1 + seed % MAX_RANK
    tensors = {}
    for path, (out_features, in_features) in SHAPES.items():
        for key, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
            value = torch.randn(shape, generator=generator)
            tensors[f"base_model.model.{path}.lora_{key}.weight"] = value
    targets = [path.rpartition(".")[2] for path in SHAPES]
    config = {"peft_type": "LORA", "target_modules": targets, "r": rank, "lora_alpha": rank}
    return {CONFIG: json.dumps(config).encode(), WEIGHTS: save(tensors)}


@functools.cache
def checkpoints() -> dict[tuple[str, int], Checkpoint]:
    """Return every version of every adapter, as its files are read without disturbance."""
    specs = {path: ModuleSpec("linear", shape[1], shape[0]) for path, shape in SHAPES.items()}
    with tempfile.TemporaryDirectory() as root:
        found = {}
        for name in NAMES:
            for version in range(VERSIONS):
                folder = Path(root, f"{name} {version}")
                folder.mkdir()
                for file, content in files_of(name, version).items():
                    (folder / file).write_bytes(content)
                found[name, version] = read_checkpoint(folder, specs)
        return found


@functools.cache
def _oracle() -> MultiLoRAModel:
    return MultiLoRAModel(make_base(), "torch_ref", max_adapters=1, max_rank=MAX_RANK)


@functools.cache
def alone(
    name: str | None, version: int, prompt: tuple[int, ...], words: Words = ()
) -> tuple[int, ...]:
    """Return the tokens of `generate` with one adapter and one prompt."""
    oracle, ids = _oracle(), torch.tensor([prompt])
    if name is not None:
        oracle.add_adapter("alone", checkpoints()[name, version])
    adapter = None if name is None else "alone"
    tokens = oracle.generate(
        adapters=[adapter],
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **as_options(words),
    )
    return tuple(tokens[0, len(prompt) :].tolist())
