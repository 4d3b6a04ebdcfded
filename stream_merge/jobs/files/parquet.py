"""Parquet files bring their own types: each must be held exactly by the schema's, or the file is not merged.

Spark looks at how a value is stored, not at what it means: it wraps an int into a tinyint, takes it for the days of a
date, and a time for a number (Spark 4.2, `ParquetVectorUpdaterFactory`).
"""

from __future__ import annotations

from urllib.parse import unquote

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from stream_merge.errors import ConfigError, ContractError
from stream_merge.model.results import MergeResult
from stream_merge.sink import MergeSink
from stream_merge.sources.files.reader import NEW_FIELD_REMEDY
from stream_merge.sources.files.schema import Schema, said
from stream_merge.spark import columns
from stream_merge.spark.hadoop_files import exactly
from stream_merge.spark.streaming import files_of

_REMEDY = "write the file again with the schema's types, or pass --schema with types that hold both"


class TypesChecked:
    """A sink that looks at the types in the files of each batch before it reads them.

    Cost: the footers of the batch's files.
    """

    def __init__(self, sink: MergeSink, schema: Schema) -> None:
        self._sink = sink
        self._schema = schema

    @property
    def last_result(self) -> MergeResult | None:
        """What the sink did last."""
        return self._sink.last_result

    def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
        """Merge a micro-batch.

        Raises:
            ContractError: a file has a type that the schema's does not hold.
            ConfigError: Spark does not tell which files the batch reads.
        """
        files = files_of(batch_df)
        if not files:  # each batch of a file source has some
            msg = (
                f"batch {batch_id} does not tell which files it reads, so that their types cannot be compared with the"
                " schema's; use the Spark version that this package names"
            )
            raise ConfigError(msg, batch_id=batch_id)
        refuse_other_types(batch_df.sparkSession, files, self._schema)
        self._sink(batch_df, batch_id)


def refuse_other_types(session: SparkSession, files: list[str], schema: Schema) -> None:
    """Compare the files' own types with the schema's.

    Raises:
        ContractError: a file has a type that the schema's does not hold, or one that Spark does not know.
    """
    paths = [unquote(file) for file in files]
    try:
        problem = _problem(_types_in(session, paths), schema)
    except (PySparkException, Py4JJavaError):  # they differ among each other, or there is a type of another world
        problem = "they differ"
    if problem is None:
        return
    for path in paths:
        try:
            problem = _problem(_types_in(session, [path]), schema)
        except (PySparkException, Py4JJavaError) as err:
            problem = f"{said(err)}; {_REMEDY}"
        if problem is not None:
            msg = f"a file cannot be read: {path}: {problem}"
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
