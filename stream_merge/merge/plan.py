"""The engine of a batch: chosen, chosen again where the table has changed, and Spark where the driver failed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pyspark.sql import DataFrame

from stream_merge.engines import choose
from stream_merge.engines.base import Choice, Execution, MergeJob
from stream_merge.errors import MergeFailedError, StreamMergeError
from stream_merge.merge.call import BatchCall, Ready
from stream_merge.model.logs import tell
from stream_merge.model.snapshot import expect_not_replaced
from stream_merge.spark.errors import reason
from stream_merge.spark.versions import KEEPS_NULL_STRUCTS
from stream_merge.tables import create_table, fitness
from stream_merge.tables.side.tombstones import Tombstones

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """An engine at work on a batch."""

    job: MergeJob
    execution: Execution
    source: DataFrame
    """Frame that the events came from, with the source's columns."""

    @property
    def choice(self) -> Choice:
        """The engine, and why."""
        return self.execution.choice

    @property
    def events(self) -> int:
        """Events after dedup."""
        return self.job.batch.upserts + self.job.batch.deletes


def choose_plan(call: BatchCall, ready: Ready) -> Plan:
    """Choose the engine for a batch that has events to merge, and start it."""
    with call.clock.phase("plan"):
        job = MergeJob(
            session=call.session,
            spec=call.spec,
            tables=call.tables,
            costs=call.costs,
            layout=ready.layout,
            batch=ready.batch,
            target=ready.target,
            now_micros=call.now_micros,
            inside_at=ready.inside_at,
        )
        job = choose.measured(job)
        preference = choose.prefer(job)
    with call.clock.phase("prepare"):
        return _started(call, job, choose.start(job, preference), ready.source)


def _started(call: BatchCall, job: MergeJob, execution: Execution, source: DataFrame) -> Plan:
    call.resources.callback(execution.release)
    return Plan(job=job, execution=execution, source=source)


def replan(call: BatchCall, plan: Plan, *, is_retry: bool) -> Plan:
    """The plan, or a new one where another writer has changed the table's columns meanwhile.

    Delta tells a merge that lost from one whose table had changed before it began only where the number of columns did
    (4.4): a field that others have added to a struct would be NULL in each row that is updated, and a column added with
    another type would be cast into silently.

    Cost: the table's log is read at each attempt but the first; and at that one where Spark merges, a column is nested,
    or the schema is about to change.
    """
    spec, job = call.spec, plan.job
    if not is_retry and job.layout.is_indifferent_to_columns and plan.execution.in_driver:
        return plan  # the driver checks for itself whether the table is the same
    target = call.tables.target.snapshot()
    if target is None:
        return plan
    expect_not_replaced(job.target.table_id, target.table_id, target=spec.target, batch_id=call.batch_id)
    if target.has_columns_of(job.target):
        return plan
    layout = call.layouts.plan(plan.source, target)
    fitness.check_target(call.session, target, spec, layout)
    properties = create_table.target_properties(spec, layout)
    prepared = create_table.prepared(call.session, spec.target, target, layout, properties)
    if prepared is not target:
        target = call.tables.target.snapshot() or prepared
        expect_not_replaced(job.target.table_id, target.table_id, target=spec.target, batch_id=call.batch_id)
    before = {column.name: column.dtype for column in job.layout.stored}
    grown = [c.name for c in layout.stored if c.lacks_fields and c.dtype != before.get(c.name, c.dtype)]
    if grown and not KEEPS_NULL_STRUCTS:
        msg = (
            f"[TARGET_SCHEMA_CHANGED] column(s) {grown!r} of {spec.target!r} got new fields while batch"
            f" {call.batch_id} was merged; nothing was committed, restart the query"
        )
        raise MergeFailedError(msg, target=spec.target, batch_id=call.batch_id)
    tell(log.info, "columns_changed_meanwhile", target=spec.label, batch_id=call.batch_id, version=target.version)
    plan.execution.release()
    job = replace(job, layout=job.layout.onto(layout), target=target)
    return _started(call, job, choose.start(job, choose.prefer(job)), plan.source)


def on_spark(call: BatchCall, plan: Plan, error: Exception) -> Plan | None:
    """A plan for Spark after the driver failed and committed nothing; None where Spark would not help."""
    other = choose.fall_back(plan.job, plan.execution, error)
    return None if other is None else _started(call, plan.job, other, plan.source)


def with_tombstones(call: BatchCall, plan: Plan, action: Callable[[Tombstones[Any]], T]) -> tuple[Plan, T | None]:
    """Run an action on the tombstones; where the driver fails, Spark does it and the rest of the batch.

    Returns the plan from now on and the result, None where tombstones are off.
    """
    spec, batch_id = call.spec, call.batch_id
    if plan.execution.tombstones is None:
        return plan, None
    try:
        return plan, action(plan.execution.tombstones)
    except StreamMergeError as err:
        other = on_spark(call, plan, err) if isinstance(err, MergeFailedError) else None
        if other is None:
            raise
    except Exception as err:
        other = on_spark(call, plan, err)
        if other is None:
            msg = f"[MERGE_FAILED] tombstones of {spec.target!r} cannot be read or written: {reason(err)}"
            raise MergeFailedError(msg, target=spec.target, batch_id=batch_id) from err
    # The driver checks for itself whether the table is the same; Spark does not.
    target = call.tables.target.snapshot()
    if target is not None:
        expect_not_replaced(plan.job.target.table_id, target.table_id, target=spec.target, batch_id=batch_id)
    return other, None if other.execution.tombstones is None else action(other.execution.tombstones)
