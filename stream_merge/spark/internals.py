"""The private corners of Spark and Delta that the sink needs, kept in one place.

Everything here goes through Py4J to classes that are not public API. It was read and run on
Spark 4.2.0 with Delta 4.4.0; an upgrade starts with this file.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.logger import PySparkLogger
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql.types import DataType, DateType, DecimalType, StructType, TimestampNTZType, TimestampType
from pyspark.sql.utils import ForeachBatchFunction

from stream_merge.model.snapshot import TableSnapshot
from stream_merge.spark import environment

LAST_COMMIT_VERSION_CONF = "spark.databricks.delta.lastCommitVersionInSession"
"""Delta notes the version of each commit of a session here (OptimisticTransaction, 4.4)."""


def owned_session(session: SparkSession) -> SparkSession:
    """A copy of a session with its own confs, temporary views and functions (about 2 ms).

    `newSession` would drop confs set at run time, such as `spark.sql.caseSensitive`.
    """
    return SparkSession(session.sparkContext, session._jsparkSession.cloneSession())


def in_session(df: DataFrame, session: SparkSession) -> DataFrame:
    """The same rows, planned and run under another session's confs."""
    dataset = _java(session, "org.apache.spark.sql.classic.Dataset")
    return DataFrame(dataset.ofRows(session._jsparkSession, df._jdf.logicalPlan()), session)


def is_classic(df: object) -> bool:
    """Whether a DataFrame has a JVM behind it in this process (False for Spark Connect)."""
    return getattr(df, "_jdf", None) is not None


def same_session(one: SparkSession, other: SparkSession) -> bool:
    """Whether two Python handles stand for one JVM session."""
    return bool(one._jsparkSession.equals(other._jsparkSession))


_LONGEST_CAUSE_CHAIN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamingQueryInfo:
    """The streaming query that a batch belongs to."""

    id: str
    """Lives in the checkpoint: the same after a restart, new with a new checkpoint."""
    name: str | None
    batch_id: int | None
    """Of the batch that it runs now, where this thread knows."""
    checkpoint: str | None
    """Folder of its checkpoint, as a URI; None where the query cannot be asked any more."""


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
    return _described(running.get(_java(session, "java.util.UUID").fromString(query_id)), query_id, context)


def _described(query: Any, query_id: str, context: SparkContext) -> StreamingQueryInfo:
    batch_id = context.getLocalProperty("streaming.sql.batchId")  # MicroBatchExecution.BATCH_ID_KEY
    return StreamingQueryInfo(
        id=query_id,
        name=None if query is None else query.name(),
        batch_id=None if batch_id is None else int(batch_id),
        checkpoint=None if query is None else _checkpoint(query),
    )


def _checkpoint(query: Any) -> str:
    """As a local URI, else as Hadoop's paths are written: Spark 4.2 gives all of them as encoded URIs."""
    root = str(query.resolvedCheckpointRoot())
    return root if root.startswith("file:") else unquote(root)


def is_called_by_query() -> bool:
    """Whether the function that asks is what a query's `foreachBatch` was given, and not called by a user's own."""
    caller = sys._getframe(2).f_locals.get("self")
    return isinstance(caller, ForeachBatchFunction)


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


def is_stopping(batch_df: DataFrame) -> bool:
    """Whether the streaming query that this thread works for has been told to stop; its jobs are cancelled then."""
    session = batch_df.sparkSession
    query_id = session.sparkContext.getLocalProperty("sql.streaming.queryId")
    if query_id is None:
        return False
    running = session._jsparkSession.sharedState().activeStreamingQueries()
    query = running.get(_java(session, "java.util.UUID").fromString(query_id))
    return query is None or not query.isActive()


def was_cancelled(error: BaseException) -> bool:
    """Whether somebody cancelled the job behind an error, or interrupted its thread: then nothing is wrong with it."""
    found: BaseException | None = error
    while found is not None:
        for class_name, message in java_causes(found):
            if "Interrupted" in class_name or message.startswith("[SPARK_JOB_CANCELLED]"):
                return True
        found = found.__cause__
    return False


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
    rows = keep(df.observe(observation, *aggregates)).localCheckpoint(eager=True)
    return rows, observation.get


