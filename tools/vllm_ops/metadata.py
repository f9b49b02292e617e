"""Shared by the operators: vLLM's metadata of a batch, and checks of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from lora_backends.backend import LoRABackend
from lora_backends.batch import NO_ADAPTER, LoRABatch
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.selection.choice import get_backend

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of results."""


@dataclass(frozen=True)
class Metadata:
    """The tensors that vLLM's `LoRAKernelMeta.meta_args` returns, in its order."""

    token_lora_mapping: torch.Tensor  # [tokens]; only its length is read: vLLM pads it with stale
    # values, and its kernels read the sorted tokens
    sorted_tokens: torch.Tensor  # [tokens], by slot
    num_tokens_per_lora: torch.Tensor  # [slots + 1]
    token_starts: torch.Tensor  # [slots + 2], where the tokens of a slot begin in sorted_tokens
    lora_ids: torch.Tensor  # [slots + 1], slots of the batch; -1: no adapter, or none
    no_lora_flag_cpu: torch.Tensor  # [1] bool on the host: no token has an adapter
    num_active_loras: torch.Tensor | int  # entries of lora_ids that count

    @property
    def is_idle(self) -> bool:
        """Whether no token has an adapter."""
        return bool(self.no_lora_flag_cpu.item())

    def slots(self, num_tokens: int, num_slots: int) -> list[int]:
        """Return the slot of each token; it waits for the device once.

        Raises:
            InvalidInputError: the metadata is of another batch, or of more slots.
        """
        self._check(num_tokens)
        parts = (self.sorted_tokens, self.num_tokens_per_lora, self.token_starts, self.lora_ids)
        refuse_capture(self.lora_ids.device)
        joined = torch.cat([part.to(torch.int64) for part in parts]).tolist()
        ends = [num_tokens, *(num_tokens + self.lora_ids.shape[0] * n for n in (1, 2))]
        tokens, counts = joined[: ends[0]], joined[ends[0] : ends[1]]
        starts, ids = joined[ends[1] : ends[2] + 1], joined[ends[2] + 1 :]
        active = int(self.num_active_loras)
        found = [NO_ADAPTER] * num_tokens
        for i, (slot, count, start) in enumerate(zip(ids, counts, starts, strict=False)):
            if slot < 0 or count == 0:
                continue
            if slot >= num_slots or start < 0 or start + count > num_tokens or i >= active:
                raise InvalidInputError(
                    f"the metadata does not fit the batch\n"
                    f"  given: entry {i} of {active} active ones is slot {slot}, with {count} "
                    f"tokens from {start} on\n"
                    f"  allowed: slots below {num_slots}, within {num_tokens} tokens, all active"
                )
            for token in tokens[start : start + count]:
                if not 0 <= token < num_tokens or found[token] != NO_ADAPTER:
                    raise InvalidInputError(
                        f"token_indices_sorted_by_lora_ids is no order of the tokens\n"
                        f"  given: token {token} for slot {slot}\n"
                        f"  allowed: each of {num_tokens} tokens once"
                    )
                found[token] = slot
        return found

    def _check(self, num_tokens: int) -> None:
        entries = self.lora_ids.numel()
        wanted = {
            "lora_ids": (self.lora_ids, entries),
            "token_lora_mapping": (self.token_lora_mapping, num_tokens),
            "token_indices_sorted_by_lora_ids": (self.sorted_tokens, num_tokens),
            "num_tokens_per_lora": (self.num_tokens_per_lora, entries),
            "lora_token_start_loc": (self.token_starts, entries + 1),
        }
        for name, (tensor, length) in wanted.items():
            device = self.lora_ids.device
            fits = is_integral(tensor) and tensor.device == device
            if tensor.shape != (length,) or not fits:
                raise InvalidInputError(
                    f"{name} does not fit the batch\n"
                    f"  given: {list(tensor.shape)} {tensor.dtype} on {tensor.device}\n"
                    f"  allowed: [{length}] of ints on {device}"
                )


def is_integral(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds ints."""
    other = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
    return not other


def refuse_capture(device: torch.device) -> None:
    """Refuse a CUDA graph: these operators read their metadata on the host."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedInputError(
            "vLLM's operators on this library cannot be captured in a CUDA graph\n"
            "  to do: run the plug-in, whose plans are filled before the graph is replayed"
        )


@lru_cache(maxsize=16)
def _default_backend(device: torch.device) -> LoRABackend:
    return get_backend(device=device)


def backend_for(device: torch.device, backend: LoRABackend | None) -> LoRABackend:
    """Return the backend given, or the one that `get_backend` chooses for the device.

    Raises:
        InvalidInputError: it is on another device.
    """
    if backend is None:
        return _default_backend(device)
    if not isinstance(backend, LoRABackend) or backend.device.type != device.type:
        given = f"{backend.name!r} on {backend.device}" if hasattr(backend, "name") else backend
        raise InvalidInputError(
            f"the backend cannot run the inputs\n  given: {given}\n"
            f"  allowed: None, or a backend on {device}"
        )
    return backend


def plan_of(backend: LoRABackend, slots: Sequence[int], num_slots: int) -> Any:
    """Return the plan of a batch."""
    return backend.prepare_batch(LoRABatch(slots, num_slots))


def layer_stacks(name: str, stacks: Any) -> tuple[torch.Tensor, ...]:
    """Return vLLM's tensors per slice with three axes; vLLM's own have a second one of 1.

    Raises:
        InvalidInputError: there is none, or one has another shape.
    """
    given = tuple(stacks) if isinstance(stacks, list | tuple) else ()
    parts = tuple(
        part[:, 0] if isinstance(part, torch.Tensor) and part.ndim == 4 else part for part in given
    )
    if not parts or any(
        not isinstance(part, torch.Tensor) or part.ndim != 3 or whole.shape[1:-2] not in ((), (1,))
        for part, whole in zip(parts, given, strict=True)
    ):
        shown = [list(getattr(part, "shape", ())) for part in given] or type(stacks).__name__
        raise InvalidInputError(
            f"{name} is no list of stacks\n  given: {shown}\n"
            f"  allowed: a tensor per slice, [slots, rows, columns] or [slots, 1, rows, columns]"
        )
    return parts


def check_output(output: torch.Tensor, shape: Sequence[int | None], like: torch.Tensor) -> None:
    """Refuse an output tensor of another shape (None: any), dtype or device."""
    fits = len(output.shape) == len(shape) and all(
        wanted in (None, size) for size, wanted in zip(output.shape, shape, strict=True)
    )
    if not fits or output.dtype not in FLOATS or output.device != like.device:
        raise InvalidInputError(
            f"the output tensor does not fit\n"
            f"  given: {list(output.shape)} {output.dtype} on {output.device}\n"
            f"  allowed: {['any' if n is None else n for n in shape]} of float16, bfloat16 or "
            f"float32 on {like.device}"
        )


def columns(output: torch.Tensor, offset: int, width: int) -> torch.Tensor:
    """Return the columns of an output that an operator adds to.

    Raises:
        InvalidInputError: it has fewer.
    """
    if offset < 0 or offset + width > output.shape[-1]:
        raise InvalidInputError(
            f"the slices do not fit the output tensor\n"
            f"  given: {width} columns from {offset} on\n  allowed: up to {output.shape[-1]}"
        )
    return output[..., offset : offset + width]
