"""Every metric there is, in a table that the documentation, dashboard and tests are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stream_merge.metrics.delta_merge import DELTA_MERGE_METRICS, Type
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


BATCHES = Instrument(
    name="stream_merge_batches_total",
    type="counter",
    unit="micro-batches",
    help="Calls of the sink by outcome; of a Kafka job also batches that were stopped before it was called.",
    label="outcome",
    values=(*OUTCOMES, FAILED),
)
BATCH_DURATION = Instrument(
    name="stream_merge_batch_duration_seconds",
    type="histogram",
    unit="seconds",
    help="Wall time of a call of the sink, whatever its outcome; of a Kafka job with fetching and decoding, of"
    " `MergeSinks` with the evaluation of the source.",
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
UNKNOWN_FIELDS = Instrument(
    name="stream_merge_events_with_unknown_fields_total",
    type="counter",
    unit="events",
    help="Records of JSON files with fields that the given schema lacks; these fields are left out.",
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
RETRIES_EXHAUSTED = Instrument(
    name="stream_merge_retries_exhausted_total",
    type="counter",
    unit="commits",
    help="Commits given up after the last attempt that the retry policy allows.",
)
MERGES = Instrument(
    name="stream_merge_merges_total",
    type="counter",
    unit="merges",
    help="Calls with something to merge, by the engine that had it; also where remembered deletes refused all of it.",
    label="engine",
    values=ENGINES,
)
DRIVER_REFUSALS = Instrument(
    name="stream_merge_driver_refusals_total",
    type="counter",
    unit="micro-batches",
    help="Calls that went to Spark though an engine could be chosen, by reason; `cost`: one in the driver could have"
    " merged them, and Spark was expected to be faster.",
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
    help="Wall time of calls by phase; the phases add up to the whole call. read: before it, of a Kafka job and of"
    " `MergeSinks`, each of whose tables has the whole of the evaluation that they share.",
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
DELETED_SHARE = Instrument(
    name="stream_merge_target_deleted_rows_ratio",
    type="gauge",
    unit="ratio",
    help="Rows in the target's files that are marked as deleted, of all in them, after the last merge in the driver.",
)
AWAITING_FILES = Instrument(
    name="stream_merge_target_files_awaiting_compaction",
    type="gauge",
    unit="files",
    help="Files of the target that compaction would write again, after the last merge in the driver.",
)
LAST_VERSION = Instrument(
    name="stream_merge_last_committed_version",
    type="gauge",
    unit="version",
    help="Version of the target that this process' last batch with a commit made; 0 before it. A query's first batch"
    " at a table commits also where it changes no row. Compaction, and a look that finds late deletes, commit newer"
    " ones.",
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
"""What a job's records turn out to be (`sources.envelopes.base.Kind`)."""

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
    help="Offsets between the end of the topic and what has been merged; asked of the broker also while a batch runs;"
    " absent until broker and checkpoint have told.",
    label="topic",
)
TOPIC_DELAY = Instrument(
    name="stream_merge_topic_delay_seconds",
    type="gauge",
    unit="seconds",
    help="From the source's commit of the newest event to the table's, of the last micro-batch that committed; absent"
    " before the first one.",
    label="topic",
)
TOPIC_NEWEST = Instrument(
    name="stream_merge_topic_newest_event_timestamp_seconds",
    type="gauge",
    unit="seconds",
    help="Unix time at which the source committed the newest event merged by this process; 0 before the first one.",
    label="topic",
)
TOPIC_POLLED = Instrument(
    name="stream_merge_topic_polled_timestamp_seconds",
    type="gauge",
    unit="seconds",
    help="Unix time when the broker last answered a question about the topic; 0 before the first answer.",
    label="topic",
)
QUERY_FAILED = Instrument(
    name="stream_merge_query_failed",
    type="gauge",
    unit="queries",
    help="1 where a query of a job has ended with an error while the job's other queries go on; 0 while it runs or"
    " waits for its broker.",
)
CERTIFICATE_EXPIRY = Instrument(
    name="stream_merge_certificate_expiry_timestamp_seconds",
    type="gauge",
    unit="seconds",
    help="Unix time when the first certificate of a job's PEM file expires: its client certificate for `kafka`, or the"
    " one that its `metrics` are served with; 0 without one.",
    label="certificate",
    values=("kafka", "metrics"),
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
    UNKNOWN_FIELDS,
    QUARANTINED,
    MERGES,
    DRIVER_REFUSALS,
    ATTEMPTS,
    LOST_COMMITS,
    RETRIES_EXHAUSTED,
    BACKOFF,
    PHASE_SECONDS,
    UPKEEP,
    UPKEEP_REMOVED,
    UPKEEP_ADDED,
    DELETED_SHARE,
    AWAITING_FILES,
    LAST_VERSION,
    LAST_COMMIT,
    QUERY_FAILED,
    CERTIFICATE_EXPIRY,
    *_OF_TOPICS,
    *OF_DELTA.values(),
    UNKNOWN_DELTA_METRICS,
)
"""Every instrument; documentation and dashboard are compared with it."""
