"""An engine that stores calls, for tests of the code that finds and repeats them."""

from dataclasses import dataclass

import torch

from lora_backends import LoRABackend
from lora_backends.dispatch.cached import CachingPlan, stores_calls


@dataclass(eq=False)
class Plan(CachingPlan):
    pass


class Call:
    """A stored call that counts how often it is repeated, and adds one to y unless it is stale."""

    def __init__(self):
        self.repeated = 0
        self.stale = False

    def run(self, x, weights, plan, y):
        self.repeated += not self.stale
        y += not self.stale
        return not self.stale


class Storing(LoRABackend):
    """Adds one to y and stores a call that does the same; notes the axes that it is given."""

    plan_type = Plan
    dtypes = (torch.float32, torch.float64)

    def __init__(self):
        super().__init__()
        self.call, self.axes = Call(), []

    @property
    def ran(self):
        return len(self.axes)

    def prepare_batch(self, batch, out=None):
        if out is None:
            return Plan(batch.num_tokens, batch.num_slots)
        out.num_tokens = batch.num_tokens
        return out

    def run_lora_a(self, x, weights, plan):
        raise NotImplementedError

    def run_lora_b(self, h, weights, plan, base_output=None):
        raise NotImplementedError

    @stores_calls
    def run_linear(self, x, weights, plan, base_output=None):
        self.axes.append((x.ndim, base_output.ndim))
        base_output += 1
        plan.call_cache.store("run_linear", self, x, weights, base_output, self.call)
        return base_output
