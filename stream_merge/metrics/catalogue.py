"""Every metric there is, in a table that the documentation, dashboard and tests are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stream_merge.model.results import (
    CONFLICTS,
    ENGINES,
    FATES,
    MAINTENANCE_OUTCOMES,
    OUTCOMES,
    PHASES,
    REASONS,
    REFUSALS,
    ROUTING_REASONS,
)

Type: TypeAlias = Literal["counter", "gauge", "histogram"]

FAILED = "failed"
"""Outcome of a call that raised; the other outcomes are those of `MergeResult`."""

OTHER = "other"
"""Label value of whatever is not in a label's enumeration, so that no label ever grows without bound."""

BUCKETS_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180, 600, 1800, 3600)
"""Upper bounds of every histogram: a skipped micro-batch takes hundredths of a second, a backfill an hour."""


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric family."""

    name: str
    """As in a query; the series of a histogram add `_bucket`, `_sum` and `_count`."""
    type: Type
    unit: str
    """What the number counts: base units for Prometheus, else a noun."""
    help: str
    label: str | None = None
    """A third label beside `query` and `target`."""
    values: tuple[str, ...] = ()
    """Values of the third label that exist, at 0, from the first micro-batch on."""
    factor: float = 1
    """Multiplier of Delta's number: turns milliseconds into seconds."""

    @property
    def labels(self) -> tuple[str, ...]:
        """All label names."""
        return ("query", "target") if self.label is None else ("query", "target", self.label)


RECORD_KINDS = ("upsert", "delete", "redundant", "filtered", "undecodable", "truncate")
"""What a job's records turn out to be (`sources.envelopes.base.Kind`)."""

# fmt: off
BATCHES = Instrument(
    "stream_merge_batches_total", "counter", "micro-batches",
    "Calls of the sink by outcome; of a Kafka job also batches that were stopped before it was called.",
    label="outcome", values=(*OUTCOMES, FAILED))
BATCH_DURATION = Instrument(
    "stream_merge_batch_duration_seconds", "histogram", "seconds",
    "Wall time of a call of the sink, whatever its outcome; of a Kafka job with fetching and decoding, of"
    " `MergeSinks` with the evaluation of the source.")
RECEIVED = Instrument(
    "stream_merge_events_received_total", "counter", "events",
    "Change events in merged micro-batches; the sum of the events by fate.")
EVENTS = Instrument(
    "stream_merge_events_total", "counter", "events",
    "Change events by fate; every received event has exactly one.",
    label="fate", values=FATES)
TIES = Instrument(
    "stream_merge_ties_total", "counter", "events",
    "Events of the same key and sequence, beyond the first, that differ in operation or stored columns.")
UNKNOWN_FIELDS = Instrument(
    "stream_merge_events_with_unknown_fields_total", "counter", "events",
    "Records of JSON files with fields that the given schema lacks; these fields are left out.")
QUARANTINED = Instrument(
    "stream_merge_quarantined_events_total", "counter", "events",
    "Quarantined events by reason; an event with several reasons counts once for each.",
    label="reason", values=(*REASONS, *ROUTING_REASONS))
MERGES = Instrument(
    "stream_merge_merges_total", "counter", "merges",
    "Calls with something to merge, by the engine that had it; also where remembered deletes refused all of it.",
    label="engine", values=ENGINES)
DRIVER_REFUSALS = Instrument(
    "stream_merge_driver_refusals_total", "counter", "micro-batches",
    "Calls that went to Spark though an engine could be chosen, by reason; `cost`: one in the driver could have"
    " merged them, and Spark was expected to be faster.",
    label="refusal", values=REFUSALS)
ATTEMPTS = Instrument(
    "stream_merge_attempts_total", "counter", "attempts",
    "Merge attempts, the first one of a micro-batch included.")
LOST_COMMITS = Instrument(
    "stream_merge_conflicts_total", "counter", "conflicts",
    "Lost optimistic commits by Delta's exception class.",
    label="conflict", values=(*CONFLICTS, OTHER))
