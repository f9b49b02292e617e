"""Times a training step of one block's linear layers: base model alone, this library, PEFT's loop.

Forward and backward of q, k and v as one layer, o, gate and up as one, and down, of 8B shape. The
base weights are frozen. The kernels of the backward are timed apart, layer by layer, beside the
time that their bytes take at the rate of a copy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from measuring import Measurement, Options, Result, Row, flag
from torch.nn import functional

from lora_backends import LoRABatch, LoRAWeights, get_backend
from lora_backends.backend import LoRABackend
from lora_backends.bench.timing import between_events, captured, measure_limits
from lora_backends.dispatch.gradients.differentiate import run_with_parameters
from lora_backends.dispatch.gradients.recorded import GradientTarget, SlotParameter
from lora_backends.operations import BY_NAME

LAYERS = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
TINY = {"qkv": (32, (32, 16, 16)), "down": (48, (32,))}
SCALING = 0.5
REPEATS = 8  # of a kernel between two events
WARM_UP = 8000  # products, of about 1.5 ms each
STEPS = 5  # of a contender between two events, as in training
STEADY = 1.0  # seconds that a contender runs before it is timed


class Cell(NamedTuple):
    """The adapters of a batch, whose rows take them in turn."""

    name: str
    ranks: tuple[int, ...]  # of each adapter
    half: bool = False  # whether the first adapter has half of the rows


def cells(arguments: Options) -> list[Cell]:
    """Return equal ranks, mixed ones, many adapters, and unequal groups."""
    found = [Cell(f"8 adapters of rank {rank}", (rank,) * 8) for rank in arguments.ranks]
    mixed = (8, 16, 32, 64, 8, 16, 32, 64)
    return [
        *found,
        Cell("8 adapters of ranks 8 to 64", mixed),
        Cell("64 adapters of rank 16", (16,) * 64),
        Cell("8 adapters of rank 16, one has half of the rows", (16,) * 8, half=True),
    ]


class Layer:
    """One fused layer with its adapters, the same values for every contender."""

    def __init__(
        self, engine: LoRABackend, cell: Cell, sizes: tuple[int, tuple[int, ...]], slots: list[int]
    ) -> None:
        device, dtype = engine.device, torch.bfloat16 if engine.device.type == "cuda" else None
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int, by: float = 1.0) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=dtype, generator=generator) * by

        inputs, self.widths = sizes
        outputs, count, rank = sum(self.widths), len(cell.ranks), max(cell.ranks)
        self.engine, self.slots = engine, slots
        self.weight = random(outputs, inputs, by=inputs**-0.5)
        self.x = random(len(slots), inputs).requires_grad_()
        self.grad = random(len(slots), outputs)
        self.lora_a = random(count, len(self.widths), rank, inputs, by=inputs**-0.5)
        self.lora_b = random(count, outputs, rank, by=rank**-0.5)
        self.parameters = [
            SlotParameter(part.detach().clone().requires_grad_(), GradientTarget(name, slot, s))
            for slot, adapter_rank in enumerate(cell.ranks)
            for s in range(len(self.widths))
            for name, part in self.parts(slot, s, adapter_rank)
        ]
        self.leaves = [self.x, self.lora_a.requires_grad_(), self.lora_b.requires_grad_()]
        ranks = torch.tensor([[r] * len(self.widths) for r in cell.ranks], dtype=torch.int32)
        scalings = torch.full(ranks.shape, SCALING)
        tables = ranks.to(device), scalings.to(device)
        self.weights = LoRAWeights(self.lora_a, self.lora_b, *tables, self.widths)
        stacks = self.lora_a.detach(), self.lora_b.detach()
        self.frozen = LoRAWeights(*stacks, *tables, self.widths)
        self.plan = engine.prepare_batch(LoRABatch(slots, num_slots=count))
        self.cell = cell

    def parts(self, slot: int, s: int, rank: int) -> list[tuple[str, torch.Tensor]]:
        """Return A and B of one adapter and slice."""
        first = sum(self.widths[:s])
        b = self.lora_b[slot, first : first + self.widths[s], :rank]
        return [("lora_a", self.lora_a[slot, s, :rank]), ("lora_b", b)]

    def base(self) -> torch.Tensor:
        """Return the frozen base layer's output."""
        return functional.linear(self.x, self.weight)

    def ours(self) -> torch.Tensor:
        """Return the same with the LoRA of each row, as callers of the interface add it."""
        return self.engine.run_linear(self.x, self.weights, self.plan, base_output=self.base())

    def in_model(self) -> torch.Tensor:
        """Return the same as `MultiLoRAModel` computes it: one node, one tensor per adapter."""
        with torch.no_grad():
            y = self.base()
        return run_with_parameters(
            self.engine,
            BY_NAME["run_linear"],
            self.x,
            self.frozen,
            self.plan,
            y,
            self.parameters,
            base_weight=self.weight,
        )

    def loop(self) -> torch.Tensor:
        """Return the same as PEFT's mixed batch: adapter by adapter, slice by slice."""
        y = self.base()
        slots = torch.tensor(self.slots, device=y.device)
        parts = list(torch.split(y, list(self.widths), -1))
        offsets = [sum(self.widths[:s]) for s in range(len(self.widths))]
        for slot, rank in enumerate(self.cell.ranks):
            rows = (slots == slot).nonzero().flatten()
            for s, (first, width) in enumerate(zip(offsets, self.widths, strict=True)):
                h = functional.linear(self.x[rows], self.lora_a[slot, s, :rank])
                b = self.lora_b[slot, first : first + width, :rank]
                parts[s] = parts[s].index_add(0, rows, functional.linear(h, b) * SCALING)
        return torch.cat(parts, -1)

    def kernels(self) -> dict[str, tuple[Callable[[], object], int]]:
        """Return each kernel of the backward, and the bytes that it has to move."""
        engine, weights, plan = self.engine, self.weights, self.plan
        x, grad = self.x.detach(), self.grad
        count, slices, rank, inputs = self.lora_a.shape
        tokens, outputs, size = len(self.slots), grad.shape[1], grad.element_size()
        a, b = torch.empty_like(self.lora_a), torch.empty_like(self.lora_b)
        dx = torch.zeros_like(x)
        _, h = engine.forward_with_h("run_linear", x, weights, plan, grad.clone())
        if h is None:
            h = engine.run_lora_a(x, weights, plan)
        dh = engine.run_lora_b_backward(grad, None, weights, plan, narrow=True)
        assert dh is not None
        narrow, wide = tokens * slices * rank * dh.element_size(), 4 * tokens * slices * rank
        stack_a, stack_b = a.nbytes, b.nbytes

        def of_b(needs_h: bool, out: torch.Tensor | None) -> Callable[[], object]:
            return lambda: engine.run_lora_b_backward(
                grad, h, weights, plan, needs_h=needs_h, narrow=True, lora_b=out
            )

        def of_a(into: torch.Tensor | None, out: torch.Tensor | None) -> Callable[[], object]:
            return lambda: engine.run_lora_a_backward(
                dh, x, weights, plan, dx=into, adds=True, lora_a=out
            )

        g_bytes, x_bytes = tokens * outputs * size, tokens * inputs * size
        return {
            "dh": (of_b(True, None), g_bytes + stack_b + narrow),
            "dB": (of_b(False, b), g_bytes + stack_b + wide),
            "dh and dB": (of_b(True, b), g_bytes + 2 * stack_b + narrow + wide),
            "dx": (of_a(dx, None), 2 * x_bytes + stack_a + narrow),
            "dA": (of_a(None, a), x_bytes + stack_a + narrow),
            "dx and dA": (of_a(dx, a), 3 * x_bytes + 2 * stack_a + narrow),
        }


