"""Change files in a folder as a stream of events: types that stay the same, and no line lost without a word."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from stream_merge import columns, names, outside
from stream_merge.errors import ConfigError, ContractError

Format = Literal["json", "csv", "parquet"]

_RECORD = "stream_merge_schema"
"""Folder in the checkpoint that keeps the schema; Spark's own are offsets, commits, sources, metadata."""

_EMPTY = f"{names.RESERVED_PREFIX}empty"
"""What the CSV reader gives for a quoted empty field, so that it can be told from a missing one."""

_FILE_OPTIONS = {
    # Without it, folders named like a=b would become columns, and files below other folders an error (Spark 4.2).
    "recursiveFileLookup": "true",
}
_STREAM_OPTIONS = {
    # By default Spark 4.2 passes over a file that is a week older than the newest one, without a word.
    "maxFileAge": "36500d",
}

_UNKNOWN_FIELDS = "a line has field(s) that the schema lacks: "
_NEW_FIELD_REMEDY = (
    "pass --schema: with them (and --schema-evolution, if the table lacks them too) to store them, without them to"
    " leave them out"
)
_READ_FAILURES = {
    re.compile(rf"(?<=\[USER_RAISED_EXCEPTION\] ){re.escape(_UNKNOWN_FIELDS)}.*?(?= SQLSTATE)"): _NEW_FIELD_REMEDY,
    re.compile(r"(?<=: )(CSV header does not conform|Number of column in CSV header).*?(?=\n\s+at )", re.DOTALL): (
        "mend or remove the file, or pass --schema with the columns that all files have"
    ),
    re.compile(r"(?<=reading file ).*?(?=\s+SQLSTATE)"): "mend or remove the file",
}
"""What Spark 4.2 says -> what to do; the first that matches counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """Names and types of the fields of a source."""

    fields: StructType
    is_inferred: bool
    """Whether they were derived from files, so that a field outside them is a surprise rather than left out."""

    def __str__(self) -> str:
        """Spark DDL, as `--schema` takes it."""
        written = ((f.name if re.fullmatch(r"\w+", f.name) else names.quote(f.name), f) for f in self.fields.fields)
        return ", ".join(f"{name} {f.dataType.simpleString()}" for name, f in written)

    def to_json(self) -> str:
        """The record in the checkpoint."""
        return json.dumps({"fields": self.fields.jsonValue(), "inferred": self.is_inferred})

    @classmethod
    def from_json(cls, text: str) -> Schema:
        """A schema from its record."""
        record = json.loads(text)
        return cls(fields=StructType.fromJson(record["fields"]), is_inferred=record["inferred"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """A folder that change files are put into.

    JSON: one object per line. CSV: RFC 4180, quotes doubled inside quotes, line breaks allowed there; a quoted
    empty field is an empty string where the column is a string, an unquoted one is NULL.
    """

    path: str
    """Folder, URI or glob; files below it are read at any depth, names starting with `_` or `.` are not."""
    format: Format
    header: bool = True
    """CSV: whether each file starts with the column names."""
    delimiter: str = ","
    """CSV: what separates fields."""

    def infer(self, session: SparkSession) -> Schema:
        """Derive the schema from the files that are there now; lines that cannot be read do not count.

        Cost: reads all files once (Parquet: only their footers).

        Raises:
            ConfigError: there is no folder, no file, or nothing in them to derive a schema from.
        """
        reader = session.read.options(**_FILE_OPTIONS)
        try:
            match self.format:
                case "json":
                    found = reader.option("mode", "DROPMALFORMED").json(self.path).schema
                case "csv":
                    found = _widened(reader.options(**self._csv_options(), inferSchema="true").csv(self.path).schema)
                case "parquet":
                    found = reader.option("mergeSchema", "true").parquet(self.path).schema
        except (AnalysisException, Py4JJavaError) as err:
            msg = (
                f"source {self.path!r} gives no schema: {_said(err)}; put a {self.format} file there, or pass --schema"
            )
            raise ConfigError(msg) from err
        if not found.fields:
            msg = f"source {self.path!r} holds no {self.format} events to infer types from; pass --schema"
            raise ConfigError(msg)
        return Schema(fields=found, is_inferred=True)

    def events(self, session: SparkSession, schema: Schema, *, max_files_per_trigger: int | None) -> DataFrame:
        """The folder as a stream.

        Returns:
            The fields of the schema and, for text formats, `__stream_merge_corrupt`: the text of a line that
            does not fit the format or the types, NULL for all others.
        """
        try:
            return self._stream(session, schema, max_files_per_trigger)
        except AnalysisException as err:
            msg = f"source {self.path!r} cannot be read: {_said(err)}; make the folder first, or name another one"
            raise ConfigError(msg) from err

    def _stream(self, session: SparkSession, schema: Schema, max_files_per_trigger: int | None) -> DataFrame:
        stream = session.readStream.options(**_FILE_OPTIONS, **_STREAM_OPTIONS)
        if max_files_per_trigger is not None:
            stream = stream.option("maxFilesPerTrigger", max_files_per_trigger)
        match self.format:
            case "json":
                return json_events(stream.text(self.path), schema)
            case "csv":
                texts = StructType([StructField(f.name, StringType()) for f in schema.fields.fields])
                reader = stream.schema(texts.add(names.CORRUPT_COLUMN, StringType()))
                reader = reader.options(**self._csv_options(), enforceSchema="false", emptyValue=_EMPTY)
                return _csv_events(reader.csv(self.path), schema, self.delimiter)
            case "parquet":
                return stream.schema(schema.fields).parquet(self.path)

    def refuse_unknown_columns(self, session: SparkSession, schema: Schema) -> None:
        """Compare an inferred schema with the Parquet files of now: Spark leaves out columns that it was not told of.

        Text formats are compared line by line or header by header, while they are read.

        Raises:
            ContractError: the files have more columns.
        """
        if self.format != "parquet" or not schema.is_inferred:
            return
        more = [name for name in self.infer(session).fields.names if name not in schema.fields.names]
        if more:
            msg = f"files in {self.path!r} have column(s) {more!r} that the schema lacks; {_NEW_FIELD_REMEDY}"
            raise ContractError(msg, reasons={})

    def _csv_options(self) -> dict[str, str]:
        return {
            "header": str(self.header).lower(),
            "sep": self.delimiter,
            "quote": '"',
            "escape": '"',
            "multiLine": "true",
            "mode": "PERMISSIVE",
            "columnNameOfCorruptRecord": names.CORRUPT_COLUMN,
        }


def parse(ddl: str) -> Schema:
    """A schema that a person wrote; PySpark needs a running session to read it.

    Raises:
        ConfigError: it is not Spark DDL.
    """
    try:
        fields = StructType.fromDDL(ddl)
    except ParseException as err:
        msg = f"--schema {ddl!r} is not a list of columns like 'id BIGINT, name STRING': {_said(err)}"
        raise ConfigError(msg) from err
    if not isinstance(fields, StructType) or not fields.fields:
        msg = f"--schema {ddl!r} names no columns; write it like 'id BIGINT, name STRING'"
        raise ConfigError(msg)
    if re.search(r"char\(", fields.simpleString()):
        msg = f"--schema {ddl!r} has CHAR or VARCHAR, which Spark does not read from files; write STRING"
        raise ConfigError(msg)
    return Schema(fields=fields, is_inferred=False)


def recorded(session: SparkSession, checkpoint: str) -> Schema | None:
    """The schema that earlier runs over this checkpoint used, or None."""
    try:
        lines = session.read.text(f"{checkpoint}/{_RECORD}").collect()
    except AnalysisException:
        return None
    return Schema.from_json(lines[0][0]) if lines else None


def record(session: SparkSession, checkpoint: str, schema: Schema) -> None:
    """Keep the schema with the checkpoint, wherever that lies, so that a restart reads the same types.

    Raises:
        ConfigError: nothing can be written there.
    """
    line = session.createDataFrame([(schema.to_json(),)], "value STRING")
    try:
        line.coalesce(1).write.mode("overwrite").text(f"{checkpoint}/{_RECORD}")
    except (PySparkException, Py4JJavaError) as err:
        msg = f"checkpoint {checkpoint!r} cannot be written: {_said(err)}; name a folder that this user may write to"
        raise ConfigError(msg) from err


def failure(path: str, trace: str, reason: str) -> ContractError | None:
    """The error for files that cannot be read, or None when the reason is another one.

    Args:
        path: the source.
        trace: everything that Spark said.
        reason: what the innermost cause said.
    """
    for pattern, remedy in _READ_FAILURES.items():
        found = pattern.search(trace)
        if found is not None:
            said = " ".join(found.group().split())
            cause = "" if reason in said or said in reason else f" ({reason})"
            return ContractError(f"a file in {path!r} cannot be read: {said}{cause}; {remedy}", reasons={})
    return None


def json_events(lines: DataFrame, schema: Schema) -> DataFrame:
    """The events of text lines; a blank line is none.

    Not Spark's JSON source, which drops `[]` and everything behind the first value of a line (Spark 4.2).

    Args:
        lines: a column `value`.
        schema: what the fields are; fields outside an inferred one fail the query.
    """
    line = F.col("value")
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": names.CORRUPT_COLUMN}
    with_corrupt = StructType([*schema.fields.fields, StructField(names.CORRUPT_COLUMN, StringType())])
    event = F.from_json(line, with_corrupt, options)
    is_one_value = F.json_array_length(F.concat(F.lit("["), line, F.lit("]"))) == 1
    corrupt = F.when(is_one_value, event.getField(names.CORRUPT_COLUMN)).otherwise(line)
    if schema.is_inferred:  # Spark would leave the other fields out without a word
        known = F.array(*(F.lit(name) for name in schema.fields.fieldNames()))
        unknown = F.array_except(F.json_object_keys(line), known)
        surprise = F.raise_error(F.concat(F.lit(_UNKNOWN_FIELDS), F.array_join(unknown, ", ")))
        corrupt = F.when(F.size(unknown) > 0, surprise.cast("string")).otherwise(corrupt)
    values = [event.getField(f.name).alias(f.name) for f in schema.fields.fields]
    return lines.where(F.trim(line) != "").select(*values, corrupt.alias(names.CORRUPT_COLUMN))


def _csv_events(texts: DataFrame, schema: Schema, delimiter: str) -> DataFrame:
    """Typed here: the CSV reader would look only at the columns that a query needs (Spark 4.2)."""
    values: list[Column] = []
    unfit: list[Column] = []
    as_written: list[Column] = []
    for f in schema.fields.fields:
        text = columns.column(f.name)
        unquoted = F.when(text == _EMPTY, F.lit("")).otherwise(text)
        as_written.append(unquoted.alias(f.name))
        if isinstance(f.dataType, StringType):
            values.append(unquoted.alias(f.name))
            continue
        # Tools that quote everything write "" for a missing number.
        number = F.when(text != _EMPTY, text)
        values.append(number.try_cast(f.dataType).alias(f.name))
        unfit.append(number.isNotNull() & number.try_cast(f.dataType).isNull())
    line_again = F.to_csv(F.struct(*as_written), {"sep": delimiter, "quote": '"', "escape": '"'})
    corrupt = F.coalesce(columns.column(names.CORRUPT_COLUMN), F.when(columns.any_of(unfit), line_again))
    return texts.select(*values, corrupt.alias(names.CORRUPT_COLUMN))


def _widened(inferred: StructType) -> StructType:
    """Integers with room to grow: the reader takes the narrowest type that holds what it has seen."""
    return StructType(
        [
            StructField(f.name, LongType() if isinstance(f.dataType, IntegerType) else f.dataType)
            for f in inferred.fields
        ]
    )


def _said(err: BaseException) -> str:
    """What Spark said, without where in its code."""
    from_outside = outside.said(err)
    if from_outside is not None:
        return from_outside
    first, _, rest = str(err).strip().partition("\n")
    java = re.match(r": [\w.$]+: (.*)", rest)  # Py4J: the first line names its own object
    return java[1] if java is not None else first
