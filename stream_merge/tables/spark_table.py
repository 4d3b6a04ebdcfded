"""A Delta table by Spark: its newest snapshot, its history, and its rows."""

from __future__ import annotations

import logging
from typing import Any

from delta.tables import DeltaTable
from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from stream_merge.errors import ConfigError
from stream_merge.model.snapshot import CommitRecord, TableSnapshot, metrics_of_history
from stream_merge.model.table_ref import TableRef
from stream_merge.spark import catalog, delta, places
from stream_merge.spark.hadoop_files import path_is_occupied, qualified_path
from stream_merge.spark.jvm import caches_nothing

log = logging.getLogger(__name__)


def delta_table(session: SparkSession, target: TableRef) -> DeltaTable:
    """A fresh handle; a handle pins the schema it was built with (Delta 4.4), so build one per attempt."""
    if target.path is not None:
        return DeltaTable.forPath(session, target.plain)
    return DeltaTable.forName(session, catalog.qualified(session, target))


def newest(session: SparkSession, target: TableRef) -> Any:
    """Delta's own snapshot of a table that is there, freshly loaded."""
    if target.path is not None:
        return delta.newest(session, delta_table(session, target))
    entry = catalog.entry(session, target)
    if entry is None:
        msg = f"[TABLE_NOT_FOUND] the catalog no longer has table {target!r}; restore the table"
        raise ConfigError(msg, target=target)
    return entry.newest()


def find(session: SparkSession, target: TableRef) -> TableSnapshot | None:
    """The table's newest snapshot, or None when nothing is there; refuses what is not a Delta table."""
    if target.path is None:
        entry = catalog.entry(session, target)
        return None if entry is None else delta.snapshot(session, entry.newest())
    try:
        return delta.snapshot(session, newest(session, target))
    except AnalysisException:
        if not path_is_occupied(session, target.plain):
            return None
    except Py4JError as err:
        if catalog.is_managed(err):
            raise catalog.managed(target) from err
        raise
    try:  # another writer may have created it between the two looks
        return delta.snapshot(session, newest(session, target))
    except AnalysisException as err:
        raise ConfigError(places.no_table(target), target=target) from err


def rows(session: SparkSession, target: TableRef, *, version: int | None = None) -> DataFrame:
    """The table's rows at a version; None: at its newest, whatever a user has cached of it.

    Spark uses cached rows, however old: they lack what others, or the driver, have committed since. A version that is
    asked for by its number is another plan.
    """
    reader = session.read.format("delta")
    if version is not None:
        reader = reader.option("versionAsOf", version)
    rows_now = reader.load(target.path) if target.path is not None else reader.table(target)
    if version is not None or not (rows_now.storageLevel.useMemory or rows_now.storageLevel.useDisk):
        return rows_now
    newest = find(session, target)
    return rows_now if newest is None else rows(session, target, version=newest.version)


def refresh_cached(session: SparkSession, target: TableRef) -> None:
    """Have Spark read again what a user has cached of the table, after a commit that it has not made."""
    if caches_nothing(session):
        return
    if target.path is not None:
        session.catalog.refreshByPath(target.plain)
    else:
        session.catalog.refreshTable(target)


def location(session: SparkSession, target: TableRef) -> TableRef:
    """Location of a target, however it is spelled; the name of a catalog table that does not exist yet."""
    if target.path is not None:
        return TableRef(qualified_path(session, target.path))
    entry = catalog.entry(session, target)
    return target if entry is None else TableRef(entry.location)


def named_location(session: SparkSession, target: TableRef) -> str | None:
    """Location of a table that is named in a catalog; None of a path."""
    return None if target.path is not None else location(session, target)


def rewrite(rows: DataFrame, target: TableRef, *, once: str | None = None) -> None:
    """Replace all rows of a table by these, in other types, in one commit; properties stay.

    The rows are read by the very transaction that replaces them (PrepareDeltaScan, Delta 4.4): what somebody appends
    meanwhile is either among them or makes this commit lose. `once`: id of a transaction that happens only once.
    """
    writer = rows.write.format("delta").mode("overwrite").option("overwriteSchema", "true")
    if once is not None:
        writer = writer.option("txnAppId", once).option("txnVersion", "0")
    if target.path is not None:
        writer.save(target.plain)
    else:
        writer.saveAsTable(target)


_MEANWHILE = 100
"""Commits of others during a read."""


def history(session: SparkSession, target: TableRef, newer_than: int, up_to: int) -> list[CommitRecord]:
    """The commits in a range of versions up to the table's newest, newest first; Delta counts from there (4.4)."""
    wanted = up_to - newer_than
    if wanted <= 0:
        return []
    columns = ("version", "unix_millis(timestamp) AS timestamp_ms", "userMetadata", "operationMetrics")
    rows = delta_table(session, target).history(wanted).selectExpr(*columns).collect()
    if rows and rows[0]["version"] > up_to:  # others have committed meanwhile
        wanted = rows[0]["version"] - newer_than
        rows = delta_table(session, target).history(wanted + _MEANWHILE).selectExpr(*columns).collect()
    return [
        CommitRecord(
            version=row["version"],
            timestamp_ms=row["timestamp_ms"],
            user_metadata=row["userMetadata"],
            metrics=metrics_of_history(row["operationMetrics"] or {}),
        )
        for row in rows
        if row["version"] > newer_than
    ]


def changes(session: SparkSession, target: TableRef, version: int) -> DataFrame:
    """The change feed of one version."""
    reader = (
        session.read.format("delta")
        .option("readChangeFeed", "true")
        .option("startingVersion", version)
        .option("endingVersion", version)
    )
    return reader.load(target.path) if target.path is not None else reader.table(target)
