"""What a commit of a job says in the table's log: offsets, topics and position of its batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stream_merge.jobs.kafka.batch_offsets import Place
from stream_merge.model.snapshot import CommitRecord

SECTION = "kafka"
"""Field of `stream_merge` in the commit metadata."""
REPLAY_SECTION = "replay"
"""The same where the records came from quarantine: their offsets are accounted for already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What the newest commit of a query says about where it stands."""

    epoch: int
    ordering: str
    epoch_since: int
    """When the epoch began, milliseconds since 1970; 0 where there was none before it."""
    positions: dict[Place, int]
    """Topic and partition -> how far the source's log had come, by the changes merged so far. Positions of other
    partitions say nothing: a job may be far ahead in one, and topics may come from several servers."""
    streamed: set[Place]
    """Topics and partitions of which the epoch has merged changes, not only rows that a snapshot had read."""
    keys_moved: bool
    """Whether a topic got more partitions in the epoch, so that a key may have rows and events in several."""
    other_topics: bool
    """Whether the epoch has merged other topics than the query's into the same rows."""
    has_unread: bool
    """Whether records of the epoch could not be read: they may be changes, and be replayed one day."""
    topic_ids: dict[str, str]
    servers: dict[str, str]
    """Topic -> server that wrote the epoch's newest changes, where positions are of one server."""
    ends: dict[Place, int]
    """Topic and partition -> offset behind the last one that a commit of this query accounts for."""
    seen: dict[Place, int]
    """The same for all queries that have merged this topic into the table: what lies before is no news."""


def section_of(commit: CommitRecord) -> Mapping[str, Any] | None:
    """What the sink wrote into a commit of a job, or None."""
    ours = commit.ours
    return ours if ours is not None and isinstance(ours.get(SECTION), dict) else None


def recorded(section: Mapping[str, Any]) -> Recorded:
    """What a section says, of any version."""
    topics = section["topics"]
    partitions: dict[Place, Mapping[str, Any]] = {
        (name, int(partition)): found
        for name, topic in topics.items()
        for partition, found in topic["partitions"].items()
    }
    streamed = {place for place, found in partitions.items() if "position" in found and "only_reads" not in found}
    return Recorded(
        epoch=section["epoch"],
        ordering=section["ordering"],
        epoch_since=section.get("epoch_since", 0),
        positions={place: partitions[place]["position"] for place in streamed},
        streamed=streamed,
        keys_moved=section.get("keys_moved", False),
        other_topics=section.get("other_topics", False),
        has_unread=section.get("has_unread", False),
        topic_ids={name: topic["id"] for name, topic in topics.items() if topic["id"] is not None},
        servers={name: topic["server"] for name, topic in topics.items() if "server" in topic},
        ends={place: found["range"][1] for place, found in partitions.items()},
        seen={place: found.get("seen", found["range"][1]) for place, found in partitions.items()},
    )
