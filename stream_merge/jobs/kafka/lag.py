"""The lag of each query, read from the broker also while a batch runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from stream_merge.jobs.kafka.batch_offsets import Covered
from stream_merge.jobs.kafka.consumer_groups import FAILURES, ConsumerGroup
from stream_merge.jobs.kafka.counts import Tally
from stream_merge.metrics.catalogue import (
    CERTIFICATE_EXPIRY,
    QUERY_FAILED,
    TOPIC_DELAY,
    TOPIC_GAPS,
    TOPIC_LAG,
    TOPIC_LOST,
    TOPIC_MIRROR_FAILURES,
    TOPIC_NEWEST,
    TOPIC_POLLED,
    TOPIC_RECORDS,
    TOPIC_SKEW,
    TOPIC_UNEXPECTED_GAPS,
)
from stream_merge.metrics.instruments import MergeMetrics, default_metrics
from stream_merge.model.logs import tell
from stream_merge.model.results import MergeResult
from stream_merge.sources.kafka import certificates
from stream_merge.sources.kafka.connection import Cluster, Offsets, TopicState, is_refusal

log = logging.getLogger(__name__)

POLL_SECONDS = 2.0
_ASK_AGAIN_SECONDS = 15.0
"""Until topics are asked for again that were not described."""


@dataclass(kw_only=True)
class Progress:
    """How far one query is; written by its batches, read by the lookout."""

    query: str
    target: str
    """Label of metrics."""
    topics: tuple[str, ...]
    group: str | None
    """Consumer group that shows the offsets; None: none does."""
    metrics: MergeMetrics | None = None
    has_failed: bool = False
    ends: dict[tuple[str, int], int] = field(default_factory=dict)
    """Topic and partition -> offset behind the last merged one."""
    starts: Callable[[], Offsets] = dict
    """Where the checkpoint started; empty until Spark has written it."""
    started: dict[tuple[str, int], int] = field(default_factory=dict)
    """The same of each topic and partition."""
    lag: int | None = None
    """Events in the topics that are not merged; None: not known yet."""
    newest_millis: dict[str, int] = field(default_factory=dict)
    """Topic -> when the source committed the newest merged event; a batch may bring older ones alone."""
    not_answered_at: float | None = None
    """When the broker, which is there, did not describe the query's topics; None: it does, or nobody has asked."""
    may_have_gaps: frozenset[str] | None = None
    """Topics whose offsets need not all have a record; None: nobody knows, so there is no alarm."""

    def begin(self) -> None:
        """Let the series exist, and the query run: a run before this one in the process may have failed."""
        self._numbers.prepare_topics(self.query, self.target, self.topics)
        self._numbers.observe_topics(self.query, self.target, store=[(QUERY_FAILED, (), 0.0)])

    def failed(self) -> None:
        """The query has ended with an error, and what it merges stands still, while the job may go on."""
        self.has_failed = True
        self._numbers.observe_topics(self.query, self.target, store=[(QUERY_FAILED, (), 1.0)])

    def has_certificates(self, ends: Mapping[str, float]) -> None:
        """Publish when the job's certificates expire."""
        store = [(CERTIFICATE_EXPIRY, (name,), end) for name, end in ends.items()]
        self._numbers.observe_topics(self.query, self.target, store=store)

    def goes_on_from(self, ends: Offsets, starts: Callable[[], Offsets]) -> None:
        """What runs before have merged, and where they started, which is asked until it is known."""
        self.ends.update(_flat(ends))
        self.starts = starts

    def merged(self, covered: Covered, tally: Tally, result: MergeResult | None) -> None:
        """Count a batch that is in the target; only of one that was committed now is there a delay.

        Args:
            covered: its offsets.
            tally: what it brought.
            result: of the merge; None where there was none.
        """
        kinds = [(TOPIC_RECORDS, (kind,), number) for kind, number in tally.kinds().items()]
        gaps, lost = [], dict(covered.lost_places())
        gone = [(TOPIC_LOST, (topic,), len(offsets)) for (topic, _), offsets in lost.items()]
        for (topic, partition), offsets in covered.places():
            self.ends[topic, partition] = offsets.end
            without_record = tally.gaps((topic, partition), offsets) - len(lost.get((topic, partition), ()))
            gaps.append((TOPIC_GAPS, (topic,), without_record))
            if without_record and self.may_have_gaps is not None and topic not in self.may_have_gaps:
                gaps.append((TOPIC_UNEXPECTED_GAPS, (topic,), without_record))
                tell(
                    log.error,
                    "offsets_without_records",
                    query=self.query,
                    topic=topic,
                    partition=partition,
                    first=offsets.start,
                    last=offsets.end - 1,
                    offsets=without_record,
                    remedy="set 'transactional: true' if producers of the topic use transactions",
                )
        self._numbers.observe_topics(self.query, self.target, add=[*kinds, *gaps, *gone])
        is_committed = result is not None and result.version is not None
        now, skewed, store = time.time() - (0.0 if result is None else result.seconds.get("maintenance", 0.0)), [], []
        for topic, millis in tally.newest_millis.items():
            delay = now - millis / 1000
            newest = self.newest_millis[topic] = max(millis, self.newest_millis.get(topic, millis))
            store.append((TOPIC_NEWEST, (topic,), newest / 1000))
            if is_committed:
                store.append((TOPIC_DELAY, (topic,), max(0.0, delay)))
            if delay < 0:
                skewed.append((TOPIC_SKEW, (topic,), 1.0))
        self._numbers.observe_topics(self.query, self.target, add=skewed, store=store)

    def seen(self, topics: dict[str, TopicState]) -> None:
        """Publish the lag, also when it is 0; and when the broker has answered, also where the lag is not known yet."""
        now = time.time()
        if not self.started:
            with suppress(Exception):  # it is being written, or its place does not answer: at the next look
                self.started = _flat(self.starts())
        lags: dict[str, int] = {}
        if self.ends or self.started:
            lags = {topic: self._lag(topic, topics[topic]) for topic in self.topics if topic in topics}
        self.lag = sum(lags.values()) if lags else None
        store = [(TOPIC_POLLED, (topic,), now) for topic in self.topics]  # also of one that the broker lacks
        store += [(TOPIC_LAG, (topic,), lag) for topic, lag in lags.items()]
        self._numbers.observe_topics(self.query, self.target, store=store)

    def mirror_failed(self) -> None:
        """Count a failure to write the group's offsets."""
        self._numbers.observe_topics(
            self.query, self.target, add=[(TOPIC_MIRROR_FAILURES, (topic,), 1.0) for topic in self.topics]
        )

    def _lag(self, topic: str, state: TopicState) -> int:
        """Before the first batch everything from where the query starts."""
        behind = 0
        for partition, end in state.ends.items():
            started = self.started.get((topic, partition), state.starts.get(partition, 0))
            behind += max(0, end - self.ends.get((topic, partition), started))
        return behind

    @property
    def _numbers(self) -> MergeMetrics:
        return self.metrics or default_metrics()


