"""Times a whole model's training step: 8 adapters in one batch, beside the frozen base model.

On a GPU a Llama of 8B shape with gradient checkpointing; on a CPU SmolLM2, and beside it PEFT,
which trains one adapter after another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import llama
import peft
import torch
from measuring import Measurement, Options, Result, Row, flag, in_turns, median_ratio
from measuring import middle_and_ends as middle
from smollm2 import load_base
from training import clock, device_of

from lora_backends.hf import MultiLoRAModel

ADAPTERS = 8
Step = Callable[[], None]


class Batch:
    """The tokens of a batch, whose rows take the adapters in turn.

    Args:
        base: the model that runs it.
        rows: of the batch.
        tokens: per row.
    """

    def __init__(self, base: Any, rows: int, tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        most = min(1000, base.config.vocab_size)
        ids = torch.randint(0, most, (rows, tokens), generator=generator)
        self.ids = ids.to(next(base.parameters()).device)
        self.names = [f"adapter{row % ADAPTERS}" for row in range(rows)]


def base_step(base: Any, batch: Batch) -> Step:
    """Return forward and backward of a frozen model down to its embeddings."""
    base.requires_grad_(False)
    embeddings = base.get_input_embeddings()(batch.ids)

    def step() -> None:
        x = embeddings.detach().requires_grad_()
        base(inputs_embeds=x, labels=batch.ids, use_cache=False).loss.backward()

    return step


class Ours:
    """All adapters in one batch.

    Args:
        base: which is wrapped.
        batch: of the step.
        backend: the engine.
        rank: of the adapters.
    """

    def __init__(self, base: Any, batch: Batch, backend: str, rank: int) -> None:
        self.batch = batch
        self.model = MultiLoRAModel(base, backend, ADAPTERS, rank)
        for name in dict.fromkeys(batch.names):
            self.model.new_adapter(name, config_of(rank))
        every = [self.model.adapter_parameters(name) for name in dict.fromkeys(batch.names)]
        self.parameters = [parameter for each in every for parameter in each.values()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5)

    def step(self) -> None:
        """Run forward and backward of all adapters."""
        batch = self.batch
        for parameter in self.parameters:
            parameter.grad = None
        logits = self.model(adapters=batch.names, input_ids=batch.ids, use_cache=False).logits
        sum(self.model.adapter_losses(logits, batch.ids, batch.names).values()).backward()

    def step_with_optimizer(self) -> None:
        """Run a step, and the optimizer's on all adapters."""
        self.step()
        self.optimizer.step()


def peft_steps(base: Any, batch: Batch, rank: int) -> Step:
    """Return forward and backward of each adapter's own rows, one adapter after another.

    One adapter stands for all: to train them apart, nobody switches between them.
    """
    model = peft.get_peft_model(base, config_of(rank))
    model.train(base.training)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own = [
        batch.ids[[row for row, each in enumerate(batch.names) if each == name]]
        for name in dict.fromkeys(batch.names)
    ]

    def steps() -> None:
        for ids in own:
            for parameter in parameters:
                parameter.grad = None
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    return steps


def config_of(rank: int) -> peft.LoraConfig:
    """Return LoRA on all linear layers but the head, with a B that is not zero."""
    return peft.LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False)


def measure(options: Options, result: Result) -> Iterator[Row]:
    """Let the contenders take turns; yield a row each."""
    device = device_of()
    on_gpu = device.type == "cuda"

    def make() -> Any:
        if on_gpu or options.tiny:
            base = llama.make_base(device, 2 if options.tiny else options.layers, options.tiny)
        else:
            base = copy.deepcopy(first)
        if on_gpu:
            base.gradient_checkpointing_enable({"use_reentrant": False})
            base.train()  # else Transformers checkpoints nothing
        return base

    first = None if on_gpu or options.tiny else load_base()
    base = make()
    batch = Batch(
        base, options.rows or (32 if on_gpu else 8), options.tokens or (512 if on_gpu else 64)
    )
    result["rows_and_tokens"] = list(batch.ids.shape)
    ours = Ours(make(), batch, options.backend, options.rank)
    result["backend"] = ours.model.backend.name
    steps: dict[str, Step] = {
        "base": base_step(base, batch),
        "ours": ours.step,
        "ours and AdamW": ours.step_with_optimizer,
    }
    if options.peft or not on_gpu:
        steps["PEFT one after another"] = peft_steps(make(), batch, options.rank)
    time = clock(device)
    with torch.enable_grad():
        clocks = {name: partial(time, step) for name, step in steps.items()}
        times = in_turns(clocks, options.rounds, warmup=2)
    result["summary"] = {
        name: round(median_ratio(series, times["base"]), 3) for name, series in times.items()
    }
    if "PEFT one after another" in times:
        ratio = median_ratio(times["PEFT one after another"], times["ours"])
        result["summary"]["PEFT over ours"] = round(ratio, 3)
    for name, series in times.items():
        ratio = round(median_ratio(series, times["base"]), 3)
        yield {"contender": name} | middle(series, 2) | {"ratio_to_base": ratio}


def settings(options: Options) -> dict[str, Any]:
    """Return how it is measured."""
    device = device_of()
    on_gpu = device.type == "cuda"
    model = (
        f"a Llama of 8B shape with {options.layers} layers and random weights in bfloat16, with "
        f"gradient checkpointing"
        if on_gpu
        else "SmolLM2-135M in float32"
    )
    method = (
        f"A training step of {model}: {ADAPTERS} adapters of rank {options.rank} on all linear "
        f"layers but the head, row i has adapter i mod {ADAPTERS}. base: forward and backward of "
        f"the frozen model to its embeddings, and the loss of Transformers. ours: forward and "
        f"backward of all adapters in one batch. PEFT one after another: the same for each "
        f"adapter's own rows. Contenders take turns; milliseconds are medians, ratios medians of "
        f"each round's."
    )
    dtype = "bfloat16" if on_gpu else "float32"
    return {"method": method, "device": device, "dtype": dtype, "backend": options.backend}


TRAINING_MODEL = Measurement(
    rows=measure,
    file=lambda _: f"training_model_{'h100' if device_of().type == 'cuda' else 'cpu'}.json",
    settings=settings,
    options={
        "--backend": flag("auto"),
        "--rank": flag(16),
        "--rows": flag(0, "0: 32 on a GPU, 8 on a CPU"),
        "--tokens": flag(0, "per row; 0: 512 on a GPU, 64 on a CPU"),
        "--layers": flag(16, "of the Llama"),
        "--rounds": flag(7),
        "--threads": flag(2, "of a CPU"),
        "--peft": flag(False, "time PEFT on a GPU too"),
        "--tiny": flag(False, "a small model"),
    },
)
