"""The dashboards ask only for what is exported; every metric is on a panel, in an alert, or left out by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import generate
import promql_parser
import pytest
import yaml
from dashboards import BOARDS, GRAFANA, alerts, asked, dashboard, panels
from prometheus_client import CollectorRegistry

from stream_merge.metrics.catalogue import CATALOGUE, TOPIC_DELAY, TOPIC_LAG
from stream_merge.metrics.instruments import MergeMetrics

SCRAPE_LABELS = {"job", "instance"}
OF_PROMETHEUS = {"ALERTS", "process_start_time_seconds"}
UNITS = {"s", "cps", "cpm", "Bps", "bytes", "percentunit", "short", "none"}
ONLY_IN_THE_REFERENCE = {
    # Counted and logged at once; the log names the events, fields and numbers.
    "stream_merge_ties_total",
    "stream_merge_events_with_unknown_fields_total",
    "stream_merge_unknown_delta_metrics_total",
    "stream_merge_topic_negative_skew_total",
    "stream_merge_topic_mirror_failures_total",
    # Details of what is on a panel.
    "stream_merge_attempts_total",
    "stream_merge_source_rows_total",
    "stream_merge_source_rows_first_scan_total",
    "stream_merge_source_rows_second_scan_total",
    "stream_merge_target_rows_matched_updated_total",
    "stream_merge_target_rows_matched_deleted_total",
    "stream_merge_target_rows_not_matched_by_source_updated_total",
    "stream_merge_target_rows_not_matched_by_source_deleted_total",
    "stream_merge_target_bytes_before_skipping_total",
    "stream_merge_target_bytes_after_skipping_total",
    "stream_merge_target_partitions_after_skipping_total",
    "stream_merge_target_partitions_added_to_total",
    "stream_merge_target_partitions_removed_from_total",
    "stream_merge_target_change_files_added_total",
    "stream_merge_target_deletion_vectors_removed_total",
    "stream_merge_maintenance_added_files_total",
}
PANELS = [(board, panel) for board in BOARDS for panel in panels(board)]
EXPRESSIONS = sorted(
    {target["expr"] for _, panel in PANELS for target in panel["targets"]}
    | {annotation["expr"] for board in BOARDS for annotation in dashboard(board)["annotations"]["list"]}
)


def parsed(expression: str) -> promql_parser.Expr:
    return promql_parser.parse(asked(expression, scrape_seconds=15, range_seconds=3600))


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
    for expression in EXPRESSIONS:
        for node, around in nodes(parsed(expression)):
            if isinstance(node, promql_parser.VectorSelector) and node.name not in OF_PROMETHEUS:
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


def test_generating_the_dashboards_again_changes_nothing() -> None:
    """The files in the repository are the generator's output; edit generate.py, then run `make dashboard`."""
    written = {path.name: path.read_text(encoding="utf-8") for path in (GRAFANA / "dashboards").iterdir()}

    assert written == generate.rendered() == generate.rendered()


def test_every_metric_label_and_value_of_a_query_is_exported() -> None:
    """A renamed metric leaves no panel silently empty."""
    series = exported()
    values = {instrument.name: set(instrument.values) for instrument in CATALOGUE if instrument.label}
    for expression, selector, _ in selectors():
        assert selector.name in series, expression
        for matcher in selector.matchers.matchers:
            assert matcher.name in series[selector.name] | SCRAPE_LABELS, expression
            if matcher.name not in {"job", "query", "target"}:
                assert matcher.value in values[selector.name], expression


def test_every_label_that_a_query_groups_by_is_exported() -> None:
    series = exported()
    for expression in EXPRESSIONS:
        found = [node for node, _ in nodes(parsed(expression))]
        names = {node.name or "" for node in found if isinstance(node, promql_parser.VectorSelector)}
        known = set().union(*(series.get(name, {"severity", "alertname", "query", "topic"}) for name in names))
        for node in found:
            if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
                assert set(node.modifier.labels) <= known | SCRAPE_LABELS, expression


def test_every_legend_names_a_label_that_its_query_keeps() -> None:
    for _, panel in PANELS:
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), target["expr"]


def test_every_metric_is_on_a_panel_or_in_an_alert_or_left_out_by_name() -> None:
    """What nobody looks at is not on a dashboard; what is new is not forgotten."""
    shown = {base_name(selector.name or "") for _, selector, _ in selectors()}
    alarming = " ".join(rule.expression for rule in (*alerts.RECORDS, *alerts.ALERTS))
    known = {instrument.name for instrument in CATALOGUE}

    assert {name for name in known - shown if name not in alarming} == ONLY_IN_THE_REFERENCE


