"""Whether an engine can read a tensor by its address, and how far its memory reaches."""

from __future__ import annotations

import torch


def unusable(tensor: torch.Tensor) -> str | None:
    """Return why a tensor's memory does not hold its values, and the remedy; None if it does."""
    if tensor.is_nested:
        return "is a nested tensor; pass its padded values, torch.nested.to_padded_tensor(...)"
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}; pass .to_dense()"
    if tensor.is_quantized:
        return f"is quantized, {tensor.dtype}; pass .dequantize() or .int_repr()"
    if tensor.is_meta:
        return "is on meta, where tensors have no values; pass it on the device of the backend"
    if is_distributed(tensor):
        return "is a DTensor, spread over processes; pass .full_tensor() or .to_local()"
    if tensor.is_neg():
        return "is a lazy negation: its memory holds the negated values; pass .resolve_neg()"
    return None


def is_distributed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor, which holds only the part of one process."""
    return hasattr(tensor, "to_local")  # its class may not be importable: a build without it


def of_left_inference_mode(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was made in inference mode, and that mode is off now."""
    return tensor.is_inference() and not torch.is_inference_mode_enabled()


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has an address, or no elements to read."""
    try:
        # the tensors that a transform or a mode of torch passes, of vmap or functionalize, have
        # none
        return not tensor.numel() or tensor.data_ptr() != 0
    except RuntimeError:  # torch refuses to name one
        return False


def extent_of(tensor: torch.Tensor | None) -> int:
    """Return the bytes from a tensor's first element to its last, both included."""
    if tensor is None or not tensor.numel():
        return 0
    if tensor.is_contiguous():
        return tensor.nbytes
    # torch has no negative strides, so the last element is the farthest
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def operators_have_memory() -> bool:
    """Return whether torch's operators return tensors with memory: not under `FakeTensorMode`."""
    # a mode may pass real tensors through and yet make new ones, and views, without an address
    return not torch._C._len_torch_dispatch_stack() or has_memory(torch.empty(1, device="cpu"))
