"""What a Delta table is like now, and how one is created or prepared for the sink."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from delta.tables import DeltaTable, DeltaTableBuilder
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, DataType, StructField, StructType

from stream_merge.errors import ConfigError
from stream_merge.model import names
from stream_merge.model.logs import tell
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import FEED_PROPERTY, VECTORS_PROPERTY, CommitRecord, TableSnapshot, metrics_of_history
from stream_merge.model.table_ref import TableRef
from stream_merge.shapes import widening
from stream_merge.shapes.layout import Layout
from stream_merge.spark import catalog, columns, delta, places
from stream_merge.spark.confs import holding
from stream_merge.spark.errors import reason
from stream_merge.spark.hadoop_files import path_is_occupied, qualified_path, remove_begun
from stream_merge.spark.jvm import caches_nothing, pins_threads
from stream_merge.spark.versions import to_ddl
from stream_merge.tables.files.footers import inner_types

log = logging.getLogger(__name__)

_CREATE_TRIES = 10
_CREATE_PAUSE_SECONDS = 0.2
"""Another writer may create the table at the same moment: its folder shows before its table does."""
_BEING_CREATED = ("DELTA_CREATE_TABLE_WITH_NON_EMPTY_LOCATION", "DELTA_TABLE_NOT_FOUND")
_KEPT_TO = ("delta.", names.TOMBSTONES_PROPERTY)
"""Properties that are set where they differ; keys and sequence are refused there."""
_TIMESTAMP_TYPE_CONF = "spark.sql.timestampType"
"""What TIMESTAMP means in SQL text. DDL of a schema says TIMESTAMP for instants alone."""
_PREPARE_TRIES = 5
"""Another writer may prepare the table at the same moment; it is read again after each loss."""


def delta_table(session: SparkSession, target: TableRef) -> DeltaTable:
    """A fresh handle; a handle pins the schema it was built with (Delta 4.4), so build one per attempt."""
    if target.path is not None:
        return DeltaTable.forPath(session, target.plain)
    return DeltaTable.forName(session, catalog.qualified(session, target))


def newest(session: SparkSession, target: TableRef) -> Any:
    """Delta's own snapshot of a table that is there, freshly loaded."""
    if target.path is not None:
        return delta.newest(session, delta_table(session, target))
    entry = catalog.entry(session, target)
    if entry is None:
        msg = f"[TABLE_NOT_FOUND] the catalog no longer has table {target!r}; restore the table"
        raise ConfigError(msg, target=target)
    return entry.newest()


def find(session: SparkSession, target: TableRef) -> TableSnapshot | None:
    """The table's newest snapshot, or None when nothing is there; refuses what is not a Delta table."""
    if target.path is None:
        entry = catalog.entry(session, target)
        return None if entry is None else delta.snapshot(session, entry.newest())
    try:
        return delta.snapshot(session, newest(session, target))
    except AnalysisException:
        if not path_is_occupied(session, target.plain):
            return None
    except Py4JError as err:
        if catalog.is_managed(err):
            raise catalog.managed(target) from err
        raise
    try:  # another writer may have created it between the two looks
        return delta.snapshot(session, newest(session, target))
    except AnalysisException as err:
        raise ConfigError(places.no_table(target), target=target) from err


def rows(session: SparkSession, target: TableRef, *, version: int | None = None) -> DataFrame:
    """The table's rows at a version; None: at its newest, whatever a user has cached of it.

    Spark uses cached rows, however old: they lack what others, or the driver, have committed since. A version that is
    asked for by its number is another plan.
    """
    reader = session.read.format("delta")
    if version is not None:
        reader = reader.option("versionAsOf", version)
    rows_now = reader.load(target.path) if target.path is not None else reader.table(target)
    if version is not None or not (rows_now.storageLevel.useMemory or rows_now.storageLevel.useDisk):
        return rows_now
    newest = find(session, target)
    return rows_now if newest is None else rows(session, target, version=newest.version)


