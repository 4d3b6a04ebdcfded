"""The driver as an engine: where it may merge, and what it needs."""

from __future__ import annotations

from functools import partial

import pyarrow as pa

from stream_merge.engines import tombstone_access
from stream_merge.engines.base import Choice, Execution, MergeJob
from stream_merge.engines.driver.compact import compact
from stream_merge.engines.driver.merger import DriverMerger
from stream_merge.engines.driver.write import rewritten_bytes
from stream_merge.engines.memory import Promise, memory_before, refusal_of_memory
from stream_merge.model.results import Mode
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.shapes import shape_of
from stream_merge.shapes.layout import Layout
from stream_merge.spark.errors import exceeds_driver_results
from stream_merge.tables.files.eligibility import (
    Ineligible,
    clauses_obstacle,
    events_obstacle,
    files_obstacle,
    layout_obstacle,
    table_obstacle,
)
from stream_merge.tables.files.features import merge_mode
from stream_merge.tables.files.table import file_sizes, table_files
from stream_merge.tables.table import Tables


def mode(job: MergeJob) -> Mode:
    """The mode "mark" where the table has deletion vectors, else "rewrite"."""
    return "rewrite" if job.table is None else merge_mode(job.table.protocol.features, job.target.properties)


def may_merge(spec: MergeSpec, tables: Tables, target: TableSnapshot, layout: Layout | None) -> bool:
    """Whether the driver may merge batches of a layout into a target; None: of any layout."""
    if spec.target_filter is not None or target.read_by != "driver" or (layout is not None and layout_obstacle(layout)):
        return False
    return table_obstacle(tables.target.current_driver(), target, "target") is None


def obstacle(job: MergeJob) -> Ineligible | None:
    """Why the driver cannot merge the job, by logs and layout alone."""
    if job.spec.target_filter is not None:
        return Ineligible(reason="filter", detail="target_filter is SQL, which only Spark executes")
    refused = layout_obstacle(job.layout) or table_obstacle(job.table, job.target, "the target")
    if refused is None:
        clauses = shape_of(job.spec).clauses(job.layout, job.spec, deletes=True, upserts=True)
        refused = clauses_obstacle(clauses)
    return refused or tombstone_access.refused_log(job)


def start(job: MergeJob, why: str) -> Execution | Ineligible:
    """The driver with the events in its memory; or why it cannot merge them: the files, the memory or the values."""
    if job.table is None:
        return Ineligible(reason="storage", detail="the target is not where it can be read")
    table = job.table
    try:
        known = table_files(table, job.target)
        touched = known.touched(table, job.target, job.batch.bounds)
        too_many = known.folder.obstacle(file_sizes(touched))
    except Exception as err:
        detail = f"the target's files could not be looked into ({type(err).__name__}: {err})"
        return Ineligible(reason="storage", detail=detail)
    refused = files_obstacle(touched, "the target")
    if refused is None and too_many is not None:
        refused = Ineligible(reason="storage", detail=too_many)
    if refused is not None:
        return refused
    way = mode(job)
    rewriting = rewritten_bytes(known, touched) if way == "rewrite" else 0
    need = partial(memory_before, job.work, touched, rewriting=rewriting, is_whole=job.layout.is_whole)
    promise = Promise(job.spec.driver_memory_bytes)
    version = table.version
    try:
        refused = refusal_of_memory(promise, need(None))
        events = _events(job) if refused is None else refused
        if isinstance(events, pa.Table):
            refused = refusal_of_memory(promise, need(events.nbytes))
            refused = refused or events_obstacle(events, job.target.partition_columns)
        if refused is not None or not isinstance(events, pa.Table):
            promise.close()
            return refused or events
        return Execution(
            choice=Choice(engine="driver", mode=way, why=why),
            merger=DriverMerger(
                spec=job.spec,
                target=table,
                layout=job.layout,
                events=events,
                bounds=job.batch.bounds,
                prepared_for=job.target.table_id,
                chosen_at=version,
                promise=promise,
            ),
            tombstones=tombstone_access.in_driver(job, events) if job.spec.tombstones else None,
            in_driver=True,
            only_spark=False,
            tidy=partial(compact, table, job.spec.driver_memory_bytes),
            release=promise.close,
        )
    except BaseException:
        promise.close()
        raise


def _events(job: MergeJob) -> pa.Table | Ineligible:
    try:
        return job.batch.rows.arrow()
    except Exception as err:
        if not exceeds_driver_results(err):
            raise
        return Ineligible(reason="memory", detail="the events exceed spark.driver.maxResultSize")
