"""Write the Grafana dashboard `stream-merge.json` from the panels below.

python grafana/generate.py              write the dashboard
python grafana/generate.py --markdown   print the table of metrics for docs/reference/metrics.md
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from stream_merge.metrics.catalogue import CATALOGUE

DASHBOARD = Path(__file__).parent / "stream-merge.json"

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
Kind: TypeAlias = Literal["timeseries", "stat"]
Look: TypeAlias = Literal["lines", "stacked", "bars"]

WIDTH = 24
SINK = "job, query, target"
TOPIC = "job, query, topic"
"""Two jobs may have queries of one name: neither may answer for the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One picture and the questions it answers."""

    title: str
    description: str
    unit: str
    """Grafana's id of the unit; cps is counts per second, cpm counts per minute."""
    queries: tuple[tuple[str, str], ...]
    """Legend and PromQL."""
    kind: Kind = "timeseries"
    look: Look = "lines"
    width: int = 8
    height: int = 8
    warn_from: float | None = None
    """Turns a stat orange from this value on."""
    no_value: str | None = None
    """What a stat says instead of "No data"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


def series(name: str, *matchers: str) -> str:
    """One metric, filtered by the variables of the dashboard."""
    chosen = ('job=~"$job"', 'query=~"$query"', 'target=~"$target"', *matchers)
    return f"stream_merge_{name}{{{', '.join(chosen)}}}"


def rate(name: str, by: str = SINK, *matchers: str) -> str:
    """A counter per second."""
    return f"sum by ({by}) (rate({series(name, *matchers)}[$__rate_interval]))"


def per_minute(name: str, by: str = SINK, *matchers: str) -> str:
    """A counter of rare things per minute."""
    return f"60 * {rate(name, by, *matchers)}"


def ratio(part: str, whole: str) -> str:
    """A quotient that has no value, rather than infinity, where there is nothing to divide by."""
    return f"{part} / ({whole} > 0)"


def quantile(q: float, histogram: str) -> str:
    """A quantile, estimated from the buckets of a histogram."""
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', f'le, {SINK}')})"


def mean(histogram: str) -> str:
    """The mean of a histogram's observations."""
    return ratio(rate(f"{histogram}_sum"), rate(f"{histogram}_count"))


def part_of_merge(histogram: str) -> str:
    """The mean over all merges, also over those without an observation: a step that never runs is at 0, not absent."""
    return ratio(rate(f"{histogram}_sum"), rate("merge_execution_seconds_count"))


LAST_COMMIT = f"({series('last_commit_timestamp_seconds')} > 0)"
"""When each process committed last; without the processes that have not committed yet."""

COMMIT_AGE = f"time() - max by ({SINK}) {LAST_COMMIT}"
CHANGED_ROWS = " + ".join(rate(f"target_rows_{action}_total") for action in ("inserted", "updated", "deleted"))
SINK_LEGEND = "{{job}}: {{query}} → {{target}}"


def per_topic(what: str) -> str:
    """Legend of a series that exists once per topic of a job."""
    return f"{what}: {{{{job}}}} {{{{query}}}} {{{{topic}}}}"


def per_sink(what: str) -> str:
    """Legend of a series that exists once per sink."""
    return f"{what}: {SINK_LEGEND}"