def refresh_cached(session: SparkSession, target: TableRef) -> None:
    """Have Spark read again what a user has cached of the table, after a commit that it has not made."""
    if caches_nothing(session):
        return
    if target.path is not None:
        session.catalog.refreshByPath(target.plain)
    else:
        session.catalog.refreshTable(target)


def location(session: SparkSession, target: TableRef) -> TableRef:
    """Location of a target, however it is spelled; the name of a catalog table that does not exist yet."""
    if target.path is not None:
        return TableRef(qualified_path(session, target.path))
    entry = catalog.entry(session, target)
    return target if entry is None else TableRef(entry.location)


def named_location(session: SparkSession, target: TableRef) -> str | None:
    """Location of a table that is named in a catalog; None of a path."""
    return None if target.path is not None else location(session, target)


def create(
    session: SparkSession,
    target: TableRef,
    fields: Sequence[StructField],
    *,
    properties: Mapping[str, str],
    partition_by: Sequence[str] = (),
    cluster_by: Sequence[str] = (),
) -> TableSnapshot:
    """Create a table in one commit, unless another writer was faster; its table is then used.

    Column mapping is switched on only where a column name needs it.
    """
    builder = DeltaTable.createIfNotExists(session).addColumns(StructType(list(fields)))
    for key, value in {**_mapping(fields), **properties}.items():
        builder = builder.property(key, value)
    if partition_by:
        builder = builder.partitionedBy(*_spelled(partition_by, fields))
    if cluster_by:
        # Unlike `partitionedBy`, this one parses its names (Delta 4.4).
        builder = builder.clusterBy(*(names.quote(name) for name in _spelled(cluster_by, fields)))
    if target.path is not None:
        return _created(session, target, builder.location(target.plain))
    with catalog.created_as(session, target) as name:
        return _created(session, target, builder.tableName(name))


_PLAIN_TYPES = frozenset(
    "binary boolean byte date decimal double float integer long short string timestamp".split()  # noqa: SIM905
)
"""Types that every Delta table may have, by PySpark's names."""


def create_plain(
    session: SparkSession, target: TableRef, fields: Sequence[StructField], *, properties: Mapping[str, str]
) -> TableSnapshot:
    """Create a table that is known to be missing: in the driver where its log is all that has to be written.

    Spark creates it in a catalog, where a column or type needs a table feature, and where confs give it properties.
    """
    is_plain = _is_plain(StructType(list(fields))) and not needs_column_mapping(fields)
    if target.path is not None and is_plain and pins_threads(session) and not delta.has_table_defaults(session):
        try:
            delta.put_first_commit(session, target.plain, fields, properties)
        except (FileExistsError, Py4JJavaError) as err:  # Spark finds out what is there, or what is wrong
            tell(log.info, "table_left_to_spark", table=target, error=reason(err))
        else:
            created = find(session, target)
            if created is not None:
                tell(log.info, "table_created", table=target)
                return created
    return create(session, target, fields, properties=properties)


def _is_plain(dtype: DataType) -> bool:
    if isinstance(dtype, StructType):
        return all(_is_plain(field.dataType) and not field.metadata for field in dtype.fields)
    if isinstance(dtype, ArrayType):
        return _is_plain(dtype.elementType)
    return dtype.typeName() in _PLAIN_TYPES


def _created(session: SparkSession, target: TableRef, builder: DeltaTableBuilder) -> TableSnapshot:
    for left in reversed(range(_CREATE_TRIES)):
        try:
            builder.execute()
        except Exception as err:
            table = find(session, target)
            if table is not None:
                return table
            if not left or not any(code in str(err) for code in _BEING_CREATED):
                msg = f"[WRITE_FAILED] table {target!r} cannot be created: {reason(err)}"
                if target.path is None and "NON_EMPTY_LOCATION" in str(err):
                    msg += "; without a metastore the catalog ends with its process: use the folder's path as target"
                raise ConfigError(msg, target=target) from err
            if left == 1 and target.path is not None:  # nobody has: whoever began is gone
                remove_begun(session, f"{target.plain}/_delta_log")
            time.sleep(_CREATE_PAUSE_SECONDS)
        else:
            tell(log.info, "table_created", table=target)
            break
    created = find(session, target)
    if created is None:
        msg = f"[TABLE_NOT_FOUND] table {target!r} was created but cannot be found; check the catalog"
        raise ConfigError(msg, target=target)
    return created


