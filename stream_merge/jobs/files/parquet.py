"""Parquet files bring their own types: each must be held exactly by the schema's, or the file is not merged.

Spark looks at how a value is stored, not at what it means: it wraps an int into a tinyint, takes it for the days of a
date, and a time for a number (Spark 4.2, `ParquetVectorUpdaterFactory`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from urllib.parse import unquote

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from stream_merge.errors import ContractError
from stream_merge.model.table_ref import TableRef
from stream_merge.sources.files import parquet_columns
from stream_merge.sources.files.reader import NEW_FIELD_REMEDY
from stream_merge.sources.files.schema import Schema, outside, said
from stream_merge.spark import columns
from stream_merge.spark.hadoop_files import exactly
from stream_merge.tables import spark_table

_REMEDY = "rewrite the file with the schema's types, or pass --schema with types that hold both"


def refuse_other_types(session: SparkSession, files: Sequence[str], schema: Schema) -> list[str]:
    """Compare the files' own types with the schema's.

    Args:
        session: reads their footers.
        files: URLs.
        schema: what they are to be read with.

    Returns: columns and nested fields of the schema, by dotted names, that none of the files has.

    Raises:
        ContractError: a file has a type that the schema's does not hold, or one that Spark does not know.
    """
    paths, case_sensitive = [unquote(file) for file in files], columns.is_case_sensitive(session)
    try:
        found = _types_in(session, paths)
    except (PySparkException, Py4JJavaError):  # they differ among each other, or there is a type of another world
        found = None
    if found is not None and _problem(found, schema, case_sensitive=case_sensitive) is None:
        return columns.new_fields(schema.fields, found, case_sensitive=case_sensitive)
    lacking: set[str] | None = None
    for path in paths:
        try:
            found = _types_in(session, [path])
        except (PySparkException, Py4JJavaError) as err:
            remedy = "rename one of them" if "COLUMN_ALREADY_EXISTS" in str(err) else _REMEDY
            problem: str | None = parquet_columns.unread(session, path) or f"{said(err)}; {remedy}"
            if (refused := outside(err, path)) is not None:
                raise ContractError(refused, reasons={}) from err
        else:
            problem = _problem(found, schema, case_sensitive=case_sensitive)
            if problem is not None:
                untyped = [name for name, _ in parquet_columns.untyped(session, [path])]
                problem = _problem(found, schema, case_sensitive=case_sensitive, untyped=untyped)
            theirs = set(columns.new_fields(schema.fields, found, case_sensitive=case_sensitive))
            lacking = theirs if lacking is None else lacking & theirs
        if problem is not None:
            msg = f"[SOURCE_FILE_INVALID] {path}: {problem}"
            raise ContractError(msg, reasons={})
    return sorted(lacking or ())


def refuse_without(session: SparkSession, target: TableRef, lacking: Sequence[str], files: Sequence[str]) -> None:
    """Stop where a snapshot would set columns to NULL that it does not have, in rows that have something there.

    Args:
        session: looks at the target.
        target: of the snapshot.
        lacking: from `refuse_other_types`.
        files: of the snapshot.

    Cost: nothing unless it lacks a column; then a look for the first row with a value.

    Raises:
        ContractError: there is such a row.
    """
    if not lacking or spark_table.find(session, target) is None:
        return
    rows = spark_table.rows(session, target)
    known = {name: columns.resolve(name.split(".")[0], rows.columns, case_sensitive=False) for name in lacking}
    used = {
        name: column
        for name, column in known.items()
        if column is not None and not rows.where(columns.column(column).isNotNull()).isEmpty()
    }
    if not used:
        return
    where = f"{unquote(files[0])}" + (f" and {len(files) - 1} more files" if len(files) > 1 else "")
    msg = (
        f"[SNAPSHOT_LACKS_COLUMNS] snapshot {where} lacks column(s) {list(used)!r}, which have values in the table;"
        " write them or, to keep the table's values, pass --schema without them"
    )
    raise ContractError(msg, reasons={})


def _types_in(session: SparkSession, paths: list[str]) -> StructType:
    return session.read.option("mergeSchema", "true").parquet(*map(exactly, paths)).schema


def _problem(found: StructType, wanted: Schema, *, case_sensitive: bool, untyped: Collection[str] = ()) -> str | None:
    """What is wrong with the types of a file, and what to do."""
    for field in wanted.fields.fields:
        name = columns.resolve(field.name, found.names, case_sensitive=case_sensitive)
        if name is None or _holds(field.dataType, found[name].dataType, case_sensitive=case_sensitive):
            continue
        without = [column for column in untyped if column.split(".")[0] == name]
        if without:
            return parquet_columns.untyped_problem(without[0])
        return (
            f"column {field.name!r} is {found[name].dataType.simpleString()}, and the schema's"
            f" {field.dataType.simpleString()} cannot hold all of its values; {_REMEDY}"
        )
    more = columns.new_fields(found, wanted.fields, case_sensitive=case_sensitive) if wanted.is_inferred else []
    return f"it has column(s) {more!r} that the schema lacks; {NEW_FIELD_REMEDY}" if more else None


def _holds(wanted: DataType, theirs: DataType, *, case_sensitive: bool) -> bool:
    """Whether a type holds each value of another one; fields of structs may be missing on either side."""
    holds = partial(_holds, case_sensitive=case_sensitive)
    match wanted, theirs:
        case StructType(), StructType():
            names = ((f, columns.resolve(f.name, theirs.names, case_sensitive=case_sensitive)) for f in wanted.fields)
            return all(name is None or holds(f.dataType, theirs[name].dataType) for f, name in names)
        case ArrayType(), ArrayType():
            return holds(wanted.elementType, theirs.elementType)
        case MapType(), MapType():
            return holds(wanted.keyType, theirs.keyType) and holds(wanted.valueType, theirs.valueType)
        case _:
            return columns.refusal("", theirs, wanted) is None
