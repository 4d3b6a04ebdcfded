"""Write the Grafana dashboards in `dashboards/`: `make dashboard`.

overview    one row per query: what is wrong, and since when
query       one query: can it keep up, is anything lost or broken
merge       one query's merges: engine, other writers, reads, writes, debt
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

import alerts
from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    DataSourceRef,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataTransformerConfig,
    DynamicConfigValue,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMapping,
    ValueMappingResult,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat, QueryEditorMode

FOLDER = Path(__file__).parent / "dashboards"
TAG = "stream-merge"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")

Panel: TypeAlias = "stat.Panel | table.Panel | timeseries.Panel"
P = TypeVar("P", stat.Panel, table.Panel, timeseries.Panel)
Row: TypeAlias = "tuple[str, list[Panel]]"
Query: TypeAlias = "tuple[str, str]"
"""Legend and PromQL."""

SINK = "job, query, target"
TOPIC = "job, query, topic"
SINK_LEGEND = "{{query}} → {{target}}"
CHOSEN = 'job=~"$job", query=~"$query", target=~"$target"'
"""On the overview several of each may be chosen; elsewhere one is, and `=~` becomes `=`."""

LIMITS: Mapping[str, float] = {
    "FreshnessBurnsFast": alerts.FRESH_SECONDS,
    "LagGrows": 1000,
    "BrokerSilent": 30,
    "QuarantineGrows": 0.1,
    "DeletionVectorDebt": 0.3,
}
"""Alert -> limit in its expression at which a panel changes colour; a test compares them."""
AWAITING_FILES = 64
"""The limit of `DeletionVectorDebt` for files."""
SOME = 0.5
"""What counts as more than none: `increase` extrapolates, so it returns no whole numbers."""
COPIES, MANY_COPIES = 10, 100
"""Rows copied per changed row: merges that rewrite files are at some; at hundreds they cost more than they change."""

STATES: Mapping[int, tuple[str, str]] = {
    -1: ("no commit yet", "blue"),
    0: ("running", "green"),
    1: ("behind", "orange"),
    2: ("batches fail", "orange"),
    3: ("ended", "red"),
    4: ("gone", "red"),
}
ENGINES = {"driver": "green", "spark": "orange"}


def mapping(results: Mapping[int, tuple[str, str]] | Mapping[str, tuple[str, str]]) -> list[ValueMapping]:
    """Text and colour of each value."""
    return [ValueMap({str(value): ValueMappingResult(text, colour) for value, (text, colour) in results.items()})]


MAPPINGS = {
    "State": mapping(STATES),
    "Merged by": mapping({engine: (engine, colour) for engine, colour in ENGINES.items()}),
}


def series(name: str, *matchers: str) -> str:
    """One metric of what is chosen."""
    return f"stream_merge_{name}{{{', '.join((CHOSEN, *matchers))}}}"


def rate(name: str, by: str = SINK, *matchers: str, over: str = "$__rate_interval") -> str:
    """A counter per second."""
    return f"sum by ({by}) (rate({series(name, *matchers)}[{over}]))"


def per_minute(name: str, by: str = SINK, *matchers: str) -> str:
    """A counter of rare things per minute."""
    return f"60 * {rate(name, by, *matchers)}"


def in_range(name: str, *matchers: str, by: str = SINK, over: str = "$__range") -> str:
    """A counter's increase over the time shown."""
    return f"sum by ({by}) (increase({series(name, *matchers)}[{over}]))"


def latest(name: str, by: str = SINK) -> str:
    """A gauge, of the newest process."""
    return f"max by ({by}) ({series(name)})"


def ratio(part: str, whole: str) -> str:
    """A quotient; no value, rather than infinity, where there is nothing to divide by."""
    return f"{part} / ({whole} > 0)"


def per_merge(seconds: str) -> str:
    """Mean seconds over all merges, also over those without that step."""
    return ratio(rate(seconds), rate("merge_execution_seconds_count"))


def quantile(q: float, histogram: str) -> str:
    """A quantile, estimated from the buckets of a histogram."""
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', f'le, {SINK}')})"


