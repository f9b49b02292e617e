"""Gives the package's index page a README whose links work there.

README links to files of the repository. On an index page such links lead nowhere: they become
absolute where pyproject.toml has the address, `[project.urls] Repository`, else plain text.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)]+)\)")


def index_page(readme: str, repository: str | None) -> str:
    """Return the text with links to `repository`, or without links into it."""

    def absolute(link: re.Match[str]) -> str:
        is_picture, text, path = link.groups()
        if repository is None:
            return "" if is_picture else text
        kind = "raw" if is_picture else "blob"
        return f"{is_picture}[{text}]({repository.rstrip('/')}/{kind}/main/{path})"

    return LINK.sub(absolute, readme)


if __name__ == "__main__":
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    setup(
        long_description=index_page(
            (HERE / "README.md").read_text(encoding="utf-8"),
            project.get("urls", {}).get("Repository"),
        ),
        long_description_content_type="text/markdown",
    )
