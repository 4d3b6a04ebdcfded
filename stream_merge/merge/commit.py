"""Commits a batch to the target: again where another writer was faster, and re-checked after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pyspark.sql import Column

from stream_merge.engines import choose
from stream_merge.engines.base import Choice, CommitTag, MergeReport
from stream_merge.engines.spark.commit import SparkCommits, add_filled, record
from stream_merge.errors import MergeFailedError
from stream_merge.merge import commit_outcome
from stream_merge.merge.call import BatchCall, Merged
from stream_merge.merge.event_fates import landed_as
from stream_merge.merge.plan import Plan, on_spark, replan, with_tombstones
from stream_merge.model import names
from stream_merge.model.logs import tell
from stream_merge.model.results import Tidied
from stream_merge.shapes import target_filter
from stream_merge.shapes.batch import Batch
from stream_merge.spark.errors import reason
from stream_merge.tables import spark_table
from stream_merge.tables.side.late_events import Hits
from stream_merge.tables.side.tombstones import Tombstones

log = logging.getLogger(__name__)


def commit(call: BatchCall, plan: Plan) -> tuple[Plan, Merged]:
    """Merge what no tombstone refuses, in one commit; each attempt reads tombstones and table afresh."""

    def attempt(number: int) -> tuple[Plan, Merged]:
        call.retrying.count_merge(number)
        with call.clock.phase("plan"):
            current = replan(call, plan, is_retry=number > 1)
        current, hits = judge(call, current)
        if hits is not None and current.events == hits.refused:
            # After a lost attempt the winner may have been a twin of this call that knew of no refusal.
            return current, _as_merged(MergeReport(already_applied=number > 1 and _is_recorded(call)), hits)
        with call.clock.phase("merge"):
            return _merged(call, current, hits)

    done, merged = call.retrying.run(attempt)
    if merged.report.already_applied:
        # Whoever applied it may have read fewer tombstones than this attempt: all upserts are checked again.
        merged = replace(merged, hits=None)
    if merged.is_in_the_target:
        keep_ledger(call, done.job.batch, merged)
    return done, merged


def judge(call: BatchCall, plan: Plan) -> tuple[Plan, Hits | None]:
    """The tombstones of the batch's keys; None where tombstones are off."""
    with call.clock.phase("tombstones"):
        return with_tombstones(call, plan, lambda tombstones: tombstones.hits())


def _merged(call: BatchCall, plan: Plan, hits: Hits | None) -> tuple[Plan, Merged]:
    """One attempt; its time is learnt. Where the driver failed, Spark tries once."""
    tag = _tag(call, plan, "target", hits)
    started = time.perf_counter()
    try:
        report: MergeReport = plan.execution.merger.merge(hits, tag)
    except Exception as err:
        try:
            report = _outcome(call, plan, err, tag)
        except MergeFailedError:
            other = on_spark(call, plan, err) if plan.execution.in_driver else None
            if other is None:
                raise
            # What made it fail may be that the columns are others now.
            other, hits = judge(call, replan(call, other, is_retry=True))
            return _merged(call, other, hits)
    else:
        if report.version is not None:
            if plan.execution.in_driver:
                _refresh_cached(call)
            choose.learn(call.costs, plan.job, plan.execution, time.perf_counter() - started)
    return plan, _as_merged(report, hits, plan.choice)


def _as_merged(report: MergeReport, hits: Hits | None, choice: Choice | None = None) -> Merged:
    return Merged(report=report, choice=choice, hits=hits, refused=0 if hits is None else hits.refused)


def _outcome(call: BatchCall, plan: Plan, err: Exception, tag: CommitTag, *, is_repair: bool = False) -> MergeReport:
    target, since = call.spec.target, plan.job.target.version
    return commit_outcome.decide(err, plan.execution.merger, target, tag, since=since, is_repair=is_repair)


def _tag(call: BatchCall, plan: Plan, role: names.Role, hits: Hits | None = None) -> CommitTag:
    """The tag of a commit to the target."""
    so_far = _so_far(call, plan.job.batch, hits) if role == "target" else None
    return call.tags.tag(role, engine=plan.choice.engine, plan=str(plan.choice), so_far=so_far)


def _so_far(call: BatchCall, batch: Batch, hits: Hits | None) -> dict[str, Any]:
    """Facts of the batch before its commit, which `stream-merge report` reads from the history."""
    undecodable = call.intake.undecodable_events
    events = {
        "received": batch.received + undecodable,
        "quarantined": batch.quarantined + undecodable,
        "collapsed": batch.collapsed,
        "stale": 0 if hits is None else hits.refused,
    }
    seconds = {phase: round(spent, 3) for phase, spent in call.clock.seconds().items() if round(spent, 3)}
    attempts = call.retrying
    return {"events": events, "seconds": seconds, "attempt": attempts.merges, "conflicts": dict(attempts.conflicts)}


def _refresh_cached(call: BatchCall) -> None:
    """Refresh what a user has cached of the target, as Delta's MERGE does; the commit stands without it."""
    try:
        spark_table.refresh_cached(call.session, call.spec.target)
    except Exception as err:
        tell(log.warning, "cached_rows_not_refreshed", target=call.spec.label, error=reason(err))