class Block:
    """The layers of one block, which run one after another, each on an input of its own.

    Args:
        engine: that computes the LoRA.
        cell: the adapters.
        layers: sizes of each layer, by name.
        slots: of the tokens.
    """

    def __init__(
        self,
        engine: LoRABackend,
        cell: Cell,
        layers: dict[str, tuple[int, tuple[int, ...]]],
        slots: list[int],
    ) -> None:
        self.layers = {name: Layer(engine, cell, sizes, slots) for name, sizes in layers.items()}

    def step(self, contender: str) -> Callable[[], None]:
        """Return forward and backward of all layers; `contender` is a method of `Layer`."""
        layers = list(self.layers.values())
        leaves = [leaf for layer in layers for leaf in layer.leaves]
        leaves += [tensor for layer in layers for tensor, _ in layer.parameters]
        grads = [layer.grad for layer in layers]

        def run() -> None:
            for leaf in leaves:
                leaf.grad = None
            with torch.enable_grad():
                outputs = [getattr(layer, contender)() for layer in layers]
            torch.autograd.backward(outputs, grads)

        return run

    def forward(self, contender: str) -> Callable[[], None]:
        """Return the forward of all layers."""

        @torch.no_grad()
        def run() -> None:
            for layer in self.layers.values():
                getattr(layer, contender)()

        return run


def warm_up(device: torch.device) -> None:
    """Multiply for some seconds: a GPU lowers its clock once it is warm."""
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    for _ in range(WARM_UP):
        a @ a
    torch.cuda.synchronize()


def device_of() -> torch.device:
    """Return where layers are."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def clock(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """Return a function that times a call, in milliseconds."""
    if device.type == "cpu":
        from measuring import seconds

        return lambda call: 1e3 * seconds(call)
    return lambda call: between_events(call) / 1e3


def steady(call: Callable[[], object], device: torch.device) -> float:
    """Return milliseconds of a call that has run for a while, as a step of training has.

    The clock of a GPU follows the load of the last tenths of a second: products alone lower it.
    """
    end = time.monotonic() + (STEADY if device.type == "cuda" else 0)
    while True:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if time.monotonic() >= end:
            break

    def run() -> None:
        for _ in range(STEPS):
            call()

    return clock(device)(run) / STEPS


def repeated(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return a call several times over, as a CUDA graph: no kernel waits for the host."""

    def run(_: int = 0) -> None:
        for _ in range(REPEATS):
            call()

    return run if device.type == "cpu" else captured(run, 1).replay


