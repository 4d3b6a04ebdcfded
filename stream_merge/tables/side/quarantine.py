"""The quarantine: one table with fixed columns for events that break the contract, whatever the source."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, LongType, StringType, StructField, StructType, TimestampType

from stream_merge.errors import ConfigError, MergeFailedError
from stream_merge.model import names, source_batch
from stream_merge.model.logs import tell
from stream_merge.model.results import UNDECODABLE
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import TableSnapshot, is_applied, is_other
from stream_merge.model.table_ref import TableRef
from stream_merge.shapes import contract
from stream_merge.shapes.arrow_order import is_legible
from stream_merge.shapes.batch import Batch
from stream_merge.spark import columns
from stream_merge.spark.errors import reason
from stream_merge.spark.streaming import Caller
from stream_merge.spark.versions import arrow_type
from stream_merge.tables import create_table, spark_table
from stream_merge.tables.files.eligibility import table_obstacle
from stream_merge.tables.side.side_table import DriverSideTable, SideCommit, SparkSideTable
from stream_merge.tables.table import Tables

log = logging.getLogger(__name__)

SCHEMA = StructType(
    [
        StructField("reasons", ArrayType(StringType())),
        StructField("query", StringType()),
        StructField("batch_id", LongType()),
        StructField("recorded_at", TimestampType()),
        StructField("event", StringType()),
        *source_batch.ORIGIN_TYPE.fields,
        StructField("error", StringType()),
        StructField("replayed_at", TimestampType()),
    ]
)
"""NULL where not applicable; the same since the first version."""
PLACE = ("topic", "partition", "offset", "timestamp")
"""Position of a record; `partition` is NULL in a file, `offset` where nobody knows."""
PROPERTIES = {names.ROW_GROUP_PROPERTY: "100"}
"""Properties of a new quarantine.

Spark reads as many rows at once as a row group has, up to 4,096, and holds each column of them in one array (Spark 4.1,
`VectorizedParquetRecordReader`): records of megabytes would need gigabytes to be read.
"""


def check(session: SparkSession, table: TableRef) -> None:
    """Refuse a table in the quarantine's place that cannot take its rows; writes nothing."""
    snapshot = spark_table.find(session, table)
    if snapshot is None:
        return
    types = {f.name: f.dataType for f in snapshot.schema.fields}
    missing = [f.name for f in SCHEMA.fields if types.get(f.name) != f.dataType]
    if missing:
        msg = (
            f"[SIDE_TABLE_NAME_TAKEN] quarantine_target {table!r} lacks column(s) {missing!r} of a quarantine; use"
            " another name, under which the sink creates the table"
        )
        raise ConfigError(msg, target=table)


def write(
    batch: Batch,
    spec: MergeSpec,
    tables: Tables,
    session: SparkSession,
    *,
    query: str,
    now_micros: int,
    commit: SideCommit,
) -> None:
    """Append the invalid events of a batch, once per batch; in the driver where it has them.

    The driver writes only what belongs to this sink alone: a table that was named may be shared with another sink,
    whose commit by Spark at the same moment a local disk would not keep apart from ours. It writes only under a
    transaction id; of a batch that is here already Spark reads what is missing.
    """
    table, invalid = spec.quarantine_table, batch.rows.invalid_at_hand()
    if invalid is not None and commit.app_id is not None and spec.quarantine_target is None and is_legible(invalid):
        side = DriverSideTable(table, tables.quarantine.driver, tables.quarantine.cached_driver)
        try:
            if _is_for_driver(side, spec, session, commit):
                side.append_once(_stored_arrow(invalid, query, commit.batch_id, now_micros), commit)
                return
        except MergeFailedError as err:
            tell(log.warning, "quarantine_left_to_spark", target=spec.label, error=reason(err))
    error, recorded_at = columns.column(names.CORRUPT_COLUMN), F.timestamp_micros(F.lit(now_micros))
    rows = _stored(batch.rows.invalid(), error=error, query=query, recorded_at=recorded_at, commit=commit)
    _append_missing(rows, table, commit)


def _is_for_driver(side: DriverSideTable, spec: MergeSpec, session: SparkSession, commit: SideCommit) -> bool:
    """Whether the driver may append the batch; a missing table is created, unless Spark is to write alone."""
    if side.table() is None and spec.engine != "spark":
        _created(session, side.name)
    handle = side.table()
    if handle is None:
        return False
    snapshot = handle.snapshot()
    if is_applied(snapshot.transaction, commit.app_id, commit.batch_id):
        return False
    stored, wanted = ([(f.name, f.dataType) for f in schema.fields] for schema in (snapshot.schema, SCHEMA))
    return stored == wanted and table_obstacle(handle, snapshot, "the quarantine") is None


