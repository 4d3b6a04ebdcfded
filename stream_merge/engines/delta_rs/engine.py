"""delta-rs as an engine: where it may merge, and what it needs."""

from __future__ import annotations

from functools import partial

from pyspark.sql import SparkSession

from stream_merge.engines import tombstones
from stream_merge.engines.base import Execution, MergeJob
from stream_merge.engines.costs import Work
from stream_merge.engines.delta_rs.merger import DeltaRsMerger
from stream_merge.engines.in_driver import started
from stream_merge.model.results import Refusal
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.shapes.layout import Layout
from stream_merge.tables.delta_rs.eligibility import of_batch, of_calendar, of_events, of_files, of_table
from stream_merge.tables.delta_rs.touched_files import touched_files
from stream_merge.tables.reader import Store
from stream_merge.tables.whitelist import Ineligible

NATIVE_BYTES_PER_FILE_BYTE = 2.5
NATIVE_BYTES_PER_EVENT_BYTE = 6
"""Resident memory of a merge by delta-rs: 20 M rows of 60 B, all touched, with 1 M events, peaked at 1.6 GB."""
NATIVE_COPIES = 3
"""Of events, and of the rows that it holds at once, as they are when they are read: 1,250 rows of 1 MB, in files of
63 MB together, with 400 events peaked at 5.2 GB."""
_ROWS_HELD = 8_192
"""DataFusion's batch."""
NATIVE_BASE_BYTES = 128 << 20
"""What delta-rs, Arrow and its allocator hold whatever the batch."""


class DeltaRs:
    """The merge by delta-rs, for tables and batches for which it is proven to do what Spark does."""

    name = "native"
    said = "delta-rs"
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
        refused = refused or of_calendar(job.session, job.target.schema)
        if refused is None and job.log_snapshot is not None:
            refused = of_table(job.log, job.log_snapshot, "the tombstone table")
        return refused or tombstones.obstacle(job)

    def start(self, job: MergeJob, why: str, refusal: Refusal | None) -> Execution | Ineligible:
        """Files, memory and the very values are looked at now."""
        if job.table is None:
            return Ineligible(reason="storage", detail="the target is not where delta-rs can read it")
        refused = of_files(job.table, job.target, "the target", job.batch.bounds)
        if refused is None and job.log is not None and job.log_snapshot is not None:
            refused = of_files(job.log, job.log_snapshot, "the tombstone table")
        if refused is not None:
            return refused
        try:
            width = job.table.widths.of(touched_files(job.table, job.batch.bounds))
        except Exception as err:
            detail = f"a file of the target could not be looked into ({type(err).__name__}: {err})"
            return Ineligible(reason="storage", detail=detail)
        return started(
            job,
            self,
            job.table,
            why=why,
            refusal=refusal,
            need=partial(_memory_needed, job.work, width),
            of_events=of_events,
            merger=DeltaRsMerger,
        )


def _of_filter(spec: MergeSpec) -> Ineligible | None:
    if spec.target_filter is None:
        return None
    return Ineligible(reason="filter", detail="target_filter is SQL, which only Spark executes")


def _memory_needed(work: Work, width: float, event_bytes: int | None) -> int:
    events = max(NATIVE_BYTES_PER_EVENT_BYTE * work.row_bytes * work.events, NATIVE_COPIES * (event_bytes or 0))
    held = NATIVE_COPIES * width * min(work.rows or _ROWS_HELD, _ROWS_HELD)
    return int(NATIVE_BASE_BYTES + NATIVE_BYTES_PER_FILE_BYTE * work.bytes + held + events)
