"""Live updates of a real vLLM under load: every answer is compared, and every update is timed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

SETTINGS = {
    "LORA_BACKENDS_VLLM": "auto",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
for setting, value in SETTINGS.items():
    os.environ.setdefault(setting, value)

import torch  # noqa: E402  # vLLM reads the settings when it is imported
from measuring import Measurement, Options, Result, Row  # noqa: E402

NAMES = ("alice", "bob")
CLIENTS, SETS, PROMPTS, LENGTH, RANK = 8, 7, 4, 24, 8
VOCAB = 256
GAP = 0.01  # least log-probability between the best token and the next, so rounding chooses none
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SMALL = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
METHOD = (
    f"Under load: AsyncLLM, its core in a process of its own, serves a random Llama of 2 layers "
    f"in float32. {CLIENTS} clients ask for 1 to {LENGTH} greedy tokens of one of two live "
    f"adapters, one request after another; a tenth names a version. Meanwhile the adapters take "
    f"versions in turns; version v has the tensors of set v mod {SETS}. Before every tenth update "
    f"one fails (a wrong shape, a missing tensor, NaN, or another rank). An answer is "
    f"wrong where it is not, from its first to its last token, the one of a single version that "
    f"was current between the request's sending and its first token. Alone: an idle engine of "
    f"SmolLM2's shape, adapters on all linear layers. Seconds are of live.update, from tensors of "
    f"the caller to the answer that all workers have the version."
)


def config(rank: int) -> dict[str, Any]:
    """Return the configuration of an adapter."""
    return {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": LINEAR}


def save_model(folder: str, sizes: dict[str, int]) -> Any:
    """Save a random Llama, and return its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = sizes["hidden_size"] // 64 if sizes["hidden_size"] > 128 else 4
    found = LlamaConfig(
        vocab_size=VOCAB, num_attention_heads=heads, initializer_range=0.15, **sizes
    )
    LlamaForCausalLM(found).save_pretrained(folder)
    return found


