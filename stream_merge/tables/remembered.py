"""What a table remembers of its deletes, for those who read it beside a sink."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from stream_merge.model import names
from stream_merge.model.table_ref import TableRef
from stream_merge.spark import columns
from stream_merge.tables import spark_table
from stream_merge.tables.tombstones.rules import log_of


def deletes(session: SparkSession, target: TableRef, *, retention_seconds: float | None) -> DataFrame | None:
    """The entries of a target's tombstones that still count, those included that an upsert has overtaken.

    Args:
        session: any.
        target: as the sink was told.
        retention_seconds: how long entries count; None: for ever.

    Returns: None where there is no table, or none that belongs to this very target.
    """
    log = target.tombstones
    found = spark_table.find(session, target)
    if found is None or log_of(found.table_id, spark_table.find(session, log)) is None:
        return None
    entries = spark_table.rows(session, log)
    if retention_seconds is None:
        return entries
    recorded_at = columns.column(names.RECORDED_AT_COLUMN)
    return entries.where(~columns.is_older(recorded_at, retention_seconds, now=F.current_timestamp()))
