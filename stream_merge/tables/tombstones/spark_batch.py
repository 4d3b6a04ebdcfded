"""The remembered deletes of one batch's keys on Spark, which any table and any number of events can have."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from stream_merge.model import names
from stream_merge.shapes.batch import Batch
from stream_merge.shapes.layout import Layout
from stream_merge.spark import columns
from stream_merge.tables.side_commits import SideCommit
from stream_merge.tables.tombstones.base import Hits
from stream_merge.tables.tombstones.spark import BROADCAST_EVENTS, SparkHits, Tombstones


class SparkTombstones:
    """Works on the tombstones of one batch.

    Args:
        session: the sink's own.
        tombstones: of the target.
        layout: how the batch's columns map onto the target.
        batch: the evaluated events.
        now: time of the call.
    """

    def __init__(
        self, *, session: SparkSession, tombstones: Tombstones, layout: Layout, batch: Batch, now: Column
    ) -> None:
        self._session = session
        self._tombstones = tombstones
        self._layout = layout
        self._batch = batch
        self._now = now

    def version(self) -> int | None:
        """Newest version of the log; None while there is none for this target."""
        return self._tombstones.version()

    def remember(self, commit: SideCommit) -> None:
        """Append the batch's deletes to the log."""
        deletes = self._batch.rows.latest().where(columns.column(names.DELETE_COLUMN))
        self._tombstones.remember(deletes, recorded_at=self._now, commit=commit)

    def hits(self) -> SparkHits:
        """The tombstones of the batch's keys."""
        return self._hits(self._batch.rows.latest())

    def late_hits(self, seen: SparkHits | None) -> SparkHits:
        """The tombstones of the upserts that were merged."""
        merged = without_refused(self._batch.rows.latest(), seen, self._layout, self._session)
        return self._hits(merged.where(~columns.column(names.DELETE_COLUMN)))

    def _hits(self, events: DataFrame) -> SparkHits:
        batch = self._batch
        return self._tombstones.hits(events, batch.upserts + batch.deletes, batch.bounds, now=self._now)

    def forget(self, hits: SparkHits, commit: SideCommit) -> None:
        """Mark the tombstones of revived keys as overtaken."""
        self._tombstones.forget(hits.revivals(), recorded_at=self._now, commit=commit)

    def tidy(self) -> None:
        """Tidy the log when it has many files."""
        self._tombstones.tidy(now=self._now)


def without_refused(events: DataFrame, hits: Hits | None, layout: Layout, session: SparkSession) -> DataFrame:
    """The events, one per key, that no tombstone refuses."""
    if hits is None or not hits.refused:
        return events
    refused = hits.refusals(session).select(*(columns.column(key) for key in layout.keys))
    if hits.refused <= BROADCAST_EVENTS:
        refused = F.broadcast(refused)
    same = columns.all_of(columns.column(key, "e") == columns.column(key, "r") for key in layout.keys)
    return events.alias("e").join(refused.alias("r"), same, "left_anti")