def keep_ledger(call: BatchCall, batch: Batch, merged: Merged) -> None:
    """Count the events of a call that fails from now on: its commit is in the target."""
    undecodable = call.intake.undecodable_events
    ledger = partial(landed_as, refused=merged.refused, repaired=merged.repaired, undecodable=undecodable)
    call.retrying.has_landed(partial(ledger, batch, merged.report))


def recheck(call: BatchCall, plan: Plan, merged: Merged) -> tuple[Plan, Merged]:
    """Undo upserts that a delete refuses which another writer remembered while this batch merged."""

    def late(tombstones: Tombstones[Any]) -> Hits | None:
        seen = None if merged.hits is None else merged.hits.version
        if not merged.report.already_applied and tombstones.version() == seen:
            return None
        return tombstones.late_hits(merged.hits)

    plan, hits = with_tombstones(call, plan, late)
    if hits is not None and hits.refused:
        merged = _repaired(call, plan, hits, merged)
    if hits is not None and merged.report.already_applied:
        merged = replace(merged, hits=hits)
    return plan, merged


def _repaired(call: BatchCall, plan: Plan, late: Hits, merged: Merged) -> Merged:
    tag = _tag(call, plan, "recheck")

    def attempt(_: int) -> MergeReport:
        try:
            report: MergeReport = plan.execution.merger.repair(late, tag)
        except Exception as err:
            return _outcome(call, plan, err, tag, is_repair=True)
        return report

    repair = call.retrying.run(attempt)
    merged = replace(merged, repaired_version=repair.version)
    if not repair.deleted:
        return merged
    counted: Mapping[str, int] = {}
    if merged.report.version is not None and call.spec.change_data_feed:
        counted = _counted_as(call, plan, late, merged.report.version)
    merged = replace(merged, repaired={**counted, "total": repair.deleted})
    keep_ledger(call, plan.job.batch, merged)
    return merged


def _counted_as(call: BatchCall, plan: Plan, late: Hits, version: int) -> Mapping[str, int]:
    """The fates that a merge gave the events that these tombstones refuse; empty where the feed cannot be read.

    Merge and repair are committed, so that is no reason to fail. The ledger then takes repaired events from the
    unaffected first.
    """
    try:
        counted: Mapping[str, int] = plan.execution.merger.counted_as(late, version)
    except Exception as err:
        tell(log.warning, "repaired_events_uncounted", target=call.spec.label, error=reason(err))
        return {}
    return counted


def forget(call: BatchCall, plan: Plan, merged: Merged, *, table_id: str) -> Plan:
    """Mark the tombstones that the batch's upserts have overtaken, and compact their table now and then."""
    revived = merged.hits is not None and merged.hits.revived > 0
    if revived:
        commit = call.tags.beside("tombstones-forget", table_id=table_id)

        def forgotten(tombstones: Tombstones[Any]) -> None:
            hits = merged.hits if merged.hits is not None else tombstones.hits()
            tombstones.forget(hits, commit)

        plan, _ = with_tombstones(call, plan, forgotten)
    if plan.job.batch.deletes or revived:
        try:
            plan, _ = with_tombstones(call, plan, lambda tombstones: tombstones.tidy())
        except Exception as err:  # the batch is done without it, and the next one tries again
            tell(log.warning, "tombstones_not_tidied", target=call.spec.label, error=reason(err))
    return plan


def tidying(call: BatchCall, plan: Plan) -> Callable[[], Tidied] | None:
    """The engine's compaction of the files that its merges leave; None where they leave none."""
    tidy = plan.execution.tidy
    if tidy is None:
        return None

    def tidied() -> Tidied:
        started = time.perf_counter()
        done = tidy()
        # What it takes counts for choices to come, as part of what a merge costs.
        call.costs.learn_maintenance(plan.choice.mode or "spark", time.perf_counter() - started)
        return done

    return tidied


def _is_recorded(call: BatchCall) -> bool:
    target = call.tables.target.snapshot()
    return target is not None and call.tags.is_recorded(target)


def record_first(call: BatchCall, *, since: int) -> int | None:
    """Commit a batch's transaction id alone; Delta's version, or None where a twin of this call was faster."""
    tag = call.tags.tag("target", engine="spark", plan="no row changed; the query's first batch at this table")
    return _committed(call, tag, partial(record, call.session, call.spec.target, tag), since=since).version


def fill_columns(call: BatchCall, values: Mapping[str, Column], *, since: int) -> MergeReport:
    """Add columns to the target with a value in each of its rows, in one commit."""
    spec = call.spec
    within = None if spec.target_filter is None else target_filter.inside(spec.target_filter)
    tag = call.tags.tag("column-default", engine="spark", plan=f"defaults of {sorted(values)!r}")
    return _committed(call, tag, partial(add_filled, call.session, spec.target, values, within, tag), since=since)


def _committed(call: BatchCall, tag: CommitTag, commit: Callable[[], MergeReport], *, since: int) -> MergeReport:
    """Run one commit of Spark's until it wins, or the policy is exhausted."""
    target = call.spec.target
    commits = SparkCommits(call.session, target)

    def attempt(_: int) -> MergeReport:
        try:
            return commit()
        except Exception as err:
            return commit_outcome.decide(err, commits, target, tag, since=since)

    return call.retrying.run(attempt)
