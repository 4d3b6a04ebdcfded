"""A frame evaluated once, with aggregates in the same pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.sql import Column, DataFrame, Observation

from stream_merge.spark import versions
from stream_merge.spark.confs import holding
from stream_merge.spark.jvm import each

_CONSTRAINTS_CONF = "spark.sql.constraintPropagation.enabled"
"""With it Spark infers filters from a checkpoint's plan, such as a literal column, and pushes them to Parquet, where
text that is not UTF-8, and dates and times of other calendars, are other values (Spark 4.2)."""


def materialised(
    df: DataFrame, *aggregates: Column, keep: Callable[[DataFrame], DataFrame] = lambda observed: observed
) -> tuple[DataFrame, dict[str, Any]]:
    """Evaluate a frame once, and named aggregates over it in the same pass; `keep` narrows the rows afterwards.

    The rows become a local checkpoint: a lost executor fails the batch instead of evaluating again a source that may
    answer differently. The aggregates are observed in the job's result stage, whose accumulators Spark counts once per
    partition.

    Returns: the evaluated rows, and the aggregates by name.
    Cost: one evaluation, one Spark job (adaptive execution submits each shuffle as one more).
    """
    observation = Observation()
    with holding(df.sparkSession, {_CONSTRAINTS_CONF: "false"}):
        rows = keep(df.observe(observation, *aggregates)).localCheckpoint(eager=True)
    return rows, versions.observed(observation)


def known_bytes(df: DataFrame) -> int:
    """Spark's estimate of a frame's size before it runs; 8 EiB for most sources."""
    return int(df._jdf.queryExecution().optimizedPlan().stats().sizeInBytes())


def held_bytes(df: DataFrame) -> int | None:
    """Size of the evaluated rows under a frame; None where it has other sources, or Spark has not stored all.

    The statistics of a checkpoint have the estimate of its source (4.2).
    """
    leaves = list(each(df._jdf.queryExecution().logical().collectLeaves()))
    if any(leaf.nodeName() != "LogicalRDD" for leaf in leaves):
        return None
    wanted = {leaf.rdd().id() for leaf in leaves}
    stored = [info for info in df.sparkSession.sparkContext._jsc.sc().getRDDStorageInfo() if info.id() in wanted]
    if len(stored) < len(wanted) or any(info.numCachedPartitions() < info.numPartitions() for info in stored):
        return None
    return sum(int(info.memSize()) + int(info.diskSize()) for info in stored)


def release(df: DataFrame) -> None:
    """Drop the blocks of a locally checkpointed frame (`RDD.unpersist` would log a warning per batch)."""
    rdd = df._jdf.logicalPlan().rdd()
    df.sparkSession.sparkContext._jsc.sc().unpersistRDD(rdd.id(), False)
