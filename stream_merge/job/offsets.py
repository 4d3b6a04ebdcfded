"""Which offsets a micro-batch covers, from Spark's own checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pyspark.sql import SparkSession

from stream_merge.sources.kafka import Offsets, parse_offsets
from stream_merge.spark_internals import read_text


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


Ranges = dict[str, dict[int, Range]]
"""topic -> partition -> offsets."""


class Checkpoint:
    """The checkpoint of one query with a single source (Spark 4.2's files `offsets/N`, `commits/N`, `sources/0/0`)."""

    def __init__(self, session: SparkSession, path: str) -> None:
        self._session = session
        self._path = path.rstrip("/")

    @property
    def exists(self) -> bool:
        """Whether a query has run over it."""
        return self._read("metadata") is not None

    def ranges(self, batch_id: int) -> Ranges:
        """What a batch covers; Spark writes it down before the batch runs.

        A partition that is new in this batch starts where Spark starts it: at its first offset.
        """
        end = self.planned(batch_id)
        start = self.planned(batch_id - 1) if batch_id else self._initial()
        if end is None:
            msg = f"checkpoint {self._path!r} has no offsets of batch {batch_id}"
            raise AssertionError(msg)
        return {
            topic: {
                partition: Range(start=(start or {}).get(topic, {}).get(partition, 0), end=offset)
                for partition, offset in partitions.items()
            }
            for topic, partitions in end.items()
        }

    def planned(self, batch_id: int) -> Offsets | None:
        """End offsets of a batch, run or not; None where there is no such batch (any more)."""
        text = self._read(f"offsets/{batch_id}")
        return None if text is None else parse_offsets(text.splitlines()[2])

    def _initial(self) -> Offsets | None:
        text = self._read("sources/0/0")
        if text is None:
            return None
        # Spark writes a version line in front; older ones a zero byte, too.
        return parse_offsets(text[text.index("{") :])

    def query_id(self) -> str | None:
        """The id of the query that the checkpoint belongs to."""
        text = self._read("metadata")
        return None if text is None else str(json.loads(text)["id"])

    def _read(self, name: str) -> str | None:
        return read_text(self._session, f"{self._path}/{name}")
