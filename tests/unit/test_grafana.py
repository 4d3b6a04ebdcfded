"""The dashboard asks only for what is exported, and shows all of it."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import promql_parser
import pytest
from dashboards import GRAFANA, alerts, dashboard, panels
from prometheus_client import CollectorRegistry

from stream_merge.metrics.catalogue import CATALOGUE, TOPIC_DELAY, TOPIC_LAG
from stream_merge.metrics.instruments import MergeMetrics

SCRAPE_LABELS = {"job", "instance"}
ALLOWED_UNITS = {"s", "cps", "cpm", "Bps", "bytes", "percentunit", "short", "none"}


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grafana_generate", GRAFANA / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def parsed(expression: str) -> promql_parser.Expr:
    """What Prometheus gets once Grafana has replaced its variables."""
    replaced = expression.replace("$__rate_interval", "1m")
    replaced = re.sub(r'=~"\$(job|query|target)"', '=~".+"', replaced)
    assert "$" not in replaced, f"a variable that the dashboard does not define in {expression}"
    return promql_parser.parse(replaced)


def nodes(expression: promql_parser.Expr) -> list[tuple[promql_parser.Expr, tuple[str, ...]]]:
    """Every node of a query with the functions and operators around it, outermost first."""
    found: list[tuple[promql_parser.Expr, tuple[str, ...]]] = []

    def visit(node: Any, around: tuple[str, ...]) -> None:
        found.append((node, around))
        match node:
            case promql_parser.Call():
                for argument in node.args:
                    visit(argument, (*around, node.func.name))
            case promql_parser.AggregateExpr():
                visit(node.expr, (*around, "aggregation"))
            case promql_parser.BinaryExpr():
                visit(node.lhs, (*around, "operator"))
                visit(node.rhs, (*around, "operator"))
            case promql_parser.ParenExpr():
                visit(node.expr, around)
            case promql_parser.MatrixSelector():
                visit(node.vector_selector, around)
            case promql_parser.VectorSelector() | promql_parser.NumberLiteral():
                pass
            case _:
                pytest.fail(f"a kind of query that this test does not look into: {node!r}")

    visit(expression, ())
    return found


def selectors() -> Iterator[tuple[str, promql_parser.VectorSelector, tuple[str, ...]]]:
    for expression in expressions():
        for node, around in nodes(parsed(expression)):
            if isinstance(node, promql_parser.VectorSelector):
                yield expression, node, around


def exported() -> dict[str, set[str]]:
    """Every series name of a live registry with its label names, as a scrape would see it."""
    registry = CollectorRegistry()
    metrics = MergeMetrics(registry=registry)
    metrics.prepare("q", "t")
    metrics.prepare_topics("q", "t", ["topic"])
    unknown_at_first = TOPIC_LAG, TOPIC_DELAY
    metrics.observe_topics("q", "t", store=[(instrument, ("topic",), 0) for instrument in unknown_at_first])
    return {sample.name: set(sample.labels) for family in registry.collect() for sample in family.samples}


def base_name(series: str) -> str:
    return re.sub(r"_(bucket|sum|count)$", "", series)


def test_generating_the_dashboard_again_changes_nothing(generator: ModuleType) -> None:
    """The file in the repository is the generator's output; edit generate.py, then run `make dashboard`."""
    assert (GRAFANA / "stream-merge.json").read_text(encoding="utf-8") == generator.rendered()


def test_every_query_is_valid_promql() -> None:
    assert len(expressions()) > 50
    for expression in expressions():
        parsed(expression)


def test_every_metric_and_label_of_a_query_is_exported() -> None:
    """A renamed metric leaves no panel silently empty."""
    series = exported()
    for expression, selector, _ in selectors():
        assert selector.name in series, expression
        used = {matcher.name for matcher in selector.matchers.matchers}
        assert used <= series[selector.name] | SCRAPE_LABELS, expression


def test_every_label_that_a_query_groups_by_is_exported() -> None:
    series = exported()
    for expression in expressions():
        found = [node for node, _ in nodes(parsed(expression))]
        known = set().union(*(series[n.name or ""] for n in found if isinstance(n, promql_parser.VectorSelector)))
        for node in found:
            if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
                assert set(node.modifier.labels) <= known | SCRAPE_LABELS, expression


def test_no_job_answers_for_another_with_a_query_of_the_same_name() -> None:
    for expression in expressions():
        for labels in re.findall(r"by \(([^)]*)\)", expression):
            by = {label.strip() for label in labels.split(",")}
            assert "query" not in by or "job" in by, expression


def test_every_value_that_a_query_selects_exists() -> None:
    """A fate, phase or outcome in a query is one that the sink has."""
    values = {instrument.name: set(instrument.values) for instrument in CATALOGUE if instrument.label}
    checked = 0
    for expression, selector, _ in selectors():
        for matcher in selector.matchers.matchers:
            if matcher.name not in {"job", "query", "target"}:
                assert set(matcher.value.split("|")) <= values[selector.name or ""], expression
                checked += 1
    assert checked == 2


