"""The source of the LoRA of experts, and the base model that it is checked against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lora_backends.adapters.files.formats import CONFIG_FILE
from lora_backends.adapters.files.messages import as_json, problem
from lora_backends.adapters.peft.config import PeftLoraConfig
from lora_backends.adapters.peft.module_rules import ModuleRule
from lora_backends.adapters.read_options import ReadOptions
from lora_backends.adapters.specs import ExpertSpec
from lora_backends.errors import InvalidInputError, UnsupportedInputError, did_you_mean

A_KEY, B_KEY, PREFIX = "lora_A.weight", "lora_B.weight", "base_model.model."


@dataclass(frozen=True)
class ExpertSource:
    """The file of the tensors of experts, with its configuration and the base model."""

    path: Path
    config: PeftLoraConfig
    rules: Mapping[str, ModuleRule]  # by every name of `ruled_names`
    options: ReadOptions

    @property
    def specs(self) -> Mapping[str, ExpertSpec] | None:
        """The parameters of the base model, by path."""
        return self.options.known_experts

    def error(
        self, what: str, given: str | list[str], allowed: str, to_do: str | None = None
    ) -> InvalidInputError:
        """Return the error about this file."""
        return InvalidInputError(problem(self.path, what, given, allowed, to_do))

    def spec(self, name: str) -> ExpertSpec | None:
        """Return the layout of a parameter of the base model; None where it is not known."""
        if self.specs is None:
            return None
        spec = self.specs.get(name)
        if spec is None:
            raise self.error(
                f"the base model has no experts {name!r}{did_you_mean(name, self.specs)}",
                f"LoRA for {name!r}",
                f"{len(self.specs)} stacked parameters of experts in the base model",
                "load it on the model it was trained on",
            )
        if spec.refusal is not None:
            what = "the adapter has LoRA of experts that cannot be reproduced exactly"
            given, allowed = f"{name}: {spec.refusal}", "adapters without these experts"
            raise UnsupportedInputError(problem(self.path, what, given, allowed))
        return spec

    def check_room(self, name: str, rank: int) -> None:
        """Refuse a rank that the caller has no room for."""
        room = self.options.room_of_experts
        if room is not None and rank > room:
            what = f"the rank of {name!r} is too large"
            given, allowed = f"rank {rank}", f"at most {room} (max_expert_rank)"
            raise self.error(what, given, allowed, f"set max_expert_rank to {rank} or more")

    def untargeted(self, path: str) -> InvalidInputError:
        """Return the error for LoRA that the configuration does not name."""
        keys = ("target_parameters", "target_modules", "exclude_modules")
        values = ((key, getattr(self.config, key)) for key in keys)
        given = [f"LoRA for {path!r}", *(f"{k} = {as_json(v)}" for k, v in values if v is not None)]
        return self.error(
            f"{CONFIG_FILE} does not target {path!r}, so PEFT would ignore its LoRA",
            given,
            "experts that the configuration targets",
            f"add them to target_parameters in {CONFIG_FILE}, or remove their tensors",
        )
