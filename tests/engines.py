"""What the tests of engines written in Triton share: where they run, and what each must keep."""

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from layers import per_token, small_batch, small_weights

from lora_backends import LoRABatch, LoRAWeights
from lora_backends.gpu.choice import fixed_choice
from lora_backends.gpu.launching import INTERPRETED
from lora_backends.gpu.tiles import ExpandTiles, ShrinkTiles, TileConfig

ON_GPU = torch.cuda.is_available() and not INTERPRETED
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
UNITS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-22}


def device_or_skip():
    """Return the GPU, or the CPU in the interpreter."""
    if ON_GPU:
        return torch.device("cuda", torch.cuda.current_device())
    if INTERPRETED:
        return torch.device("cpu")
    pytest.skip("Triton needs a GPU, or TRITON_INTERPRET=1 set before the import")


def mark_gpu(items, conftest):
    """Mark what runs on the GPU beside a conftest, so that `-m gpu` finds it."""
    for item in items:
        here = item.path.is_relative_to(Path(conftest).parent)
        if ON_GPU and here and "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)


def run_interpreted(*arguments):
    """Run Python where Triton's interpreter is chosen before the import; return what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def on(device, weights):
    """Return a layer on a device."""
    moved = {
        name: getattr(weights, name).to(device)
        for name in ("lora_a", "lora_b", "ranks", "scalings")
    }
    bias = None if weights.bias is None else weights.bias.to(device)
    return LoRAWeights(**moved, output_slices=weights.output_slices, bias=bias)


def ones(num_slots, slices, max_rank, inputs, device, dtype=torch.bfloat16):
    """Return a layer of ones, every rank the widest."""
    return LoRAWeights(
        lora_a=torch.ones(num_slots, len(slices), max_rank, inputs, dtype=dtype, device=device),
        lora_b=torch.ones(num_slots, sum(slices), max_rank, dtype=dtype, device=device),
        ranks=torch.full((num_slots, len(slices)), max_rank, dtype=torch.int32),
        scalings=torch.ones(num_slots, len(slices)),
        output_slices=slices,
    )


def check_rank(backend, max_rank):
    """Check sums of ones, exact in bfloat16 while they have 8 bits."""
    weights = ones(2, (3, 40), max_rank, 4, backend.device)
    x = torch.ones(4, 4, dtype=torch.bfloat16, device=backend.device)
    y = backend.run_linear(x, weights, backend.prepare_batch(LoRABatch([1, 0, -1, 1], 2)))
    assert y[:, 0].tolist() == pytest.approx([4 * max_rank, 4 * max_rank, 0, 4 * max_rank])
    assert (y[0] == y[0, 0]).all()


def check_candidates(backend, tuning):
    """Check tile sizes that a table may hold, drawn from all candidates."""
    weights, batch = small_weights(torch.float32), small_batch()
    layer = (weights.num_slices, weights.max_rank, weights.in_features, weights.out_features, 4)
    x, base = torch.randn(7, 10), torch.randn(7, 14)
    expected, on_device = per_token(x, weights, batch, base), on(backend.device, weights)
    for tile in tuning.TILE_TOKENS:
        found = tuning.candidates(7, 3, tile, *layer)
        for tiles in random.Random(tile).sample(found, min(8, len(found))):
            backend.tile_choice = fixed_choice(tile, tiles)
            y = base.clone().to(backend.device)
            backend.run_linear(x.to(backend.device), on_device, backend.prepare_batch(batch), y)
            assert ((y.cpu().double() - expected).abs() <= 1e-5).all(), tiles


LAYOUTS = ["whole", "part of a stack", "wide rows", "unaligned rows"]
BOXES = [(torch.bfloat16, True, layout) for layout in LAYOUTS]
BOXES += [(torch.float16, False, "whole"), (torch.float32, False, "whole")]


def check_boxes(backend, launch, monkeypatch, dtype, bias, layout):
    """Check sizes that copy boxes of B, and that they are copied wherever that is possible."""
    copied, boxes_of = [], launch.boxes_of
    monkeypatch.setattr(launch, "boxes_of", lambda *args: copied.append(args) or boxes_of(*args))
    generator = torch.Generator().manual_seed(7)
    slices, max_rank, tile = (200, 72, 8), 24, 64
    ranks = torch.tensor([[24, 3, 0], [16, 24, 1], [0, 0, 0], [9, 17, 24]], dtype=torch.int32)
    lora_a = torch.randn(4, 3, max_rank, 40, generator=generator)
    lora_b = torch.randn(4, sum(slices), max_rank, generator=generator)
    for slot, s in itertools.product(range(4), range(3)):
        lora_a[slot, s, ranks[slot, s] :] = float("nan")
        lora_b[slot, sum(slices[:s]) : sum(slices[: s + 1]), ranks[slot, s] :] = float("nan")
    weights = LoRAWeights(
        lora_a=lora_a.to(dtype),
        lora_b=_laid_out(lora_b.to(dtype), layout),
        ranks=ranks,
        scalings=torch.randn(4, 3, generator=generator),
        output_slices=slices,
        bias=torch.randn(4, sum(slices), generator=generator).to(dtype) if bias else None,
    )
    slots = [3] * 70 + [-1, 0, 2] + [1] * 9 + [0, 3] * 5
    x = torch.randn(len(slots), 40, generator=generator).to(dtype)
    base = torch.randn(len(slots), sum(slices), generator=generator).to(dtype)
    tiles = TileConfig(ShrinkTiles(16, 16, 2), ExpandTiles(16, 32, 4, num_stages=3))
    backend.tile_choice = fixed_choice(tile, tiles)
    plan, y = backend.prepare_batch(LoRABatch(slots, 4)), base.clone().to(backend.device)
    moved = on(backend.device, weights)
    object.__setattr__(moved, "lora_b", _laid_out(moved.lora_b, layout))
    for _ in range(2):  # the second call takes the launches that are kept
        y.copy_(base)
        backend.run_linear(x.to(backend.device), moved, plan, y)
    expected = per_token(x, weights, LoRABatch(slots, 4), base)
    scale = lora_a.nan_to_num().norm(dim=-1).amax() * lora_b.nan_to_num().norm(dim=-1).amax()
    room = 4 * UNITS[dtype] * scale + 2 * UNITS[dtype] * expected.abs()
    assert ((y.cpu().double() - expected).abs() <= room).all()
    assert torch.equal(y[70].cpu(), base[70])
    assert bool(copied) is (dtype != torch.float32 and layout != "unaligned rows")


def _laid_out(lora_b, layout):
    """Return a copy of B whose slots, or whose rows, are apart."""
    num_slots, columns, max_rank = lora_b.shape
    room = {"part of a stack": (31, 0), "wide rows": (0, 8), "unaligned rows": (0, 3)}
    more_columns, more_ranks = room.get(layout, (0, 0))
    whole = lora_b.new_full(
        (num_slots, columns + more_columns, max_rank + more_ranks), float("nan")
    )
    part = whole[:, more_columns:, :max_rank]
    part.copy_(lora_b)
    return part


def check_five_slices(backend):
    weights = ones(1, (5, 1, 7, 16, 33), 3, 8, backend.device, torch.float32)
    x = torch.ones(1, 8, device=backend.device)
    y = backend.run_linear(x, weights, backend.prepare_batch(LoRABatch([0], 1)))
    assert y.unique().tolist() == [24.0]


def check_batch_invariance(backend):
    """Check that a token's row is the same alone as among 70."""
    device = backend.device
    weights = on(device, small_weights(torch.bfloat16))
    x = torch.randn(70, 10, device=device).to(torch.bfloat16)
    slots = [token % 4 for token in range(70)]
    together = backend.run_linear(x, weights, backend.prepare_batch(LoRABatch(slots, 4)))
    alone = [
        backend.run_linear(x[t : t + 1], weights, backend.prepare_batch(LoRABatch([slot], 4)))
        for t, slot in enumerate(slots[:8])
    ]
    assert torch.equal(together[:8], torch.cat(alone))


def check_graph_replay(backend):
    """Check that one captured call follows the plan over compositions of 96 tokens."""
    generator = torch.Generator().manual_seed(0)
    weights = on("cuda", small_weights(torch.bfloat16))
    x = torch.randn(96, 10, generator=generator).cuda().to(torch.bfloat16)
    base = torch.randn(96, 14, generator=generator).cuda().to(torch.bfloat16)
    y = base.clone()
    plan = backend.prepare_batch(LoRABatch([0] * 96, 4))
    backend.run_linear(x, weights, plan, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.run_linear(x, weights, plan, y)
    compositions = [[-1] * 96, [3] * 96, [t % 5 - 1 for t in range(96)], [0, 3] + [-1] * 94]
    compositions += [torch.randint(-1, 4, (96,), generator=generator).tolist() for _ in range(8)]
    for slots in compositions:
        backend.prepare_batch(LoRABatch(slots, 4), out=plan)
        y.copy_(base)
        graph.replay()
        eager = backend.run_linear(x, weights, plan, base.clone())
        assert torch.equal(y, eager)
