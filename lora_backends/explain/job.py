"""Parses the batch and the layer of a command line, or a batch in a file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_backends.batch import LoRABatch
from lora_backends.common.files import as_path, read_text
from lora_backends.errors import InvalidInputError, did_you_mean, shown
from lora_backends.explain import Layer
from lora_backends.model_shapes import preset

KEYS = ("slots", "sequences", "num_slots", "ranks")
"""Keys of a file: slots or sequences, the number of slots, and ranks per slot."""

MOST = {"slots": 1024, "tokens": 65_536, "slices": 16, "width": 2**20, "rank": 2048}
"""Limits of a batch and a layer: a larger drawing takes minutes and cannot be read."""

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def make_batch(
    slots: str | None, sequences: str | None, num_slots: int | None, file: Path | None
) -> tuple[LoRABatch, Any]:
    """Return the batch of one source, and its ranks if that is a file which has them.

    The sources are `slots`, "2,-1,0", `sequences`, "0:5,2:7" (slot and length), and a JSON or TOML
    file with the keys `KEYS`. Without `num_slots` there is one more slot than the highest in use.
    """
    sources = [text for text in (slots, sequences, file) if text is not None]
    if len(sources) != 1:
        raise InvalidInputError(
            f"which batch?\n  given: {len(sources)} of --slots, --sequences and --batch\n"
            f"  allowed: one, e.g. --slots 2,-1,0,2,2 or --sequences 0:5,2:7"
        )
    fields: dict[str, Any] = {"num_slots": num_slots}
    if file is not None:
        fields = _read(file) | ({} if num_slots is None else fields)
    elif slots is not None:
        fields["slots"] = _ints(slots, "--slots")
    else:
        fields["sequences"] = [_pair(item) for item in str(sequences).split(",")]
    return _batch(fields), fields.get("ranks")


def make_layer(
    num_slots: int,
    *,
    preset_name: str = "llama3-8b",
    projection: str = "qkv",
    in_features: int | None = None,
    output_slices: str | None = None,
    ranks: Any = None,
    max_rank: int | None = None,
    dtype: str = "bfloat16",
) -> Layer:
    """Return the layer: both widths if they are given, else a projection of a preset.

    `ranks` is "16" for all slots, "16,8,64" for one per slot, a list of these, or a list of lists
    with a rank per slice; None means 16. Without `max_rank` the highest rank is taken.
    """
    if (in_features is None) != (output_slices is None):
        raise InvalidInputError("--in-features and --output-slices go together")
    if in_features is not None:
        widths = (in_features, tuple(_ints(str(output_slices), "--output-slices")))
    else:
        projections, _ = preset(preset_name)
        if projection not in projections:
            raise InvalidInputError(
                f"{preset_name} has no projection {projection!r}"
                f"{did_you_mean(projection, projections)}\n  allowed: {', '.join(projections)}"
            )
        widths = projections[projection]
    if dtype not in ITEM_BYTES:
        raise InvalidInputError(f"--dtype {dtype!r}\n  allowed: {', '.join(ITEM_BYTES)}")
    _check_most("slices", len(widths[1]))
    _check_most("width", max(widths[0], *widths[1]))
    table = _ranks(ranks, num_slots, len(widths[1]))
    highest = max((rank for row in table for rank in row), default=1)
    width = max(1, highest) if max_rank is None else max_rank
    _check_most("rank", width)
    return Layer(*widths, table, width, ITEM_BYTES[dtype])


def _read(file: Path) -> dict[str, Any]:
    text = read_text(as_path(file, "--batch"))
    try:
        value = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        kind = "TOML" if file.suffix == ".toml" else "JSON"
        raise InvalidInputError(f"{file} is not valid {kind}: {error}") from error
    unknown = [key for key in value if key not in KEYS] if isinstance(value, dict) else ["?"]
    if unknown or ("slots" in value) == ("sequences" in value):
        held = ", ".join(value) if isinstance(value, dict) else type(value).__name__
        raise InvalidInputError(
            f"{file} holds no batch\n  given: {held}"
            f"\n  allowed: slots or sequences, with num_slots and ranks if wanted"
        )
    fields: dict[str, Any] = value
    return fields


def _batch(fields: dict[str, Any]) -> LoRABatch:
    if "sequences" in fields:
        pairs = fields["sequences"]
        if not isinstance(pairs, list) or not all(_is_pair(pair) for pair in pairs):
            raise InvalidInputError(
                f"sequences are no list of [slot, length]\n  given: {shown(pairs, 80)}"
            )
        slots, lengths = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    else:
        slots, lengths = fields["slots"], None
    if fields.get("num_slots") is None:
        # anything else is refused by LoRABatch, with its own message
        plain = isinstance(slots, list) and all(isinstance(slot, int) for slot in slots)
        fields["num_slots"] = max([0, *slots]) + 1 if plain else 1
    _check_most("slots", fields["num_slots"])
    _check_most("tokens", len(slots) if lengths is None else sum(lengths))
    if lengths is None:
        return LoRABatch(slots, fields["num_slots"])
    return LoRABatch.from_sequences(slots, lengths, fields["num_slots"])


def _check_most(what: str, count: Any) -> None:
    """Refuse sizes that take too long to draw; other types are refused where they are used."""
    if isinstance(count, int) and count > MOST[what]:
        raise InvalidInputError(
            f"the batch or the layer is too large to be drawn\n  given: {shown(count)} {what}\n"
            f"  allowed: at most {MOST[what]}"
        )


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(n, int) for n in pair)


def _ranks(ranks: Any, num_slots: int, slices: int) -> tuple[tuple[int, ...], ...]:
    rows = _ints(ranks, "--ranks") if isinstance(ranks, str) else ranks
    rows = [16] if rows is None else rows if isinstance(rows, list) else [rows]
    if len(rows) == 1:
        rows = rows * num_slots
    table = [row if isinstance(row, list) else [row] * slices for row in rows]
    flat = [rank for row in table for rank in row]
    if len(table) != num_slots or not all(type(rank) is int for rank in flat):
        raise InvalidInputError(
            f"ranks do not fit the batch\n  given: {shown(ranks)}\n"
            f"  allowed: one for all, or one for each of {num_slots} slots"
        )
    return tuple(tuple(row) for row in table)


def _ints(text: str, what: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise InvalidInputError(f"{what} {shown(text)}\n  allowed: e.g. 2,-1,0") from error


def _pair(item: str) -> list[int]:
    slot, _, length = item.partition(":")
    try:
        return [int(slot), int(length)]
    except ValueError as error:
        raise InvalidInputError(
            f"--sequences: {shown(item)}\n  allowed: SLOT:LENGTH, e.g. 0:5,-1:3"
        ) from error


def ranges(tokens: Sequence[int], most: int = 12) -> str:
    """Return ascending tokens as "0-4 7 9-11", cut off after `most` ranges."""
    spans: list[list[int]] = []
    for token in tokens:
        if spans and token == spans[-1][1] + 1:
            spans[-1][1] = token
        else:
            spans.append([token, token])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in spans[:most]]
    return " ".join(words) + (" ..." if len(spans) > most else "")
