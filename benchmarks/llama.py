"""A Llama of 8B shape with random weights and adapters, and its forward passes, for benchmarks."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from lora_backends.adapters import Checkpoint, ModuleDelta

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PAST = 128  # tokens in the cache in front of a decode step
STEPS = 8  # consecutive steps of a sample, and room in the cache after the prompt
SIZES = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
TINY = dict(zip(SIZES, (1024, 32, 48, 4, 2), strict=True))


def make_base(device: torch.device, layers: int, tiny: bool, **others: int) -> Any:
    """Return a Llama with random weights, the same in every call, made on the device."""
    torch.manual_seed(0)
    sizes = (TINY if tiny else SIZES) | others
    config = LlamaConfig(**sizes, num_hidden_layers=layers, max_position_embeddings=4096)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if tiny else torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def random_adapter(
    base: Any, rank: int, seed: int, device: torch.device | str | None = None
) -> Checkpoint:
    """Return random LoRA for all linear layers but the head, with a small delta.

    It is on the base model's device unless another is given.
    """
    device = device or next(base.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    modules = {}
    for path, module in base.named_modules():
        if path.endswith(TARGETS):
            a = torch.randn(rank, module.in_features, generator=generator, device=device)
            b = torch.randn(module.out_features, rank, generator=generator, device=device)
            scaling = 0.3 / (rank * module.in_features) ** 0.5
            modules[path] = ModuleDelta(path, "linear", rank, scaling, a, b, None)
    return Checkpoint(Path("random"), modules, {})


def adapter_bytes(base: Any, rank: int) -> int:
    """Return the bytes of A and B of one adapter."""
    sizes = [
        rank * (module.in_features + module.out_features) * module.weight.element_size()
        for path, module in base.named_modules()
        if path.endswith(TARGETS)
    ]
    return sum(sizes)


def peft_model(base: Any, names: list[str], rank: int) -> Any:
    """Return the base model, changed in place, with PEFT's adapters of the same sizes."""
    import peft

    config = peft.LoraConfig(r=rank, target_modules=list(TARGETS), init_lora_weights=False)
    model = peft.get_peft_model(base, config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    return model.eval()


class Pass:
    """Forward passes of one shape: decode steps on a static cache of their own, or a prefill.

    Args:
        base: whose weights fill the cache.
        run: the model, or a program.
        rows: of the batch.
        tokens: per row: 1 is a decode step, more are a prefill without a cache.
        arguments: of `run`, besides the tokens.
    """

    def __init__(self, base: Any, run: Any, rows: int, tokens: int, **arguments: Any) -> None:
        self.run, self.device = run, next(base.parameters()).device
        self.graph: torch.cuda.CUDAGraph | None = None
        ids = torch.arange(rows * tokens, device=self.device).view(rows, tokens) * 11 % 997
        self.inputs = {"input_ids": ids, "logits_to_keep": 1, "use_cache": False, **arguments}
        self.cache: StaticCache | None = None
        if tokens == 1:
            self.cache = prompt_cache(base, rows)
            self.inputs |= {"past_key_values": self.cache, "use_cache": True}
            if not any(hasattr(layer, "cumulative_length") for layer in self.cache.layers):
                raise RuntimeError("this version of transformers has no cache to wind back")

    def wind_back(self) -> None:
        """Forget all tokens after the prompt, in place."""
        for layer in [] if self.cache is None else self.cache.layers:
            if isinstance(layer.cumulative_length, torch.Tensor):
                layer.cumulative_length.fill_(PAST)
            else:
                layer.cumulative_length = PAST

    def __call__(self) -> torch.Tensor:
        """Run or replay a pass; return its logits."""
        if self.graph is not None:
            self.graph.replay()
            return self.captured
        torch.compiler.cudagraph_mark_step_begin()
        logits: torch.Tensor = self.run(**self.inputs).logits
        return logits

    def logits(self) -> torch.Tensor:
        """Return the logits of the last token, the first after the prompt of a decode step."""
        self.wind_back()
        return self().clone()

    def capture(self) -> None:
        """Capture one pass in a CUDA graph, after warming up beside the main stream."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.logits()
            self.wind_back()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.captured = self()
        self.graph = graph

    def time(self) -> float:
        """Return the milliseconds of a pass, the mean over as many as the cache has room for."""
        self.wind_back()
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(STEPS):
            self()
        synchronize(self.device)
        return 1e3 * (time.perf_counter() - start) / STEPS


def prompt_cache(base: Any, rows: int) -> StaticCache:
    """Return a cache that holds the prompt, the same bits for every contender."""
    cache, first = _filled_cache(base, rows), _first_cache(base, rows)
    for layer, kept in zip(cache.layers, first.layers, strict=True):
        layer.keys.copy_(kept.keys)
        layer.values.copy_(kept.values)
    return cache


@functools.cache
def _first_cache(base: Any, rows: int) -> StaticCache:
    return _filled_cache(base, rows)


def _filled_cache(base: Any, rows: int) -> StaticCache:
    device = next(base.parameters()).device
    cache = StaticCache(config=base.config, max_cache_len=PAST + STEPS)
    prompt = torch.arange(rows * PAST, device=device) * 7 % 251
    base(input_ids=prompt.view(-1, PAST), past_key_values=cache, logits_to_keep=1)
    return cache


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error in the Frobenius norm."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
