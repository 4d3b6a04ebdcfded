"""A frame evaluated once, with aggregates in the same pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.sql import Column, DataFrame, Observation

from stream_merge.spark import versions
from stream_merge.spark.confs import holding

_CONSTRAINTS_CONF = "spark.sql.constraintPropagation.enabled"
"""With it a checkpoint keeps what its plan tells of the values, such as a column that is a literal there. Spark makes
filters of that for the rows that are joined to it and pushes them to Parquet, where text that is not UTF-8, and dates
and times of other calendars, are other values (Spark 4.2)."""


def materialised(
    df: DataFrame, *aggregates: Column, keep: Callable[[DataFrame], DataFrame] = lambda observed: observed
) -> tuple[DataFrame, dict[str, Any]]:
    """Evaluate a frame once, and aggregates over it in the same pass.

    The rows become a local checkpoint: a lost executor fails the batch instead of evaluating again
    a source that may answer differently. The aggregates are observed in the job's result stage,
    whose accumulators Spark counts once per partition.

    Args:
        df: what to evaluate.
        aggregates: named aggregates over all its rows.
        keep: narrows the rows that are kept after they were observed.

    Returns: the evaluated rows, and the aggregates by name.
    Cost: one evaluation, one Spark job (adaptive execution submits each shuffle as one more).
    """
    observation = Observation()
    with holding(df.sparkSession, {_CONSTRAINTS_CONF: "false"}):
        rows = keep(df.observe(observation, *aggregates)).localCheckpoint(eager=True)
    return rows, versions.observed(observation)


def known_bytes(df: DataFrame) -> int:
    """Size of a frame's rows as far as Spark knows it before it runs; of most sources it knows nothing: 8 EiB."""
    return int(df._jdf.queryExecution().optimizedPlan().stats().sizeInBytes())


def held_bytes(df: DataFrame) -> int | None:
    """What the evaluated rows take that a frame stands on; None where it stands on others, or Spark does not hold all.

    Of a checkpoint Spark's statistics know what its source promised, which for most sources is nothing (4.2).
    """
    leaves = df._jdf.queryExecution().logical().collectLeaves()
    found = [leaves.apply(i) for i in range(leaves.size())]
    if any(leaf.nodeName() != "LogicalRDD" for leaf in found):
        return None
    wanted = {leaf.rdd().id() for leaf in found}
    stored = [info for info in df.sparkSession.sparkContext._jsc.sc().getRDDStorageInfo() if info.id() in wanted]
    if len(stored) < len(wanted) or any(info.numCachedPartitions() < info.numPartitions() for info in stored):
        return None
    return sum(int(info.memSize()) + int(info.diskSize()) for info in stored)


def release(df: DataFrame) -> None:
    """Drop the blocks of a locally checkpointed frame (`RDD.unpersist` would log a warning per batch)."""
    rdd = df._jdf.logicalPlan().rdd()
    df.sparkSession.sparkContext._jsc.sc().unpersistRDD(rdd.id(), False)