OUTCOME_FAILED, QUARANTINED, SCHEMA_CHANGE = 'outcome="failed"', 'fate="quarantined"', 'refusal="schema_change"'
ACTIONS = ("inserted", "updated", "deleted")
CHANGED = " + ".join(in_range(f"target_rows_{action}_total") for action in ACTIONS)
LAG = f"sum by ({SINK}) ({series('topic_lag_events')})"
LAST_COMMIT = series("last_commit_timestamp_seconds")
COMMIT_AGE = f"time() - max by ({SINK}) ({LAST_COMMIT} > 0)"
NEWEST_AGE = f"time() - ({series('topic_newest_event_timestamp_seconds')} > 0)"
BEHIND = f"max by ({SINK}) (({NEWEST_AGE}) * (min_over_time({series('topic_lag_events')}[5m]) > bool 0))"
BEHIND_TEXT = "Behind by: age of the newest merged event if a topic has had lag for five minutes, else 0."
FIRING = 'max by (severity, alertname, query, topic) (ALERTS{alertstate="firing", job=~"$job"})'
# The first state that holds: `or` takes from its right side what its left side lacks.
STATE = " or ".join(
    (
        f"4 + 0 * (max by ({SINK}) (last_over_time({LAST_COMMIT}[$__range])) unless max by ({SINK}) ({LAST_COMMIT}))",
        f"3 * ({latest('query_failed')} > 0)",
        f"2 + 0 * ({in_range('batches_total', OUTCOME_FAILED, over='10m')} > {SOME})",
        f"1 + 0 * ({BEHIND} > {alerts.FRESH_SECONDS})",
        f"0 * max by ({SINK}) ({LAST_COMMIT} > 0)",
        f"-1 + 0 * max by ({SINK}) ({LAST_COMMIT})",
    )
)
DETAILS = (
    "Open the query",
    "/d/stream-merge-query?${datasource:queryparam}&${runbook:queryparam}&${__url_time_range}"
    + "".join(f"&var-{name}=${{__data.fields.{name}:percentencode}}" for name in SINK.split(", ")),
)
"""Title and address of a link."""


def colours(*limits: float) -> dashboard.ThresholdsConfig:
    """Green below the first limit, orange from it on, red from the second."""
    steps = [Threshold(value=None, color="green")]
    steps += [Threshold(value=limit, color=colour) for limit, colour in zip(limits, ("orange", "red"), strict=False)]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def panel(panel: P, title: str, unit: str, description: str, queries: Sequence[Query]) -> P:
    """Title, unit and queries, which the SDK leaves without `refId` and data source."""
    panel.title(title).description(description).unit(unit).datasource(SOURCE)
    for ref, (legend, expression) in zip("ABCDEFGHIJ", queries, strict=False):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(ref)
        query.datasource(SOURCE).editor_mode(QueryEditorMode.CODE)
        if isinstance(panel, table.Panel):
            query.format(PromQueryFormat.TABLE)
        panel.with_target(query.range() if isinstance(panel, timeseries.Panel) else query.instant())
    return panel


def lines(title: str, unit: str, description: str, *queries: Query, limit: float | None = None) -> timeseries.Panel:
    """Lines over time; a limit is a dashed one."""
    graph = panel(timeseries.Panel(), title, unit, description, queries)
    graph.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC))
    # A minute's rates: a batch counts when it ends, so shorter ones are combs.
    graph.interval("1m").span(8).height(8).min(0).line_width(1).show_points(VisibilityMode.NEVER)
    legend = common.VizLegendOptions().show_legend(True).display_mode(LegendDisplayMode.LIST)
    graph.legend(legend.placement(LegendPlacement.BOTTOM))
    graph.tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    if limit is not None:
        graph.thresholds(colours(limit))
        graph.thresholds_style(common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED))
    return graph


def areas(title: str, unit: str, description: str, *queries: Query) -> timeseries.Panel:
    """Stacked areas over time."""
    stacking = common.StackingConfig().group("A").mode(StackingMode.NORMAL)
    return lines(title, unit, description, *queries).stacking(stacking).fill_opacity(40)


def number(title: str, unit: str, description: str, query: str, *limits: float) -> stat.Panel:
    """One number of now."""
    number = panel(stat.Panel(), title, unit, description, [("", query)])
    number.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
    number.span(4).height(4).no_value("no data").thresholds(colours(*limits)).mappings(MAPPINGS.get(title, []))
    return number.color_mode(BigValueColorMode.VALUE).graph_mode(BigValueGraphMode.NONE)


class Column(NamedTuple):
    """A query's column in a table."""

    title: str
    expression: str
    unit: str = "none"
    limits: tuple[float, ...] = ()
    label: str | None = None
    """Shown instead of the value."""


