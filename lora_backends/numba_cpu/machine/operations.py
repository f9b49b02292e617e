"""Operations: functions of kernels that add their instructions to LLVM's module themselves.

Each has a plain twin in `plain`, which runs where NUMBA_DISABLE_JIT is set.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic


def operation(twin: Callable[..., Any], returns: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an operation of a function that takes a builder and the values of the arguments.

    A tuple comes as a list. `kind`, a marker, comes as its type. `twin` does the same in plain
    Python; `returns` is the type of the result, or a function of the arguments' types that returns
    it.
    """

    def make(emit: Callable[..., Any]) -> Any:
        if config.DISABLE_JIT:
            return twin
        signature = inspect.signature(emit)
        names = list(signature.parameters)[1:]

        def define(typing: Any, *kinds: Any) -> Any:
            kinds = tuple(map(_converted, names, kinds))
            result = returns if isinstance(returns, types.Type) else returns(*kinds)

            def codegen(context: Any, builder: Any, typed: Any, values: Any) -> Any:
                value = emit(builder, *map(_opened, [builder] * len(kinds), names, kinds, values))
                if result == types.void:
                    return context.get_dummy_value()
                if isinstance(result, types.BaseTuple):
                    return context.make_tuple(builder, result, value)
                return value

            return result(*kinds), codegen

        define.__name__, define.__doc__ = emit.__name__, emit.__doc__
        define.__signature__ = signature  # type: ignore[attr-defined]
        return intrinsic(define)

    return make


def _converted(name: str, kind: Any) -> Any:
    """Return the type to which numba converts an argument: int64 or float32 for a number."""
    if name == "kind":
        return kind
    if isinstance(types.unliteral(kind), types.Integer):
        return types.int64
    return types.float32 if isinstance(kind, types.Float) else kind


def _opened(builder: Any, name: str, kind: Any, value: Any) -> Any:
    if name == "kind":
        return kind
    return cgutils.unpack_tuple(builder, value) if isinstance(kind, types.BaseTuple) else value
