"""The steps of one call, in the order that makes a crash at any point harmless.

Order of writes: quarantine, defaults of new columns, tombstones, target, re-check, forgotten tombstones. Each of them
is idempotent, and a target that is committed already does not skip those after it.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from stream_merge.engines.base import MergeReport
from stream_merge.engines.choose import fits_the_driver, is_for_driver
from stream_merge.engines.spark.pruning import Pruning
from stream_merge.engines.spark.whole import Beside
from stream_merge.errors import MergeFailedError
from stream_merge.merge import commit, validation
from stream_merge.merge.call import Applied, BatchCall, Done, Merged, Prepared, Ready
from stream_merge.merge.plan import Plan, choose_plan, with_tombstones
from stream_merge.model.logs import tell
from stream_merge.model.snapshot import TableSnapshot, expect_not_replaced, is_on
from stream_merge.shapes.batch import Batch, evaluate_at_hand, evaluate_in_driver
from stream_merge.shapes.batch import evaluate as evaluate_on_spark
from stream_merge.shapes.layout import Layout
from stream_merge.spark.columns import CHAR_VARCHAR_METADATA
from stream_merge.spark.confs import holding
from stream_merge.spark.jvm import in_session
from stream_merge.spark.streaming import keeps_state, run_through
from stream_merge.tables import create_table, fitness
from stream_merge.tables.side import location, quarantine
from stream_merge.tables.side.tombstones import own_log

log = logging.getLogger(__name__)


def prepare(call: BatchCall, source: DataFrame) -> Prepared | Applied:
    """Check everything that can be checked before the first event is read; nothing is written."""
    spec, session = call.spec, call.session
    with call.clock.phase("plan"):
        target = call.tables.target.snapshot()
        call.last_commit.expect(session, target, call.delivery)
        applied = target if _is_applied(call, target) else None
        call.retrying.landed |= applied is not None
        layout = call.layouts.plan(source, target)
        fitness.check_target(session, target, spec, layout)
        check_quarantine(call)
        if target is not None:
            location.expect_here(session, spec, call.tables, target)
            if call.is_first and spec.tombstones:
                own_log(target.table_id, call.tables.tombstones.snapshot())  # refuses a format of another version
    return Prepared(layout=layout, target=target) if applied is None else Applied(layout=layout, target=applied)


def check_quarantine(call: BatchCall) -> None:
    """Check before the first write that the quarantine table can take rows."""
    if call.is_first and call.spec.on_invalid == "quarantine":
        quarantine.check(call.session, call.spec.quarantine_table)


def _is_applied(call: BatchCall, target: TableSnapshot | None) -> bool:
    if call.delivery is not None:
        return call.delivery.is_applied(target, call.batch_id, call.history)
    if target is not None and call.spec.is_whole:
        validation.expect_newest(target, call.spec, app_id=call.caller.app_id("target"), batch_id=call.batch_id)
    if target is None or not call.tags.is_recorded(target):
        return False
    recorded = call.tags.recorded_id(target)
    if recorded is not None and recorded > call.batch_id:  # a script that begins again, or events that nobody has
        tell(log.warning, "batch_id_below_recorded", target=call.spec.label, batch_id=call.batch_id, recorded=recorded)
    return True


def repeat(call: BatchCall, source: DataFrame, applied: Applied) -> Done:
    """Finish a batch that the target holds: its events are read only if a delete may concern them."""
    again = Merged(report=MergeReport(already_applied=True))
    if not _remembers_deletes(call, applied.target):
        keep_state(call, source)
        return Done(target=applied.target, was_applied=True, merged=again)
    batch = evaluate(call, source, applied.layout, applied.target)
    ready = Ready(layout=applied.layout, target=applied.target, batch=batch, source=source)
    if not batch.upserts + batch.deletes:
        return Done(batch=batch, target=applied.target, was_applied=True, merged=again)
    _register_writer(call)
    plan, again = recheck(call, choose_plan(call, ready), ready, again)
    plan = forget_revived(call, plan, ready, again)
    return Done(batch=batch, target=applied.target, choice=plan.choice, was_applied=True, merged=again)


def _remembers_deletes(call: BatchCall, target: TableSnapshot) -> bool:
    if not call.spec.tombstones:
        return False
    with call.clock.phase("tombstones"):
        table = own_log(target.table_id, call.tables.tombstones.snapshot())
    return table is not None and table.files != 0


def keep_state(call: BatchCall, source: DataFrame) -> None:
    """Read an applied batch that nobody has read where stateful operators made it: later batches need their state."""
    if keeps_state(source):
        with call.clock.phase("prepare"), holding(call.session, call.source_confs):
            run_through(source)


def merge_events(call: BatchCall, source: DataFrame, prepared: Prepared) -> Done:
    """Merge a batch that the target does not hold."""
    call.intake.expect_whole()
    batch = evaluate(call, source, prepared.layout, prepared.target)
    call.intake.expect_whole()
    validation.refuse(call, batch, prepared)
    if not batch.received and not call.spec.is_whole:
        _register_writer(call)
        quarantine_undecodable(call)
        return Done(batch=batch, target=prepared.target)
    ready = prepare_target(call, source, prepared, batch)
    quarantine_events(call, ready)
    if not batch.upserts + batch.deletes and not call.spec.is_whole:
        return Done(batch=batch, target=ready.target, recorded_version=record_first_batch(call, ready, None))
    ready = fill_new_columns(call, ready)
    plan = remember_deletes(call, choose_plan(call, ready), ready)
    plan, merged = commit.commit(call, plan)
    recorded = record_first_batch(call, ready, merged)
    plan, merged = recheck(call, plan, ready, merged)
    plan = forget_revived(call, plan, ready, merged)
    return Done(
        batch=ready.batch,
        target=ready.target,
        choice=plan.choice,
        merged=merged,
        adds_columns=ready.layout.evolves,
        recorded_version=recorded,
        tidy=None if merged.report.version is None else commit.tidying(call, plan),
    )


def evaluate(call: BatchCall, source: DataFrame, layout: Layout, target: TableSnapshot | None) -> Batch:
    """Contract, latest event per key, counts and key bounds: the only evaluation of the source."""
    with call.clock.phase("prepare"), holding(call.session, call.source_confs):
        batch = _evaluated_in_driver(call, source, layout, target) or evaluate_on_spark(source, layout)
        call.resources.callback(batch.rows.release)
        call.costs.last_events = batch.received
    if batch.left_out is not None and batch.left_out.events:
        _warn_of_left_out(call.spec.label, call.caller.query, batch.left_out.fields)
    return batch


@functools.lru_cache(maxsize=1_000)
def _warn_of_left_out(target: str, query: str, fields: tuple[str, ...]) -> None:
    """Warn once of the same fields."""
    remedy = "add them to the schema to store them"
    tell(log.warning, "fields_left_out", target=target, query=query, fields=fields, remedy=remedy)


def _evaluated_in_driver(
    call: BatchCall, source: DataFrame, layout: Layout, target: TableSnapshot | None
) -> Batch | None:
    """The batch in the driver, or None where it should not or could not go there."""
    spec, at_hand = call.spec, call.intake.at_hand
    if spec.is_whole:
        return None  # Spark finds the keys that a full copy has twice; and its rows are looked for in each file
    if at_hand is not None and is_for_driver(spec, call.tables, target, layout):
        batch = evaluate_at_hand(source, at_hand, layout)
        if batch is not None:
            return batch
    if not fits_the_driver(source, spec, call.tables, call.costs, layout=layout, target=target):
        return None
    batch = evaluate_in_driver(source, layout)
    if batch is None:
        tell(log.warning, "batch_too_large_for_the_driver", target=spec.label, batch_id=call.batch_id)
    return batch


def prepare_target(call: BatchCall, source: DataFrame, prepared: Prepared, batch: Batch) -> Ready:
    """Create a missing target, or give an existing one what the sink needs on it."""
    spec, session, layout, target = call.spec, call.session, prepared.layout, prepared.target
    properties = create_table.target_properties(spec, layout)
    inside_at: int | None = None
    with call.clock.phase("plan"):
        is_prepared = target is not None and create_table.is_prepared(target, spec.target, layout, properties)
        has_deletes = batch.deletes > 0
        properties |= location.recorded(spec, call.tables, target, deletes=has_deletes, is_prepared=is_prepared)
        if target is None:
            _register_writer(call)
            target = create_table.create(
                session,
                spec.target,
                layout.target_fields,
                properties={**create_table.NEW_TARGETS, **spec.table_properties, **properties},
                partition_by=spec.partition_by,
                cluster_by=spec.cluster_by,
            )
            layout = _same_layout(call, source, layout, target)
        elif spec.is_whole and not create_table.is_prepared(target, spec.target, layout, properties):
            # What speaks against the copy has to be said before its table gets so much as a property.
            Beside(session, spec, layout, batch, batch_id=call.batch_id, version=target.version).expect_allowed()
        elif spec.target_filter is not None:
            pruning = Pruning(session, spec, layout, batch, target)
            pruning.expect_inside(target.version, batch_id=call.batch_id)
            inside_at = target.version
        _register_writer(call)
        before = target
        target = create_table.prepared(session, spec.target, target, layout, properties)
        if target is not before:  # delta-rs, too, has to see what has become of the table
            target = call.tables.target.snapshot() or target
            expect_not_replaced(before.table_id, target.table_id, target=spec.target, batch_id=call.batch_id)
    return Ready(layout=layout, target=target, batch=batch, source=source, inside_at=inside_at)


def _register_writer(call: BatchCall) -> None:
    """Register as a writer for other processes, right before the sink's first write."""
    if call.is_first:
        call.register_writer()


