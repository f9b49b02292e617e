"""What is timed: a cell is one layer's shape and one batch."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lora_backends.errors import InvalidInputError, UnsupportedInputError, did_you_mean
from lora_backends.files import as_path, read_text

MIXES = ("identical", "distinct", "uniform", "skewed")
"""How tokens are dealt over adapters, after Punica (arXiv 2310.18547)."""
ZIPF = 1.5
MIN_SLOTS = 8  # a stack has room for more adapters than a small batch uses

Projections = dict[str, tuple[int, tuple[int, ...]]]  # name: in_features, output_slices
Composition = tuple[int, int, int, str]  # tokens, adapters, rank, mix

_NAMES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
PRESETS: Mapping[str, Mapping[str, int]] = {
    "llama3-8b": dict(zip(_NAMES, (4096, 14336, 32, 8), strict=True)),
    "llama3-70b": dict(zip(_NAMES, (8192, 28672, 64, 8), strict=True)),
    "qwen3-30b-a3b": {
        **dict(zip(_NAMES, (2048, 6144, 32, 4), strict=True)),
        "head_dim": 128,
        "num_experts": 128,
    },
    "smollm2": dict(zip(_NAMES, (576, 1536, 9, 3), strict=True)),
}
"""The keys of each model's config.json that decide the shapes of its layers."""

COMPOSITIONS: Mapping[str, Sequence[Composition]] = {
    "cuda": (
        (1, 1, 16, "uniform"),
        (16, 8, 16, "uniform"),
        (64, 1, 16, "identical"),
        (64, 8, 16, "uniform"),
        (64, 8, 16, "skewed"),
        (64, 64, 16, "distinct"),
        (256, 8, 16, "uniform"),
        (2048, 8, 16, "uniform"),
        (16, 8, 64, "uniform"),
        (256, 8, 64, "uniform"),
        (2048, 8, 64, "skewed"),
    ),
    "cpu": (
        (1, 1, 16, "uniform"),
        (16, 8, 16, "uniform"),
        (64, 1, 16, "identical"),
        (64, 8, 16, "uniform"),
        (64, 8, 16, "skewed"),
        (64, 64, 16, "distinct"),
        (256, 8, 16, "uniform"),
        (64, 8, 64, "uniform"),
    ),
}
"""The batches that each projection of a model is timed with, by type of device."""


@dataclass(frozen=True)
class Cell:
    """One layer and one batch.

    Args:
        projection: its name in tables and plots.
        in_features: width of x.
        output_slices: width of every slice of y.
        tokens: rows of x.
        adapters: adapters that tokens are dealt over; a batch may leave some without a token.
        rank: of all adapters.
        mix: one of `MIXES`. identical: all tokens use one adapter; distinct: every token its own;
            uniform: dealt round-robin, so that neighbours use different adapters; skewed: drawn
            with a popularity that falls as 1 / i^1.5, tokens of one adapter side by side.

    Raises:
        InvalidInputError: a size below 1, or no such mix.

    Source:
        Punica: Multi-Tenant LoRA Serving, arXiv 2310.18547, names the four mixes.
    """

    projection: str
    in_features: int
    output_slices: tuple[int, ...]
    tokens: int
    adapters: int
    rank: int
    mix: str = "uniform"

    def __post_init__(self) -> None:
        object.__setattr__(self, "output_slices", tuple(self.output_slices))
        sizes = (self.in_features, *self.output_slices, self.tokens, self.adapters, self.rank)
        if not self.output_slices or min(sizes) < 1:
            raise InvalidInputError(
                f"not a layer and a batch\n  given: {self}\n  allowed: sizes >= 1"
            )
        if self.mix not in MIXES:
            raise InvalidInputError(
                f"no mix of adapters named {self.mix!r}{did_you_mean(self.mix, MIXES)}\n"
                f"  allowed: {', '.join(MIXES)}"
            )
        fixed = {"identical": 1, "distinct": self.tokens}
        object.__setattr__(self, "adapters", fixed.get(self.mix, self.adapters))

    @property
    def num_slots(self) -> int:
        """Slots of the stack: one per adapter, 8 at least."""
        return max(MIN_SLOTS, self.adapters)

    @property
    def out_features(self) -> int:
        """Width of y."""
        return sum(self.output_slices)

    @property
    def token_slots(self) -> list[int]:
        """The slot of every token: the same ones every time."""
        return deal(self.tokens, self.adapters, self.mix == "skewed")

    @property
    def active_adapters(self) -> int:
        """Adapters that have a token."""
        return len(set(self.token_slots))

    def adapter_bytes(self, itemsize: int) -> int:
        """Return the size of one adapter's A and B."""
        width = len(self.output_slices) * self.in_features + self.out_features
        return itemsize * self.rank * width

    def bytes_moved(self, itemsize: int) -> int:
        """Return what must move: active A and B once, x once, y read and written."""
        rows = itemsize * self.tokens * (self.in_features + 2 * self.out_features)
        return self.active_adapters * self.adapter_bytes(itemsize) + rows

    @property
    def flop(self) -> int:
        """Multiplications and additions of shrink and expand."""
        width = len(self.output_slices) * self.in_features + self.out_features
        return 2 * self.tokens * self.rank * width

    def describe(self) -> dict[str, Any]:
        """Return the cell as a row of a result file."""
        return asdict(self) | {
            "output_slices": list(self.output_slices),
            "active_adapters": self.active_adapters,
        }


