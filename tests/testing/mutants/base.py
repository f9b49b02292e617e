"""The registry of mutants, and torch_ref with a place for a fault."""

from dataclasses import dataclass

import torch

from lora_backends import LoRABackend, LoRABatch
from lora_backends.torch_ref import TorchRefBackend


@dataclass(frozen=True)
class Mutant:
    """A wrong backend, its fault in a few words, and the property that catches it."""

    backend: type[LoRABackend]
    caught_by: str

    @property
    def name(self):
        return self.backend.__name__

    @property
    def fault(self):
        return self.backend.__doc__


MUTANTS: dict[str, Mutant] = {}


def caught_by(name):
    def register(backend):
        MUTANTS[backend.__name__] = Mutant(backend, name)
        return backend

    return register


class TwoSteps(TorchRefBackend):
    """torch_ref without its fused run_linear, so that a fault of one step shows in it.

    Mutants whose fault is in a feature declare it; the others have the plain interface.
    """

    features = frozenset()

    def run_linear(self, x, weights, plan, base_output=None):
        return self.run_lora_b(self.run_lora_a(x, weights, plan), weights, plan, base_output)


class Seeing(TwoSteps):
    """torch_ref that sees other weights, x, h or base than it is given."""

    def seen(self, weights):
        return weights

    def seen_x(self, x):
        return x

    def seen_h(self, h, weights, plan):
        return h

    def run_lora_a(self, x, weights, plan):
        return super().run_lora_a(self.seen_x(x), self.seen(weights), plan)

    def run_lora_b(self, h, weights, plan, base_output=None):
        h = self.seen_h(h, weights, plan)
        return super().run_lora_b(h, self.seen(weights), plan, base_output)


class Dropping(TwoSteps):
    """torch_ref whose plan loses some tokens."""

    def keep(self, slots):
        raise NotImplementedError

    def prepare_batch(self, batch, out=None):
        kept = torch.where(self.keep(batch.token_slots), batch.token_slots, -1)
        return super().prepare_batch(LoRABatch(kept, batch.num_slots), out)


def active_slices(weights, plan):
    """Yield (slot, rows, slice, rank, output columns, scaling) wherever the rank is not 0."""
    for slot, rows in plan.segments:
        for s, rank in enumerate(weights.ranks[slot].tolist()):
            if rank:
                columns = slice(*weights.slice_offsets[s : s + 2])
                yield slot, rows, s, rank, columns, float(weights.scalings[slot, s])


def new_y(weights, plan):
    return torch.zeros(plan.num_tokens, weights.out_features, dtype=weights.dtype)
