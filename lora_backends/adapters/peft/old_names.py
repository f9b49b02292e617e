"""Other names for modules of a base model.

They come from Transformers 4, from a vision-language model around the same language model, from
Tinker, and from PEFT's models in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from lora_backends.adapters.files.formats import LONGEST_NAME
from lora_backends.adapters.files.messages import problem
from lora_backends.errors import InvalidInputError, shown

_RENAMED = (
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head$", "lm_head"),
    (r"^model\.(?=(layers|embed_tokens|norm)\b)", "model.language_model."),
    (
        r"^(model\.)?(language_model|text_model|llm)\.(model\.)?(?=(layers|embed_tokens)\b)",
        "model.",
    ),
    (r"^(model\.)?(language_model|text_model|llm|thinker)\.lm_head$", "lm_head"),
    (r"^thinker\.(?=model\.)", ""),
    (r"^(model\.)?unembed_tokens$", "lm_head"),  # Tinker
    (r"^", "model."),  # vision towers and connectors
)
"""Parts of paths that Transformers 5 renamed, that vision-language models put in front, or that
Tinker uses; replaced if the base model has only the new path."""

_OF_TOWER = ("vision_tower.vision_model.", "vision_tower.")
"""The start of paths in a vision tower, in Transformers 4 and 5; beside the renamed parts."""

_OF_TINKER = (".attn.", ".self_attn.")
"""Tinker's name of gpt-oss' attention."""

_OF_LAYER = (
    (r"\battention\.attention\.query$", "attention.q_proj"),
    (r"\battention\.attention\.key$", "attention.k_proj"),
    (r"\battention\.attention\.value$", "attention.v_proj"),
    (r"\battention\.output\.dense$", "attention.o_proj"),
    (r"\bintermediate\.dense$", "mlp.fc1"),
    (r"\boutput\.dense$", "mlp.fc2"),
)
_LAYERS = (r"\bencoder\.layer\.", "layers.")
"""Parts of paths in ViT and its like, as Transformers 5 renames their weights; DINOv2 has kept the
layers' names."""

_ADAPTER_NAMES = (
    r"\.lora_(?:A|B)\.(?P<name>[^.]+)\.(?:weight|bias)$",
    r"\.lora_embedding_(?:A|B)\.(?P<name>[^.]+)$",
    r"\.lora_magnitude_vector\.(?P<name>[^.]+)\.weight$",
    r"\.modules_to_save\.(?P<name>[^.]+)\.[^.].*$",
    r"\.trainable_tokens_delta\.(?P<name>[^.]+)$",
)
_NO_NAMES = ("weight", "bias", "base_layer", "original_module", "modules_to_save")
"""Words of PEFT that no adapter name may be: a tensor that has one there keeps its name."""

_NAMED = [re.compile(pattern) for pattern in _ADAPTER_NAMES]


def renamed(path: str, known: Iterable[str]) -> str:
    """Return the base model's path for a module path of an older Transformers."""
    # Each path is looked up several times.
    known = known if isinstance(known, (set, Mapping)) else set(known)
    if path in known:
        return path
    starts = (path, path.replace(*_OF_TOWER), path.replace(*_OF_TINKER), *_in_vision(path))
    for start in starts:
        for old, new in (*_RENAMED, (r"^", "")):
            candidate = re.sub(old, new, start, count=1)
            if candidate != path and candidate in known:
                return candidate
    return path


def _in_vision(path: str) -> tuple[str, str]:
    for old, new in _OF_LAYER:
        path = re.sub(old, new, path, count=1)
    return path, re.sub(*_LAYERS, path, count=1)


def without_adapter_name(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as `save_pretrained` names them, where a state_dict has one adapter's name."""
    name_in = {key: name for key in tensors if (name := _adapter_name(key)) is not None}
    names = sorted({*name_in.values()})
    if len(names) > 1:
        given = [f"an adapter named {shown(name)}" for name in names]
        what = "the file holds several adapters"
        to_do = "save each with PEFT's save_pretrained, in a folder of its own"
        raise InvalidInputError(problem(path, what, given, "one adapter", to_do))
    short = {key: _cut(key, name) for key, name in name_in.items()}
    # A name that is taken stays as it is: nothing says which of the two tensors counts.
    return {
        key if short.get(key, key) in tensors else short[key]: tensor
        for key, tensor in tensors.items()
    }


def _adapter_name(key: str) -> str | None:
    if len(key) > LONGEST_NAME:
        return None
    matches = (pattern.search(key) for pattern in _NAMED)
    name = next((match["name"] for match in matches if match), None)
    return None if name in _NO_NAMES else name


def _cut(key: str, name: str) -> str:
    match = next(match for pattern in _NAMED if (match := pattern.search(key)))
    return key[: match.start("name") - 1] + key[match.end("name") :]
