"""The remembered deletes as one batch meets them, whoever reads and writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from pyspark.sql import DataFrame, SparkSession

from stream_merge.tables.side_commits import SideCommit


@dataclass(frozen=True, kw_only=True, slots=True)
class Hits:
    """The events of a batch whose key has a tombstone; each reader adds them in its own form."""

    refused: int = 0
    """Events that are older than the tombstone of their key."""
    revived: int = 0
    """Upserts that are not older: they bring their key back."""
    version: int | None = None
    """Version of the log that was at least read; None while there is no log."""

    def refusals(self, session: SparkSession) -> DataFrame:
        """Keys and tombstone sequence of the refused events; only where there are some.

        Raises:
            ValueError: there are none.
        """
        msg = "no tombstone was hit"
        raise ValueError(msg)

    def release(self) -> None:
        """Free what was materialised."""


H = TypeVar("H", bound=Hits)


class BatchTombstones(Protocol[H]):
    """The remembered deletes of a target, asked and told about one batch. Raises what its library raises."""

    def version(self) -> int | None:
        """Newest version of the log; None while there is none for this target."""
        ...

    def remember(self, commit: SideCommit) -> None:
        """Append the batch's deletes to the log, which is created before the first one."""
        ...

    def hits(self) -> H:
        """The tombstones of the batch's keys."""
        ...

    def late_hits(self, seen: H | None) -> H:
        """The tombstones of the upserts that were merged: of all but those refused before."""
        ...

    def forget(self, hits: H, commit: SideCommit) -> None:
        """Mark the tombstones of revived keys as overtaken; only after the target's commit."""
        ...

    def tidy(self) -> None:
        """Drop entries that no longer matter and pack small files, when there are many."""
        ...
