"""Where a target's rows came from: the offsets, topics and position that each commit of a job records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import SparkSession

from stream_merge import tables
from stream_merge.errors import ConfigError, ContractError
from stream_merge.explain import ours_in
from stream_merge.job.decoded import DecodedBatch
from stream_merge.job.offsets import Range, Ranges
from stream_merge.job.sequence import BY_LOG_POSITION, BY_OFFSET
from stream_merge.job.settings import QuerySettings
from stream_merge.job.tally import Counts
from stream_merge.results import MergeResult
from stream_merge.snapshot import CommitRecord, TableSnapshot
from stream_merge.sources.kafka import TopicState

SECTION = "kafka"
"""Field of `stream_merge` in the commit metadata."""
REPLAY_SECTION = "replay"
"""The same where the records came from quarantine: their offsets are accounted for already."""
_LOOKED_AT_FIRST = 200
"""Versions; where none of them is a job's, all that the log has."""


@dataclass(kw_only=True, slots=True)
class Recorded:
    """What the newest commit of a query says about where it stands."""

    epoch: int
    ordering: str
    position: int | None
    """Highest position merged so far."""
    topic_ids: dict[str, str]
    ends: dict[tuple[str, int], int]
    """Topic and partition -> offset behind the last one that a commit of this query accounts for."""
    seen: dict[tuple[str, int], int]
    """The same for whichever query committed last."""


