"""What batches have read that changed nothing and made no commit: the next commit accounts for it, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stream_merge.jobs.kafka.batch_offsets import Range, Ranges
from stream_merge.jobs.kafka.counts import Counts, Place


@dataclass(kw_only=True, slots=True)
class Uncommitted:
    """Of this run of the job; what an earlier one has read without a commit is not known."""

    _counts: dict[Place, Counts] = field(default_factory=dict)
    _starts: dict[Place, int] = field(default_factory=dict)
    _lost: dict[Place, list[Range]] = field(default_factory=dict)

    def add(self, ranges: Ranges, counts: Mapping[Place, Counts], lost: Ranges) -> None:
        """A batch made no commit.

        Args:
            ranges: what it covers.
            counts: its records.
            lost: offsets that the broker had removed before they were read.
        """
        for place, records in counts.items():
            self._counts.setdefault(place, Counts()).add(records)
        for topic, partitions in ranges.items():
            for partition, found in partitions.items():
                self._starts.setdefault((topic, partition), found.start)
        for topic, partitions in lost.items():
            for partition, gone in partitions.items():
                self._lost.setdefault((topic, partition), []).append(gone)

    def clear(self) -> None:
        """A commit has accounted for all."""
        for of_places in (self._counts, self._starts, self._lost):
            of_places.clear()

    def start(self, place: Place, *, before: Range) -> int:
        """Where the first of these batches started, or else the batch that comes now."""
        return self._starts.get(place, before.start)

    def counts(self, place: Place, *, beside: Counts | None) -> Counts:
        """Their records, and those of the batch that comes now."""
        found = Counts()
        for one in (self._counts.get(place), beside):
            if one is not None:
                found.add(one)
        return found

    def lost(self, place: Place, *, beside: Range | None) -> list[Range]:
        """What they found removed, and what the batch that comes now does."""
        return [*self._lost.get(place, ()), *(() if beside is None else (beside,))]
