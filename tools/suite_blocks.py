"""The generated parts of the page on the conformance suite: properties and profiles."""

from __future__ import annotations

import inspect
import re

from reference_blocks import table

from lora_backends.testing import DEFAULT, THOROUGH, suite
from lora_backends.testing.properties.core import BOUNDED, BY_CLAIM, EXACT

SMALL_WORDS = frozenset(
    "a an and are as at be by for from in is it its no of on or that the to with".split()
)

AGREEMENTS = {EXACT: "exact", BY_CLAIM: "", BOUNDED: "bound"}
"""The agreements of the suite, in the short words that the page explains."""


def properties() -> str:
    """Return every property in the order of running; a rule that its name tells is left out."""
    rows = [
        [f"`{name}`", "" if _tells(name, found.rule) else found.rule, AGREEMENTS[found.agreement]]
        for name, found in suite.properties().items()
    ]
    return table(["property", "rule", "agreement"], rows)


def property_groups() -> str:
    """Return the subject and the number of properties of each module of the suite."""
    groups: dict[str, int] = {}
    for found in suite.properties().values():
        about = (inspect.getdoc(inspect.getmodule(found.check)) or "").partition("\n")[0]
        if found.check.__module__ == suite.__name__:  # the machine has no module among the others
            about = found.rule
        groups[about] = groups.get(about, 0) + 1
    rows = [[about.rstrip("."), str(count)] for about, count in groups.items()]
    return table(["what is checked", ">properties"], rows)


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


def _tells(name: str, rule: str) -> bool:
    """Return whether a name has all words of a rule, up to two, in some form."""
    known = {word[:4] for word in name.split("_")}
    words = (word for word in re.findall(r"\w+", rule.lower()) if word not in SMALL_WORDS)
    return sum(word[:4] not in known for word in words) <= 2
