"""How the events of a batch get into the target: by one engine, by Spark where delta-rs fails, again where it lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from pyspark.sql import Column, DataFrame

from stream_merge.engines import choose
from stream_merge.engines.base import Choice, CommitTag, Execution, MergeJob, MergeReport
from stream_merge.engines.spark.commit import SparkCommits, add_filled, record
from stream_merge.errors import MergeFailedError, StreamMergeError
from stream_merge.microbatch import commit_fate
from stream_merge.microbatch.call import BatchCall
from stream_merge.microbatch.ledger import landed_as
from stream_merge.model import names
from stream_merge.model.logs import tell
from stream_merge.model.results import Tidied
from stream_merge.model.snapshot import expect_not_replaced
from stream_merge.shapes import target_filter
from stream_merge.shapes.batch import Batch
from stream_merge.spark.errors import reason
from stream_merge.spark.versions import KEEPS_NULL_STRUCTS
from stream_merge.tables import fitness, spark_table
from stream_merge.tables.side.judging import Hits
from stream_merge.tables.side.tombstones import Tombstones

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """What became of the events of a batch."""

    report: MergeReport
    """What the merge did."""
    engine: str | None = None
    """Which one merged; None where none had to."""
    refused: int = 0
    """Events that a tombstone refused before the merge."""
    repaired: Mapping[str, int] = field(default_factory=dict)
    """Rows that the re-check removed, in `total` and by what they had been counted as."""
    repaired_version: int | None = None
    """Of the target, that the re-check has committed."""


class Executor:
    """The engine that works on a batch, and the tombstones of its keys as they were seen last.

    Args:
        job: what is to be merged.
        execution: the engine that was chosen first.
        source: what the events came from, with the source's columns.
    """

    def __init__(self, call: BatchCall, job: MergeJob, execution: Execution, source: DataFrame) -> None:
        self._call = call
        self._job = job
        self._execution = execution
        self._source = source
        self.hits: Hits | None = None
        """None before the first look, and where deletes are not remembered."""
        call.resources.callback(self._release)

    @property
    def choice(self) -> Choice:
        """The engine, and why it is this one."""
        return self._execution.choice

    def follow_columns(self, *, is_retry: bool) -> None:
        """Where another writer has changed the target's columns meanwhile: merge into the table as it is now.

        Delta tells a merge that lost from one whose table had changed before it began only where the number of columns
        did (4.4): a field that others have added to a struct would be NULL in each row that is updated.

        A column that another writer has added with another type meanwhile would be cast into, without a word.

        Cost: a look at the table's log at each attempt but the first; and at that one where Spark merges, a column is
        nested, or the schema is about to change.

        Raises:
            ConfigError: the events do not fit the table any more, or it is another one now.
        """
        call, spec, before = self._call, self._call.spec, self._job.target
        layout = self._job.layout
        if not is_retry and layout.is_indifferent_to_columns and self._execution.in_driver:
            return  # which looks for itself whether the table is the same
        found = call.tables.target.snapshot()
        if found is None:
            return
        expect_not_replaced(before.table_id, found.table_id, target=spec.target, batch_id=call.batch_id)
        if found.has_columns_of(before):
            return
        layout = call.layouts.plan(self._source, found)
        fitness.check_target(call.session, found, spec, layout)
        properties = spark_table.target_properties(spec, layout)
        prepared = spark_table.prepared(call.session, spec.target, found, layout, properties)
        if prepared is not found:
            found = call.tables.target.snapshot() or prepared
            expect_not_replaced(before.table_id, found.table_id, target=spec.target, batch_id=call.batch_id)
        held = {column.name: column.dtype for column in self._job.layout.stored}
        grown = [c.name for c in layout.stored if c.lacks_fields and c.dtype != held.get(c.name, c.dtype)]
        if grown and not KEEPS_NULL_STRUCTS:
            msg = (
                f"[TARGET_SCHEMA_CHANGED] column(s) {grown!r} of {spec.target!r} got new fields while batch"
                f" {call.batch_id} was merged; nothing was committed, restart the query"
            )
            raise MergeFailedError(msg, target=spec.target, batch_id=call.batch_id)
        tell(log.info, "columns_changed_meanwhile", target=spec.label, batch_id=call.batch_id, version=found.version)
        self.hits = None
        self._execution.release()
        self._job = replace(self._job, layout=self._job.layout.onto(layout), target=found)
        self._execution = choose.start(self._job, choose.rank(self._job))

    def tag(self, role: names.Role) -> CommitTag:
        """What a commit of the target carries."""
        so_far = self._so_far() if role == "target" else None
        return self._call.marks.tag(role, engine=self.choice.engine, plan=str(self.choice), so_far=so_far)

    def _so_far(self) -> dict[str, Any]:
        """What the commit cannot say by the metrics of its merge: `stream-merge report` reads it from the history."""
        batch, attempts, undecodable = self._job.batch, self._call.attempts, self._call.intake.undecodable_events
        events = {
            "received": batch.received + undecodable,
            "quarantined": batch.quarantined + undecodable,
            "collapsed": batch.collapsed,
            "stale": 0 if self.hits is None else self.hits.refused,
        }
        seconds = {phase: round(spent, 3) for phase, spent in self._call.clock.seconds().items() if round(spent, 3)}
        return {"events": events, "seconds": seconds, "attempt": attempts.merges, "conflicts": dict(attempts.conflicts)}

    def with_tombstones(self, action: Callable[[Tombstones[Any]], T]) -> T | None:
        """Do something with the remembered deletes; where delta-rs cannot, Spark does it and the rest of the batch.

        Returns: None where deletes are not remembered.
        """
        spec, batch_id = self._call.spec, self._call.batch_id
        tombstones = self._execution.tombstones
        if tombstones is None:
            return None
        try:
            return action(tombstones)
        except MergeFailedError as err:
            if not self._take_over(err):
                raise
        except StreamMergeError:
            raise
        except Exception as err:
            if not self._take_over(err):
                msg = f"[MERGE_FAILED] tombstones of {spec.target!r} cannot be read or written: {reason(err)}"
                raise MergeFailedError(msg, target=spec.target, batch_id=batch_id) from err
        self._expect_same_table()
        return None if self._execution.tombstones is None else action(self._execution.tombstones)

    def _expect_same_table(self) -> None:
        """Before Spark takes over: it does not look for itself, as the engines of the driver do."""
        call, before = self._call, self._job.target
        found = call.tables.target.snapshot()
        if found is not None:
            expect_not_replaced(before.table_id, found.table_id, target=call.spec.target, batch_id=call.batch_id)

    @property
    def batch(self) -> Batch:
        """The evaluated batch."""
        return self._job.batch

    def look(self, tombstones: Tombstones[Any]) -> Hits | None:
        """The tombstones that concern the batch, looked for again when the log has moved on."""
        if self.hits is None or tombstones.version() != self.hits.version:
            self.hits = tombstones.hits()
        return self.hits

    def merge(self, tag: CommitTag) -> MergeReport:
        """One merge of what no tombstone refuses."""
        report: MergeReport = self._execution.merger.merge(self.hits, tag)
        return report

    def merge_timed(self, tag: CommitTag) -> MergeReport:
        """As `merge`; what it took counts for choices to come. One that failed natively is tried on Spark, once."""
        started = time.perf_counter()
        try:
            report = self.merge(tag)
        except Exception as err:
            return self._decided(err, tag)
        if report.version is not None:
            if self._execution.in_driver:
                self._refresh_cached()
            choose.learn(self._call.costs, self._job, self._execution, time.perf_counter() - started)
        return report

    def _refresh_cached(self) -> None:
        """What a user has cached of the target is read anew, as after Delta's MERGE; the commit stands without it."""
        try:
            spark_table.refresh_cached(self._call.session, self._call.spec.target)
        except Exception as err:
            tell(log.warning, "cached_rows_not_refreshed", target=self._call.spec.label, error=reason(err))

    def repair(self, late: Hits, tag: CommitTag) -> MergeReport:
        """Undo the upserts that these tombstones refuse."""
        merger, spec = self._execution.merger, self._call.spec
        try:
            report: MergeReport = merger.repair(late, tag)
        except Exception as err:
            since = self._job.target.version
            return commit_fate.decide(err, merger, spec.target, tag, since=since, is_repair=True)
        return report

    def counted_as(self, late: Hits, version: int) -> Mapping[str, int]:
        """What the events that these tombstones refuse had been counted as by a merge; empty where it cannot be read.

        Merge and repair are committed: a feed that an engine cannot read (delta-rs 1.6: of tables with type widening)
        is no reason to fail. The ledger then takes repaired events from the unaffected first.
        """
        try:
            found: Mapping[str, int] = self._execution.merger.counted_as(late, version)
        except Exception as err:
            tell(log.warning, "repaired_events_uncounted", target=self._call.spec.label, error=reason(err))
            return {}
        return found

    @property
    def tidy(self) -> Callable[[], Tidied] | None:
        """What the engine does about the files that its merges leave; None where they leave none."""
        tidy = self._execution.tidy
        return None if tidy is None else partial(self._tidied, tidy)

    def _tidied(self, tidy: Callable[[], Tidied]) -> Tidied:
        """What it takes counts for choices to come, as part of what a merge costs."""
        started = time.perf_counter()
        found = tidy()
        self._call.costs.learn_maintenance(self.choice.engine, time.perf_counter() - started)
        return found

    def _decided(self, err: Exception, tag: CommitTag) -> MergeReport:
        """What became of a merge that raised; one that failed natively and did not land is tried on Spark, once."""
        try:
            return self._fate(err, tag)
        except MergeFailedError:
            if not self._execution.in_driver or not self._take_over(err):
                raise
        self.follow_columns(is_retry=True)  # what made it fail may be that they are others now
        if self._execution.tombstones is not None:
            self.look(self._execution.tombstones)
        tag = self.tag("target")
        try:
            return self.merge(tag)
        except Exception as again:
            return self._fate(again, tag)

    def _fate(self, err: Exception, tag: CommitTag) -> MergeReport:
        merger, target = self._execution.merger, self._call.spec.target
        return commit_fate.decide(err, merger, target, tag, since=self._job.target.version)

    def _take_over(self, err: Exception) -> bool:
        other = choose.take_over(self._job, self._execution, err)
        if other is None:
            return False
        self.hits = None
        self._execution = other
        return True

    def _release(self) -> None:
        self.hits = None
        self._execution.release()