def start_over(
    session: SparkSession, target: TableRef, fields: Sequence[StructField], *, properties: Mapping[str, str], once: str
) -> None:
    """Empty a table of the sink, then give it other columns and properties: a crash in between repeats.

    Delta's CREATE OR REPLACE is a plain CREATE for a path and refuses another schema or property (4.4). Delta skips a
    transaction `once` that the table has seen already, so that a late process does not empty it again.
    """
    identifier = target.sql
    if needs_column_mapping(fields):
        session.sql(f"ALTER TABLE {identifier} SET TBLPROPERTIES ({_listed(_mapping(fields))})")
    rewrite(session.createDataFrame([], StructType(list(fields))), target, once=once)
    session.sql(f"ALTER TABLE {identifier} SET TBLPROPERTIES ({_listed(properties)})")


def rewrite(rows: DataFrame, target: TableRef, *, once: str | None = None) -> None:
    """Replace all rows of a table by these, in other types, in one commit; properties stay.

    The rows are read by the very transaction that replaces them (PrepareDeltaScan, Delta 4.4): what somebody appends
    meanwhile is either among them or makes this commit lose. `once`: id of a transaction that happens only once.
    """
    writer = rows.write.format("delta").mode("overwrite").option("overwriteSchema", "true")
    if once is not None:
        writer = writer.option("txnAppId", once).option("txnVersion", "0")
    if target.path is not None:
        writer.save(target.plain)
    else:
        writer.saveAsTable(target)


def _mapping(fields: Iterable[StructField]) -> dict[str, str]:
    return {"delta.columnMapping.mode": "name"} if needs_column_mapping(fields) else {}


def _listed(properties: Mapping[str, str]) -> str:
    return ", ".join(f"{names.sql_string(key)} = {names.sql_string(value)}" for key, value in properties.items())


def _spelled(wanted: Sequence[str], fields: Sequence[StructField]) -> list[str]:
    """The columns as the table spells them; `check_target` has resolved them all."""
    known = [f.name for f in fields]
    return [columns.resolve(name, known, case_sensitive=False) or name for name in wanted]


def needs_column_mapping(fields: Iterable[StructField]) -> bool:
    """Whether a name among these columns, nested ones included, is refused by plain Delta."""
    return any(names.needs_column_mapping(f.name) or _needs_mapping(f.dataType) for f in fields)


def _needs_mapping(dtype: DataType) -> bool:
    if isinstance(dtype, StructType):
        return needs_column_mapping(dtype.fields)
    return any(map(_needs_mapping, inner_types(dtype)))


NEW_TARGETS: Mapping[str, str] = {VECTORS_PROPERTY: "true"}
"""Properties of new targets: without deletion vectors a batch of a few rows rewrites complete files."""


def target_properties(spec: MergeSpec, layout: Layout) -> dict[str, str]:
    """Properties that the sink records in the target, and the feed it needs."""
    feed = {FEED_PROPERTY: "true"} if spec.change_data_feed else {}
    return {**feed, **recorded_properties(layout)}


def recorded_properties(layout: Layout) -> dict[str, str]:
    """Keys, sequence definition and format version, as properties."""
    return {
        names.KEYS_PROPERTY: json.dumps(list(layout.keys)),
        names.SEQUENCE_PROPERTY: layout.definition,
        names.FORMAT_PROPERTY: names.FORMAT_VERSION,
    }