def rows(title: str, description: str, link: tuple[str, str], *columns: Column) -> table.Panel:
    """A table with a row for what has the same labels, and a link on each cell."""
    rows = panel(table.Panel(), title, "none", description, [(c.title, c.expression) for c in columns])
    rows.height(8).data_links([dashboard.DashboardLink(link[0]).url(link[1])])
    values = [f"Value #{ref}" if len(columns) > 1 else "Value" for ref in "ABCDEFGHIJ"[: len(columns)]]
    names = {column.label or value: column.title for value, column in zip(values, columns, strict=True)}
    hidden = ["Time", *(value for value, column in zip(values, columns, strict=True) if column.label)]
    rows.with_transformation(DataTransformerConfig(id_val="merge", options={}))
    options = {"excludeByName": dict.fromkeys(hidden, True), "renameByName": names}
    rows.with_transformation(DataTransformerConfig(id_val="organize", options=options))
    for column in columns:
        looks: dict[str, object] = {"unit": column.unit, "custom.cellOptions": {"type": "color-text"}}
        if column.limits:
            looks |= {"thresholds": colours(*column.limits).build(), "color": {"mode": "thresholds"}}
        else:
            looks |= {"mappings": MAPPINGS.get(column.title, []), "color": {"mode": "fixed", "fixedColor": "text"}}
        rows.override_by_name(column.title, [DynamicConfigValue(name, value) for name, value in looks.items()])
    return rows


# Panels in the order in which one asks at night.
# fmt: off
OVERVIEW: list[Row] = [
    ("What is wrong?", [
        rows("Queries", "One row per query and target; a click opens the query. The last four columns: in the time "
             f"shown. {BEHIND_TEXT}", DETAILS,
             Column("State", STATE),
             Column("Lag", LAG, "short", (LIMITS["LagGrows"],)),
             Column("Behind by", BEHIND, "s", (LIMITS["FreshnessBurnsFast"],)),
             Column("Last commit", COMMIT_AGE, "s"),
             Column("Failed batches", in_range("batches_total", OUTCOME_FAILED), "short", (SOME,)),
             Column("Quarantined", ratio(in_range("events_total", QUARANTINED), in_range("events_received_total")),
                    "percentunit", (1e-9, LIMITS["QuarantineGrows"])),
             Column("Merged by", f"topk by ({SINK}) (1, {in_range('merges_total', by=f'{SINK}, engine')} > 0)",
                    label="engine"),
             Column("Copied per changed row", ratio(in_range("target_rows_copied_total"), f"({CHANGED})"), "short",
                    (COPIES, MANY_COPIES))).span(24).height(6),
    ]),
    ("Since when?", [
        rows("Firing alerts", "A click opens the runbook. Empty: none fires, or grafana/alerts.yaml is not loaded.",
             ("Open the runbook", "${runbook}"),
             Column("Firing", FIRING, label="alertname")).span(8),
        lines("Lag", "short", "Offsets between the end of the topics and what has been merged.",
              (SINK_LEGEND, LAG), limit=LIMITS["LagGrows"]),
        lines("Delay", "s", "From the source's commit of a batch's newest event to the table's.",
              (SINK_LEGEND, latest("topic_delay_seconds")), limit=LIMITS["FreshnessBurnsFast"]),
    ]),
    ("Does it get work done?", [
        lines("Events", "cps", "Change events merged.", (SINK_LEGEND, rate("events_received_total"))),
        lines("Busy", "percentunit", "Share of five minutes; a batch counts when it ends. 100 %: no more events fit.",
              (SINK_LEGEND, rate("batch_duration_seconds_sum", over="5m"))),
        lines("Batch duration, p99", "s", "99th percentile, whatever the outcome.",
              (SINK_LEGEND, quantile(0.99, "batch_duration_seconds"))),
    ]),
]

