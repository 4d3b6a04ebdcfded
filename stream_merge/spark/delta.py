"""Delta's JVM: a table's snapshot, log and lock, and the metrics of a merge.

Calls go through Py4J to classes that are not public API, read and run on Spark 4.2.0 with Delta 4.4.0.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from uuid import uuid4

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructField, StructType

from stream_merge.model.locations import local_path
from stream_merge.model.snapshot import TableSnapshot
from stream_merge.spark.hadoop_files import make_folder, write_text
from stream_merge.spark.jvm import active, each, entries, java_class, strings

LAST_COMMIT_VERSION_CONF = "spark.databricks.delta.lastCommitVersionInSession"
"""The version of a session's last commit (OptimisticTransaction, 4.4)."""


def newest(session: SparkSession, delta_table: Any) -> Any:
    """Delta's own snapshot of the table behind a `DeltaTable` handle for a path, freshly loaded.

    For a table in a catalog use `Entry.newest`: where the catalog commits, the log is not complete.
    """
    none = java_class(session, "scala.Option").empty()
    return delta_table._jdt.deltaLog().update(False, none, none)


def snapshot(session: SparkSession, loaded: Any) -> TableSnapshot:
    """The snapshot from Delta's own, freshly loaded one (about 5 ms when little changed)."""
    metadata = loaded.metadata()
    checksum = loaded.checksumOpt()
    return TableSnapshot(
        table_id=metadata.id(),
        version=int(loaded.version()),
        location=loaded.deltaLog().dataPath().toString(),
        schema=StructType.fromJson(json.loads(metadata.schemaString())),
        partition_columns=strings(metadata.partitionColumns()),
        properties={str(name): str(value) for name, value in entries(metadata.configuration())},
        files=int(checksum.get().numFiles()) if checksum.isDefined() else None,
        transaction=lambda app_id: _recorded_transaction(session, loaded, app_id),
    )


def _recorded_transaction(session: SparkSession, loaded: Any, app_id: str) -> int | None:
    """The transaction from the version's checksum file, which Delta 4.4 writes with each commit.

    `Snapshot.transactions` runs a Spark job to rebuild the table's state.
    """
    checksum = loaded.checksumOpt()
    if checksum.isDefined() and checksum.get().setTransactions().isDefined():
        recorded = each(checksum.get().setTransactions().get())
        return next((int(entry.version()) for entry in recorded if entry.appId() == app_id), None)
    with active(session):
        version = loaded.transactions().get(app_id)
    return int(version.get()) if version.isDefined() else None


def _delta_log(session: SparkSession, location: str) -> Any:
    """Delta's `DeltaLog` of a location."""
    path = java_class(session, "org.apache.hadoop.fs.Path")(location)
    return java_class(session, "org.apache.spark.sql.delta.DeltaLog").forTable(session._jsparkSession, path)


@contextmanager
def commit_lock(session: SparkSession, location: str) -> Iterator[None]:
    """Hold the lock of Spark's commits to a table in this process.

    Delta 4.4 takes it where its log store makes partial writes visible, as on a local disk
    (`OptimisticTransactionImpl.lockCommitIfEnabled`). Py4J runs each Python thread on a JVM thread of its own
    (PySpark's pinned mode, the default), so the lock belongs to this one.
    """
    lock = _delta_log(session, location).snapshotLock()
    lock.lock()
    try:
        yield
    finally:
        lock.unlock()


