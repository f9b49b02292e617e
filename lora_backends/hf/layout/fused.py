"""The projections inside fused linear layers, and the order of their output columns.

Only a model's code defines the order, so the known classes are listed here, from Transformers'
source. `tests/hf/layers/test_fused.py` checks what each column does in the attention or the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import nn

from lora_backends.adapters.specs import FusedPart

_QKV = ("q_proj", "k_proj", "v_proj")

Parts: TypeAlias = tuple[FusedPart, ...]


def _blocks(names: Sequence[str], widths: Sequence[int]) -> Parts:
    """Return parts that follow one another without gaps."""
    starts = [sum(widths[:place]) for place in range(len(widths))]
    return tuple(map(FusedPart, names, starts, widths))


def _by_head(heads: int, width: int) -> Parts:
    """Return q, k and v of a layer whose columns are [heads, 3, head_dim]."""
    size = width // heads // 3
    return tuple(
        FusedPart(name, place * size, size, 3 * size, heads) for place, name in enumerate(_QKV)
    )


def _grouped(parent: Any, width: int) -> Parts:
    queries = parent.o_proj.in_features
    return _blocks(_QKV, (queries, (width - queries) // 2, (width - queries) // 2))


def _halves(parent: Any, width: int) -> Parts:
    return _blocks(("gate_proj", "up_proj"), (width // 2, width // 2))


def _thirds(parent: Any, width: int) -> Parts:
    return _blocks(_QKV, (width // 3,) * 3)


def _delta_net(parent: Any, width: int) -> Parts:
    names = ("in_proj_q", "in_proj_k", "in_proj_v")
    return _blocks(names, (parent.key_dim, parent.key_dim, parent.value_dim))


def _heads(parent: Any, width: int) -> Parts:
    return _by_head(parent.config.num_attention_heads, width)


def _bloom(parent: Any, width: int) -> Parts:
    return _by_head(parent.num_heads, width)


KNOWN: dict[tuple[str, str], Callable[[Any, int], Parts]] = {
    ("Phi3Attention", "qkv_proj"): _grouped,
    ("Phi4MultimodalAttention", "qkv_proj"): _grouped,
    ("Phi3MLP", "gate_up_proj"): _halves,
    ("Phi4MultimodalMLP", "gate_up_proj"): _halves,
    ("GlmMLP", "gate_up_proj"): _halves,
    ("Glm4MLP", "gate_up_proj"): _halves,
    ("Glm4vTextMLP", "gate_up_proj"): _halves,
    ("Qwen3_5GatedDeltaNet", "in_proj_qkv"): _delta_net,
    ("Qwen3_5MoeGatedDeltaNet", "in_proj_qkv"): _delta_net,
    ("GPTNeoXAttention", "query_key_value"): _heads,
    ("BloomAttention", "query_key_value"): _bloom,
    ("GPT2Attention", "c_attn"): _thirds,
    ("MptAttention", "Wqkv"): _thirds,
}
"""By class of the parent module and name of the fused layer in it: a function that returns the
layer's parts from the parent and the layer's number of output columns."""


def parts_of(parent: nn.Module, name: str, width: int) -> Parts:
    """Return the projections inside a linear layer; () if it is not fused, or their order unknown.

    `parent` holds the layer as `name`; it has `width` output columns.
    """
    kind = type(parent)
    find = KNOWN.get((kind.__name__, name))
    # Other code may have a class of this name with another order.
    is_known = kind.__module__.partition(".")[0] == "transformers"
    if find is None or not is_known or getattr(parent, "is_cross_attention", False):
        return ()
    try:
        parts = find(parent, width)
    except AttributeError:  # code of another version
        return ()
    covers = sum(part.width for part in parts) == width and all(part.size > 0 for part in parts)
    return parts if covers else ()
