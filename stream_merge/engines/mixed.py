"""Spark merges the target, delta-rs keeps the remembered deletes: for targets that only Spark may write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.types import StructField, StructType

from stream_merge.engines.base import CommitTag, MergeReport
from stream_merge.engines.remembering import RemembersNatively
from stream_merge.engines.spark.merger import SparkEngine
from stream_merge.model import names
from stream_merge.model.snapshot import CommitRecord, TableSnapshot
from stream_merge.shapes.key_bounds import KeyBounds
from stream_merge.shapes.layout import Layout
from stream_merge.spark import columns
from stream_merge.tables.tombstones.delta_rs import NativeHits, NativeTombstones
from stream_merge.tables.tombstones.spark import SparkHits


class MixedEngine(RemembersNatively):
    """Works on one batch. The log is a plain table of the sink's own, whatever the target is like.

    In Spark each look into the log and each append costs as much as a job or two.

    Args:
        spark: merges.
        session: the sink's own.
        tombstones: the target's remembered deletes.
        layout: how the batch's columns map onto the target.
        events: `Rows.keys` of the batch.
        bounds: least and greatest keys.
    """

    name = "spark"

    def __init__(
        self,
        *,
        spark: SparkEngine,
        session: SparkSession,
        tombstones: NativeTombstones,
        layout: Layout,
        events: pa.Table,
        bounds: KeyBounds,
    ) -> None:
        super().__init__(tombstones, events, bounds)
        self._spark = spark
        self._session = session
        self._layout = layout

    def find(self) -> TableSnapshot | None:
        """The target, freshly loaded."""
        return self._spark.find()

    def history(self, *, newer_than: int, up_to: int) -> Sequence[CommitRecord]:
        """Its commits in a range of versions, newest first."""
        return self._spark.history(newer_than=newer_than, up_to=up_to)

    def merge(self, hits: NativeHits, tag: CommitTag) -> MergeReport:
        """One MERGE in one commit."""
        return self._spark.merge(self._refusals(hits), tag)

    def repair(self, late: NativeHits, tag: CommitTag) -> MergeReport:
        """One MERGE that only deletes."""
        return self._spark.repair(self._refusals(late), tag)

    def counted_as(self, late: NativeHits, version: int) -> Mapping[str, int]:
        """How many of the refused keys a version's change feed shows as inserted and as updated."""
        return self._spark.counted_as(self._refusals(late), version)

    def _refusals(self, hits: NativeHits) -> SparkHits:
        """The refused events, for Spark."""
        if not hits.refused:
            return SparkHits(version=hits.version)
        keys = [StructField(f.name, columns.nullable(f.dataType)) for f in self._layout.key_fields]
        sequence = StructField(names.SEQUENCE_COLUMN, columns.nullable(self._layout.sequence_type))
        rows = self._session.createDataFrame(hits.refusals(self._layout.keys), StructType([*keys, sequence]))
        return SparkHits.of_refusals(rows, refused=hits.refused, version=hits.version)
