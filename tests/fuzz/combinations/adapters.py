"""Adapters of one random model that PEFT has saved, and PEFT's model with each of them."""

import copy
import random
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from helpers.sweeps import sweep

from .bases import Base, draw_inputs
from .configs import draw_config
from .judging import logits_of

ATTEMPTS = 12
PLAIN = {"lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "layers_pattern"}
PLAIN |= {"r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform"}
PLAIN |= {"task_type", "init_lora_weights", "runtime_config", "inference_mode"}


@dataclass
class Adapter:
    """An adapter in a folder, its configuration, and PEFT's model with it alone."""

    name: str
    config: dict[str, Any]
    folder: Path
    peft: Any
    doubled: Any = field(default=None, repr=False)

    @property
    def is_plain(self) -> bool:
        """Return whether it is LoRA of linear layers alone, which may blend with another."""
        inits = (None, True, False, "gaussian", "orthogonal", "mica")
        return set(self.config) <= PLAIN and self.config.get("init_lora_weights") in inits

    @property
    def is_invoked(self) -> bool:
        return bool(self.config.get("alora_invocation_tokens"))

    def in_float64(self) -> Any:
        """Return PEFT's model with it in float64."""
        if self.doubled is None:
            self.doubled = copy.deepcopy(self.peft).double()
        return self.doubled


def make_adapter(base: Base, name: str, folder: Path, seed: str) -> Adapter:
    """Save a random adapter that PEFT makes and loads; it refuses some configurations."""
    for attempt in range(ATTEMPTS):
        draw = random.Random(f"{seed}/{attempt}")
        config = draw_config(draw, base)
        if attempt == ATTEMPTS - 1:
            config = {"r": 4, "target_modules": base.names}
        where = folder / f"{name}-{attempt}"
        try:
            std = draw.choice([0.05, 0.2, 0.2, 0.3])
            sweep.adapt(base.model, str(where), draw.randrange(2**31), std, **config)
            model = sweep.in_peft(base.model, str(where))
            kept = [logits_of(model, draw_inputs(draw, base, 1)), *tensors_of(model).values()]
            if not all(bool(tensor.isfinite().all()) for tensor in kept):
                continue  # e.g. PiSSA with lora_alpha 0
        except Exception:  # of PEFT, in any form
            continue
        return Adapter(name, config, where, model)
    raise AssertionError(f"PEFT makes no adapter for {base.name}")


def blended(base: Base, parts: list[tuple[Adapter, float]]) -> Any:
    """Return PEFT's model with several plain adapters at once, each scaled by a strength."""
    import peft

    model = sweep.in_peft_together(base.model, {a.name: str(a.folder) for a, _ in parts})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.base_model.set_adapter([adapter.name for adapter, _ in parts])
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            for adapter, strength in parts:
                if adapter.name in module.scaling:
                    module.scaling[adapter.name] *= strength
    return model.eval()


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """Return what PEFT saves of an adapter."""
    import peft

    found: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(model)
    return found
