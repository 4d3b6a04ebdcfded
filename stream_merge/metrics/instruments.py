"""The metrics of a registry, changed under one lock: a scrape never sees half a batch, and the ledger adds up."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from math import inf
from threading import Lock, RLock
from typing import ParamSpec, TypeAlias
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from stream_merge.metrics import catalogue as M
from stream_merge.metrics.catalogue import Instrument, Type
from stream_merge.model.logs import tell
from stream_merge.model.results import FATES, EventCounts, FailedBatch, MergeResult

logger = logging.getLogger(__name__)

Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Change: TypeAlias = tuple[Instrument, tuple[str, ...], float]
"""An instrument, its label value beyond query and target (if it has one), and the amount."""
P = ParamSpec("P")


def _never_fails_a_batch(method: Callable[P, None]) -> Callable[P, None]:
    """Log errors of `method`: the merge is committed, and Spark would deliver its batch again."""

    @wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception:
            tell(logger.error, "stream_merge.metrics_error", exc_info=True)

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
        self._numbers = _registered_numbers(REGISTRY if registry is None else registry)

    @_never_fails_a_batch
    def prepare(self, query: str, target: str) -> None:
        """Create every series of a sink at 0: Prometheus misses the first rise of a counter that starts above."""
        self._numbers.change(query, target)

    @_never_fails_a_batch
    def attempt(self, query: str, target: str) -> None:
        """Count one merge attempt."""
        self._numbers.change(query, target, add=[(M.ATTEMPTS, (), 1)])

    @_never_fails_a_batch
    def conflict(self, query: str, target: str, conflict: str) -> None:
        """Count one lost commit; a class that is not in `CONFLICTS` counts as `other`."""
        self._numbers.change(query, target, add=[(M.LOST_COMMITS, (conflict,), 1)])

    @_never_fails_a_batch
    def exhausted(self, query: str, target: str) -> None:
        """Count a commit that the retry policy gave up."""
        self._numbers.change(query, target, add=[(M.RETRIES_EXHAUSTED, (), 1)])

    @_never_fails_a_batch
    def backoff(self, query: str, target: str, seconds: float) -> None:
        """Count the wait before another attempt."""
        self._numbers.change(query, target, add=[(M.BACKOFF, (), seconds)])

    @_never_fails_a_batch
    def observe(self, result: MergeResult) -> None:
        """Count a call that returned."""
        add = [*_call(result, result.outcome), *_events(result.events, result.reasons)]
        if result.attempts:
            add.append((M.MERGES, (result.engine,), 1))
        if result.refusal is not None:
            add.append((M.DRIVER_REFUSALS, (result.refusal,), 1))
        if (run := result.maintenance) is not None:
            add.append((M.MAINTENANCE, (run.outcome,), 1))
            add += [(M.MAINTENANCE_REMOVED, (), run.removed_files), (M.MAINTENANCE_ADDED, (), run.added_files)]
        unknown = result.metrics.keys() - M.DELTA_MERGE_METRICS.keys()
        for name in result.metrics.keys() - unknown:
            instrument = M.DELTA_MERGE_METRICS[name]
            value = result.metrics[name] * instrument.factor
            # A timing of 0 is a step that did not run: Delta 4.4 reports at least 1 ms for one that did.
            if value > 0:
                add.append((instrument, (), value))
        add.append((M.UNKNOWN_DELTA_METRICS, (), len(unknown)))
        store: list[Change] = []
        if result.version is not None:
            store = [
                (M.LAST_VERSION, (), result.version),
                (M.LAST_COMMIT, (), time.time() - result.seconds.get("maintenance", 0.0)),
            ]
        if (debt := result.read_debt) is not None:
            store += [(M.DELETED_SHARE, (), debt.deleted_share), (M.AWAITING_FILES, (), debt.awaiting_files)]
        self._numbers.change(result.query, result.target, add=add, store=store)
        self._numbers.warn_once(sorted(unknown))

    @_never_fails_a_batch
    def observe_events(self, query: str, target: str, events: EventCounts, reasons: Mapping[str, int]) -> None:
        """Count the events of a batch whose call raised after its commit."""
        self._numbers.change(query, target, add=_events(events, reasons))

    @_never_fails_a_batch
    def observe_failure(self, failed: FailedBatch) -> None:
        """Count a call that raised."""
        self._numbers.change(failed.query, failed.target, add=_call(failed, M.FAILED))

    @_never_fails_a_batch
    def prepare_topics(self, query: str, target: str, topics: Iterable[str]) -> None:
        """Create the series of a job's topics at 0, without lag and delay, whose 0 means none."""
        per_topic = [row for row in M.CATALOGUE if row.label == "topic" and row not in (M.TOPIC_LAG, M.TOPIC_DELAY)]
        add = [(instrument, (topic,), 0.0) for instrument in per_topic for topic in topics]
        self._numbers.change(query, target, add=add)

    @_never_fails_a_batch
    def observe_topics(
        self, query: str, target: str, *, add: Iterable[Change] = (), store: Iterable[Change] = ()
    ) -> None:
        """Count what a job read, and store its position."""
        self._numbers.change(query, target, add=add, store=store)

    @_never_fails_a_batch
    def set_aside(self, query: str, target: str, reason: str, events: int) -> None:
        """Count events that `MergeSinks` quarantined instead of merging them."""
        add: list[Change] = [(M.RECEIVED, (), events), (M.EVENTS, ("quarantined",), events)]
        self._numbers.change(query, target, add=[*add, (M.QUARANTINED, (reason,), events)])


