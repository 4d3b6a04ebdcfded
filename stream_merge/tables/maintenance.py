"""Maintenance of a table and its side tables: OPTIMIZE and VACUUM by Spark, which knows every table feature."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta

from pyspark.sql import DataFrame, SparkSession

from stream_merge.errors import ConfigError
from stream_merge.model.logs import tell
from stream_merge.model.results import MaintenanceOutcome, MaintenanceRun
from stream_merge.model.settings import SMALL_BYTES, Maintenance, MergeSpec
from stream_merge.model.table_ref import TableRef
from stream_merge.spark import places
from stream_merge.spark.confs import TIMESTAMP_CONF, TIMESTAMP_MICROS, WHOLE_READS, holding
from stream_merge.spark.delta import silent
from stream_merge.spark.errors import reason
from stream_merge.tables import backoff, locks, spark_table
from stream_merge.tables.files.compaction_choice import MOST_DELETED_SHARE
from stream_merge.tables.side import location as side_location
from stream_merge.tables.spark_table import delta_table, find, named_location, newest

log = logging.getLogger(__name__)

MAX_FILE_CONF = "spark.databricks.delta.optimize.maxFileSize"
TARGET_BYTES = 128 << 20
"""Files are compacted up to this size. Larger ones make each merge copy more rows (copy-on-write)."""
_OPTIMIZE_CONFS = {
    TIMESTAMP_CONF: TIMESTAMP_MICROS,
    **WHOLE_READS,
    "spark.databricks.delta.optimize.minFileSize": str(SMALL_BYTES),
    # REORG purges removed rows: OPTIMIZE does so only in files that are not alone in their partition (Delta 4.4).
    "spark.databricks.delta.optimize.maxDeletedRowsRatio": "1.0",
    # Files clustered together are rewritten with new ones until they have this size; Delta's own limit is 100 GB.
    "spark.databricks.delta.optimize.clustering.mergeStrategy.minCubeSize.threshold": str(8 * TARGET_BYTES),
}
_LISTING_CONF = "spark.sql.sources.parallelPartitionDiscovery.parallelism"
"""VACUUM lists a table in so many tasks; Spark's default of 10,000 takes a minute on two cores, for any table."""
BETWEEN_VACUUMS = timedelta(days=1)
"""VACUUM lists the complete table: not more often."""
_WORSE: tuple[MaintenanceOutcome, ...] = ("nothing", "done", "lost", "no_memory", "failed")


class MaintenancePlan:
    """Counts the calls of one sink that changed its target, and maintains it after every `wanted.every` of them."""

    def __init__(self, spec: MergeSpec, wanted: Maintenance) -> None:
        self._target, self._wanted = spec.target, wanted
        self._tombstones = spec.tombstone_target if spec.tombstones else None
        # A quarantine table of the user's own is theirs to maintain.
        self._quarantine = spec.quarantine_table if spec.quarantine_target is None else None
        self._changed = 0
        self._vacuumed_at: float | None = None

    def after_call(self, session: SparkSession, *, changed: bool) -> MaintenanceRun | None:
        """Maintain the target, if it is due."""
        self._changed += changed
        if self._changed < self._wanted.every:
            return None
        self._changed = 0
        age = float("inf") if self._vacuumed_at is None else time.monotonic() - self._vacuumed_at
        vacuum = self._wanted.vacuum and age >= BETWEEN_VACUUMS.total_seconds()
        side_tables = {"tombstones": self._tombstones, "quarantine": self._quarantine}
        result = _maintained(session, self._target, optimize=self._wanted.optimize, vacuum=vacuum, **side_tables)
        if result.vacuumed:
            self._vacuumed_at = time.monotonic()
        return result


def maintain(session: SparkSession, target: TableRef, wanted: Maintenance) -> MaintenanceRun:
    """Maintain a table now, by hand; jobs of other processes cannot write to one on a local disk meanwhile."""
    location = named_location(session, target)
    if location is None:
        places.expect_scheme(target, spark_table.location(session, target))
    with locks.only_writer(target, "stream-merge maintain", location):
        locks.expect_alone(target, location)
        snapshot = find(session, target)
        if snapshot is None:
            msg = f"[TABLE_NOT_FOUND] there is no Delta table at {target!r}; use a sink's target"
            raise ConfigError(msg, target=target)
        side_tables = {
            "tombstones": side_location.locate(session, target, snapshot),
            "quarantine": target.quarantine,
        }
        return _maintained(session, target, optimize=wanted.optimize, vacuum=wanted.vacuum, **side_tables)


