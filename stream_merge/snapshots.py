"""Snapshots by their versions: one after the other into a table, as AUTO CDC FROM SNAPSHOT takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from pyspark.sql import DataFrame, SparkSession

from stream_merge.errors import ConfigError
from stream_merge.model.results import MergeResult
from stream_merge.sink import MergeSink

NextVersion: TypeAlias = Callable[[int | None], tuple[DataFrame, int] | None]
"""From the latest merged version (None: none yet) to the next snapshot and its version; None: there is no more."""


def merge_versions(sink: MergeSink, spark: SparkSession, next_version: NextVersion) -> list[MergeResult]:
    """Merge snapshots in ascending order of their versions until there is no more.

    The version is the batch id of the sink's transaction id in the target, from which a later run goes on. A snapshot
    that changes nothing is not committed, so a run that ends after it asks for it once more.

    Args:
        sink: with `shape=Snapshot(…)` and an `app_id`; call it from here alone.
        spark: reads the target.
        next_version: called again and again, each time with the version that it has given before.

    Returns:
        What became of each, in their order.

    Raises:
        ConfigError: the sink cannot tell versions, or one does not ascend. Snapshots before it are merged.
        StreamMergeError: whatever the sink raises; snapshots before it are merged.
    """
    results: list[MergeResult] = []
    latest = sink._latest_snapshot(spark)
    while (found := next_version(latest)) is not None:
        snapshot, version = found
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            msg = f"next_version({latest}) gave version {version!r} for {sink._target!r}; give a whole number from 0 on"
            raise ConfigError(msg, target=sink._target)
        if latest is not None and version <= latest:
            msg = (
                f"next_version({latest}) gave version {version} for {sink._target!r}, which is not newer; give versions"
                " in ascending order, and None after the last one"
            )
            raise ConfigError(msg, target=sink._target, batch_id=version)
        sink(snapshot, version)
        if sink.last_result is not None:
            results.append(sink.last_result)
        latest = version
    return results