RETRIES_EXHAUSTED = Instrument(
    "stream_merge_retries_exhausted_total", "counter", "commits",
    "Commits given up after the last attempt that the retry policy allows.")
BACKOFF = Instrument(
    "stream_merge_backoff_seconds_total", "counter", "seconds",
    "Time waited between attempts, counted while the call still runs.")
PHASE_SECONDS = Instrument(
    "stream_merge_phase_seconds_total", "counter", "seconds",
    "Wall time of calls by phase; the phases add up to the whole call. read: before it, of a Kafka job and of"
    " `MergeSinks`, each of whose tables has the whole of the evaluation that they share.",
    label="phase", values=PHASES)
MAINTENANCE = Instrument(
    "stream_merge_maintenance_total", "counter", "runs",
    "Maintenance runs on the target's files, by outcome.",
    label="maintenance", values=MAINTENANCE_OUTCOMES)
MAINTENANCE_REMOVED = Instrument(
    "stream_merge_maintenance_removed_files_total", "counter", "files",
    "Data files that maintenance compacted, or rewrote without removed rows.")
MAINTENANCE_ADDED = Instrument(
    "stream_merge_maintenance_added_files_total", "counter", "files",
    "Data files that maintenance wrote in their place.")
DELETED_SHARE = Instrument(
    "stream_merge_target_deleted_rows_ratio", "gauge", "ratio",
    "Share of the rows in the target's files that are marked as deleted, after the last merge in the driver.")
AWAITING_FILES = Instrument(
    "stream_merge_target_files_awaiting_compaction", "gauge", "files",
    "Files of the target that compaction would write again, after the last merge in the driver.")
LAST_VERSION = Instrument(
    "stream_merge_last_committed_version", "gauge", "version",
    "Version of the target that this process' last batch with a commit made; 0 before it. A query's first batch"
    " at a table commits also where it changes no row. Compaction, and a look that finds late deletes, commit newer"
    " ones.")
LAST_COMMIT = Instrument(
    "stream_merge_last_commit_timestamp_seconds", "gauge", "seconds",
    "Unix time when this process last committed to the target; 0 before its first commit.")
QUERY_FAILED = Instrument(
    "stream_merge_query_failed", "gauge", "queries",
    "1 where a query of a job has ended with an error while the job's other queries go on; 0 while it runs or"
    " waits for its broker.")
CERTIFICATE_EXPIRY = Instrument(
    "stream_merge_certificate_expiry_timestamp_seconds", "gauge", "seconds",
    "Unix time when the first certificate of a job's PEM file expires: its client certificate for `kafka`, or the"
    " one that its `metrics` are served with; 0 without one.",
    label="certificate", values=("kafka", "metrics"))
TOPIC_RECORDS = Instrument(
    "stream_merge_topic_records_total", "counter", "records",
    "Records that a job read from its topics, by what they turned out to be.",
    label="kind", values=RECORD_KINDS)
TOPIC_GAPS = Instrument(
    "stream_merge_topic_gaps_total", "counter", "offsets",
    "Offsets without a record: removed by compaction, or taken by transactions.",
    label="topic")
TOPIC_UNEXPECTED_GAPS = Instrument(
    "stream_merge_topic_unexpected_gaps_total", "counter", "offsets",
    "Offsets without a record in topics neither compacted nor declared transactional; an alarm when above 0.",
    label="topic")
TOPIC_LOST = Instrument(
    "stream_merge_topic_lost_offsets_total", "counter", "offsets",
    "Offsets that the broker had removed before they were read; the job went on because it was told to.",
    label="topic")
TOPIC_LAG = Instrument(
    "stream_merge_topic_lag_events", "gauge", "offsets",
    "Offsets between the end of the topic and what has been merged; asked of the broker also while a batch runs;"
    " absent until broker and checkpoint have told.",
    label="topic")
