"""The messages of errors about checkpoints: one fact per line."""

from __future__ import annotations

import json
from pathlib import Path

from lora_backends.errors import shown

MOST_FACTS = 20
"""Facts that a message lists; the rest are counted."""


def problem(
    path: Path,
    what: str,
    given: str | list[str],
    allowed: str,
    to_do: str | None = None,
    kind: str = "PEFT checkpoint",
) -> str:
    """Return the message of an error about one file of a kind."""
    facts = [given] if isinstance(given, str) else given
    lines = [f"cannot read the {kind}: {what}", f"  file: {path}"]
    lines += [f"  given: {fact}" for fact in facts[:MOST_FACTS]]
    if len(facts) > MOST_FACTS:
        lines.append(f"  given: ... and {len(facts) - MOST_FACTS} more")
    lines += [f"  allowed: {allowed}"] + ([f"  to do: {to_do}"] if to_do else [])
    return "\n".join(lines)


def as_json(value: object) -> str:
    """Return a value of a JSON file as it is there, cut if it is long."""
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        return shown(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