def _same_layout(call: BatchCall, source: DataFrame, before: Layout, created: TableSnapshot) -> Layout:
    """The layout for the created table: another writer may have created it meanwhile, and then its schema counts."""
    spec = call.spec
    layout = call.layouts.plan(source, created)
    if _read_as(layout) != _read_as(before):
        msg = (
            f"[TARGET_SCHEMA_CHANGED] target {spec.target!r} was created by another writer with other column types or"
            f" partitions while batch {call.batch_id} was read; nothing was written, restart the query"
        )
        raise MergeFailedError(msg, target=spec.target, batch_id=call.batch_id)
    fitness.check_target(call.session, created, spec, layout)
    return layout


def _read_as(layout: Layout) -> tuple[Any, ...]:
    """What events were judged by: types, char(n), keys that partitions do not keep, columns of the sequence."""
    stored = [(c.name, c.dtype.simpleString(), c.field.metadata.get(CHAR_VARCHAR_METADATA)) for c in layout.stored]
    return stored, layout.texts_in_partitions, layout.sequence_columns


def quarantine_undecodable(call: BatchCall) -> None:
    """Write undecodable records to the quarantine table, once per batch."""
    undecodable = call.intake.undecodable
    if undecodable is None:
        return
    with call.clock.phase("quarantine"):
        rows = in_session(undecodable.rows, call.session)
        quarantine.write_undecodable(rows, call.spec.quarantine_table, commit=call.tags.undecodable())


