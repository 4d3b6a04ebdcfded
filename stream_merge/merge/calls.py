"""The calls of one sink, through which all of its batches are merged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from stream_merge.engines.choose import wants_events_at_hand
from stream_merge.engines.costs import CostModel
from stream_merge.errors import ConfigError
from stream_merge.merge import steps
from stream_merge.merge.call import Applied, BatchCall, Done
from stream_merge.merge.clock import Observed, PhaseClock, now_micros
from stream_merge.merge.commit_tags import CommitTags
from stream_merge.merge.report import failures_reported, merge_result, publish
from stream_merge.merge.retrying import Retrying
from stream_merge.merge.running_calls import batch_part, claims
from stream_merge.metrics.instruments import MergeMetrics, default_metrics
from stream_merge.model.logs import tell
from stream_merge.model.observer import Observer
from stream_merge.model.results import TARGET_FAILED, MergeResult, Tidied
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import is_applied
from stream_merge.model.source_batch import Intake
from stream_merge.model.table_ref import TableRef
from stream_merge.shapes import target_filter as filters
from stream_merge.shapes.layouts import Layouts
from stream_merge.spark.confs import (
    APP_ID_CONF,
    BATCH_ID_CONF,
    TIMESTAMP_CONF,
    TIMESTAMP_MICROS,
    USER_METADATA_CONF,
    WHOLE_READS,
)
from stream_merge.spark.errors import reason, spark_errors_unlogged
from stream_merge.spark.jvm import expect_classic, in_session, owned_session, same_session
from stream_merge.spark.streaming import Caller, caller
from stream_merge.tables import backoff, locks
from stream_merge.tables.applied_batches import Noted, fingerprint, query_delivery
from stream_merge.tables.last_commit import LastCommit
from stream_merge.tables.maintenance import MaintenancePlan, worse
from stream_merge.tables.side import quarantine
from stream_merge.tables.side.side_table import SideCommit
from stream_merge.tables.table import Tables

log = logging.getLogger(__name__)


class Calls:
    """Merges the batches of one sink, one call each."""

    def __init__(
        self, spec: MergeSpec, *, metrics: MergeMetrics | None = None, observers: Sequence[Observer] = ()
    ) -> None:
        self.spec = spec
        self.last_result: MergeResult | None = None
        """Result of the last call that did not raise."""
        self.costs = CostModel()
        self.sleep: Callable[[float], None] = time.sleep
        self._own_metrics = metrics
        self._observers = tuple(observers)
        self._layouts = Layouts(spec)
        self._tables = Tables(spec)
        self._last_commit = LastCommit(spec)
        self._session = OwnSession()
        self._maintenance = None if spec.maintenance is None else MaintenancePlan(spec, spec.maintenance)
        self._is_new, self._failed_late = True, False
        self._noted: set[Noted] = set()

    @property
    def metrics(self) -> MergeMetrics:
        """The metrics of calls."""
        return self._own_metrics or default_metrics()

    def for_source(
        self,
        *carries: str,
        deletes: str | None = None,
        position_components: int | None = None,
        skip_unchanged: bool = False,
    ) -> None:
        """Settings that only sources of this package have, before the first call: see the fields of `MergeSpec`.

        `carries`: columns of `names.SOURCE_COLUMNS` in the batches; `deletes`: SQL of the delete mark.
        """
        self.spec = replace(
            self.spec,
            source_columns=frozenset(carries),
            apply_as_deletes=self.spec.apply_as_deletes if deletes is None else deletes,
            position_components=position_components,
            skip_unchanged=skip_unchanged,
        )
        self._layouts = Layouts(self.spec)

    @spark_errors_unlogged()
    def merge(self, batch_df: DataFrame, batch_id: int, intake: Intake) -> None:
        """Merge one micro-batch (`MergeSink.__call__`)."""
        with self._call(batch_df, batch_id, intake) as (call, source):
            prepared = steps.prepare(call, source)
            if isinstance(prepared, Applied):
                done = steps.repeat(call, source, prepared)
            else:
                done = steps.merge_events(call, source, prepared)
                self._is_new = False
            note_target(call, done)
            done = run_maintenance(call, done)
        self._report(call, done)

    def account(self, batch_df: DataFrame, batch_id: int, intake: Intake) -> None:
        """Account for a batch without any decodable event: undecodable records go to the quarantine, once per batch.

        The target is neither read nor created.
        """
        with self._call(batch_df, batch_id, intake) as (call, _):
            steps.check_quarantine(call)
            steps.quarantine_undecodable(call)
            note_query(call)
        self._report(call, Done())

    @contextmanager
    def _call(self, batch_df: DataFrame, batch_id: int, intake: Intake) -> Iterator[tuple[BatchCall, DataFrame]]:
        """The call, and the batch in the sink's own session; what the block raises is counted and logged."""
        clock = PhaseClock(intake.began)
        self._failed_late = False
        expect_classic(batch_df, target=self.spec.target, batch_id=batch_id)
        who = caller(batch_df, self.spec, intake.query)
        metrics = self.metrics
        metrics.prepare(who.query, self.spec.label)
        observed = self._observed(clock, query=who.query, batch_id=batch_id)
        with failures_reported(
            self.spec,
            metrics,
            clock,
            query=who.query,
            batch_id=batch_id,
            observed=observed,
            landed=lambda: self._failed_late,
        ):
            session = self._session.of(batch_df)
            self._tables.begin(session)
            location = self._tables.target.location
            observed.started(location.path)
            if self._is_new:
                locks.expect_no_other(self.spec.target, location)
            part = batch_part(batch_df, who, batch_id, intake.calls)
            claim = claims.held(self, who.identity, self.spec, location, part=part)
            with claim, ExitStack() as resources:
                call = self._called(
                    batch_df,
                    batch_id,
                    intake,
                    who=who,
                    location=location,
                    clock=clock,
                    observed=observed,
                    resources=resources,
                )
                try:
                    yield call, in_session(batch_df, session)
                except BaseException:
                    self._failed_late = call.retrying.landed
                    call.retrying.count_landed()
                    raise

    def _called(
        self,
        batch_df: DataFrame,
        batch_id: int,
        intake: Intake,
        *,
        who: Caller,
        location: str,
        clock: PhaseClock,
        observed: Observed,
        resources: ExitStack,
    ) -> BatchCall:
        session = self._session.of(batch_df)
        spec = filters.with_fixed_time(session, self.spec)
        delivery = query_delivery(
            spec, who, batch_id, session, location=location, noted=self._noted, calls=intake.calls
        )
        retrying = Retrying(
            policy=spec.retry,
            clock=clock,
            metrics=self.metrics,
            query=who.query,
            target=spec.label,
            sleep=self.sleep,
        )
        tags = CommitTags(
            caller=who,
            batch_id=batch_id,
            target=spec.target,
            run=retrying.run,
            judge=None if delivery is None else delivery.judge,
            recorded={} if delivery is None else delivery.recorded(batch_id),
            accounted=intake.recorded,
            user_metadata=batch_df.sparkSession.conf.get(USER_METADATA_CONF, None),
        )
        return BatchCall(
            spec=spec,
            batch_id=batch_id,
            caller=who,
            intake=intake,
            delivery=delivery,
            is_first=self._is_new,
            clock=clock,
            observed=observed,
            now_micros=now_micros(),
            session=session,
            source_confs={} if spec.source_columns else self._session.ignored,
            tables=self._tables,
            layouts=self._layouts,
            costs=self.costs,
            last_commit=self._last_commit,
            retrying=retrying,
            tags=tags,
            maintenance=self._maintenance,
            resources=resources,
            register_writer=partial(locks.enter, spec.target, f"query {who.query!r}", location),
        )

    def _report(self, call: BatchCall, done: Done) -> None:
        """Keep, count and log the result."""
        result = merge_result(call, done)
        self.last_result = result
        publish(result, self.metrics)
        target = self.spec.target
        locks.warn_of_others(target, f"query {call.caller.query!r}", self._tables.target.known_location)
        call.observed.ended(lambda: {"result": result, **self._table(call, done)})

    def _observed(self, clock: PhaseClock, *, query: str, batch_id: int) -> Observed:
        return Observed(self._observers, clock, query=query, target=self.spec.label, batch_id=batch_id)

    def _table(self, call: BatchCall, done: Done) -> dict[str, Any]:
        """Location and columns of the target after a batch. Cost: its log is read where the batch has added columns."""
        target = done.target
        if target is not None and done.adds_columns:
            self._tables.begin(call.session)
            target = self._tables.target.snapshot() or target
        return {} if target is None else {"location": target.location, "schema": target.schema}

    def reading(
        self, batch_df: DataFrame, batch_id: int, began: float, passes: Callable[[Exception], bool] = lambda _: False
    ) -> AbstractContextManager[None]:
        """Counts and logs errors of the source before a call as those of the call, unless they pass."""
        query, metrics = caller(batch_df, self.spec).query, self.metrics
        metrics.prepare(query, self.spec.label)
        clock = PhaseClock(began, current="read")
        observed = self._observed(clock, query=query, batch_id=batch_id)
        return failures_reported(
            self.spec, metrics, clock, query=query, batch_id=batch_id, observed=observed, passes=passes
        )

    def wants_events_at_hand(self, batch_df: DataFrame, *, need: int) -> bool:
        """Whether an engine in the driver is likely to merge a batch that takes so many bytes there."""
        self._tables.begin(self._session.of(batch_df))
        return wants_events_at_hand(self.spec, self._tables, need=need)

    def announce(self, batch_df: DataFrame, *, at_most: int) -> None:
        """Create the sink's metrics before its first event, and set how many events a first batch can hold."""
        who = caller(batch_df, self.spec)
        self.metrics.prepare(who.query, self.spec.label)
        self.costs.expect(at_most)

    def location_to_be(self, batch_df: DataFrame) -> TableRef:
        """Location of the target, even if it does not exist yet; its full name where only a catalog knows."""
        self._tables.begin(self._session.of(batch_df))
        return self._tables.target.location_to_be

    def may_hold(self, batch_df: DataFrame, batch_id: int) -> bool:
        """Whether the target may hold the batch whose call failed: its commit came first, or nobody can say."""
        self._tables.begin(self._session.of(batch_df))
        if self._failed_late:
            return True
        app_id = caller(batch_df, self.spec).app_id("target")
        try:
            target = self._tables.target.snapshot()
            return target is not None and is_applied(target.transaction, app_id, batch_id)
        except ConfigError:
            return False  # what is there is not a Delta table
        except Exception:
            tell(log.warning, "target_unreadable", target=self.spec.label, batch_id=batch_id, exc_info=True)
            return True

    def quarantine_batch(self, batch_df: DataFrame, batch_id: int, error: Exception) -> int:
        """Commit all events of a batch to the quarantine table, each once; returns how many were written.

        A repeated batch may have more of them, from a stream or settings that were repaired since: these are added. An
        event that also breaks the contract may be there already, for that reason.
        """
        spec, query = self.spec, caller(batch_df, self.spec).query
        counts = quarantine.write_whole(
            in_session(batch_df, self._session.of(batch_df)),
            spec.quarantine_table,
            reason=TARGET_FAILED,
            error=reason(error),
            query=query,
            commit=self._quarantine_commit(batch_df, batch_id),
        )
        for why, count in counts.items():
            self.metrics.set_aside(query, spec.label, why, count)
        return sum(counts.values())

    def is_quarantined(self, batch_df: DataFrame, batch_id: int) -> bool:
        """Whether `quarantine_batch` has committed this batch before: then it must not be merged any more."""
        session, commit = self._session.of(batch_df), self._quarantine_commit(batch_df, batch_id)
        return quarantine.is_written(session, self.spec.quarantine_table, commit)

    def _quarantine_commit(self, batch_df: DataFrame, batch_id: int) -> SideCommit:
        """The commit of a failed batch to the quarantine table.

        It has the target's name: a target that failed may have no readable id, and sinks may share a quarantine table.
        """
        who = caller(batch_df, self.spec)
        return SideCommit(
            app_id=who.app_id("quarantine-broken", about=self.spec.target.plain),
            batch_id=batch_id,
            run=lambda attempt: backoff.run(attempt, self.spec.retry, sleep=self.sleep),
            fingerprint=fingerprint(who, batch_id, self._session.of(batch_df)),
            user=batch_df.sparkSession.conf.get(USER_METADATA_CONF, None),
        )


