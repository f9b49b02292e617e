"""The generated parts of the page on the conformance suite: properties and profiles."""

from __future__ import annotations

from reference_blocks import table

from lora_backends.testing import DEFAULT, THOROUGH, suite
from lora_backends.testing.properties.core import BOUNDED, BY_CLAIM, EXACT

AGREEMENTS = {EXACT: "exact", BY_CLAIM: "claimed", BOUNDED: "bound"}
"""The agreements of the suite, in the short words that the page explains."""


def properties() -> str:
    """Return every property in the order in which they run."""
    rows = [
        [f"`{name}`", found.rule, AGREEMENTS[found.agreement]]
        for name, found in suite.properties().items()
    ]
    return table(["property", "rule", "agreement"], rows)


def profiles() -> str:
    """Return the sizes of both profiles."""
    rows = []
    for profile in (DEFAULT, THOROUGH):
        examples = sum(found.examples for found in suite.properties().values()) * profile.effort
        rows.append(
            [f"`{profile.name}`", str(profile.max_tokens), str(profile.max_slots)]
            + [str(profile.max_slices), str(max(profile.ranks)), f"{examples:.0f}"]
        )
    return table(
        ["profile", ">tokens", ">slots", ">slices", ">max_rank", ">examples"],
        rows,
    )