ROWS = (
    Row(
        title="Overview",
        panels=(
            Panel(
                title="Time since the last commit",
                description="How long ago each sink last committed to its target. Grows while a query is stuck, and "
                "also while its source is silent.",
                unit="s",
                kind="stat",
                width=6,
                height=5,
                no_value="no commit yet",
                queries=((SINK_LEGEND, COMMIT_AGE),),
            ),
            Panel(
                title="Last committed version",
                description="Delta version of the target that the last batch with a commit made; a query's first "
                "one commits also where it changes no row.",
                unit="none",
                kind="stat",
                width=6,
                height=5,
                no_value="no commit yet",
                queries=((SINK_LEGEND, f"max by ({SINK}) ({series('last_committed_version')} and {LAST_COMMIT})"),),
            ),
            Panel(
                title="Events per second",
                description="Change events in the merged micro-batches, over everything selected above.",
                unit="cps",
                kind="stat",
                width=6,
                height=5,
                queries=(("events", f"sum(rate({series('events_received_total')}[$__rate_interval]))"),),
            ),
            Panel(
                title="Failed micro-batches per minute",
                description="Calls of the sink that raised. The streaming query fails with them; Spark delivers the "
                "batch again after a restart.",
                unit="cpm",
                kind="stat",
                width=6,
                height=5,
                warn_from=0.001,
                queries=(
                    (
                        "failed",
                        "60 * sum(rate(" + series("batches_total", 'outcome="failed"') + "[$__rate_interval]))",
                    ),
                ),
            ),
            Panel(
                title="Queries ended with an error",
                description="Queries of a job that have ended with an error while the job's other queries go on: what "
                "they merge stands still until somebody has done what the log says.",
                unit="none",
                kind="stat",
                width=6,
                height=5,
                warn_from=1,
                queries=(("ended", f"sum({series('query_failed')})"),),
            ),
            Panel(
                title="Micro-batches by outcome",
                description="committed: rows changed. no_change: nothing to change. skipped_duplicate: the batch had "
                "been applied before a restart. empty: no events. failed: the call raised.",
                unit="cpm",
                look="stacked",
                queries=(("{{outcome}}", per_minute("batches_total", "outcome")),),
            ),
            Panel(
                title="Micro-batch duration",
                description="Wall time of a call of the sink, whatever its outcome: median, 99th percentile and mean.",
                unit="s",
                queries=(
                    (per_sink("p50"), quantile(0.5, "batch_duration_seconds")),
                    (per_sink("p99"), quantile(0.99, "batch_duration_seconds")),
                    (per_sink("mean"), mean("batch_duration_seconds")),
                ),
            ),
            Panel(
                title="Events received",
                description="Change events in the merged micro-batches.",
                unit="cps",
                queries=((SINK_LEGEND, rate("events_received_total")),),
            ),
        ),
    ),
    Row(
        title="What became of the events",
        panels=(
            Panel(
                title="Events by fate",
                description="Every received event has exactly one fate. collapsed: an older event of a key in the "
                "same batch. stale: older than a remembered delete. unaffected: changed nothing, or "
                "older than the row.",
                unit="cps",
                look="stacked",
                width=12,
                queries=(("{{fate}}", rate("events_total", "fate")),),
            ),
            Panel(
                title="Share of the events that changed no row",
                description="Parts of the received events that were quarantined, collapsed, stale or unaffected.",
                unit="percentunit",
                look="stacked",
                width=12,
                queries=(
                    (
                        "{{fate}}",
                        rate("events_total", "fate", 'fate=~"quarantined|collapsed|stale|unaffected"')
                        + " / ignoring (fate) group_left () (sum(rate("
                        + series("events_received_total")
                        + "[$__rate_interval])) > 0)",
                    ),
                ),
            ),
        ),
    ),
    Row(
        title="Where the time goes",
        panels=(
            Panel(
                title="Micro-batch time by phase",
                description="Mean seconds of a micro-batch in each phase; together they are the mean duration.",
                unit="s",
                look="stacked",
                queries=(
                    (
                        "{{phase}}",
                        rate("phase_seconds_total", "phase")
                        + " / ignoring (phase) group_left () (sum(rate("
                        + series("batch_duration_seconds_count")
                        + "[$__rate_interval])) > 0)",
                    ),
                ),
            ),
            Panel(
                title="Time busy merging",
                description="Part of the wall time that a sink spends in its micro-batches, of a Kafka job with "
                "fetching and decoding. Near 100 % the stream cannot keep up with more.",
                unit="percentunit",
                queries=((SINK_LEGEND, rate("batch_duration_seconds_sum")),),
            ),
            Panel(
                title="Steps of a merge",
                description="Mean time of a MERGE up to its commit and of Delta's own steps in it, 0 for a step that "
                "it did not need; 99th percentile for the whole.",
                unit="s",
                queries=(
                    (per_sink("execution p99"), quantile(0.99, "merge_execution_seconds")),
                    (per_sink("execution"), mean("merge_execution_seconds")),
                    (per_sink("materialise source"), part_of_merge("merge_materialize_source_seconds")),
                    (per_sink("scan"), part_of_merge("merge_scan_seconds")),
                    (per_sink("rewrite"), part_of_merge("merge_rewrite_seconds")),
                ),
            ),
        ),
    ),
    Row(
        title="Topics",
        panels=(
            Panel(
                title="Lag",
                description="Offsets between the end of each topic and what has been merged, asked of the broker also "
                "while a batch runs. Flat and above zero with an old poll: the broker does not answer.",
                unit="none",
                queries=((per_topic("lag"), f"max by ({TOPIC}) ({series('topic_lag_events')})"),),
            ),
            Panel(
                title="Delay",
                description="From the source's commit of the newest event to the table's, of the last micro-batch that "
                "committed, and how old the newest merged event is now. The second one alone grows while the source is "
                "idle.",
                unit="s",
                queries=(
                    (per_topic("delay"), f"max by ({TOPIC}) ({series('topic_delay_seconds')})"),
                    (
                        per_topic("newest event"),
                        f"time() - max by ({TOPIC}) ({series('topic_newest_event_timestamp_seconds')} > 0)",
                    ),
                    (
                        per_topic("last poll"),
                        f"time() - max by ({TOPIC}) ({series('topic_polled_timestamp_seconds')} > 0)",
                    ),
                ),
            ),
            Panel(
                title="Records by kind",
                description="What the records of the topics turned out to be; filtered ones belong to the connector, "
                "redundant ones repeat a delete.",
                unit="cps",
                look="stacked",
                queries=(("{{kind}}", f"sum by (kind) (rate({series('topic_records_total')}[$__rate_interval]))"),),
            ),
            Panel(
                title="Offsets without an event",
                description="Gaps belong to compacted and transactional topics and are unexpected anywhere else; "
                "lost offsets were removed by the broker before they were read.",
                unit="cps",
                queries=(
                    (per_topic("gaps"), f"sum by ({TOPIC}) (rate({series('topic_gaps_total')}[$__rate_interval]))"),
                    (
                        per_topic("unexpected gaps"),
                        f"sum by ({TOPIC}) (rate({series('topic_unexpected_gaps_total')}[$__rate_interval]))",
                    ),
                    (
                        per_topic("lost"),
                        f"sum by ({TOPIC}) (rate({series('topic_lost_offsets_total')}[$__rate_interval]))",
                    ),
                ),
            ),
            Panel(
                title="Clocks and lag tools",
                description="Micro-batches whose newest event has a time in this machine's future, and failures to "
                "write merged offsets to the consumer group that lag tools look at.",
                unit="cps",
                queries=(
                    (
                        per_topic("negative skew"),
                        f"sum by ({TOPIC}) (rate({series('topic_negative_skew_total')}[$__rate_interval]))",
                    ),
                    (
                        per_topic("mirror failures"),
                        f"sum by ({TOPIC}) (rate({series('topic_mirror_failures_total')}[$__rate_interval]))",
                    ),
                ),
            ),
        ),
    ),
    Row(
        title="Engines",
        panels=(
            Panel(
                title="Merges by engine",
                description="Micro-batches by who merged them: in the driver delta-rs (native) and merge-on-read, "
                "else Spark.",
                unit="cpm",
                look="stacked",
                queries=(("{{engine}}", per_minute("merges_total", "engine")),),
            ),
            Panel(
                title="Why not native",
                description="Micro-batches that went to Spark though the sink may choose, by reason.",
                unit="cpm",
                look="bars",
                queries=(("{{refusal}}", per_minute("native_refusals_total", "refusal")),),
            ),
        ),
    ),
    Row(
        title="Conflicts with other writers",
        panels=(
            Panel(
                title="Merge attempts",
                description="Attempts, the first one of a micro-batch included: the distance to the micro-batches is "
                "retries.",
                unit="cpm",
                queries=(
                    (per_sink("attempts"), per_minute("attempts_total")),
                    (per_sink("micro-batches"), per_minute("batches_total")),
                ),
            ),
            Panel(
                title="Lost commits by class",
                description="Optimistic commits lost to another writer, by Delta's exception class.",
                unit="cpm",
                look="bars",
                queries=(("{{conflict}}", per_minute("conflicts_total", "conflict")),),
            ),
            Panel(
                title="Time waiting before another attempt",
                description="Part of the wall time that a sink spends in backoff.",
                unit="percentunit",
                queries=((SINK_LEGEND, rate("backoff_seconds_total")),),
            ),
        ),
    ),
    Row(
        title="Write amplification",
        panels=(
            Panel(
                title="Upkeep",
                description="Rounds of upkeep of a target's files by what became of them: over_budget needs a larger "
                "budget_seconds, behind leaves rounds out until the stream has caught up.",
                unit="cpm",
                look="stacked",
                queries=(("{{upkeep}}", f"60 * ({rate('upkeep_total', 'upkeep')})"),),
            ),
            Panel(
                title="Files put together",
                description="Data files that upkeep took away, and those that it wrote in their place.",
                unit="cpm",
                queries=(
                    ("removed", f"60 * sum(rate({series('upkeep_removed_files_total')}[$__rate_interval]))"),
                    ("added", f"60 * sum(rate({series('upkeep_added_files_total')}[$__rate_interval]))"),
                ),
            ),
            Panel(
                title="Rows marked as deleted",
                description="Share of the rows in a target's files that merges on read have marked and readers skip. A "
                "file of up to 64 MiB is written again when it has lost a quarter of its rows and 1 MiB by that; small "
                "ones of merges on read are put together before, eight of about one size.",
                unit="percentunit",
                queries=((SINK_LEGEND, f"max by ({SINK}) ({series('target_deleted_rows_ratio')})"),),
            ),
            Panel(
                title="Files awaiting compaction",
                description="Files of a target that rounds of compaction would write again, one round after each merge "
                "on read. If it keeps growing, merges come faster than rounds; if compaction is off, something else "
                "has to see to them.",
                unit="short",
                queries=((SINK_LEGEND, f"max by ({SINK}) ({series('target_files_awaiting_compaction')})"),),
            ),
            Panel(
                title="Target rows written",
                description="Rows inserted, updated and deleted, and unchanged rows copied because they share a file "
                "with a changed one.",
                unit="cps",
                look="stacked",
                queries=tuple(
                    (action, f"sum(rate({series(f'target_rows_{action}_total')}[$__rate_interval]))")
                    for action in ("inserted", "updated", "deleted", "copied")
                ),
            ),
            Panel(
                title="Rows copied per row changed",
                description="How many unchanged rows each changed row costs. Deletion vectors bring it to 0, "
                "clustering by the keys brings it down.",
                unit="short",
                queries=((SINK_LEGEND, ratio(rate("target_rows_copied_total"), f"({CHANGED_ROWS})")),),
            ),
            Panel(
                title="Rows by clause of the merge",
                description="Updated and deleted rows by the clause that changed them: matched, or not matched by "
                "source.",
                unit="cps",
                queries=tuple(
                    (f"{clause} {action}", f"sum(rate({series(metric)}[$__rate_interval]))")
                    for clause, action, metric in (
                        ("matched", "updated", "target_rows_matched_updated_total"),
                        ("matched", "deleted", "target_rows_matched_deleted_total"),
                        ("not matched by source", "updated", "target_rows_not_matched_by_source_updated_total"),
                        ("not matched by source", "deleted", "target_rows_not_matched_by_source_deleted_total"),
                    )
                ),
            ),
            Panel(
                title="Bytes added and removed",
                description="Bytes of the data files that merges added to and removed from the target.",
                unit="Bps",
                queries=(
                    (per_sink("added"), rate("target_added_bytes_total")),
                    (per_sink("removed"), rate("target_removed_bytes_total")),
                ),
            ),
            Panel(
                title="Files added and removed",
                description="Data files that merges added to and removed from the target. Many more added than "
                "removed means that OPTIMIZE is due.",
                unit="cpm",
                queries=(
                    (per_sink("added"), per_minute("target_files_added_total")),
                    (per_sink("removed"), per_minute("target_files_removed_total")),
                ),
            ),
            Panel(
                title="Mean size of an added file",
                description="Bytes added per data file added; small files make every later read and merge slower.",
                unit="bytes",
                queries=((SINK_LEGEND, ratio(rate("target_added_bytes_total"), rate("target_files_added_total"))),),
            ),
        ),
    ),
    Row(
        title="What a merge has to read",
        panels=(
            Panel(
                title="Files before and after skipping",
                description="Files of the target per second of merging, and those left to scan after partition "
                "pruning and data skipping.",
                unit="cps",
                queries=(
                    (per_sink("before"), rate("target_files_before_skipping_total")),
                    (per_sink("after"), rate("target_files_after_skipping_total")),
                ),
            ),
            Panel(
                title="Bytes before and after skipping",
                description="Bytes of the target per second of merging, and those left to scan after partition "
                "pruning and data skipping.",
                unit="Bps",
                queries=(
                    (per_sink("before"), rate("target_bytes_before_skipping_total")),
                    (per_sink("after"), rate("target_bytes_after_skipping_total")),
                ),
            ),
            Panel(
                title="Part of the target left after skipping",
                description="Low is good. Near 100 % every merge scans the whole table: its files do not separate "
                "the keys.",
                unit="percentunit",
                queries=(
                    (
                        per_sink("files"),
                        ratio(rate("target_files_after_skipping_total"), rate("target_files_before_skipping_total")),
                    ),
                    (
                        per_sink("bytes"),
                        ratio(rate("target_bytes_after_skipping_total"), rate("target_bytes_before_skipping_total")),
                    ),
                ),
            ),
            Panel(
                title="Partitions",
                description="Partitions that merges by Spark had left to scan, wrote to and removed from; 0 for an "
                "unpartitioned table.",
                unit="cps",
                width=12,
                queries=(
                    (per_sink("after skipping"), rate("target_partitions_after_skipping_total")),
                    (per_sink("added to"), rate("target_partitions_added_to_total")),
                    (per_sink("removed from"), rate("target_partitions_removed_from_total")),
                ),
            ),
            Panel(
                title="Source rows",
                description="Rows the merge read from its source: as the table history reports them, and in each of "
                "the two scans.",
                unit="cps",
                width=12,
                queries=(
                    (per_sink("reported"), rate("source_rows_total")),
                    (per_sink("first scan"), rate("source_rows_first_scan_total")),
                    (per_sink("second scan"), rate("source_rows_second_scan_total")),
                ),
            ),
        ),
    ),
    Row(
        title="Deletion vectors and change data feed",
        panels=(
            Panel(
                title="Deletion vectors",
                description="Deletion vectors added, replaced by larger ones, and removed with their files.",
                unit="cpm",
                queries=(
                    (per_sink("added"), per_minute("target_deletion_vectors_added_total")),
                    (per_sink("updated"), per_minute("target_deletion_vectors_updated_total")),
                    (per_sink("removed"), per_minute("target_deletion_vectors_removed_total")),
                ),
            ),
            Panel(
                title="Change data feed files",
                description="Files that merges added for readers of the change data feed.",
                unit="cpm",
                queries=((SINK_LEGEND, per_minute("target_change_files_added_total")),),
            ),
            Panel(
                title="Change data feed bytes",
                description="Bytes that merges added for readers of the change data feed.",
                unit="Bps",
                queries=((SINK_LEGEND, rate("target_change_file_bytes_total")),),
            ),
        ),
    ),
    Row(
        title="Data that breaks the contract",
        panels=(
            Panel(
                title="Quarantined events by reason",
                description="Events written to the quarantine table, lines and records that cannot be read among them; "
                "an event with several reasons counts once for each.",
                unit="cpm",
                look="bars",
                queries=(("{{reason}}", per_minute("quarantined_events_total", "reason")),),
            ),
            Panel(
                title="Ties",
                description="Events of the same key and sequence that differ: the source's sequence does not order "
                "them, so the merge had to choose.",
                unit="cpm",
                look="bars",
                queries=((SINK_LEGEND, per_minute("ties_total")),),
            ),
            Panel(
                title="Records with unknown fields",
                description="JSON records of files with fields that the given schema lacks: they are left out, and the "
                "log names them.",
                unit="cpm",
                look="bars",
                queries=((SINK_LEGEND, per_minute("events_with_unknown_fields_total")),),
            ),
            Panel(
                title="Numbers of Delta that are not exported",
                description="Not 0: Delta reports numbers that this version of stream_merge does not know; the log "
                "names them.",
                unit="cpm",
                queries=((SINK_LEGEND, per_minute("unknown_delta_metrics_total")),),
            ),
        ),
    ),
    Row(
        title="Commits",
        panels=(
            Panel(
                title="Time since the last commit, over time",
                description="How long ago each sink had last committed; a steady stream draws a low sawtooth.",
                unit="s",
                width=12,
                queries=((SINK_LEGEND, COMMIT_AGE),),
            ),
            Panel(
                title="Committed version, over time",
                description="Version of the target that the last batch with a commit made. A fall is a recreated "
                "table.",
                unit="none",
                width=12,
                queries=((SINK_LEGEND, f"max by ({SINK}) ({series('last_committed_version')} and {LAST_COMMIT})"),),
            ),
        ),
    ),
)

DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> Json:
    """The whole dashboard, as Grafana's classic JSON model."""
    panels: list[Json] = []
    y = 0
    for row in ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": y},
                "panels": [],
            }
        )
        x, y, height = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y, height = 0, y + height, 0
            panels.append(_panel(panel, len(panels) + 1, x, y))
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return {
        "uid": "stream-merge",
        "title": "stream_merge",
        "description": "Change streams merged into Delta tables: fates of the events, time, conflicts, cost.",
        "tags": ["delta", "spark", "stream-merge"],
        "schemaVersion": 42,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "timepicker": {},
        "fiscalYearStartMonth": 0,
        "links": [],
        "annotations": {"list": []},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {"text": "prometheus", "value": "prometheus"},
                    "hide": 0,
                    "includeAll": False,
                    "multi": False,
                    "options": [],
                    "refresh": 1,
                    "regex": "",
                },
                _variable("job", "Job", ""),
                _variable("query", "Query", '{job=~"$job"}'),
                _variable("target", "Target", '{job=~"$job", query=~"$query"}'),
            ]
        },
        "panels": panels,
    }


def _variable(name: str, label: str, matchers: str) -> Json:
    query = f"label_values(stream_merge_batches_total{matchers}, {name})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "current": {"text": ["All"], "value": ["$__all"]},
        "hide": 0,
        "includeAll": True,
        "allValue": ".+",
        "multi": True,
        "options": [],
        "refresh": 2,
        "regex": "",
        "sort": 1,
    }


