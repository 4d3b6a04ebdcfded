"""Types of Parquet files: the schema's must hold each exactly, or the file is not merged.

Spark reads by physical type: it wraps an int into a tinyint, and reads it as days of a date, or a time as a number
(Spark 4.2, `ParquetVectorUpdaterFactory`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from urllib.parse import unquote

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from stream_merge.errors import ContractError
from stream_merge.sources.files.schema import NEW_FIELD_REMEDY, Schema, message, outside_problem
from stream_merge.spark import columns
from stream_merge.spark.hadoop_files import exactly, parquet_columns

_REMEDY = "rewrite the file with the schema's types, or pass --schema with types that hold both"
_UNREAD = {
    "TIMESTAMP(NANOS": 'write it with coerce_timestamps="us" (PyArrow, pandas), or read it as BIGINT with --conf'
    " spark.sql.legacy.parquet.nanosAsLong=true",
    "FLOAT16": "write it as FLOAT",
    "TIME(": "write it as a string or a number",
}
"""Parquet types that Spark 4.2 or Delta 4.4 lacks -> remedy."""
_UNTYPED = "UNKNOWN"
"""Parquet's name for Arrow's null type, of a column with only NULLs; Spark 4.2 reads it as INT."""


def refuse_other_types(session: SparkSession, files: Sequence[str], schema: Schema) -> list[str]:
    """Refuse files (URLs) with a type that the schema's does not hold, or that Spark does not know.

    Returns: dotted names of the schema's columns and nested fields that none of the files has.
    """
    paths, case_sensitive = [unquote(file) for file in files], columns.is_case_sensitive(session)
    try:
        types: StructType | None = _types_in(session, paths)
    except (PySparkException, Py4JJavaError):  # they differ from each other, or have an unknown type
        types = None
    if types is not None and _problem(types, schema, case_sensitive=case_sensitive) is None:
        return columns.new_fields(schema.fields, types, case_sensitive=case_sensitive)
    lacking: set[str] | None = None
    for path in paths:
        try:
            own = _types_in(session, [path])
        except (PySparkException, Py4JJavaError) as err:
            remedy = "rename one of them" if "COLUMN_ALREADY_EXISTS" in str(err) else _REMEDY
            problem: str | None = unread(session, path) or f"{message(err)}; {remedy}"
            if (refused := outside_problem(err, path)) is not None:
                raise ContractError(refused, reasons={}) from err
        else:
            problem = _problem(own, schema, case_sensitive=case_sensitive)
            if problem is not None:
                without = [name for name, _ in untyped(session, [path])]
                problem = _problem(own, schema, case_sensitive=case_sensitive, untyped=without)
            theirs = set(columns.new_fields(schema.fields, own, case_sensitive=case_sensitive))
            lacking = theirs if lacking is None else lacking & theirs
        if problem is not None:
            msg = f"[SOURCE_FILE_INVALID] {path}: {problem}"
            raise ContractError(msg, reasons={})
    return sorted(lacking or ())


def _types_in(session: SparkSession, paths: list[str]) -> StructType:
    return session.read.option("mergeSchema", "true").parquet(*map(exactly, paths)).schema


def _problem(types: StructType, wanted: Schema, *, case_sensitive: bool, untyped: Collection[str] = ()) -> str | None:
    """The problem with the types of a file and its remedy, or None."""
    for field in wanted.fields.fields:
        name = columns.resolve(field.name, types.names, case_sensitive=case_sensitive)
        if name is None or _holds(field.dataType, types[name].dataType, case_sensitive=case_sensitive):
            continue
        without = [column for column in untyped if column.split(".")[0] == name]
        if without:
            return untyped_problem(without[0])
        return (
            f"column {field.name!r} is {types[name].dataType.simpleString()}, and the schema's"
            f" {field.dataType.simpleString()} cannot hold all of its values; {_REMEDY}"
        )
    more = columns.new_fields(types, wanted.fields, case_sensitive=case_sensitive) if wanted.is_inferred else []
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


def unread(session: SparkSession, path: str) -> str | None:
    """The first column of a file that Spark cannot read, with the remedy; None if there is none."""
    try:
        types = parquet_columns(session, path)
    except Py4JJavaError:  # not a Parquet file, which Spark reports
        return None
    for name, written in types.items():
        for kind, remedy in _UNREAD.items():
            if kind in written:
                return f"column {name!r} is {written}, which Spark cannot read; {remedy}"
    return None


def untyped(session: SparkSession, files: Sequence[str], leaves: int = 0) -> Iterator[tuple[str, str]]:
    """Columns without a type in all of these files, each with its first file; stops when all `leaves` have one."""
    typed: set[str] = set()
    without: dict[str, str] = {}
    for file in files:
        for name, written in parquet_columns(session, file).items():
            if _UNTYPED in re.sub(r"^\S+", "", written):
                without.setdefault(name, file)
            else:
                typed.add(name)
        if leaves and len(typed) >= leaves:
            return
    yield from ((name, file) for name, file in without.items() if name not in typed)


def untyped_problem(name: str) -> str:
    """The error sentence for a column without a type."""
    return (
        f"column {name!r} has only NULLs and no type (Arrow's null type), so Spark reads it as INT; write it with a"
        " type, or pass --schema without it"
    )


def difference(session: SparkSession, files: Sequence[str]) -> str | None:
    """The first column whose types differ between these files, and why; None if there is none."""
    types: dict[str, tuple[DataType, str]] = {}
    for file in sorted(map(unquote, files)):
        problem = unread(session, file)
        if problem is not None:
            return f"{file}: {problem}"
        try:
            fields = session.read.parquet(exactly(file)).schema.fields
        except (PySparkException, Py4JJavaError):
            return None
        for field in fields:
            before, other = types.setdefault(field.name.lower(), (field.dataType, file))
            if before == field.dataType or isinstance(before, StructType | ArrayType | MapType):
                continue
            for name, where in (*untyped(session, [other]), *untyped(session, [file])):
                if name == field.name:
                    return f"{where}: {untyped_problem(name)}"
            both = f"{before.simpleString()} in {other} but {field.dataType.simpleString()} in {file}"
            return f"column {field.name!r} is {both}; write it with the same type in all files"
    return None


def leaves(dtype: DataType) -> int:
    """The number of Parquet columns that store a type."""
    match dtype:
        case StructType():
            return sum(leaves(field.dataType) for field in dtype.fields)
        case ArrayType():
            return leaves(dtype.elementType)
        case MapType():
            return leaves(dtype.keyType) + leaves(dtype.valueType)
        case _:
            return 1
