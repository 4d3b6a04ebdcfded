"""The part of the target that a MERGE reads: by bounds and partition values of the keys, and by the user's filter."""

from __future__ import annotations

import logging

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType

from stream_merge.errors import ContractError
from stream_merge.model.logs import tell
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.shapes import target_filter
from stream_merge.shapes.batch import Batch
from stream_merge.shapes.key_bounds import as_transported, boundable
from stream_merge.shapes.layout import Layout
from stream_merge.spark import columns
from stream_merge.spark.jvm import exact_literal
from stream_merge.spark.versions import is_valid_utf8
from stream_merge.tables import spark_table
from stream_merge.tables.side.tombstones import BROADCAST_EVENTS

log = logging.getLogger(__name__)

MOST_VALUES = 64
"""Partition values that a condition lists; Delta compares each file with each value."""
_SHOWN_KEYS = 2


class Pruning:
    """The part of the target that one batch reads.

    `inside_at` is a version in which no row of the batch's keys lies outside of the filter.
    """

    def __init__(
        self,
        session: SparkSession,
        spec: MergeSpec,
        layout: Layout,
        batch: Batch,
        target: TableSnapshot,
        *,
        inside_at: int | None = None,
    ) -> None:
        self._session = session
        self._spec = spec
        self._layout = layout
        self._batch = batch
        self._target = target
        self._inside_at = inside_at
        self._by_keys: Column | None = None

    @property
    def has_filter(self) -> bool:
        """Whether the sink has a `target_filter`."""
        return self._spec.target_filter is not None

    def by_keys(self) -> Column:
        """Condition on `t` that all rows of the batch's keys meet.

        Cost: one small Spark job, once, where a key is a partition column and has several values.
        """
        if self._by_keys is None:
            bounds = self._batch.bounds.condition(self._session, "t")
            partitions = None if self._layout.concerns_missing else self._by_partitions()
            self._by_keys = bounds if partitions is None else bounds & partitions
        return self._by_keys

    def _by_partitions(self) -> Column | None:
        """Partitions of the keys that are partition columns; None where the bounds say as much, or they are many."""
        single = {bound.name for bound in self._batch.bounds.columns if bound.least == bound.greatest}
        keys = {field.name for field in boundable(self._layout.key_fields)} - single
        fields = [self._target.schema[name] for name in self._target.partition_columns if name in keys]
        if not fields:
            return None
        values = [as_transported(columns.column(field.name), field.dataType) for field in fields]
        # Text that is not UTF-8 would arrive here as another one.
        are_legible = columns.all_of(
            is_valid_utf8(columns.column(field.name)) for field in fields if isinstance(field.dataType, StringType)
        )
        rows = self._batch.rows.latest().select(*values, are_legible).distinct().limit(MOST_VALUES + 1).collect()
        if len(rows) > MOST_VALUES or not all(row[-1] for row in rows):
            return None
        return columns.all_of(
            columns.column(field.name, "t").isin(
                *(exact_literal(self._session, value, field.dataType) for value in {row[i] for row in rows})
            )
            for i, field in enumerate(fields)
        )

    def filtered(self) -> Column | None:
        """The user's filter; None where there is none."""
        return None if self._spec.target_filter is None else target_filter.inside(self._spec.target_filter)

    def condition(self) -> Column:
        """Keys and filter."""
        wanted = self.filtered()
        return self.by_keys() if wanted is None else self.by_keys() & wanted

    def expect_inside(self, version: int, *, batch_id: int) -> None:
        """Stop where a row of the batch's keys lies outside of the filter: the merge would insert it twice.

        Cost: nothing for a version checked before; else one Spark job over the key columns (and those of the filter) of
        the files outside of the filter whose statistics do not rule out the batch's keys.
        """
        if not self.has_filter or version == self._inside_at or not self._batch.upserts + self._batch.deletes:
            return
        keys = self._outside(version)
        if keys:
            msg = (
                f"[OUTSIDE_TARGET_FILTER] keys of batch {batch_id} for {self._spec.target!r} have rows outside of"
                f" target_filter={self._spec.target_filter!r}, such as {' and '.join(keys)}; nothing was written, widen"
                " or remove the filter"
            )
            raise ContractError(msg, reasons={}, target=self._spec.target, batch_id=batch_id)
        self._inside_at = version

    def warn_if_outside(self, version: int, *, batch_id: int) -> None:
        """Warn where another writer added such rows between the check and the MERGE's commit."""
        if not self.has_filter or self._inside_at is None or version == self._inside_at + 1:
            return
        keys = self._outside(version - 1)
        if keys:
            where = {"target": self._spec.label, "batch_id": batch_id, "version": version}
            tell(log.warning, "keys_outside_of_filter", **where, keys=list(keys))

    def _outside(self, version: int) -> list[str]:
        """A few of the batch's keys, as JSON, that have rows outside of the filter."""
        if self._spec.target_filter is None:
            return []
        stored = spark_table.rows(self._session, self._spec.target, version=version).alias("t")
        elsewhere = stored.where(self.by_keys() & target_filter.outside(self._spec.target_filter))
        events = self._batch.rows.latest().select(*(columns.column(key) for key in self._layout.keys))
        if self._batch.upserts + self._batch.deletes <= BROADCAST_EVENTS:
            events = F.broadcast(events)
        same_keys = columns.all_of(columns.column(k, "t") == columns.column(k, "s") for k in self._layout.keys)
        outside = elsewhere.join(events.alias("s"), same_keys, "left_semi")
        key = F.to_json(F.struct(*(columns.column(name, "t") for name in self._layout.keys)))
        return [row[0] for row in outside.select(key).limit(_SHOWN_KEYS).collect()]
