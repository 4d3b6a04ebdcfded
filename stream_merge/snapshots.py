"""`merge_versions`: snapshots by their versions, one after the other into a table, as in AUTO CDC FROM SNAPSHOT."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from pyspark.sql import DataFrame, SparkSession

from stream_merge.errors import ConfigError
from stream_merge.model.results import MergeResult
from stream_merge.sink import MergeSink
from stream_merge.spark.streaming import DIRECT, Caller
from stream_merge.tables import spark_table

NextVersion: TypeAlias = Callable[[int | None], tuple[DataFrame, int] | None]
"""From the latest merged version (None: none) to the next snapshot and its version; None: there is no more."""


def merge_versions(sink: MergeSink, spark: SparkSession, next_version: NextVersion) -> list[MergeResult]:
    """Merge snapshots in ascending order of their versions until there is no more.

    The version is the batch id of the sink's transaction id in the target, from which a later run goes on. A snapshot
    that changes nothing is not committed, so a run that ends after it asks for it once more.

    Args:
        sink: with `shape=Snapshot(…)` and an `app_id`; call it from here alone.
        spark: reads the target.
        next_version: called repeatedly, each time with the version that it returned before.

    Returns:
        The result of each, in their order.

    Raises:
        ConfigError: the sink has no full copies or `app_id`, or one does not ascend. Snapshots before it are merged.
        StreamMergeError: whatever the sink raises; snapshots before it are merged.
    """
    results: list[MergeResult] = []
    target = sink._calls.spec.target
    latest = _latest(sink, spark)
    while (following := next_version(latest)) is not None:
        snapshot, version = following
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            msg = (
                f"[INVALID_SETTING] next_version({latest}) returned version {version!r} for {target!r}; return a whole"
                " number, 0 or more"
            )
            raise ConfigError(msg, target=target)
        if latest is not None and version <= latest:
            msg = (
                f"[FULL_COPY_OUT_OF_ORDER] next_version({latest}) returned version {version} for {target!r}, which is"
                " not newer; return versions in ascending order, then None"
            )
            raise ConfigError(msg, target=target, batch_id=version)
        sink(snapshot, version)
        if sink.last_result is not None:
            results.append(sink.last_result)
        latest = version
    return results


def _latest(sink: MergeSink, spark: SparkSession) -> int | None:
    """The version of the last snapshot that the target has; None where there is none."""
    spec = sink._calls.spec
    problems = []
    if not spec.is_whole:
        problems.append("[MISSING_SETTING] merge_versions needs a sink with shape=Snapshot(…)")
    if spec.app_id is None:
        problems.append("[MISSING_SETTING] merge_versions needs a sink with app_id=, to find the versions it merged")
    if problems:
        raise ConfigError(problems, target=spec.target)
    table = spark_table.find(spark, spec.target)
    app_id = Caller(query=DIRECT, identity=spec.app_id).app_id("target")
    return None if table is None or app_id is None else table.transaction(app_id)
