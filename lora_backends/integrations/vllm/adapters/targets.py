"""Maps module names in adapters to the LoRA layers of an engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lora_backends.errors import UnsupportedInputError

ABSORBED = "kv_b_proj"
"""Under multi-head latent attention, decoding multiplies by parts of this weight directly."""


@dataclass(frozen=True)
class Target:
    """The LoRA layer of vLLM that takes one module of an adapter."""

    layer: str  # its name in the model
    piece: int | None  # which of the layer's packed modules; None: the layer is the module


class Targets:
    """Finds the LoRA layer for each module of an adapter.

    Args:
        manager: vLLM's `LoRAModelManager`.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        renames = getattr(manager.model, "hf_to_vllm_mapper", None)
        self.renames = None if renames is None else _without_stacking(renames)
        self.skipped = tuple(getattr(manager.model, "lora_skip_prefixes", None) or ())
        self._targets = {name: Target(name, None) for name in manager.modules}
        for layer, modules in manager.packed_modules.items():
            if layer in manager.modules:
                self._targets |= {name: Target(layer, i) for i, name in enumerate(modules)}

        # from 0.33: a text model's names for the language model inside a multimodal one
        text_names = getattr(manager, "_get_text_lora_names", lambda name: ())
        for name, target in list(self._targets.items()):
            for text_name in text_names(name):
                self._targets.setdefault(text_name, target)

    def name_of(self, path: str) -> str:
        """Return vLLM's name for the module at a path of the Hugging Face model."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        key = f"base_model.model.{path}.lora_A.weight"
        name: str
        name, _ = parse_fine_tuned_lora_name(key, self.renames)
        return name

    def find(self, name: str) -> Target | None:
        """Return the layer of a module by vLLM's name; None if it has none."""
        target = self._targets.get(name)
        if target is None and self._manager.is_pooling_model:
            target = self._targets.get(f"model.{name}")  # as vLLM looks for it
        if target is None and name.endswith(".experts.base_layer"):  # PEFT's name of gate and up
            target = self._targets.get(name.removesuffix(".base_layer"))
        return target

    def is_elsewhere(self, name: str) -> bool:
        """Return whether another pipeline stage has a module, or vLLM's model skips it."""
        if any(name.startswith(prefix) or f".{prefix}" in name for prefix in self.skipped):
            return True
        module = self._manager.model
        for part in name.split("."):
            if type(module).__name__ == "PPMissingLayer":
                return True
            module = getattr(module, part, None)
            if module is None:
                return False
        return type(module).__name__ == "PPMissingLayer"

    def check(self, source: Any, names: Iterable[str]) -> None:
        """Refuse an adapter with a module that vLLM would ignore or run wrong.

        Args:
            source: of the adapter, for the error.
            names: vLLM's names of its modules.

        Raises:
            UnsupportedInputError: a module has no layer, vLLM's model does not call its layer, or
                vLLM would run it wrong.
        """
        refused = {name: self._why_not(name) for name in names}
        reasons = [f"{name}: {why}" for name, why in refused.items() if why]
        if reasons:
            more = f", and {len(reasons) - 3} more" if len(reasons) > 3 else ""
            raise UnsupportedInputError(
                f"vLLM would ignore parts of the adapter, or run them wrong\n  file: {source}\n"
                f"  given: LoRA of {'; '.join(reasons[:3])}{more}\n"
                f"  to do: merge the adapter into its base model, or train it without these modules"
            )

    def _why_not(self, name: str) -> str:
        target = self.find(name)
        if target is None:
            if self.is_elsewhere(name):
                return ""
            config = getattr(self._manager, "lora_config", None)
            if getattr(config, "target_modules", None):
                return "no LoRA layer takes it; target_modules of vLLM may leave it out"
            return "no LoRA layer of this engine takes it"
        module = self._manager.modules[target.layer]
        refused: str = getattr(module, "lora_backends_refuses", "")
        if refused:
            return refused
        last = target.layer.rsplit(".", 1)[-1]
        if last == ABSORBED and _is_absorbed(self._manager.model):
            return "multi-head latent attention multiplies by its weight without the layer"
        # vLLM runs the model before it loads adapters, perhaps without embeddings and heads
        is_linear = hasattr(module, "_apply_lora_to_output") and not hasattr(
            module, "full_weight_stacked"
        )
        if is_linear and getattr(module.punica_wrapper, "was_run", False):
            layers = getattr(module, "lora_backends_layers", ())
            if layers and not any(getattr(layer, "is_called", True) for layer in layers):
                return "the model holds its weight elsewhere and does not call the layer"
        return ""


def _without_stacking(mapper: Any) -> Any:
    rename = getattr(mapper, "get_rename_mapper", None)  # newer versions: names alone
    return mapper if rename is None else rename()


def _is_absorbed(model: Any) -> bool:
    return any(
        "MLA" in type(module).__name__ or "MultiHeadLatent" in type(module).__name__
        for module in model.modules()
    )
