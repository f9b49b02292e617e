"""Weights that are split over several safetensors files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from lora_backends.adapters.files.limits import LoadLimits
from lora_backends.adapters.files.messages import problem
from lora_backends.adapters.files.safetensors_file import read_safetensors
from lora_backends.errors import InvalidInputError, shown

_SHARD = re.compile(r"adapter_model-(\d{5})-of-(\d{5})\.safetensors")


def shards_of(names: Iterable[str]) -> list[str]:
    """Return the names of shards among those of a folder, in order."""
    return sorted(name for name in names if _SHARD.fullmatch(name))


def read_shards(folder: Path, names: list[str], limits: LoadLimits) -> dict[str, Tensor]:
    """Return the tensors of all shards, each of which is in one."""
    counts = {match[2] for name in names if (match := _SHARD.fullmatch(name))}
    wanted = {
        f"adapter_model-{number:05}-of-{count}.safetensors"
        for count in counts
        # A file's name may claim any count: one more than there are files shows the gap.
        for number in range(1, min(int(count), len(names) + 1) + 1)
    }
    if wanted != {*names}:
        missing = sorted(wanted - {*names})
        given = f"{len(names)} shards, without {', '.join(missing[:3])}"
        raise InvalidInputError(
            problem(folder, "shards are missing", given, "all of them", "copy the folder again")
        )
    tensors: dict[str, Tensor] = {}
    size = 0
    for name in names:
        for key, tensor in read_safetensors(folder / name, limits).items():
            if key in tensors:
                given = f"tensor {shown(key)} in {name} and in another"
                raise InvalidInputError(problem(folder, "shards overlap", given, "one of them"))
            tensors[key] = tensor
            size += tensor.nbytes
        # After each shard, so that no further one is read.
        if len(tensors) > limits.tensors:
            given = f"{len(tensors)} tensors and more"
            raise limits.exceeded("tensors", folder, given, len(tensors))
        if size > limits.unpacked_bytes:
            given = f"tensors of {size} bytes and more"
            raise limits.exceeded("unpacked_bytes", folder, given, size)
    return tensors