@dataclass(kw_only=True)
class Origin:
    """What is recorded, and what the next commit has to record."""

    settings: QuerySettings
    identity: str | None
    last: Recorded | None = None
    topic_ids: dict[str, str] = field(default_factory=dict)
    pending: dict[tuple[str, int], Counts] = field(default_factory=dict)
    """Records of batches that changed nothing and made no commit: the next commit accounts for them."""
    unrecorded: dict[tuple[str, int], int] = field(default_factory=dict)
    """Topic and partition -> where the first of those batches started."""

    @classmethod
    def of_table(
        cls,
        session: SparkSession,
        found: TableSnapshot | None,
        identity: str | None,
        settings: QuerySettings,
    ) -> Origin:
        """Read the newest commit of any query of a job, and of this one.

        Raises:
            ConfigError: the table is ordered in another way, or the job file's epoch is lower than the recorded one.
        """
        origin = cls(settings=settings, identity=identity)
        if found is None:
            return origin
        newest: Recorded | None = None
        for section, whose in _sections(session, settings.target, found.version):
            recorded = _recorded(section)
            newest = newest or recorded
            if whose == identity:
                origin.last = recorded
                break
        if newest is not None:
            origin._expect_same_order(newest)
            if origin.last is None:  # another checkpoint: its offsets are not ours, its positions are
                origin.last = Recorded(
                    epoch=newest.epoch,
                    ordering=newest.ordering,
                    position=newest.position,
                    topic_ids=newest.topic_ids,
                    ends={},
                    seen=newest.ends,
                )
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
                    f"topic {name!r} was made anew (its id was {known}, now {state.topic_id}), so its offsets start"
                    f" again; name a new checkpoint and set 'epoch: {last.epoch + 1}', so that the events of now win"
                    " over those stored"
                )
                raise ContractError(msg, reasons={}, target=settings.target)
            is_wider = bool(partitions) and len(state.ends) > len(partitions)
            if self.ordering == BY_OFFSET and is_wider and settings.epoch <= last.epoch:
                msg = (
                    f"topic {name!r} has {len(state.ends)} partitions, it had {len(partitions)}; keys may have moved,"
                    f" and their events are ordered by partition and offset: set 'epoch: {last.epoch + 1}'"
                )
                raise ContractError(msg, reasons={}, target=settings.target)

    def expect_no_regression(self, batch: DecodedBatch, ranges: Ranges) -> None:
        """Stop where positions fell back further than the limit: they compare with nothing that is stored.

        Raises:
            ContractError: a new event stands too far behind.
        """
        last, settings = self.last, self.settings
        if last is None or last.position is None or settings.epoch > last.epoch or self.ordering != BY_LOG_POSITION:
            return
        least = last.position - settings.limits.max_position_regression
        for place, position in batch.lowest_positions.items():
            found = ranges.get(place[0], {}).get(place[1])
            is_new = found is not None and found.start >= last.seen.get(place, 0)
            if is_new and position < least:
                msg = (
                    f"topic {place[0]!r}, partition {place[1]} has an event at position {position}, more than"
                    f" max_position_regression below the highest one merged ({last.position}): the source was restored"
                    f" or replaced; set 'epoch: {last.epoch + 1}' if the events of now are to win over those stored"
                )
                raise ContractError(msg, reasons={}, target=settings.target)

    @property
    def ordering(self) -> str:
        """The sequence's definition."""
        return self.settings.value_format.ordering

    def recorded(self, ranges: Ranges, batch: DecodedBatch, lost: Ranges) -> dict[str, Any]:
        """What the commit of a batch says: JSON."""
        topics: dict[str, Any] = {}
        for topic, partitions in ranges.items():
            topics[topic] = {
                "id": self.topic_ids.get(topic),
                "partitions": {
                    str(p): self._accounted(topic, p, found, batch, lost.get(topic, {}).get(p))
                    for p, found in partitions.items()
                },
            }
        return {
            "topics": topics,
            "connector": batch.connector,
            "epoch": self.settings.epoch,
            "ordering": self.ordering,
            "position": self._highest(batch),
        }

    def committed(self, ranges: Ranges, batch: DecodedBatch, result: MergeResult | None) -> None:
        """The batch is in the target; where nothing was committed, the next commit accounts for its offsets, too."""
        if result is None or (result.version is None and result.outcome != "skipped_duplicate"):
            for place, counts in batch.counts.items():
                self.pending.setdefault(place, Counts()).add(counts)
            for topic, partitions in ranges.items():
                for partition, found in partitions.items():
                    self.unrecorded.setdefault((topic, partition), found.start)
            return
        self.pending.clear()
        self.unrecorded.clear()
        ends = {} if self.last is None else self.last.ends
        for topic, partitions in ranges.items():
            for partition, found in partitions.items():
                ends[topic, partition] = max(found.end, ends.get((topic, partition), 0))
        self.last = Recorded(
            epoch=self.settings.epoch,
            ordering=self.ordering,
            position=self._highest(batch),
            topic_ids=dict(self.topic_ids),
            ends=ends,
            seen=dict(ends),
        )

    def _highest(self, batch: DecodedBatch) -> int | None:
        known = self.last.position if self.last is not None and self.last.epoch == self.settings.epoch else None
        found = [position for position in (known, batch.highest_position) if position is not None]
        return max(found, default=None)

    def _accounted(
        self, topic: str, partition: int, found: Range, batch: DecodedBatch, lost: Range | None
    ) -> dict[str, Any]:
        """From the end of the last recorded commit, so that no offset is in none; `first`: there was none."""
        before = None if self.last is None else self.last.ends.get((topic, partition))
        start = self.unrecorded.get((topic, partition), found.start) if before is None else before
        counts = Counts()
        for found_there in (self.pending.get((topic, partition)), batch.counts.get((topic, partition))):
            if found_there is not None:
                counts.add(found_there)
        known = {kind: n for kind, n in sorted(counts.kinds.items()) if n}
        filtered = dict(sorted(counts.filtered.items()))
        return {
            "range": [min(start, found.end), found.end],
            **({"first": True} if before is None else {}),
            "records": known,
            **({"filtered": filtered} if filtered else {}),
            **({"lost": [lost.start, lost.end]} if lost else {}),
        }

    def _expect_same_order(self, newest: Recorded) -> None:
        settings = self.settings
        if newest.ordering != self.ordering and settings.epoch <= newest.epoch:
            msg = (
                f"target {settings.target!r} is ordered by {newest.ordering!r}, the job file orders by"
                f" {self.ordering!r}; stored and new sequences do not compare: set 'epoch: {newest.epoch + 1}' if the"
                " events of now are to win over those stored"
            )
            raise ConfigError(msg, target=settings.target)
        if newest.epoch > settings.epoch:
            msg = (
                f"target {settings.target!r} holds events of epoch {newest.epoch}, the job file says"
                f" {settings.epoch}, so every new event would be stale; set 'epoch: {newest.epoch}' or more"
            )
            raise ConfigError(msg, target=settings.target)


def _sections(session: SparkSession, target: str, version: int) -> Iterator[tuple[Mapping[str, Any], str | None]]:
    """The job's part of each commit, newest first, as far as the log is kept, and whose batch it was."""
    seen = version + 1
    for lowest in (max(version - _LOOKED_AT_FIRST, -1), -1):
        for commit in tables.history(session, target, newer_than=lowest, up_to=version):
            ours = section_of(commit) if commit.version < seen else None
            seen = min(seen, commit.version)
            if ours is not None:
                yield ours[SECTION], ours.get("identity")


def section_of(commit: CommitRecord) -> Mapping[str, Any] | None:
    """What the sink wrote into a commit of a job, or None."""
    ours = ours_in(commit.user_metadata)
    return ours if ours is not None and isinstance(ours.get(SECTION), dict) else None


def _recorded(section: Mapping[str, Any]) -> Recorded:
    topics = section["topics"]
    ends = {
        (name, int(partition)): found["range"][1]
        for name, topic in topics.items()
        for partition, found in topic["partitions"].items()
    }
    return Recorded(
        epoch=section["epoch"],
        ordering=section["ordering"],
        position=section["position"],
        topic_ids={name: topic["id"] for name, topic in topics.items() if topic["id"] is not None},
        ends=ends,
        seen=ends,
    )