def _panel(panel: Panel, panel_id: int, x: int, y: int) -> Json:
    defaults: dict[str, Json] = {"unit": panel.unit, "min": 0}
    if panel.no_value is not None:
        defaults["noValue"] = panel.no_value
    if panel.kind == "stat":
        defaults["color"] = {"mode": "thresholds"}
        defaults["thresholds"] = _thresholds(panel.warn_from)
        options: Json = {
            "colorMode": "value",
            "graphMode": "area",
            "justifyMode": "auto",
            "orientation": "auto",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "textMode": "auto",
        }
    else:
        defaults["color"] = {"mode": "palette-classic"}
        defaults["custom"] = _drawing(panel.look)
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "id": panel_id,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": {"h": panel.height, "w": panel.width, "x": x, "y": y},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": DATASOURCE,
                "editorMode": "code",
                "expr": expression,
                "legendFormat": legend,
                "range": True,
            }
            for i, (legend, expression) in enumerate(panel.queries)
        ],
    }


def _thresholds(warn_from: float | None) -> Json:
    steps: list[Json] = [{"color": "green", "value": None}]
    if warn_from is not None:
        steps.append({"color": "orange", "value": warn_from})
    return {"mode": "absolute", "steps": steps}


def _drawing(look: Look) -> Json:
    return {
        "drawStyle": "bars" if look == "bars" else "line",
        "fillOpacity": {"lines": 0, "stacked": 40, "bars": 80}[look],
        "lineWidth": 1,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"group": "A", "mode": "none" if look == "lines" else "normal"},
    }


def rendered() -> str:
    """The file's text."""
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"


def markdown() -> str:
    """Every metric as a table for docs/reference/metrics.md."""
    lines = ["| metric | type | labels beside `query`, `target` | what it says |", "|---|---|---|---|"]
    for instrument in CATALOGUE:
        values = ", ".join(f"`{value}`" for value in instrument.values)
        label = f"`{instrument.label}`{': ' if values else ''}{values}" if instrument.label else ""
        lines.append(f"| `{instrument.name}` | {instrument.type}, {instrument.unit} | {label} | {instrument.help} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the dashboard, or print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--markdown", action="store_true", help="print the table of metrics instead")
    if parser.parse_args().markdown:
        sys.stdout.write(markdown())
    else:
        DASHBOARD.write_text(rendered(), encoding="utf-8")


if __name__ == "__main__":
    main()