TOPIC_DELAY = Instrument(
    "stream_merge_topic_delay_seconds", "gauge", "seconds",
    "From the source's commit of the newest event to the table's, of the last micro-batch that committed; absent"
    " before the first one.",
    label="topic")
TOPIC_NEWEST = Instrument(
    "stream_merge_topic_newest_event_timestamp_seconds", "gauge", "seconds",
    "Unix time at which the source committed the newest event merged by this process; 0 before the first one.",
    label="topic")
TOPIC_POLLED = Instrument(
    "stream_merge_topic_polled_timestamp_seconds", "gauge", "seconds",
    "Unix time when the broker last answered a question about the topic; 0 before the first answer.",
    label="topic")
TOPIC_SKEW = Instrument(
    "stream_merge_topic_negative_skew_total", "counter", "micro-batches",
    "Micro-batches whose newest event has a time in this machine's future; their delay is shown as 0.",
    label="topic")
TOPIC_MIRROR_FAILURES = Instrument(
    "stream_merge_topic_mirror_failures_total", "counter", "failures",
    "Failures to write merged offsets to the consumer group that lag tools look at.",
    label="topic")
UNKNOWN_DELTA_METRICS = Instrument(
    "stream_merge_unknown_delta_metrics_total", "counter", "numbers",
    "Numbers of Delta's MERGE that this version cannot export because it does not know their names; see the log.")

