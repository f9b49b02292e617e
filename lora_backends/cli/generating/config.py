"""The configuration file of `lora-backends generate`: `LoRAConfig` and the job."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt

from lora_backends.cli.generating.entries import Entry, checked, entry_of
from lora_backends.common.files import as_path, kind_of
from lora_backends.errors import InvalidInputError, shown
from lora_backends.selection.config import MOST, LoRAConfig


class ModelConfig(BaseModel):
    """Where the base model is: a folder or hub id, or an installed package that carries it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str | None = None
    """A folder, or the id of a model on the Hugging Face hub."""
    package: str | None = None
    """An installed Python package whose folder holds the model; it is not imported."""
    gguf_file: str | None = None
    """The GGUF file in that folder, where the model is one."""

    def location(self) -> str:
        """Return the first argument of `from_pretrained`."""
        if (self.path is None) == (self.package is None):
            raise InvalidInputError(
                f"which model?\n  given: path={shown(self.path)}, package={shown(self.package)}\n"
                f"  allowed: one of the two, under [model] or as --model"
            )
        if self.path is not None:
            path = as_path(self.path, "the model")
            if kind_of(path) == "a file":
                raise InvalidInputError(
                    f"the model {shown(self.path)} is a file\n  to do: give its folder"
                )
            return str(path)
        assert self.package is not None
        if not self.package.isidentifier():  # a dotted name would import its parent package
            raise InvalidInputError(
                f"model.package is {shown(self.package)}\n  allowed: the name of a package"
            )
        spec = importlib.util.find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            raise InvalidInputError(
                f"the package {self.package!r} that carries the model is not installed"
            )
        return spec.submodule_search_locations[0]


class PromptConfig(BaseModel):
    """One row of the batch."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str = Field(min_length=1)
    """The prompt."""
    adapter: Annotated[Entry, BeforeValidator(checked)] = None
    """The adapter that answers, or a blend: a table of names to strengths, or
    "pirate:0.7+json:0.3"; the base model if left out."""


class GenerateConfig(LoRAConfig):
    """A `LoRAConfig` with a model, prompts, and how to generate."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    """The base model."""
    prompts: list[PromptConfig] = Field(default_factory=list)
    """The rows of the batch."""
    max_new_tokens: StrictInt = Field(default=40, ge=1, le=MOST)
    """How long an answer may be."""
    chat: StrictBool = True
    """Whether prompts go through the tokenizer's chat template."""

    def entries(self) -> list[Entry]:
        """Return the adapter or blend of every prompt; InvalidInputError if it has none."""
        numbered = enumerate(self.prompts, 1)
        return [entry_of(prompt.adapter, self.adapters, number) for number, prompt in numbered]


def job(config: Path | None, model: str | None, **options: Any) -> GenerateConfig:
    """Return the job of a file, of options that are not None, or of both; it has prompts."""
    overrides = {key: value for key, value in options.items() if value is not None}
    if model is not None:
        overrides["model"] = {"path": model}
    if config is None:
        settings = GenerateConfig(**overrides)
    else:
        settings = GenerateConfig.from_file(config, **overrides)
    if not settings.prompts:
        raise InvalidInputError(
            "no prompts\n  to do: give --prompt TEXT, or [[prompts]] in the configuration"
        )
    return settings


def adapters_of(texts: list[str] | None) -> dict[str, str] | None:
    """Return the adapters that --adapter names as NAME=FOLDER, each once, or None."""
    if not texts:
        return None
    adapters: dict[str, str] = {}
    for item in texts:
        name, _, folder = item.partition("=")
        if not name or not folder:
            raise InvalidInputError(f"--adapter {item!r}\n  allowed: NAME=FOLDER")
        if name in adapters:
            raise InvalidInputError(
                f"--adapter names {name!r} twice\n  given: {adapters[name]} and {folder}\n"
                f"  allowed: a name for each"
            )
        adapters[name] = folder
    return adapters


def prompts_of(texts: list[str] | None, use: list[str] | None) -> list[dict[str, str]] | None:
    """Return the prompts that --prompt and --use name, or None; their numbers go together."""
    if not texts:
        if use:
            raise InvalidInputError("--use goes with --prompt: one adapter per prompt")
        return None
    names = use or ["-"]
    if len(names) == 1:
        # one --use serves all prompts
        names = names * len(texts)
    if len(names) != len(texts):
        raise InvalidInputError(
            f"{len(names)} times --use for {len(texts)} times --prompt\n"
            f"  allowed: one per prompt, or one for all"
        )
    return [
        {"text": text} if name == "-" else {"text": text, "adapter": name}
        for text, name in zip(texts, names, strict=True)
    ]
