"""Limits for checkpoints, which may come from strangers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from lora_backends.adapters.files.messages import problem
from lora_backends.errors import InvalidInputError, shown


@dataclass(frozen=True)
class LoadLimits:
    """Limits beyond which a checkpoint is refused.

    Raises:
        InvalidInputError: a limit is no number, or not above 0.
    """

    file_bytes: int = 8 * 2**30  # size of adapter_model.safetensors or adapter_model.bin
    header_bytes: int = 16 * 2**20  # adapter_config.json, the header or pickle of the weights
    tensors: int = 50_000  # in one file
    unpacked_bytes: int = 8 * 2**30  # all tensors of one file in memory, in their own dtype
    matching_seconds: float = 2.0  # the patterns of adapter_config.json against all module names

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kinds = (int, float) if field.type == "float" else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 2**63:
                raise InvalidInputError(
                    f"limits.{field.name} is {shown(value)}\n  allowed: "
                    f"{'a number' if len(kinds) > 1 else 'an int'} above 0 and below 2^63"
                )

    @classmethod
    def of(cls, value: object) -> LoadLimits:
        """Return the limits, or the defaults for None; InvalidInputError for anything else."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        raise InvalidInputError(
            f"limits is {shown(value)}\n  allowed: LoadLimits(...), or None for the defaults"
        )

    def file_too_large(self, path: Path, size: int) -> InvalidInputError:
        """Return the error for a file of weights beyond the limit."""
        also = {"unpacked_bytes": size} if self.unpacked_bytes < size else {}
        return self.exceeded("file_bytes", path, f"a file of {size} bytes", size, **also)

    def config_too_large(self, path: Path, size: int) -> InvalidInputError:
        """Return the error for an adapter_config.json beyond the limit."""
        return self.exceeded("header_bytes", path, f"a file of {size} bytes", size)

    def exceeded(
        self, name: str, path: Path, given: str | list[str], needed: float, **also: float
    ) -> InvalidInputError:
        """Return the error that names a limit and how to raise it, and those in `also`."""
        what = f"the checkpoint is beyond the limit {name}"
        raised = {name: needed, **also}
        to_do = (
            f"if you trust the file, pass limits=LoadLimits("
            f"{', '.join(f'{key}={value}' for key, value in raised.items())}), or write "
            f"{', '.join(f'{key} = {value}' for key, value in raised.items())} under [limits] in "
            f"the configuration"
        )
        return InvalidInputError(
            problem(path, what, given, f"{name} of at most {getattr(self, name)}", to_do)
        )
