"""Replaces rows of a module's output where a row's adapter has a module of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lora_backends.adapters import AdapterPool
from lora_backends.errors import InvalidInputError, UnsupportedInputError

if TYPE_CHECKING:
    from lora_backends.hf.calls.entries import Choices


@dataclass(frozen=True, eq=False)
class Replacement:
    """An adapter's replacement of one base module that works on each position alone."""

    module: nn.Module | None = None  # computes the output: the base's kind, with own parameters
    bias: torch.Tensor | None = None  # [out_features], own minus base: added to the base's output
    tokens: torch.Tensor | None = None  # [n] ids whose rows are replaced
    token_module: nn.Module | None = None  # computes the outputs of these rows: an embedding of n
    # rows, or a head with n outputs
    width: int | None = None  # out_features, where they differ from the base's
    nbytes: int = 0  # of the adapter's own values; the rest is shared with the base model


@dataclass(frozen=True, eq=False)
class ReplacedRows:
    """The replacements of one module for the rows of a call."""

    by_number: Mapping[int, Replacement]  # the slot of an adapter to its module
    width: int | None  # widest output of the rows of the call, where one differs from the base's


def replaced_rows(
    pool: AdapterPool, slots: Mapping[str, int], choices: Choices
) -> dict[str, ReplacedRows]:
    """Return the replacements of modules for the rows of a call, by path; refuse blends of them."""
    numbers = {number for row in choices.rows for number in row}
    by_path: dict[str, dict[int, Replacement]] = {}
    for name, slot in slots.items():
        replacements = pool.own_modules(slot)
        if replacements and any(n != slot and slot in choices.slots_of(n) for n in numbers):
            raise UnsupportedInputError(
                f"adapter {name!r} has modules of its own (modules_to_save, biases, tokens or an "
                f"invocation), which no strength scales and no other adapter shares\n"
                f"  allowed: its name alone, without a strength"
            )
        for path, module in replacements.items():
            if isinstance(module, Replacement):
                by_path.setdefault(path, {})[slot] = module
    return {
        path: ReplacedRows(by, _widest(path, by, numbers, pool)) for path, by in by_path.items()
    }


def _widest(
    path: str, replacements: Mapping[int, Replacement], numbers: set[int], pool: AdapterPool
) -> int | None:
    widths = {n: module.width for n, module in replacements.items() if module.width is not None}
    if not widths:
        return None
    # Rows without a head of their own have the base's labels.
    base = [pool.modules[path].out_features] * bool(numbers - {*widths})
    return max([*widths.values(), *base])


def label_counts(
    replacements: Mapping[str, ReplacedRows], pool: AdapterPool, rows: list[list[int]]
) -> list[int] | None:
    """Return the labels that each row's head gives, or None where all have the base's.

    `rows` has the numbers of each row, or of each of its tokens, whose heads have equal labels.
    """
    counts = None
    for path, modules in replacements.items():
        if modules.width is not None:
            base, by = pool.modules[path].out_features, modules.by_number
            labels = [{(by[n].width if n in by else None) or base for n in row} for row in rows]
            if mixed := next((each for each in labels if len(each) > 1), None):
                raise UnsupportedInputError(
                    f"the heads of one row's tokens have different numbers of labels\n"
                    f"  given: {sorted(mixed)} at {path}\n"
                    f"  allowed: one number of labels in a row"
                )
            counts = [each.pop() for each in labels]
    return counts


def replace_rows(
    replaced: ReplacedRows, x: torch.Tensor, output: torch.Tensor, numbers: torch.Tensor, late: bool
) -> torch.Tensor:
    """Return a module's output with the rows of adapters that have a module of their own.

    x is [positions] token ids, or [positions, in_features]; `numbers` are [positions] on the CPU.
    `late` adds biases; else outputs are replaced. A bias comes after LoRA, because DoRA scales what
    is there before it.
    """
    shape = output.shape
    # Contiguous, so that rows are a view, which is written in place.
    y = output.contiguous().view(-1, shape[-1])
    if replaced.width not in (None, shape[-1]) and not late:
        # NaN, so that a model that mixes columns is noticed by `check_heads`.
        wide = y.new_full((y.shape[0], max(replaced.width or 0, shape[-1])), torch.nan)
        wide[:, : shape[-1]] = y
        y = wide
    for number, module in replaced.by_number.items():
        # Found on the CPU: a mask on the GPU would make the host wait.
        at = (numbers == number).nonzero().flatten().to(y.device)
        if not len(at):
            continue
        if late and module.bias is not None:
            y[at] += module.bias
        elif not late:
            _replace(module, x, y, at)
    if replaced.width is not None and not late:
        y = y[:, : replaced.width]
    return y.reshape(*shape[:-1], y.shape[-1])


