"""Reading `adapter_model.bin`: a zip archive of `torch.save`, or its format before that."""

from __future__ import annotations

import io
import math
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_backends.adapters.files.formats import check_pointer
from lora_backends.adapters.files.limits import LoadLimits
from lora_backends.adapters.files.messages import problem
from lora_backends.adapters.files.state_pickle import (
    RefusedPickleError,
    StorageRecord,
    StoredTensor,
    evaluate,
)
from lora_backends.common.files import is_from_outside, read_bytes
from lora_backends.errors import InvalidInputError, LoRABackendError, shown

ReadStorage = Callable[[str], bytes]

_PICKLE = "data.pkl"
_DIRECTORY_ENTRY = b"PK\x01\x02"
_PLAIN_RECORDS = 16  # an archive of torch.save has fewer records that are no storages
_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001  # of the format before zip archives


def read_pickle(path: Path, limits: LoadLimits) -> dict[str, Tensor]:
    """Return the tensors of a file of `torch.save`, in memory of their own; no code is run.

    Raises:
        InvalidInputError: the file cannot be read, is damaged, beyond a limit, or holds something
            else than a dict of names to dense tensors.
    """
    content = read_bytes(path, limits.file_bytes, limits.file_too_large)
    check_pointer(path, content)
    read = _read_archive if content[:4] == b"PK\x03\x04" else _read_legacy
    try:
        return read(content, path, limits)
    except (LoRABackendError, MemoryError):
        raise
    except RefusedPickleError as error:
        raise InvalidInputError(_problem(path, error.what, error.given)) from error
    except Exception as error:  # a damaged file makes the decoders fail in any way
        if is_from_outside(error):
            raise
        given = f"{type(error).__name__}: {shown(str(error))}"
        raise InvalidInputError(_problem(path, "the file is damaged", given)) from error


def _problem(path: Path, what: str, given: str) -> str:
    allowed = "a dict of names to dense tensors from torch.save, nothing else"
    return problem(path, what, given, allowed, "save the adapter again as safetensors")


def _read_archive(content: bytes, path: Path, limits: LoadLimits) -> dict[str, Tensor]:
    # Counted before the archive is opened, which makes an object of every entry.
    entries = content.count(_DIRECTORY_ENTRY)
    if entries > limits.tensors + _PLAIN_RECORDS:
        raise limits.exceeded("tensors", path, f"{entries} records", entries)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        records = {record.filename: record for record in archive.infolist()}
        _check_records(archive, len(content))
        name = next((name for name in records if name.partition("/")[2] == _PICKLE), None)
        if name is None:
            raise RefusedPickleError("the archive is not of torch.save", f"no {_PICKLE} in it")
        root, size = name.removesuffix(_PICKLE), records[name].file_size
        if size > limits.header_bytes:
            raise limits.exceeded("header_bytes", path, f"a pickle of {size} bytes", size)
        # torch reads a file without this record as its own byte order.
        order = root + "byteorder"
        if order in records and archive.read(order) != sys.byteorder.encode():
            raise RefusedPickleError("the file is of a machine with another byte order", order)
        state = evaluate(io.BytesIO(archive.read(name)), _checker(path, limits))
        return _tensors(state, path, limits, lambda key: archive.read(f"{root}data/{key}"))


def _check_records(archive: zipfile.ZipFile, size: int) -> None:
    """Refuse records that unpack to more than the file: torch.save does not compress."""
    records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise RefusedPickleError("the records of the archive are compressed", "compressed records")
    total = sum(record.file_size for record in records)
    if total > size or len({record.filename for record in records}) < len(records):
        given = f"{len(records)} records of {total} bytes in a file of {size} bytes"
        raise RefusedPickleError("the records of the archive overlap", given)


def _read_legacy(content: bytes, path: Path, limits: LoadLimits) -> dict[str, Tensor]:
    """Read pickles of magic, version, system, state and keys, then the storages one by one."""
    stream, check = io.BytesIO(content), _checker(path, limits)
    if (evaluate(stream, check), evaluate(stream, check)) != (_MAGIC, _VERSION):
        raise RefusedPickleError("the file is damaged", "no file of torch.save")
    system = evaluate(stream, check)
    if system["little_endian"] is not (sys.byteorder == "little"):
        what = "the file is of a machine with another byte order"
        raise RefusedPickleError(what, f"not {sys.byteorder} endian")
    state = _stored(evaluate(stream, check))
    keys = evaluate(stream, check, extra=2 * len(state))
    items = {s.storage.key: s.storage.dtype.itemsize for s in state.values()}
    storages: dict[str, bytes] = {}
    if type(keys) is not list or not all(type(key) is str for key in keys):
        raise TypeError("the keys of the storages are no list of names")
    for key in keys:
        size = int.from_bytes(stream.read(8), sys.byteorder) * items[key]
        # A size beyond the file reads less, and `_storage` refuses that.
        storages[key] = stream.read(size)
    return _tensors(state, path, limits, storages.__getitem__)


def _checker(path: Path, limits: LoadLimits) -> Callable[[int, int], None]:
    def check(position: int, tensors: int) -> None:
        if position > limits.header_bytes:
            raise limits.exceeded("header_bytes", path, f"a pickle of {position} bytes", position)
        if tensors > limits.tensors:
            raise limits.exceeded("tensors", path, f"{tensors} tensors or more", 2 * tensors)

    return check


def _stored(state: Any) -> Mapping[str, StoredTensor]:
    if type(state) is not dict or not all(type(x) is StoredTensor for x in state.values()):
        given = f"a {type(state).__name__} with other values than tensors"
        raise RefusedPickleError("the file holds no state dict", given)
    stored: dict[str, StoredTensor] = state
    return stored


def _tensors(state: Any, path: Path, limits: LoadLimits, read: ReadStorage) -> dict[str, Tensor]:
    stored = _stored(state)
    unpacked = sum(tensor.nbytes for tensor in stored.values())
    for name, tensor in stored.items():
        if math.prod(tensor.size) > tensor.storage.size:
            given = f"tensor {shown(name)} {list(tensor.size)} over {tensor.storage.size} elements"
            raise RefusedPickleError("elements of a tensor share memory", given)
    if unpacked > limits.unpacked_bytes:
        raise limits.exceeded("unpacked_bytes", path, f"tensors of {unpacked} bytes", unpacked)
    # One read per storage: tied weights and stacked layers share them.
    views: dict[StorageRecord, list[str]] = {}
    for name, tensor in stored.items():
        views.setdefault(tensor.storage, []).append(name)
    tensors: dict[str, Tensor] = {}
    for storage, names in views.items():
        whole = _storage(read(storage.key), storage)
        # A view keeps its whole storage, e.g. a layer's slice of a stacked parameter.
        copies = sum(stored[name].nbytes for name in names) < whole.nbytes
        for name in names:
            view = whole.as_strided(stored[name].size, stored[name].stride, stored[name].offset)
            tensors[name] = view.clone() if copies else view
    return {name: tensors[name] for name in stored}


def _storage(content: bytes, storage: StorageRecord) -> Tensor:
    if len(content) != storage.size * storage.dtype.itemsize:
        given = f"{len(content)} bytes for {storage.size} elements of {storage.dtype}"
        raise RefusedPickleError("the file is damaged: a storage has another size", given)
    if not content:
        return torch.empty(0, dtype=storage.dtype)
    return torch.frombuffer(bytearray(content), dtype=storage.dtype)