def worse(results: Sequence[MaintenanceRun]) -> MaintenanceRun:
    """The sum of several parts of a maintenance run, with the worst outcome."""
    return MaintenanceRun(
        outcome=max((one.outcome for one in results), key=_WORSE.index, default="nothing"),
        removed_files=sum(one.removed_files for one in results),
        added_files=sum(one.added_files for one in results),
        vacuumed=any(one.vacuumed for one in results),
        detail="; ".join(one.detail for one in results if one.detail),
    )


def _maintained(
    session: SparkSession,
    target: TableRef,
    *,
    optimize: bool,
    vacuum: bool,
    tombstones: TableRef | None,
    quarantine: TableRef | None,
) -> MaintenanceRun:
    """Maintain the target, and if it is vacuumed its side tables; failures are logged, and left for the next run.

    Cost: a job over the log; OPTIMIZE, and where many rows are removed REORG; VACUUM lists each table.
    """
    result = _run(session, target, optimize=optimize, vacuum=vacuum)
    if result.vacuumed:
        # Every batch with a delete or a broken event adds a file. The sink compacts the tombstones itself.
        for side_table, compacted in ((tombstones, False), (quarantine, True)):
            if side_table is not None:
                _run(session, side_table, optimize=compacted, vacuum=True)
    return result


def _run(session: SparkSession, table: TableRef, *, optimize: bool, vacuum: bool) -> MaintenanceRun:
    started = time.perf_counter()
    parts = [(_optimized, optimize), (_purged, optimize), (_vacuumed, vacuum)]
    result = worse([_guarded(part, session, table) for part, wanted in parts if wanted])
    seconds = round(time.perf_counter() - started, 3)
    say = log.warning if result.outcome == "failed" else log.info
    tell(say, "table_maintenance", table=table, **asdict(result), seconds=seconds)
    return result


def _guarded(
    part: Callable[[SparkSession, TableRef], MaintenanceRun], session: SparkSession, table: TableRef
) -> MaintenanceRun:
    try:
        return MaintenanceRun(outcome="nothing") if find(session, table) is None else part(session, table)
    except Exception as err:
        lost = backoff.conflict_class(err)
        return MaintenanceRun(outcome="failed" if lost is None else "lost", detail=reason(err))


def _optimized(session: SparkSession, table: TableRef) -> MaintenanceRun:
    """Compact small files, and cluster new files of a clustered table."""
    return _rewritten(session, f"OPTIMIZE {table.sql}")


def _purged(session: SparkSession, table: TableRef) -> MaintenanceRun:
    """Rewrite the files with removed rows, where these are many. Cost: one job over the log."""
    files = DataFrame(newest(session, table).allFiles().toDF(), session).where("deletionVector IS NOT NULL")
    rows = "CAST(get_json_object(stats, '$.numRecords') AS BIGINT)"
    row = files.selectExpr(f"sum(deletionVector.cardinality) / sum({rows}) AS share").first()
    if row is None or row["share"] is None or row["share"] < MOST_DELETED_SHARE:
        return MaintenanceRun(outcome="nothing")
    return _rewritten(session, f"REORG TABLE {table.sql} APPLY (PURGE)")


def _rewritten(session: SparkSession, statement: str) -> MaintenanceRun:
    with holding(session, {MAX_FILE_CONF: session.conf.get(MAX_FILE_CONF, str(TARGET_BYTES)), **_OPTIMIZE_CONFS}):
        row = session.sql(statement).first()
    removed, added = (0, 0) if row is None else (row["metrics"]["numFilesRemoved"], row["metrics"]["numFilesAdded"])
    return MaintenanceRun(outcome="done" if removed else "nothing", removed_files=removed, added_files=added)


def _vacuumed(session: SparkSession, table: TableRef) -> MaintenanceRun:
    """Delete files that the table has not needed for its own retention."""
    with holding(session, {_LISTING_CONF: str(4 * session.sparkContext.defaultParallelism)}), silent(session):
        delta_table(session, table).vacuum()
    return MaintenanceRun(outcome="done", vacuumed=True)