def put_commit(session: SparkSession, location: str, version: int, text: str) -> None:
    """Put a commit into a table's log by the log store of Spark's own commits.

    Delta chooses it by the location's scheme (`DelegatingLogStore`, 4.4); it may exclude other processes or not.

    Raises:
        FileExistsError: the version exists.
        py4j.protocol.Py4JJavaError: otherwise; whether the commit is there is unknown.
    """
    store = java_class(session, "org.apache.spark.sql.delta.storage.LogStore$").__getattr__("MODULE$")
    lines = java_class(session, "scala.collection.Iterator$").__getattr__("MODULE$").single(text.removesuffix("\n"))
    path = java_class(session, "org.apache.hadoop.fs.Path")(f"{location}/_delta_log/{version:020d}.json")
    hadoop = session._jsparkSession.sessionState().newHadoopConf()
    try:
        store.apply(session._jsparkSession).write(path, lines, False, hadoop)
    except Py4JJavaError as err:
        if err.java_exception.getClass().getSimpleName() == "FileAlreadyExistsException":
            raise FileExistsError(str(path.toString())) from err
        raise


def write_checkpoint(session: SparkSession, location: str) -> None:
    """Write a checkpoint of a table's newest version, and clean up its log, as Spark does after its commits."""
    log, none = _delta_log(session, location), java_class(session, "scala.Option").empty()
    log.update(False, none, none)
    log.checkpoint()


def merge_metrics(result: DataFrame) -> dict[str, int]:
    """All SQL metrics of the MERGE whose `execute()` returned this frame, by Delta's names; times in milliseconds.

    Read from the executed command itself. Counters come from task accumulators: retried tasks over-count.
    """
    metrics = result._jdf.queryExecution().commandExecuted().commandPhysicalPlan().metrics()
    return {str(name): int(metric.value()) for name, metric in entries(metrics)}


_DEFAULTS_CONF = "spark.databricks.delta.properties.defaults."


def has_table_defaults(session: SparkSession) -> bool:
    """Whether confs define properties that Delta gives a new table (4.4)."""
    return _DEFAULTS_CONF in str(session._jsparkSession.sessionState().conf().settings().keySet().toString())


def put_first_commit(
    session: SparkSession, location: str, fields: Sequence[StructField], properties: Mapping[str, str]
) -> None:
    """Create a table without table features: its first commit as Delta 4.4 writes it, and the checksum of that version.

    Without the checksum Delta runs a job to count files and transaction ids. Raises the errors of `put_commit`.
    """
    now = int(time.time() * 1000)
    metadata = {
        "id": str(uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": StructType(list(fields)).json(),
        "partitionColumns": [],
        "configuration": dict(properties),
        "createdTime": now,
    }
    protocol = {"minReaderVersion": 1, "minWriterVersion": 2}
    info = {
        "timestamp": now,
        "operation": "CREATE TABLE",
        "operationParameters": {"partitionBy": "[]", "properties": json.dumps(dict(properties))},
        "isolationLevel": "Serializable",
        "isBlindAppend": True,
        "operationMetrics": {},
        "engineInfo": "stream_merge",
    }
    actions = ({"commitInfo": info}, {"metaData": metadata}, {"protocol": protocol})
    make_folder(session, f"{location}/_delta_log")
    with nullcontext() if local_path(location) is None else commit_lock(session, location):
        put_commit(session, location, 0, "".join(f"{json.dumps(action)}\n" for action in actions))
    counts = {"tableSizeBytes": 0, "numFiles": 0, "numMetadata": 1, "numProtocol": 1}
    lists: Mapping[str, Any] = {"setTransactions": [], "domainMetadata": [], "allFiles": []}
    checksum = json.dumps({**counts, **lists, "metadata": metadata, "protocol": protocol})
    write_text(session, f"{location}/_delta_log/{0:020d}.crc", checksum)


@contextmanager
def silent(session: SparkSession) -> Iterator[None]:
    """Drop what the block's thread prints: VACUUM prints its counts (`DatabricksLogging.logConsole`, 4.4).

    `setOutDirect` is `private[scala]`, which the JVM does not enforce; it concerns the calling thread alone.
    """
    console = java_class(session, "scala.Console$").__getattr__("MODULE$")
    before = console.out()
    nowhere = java_class(session, "java.io.OutputStream").nullOutputStream()
    console.setOutDirect(java_class(session, "java.io.PrintStream")(nowhere))
    try:
        yield
    finally:
        console.setOutDirect(before)
