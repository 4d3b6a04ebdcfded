"""Every metric there is, in two tables that the documentation, dashboard and tests are compared with.

`DELTA_MERGE_METRICS` maps the SQL metrics of Delta's MERGE; `CATALOGUE` lists every instrument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from stream_merge.model.results import (
    CONFLICTS,
    ENGINES,
    FATES,
    OUTCOMES,
    PHASES,
    REASONS,
    REFUSALS,
    ROUTING_REASONS,
    UPKEEP_OUTCOMES,
)

FAILED = "failed"
"""Outcome of a call that raised; the other outcomes are those of `MergeResult`."""

OTHER = "other"
"""Label value of whatever is not in a label's enumeration, so that no label ever grows without bound."""

BUCKETS_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180, 600, 1800, 3600)
"""Upper bounds of every histogram: a skipped micro-batch takes hundredths of a second, a backfill an hour."""

Type: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Instrument:
    """One metric family."""

    name: str
    """As in a query; the series of a histogram add `_bucket`, `_sum` and `_count`."""
    type: Type
    unit: str
    """What the number counts: base units for Prometheus, a noun where there is no unit."""
    help: str
    label: str | None = None
    """A third label beside `query` and `target`."""
    values: tuple[str, ...] = ()
    """Values of the third label that exist, at 0, from the first micro-batch on."""

    @property
    def labels(self) -> tuple[str, ...]:
        """All label names."""
        return ("query", "target") if self.label is None else ("query", "target", self.label)


class DeltaMetric(NamedTuple):
    """How one SQL metric of Delta's MERGE is exported."""

    name: str
    type: Type
    unit: str
    factor: float
    """Delta's number times this is ours; turns milliseconds into seconds."""
    help: str


