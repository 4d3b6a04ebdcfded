"""Delta's MERGE on Spark: distributed, all table features. The only place that calls `DeltaTable.merge`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from delta.tables import DeltaMergeBuilder
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from stream_merge import columns, names, retry, tables
from stream_merge.batch import Batch
from stream_merge.commits import SideCommit
from stream_merge.config import MergeSpec
from stream_merge.engines.base import CommitTag, MergeReport
from stream_merge.engines.spark_log import BROADCAST_EVENTS, SparkHits, Tombstones
from stream_merge.layout import Layout
from stream_merge.logs import tell
from stream_merge.snapshot import CommitRecord, TableSnapshot
from stream_merge.spark_internals import LAST_COMMIT_VERSION_CONF, merge_metrics
from stream_merge.tables import delta_table

log = logging.getLogger(__name__)

APP_ID_CONF = "spark.databricks.delta.write.txnAppId"
BATCH_ID_CONF = "spark.databricks.delta.write.txnVersion"
USER_METADATA_CONF = "spark.databricks.delta.commitInfo.userMetadata"
AUTO_RESET_CONF = "spark.databricks.delta.write.txnVersion.autoReset.enabled"
MATERIALIZE_CONF = "spark.databricks.delta.merge.materializeSource"
DELETION_VECTORS_CONF = "spark.databricks.delta.merge.deletionVectors.persistent"
"""Whether a MERGE into a table with deletion vectors writes any (Delta 4.4)."""


class SparkEngine:
    """Works on one batch in a session that belongs to the sink.

    MERGE takes its transaction id and user metadata only from confs of the session of the target
    `DeltaTable` (Delta 4.4). They are set before every attempt and restored after it; in a session
    of one's own no other write can pick them up.

    Args:
        session: the sink's own.
        spec: what the sink was told.
        layout: how the batch's columns map onto the target.
        batch: the evaluated events.
        target_id: Delta table id of the target; tombstones belong to it.
        now: time of the call.
        deletion_vectors: on a target that has them: mark rows as deleted (True) or write their files again
            (False); None leaves it to the session.
    """

    name = "spark"

    def __init__(
        self,
        *,
        session: SparkSession,
        spec: MergeSpec,
        layout: Layout,
        batch: Batch,
        target_id: str,
        now: Column,
        deletion_vectors: bool | None = None,
    ) -> None:
        self._session = session
        self._spec = spec
        self._target = spec.target
        self._layout = layout
        self._batch = batch
        self._now = now
        self._deletion_vectors = deletion_vectors
        self._tombstones = Tombstones(session, spec, target_id, layout)

    def find(self) -> TableSnapshot | None:
        """The target, freshly loaded."""
        return tables.find(self._session, self._target)

    def history(self, *, newer_than: int, up_to: int) -> Sequence[CommitRecord]:
        """Its commits in a range of versions, newest first."""
        return tables.history(self._session, self._target, newer_than=newer_than, up_to=up_to)

    def log_version(self) -> int | None:
        """Newest version of the tombstone log; None while there is none for this target."""
        return self._tombstones.version()

    def remember(self, commit: SideCommit) -> None:
        """Append the batch's deletes to the tombstone log."""
        deletes = self._batch.rows.latest().where(columns.column(names.DELETE_COLUMN))
        self._tombstones.remember(deletes, recorded_at=self._now, commit=commit)

    def no_hits(self) -> SparkHits:
        """Nothing found."""
        return SparkHits()

    def find_hits(self) -> SparkHits:
        """Find the tombstones of the batch's keys."""
        return self._find_hits(self._batch.rows.latest())

    def find_late_hits(self, seen: SparkHits) -> SparkHits:
        """Find the tombstones of the upserts that were merged."""
        return self._find_hits(self._live(seen).where(~columns.column(names.DELETE_COLUMN)))

    def _find_hits(self, events: DataFrame) -> SparkHits:
        batch = self._batch
        return self._tombstones.hits(events, batch.upserts + batch.deletes, batch.bounds, now=self._now)

    def forget(self, hits: SparkHits, commit: SideCommit) -> None:
        """Mark the tombstones of revived keys as overtaken."""
        self._tombstones.forget(hits.revivals(), recorded_at=self._now, commit=commit)

    def tidy(self) -> None:
        """Tidy the tombstone log when it has many files."""
        self._tombstones.tidy(now=self._now, delete_matched=self._delete_matched)

    def merge(self, hits: SparkHits, tag: CommitTag) -> MergeReport:
        """One MERGE in one commit: delete, update or insert each event, unless the row is newer."""
        layout, batch = self._layout, self._batch
        clauses = layout.once("spark_clauses", lambda: _clauses(layout, self._spec))
        with self._commit(tag):
            builder = self._matched(self._live(hits).alias("s"))
            if batch.deletes:
                builder = builder.whenMatchedDelete(clauses.delete)
            if batch.upserts:
                if clauses.updates:
                    builder = builder.whenMatchedUpdate(clauses.update, clauses.updates)
                builder = builder.whenNotMatchedInsert(clauses.insert, clauses.values)
            if self._spec.schema_evolution and layout.new_columns:
                builder = builder.withSchemaEvolution()
            return self._execute(builder)

    def repair(self, late: SparkHits, tag: CommitTag) -> MergeReport:
        """One MERGE that only deletes."""
        tombstone_sequence, stored_sequence = _sequences(self._layout)
        older = stored_sequence < tombstone_sequence
        with self._commit(tag):
            builder = self._matched(late.refusals().alias("s"))
            return self._execute(builder.whenMatchedDelete(F.coalesce(older, F.lit(True))))

    def counted_as(self, late: SparkHits, version: int) -> dict[str, int]:
        """How many of the refused keys a version's change feed shows as inserted and as updated."""
        keys = [columns.column(key) for key in self._layout.keys]
        changed = tables.changes(self._session, self._target, version)
        touched = changed.join(late.refusals().select(*keys), list(self._layout.keys), "left_semi")
        counted = {row["_change_type"]: row["count"] for row in touched.groupBy("_change_type").count().collect()}
        return {"inserted": counted.get("insert", 0), "updated": counted.get("update_postimage", 0)}

    def _live(self, hits: SparkHits) -> DataFrame:
        """The events that no tombstone refuses."""
        latest = self._batch.rows.latest()
        if not hits.refused:
            return latest
        refused = hits.refusals().select(*(columns.column(key) for key in self._layout.keys))
        if hits.refused <= BROADCAST_EVENTS:
            refused = F.broadcast(refused)
        same = columns.all_of(columns.column(key, "e") == columns.column(key, "r") for key in self._layout.keys)
        return latest.alias("e").join(refused.alias("r"), same, "left_anti")

    def _delete_matched(self, table: str, keys: Sequence[str], source: DataFrame, condition: Column) -> None:
        """One MERGE that only deletes, on a side table and without a transaction id."""
        same_keys = _same_keys(keys)
        builder = delta_table(self._session, table).alias("t").merge(source.alias("s"), same_keys & condition)
        try:
            builder.whenMatchedDelete().execute()
        except Exception as err:
            if retry.conflict_class(err) is None:
                raise
            tell(log.info, "side_table_tidied_later", table=table, conflict=retry.conflict_class(err))

    def _matched(self, source: DataFrame) -> DeltaMergeBuilder:
        same_keys = self._layout.once("same_keys", lambda: _same_keys(self._layout.keys))
        bounds = self._batch.bounds.condition(self._session, "t")
        return delta_table(self._session, self._target).alias("t").merge(source, bounds & same_keys)

    def _execute(self, builder: DeltaMergeBuilder) -> MergeReport:
        result = builder.execute()
        rows = result.collect()
        metrics = merge_metrics(result)
        if not rows:
            return MergeReport(already_applied=True)
        counts = rows[0]
        version = self._session.conf.get(LAST_COMMIT_VERSION_CONF, None)
        return MergeReport(
            inserted=counts["num_inserted_rows"],
            updated=counts["num_updated_rows"],
            deleted=counts["num_deleted_rows"],
            version=None if not version else int(version),
            metrics=metrics,
        )

    @contextmanager
    def _commit(self, tag: CommitTag) -> Iterator[None]:
        """Set the confs that a commit takes its identity from, and restore them whatever happens."""
        wanted: dict[str, str | None] = {
            APP_ID_CONF: tag.app_id,
            BATCH_ID_CONF: None if tag.app_id is None else str(tag.batch_id),
            USER_METADATA_CONF: tag.user_metadata,
            # Auto-reset drops the id while the commit is built, so a second attempt would go without it.
            AUTO_RESET_CONF: "false",
            # The events are materialised already; Delta would write them to disk once more.
            MATERIALIZE_CONF: "none",
            LAST_COMMIT_VERSION_CONF: None,
        }
        if self._deletion_vectors is not None:
            wanted[DELETION_VECTORS_CONF] = str(self._deletion_vectors).lower()
        before = {key: self._session.conf.get(key, None) for key in wanted}
        try:
            self._set(wanted)
            yield
        finally:
            self._set(before)

    def _set(self, confs: dict[str, str | None]) -> None:
        for key, value in confs.items():
            if value is None:
                self._session.conf.unset(key)
            else:
                self._session.conf.set(key, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Clauses:
    """Conditions and assignments of the merge, over `s` and `t`."""

    delete: Column
    update: Column
    insert: Column
    values: dict[str, str | Column]
    """The whole stored row."""
    updates: dict[str, str | Column]
    """The same without the keys, which are equal."""


def _clauses(layout: Layout, spec: MergeSpec) -> _Clauses:
    source_sequence, stored_sequence = _sequences(layout)
    delete = columns.column(names.DELETE_COLUMN, "s")
    # A row without a sequence is the oldest: NULL orders first inside a struct, and compares as NULL outside.
    newer = F.coalesce(source_sequence > stored_sequence, F.lit(True))
    redelivered = source_sequence.eqNullSafe(stored_sequence) & _changed(layout)
    values = _assignments(layout)
    keys = {names.quote(key) for key in layout.keys}
    return _Clauses(
        delete=delete & newer,
        update=~delete & ((newer & ~_repeats(layout, spec)) | redelivered),
        insert=~delete,
        values=values,
        updates={name: value for name, value in values.items() if name not in keys},
    )


def _repeats(layout: Layout, spec: MergeSpec) -> Column:
    """Whether a newer event says nothing new: the row as it is, from the same place of the source's log."""
    if spec.skip_unchanged:
        return ~_changed(layout)
    if spec.position_components is None:
        return F.lit(False)
    source, stored = columns.column(names.SEQUENCE_COLUMN, "s"), layout.target_sequence("t")
    leading = [field.name for field in layout.sequence_fields[: spec.position_components]]
    return columns.all_of(source[name].eqNullSafe(stored[name]) for name in leading) & ~_changed(layout)


def _same_keys(keys: Sequence[str]) -> Column:
    return columns.all_of(columns.column(k, "t") == columns.column(k, "s") for k in keys)


def _changed(layout: Layout) -> Column:
    new = layout.new_columns
    return columns.any_of(
        F.lit(True)
        if any(name == c.source_name or name.startswith(f"{c.source_name}.") for name in new)
        else columns.differs(columns.column(c.name, "s"), columns.column(c.name, "t"), c.dtype)
        for c in layout.stored
    )


def _sequences(layout: Layout) -> tuple[Column, Column]:
    """The source's and the stored sequence, ready to be compared; a single component as such, which costs less."""
    source, stored = columns.column(names.SEQUENCE_COLUMN, "s"), layout.target_sequence("t")
    if len(layout.sequence_fields) > 1:
        return source, stored
    component = layout.sequence_fields[0].name
    if layout.sequence_columns is not None:
        return source.getField(component), columns.column(layout.sequence_columns[0], "t")
    return source.getField(component), stored.getField(component)


def _assignments(layout: Layout) -> dict[str, str | Column]:
    """What an upsert writes: the whole stored row and, where it is kept apart, the sequence."""
    values: dict[str, str | Column] = {names.quote(c.name): columns.column(c.name, "s") for c in layout.stored}
    if layout.sequence_columns is None:
        values[names.quote(names.SEQUENCE_COLUMN)] = columns.column(names.SEQUENCE_COLUMN, "s")
    return values
