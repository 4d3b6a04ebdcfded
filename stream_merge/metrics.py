"""What a sink did, as numbers that Prometheus can scrape.

Two tables say everything about what is exported: `DELTA_MERGE_METRICS` maps the SQL metrics of
Delta's MERGE, `CATALOGUE` lists every instrument. All numbers of a registry change under one lock,
one micro-batch at a time, so that a scrape never sees half a batch and the ledger adds up in it.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from math import inf
from threading import Lock
from types import TracebackType
from typing import Literal, NamedTuple, ParamSpec, Self, TypeAlias
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from stream_merge.errors import ConfigError
from stream_merge.results import CONFLICTS, FATES, OUTCOMES, PHASES, REASONS, FailedBatch, MergeResult

logger = logging.getLogger(__name__)

FAILED = "failed"
"""Outcome of a call that raised; the other outcomes are those of `MergeResult`."""

OTHER = "other"
"""Label value of whatever is not in a label's enumeration, so that no label ever grows without bound."""

BUCKETS_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180, 600, 1800, 3600)
"""Upper bounds of every histogram: a skipped micro-batch takes hundredths of a second, a backfill an hour."""

Type: TypeAlias = Literal["counter", "gauge", "histogram"]
Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Change: TypeAlias = tuple["Instrument", tuple[str, ...], float]
"""An instrument, its label value beyond query and target (if it has one), and the amount."""
P = ParamSpec("P")


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
    values=REASONS,
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

_OF_DELTA: Mapping[str, Instrument] = {
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
    ATTEMPTS,
    LOST_COMMITS,
    BACKOFF,
    PHASE_SECONDS,
    LAST_VERSION,
    LAST_COMMIT,
    *_OF_DELTA.values(),
    UNKNOWN_DELTA_METRICS,
)
"""Every instrument; README and dashboard are compared with it."""


def _never_fails_a_batch(method: Callable[P, None]) -> Callable[P, None]:
    """Log what goes wrong in `method` instead of raising it.

    The merge is committed by then: an error here would make Spark deliver an applied batch again.
    """

    @wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception:
            logger.exception("stream_merge.metrics_error")

    return guarded


class MergeMetrics:
    """The instruments of every sink that shares a registry.

    Two objects on one registry share their numbers. `attempt`, `conflict` and `backoff` are called
    while a micro-batch runs, so that a batch stuck in retries shows before it ends; therefore
    `observe` leaves a result's attempts and conflicts alone. prometheus_client's multiprocess mode
    is not supported: it ignores collectors like ours.

    Args:
        registry: None is prometheus_client's own.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._numbers = _numbers_of(REGISTRY if registry is None else registry)

    @_never_fails_a_batch
    def prepare(self, query: str, target: str) -> None:
        """Make every series of a sink exist at 0: Prometheus cannot see a counter rise that starts above it."""
        self._numbers.change(query, target)

    @_never_fails_a_batch
    def attempt(self, query: str, target: str) -> None:
        """Count one merge attempt."""
        self._numbers.change(query, target, add=[(ATTEMPTS, (), 1)])

    @_never_fails_a_batch
    def conflict(self, query: str, target: str, conflict: str) -> None:
        """Count one lost commit; a class that is not in `CONFLICTS` counts as `other`."""
        self._numbers.change(query, target, add=[(LOST_COMMITS, (conflict,), 1)])

    @_never_fails_a_batch
    def backoff(self, query: str, target: str, seconds: float) -> None:
        """Count the wait before another attempt."""
        self._numbers.change(query, target, add=[(BACKOFF, (), seconds)])

    @_never_fails_a_batch
    def observe(self, result: MergeResult) -> None:
        """Count a call that returned."""
        add = _call(result, result.outcome)
        add += [(EVENTS, (fate,), getattr(result.events, fate)) for fate in FATES]
        add += [(RECEIVED, (), result.events.received), (TIES, (), result.events.ties)]
        add += [(QUARANTINED, (reason,), events) for reason, events in result.reasons.items()]
        unknown = result.metrics.keys() - DELTA_MERGE_METRICS.keys()
        for name in result.metrics.keys() - unknown:
            value = result.metrics[name] * DELTA_MERGE_METRICS[name].factor
            # A timing of 0 is a step that did not run: Delta 4.4 reports at least 1 ms for one that did.
            if value > 0:
                add.append((_OF_DELTA[name], (), value))
        add += [(UNKNOWN_DELTA_METRICS, (), len(unknown))]
        store: list[Change] = []
        if result.version is not None:
            store = [(LAST_VERSION, (), result.version), (LAST_COMMIT, (), time.time())]
        self._numbers.change(result.query, result.target, add=add, store=store)
        self._numbers.warn_once(sorted(unknown))

    @_never_fails_a_batch
    def observe_failure(self, failed: FailedBatch) -> None:
        """Count a call that raised."""
        self._numbers.change(failed.query, failed.target, add=_call(failed, FAILED))


def default_metrics() -> MergeMetrics:
    """The metrics of every sink that was given none, on prometheus_client's own registry."""
    with _DEFAULT_LOCK:
        return _default_metrics()


