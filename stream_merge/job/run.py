"""Running a job: each query on its own, started again after an outage, stopped between two micro-batches."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from queue import SimpleQueue

from kafka.errors import KafkaError
from pyspark.sql import SparkSession

from stream_merge.errors import (
    CommitConflictError,
    CommitStateUnknownError,
    ConfigError,
    StreamMergeError,
)
from stream_merge.job.check import refuse_start_of_existing
from stream_merge.job.lookout import Lookout, Progress
from stream_merge.job.offsets import Checkpoint
from stream_merge.job.settings import JobSettings, QuerySettings
from stream_merge.job.topic import TopicSink, merge_sink
from stream_merge.metrics import MergeMetrics
from stream_merge.results import MergeResult
from stream_merge.sources import kafka
from stream_merge.sources.kafka import Cluster
from stream_merge.spark_internals import java_causes, owned_session
from stream_merge.tables import local_path
from stream_merge.watch.queries import QueryFailedError, Running, Stream, drained

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_LONGEST_OUTAGE_SECONDS = 600.0
"""How long a query is started again and again without a micro-batch in between."""
_SETTLED_SECONDS = 150.0
"""A query that has run for so long has found its broker: Spark 4.2 polls for 120 s before it gives up."""
_BACKOFF_SECONDS = (1.0, 2.0, 5.0, 10.0)
_OUTAGES = (
    "org.apache.kafka.common.errors.TimeoutException",
    "org.apache.kafka.common.errors.DisconnectException",
    "org.apache.kafka.common.errors.NetworkException",
    "org.apache.kafka.common.errors.RetriableException",
    "org.apache.kafka.common.errors.UnknownTopicOrPartitionException",
    "org.apache.kafka.common.errors.SaslAuthenticationException",
    "org.apache.kafka.common.errors.TopicAuthorizationException",
    "org.apache.kafka.common.KafkaException",
    "java.util.concurrent.TimeoutException",
)
"""Java errors of a broker that is away, or does not let the job in right now."""


class Verdict(Enum):
    """What has to change before the job can go on; the value is the exit code."""

    NOTHING = 0
    CONFIGURATION = 2
    DATA = 3
    AGAIN = 4


_WORST_FIRST = (Verdict.DATA, Verdict.CONFIGURATION, Verdict.AGAIN, Verdict.NOTHING)
"""Whoever restarts jobs that ended with 4 must not do so while a query waits for a person."""


@dataclass(kw_only=True, slots=True)
class JobResult:
    """How a job ended."""

    results: dict[str, list[MergeResult]] = field(default_factory=dict)
    """Query name -> its micro-batches."""
    failures: dict[str, Exception] = field(default_factory=dict)
    """Query name -> why it ended."""

    @property
    def verdict(self) -> Verdict:
        """The worst of all queries."""
        found = {verdict(error) for error in self.failures.values()}
        return next((one for one in _WORST_FIRST if one in found), Verdict.NOTHING)


def verdict(error: Exception) -> Verdict:
    """What has to change after an error."""
    if isinstance(error, ConfigError):
        return Verdict.CONFIGURATION
    if isinstance(error, CommitConflictError | CommitStateUnknownError) or is_outage(error):
        return Verdict.AGAIN
    return Verdict.DATA if isinstance(error, StreamMergeError) else Verdict.AGAIN


def is_outage(error: BaseException) -> bool:
    """Whether the broker was away: the same offsets can be read later."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, KafkaError | TimeoutError | ConnectionError):
            return True
        if any(class_name in _OUTAGES for class_name, _ in java_causes(found)):
            return True
        if isinstance(found, QueryFailedError) and any(name in found.trace for name in _OUTAGES):
            return True
        found = found.__cause__
    return False


def stop_request(query: QuerySettings) -> Path | None:
    """The file whose presence stops a query: beside its checkpoint folder; None where that is not on a disk."""
    place = local_path(query.checkpoint)
    return None if place is None else place.with_name(f"{place.name}.stop")


def request_stop(settings: JobSettings) -> list[tuple[str, Path]]:
    """Ask the queries of a running job to stop; each by the file whose path is returned with its name."""
    requests = [(query.name, stop_request(query)) for query in settings.queries]
    remote = [name for name, path in requests if path is None]
    if remote:
        msg = f"the checkpoints of {remote!r} are not on this disk; send SIGTERM to the job's process"
        raise ConfigError(msg)
    asked = [(name, path) for name, path in requests if path is not None]
    for _, path in asked:
        path.touch()
    return asked


def run(
    settings: JobSettings,
    session: SparkSession,
    *,
    once: bool = False,
    stopping: threading.Event | None = None,
    on_result: Callable[[str, MergeResult], None] = lambda *_: None,
    metrics: MergeMetrics | None = None,
) -> JobResult:
    """Run all queries of a job until they end or someone stops them.

    Args:
        settings: the job.
        session: each query gets a session of its own, made from this one.
        once: end when everything that was there at the start has been merged.
        stopping: set it, from any thread, to end after the running micro-batches.
        on_result: called in this thread for each micro-batch, with the query's name.
        metrics: where to count; None: one instance on the default Prometheus registry.

    Returns:
        What the queries did, and why those failed that did; one that fails does not stop the others.
    """
    return Job(settings, session, metrics=metrics).run(
        once=once, stopping=stopping or threading.Event(), on_result=on_result
    )


