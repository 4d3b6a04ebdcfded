"""`MergeSink`: what a streaming query's `foreachBatch` calls for every micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame

from stream_merge.merge.calls import Calls
from stream_merge.metrics.instruments import MergeMetrics
from stream_merge.model import arguments
from stream_merge.model.observer import Observer
from stream_merge.model.results import MergeResult
from stream_merge.model.settings import (
    Create,
    Driver,
    Engine,
    Maintenance,
    MergeSpec,
    OnInvalid,
    RetryPolicy,
    SchemaEvolution,
    Tombstones,
)
from stream_merge.model.source_batch import Intake
from stream_merge.model.table_ref import TableRef
from stream_merge.shapes import Changes, Shape, checked
from stream_merge.spark.streaming import is_called_by_query


class MergeSink:
    """Merges micro-batches of change events into one Delta table.

    Pass it to `foreachBatch`, or call it. For each batch it checks the events, keeps the latest per key, refuses stale
    ones, merges in one commit, retries lost commits and accounts for every event.

    Guarantees: a batch id delivered again changes nothing; order of arrival does not matter for keys whose sequences
    differ. Thread-safe for different batches of different queries, not for one sink called twice at once.

    Args:
        target: catalog name, or a path / URI when it has a slash or a scheme.
        keys: top-level columns that together identify a row.
        sequence_by: column, columns compared left to right, or an expression; later wins. Required for changes.
        apply_as_deletes: SQL text or Column; TRUE = delete, FALSE or NULL = upsert.
        column_list: the only columns to store; excludes `except_column_list`.
        except_column_list: columns not to store.
        on_invalid: "quarantine" events that break the contract, or "fail" the batch.
        quarantine_target: where they go; None: `__stream_merge_quarantine_<table>` beside the target.
        tombstones: remember deletes, so that a late upsert cannot revive a key; `Tombstones(…)`: for how long.
        create: create a missing target from the first batch; `Create(…)`: with what layout and properties.
        change_data_feed: make sure the target's change data feed is on.
        schema_evolution: True adds new columns and nested fields of the source, "widen" also widens types.
        engine: "auto", "spark" or "driver".
        retry: attempts, time budget and backoff for lost commits.
        app_id: part of the idempotency identity; outside a streaming query all of it.
        name: label for metrics and logs; part of the identity when given.
        driver: memory of merges in the driver, and how it reaches object stores.
        maintenance: compact and vacuum the target at the end of a call; None: never.
        target_filter: SQL over the row `t`: the part of the target that has a batch's keys; else it stops.
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
        tombstones: bool | Tombstones = True,
        create: bool | Create = True,
        change_data_feed: bool = True,
        schema_evolution: SchemaEvolution = False,
        engine: Engine = "auto",
        retry: RetryPolicy | None = None,
        app_id: str | None = None,
        name: str | None = None,
        driver: Driver = Driver(),  # noqa: B008 - frozen
        maintenance: Maintenance | None = None,
        target_filter: str | None = None,
        shape: Shape | None = None,
        metrics: MergeMetrics | None = None,
        observers: Sequence[Observer] = (),
        **renamed: object,
    ) -> None:
        arguments.expect_known(renamed, target=target)
        wanted = checked(Changes() if shape is None else shape, target=target)
        remembers, deletes = arguments.on_or_with(tombstones, Tombstones())
        creates, created = arguments.on_or_with(create, Create())
        spec = MergeSpec(
            target=TableRef(target),
            keys=arguments.as_names(keys),
            sequence_by=sequence_by if isinstance(sequence_by, Column) else arguments.as_names(sequence_by),
            apply_as_deletes=apply_as_deletes,
            column_list=arguments.optional_names(column_list),
            except_column_list=arguments.optional_names(except_column_list),
            on_invalid=on_invalid,
            quarantine_target=None if quarantine_target is None else TableRef(quarantine_target),
            tombstones=remembers if remembers is not True else wanted.remembers_deletes,
            tombstone_retention_seconds=deletes.retention_seconds,
            create_target=creates,
            partition_by=arguments.as_names(created.partition_by),
            cluster_by=arguments.as_names(created.cluster_by),
            table_properties=arguments.as_own_mapping(created.properties),
            change_data_feed=arguments.to_bool(change_data_feed),
            schema_evolution=schema_evolution,
            engine=engine,
            retry=RetryPolicy() if retry is None else retry,
            app_id=app_id,
            name=name,
            single_writer=arguments.to_bool(driver.single_writer),
            storage_options=None if driver.storage_options is None else arguments.as_mapping(driver.storage_options),
            driver_memory_bytes=driver.memory_bytes,
            maintenance=maintenance,
            target_filter=target_filter,
            shape=wanted,
        )
        self._calls = Calls(spec, metrics=metrics, observers=observers)

    def __repr__(self) -> str:
        """Name the sink by its target, keys and name."""
        spec = self._calls.spec
        return f"MergeSink(target={spec.target!r}, keys={list(spec.keys)!r}, name={spec.name!r})"

    @property
    def last_result(self) -> MergeResult | None:
        """What the last call that did not raise did; None before the first one."""
        return self._calls.last_result

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        """Merge one micro-batch.

        Guarantees: idempotent for a repeated `batch_id`; on any error the target is unchanged or holds the whole batch.
        Cost: one evaluation of the source; one MERGE per attempt; one append each for quarantined events and deletes.

        Raises:
            ConfigError, ContractError: before anything is written.
            CommitConflictError, MergeFailedError: the merge did not land.
            CommitStateUnknownError: nobody can say whether the commit landed.
        """
        self._calls.merge(batch_df, batch_id, Intake(calls="every" if is_called_by_query() else "some"))
