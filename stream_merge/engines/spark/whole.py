"""A full copy compared with its table: what it would change, and whether it may."""

from __future__ import annotations

import logging

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from stream_merge.engines.base import MergeReport
from stream_merge.engines.spark import render
from stream_merge.errors import CommitConflictError
from stream_merge.model import names
from stream_merge.model.logs import tell
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.shapes import shape_of
from stream_merge.shapes.base import Copied
from stream_merge.shapes.batch import Batch
from stream_merge.shapes.layout import Layout
from stream_merge.spark import columns
from stream_merge.tables import spark_table
from stream_merge.tables.side.tombstones import BROADCAST_EVENTS

log = logging.getLogger(__name__)

_IS_ROW, _IS_EXPECTED = f"{names.RESERVED_PREFIX}is_row", f"{names.RESERVED_PREFIX}is_expected"


class Beside:
    """A full copy and its table at one version."""

    def __init__(
        self, session: SparkSession, spec: MergeSpec, layout: Layout, batch: Batch, *, batch_id: int, version: int
    ) -> None:
        self._spec = spec
        self._shape = shape_of(spec)
        self._layout = layout
        self._upserts = batch.upserts
        self._batch_id = batch_id
        self._version = version
        self._missing = 0
        rows = spark_table.rows(session, spec.target, version=version)
        lacking = [field for field in layout.beside if field.name not in rows.columns]
        added = [F.lit(None).cast(field.dataType).alias(field.name) for field in lacking]
        self._rows = rows.select("*", *added).alias("t")
        events = batch.rows.latest()
        self._is_small = batch.upserts <= BROADCAST_EVENTS
        self._events = (F.broadcast(events) if self._is_small else events).alias("s")

    def would_change(self) -> bool:
        """Whether merging the copy changes a row of the table.

        Cost: one Spark job over the keys of both (with flag and window); a second one over all columns where no key is
        new and none is missing.
        """
        counts, new = self.expect_allowed()
        if new or (counts.missing and self._shape.concerns_missing):
            return True
        updating = self._shape.updating(self._spec)
        if not self._upserts or updating is None:
            return False
        pairs = self._rows.join(self._events, render.same_keys(self._layout))
        return not pairs.where(render.condition(updating, self._layout)).isEmpty()

    def expect_newest(self, now: TableSnapshot | None) -> None:
        """Stop where another writer has committed since the comparison, as if a commit had lost against it."""
        if now is not None and now.version == self._version:
            return
        meanwhile = "does not exist" if now is None else f"is at version {now.version}"
        msg = (
            f"[COMMIT_CONFLICT] snapshot {self._batch_id} was compared with version {self._version} of"
            f" {self._spec.target!r}, which now {meanwhile}; nothing was written, restart the query, or raise"
            " attempts or budget of the retry policy"
        )
        raise CommitConflictError(
            msg, conflict="ConcurrentWriteException", target=self._spec.target, batch_id=self._batch_id
        )

    def held_against(self, report: MergeReport) -> MergeReport:
        """The report of the MERGE; warns where it removed more rows than were counted.

        Another writer has then committed rows between the comparison and the MERGE, which began with a newer version.
        """
        removed = sum(
            report.metrics.get(f"numTargetRowsNotMatchedBySource{what}", 0) for what in ("Deleted", "Updated")
        )
        if removed > self._missing:
            facts = {"version": report.version, "counted": self._missing, "removed": removed}
            where = {"target": self._spec.label, "batch_id": self._batch_id}
            tell(log.warning, "more_rows_removed_than_counted", **where, **facts)
        return report

    def expect_allowed(self) -> tuple[Copied, int]:
        """What the copy does to the table, and how many of its keys are new. Cost: one Spark job over all keys."""
        counts, new = self._counted()
        self._shape.expect_allowed(counts, target=self._spec.target, batch_id=self._batch_id)
        self._missing = counts.missing
        return counts, new

    def _counted(self) -> tuple[Copied, int]:
        """Rows that should be in the copy, those that are not, and keys of the copy that the table does not have.

        Rows are looked up in a small copy, without a shuffle. With a large one they are joined from both sides, so that
        new keys need no count of the distinct ones that rows have.
        """
        layout = self._layout
        keys = [columns.column(layout.in_event(key), "s") for key in layout.keys]
        is_event = columns.all_of(key.isNotNull() for key in keys)
        is_row, expected = columns.column(_IS_ROW, "t"), columns.column(_IS_EXPECTED, "t")
        # Over the rows alone, as MERGE evaluates it (Delta 4.4): beside an event a name may mean that one's column.
        is_expected = render.condition(self._shape.expected, layout)
        rows = self._rows.withColumns({_IS_ROW: F.lit(True), _IS_EXPECTED: is_expected}).alias("t")
        if self._is_small:
            new = F.lit(self._upserts) - F.count_distinct(F.when(is_event, F.struct(*keys)))
        else:
            new = F.count_if(is_row.isNull())
        ((every, missing, new_keys),) = (
            rows.join(self._events, render.same_keys(layout), "left" if self._is_small else "full")
            .agg(
                F.count_if(is_row & expected),
                F.count_if(is_row & expected & ~is_event),
                new,
            )
            .collect()
        )
        return Copied(rows=every, missing=missing), new_keys
