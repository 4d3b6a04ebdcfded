"""Where a target's rows came from: the offsets, topics and position that each commit of a job records."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from stream_merge.errors import ConfigError
from stream_merge.jobs.kafka.batch_offsets import Covered, Place, Range
from stream_merge.jobs.kafka.commit_section import SECTION, Recorded, recorded, section_of
from stream_merge.jobs.kafka.counts import Counts, Tally, furthest
from stream_merge.jobs.kafka.ordering import BY_OFFSET, COMPONENTS, EpochBefore, Placing
from stream_merge.jobs.kafka.settings import QuerySettings
from stream_merge.model import names
from stream_merge.model.snapshot import TableSnapshot, newest_first
from stream_merge.sources.envelopes.base import Kind
from stream_merge.sources.kafka.connection import Offsets, TopicState
from stream_merge.spark import columns
from stream_merge.tables import spark_table
from stream_merge.tables.side import location


@dataclass(frozen=True, kw_only=True, slots=True)
class Uncommitted:
    """What batches of this run have read that changed nothing and made no commit: the next commit accounts for it."""

    starts: Mapping[Place, int] = field(default_factory=dict)
    """Where the first of them started."""
    counts: Mapping[Place, Counts] = field(default_factory=dict)
    lost: Mapping[Place, tuple[Range, ...]] = field(default_factory=dict)
    """Offsets that the broker had removed before they were read."""

    def plus(self, covered: Covered, counts: Mapping[Place, Counts]) -> Uncommitted:
        """With another batch."""
        lost = dict(self.lost)
        for place, gone in covered.lost_places():
            lost[place] = (*lost.get(place, ()), gone)
        both = self.counts.keys() | counts.keys()
        return Uncommitted(
            starts={**{place: read.start for place, read in covered.places()}, **self.starts},
            counts={place: self.counts.get(place, Counts()) + counts.get(place, Counts()) for place in both},
            lost=lost,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """What the commits of a job have recorded of its present epoch, and what the next one has to record."""

    query: QuerySettings
    last: Recorded | None = None
    """By the newest commit of the query; where it has made none, by that of another one, without `ends`."""
    positions: Mapping[Place, int] = field(default_factory=dict)
    """How far the source's log had come. Of other partitions it says nothing: a job may be far ahead in one, and topics
    may come from several servers."""
    streamed: frozenset[Place] = frozenset()
    """Where changes were merged by any query, not only rows that a snapshot had read."""
    servers: Mapping[str, str] = field(default_factory=dict)
    """Topic -> server that wrote its newest changes, where positions are of one server."""
    is_of_new_table: bool = False
    """Whether there was no table when this was read."""
    has_deletes: bool = False
    """Whether deletes were remembered when this was read, though no commit tells of changes."""
    has_unread: bool = False
    """As `Recorded.has_unread`; where no commit tells of changes, whether the quarantine has any of the topics."""
    keys_moved: bool = False
    """As `Recorded.keys_moved`."""
    other_topics: bool = False
    """As `Recorded.other_topics`."""
    started: Offsets = field(default_factory=dict)
    """Where the query's checkpoint started, as long as the table's log shows that nothing is recorded of it."""
    since: int = field(default_factory=lambda: time.time_ns() // 1_000_000)
    """When its epoch begins, if it is higher than the recorded one; milliseconds since 1970."""
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    uncommitted: Uncommitted = Uncommitted()

    # -- what a batch has to know ----------------------------------------------------------

    @property
    def epoch_since(self) -> int:
        """When the job file's epoch began, milliseconds since 1970; 0 where there was none before it."""
        if self.last is None:
            return 0
        return self.last.epoch_since if self.last.epoch == self.query.epoch else self.since

    def at(self, topics: Mapping[str, TopicState]) -> Lineage:
        """With the topics as they are now."""
        moved = self.keys_moved or any(self.is_wider(name, state) for name, state in topics.items())
        return replace(self, topic_ids={name: state.topic_id for name, state in topics.items()}, keys_moved=moved)

    def partitions(self, topic: str) -> int:
        """How many of a topic the last commit knew."""
        return 0 if self.last is None else sum(name == topic for name, _ in self.last.seen)

    def is_wider(self, topic: str, state: TopicState) -> bool:
        """Whether a topic has got more partitions within the epoch."""
        is_of_epoch = self.last is not None and self.query.epoch <= self.last.epoch
        return is_of_epoch and 0 < self.partitions(topic) < len(state.ends)

    def placing(self, tally: Tally) -> Placing:
        """Where the rows of a batch stand that a snapshot has read."""
        comes_first = self.last is not None or self.is_of_new_table  # else the log may have been tidied away
        has_more = tally.streamed or self.streamed or self.has_deletes or self.keys_moved or self._has_unread(tally)
        return Placing.FIRST if comes_first and not has_more and not self.other_topics else self.placing_of_others

    @property
    def placing_of_others(self) -> Placing:
        """The same of rows that may have changes before them."""
        return Placing.AS_TOLD if self.other_topics else Placing.BEHIND

    @property
    def mixes_offsets(self) -> bool:
        """Whether the epoch has events of other topics, with whose offsets those of the query's would be compared."""
        is_of_now = self.last is not None and self.query.epoch <= self.last.epoch
        return self.other_topics and self.compares_offsets and is_of_now

    @property
    def compares_offsets(self) -> bool:
        """Whether offsets tell what came later: of all events, or of the null-value records that may be all deletes."""
        formats = self.query.key_format, self.query.value_format
        return self.ordering == BY_OFFSET or (formats[0].type != "none" and formats[1].deletes_by_null_values)

    @property
    def ordering(self) -> str:
        """The sequence's definition."""
        return self.query.value_format.ordering

    @property
    def servers_before(self) -> Mapping[str, str]:
        """Topic -> server of the newest recorded changes, of whichever epoch."""
        return {} if self.last is None else self.last.servers

    def epoch_before(self, tally: Tally) -> EpochBefore:
        """What of a batch still is of the epoch before: what lies before the first change of a new server."""
        ends: dict[Place, int | None] = {}
        for topic, servers in ({} if self.query.on_server_change == "ignore" else tally.servers).items():
            before = self.servers_before.get(topic, "")
            new = [places for server, places in servers.items() if server != before]
            if new and before in servers and topic not in self.servers:
                for partition in servers[before]:
                    ends[topic, partition] = min((of[partition] for of in new if partition in of), default=None)
        return EpochBefore(0 if self.last is None else self.last.epoch, ends)

    # -- what a batch leaves ---------------------------------------------------------------

    def section(self, covered: Covered, tally: Tally) -> dict[str, Any]:
        """What the commit of a batch says: JSON."""
        then, read = self._behind(tally), self.uncommitted.plus(covered, tally.counts)
        topics: dict[str, Any] = {}
        for topic, partitions in covered.ranges.items():
            topics[topic] = {
                "id": self.topic_ids.get(topic),
                **({"server": then.servers[topic]} if topic in then.servers else {}),
                "partitions": {
                    str(p): {
                        **self._accounted((topic, p), found.end, read),
                        **_known("position", then.positions.get((topic, p))),
                        **({"only_reads": True} if (topic, p) in tally.reads - then.streamed else {}),
                        **_known("seen", self._seen((topic, p), beyond=found.end)),
                    }
                    for p, found in partitions.items()
                },
            }
        return {
            "topics": topics,
            "connector": tally.connector,
            "epoch": self.query.epoch,
            "epoch_since": self.epoch_since,
            "ordering": self.ordering,
            "position": max(then.positions.values(), default=None),
            **({"keys_moved": True} if self.keys_moved else {}),
            **({"other_topics": True} if self.other_topics else {}),
            **({"has_unread": True} if then.has_unread else {}),
        }

    def behind(self, covered: Covered, tally: Tally, *, is_committed: bool) -> Lineage:
        """The lineage behind a batch; where it made no commit, the next one accounts for its offsets, too."""
        then = self._behind(tally)
        if not is_committed:
            return replace(then, uncommitted=self.uncommitted.plus(covered, tally.counts))
        return replace(then, last=recorded(self.section(covered, tally)), uncommitted=Uncommitted())

    def _behind(self, tally: Tally) -> Lineage:
        """With what a batch tells; where no commit records it, too.

        Older versions have recorded the highest position that an event had itself. That is never above ours, but for
        rows that a snapshot has read, so that what a healthy source brings next lies behind neither. They read ours
        as theirs, and stop where a change's own position is far behind it, as they do at long transactions anyway.
        """
        before, newest = self.servers_before, dict(self.servers)
        for topic, servers in tally.servers.items():
            newest[topic] = next((one for one in servers if one != before.get(topic)), before.get(topic, ""))
        # Where the batch still has changes of the epoch before: no more than the new server's.
        mixed = {place: tally.lowest_positions[place] for place in self.epoch_before(tally).ends}
        return replace(
            self,
            positions={**furthest(self.positions, tally.highest_positions), **mixed},
            streamed=self.streamed | tally.streamed,
            servers=newest,
            has_unread=self._has_unread(tally),
        )

    def _has_unread(self, tally: Tally) -> bool:
        return self.has_unread or tally.total(Kind.UNDECODABLE) > 0

    def _seen(self, place: Place, *, beyond: int) -> int | None:
        """How far any query has merged this very topic, where that is further."""
        last, topic = self.last, place[0]
        if last is None or last.topic_ids.get(topic) != self.topic_ids.get(topic):
            return None
        seen = last.seen.get(place, 0)
        return seen if seen > beyond else None

    def _accounted(self, place: Place, end: int, read: Uncommitted) -> dict[str, Any]:
        """From the end of the last recorded commit, so that no offset is in none; `first`: there was none.

        `uncounted` offsets at the start were read by an earlier run of the job, in batches without a commit: what their
        records were is not known here.
        """
        before = None if self.last is None else self.last.ends.get(place)
        counted_from = read.starts[place]
        first = self.started.get(place[0], {}).get(place[1], counted_from)
        start = min(min(first, counted_from) if before is None else before, end)
        counts = read.counts.get(place, Counts())
        gone = [[one.start, one.end] for one in read.lost.get(place, ())]
        filtered = dict(sorted(counts.filtered.items()))
        return {
            "range": [start, end],
            **({"first": True} if before is None else {}),
            "records": {kind: n for kind, n in sorted(counts.kinds.items()) if n},
            **({"uncounted": counted_from - start} if counted_from > start else {}),
            **({"filtered": filtered} if filtered else {}),
            **({"lost": gone[0]} if gone else {}),
            **({"also_lost": gone[1:]} if gone[1:] else {}),
        }


