"""What is known of a merge before it: by its target, its tombstones' table and the files that its keys may lie in."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession

from stream_merge.engines import ENGINES
from stream_merge.engines.base import MergeJob
from stream_merge.engines.costs import DRIVER_BYTES, DRIVER_EVENTS, CostModel, Work
from stream_merge.engines.memory import reservations
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.shapes.batch import Batch
from stream_merge.shapes.layout import Layout
from stream_merge.spark.evaluate_once import known_bytes
from stream_merge.tables.delta_rs.touched_files import size_of, touched_files
from stream_merge.tables.side.tombstones import own_log, widen_schema
from stream_merge.tables.table import Tables


def job_of(
    session: SparkSession,
    spec: MergeSpec,
    tables: Tables,
    costs: CostModel,
    *,
    layout: Layout,
    batch: Batch,
    target: TableSnapshot,
    now_micros: int,
    inside_at: int | None = None,
) -> MergeJob:
    """Look at everything that engines are chosen by.

    Cost: the tables' logs alone; for `engine="spark"` nothing.
    """
    if spec.tombstones:
        layout.once("log_of_types", lambda: _widen_log(session, spec, tables, layout, target))
    table, log, log_snapshot, touched, rows = None, None, None, 0, 0
    if spec.engine != "spark":
        table = tables.target.current_driver()
        if spec.tombstones:
            log_snapshot = own_log(target.table_id, tables.tombstones.snapshot())
            log = tables.tombstones.cached_driver()
        for one in (table, None if log_snapshot is None else log):
            if one is not None:
                more_bytes, more_rows = size_of(touched_files(one, batch.bounds))
                touched, rows = touched + more_bytes, rows + more_rows
    return MergeJob(
        session=session,
        spec=spec,
        tables=tables,
        costs=costs,
        layout=layout,
        batch=batch,
        target=target,
        now_micros=now_micros,
        table=table,
        log=log,
        inside_at=inside_at,
        log_snapshot=log_snapshot,
        work=Work(
            events=batch.upserts + batch.deletes,
            bytes=touched,
            rows=rows,
            cores=session.sparkContext.defaultParallelism,
        ),
    )


def _widen_log(session: SparkSession, spec: MergeSpec, tables: Tables, layout: Layout, target: TableSnapshot) -> bool:
    """Keys and sequence of the target may have been widened, by this batch or by somebody."""
    found = own_log(target.table_id, tables.tombstones.snapshot())
    if found is not None:
        widen_schema(session, spec, target.table_id, layout, found)
    return True


def fits_the_driver(
    source: DataFrame,
    spec: MergeSpec,
    tables: Tables,
    costs: CostModel,
    *,
    layout: Layout,
    target: TableSnapshot | None,
) -> bool:
    """Whether the batch is to be evaluated in the driver: it will be small, and may be merged there.

    Nobody knows a batch's size before it is read. The batch before is the best guess, else what
    Spark knows of a source that is in memory already.
    """
    if not is_for_driver(spec, tables, target, layout):
        return False
    if costs.last_events is None:
        return known_bytes(source) <= DRIVER_BYTES
    return costs.last_events <= DRIVER_EVENTS


def is_for_driver(
    spec: MergeSpec,
    tables: Tables,
    target: TableSnapshot | None,
    layout: Layout | None = None,
) -> bool:
    """Whether an engine in the driver may merge into the target: batches in this layout, or any."""
    if spec.engine == "spark" or target is None:
        return False
    return any(
        engine.in_driver and (layout is None or engine.takes(layout)) and engine.reads(spec, tables, target)
        for engine in ENGINES
    )


def wants_events_at_hand(spec: MergeSpec, tables: Tables, *, need: int) -> bool:
    """Whether an engine in the driver is likely to merge a batch that takes so many bytes of memory there."""
    ceiling = reservations.allowed() if spec.native_memory_bytes is None else spec.native_memory_bytes
    return need <= ceiling and is_for_driver(spec, tables, tables.target.snapshot())
