"""One Parquet file of a table, written as Spark's Delta writes it, and its action for the log."""

from __future__ import annotations

import unicodedata
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    CharType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegralType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VarcharType,
)

from stream_merge.model import names
from stream_merge.model.snapshot import HIVE_NULL
from stream_merge.spark.versions import arrow_type
from stream_merge.tables.files.footers import inner_types
from stream_merge.tables.files.statistics import maps_columns, statistics, stored_name

CHANGE_TYPE = "_change_type"
OWN_PREFIX = "on-read-"
"""Prefix of data files of new rows: they may be compacted without being asked for."""
OTHERS_PREFIX = "part-"
"""Prefix of data files that replace other writers' files, as Spark's names have it."""
CHANGE_FOLDER = "_change_data"
_CHANGE_FIELD = StructField(CHANGE_TYPE, StringType(), nullable=False)
_MOST_ROWS = 1 << 20
_MOST_BYTES = 128 << 20
"""Of a row group, in memory: Spark's `parquet.block.size`."""

_STORED = (
    BinaryType, BooleanType, DateType, DecimalType, DoubleType, FloatType, IntegralType, StringType, TimestampNTZType,
    TimestampType,
)  # fmt: skip
_UNSTORED = (CharType, VarcharType)
"""Delta keeps them as texts whose length a writer must look at."""

_FILE_METADATA = {"org.apache.spark.version": pyspark.__version__}
"""With it Spark takes days and times as they stand (`DataSourceUtils.datetimeRebaseSpec`); without it, by its confs."""

_ESCAPED = frozenset("\"#%'*/:=?\\\x7f{[]^" + "".join(map(chr, range(1, 0x20))))
_PLAIN_IN_URL = "/;:@&=+$,-_.!~'()*"


class NullViolationError(ValueError):
    """A column that the table says is NOT NULL would get a NULL."""


def write_data_file(
    root: Path,
    rows: pa.Table,
    schema: StructType,
    *,
    partition: Mapping[str, str | None],
    properties: Mapping[str, str],
    now_ms: int,
    prefix: str = OWN_PREFIX,
) -> dict[str, Any]:
    """Write rows of one partition to a new data file; returns the body of its `add` action.

    Rows have the columns of `schema` without those of `partition`, in `arrow_type`'s types; `partition` is by names in
    files, in the order of the table's partition columns. Raises `NullViolationError`, or `ValueError` for rows of
    another schema or of a type that is not written here; nothing is written then.
    """
    partitioned = _partition_fields(schema, partition, properties)
    data = StructType([field for field in schema.fields if field not in partitioned])
    stats = statistics(_checked(rows, data, partitioned, partition), data, properties)
    name = f"{prefix}{uuid.uuid4()}.snappy.parquet"
    stored = as_stored(rows, data, properties)
    file = _written(root, "", name, stored, partition=partition, properties=properties)
    return {**file, "modificationTime": now_ms, "dataChange": True, "stats": stats}


def write_change_file(
    root: Path,
    rows: pa.Table,
    schema: StructType,
    *,
    partition: Mapping[str, str | None],
    properties: Mapping[str, str],
) -> dict[str, Any]:
    """Write changes of one partition, `_change_type` as their last column; returns the body of the `cdc` action."""
    partitioned = _partition_fields(schema, partition, properties)
    data = StructType([*(field for field in schema.fields if field not in partitioned), _CHANGE_FIELD])
    stored = as_stored(_checked(rows, data, partitioned, partition), data, properties)
    name = f"cdc-00000-{uuid.uuid4()}.c000.snappy.parquet"
    file = _written(root, CHANGE_FOLDER, name, stored, partition=partition, properties=properties)
    return {**file, "dataChange": False}


def _written(
    root: Path,
    folder: str,
    name: str,
    rows: pa.Table,
    *,
    partition: Mapping[str, str | None],
    properties: Mapping[str, str],
) -> dict[str, Any]:
    values = {column: value or None for column, value in partition.items()}
    relative = _folder(folder, values) / name
    path = root / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = {"compression": "snappy", "store_schema": False, "store_decimal_as_integer": True}
    bounded = sorted(_bounded_leaves(rows.schema))
    try:
        limit = properties.get(names.ROW_GROUP_PROPERTY, "")
        most_rows = int(limit) if limit.isdecimal() else _MOST_ROWS
        with pq.ParquetWriter(path, rows.schema, write_statistics=bounded, **settings) as writer:
            for group in _row_groups(rows, most_rows):
                writer.write_table(group, row_group_size=group.num_rows)
            writer.add_key_value_metadata(_FILE_METADATA)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return {"path": _as_url(str(relative)), "partitionValues": values, "size": path.stat().st_size}


