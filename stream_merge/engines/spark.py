"""Delta's MERGE on Spark: distributed, all table features. The only place that calls `DeltaTable.merge`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from delta.tables import DeltaMergeBuilder
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from stream_merge import columns, names, retry
from stream_merge.engines.base import CommitTag, MergeReport, MergeRequest, RepairRequest
from stream_merge.layout import Layout
from stream_merge.plan import KeyBounds
from stream_merge.spark_internals import LAST_COMMIT_VERSION_CONF, merge_metrics
from stream_merge.tables import delta_table

log = logging.getLogger(__name__)

APP_ID_CONF = "spark.databricks.delta.write.txnAppId"
BATCH_ID_CONF = "spark.databricks.delta.write.txnVersion"
USER_METADATA_CONF = "spark.databricks.delta.commitInfo.userMetadata"
AUTO_RESET_CONF = "spark.databricks.delta.write.txnVersion.autoReset.enabled"
MATERIALIZE_CONF = "spark.databricks.delta.merge.materializeSource"


class SparkEngine:
    """Runs merges in a session that belongs to the sink.

    MERGE takes its transaction id and user metadata only from confs of the session of the target
    `DeltaTable` (Delta 4.4). They are set before every attempt and restored after it; in a session
    of one's own no other write can pick them up.
    """

    name = "spark"

    def __init__(self, session: SparkSession, target: str) -> None:
        self._session = session
        self._target = target

    def merge(self, request: MergeRequest) -> MergeReport:
        """One MERGE in one commit: delete, update or insert each event, unless the row is newer."""
        layout = request.layout
        clauses = layout.once("spark_clauses", lambda: _clauses(layout))
        with self._commit(request.tag):
            builder = self._matched(request.events.alias("s"), layout, request.bounds)
            if request.has_deletes:
                builder = builder.whenMatchedDelete(clauses.delete)
            if request.has_upserts:
                if clauses.updates:
                    builder = builder.whenMatchedUpdate(clauses.update, clauses.updates)
                builder = builder.whenNotMatchedInsert(clauses.insert, clauses.values)
            if request.schema_evolution and request.layout.new_columns:
                builder = builder.withSchemaEvolution()
            return self._execute(builder)

    def repair(self, request: RepairRequest) -> MergeReport:
        """One MERGE that only deletes."""
        tombstone_sequence, stored_sequence = _sequences(request.layout)
        older = stored_sequence < tombstone_sequence
        with self._commit(request.tag):
            builder = self._matched(request.refused.alias("s"), request.layout, request.bounds)
            return self._execute(builder.whenMatchedDelete(F.coalesce(older, F.lit(True))))

    def delete_matched(self, table: str, keys: Sequence[str], source: DataFrame, condition: Column) -> None:
        """One MERGE that only deletes, on a side table and without a transaction id."""
        same_keys = _same_keys(keys)
        builder = delta_table(self._session, table).alias("t").merge(source.alias("s"), same_keys & condition)
        try:
            builder.whenMatchedDelete().execute()
        except Exception as err:
            if retry.conflict_class(err) is None:
                raise
            log.info("side_table_tidied_later", extra={"table": table, "conflict": retry.conflict_class(err)})

    def _matched(self, source: object, layout: Layout, bounds: KeyBounds) -> DeltaMergeBuilder:
        same_keys = layout.once("same_keys", lambda: _same_keys(layout.keys))
        table = delta_table(self._session, self._target)
        return table.alias("t").merge(source, bounds.condition(self._session, "t") & same_keys)  # type: ignore[arg-type]

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


def _clauses(layout: Layout) -> _Clauses:
    source_sequence, stored_sequence = _sequences(layout)
    delete = columns.column(names.DELETE_COLUMN, "s")
    # A row without a sequence is the oldest: NULL orders first inside a struct, and compares as NULL outside.
    newer = F.coalesce(source_sequence > stored_sequence, F.lit(True))
    redelivered = source_sequence.eqNullSafe(stored_sequence) & _changed(layout)
    values = _assignments(layout)
    keys = {names.quote(key) for key in layout.keys}
    return _Clauses(
        delete=delete & newer,
        update=~delete & (newer | redelivered),
        insert=~delete,
        values=values,
        updates={name: value for name, value in values.items() if name not in keys},
    )


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