def test_every_legend_names_a_label_that_its_query_keeps() -> None:
    for panel in panels():
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), target["expr"]


def test_every_exported_metric_is_on_a_panel_or_in_an_alert() -> None:
    """What nobody can see need not be exported."""
    shown = {base_name(selector.name or "") for _, selector, _ in selectors()}
    exported = {instrument.name for instrument in CATALOGUE}

    assert shown <= exported
    for name in exported - shown:
        assert any(name in alert.expression for alert in alerts.ALERTS), name


def test_every_query_is_filtered_by_job_query_and_target() -> None:
    for expression, selector, _ in selectors():
        text = expression[expression.index(f"{selector.name}{{") :].split("}")[0]
        for variable in ("job", "query", "target"):
            assert f'{variable}=~"${variable}"' in text, expression


def test_counters_are_only_read_as_rates_over_the_interval_of_grafana() -> None:
    """The level of a counter means nothing: it restarts with the process. Gauges are never rated."""
    gauges = {instrument.name for instrument in CATALOGUE if instrument.type == "gauge"}
    for expression, selector, around in selectors():
        is_rated = bool(around) and around[-1] in {"rate", "increase"}
        assert is_rated == (selector.name not in gauges), expression
    for expression in expressions():
        assert set(re.findall(r"\[(.*?)\]", expression)) <= {"$__rate_interval"}


def test_rates_are_taken_before_sums() -> None:
    """A rate of a sum misreads the restart of one process as a reset of all."""
    for expression in expressions():
        for node, around in nodes(parsed(expression)):
            if isinstance(node, promql_parser.AggregateExpr):
                assert "rate" not in around, expression


def test_buckets_are_aggregated_by_their_bound_inside_a_quantile() -> None:
    for expression, selector, around in selectors():
        if (selector.name or "").endswith("_bucket"):
            assert "histogram_quantile" in around
            assert "by (le, " in expression


def test_every_panel_says_what_it_shows_and_in_which_unit() -> None:
    titles = [panel["title"] for panel in panels()]
    assert len(titles) == len(set(titles))
    for panel in panels():
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"] in ALLOWED_UNITS
        assert panel["type"] in {"timeseries", "stat"}
        assert panel["targets"]
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGH")[: len(panel["targets"])]
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    everything = dashboard()["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        grid = panel["gridPos"]
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert grid["x"] + grid["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in everything}) == len(everything)


def test_the_dashboard_can_be_provisioned_anywhere() -> None:
    """A stable uid, no id of somebody's database, nothing editable, a schema that Grafana 11 to 13 load."""
    board = dashboard()

    assert board["uid"] == "stream-merge"
    assert "id" not in board
    assert board["editable"] is False
    assert board["schemaVersion"] == 42
    assert "__inputs" not in board


def test_variables_choose_data_source_job_query_and_target() -> None:
    variables = {variable["name"]: variable for variable in dashboard()["templating"]["list"]}

    assert list(variables) == ["datasource", "job", "query", "target"]
    assert variables["datasource"]["query"] == "prometheus"
    series = exported()
    for name in ("job", "query", "target"):
        variable = variables[name]
        assert (variable["multi"], variable["includeAll"], variable["allValue"]) == (True, True, ".+")
        assert variable["refresh"] == 2
        found = re.fullmatch(r"label_values\((?P<selector>.+), (?P<label>\w+)\)", variable["query"]["query"])
        assert found is not None
        assert found["label"] == name
        selector = parsed(found["selector"])
        assert isinstance(selector, promql_parser.VectorSelector)
        assert {name} | {m.name for m in selector.matchers.matchers} <= series[selector.name or ""] | SCRAPE_LABELS


def test_provisioning_gives_the_data_source_a_fixed_uid_and_an_interval() -> None:
    """Without the scrape interval Grafana computes $__rate_interval from a guess."""
    text = (GRAFANA / "provisioning" / "datasources" / "prometheus.yaml").read_text(encoding="utf-8")

    assert re.search(r"^apiVersion: 1$", text, re.MULTILINE)
    assert re.search(r"^    uid: prometheus$", text, re.MULTILINE)
    assert re.search(r"^    type: prometheus$", text, re.MULTILINE)
    assert re.search(r"^      timeInterval: \d+s$", text, re.MULTILINE)


def test_provisioning_does_not_let_the_user_interface_change_the_dashboard() -> None:
    text = (GRAFANA / "provisioning" / "dashboards" / "stream-merge.yaml").read_text(encoding="utf-8")

    assert re.search(r"^apiVersion: 1$", text, re.MULTILINE)
    assert re.search(r"^    type: file$", text, re.MULTILINE)
    assert re.search(r"^    allowUiUpdates: false$", text, re.MULTILINE)


def test_the_table_for_readers_lists_every_metric(generator: ModuleType) -> None:
    table = generator.markdown()

    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [instrument.name for instrument in CATALOGUE]
