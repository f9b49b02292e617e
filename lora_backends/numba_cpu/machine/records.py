"""Records for kernels: NamedTuples of int64, passed between kernels, routines and the host.

A record lies in memory as its int64 one after the other; a field that is a record itself lies in
its place. All compiled functions take the address of one record.
"""

# ruff: noqa: D402 (an operation is documented by an example of its use)
# mypy: disable-error-code="misc"

from __future__ import annotations

from typing import Any, get_type_hints

from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.typing import templates
from numba.extending import infer_getattr, intrinsic, lower_getattr_generic, models, register_model

from lora_backends.numba_cpu.machine import lowering, plain
from lora_backends.numba_cpu.machine.operations import operation


def type_of(names: Any) -> Any:
    """Return the type of a record in a kernel: a NamedTuple of int64 and of records."""
    hints = get_type_hints(names)
    fields = [types.int64 if hints[n] is int else type_of(hints[n]) for n in names._fields]
    return types.BaseTuple.from_types(fields, names)


def leaves(builder: Any, items: list[Any], kinds: Any) -> list[Any]:
    """Return the int64 among items, and among the items of those that are records, in order."""
    values: list[Any] = []
    for item, kind in zip(items, kinds, strict=True):
        if isinstance(kind, types.BaseTuple):
            values += leaves(builder, cgutils.unpack_tuple(builder, item), kind.types)
        else:
            values.append(item)
    return values


def load_fields(context: Any, builder: Any, address: Any, kind: Any) -> Any:
    """Return the record of a type that lies at an address, and the address after it."""
    if not isinstance(kind, types.BaseTuple):
        value = lowering.load_value(builder, address, lowering.I64, 8)
        return value, builder.add(address, lowering.integer(8))
    items = []
    for part in kind.types:
        item, address = load_fields(context, builder, address, part)
        items.append(item)
    return context.make_tuple(builder, kind, items), address


def _fields(typing: Any, kind: Any, address: Any) -> Any:
    """fields(kind, address): the record of a kind that lies there."""
    result = type_of(kind.instance_class)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return load_fields(context, builder, args[1], result)[0]

    return result(kind, types.int64), codegen


def _invoke(typing: Any, function: Any, record: Any) -> Any:
    """invoke(function, record): call the compiled function that lies there with a record."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        items = leaves(builder, [args[1]], [record])
        memory = cgutils.alloca_once(builder, ir.ArrayType(lowering.I64, len(items)))
        address = builder.ptrtoint(memory, lowering.I64)
        for i, item in enumerate(items):
            at = builder.add(address, lowering.integer(8 * i))
            lowering.store_value(builder, at, item, 8)
        lowering.call_function(builder, args[0], ir.VoidType(), address)
        return context.get_dummy_value()

    return types.void(types.int64, record), codegen


fields = plain.fields if config.DISABLE_JIT else intrinsic(_fields)
invoke = plain.invoke if config.DISABLE_JIT else intrinsic(_invoke)


class Record(types.Type):
    """The type of a result of `record`: an address, with the names of the int64 that lie there."""

    def __init__(self, names: Any) -> None:
        super().__init__(name=f"Record({names.__module__}.{names.__qualname__})")
        self.fields: tuple[str, ...] = names._fields


@register_model(Record)
class _RecordModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, lowering.I64)


@infer_getattr
class _RecordFields(templates.AttributeTemplate):
    key = Record

    def generic_resolve(self, kind: Record, name: str) -> Any:
        return types.int64 if name in kind.fields else None


def _read_field(context: Any, builder: Any, kind: Record, address: Any, name: str) -> Any:
    # functions that read records run once per segment: unrolled loops would not pay
    builder.function.attributes.add("optsize")
    at = builder.add(address, lowering.integer(8 * kind.fields.index(name)))
    return lowering.load_value(builder, at, lowering.I64, 8)


lower_getattr_generic(Record)(_read_field)


@operation(plain.fields, lambda kind, address: Record(kind.instance_class))
def record(builder: Any, kind: Any, address: Any) -> Any:
    """record(kind, address): `fields` without records among them, each read where it is used."""
    # a function that takes it has one argument, not one per field, which compiles sooner
    return address


@operation(plain.read_int, types.int64)
def read_int(builder: Any, address: Any) -> Any:
    """read_int(address): one int32 as an int64."""
    return builder.sext(lowering.load_value(builder, address, lowering.I32), lowering.I64)


@operation(plain.read_id, types.int64)
def read_id(builder: Any, address: Any) -> Any:
    """read_id(address): one int64."""
    return lowering.load_value(builder, address, lowering.I64, 8)


@operation(plain.write_id, types.void)
def write_id(builder: Any, address: Any, value: Any) -> Any:
    """write_id(address, value): one int64."""
    lowering.store_value(builder, address, value, 8)


@operation(plain.ints, types.CPointer(types.int64))
def ints(builder: Any, address: Any) -> Any:
    """ints(address): a pointer to int64, for `numba.carray`."""
    return builder.inttoptr(address, lowering.I64.as_pointer())


@operation(plain.call, types.int64)
def call(builder: Any, address: Any) -> Any:
    """call(address): what the C function of no arguments that lies there returns, an int32."""
    return builder.sext(lowering.call_function(builder, address, lowering.I32), lowering.I64)
