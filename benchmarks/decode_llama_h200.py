"""Times a decode step of a Llama of 8B shape (16 layers, random weights), 64 rows over 8 adapters.

Contenders: the base model, `MultiLoRAModel` and, with --peft, PEFT's mixed batch; each called
eagerly, the first two also under a CUDA graph and under torch.compile(mode="reduce-overhead").
The logits are checked before anything is timed. A contender that fails does not stop the others.

    python benchmarks/decode_llama_h200.py --peft
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from lora_backends import LoRABackend, LoRABackendError, LoRABatch, get_backend
from lora_backends.adapters import Checkpoint, ModuleDelta
from lora_backends.backend import LoRAPlan
from lora_backends.bench.results import new_result, write_result
from lora_backends.hf import MultiLoRAModel, PreparedAdapters

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RESULT = Path(__file__).parent / "results" / "h200_llama_decode.json"


def main() -> None:
    """Check, measure, write the result file and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--steps", type=int, default=100, help="timed steps of a contender")
    parser.add_argument("--peft", action="store_true", help="time PEFT's mixed batch too")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument(
        "--fuse",
        action=argparse.BooleanOptionalAction,
        help="q, k, v in one call, gate and up too; on a GPU unless --no-fuse is given",
    )
    parser.add_argument("--tiny", action="store_true", help="a small model; on the CPU no graphs")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with torch.no_grad():
        Benchmark(arguments).run()


