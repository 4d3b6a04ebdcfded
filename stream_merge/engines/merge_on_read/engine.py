"""Merge-on-read as an engine: where it may merge, and what it needs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from pyspark.sql import SparkSession

from stream_merge.engines import tombstones
from stream_merge.engines.base import Execution, MergeJob
from stream_merge.engines.in_driver import started
from stream_merge.engines.merge_on_read.compact import compact
from stream_merge.engines.merge_on_read.memory import memory_before
from stream_merge.engines.merge_on_read.merger import MergeOnReadMerger
from stream_merge.model.results import Refusal
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.shapes import shape_of
from stream_merge.shapes.layout import Layout
from stream_merge.tables.delta_rs.eligibility import of_batch, of_log
from stream_merge.tables.merge_on_read.eligibility import of_clauses, of_events, of_files, of_layout, of_table
from stream_merge.tables.merge_on_read.table import sizes_of, table_of
from stream_merge.tables.reader import Store
from stream_merge.tables.whitelist import Ineligible


class MergeOnRead:
    """The merge by deletion vectors and an appended file, for tables and batches for which it is proven."""

    name = "merge_on_read"
    said = "merge-on-read"
    in_driver = True

    def reads(self, spec: MergeSpec, store: Store, session: SparkSession, found: TableSnapshot) -> bool:
        """What it can write as well."""
        if spec.target_filter is not None or found.read_by != "native":
            return False
        return of_table(store.handle(session, spec.target), found, "target") is None

    def takes(self, layout: Layout) -> bool:
        """What Arrow evaluates as Spark does: as for delta-rs; what else is carried, Spark evaluates."""
        return of_batch(layout) is None and of_layout(layout) is None

    def obstacle(self, job: MergeJob) -> Ineligible | None:
        """Columns, features and places that are not proven."""
        if job.spec.target_filter is not None:
            return Ineligible(reason="filter", detail="target_filter is SQL, which only Spark executes")
        refused = of_layout(job.layout) or of_table(job.table, job.target, "the target")
        if refused is None:
            clauses = shape_of(job.spec).clauses(job.layout, job.spec, deletes=True, upserts=True)
            refused = of_clauses(clauses)
        if refused is None and job.log_snapshot is not None and job.log is None:
            refused = Ineligible(reason="storage", detail="the tombstone table is not where delta-rs can read it")
        return refused or tombstones.obstacle(job)

    def start(self, job: MergeJob, why: str, refusal: Refusal | None) -> Execution | Ineligible:
        """Files, memory and the very values are looked at now."""
        if job.table is None:
            return Ineligible(reason="storage", detail="the target is not where it can be read")
        try:
            known = table_of(job.table, job.target)
            touched = known.touched(job.table, job.target, job.batch.bounds)
            too_many = known.folder.obstacle(sizes_of(touched))
        except Exception as err:
            detail = f"the target's files could not be looked into ({type(err).__name__}: {err})"
            return Ineligible(reason="storage", detail=detail)
        refused = of_files(touched, "the target")
        if refused is None and too_many is not None:
            refused = Ineligible(reason="storage", detail=too_many)
        if refused is None and job.log is not None and job.log_snapshot is not None:
            refused = of_log(job.layout, job.log, job.log_snapshot)
        if refused is not None:
            return refused
        table = job.table
        found = started(
            job,
            self,
            table,
            why=why,
            refusal=refusal,
            need=partial(memory_before, job.work, touched, is_whole=job.layout.is_whole),
            of_events=of_events,
            merger=MergeOnReadMerger,
        )
        if not isinstance(found, Execution):
            return found
        return replace(found, tidy=partial(compact, table, job.spec.native_memory_bytes))
