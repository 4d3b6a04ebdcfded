"""Creates the target, and prepares an existing one: the properties and columns that the sink needs on it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from delta.tables import DeltaTable, DeltaTableBuilder
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession
from pyspark.sql.types import ArrayType, DataType, StructField, StructType

from stream_merge.errors import ConfigError
from stream_merge.model import names
from stream_merge.model.logs import tell
from stream_merge.model.settings import MergeSpec
from stream_merge.model.snapshot import FEED_PROPERTY, VECTORS_PROPERTY, TableSnapshot
from stream_merge.model.table_ref import TableRef
from stream_merge.shapes import widening
from stream_merge.shapes.layout import Layout
from stream_merge.spark import catalog, columns, delta
from stream_merge.spark.confs import holding
from stream_merge.spark.errors import reason
from stream_merge.spark.hadoop_files import remove_begun
from stream_merge.spark.jvm import pins_threads
from stream_merge.spark.versions import to_ddl
from stream_merge.tables import spark_table
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

_PLAIN_TYPES = frozenset(
    "binary boolean byte date decimal double float integer long short string timestamp".split()  # noqa: SIM905
)
"""Types that every Delta table may have, by PySpark's names."""

NEW_TARGETS: Mapping[str, str] = {VECTORS_PROPERTY: "true"}
"""Properties of new targets: without deletion vectors a batch of a few rows rewrites complete files."""


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
            created = spark_table.find(session, target)
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
            table = spark_table.find(session, target)
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
    created = spark_table.find(session, target)
    if created is None:
        msg = f"[TABLE_NOT_FOUND] table {target!r} was created but cannot be found; check the catalog"
        raise ConfigError(msg, target=target)
    return created


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
        table = spark_table.find(session, target) or table
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
    spark_table.rewrite(session.createDataFrame([], StructType(list(fields))), target, once=once)
    session.sql(f"ALTER TABLE {identifier} SET TBLPROPERTIES ({_listed(properties)})")
