"""`MergeSink`: what a streaming query's `foreachBatch` calls for every micro-batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from pyspark.sql import Column, DataFrame

from stream_merge.engines.costs import CostModel
from stream_merge.engines.job import wants_events_at_hand
from stream_merge.metrics.instruments import MergeMetrics, default_metrics
from stream_merge.microbatch import after, set_aside, steps
from stream_merge.microbatch.attempts import Attempts
from stream_merge.microbatch.call import BatchCall
from stream_merge.microbatch.claims import claims, part_of
from stream_merge.microbatch.clock import PhaseClock, now_micros
from stream_merge.microbatch.commit import Marks
from stream_merge.microbatch.observing import Observed
from stream_merge.microbatch.own_session import OwnSession
from stream_merge.microbatch.report import failures_told, result_of, told
from stream_merge.microbatch.values import Applied, Done
from stream_merge.model.given import as_mapping, as_names, as_own_mapping, as_truth
from stream_merge.model.maintenance import Maintenance
from stream_merge.model.observer import Observer
from stream_merge.model.results import MergeResult
from stream_merge.model.settings import Engine, MergeSpec, OnInvalid, RetryPolicy, SchemaEvolution
from stream_merge.model.source_batch import Intake
from stream_merge.model.table_ref import TableRef
from stream_merge.shapes import Changes, Shape, checked
from stream_merge.shapes import target_filter as filters
from stream_merge.shapes.matching import Layouts
from stream_merge.spark.confs import USER_METADATA_CONF
from stream_merge.spark.errors import spark_errors_unlogged
from stream_merge.spark.identity import Caller, caller
from stream_merge.spark.jvm import expect_classic, in_session
from stream_merge.spark.streaming import is_called_by_query
from stream_merge.tables import locks
from stream_merge.tables.delivery import Noted, of_query
from stream_merge.tables.last_commit import LastCommit
from stream_merge.tables.maintenance import MaintenancePlan
from stream_merge.tables.table import Tables

log = logging.getLogger(__name__)


class MergeSink:
    """Merges micro-batches of change events into one Delta table.

    Pass it to `foreachBatch`, or call it. For each batch it checks the events, keeps the latest per
    key, refuses stale ones, merges in one commit, retries lost commits and accounts for every event.

    Guarantees: a batch id delivered again changes nothing; order of arrival does not matter for keys
    whose sequences differ. Thread-safe for different batches of different queries, not for one sink
    called twice at once.

    Args:
        target: catalog name, or a path / URI when it has a slash or a scheme.
        keys: top-level columns that together identify a row.
        sequence_by: column, columns compared left to right, or an expression; later wins. Required for changes.
        apply_as_deletes: SQL text or Column; TRUE = delete, FALSE or NULL = upsert.
        column_list: the only columns to store; excludes `except_column_list`.
        except_column_list: columns not to store.
        on_invalid: "quarantine" events that break the contract, or "fail" the batch.
        quarantine_target: where they go; None: `__stream_merge_quarantine_<table>` beside the target.
        tombstones: remember deletes, so that a late upsert cannot revive a key.
        tombstone_retention_seconds: how long; None: forever.
        create_target: create a missing target from the first batch.
        partition_by: partition columns of a created target.
        cluster_by: clustering columns of a created target.
        table_properties: properties of a created target.
        change_data_feed: make sure the target's change data feed is on.
        schema_evolution: True adds new columns and nested fields of the source, "widen" also widens types.
        engine: "auto", "spark" or "driver".
        retry: attempts, time budget and backoff for lost commits.
        app_id: part of the idempotency identity; outside a streaming query all of it.
        name: label for metrics and logs; part of the identity when given.
        single_writer: promise that nobody else writes to the target; without it an object store is left to Spark,
            unless commits exclude each other there (on S3 by `streammerge.ConditionalPutLogStore`).
        storage_options: how delta-rs reaches an object store; None: on S3 and Azure as Spark's settings say.
        native_memory_bytes: memory ceiling of the native engine.
        maintenance: compact and vacuum the target at the end of a call; None: never.
        target_filter: SQL over the row `t`, such as "t.day >= current_date() - 7": the only part of the target that is
            looked through for a batch's keys. Rows of them elsewhere stop the batch before anything is written.
        shape: what a batch means for the table, one of `stream_merge.shapes`; None: its changes.
        metrics: where to count; None: one instance on the default Prometheus registry.
        observers: called when a micro-batch starts and ends, such as `stream_merge.observers.otel.Traces()`.

    Raises:
        ConfigError: every problem that can be seen without Spark, at once.
    """

    def __init__(
        self,
        *,
        target: str,
        keys: str | Sequence[str],
        sequence_by: str | Sequence[str] | Column = (),
        apply_as_deletes: str | Column | None = None,
        column_list: Sequence[str] | None = None,
        except_column_list: Sequence[str] | None = None,
        on_invalid: OnInvalid = "quarantine",
        quarantine_target: str | None = None,
        tombstones: bool = True,
        tombstone_retention_seconds: float | None = None,
        create_target: bool = True,
        partition_by: str | Sequence[str] = (),
        cluster_by: str | Sequence[str] = (),
        table_properties: Mapping[str, str] | None = None,
        change_data_feed: bool = True,
        schema_evolution: SchemaEvolution = False,
        engine: Engine = "auto",
        retry: RetryPolicy | None = None,
        app_id: str | None = None,
        name: str | None = None,
        single_writer: bool = False,
        storage_options: Mapping[str, str] | None = None,
        native_memory_bytes: int | None = None,
        maintenance: Maintenance | None = None,
        target_filter: str | None = None,
        shape: Shape | None = None,
        metrics: MergeMetrics | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        wanted = checked(Changes() if shape is None else shape, target=target)
        tombstones = as_truth(tombstones)
        self._spec = MergeSpec(
            target=TableRef(target),
            keys=as_names(keys),
            sequence_by=sequence_by if isinstance(sequence_by, Column) else as_names(sequence_by),
            apply_as_deletes=apply_as_deletes,
            column_list=None if column_list is None else as_names(column_list),
            except_column_list=None if except_column_list is None else as_names(except_column_list),
            on_invalid=on_invalid,
            quarantine_target=None if quarantine_target is None else TableRef(quarantine_target),
            tombstones=tombstones if tombstones is not True else wanted.remembers_deletes,
            tombstone_retention_seconds=tombstone_retention_seconds,
            create_target=as_truth(create_target),
            partition_by=as_names(partition_by),
            cluster_by=as_names(cluster_by),
            table_properties={} if table_properties is None else as_own_mapping(table_properties),
            change_data_feed=as_truth(change_data_feed),
            schema_evolution=schema_evolution,
            engine=engine,
            retry=RetryPolicy() if retry is None else retry,
            app_id=app_id,
            name=name,
            single_writer=as_truth(single_writer),
            storage_options=None if storage_options is None else as_mapping(storage_options),
            native_memory_bytes=native_memory_bytes,
            maintenance=maintenance,
            target_filter=target_filter,
            shape=wanted,
        )
        self._metrics = metrics
        self._observers = tuple(observers)
        self._layouts = Layouts(self._spec)
        self._tables = Tables(self._spec)
        self._costs = CostModel()
        self._last_commit = LastCommit(self._spec)
        self._sleep: Callable[[float], None] = time.sleep
        self._session = OwnSession()
        self._maintenance = None if maintenance is None else MaintenancePlan(self._spec, maintenance)
        self._last_result: MergeResult | None = None
        self._is_new, self._failed_late = True, False
        self._noted: set[Noted] = set()

    def __repr__(self) -> str:
        """Name the sink by what it was told."""
        return f"MergeSink(target={self._spec.target!r}, keys={list(self._spec.keys)!r}, name={self._spec.name!r})"

    def _for_source(
        self,
        *carries: str,
        deletes: str | None = None,
        position_components: int | None = None,
        skip_unchanged: bool = False,
    ) -> MergeSink:
        """The same sink for a source of this package.

        Args:
            carries: columns of `names.SOURCE_COLUMNS` that its batches have.
            deletes: SQL text of what it marks as a delete; a shape without deletes refuses batches that have some.
            position_components: see `MergeSpec.position_components`.
            skip_unchanged: see `MergeSpec.skip_unchanged`.
        """
        self._spec = replace(
            self._spec,
            source_columns=frozenset(carries),
            apply_as_deletes=self._spec.apply_as_deletes if deletes is None else deletes,
            position_components=position_components,
            skip_unchanged=skip_unchanged,
        )
        self._layouts = Layouts(self._spec)
        return self

    def _under(self, *, costs: CostModel, sleep: Callable[[float], None] | None = None) -> MergeSink:
        """The same sink with another judge of its engines and, if given, another way to wait for the next attempt."""
        self._costs = costs
        self._sleep = self._sleep if sleep is None else sleep
        return self

    @property
    def last_result(self) -> MergeResult | None:
        """What the last call that did not raise did; None before the first one."""
        return self._last_result

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        """Merge one micro-batch.

        Guarantees: idempotent for a repeated `batch_id` under the same identity; on any error the
        target is unchanged or holds the whole batch.
        Cost: one evaluation of the source; one MERGE per attempt; one append each for quarantined
        events and for deletes, when there are any.

        Raises:
            ConfigError: before anything is written.
            ContractError: invalid events under on_invalid="fail", before anything is written.
            CommitConflictError: other writers won every attempt.
            CommitStateUnknownError: nobody can say whether the commit landed.
            MergeFailedError: the merge failed and did not land.
        """
        self._merge(batch_df, batch_id, Intake(calls="every" if is_called_by_query() else "some"))

    @spark_errors_unlogged()
    def _merge(self, batch_df: DataFrame, batch_id: int, intake: Intake) -> None:
        """As a call, with what the source tells about the batch beside its events."""
        with self._call(batch_df, batch_id, intake) as (call, source):
            prepared = steps.prepare(call, source)
            if isinstance(prepared, Applied):
                done = steps.repeat(call, source, prepared)
            else:
                done = steps.merge_events(call, source, prepared)
                self._is_new = False
            after.note_target(call, done)
            done = after.run_maintenance(call, done)
        self._report(call, done)

    def _account(self, batch_df: DataFrame, batch_id: int, intake: Intake) -> None:
        """As `_merge`, for a batch without any event of which the columns of a row are known.

        What is undecodable goes to the quarantine, once per batch; the target is neither looked at nor created.
        """
        with self._call(batch_df, batch_id, intake) as (call, _):
            steps.check_quarantine(call)
            steps.quarantine_undecodable(call)
            after.note_query(call)
        self._report(call, Done())

    @contextmanager
    def _call(self, batch_df: DataFrame, batch_id: int, intake: Intake) -> Iterator[tuple[BatchCall, DataFrame]]:
        """The call, and the batch in the sink's own session; what the block raises is counted and logged."""
        clock = PhaseClock(intake.began)
        self._failed_late = False
        expect_classic(batch_df, target=self._spec.target, batch_id=batch_id)
        who = caller(batch_df, self._spec, intake.query)
        metrics = self._metrics or default_metrics()
        metrics.prepare(who.query, self._spec.label)
        observed = self._observed(clock, query=who.query, batch_id=batch_id)
        with failures_told(
            self._spec,
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
                locks.expect_no_other(self._spec.target, location)
            part = part_of(batch_df, who, batch_id, intake.calls)
            held = claims.held(self, who.identity, self._spec, location, part=part)
            with held, ExitStack() as resources:
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
                    self._failed_late = call.attempts.landed
                    call.attempts.count_landed()
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
        spec = filters.with_fixed_time(session, self._spec)
        delivery = of_query(spec, who, batch_id, session, location=location, noted=self._noted, calls=intake.calls)
        attempts = Attempts(
            spec.retry,
            clock=clock,
            metrics=self._metrics or default_metrics(),
            query=who.query,
            target=spec.label,
            sleep=self._sleep,
        )
        marks = Marks(
            caller=who,
            batch_id=batch_id,
            target=spec.target,
            run=attempts.run,
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
            costs=self._costs,
            last_commit=self._last_commit,
            attempts=attempts,
            marks=marks,
            maintenance=self._maintenance,
            resources=resources,
            be_seen=partial(locks.enter, spec.target, f"query {who.query!r}", location),
        )

    def _report(self, call: BatchCall, done: Done) -> None:
        """Keep, count and log the result."""
        result = result_of(call, done)
        self._last_result = result
        told(result, self._metrics or default_metrics())
        target = self._spec.target
        locks.warn_of_others(target, f"query {call.caller.query!r}", self._tables.target.known_location)
        call.observed.ended(lambda: {"result": result, **self._table(call, done)})

    def _observed(self, clock: PhaseClock, *, query: str, batch_id: int) -> Observed:
        return Observed(self._observers, clock, query=query, target=self._spec.label, batch_id=batch_id)

    def _table(self, call: BatchCall, done: Done) -> dict[str, Any]:
        """Place and columns of the target behind a batch. Cost: a look at its log where the batch has added columns."""
        found = done.target
        if found is not None and done.adds_columns:
            self._tables.begin(call.session)
            found = self._tables.target.snapshot() or found
        return {} if found is None else {"location": found.location, "schema": found.schema}

    def _reading(
        self, batch_df: DataFrame, batch_id: int, began: float, passes: Callable[[Exception], bool] = lambda _: False
    ) -> AbstractContextManager[None]:
        """What a source does before a call: counted and logged as the call's where it raises what does not pass."""
        query, metrics = caller(batch_df, self._spec).query, self._metrics or default_metrics()
        metrics.prepare(query, self._spec.label)
        clock = PhaseClock(began, current="read")
        observed = self._observed(clock, query=query, batch_id=batch_id)
        return failures_told(
            self._spec, metrics, clock, query=query, batch_id=batch_id, observed=observed, passes=passes
        )

    def _wants_events_at_hand(self, batch_df: DataFrame, *, need: int) -> bool:
        """Whether an engine in the driver is likely to merge a batch that takes so many bytes there."""
        self._tables.begin(self._session.of(batch_df))
        return wants_events_at_hand(self._spec, self._tables, need=need)

    # -- for `MergeSinks` --------------------------------------------------------------------

    def _announce(self, batch_df: DataFrame, *, at_most: int) -> None:
        """Let the sink's series exist before its first event, and tell how many events a first batch can hold."""
        who = caller(batch_df, self._spec)
        (self._metrics or default_metrics()).prepare(who.query, self._spec.label)
        self._costs.expect(at_most)

    def _place_for(self, batch_df: DataFrame) -> TableRef:
        """Where the target lies or is going to, however it is spelled; its whole name where only a catalog knows."""
        self._tables.begin(self._session.of(batch_df))
        return self._tables.target.location_to_be

    def _may_hold(self, batch_df: DataFrame, batch_id: int) -> bool:
        """Whether the target may hold the batch whose call failed: its commit came first, or nobody can say."""
        return self._failed_late or set_aside.may_hold(batch_df, batch_id, self._spec, self._session, self._tables)

    def _set_aside(self, batch_df: DataFrame, batch_id: int, error: Exception) -> int:
        """Commit all events of a batch to the quarantine table instead of merging them, each once.

        Returns: how many this call has written.
        """
        spec, session = self._spec, self._session.of(batch_df)
        counts = set_aside.write(batch_df, batch_id, spec, session, error=error, sleep=self._sleep)
        query, metrics = caller(batch_df, spec).query, self._metrics or default_metrics()
        for why, count in counts.items():
            metrics.set_aside(query, spec.label, why, count)
        return sum(counts.values())

    def _is_set_aside(self, batch_df: DataFrame, batch_id: int) -> bool:
        """Whether `_set_aside` has committed this batch before: then it must not be merged any more."""
        return set_aside.is_written(batch_df, batch_id, self._spec, self._session.of(batch_df), self._sleep)