def tensors_of(model: Any, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Return a random adapter of a Llama, by PEFT's names."""
    draw = torch.Generator().manual_seed(seed)
    wide, inner = model.hidden_size, model.intermediate_size
    kv = wide * model.num_key_value_heads // model.num_attention_heads
    shapes = {name: (wide, wide) for name in ("self_attn.q_proj", "self_attn.o_proj")}
    shapes |= {name: (kv, wide) for name in ("self_attn.k_proj", "self_attn.v_proj")}
    shapes |= {"mlp.gate_proj": (inner, wide), "mlp.up_proj": (inner, wide)}
    shapes["mlp.down_proj"] = (wide, inner)
    found = {}
    for layer in range(model.num_hidden_layers):
        for name, (tall, across) in shapes.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            found[f"{key}.lora_A.weight"] = 0.15 * torch.randn(rank, across, generator=draw)
            found[f"{key}.lora_B.weight"] = 0.15 * torch.randn(tall, rank, generator=draw)
    return found


@contextlib.asynccontextmanager
async def served(folder: str, rank: int) -> AsyncIterator[Any]:
    """Run an engine."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=folder,
            dtype="float32",
            enable_lora=True,
            max_loras=4,
            max_lora_rank=rank,
            max_model_len=128,
            max_num_seqs=16,
            skip_tokenizer_init=True,
        )
    )
    try:
        yield engine
    finally:
        engine.shutdown()


@dataclass
class Load:
    """An engine under load, and the counts so far."""

    engine: Any
    model: Any
    prompts: list[list[int]]
    sets: list[dict[str, torch.Tensor]]
    answers: dict[tuple[int, int], list[int]]  # by set and prompt
    updates: int  # to make
    started: dict[str, int] = field(default_factory=dict)  # the newest version, by name
    current: dict[str, int] = field(default_factory=dict)  # the newest that was acknowledged
    seconds: list[float] = field(default_factory=list)
    requests: int = 0
    tokens: int = 0
    under_one: int = 0  # requests that only one version can have answered
    across: int = 0  # requests that ended after a newer version was current
    wrong: list[str] = field(default_factory=list)
    refused: int = 0
    is_done: bool = False

    async def update(self) -> None:
        """Make all updates, some of which must fail."""
        from lora_backends.errors import InvalidInputError
        from lora_backends.integrations.vllm import live

        for turn in range(self.updates):
            name, version = NAMES[turn % 2], self.started[NAMES[turn % 2]] + 1
            if turn % 10 == 9:
                try:
                    await live.update(self.engine, name, *self.bad(turn // 10), version=version)
                except InvalidInputError:
                    self.refused += 1
                after = (await live.versions(self.engine))[name]
                if max(after) != self.current[name]:  # old ones may have left
                    self.wrong.append(f"a failing update changed {name}")
            self.started[name] = version
            start = time.perf_counter()
            tensors = self.sets[version % SETS]
            await live.update(self.engine, name, tensors, config(RANK), version=version)
            self.seconds.append(time.perf_counter() - start)
            self.current[name] = version
            await asyncio.sleep(0.02)
        self.is_done = True

    def bad(self, turn: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return an adapter that must be refused, and its configuration."""
        tensors, first = dict(self.sets[0]), next(iter(self.sets[0]))
        if turn % 4 == 0:
            tensors[first] = tensors[first][:, :-1]
        elif turn % 4 == 1:
            del tensors[first]
        elif turn % 4 == 2:
            tensors[first] = torch.full_like(tensors[first], float("nan"))
        return tensors, config(RANK if turn % 4 < 3 else 2 * RANK)

    async def ask(self, seed: int) -> None:
        """Send one request after another until all updates are made."""
        from lora_backends.integrations.vllm import live

        draw, count = random.Random(seed), 0
        while not self.is_done:
            count += 1
            name, which = draw.choice(NAMES), draw.randrange(len(self.prompts))
            length, low = draw.randint(1, LENGTH), self.current[name]
            named = low if draw.random() < 0.1 else None
            request = live.request(name, named)
            high = None
            try:
                async for out in generate(
                    self.engine, self.prompts[which], length, request, f"{seed}-{count}"
                ):
                    if high is None:
                        high = low if named is not None else self.started[name]
                    last = out
            except Exception as error:
                self.wrong.append(f"{type(error).__name__}: {error}")
                continue
            self.requests += 1
            self.across += self.current[name] > low
            found = list(last.outputs[0].token_ids)
            self.tokens += len(found)
            if named is not None and last.outputs[0].finish_reason == "error":
                self.tokens -= len(found)  # this version has left before the request came
                continue
            assert high is not None
            self.under_one += high == low
            allowed = {version % SETS for version in range(low, high + 1)}
            if not any(found == self.answers[each, which][:length] for each in allowed):
                self.wrong.append(f"{name} {low} to {high}, prompt {which}: {found}")


async def generate(
    engine: Any, prompt: list[int], length: int, lora: Any, name: str, logprobs: int | None = None
) -> AsyncIterator[Any]:
    """Yield the outputs of a greedy request."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=length, min_tokens=length, ignore_eos=True,
        detokenize=False, logprobs=logprobs,
    )  # fmt: skip
    async for out in engine.generate(
        {"prompt_token_ids": prompt}, sampling, name, lora_request=lora
    ):
        yield out


async def answers_of(
    engine: Any, model: Any, sets: list[dict[str, torch.Tensor]]
) -> tuple[list[list[int]], dict[tuple[int, int], list[int]]]:
    """Return prompts, and each set's answer to each; no token is within `GAP` of the next best."""
    from lora_backends.integrations.vllm import live

    for index, tensors in enumerate(sets):
        await live.update(engine, "reference", tensors, config(RANK), version=index, keep=len(sets))
    draw, prompts, answers = random.Random(1), list[list[int]](), {}
    while len(prompts) < PROMPTS:
        prompt = [draw.randrange(VOCAB) for _ in range(40)]
        found, gaps = [], []
        for index in range(len(sets)):
            lora = live.request("reference", index)
            async for out in generate(engine, prompt, LENGTH, lora, f"r{draw.random()}", 2):
                last = out.outputs[0]
            found.append(list(last.token_ids))
            for every in last.logprobs:
                best = sorted((each.logprob for each in every.values()), reverse=True)
                gaps.append(best[0] - best[1])
        if min(gaps) > GAP and len({row[0] for row in found}) == len(sets):
            for index, row in enumerate(found):
                answers[index, len(prompts)] = row
            prompts.append(prompt)
    await live.remove(engine, "reference")
    return prompts, answers


async def under_load(updates: int) -> tuple[Load, dict[str, Any]]:
    """Run the load, and return it with what the engine holds in the end."""
    from lora_backends.integrations.vllm import live

    with tempfile.TemporaryDirectory() as folder:
        model = save_model(folder, SMALL)
        sets = [tensors_of(model, RANK, seed) for seed in range(SETS)]
        async with served(folder, RANK) as engine:
            prompts, answers = await answers_of(engine, model, sets)
            load = Load(engine, model, prompts, sets, answers, updates)
            for name in NAMES:
                await live.update(engine, name, sets[0], config(RANK), version=0)
                load.started[name] = load.current[name] = 0
            await asyncio.gather(load.update(), *(load.ask(seed) for seed in range(CLIENTS)))
            return load, await live.memory(engine)


async def alone(rank: int, rounds: int) -> tuple[int, list[float]]:
    """Return the bytes of an adapter of SmolLM2's shape, and seconds of updates."""
    from lora_backends.integrations.vllm import live

    with tempfile.TemporaryDirectory() as folder:
        model = save_model(folder, SMOLLM2)
        tensors = tensors_of(model, rank, 0)
        seconds = []
        async with served(folder, rank) as engine:
            for version in range(rounds + 1):
                start = time.perf_counter()
                await live.update(engine, "alice", tensors, config(rank), version=version)
                seconds.append(time.perf_counter() - start)
    return sum(each.nbytes for each in tensors.values()), seconds[1:]


def row(name: str, num_bytes: int, seconds: list[float]) -> Row:
    """Return a row of the result."""
    ordered = sorted(seconds)
    return {
        "case": name,
        "updates": len(seconds),
        "bytes": num_bytes,
        "median_ms": round(1000 * statistics.median(ordered), 2),
        "p90_ms": round(1000 * ordered[int(0.9 * (len(ordered) - 1))], 2),
        "largest_ms": round(1000 * ordered[-1], 2),
    }


def measure(options: Options, result: Result) -> Iterator[Row]:
    """Yield times of updates; refuse wrong answers after the file has been written."""
    load, memory = asyncio.run(under_load(options.updates))
    size = sum(each.nbytes for each in load.sets[0].values())
    result["summary"] = {
        "updates": len(load.seconds),
        "failing_updates": load.refused,
        "requests": load.requests,
        "tokens": load.tokens,
        "requests_of_one_possible_version": load.under_one,
        "requests_that_outlived_their_version": load.across,
        "wrong_or_lost": len(load.wrong),
        "load_average_of_the_machine": [round(each, 1) for each in os.getloadavg()],
        "versions_held_at_the_end": {name: len(each) for name, each in memory.items()},
    }
    yield row("under load", size, load.seconds)
    for rank in options.ranks:
        yield row(f"alone, SmolLM2, rank {rank}", *asyncio.run(alone(rank, options.rounds)))
    if load.wrong:
        raise SystemExit("\n".join([f"{len(load.wrong)} wrong answers", *load.wrong[:5]]))


LIVE = Measurement(
    rows=measure,
    file="vllm_live_cpu.json",
    method=METHOD,
    options={
        "--updates": {"type": int, "default": 1000},
        "--rounds": {"type": int, "default": 20},
        "--ranks": {"type": int, "nargs": "*", "default": [8, 64]},
    },
    settings=lambda _: {},
)