# Names of delta-spark 4.4.0, MergeIntoCommandBase.baseMetrics. The splits (matched, not matched by
# source) are families of their own: in one family with their totals, a sum would count rows twice.
DELTA_MERGE_METRICS: Mapping[str, Instrument] = {
    "operationNumSourceRows": Instrument(
        "stream_merge_source_rows_total", "counter", "rows",
        "Rows the merge read from its source, as the table history reports them."),
    "numSourceRows": Instrument(
        "stream_merge_source_rows_first_scan_total", "counter", "rows",
        "Source rows counted in the first scan, which finds the files to touch."),
    "numSourceRowsInSecondScan": Instrument(
        "stream_merge_source_rows_second_scan_total", "counter", "rows",
        "Source rows counted in the second scan, which writes; 0 where none was needed."),
    "numTargetRowsCopied": Instrument(
        "stream_merge_target_rows_copied_total", "counter", "rows",
        "Unchanged rows rewritten because they share a file with a changed one."),
    "numTargetRowsInserted": Instrument(
        "stream_merge_target_rows_inserted_total", "counter", "rows",
        "Rows inserted."),
    "numTargetRowsUpdated": Instrument(
        "stream_merge_target_rows_updated_total", "counter", "rows",
        "Rows updated."),
    "numTargetRowsMatchedUpdated": Instrument(
        "stream_merge_target_rows_matched_updated_total", "counter", "rows",
        "Rows updated by a matched clause; part of the updated rows."),
    "numTargetRowsNotMatchedBySourceUpdated": Instrument(
        "stream_merge_target_rows_not_matched_by_source_updated_total", "counter", "rows",
        "Rows updated by a clause for rows absent from the source; part of the updated rows."),
    "numTargetRowsDeleted": Instrument(
        "stream_merge_target_rows_deleted_total", "counter", "rows",
        "Rows deleted."),
    "numTargetRowsMatchedDeleted": Instrument(
        "stream_merge_target_rows_matched_deleted_total", "counter", "rows",
        "Rows deleted by a matched clause; part of the deleted rows."),
    "numTargetRowsNotMatchedBySourceDeleted": Instrument(
        "stream_merge_target_rows_not_matched_by_source_deleted_total", "counter", "rows",
        "Rows deleted by a clause for rows absent from the source; part of the deleted rows."),
    "numTargetFilesBeforeSkipping": Instrument(
        "stream_merge_target_files_before_skipping_total", "counter", "files",
        "Files of the target when the merge began, summed over merges."),
    "numTargetFilesAfterSkipping": Instrument(
        "stream_merge_target_files_after_skipping_total", "counter", "files",
        "Files left to scan after partition pruning and data skipping, summed over merges."),
    "numTargetFilesRemoved": Instrument(
        "stream_merge_target_files_removed_total", "counter", "files",
        "Data files removed from the table."),
    "numTargetFilesAdded": Instrument(
        "stream_merge_target_files_added_total", "counter", "files",
        "Data files added to the table."),
    "numTargetBytesBeforeSkipping": Instrument(
        "stream_merge_target_bytes_before_skipping_total", "counter", "bytes",
        "Bytes of the target when the merge began, summed over merges."),
    "numTargetBytesAfterSkipping": Instrument(
        "stream_merge_target_bytes_after_skipping_total", "counter", "bytes",
        "Bytes left to scan after partition pruning and data skipping, summed over merges."),
    "numTargetBytesRemoved": Instrument(
        "stream_merge_target_removed_bytes_total", "counter", "bytes",
        "Bytes of the data files removed from the table."),
    "numTargetBytesAdded": Instrument(
        "stream_merge_target_added_bytes_total", "counter", "bytes",
        "Bytes of the data files added to the table."),
    "numTargetPartitionsAfterSkipping": Instrument(
        "stream_merge_target_partitions_after_skipping_total", "counter", "partitions",
        "Partitions left to scan after skipping, summed over merges by Spark, which alone counts them; 0 for an "
        "unpartitioned table."),
    "numTargetPartitionsRemovedFrom": Instrument(
        "stream_merge_target_partitions_removed_from_total", "counter", "partitions",
        "Partitions that files were removed from, summed over merges by Spark, which alone counts them; 0 for an "
        "unpartitioned table."),
    "numTargetPartitionsAddedTo": Instrument(
        "stream_merge_target_partitions_added_to_total", "counter", "partitions",
        "Partitions that files were added to, summed over merges by Spark, which alone counts them; 0 for an "
        "unpartitioned table."),
    "numTargetChangeFilesAdded": Instrument(
        "stream_merge_target_change_files_added_total", "counter", "files",
        "Change data feed files added."),
    "numTargetChangeFileBytes": Instrument(
        "stream_merge_target_change_file_bytes_total", "counter", "bytes",
        "Bytes of the change data feed files added."),
    "numTargetDeletionVectorsAdded": Instrument(
        "stream_merge_target_deletion_vectors_added_total", "counter", "deletion vectors",
        "Deletion vectors added to files that had none."),
    "numTargetDeletionVectorsRemoved": Instrument(
        "stream_merge_target_deletion_vectors_removed_total", "counter", "deletion vectors",
        "Deletion vectors removed together with their files."),
    "numTargetDeletionVectorsUpdated": Instrument(
        "stream_merge_target_deletion_vectors_updated_total", "counter", "deletion vectors",
        "Deletion vectors replaced by larger ones; the table history counts these as added and removed."),
    "executionTimeMs": Instrument(
        "stream_merge_merge_execution_seconds", "histogram", "seconds",
        "Time of one MERGE up to its commit, as Delta measured it.", factor=0.001),
    "materializeSourceTimeMs": Instrument(
        "stream_merge_merge_materialize_source_seconds_total", "counter", "seconds",
        "Time merges took to materialise their source.", factor=0.001),
    "scanTimeMs": Instrument(
        "stream_merge_merge_scan_seconds_total", "counter", "seconds",
        "Time merges took to find the files to touch.", factor=0.001),
    "rewriteTimeMs": Instrument(
        "stream_merge_merge_rewrite_seconds_total", "counter", "seconds",
        "Time merges took to write files and deletion vectors.", factor=0.001),
}
"""Delta's name to ours; every SQL metric of a MERGE is here, and a test fails when Delta emits another."""
# fmt: on

CATALOGUE: tuple[Instrument, ...] = (
    *(value for value in tuple(globals().values()) if isinstance(value, Instrument)),
    *DELTA_MERGE_METRICS.values(),
)
"""Every instrument; documentation and dashboard are compared with it."""