QUERY: list[Row] = [
    ("How is it?", [
        number("State", "none", "As on the overview.", STATE),
        number("Lag", "short", "Offsets to the end of the topics.", LAG, LIMITS["LagGrows"]),
        number("Behind by", "s", BEHIND_TEXT, BEHIND, LIMITS["FreshnessBurnsFast"]),
        number("Last commit", "s", "Time since; grows also while the source is idle.", COMMIT_AGE),
        number("Table version", "none", "Of the last commit.", latest("last_committed_version")),
        number("Broker's last answer", "s", "Time since the broker answered a question about a topic.",
               f"time() - min by ({SINK}) ({series('topic_polled_timestamp_seconds')} > 0)", LIMITS["BrokerSilent"]),
    ]),
    ("Can it keep up?", [
        lines("Lag by topic", "short", "Offsets between the end of the topic and what has been merged.",
              ("{{topic}}", latest("topic_lag_events", TOPIC)), limit=LIMITS["LagGrows"]),
        lines("Age of the newest event", "s", "Delay: from the source's commit to the table's. Newest event: its "
              "age now; grows also while the source is idle.",
              ("delay {{topic}}", latest("topic_delay_seconds", TOPIC)),
              ("newest event {{topic}}", f"max by ({TOPIC}) ({NEWEST_AGE})"), limit=LIMITS["FreshnessBurnsFast"]),
        lines("Batch duration", "s", "Wall time, whatever the outcome.",
              ("p50", quantile(0.5, "batch_duration_seconds")), ("p99", quantile(0.99, "batch_duration_seconds"))),
        areas("Where the time goes", "percentunit", "Share of five minutes; the rest is idle. read: fetch and decode.",
              ("{{phase}}", rate("phase_seconds_total", "phase", over="5m"))),
        areas("Batches by outcome", "cpm", "no_change: nothing to change. skipped_duplicate: applied before a restart. "
              "failed: is delivered again.", ("{{outcome}}", per_minute("batches_total", "outcome"))),
        areas("Events by fate", "cps", "Every event has one. collapsed: its key has a newer event in the batch. "
              "stale: older than a remembered delete. unaffected: changed nothing, or older than the row.",
              ("{{fate}}", rate("events_total", "fate"))),
    ]),
    ("Is anything lost or broken?", [
        areas("Quarantined events by reason", "cpm", "An event with several reasons counts once for each.",
              ("{{reason}}", per_minute("quarantined_events_total", "reason"))),
        areas("Records by kind", "cps", "filtered: of the connector, not a change. redundant: repeats a delete.",
              ("{{kind}}", rate("topic_records_total", "kind"))),
        lines("Offsets without an event", "cpm", "Unexpected or lost offsets are missing changes; gaps belong to "
              "compacted and transactional topics.",
              ("gaps {{topic}}", per_minute("topic_gaps_total", TOPIC)),
              ("unexpected {{topic}}", per_minute("topic_unexpected_gaps_total", TOPIC)),
              ("lost {{topic}}", per_minute("topic_lost_offsets_total", TOPIC))),
    ]),
]

MERGE: list[Row] = [
    ("Which engine, and why?", [
        areas("Merges by engine", "cpm", "driver: tenths of seconds. spark: seconds.",
              ("{{engine}}", per_minute("merges_total", "engine"))),
        areas("Why Spark", "cpm", "Batches that went to Spark, by reason. cost: Spark was expected to be faster.",
              ("{{refusal}}", per_minute("driver_refusals_total", "refusal"))),
        lines("Steps of a merge", "s", "Mean time of a MERGE up to its commit, and of Delta's steps in it.",
              ("p99", quantile(0.99, "merge_execution_seconds")), ("mean", per_merge("merge_execution_seconds_sum")),
              ("materialize source", per_merge("merge_materialize_source_seconds_total")),
              ("scan", per_merge("merge_scan_seconds_total")),
              ("rewrite", per_merge("merge_rewrite_seconds_total"))),
    ]),
    ("Do other writers interfere?", [
        areas("Conflicts", "cpm", "Commits lost to another writer, by Delta's exception class.",
              ("{{conflict}}", per_minute("conflicts_total", "conflict"))),
        lines("Waiting between attempts", "percentunit", "Share of the wall time in backoff.",
              ("backoff", rate("backoff_seconds_total"))),
    ]),
    ("What does a merge read and write?", [
        lines("Files left to scan", "percentunit", "After pruning and skipping. Near 100 %: the keys are in all files.",
              ("files", ratio(rate("target_files_after_skipping_total"), rate("target_files_before_skipping_total")))),
        areas("Rows written", "cps", "copied: unchanged rows rewritten because they share a file with a changed one.",
              *((action, rate(f"target_rows_{action}_total")) for action in (*ACTIONS, "copied"))),
        lines("Bytes", "Bps", "Of data files added and removed, and of files for the change data feed.",
              ("added", rate("target_added_bytes_total")), ("removed", rate("target_removed_bytes_total")),
              ("change data feed", rate("target_change_file_bytes_total"))),
    ]),
    ("Does debt pile up?", [
        lines("Rows marked as deleted", "percentunit", "Share of the rows in the files, which readers skip.",
              ("deleted", latest("target_deleted_rows_ratio")), limit=LIMITS["DeletionVectorDebt"]),
        lines("Files awaiting compaction", "short", "Files that compaction would rewrite.",
              ("files", latest("target_files_awaiting_compaction")), limit=AWAITING_FILES),
        lines("Files and deletion vectors", "cpm", "What merges add, replace, remove, and maintenance compacts.",
              ("files added", per_minute("target_files_added_total")),
              ("files removed", per_minute("target_files_removed_total")),
              ("files compacted", per_minute("maintenance_removed_files_total")),
              ("vectors added", per_minute("target_deletion_vectors_added_total")),
              ("vectors replaced", per_minute("target_deletion_vectors_updated_total"))),
        lines("Size of an added file", "bytes", "Mean. Small files slow down every later read and merge.",
              ("mean", ratio(rate("target_added_bytes_total"), rate("target_files_added_total")))),
        areas("Maintenance runs", "cpm", "no_memory: compaction in the driver. lost: another writer was faster.",
              ("{{maintenance}}", per_minute("maintenance_total", "maintenance"))),
    ]),
]
# fmt: on


