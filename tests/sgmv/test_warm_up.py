"""Kernels that are compiled before an engine serves: all that any of its batches needs."""

import random
from dataclasses import dataclass
from itertools import islice, pairwise

import pytest
import torch

from lora_backends import LoRAWeights, get_backend
from lora_backends.integrations import plans as rooms
from lora_backends.integrations.plans import Plans
from lora_backends.integrations.warm_up import (
    Batch,
    Trial,
    _unlike,
    announce,
    batches,
    record,
)
from lora_backends.sgmv.launching.kernel import INTERPRETED
from lora_backends.sgmv.tiles.gpu import H200
from lora_backends.sgmv.tiles.source import rules_for

ROWS, SLOTS = 2048, 8
LAYERS = {  # in_features and output_slices
    "qkv": (4096, (4096, 1024, 1024)),
    "down": (14336, (4096,)),
}


@dataclass
class Serving:
    """A layer of an engine on an H200, as far as choosing kernels goes."""

    plans: Plans
    trial: Trial

    def needed(self, batch, rows):
        announce(self.plans, batch)
        return self.needed_by_the_announced(rows)

    def needed_by_the_announced(self, rows):
        with self.plans.backend.recording() as recorded:
            self.trial.call(rows)
        return recorded.kernels


@pytest.fixture
def serve(monkeypatch):
    if not INTERPRETED:
        pytest.skip("plans an H200's kernels on a CPU")
    monkeypatch.setattr(
        rooms, "_sizes", lambda _, capacity, sizes=rooms._sizes: sizes("cuda", capacity)
    )

    def make(engine, layer, rank, halves=False, lora_a=None, plans=None, slots=SLOTS):
        backend = get_backend(engine, device="cpu") if plans is None else plans.backend
        backend._options = backend._options._replace(
            programmatic=True, tma=True, gpu=H200, source=rules_for(H200)
        )
        wide, slices = LAYERS[layer]
        weights = LoRAWeights(
            lora_a or torch.empty(slots, len(slices), rank, wide, dtype=torch.bfloat16),
            torch.empty(slots, sum(slices), rank, dtype=torch.bfloat16),
            torch.zeros(slots, len(slices), dtype=torch.int32),
            torch.ones(slots, len(slices)),
            slices,
        )
        plans = plans or Plans(backend, slots, ROWS)

        def run(rows):
            x, y = (torch.empty(rows, n, dtype=torch.bfloat16) for n in (wide, sum(slices)))
            if not halves:
                backend.run_linear(x, weights, plans.of(rows), y)
                return
            h = torch.empty(len(slices), rows, rank)
            backend.run_lora_a(x, weights, plans.of(rows), out=h)
            backend.run_lora_b(h, weights, plans.of(rows), y)

        return Serving(plans, Trial(plans, ROWS, run, None, halves))

    return make


def drawn(draw):
    """Return a batch of prefills in chunks beside decodes, or decodes alone, and its rows of x."""
    decodes, prefill = draw.randint(0, 256), draw.choice((0, draw.randint(0, ROWS)))
    rows = min(max(1, decodes + prefill), ROWS)
    batch = Batch(rows, draw.randint(1, min(SLOTS, rows)))
    return batch, draw.choice((rows, min(ROWS, -(-rows // 8) * 8)))


@pytest.mark.parametrize(
    "engine, layer, rank, halves",
    [
        ("triton", "qkv", 16, False),
        ("triton", "down", 8, False),
        ("triton", "qkv", 8, True),
        ("csgmv", "qkv", 64, False),
    ],
)
def test_no_batch_of_a_serving_needs_another_kernel(serve, engine, layer, rank, halves):
    serving = serve(engine, layer, rank, halves)
    plans, trial = serving.plans, serving.trial
    recorded, jobs = record(plans, [trial], captured=False)
    assert len(jobs) <= recorded.missing < 60
    compiled, draw = recorded.kernels, random.Random(7)
    assert serving.needed(Batch(16, 1), 16) <= compiled
    for _ in range(500):
        batch, rows = drawn(draw)
        assert serving.needed(batch, rows) <= compiled, (batch, rows)

    for room in (8, 64, 256):  # as a capture does
        announce(plans, Batch(room, SLOTS))
        plans.of(room).is_captured = True
        next(each for each in plans._rooms if each.capacity == room).is_captured = True
    compiled |= record(plans, [trial], captured=True)[0].kernels
    for _ in range(500):
        batch, rows = drawn(draw)
        assert serving.needed(batch, rows) <= compiled, (batch, rows)


def unevenly(rows, active, draw):
    """Yield the slot of each row: in turn; full tiles and idle rows; overfull slots; chunks."""
    yield [row % active for row in range(rows)]
    for tile in (16, 32):
        if rows > tile * active:  # full tiles, and rows without an adapter
            yield [*range(active)] * tile + [-1] * (rows - tile * active)
        taken, over = [*range(active)], 0
        while len(taken) + tile <= rows and over < active:
            taken, over = taken + [over] * tile, over + 1
        yield taken + [over % active] * (rows - len(taken))
    ends = sorted(draw.choices(range(rows - active + 1), k=active - 1))
    lengths = [end - first for first, end in pairwise([0, *ends, rows - active])]
    yield [slot for slot, length in enumerate(lengths) for _ in range(length + 1)]


@pytest.mark.parametrize(
    "engine, layer, rank, slots, step",
    [("triton", "down", 16, 24, 1), ("csgmv", "qkv", 64, 24, 3), ("triton", "down", 64, 72, 37)],
)
def test_no_batch_that_falls_unevenly_on_slots_needs_another_kernel(
    serve, engine, layer, rank, slots, step
):
    serving = serve(engine, layer, rank, slots=slots)
    compiled = record(serving.plans, [serving.trial], captured=False)[0].kernels
    draw, tiles = random.Random(7), set()
    for active in range(1, slots + 1):
        for rows in range(active + draw.randrange(step), min(ROWS, 34 * active), step):
            for taken in islice(unevenly(rows, active, draw), None if rows > 256 else 1):
                serving.plans.set_slots(taken)
                assert serving.needed_by_the_announced(rows) <= compiled, (rows, active, taken)
                tiles.add(serving.plans.of(rows).tile_tokens)
    assert tiles == {16, 32, 64}


def test_layers_whose_tensors_lie_at_other_distances_are_told_apart(serve):
    parts = torch.empty(4 * SLOTS, 16, 4096, dtype=torch.bfloat16).split(SLOTS)
    first = serve("triton", "qkv", 16, lora_a=parts[:3])
    like, unlike = (
        serve("triton", "qkv", 16, lora_a=each, plans=first.plans).trial
        for each in (parts[1:], (*parts[:2], parts[3]))
    )
    assert _unlike(first.plans, [first.trial, like, unlike]) == [like, unlike]


def test_batches_of_a_backend_that_tells_nothing_are_close_to_any_batch():
    chosen = batches(8192, 8)
    assert {Batch(1, 1), Batch(8192, 1), Batch(8192, 8)} <= set(chosen)
    assert all(batch.slots <= batch.rows <= 8192 for batch in chosen)
    for rows in (3, 40, 100, 777, 5000):
        for slots in (1, 3, 8):
            if slots <= rows:
                near = [b for b in chosen if b.slots == slots and b.rows <= rows < 1.3 * b.rows]
                assert near, (rows, slots)
