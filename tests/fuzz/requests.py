"""Makes random requests in continuous batching: the tokens of `generate`, or a typed error.

    python -m tests.fuzz.requests --cases 5000 --seed 0 --result results.json

The same command goes on where the last one ended; `--only NUMBER` repeats the manager of one case,
up to that case. A case is a request. Each manager has its own model, kind of batches and
adapters, and takes 40 requests of several threads. Each answer is compared with that of `generate`
for the same prompt, adapter and words alone.
"""

import copy
import random
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import transformers

from lora_backends import LoRABackendError
from lora_backends.adapters.specs import OwnModules, OwnParameter, TokenRows
from lora_backends.hf import MultiLoRAModel

from ..helpers.adapters.deltas import random_checkpoint
from ..helpers.continuous import settings
from .running import HANG_SECONDS, Ran, RunCase, fault_of_message, main

PER_MANAGER, THREADS = 40, 6
VOCABULARY, POSITIONS, SLOTS = 40, 64, 3
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head")
PLAIN, WITH_MODULES = tuple("abc"), tuple("de")
ADAPTERS = PLAIN + WITH_MODULES
SAVED = (
    "model.norm",
    "model.layers.1.input_layernorm",
    "model.layers.0.self_attn.v_proj",
    "model.layers.1.mlp.gate_proj",
    "lm_head",
)
WORDS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 2},
    {"suppress_tokens": [1, 2, 3, 5, 8, 13]},
    {"min_new_tokens": 3},
    {"bad_words_ids": [[4], [5, 6]]},
    {"begin_suppress_tokens": [7, 9]},
)
WRONG: tuple[dict[str, Any], ...] = (
    {"input_ids": []},
    {"input_ids": "text"},
    {"input_ids": None},
    {"input_ids": [1.5]},
    {"input_ids": [[1, 2]]},
    {"input_ids": [VOCABULARY]},
    {"input_ids": [-1]},
    {"input_ids": [1] * POSITIONS},
    {"max_new_tokens": 0},
    {"max_new_tokens": POSITIONS},
    {"max_new_tokens": 2.0},
    {"max_new_tokens": True},
    {"adapter": "unknown"},
    {"adapter": 7},
    {"adapter": ["a", "b"]},
    {"adapter": {"a": None}},
    {"adapter": {}},
    {"num_beams": 3},
    {"no_such_word": 1},
    {"do_sample": True},
    {"repetition_penalty": 0.0},
    {"bad_words_ids": []},
    {"eos_token_id": 1.5},
    {"streaming": None},
    {"request_id": b"x"},
    {"assistant_model": 1},
)


class Manager:
    """One model and one manager, the requests of its cases, and their outcomes.

    Args:
        seed: of all draws.
    """

    def __init__(self, seed: str) -> None:
        draw = random.Random(seed)
        torch.manual_seed(draw.randrange(2**31))
        self.model, self._alone_model, self._about = _models(draw)
        self.asked = [_request(draw) for _ in range(PER_MANAGER)]
        self._has_words = draw.random() < 0.5
        self._config = {
            "num_blocks": draw.choice((8, 12, 48)),
            "max_batch_tokens": draw.choice((5, 9, 32)),
            "scheduler_type": draw.choice(("fifo", "prefill_first")),
            "per_request_processors": self._has_words,
        }
        self._alone: dict[str, list[int]] = {}

    def start(self) -> None:
        """Begin to serve all requests."""
        config = settings(**self._config)
        self._requests = self.model.continuous_batching(continuous_batching_config=config)
        self._requests.start()
        self._pool = ThreadPoolExecutor(THREADS)
        self._futures = [
            self._pool.submit(self._serve, self._requests, asked) for asked in self.asked
        ]

    def judged(self, number: int) -> Ran:
        """Wait for the answer of one request, and judge it; the last one ends the manager."""
        found = self._ended(self._futures[number], self.asked[number])
        if number == PER_MANAGER - 1:
            wait(self._futures, HANG_SECONDS)
            self._requests.stop(timeout=HANG_SECONDS)
            self._pool.shutdown(wait=False, cancel_futures=True)
            left = [*self._requests._held, *self.model.pool.slots._holds]
            if left and found.fault is None:
                found = found._replace(fault=f"held at the end: {left}")
        return found

    def _ended(self, future: "Future[Any]", asked: dict[str, Any]) -> Ran:
        steps = [repr(self._about), repr(self._config), repr(asked)]
        wanted = asked["how"]
        try:
            tokens = future.result(HANG_SECONDS)
        except TimeoutError:
            return Ran("hang", f"no answer within {HANG_SECONDS:.0f} s", steps)
        except LoRABackendError as error:
            fault = fault_of_message(str(error))
            no_words = asked["words"] and not self._has_words
            if wanted == "right" and not no_words:
                fault = f"a valid request ends with {type(error).__name__}: {error}"
            return Ran(f"{wanted}: {type(error).__name__}", fault, steps)
        except Exception as error:
            return Ran("untyped", f"{type(error).__name__}: {error}", steps)
        if wanted == "wrong":
            return Ran("wrong", "accepted", steps)
        expected = self._expected(asked)
        if tokens != expected:
            return Ran("wrong", f"{tokens}, and {expected} alone", steps)
        return Ran(f"{wanted}: right", None, steps)

    def _serve(self, requests: Any, asked: dict[str, Any]) -> list[int]:
        options = {**asked["options"], **asked["words"]}
        name = requests.add_request(**options)
        if asked["how"] == "cancelled":
            requests.cancel_request(name)
        if asked["how"] == "streamed":
            return [each for each in requests.request_id_iter(name)][-1].generated_tokens
        tokens: list[int] = requests.collect([name])[name].generated_tokens
        return tokens

    def _expected(self, asked: dict[str, Any]) -> list[int]:
        """Return the tokens of `generate`, kept by all that they depend on."""
        options, words = asked["options"], asked["words"]
        key = repr((sorted(options.items()), sorted(words.items())))
        if key not in self._alone:
            ids = torch.tensor([options["input_ids"]])
            ends = options.get("eos_token_id")
            tokens = self._alone_model.generate(
                adapters=[options.get("adapter")],
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=options["max_new_tokens"],
                **({} if ends is None else {"eos_token_id": ends}),
                **words,
            )
            self._alone[key] = tokens[0, ids.shape[1] :].tolist()
        return self._alone[key]


