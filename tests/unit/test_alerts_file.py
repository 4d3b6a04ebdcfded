"""The alerts ask only for what is exported, and each has its section in the runbook."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from dashboards import ALERTS_FILE, alerts

from stream_merge.metrics.catalogue import CATALOGUE

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "operate" / "alerts.md").read_text(encoding="utf-8")
EXPRESSIONS = {rule.name: rule.expression for rule in (*alerts.RECORDS, *alerts.ALERTS)}
SCRAPE_LABELS = {"job", "instance"}
OF_PROCESSES = {"up": SCRAPE_LABELS, "process_start_time_seconds": SCRAPE_LABELS}
"""Series that Prometheus and its client export by themselves."""


def selectors(expression: str) -> Iterator[promql_parser.VectorSelector]:
    def visit(node: Any) -> Iterator[promql_parser.VectorSelector]:
        match node:
            case promql_parser.VectorSelector():
                yield node
            case promql_parser.Call():
                for argument in node.args:
                    yield from visit(argument)
            case promql_parser.AggregateExpr() | promql_parser.ParenExpr():
                yield from visit(node.expr)
            case promql_parser.BinaryExpr():
                yield from visit(node.lhs)
                yield from visit(node.rhs)
            case promql_parser.MatrixSelector():
                yield from visit(node.vector_selector)
            case promql_parser.NumberLiteral():
                pass
            case _:
                pytest.fail(f"a kind of query that this test does not look into: {node!r}")

    return visit(promql_parser.parse(expression))


def test_writing_the_file_again_changes_nothing() -> None:
    """Edit grafana/alerts.py, then run `make alerts`."""
    assert ALERTS_FILE.read_text(encoding="utf-8") == alerts.rendered()


def test_names_are_unique() -> None:
    assert len(EXPRESSIONS) == len(alerts.RECORDS) + len(alerts.ALERTS)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_every_metric_label_and_value_of_an_expression_exists(name: str) -> None:
    """A renamed metric leaves no alert silently without data."""
    metrics = {instrument.name: instrument for instrument in CATALOGUE}
    records = {record.name for record in alerts.RECORDS}
    found = list(selectors(EXPRESSIONS[name]))

    assert found
    for selector in found:
        assert selector.name in metrics.keys() | records | OF_PROCESSES.keys()
        for matcher in selector.matchers.matchers:
            if matcher.name not in SCRAPE_LABELS:
                instrument = metrics[selector.name or ""]
                assert matcher.name == instrument.label
                assert matcher.value in instrument.values


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_every_label_that_an_expression_groups_by_exists(name: str) -> None:
    for labels in re.findall(r"(?:by|on) \(([^)]*)\)", EXPRESSIONS[name]):
        assert {label.strip() for label in labels.split(",")} <= {*SCRAPE_LABELS, "query", "target"}


def test_every_alert_has_its_section() -> None:
    assert re.findall(r"^## (.+)$", PAGE, re.MULTILINE) == [alert.name for alert in alerts.ALERTS]


@pytest.mark.parametrize("name", [alert.name for alert in alerts.ALERTS])
def test_a_section_says_what_it_means_and_what_to_do(name: str) -> None:
    section = PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]

    assert re.findall(r"^- \*\*(\w+)\.\*\* \S", section, re.MULTILINE) == ["Meaning", "Impact", "Diagnosis", "Remedy"]


def test_every_command_that_the_page_names_exists() -> None:
    reference = (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")
    commands = re.findall(r"^## stream-merge (.+)$", reference, re.MULTILINE)
    named = set(re.findall(r"`stream-merge ((?:quarantine )?[a-z]+)", PAGE))

    assert named
    assert named <= set(commands)


def test_the_page_is_short() -> None:
    assert len(PAGE.split()) <= 1_250
    assert max(map(len, PAGE.splitlines())) <= 140
