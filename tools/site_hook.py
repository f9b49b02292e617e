"""What mkdocs does besides building: folders in the order of Diataxis, blocks that are not run."""

from __future__ import annotations

from typing import Any

ORDER = ("Home", "Tutorial", "How to", "Reference", "Explanation")


def on_nav(nav: Any, **_: Any) -> Any:
    """Sort the folders; a new one has to be given its place in ORDER."""
    nav.homepage.title = "Home"
    for item in nav.items:
        if item.title not in ORDER:
            raise ValueError(f"docs/ has {item.title!r}; allowed: {', '.join(ORDER)}")
    nav.items.sort(key=lambda item: ORDER.index(item.title))
    return nav


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Drop the mark of code that the tests do not run: the highlighter takes a language alone."""
    return markdown.replace("```python no-run\n", "```python\n")
