"""The page that holds the cases of Delta's MERGE suites against tests of ours names only tests that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "tests/delta_merge_suites.md"


def rows() -> list[list[str]]:
    """The cells of each row that holds cases."""
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in cells if row[0].strip() != "Delta's cases"]


def test_every_test_that_the_page_names_exists() -> None:
    """By file and function."""
    named = {
        (file, name) for _, tests, _ in rows() for file, name in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", tests)
    }
    known = {
        (file, node.name)
        for file in {file for file, _ in named}
        for node in ast.parse((ROOT / file).read_text()).body
        if isinstance(node, ast.FunctionDef)
    }

    assert len(named) > 50
    assert sorted(named - known) == []


def test_every_row_names_a_test_and_the_cases_are_as_many_as_is_said() -> None:
    """A row without a test has a remark that says what the question means instead; at present each has a test."""
    said = re.search(r"holds their (\d+) cases", PAGE.read_text())
    assert said is not None

    assert [row for row in rows() if not re.search(r"::test_\w+`", row[1])] == []
    assert sum(len(cases.split("; ")) for cases, _, _ in rows()) == int(said[1])