# Names of delta-spark 4.4.0, MergeIntoCommandBase.baseMetrics. The splits (matched, not matched by
# source) are families of their own: in one family with their totals, a sum would count rows twice.
# fmt: off
DELTA_MERGE_METRICS: Mapping[str, DeltaMetric] = {
    "operationNumSourceRows": DeltaMetric(
        "stream_merge_source_rows_total", "counter", "rows", 1,
        "Rows the merge read from its source, as the table history reports them."),
    "numSourceRows": DeltaMetric(
        "stream_merge_source_rows_first_scan_total", "counter", "rows", 1,
        "Source rows counted in the first scan, which finds the files to touch."),
    "numSourceRowsInSecondScan": DeltaMetric(
        "stream_merge_source_rows_second_scan_total", "counter", "rows", 1,
        "Source rows counted in the second scan, which writes; 0 where none was needed."),
    "numTargetRowsCopied": DeltaMetric(
        "stream_merge_target_rows_copied_total", "counter", "rows", 1,
        "Unchanged rows rewritten because they share a file with a changed one."),
    "numTargetRowsInserted": DeltaMetric(
        "stream_merge_target_rows_inserted_total", "counter", "rows", 1,
        "Rows inserted."),
    "numTargetRowsUpdated": DeltaMetric(
        "stream_merge_target_rows_updated_total", "counter", "rows", 1,
        "Rows updated."),
    "numTargetRowsMatchedUpdated": DeltaMetric(
        "stream_merge_target_rows_matched_updated_total", "counter", "rows", 1,
        "Rows updated by a matched clause; part of the updated rows."),
    "numTargetRowsNotMatchedBySourceUpdated": DeltaMetric(
        "stream_merge_target_rows_not_matched_by_source_updated_total", "counter", "rows", 1,
        "Rows updated by a clause for rows absent from the source; part of the updated rows."),
    "numTargetRowsDeleted": DeltaMetric(
        "stream_merge_target_rows_deleted_total", "counter", "rows", 1,
        "Rows deleted."),
    "numTargetRowsMatchedDeleted": DeltaMetric(
        "stream_merge_target_rows_matched_deleted_total", "counter", "rows", 1,
        "Rows deleted by a matched clause; part of the deleted rows."),
    "numTargetRowsNotMatchedBySourceDeleted": DeltaMetric(
        "stream_merge_target_rows_not_matched_by_source_deleted_total", "counter", "rows", 1,
        "Rows deleted by a clause for rows absent from the source; part of the deleted rows."),
    "numTargetFilesBeforeSkipping": DeltaMetric(
        "stream_merge_target_files_before_skipping_total", "counter", "files", 1,
        "Files of the target when the merge began, summed over merges."),
    "numTargetFilesAfterSkipping": DeltaMetric(
        "stream_merge_target_files_after_skipping_total", "counter", "files", 1,
        "Files left to scan after partition pruning and data skipping, summed over merges."),
    "numTargetFilesRemoved": DeltaMetric(
        "stream_merge_target_files_removed_total", "counter", "files", 1,
        "Data files removed from the table."),
    "numTargetFilesAdded": DeltaMetric(
        "stream_merge_target_files_added_total", "counter", "files", 1,
        "Data files added to the table."),
    "numTargetBytesBeforeSkipping": DeltaMetric(
        "stream_merge_target_bytes_before_skipping_total", "counter", "bytes", 1,
        "Bytes of the target when the merge began, summed over merges."),
    "numTargetBytesAfterSkipping": DeltaMetric(
        "stream_merge_target_bytes_after_skipping_total", "counter", "bytes", 1,
        "Bytes left to scan after partition pruning and data skipping, summed over merges."),
    "numTargetBytesRemoved": DeltaMetric(
        "stream_merge_target_removed_bytes_total", "counter", "bytes", 1,
        "Bytes of the data files removed from the table."),
    "numTargetBytesAdded": DeltaMetric(
        "stream_merge_target_added_bytes_total", "counter", "bytes", 1,
        "Bytes of the data files added to the table."),
    "numTargetPartitionsAfterSkipping": DeltaMetric(
        "stream_merge_target_partitions_after_skipping_total", "counter", "partitions", 1,
        "Partitions left to scan after skipping, summed over merges; 0 for an unpartitioned table."),
    "numTargetPartitionsRemovedFrom": DeltaMetric(
        "stream_merge_target_partitions_removed_from_total", "counter", "partitions", 1,
        "Partitions that files were removed from, summed over merges; 0 for an unpartitioned table."),
    "numTargetPartitionsAddedTo": DeltaMetric(
        "stream_merge_target_partitions_added_to_total", "counter", "partitions", 1,
        "Partitions that files were added to, summed over merges; 0 for an unpartitioned table."),
    "numTargetChangeFilesAdded": DeltaMetric(
        "stream_merge_target_change_files_added_total", "counter", "files", 1,
        "Change data feed files added."),
    "numTargetChangeFileBytes": DeltaMetric(
        "stream_merge_target_change_file_bytes_total", "counter", "bytes", 1,
        "Bytes of the change data feed files added."),
    "numTargetDeletionVectorsAdded": DeltaMetric(
        "stream_merge_target_deletion_vectors_added_total", "counter", "deletion vectors", 1,
        "Deletion vectors added to files that had none."),
    "numTargetDeletionVectorsRemoved": DeltaMetric(
        "stream_merge_target_deletion_vectors_removed_total", "counter", "deletion vectors", 1,
        "Deletion vectors removed together with their files."),
    "numTargetDeletionVectorsUpdated": DeltaMetric(
        "stream_merge_target_deletion_vectors_updated_total", "counter", "deletion vectors", 1,
        "Deletion vectors replaced by larger ones; the table history counts these as added and removed."),
    "executionTimeMs": DeltaMetric(
        "stream_merge_merge_execution_seconds", "histogram", "seconds", 0.001,
        "Time of one MERGE up to its commit, as Delta measured it."),
    "materializeSourceTimeMs": DeltaMetric(
        "stream_merge_merge_materialize_source_seconds", "histogram", "seconds", 0.001,
        "Time to materialise the source of one MERGE; merges that did not are not counted."),
    "scanTimeMs": DeltaMetric(
        "stream_merge_merge_scan_seconds", "histogram", "seconds", 0.001,
        "Time one MERGE took to find the files to touch; merges without this step are not counted."),
    "rewriteTimeMs": DeltaMetric(
        "stream_merge_merge_rewrite_seconds", "histogram", "seconds", 0.001,
        "Time one MERGE took to write files and deletion vectors; merges without this step are not counted."),
}
"""Delta's name to ours; every SQL metric of a MERGE is here, and a test fails when Delta emits another."""
# fmt: on

