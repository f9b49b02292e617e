"""The pickle inside a file of `torch.save`, evaluated without running anything in it.

A dict of tensors needs about thirty opcodes and four functions. Python's unpickler calls whatever
a pickle names. `torch.load(weights_only=True)` calls only what it allows, but that includes
`bytearray` with any number; it hashes tuples that are nested exponentially deep, and it grows the
storages of the old format to any size that a tensor claims. Here nothing is called: a tensor
becomes a description. Only str and int are compared, hashed or shown, and the type of a value
decides which it is.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

import torch


class StorageRecord(NamedTuple):
    """A piece of memory that tensors are views of."""

    key: str
    dtype: torch.dtype
    size: int  # elements


class StoredTensor(NamedTuple):
    """Where the elements of a tensor lie."""

    storage: StorageRecord
    offset: int  # of the first element
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, without the rest of its storage."""
        return math.prod(self.size) * self.storage.dtype.itemsize


class RefusedPickleError(Exception):
    """The pickle holds something else than names and dense tensors."""

    def __init__(self, what: str, given: str) -> None:
        super().__init__(what)
        self.what, self.given = what, given


_GLOBALS: dict[str, Any] = {
    "torch._utils _rebuild_tensor": "tensor",
    "torch._utils _rebuild_tensor_v2": "tensor",
    "torch._utils _rebuild_parameter": "parameter",
    "collections OrderedDict": "dict",
    "torch BFloat16Storage": torch.bfloat16,
    "torch BoolStorage": torch.bool,
    "torch ByteStorage": torch.uint8,
    "torch CharStorage": torch.int8,
    "torch DoubleStorage": torch.float64,
    "torch FloatStorage": torch.float32,
    "torch HalfStorage": torch.float16,
    "torch IntStorage": torch.int32,
    "torch LongStorage": torch.int64,
    "torch ShortStorage": torch.int16,
}

_OTHER_TENSORS = {
    "torch._utils _rebuild_tensor_v3": "tensors of 8 bits (fp8), or of another rare dtype",
    "torch._tensor _rebuild_from_type_v2": "shards (DTensor) that FSDP2 left on one process, or "
    "another subclass of tensors",
}
"""Functions by which a pickle rebuilds tensors that this reader does not support."""

_MOST_AXES = 16

# A tensor takes about 45 opcodes: more of them than this make nothing that is read.
_OPCODES, _OPCODES_PER_TENSOR = 1000, 100


def evaluate(stream: BinaryIO, check: Callable[[int, int], None], extra: int = 0) -> Any:
    """Return the value of the pickle at the position of a stream, which is left after it.

    It is made of numbers, strings, tuples, lists, dicts by str, and a `StoredTensor` for each
    tensor. `check` gets the position and the number of tensors so far, and raises to stop. `extra`
    opcodes are expected besides those of tensors.

    Raises:
        RefusedPickleError: something else is in the pickle.
        Exception: the pickle is damaged.
    """
    machine, spare = _Machine(), _OPCODES + extra
    for opcode, argument, position in pickletools.genops(stream):
        step = _STEPS.get(opcode.name)
        if step is None:
            raise RefusedPickleError("the file holds no state dict", f"opcode {opcode.name}")
        step(machine, argument)
        spare -= 1
        # Each tensor is a REDUCE, so this sees every one.
        if opcode.name == "REDUCE":
            check(position or 0, machine.tensors)
        elif spare + _OPCODES_PER_TENSOR * machine.tensors < 0:
            given = f"a pickle of {machine.tensors} tensors after {position} bytes"
            raise RefusedPickleError("the file holds no state dict", given)
    check(stream.tell(), machine.tensors)
    return machine.stack.pop()