STALENESS_CONF = "spark.databricks.delta.stalenessLimit"
"""Allows reads of an older version of a table for a while; 0 by default."""


class OwnSession:
    """A copy of the session that the batches come from, with the confs it had when it was first seen."""

    def __init__(self) -> None:
        self._sessions: tuple[SparkSession, SparkSession] | None = None
        self.ignored: dict[str, str | None] = {}
        """Confs of `WHOLE_READS` that the batches' session sets and the copy does not: their source is read by them."""

    def of(self, batch_df: DataFrame) -> SparkSession:
        """The copy for this batch; a new one when the batches come from another session."""
        theirs = batch_df.sparkSession
        if self._sessions is None or not same_session(self._sessions[0], theirs):
            ours = owned_session(theirs)
            for conf in (APP_ID_CONF, BATCH_ID_CONF):
                # Ids of the user's own writes: under them Delta would drop appends to the side tables as repeated.
                ours.conf.unset(conf)
            ours.conf.set(TIMESTAMP_CONF, TIMESTAMP_MICROS)
            # A look at the rows must see what a MERGE would: it always takes the newest version (Delta 4.4).
            ours.conf.set(STALENESS_CONF, "0")
            confs = {conf: theirs.conf.get(conf, whole) for conf, whole in WHOLE_READS.items()}
            self.ignored = {conf: value for conf, value in confs.items() if str(value).lower() != WHOLE_READS[conf]}
            self._sessions = (theirs, ours)
        return self._sessions[1]


