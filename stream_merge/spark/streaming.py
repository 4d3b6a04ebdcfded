"""The streaming query that a micro-batch belongs to, the identity of its batch ids, and what its batches consist of.

Calls go through Py4J to classes that are not public API, read and run on Spark 4.2.0 with Delta 4.4.0.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.utils import ForeachBatchFunction

from stream_merge.model import names
from stream_merge.model.settings import MergeSpec
from stream_merge.spark.jvm import each, java_class

DIRECT = "direct"
"""Label of calls outside a streaming query."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """The caller of the sink."""

    query: str
    """Label: query name, else query id, else "direct"."""
    identity: str | None
    """What batch ids belong to; None writes no transaction id."""
    checkpoint: str | None = None
    """Folder of the streaming query's checkpoint, as Hadoop writes paths; None outside of one, and where it is gone."""
    batch_id: int | None = None
    """Id of the query's running batch, where this thread knows it."""
    run_id: str | None = None
    """New with each start of the query; None outside of one, and where it is gone."""

    def app_id(self, role: names.Role, *, about: str | None = None) -> str | None:
        """Application id of one commit, or None."""
        if self.identity is None:
            return None
        return names.transaction_app_id(self.identity, role, about=about)


def caller(batch_df: DataFrame, spec: MergeSpec, label: str = DIRECT) -> Caller:
    """The streaming query that delivers the batch to a sink; `label` stands for it outside of one."""
    return caller_named(batch_df, app_id=spec.app_id, name=spec.name, label=label)


def caller_named(batch_df: DataFrame, *, app_id: str | None, name: str | None, label: str = DIRECT) -> Caller:
    """The caller for anything that writes under that `app_id` and `name`."""
    query, query_id = _streaming_query(batch_df)
    identity = names.identity(query_id=query_id, app_id=app_id, name=name)
    if query_id is None:
        return Caller(query=label, identity=identity)
    batch_id = batch_df.sparkSession.sparkContext.getLocalProperty("streaming.sql.batchId")  # MicroBatchExecution
    return Caller(
        query=query_id if query is None else query.name() or query_id,
        identity=identity,
        checkpoint=None if query is None else str(query.resolvedCheckpointRoot()),
        batch_id=None if batch_id is None else int(batch_id),
        run_id=None if query is None else str(query.runId().toString()),
    )


def _streaming_query(batch_df: DataFrame) -> tuple[Any, str | None]:
    """The running query that delivers this batch, None where it is gone, and its id; no id outside of one.

    The batch's session is the clone that the query made for itself, whichever thread the sink is called on; the
    thread-local `sql.streaming.queryId` covers frames of other sessions.
    """
    session = batch_df.sparkSession
    running = session._jsparkSession.sharedState().activeStreamingQueries()
    # By index: Py4J ends a loop over a Java collection with an exception, whose conversion takes 45 ms.
    ids = running.keySet().toArray()
    for i in range(len(ids)):
        query = running.get(ids[i])
        if query is not None and query.sparkSessionForStream().equals(session._jsparkSession):
            return query, str(query.id().toString())
    query_id = session.sparkContext.getLocalProperty("sql.streaming.queryId")
    if query_id is None:
        return None, None
    return running.get(java_class(session, "java.util.UUID").fromString(query_id)), query_id


@dataclass(frozen=True, slots=True)
class Look:
    """The state of a running query."""

    run_id: str
    name: str
    """Its name, else its id."""
    is_waiting: bool
    """Whether it is between two triggers, after the first."""
    progress: str | None
    """Begin of its newest trigger with events; None: there was none."""
    trigger_seconds: float
    """Duration of that trigger."""


def look_at_queries(session: SparkSession) -> list[Look]:
    """The states of all streaming queries in a session's JVM."""
    running = session._jsparkSession.sharedState().activeStreamingQueries()
    ids = running.keySet().toArray()
    looks = []
    for query in (running.get(ids[i]) for i in range(len(ids))):
        if query is None:
            continue
        status, progress = query.status(), query.lastProgress()
        look = Look(
            run_id=str(query.runId().toString()),
            name=str(query.name() or query.id().toString()),
            is_waiting=not status.isTriggerActive() and str(status.message()).startswith("Waiting"),
            progress=None if progress is None else str(progress.timestamp()),
            trigger_seconds=0.0 if progress is None else int(progress.durationMs().get("triggerExecution")) / 1000,
        )
        looks.append(look)
    return looks


def is_called_by_query() -> bool:
    """Whether the calling function was passed to `foreachBatch` itself, and not called by a user's own."""
    caller = sys._getframe(2).f_locals.get("self")
    return isinstance(caller, ForeachBatchFunction)


def is_stopping(batch_df: DataFrame) -> bool:
    """Whether the streaming query of this thread was stopped; its jobs are cancelled then."""
    session = batch_df.sparkSession
    query_id = session.sparkContext.getLocalProperty("sql.streaming.queryId")
    if query_id is None:
        return False
    running = session._jsparkSession.sharedState().activeStreamingQueries()
    query = running.get(java_class(session, "java.util.UUID").fromString(query_id))
    return query is None or not query.isActive()


def keeps_state(batch_df: DataFrame) -> bool:
    """Whether stateful operators of its query produce the batch: reading it writes their state.

    The batch's plan stands on the RDD of the streaming plan (Spark 4.2, `ForeachBatchSink`).
    """
    leaves = each(batch_df._jdf.queryExecution().logical().collectLeaves())
    rdds = [leaf.rdd() for leaf in leaves if leaf.nodeName() == "LogicalRDD"]
    return any("StateStore" in rdd.toDebugString() for rdd in rdds)


def run_through(batch_df: DataFrame) -> None:
    """Compute all rows of a batch."""
    batch_df.write.format("noop").mode("overwrite").save()


def planned_files(batch_df: DataFrame) -> list[str]:
    """The files that a micro-batch of a file source reads; `inputFiles` has none inside of `foreachBatch`.

    Spark has planned them by then: they are in the scan at the root of the batch's RDD (FileScanRDD, Spark 4.2).
    """
    urls: list[str] = []
    todo = [batch_df._jdf.queryExecution().toRdd()]
    while todo:
        rdd = todo.pop()
        if rdd.getClass().getSimpleName() == "FileScanRDD":
            for part in each(rdd.filePartitions()):
                urls += [str(file.urlEncodedPath()) for file in part.files()]
        todo += [dependency.rdd() for dependency in each(rdd.dependencies())]
    return sorted(set(urls))
