"""Finds changes of a tensor between two places of a program that `torch.compile` traces.

A sibling may take the output that its leader has computed for it only if both get the same values.
An eager call compares `_version`, which counts changes in place. Code that is traced cannot: its
tensors have no version that it could branch on. But the fake implementation of a custom operation
runs on the tensors that torch traces with, and those count their changes too. So `_note` compares
versions there, and answers by the shape of its result, which is a constant of the program.
"""

from __future__ import annotations

import torch

_NOTED = "_lora_backends_noted"
"""Attribute of a tensor of the trace: its version when it was noted."""


@torch.library.custom_op("lora_backends::note", mutates_args=())
def _note(x: torch.Tensor, first: bool) -> torch.Tensor:
    return x.new_empty(0)  # not used: the program has the shape of the fake result


@_note.register_fake
def _(x: torch.Tensor, first: bool) -> torch.Tensor:
    version = None if x.is_inference() else x._version
    if first:
        setattr(x, _NOTED, version)
    same = version is not None and getattr(x, _NOTED, None) == version
    return x.new_empty(int(same))


def note(x: torch.Tensor) -> None:
    """Remember x as it is at this place of the traced program."""
    _note(x, True)


def is_unchanged(x: torch.Tensor) -> bool:
    """Return whether x, of the same traced program, is unchanged since it was noted."""
    # False after a break of the program, whose next part is traced with other tensors
    return bool(_note(x, False).shape[0])