def merged(call: BatchCall, executor: Executor, *, events: int) -> Merged:
    """Merge what no tombstone refuses, in one commit; each attempt reads tombstones and table afresh.

    Args:
        call: the sink's.
        executor: the engine that works on the batch.
        events: how many the batch has after dedup.
    """
    done_by: str | None = None

    def attempt(number: int) -> MergeReport:
        nonlocal done_by
        call.attempts.count_merge(number)
        with call.clock.phase("plan"):
            executor.follow_columns(is_retry=number > 1)
        with call.clock.phase("tombstones"):
            executor.with_tombstones(executor.look)
        if executor.hits is not None and events == executor.hits.refused:
            # After a lost attempt the winner may have been a twin of this call that knew of no refusal.
            return MergeReport(already_applied=number > 1 and _is_recorded(call))
        with call.clock.phase("merge"):
            report = executor.merge_timed(executor.tag("target"))
        done_by = executor.choice.engine
        return report

    report = call.attempts.run(attempt)
    if report.already_applied:
        # Whoever applied it may have seen fewer tombstones than this attempt: all upserts are checked again.
        executor.hits = None
    done = Merged(report=report, engine=done_by, refused=0 if executor.hits is None else executor.hits.refused)
    if report.already_applied or report.version is not None:
        keep_ledger(call, executor.batch, done)
    return done