class Benchmark:
    """One model, its adapters, and the results so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cpu" and not arguments.tiny:
            raise SystemExit("needs a GPU; --tiny runs a small model on the CPU")
        self.rows, self.rank, self.past = (6, 4, 8) if arguments.tiny else (64, 16, 128)
        self.names = [f"adapter{i}" for i in range(3 if arguments.tiny else 8)]
        self.base = make_base(self.device, arguments.tiny)
        self.plain = make_base(self.device, arguments.tiny)  # the same, never wrapped
        backend = make_backend(arguments.backend, self.device)
        fuse = arguments.fuse
        self.model = MultiLoRAModel(self.base, backend, len(self.names), self.rank, fuse=fuse)
        for seed, name in enumerate(self.names):
            self.model.add_adapter(name, random_adapter(self.base, self.rank, seed))
        self.step = self.model.prepare(self.composition(0))
        self.tokens = torch.randint(0, 1000, (self.rows, 1), device=self.device)
        self.results: dict[str, Any] = {"checks": {}, "rows": [], "failed": {}}

    def run(self) -> None:
        """Run every part; a failure is recorded and the other parts still run."""
        parts: list[tuple[str, Callable[[], None]]] = [
            ("host", self.time_host),
            ("reference", self.check_reference),
            ("eager", self.time_eager),
        ]
        if self.device.type == "cuda":
            parts.append(("graph", self.time_graphs))
        if not self.arguments.no_compile:
            parts.append(("compile", self.time_compiled))
        if self.arguments.peft:
            parts.append(("peft", self.time_peft))
        for name, part in parts:
            try:
                part()
            except Exception as error:  # the other contenders are still worth timing
                traceback.print_exc()
                self.results["failed"][name] = f"{type(error).__name__}: {error}"[:2000]
            self.write()
        self.print_table()

    def composition(self, turn: int) -> list[str | None]:
        """Return the adapters of all rows: mixed, without some, skewed, or none at all."""
        count = len(self.names)
        mixed: list[str | None] = [self.names[row % count] for row in range(self.rows)]
        some = [None if row % 3 else name for row, name in enumerate(reversed(mixed))]
        skewed = [self.names[-1]] * (self.rows - 1) + [self.names[0]]
        return [mixed, some, skewed, [None] * self.rows][turn % 4]

    def decode(self, **adapters: Any) -> Decoder:
        """Return decode steps of our model, of the base model where no adapters are given."""
        run = self.model if adapters else self.plain
        return Decoder(self.plain, run, self.tokens, self.past, adapters)

    def time_host(self) -> None:
        """Time a layer's modules on the host, with an empty backend and with the one under test."""
        self.results["host_us"] = time_layer(self.device, self.model.backend)

    def check_reference(self) -> None:
        """Compare with torch_ref, and with plans made for each composition."""
        reference = MultiLoRAModel(
            self.base, make_backend("torch_ref", self.device), len(self.names), self.rank
        )
        for seed, name in enumerate(self.names):
            reference.add_adapter(name, random_adapter(self.base, self.rank, seed))
        found = []
        for turn in range(4):
            rows = self.composition(turn)
            self.step.update(rows)
            ours = self.decode(adapters=self.step).logits()
            expected = self.decode(adapters=rows).logits()
            oracle = Decoder(
                self.plain, reference, self.tokens, self.past, {"adapters": rows}
            ).logits()
            found.append(
                {"torch_ref": distance(ours, oracle), "plan_of_its_own": distance(ours, expected)}
            )
        reference.detach()
        plain = self.decode()
        checks = self.results["checks"]
        checks["relative_error"] = found
        checks["base_relative_error"] = noise = repeatability(plain)
        checks["no_adapter_relative_error"] = distance(ours, plain.logits())  # ours: all None
        worst = max(entry["torch_ref"] for entry in found)
        # a fused product rounds differently from the base model's
        unadapted = ROUNDING if self.step.shared else 3 * noise
        if worst > ROUNDING or checks["no_adapter_relative_error"] > unadapted:
            raise AssertionError(f"logits are wrong: {checks}")

    def time_eager(self) -> None:
        """Time steps that Python launches."""
        self.step.update(self.composition(0))
        self.measure("eager", {"base": self.decode(), "ours": self.decode(adapters=self.step)})

    def time_graphs(self) -> None:
        """Capture both steps, check that ours follows updates, and time replays."""
        base, ours = self.decode(), self.decode(adapters=self.step)
        base.capture()
        ours.capture()
        self.follow("graph", ours)
        self.measure("graph", {"base": base, "ours": ours})

    def time_compiled(self) -> None:
        """Compile both steps, check that ours follows updates, and time them."""
        options: dict[str, Any] = {"mode": "reduce-overhead"}
        if self.device.type == "cpu":
            options = {"backend": "aot_eager"}
        base, ours = self.decode(), self.decode(adapters=self.step)
        base.run = torch.compile(self.plain, fullgraph=True, **options)
        compiled = torch.compile(self.base, fullgraph=True, **options)

        def with_step(adapters: PreparedAdapters, **inputs: Any) -> Any:
            with self.model.using(adapters):
                return compiled(**inputs)

        ours.run = with_step
        self.follow("compiled", ours)
        self.measure("compiled", {"base": base, "ours": ours})

    def time_peft(self) -> None:
        """Time the mixed batch of PEFT; it changes the base model, so it comes last."""
        self.model.detach()
        with tempfile.TemporaryDirectory() as folder:
            run = peft_model(self.base, self.names, self.rank, Path(folder))
            rows = {"adapter_names": self.composition(0)}
            decoder = Decoder(self.plain, run, self.tokens, self.past, rows)
            self.measure("peft", {"base": self.decode(), "peft": decoder}, samples=4)

    def follow(self, kind: str, decoder: Decoder) -> None:
        """Check that a captured step follows updates, as the eager step does.

        Bits may differ: even the base model's eager step does not always repeat its bits.
        """
        eager = self.decode(adapters=self.step)
        errors, apart = [], []
        previous: torch.Tensor | None = None
        for turn in (0, 1, 2, 3, 1, 0):
            self.step.update(self.composition(turn))
            found = decoder.logits()
            errors.append(distance(found, eager.logits()))
            if previous is not None:
                apart.append(distance(found, previous))
            previous = found
        checks = self.results["checks"]
        checks[f"{kind}_relative_error"] = max(errors)
        checks[f"{kind}_least_change_by_an_update"] = min(apart)
        if max(errors) > ROUNDING or max(errors) > min(apart) / 3:
            raise AssertionError(f"{kind} does not follow updates: {checks}")

    def measure(self, kind: str, decoders: dict[str, Decoder], samples: int = 0) -> None:
        """Let contenders take turns; a sample is the mean of consecutive steps, in ms."""
        samples = samples or max(2, self.arguments.steps // STEPS)
        times: dict[str, list[float]] = {name: [] for name in decoders}
        for turn in range(samples + 2):
            for name, decoder in decoders.items():
                sample = decoder.time()
                if turn >= 2:
                    times[name].append(sample)
        base = statistics.median(times["base"])
        for name, series in times.items():
            middle = statistics.median(series)
            row = {"kind": kind, "contender": name, "ms": round(middle, 4)}
            row |= {"ms_min": round(min(series), 4), "ms_max": round(max(series), 4)}
            self.results["rows"].append(row | {"ratio_to_base": round(middle / base, 3)})

    def write(self) -> None:
        """Write the results so far."""
        method = (
            f"A decode step of {self.rows} rows with a static cache that holds {self.past} to "
            f"{self.past + STEPS} tokens; {len(self.names)} adapters of rank {self.rank} on "
            f"{', '.join(TARGETS)}; row i uses adapter i mod {len(self.names)}. A sample is the "
            f"wall time of {STEPS} steps over {STEPS}, contenders take turns; the base model is "
            f"a copy with the same weights that was never wrapped. Milliseconds are "
            f"medians over the samples, ratios those of medians."
        )
        result = new_result(
            method,
            self.device,
            model=str(self.base.config),
            backend=self.model.backend.name,
            fused=bool(self.step.shared),
        )
        result |= self.results
        result["summary"] = {
            f"{row['contender']}, {row['kind']}": row["ratio_to_base"]
            for row in self.results["rows"]
            if row["contender"] != "base"
        }
        write_result(self.arguments.output, result)

    def print_table(self) -> None:
        """Print times, checks and failures."""
        for row in self.results["rows"]:
            print(
                f"{row['kind']:10}{row['contender']:8}{row['ms']:10.3f} ms "
                f"({row['ms_min']:.3f} to {row['ms_max']:.3f})  x {row['ratio_to_base']:.3f}"
            )
        for name in ("host_us", "checks", "failed"):
            print(name, self.results.get(name))


ROUNDING = 5e-2  # the most that logits of 16 layers in bfloat16 differ by
STEPS = 8  # consecutive steps of a sample, and room in the cache behind the prompt


class Nothing(LoRABackend):
    """A backend that does nothing after its arguments have been checked."""

    def prepare_batch(self, batch: LoRABatch, out: Any = None) -> LoRAPlan:
        """Do nothing."""
        return LoRAPlan(batch.num_tokens, batch.num_slots)

    def run_lora_a(self, x: torch.Tensor, weights: Any, plan: Any) -> torch.Tensor:
        """Do nothing."""
        return x

    def run_lora_b(self, h: Any, weights: Any, plan: Any, base_output: Any = None) -> Any:
        """Do nothing."""
        return base_output

    def run_linear(self, x: Any, weights: Any, plan: Any, base_output: Any = None) -> Any:
        """Do nothing."""
        return base_output


class Decoder:
    """Decode steps on a static cache of their own, which can be wound back."""

    def __init__(
        self, base: Any, run: Any, tokens: torch.Tensor, past: int, arguments: dict[str, Any]
    ) -> None:
        self.run, self.past, self.device = run, past, tokens.device
        self.graph: torch.cuda.CUDAGraph | None = None
        self.cache = prompt_cache(base, tokens.shape[0], past)
        self.inputs = {"input_ids": tokens, "past_key_values": self.cache, **arguments}
        if not any(hasattr(layer, "cumulative_length") for layer in self.cache.layers):
            raise RuntimeError("this version of transformers has no cache that can be wound back")

    def wind_back(self) -> None:
        """Forget all tokens behind the prompt, in place."""
        for layer in self.cache.layers:
            if isinstance(layer.cumulative_length, torch.Tensor):
                layer.cumulative_length.fill_(self.past)
            else:
                layer.cumulative_length = self.past

    def __call__(self) -> torch.Tensor:
        """Run or replay a step; return its logits."""
        if self.graph is not None:
            self.graph.replay()
            return self.captured
        torch.compiler.cudagraph_mark_step_begin()
        logits: torch.Tensor = self.run(**self.inputs).logits
        return logits

    def logits(self) -> torch.Tensor:
        """Return the logits of the first token behind the prompt."""
        self.wind_back()
        return self().clone()

    def capture(self) -> None:
        """Capture one step in a CUDA graph, after warming up beside the main stream."""
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
        """Return the milliseconds of a step, the mean over as many as the cache has room for."""
        self.wind_back()
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(STEPS):
            self()
        synchronize(self.device)
        return 1e3 * (time.perf_counter() - start) / STEPS


def time_layer(device: torch.device, backend: LoRABackend) -> dict[str, float]:
    """Return the host microseconds of a small layer's seven modules, with and without LoRA."""
    base = make_base(device, tiny=True)
    modules = [m for path, m in base.model.layers[0].named_modules() if path.endswith(TARGETS)]
    dtype = base.dtype
    inputs = {
        m.in_features: torch.zeros(6, 1, m.in_features, dtype=dtype, device=device) for m in modules
    }

    def layer() -> None:
        for module in modules:
            module(inputs[module.in_features])

    found = {"layer_base": host_microseconds(layer)}
    for used, engine in (("nothing", Nothing(device)), (backend.name, backend)):
        for name, fuse in (("alone", False), ("fused", True)):
            model = MultiLoRAModel(base, engine, 1, 4, fuse=fuse)
            model.add_adapter("a", random_adapter(base, 4, 0))
            with model.prepare(["a"] * 6) as step, model.using(step):
                found[f"layer_{name}_{used}"] = host_microseconds(layer)
            model.detach()
    return found


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error in the Frobenius norm."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def repeatability(decoder: Decoder, times: int = 4) -> float:
    """Return the largest distance between repeated steps."""
    first = decoder.logits()
    return max(distance(decoder.logits(), first) for _ in range(times))


def prompt_cache(base: Any, rows: int, past: int) -> StaticCache:
    """Return a cache that holds the prompt, the same bits for every contender."""
    cache = _filled_cache(base, rows, past)
    first = _first_cache(base, rows, past)
    for layer, kept in zip(cache.layers, first.layers, strict=True):
        layer.keys.copy_(kept.keys)
        layer.values.copy_(kept.values)
    return cache


@functools.cache
def _first_cache(base: Any, rows: int, past: int) -> StaticCache:
    return _filled_cache(base, rows, past)


def _filled_cache(base: Any, rows: int, past: int) -> StaticCache:
    device = next(base.parameters()).device
    cache = StaticCache(config=base.config, max_cache_len=past + STEPS)
    prompt = torch.arange(rows * past, device=device) * 7 % 251
    base(input_ids=prompt.view(-1, past), past_key_values=cache, logits_to_keep=1)
    return cache


def make_base(device: torch.device, tiny: bool) -> Any:
    """Return a Llama with random weights, made on the device."""
    sizes: dict[str, int] = {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    if tiny:
        small = (1024, 32, 48, 2, 4, 2)
        sizes = dict(zip(sizes, small, strict=True))
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, max_position_embeddings=4096)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if tiny else torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def make_backend(name: str, device: torch.device) -> LoRABackend:
    """Return a backend by its name, or by its class where the package is not installed."""
    try:
        return get_backend(name, device=device)
    except LoRABackendError:
        if name == "triton":
            from lora_backends.triton import TritonBackend

            return TritonBackend(device)
        if name == "torch_ref":
            from lora_backends.torch_ref import TorchRefBackend

            return TorchRefBackend(device)
        raise


def random_adapter(base: Any, rank: int, seed: int) -> Checkpoint:
    """Return random LoRA for all linear layers but the head, with a small delta."""
    device = next(base.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    modules = {}
    for path, module in base.named_modules():
        if path.endswith(TARGETS):
            a = torch.randn(rank, module.in_features, generator=generator, device=device)
            b = torch.randn(module.out_features, rank, generator=generator, device=device)
            scaling = 0.3 / (rank * module.in_features) ** 0.5
            modules[path] = ModuleDelta(path, "linear", rank, scaling, a, b, None)
    return Checkpoint(Path("random"), modules, {})


def peft_model(base: Any, names: list[str], rank: int, folder: Path) -> Any:
    """Return the base model with PEFT's adapters of the same sizes."""
    import peft

    config = peft.LoraConfig(r=rank, target_modules=list(TARGETS), init_lora_weights=False)
    model = peft.get_peft_model(base, config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    return model.eval()


def host_microseconds(call: Callable[[], Any], calls: int = 1000) -> float:
    """Return the best of some host timings of a call; work on the GPU is not awaited."""
    best = float("inf")
    for _ in range(5):
        synchronize(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        start = time.perf_counter()
        for _ in range(calls // 5):
            call()
        best = min(best, (time.perf_counter() - start) / (calls // 5))
    return round(1e6 * best, 2)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
