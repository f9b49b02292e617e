"""Layer shapes of decoder models: by the name of a known model, or from a config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_backends.common.files import as_path, read_text
from lora_backends.errors import InvalidInputError, UnsupportedInputError, did_you_mean

Projections = dict[str, tuple[int, tuple[int, ...]]]  # name: in_features, output_slices

EMBEDDING = "embedding"
"""The projection that reads token ids: its in_features is the size of the vocabulary."""

LAYER = "layer"
"""The projection of a layer that is given by its widths: of any kind."""

_NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
PRESETS: Mapping[str, Mapping[str, int]] = {
    "llama3-8b": dict(zip(_NAMES, (4096, 14336, 32, 8, 128256), strict=True)),
    "llama3-70b": dict(zip(_NAMES, (8192, 28672, 64, 8, 128256), strict=True)),
    "qwen3-30b-a3b": {
        **dict(zip(_NAMES, (2048, 6144, 32, 4, 151936), strict=True)),
        "head_dim": 128,
        "num_experts": 128,
    },
    "smollm2": dict(zip(_NAMES, (576, 1536, 9, 3, 49152), strict=True)),
}
"""For each model, the keys of its config.json that decide the shapes of its layers."""


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
    """Return the projections of a decoder: qkv, o, gate_up, down and the embedding; and notes.

    Args:
        config: the keys of a config.json; num_key_value_heads and head_dim may be missing, as
            in Transformers, and without vocab_size there is no embedding. With experts, the
            feed-forward projections are left out.
        origin: where they come from, for errors.

    Returns:
        in_features and output_slices by name, and a sentence on each part left out.

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
    projections: Projections = {"qkv": (hidden, (q, kv, kv)), "o": (q, (hidden,))}
    notes = []
    if experts:
        note = f"{config[experts[0]]} experts are left out: only attention projections are timed"
        notes.append(note)
    else:
        inner = _size(config, "intermediate_size", origin)
        projections |= {"gate_up": (hidden, (inner, inner)), "down": (inner, (hidden,))}
    if config.get("vocab_size") is not None:
        projections[EMBEDDING] = (_size(config, "vocab_size", origin), (hidden,))
    return projections, notes


def _size(config: Mapping[str, Any], key: str, origin: str) -> int:
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInputError(
            f"{key} in {origin} is no size\n  given: {value!r}\n  allowed: an int >= 1"
        )
    return value
