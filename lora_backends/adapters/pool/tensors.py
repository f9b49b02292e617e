"""Walks the tensors of an adapter in each of its forms, and moves them together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in a checkpoint, or in a staged one."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_of(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


def copied(value: Any) -> Any:
    """Return a checkpoint, or a part of one, with copies of its tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: copied(each) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: copied(getattr(value, f.name)) for f in fields(value)})
    return value


def side_by_side(tensors: Sequence[torch.Tensor], pin: bool = True) -> list[torch.Tensor]:
    """Return copies of tensors that fill one piece of memory, pinned or not, for each dtype."""
    copies = list(tensors)
    # A buffer has one dtype.
    for dtype in {tensor.dtype for tensor in tensors}:
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        sizes = [tensors[place].numel() for place in places]
        buffer = torch.empty(sum(sizes), dtype=dtype, device="cpu", pin_memory=pin)
        for place, part in zip(places, torch.split(buffer, sizes), strict=True):
            copies[place] = part.view(tensors[place].shape).copy_(tensors[place])
    return copies


def in_one_copy(
    tensors: Sequence[torch.Tensor], device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
    """Copy tensors that fill one piece of memory to a device, at once.

    Returns:
        All values on the device, in `dtype`, and each tensor as a view of them; None where the
        tensors lie elsewhere.
    """
    if not tensors:
        return None
    first, count = tensors[0], sum(t.numel() for t in tensors)
    storage = first.untyped_storage()
    # Other bytes of the storage would be copied, too.
    if storage.nbytes() != count * first.element_size() or not all(
        t.is_contiguous()
        and t.dtype == first.dtype
        and t.untyped_storage().data_ptr() == storage.data_ptr()
        for t in tensors
    ):
        return None
    whole = first.as_strided((count,), (1,), 0)
    # From pinned memory the host does not wait; the allocator keeps it until the copy has ended.
    values = whole.to(device, non_blocking=True).to(dtype)
    return values, [values.as_strided(t.shape, t.stride(), t.storage_offset()) for t in tensors]
