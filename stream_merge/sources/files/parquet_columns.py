"""Names Parquet columns that Spark cannot read, or reads as another type, with the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from urllib.parse import unquote

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from stream_merge.spark import parquet_footers
from stream_merge.spark.hadoop_files import exactly

_UNREAD = {
    "TIMESTAMP(NANOS": 'write it with coerce_timestamps="us" (PyArrow, pandas), or read it as BIGINT with --conf'
    " spark.sql.legacy.parquet.nanosAsLong=true",
    "FLOAT16": "write it as FLOAT",
    "TIME(": "write it as a string or a number",
}
"""Parquet types that Spark 4.2 or Delta 4.4 lacks -> remedy."""
_UNTYPED = "UNKNOWN"
"""Parquet's name for Arrow's null type, of a column with only NULLs; Spark 4.2 reads it as INT."""


def unread(session: SparkSession, path: str) -> str | None:
    """The first column of a file that Spark cannot read, with the remedy; None if there is none."""
    try:
        types = parquet_footers.columns(session, path)
    except Py4JJavaError:  # not a Parquet file, which Spark reports
        return None
    for name, written in types.items():
        for kind, remedy in _UNREAD.items():
            if kind in written:
                return f"column {name!r} is {written}, which Spark cannot read; {remedy}"
    return None


def untyped(session: SparkSession, files: Sequence[str], leaves: int = 0) -> Iterator[tuple[str, str]]:
    """Columns that have no type in any of these files, each with the first such file.

    Args:
        session: reads footers, until each column has been seen with a type.
        files: paths.
        leaves: how many columns the files have in all, nested ones by their innermost.
    """
    typed: set[str] = set()
    without: dict[str, str] = {}
    for file in files:
        for name, written in parquet_footers.columns(session, file).items():
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
    """The first column that keeps these files from having one schema, and why; None if there is none."""
    seen: dict[str, tuple[DataType, str]] = {}
    for file in sorted(map(unquote, files)):
        problem = unread(session, file)
        if problem is not None:
            return f"{file}: {problem}"
        try:
            fields = session.read.parquet(exactly(file)).schema.fields
        except (PySparkException, Py4JJavaError):
            return None
        for field in fields:
            before, other = seen.setdefault(field.name.lower(), (field.dataType, file))
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
