"""Takes the comment beside a dataclass's field as its description in the reference.

    num_slots: int  # >= 1

The code describes fields by shape, dtype and range in such a comment, and nowhere else.
"""

from __future__ import annotations

from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """Gives fields without a docstring the comment beside them."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Look at every field of a dataclass."""
        if not any("dataclass" in str(decorator.value) for decorator in cls.decorators):
            return
        for field in cls.attributes.values():
            if field.docstring is None and field.lineno is not None:
                _, mark, comment = field.lines[0].partition("  # ")
                if mark:
                    comment = comment.replace("[", r"\[")  # a shape, not a link
                    field.docstring = griffe.Docstring(comment, lineno=field.lineno, parent=field)
