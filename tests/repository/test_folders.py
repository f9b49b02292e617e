"""Folders stay small enough to read at a glance."""

from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST = 15


@pytest.mark.parametrize("top", ["lora_backends", "tests"])
def test_no_folder_holds_too_many_modules(top):
    modules = Counter(path.parent.relative_to(ROOT) for path in (ROOT / top).rglob("*.py"))
    assert {str(folder): count for folder, count in modules.items() if count > MOST} == {}
