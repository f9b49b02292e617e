"""A batch in several passes, one for each adapter, for models that mix up rows.

Every pass runs the whole batch with one adapter in all rows, and each row of the result is taken
from the pass of its adapter. So no input is divided: an axis that is as long as the batch need not
have the rows, it may have images, tokens or sections of a rotary embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.hf.calls.entries import RowAdapters, adapter_names
from lora_backends.hf.layout.images import Images

ROW_OUTPUTS = frozenset(
    """attentions class_queries_logits cross_attentions decoder_attentions decoder_hidden_states
    embeddings encoder_attentions encoder_hidden_states encoder_last_hidden_state end_logits
    extract_features global_attentions hidden_states last_hidden_state logits masks_queries_logits
    pooler_output pred_boxes pred_masks predicted_depth prediction_logits projected_states
    reshaped_hidden_states seq_relationship_logits start_logits text_embeds""".split()
)
"""Outputs, or tuples of them, that Transformers documents with the rows on their first axis."""

OF_IMAGES = "image_hidden_states"
"""The output with the images of all rows, in order."""

ENCODERS = frozenset({"image_outputs", "video_outputs", "audio_outputs"})
"""Outputs of encoders of images, video and sound: nothing says to which row an image belongs."""

_PLAIN = bool | int | float | str | None

Run = Callable[..., Any]
"""Runs a model; takes `adapters` and inputs."""


def run_split(
    run: Run, adapters: Sequence[RowAdapters], inputs: Mapping[str, Any], images: Images
) -> Any:
    """Run the batch for each of the adapters, and return each row of its own adapter's pass.

    Raises:
        InvalidInputError: `adapters` is not one entry per row.
        UnsupportedInputError: an input that a pass may change, or an output whose rows are not
            known and that the adapters change.
    """
    adapter_names(adapters)
    if not adapters:
        raise InvalidInputError("adapters is empty\n  allowed: one name or None per row")
    # By equality, not by name: equal blends share a pass.
    count, groups = len(adapters), _groups(adapters)
    if len(groups) == 1:
        return run(adapters=adapters, **inputs)
    owners = [next(g for g, rows in enumerate(groups) if row in rows) for row in range(count)]
    outputs = [_pass(run, adapters[rows[0]], count, inputs) for rows in groups]
    joined = {
        name: _joined(name, [output.get(name) for output in outputs], owners, inputs, images)
        for name in outputs[0]
    }
    whole: Any = type(outputs[0])(**joined)
    return whole.to_tuple() if inputs.get("return_dict") is False else whole


def accepted(run: Run, count: int, inputs: Mapping[str, Any], images: Images) -> bool:
    """Return whether `run_split` takes these inputs of `count` rows and the outputs for them."""
    try:
        output = _pass(run, None, count, inputs)
    except Exception:  # whatever a model of any author raises
        return False
    # outputs that only equality would allow count as refused
    return all(
        isinstance(value, _PLAIN)
        or name in ENCODERS
        or (name in ROW_OUTPUTS and _has_rows(value, count))
        or (name == OF_IMAGES and images.placeholders(inputs, value) is not None)
        for name, value in output.items()
    )


def _pass(run: Run, entry: RowAdapters, count: int, inputs: Mapping[str, Any]) -> Any:
    """Run the whole batch with one entry in all rows."""
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor) and not _is_plain(value):
            raise UnsupportedInputError(
                f"split=True runs the batch several times, and a pass may change {name}\n"
                f"  given: {type(value).__name__}\n"
                f"  allowed: tensors, numbers, strings, and lists of numbers and strings\n"
                f"  to do: split the batch by adapter yourself"
            )
    copies = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }
    if copies.get("return_dict") is False:  # outputs are recognised by their names
        copies["return_dict"] = True
    # All rows, also those of other adapters: an axis keeps the length that it had.
    output = run(adapters=[entry] * count, **copies)
    if not isinstance(output, Mapping):
        raise UnsupportedInputError(
            f"split=True needs the names of a model's outputs\n"
            f"  given: {type(output).__name__}\n  allowed: a ModelOutput\n"
            f"  to do: pass return_dict=True, or split the batch by adapter yourself"
        )
    return output


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _groups(adapters: Sequence[RowAdapters]) -> list[list[int]]:
    groups: list[list[int]] = []
    for row, entry in enumerate(adapters):
        same = next((group for group in groups if adapters[group[0]] == entry), None)
        if same is None:
            groups.append([row])
        else:
            same.append(row)
    return groups


def _joined(
    name: str,
    parts: Sequence[Any],
    owners: Sequence[int],
    inputs: Mapping[str, Any],
    images: Images,
) -> Any:
    """Return an output of all rows, from that of each pass; `owners` has the pass of each row."""
    # Values that no adapter changes need no rows: positions or masks for instance.
    if all(_same(part, parts[0]) for part in parts):
        return parts[0]
    if name in ENCODERS:
        return None  # documented at `MultiLoRAModel.__call__`
    if name in ROW_OUTPUTS and all(_has_rows(part, len(owners)) for part in parts):
        return _chosen(parts, owners)
    counts = images.placeholders(inputs, parts[0]) if name == OF_IMAGES else None
    if counts is not None:
        pairs = zip(owners, counts, strict=True)
        # Features of images follow each other without an axis of rows.
        tokens = [owner for owner, number in pairs for _ in range(number)]
        return _chosen([part.flatten(0, -2) for part in parts], tokens).view_as(parts[0])
    cures = {"loss": "leave labels out, and compute the loss from the logits"}
    is_cache = not isinstance(parts[0], torch.Tensor | tuple | list | Mapping)
    cure = cures.get(
        name, "pass use_cache=False" if is_cache else f"leave {name} out of the outputs"
    )
    raise UnsupportedInputError(
        f"split=True cannot join the outputs {name}: it is not known which row each element "
        f"belongs to\n  allowed: outputs of rows, e.g. logits, last_hidden_state, hidden_states\n"
        f"  to do: {cure}, or split the batch by adapter yourself"
    )


def _same(value: Any, other: Any) -> bool:
    """Return whether an output of two passes is the same."""
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value.dtype == other.dtype and torch.equal(value, other)
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return value.keys() == other.keys() and all(_same(value[k], other[k]) for k in value)
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(_same, value, other))
    return isinstance(value, _PLAIN) and type(value) is type(other) and value == other


def _has_rows(value: Any, count: int) -> bool:
    """Return whether an output, known to begin with the rows, has one element for each."""
    if isinstance(value, list | tuple):
        return all(_has_rows(part, count) for part in value)
    if isinstance(value, torch.Tensor):
        return value.shape[:1] == (count,)
    return value is None


def _chosen(parts: Sequence[Any], owners: Sequence[int]) -> Any:
    """Return each element of the first axis from the part that `owners` names."""
    first = parts[0]
    if all(isinstance(part, list | tuple) for part in parts) and len({*map(len, parts)}) == 1:
        return type(first)(_chosen(elements, owners) for elements in zip(*parts, strict=True))
    if all(part is None for part in parts):
        return None
    shapes = [list(part.shape) if isinstance(part, torch.Tensor) else None for part in parts]
    if None in shapes or any(shape != shapes[0] for shape in shapes):
        raise UnsupportedInputError(
            f"split=True cannot join outputs of different shapes\n  given: {shapes}\n"
            f"  to do: split the batch by adapter yourself"
        )
    return torch.stack([parts[owner][place] for place, owner in enumerate(owners)])
