"""`LoRAConfig`: arguments over environment over a TOML file over defaults."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, Field, StrictInt, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)
from typing_extensions import override

from lora_backends.adapters.files.limits import LoadLimits
from lora_backends.common.devices import as_device
from lora_backends.common.files import as_path, read_text
from lora_backends.common.names import (
    AUTO,
    ENV_PREFIX,
    TILES_VARIABLE,
    TUNE_VARIABLE,
    VLLM_VARIABLE,
)
from lora_backends.errors import (
    InvalidInputError,
    UnknownBackendError,
    did_you_mean,
    shown,
)
from lora_backends.selection.registry import backend_names

MOST = 2**31 - 1
"""The largest number in a configuration."""

_MOST_PROBLEMS = 10  # that one error lists: a screen of them


@dataclass(frozen=True)
class _File:
    """A TOML file, parsed."""

    path: Path
    values: Mapping[str, Any]


_FILE: ContextVar[_File | None] = ContextVar("_FILE", default=None)
"""The file that a configuration being made is read from."""


class _FileSource(PydanticBaseSettingsSource):
    """The values of the file, as a source of pydantic-settings."""

    @override
    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return self().get(field_name), field_name, False

    @override
    def __call__(self) -> dict[str, Any]:
        """Leave out values of a stronger source: tables are replaced whole, not merged."""
        file = _FILE.get()
        values = (
            {k: v for k, v in file.values.items() if k not in self.current_state} if file else {}
        )
        # options of the file's backend mean nothing to another one
        if file and self.current_state.get("backend", file.values.get("backend")) != (
            file.values.get("backend")
        ):
            values.pop("backend_options", None)
        return values


class _EnvSource(EnvSettingsSource):
    """The environment, where a number is a string: elsewhere a string for a number is refused."""

    @override
    def prepare_field_value(
        self, field_name: str, field: Any, value: Any, value_is_complex: bool
    ) -> Any:
        prepared = super().prepare_field_value(field_name, field, value, value_is_complex)
        # StrictInt refuses strings, and the environment holds nothing else
        if field.annotation is int and isinstance(prepared, str) and prepared.strip().isdecimal():
            return int(prepared)
        return prepared

    @override
    def __call__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__call__().items() if k not in self.current_state}


class LoRAConfig(BaseSettings):
    """The backend, the device, the slots and the adapters of a run.

    Every field may be given as an argument, as an environment variable with the prefix
    ``LORA_BACKENDS_`` (tables as JSON), or in a TOML file (`from_file`), in this order of
    precedence. A table is taken whole from the strongest source that has it, and options in a file
    go with the file's backend:

        backend = "auto"
        max_rank = 16

        [adapters]
        pirate = "adapters/pirate"     # relative to the file

    Raises:
        InvalidInputError: an unknown key, a wrong type or value, an unknown backend; it names the
            key, its place and the allowed values.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, validate_default=False
    )

    backend: str = AUTO
    """A registered name or "auto"."""
    device: str = AUTO
    """"cpu", "cuda", "cuda:1", ... or "auto"."""
    dtype: Literal["float16", "bfloat16", "float32", "float64", "auto"] = "auto"
    """Dtype that a model is loaded in; "auto": as its checkpoint says."""
    adapter_dtype: Literal["int8", "float8_e4m3fn", "float8_e5m2", "auto"] = "auto"
    """Dtype that adapters are kept in; "auto": the model's. 8 bits take half the bytes of 16."""
    max_adapters: StrictInt = Field(default=8, ge=1, le=MOST)
    """Slots: adapters that may be loaded at once."""
    max_rank: StrictInt = Field(default=64, ge=1, le=MOST)
    """The largest rank that a slot has room for."""
    backend_options: dict[str, Any] = Field(default_factory=dict)
    """The backend's own options."""
    adapters: dict[str, Path] = Field(default_factory=dict)
    """Name to the folder of a PEFT checkpoint."""
    limits: LoadLimits = Field(default_factory=LoadLimits)
    """Limits beyond which a checkpoint is refused: a table of `LoadLimits`."""

    def __init__(self, /, **values: Any) -> None:
        self._check_environment()
        try:
            super().__init__(**values)
        except ValidationError as error:
            unknown = any("no backend named" in detail["msg"] for detail in error.errors())
            kind = UnknownBackendError if unknown else InvalidInputError
            raise kind(self._explain(error, values)) from error
        except (SettingsError, RecursionError) as error:  # JSON that is broken or nested too deep
            raise InvalidInputError(
                f"the environment is wrong: {error}\n  allowed: tables as JSON, e.g. "
                f"{ENV_PREFIX}BACKEND_OPTIONS='{{\"tile\": 32}}'"
            ) from error

    @classmethod
    def from_file(cls, path: str | Path, **overrides: Any) -> Self:
        """Read a TOML file; the environment overrides it, and `overrides` override both.

        Args:
            path: the file. Folders under ``[adapters]`` are relative to its folder.
            overrides: fields.

        Returns:
            The configuration.

        Raises:
            InvalidInputError: no such file, no TOML, or a wrong key or value in it.
        """
        file = as_path(path, "the configuration")
        try:
            values = tomllib.loads(read_text(file))
        except InvalidInputError:
            raise
        except (ValueError, RecursionError) as error:  # an int of thousands of digits, deep lists
            raise InvalidInputError(f"{file} is not valid TOML: {shown(str(error))}") from error
        adapters = values.get("adapters")
        if isinstance(adapters, dict):
            values["adapters"] = {
                name: file.parent / as_path(folder, f"adapters.{name} in {file}")
                if isinstance(folder, str)
                else folder
                for name, folder in adapters.items()
            }
        token = _FILE.set(_File(file, values))
        try:
            return cls(**overrides)
        finally:
            _FILE.reset(token)

    @classmethod
    @override
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, _EnvSource(settings_cls), _FileSource(settings_cls)

    @field_validator("backend")
    @classmethod
    def _known_backend(cls, backend: str) -> str:
        names = [AUTO, *backend_names()]
        if backend not in names:
            raise ValueError(
                f"no backend named {shown(backend)}{did_you_mean(backend, names) or ';'} "
                f"registered: {', '.join(names)}"
            )
        return backend

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if device != AUTO:
            as_device(device)  # an InvalidInputError is a ValueError
        return device

    @field_validator("limits", mode="before")
    @classmethod
    def _as_limits(cls, limits: Any) -> Any:
        # pydantic refuses other types
        if not isinstance(limits, Mapping):
            return limits
        names = [field.name for field in fields(LoadLimits)]
        unknown = [shown(name) for name in limits if name not in names]
        if unknown:
            raise ValueError(f"unknown limit {unknown[0]}\n    allowed: {', '.join(names)}")
        return LoadLimits(**limits)  # an InvalidInputError is a ValueError

    @field_validator("adapters")
    @classmethod
    def _expanded(cls, adapters: dict[str, Path]) -> dict[str, Path]:
        if "" in adapters:
            raise ValueError("an adapter has the empty name")
        return {name: as_path(folder, f"adapters.{name}") for name, folder in adapters.items()}

    @classmethod
    def _check_environment(cls) -> None:
        fields = [ENV_PREFIX + field.upper() for field in LoRAConfig.model_fields]
        allowed = [*fields, TILES_VARIABLE, TUNE_VARIABLE, VLLM_VARIABLE]
        for variable in os.environ:
            # pydantic-settings ignores unknown variables, and a typing error would pass unseen
            if variable.upper().startswith(ENV_PREFIX) and variable.upper() not in allowed:
                raise InvalidInputError(
                    f"unknown environment variable {_name(variable)}"
                    f"{did_you_mean(variable, allowed)}\n"
                    f"  allowed: {', '.join(allowed)}"
                )

    @classmethod
    def _explain(cls, error: ValidationError, arguments: Mapping[str, Any]) -> str:
        lines = []
        details = error.errors()
        for detail in details[:_MOST_PROBLEMS]:
            key = ".".join(_name(part) for part in detail["loc"])
            top = str(detail["loc"][0]) if detail["loc"] else ""
            if detail["type"] == "extra_forbidden":
                fields = _sibling_fields(cls, detail["loc"])
                guess = did_you_mean(str(detail["loc"][-1]), fields)
                problem = f"unknown key{guess}\n    allowed: {', '.join(fields)}"
            else:
                reason = detail["msg"].removeprefix("Value error, ")
                problem = f"{reason} (given: {shown(detail['input'])})"
                if top == "adapters" and isinstance(detail["input"], Mapping):  # a TOML table
                    problem += '; quote a name with dots: "retrieval.query" = "folder"'
            lines.append(f"  - {key} in {cls._where(top, arguments)}: {problem}")
        if len(details) > _MOST_PROBLEMS:
            lines.append(f"  - and {len(details) - _MOST_PROBLEMS} more")
        return "\n".join(["the configuration is wrong:", *lines])

    @classmethod
    def _where(cls, key: str, arguments: Mapping[str, Any]) -> str:
        """Return where the value of `key` came from."""
        if key in arguments:
            return "the arguments"
        variable = ENV_PREFIX + key.upper()
        if variable in {name.upper() for name in os.environ}:
            return f"the environment variable {variable}"
        file = _FILE.get()
        return str(file.path) if file else "the defaults"


def _name(part: str | int) -> str:
    text = str(part)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _sibling_fields(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """Return the fields of the table that holds the key at `location`."""
    for part in location[:-1]:
        if isinstance(part, str):
            annotation = model.model_fields[part].annotation
            model = next(
                t
                for t in (annotation, *get_args(annotation))
                if isinstance(t, type) and issubclass(t, BaseModel)
            )
    return list(model.model_fields)