def _flat(offsets: Offsets) -> dict[tuple[str, int], int]:
    return {(topic, p): offset for topic, partitions in offsets.items() for p, offset in partitions.items()}


class Lookout:
    """A thread that asks the broker for the ends of all topics of a job, and mirrors offsets to consumer groups.

    Everything here is best effort: a failure is counted or logged, and never fails a batch.

    Args:
        cluster: asked by nobody else; closed at the end.
        progress: of each query.
        certificates: PEM files by their name in the metrics.
        now: seconds on a clock that never goes back.
    """

    def __init__(
        self,
        cluster: Cluster,
        progress: Iterable[Progress],
        *,
        certificates: Mapping[str, str] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._progress = list(progress)
        self._certificates = dict(certificates or {})
        self._now = now
        self._groups = {one.query: ConsumerGroup(name=one.group) for one in self._progress if one.group is not None}
        self._over = threading.Event()
        self._away_since: float | None = None
        self._has_stumbled = False
        self._thread = threading.Thread(target=self._run, name="stream-merge-lookout", daemon=True)

    def __enter__(self) -> Lookout:
        """Start looking."""
        for progress in self._progress:
            progress.begin()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Look once more, so that what was merged last is mirrored, and end."""
        self._over.set()
        self._thread.join()
        self._guarded(self._look)
        self._guarded(self._cluster.close)

    def _run(self) -> None:
        while not self._over.is_set():
            self._look_at_certificates()
            self._guarded(self._look)
            self._over.wait(POLL_SECONDS)

    def _look_at_certificates(self) -> None:
        """Also while the broker is away: a renewed file is seen, one that is being replaced keeps its last answer."""
        ends = {}
        for name, file in self._certificates.items():
            with suppress(OSError, ValueError, IndexError):
                ends[name] = certificates.expires_at(file)
        for progress in self._progress:
            progress.has_certificates(ends)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Log what nobody expects, once until it is over.

        It would end the thread, and the lag would stand still without a word; at the end it would take the place of
        what the job has to say.
        """
        try:
            step()
        except Exception:
            if not self._has_stumbled:
                tell(log.error, "lookout_failed", exc_info=True)
            self._has_stumbled = True
        else:
            self._has_stumbled = False

    def _look(self) -> None:
        """Ask for the topics of all queries at once, and for those of a query on their own while they have no answer.

        The broker answers for all topics of a question or for none: one without an ACL, or with a partition without a
        leader, takes the answer from the others.
        """
        together = [progress for progress in self._progress if progress.not_answered_at is None]
        alone = [progress for progress in self._progress if self._is_to_be_asked_again(progress)]
        if self._away_since is not None and not self._is_there():
            return
        try:
            topics = self._cluster.topics(sorted({topic for progress in together for topic in progress.topics}))
        except FAILURES:
            if self._over.is_set() or not self._is_there():
                return
            alone = [*together, *alone]
        else:
            for progress in together:
                self._answered(progress, topics)
        for progress in alone:
            try:
                topics = self._cluster.topics(progress.topics)
            except FAILURES as err:
                if not self._is_there():
                    return
                self._not_answered(progress, err)
            else:
                self._answered(progress, topics)

    def _is_to_be_asked_again(self, progress: Progress) -> bool:
        """Not each time: a question that fails takes the connection with it."""
        since = progress.not_answered_at
        return since is not None and (self._now() - since >= _ASK_AGAIN_SECONDS or self._over.is_set())

    def _answered(self, progress: Progress, topics: dict[str, TopicState]) -> None:
        progress.not_answered_at = None
        progress.seen(topics)
        group = self._groups.get(progress.query)
        if group is not None and not group.mirror(
            self._cluster, progress.ends, now=self._now(), is_last=self._over.is_set()
        ):
            progress.mirror_failed()

    def _not_answered(self, progress: Progress, error: Exception) -> None:
        """Say so, once until there is an answer."""
        if progress.not_answered_at is None:
            tell(
                log.warning,
                "topics_not_described",
                query=progress.query,
                topics=progress.topics,
                error=type(error).__name__,
                remedy="look for a missing ACL (Describe) and for partitions without a leader",
            )
        progress.not_answered_at = self._now()

    def _is_there(self) -> bool:
        """Whether the broker answers at all: to a question about no topic."""
        try:
            self._cluster.topics(())
        except FAILURES as err:
            self._is_away(err)
            return False
        self._is_back()
        return True

    def _is_away(self, error: Exception) -> None:
        """Say so, once in an outage; a broker that refuses the job ends its queries, which say it themselves."""
        if self._away_since is None and not self._over.is_set() and not is_refusal(error):
            self._away_since = self._now()
            tell(log.warning, "broker_away", error=type(error).__name__)

    def _is_back(self) -> None:
        if self._away_since is not None:
            tell(log.warning, "broker_back", seconds=round(self._now() - self._away_since))
            self._away_since = None