def keep_ledger(call: BatchCall, batch: Batch, merged: Merged) -> None:
    """From here on the events of a call that fails are counted: its commit is in the target."""
    undecodable = call.intake.undecodable_events
    ledger = partial(landed_as, refused=merged.refused, repaired=merged.repaired, undecodable=undecodable)
    call.attempts.has_landed(partial(ledger, batch, merged.report))


def rechecked(call: BatchCall, executor: Executor, merged: Merged) -> Merged:
    """Undo upserts that a delete refuses which another writer remembered while this batch merged."""

    def late(tombstones: Tombstones[Any]) -> Hits | None:
        seen = None if executor.hits is None else executor.hits.version
        if not merged.report.already_applied and tombstones.version() == seen:
            return None
        found: Hits = tombstones.late_hits(executor.hits)
        return found

    found = executor.with_tombstones(late)
    if found is None:
        return merged
    if found.refused:
        merged = _repaired(call, executor, found, merged)
    if merged.report.already_applied:
        executor.hits = found
    return merged


def _repaired(call: BatchCall, executor: Executor, late: Hits, merged: Merged) -> Merged:
    tag = executor.tag("recheck")
    repair = call.attempts.run(lambda _: executor.repair(late, tag))
    merged = replace(merged, repaired_version=repair.version)
    if not repair.deleted:
        return merged
    found: Mapping[str, int] = {}
    if merged.report.version is not None and call.spec.change_data_feed:
        found = executor.counted_as(late, merged.report.version)
    merged = replace(merged, repaired={**found, "total": repair.deleted})
    keep_ledger(call, executor.batch, merged)
    return merged


