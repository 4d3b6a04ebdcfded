"""`MergeSinks`: one stream's events, each to the table that a column names."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import IntegralType, StringType

from stream_merge.errors import CommitStateUnknownError, ConfigError, ContractError, MergeFailedError, RoutedMergeError
from stream_merge.merge.calls import OwnSession
from stream_merge.merge.clock import PhaseClock
from stream_merge.merge.report import failures_reported
from stream_merge.metrics.instruments import MergeMetrics, default_metrics
from stream_merge.model import names
from stream_merge.model.logs import counted, tell
from stream_merge.model.results import UNDECODABLE, UNKNOWN_ROUTE, MergeResult
from stream_merge.model.settings import RetryPolicy
from stream_merge.model.source_batch import Intake
from stream_merge.model.table_ref import TableRef
from stream_merge.shapes import contract
from stream_merge.sink import MergeSink
from stream_merge.spark import columns
from stream_merge.spark.confs import USER_METADATA_CONF
from stream_merge.spark.errors import reason, was_cancelled
from stream_merge.spark.evaluate_once import materialised, release
from stream_merge.spark.jvm import expect_classic, in_session
from stream_merge.spark.streaming import Caller, caller_named, is_stopping
from stream_merge.spark.versions import for_thread
from stream_merge.tables import backoff
from stream_merge.tables.applied_batches import fingerprint
from stream_merge.tables.side import quarantine
from stream_merge.tables.side.side_table import SideCommit

log = logging.getLogger(__name__)

Route: TypeAlias = str | int
"""A value of the column that events are routed by."""
OnFailure = Literal["fail", "quarantine"]

_SHOWN = 5
"""Unknown values that an error names."""
_QUARANTINED_BEFORE = "the batch was set aside for this table before, and has come again with more events"


@dataclass(frozen=True, kw_only=True, slots=True)
class _All:
    """All tables together, in reports of a batch."""

    label: str
    target: None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turn:
    """One batch."""

    batch_id: int
    seconds: float
    """Duration of its evaluation."""
    may_be_replay: bool


class MergeSinks:
    """Routes the events of one stream to many tables, and merges into them side by side.

    Pass it to `foreachBatch`, or call it. The batch is evaluated once; each sink gets its own events
    in a session of its own, and keeps its own transaction ids, metrics and ledger.

    Guarantees: a batch never ends with an event neither merged nor in a quarantine table. When a table
    fails under on_failure="fail", the others still get their events, then the batch fails; delivered
    again, it is skipped by id where it is applied. Under on_failure="quarantine" the events of the
    failed table are committed to its sink's quarantine table and the batch goes on. The batch fails all the
    same where the table may have the events already (it failed after its commit, or that is unknown), and
    where the query was stopped or its jobs were cancelled.

    Args:
        sinks: value of the route to the sink that takes its events.
        route_by: top-level column (of text or whole numbers), or an expression such as F.col("source.table").
        on_failure: what becomes of the events of a table that fails, and of events that belong to no sink.
        quarantine_target: table for events whose route is NULL or names no sink; needed with "quarantine".
        parallel: tables merged at a time; None: as many as the machine has cores, at least two.
        app_id: part of the idempotency identity of that table; outside a streaming query all of it.
        name: label of those events in metrics and logs, and part of the identity of that table: two `MergeSinks`
            of one query that share a quarantine_target need a name each.
        metrics: where they are counted; None: one instance on the default Prometheus registry.

    Raises:
        ConfigError: every problem that shows without Spark, at once.
    """

    def __init__(
        self,
        sinks: Mapping[Route, MergeSink],
        *,
        route_by: str | Column,
        on_failure: OnFailure = "fail",
        quarantine_target: str | None = None,
        parallel: int | None = None,
        app_id: str | None = None,
        name: str = "unrouted",
        metrics: MergeMetrics | None = None,
    ) -> None:
        problems = _problems(sinks, route_by, on_failure, quarantine_target, parallel)
        if problems:
            raise ConfigError(problems)
        self._sinks = dict(sinks)
        self._route_by = route_by
        self._on_failure = on_failure
        self._quarantine_target = None if quarantine_target is None else TableRef(quarantine_target)
        self._app_id = app_id
        self._name = name
        self._metrics = metrics
        self._session = OwnSession()
        self._pool = ThreadPoolExecutor(parallel or max(2, os.cpu_count() or 2), thread_name_prefix="stream_merge")
        self._last: tuple[str | None, int] | None = None
        self._announced = False
        self._last_results: dict[Route, MergeResult] = {}
        self._last_failures: dict[Route, Exception] = {}

    def __repr__(self) -> str:
        return f"MergeSinks({len(self._sinks)} sinks, route_by={self._route_by!r}, on_failure={self._on_failure!r})"

    @property
    def last_results(self) -> Mapping[Route, MergeResult]:
        """Results of the last call, by route."""
        return dict(self._last_results)

    @property
    def last_failures(self) -> Mapping[Route, Exception]:
        """Errors of the last call, by route."""
        return dict(self._last_failures)

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        """Merge one micro-batch into the tables that its events name.

        Cost: one evaluation of the source in one Spark job; then what each sink with events costs.

        Raises:
            ConfigError: the route cannot be computed or compared; before anything is written.
            ContractError: events without a sink under on_failure="fail"; before anything is written.
            RoutedMergeError: some tables failed; the others have their events.
        """
        expect_classic(batch_df, target=None, batch_id=batch_id)
        who = caller_named(batch_df, app_id=self._app_id, name=None)
        last, self._last = self._last, (who.identity, batch_id)
        may_be_replay = last is None or last[0] != who.identity or batch_id <= last[1]
        self._last_results, self._last_failures = {}, {}
        metrics, began = self._metrics or default_metrics(), time.perf_counter()
        metrics.prepare(who.query, self._name)
        clock = PhaseClock(current="read")
        with ExitStack() as resources:
            with failures_reported(_All(label=self._name), metrics, clock, query=who.query, batch_id=batch_id):
                routed, counts = self._evaluated(batch_df)
                resources.callback(release, routed)
                seconds = time.perf_counter() - began
                self._before_the_first(routed, at_most=counts["received"])
                if counts["unrouted"]:
                    self._quarantine_unrouted(routed, batch_id, who, counts["unrouted"])
            routes = sorted(counts["routes"], key=list(self._sinks).index)
            self._merge(routed, _Turn(batch_id=batch_id, seconds=seconds, may_be_replay=may_be_replay), routes)

    def _before_the_first(self, routed: DataFrame, *, at_most: int) -> None:
        if self._announced:
            return
        self._expect_different_locations(routed)
        for sink in self._sinks.values():
            sink._calls.announce(routed, at_most=at_most)
        self._announced = True

    def _evaluated(self, batch_df: DataFrame) -> tuple[DataFrame, dict[str, Any]]:
        """The batch, evaluated once, with the route as a column; its number of events and their routes."""
        if isinstance(self._route_by, str):
            if self._route_by not in batch_df.columns:
                msg = (
                    f"[COLUMN_NOT_FOUND] route_by names column {self._route_by!r}, which the source does not have; its"
                    f" columns are {batch_df.columns!r}"
                )
                raise ConfigError(msg)
            route = columns.column(self._route_by)
        else:
            route = self._route_by
        with_route = batch_df.withColumn(names.ROUTE_COLUMN, route)
        self._check_type(with_route)
        if isinstance(with_route.schema[names.ROUTE_COLUMN].dataType, StringType):
            # Without its collation, by which a route could be several sinks', and which sets do not take (Spark 4.2).
            with_route = with_route.withColumn(names.ROUTE_COLUMN, columns.column(names.ROUTE_COLUMN).cast("string"))
        return materialised(
            with_route,
            F.count(F.lit(1)).alias("received"),
            F.count_if(self._is_unrouted()).alias("unrouted"),
            F.collect_set(F.when(~self._is_unrouted(), columns.column(names.ROUTE_COLUMN))).alias("routes"),
        )

    def _is_unrouted(self) -> Column:
        known = columns.column(names.ROUTE_COLUMN).isin(list(self._sinks))
        return ~F.coalesce(known, F.lit(False))

    def _expect_different_locations(self, batch_df: DataFrame) -> None:
        """Refuse two names of one table: one sink would skip the other's events by transaction id."""
        routes: dict[str, Route] = {}
        for route, sink in self._sinks.items():
            location = sink._calls.location_to_be(batch_df).canonical
            if location in routes:
                msg = (
                    f"[DUPLICATE_SETTING] routes {routes[location]!r} and {route!r} have the same table ({location});"
                    " give each its own target"
                )
                raise ConfigError(msg, target=sink._calls.spec.target)
            routes[location] = route

    def _check_type(self, with_route: DataFrame) -> None:
        dtype = with_route.schema[names.ROUTE_COLUMN].dataType
        wanted = StringType if isinstance(next(iter(self._sinks)), str) else IntegralType
        if not isinstance(dtype, wanted):
            kind = type(next(iter(self._sinks))).__name__
            msg = (
                f"[INVALID_SETTING] route_by is {dtype.simpleString()}, but the keys of sinks are {kind}; cast the"
                " column, or use keys of its type"
            )
            raise ConfigError(msg)

    def _quarantine_unrouted(self, routed: DataFrame, batch_id: int, who: Caller, count: int) -> None:
        """Refuse events without a sink, or commit them to the quarantine table before any table is merged."""
        lost = routed.where(self._is_unrouted())
        values = [row[0] for row in lost.select(names.ROUTE_COLUMN).distinct().limit(_SHOWN + 1).collect()]
        shown = ", ".join(map(repr, values[:_SHOWN])) + (", ..." if len(values) > _SHOWN else "")
        if self._on_failure == "fail" or self._quarantine_target is None:
            msg = (
                f"[UNKNOWN_ROUTE] {count} events of batch {batch_id} have a route without a sink ({shown}); add a sink,"
                " or set on_failure='quarantine'"
            )
            corrupt = contract.corrupt_because(lost.columns)
            unreadable = lost.where(corrupt.isNotNull()).count() if names.CORRUPT_COLUMN in lost.columns else 0
            if unreadable == count:
                why, where = lost.select(corrupt, contract.origin(lost.columns)["topic"]).first() or ("", "")
                msg = (
                    f"[UNDECODABLE_RECORDS] {counted(count, 'record')} of batch {batch_id} cannot be read (one in"
                    f" {where}: {why}); fix the source or its schema, or set on_failure='quarantine'"
                )
            reasons = {UNKNOWN_ROUTE: count - unreadable, UNDECODABLE: unreadable}
            raise ContractError(msg, reasons={r: n for r, n in reasons.items() if n}, batch_id=batch_id)
        tell(log.warning, "events_without_a_sink", query=who.query, batch_id=batch_id, routes=shown)
        session = self._session.of(routed)
        written = quarantine.write_whole(
            in_session(lost.drop(names.ROUTE_COLUMN), session),
            self._quarantine_target,
            reason=UNKNOWN_ROUTE,
            error=f"no sink takes this event's route; routes seen in the batch: {shown}",
            query=who.query,
            commit=SideCommit(
                app_id=who.app_id("quarantine-unrouted", about=self._name),
                batch_id=batch_id,
                run=lambda attempt: backoff.run(attempt, RetryPolicy(), sleep=time.sleep),
                fingerprint=fingerprint(who, batch_id, session),
                user=routed.sparkSession.conf.get(USER_METADATA_CONF, None),
            ),
        )
        for kind, events in written.items():
            (self._metrics or default_metrics()).set_aside(who.query, self._name, kind, events)

    def _merge(self, routed: DataFrame, turn: _Turn, routes: list[Route]) -> None:
        """Merge each sink's events in parallel; failures are handled when all have ended."""
        batch_id = turn.batch_id
        running: dict[Route, Future[MergeResult | None]] = {}
        try:
            for route in routes:
                task = for_thread(routed.sparkSession, self._merge_one)
                running[route] = self._pool.submit(task, routed, turn, route)
            wait(running.values())
        except BaseException:
            for future in running.values():
                future.cancel()
            wait(running.values())
            raise
        for route, future in running.items():
            error = future.exception()
            if isinstance(error, Exception):
                self._last_failures[route] = error
            elif (result := future.result()) is not None:
                self._last_results[route] = result
        lost = dict(self._last_failures)
        if self._on_failure == "quarantine":
            after = {route: self._quarantine_failed(routed, batch_id, route, error) for route, error in lost.items()}
            lost = {route: error for route, error in after.items() if error is not None}
        if lost:
            raise self._failure(lost, batch_id, len(routes))

    def _merge_one(self, routed: DataFrame, turn: _Turn, route: Route) -> MergeResult | None:
        sink, events = self._sinks[route], self._events(routed, route)
        began = time.perf_counter() - turn.seconds
        if self._on_failure == "quarantine" and turn.may_be_replay:
            with sink._calls.reading(events, turn.batch_id, began):
                is_quarantined = sink._calls.is_quarantined(events, turn.batch_id)
            if is_quarantined:
                self._quarantine_batch(sink, turn.batch_id, events, MergeFailedError(_QUARANTINED_BEFORE))
                return None
        sink._calls.merge(events, turn.batch_id, Intake(calls="routed", began=began))
        return sink.last_result

    def _events(self, routed: DataFrame, route: Route) -> DataFrame:
        return routed.where(columns.column(names.ROUTE_COLUMN) == F.lit(route)).drop(names.ROUTE_COLUMN)

    def _quarantine_failed(self, routed: DataFrame, batch_id: int, route: Route, error: Exception) -> Exception | None:
        """Quarantine what a sink could not merge; the error that keeps the batch from ending, or None."""
        if is_stopping(routed) or was_cancelled(error):
            return error  # nothing is wrong with the table
        sink, events = self._sinks[route], self._events(routed, route)
        if isinstance(error, CommitStateUnknownError) or sink._calls.may_hold(events, batch_id):
            return error  # a replay finds out, and does what was left undone
        try:
            self._quarantine_batch(sink, batch_id, events, error)
        except Exception as again:
            again.add_note(f"while events were quarantined that could not be merged: {reason(error)}")
            return again
        return None

    def _quarantine_batch(self, sink: MergeSink, batch_id: int, events: DataFrame, error: Exception) -> None:
        """Quarantine and log a batch of a table, as far as it is not in the quarantine."""
        count = sink._calls.quarantine_batch(events, batch_id, error)
        if count:
            tell(
                log.error,
                "events_of_a_failed_table_quarantined",
                target=sink._calls.spec.label,
                batch_id=batch_id,
                events=count,
                error=reason(error),
            )

    def _failure(self, lost: Mapping[Route, Exception], batch_id: int, tables: int) -> RoutedMergeError:
        listed = "; ".join(
            f"{route!r} ({self._sinks[route]._calls.spec.target}): {reason(e)}" for route, e in lost.items()
        )
        msg = (
            f"[TABLES_FAILED] {len(lost)} of {tables} tables failed in batch {batch_id}; the others are merged and skip"
            f" it when it is delivered again: {listed}"
        )
        route, first = next(iter(lost.items()))
        error = RoutedMergeError(msg, failures=lost, target=self._sinks[route]._calls.spec.target, batch_id=batch_id)
        error.__cause__ = first
        return error