def slots_of(cell: Cell, rows: int, tokens: int) -> list[int]:
    """Return the slot of each token."""
    count = len(cell.ranks)
    per_row = [row % count for row in range(rows)]
    if cell.half:
        per_row = [0] * (rows // 2) + [1 + row % (count - 1) for row in range(rows - rows // 2)]
    return [slot for slot in per_row for _ in range(tokens)]


def measure(arguments: Options, result: Result) -> Iterator[Row]:
    """Yield a row per cell: milliseconds of each contender, and of each layer's kernels."""
    device = device_of()
    if device.type == "cpu" and not arguments.tiny:
        raise SystemExit("needs a GPU; --tiny runs small layers on the CPU")
    limits = measure_limits(device, torch.bfloat16)
    result["limits"] = limits.describe()
    copy = result["limits"]["copy_gb_per_s"] * 1e6  # bytes a millisecond
    engine = get_backend(arguments.backend, device=device)
    if device.type == "cuda":
        warm_up(device)
    contenders = ["base", "ours", "in_model", *(["loop"] if arguments.loop else [])]
    for cell in cells(arguments):
        slots = slots_of(cell, arguments.rows, arguments.tokens)
        block = Block(engine, cell, TINY if arguments.tiny else LAYERS, slots)
        calls = {name: block.step(name) for name in contenders}
        calls |= {"forward": block.forward("ours"), "base forward": block.forward("base")}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(arguments.samples + 1):
            # a GPU grows hot: every other turn goes backwards, so that nothing is always last
            for name, call in list(calls.items())[:: -1 if turn % 2 else 1]:
                taken = steady(call, device)
                if turn:
                    times[name].append(taken)
        ms = {name: statistics.median(series) for name, series in times.items()}
        kernels = {name: kernels_of(layer, device) for name, layer in block.layers.items()}
        yield {
            "cell": cell.name,
            "ms": {name: round(value, 4) for name, value in ms.items()},
            "kernels_ms": {
                name: {kernel: round(value, 4) for kernel, (value, _) in found.items()}
                for name, found in kernels.items()
            },
            "share_of_copy": {
                name: {k: round(moved / copy / value, 3) for k, (value, moved) in found.items()}
                for name, found in kernels.items()
            },
            **(error_of(block) if arguments.loop else {}),
        }
        del block, calls
        if device.type == "cuda":
            torch.cuda.empty_cache()


def kernels_of(layer: Layer, device: torch.device) -> dict[str, tuple[float, int]]:
    """Return the milliseconds of each kernel of the backward, and the bytes that it has to move."""
    measured, found = clock(device), {}
    for name, (call, moved) in layer.kernels().items():
        run = repeated(call, device)
        run()
        found[name] = statistics.median(measured(run) for _ in range(5)) / REPEATS, moved
    return found


def error_of(block: Block) -> dict[str, float]:
    """Return the largest relative error of our gradients against the loop's in the same dtype."""
    found = []
    for contender in ("ours", "loop"):
        block.step(contender)()
        leaves = [leaf for layer in block.layers.values() for leaf in layer.leaves]
        found.append([leaf.grad.float() for leaf in leaves if leaf.grad is not None])
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True)]
    return {"relative_error": round(max(errors), 5)}


def summary(result: Result) -> dict[str, Any]:
    """Return each cell's step times over the base's, and its kernels' shares of a copy."""
    found: dict[str, Any] = {}
    for row in result["rows"]:
        ms, shares = row["ms"], list(row["share_of_copy"].values())
        found[row["cell"]] = {
            "ratio_to_base": {
                key: round(ms[key] / ms["base"], 3)
                for key in ("ours", "in_model", "loop")
                if key in ms
            },
            "least_and_largest_share": {
                kernel: [min(values), max(values)]
                for kernel in shares[0]
                if (values := [share[kernel] for share in shares])
            },
        }
    return found


TRAINING = Measurement(
    rows=measure,
    file="training_gpu.json",
    method=(
        "Forward and backward of the linear layers of one block of 8B shape, one after another, "
        "frozen base weights, bfloat16; rows take the adapters in turn. Contenders take turns, "
        "in reverse order every other round; each runs for a second, so that the GPU has the clock "
        "of its load, then five steps between CUDA events; medians. Kernels run in CUDA graphs. "
        "ours: F.linear, then run_linear on its output, by autograd. in_model: one node of both, "
        "as MultiLoRAModel has it. loop: PEFT's mixed batch. share_of_copy: bytes that a kernel "
        "has to move, at the rate of a copy, over its time."
    ),
    settings=lambda o: {"device": device_of(), "backend": o.backend, "limits": {}},
    summary=summary,
    partial=True,
    options={
        "--backend": flag("triton"),
        "--ranks": flag([16, 64]),
        "--rows": flag(64),
        "--tokens": flag(512, "per row"),
        "--samples": flag(5),
        "--loop": flag(False, "time PEFT's loop too, and compare gradients with it"),
        "--tiny": flag(False, "small layers, on the CPU"),
    },
)
