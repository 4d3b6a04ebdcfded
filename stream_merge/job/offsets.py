"""Which offsets a micro-batch covers, from Spark's own checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession

from stream_merge.sources.kafka import Offsets, parse_offsets
from stream_merge.spark_internals import list_names, read_text
from stream_merge.tables import local_path


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

ReadFile = Callable[[str], str | None]
"""The text of a file, None where there is none."""
ListNames = Callable[[str], list[str]]
"""The names in a folder; none where there is no folder."""


class Checkpoint:
    """The checkpoint of one query with a single source (Spark 4.2's files `offsets/N`, `commits/N`, `sources/0/0`)."""

    def __init__(self, read: ReadFile, names: ListNames, path: str) -> None:
        self._read_file = read
        self._list_names = names
        self._path = path.rstrip("/")

    @classmethod
    def in_session(cls, session: SparkSession, path: str) -> Checkpoint:
        """Wherever Hadoop's file systems reach."""
        return cls(lambda name: read_text(session, name), lambda name: list_names(session, name), path)

    @classmethod
    def on_disk(cls, path: str) -> Checkpoint:
        """On this machine, without Spark."""
        return cls(_local_text, _local_names, str(local_path(path) or path))

    @property
    def exists(self) -> bool:
        """Whether a query has run over it."""
        return self._read("metadata") is not None

    def ranges(self, batch_id: int, first: Offsets) -> Ranges:
        """What a batch covers; Spark writes it down before the batch runs.

        Args:
            batch_id: which batch.
            first: topic -> partition -> first offset that is there; where a partition starts that is new in this batch.
        """
        end = self.planned(batch_id)
        start = self.planned(batch_id - 1) or {} if batch_id else self.initial()
        if end is None:
            msg = f"checkpoint {self._path!r} has no offsets of batch {batch_id}"
            raise AssertionError(msg)
        return {
            topic: {
                partition: Range(
                    start=start.get(topic, {}).get(partition, min(first.get(topic, {}).get(partition, 0), offset)),
                    end=offset,
                )
                for partition, offset in partitions.items()
            }
            for topic, partitions in end.items()
        }

    def planned(self, batch_id: int) -> Offsets | None:
        """End offsets of a batch, run or not; None where there is no such batch (any more)."""
        text = self._read(f"offsets/{batch_id}")
        return None if text is None else parse_offsets(text.split("\n")[2])

    def newest(self) -> Offsets:
        """End offsets of the newest planned batch, run or not."""
        return self._newest_of("offsets")

    def merged(self) -> Offsets:
        """End offsets of the newest batch that Spark has recorded as done."""
        return self._newest_of("commits")

    def _newest_of(self, log: str) -> Offsets:
        batch_ids = [int(name) for name in self._list_names(f"{self._path}/{log}") if name.isdigit()]
        return (self.planned(max(batch_ids)) if batch_ids else None) or {}

    def query_id(self) -> str | None:
        """The id of the query that the checkpoint belongs to."""
        text = self._read("metadata")
        return None if text is None else str(json.loads(text)["id"])

    def initial(self) -> Offsets:
        """Where its partitions started; none of those that came later."""
        text = self._read("sources/0/0")
        # Spark writes a version line in front; older ones a zero byte, too.
        return {} if text is None else parse_offsets(text[text.index("{") :])

    def _read(self, name: str) -> str | None:
        return self._read_file(f"{self._path}/{name}")


def _local_text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _local_names(path: str) -> list[str]:
    folder = Path(path)
    return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