def deal(tokens: int, adapters: int, skewed: bool) -> list[int]:
    """Return the slot of every token: dealt round-robin, or drawn by popularity and grouped."""
    if not skewed:
        return [token % adapters for token in range(tokens)]
    popularity = torch.arange(1, adapters + 1).double() ** -ZIPF
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(popularity, tokens, True, generator=generator)
    return sorted(int(slot) for slot in drawn)


def preset(name: str) -> tuple[Projections, list[str]]:
    """Return the projections of a model by name, and notes.

    Args:
        name: one of `PRESETS`.

    Returns:
        As `projections_from`.

    Raises:
        InvalidInputError: no such preset.
    """
    if name not in PRESETS:
        raise InvalidInputError(
            f"no preset named {name!r}{did_you_mean(name, PRESETS)}\n"
            f"  allowed: {', '.join(PRESETS)}\n"
            f"  to do: for another model give its config.json, or widths by hand"
        )
    return projections_from(PRESETS[name], f"the preset {name}")


def read_config(path: Path) -> tuple[Projections, list[str]]:
    """Return the projections of a Transformers model from its config.json, and notes.

    Raises:
        InvalidInputError: no such file, no JSON object, or keys that are missing or no sizes.
        UnsupportedInputError: the attention is not made of q, k, v and o.
    """
    try:
        config = json.loads(read_text(as_path(path, "--config-json")))
    except InvalidInputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidInputError(f"{path} holds no JSON object, but a {type(config).__name__}")
    inner = config.get("text_config")  # of a model that also sees or hears
    return projections_from(inner if isinstance(inner, dict) else config, str(path))


def projections_from(config: Mapping[str, Any], origin: str) -> tuple[Projections, list[str]]:
    """Return qkv, o, gate_up and down of a decoder layer, and notes on what is left out.

    Args:
        config: the keys of a config.json; num_key_value_heads and head_dim may be missing, as
            in Transformers. With experts, only the attention's projections are taken.
        origin: where they come from, for errors.

    Returns:
        in_features and output_slices by name, and sentences on what is left out.

    Raises:
        InvalidInputError: keys are missing or no sizes.
        UnsupportedInputError: the attention is not made of q, k, v and o.
    """
    if "kv_lora_rank" in config:
        raise UnsupportedInputError(
            f"{origin} describes latent attention (kv_lora_rank), which has no q, k, v\n"
            f"  to do: give --in-features and --output-slices"
        )
    experts = [
        key
        for key in ("num_experts", "num_local_experts", "n_routed_experts")
        if isinstance(config.get(key), int) and config[key] > 1
    ]
    needed = ["hidden_size", "num_attention_heads", *([] if experts else ["intermediate_size"])]
    missing = [key for key in needed if config.get(key) is None]
    if missing:
        raise InvalidInputError(
            f"{origin} lacks {', '.join(missing)}\n"
            f"  given: {', '.join(sorted(config)) or 'no keys'}\n"
            f"  to do: give --in-features and --output-slices"
        )
    hidden, heads = (_size(config, key, origin) for key in needed[:2])
    key_heads = (
        heads
        if config.get("num_key_value_heads") is None
        else (_size(config, "num_key_value_heads", origin))
    )
    dim = _size(config, "head_dim", origin) if config.get("head_dim") else hidden // heads
    q, kv = heads * dim, key_heads * dim
    found: Projections = {"qkv": (hidden, (q, kv, kv)), "o": (q, (hidden,))}
    if experts:
        note = f"{config[experts[0]]} experts are left out: only attention projections are timed"
        return found, [note]
    inner = _size(config, "intermediate_size", origin)
    return found | {"gate_up": (hidden, (inner, inner)), "down": (inner, (hidden,))}, []


def _size(config: Mapping[str, Any], key: str, origin: str) -> int:
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInputError(
            f"{key} in {origin} is no size\n  given: {value!r}\n  allowed: an int >= 1"
        )
    return value


def make_cells(
    projections: Projections,
    device_type: str,
    tokens: Sequence[int] = (),
    adapters: Sequence[int] = (),
    ranks: Sequence[int] = (),
    mixes: Sequence[str] = (),
) -> list[Cell]:
    """Return every projection with every batch.

    Args:
        projections: from `preset`, `read_config`, or by hand.
        device_type: "cpu" or "cuda": which of `COMPOSITIONS` is used if no sizes are given.
        tokens: numbers of tokens; if any of the four is given, every combination is made.
        adapters: numbers of adapters.
        ranks: ranks.
        mixes: some of `MIXES`.

    Returns:
        The cells, none twice.
    """
    compositions: Iterable[Composition] = COMPOSITIONS[device_type]
    if tokens or adapters or ranks or mixes:
        compositions = itertools.product(
            tokens or (16, 64, 256), adapters or (8,), ranks or (16,), mixes or ("uniform",)
        )
    pairs = itertools.product(projections.items(), list(compositions))
    cells = [Cell(name, width, slices, *batch) for (name, (width, slices)), batch in pairs]
    return list(dict.fromkeys(cells))


def num_layers(cell: Cell, itemsize: int, rotated_bytes: float, most: int) -> int:
    """Return how many layers hold `rotated_bytes` together, 4 to `most` of them."""
    size = cell.num_slots * cell.adapter_bytes(itemsize)
    return max(4, min(most, math.ceil(rotated_bytes / size)))