def quarantine_events(call: BatchCall, ready: Ready) -> None:
    """Write undecodable records and events that break the contract to the quarantine table, once per batch."""
    quarantine_undecodable(call)
    if not ready.batch.quarantined:
        return
    with call.clock.phase("quarantine"):
        quarantine.write(
            ready.batch,
            call.spec,
            call.tables,
            call.session,
            query=call.caller.query,
            now_micros=call.now_micros,
            commit=call.tags.beside("quarantine", table_id=ready.target.table_id),
        )


def fill_new_columns(call: BatchCall, ready: Ready) -> Ready:
    """Fill columns that this batch adds with the source's default in all rows of the target, in one commit.

    A repeated batch sees that they are there, and no row that is written later is touched.
    """
    layout, target, defaults = ready.layout, ready.target, call.intake.column_defaults
    values = {
        column.name: F.lit(defaults[column.source_name]).cast(column.dtype)
        for column in layout.stored
        if column.name in layout.new_columns and column.source_name in defaults
    }
    if not values:
        return ready
    if is_on(target.properties, "delta.appendOnly"):
        why = "delta.appendOnly forbids the update; existing rows stay NULL"
        tell(log.warning, "new_columns_not_filled", target=call.spec.label, columns=sorted(values), reason=why)
        return ready
    with call.clock.phase("merge"):
        report = commit.fill_columns(call, values, since=target.version)
        now = call.tables.target.snapshot() or target
        expect_not_replaced(target.table_id, now.table_id, target=call.spec.target, batch_id=call.batch_id)
        layout = layout.onto(call.layouts.plan(ready.source, now))
    tell(log.info, "new_columns_filled", target=call.spec.label, columns=sorted(values), rows=report.updated)
    return replace(ready, layout=layout, target=now, inside_at=None)


def remember_deletes(call: BatchCall, plan: Plan, ready: Ready) -> Plan:
    """Add the batch's deletes to the tombstones, before the target shows their effect."""
    if not (ready.batch.deletes and call.spec.tombstones):
        return plan
    with call.clock.phase("tombstones"):
        tag = call.tags.beside("tombstones-add", table_id=ready.target.table_id)
        return with_tombstones(call, plan, lambda tombstones: tombstones.remember(tag))[0]


def record_first_batch(call: BatchCall, ready: Ready, merged: Merged | None) -> int | None:
    """Commit the transaction id alone where a query's first batch at the target changes no row; the version, if any.

    A target without any id of a query that has merged before is then known to be lost or replaced.
    """
    if merged is not None and merged.is_in_the_target:
        return None
    if not call.tags.is_first(ready.target):
        return None
    with call.clock.phase("merge"):
        version = commit.record_first(call, since=ready.target.version)
    if version is not None:
        commit.keep_ledger(call, ready.batch, merged or Merged(report=MergeReport()))
    return version


def recheck(call: BatchCall, plan: Plan, ready: Ready, merged: Merged) -> tuple[Plan, Merged]:
    """Undo upserts that a delete refuses which another writer remembered while this batch merged."""
    if not (ready.batch.upserts and call.spec.tombstones):
        return plan, merged
    with call.clock.phase("recheck"):
        return commit.recheck(call, plan, merged)


def forget_revived(call: BatchCall, plan: Plan, ready: Ready, merged: Merged) -> Plan:
    """Mark the tombstones that this batch's upserts have overtaken, and compact their table now and then."""
    if not call.spec.tombstones:
        return plan
    with call.clock.phase("tombstones"):
        if merged.report.already_applied and not _is_newest_recorded(call):
            return plan
        return commit.forget(call, plan, merged, table_id=ready.target.table_id)


def _is_newest_recorded(call: BatchCall) -> bool:
    """Whether the target has recorded this very batch last.

    Otherwise nobody knows whether its upserts were merged (`replay_claims`). A tombstone that is left does no harm; one
    that is forgotten lets an older upsert revive its key.
    """
    target = call.tables.target.snapshot()
    return target is not None and call.tags.recorded_id(target) == call.batch_id