def _row_groups(rows: pa.Table, most: int) -> Iterator[pa.Table]:
    if rows.num_rows > most:
        for first in range(0, rows.num_rows, most):
            yield from _row_groups(rows.slice(first, most), most)
    elif rows.num_rows == 1 or rows.nbytes <= _MOST_BYTES:
        yield rows
    else:
        half = rows.num_rows // 2
        yield from _row_groups(rows.slice(0, half), most)
        yield from _row_groups(rows.slice(half), most)


def _bounded_leaves(schema: pa.Schema) -> set[str]:
    """The leaves whose least and greatest values are in the footer: all but floats.

    pyarrow passes over NaN there; for Spark NaN is greatest, and it would skip the row group that has one.
    """
    leaves = [leaf for field in schema for leaf in _leaves(field.name, field.type)]
    return {path for path, _ in leaves} - {path for path, dtype in leaves if pa.types.is_floating(dtype)}


def _leaves(path: str, dtype: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    if pa.types.is_struct(dtype):
        inner = [(dtype.field(i).name, dtype.field(i).type) for i in range(dtype.num_fields)]
    elif pa.types.is_map(dtype):
        inner = [("key_value.key", dtype.key_type), ("key_value.value", dtype.item_type)]
    elif pa.types.is_list(dtype):
        inner = [("list.element", dtype.value_type)]
    else:
        yield path, dtype
        return
    for name, part in inner:
        yield from _leaves(f"{path}.{name}", part)


# -- names and types in files -------------------------------------------------------------------


class _Renamed:
    """A batch whose memory is read by another schema of the same layout; nothing is copied."""

    def __init__(self, batch: pa.RecordBatch, schema: pa.Schema) -> None:
        self._batch, self._schema = batch, schema

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        """The schema's and the memory's capsule, as Arrow's PyCapsule protocol has it."""
        return self._schema.__arrow_c_schema__(), self._batch.__arrow_c_array__()[1]


def as_stored(rows: pa.Table, schema: StructType, properties: Mapping[str, str]) -> pa.Table:
    """Rows with the names and field ids that they have in files, at every depth. Nothing is copied.

    All columns may be NULL in a file, as in Spark's (`makeOutputNullable`): NOT NULL is a matter of the log.
    """
    mapped = maps_columns(properties)
    fields = [_stored_field(field, mapped=mapped and field is not _CHANGE_FIELD) for field in schema.fields]
    stored = pa.schema(fields)
    return pa.Table.from_batches([pa.record_batch(_Renamed(b, stored)) for b in rows.to_batches()], stored)


def _stored_field(field: StructField, *, mapped: bool) -> pa.Field:
    ids = {b"PARQUET:field_id": str(field.metadata["delta.columnMapping.id"]).encode()} if mapped else None
    return pa.field(stored_name(field, mapped=mapped), _stored(field.dataType, mapped=mapped), metadata=ids)


def _stored(dtype: DataType, *, mapped: bool) -> pa.DataType:
    if isinstance(dtype, StructType):
        return pa.struct([_stored_field(field, mapped=mapped) for field in dtype.fields])
    if isinstance(dtype, ArrayType):
        return pa.list_(pa.field("element", _stored(dtype.elementType, mapped=mapped)))
    if isinstance(dtype, MapType):
        return pa.map_(_stored(dtype.keyType, mapped=mapped), _stored(dtype.valueType, mapped=mapped))
    return arrow_type(dtype)


# -- what is refused ----------------------------------------------------------------------------


def _partition_fields(
    schema: StructType, partition: Mapping[str, str | None], properties: Mapping[str, str]
) -> list[StructField]:
    mapped = maps_columns(properties)
    fields = {stored_name(field, mapped=mapped): field for field in schema.fields}
    unknown = [name for name in partition if name not in fields]
    if unknown:
        msg = f"the files of this table have no partition columns {unknown!r}; name them as the log does"
        raise ValueError(msg)
    return [fields[name] for name in partition]


def _checked(
    rows: pa.Table, data: StructType, partitioned: list[StructField], partition: Mapping[str, str | None]
) -> pa.Table:
    if not rows.num_rows:
        msg = "a file without rows is of no use; add none to the log"
        raise ValueError(msg)
    if rows.column_names != data.names:
        msg = f"rows have the columns {rows.column_names!r}, but files of this table have {data.names!r}; select those"
        raise ValueError(msg)
    for field in data.fields:
        odd = next(_unstored(field.dataType), None)
        if odd is not None:
            msg = f"column {field.name!r} has the type {odd.simpleString()}, which only Spark writes; let Spark merge"
            raise ValueError(msg)
        wanted, given = arrow_type(field.dataType), rows[field.name].type
        if not _fits(given, wanted):
            msg = f"column {field.name!r} came as {given}, but the table has {wanted}; cast it first"
            raise ValueError(msg)
    nulls = [
        path for field in data.fields for path in _nulls(rows[field.name], field.dataType, field.name, field.nullable)
    ]
    nulls += [f.name for f, value in zip(partitioned, partition.values(), strict=True) if not value and not f.nullable]
    if nulls:
        msg = f"column {nulls[0]!r} is NOT NULL in the table, but a row has NULL there; give it a value"
        raise NullViolationError(msg)
    return rows


def _unstored(dtype: DataType) -> Iterator[DataType]:
    parts = inner_types(dtype)
    if not parts and (not isinstance(dtype, _STORED) or isinstance(dtype, _UNSTORED)):
        yield dtype
    for part in parts:
        yield from _unstored(part)


def _fits(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of one type can be read as the other: the same layout, and structs' fields of the same names."""
    if given.id != wanted.id or given.num_fields != wanted.num_fields:
        return False
    if not given.num_fields:
        return bool(given == wanted)
    pairs = [(given.field(i), wanted.field(i)) for i in range(given.num_fields)]
    is_struct = pa.types.is_struct(given)
    return all((not is_struct or ours.name == theirs.name) and _fits(ours.type, theirs.type) for ours, theirs in pairs)


def _nulls(values: pa.ChunkedArray, dtype: DataType, path: str, nullable: bool) -> Iterator[str]:
    """Paths of NULLs that must not be. As for Delta, fields of a NULL struct are NULL, but not in arrays."""
    if not nullable and values.null_count:
        yield path
    if not _requires(dtype):
        return
    if isinstance(dtype, StructType):
        for field, inner in zip(dtype.fields, values.flatten(), strict=True):
            yield from _nulls(inner, field.dataType, f"{path}.{field.name}", field.nullable)
    elif isinstance(dtype, ArrayType):
        elements = pa.chunked_array([chunk.flatten() for chunk in values.chunks], values.type.value_type)
        yield from _nulls_inside(elements, dtype.elementType, f"{path}.element", dtype.containsNull)
    elif isinstance(dtype, MapType):
        keys, items = _entries(values)
        yield from _nulls_inside(keys, dtype.keyType, f"{path}.key", False)
        yield from _nulls_inside(items, dtype.valueType, f"{path}.value", dtype.valueContainsNull)


def _nulls_inside(values: pa.ChunkedArray, dtype: DataType, path: str, nullable: bool) -> Iterator[str]:
    if not nullable and values.null_count:
        yield path
    yield from _nulls(values.drop_null() if _requires(dtype) else values, dtype, path, True)


def _entries(maps: pa.ChunkedArray) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """All keys and all values; a cast to a list of structs would fail at NULLs before they can be reported."""
    keys, items = [], []
    for chunk in filter(len, maps.drop_null().chunks):
        start, count = chunk.offsets[0].as_py(), chunk.offsets[-1].as_py() - chunk.offsets[0].as_py()
        keys.append(chunk.keys.slice(start, count))
        items.append(chunk.items.slice(start, count))
    return pa.chunked_array(keys, maps.type.key_type), pa.chunked_array(items, maps.type.item_type)


def _requires(dtype: DataType) -> bool:
    """Whether a value of this type has something inside that must not be NULL; keys of maps never may."""
    if isinstance(dtype, StructType):
        return any(not field.nullable or _requires(field.dataType) for field in dtype.fields)
    if isinstance(dtype, ArrayType):
        return not dtype.containsNull or _requires(dtype.elementType)
    return isinstance(dtype, MapType)


# -- paths --------------------------------------------------------------------------------------


def _folder(base: str, values: Mapping[str, str | None]) -> PurePosixPath:
    return PurePosixPath(base, *(f"{_escaped(name)}={_escaped(value or HIVE_NULL)}" for name, value in values.items()))


def _escaped(text: str) -> str:
    """A text as a part of a folder's name (`ExternalCatalogUtils.escapePathName`)."""
    return "".join(f"%{ord(c):02X}" if c in _ESCAPED else c for c in text)


def _as_url(path: str) -> str:
    """A path as the log spells it: Java's `URI` leaves what is not ASCII, but spaces and control characters."""
    spaces = ("Zs", "Zl", "Zp", "Cc")
    plain = {c for c in path if not c.isascii() and unicodedata.category(c) not in spaces}
    return "".join(c if c in plain else quote(c, safe=_PLAIN_IN_URL) for c in path)