def _created(session: SparkSession, table: TableRef) -> TableSnapshot:
    snapshot = spark_table.find(session, table)
    return snapshot or create_table.create_plain(session, table, SCHEMA.fields, properties=PROPERTIES)


def undecodable_id(caller: Caller, target: TableRef) -> str | None:
    """Application id of the commit of undecodable records; by the target's name, since it may not exist yet."""
    return caller.app_id("quarantine-undecodable", about=target.plain)


def write_undecodable(rows: DataFrame, table: TableRef, *, commit: SideCommit) -> None:
    """Append records that never became events, in columns of `SCHEMA`, once per batch."""
    named = (columns.column(f.name).cast(f.dataType).alias(f.name) for f in SCHEMA.fields)
    _append_missing(rows.select(*named), table, commit)


def records(session: SparkSession, table: TableRef, *, replayed_at: Column | None = None) -> DataFrame | None:
    """Quarantined records of topics with their bytes, by when they were replayed; None where there is no table."""
    has_bytes = F.col("raw_key").isNotNull() | F.col("raw_value").isNotNull()
    is_record = F.col("topic").isNotNull() & F.col("offset").isNotNull() & has_bytes
    return _rows_where(session, table, is_record, replayed_at)


def records_of_files(session: SparkSession, table: TableRef, *, replayed_at: Column | None = None) -> DataFrame | None:
    """Quarantined lines of files, by when they were replayed: `topic` is the file, and `partition` NULL."""
    is_record = F.col("topic").isNotNull() & F.col("partition").isNull() & F.col("raw_value").isNotNull()
    return _rows_where(session, table, is_record, replayed_at)


def _rows_where(session: SparkSession, table: TableRef, wanted: Column, at: Column | None) -> DataFrame | None:
    if spark_table.find(session, table) is None:
        return None
    is_replayed = F.col("replayed_at").isNull() if at is None else F.col("replayed_at") == at
    return spark_table.rows(session, table).where(wanted & is_replayed)


def write_whole(
    events: DataFrame, table: TableRef, *, reason: str, error: str, query: str, commit: SideCommit
) -> Mapping[str, int]:
    """Append all events of a batch, valid or not, or those missing if it was the last one written; numbers by reason.

    A record that could not be decoded is there for that reason. A batch older than the last one written, or another one
    under its id (of a checkpoint restored from an older copy), is appended without a transaction id: under one, Delta
    would drop it as repeated. Such a batch is not recognised when it comes again.

    Cost: two Spark jobs over the batch, one append.
    """
    session = events.sparkSession
    if not is_written(session, table, commit):
        snapshot = spark_table.find(session, table)
        if snapshot is not None and is_applied(snapshot.transaction, commit.app_id, commit.batch_id):
            commit = replace(commit, app_id=None)
    corrupt = contract.corrupt_because(events.columns)
    described = events.select(
        F.array(F.when(corrupt.isNull(), F.lit(reason)).otherwise(F.lit(UNDECODABLE))).alias(names.REASONS_COLUMN),
        F.when(corrupt.isNull(), contract.event_text(events.columns)).alias(names.EVENT_COLUMN),
        corrupt.alias(names.CORRUPT_COLUMN),
        contract.origin(events.columns).alias(names.ORIGIN_COLUMN),
    )
    why = F.coalesce(columns.column(names.CORRUPT_COLUMN), F.lit(error))
    rows = _stored(described, error=why, query=query, recorded_at=F.current_timestamp(), commit=commit)
    missing = _missing(rows, table, commit)
    if missing is None:
        return {}
    # Before the append: behind it a job that fails would leave rows uncounted that no replay finds missing.
    counts = {row[0]: row[1] for row in missing[0].groupBy(F.col("reasons")[0]).count().collect()}
    SparkSideTable(session, table).append_once(*missing)
    return counts


def is_written(session: SparkSession, table: TableRef, commit: SideCommit) -> bool:
    """Whether this batch is the last one that was written under that application id."""
    snapshot = None if commit.app_id is None else spark_table.find(session, table)
    if snapshot is None or commit.app_id is None or snapshot.transaction(commit.app_id) != commit.batch_id:
        return False
    then = commit.recorded_fingerprint(snapshot.version, partial(spark_table.history, session, table))
    return not is_other(commit.fingerprint, then)