def test_every_query_is_of_the_chosen_job_query_and_target() -> None:
    """One of each but on the overview, whose lines and rows keep the job: two may have queries of one name."""
    for board, panel in PANELS:
        operator = "=~" if board == "overview" else "="
        for target in panel["targets"]:
            chosen = ", ".join(f'{name}{operator}"${name}"' for name in ("job", "query", "target"))
            selected = re.findall(r"(stream_merge_\w+)\{(.*?)\}", target["expr"])
            assert [name for name, matchers in selected if not matchers.startswith(chosen)] == []
            if board == "overview" and selected:
                assert all("job, query, target" in by for by in re.findall(r"by \(([^)]*)\)", target["expr"]))


def test_counters_are_only_read_as_rates_and_before_sums() -> None:
    """The level of a counter means nothing: it restarts with the process. Gauges are never rated."""
    gauges = {instrument.name for instrument in CATALOGUE if instrument.type == "gauge"}
    for expression, selector, around in selectors():
        is_rated = bool(around) and around[-1] in {"rate", "increase"}
        assert is_rated == (selector.name not in gauges), expression
    for expression in EXPRESSIONS:
        assert set(re.findall(r"rate\(.*?\[(.*?)\]", expression)) <= {"$__rate_interval", "5m"}


def test_every_panel_says_what_it_shows_and_in_which_unit() -> None:
    source = {"type": "prometheus", "uid": "${datasource}"}
    for board in BOARDS:
        titles = [panel["title"] for panel in panels(board)]
        assert len(titles) == len(set(titles))
    for _, panel in PANELS:
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGHIJ")[: len(panel["targets"])]
        assert [part["datasource"] for part in (panel, *panel["targets"])] == [source] * (1 + len(panel["targets"]))


def test_limits_are_those_of_the_alerts() -> None:
    """A panel turns orange where an alert is near, and nowhere else."""
    expressions = {alert.name: alert.expression for alert in (*alerts.ALERTS, *alerts.RECORDS)}
    expressions["FreshnessBurnsFast"] = expressions[f"{alerts.STALE}:bool"]
    limits = [*generate.LIMITS.items(), ("DeletionVectorDebt", generate.AWAITING_FILES)]

    assert [name for name, limit in limits if not re.search(rf"> (bool )?{limit}\b", expressions[name])] == []


@pytest.mark.parametrize("board", BOARDS)
def test_panels_have_ids_of_their_own_and_do_not_overlap(board: str) -> None:
    everything = dashboard(board)["panels"]
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


@pytest.mark.parametrize("board", BOARDS)
def test_a_dashboard_can_be_provisioned_anywhere_and_keeps_variables_on_the_way_to_others(board: str) -> None:
    """A stable uid, no id of somebody's database, nothing editable, a schema that Grafana 11 to 13 load."""
    loaded = dashboard(board)
    others, runbook = loaded["links"]

    assert loaded["uid"] == f"stream-merge-{board}"
    assert (loaded["editable"], loaded["schemaVersion"], "id" in loaded) == (False, 42, False)
    assert (others["tags"], others["includeVars"], others["keepTime"]) == (loaded["tags"], True, True)
    assert runbook["url"] == "${runbook}"
    variables = {variable["name"]: variable for variable in loaded["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "query", "target", "runbook"]
    assert variables["runbook"]["query"] == alerts.RUNBOOK
    for name in ("job", "query", "target"):
        several = board == "overview"
        assert (variables[name]["multi"], variables[name]["includeAll"]) == (several, several)
        assert variables[name].get("allValue") == (".+" if several else None)
        found = re.fullmatch(
            r"label_values\((stream_merge_batches_total.*), (\w+)\)", variables[name]["query"]["query"]
        )
        assert found is not None
        assert found[2] == name
        parsed(found[1])


def test_a_row_of_the_overview_opens_its_query() -> None:
    queries = panels("overview")[0]
    (link,) = queries["fieldConfig"]["defaults"]["links"]

    assert link["url"].startswith("/d/stream-merge-query?")
    assert set(re.findall(r"var-(\w+)=\$\{__data.fields.(\w+):", link["url"])) == {
        (name, name) for name in ("job", "query", "target")
    }
    assert {"${__url_time_range}", "${datasource:queryparam}", "${runbook:queryparam}"} <= set(
        re.split("[?&]", link["url"])
    )


def test_provisioning_gives_the_data_source_a_fixed_uid_and_an_interval() -> None:
    """Without the scrape interval Grafana computes $__rate_interval from a guess."""
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]

    assert (source["uid"], source["type"]) == ("prometheus", "prometheus")
    assert re.fullmatch(r"\d+s", source["jsonData"]["timeInterval"])


def test_provisioning_does_not_let_the_user_interface_change_the_dashboards() -> None:
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/stream-merge.yaml").read_text())["providers"]

    assert (provider["type"], provider["allowUiUpdates"]) == ("file", False)