def _replace(replacement: Replacement, x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> None:
    if replacement.module is not None:
        values = replacement.module(x[at])
        y[at, : values.shape[1]] = values
        y[at, values.shape[1] :] = torch.nan
    if replacement.tokens is None or replacement.token_module is None:
        return
    if isinstance(replacement.token_module, nn.Embedding):
        hits = (
            x[at, None] == replacement.tokens
        ).nonzero()  # [hits, 2]: place in at, place in tokens
        y[at[hits[:, 0]]] = replacement.token_module(hits[:, 1])
    else:
        y[at[:, None], replacement.tokens] = replacement.token_module(x[at])


def check_heads(logits: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    """Return the logits of each row, cut to the labels of its own head.

    The head's output has NaN in the columns that a row's own head lacks. The operations after the
    head must not have mixed them into the other columns.

    Raises:
        UnsupportedInputError: a row's own columns have NaN, or the logits have another width.
    """
    rows = [logits[row, ..., :count] for row, count in enumerate(counts)]
    if logits.shape[-1] != max(counts) or any(bool(row.isnan().any()) for row in rows):
        raise UnsupportedInputError(
            f"heads with different numbers of labels share a batch, and the model mixes labels "
            f"after its head, or a logit is NaN\n  given: {counts} labels, logits of shape "
            f"{list(logits.shape)}\n  to do: split the batch by the number of labels"
        )
    return rows


def check_labels(counts: list[int] | None, as_list: bool, inputs: Mapping[str, Any]) -> None:
    """Raise InvalidInputError for rows with different numbers of labels, unless as a list."""
    if counts is None:
        return
    if inputs.get("labels") is not None:
        raise InvalidInputError(
            "labels are given, and an adapter has a head with other labels than the base model\n"
            "  to do: compute the loss from the logits"
        )
    if len({*counts}) > 1 and not as_list:
        raise InvalidInputError(
            f"the heads of the rows have different numbers of labels\n  given: {counts}\n"
            f"  to do: pass logits_as_list=True, or split the batch"
        )


def with_labels(output: Any, counts: list[int] | None, as_list: bool, rows: int) -> Any:
    """Return a model's output with the logits of each row's own labels, or refuse it.

    `counts` are None where all rows have the base's; `as_list` returns a tensor for each row.
    """
    if counts is None and not as_list:
        return output
    if counts is not None and getattr(output, "loss", None) is not None:
        raise UnsupportedInputError(
            f"{type(output).__name__} has a loss, and an adapter has a head with other labels than "
            f"the base model\n  to do: pass no labels, and compute the loss from the logits"
        )
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise UnsupportedInputError(
            f"an adapter has a head with other labels, and {type(output).__name__} has no logits\n"
            f"  to do: return_dict=True, on a model with logits"
        )
    if logits.shape[:1] != (rows,):
        raise UnsupportedInputError(
            f"logits have no row of the batch in each element of their first axis\n"
            f"  given: logits {list(logits.shape)} for {rows} rows\n"
            f"  to do: split the batch by the number of labels"
        )
    by_row = [*logits] if counts is None else check_heads(logits, counts)
    if as_list:
        output["logits"] = by_row
    return output


def check_compiled(base: nn.Module, why: str) -> None:
    """Raise UnsupportedInputError for a compiled program, which would not notice hooks."""
    if any(map(_is_compiled, base.modules())):
        raise UnsupportedInputError(
            f"{why}, and the base model was compiled in place\n"
            "  to do: use a model without compile() for these adapters"
        )


def _is_compiled(module: nn.Module) -> bool:
    attributes = vars(module)
    # the only marks that torch.compile leaves on a module and on a function
    marked = hasattr(attributes.get("forward"), "_torchdynamo_orig_callable")
    return marked or attributes.get("_compiled_call_impl") is not None