class Job:
    """The queries of a job file in one Spark application."""

    def __init__(self, settings: JobSettings, session: SparkSession, *, metrics: MergeMetrics | None = None) -> None:
        self._settings = settings
        self._session = session
        self._metrics = metrics
        connection = settings.kafka.connection()
        self._clusters = {query.name: Cluster(connection) for query in settings.queries}
        self._progress = {query.name: _progress(query, metrics) for query in settings.queries}

    def run(self, *, once: bool, stopping: threading.Event, on_result: Callable[[str, MergeResult], None]) -> JobResult:
        """As `run`."""
        result = JobResult()
        arrived: SimpleQueue[tuple[str, MergeResult]] = SimpleQueue()
        queries = [_Query(query, self._stream, arrived, once=once) for query in self._settings.queries]
        lookout = Lookout(self._settings.kafka.connection(), self._progress.values())

        def hand_over() -> None:
            for name, merged in drained(arrived):
                result.results.setdefault(name, []).append(merged)
                on_result(name, merged)

        with lookout:
            try:
                while any(not query.has_ended for query in queries) and not stopping.is_set():
                    for query in queries:
                        query.step()
                    hand_over()
                    time.sleep(_POLL_SECONDS)
            finally:
                for query in queries:
                    query.stop()
                for cluster in self._clusters.values():
                    cluster.close()
        hand_over()
        result.failures = {query.name: query.failure for query in queries if query.failure is not None}
        return result

    def _stream(self, query: QuerySettings) -> Stream:
        session = owned_session(self._session)
        checkpoint = Checkpoint.in_session(session, query.checkpoint)
        refuse_start_of_existing(query, checkpoint)
        self._progress[query.name].goes_on_from(checkpoint.merged())
        connection = self._settings.kafka.connection()
        sink = TopicSink(
            query,
            merge_sink(query, metrics=self._metrics),
            cluster=self._clusters[query.name],
            progress=self._progress[query.name],
        )
        offsets, millis = _start(query)
        records = kafka.records(
            session,
            connection,
            query.topic,
            starting_offsets=offsets,
            starting_timestamp_millis=millis,
            max_records=query.limits.max_events_per_batch,
            fail_on_data_loss=query.on_data_loss == "stop",
        )
        return Stream(
            name=query.name, events=records, sink=sink, checkpoint=query.checkpoint, trigger_seconds=query.trigger
        )


def _progress(query: QuerySettings, metrics: MergeMetrics | None) -> Progress:
    group = f"stream-merge-{query.name}" if query.group is None else query.group
    return Progress(query=query.name, target=query.name, topics=query.topic, group=group or None, metrics=metrics)


def _start(query: QuerySettings) -> tuple[str, int | None]:
    """Spark's starting offsets, or a time instead."""
    start = query.start
    if start is None or isinstance(start, str):
        return start or "earliest", None
    if isinstance(start, datetime):
        moment = start if start.tzinfo is not None else start.replace(tzinfo=UTC)
        return "earliest", int(moment.timestamp() * 1000)
    offsets = ", ".join(f'"{partition}": {offset}' for partition, offset in start.items())
    return f'{{"{query.topic[0]}": {{{offsets}}}}}', None


class _Query:
    """One query through its outages."""

    def __init__(
        self,
        settings: QuerySettings,
        make: Callable[[QuerySettings], Stream],
        arrived: SimpleQueue[tuple[str, MergeResult]],
        *,
        once: bool,
    ) -> None:
        self._settings = settings
        self._make = make
        self._arrived = arrived
        self._once = once
        self._closing = threading.Event()
        self._running: Running | None = None
        self._not_before = 0.0
        self._outage_since: float | None = None
        self._restarts = 0
        self.failure: Exception | None = None
        self.has_ended = False
        self._asked = stop_request(settings)
        self._take_request()  # of a run before

    @property
    def name(self) -> str:
        return self._settings.name

    def step(self) -> None:
        """Start, restart or end the query, if it is time to."""
        if self.has_ended or time.monotonic() < self._not_before:
            return
        if self._running is None:
            self._start()
        elif self._take_request():
            self.stop()
        elif not self._running.is_active or self._running.has_failed:
            self._look_at_the_end(self._running)
        elif self._outage_since is not None and time.monotonic() - self._not_before > _SETTLED_SECONDS:
            self._outage_since, self._restarts = None, 0

    def stop(self) -> None:
        """End it after its running micro-batch."""
        self.has_ended = True
        if self._running is None:
            return
        self._closing.set()
        self._running.stop()
        self._keep(self._running.failure)

    def _take_request(self) -> bool:
        """Whether somebody has asked to stop; the request is used up."""
        if self._asked is None or not self._asked.exists():
            return False
        self._asked.unlink(missing_ok=True)
        return True

    def _start(self) -> None:
        try:
            self._running = Running(self._make(self._settings), self._arrived, self._closing, once=self._once)
        except Exception as err:
            self._failed(err)

    def _look_at_the_end(self, running: Running) -> None:
        running.stop()
        error = running.failure
        self._running = None
        if error is None:
            self.has_ended = True
            return
        if running.has_delivered:
            self._outage_since, self._restarts = None, 0
        self._failed(error)

    def _failed(self, error: Exception) -> None:
        now = time.monotonic()
        self._outage_since = now if self._outage_since is None else self._outage_since
        if not is_outage(error) or now - self._outage_since > _LONGEST_OUTAGE_SECONDS:
            self._keep(error)
            self.has_ended = True
            return
        wait = _BACKOFF_SECONDS[min(self._restarts, len(_BACKOFF_SECONDS) - 1)]
        self._restarts += 1
        self._not_before = now + wait
        log.warning("query_restarts", extra={"query": self.name, "seconds": wait, "error": str(error).splitlines()[0]})

    def _keep(self, error: Exception | None) -> None:
        if error is not None and self.failure is None:
            self.failure = error
