"""Runs the Python on a page, for the tests that compare it with the text under it."""

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```(?:\n+```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)


def run(page):
    """Return the names that a page's blocks define, what each printed and the text under each."""
    namespace, shown, expected = {"__name__": "__page__"}, [], []
    for code, text in BLOCK.findall(page.read_text()):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(page), "exec"), namespace)
        shown.append(printed.getvalue())
        expected.append(text)
    return namespace, shown, expected
