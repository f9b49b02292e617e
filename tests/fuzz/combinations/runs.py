"""A world: one wrapped model, 16 adapters, and 40 cases that load them and mix them in batches."""

import copy
import random
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers

from lora_backends import LoRABackendError, unavailable_reasons
from lora_backends.hf import MultiLoRAModel

from ..running import Ran, RunCase, ending_hangs, fault_of_message, untyped
from .adapters import Adapter, make_adapter
from .bases import draw_base
from .cases import Case
from .refusals import feature_of

CASES = 40
BACKENDS = ("numba_cpu",) * 30 + ("torch_ref",) * 9 + ("csgmv",)
MAX_RANK = 32  # PiSSA and OLoRA take twice their rank


@contextmanager
def opened(seed: int) -> Iterator[RunCase]:
    """Yield a function that runs one case; the first of a world, or a lone one, opens the world."""
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        world: World | None = None

        def run(number: int) -> Ran:
            nonlocal world
            index = number // CASES
            if world is None or (world.seed, world.index) != (seed, index):
                if world is not None:
                    world.close()
                world = World(seed, index, Path(root))
            while world.next < number:
                world.run(world.next)
            return world.run(number)

        yield run


class World:
    """A model and its adapters; each follows from the seed and its number."""

    def __init__(self, seed: int, index: int, root: Path) -> None:
        self.seed, self.index, self.next = seed, index, index * CASES
        self.folder = root / str(index)
        draw = random.Random(f"{seed}/world {index}")
        self.base = draw_base(draw)
        backends = [name for name in BACKENDS if not unavailable_reasons(name, "cpu")]
        self.backend = draw.choice(backends)
        self.adapters: dict[str, Adapter] = {}
        self.before = {n: t.clone() for n, t in self.base.model.state_dict().items()}
        self.refusal: LoRABackendError | None = None
        slots, fuse = draw.randint(4, 6), draw.choice([None, True, False])
        try:
            self.model = MultiLoRAModel(
                copy.deepcopy(self.base.model), self.backend, slots, MAX_RANK, fuse=fuse
            )
        except LoRABackendError as error:
            self.refusal = error
            return
        self.has_store = draw.random() < 0.25
        if self.has_store:
            self.model.keep_adapters(cpu_bytes=draw.choice([2**16, 2**26]), watch_s=None)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def adapter(self, name: str) -> Adapter:
        if name not in self.adapters:
            seed = f"{self.seed}/{self.index}/{name}"
            self.adapters[name] = make_adapter(self.base, name, self.folder, seed)
        return self.adapters[name]

    def run(self, number: int) -> Ran:
        """Run one case."""
        self.next = number + 1
        if self.refusal is not None:
            outcome, fault = self.judge_refusal(self.refusal, [])
            return Ran(f"the model {outcome}", fault, [self.base.name])
        case = Case(self, random.Random(f"{self.seed}/{number}"))
        try:
            with ending_hangs():
                outcome, fault = case.run()
        except BaseException as error:
            return untyped(error, case.steps)
        return Ran(outcome, fault, case.steps)

    def judge_refusal(
        self, error: LoRABackendError, adapters: list[Adapter]
    ) -> tuple[str, str | None]:
        """Return the outcome of a refusal, and what is wrong with it."""
        feature = feature_of(str(error), [adapter.config for adapter in adapters])
        fault = fault_of_message(str(error))
        if feature is None:
            feature, fault = "not known", f"refused without a known reason: {error}"
        return f"refused: {type(error).__name__}: {feature}", fault

    def changed(self) -> str | None:
        """Return what has changed in the base model."""
        now = self.model.base.state_dict()
        if now.keys() != self.before.keys():
            return f"the base model's tensors are {sorted(now.keys() ^ self.before.keys())}"
        wrong = [name for name, tensor in self.before.items() if not torch.equal(tensor, now[name])]
        return f"base weights changed: {wrong[:3]}" if wrong else None
