"""delta-rs as an engine: where it may merge, and what it needs."""

from __future__ import annotations

from pyspark.sql import SparkSession

from stream_merge.engines import tombstones
from stream_merge.engines.base import Choice, Execution, MergeJob
from stream_merge.engines.costs import Work
from stream_merge.engines.delta_rs.merger import DeltaRsMerger
from stream_merge.engines.memory import Promise, reservations
from stream_merge.model.results import Refusal
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.shapes.layout import Layout
from stream_merge.spark.errors import exceeds_driver_results
from stream_merge.tables.delta_rs.eligibility import Ineligible, of_batch, of_events, of_files, of_table
from stream_merge.tables.delta_rs.table import NativeTable
from stream_merge.tables.reader import Store

NATIVE_BYTES_PER_FILE_BYTE = 2.5
NATIVE_BYTES_PER_EVENT_BYTE = 6
"""Resident memory of a merge by delta-rs: 20 M rows of 60 B, all touched, with 1 M events, peaked at 1.6 GB."""
NATIVE_BASE_BYTES = 128 << 20
"""What delta-rs, Arrow and its allocator hold whatever the batch."""


class DeltaRs:
    """The merge by delta-rs, for tables and batches for which it is proven to do what Spark does."""

    name = "native"
    in_driver = True

    def reads(self, spec: MergeSpec, store: Store, session: SparkSession, found: TableSnapshot) -> bool:
        """What it can write as well."""
        if _of_filter(spec) is not None:
            return False
        return found.read_by == "native" and of_table(store.handle(session, spec.target), found, "target") is None

    def takes(self, layout: Layout) -> bool:
        """What it carries and compares as Spark does."""
        return of_batch(layout) is None

    def obstacle(self, job: MergeJob) -> Ineligible | None:
        """Columns, features and places that are not proven."""
        refused = _of_filter(job.spec) or of_batch(job.layout) or of_table(job.table, job.target, "the target")
        if refused is None and job.log_snapshot is not None:
            refused = of_table(job.log, job.log_snapshot, "the tombstone table")
        return refused

    def start(self, job: MergeJob, why: str, refusal: Refusal | None) -> Execution | Ineligible:
        """Files, memory and the very values are looked at now."""
        if job.table is None:
            return Ineligible(reason="storage", detail="the target is not where delta-rs can read it")
        refused = of_files(job.table, job.target, "the target", job.batch.bounds)
        if refused is None and job.log is not None and job.log_snapshot is not None:
            refused = of_files(job.log, job.log_snapshot, "the tombstone table")
        if refused is not None:
            return refused
        need = _memory_needed(job.work)
        allowed = reservations.take(need, job.spec.native_memory_bytes)
        if allowed is not None:
            return Ineligible(
                reason="memory",
                detail=f"delta-rs might need {need / 1e6:,.0f} MB of the driver's memory, of {allowed / 1e6:,.0f} MB"
                " allowed",
            )
        promise = Promise(need)
        try:
            found = _started(job, job.table, Choice(engine=self.name, why=why, refusal=refusal), promise)
        except BaseException:
            promise.give_back()
            raise
        if isinstance(found, Ineligible):
            promise.give_back()
        return found


def _of_filter(spec: MergeSpec) -> Ineligible | None:
    if spec.target_filter is None:
        return None
    return Ineligible(reason="filter", detail="target_filter is SQL, which only Spark executes")


def _started(job: MergeJob, table: NativeTable, choice: Choice, promise: Promise) -> Execution | Ineligible:
    version = table.version  # as it was found eligible
    try:
        events = job.batch.rows.arrow()
    except Exception as err:
        if not exceeds_driver_results(err):
            raise
        return Ineligible(reason="memory", detail="the events exceed spark.driver.maxResultSize")
    refused = of_events(events, job.target.partition_columns)
    if refused is not None:
        return refused
    merger = DeltaRsMerger(
        spec=job.spec, target=table, layout=job.layout, events=events, bounds=job.batch.bounds, chosen_at=version
    )
    return Execution(
        choice=choice,
        merger=merger,
        tombstones=tombstones.by_delta_rs(job, events) if job.spec.tombstones else None,
        in_driver=True,
        only_spark=False,
        release=promise.give_back,
    )


def _memory_needed(work: Work) -> int:
    row_bytes = work.bytes / work.rows if work.rows else 256
    return int(
        NATIVE_BASE_BYTES
        + NATIVE_BYTES_PER_FILE_BYTE * work.bytes
        + NATIVE_BYTES_PER_EVENT_BYTE * row_bytes * work.events
    )
