"""The pages in `docs` keep to what the code says: help texts, paths, where identifiers are quoted."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_SPEC = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
assert _SPEC is not None
assert _SPEC.loader is not None
generate = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(generate)


@pytest.mark.parametrize("name", generate.PARTS)
def test_what_the_reference_takes_from_the_code_is_up_to_date(name: str) -> None:
    """Every metric, every option of every command; `make reference` writes them again."""
    file, part = generate.PARTS[name]
    page = (DOCS / file).read_text()

    assert generate.written(page, name, part()) == page


def test_every_page_is_in_the_navigation() -> None:
    """What nobody can find is not documented."""
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}

    assert set(re.findall(r"[\w/-]+\.md", navigation)) == pages


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "grafana/README.md"])
def test_links_of_pages_outside_the_site_lead_somewhere(page: str) -> None:
    """Those of the site are checked by `make docs`."""
    links = re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / page).read_text())

    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


def test_every_file_that_a_page_names_is_there() -> None:
    """Paths of the repository in backticks: folders of these names are its own. Tests may lie in any folder."""
    named = r"`((?:stream_merge|examples|deployments|grafana|tests|docs)/[\w./-]+)`"
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    found = {path for page in pages for path in re.findall(named, page.read_text())}

    tests = set(re.findall(r"`(test_\w+\.py)`", "".join(page.read_text() for page in pages)))

    assert [path for path in sorted(found) if not (ROOT / path).exists()] == []
    assert tests - {path.name for path in (ROOT / "tests").rglob("test_*.py")} == set()


def test_identifiers_are_quoted_in_two_places_only() -> None:
    """One for Spark SQL, one for DataFusion's; CONTRIBUTING says so. Fields of a CSV header are no identifiers."""
    doubling = re.compile(r"""\.replace\(\s*(?:"`",\s*"``"|'"',\s*'""')\s*\)""")
    found = {
        str(path.relative_to(ROOT)): len(doubling.findall(path.read_text()))
        for path in (ROOT / "stream_merge").rglob("*.py")
        if doubling.search(path.read_text()) and path.name != "reader.py"
    }

    assert found == {"stream_merge/model/names.py": 1, "stream_merge/tables/log/handle.py": 1}
    assert all(f"`{path}`" in (ROOT / "CONTRIBUTING.md").read_text() for path in found)