def _problems(
    sinks: Mapping[Route, MergeSink],
    route_by: str | Column,
    on_failure: str,
    quarantine_target: str | None,
    parallel: int | None,
) -> list[str]:
    problems = []
    if not sinks:
        problems.append("[MISSING_SETTING] sinks is empty; map at least one value of the route to a MergeSink")
    kinds = {type(route) for route in sinks}
    if len(kinds) > 1 or not kinds <= {str, int}:
        types = sorted(kind.__name__ for kind in kinds)
        problems.append(f"[INVALID_SETTING] sinks has keys of {types}; use str for all of them, or int")
    for what, values in (
        ("target", [sink._calls.spec.target.plain for sink in sinks.values()]),
        ("name= (label of metrics)", [sink._calls.spec.label for sink in sinks.values()]),
    ):
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            problems.append(f"[DUPLICATE_SETTING] several sinks have the same {what}: {twice!r}; give each its own")
    missing = [route for route, sink in sinks.items() if sink._calls.spec.concerns_missing or sink._calls.spec.is_whole]
    if missing:
        problems.append(
            f"[CONFLICTING_SETTINGS] the sinks of {missing!r} need full copies of their tables, and a routed batch has"
            " parts; merge these tables with a MergeSink of their own"
        )
    if not isinstance(route_by, Column) and (not isinstance(route_by, str) or not route_by):
        problems.append(f"[INVALID_SETTING] route_by={route_by!r} must be a column name or a Column")
    if on_failure not in get_args(OnFailure):
        problems.append(f"[INVALID_SETTING] on_failure={on_failure!r} must be one of {list(get_args(OnFailure))}")
    if on_failure == "quarantine" and quarantine_target is None:
        problems.append(
            "[MISSING_SETTING] on_failure='quarantine' needs quarantine_target=, the table for events whose route is"
            " NULL or has no sink"
        )
    if on_failure == "fail" and quarantine_target is not None:
        problems.append(
            "[CONFLICTING_SETTINGS] quarantine_target= is used with on_failure='quarantine' only; remove it"
        )
    if parallel is not None and (not isinstance(parallel, int) or isinstance(parallel, bool) or parallel < 1):
        problems.append(f"[INVALID_SETTING] parallel={parallel!r} must be a whole number, 1 or more")
    return problems