def exceeds_driver_results(error: BaseException) -> bool:
    """Whether Spark stopped a query because its answer is larger than `spark.driver.maxResultSize`."""
    messages = [str(error), *(message for _, message in java_causes(error))]
    return any("spark.driver.maxResultSize" in message for message in messages)


def known_bytes(df: DataFrame) -> int:
    """Size of a frame's rows as far as Spark knows it before it runs; of most sources it knows nothing: 8 EiB."""
    return int(df._jdf.queryExecution().optimizedPlan().stats().sizeInBytes())


def release(df: DataFrame) -> None:
    """Drop the blocks of a locally checkpointed frame (`RDD.unpersist` would log a warning per batch)."""
    rdd = df._jdf.logicalPlan().rdd()
    df.sparkSession.sparkContext._jsc.sc().unpersistRDD(rdd.id(), False)


def snapshot(session: SparkSession, delta_table: Any) -> TableSnapshot:
    """A freshly loaded snapshot of the table behind a `DeltaTable` handle (about 5 ms when little changed)."""
    none = _java(session, "scala.Option").empty()
    log = delta_table._jdt.deltaLog()
    loaded = log.update(False, none, none)
    metadata = loaded.metadata()
    checksum = loaded.checksumOpt()
    return TableSnapshot(
        table_id=metadata.id(),
        version=int(loaded.version()),
        location=log.dataPath().toString(),
        schema=StructType.fromJson(json.loads(metadata.schemaString())),
        partition_columns=_strings(metadata.partitionColumns()),
        properties=_string_map(metadata.configuration()),
        files=int(checksum.get().numFiles()) if checksum.isDefined() else None,
        transaction=lambda app_id: _recorded_transaction(loaded, app_id),
    )


def _recorded_transaction(loaded: Any, app_id: str) -> int | None:
    """From the version's checksum file, which Delta 4.4 writes with each commit.

    `Snapshot.transactions` runs a Spark job to rebuild the table's state.
    """
    checksum = loaded.checksumOpt()
    if checksum.isDefined() and checksum.get().setTransactions().isDefined():
        recorded = checksum.get().setTransactions().get()
        entries = (recorded.apply(i) for i in range(recorded.size()))
        return next((int(entry.version()) for entry in entries if entry.appId() == app_id), None)
    version = loaded.transactions().get(app_id)
    return int(version.get()) if version.isDefined() else None


def merge_metrics(result: DataFrame) -> dict[str, int]:
    """All SQL metrics of the MERGE whose `execute()` returned this frame, by Delta's names.

    Read from the executed command itself, so no other query can be mistaken for it. Times are
    in milliseconds. Counters come from task accumulators: retried tasks over-count.
    """
    metrics = result._jdf.queryExecution().commandExecuted().commandPhysicalPlan().metrics()
    found: dict[str, int] = {}
    entries = metrics.iterator()
    while entries.hasNext():
        entry = entries.next()
        found[entry._1()] = int(entry._2().value())
    return found


def exact_literal(session: SparkSession, value: object, dtype: DataType) -> Column:
    """A literal of exactly this type, without a detour through Python's or the session's time zone.

    Args:
        session: whose JVM makes the literal.
        value: microseconds for timestamps with and without zone, days for dates, text for decimals, else the value
            itself.
        dtype: the column's type.
    """
    java: Any = value
    if isinstance(dtype, TimestampType | TimestampNTZType):
        java = _java(session, "java.time.Instant").EPOCH.plus(
            value, _java(session, "java.time.temporal.ChronoUnit").MICROS
        )
        if isinstance(dtype, TimestampNTZType):
            java = _java(session, "java.time.LocalDateTime").ofInstant(java, _java(session, "java.time.ZoneOffset").UTC)
    elif isinstance(dtype, DateType):
        java = _java(session, "java.time.LocalDate").ofEpochDay(value)
    elif isinstance(dtype, DecimalType):
        java = _java(session, "java.math.BigDecimal")(str(value))
    return Column(_java(session, "org.apache.spark.sql.functions").lit(java)).cast(dtype)


def java_causes(error: BaseException) -> list[tuple[str, str]]:
    """(class name, message) of the Java exception behind a Python one and of its causes, outermost first."""
    java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    chain: list[tuple[str, str]] = []
    while java is not None and len(chain) < _LONGEST_CAUSE_CHAIN:
        chain.append((str(java.getClass().getName()), str(java.getMessage() or "")))
        java = java.getCause()
    return chain