def _models(draw: random.Random) -> tuple[MultiLoRAModel, MultiLoRAModel, str]:
    """Return a model with fewer slots than adapters, one with as many, and their kind."""
    kind = draw.choice(("llama", "qwen3", "gemma3", "mistral"))
    base = _base(kind)
    base.generation_config = transformers.GenerationConfig(
        max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    backend = draw.choice(("torch_ref", "numba_cpu"))
    alone = MultiLoRAModel(copy.deepcopy(base).eval(), backend, len(ADAPTERS), max_rank=4)
    model = MultiLoRAModel(base.eval(), backend, SLOTS, max_rank=4)
    model.keep_adapters()
    for seed, name in enumerate(ADAPTERS):
        chosen = draw.sample(TARGETS, draw.randint(1, len(TARGETS)))
        checkpoint = random_checkpoint(base, chosen, draw.randint(1, 4), seed, std=0.6)
        if name in WITH_MODULES:
            checkpoint = replace(checkpoint, own=_own_modules(base, chosen, draw, seed))
        for each in (model, alone):
            each.add_adapter(name, checkpoint)
    return model, alone, f"{kind}, {backend}"


def _own_modules(base: Any, adapted: Sequence[str], draw: random.Random, seed: int) -> OwnModules:
    """Return random modules, heads and tokens of an adapter, in place of the base model's."""
    generator = torch.Generator().manual_seed(seed)
    tied = {"lm_head"} if base.config.tie_word_embeddings else set()
    free = [path for path in SAVED if path.rpartition(".")[2] not in {*adapted, *tied}]
    parameters = {}
    for path in draw.sample(free, draw.randint(0, len(free))):
        weight = base.get_parameter(f"{path}.weight").detach()
        changed = weight + 0.3 * torch.randn(weight.shape, generator=generator)
        parameters[f"{path}.weight"] = OwnParameter(changed, alone=True)
    tokens = {}
    if draw.random() < 0.5 or not parameters:
        ids = tuple(draw.sample(range(VOCABULARY), draw.randint(1, VOCABULARY)))
        values = torch.randn(len(ids), base.config.hidden_size, generator=generator)
        tokens["model.embed_tokens"] = TokenRows(ids, values)
    return OwnModules(parameters, tokens)


def _base(kind: str) -> Any:
    words = {**SIZES, **HEADS, "intermediate_size": 24, "max_position_embeddings": POSITIONS}
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**words))
    if kind == "mistral":
        config = transformers.MistralConfig(**words, sliding_window=8)
        return transformers.MistralForCausalLM(config)
    if kind == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**words, head_dim=8))
    config = transformers.Gemma3TextConfig(
        **words, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    )
    return transformers.Gemma3ForCausalLM(config)


def _request(draw: random.Random) -> dict[str, Any]:
    options = {
        "input_ids": [draw.randrange(VOCABULARY) for _ in range(draw.choice((1, 2, 3, 7, 20)))],
        "max_new_tokens": draw.randint(1, 8),
        "adapter": draw.choice((None, *ADAPTERS)),
    }
    if draw.random() < 0.1:
        first, second = draw.sample(PLAIN, 2)
        options["adapter"] = {first: 0.5, second: draw.choice((0.25, 1.5))}
    if draw.random() < 0.3:
        options["eos_token_id"] = draw.sample(range(VOCABULARY), 4)
    words = dict(draw.choice(WORDS)) if draw.random() < 0.25 else {}
    how = draw.choices(("right", "streamed", "cancelled", "wrong"), (6, 2, 1, 2))[0]
    if how == "wrong":
        options |= draw.choice(WRONG)
        words = {}
    elif how == "streamed":
        options["streaming"] = True
    return {"how": how, "options": options, "words": words}


@contextmanager
def opened(seed: int) -> Iterator[RunCase]:
    """Yield a function that runs one case, with the others of its manager before it."""
    kept: dict[int, Manager] = {}

    def run(number: int) -> Ran:
        manager = number // PER_MANAGER
        if manager not in kept:
            kept.clear()
            kept[manager] = Manager(f"{seed}/{manager}")
            kept[manager].start()
        return kept[manager].judged(number % PER_MANAGER)

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield run


if __name__ == "__main__":
    threading.stack_size(2**20)  # the address space is limited
    sys.exit(main("requests", __doc__, opened))