class _Machine:
    """The stack, marks and memo of a pickle; every method carries out an opcode."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []  # lengths of the stack
        self.memo: dict[int, Any] = {}
        self.tensors = 0

    def push_tuple(self, size: int) -> None:
        self.stack.append(tuple(self.pop(size)))

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def get(self, index: int) -> None:
        self.stack.append(self.memo[index])

    def pop(self, count: int) -> list[Any]:
        if not 0 <= count <= len(self.stack):
            raise IndexError("a stack of a pickle is too short")
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return items

    def pop_to_mark(self) -> list[Any]:
        return self.pop(len(self.stack) - self.marks.pop())

    def mark(self, _: None) -> None:
        self.marks.append(len(self.stack))

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        # A key of another type is never hashed: nested tuples take 2^depth steps.
        if type(target) is not dict or not all(type(key) is str for key in items[::2]):
            raise RefusedPickleError("the file holds no state dict", "keys that are no names")
        target.update(zip(items[::2], items[1::2], strict=True))

    def append(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise TypeError("a pickle appends to something else than a list")
        self.stack[-1].extend(items)

    def load_storage(self, _: None) -> None:
        kind, dtype, key, _location, size, *view = self.stack.pop()
        if kind != "storage" or type(dtype) is not torch.dtype or type(key) is not str:
            raise TypeError("a storage is not described as torch.save does")
        if view not in ([], [None]) or not _is_size(size):
            raise RefusedPickleError("the file holds a view of a storage", f"storage {key[:60]!r}")
        self.stack.append(StorageRecord(key, dtype, size))

    def reduce(self, _: None) -> None:
        function, arguments = self.pop(2)
        if function == "tensor":
            self.stack.append(_tensor(*arguments))
            self.tensors += 1
        elif function == "parameter" and type(arguments[0]) is StoredTensor:
            self.stack.append(arguments[0])
        elif function == "dict" and arguments == ():
            self.stack.append({})
        else:
            raise TypeError("a pickle calls a function in a way of its own")

    def build(self, _: None) -> None:
        state = self.stack.pop()  # of an OrderedDict: attributes such as _metadata
        if type(state) is not dict or type(self.stack[-1]) is not dict:
            raise TypeError("a pickle sets the state of something else than a dict")


_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "STOP"), lambda machine, _: None),
    **dict.fromkeys(
        ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"),
        lambda machine, value: machine.stack.append(value),
    ),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
    "NONE": lambda machine, _: machine.stack.append(None),
    "NEWTRUE": lambda machine, _: machine.stack.append(True),
    "NEWFALSE": lambda machine, _: machine.stack.append(False),
    "GLOBAL": lambda machine, name: machine.stack.append(_global(name)),
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_TUPLE": lambda machine, _: machine.stack.append(()),
    "TUPLE1": lambda machine, _: machine.push_tuple(1),
    "TUPLE2": lambda machine, _: machine.push_tuple(2),
    "TUPLE3": lambda machine, _: machine.push_tuple(3),
    "MARK": _Machine.mark,
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.pop_to_mark())),
    "SETITEM": lambda machine, _: machine.set_items(machine.pop(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    "APPEND": lambda machine, _: machine.append(machine.pop(1)),
    "APPENDS": lambda machine, _: machine.append(machine.pop_to_mark()),
    "BINPERSID": _Machine.load_storage,
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
}


def _global(name: str) -> Any:
    if name in _GLOBALS:
        return _GLOBALS[name]
    given = name[:100].replace(" ", ".")
    if name in _OTHER_TENSORS:
        raise RefusedPickleError(f"the file holds {_OTHER_TENSORS[name]}", given)
    if name.startswith("torch.distributed"):
        raise RefusedPickleError("the file holds shards of a distributed run", given)
    if name.startswith("torch"):
        raise RefusedPickleError("the file holds something else than dense tensors", given)
    raise RefusedPickleError("the file needs code to be unpickled, which is never run", given)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_rest: Any) -> StoredTensor:
    """Describe a tensor; whether it requires gradients and its hooks are left out."""
    numbers = (offset, *size, *stride)
    if (
        type(storage) is not StorageRecord
        or len(numbers) > 1 + 2 * _MOST_AXES
        or not all(map(_is_size, numbers))
    ):
        raise TypeError("a tensor is not described as torch.save does")
    return StoredTensor(storage, offset, tuple(size), tuple(stride))


def _is_size(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**63
