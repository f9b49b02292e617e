"""Swaps of adapters under load: rows are compared, and the memory of the process is watched."""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import tempfile
import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from measuring import Measurement, Options, Result, Row, flag
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from lora_backends.adapters.pool.store import AdapterStore
from lora_backends.hf import MultiLoRAModel

ADAPTERS, SLOTS, ROWS, THREADS, RANK = 24, 6, 2, 2, 4
BOUND = 2e-5
METHOD = (
    f"{THREADS} threads run batches of {ROWS} rows of a model of 2 layers, each row with a random "
    f"adapter of {ADAPTERS} for {SLOTS} slots, and prefetch those of their next batch every other "
    f"time. Half of the adapters come from a folder, half from memory; a third thread replaces one "
    f"from memory every 50 ms, and the files of one every 200 ms, by others of its own. A row is "
    f"wrong where its logits differ from the adapter's own by more than {BOUND:g} of the largest. "
    f"Memory is the resident set: medians of samples between 10% and 20% of the swaps, and in the "
    f"last 10%."
)


def make_base() -> Any:
    """Return a small random model."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 40}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes)).eval()


def tensors_of(seed: int) -> dict[str, torch.Tensor]:
    """Return random LoRA of q and v, by the names of a file of PEFT's."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for layer, name in itertools.product(range(2), ("q_proj", "v_proj")):
        key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        found[f"{key}.lora_A.weight"] = torch.randn(RANK, 16, generator=generator)
        found[f"{key}.lora_B.weight"] = 0.5 * torch.randn(16, RANK, generator=generator)
    return found


CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}
IDS = torch.arange(1, 7)[None]


def save(folder: Path, seed: int) -> None:
    """Write an adapter whose folder appears, or changes, at once."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    partial = folder / "partial"
    save_file(tensors_of(seed), partial)
    partial.replace(folder / "adapter_model.safetensors")


@dataclass
class Load:
    """The model under load, and the counts so far."""

    model: MultiLoRAModel
    store: AdapterStore
    expected: dict[str, list[torch.Tensor]]  # of each adapter, and of its replacement
    swaps: int  # to make
    rows: int = 0
    wrong: int = 0
    refused: int = 0  # batches that found every slot in use by others
    errors: list[str] = field(default_factory=list)

    def serve(self, seed: int) -> None:
        """Run batches until the swaps are made."""
        draw, names = random.Random(seed), list(self.expected)
        following = draw.sample(names, ROWS)
        try:
            for turn in itertools.count():
                if self.store.swaps >= self.swaps or self.errors:
                    return
                batch, following = following, draw.sample(names, ROWS)
                if turn % 2:
                    self.store.prefetch(following)
                logits = self.model(adapters=batch, input_ids=IDS.expand(ROWS, -1)).logits
                for name, row in zip(batch, logits, strict=True):
                    self.rows += 1
                    self.wrong += not any(close(row, each) for each in self.expected[name])
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")

    def replace(self, folder: Path) -> None:
        """Replace adapters in memory and on disk, back and forth."""
        draw, turn = random.Random(7), 0
        kinds = [name for name in self.expected if name.startswith("m")]
        while self.store.swaps < self.swaps and not self.errors:
            turn += 1
            time.sleep(0.05)
            which = draw.randrange(len(kinds))
            variant = turn % 2
            try:
                self.model.add_adapter(
                    f"m{which}", tensors_of(seed_of(f"m{which}", variant)), CONFIG
                )
            except ValueError:  # a batch uses it, or all slots
                self.refused += 1
            if turn % 4 == 0:
                save(folder / f"f{which}", seed_of(f"f{which}", turn // 4 % 2))


def seed_of(name: str, variant: int) -> int:
    """Return the seed of an adapter, or of its replacement."""
    return 1000 * (name[0] == "f") + 100 * variant + int(name[1:])


def close(row: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((row - expected).abs().max() <= BOUND * expected.abs().max())


def resident_bytes() -> int:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def expected_logits() -> dict[str, list[torch.Tensor]]:
    """Return the logits of every adapter and of its replacement, in a model that swaps nothing."""
    model = MultiLoRAModel(make_base(), "torch_ref", 1, RANK)
    found: dict[str, list[torch.Tensor]] = {}
    for kind, index in itertools.product("mf", range(ADAPTERS // 2)):
        for variant in range(2):
            name = f"{kind}{index}"
            model.add_adapter("only", tensors_of(seed_of(name, variant)), CONFIG)
            found.setdefault(name, []).append(
                model(adapters=["only"], input_ids=IDS).logits[0].clone()
            )
    return found


def run(swaps: int) -> tuple[Load, list[tuple[int, int]], float]:
    """Run the load; return it, samples of swaps and memory, and the seconds."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for index in range(ADAPTERS // 2):
            save(folder / f"f{index}", seed_of(f"f{index}", 0))
        model = MultiLoRAModel(make_base(), "torch_ref", SLOTS, RANK)
        store = model.keep_adapters(folder=folder, watch_s=0.0)
        for index in range(ADAPTERS // 2):
            model.add_adapter(f"m{index}", tensors_of(seed_of(f"m{index}", 0)), CONFIG)
        load = Load(model, store, expected_logits(), swaps)
        threads = [threading.Thread(target=load.serve, args=(seed,)) for seed in range(THREADS)]
        threads.append(threading.Thread(target=load.replace, args=(folder,)))
        # arrays of numbers: a list of tuples would grow by more than what is looked for
        start, done, sizes = time.perf_counter(), array("q", [0]), array("q", [resident_bytes()])
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.25)
            done.append(store.swaps)
            sizes.append(resident_bytes())
            if len(done) % 80 == 0:
                print(f"{store.swaps} swaps, {load.rows} rows, {load.wrong} wrong")
        samples = list(zip(done, sizes, strict=True))
        return load, samples, time.perf_counter() - start


def measure(options: Options, result: Result) -> Iterator[Row]:
    """Yield samples of the memory; refuse wrong rows after the file has been written."""
    swaps = options.swaps
    load, samples, taken = run(swaps)
    if load.errors:
        raise SystemExit(load.errors[0])
    early = [size for done, size in samples if 0.1 * swaps <= done <= 0.2 * swaps]
    late = [size for done, size in samples if done >= 0.9 * swaps]
    result["summary"] = {
        "swaps": load.store.swaps,
        "disk_reads": load.store.disk_reads,
        "rows": load.rows,
        "wrong_rows": load.wrong,
        "refused_replacements": load.refused,
        "seconds": round(taken, 1),
        "resident_mb_early": round(statistics.median(early) / 1e6, 2) if early else None,
        "resident_mb_late": round(statistics.median(late) / 1e6, 2) if late else None,
    }
    for done, size in thinned(samples):
        yield {"swaps": done, "resident_bytes": size}
    if load.wrong:
        raise SystemExit(f"{load.wrong} wrong rows")


def thinned(samples: list[tuple[int, int]], most: int = 40) -> list[tuple[int, int]]:
    """Return at most so many of the samples, spread evenly."""
    return samples[:: -(-len(samples) // most)]


SWAPS = Measurement(
    rows=measure,
    file="adapter_swaps_cpu.json",
    method=METHOD,
    settings=lambda _: {"dtype": "float32", "backend": "torch_ref"},
    options={"--swaps": flag(100_000)},
    partial=True,
)