def default_metrics() -> MergeMetrics:
    """The metrics of every sink without its own, on prometheus_client's registry."""
    with _LOCK:
        return _default_metrics()


@dataclass(slots=True)
class _Distribution:
    """State of one histogram series."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(M.BUCKETS_SECONDS) + 1))
    """Observations by bucket, not cumulated; the last one has no upper bound."""
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(M.BUCKETS_SECONDS, value)] += 1
        self.total += value

    def cumulated(self) -> list[tuple[str, float]]:
        seen, buckets = 0, []
        for bound, count in zip((*M.BUCKETS_SECONDS, inf), self.counts, strict=True):
            seen += count
            buckets.append(("+Inf" if bound == inf else str(float(bound)), float(seen)))
        return buckets


class _Numbers(Collector):
    """Every number of one registry.

    prometheus_client's instruments lock series by series and add a `_created` series to each.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._prepared: set[tuple[str, str]] = set()
        self._warned: set[str] = set()
        self._values: dict[str, dict[tuple[str, ...], float]] = {
            instrument.name: {} for instrument in M.CATALOGUE if instrument.type != "histogram"
        }
        self._distributions: dict[str, dict[tuple[str, ...], _Distribution]] = {
            instrument.name: {} for instrument in M.CATALOGUE if instrument.type == "histogram"
        }

    def change(self, query: str, target: str, *, add: Iterable[Change] = (), store: Iterable[Change] = ()) -> None:
        """Apply all changes at once."""
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
        """Log each unknown Delta metric once."""
        with self._lock:
            new = [name for name in unknown if name not in self._warned]
            self._warned.update(new)
        for name in new:
            tell(logger.warning, "stream_merge.unknown_delta_metric", delta_metric=name)

    def describe(self) -> Iterator[Family]:
        """Families without samples."""
        return (_family(instrument) for instrument in M.CATALOGUE)

    def collect(self) -> Iterator[Family]:
        """All series, consistent with each other."""
        with self._lock:
            return iter([self._filled(instrument) for instrument in M.CATALOGUE])

    def _prepare(self, sink: tuple[str, str]) -> None:
        if sink in self._prepared:
            return
        for instrument in M.CATALOGUE:
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


def _events(events: EventCounts, reasons: Mapping[str, int]) -> list[Change]:
    return [
        *((M.EVENTS, (fate,), getattr(events, fate)) for fate in FATES),
        (M.RECEIVED, (), events.received),
        (M.TIES, (), events.ties),
        (M.UNKNOWN_FIELDS, (), events.with_unknown_fields),
        *((M.QUARANTINED, (reason,), number) for reason, number in reasons.items()),
    ]


def _call(call: MergeResult | FailedBatch, outcome: str) -> list[Change]:
    return [
        (M.BATCHES, (outcome,), 1),
        (M.BATCH_DURATION, (), call.duration_seconds),
        *((M.PHASE_SECONDS, (phase,), seconds) for phase, seconds in call.seconds.items()),
    ]


_FAMILIES: Mapping[Type, type[Family]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _family(instrument: Instrument) -> Family:
    return _FAMILIES[instrument.type](instrument.name, instrument.help, labels=instrument.labels)


def _bounded(instrument: Instrument, extra: tuple[str, ...]) -> tuple[str, ...]:
    if instrument.label == "topic":  # as many as the job file names
        return extra
    return tuple(value if value in instrument.values else M.OTHER for value in extra)


def _label(value: str) -> str:
    # A lone surrogate (a path of undecodable bytes) would break every scrape of the process.
    return str(value).encode("utf-8", "replace").decode("utf-8")


_LOCK = RLock()
_BY_REGISTRY: WeakKeyDictionary[CollectorRegistry, _Numbers] = WeakKeyDictionary()


def _registered_numbers(registry: CollectorRegistry) -> _Numbers:
    """The numbers of a registry, registered once: a second registration raises."""
    with _LOCK:
        if registry not in _BY_REGISTRY:
            numbers = _Numbers()
            registry.register(numbers)
            _BY_REGISTRY[registry] = numbers
        return _BY_REGISTRY[registry]


@cache
def _default_metrics() -> MergeMetrics:
    return MergeMetrics()
