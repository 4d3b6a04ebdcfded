"""Parquet files bring their own types: each must be held exactly by the schema's, or the file is not merged.

Spark looks at how a value is stored, not at what it means: it wraps an int into a tinyint, takes it for the days of a
date, and a time for a number (Spark 4.2, `ParquetVectorUpdaterFactory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from stream_merge.errors import ContractError
from stream_merge.sources.files.reader import NEW_FIELD_REMEDY
from stream_merge.sources.files.schema import Schema, said
from stream_merge.spark import columns
from stream_merge.spark.hadoop_files import exactly

_REMEDY = "write the file again with the schema's types, or pass --schema with types that hold both"


def refuse_other_types(session: SparkSession, files: Sequence[str], schema: Schema, *, is_whole: bool) -> None:
    """Compare the files' own types with the schema's.

    Args:
        session: reads their footers.
        files: URLs.
        schema: what they are to be read with.
        is_whole: they are a snapshot; a column that none of them has would be NULL in every row.

    Raises:
        ContractError: a file has a type that the schema's does not hold, or one that Spark does not know; or the files
            of a snapshot lack a column.
    """
    paths = [unquote(file) for file in files]
    try:
        found = _types_in(session, paths)
    except (PySparkException, Py4JJavaError):  # they differ among each other, or there is a type of another world
        found = None
    if found is not None and _problem(found, schema) is None:
        if is_whole:
            _refuse_without(columns.new_fields(schema.fields, found, case_sensitive=False), paths)
        return
    for path in paths:
        try:
            problem = _problem(_types_in(session, [path]), schema)
        except (PySparkException, Py4JJavaError) as err:
            problem = f"{said(err)}; {_REMEDY}"
        if problem is not None:
            msg = f"a file cannot be read: {path}: {problem}"
            raise ContractError(msg, reasons={})


def _refuse_without(missing: Sequence[str], paths: Sequence[str]) -> None:
    if not missing:
        return
    where = f"{paths[0]}" + (f" and {len(paths) - 1} more files" if len(paths) > 1 else "")
    msg = (
        f"a snapshot lacks column(s) {list(missing)!r} of the schema, which would be NULL in every row: {where}; write"
        " it with them or, to leave what the table has there, pass --schema without them"
    )
    raise ContractError(msg, reasons={})


def _types_in(session: SparkSession, paths: list[str]) -> StructType:
    return session.read.option("mergeSchema", "true").parquet(*map(exactly, paths)).schema


def _problem(found: StructType, wanted: Schema) -> str | None:
    """What is wrong with the types of a file, and what to do."""
    types = {f.name.lower(): f.dataType for f in found.fields}
    for field in wanted.fields.fields:
        theirs = types.get(field.name.lower())
        if theirs is not None and not _holds(field.dataType, theirs):
            return (
                f"column {field.name!r} is {theirs.simpleString()} there, and the schema's"
                f" {field.dataType.simpleString()} does not hold each of its values; {_REMEDY}"
            )
    more = columns.new_fields(found, wanted.fields, case_sensitive=False) if wanted.is_inferred else []
    return f"it has column(s) {more!r} that the schema lacks; {NEW_FIELD_REMEDY}" if more else None


def _holds(wanted: DataType, theirs: DataType) -> bool:
    """Whether a type holds each value of another one; fields of structs may be missing on either side."""
    match wanted, theirs:
        case StructType(), StructType():
            types = {f.name.lower(): f.dataType for f in theirs.fields}
            return all(_holds(f.dataType, types[f.name.lower()]) for f in wanted.fields if f.name.lower() in types)
        case ArrayType(), ArrayType():
            return _holds(wanted.elementType, theirs.elementType)
        case MapType(), MapType():
            return _holds(wanted.keyType, theirs.keyType) and _holds(wanted.valueType, theirs.valueType)
        case _:
            return columns.refusal("", theirs, wanted) is None
