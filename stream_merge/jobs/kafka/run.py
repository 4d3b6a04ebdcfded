"""Running a job: its queries side by side in one Spark application."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

from pyspark.sql import SparkSession

from stream_merge.errors import ConfigError, StreamMergeError
from stream_merge.jobs.kafka import control
from stream_merge.jobs.kafka.batch import TopicSink, merge_sink
from stream_merge.jobs.kafka.batch_offsets import Checkpoint
from stream_merge.jobs.kafka.check import refuse_places, refuse_start_elsewhere, refuse_start_of_existing
from stream_merge.jobs.kafka.distinct_targets import OwnTable, Targets
from stream_merge.jobs.kafka.exit_codes import Verdict, worst
from stream_merge.jobs.kafka.lag import Lookout, Progress
from stream_merge.jobs.kafka.lineage import Origin
from stream_merge.jobs.kafka.query import Supervised
from stream_merge.jobs.kafka.replay import Replayed, Request, replay
from stream_merge.jobs.kafka.settings import JobSettings, QuerySettings
from stream_merge.jobs.watch.queries import MOST_KEPT, Stream, drained
from stream_merge.metrics.health import Health
from stream_merge.metrics.instruments import MergeMetrics
from stream_merge.model.logs import tell
from stream_merge.model.results import MergeResult
from stream_merge.model.table_ref import TableRef
from stream_merge.sources.kafka.connection import Cluster
from stream_merge.sources.kafka.connection import records as records_of
from stream_merge.spark import catalog
from stream_merge.spark.jvm import owned_session
from stream_merge.spark.preflight import expect_workers, refuse_forgetful_catalog
from stream_merge.tables import fitness, locks, spark_table
from stream_merge.tables.applied_batches import expect_same_table

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1


@dataclass(kw_only=True, slots=True)
class JobResult:
    """How a job ended."""

    results: dict[str, deque[MergeResult]] = field(default_factory=dict)
    """Query name -> its newest micro-batches."""
    failures: dict[str, Exception] = field(default_factory=dict)
    """Query name -> why it ended."""

    @property
    def verdict(self) -> Verdict:
        """The worst of all queries."""
        return worst(self.failures.values())


def run(
    settings: JobSettings,
    session: SparkSession,
    *,
    once: bool = False,
    stopping: threading.Event | None = None,
    on_result: Callable[[str, MergeResult], None] = lambda *_: None,
    on_lag: Callable[[str, int], None] = lambda *_: None,
    metrics: MergeMetrics | None = None,
    health: Health | None = None,
) -> JobResult:
    """Run all queries of a job until they end or someone stops them.

    Args:
        settings: the job.
        session: each query gets a session of its own, made from this one.
        once: end when everything that was there at the start has been merged.
        stopping: set it, from any thread, to end after the running micro-batches.
        on_result: called in this thread for each micro-batch, with the query's name.
        on_lag: called in this thread until a query's first micro-batch, with its name and the events it is behind.
        metrics: where to count; None: one instance on the default Prometheus registry.
        health: told how the queries are.

    Returns:
        What the queries did, and why those failed that did; one that fails does not stop the others.
    """
    return Job(settings, session, metrics=metrics).run(
        once=once,
        stopping=stopping or threading.Event(),
        on_result=on_result,
        on_lag=on_lag,
        health=health,
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
        self._turns = {query.name: threading.Lock() for query in settings.queries}
        self._sinks: dict[str, TopicSink] = {}
        self._targets = Targets(lambda target: _place(owned_session(session), target))

    def run(
        self,
        *,
        once: bool,
        stopping: threading.Event,
        on_result: Callable[[str, MergeResult], None],
        on_lag: Callable[[str, int], None],
        health: Health | None,
    ) -> JobResult:
        """As `run`."""
        refuse_places(self._settings)
        expect_workers(self._session)
        result = JobResult()
        arrived: SimpleQueue[tuple[str, MergeResult]] = SimpleQueue()
        queries = [Supervised(query, self, arrived, once=once) for query in self._settings.queries]
        if health is not None:
            health.follow(self._session, lambda: {query.name: query.state for query in queries})
        certificates = {
            "kafka": self._settings.kafka.security.certificate_file,
            "metrics": self._settings.metrics.certificate_file,
        }
        lookout = Lookout(
            Cluster(self._settings.kafka.connection()),
            self._progress.values(),
            certificates={name: file for name, file in certificates.items() if file is not None},
        )

        def hand_over() -> None:
            for name, merged in drained(arrived):
                result.results.setdefault(name, deque(maxlen=MOST_KEPT)).append(merged)
                on_result(name, merged)
            for name, progress in self._progress.items():
                if name not in result.results and progress.lag is not None:
                    on_lag(name, progress.lag)

        with lookout, ExitStack() as held:
            try:
                for query in queries:
                    if not held.enter_context(control.held(query.settings)):
                        query.end(control.refusal(query.settings))
                        continue
                    try:
                        held.enter_context(self._only_writer(query.settings))
                        query.forget_old_requests()
                    except ConfigError as err:
                        query.end(err)
                while any(not query.has_ended for query in queries) and not stopping.is_set():
                    for query in queries:
                        query.step()
                        if query.failure is not None and not self._progress[query.name].has_failed:
                            self._progress[query.name].failed()
                            if any(not other.has_ended for other in queries):  # else the job ends, and says so itself
                                tell(log.error, "query_ended", query=query.name, error=str(query.failure))
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

    def _only_writer(self, query: QuerySettings) -> AbstractContextManager[None]:
        location = None
        with suppress(StreamMergeError):  # the query will say so, and try again where that helps
            location = spark_table.named_location(self._session, query.target)
        return locks.only_writer(query.target, f"query {query.name!r}", location)

    def look_before(self, query: QuerySettings, *, is_first: bool, once: bool) -> None:
        """Stop for what Spark would stumble over while it plans a batch, without a word that helps.

        Args:
            query: which.
            is_first: whether it has not run in this process; afterwards its checkpoint says where it goes on.
            once: whether nothing is waited for that was never there.

        Raises:
            ConfigError: `start` does not fit the checkpoint or the topic, `keys` not the table, or there is no topic.
            ContractError: the offsets of the checkpoint are those of a topic that was made anew.
            kafka.errors.KafkaError: the broker is away.
        """
        session = owned_session(self._session)
        checkpoint = Checkpoint.in_session(session, query.checkpoint)
        if is_first:
            refuse_start_of_existing(query, checkpoint)
            checkpoint.expect_one_of(query.topic, may_lack=query.on_data_loss == "continue")
        topics = self._clusters[query.name].topics(query.topic)
        missing = [topic for topic in query.topic if topic not in topics]
        if once and set(missing) - set(checkpoint.merged()):
            msg = (
                f"[TOPIC_NOT_FOUND] query {query.name!r} reads topic(s) {missing!r}, which the broker does not have;"
                " correct 'topic', or let the connector create them first (without --once, the query waits)"
            )
            raise ConfigError(msg, target=query.target)
        if missing:  # the connector may be about to make it
            tell(log.warning, "topic_missing", query=query.name, topics=missing)
        if is_first and not checkpoint.has_begun:
            refuse_start_elsewhere(query, topics)
        refuse_forgetful_catalog(session, query.target)
        found = spark_table.find(session, query.target)
        self._targets.expect_own(query.name, query.target)
        others = found and fitness.keys_problem(found, query.target, query.keys, case_sensitive=False)
        if others:  # the sink would say so at the next batch, which may be long in coming
            raise ConfigError(others, target=query.target)
        query_id = checkpoint.query_id()
        if query_id is not None:
            if is_first:
                location = spark_table.location(session, query.target) if found is None else found.location
                expect_same_table(
                    checkpoint, found, name=query.name, label=query.name, target=query.target, location=location
                )
            Origin.of_table(session, found, query.identity(query_id), query).expect_same_topics(topics)

    def stream(self, query: QuerySettings) -> Stream:
        """What a query does with what it reads."""
        session = owned_session(self._session)
        checkpoint = Checkpoint.in_session(session, query.checkpoint)
        self._progress[query.name].goes_on_from(checkpoint.merged(), checkpoint.initial)
        connection = self._settings.kafka.connection()
        sink = TopicSink(
            query,
            merge_sink(query, metrics=self._metrics, observers=self._settings.observers(query)),
            cluster=self._clusters[query.name],
            progress=self._progress[query.name],
            turn=self._turns[query.name],
        )
        self._sinks[query.name] = sink
        begins = query.begins()
        if not checkpoint.has_begun:
            checkpoint.note_start(begins.text)
        records = records_of(
            session,
            connection,
            query.topic,
            starting_offsets=begins.offsets,
            starting_timestamp_millis=begins.millis,
            max_records=query.limits.max_events_per_batch,
            fail_on_data_loss=query.on_data_loss == "stop",
        )
        return Stream(
            name=query.name,
            events=records,
            sink=OwnTable(sink, query.name, self._targets),
            checkpoint=query.checkpoint,
            trigger_seconds=query.trigger,
        )

    def replay(self, query: QuerySettings, request: Request) -> Replayed:
        """What a command has asked for; between two batches: a local disk takes one writer at a time."""
        if request.settings not in (None, query.digest()):
            msg = (
                f"[JOB_FILE_CHANGED] query {query.name!r} runs with another version of the job file; restart the job,"
                " or replay while it is stopped"
            )
            return Replayed(id=request.id, error=msg)
        with self._turns[query.name]:
            try:
                return replay(owned_session(self._session), query, request, metrics=self._metrics)
            finally:
                sink = self._sinks.get(query.name)
                if sink is not None:
                    sink.look_again()


def _place(session: SparkSession, target: TableRef) -> TableRef:
    location = spark_table.location(session, target)
    return location if location.path is not None else TableRef(catalog.place_to_be(session, target))


def _progress(query: QuerySettings, metrics: MergeMetrics | None) -> Progress:
    group = f"stream-merge-{query.name}" if query.group is None else query.group
    return Progress(query=query.name, target=query.name, topics=query.topic, group=group or None, metrics=metrics)
