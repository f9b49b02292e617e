"""A pytest plugin under which matrix products sum in an order that follows their layout.

    ORDER=1 python -m pytest -p helpers.any_order_blas tests/interface

A matrix library promises equal bits only for equal shapes, strides, alignment and threads. On one
CPU it may keep more than it promises, and a test that relies on that fails on the next one. Here
each product is the sum of two parts, cut at a place that follows shape, strides and address modulo
64 bytes, so such a test fails everywhere. Other values of ORDER cut at other places.
"""

import os

import torch

ORDER = int(os.environ.get("ORDER", "1"))
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
products = 0


def _layout(tensor):
    strides = tuple(s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    return (*tensor.shape, *strides, tensor.data_ptr() % 64)


def _split(left, right, axis):
    """Return the parts of both factors; `axis` of the left one is summed over."""
    global products
    products += 1
    size = left.shape[axis]
    if size < 2 or not left.is_floating_point():
        return [(left, right)]
    cut = 1 + hash((ORDER, _layout(left), _layout(right))) % (size - 1)
    parts = zip(
        left.split((cut, size - cut), axis), right.split((cut, size - cut), axis - 1), strict=True
    )
    return list(parts)[::-1]


def _replace(library, name, axis, adds):
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def product(left, right):
        first, *rest = _split(left, right, axis)
        total = kernel.call_boxed(CPU, *first)
        for part in rest:
            total = total + kernel.call_boxed(CPU, *part)
        return total

    def added(total, left, right, *, beta=1, alpha=1):
        for part in _split(left, right, axis):
            total = kernel.call_boxed(CPU, total, *part, beta=beta, alpha=alpha)
            beta = 1
        return total

    library.impl(name, added if adds else product, "CPU")


_library = torch.library.Library("aten", "IMPL")  # replaces the kernels for as long as it lives
for _name, _axis, _adds in [
    ("mm", 1, False),
    ("bmm", 2, False),
    ("mv", 1, False),
    ("dot", 0, False),
    ("addmm", 1, True),
    ("baddbmm", 2, True),
]:
    _replace(_library, _name, _axis, _adds)


def pytest_terminal_summary(terminalreporter):
    """Show that the kernels were replaced."""
    terminalreporter.write_line(f"{products} matrix products summed in an order of their layout")