def read_lineage(
    session: SparkSession,
    found: TableSnapshot | None,
    query: QuerySettings,
    *,
    identity: str | None = None,
    started: Offsets | None = None,
) -> Lineage:
    """The lineage of a table, by the newest commit of any query of a job and of this one.

    Args:
        session: to read the table's log.
        found: the target; None where there is none yet.
        query: the query.
        identity: of its batches; None: nobody asks where the rows of a snapshot stand.
        started: where its checkpoint started.

    Raises:
        ConfigError: the table is ordered in another way, or the job file's epoch is lower than the recorded one.
    """
    newest = last = None
    oldest = 0
    if found is not None:
        for commit in newest_first(
            found.version,
            lambda newer_than, up_to: spark_table.history(session, query.target, newer_than=newer_than, up_to=up_to),
        ):
            oldest, ours = commit.version, section_of(commit)
            if ours is None:
                continue
            found_here = recorded(ours[SECTION])
            newest = newest or found_here
            if ours.get("identity") == identity:
                last = found_here
                break
    if newest is not None:
        _refuse_other_order(newest, query)
        last = last or replace(newest, ends={})  # another checkpoint: its offsets are not ours, its positions are
    of_now = [one for one in (newest, last) if one is not None and one.epoch == query.epoch]
    own = [one for one in (last,) if one is not None and one.epoch == query.epoch]
    lineage = Lineage(
        query=query,
        last=last,
        positions=own[0].positions if own else {},
        servers=own[0].servers if own else {},
        streamed=frozenset().union(*(one.streamed for one in of_now)),
        is_of_new_table=found is None,
        has_unread=any(one.has_unread for one in of_now),
        keys_moved=any(one.keys_moved for one in of_now),
        other_topics=any(one.other_topics or _is_of_others(one, query) for one in of_now),
        started={} if oldest else started or {},  # a commit of the query may have been tidied away with the log
    )
    if identity is None or lineage.streamed:
        return lineage
    return replace(
        lineage,
        has_deletes=newest is not None and _has_deletes(session, query),
        has_unread=lineage.has_unread or _has_unread(session, query, since=lineage.epoch_since),
    )