def forget(call: BatchCall, executor: Executor, *, table_id: str) -> bool:
    """Mark the tombstones that the batch's upserts have overtaken; whether there were any."""

    def forgotten(tombstones: Tombstones[Any]) -> None:
        if executor.hits is None:  # the other engine found them
            executor.hits = tombstones.hits()
        if executor.hits.revived:
            tombstones.forget(executor.hits, call.marks.beside("tombstones-forget", table_id=table_id))

    revived = executor.hits is not None and executor.hits.revived > 0
    if revived:
        executor.with_tombstones(forgotten)
    return revived


def tidy(call: BatchCall, executor: Executor) -> None:
    """Housekeeping of the tombstones: the batch is done without it, and the next one tries again."""
    try:
        executor.with_tombstones(lambda tombstones: tombstones.tidy())
    except Exception as err:
        tell(log.warning, "tombstones_not_tidied", target=call.spec.label, error=reason(err))


def _is_recorded(call: BatchCall) -> bool:
    found = call.tables.target.snapshot()
    return found is not None and call.marks.is_recorded(found)


def record_first(call: BatchCall, *, since: int) -> int | None:
    """Commit a batch's transaction id alone; Delta's version, or None where a twin of this call was faster.

    Args:
        call: the sink's.
        since: version of the target before.
    """
    tag = call.marks.tag("target", engine="spark", plan="no row changed; the query's first batch at this table")
    return _committed(call, tag, partial(record, call.session, call.spec.target, tag), since=since).version


def fill_new_columns(call: BatchCall, values: Mapping[str, Column], *, since: int) -> MergeReport:
    """Add columns to the target with a value in each of its rows, in one commit.

    Args:
        call: the sink's.
        values: column -> value, typed.
        since: version of the target before.
    """
    spec = call.spec
    within = None if spec.target_filter is None else target_filter.inside(spec.target_filter)
    tag = call.marks.tag("column-default", engine="spark", plan=f"defaults of {sorted(values)!r}")
    return _committed(call, tag, partial(add_filled, call.session, spec.target, values, within, tag), since=since)


def _committed(call: BatchCall, tag: CommitTag, commit: Callable[[], MergeReport], *, since: int) -> MergeReport:
    """Run one commit of Spark's until it wins, or the policy is exhausted."""
    target = call.spec.target
    commits = SparkCommits(call.session, target)

    def attempt(_: int) -> MergeReport:
        try:
            return commit()
        except Exception as err:
            return commit_fate.decide(err, commits, target, tag, since=since)

    return call.attempts.run(attempt)
