"""The site: no warning, current generated parts, a complete reference, search from disk."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

pytest.importorskip("griffe", reason="the site's tools are not installed: pip install '.[docs]'")
pytest.importorskip("typer")

import build_site
import figures
import pages

import lora_backends
from lora_backends.selection.registry import backend_class, backend_names

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"([^\"]*)\"")


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_generated_parts_are_what_code_and_results_give(page):
    assert page.read_text() == pages.updated(page.read_text()), "run `make docs`"


def test_a_stale_part_shows():
    page = (REFERENCE / "support.md").read_text()
    stale = page.replace("| deterministic | yes", "| deterministic | no")
    assert stale != page
    assert pages.updated(stale) == page


def test_every_public_name_is_in_the_reference():
    described = set()
    for page in REFERENCE.glob("*.md"):
        described.update(re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE))
    missing = [
        f"{package}.{name}"
        for package, name, home in public_names()
        if f"{package}.{name}" not in described and f"{home}.{name}" not in described
    ]
    assert missing == []


def public_names():
    """Yield what the package and its subpackages export, and the backends' classes.

    Each with the package, the name and the module that it is defined in.
    """
    packages = ["lora_backends"]
    for found in pkgutil.iter_modules(lora_backends.__path__, "lora_backends."):
        if found.ispkg:
            packages.append(found.name)
    for package in packages:
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", []):
            yield package, name, getattr(getattr(module, name), "__module__", package)
    for name in backend_names():
        cls = backend_class(name)
        if cls.__module__.startswith("lora_backends."):
            yield cls.__module__, cls.__qualname__, cls.__module__


LINKS = ("nowhere.md", "#nowhere")
FAULTS = {
    "": (),
    " ".join(f"[a link]({link})" for link in LINKS): (*LINKS, "2 issues found"),
    "::: lora_backends.nowhere": ("lora_backends.nowhere",),
}


@pytest.mark.parametrize("fault", FAULTS, ids=["no fault", "links", "a name"])
def test_the_site_is_built_only_without_a_warning(fault, tmp_path, capfd):
    pytest.importorskip("zensical")
    config = (ROOT / "mkdocs.yml").read_text()
    config = re.sub(r"^nav:\n(?:[ ].*\n|\n)+", "", config, flags=re.MULTILINE)  # one page only
    (tmp_path / "mkdocs.yml").write_text(config)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Home\n\n{fault}\n")
    status = build_site.build(tmp_path / "mkdocs.yml", tmp_path / "site")
    shown = capfd.readouterr().err
    assert (status != 0) == bool(fault) == bool(shown)
    assert all(told in shown for told in FAULTS[fault])


def test_docstrings_are_markdown():
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in (ROOT / "lora_backends").rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.endswith("::")
    ]
    assert wrong == [], "end the line before an indented example in one colon"


def test_the_picture_is_drawn_from_the_results():
    picture = (ROOT / "docs" / "images" / "h200.svg").read_text()
    assert figures.digest() in picture, "run tools/draw_h200.py"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site as `make docs` does; a warning is an error."""
    pytest.importorskip("zensical")
    folder = tmp_path_factory.mktemp("site")
    assert build_site.build(ROOT / "mkdocs.yml", folder) == 0
    return folder


def test_the_search_index_is_a_script_so_that_search_works_from_disk(site):
    # A browser runs a script from file://, but lets no page fetch JSON there or start a worker.
    index = (site / "search.js").read_text()
    assert index.startswith("var __index = {")
    assert "how-to/use-with-transformers.html" in index
    page = (site / "reference" / "glossary.html").read_text()
    assert 'src="../javascripts/iframe-worker.js"' in page
    assert (site / "javascripts" / "iframe-worker.js").is_file()


def test_a_readers_browser_fetches_nothing(site):
    fetched = [
        f"{page.relative_to(site)}: {url}"
        for page in site.rglob("*.html")
        for url in LOADED.findall(page.read_text())
        if url.startswith(("http:", "https:", "//"))
    ]
    assert fetched == []


def test_pages_lead_to_their_neighbours(site):
    page = (site / "how-to" / "serve-requests.html").read_text()
    assert re.search(r'<a\b[^>]*rel="prev"|md-footer__link--prev', page)
    assert re.search(r'<a\b[^>]*rel="next"|md-footer__link--next', page)


def test_the_site_lists_what_the_pages_leave_to_it(site):
    assert "--max-new-tokens" in (site / "reference" / "command-line.html").read_text()
    properties = (site / "reference" / "testing.html").read_text()
    assert "permuting_tokens_permutes_rows" in properties


INTERNALS = ("record_of", "put_ahead", "begin_training", "file_too_large", "__reduce_ex__")


def test_the_reference_hides_internals(site):
    shown = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    assert [name for name in INTERNALS if re.search(rf'id="[\w.]*\.{name}"', shown)] == []
    assert 'id="lora_backends.adapters.AdapterPool.load"' in shown


def test_the_first_page_of_the_navigation_is_the_transformers_guide(site):
    home = (site / "index.html").read_text()
    links = re.findall(r"<a\b[^>]*\bmd-nav__link\b[^>]*>", home)
    pages = '(?:how-to|tutorial|reference|explanation)/[^"#]*'
    order = [found[1] for link in links if (found := re.search(f'href="(?:./)?({pages})"', link))]
    assert order[0] == "how-to/use-with-transformers.html"