def _stored(rows: DataFrame, *, error: Column, query: str, recorded_at: Column, commit: SideCommit) -> DataFrame:
    """Rows of the quarantine, in Spark."""
    origin = columns.column(names.ORIGIN_COLUMN)
    known: dict[str, Column] = {field.name: origin[field.name] for field in source_batch.ORIGIN_TYPE.fields}
    known |= {
        "reasons": columns.column(names.REASONS_COLUMN),
        "query": F.lit(query),
        "batch_id": F.lit(commit.batch_id),
        "recorded_at": recorded_at,
        "event": columns.column(names.EVENT_COLUMN),
        "error": error,
    }
    return rows.select(*(known.get(f.name, F.lit(None)).cast(f.dataType).alias(f.name) for f in SCHEMA.fields))


def _stored_arrow(invalid: pa.Table, query: str, batch_id: int, now_micros: int) -> pa.Table:
    """Rows of the quarantine, in the driver."""
    count = invalid.num_rows
    origin = invalid[names.ORIGIN_COLUMN]
    known = {name: pc.struct_field(origin, name) for name in source_batch.ORIGIN_TYPE.names}
    known |= {
        "reasons": invalid[names.REASONS_COLUMN],
        "query": pa.array([query] * count),
        "batch_id": pa.array([batch_id] * count),
        "recorded_at": pa.array([now_micros] * count, pa.timestamp("us", tz="UTC")),
        "event": invalid[names.EVENT_COLUMN],
        "error": invalid[names.CORRUPT_COLUMN],
    }
    schema = pa.schema([(f.name, arrow_type(f.dataType)) for f in SCHEMA.fields])
    filled = [known.get(field.name, pa.nulls(count, field.type)).cast(field.type) for field in schema]
    return pa.table(filled, schema=schema)


def _append_missing(rows: DataFrame, table: TableRef, commit: SideCommit) -> None:
    missing = _missing(rows, table, commit)
    if missing is not None:
        SparkSideTable(rows.sparkSession, table).append_once(*missing)


def _missing(rows: DataFrame, table: TableRef, commit: SideCommit) -> tuple[DataFrame, SideCommit] | None:
    """The rows of a batch that the table lacks, and how to append them; None where it has all. Creates a missing table.

    A batch that could not be merged comes again, by a stream or settings that have been repaired since. Rows of another
    query under the same id do not count.
    """
    session = rows.sparkSession
    snapshot = _created(session, table)
    if not is_applied(snapshot.transaction, commit.app_id, commit.batch_id):
        return rows, commit
    commit.expect_own(snapshot, partial(spark_table.history, session, table))
    stored = spark_table.rows(session, table).where(F.col("batch_id") == commit.batch_id)
    beyond = _beyond(rows, stored).localCheckpoint(eager=True)
    return None if beyond.isEmpty() else (beyond, replace(commit, app_id=None, judge=None))


def _beyond(rows: DataFrame, stored: DataFrame) -> DataFrame:
    """Rows that are not stored.

    A record of a topic is identified by its position and time. A file may have been moved together with its checkpoint:
    its records are identified by the file's name, their position and content. Anything else, and what has no position
    as it is stored (of files, by older versions), is identified by its content.
    """

    def said(alias: str) -> list[Column]:
        event, raw_value = F.col(f"{alias}.event"), F.col(f"{alias}.raw_value")
        return [event, F.when(event.isNull(), raw_value)]

    def place(alias: str) -> Column:
        topic, partition, offset, timestamp = (F.col(f"{alias}.{name}") for name in PLACE)
        is_of_topic = partition.isNotNull()
        name = F.when(is_of_topic, topic).otherwise(F.element_at(F.split(topic, "/"), -1))
        at = F.when(is_of_topic, timestamp)
        query = F.col(f"{alias}.query")
        return F.struct(query, name, partition, offset, at, *(F.when(~is_of_topic, one) for one in said(alias)))

    def content(alias: str) -> Column:
        return F.struct(F.col(f"{alias}.query"), F.col(f"{alias}.reasons"), *said(alias))

    has_place = F.col("offset").isNotNull()
    placed, others = stored.where(has_place).alias("s"), stored.where(~has_place).alias("s")
    left = rows.alias("r").join(placed, place("r").eqNullSafe(place("s")), "left_anti")
    return left.alias("r").join(others, content("r").eqNullSafe(content("s")), "left_anti")
