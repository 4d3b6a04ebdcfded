"""Where a target's rows came from: the offsets, topics and position that each commit of a job records."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from stream_merge.errors import ConfigError, ContractError
from stream_merge.jobs.kafka.batch_offsets import Range, Ranges
from stream_merge.jobs.kafka.commit_section import SECTION, Recorded, recorded, section_of
from stream_merge.jobs.kafka.counts import Place, take_in
from stream_merge.jobs.kafka.decode import DecodedBatch
from stream_merge.jobs.kafka.ordering import BY_OFFSET, COMPONENTS, EpochBefore, Placing
from stream_merge.jobs.kafka.settings import QuerySettings
from stream_merge.jobs.kafka.uncommitted import Uncommitted
from stream_merge.model import names
from stream_merge.model.results import MergeResult
from stream_merge.model.snapshot import TableSnapshot, newest_first
from stream_merge.sources.envelopes.base import Kind
from stream_merge.sources.kafka.connection import Offsets, TopicState
from stream_merge.spark import columns
from stream_merge.tables import spark_table
from stream_merge.tables.side import location


@dataclass(kw_only=True)
class Origin:
    """What is recorded, and what the next commit has to record."""

    settings: QuerySettings
    identity: str | None
    last: Recorded | None = None
    is_of_new_table: bool = False
    """Whether there was no table when this was read, and nothing has been committed since."""
    has_deletes: bool = False
    """Whether deletes of the epoch were remembered when this was read, though no commit tells of changes."""
    has_unread: bool = False
    """As `Recorded.has_unread`; where no commit tells of changes, whether the quarantine has any of the topics."""
    streamed_since: set[Place] = field(default_factory=set)
    """As `Recorded.streamed`, of the newest commit of any query, and of batches that made no commit."""
    keys_moved: bool = False
    """As `Recorded.keys_moved`."""
    other_topics: bool = False
    """As `Recorded.other_topics`."""
    started: Offsets = field(default_factory=dict)
    """Where the query's checkpoint started, as long as the table's log shows that nothing is recorded of it."""
    since: int = field(default_factory=lambda: time.time_ns() // 1_000_000)
    """When its epoch begins, if it is higher than the recorded one; milliseconds since 1970."""
    topic_ids: dict[str, str] = field(default_factory=dict)
    uncommitted: Uncommitted = field(default_factory=Uncommitted)

    @classmethod
    def of_table(
        cls,
        session: SparkSession,
        found: TableSnapshot | None,
        identity: str | None,
        settings: QuerySettings,
        *,
        started: Offsets | None = None,
    ) -> Origin:
        """Read the newest commit of any query of a job, and of this one.

        Args:
            session: to read the table's log.
            found: the target; None where there is none yet.
            identity: of the query's batches; None: of no query, so that nobody asks where the rows of a snapshot stand.
            settings: the query.
            started: where its checkpoint started.

        Raises:
            ConfigError: the table is ordered in another way, or the job file's epoch is lower than the recorded one.
        """
        origin = cls(settings=settings, identity=identity, started=started or {})
        if found is None:
            origin.is_of_new_table = True
            origin.has_unread = identity is not None and _has_unread(session, settings, since=origin.epoch_since())
            return origin
        newest: Recorded | None = None
        oldest = found.version
        for commit in newest_first(
            found.version,
            lambda newer_than, up_to: spark_table.history(session, settings.target, newer_than=newer_than, up_to=up_to),
        ):
            oldest, ours = commit.version, section_of(commit)
            if ours is None:
                continue
            found_here = recorded(ours[SECTION])
            newest = newest or found_here
            if ours.get("identity") == identity:
                origin.last = found_here
                break
        if oldest > 0:
            origin.started = {}  # a commit of the query may have been tidied away with the log
        if newest is not None:
            origin._expect_same_order(newest)
            origin.streamed_since = set(newest.streamed) if newest.epoch == settings.epoch else set()
            if origin.last is None:  # another checkpoint: its offsets are not ours, its positions are
                origin.last = replace(newest, ends={})
            of_now = [one for one in (newest, origin.last) if one is not None and one.epoch == settings.epoch]
            origin.keys_moved = any(one.keys_moved for one in of_now)
            origin.other_topics = any(one.other_topics or origin._is_of_others(one) for one in of_now)
            looks = identity is not None and not origin.streamed_since
            origin.has_deletes = looks and _has_deletes(session, settings)
            origin.has_unread = any(one.has_unread for one in of_now)
        if identity is not None and not origin.streamed_since and not origin.has_unread:
            origin.has_unread = _has_unread(session, settings, since=origin.epoch_since())
        return origin

    def expect_same_topics(self, topics: Mapping[str, TopicState]) -> None:
        """Stop where offsets mean something else than before.

        Raises:
            ContractError: a topic was made anew, or has other partitions while its events are ordered by offset.
        """
        self.topic_ids = {name: state.topic_id for name, state in topics.items()}
        last, settings = self.last, self.settings
        if last is None:
            return
        for name, state in topics.items():
            known = last.topic_ids.get(name, state.topic_id)
            partitions = {partition for topic, partition in last.seen if topic == name}
            goes_on = any(topic == name for topic, _ in last.ends)
            if known != state.topic_id and (goes_on or settings.epoch <= last.epoch):
                msg = (
                    f"[TOPIC_RECREATED] topic {name!r} was re-created (id {known}, now {state.topic_id}), so its"
                    f" offsets start again; use a new checkpoint and set 'epoch: {last.epoch + 1}'"
                )
                raise ContractError(msg, reasons={}, target=settings.target)
            is_wider = bool(partitions) and len(state.ends) > len(partitions)
            self.keys_moved = self.keys_moved or (is_wider and settings.epoch <= last.epoch)
            if self._compares_offsets and is_wider and settings.epoch <= last.epoch:
                msg = (
                    f"[ORDER_CHANGED] topic {name!r} has {len(state.ends)} partitions, it had {len(partitions)}; keys"
                    f" may have moved, so offsets no longer order their events: set 'epoch: {last.epoch + 1}'"
                )
                raise ContractError(msg, reasons={}, target=settings.target)

    def expect_no_regression(self, batch: DecodedBatch, ranges: Ranges) -> None:
        """Stop where the source's log fell back further than the limit: positions compare with nothing that is stored.

        Raises:
            ContractError: a new event stands too far behind.
        """
        last, settings, log = self.last, self.settings, self.settings.value_format.log
        if last is None or settings.epoch > last.epoch or log is None:
            return
        for place, position in batch.lowest_positions.items():
            found, highest = ranges.get(place[0], {}).get(place[1]), last.positions.get(place)
            is_new = found is not None and found.start >= last.seen.get(place, 0)
            most = settings.limits.max_position_regression
            if is_new and highest is not None and log.regression(highest, position) > most:
                back = f"{log.shown(highest)} to {log.shown(position)}"
                msg = (
                    f"[POSITION_REGRESSED] topic {place[0]!r}, partition {place[1]} went back from position {back}; if"
                    f" the source was restored, set 'epoch: {last.epoch + 1}'; if the connector re-delivers, raise"
                    " max_position_regression"
                )
                raise ContractError(msg, reasons={}, target=settings.target)

    def expect_same_servers(self, batch: DecodedBatch) -> None:
        """Stop where changes were written by another server than those before: positions are of one server.

        Raises:
            ContractError: in the same epoch, or a second time in one batch.
        """
        settings = self.settings
        if settings.on_server_change == "ignore":
            return
        for topic, servers in batch.servers.items():
            before, of_epoch = (found.get(topic) for found in (self._servers_before, self._servers))
            new = sorted((*min(places.items()), server) for server, places in servers.items() if server != before)
            if len(new) > (of_epoch is None):
                partition, offset, server = new[-1]
                remedy = f"set 'epoch: {settings.epoch + 1}'" if of_epoch else "'start' there, with a new snapshot"
                msg = (
                    f"[SOURCE_SERVER_CHANGED] topic {topic!r}, partition {partition}, offset {offset}: server"
                    f" {server!r} follows {before or new[0][2]!r}; {remedy}, or 'on_server_change: ignore' within one"
                    " binlog"
                )
                raise ContractError(msg, reasons={}, target=settings.target)

    def epoch_before(self, batch: DecodedBatch) -> EpochBefore:
        """What of a batch still is of the epoch before: what lies before the first change of a new server."""
        ends: dict[Place, int | None] = {}
        for topic, servers in ({} if self.settings.on_server_change == "ignore" else batch.servers).items():
            before = self._servers_before.get(topic, "")
            new = [places for server, places in servers.items() if server != before]
            if new and before in servers and topic not in self._servers:
                for partition in servers[before]:
                    ends[topic, partition] = min((of[partition] for of in new if partition in of), default=None)
        return EpochBefore(0 if self.last is None else self.last.epoch, ends)

    def placing(self, batch: DecodedBatch) -> Placing:
        """Where the rows of a batch stand that a snapshot has read."""
        if self.other_topics or batch.streamed or self._has_unread(batch) or not self._comes_first:
            return self.placing_of_others
        return Placing.FIRST

    @property
    def placing_of_others(self) -> Placing:
        """The same of rows that may have changes before them."""
        return Placing.AS_TOLD if self.other_topics else Placing.BEHIND

    @property
    def _comes_first(self) -> bool:
        """Whether no change of the epoch was merged, or its delete remembered, nor a read in another partition."""
        last = self.last
        if self.streamed_since or self.has_deletes or self.keys_moved:
            return False
        if last is None:
            return self.is_of_new_table  # else commits of the epoch may have been tidied away with the log
        return last.epoch < self.settings.epoch or not last.streamed

    def _is_of_others(self, found: Recorded) -> bool:
        """Whether a commit has merged other topics into rows of the same keys."""
        topics = {topic for topic, _ in found.seen}
        return self.settings.topic_column is None and not topics <= set(self.settings.topic)

    @property
    def mixes_offsets(self) -> bool:
        """Whether the epoch has events of other topics, with whose offsets those of the query's would be compared."""
        is_of_now = self.last is not None and self.settings.epoch <= self.last.epoch
        return self.other_topics and self._compares_offsets and is_of_now

    @property
    def _compares_offsets(self) -> bool:
        """Whether offsets tell what came later: of all events, or of the null-value records that may be all deletes."""
        formats = self.settings.key_format, self.settings.value_format
        return self.ordering == BY_OFFSET or (formats[0].type != "none" and formats[1].deletes_by_null_values)

    @property
    def ordering(self) -> str:
        """The sequence's definition."""
        return self.settings.value_format.ordering

    def recorded(self, ranges: Ranges, batch: DecodedBatch, lost: Ranges) -> dict[str, Any]:
        """What the commit of a batch says: JSON."""
        topics: dict[str, Any] = {}
        positions, streamed, servers = self._highest(batch), self._streamed(batch), self._newest_servers(batch)
        for topic, partitions in ranges.items():
            topics[topic] = {
                "id": self.topic_ids.get(topic),
                **({"server": servers[topic]} if topic in servers else {}),
                "partitions": {
                    str(p): {
                        **self._accounted(topic, p, found, batch, lost.get(topic, {}).get(p)),
                        **_known("position", positions.get((topic, p))),
                        **({"only_reads": True} if (topic, p) in batch.reads - streamed else {}),
                        **_known("seen", self._seen(topic, p, beyond=found.end)),
                    }
                    for p, found in partitions.items()
                },
            }
        return {
            "topics": topics,
            "connector": batch.connector,
            "epoch": self.settings.epoch,
            "epoch_since": self.epoch_since(),
            "ordering": self.ordering,
            "position": max(positions.values(), default=None),
            **({"keys_moved": True} if self.keys_moved else {}),
            **({"other_topics": True} if self.other_topics else {}),
            **({"has_unread": True} if self._has_unread(batch) else {}),
        }

    def committed(self, ranges: Ranges, batch: DecodedBatch, lost: Ranges, result: MergeResult | None) -> None:
        """The batch is in the target; where nothing was committed, the next commit accounts for its offsets, too."""
        self.has_unread = self._has_unread(batch)
        if result is None or (result.version is None and result.outcome != "skipped_duplicate"):
            self.uncommitted.add(ranges, batch.counts, lost)
            self.streamed_since |= batch.streamed
            return
        self.uncommitted.clear()
        ends = {} if self.last is None else self.last.ends
        seen = {}
        for topic, partitions in ranges.items():
            for partition, found in partitions.items():
                place = topic, partition
                ends[place] = max(found.end, ends.get(place, 0))
                seen[place] = self._seen(*place, beyond=found.end) or found.end
        self.last = Recorded(
            epoch=self.settings.epoch,
            ordering=self.ordering,
            epoch_since=self.epoch_since(),
            positions=self._highest(batch),
            streamed=self._streamed(batch),
            keys_moved=self.keys_moved,
            other_topics=self.other_topics,
            has_unread=self.has_unread,
            topic_ids=dict(self.topic_ids),
            servers=self._newest_servers(batch),
            ends=ends,
            seen=seen,
        )

    def _highest(self, batch: DecodedBatch) -> dict[Place, int]:
        """Topic and partition -> highest position of the epoch, this batch included.

        Older versions have recorded the highest position that an event had itself. That is never above ours, but for
        rows that a snapshot has read, so that what a healthy source brings next lies behind neither. They read ours
        as theirs, and stop where a change's own position is far behind it, as they do at long transactions anyway.
        """
        last = self.last
        highest = dict(last.positions) if last is not None and last.epoch == self.settings.epoch else {}
        take_in(highest, max, batch.highest_positions)
        # Where the batch still has changes of the epoch before: no more than the new server's.
        highest |= {place: batch.lowest_positions[place] for place in self.epoch_before(batch).ends}
        return highest

    @property
    def _servers_before(self) -> Mapping[str, str]:
        """Topic -> server of the newest changes."""
        return {} if self.last is None else self.last.servers

    @property
    def _servers(self) -> Mapping[str, str]:
        """Topic -> server of the newest changes of the epoch."""
        last = self.last
        return last.servers if last is not None and last.epoch == self.settings.epoch else {}

    def _newest_servers(self, batch: DecodedBatch) -> dict[str, str]:
        """The same, this batch included."""
        before = self._servers_before
        newest = {
            topic: next((server for server in servers if server != before.get(topic)), before.get(topic, ""))
            for topic, servers in batch.servers.items()
        }
        return {**self._servers, **newest}

    def _streamed(self, batch: DecodedBatch) -> set[Place]:
        """Topics and partitions with changes of the epoch, this batch included."""
        last = self.last
        before = last.streamed if last is not None and last.epoch == self.settings.epoch else set()
        return before | self.streamed_since | batch.streamed

    def _has_unread(self, batch: DecodedBatch) -> bool:
        return self.has_unread or batch.total(Kind.UNDECODABLE) > 0

    def _seen(self, topic: str, partition: int, *, beyond: int) -> int | None:
        """How far any query has merged this very topic, where that is further."""
        last = self.last
        if last is None or last.topic_ids.get(topic) != self.topic_ids.get(topic):
            return None
        seen = last.seen.get((topic, partition), 0)
        return seen if seen > beyond else None

    def epoch_since(self) -> int:
        """When the job file's epoch began, milliseconds since 1970; 0 where there was none before it."""
        if self.last is None:
            return 0
        return self.last.epoch_since if self.last.epoch == self.settings.epoch else self.since

    def _accounted(
        self, topic: str, partition: int, found: Range, batch: DecodedBatch, lost: Range | None
    ) -> dict[str, Any]:
        """From the end of the last recorded commit, so that no offset is in none; `first`: there was none.

        `uncounted` offsets at the start were read by an earlier run of the job, in batches without a commit: what their
        records were is not known here.
        """
        place = topic, partition
        before = None if self.last is None else self.last.ends.get(place)
        counted_from = self.uncommitted.start(place, before=found)
        first = self.started.get(topic, {}).get(partition, found.start)
        start = min(min(first, counted_from) if before is None else before, found.end)
        counts = self.uncommitted.counts(place, beside=batch.counts.get(place))
        gone = [[one.start, one.end] for one in self.uncommitted.lost(place, beside=lost)]
        known = {kind: n for kind, n in sorted(counts.kinds.items()) if n}
        filtered = dict(sorted(counts.filtered.items()))
        return {
            "range": [start, found.end],
            **({"first": True} if before is None else {}),
            "records": known,
            **({"uncounted": counted_from - start} if counted_from > start else {}),
            **({"filtered": filtered} if filtered else {}),
            **({"lost": gone[0]} if gone else {}),
            **({"also_lost": gone[1:]} if gone[1:] else {}),
        }

    def _expect_same_order(self, newest: Recorded) -> None:
        settings = self.settings
        if newest.ordering != self.ordering and settings.epoch <= newest.epoch:
            msg = (
                f"[ORDER_CHANGED] target {settings.target!r} is ordered by {newest.ordering!r}, the job file orders by"
                f" {self.ordering!r}; set 'epoch: {newest.epoch + 1}' to let new events win over stored rows"
            )
            raise ConfigError(msg, target=settings.target)
        if newest.epoch > settings.epoch:
            msg = (
                f"[EPOCH_TOO_LOW] target {settings.target!r} has events of epoch {newest.epoch}, the job file has"
                f" {settings.epoch}, so new events would be stale; set 'epoch: {newest.epoch}' or more"
            )
            raise ConfigError(msg, target=settings.target)


def _has_deletes(session: SparkSession, settings: QuerySettings) -> bool:
    """Whether deletes of the epoch are remembered: a batch that has only remembered some has made no commit."""
    found = location.deletes(session, settings.target, retention_seconds=settings.tombstone_retention)
    epoch = columns.column(names.SEQUENCE_COLUMN)[COMPONENTS[0]]
    return found is not None and not found.where(epoch == settings.epoch).isEmpty()


def _has_unread(session: SparkSession, settings: QuerySettings, *, since: int) -> bool:
    """Whether records of the epoch were set aside: a batch that has nothing else makes no commit."""
    place = settings.target.quarantine
    if spark_table.find(session, place) is None:
        return False
    is_ours = F.col("topic").isin(list(settings.topic)) & (F.unix_millis("recorded_at") >= since)
    return not spark_table.rows(session, place).where(is_ours).isEmpty()


def _known(name: str, value: int | None) -> dict[str, int]:
    return {} if value is None else {name: value}