def note_query(call: BatchCall) -> None:
    """Record in the checkpoint that this sink gets the query's batches, also where none had events for it."""
    if call.delivery is not None:
        call.delivery.note(None)


def note_target(call: BatchCall, done: Done) -> None:
    """Record in the checkpoint that the query has merged into this very table, and its commits for the next call."""
    if done.target is not None:
        tokens = call.tags.tokens
        call.last_commit.note(done.target, done.versions, call.delivery, batch_id=call.batch_id, tokens=tokens)
    if call.delivery is not None and done.target is not None and done.version is not None:
        call.delivery.note(done.target)


def run_maintenance(call: BatchCall, done: Done) -> Done:
    """Compact the files that the engine's merges leave, and maintain the target, if it is due."""
    if call.maintenance is None and done.tidy is None:
        return done
    call.resources.close()  # other sinks may need the memory of this batch meanwhile
    with call.clock.phase("maintenance"):
        tidied = Tidied() if done.tidy is None else done.tidy()
        runs = [tidied.maintenance]
        if call.maintenance is not None:
            runs.append(call.maintenance.after_call(call.session, changed=done.merged.report.version is not None))
    done_runs = [run for run in runs if run is not None]
    return replace(done, maintenance=worse(done_runs) if done_runs else None, read_debt=tidied.debt)
