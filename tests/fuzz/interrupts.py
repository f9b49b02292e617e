"""Loads that a signal interrupts at a random moment, and what has to hold after each.

python -m tests.fuzz.interrupts --loads 10000 --result results.json
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

import torch
from safetensors.torch import save_file

from lora_backends.adapters import AdapterPool, Checkpoint, ModuleSpec, read_checkpoint

from .running import keep

SPECS = {
    "q": ModuleSpec("linear", 6, 4),
    "k": ModuleSpec("linear", 6, 3),
    "v": ModuleSpec("linear", 6, 3),
    "o": ModuleSpec("linear", 4, 6),
    "embed": ModuleSpec("embedding", 9, 4),
}
GROUPS = [("q", "k", "v")]
MAX_RANK = 5


def make_pool(max_adapters: int = 3) -> AdapterPool:
    return AdapterPool(SPECS, max_adapters, MAX_RANK, groups=GROUPS)


def save_adapter(root: Path, name: str) -> Path:
    """Save the adapter that belongs to a name: some of the modules, unequal ranks, random values.

    Names with an odd checksum have biases, and then no embedding.
    """
    seed = crc32(name.encode())
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
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
    targets = "|".join(ranks) if draw.random() < 0.2 else sorted(ranks)  # the former by a process
    config = {"peft_type": "LORA", "target_modules": targets, "lora_bias": biased}
    folder = root / name
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({**config, "rank_pattern": ranks}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def faults(pool: AdapterPool, adapters: dict[str, Checkpoint]) -> Iterator[str]:
    """Yield every loaded name that would be served other weights than those of its checkpoint."""
    for name in pool.slots.names:
        slot = pool.slots.slot(name)
        for path in pool.modules:
            delta, stack = adapters[name].modules.get(path), pool.active_weights.get(path)
            if stack is None:
                if delta is not None:
                    yield f"{name}: {path} is not active"
                continue
            tables = [(stack, 0)]
            if path in GROUPS[0] and GROUPS[0][0] in pool.shared_weights:
                tables.append((pool.shared_weights[GROUPS[0][0]], GROUPS[0].index(path)))
            for weights, index in tables:
                if not _holds(weights, index, slot, delta):
                    yield f"{name}: wrong weights of {path} in slot {slot}"


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


@contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """Raise KeyboardInterrupt inside the block when the time is over, as Ctrl-C would."""
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, previous)


def interrupt_loads(root: Path, loads: int, seed: int = 0) -> tuple[int, list[str]]:
    """Load random adapters, each interrupted after a random time; the pool is used throughout.

    Returns:
        How many loads were interrupted, and what was wrong.
    """
    draw = random.Random(seed)
    folders = {name: save_adapter(root, name) for name in (f"adapter{i}" for i in range(12))}
    adapters = {name: read_checkpoint(folder, SPECS) for name, folder in folders.items()}
    pool, interrupted, wrong = make_pool(), 0, []
    start = time.perf_counter()
    for name, folder in folders.items():
        pool.load(name, folder)
    longest = 1.3 * (time.perf_counter() - start) / len(folders)
    for load in range(loads):
        name, seconds = draw.choice(sorted(folders)), draw.uniform(1e-5, longest)
        try:
            with interrupt_after(seconds):
                if name in pool.slots and draw.random() < 0.3:
                    pool.unload(name)
                else:
                    pool.load(name, folders[name], replace_existing=True)
        except KeyboardInterrupt:
            interrupted += 1
        except Exception as error:
            wrong.append(f"load {load}: {type(error).__name__}: {error}")
        wrong += [f"load {load}: {fault}" for fault in faults(pool, adapters)]
    return interrupted, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        interrupted, wrong = interrupt_loads(Path(root), given.loads, given.seed)
    if given.result is not None:
        outcomes = {"interrupted": interrupted, "finished": given.loads - interrupted}
        keep(
            given.result,
            "interrupts",
            {"seed": given.seed, "done": given.loads, "outcomes": outcomes, "faults": wrong},
        )
    print(
        f"{given.loads} loads, {interrupted} interrupted, {len(wrong)} faults",
        *wrong[:20],
        sep="\n",
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
