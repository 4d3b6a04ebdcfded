"""Which version of a table holds which offsets, and back: the offsets that each commit of a job recorded."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime

from stream_merge.jobs.kafka.batch_offsets import Checkpoint, Range, Ranges
from stream_merge.jobs.kafka.commit_section import REPLAY_SECTION, SECTION, section_of
from stream_merge.jobs.kafka.settings import QuerySettings
from stream_merge.model.snapshot import CommitRecord
from stream_merge.tables.explain import opened


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One version of the target, or what is planned and not committed."""

    version: int | None
    """None: the uncommitted tail, from the checkpoint."""
    at: datetime | None
    identity: str | None
    """Whose batch it was; None for a version that holds none of a job's."""
    batch_id: int | None
    ranges: Ranges = field(default_factory=dict)
    """Offsets that the commit accounts for."""
    is_first: bool = False
    """Whether the query had recorded nothing before."""
    is_maintenance: bool = False
    """Whether the sink put files together."""
    records: Counter[str] = field(default_factory=Counter)
    """Kind -> records of the batch."""
    replayed: int | None = None
    """Records from quarantine, where the commit is a replay's."""
    lost: int = 0
    """Offsets that the broker had removed before they were read."""
    uncounted: int = 0
    """Offsets that an earlier run of the job had read, in batches without a commit: `records` lacks theirs."""

    @property
    def offsets(self) -> int:
        """How many it accounts for."""
        return sum(len(found) for partitions in self.ranges.values() for found in partitions.values())


def trail(query: QuerySettings) -> list[Step]:
    """The versions of a query's target as far as the log is kept, oldest first, and the uncommitted tail.

    Raises:
        ConfigError: the log cannot be read without Spark.
    """
    table = opened(query.target)
    steps = [_step(commit) for commit in reversed(table.history(None))]
    checkpoint = Checkpoint.on_disk(query.checkpoint)
    tail = _tail(checkpoint, steps, query)
    return steps if tail is None else [*steps, tail]


def _step(commit: CommitRecord) -> Step:
    at = None if commit.timestamp_ms is None else datetime.fromtimestamp(commit.timestamp_ms / 1000, UTC)
    said = commit.ours or {}
    if said.get("role") == "recheck":  # an older version says there once more what the batch's own commit says
        return Step(version=commit.version, at=at, identity=said.get("identity"), batch_id=said.get("batch_id"))
    ours = section_of(commit)
    if ours is None:
        replay = said.get(REPLAY_SECTION, {})
        return Step(
            version=commit.version,
            at=at,
            identity=None,
            batch_id=None,
            is_maintenance=commit.is_maintenance,
            replayed=replay.get("records"),
        )
    ranges: Ranges = {}
    records: Counter[str] = Counter()
    lost, uncounted, is_first = 0, 0, False
    for topic, described in ours[SECTION]["topics"].items():
        for partition, found in described["partitions"].items():
            ranges.setdefault(topic, {})[int(partition)] = Range(start=found["range"][0], end=found["range"][1])
            records.update(found["records"])
            gone = [found["lost"], *found.get("also_lost", ())] if "lost" in found else []
            lost += sum(end - start for start, end in gone)
            uncounted += found.get("uncounted", 0)
            is_first = is_first or found.get("first", False)
    return Step(
        version=commit.version,
        at=at,
        identity=ours.get("identity"),
        batch_id=ours.get("batch_id"),
        ranges=ranges,
        is_first=is_first,
        records=records,
        lost=lost,
        uncounted=uncounted,
    )


def _tail(checkpoint: Checkpoint, steps: list[Step], query: QuerySettings) -> Step | None:
    """What the checkpoint has planned beyond the last commit: merged without a change, or still to come."""
    query_id = checkpoint.query_id()
    own = [step for step in steps if query_id is not None and query_id in (step.identity or "").split("/")]
    if query_id is None or not (own or steps[0].version == 0):
        return None  # what the query has committed may have been tidied away with the log
    starts = {
        (topic, p): start for topic, partitions in checkpoint.initial().items() for p, start in partitions.items()
    }
    for step in own:
        for topic, ranges in step.ranges.items():
            starts |= {(topic, partition): found.end for partition, found in ranges.items()}
    left: Ranges = {}
    for topic, partitions in checkpoint.newest().items():
        for partition, end in partitions.items():
            start = starts.get((topic, partition), 0)
            if end > start:
                left.setdefault(topic, {})[partition] = Range(start=start, end=end)
    if not left:
        return None
    return Step(version=None, at=None, identity=query.identity(query_id), batch_id=None, ranges=left)
