"""Small adapters in several versions, and the contents that a slot must have for each."""

import json
import random
from pathlib import Path
from zlib import crc32

import torch
from safetensors.torch import save

from lora_backends.adapters import AdapterPool, Checkpoint, ModuleSpec, read_checkpoint

SPECS = {
    "q": ModuleSpec("linear", 6, 4),
    "k": ModuleSpec("linear", 6, 3),
    "v": ModuleSpec("linear", 6, 3),
    "o": ModuleSpec("linear", 4, 6),
    "embed": ModuleSpec("embedding", 9, 4),
}
GROUPS = [("q", "k", "v")]
MAX_RANK = 5
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def make_pool(max_adapters: int = 3) -> AdapterPool:
    return AdapterPool(SPECS, max_adapters, MAX_RANK, groups=GROUPS)


def files_of(name: str, version: int = 0, patterns: bool = False) -> dict[str, bytes]:
    """Return the files of an adapter: some of the modules, unequal ranks, random values.

    Names with an odd checksum have biases, and then no embedding. Versions of a name differ in
    their values alone. With patterns some give their modules as one, which a process matches.
    """
    seed = crc32(name.encode())
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed + version)
    biased = bool(seed % 2)
    paths = [path for path in SPECS if not (biased and SPECS[path].kind == "embedding")]
    tensors, ranks = {}, {}
    for path in draw.sample(paths, draw.randint(1, len(paths))):
        rank, spec = draw.randint(1, MAX_RANK), SPECS[path]
        ranks[path] = rank
        linear = spec.kind == "linear"
        key_a, key_b = ("A.weight", "B.weight") if linear else ("embedding_A", "embedding_B")
        for key, shape in ((key_a, (rank, spec.in_features)), (key_b, (spec.out_features, rank))):
            value = torch.randn(shape, generator=generator)
            tensors[f"base_model.model.{path}.lora_{key}"] = value
        if biased:
            bias = torch.randn(spec.out_features, generator=generator)
            tensors[f"base_model.model.{path}.lora_B.bias"] = bias
    targets = "|".join(ranks) if patterns and draw.random() < 0.2 else sorted(ranks)
    config = {"peft_type": "LORA", "target_modules": targets, "lora_bias": biased}
    return {CONFIG: json.dumps({**config, "rank_pattern": ranks}).encode(), WEIGHTS: save(tensors)}


def save_adapter(root: Path, name: str, version: int = 0, patterns: bool = False) -> Path:
    """Save the adapter that belongs to a name."""
    folder = root / name
    folder.mkdir()
    for file, content in files_of(name, version, patterns).items():
        (folder / file).write_bytes(content)
    return folder


def read_version(root: Path, name: str, version: int) -> Checkpoint:
    """Return an adapter as a reader of its files gets it."""
    return read_checkpoint(save_adapter(root / f"{version}", name, version), SPECS)


def faults(pool: AdapterPool, adapters: dict[str, Checkpoint]) -> list[str]:
    """Return every loaded name that would be served other weights than those of its checkpoint."""
    return [
        f"{name}: wrong weights of {path} in slot {pool.slots.place(name)}"
        for name in pool.slots.names
        for path in pool.modules
        if not holds(pool, path, pool.slots.place(name), adapters[name])
    ]


def holds(pool: AdapterPool, path: str, slot: int, adapter: Checkpoint) -> bool:
    """Return whether a slot has the weights of an adapter for one module, in each of its stacks."""
    delta, stack = adapter.modules.get(path), pool.active_weights.get(path)
    if stack is None:
        return delta is None
    tables = [(stack, 0)]
    if path in GROUPS[0] and GROUPS[0][0] in pool.shared_weights:
        tables.append((pool.shared_weights[GROUPS[0][0]], GROUPS[0].index(path)))
    return all(_holds(weights, index, slot, delta) for weights, index in tables)


def _holds(weights, index, slot, delta):
    columns = slice(weights.slice_offsets[index], weights.slice_offsets[index + 1])
    bias = None if weights.bias is None else weights.bias[slot, columns]
    rank = int(weights.ranks[slot, index])
    if delta is None:
        return rank == 0 and (bias is None or not bias.any())
    biases = (delta.bias, bias) if delta.bias is not None else (torch.zeros(1), torch.zeros(1))
    return (
        rank == delta.rank
        and float(weights.scalings[slot, index]) == float(torch.tensor(delta.scaling))
        and torch.equal(weights.lora_a[slot, index, :rank], delta.lora_a.to(weights.dtype))
        and torch.equal(weights.lora_b[slot, columns, :rank], delta.lora_b.to(weights.dtype))
        and (delta.bias is not None or bias is None or not bias.any())
        and (biases[1] is not None and torch.equal(biases[0], biases[1]))
    )