BATCHES = Instrument(
    name="stream_merge_batches_total",
    type="counter",
    unit="micro-batches",
    help="Calls of the sink by outcome.",
    label="outcome",
    values=(*OUTCOMES, FAILED),
)
BATCH_DURATION = Instrument(
    name="stream_merge_batch_duration_seconds",
    type="histogram",
    unit="seconds",
    help="Wall time of a call of the sink, whatever its outcome.",
)
RECEIVED = Instrument(
    name="stream_merge_events_received_total",
    type="counter",
    unit="events",
    help="Change events in merged micro-batches; the sum of the events by fate.",
)
EVENTS = Instrument(
    name="stream_merge_events_total",
    type="counter",
    unit="events",
    help="Change events by fate; every received event has exactly one.",
    label="fate",
    values=FATES,
)
TIES = Instrument(
    name="stream_merge_ties_total",
    type="counter",
    unit="events",
    help="Events of the same key and sequence, beyond the first, that differ in operation or stored columns.",
)
QUARANTINED = Instrument(
    name="stream_merge_quarantined_events_total",
    type="counter",
    unit="events",
    help="Quarantined events by reason; an event with several reasons counts once for each.",
    label="reason",
    values=(*REASONS, *ROUTING_REASONS),
)
ATTEMPTS = Instrument(
    name="stream_merge_attempts_total",
    type="counter",
    unit="attempts",
    help="Merge attempts, the first one of a micro-batch included.",
)
LOST_COMMITS = Instrument(
    name="stream_merge_conflicts_total",
    type="counter",
    unit="conflicts",
    help="Lost optimistic commits by Delta's exception class.",
    label="conflict",
    values=(*CONFLICTS, OTHER),
)
MERGES = Instrument(
    name="stream_merge_merges_total",
    type="counter",
    unit="merges",
    help="Calls that merged, by the engine that did it.",
    label="engine",
    values=ENGINES,
)
NATIVE_REFUSALS = Instrument(
    name="stream_merge_native_refusals_total",
    type="counter",
    unit="micro-batches",
    help="Calls that went to Spark though an engine could be chosen, by reason.",
    label="refusal",
    values=REFUSALS,
)
BACKOFF = Instrument(
    name="stream_merge_backoff_seconds_total",
    type="counter",
    unit="seconds",
    help="Time waited between attempts, counted while the call still runs.",
)
PHASE_SECONDS = Instrument(
    name="stream_merge_phase_seconds_total",
    type="counter",
    unit="seconds",
    help="Wall time of calls by phase; the phases add up to the whole call.",
    label="phase",
    values=PHASES,
)
UPKEEP = Instrument(
    name="stream_merge_upkeep_total",
    type="counter",
    unit="rounds",
    help="Rounds of upkeep of the target's files that were due, by what became of them.",
    label="upkeep",
    values=UPKEEP_OUTCOMES,
)
UPKEEP_REMOVED = Instrument(
    name="stream_merge_upkeep_removed_files_total",
    type="counter",
    unit="files",
    help="Data files that upkeep put together, or wrote again without removed rows.",
)
UPKEEP_ADDED = Instrument(
    name="stream_merge_upkeep_added_files_total",
    type="counter",
    unit="files",
    help="Data files that upkeep wrote in their place.",
)
LAST_VERSION = Instrument(
    name="stream_merge_last_committed_version",
    type="gauge",
    unit="version",
    help="Version of the target that this process committed last; 0 before its first commit.",
)
LAST_COMMIT = Instrument(
    name="stream_merge_last_commit_timestamp_seconds",
    type="gauge",
    unit="seconds",
    help="Unix time when this process last committed to the target; 0 before its first commit.",
)
UNKNOWN_DELTA_METRICS = Instrument(
    name="stream_merge_unknown_delta_metrics_total",
    type="counter",
    unit="numbers",
    help="Numbers of Delta's MERGE that this version cannot export because it does not know their names; see the log.",
)

