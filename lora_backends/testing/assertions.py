"""Comparisons that say where and by how much two results differ."""

from __future__ import annotations

import torch

from lora_backends.testing.cases.inputs import LoRAInputs, bits
from lora_backends.testing.oracles import Expected


def assert_close(actual: torch.Tensor, expected: Expected, inputs: LoRAInputs) -> None:
    """Check ``|actual - expected| <= bound`` for every element; a NaN never is within.

    Args:
        actual: y, [num_tokens, out_features], or h, [num_slices, num_tokens, max_rank].
        expected: value and bound, of the same shape.
        inputs: of the call, to name slot, slice and rank.

    Raises:
        AssertionError: names the worst element, both values, error and bound.
    """
    _assert_shape(actual, expected.value, inputs)
    result = actual.detach().cpu().double()
    error = (result - expected.value).abs()
    exceeds = ~(error <= expected.bound)  # NaN exceeds
    if not bool(exceeds.any()):
        return
    # relative to the bound, so that the worst element is the most wrong one
    excess = torch.where(exceeds, (error / expected.bound.clamp(min=1e-300)).nan_to_num(1e300), 0)
    index = _index(excess)
    raise AssertionError(
        f"{int(exceeds.sum())} of {exceeds.numel()} elements exceed the bound; the worst:\n"
        f"  {_where(index, inputs)}\n"
        f"  actual   {result[index].item():.9g}\n"
        f"  expected {expected.value[index].item():.9g}\n"
        f"  error    {error[index].item():.3g}, bound {expected.bound[index].item():.3g}"
    )


def assert_same_values(actual: torch.Tensor, wanted: torch.Tensor, inputs: LoRAInputs) -> None:
    """Check that two results are equal value by value; the sign of a zero is free, NaN differs."""
    _assert_like(actual, wanted, inputs)
    _assert_none(actual.cpu() != wanted.cpu(), actual, wanted, inputs, "differ")


def assert_same_bits(actual: torch.Tensor, wanted: torch.Tensor, inputs: LoRAInputs) -> None:
    """Check that two results are equal bit for bit, so that NaN and the sign of a zero count."""
    _assert_like(actual, wanted, inputs)
    _assert_none(bits(actual) != bits(wanted), actual, wanted, inputs, "differ in their bits")


def _assert_none(
    different: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    inputs: LoRAInputs,
    verb: str,
) -> None:
    if not bool(different.any()):
        return
    index = _index(different)
    raise AssertionError(
        f"{int(different.sum())} of {different.numel()} elements {verb}; the first:\n"
        f"  {_where(index, inputs)}\n"
        f"  actual   {left[index].item()!r}\n"
        f"  expected {right[index].item()!r}"
    )


def _assert_like(actual: torch.Tensor, wanted: torch.Tensor, inputs: LoRAInputs) -> None:
    if actual.dtype != wanted.dtype:
        raise AssertionError(f"the result is {actual.dtype}, not {wanted.dtype}")
    _assert_shape(actual, wanted, inputs)


def _assert_shape(actual: torch.Tensor, wanted: torch.Tensor, inputs: LoRAInputs) -> None:
    if actual.shape != wanted.shape:
        raise AssertionError(
            f"the result is {list(actual.shape)}, not {list(wanted.shape)}\n  given: {inputs!r}"
        )


def _index(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the index of the first largest element."""
    values = tensor.to(torch.float64)
    return tuple(int(i) for i in torch.unravel_index(values.argmax(), values.shape))


def _where(index: tuple[int, ...], inputs: LoRAInputs) -> str:
    """Describe an index of h (three axes) or y (two axes)."""
    if len(index) == 3:
        slice_index, token, rank = index
        return f"h[{slice_index}, {token}, {rank}]: {inputs.location(token, slice_index)}"
    token, column = index
    return f"y[{token}, {column}]: {inputs.location(token, inputs.slice_of(column))}"
