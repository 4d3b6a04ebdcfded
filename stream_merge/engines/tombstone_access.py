"""Who reads and writes the tombstones of a job: the driver where it may, whichever engine merges."""

from __future__ import annotations

from functools import partial

import pyarrow as pa

from stream_merge.engines.base import MergeJob
from stream_merge.engines.costs import DRIVER_EVENTS
from stream_merge.shapes.arrow_order import is_legible
from stream_merge.spark.errors import exceeds_driver_results
from stream_merge.tables.files.eligibility import Ineligible, keys_obstacle, table_obstacle
from stream_merge.tables.side.side_table import DriverSideTable, SparkSideTable
from stream_merge.tables.side.tombstones import DriverTombstones, Scope, SparkTombstones, own_log


def on_spark(job: MergeJob) -> SparkTombstones:
    """Tombstones by Spark."""
    own = partial(own_log, job.target.table_id)
    return SparkTombstones(SparkSideTable(job.session, job.spec.tombstone_target, own), _scope(job))


def in_driver(job: MergeJob, events: pa.Table) -> DriverTombstones:
    """Tombstones by the driver; `events` are `Rows.arrow` or `Rows.keys` of the batch."""
    name = job.spec.tombstone_target
    table = DriverSideTable(
        name,
        newest=lambda: job.tables.tombstones.driver(must_read=True),
        cached=job.tables.tombstones.cached_driver,
        accept=partial(own_log, job.target.table_id),
    )
    return DriverTombstones(table, events, _scope(job))


def _scope(job: MergeJob) -> Scope:
    return Scope(
        session=job.session,
        spec=job.spec,
        target_id=job.target.table_id,
        layout=job.layout,
        batch=job.batch,
        now_micros=job.now_micros,
    )


def refused_log(job: MergeJob) -> Ineligible | None:
    """Why the driver cannot keep the log of deletes, of whose events it has keys and sequences only."""
    if job.log_snapshot is None:
        return None
    if job.log is None:
        return Ineligible(reason="storage", detail="the tombstone table is not where the driver can read it")
    return keys_obstacle(job.layout) or table_obstacle(job.log, job.log_snapshot, "the tombstone table")


def quickly(job: MergeJob) -> DriverTombstones | None:
    """Tombstones by the driver for a small batch that Spark merges: saves Spark jobs. None where not proven."""
    small = job.batch.upserts + job.batch.deletes <= DRIVER_EVENTS
    if job.spec.engine != "auto" or not small or not job.costs.remembers_in_driver or job.log_snapshot is None:
        return None
    if refused_log(job) is not None:
        return None
    try:
        events = job.batch.rows.keys()
    except Exception as err:
        if not exceeds_driver_results(err):
            raise
        return None
    return in_driver(job, events) if is_legible(events) else None
