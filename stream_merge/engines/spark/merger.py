"""Delta's MERGE on Spark: distributed, with every table feature."""

from __future__ import annotations

from collections.abc import Sequence

from delta.tables import DeltaMergeBuilder
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from stream_merge.engines.base import CommitTag, MergeJob, MergeReport
from stream_merge.engines.spark import render, whole
from stream_merge.engines.spark.commit import SparkCommits, committing, executed
from stream_merge.engines.spark.pruning import Pruning
from stream_merge.errors import CommitConflictError, MergeFailedError
from stream_merge.model import names
from stream_merge.model.snapshot import TableSnapshot, is_applied
from stream_merge.shapes import shape_of
from stream_merge.shapes.clauses import Clause, Delete, Newer, Update
from stream_merge.shapes.surely_changes import GreatestSequence, stored
from stream_merge.spark import columns
from stream_merge.spark.evaluate_once import held_bytes
from stream_merge.tables import spark_table
from stream_merge.tables.side.late_events import Hits
from stream_merge.tables.side.tombstones import BROADCAST_EVENTS, without_refused
from stream_merge.tables.spark_table import delta_table

BROADCAST_BYTES = 64 << 20
"""Events up to this size are broadcast to the executors, through the memory of the driver."""


class SparkMerger(SparkCommits):
    """Merges one batch in the sink's private session.

    MERGE takes its transaction id and user metadata only from confs of the session of the target `DeltaTable` (Delta
    4.4): they are set before every attempt and restored after it.
    """

    def __init__(self, job: MergeJob, *, deletion_vectors: bool | None) -> None:
        super().__init__(job.session, job.spec.target)
        self._job = job
        self._spec, self._layout, self._batch = job.spec, job.layout, job.batch
        self._shape = shape_of(job.spec)
        self._pruning = Pruning(job.session, job.spec, job.layout, job.batch, job.target, inside_at=job.inside_at)
        self._deletion_vectors = deletion_vectors
        """Mark rows as deleted (True) or write their files again (False); None leaves it to the session."""

    def merge(self, hits: Hits | None, tag: CommitTag) -> MergeReport:
        """One MERGE in one commit: delete, update or insert each event, unless the row is newer."""
        layout, batch = self._layout, self._batch
        if self._shape.is_whole:
            return self._merge_whole(tag)
        if self._pruning.has_filter:
            target = self._existing(tag)
            if is_applied(target.transaction, tag.app_id, tag.batch_id):
                return MergeReport(already_applied=True)
            self._pruning.expect_inside(target.version, batch_id=tag.batch_id)
        refused = 0 if hits is None else hits.refused
        live = without_refused(batch.rows.latest(), hits, layout, self._session)
        is_wanted = self._shape.is_literal or self._is_sure(refused)
        if not is_wanted and not self._would_change(live, None if refused else batch.upserts):
            # Delta would write files again for rows that stay as they are, which some readers take for changes.
            return self._unchanged(tag)
        self._expect_columns(tag)
        report = self._executed(layout.as_merged(live), tag)
        if report.version is not None:
            self._pruning.warn_if_outside(report.version, batch_id=tag.batch_id)
        return report

    def _expect_columns(self, tag: CommitTag) -> None:
        """Stop where another writer changed the columns since the layout was made: Delta (4.4) sees no conflict.

        It would cast into the new columns, or put NULL into their fields.
        """
        if self._layout.is_indifferent_to_columns or self._existing(tag).has_columns_of(self._job.target):
            return
        lost = "MetadataChangedException"
        msg = (
            f"[COMMIT_CONFLICT] another writer changed the columns of {self._target!r} before batch {tag.batch_id} was"
            f" merged ({lost}); nothing was written, restart the query, or raise attempts of the retry policy"
        )
        raise CommitConflictError(msg, conflict=lost, target=self._target, batch_id=tag.batch_id)

    def _merge_whole(self, tag: CommitTag) -> MergeReport:
        """Merge a full copy of the table, compared with the version that the MERGE begins with."""
        target = self._existing(tag)
        if is_applied(target.transaction, tag.app_id, tag.batch_id):
            return MergeReport(already_applied=True)
        beside = whole.Beside(
            self._session, self._spec, self._layout, self._batch, batch_id=tag.batch_id, version=target.version
        )
        is_wanted = beside.would_change()
        beside.expect_newest(self.find())
        if not is_wanted:
            return self._unchanged(tag)
        return beside.held_against(self._executed(self._batch.rows.latest(), tag))

    def _executed(self, events: DataFrame, tag: CommitTag) -> MergeReport:
        layout, batch = self._layout, self._batch
        clauses = self._shape.clauses(layout, self._spec, deletes=batch.deletes > 0, upserts=batch.upserts > 0)
        source = self._brought_to_rows(events, clauses).alias("s")
        with committing(self._session, tag, deletion_vectors=self._deletion_vectors):
            builder = render.with_clauses(
                self._matched(source, self._is_match()), clauses, layout, of_missing=self._pruning.filtered()
            )
            if layout.evolves:
                builder = builder.withSchemaEvolution()
            return executed(self._session, self._target, builder, tag)

    def _brought_to_rows(self, events: DataFrame, clauses: Sequence[Clause]) -> DataFrame:
        """Broadcast few events that can only change rows.

        Delta joins the rows with such events alone, and Spark, which does not know how few they are, would shuffle the
        rows of all rewritten files. With an insert, or rows that no event matches, it joins from both sides, and has
        to.
        """
        if self._batch.upserts + self._batch.deletes > BROADCAST_EVENTS:
            return events
        if not all(isinstance(clause, Update | Delete) for clause in clauses):
            return events
        size = held_bytes(events)
        return events if size is None or size > BROADCAST_BYTES else F.broadcast(events)

    def repair(self, late: Hits, tag: CommitTag) -> MergeReport:
        """One MERGE that only deletes."""
        older = render.condition(Newer(), self._layout)  # the tombstone than the row
        refused = late.refusals(self._session)
        if self._pairs(refused, self._has_keys()).where(older).isEmpty():
            return self._unchanged(tag)
        with committing(self._session, tag, deletion_vectors=self._deletion_vectors):
            # Whatever the user's filter is by now: what is to be undone lies where the merge has put it.
            builder = self._matched(refused.alias("s"), self._has_keys())
            return executed(self._session, self._target, builder.whenMatchedDelete(older), tag)

    def counted_as(self, late: Hits, version: int) -> dict[str, int]:
        """How many of the refused keys a version's change feed shows as inserted and as updated."""
        keys = [columns.column(key) for key in self._layout.keys]
        changed = spark_table.changes(self._session, self._target, version)
        touched = changed.join(late.refusals(self._session).select(*keys), list(self._layout.keys), "left_semi")
        counted = {row["_change_type"]: row["count"] for row in touched.groupBy("_change_type").count().collect()}
        return {"inserted": counted.get("insert", 0), "updated": counted.get("update_postimage", 0)}

    def _is_sure(self, refused: int) -> bool:
        """Whether the batch certainly changes a row, by the statistics of the target's files."""
        if refused or not self._batch.upserts:
            return False
        return self._shape.surely_changes(self._batch.rows.greatest(), self._stored_greatest, self._spec)

    def _stored_greatest(self) -> GreatestSequence | None:
        """The greatest sequence in the target by its files' statistics."""
        if self._job.target.maps_columns:
            return None  # statistics go by the names in the files, which may be those of other columns by now
        files = self._job.tables.target.files()
        return None if files is None else stored(files, self._layout)

    def _would_change(self, events: DataFrame, upserts: int | None) -> bool:
        """Whether any event changes a row; `upserts` is None where nobody has counted them.

        Cost: one Spark job over keys and sequences of the files within the bounds; a second one over all columns where
        only an event that repeats its row's sequence could change something.
        """
        layout, spec, shape = self._layout, self._spec, self._shape
        deletes = columns.column(names.DELETE_COLUMN, "s")
        matched_upsert = F.when(~deletes, F.struct(*(columns.column(key, "s") for key in layout.keys)))
        certain, updates = (
            F.lit(False) if wanted is None else render.condition(wanted, layout)
            for wanted in (shape.certain(spec), shape.updating(spec))
        )
        counts = self._pairs(events).agg(
            F.coalesce(F.bool_or(certain), F.lit(False)),
            F.count_distinct(matched_upsert),
        )
        ((is_certain, matched),) = counts.collect()
        if is_certain:
            return True
        if upserts is None:
            upserts = events.where(~columns.column(names.DELETE_COLUMN)).count()
        if matched < upserts or not matched or shape.updating(spec) is None:
            return bool(matched < upserts)
        return not self._pairs(events).where(updates).isEmpty()

    def _pairs(self, events: DataFrame, is_match: Column | None = None) -> DataFrame:
        """Events (`s`) and the rows (`t`) of their keys, as the MERGE would match them."""
        batch = self._batch
        if batch.upserts + batch.deletes <= BROADCAST_EVENTS:
            events = F.broadcast(events)
        rows = spark_table.rows(self._session, self._target)
        return rows.alias("t").join(events.alias("s"), self._is_match() if is_match is None else is_match)

    def _existing(self, tag: CommitTag) -> TableSnapshot:
        """The target, which must still be there: a missing one must not pass for one that needs no merge."""
        target = self.find()
        if target is None:
            msg = (
                f"[TABLE_NOT_FOUND] target {self._target!r} disappeared after batch {tag.batch_id} was read; restore"
                " it, then restart the query"
            )
            raise MergeFailedError(msg, target=self._target, batch_id=tag.batch_id)
        return target

    def _unchanged(self, tag: CommitTag) -> MergeReport:
        """The report of a merge with nothing left to do: perhaps because a twin of this call has done it."""
        target = self.find()
        return MergeReport(
            already_applied=target is not None and is_applied(target.transaction, tag.app_id, tag.batch_id)
        )

    def _matched(self, source: DataFrame, is_match: Column) -> DeltaMergeBuilder:
        return delta_table(self._session, self._target).alias("t").merge(source, is_match)

    def _is_match(self) -> Column:
        return self._pruning.condition() & self._same_keys()

    def _has_keys(self) -> Column:
        return self._pruning.by_keys() & self._same_keys()

    def _same_keys(self) -> Column:
        return self._layout.once("same_keys", lambda: render.same_keys(self._layout))
