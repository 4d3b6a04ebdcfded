"""The streaming query that a micro-batch belongs to, and what its batches are made of.

Everything here goes through Py4J to classes that are not public API, read and run on Spark 4.2.0 with Delta 4.4.0.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.utils import ForeachBatchFunction

from stream_merge.spark.jvm import each, java_class


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamingQueryInfo:
    """The streaming query that a batch belongs to."""

    id: str
    """Lives in the checkpoint: the same after a restart, new with a new checkpoint."""
    name: str | None
    batch_id: int | None
    """Of the batch that it runs now, where this thread knows."""
    checkpoint: str | None
    """Folder of its checkpoint, as Hadoop writes paths; None where the query cannot be asked any more."""
    run_id: str | None = None
    """New with each start; None where the query cannot be asked any more."""


def streaming_query(batch_df: DataFrame) -> StreamingQueryInfo | None:
    """The running query that delivers this batch, or None outside a streaming query.

    The batch's session is the clone that the query made for itself, whichever thread the sink
    is called on; the thread-local `sql.streaming.queryId` covers frames of other sessions.
    """
    session = batch_df.sparkSession
    context = session.sparkContext
    running = session._jsparkSession.sharedState().activeStreamingQueries()
    # By index: Py4J ends a loop over a Java collection with an exception, whose conversion takes 45 ms.
    ids = running.keySet().toArray()
    for i in range(len(ids)):
        query = running.get(ids[i])
        if query is not None and query.sparkSessionForStream().equals(session._jsparkSession):
            return _described(query, query.id().toString(), context)
    query_id = context.getLocalProperty("sql.streaming.queryId")
    if query_id is None:
        return None
    return _described(running.get(java_class(session, "java.util.UUID").fromString(query_id)), query_id, context)


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a running query."""

    run_id: str
    name: str
    """As it was started, else its id."""
    is_waiting: bool
    """Between two triggers, after the first."""
    progress: str | None
    """When its newest trigger with events began; None: there was none."""
    trigger_seconds: float
    """What that took."""


def look_at_queries(session: SparkSession) -> list[Look]:
    """All streaming queries that run in a session's JVM."""
    running = session._jsparkSession.sharedState().activeStreamingQueries()
    ids = running.keySet().toArray()
    found = (running.get(ids[i]) for i in range(len(ids)))
    return [_look(query) for query in found if query is not None]


def _look(query: Any) -> Look:
    status, progress = query.status(), query.lastProgress()
    is_waiting = not status.isTriggerActive() and str(status.message()).startswith("Waiting")
    return Look(
        run_id=str(query.runId().toString()),
        name=str(query.name() or query.id().toString()),
        is_waiting=is_waiting,
        progress=None if progress is None else str(progress.timestamp()),
        trigger_seconds=0.0 if progress is None else int(progress.durationMs().get("triggerExecution")) / 1000,
    )


def _described(query: Any, query_id: str, context: SparkContext) -> StreamingQueryInfo:
    batch_id = context.getLocalProperty("streaming.sql.batchId")  # MicroBatchExecution.BATCH_ID_KEY
    return StreamingQueryInfo(
        id=query_id,
        name=None if query is None else query.name(),
        batch_id=None if batch_id is None else int(batch_id),
        checkpoint=None if query is None else _checkpoint(query),
        run_id=None if query is None else str(query.runId().toString()),
    )


def _checkpoint(query: Any) -> str:
    """As Hadoop writes its paths: no character stands for another one (Spark 3.5 to 4.2)."""
    return str(query.resolvedCheckpointRoot())


def is_called_by_query() -> bool:
    """Whether the function that asks is what a query's `foreachBatch` was given, and not called by a user's own."""
    caller = sys._getframe(2).f_locals.get("self")
    return isinstance(caller, ForeachBatchFunction)


def is_stopping(batch_df: DataFrame) -> bool:
    """Whether the streaming query that this thread works for has been told to stop; its jobs are cancelled then."""
    session = batch_df.sparkSession
    query_id = session.sparkContext.getLocalProperty("sql.streaming.queryId")
    if query_id is None:
        return False
    running = session._jsparkSession.sharedState().activeStreamingQueries()
    query = running.get(java_class(session, "java.util.UUID").fromString(query_id))
    return query is None or not query.isActive()


def keeps_state(batch_df: DataFrame) -> bool:
    """Whether the batch comes out of stateful operators of its streaming query: reading it writes their state.

    The batch's plan stands on the RDD of the streaming plan (Spark 4.2, `ForeachBatchSink`).
    """
    leaves = batch_df._jdf.queryExecution().logical().collectLeaves()
    rdds = [leaf.rdd() for leaf in map(leaves.apply, range(leaves.size())) if leaf.nodeName() == "LogicalRDD"]
    return any("StateStore" in rdd.toDebugString() for rdd in rdds)


def run_through(batch_df: DataFrame) -> None:
    """Compute all rows of a batch, and keep none."""
    batch_df.write.format("noop").mode("overwrite").save()


def files_of(batch_df: DataFrame) -> list[str]:
    """The files that a micro-batch of a file source reads; `inputFiles` does not know them inside of `foreachBatch`.

    Spark has planned them by then: they are in the scan at the root of the batch's RDD (FileScanRDD, Spark 4.2).
    """
    found: list[str] = []
    todo = [batch_df._jdf.queryExecution().toRdd()]
    while todo:
        rdd = todo.pop()
        if rdd.getClass().getSimpleName() == "FileScanRDD":
            for part in each(rdd.filePartitions()):
                found += [str(file.urlEncodedPath()) for file in part.files()]
        todo += [dependency.rdd() for dependency in each(rdd.dependencies())]
    return sorted(set(found))