class MetricsServer:
    """A running `/metrics` endpoint; closes at the end of a `with` block."""

    def __init__(self, port: int, host: str, registry: CollectorRegistry) -> None:
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        self.port = int(self._server.server_port)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.port}/metrics"

    def close(self) -> None:
        """Stop serving and free the port; may be called twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(port: int = 9108, host: str = "127.0.0.1", registry: CollectorRegistry | None = None) -> MetricsServer:
    """Serve a registry over plain HTTP, without authentication: keep it on loopback or a private network.

    Args:
        port: 0 takes a free one; see the server's `port`.
        host: address to listen on.
        registry: None serves prometheus_client's own.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    try:
        return MetricsServer(port, host, REGISTRY if registry is None else registry)
    except (OSError, OverflowError) as err:
        reason = getattr(err, "strerror", None) or str(err)
        msg = f"cannot serve metrics on {host}:{port}: {reason}; choose another port, or 0 for a free one"
        raise ConfigError(msg) from err


@dataclass(slots=True)
class _Distribution:
    """State of one histogram series."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_SECONDS) + 1))
    """Observations by bucket, not cumulated; the last one has no upper bound."""
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(BUCKETS_SECONDS, value)] += 1
        self.total += value

    def cumulated(self) -> list[tuple[str, float]]:
        seen, buckets = 0, []
        for bound, count in zip((*BUCKETS_SECONDS, inf), self.counts, strict=True):
            seen += count
            buckets.append(("+Inf" if bound == inf else str(float(bound)), float(seen)))
        return buckets


class _Numbers(Collector):
    """Every number of one registry.

    Own collector rather than prometheus_client's instruments: those lock series by series, so a
    scrape could see a ledger that does not add up, and they add a `_created` series to each.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._prepared: set[tuple[str, str]] = set()
        self._warned: set[str] = set()
        self._values: dict[str, dict[tuple[str, ...], float]] = {
            instrument.name: {} for instrument in CATALOGUE if instrument.type != "histogram"
        }
        self._distributions: dict[str, dict[tuple[str, ...], _Distribution]] = {
            instrument.name: {} for instrument in CATALOGUE if instrument.type == "histogram"
        }

    def change(self, query: str, target: str, *, add: Iterable[Change] = (), store: Iterable[Change] = ()) -> None:
        """Apply all changes at once; a scrape sees none or all of them."""
        sink = (_label(query), _label(target))
        with self._lock:
            self._prepare(sink)
            for instrument, extra, amount in add:
                labels = (*sink, *_bounded(instrument, extra))
                if amount < 0:
                    continue  # a counter never falls, whatever an engine reports
                if instrument.type == "histogram":
                    self._distributions[instrument.name][labels].observe(amount)
                else:
                    series = self._values[instrument.name]
                    series[labels] = series.get(labels, 0.0) + amount
            for instrument, extra, value in store:
                self._values[instrument.name][(*sink, *extra)] = value

    def warn_once(self, unknown: Iterable[str]) -> None:
        """Log each Delta metric that is not in the table, once."""
        with self._lock:
            new = [name for name in unknown if name not in self._warned]
            self._warned.update(new)
        for name in new:
            logger.warning("stream_merge.unknown_delta_metric name=%r", name, extra={"delta_metric": name})

    def describe(self) -> Iterator[Family]:
        """Families without samples, for the registry's check of names."""
        return (_family(instrument) for instrument in CATALOGUE)

    def collect(self) -> Iterator[Family]:
        """One consistent picture of all series."""
        with self._lock:
            return iter([self._filled(instrument) for instrument in CATALOGUE])

    def _prepare(self, sink: tuple[str, str]) -> None:
        if sink in self._prepared:
            return
        for instrument in CATALOGUE:
            if instrument.type == "histogram":
                self._distributions[instrument.name][sink] = _Distribution()
            elif instrument.label is None:
                self._values[instrument.name][sink] = 0.0
            else:
                self._values[instrument.name].update({(*sink, value): 0.0 for value in instrument.values})
        self._prepared.add(sink)

    def _filled(self, instrument: Instrument) -> Family:
        family = _family(instrument)
        if isinstance(family, HistogramMetricFamily):
            for labels, distribution in self._distributions[instrument.name].items():
                family.add_metric(labels, distribution.cumulated(), distribution.total)
        else:
            for labels, value in self._values[instrument.name].items():
                family.add_metric(labels, value)
        return family


def _call(call: MergeResult | FailedBatch, outcome: str) -> list[Change]:
    return [
        (BATCHES, (outcome,), 1),
        (BATCH_DURATION, (), call.duration_seconds),
        *((PHASE_SECONDS, (phase,), seconds) for phase, seconds in call.seconds.items()),
    ]


def _family(instrument: Instrument) -> Family:
    match instrument.type:
        case "counter":
            return CounterMetricFamily(instrument.name, instrument.help, labels=instrument.labels)
        case "gauge":
            return GaugeMetricFamily(instrument.name, instrument.help, labels=instrument.labels)
        case "histogram":
            return HistogramMetricFamily(instrument.name, instrument.help, labels=instrument.labels)


def _bounded(instrument: Instrument, extra: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(value if value in instrument.values else OTHER for value in extra)


def _label(value: str) -> str:
    # A lone surrogate (a path of undecodable bytes) would break every scrape of the process.
    return str(value).encode("utf-8", "replace").decode("utf-8")


_LOCK = Lock()
_DEFAULT_LOCK = Lock()
_BY_REGISTRY: WeakKeyDictionary[CollectorRegistry, _Numbers] = WeakKeyDictionary()


def _numbers_of(registry: CollectorRegistry) -> _Numbers:
    """The numbers of a registry, registered once: a second registration of the same names would raise."""
    with _LOCK:
        if registry not in _BY_REGISTRY:
            numbers = _Numbers()
            registry.register(numbers)
            _BY_REGISTRY[registry] = numbers
        return _BY_REGISTRY[registry]


@cache
def _default_metrics() -> MergeMetrics:
    return MergeMetrics()