def _refuse_other_order(newest: Recorded, query: QuerySettings) -> None:
    ordering = query.value_format.ordering
    if newest.ordering != ordering and query.epoch <= newest.epoch:
        msg = (
            f"[ORDER_CHANGED] target {query.target!r} is ordered by {newest.ordering!r}, the job file orders by"
            f" {ordering!r}; set 'epoch: {newest.epoch + 1}' to let new events win over stored rows"
        )
        raise ConfigError(msg, target=query.target)
    if newest.epoch > query.epoch:
        msg = (
            f"[EPOCH_TOO_LOW] target {query.target!r} has events of epoch {newest.epoch}, the job file has"
            f" {query.epoch}, so new events would be stale; set 'epoch: {newest.epoch}' or more"
        )
        raise ConfigError(msg, target=query.target)


def _is_of_others(one: Recorded, query: QuerySettings) -> bool:
    """Whether a commit has merged other topics into rows of the same keys."""
    return query.topic_column is None and not {topic for topic, _ in one.seen} <= set(query.topic)


def _has_deletes(session: SparkSession, query: QuerySettings) -> bool:
    """Whether deletes of the epoch are remembered: a batch that has only remembered some has made no commit."""
    found = location.deletes(session, query.target, retention_seconds=query.tombstone_retention)
    epoch = columns.column(names.SEQUENCE_COLUMN)[COMPONENTS[0]]
    return found is not None and not found.where(epoch == query.epoch).isEmpty()


def _has_unread(session: SparkSession, query: QuerySettings, *, since: int) -> bool:
    """Whether records of the epoch were set aside: a batch that has nothing else makes no commit."""
    place = query.target.quarantine
    if spark_table.find(session, place) is None:
        return False
    is_ours = F.col("topic").isin(list(query.topic)) & (F.unix_millis("recorded_at") >= since)
    return not spark_table.rows(session, place).where(is_ours).isEmpty()


def _known(name: str, value: int | None) -> dict[str, int]:
    return {} if value is None else {name: value}
