"""A batch in several passes: the rows of each adapter together, for models that mix up rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.hf.entries import RowAdapters, adapter_names

ROW_INPUTS = frozenset(
    """input_ids attention_mask token_type_ids position_ids inputs_embeds bbox pixel_values
    input_values input_features decoder_input_ids decoder_attention_mask""".split()
)
"""Inputs with a row of the batch in each element of their first axis."""


def run_split(
    run: Callable[..., Any], adapters: Sequence[RowAdapters], inputs: Mapping[str, Any]
) -> Any:
    """Run a pass for each of the adapters, and return one output with all rows in order.

    Args:
        run: the model, which takes `adapters` and inputs.
        adapters: of all rows.
        inputs: of all rows.

    Raises:
        InvalidInputError: `adapters` is not one entry per row.
        UnsupportedInputError: an input or an output has no row in each element of its first axis.
    """
    adapter_names(adapters)
    if not adapters:
        raise InvalidInputError("adapters is empty\n  allowed: one name or None per row")
    count, groups = len(adapters), _groups(adapters)
    for name, value in inputs.items():
        rows = value.shape[:1] if isinstance(value, torch.Tensor) else None
        if (rows is not None and (name not in ROW_INPUTS or rows != (count,))) or (
            rows is None and not (value is None or isinstance(value, bool | int | float | str))
        ):
            raise UnsupportedInputError(
                f"split=True cannot divide {name} by rows\n  allowed: tensors of {count} rows: "
                f"{', '.join(sorted(ROW_INPUTS))}\n  to do: split the batch by adapter yourself"
            )
    outputs = []
    for rows_of in groups:
        part = {
            name: value[rows_of] if isinstance(value, torch.Tensor) else value
            for name, value in inputs.items()
        }
        outputs.append(run(adapters=[adapters[row] for row in rows_of], **part))
    order = torch.tensor([row for rows_of in groups for row in rows_of]).argsort()
    sizes = [len(rows_of) for rows_of in groups]
    first = outputs[0]
    if not isinstance(first, Mapping):  # return_dict=False
        return _joined("of the model", outputs, sizes, order)
    joined = {name: _joined(name, [o.get(name) for o in outputs], sizes, order) for name in first}
    return type(first)(**joined)


def _groups(adapters: Sequence[RowAdapters]) -> list[list[int]]:
    groups: list[list[int]] = []
    for row, entry in enumerate(adapters):
        same = next((group for group in groups if adapters[group[0]] == entry), None)
        if same is None:
            groups.append([row])
        else:
            same.append(row)
    return groups


def _joined(name: str, parts: Sequence[Any], sizes: Sequence[int], order: torch.Tensor) -> Any:
    if all(isinstance(part, tuple) for part in parts) and len({*map(len, parts)}) == 1:
        return tuple(_joined(name, own, sizes, order) for own in zip(*parts, strict=True))
    if all(part is None for part in parts):
        return None
    tensors = [part for part in parts if isinstance(part, torch.Tensor) and part.ndim]
    if [part.shape[0] for part in tensors] != [*sizes] or len({t.shape[1:] for t in tensors}) != 1:
        raise UnsupportedInputError(
            f"split=True cannot join the outputs {name}: they have no rows on their first axis\n"
            f"  to do: pass use_cache=False, or split the batch by adapter yourself"
        )
    return torch.cat(tensors)[order.to(tensors[0].device)]