RECORD_KINDS = ("upsert", "delete", "redundant", "filtered", "undecodable", "truncate")
"""What a job's records turn out to be (`sources.formats.base.Kind`)."""

TOPIC_RECORDS = Instrument(
    name="stream_merge_topic_records_total",
    type="counter",
    unit="records",
    help="Records that a job read from its topics, by what they turned out to be.",
    label="kind",
    values=RECORD_KINDS,
)
TOPIC_GAPS = Instrument(
    name="stream_merge_topic_gaps_total",
    type="counter",
    unit="offsets",
    help="Offsets without a record: removed by compaction, or taken by transactions.",
    label="topic",
)
TOPIC_UNEXPECTED_GAPS = Instrument(
    name="stream_merge_topic_unexpected_gaps_total",
    type="counter",
    unit="offsets",
    help="Offsets without a record in topics neither compacted nor declared transactional; an alarm when above 0.",
    label="topic",
)
TOPIC_LOST = Instrument(
    name="stream_merge_topic_lost_offsets_total",
    type="counter",
    unit="offsets",
    help="Offsets that the broker had removed before they were read; the job went on because it was told to.",
    label="topic",
)
TOPIC_LAG = Instrument(
    name="stream_merge_topic_lag_events",
    type="gauge",
    unit="offsets",
    help="Offsets between the end of the topic and what has been merged; asked of the broker also while a batch runs.",
    label="topic",
)
TOPIC_DELAY = Instrument(
    name="stream_merge_topic_delay_seconds",
    type="gauge",
    unit="seconds",
    help="From the source's commit of the newest event of the last micro-batch to the table's commit.",
    label="topic",
)
TOPIC_NEWEST = Instrument(
    name="stream_merge_topic_newest_event_timestamp_seconds",
    type="gauge",
    unit="seconds",
    help="Unix time at which the source committed the newest merged event; 0 before the first one.",
    label="topic",
)
TOPIC_POLLED = Instrument(
    name="stream_merge_topic_polled_timestamp_seconds",
    type="gauge",
    unit="seconds",
    help="Unix time when the broker last told the end of the topic; 0 before the first answer.",
    label="topic",
)
TOPIC_SKEW = Instrument(
    name="stream_merge_topic_negative_skew_total",
    type="counter",
    unit="micro-batches",
    help="Micro-batches whose newest event has a time in this machine's future; their delay is shown as 0.",
    label="topic",
)
TOPIC_MIRROR_FAILURES = Instrument(
    name="stream_merge_topic_mirror_failures_total",
    type="counter",
    unit="failures",
    help="Failures to write merged offsets to the consumer group that lag tools look at.",
    label="topic",
)
_OF_TOPICS = (
    TOPIC_RECORDS,
    TOPIC_GAPS,
    TOPIC_UNEXPECTED_GAPS,
    TOPIC_LOST,
    TOPIC_LAG,
    TOPIC_DELAY,
    TOPIC_NEWEST,
    TOPIC_POLLED,
    TOPIC_SKEW,
    TOPIC_MIRROR_FAILURES,
)

OF_DELTA: Mapping[str, Instrument] = {
    delta_name: Instrument(name=row.name, type=row.type, unit=row.unit, help=row.help)
    for delta_name, row in DELTA_MERGE_METRICS.items()
}

CATALOGUE: tuple[Instrument, ...] = (
    BATCHES,
    BATCH_DURATION,
    RECEIVED,
    EVENTS,
    TIES,
    QUARANTINED,
    MERGES,
    NATIVE_REFUSALS,
    ATTEMPTS,
    LOST_COMMITS,
    BACKOFF,
    PHASE_SECONDS,
    UPKEEP,
    UPKEEP_REMOVED,
    UPKEEP_ADDED,
    LAST_VERSION,
    LAST_COMMIT,
    *_OF_TOPICS,
    *OF_DELTA.values(),
    UNKNOWN_DELTA_METRICS,
)
"""Every instrument; documentation and dashboard are compared with it."""
