"""Who reads and writes the remembered deletes of a job: whichever engine merges, the driver does it where it may."""

from __future__ import annotations

from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructField, StructType

from stream_merge.engines.base import MergeJob
from stream_merge.engines.costs import DRIVER_EVENTS
from stream_merge.model import names
from stream_merge.spark.errors import exceeds_driver_results
from stream_merge.tables.delta_rs.eligibility import of_calendar, of_events, of_keys, of_log, of_place
from stream_merge.tables.side.side_table import DriverSideTable, SparkSideTable
from stream_merge.tables.side.tombstones import DriverTombstones, SparkTombstones, own_log
from stream_merge.tables.whitelist import Ineligible


def on_spark(job: MergeJob) -> SparkTombstones:
    """By Spark."""
    own = partial(own_log, job.target.table_id)
    return SparkTombstones(SparkSideTable(job.session, job.spec.tombstone_target, own), **_scope(job))


def by_delta_rs(job: MergeJob, events: pa.Table) -> DriverTombstones:
    """In the driver.

    Args:
        job: whose deletes are remembered.
        events: `Rows.arrow` or `Rows.keys` of the batch.
    """
    name = job.spec.tombstone_target
    table = DriverSideTable(
        name,
        newest=lambda: job.tables.tombstones.driver(must_read=True),
        cached=job.tables.tombstones.cached_driver,
        accept=partial(own_log, job.target.table_id),
    )
    return DriverTombstones(table, events, **_scope(job))


def _scope(job: MergeJob) -> dict[str, Any]:
    return {
        "session": job.session,
        "spec": job.spec,
        "target_id": job.target.table_id,
        "layout": job.layout,
        "batch": job.batch,
        "now_micros": job.now_micros,
    }


def obstacle(job: MergeJob) -> Ineligible | None:
    """Why delta-rs must not write the log of deletes, or could not write the one that the batch has to begin.

    That one would be made, and then nothing could be appended to it.
    """
    refused = _of_calendar(job)
    begins = job.spec.tombstones and job.batch.deletes > 0 and job.log_snapshot is None
    if refused is not None or not begins:
        return refused
    target = job.spec.tombstone_target
    refused = of_place(target.plain, "the tombstone table") if target.path is not None else None
    return refused or of_keys(job.layout)


def obstacle_in(events: pa.Table, job: MergeJob) -> Ineligible | None:
    """Why delta-rs could not append these events' keys and sequences to the log of deletes."""
    if not job.spec.tombstones:
        return None
    return of_events(events.select([*job.layout.keys, names.SEQUENCE_COLUMN]), ())


def quickly(job: MergeJob) -> DriverTombstones | None:
    """In the driver for a batch that Spark merges, None where that is not proven; Spark takes a job or two to read.

    The log is a plain table of the sink's own, whatever the target is like.
    """
    small = job.batch.upserts + job.batch.deletes <= DRIVER_EVENTS
    if job.spec.engine != "auto" or not small or not job.costs.remembers_natively:
        return None
    if job.log is None or job.log_snapshot is None or of_log(job.layout, job.log, job.log_snapshot) is not None:
        return None
    if _of_calendar(job) is not None:
        return None
    try:
        events = job.batch.rows.keys()
    except Exception as err:
        if not exceeds_driver_results(err):
            raise
        return None
    return None if of_events(events, ()) is not None else by_delta_rs(job, events)


def _of_calendar(job: MergeJob) -> Ineligible | None:
    """Obstacle of keys and sequence, where the batch reads or writes the log; its own time is of today."""
    if not job.spec.tombstones or (job.batch.deletes == 0 and job.log_snapshot is None):
        return None
    sequence = StructField(names.SEQUENCE_COLUMN, job.layout.sequence_type)
    return of_calendar(job.session, StructType([*job.layout.key_fields, sequence]))