def root_cause(error: BaseException) -> str:
    """What the innermost cause of an error is called and says, on one line; a cause in the JVM may say nothing."""
    class_name, message = (java_causes(error) or [(type(error).__name__, str(error))])[-1]
    return (f"{class_name}: {message}" if message else class_name).splitlines()[0]


def reason(error: BaseException) -> str:
    """What went wrong, in one line; the first line of a `Py4JJavaError` only names the call that failed."""
    from_outside = environment.said(error)
    if from_outside is not None:
        return from_outside
    if isinstance(error, Py4JJavaError):
        for class_name, message in java_causes(error):
            return environment.first_line(f"{class_name.rsplit('.', 1)[-1]}: {message}")
    return environment.first_line(str(error).strip()) or type(error).__name__


PYSPARK_ERROR_LOGGERS = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
"""PySpark 4.2 writes each error that Spark raises to stderr, as a line of JSON with its trace, caught or not."""
_errors_are_ours: ContextVar[bool] = ContextVar("stream_merge_errors_are_ours", default=False)


@contextmanager
def spark_errors_unlogged() -> Iterator[None]:
    """Keep PySpark from logging Spark's errors in this thread for a while: they become sentences, or are handled."""
    for name in PYSPARK_ERROR_LOGGERS:
        PySparkLogger.getLogger(name).addFilter(_not_ours)  # which adds the same one once
    token = _errors_are_ours.set(True)
    try:
        yield
    finally:
        _errors_are_ours.reset(token)


def _not_ours(_record: logging.LogRecord) -> bool:
    return not _errors_are_ours.get()


def _java(session: SparkSession, name: str) -> Any:
    """A class by its whole name: Py4J would ask the JVM for each package on the way, a millisecond in all."""
    return getattr(session.sparkContext._jvm, name)


def _strings(seq: Any) -> tuple[str, ...]:
    return tuple(str(seq.apply(i)) for i in range(seq.size()))


def _string_map(scala_map: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    entries = scala_map.iterator()
    while entries.hasNext():
        entry = entries.next()
        found[str(entry._1())] = str(entry._2())
    return found


@contextmanager
def jvm_signals(tell: Callable[[], None], *numbers: signal.Signals) -> Iterator[None]:
    """Have the JVM tell this process of signals, instead of ending Spark at once; nothing where no JVM runs.

    Under spark-submit the JVM is the process that people and cluster managers know; elsewhere a signal to the whole
    process group reaches it, too.

    Args:
        tell: called in a thread of its own for each signal.
        numbers: which signals.
    """
    gateway = SparkContext._gateway
    if gateway is None:
        yield
        return
    ensure_callback_server_started(gateway)  # type: ignore[no-untyped-call]
    java, handler = gateway.jvm.sun.misc.Signal, _SignalHandler(tell)
    signals = [java(number.name.removeprefix("SIG")) for number in numbers]
    before = [java.handle(one, handler) for one in signals]
    try:
        yield
    finally:
        with suppress(Py4JError):  # the JVM may have ended
            for one, theirs in zip(signals, before, strict=True):
                java.handle(one, theirs)


class _SignalHandler:
    """A `sun.misc.SignalHandler` that is Python."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def handle(self, _signal: Any) -> None:
        """What the JVM calls."""
        self._tell()

    class Java:
        """Read by Py4J."""

        implements = ("sun.misc.SignalHandler",)


def files_of(batch_df: DataFrame) -> list[str]:
    """The files that a micro-batch of a file source reads; `inputFiles` does not know them inside of `foreachBatch`.

    Spark has planned them by then: they are in the scan at the root of the batch's RDD (FileScanRDD, Spark 4.2).
    """
    found: list[str] = []
    todo = [batch_df._jdf.queryExecution().toRdd()]
    while todo:
        rdd = todo.pop()
        if rdd.getClass().getSimpleName() == "FileScanRDD":
            for part in _each(rdd.filePartitions()):
                found += [str(file.urlEncodedPath()) for file in part.files()]
        todo += [dependency.rdd() for dependency in _each(rdd.dependencies())]
    return sorted(set(found))


def _each(seq: Any) -> Iterator[Any]:
    return (seq.apply(i) for i in range(seq.size()))