def lacks_reserved(table: TableSnapshot, layout: Layout) -> bool:
    """Whether the table lacks the reserved column for the sequence."""
    return layout.sequence_columns is None and names.SEQUENCE_COLUMN not in table.schema.names


def is_prepared(table: TableSnapshot, target: TableRef, layout: Layout, properties: Mapping[str, str]) -> bool:
    """Whether `prepared` would change nothing in an existing table."""
    return not _missing(target, table, layout, properties)


def prepared(
    session: SparkSession, target: TableRef, table: TableSnapshot, layout: Layout, properties: Mapping[str, str]
) -> TableSnapshot:
    """Give an existing table the reserved column, properties and wider types that it lacks."""
    for left in reversed(range(_PREPARE_TRIES)):
        statements = _missing(target, table, layout, properties)
        if not statements:
            return table
        try:
            for statement in statements:
                with holding(session, {_TIMESTAMP_TYPE_CONF: "TIMESTAMP_LTZ"}):
                    session.sql(statement)
                tell(log.info, "table_prepared", table=target, statement=statement)
                if statement == widening.enabling(target):
                    tell(log.warning, "type_widening_enabled", table=target, cost=widening.COST)
        except Exception as err:
            if not left:
                msg = f"[WRITE_FAILED] table {target!r} cannot be prepared: {reason(err)}"
                raise ConfigError(msg, target=target) from err
        table = find(session, target) or table
    return table


def _missing(target: TableRef, table: TableSnapshot, layout: Layout, properties: Mapping[str, str]) -> list[str]:
    identifier = target.sql
    statements: list[str] = []
    # Before the property that says there is one: where it is missing later, somebody has taken it away.
    if lacks_reserved(table, layout):
        column = to_ddl(StructType([StructField(names.SEQUENCE_COLUMN, layout.sequence_type)]))
        statements.append(f"ALTER TABLE {identifier} ADD COLUMNS ({column})")
    added = [field for field in layout.beside if field.name not in table.schema.names]
    if added:
        statements.append(f"ALTER TABLE {identifier} ADD COLUMNS ({to_ddl(StructType(added))})")
    absent = {
        key: value
        for key, value in properties.items()
        if key not in table.properties or (key.startswith(_KEPT_TO) and table.properties[key] != value)
    }
    if absent:
        statements.append(f"ALTER TABLE {identifier} SET TBLPROPERTIES ({_listed(absent)})")
    pending = widening.pending(layout.type_changes, table.schema)
    return [*statements, *widening.statements(target, pending, table.properties)]


_MEANWHILE = 100
"""Commits of others during a read."""


def history(session: SparkSession, target: TableRef, newer_than: int, up_to: int) -> list[CommitRecord]:
    """The commits in a range of versions up to the table's newest, newest first; Delta counts from there (4.4)."""
    wanted = up_to - newer_than
    if wanted <= 0:
        return []
    columns = ("version", "unix_millis(timestamp) AS timestamp_ms", "userMetadata", "operationMetrics")
    rows = delta_table(session, target).history(wanted).selectExpr(*columns).collect()
    if rows and rows[0]["version"] > up_to:  # others have committed meanwhile
        wanted = rows[0]["version"] - newer_than
        rows = delta_table(session, target).history(wanted + _MEANWHILE).selectExpr(*columns).collect()
    return [
        CommitRecord(
            version=row["version"],
            timestamp_ms=row["timestamp_ms"],
            user_metadata=row["userMetadata"],
            metrics=metrics_of_history(row["operationMetrics"] or {}),
        )
        for row in rows
        if row["version"] > newer_than
    ]


def changes(session: SparkSession, target: TableRef, version: int) -> DataFrame:
    """The change feed of one version."""
    reader = (
        session.read.format("delta")
        .option("readChangeFeed", "true")
        .option("startingVersion", version)
        .option("endingVersion", version)
    )
    return reader.load(target.path) if target.path is not None else reader.table(target)
