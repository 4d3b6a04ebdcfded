"""Which offsets a micro-batch covers, from Spark's own checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stream_merge.errors import ConfigError
from stream_merge.sources.kafka.connection import Offsets, TopicState, parse_offsets
from stream_merge.spark import checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Offsets of one partition."""

    start: int
    """First offset."""
    end: int
    """Offset behind the last one."""

    def __len__(self) -> int:
        """How many offsets; records may be fewer."""
        return max(0, self.end - self.start)


Place = tuple[str, int]
"""Topic and partition."""

_START = "stream_merge_start"
"""A note beside Spark's files."""

Ranges = dict[str, dict[int, Range]]
"""topic -> partition -> offsets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Covered:
    """The offsets of a batch."""

    ranges: Ranges
    lost: Ranges
    """The parts that the broker has no longer: from where the batch starts to where the log starts now."""

    @classmethod
    def by_broker(cls, ranges: Ranges, topics: Mapping[str, TopicState]) -> Covered:
        """With the topics as the broker describes them; one that is gone is not among them."""
        lost: Ranges = {}
        for topic, partitions in ranges.items():
            starts = topics[topic].starts if topic in topics else {}
            for partition, wanted in partitions.items():
                first = starts.get(partition, wanted.end)
                if len(wanted) and first > wanted.start:
                    lost.setdefault(topic, {})[partition] = Range(start=wanted.start, end=min(first, wanted.end))
        return cls(ranges=ranges, lost=lost)

    def places(self) -> Iterator[tuple[Place, Range]]:
        """Each topic and partition with its offsets."""
        return _flat(self.ranges)

    def lost_places(self) -> Iterator[tuple[Place, Range]]:
        """Each topic and partition that has lost some, with these."""
        return _flat(self.lost)


def _flat(ranges: Ranges) -> Iterator[tuple[Place, Range]]:
    for topic, partitions in ranges.items():
        for partition, offsets in partitions.items():
            yield (topic, partition), offsets


class Checkpoint(checkpoint.Checkpoint):
    """The checkpoint of a query whose single source is Kafka (Spark 4.2's files `offsets/N`, `sources/0/0`)."""

    def ranges(self, batch_id: int, first: Offsets) -> Ranges:
        """What a batch covers; Spark writes it down before the batch runs.

        Args:
            batch_id: which batch.
            first: topic -> partition -> first offset that is there: where those of a topic start that is new in this
                batch. A new partition of another starts at 0; what the broker has of it no more, nobody has read.
        """
        end = self.planned(batch_id)
        start = self.planned(batch_id - 1) or {} if batch_id else self.initial()
        if end is None:
            msg = f"checkpoint {self.path!r} has no offsets of batch {batch_id}"
            raise AssertionError(msg)

        def begins(topic: str, partition: int, offset: int) -> int:
            if topic in start:
                return start[topic].get(partition, 0)
            return min(first.get(topic, {}).get(partition, 0), offset)

        return {
            topic: {n: Range(start=begins(topic, n, offset), end=offset) for n, offset in partitions.items()}
            for topic, partitions in end.items()
        }

    def planned(self, batch_id: int) -> Offsets | None:
        """End offsets of a batch, run or not; None where there is no such batch (any more)."""
        ends = self.sources(batch_id)
        if ends and checkpoint.are_file_offsets(ends):
            msg = (
                f"[CHECKPOINT_MISMATCH] checkpoint {self.path!r} belongs to 'stream-merge files'; give this query its"
                " own checkpoint"
            )
            raise ConfigError(msg)
        try:
            return None if ends is None else parse_offsets(ends[0])
        except (AttributeError, TypeError, ValueError) as err:
            msg = (
                f"[CHECKPOINT_MISMATCH] checkpoint {self.path!r} belongs to a query that does not read topics; give"
                " this query its own checkpoint"
            )
            raise ConfigError(msg) from err

    def expect_one_of(self, topics: Sequence[str], *, may_lack: bool) -> None:
        """Stop where its query has read other topics, and none of these, or some that it is to read no more.

        Args:
            topics: that the query is to read.
            may_lack: whether it goes on without what it has read before; Spark takes partitions that are there no more
                for lost data (`KafkaMicroBatchStream`, Spark 4.2).

        Raises:
            ConfigError: it belongs to another query, or knows topics that are left out now.
        """
        known = sorted(self.newest())
        left_out = sorted(set(known) - set(topics))
        if left_out and len(left_out) < len(known) and not may_lack:
            msg = (
                f"[CHECKPOINT_MISMATCH] checkpoint {self.path!r} has offsets of topic(s) {left_out!r}, which 'topic'"
                " lacks; add them, set 'on_data_loss: continue', or use a new checkpoint"
            )
            raise ConfigError(msg)
        if known and not set(known) & set(topics):
            msg = (
                f"[CHECKPOINT_MISMATCH] checkpoint {self.path!r} belongs to a query over topic(s) {known!r}; give the"
                f" one over {sorted(topics)!r} its own checkpoint"
            )
            raise ConfigError(msg)

    def newest(self) -> Offsets:
        """End offsets of the newest planned batch, run or not."""
        return self._newest_of("offsets")

    def merged(self) -> Offsets:
        """End offsets of the newest batch that Spark has recorded as done."""
        return self._newest_of("commits")

    def _newest_of(self, log: str) -> Offsets:
        batch_id = self.newest_batch(log)
        return (None if batch_id is None else self.planned(batch_id)) or {}

    def initial(self) -> Offsets:
        """Where its partitions started; none of those that came later."""
        text = self._read("sources/0/0")
        # Spark writes a version line in front; older ones a zero byte, too.
        return {} if text is None else parse_offsets(text[text.index("{") :])

    @property
    def has_begun(self) -> bool:
        """Whether it says where its query starts: Spark writes that down while it plans the first batch."""
        return self._read("sources/0/0") is not None

    def noted_start(self) -> str | None:
        """The `start` that its query began with; None where nobody has noted one."""
        return self._read(_START)

    def note_start(self, start: str) -> None:
        """Remember the `start` that its query begins with: the same is no contradiction later."""
        self._files.write(f"{self.path}/{_START}", start)