def variable(name: str, matchers: str, *, several: bool) -> dashboard.QueryVariable:
    """A choice among the values of a label, given the choices before it."""
    asked = f"label_values(stream_merge_batches_total{matchers}, {name})"
    variable = dashboard.QueryVariable(name).label(name.capitalize()).datasource(SOURCE).definition(asked)
    variable.query({"query": asked, "refId": name}).refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    variable.sort(VariableSort.ALPHABETICAL_ASC).multi(several).include_all(several)
    return variable.all_value(".+").current(VariableOption(text=["All"], value=["$__all"])) if several else variable


def annotation(name: str, colour: str, expression: str, text: str) -> dashboard.AnnotationQuery:
    """Vertical lines on every graph."""
    marks = dashboard.AnnotationQuery().name(name).datasource(SOURCE).icon_color(colour).expr(expression)
    return marks.title_format(name).text_format(text).use_value_for_time(name == "Restarts").placement("")


def text(board: str, title: str, description: str, rows: list[Row]) -> str:
    """A dashboard's file."""
    several = board == "overview"
    built = dashboard.Dashboard(title).uid(f"{TAG}-{board}").description(description).tags([TAG]).readonly()
    built.tooltip(DashboardCursorSync.CROSSHAIR).refresh("30s").time("now-1h", "now").version(1)
    # Without a placement of its own a link or annotation hides in a menu.
    boards = dashboard.DashboardLink(TAG).type(DashboardLinkType.DASHBOARDS).tags([TAG])
    built.link(boards.include_vars(True).keep_time(True).placement(""))
    runbook = dashboard.DashboardLink("Runbook").type(DashboardLinkType.LINK).url("${runbook}").icon("doc")
    built.link(runbook.placement(""))
    datasource = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    built.with_variable(datasource.current(VariableOption(text="prometheus", value="prometheus")))
    for name, matchers in (("job", ""), ("query", '{job=~"$job"}'), ("target", '{job=~"$job", query=~"$query"}')):
        built.with_variable(variable(name, matchers, several=several))
    built.with_variable(dashboard.TextBoxVariable("runbook").label("Runbook").default_value(alerts.RUNBOOK))
    started = 'process_start_time_seconds{job=~"$job"} * 1000'
    built.annotation(annotation("Restarts", "red", started, "{{instance}} started"))
    changed = f"{in_range('driver_refusals_total', SCHEMA_CHANGE, over='2m')} > 0"
    built.annotation(annotation("Schema changes", "blue", changed, "columns of {{target}} change"))
    for heading, panels in rows:
        built.with_row(dashboard.Row(heading))
        for panel in panels:
            built.with_panel(panel)
    model = built.build()
    for number, placed in enumerate(model.panels or [], start=1):
        placed.id_val = number
    written = JSONEncoder(indent=2, ensure_ascii=False).encode(model) + "\n"
    return written if several else written.replace('=~\\"$', '=\\"$')


def rendered() -> dict[str, str]:
    """Name and text of each dashboard's file."""
    return {
        "overview.json": text("overview", "stream_merge: overview", "One row per query, and what is wrong.", OVERVIEW),
        "query.json": text("query", "stream_merge: query", "Whether a query keeps up and loses nothing.", QUERY),
        "merge.json": text("merge", "stream_merge: merge", "What a query's merges read, write and leave.", MERGE),
    }


if __name__ == "__main__":
    for name, content in rendered().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
