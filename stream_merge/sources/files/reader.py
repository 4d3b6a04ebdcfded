"""Change files in a folder as a stream of events with fixed types; no line is lost silently."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal
from urllib.parse import unquote

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamReader
from pyspark.sql.types import DateType, IntegerType, LongType, NumericType, StringType, StructField, StructType

from stream_merge.errors import ConfigError, ContractError
from stream_merge.model import locations, names, source_batch
from stream_merge.sources.files import csv_records, parquet
from stream_merge.sources.files.csv_records import OTHER_HEADER, CsvRecords, split_record, unescape_delimiter
from stream_merge.sources.files.decoding import (
    NOT_LINES,
    UNKNOWN_FIELDS,
    FileDecoder,
    JsonLines,
    json_encoding,
    without_mark,
)
from stream_merge.sources.files.schema import NEW_FIELD_REMEDY, Schema, message, outside_problem, parse
from stream_merge.sources.wire.encodings import Encoding
from stream_merge.sources.wire.strict_json import UndecodableError
from stream_merge.spark import columns, preflight, versions
from stream_merge.spark.hadoop_files import exactly

Format = Literal["json", "csv", "parquet"]

_DECODED = "decoded"
_BYTES = "ISO-8859-1"
"""A character for each byte: Spark's CSV reader then preserves text that is not UTF-8."""
_FILE_OPTIONS = {
    # Without it, folders named like a=b would become columns, and files below other folders an error (Spark 4.2).
    "recursiveFileLookup": "true",
    # Whatever the session's confs: skipped files would be lost silently.
    "ignoreCorruptFiles": "false",
    "ignoreMissingFiles": "false",
}
_STREAM_OPTIONS = {
    # By default Spark 4.2 silently skips a file that is a week older than the newest one.
    "maxFileAge": "36500d",
}
_RAISED = r"(?:(?<=\[USER_RAISED_EXCEPTION\] )|(?<=RuntimeException: ))"
_END = r"(?=\s+SQLSTATE|\s+Details:|$)"
_READ_FAILURES = {
    re.compile(f"{_RAISED}.*?{re.escape(UNKNOWN_FIELDS)}.*?{_END}", re.MULTILINE): NEW_FIELD_REMEDY,
    re.compile(f"{_RAISED}.*?{re.escape(OTHER_HEADER)}.*?{_END}", re.MULTILINE): (
        "fix the file, replace it by an empty one, or pass --schema with the columns that all files have"
    ),
    re.compile(f"{_RAISED}.*?{re.escape(NOT_LINES)}.*?{_END}", re.MULTILINE): (
        "write one object per line, for example with jq -c '.[]' for an array or jq -c . for an object"
    ),
    re.compile(f"(?<=reading file ).*?{_END}", re.MULTILINE): "fix the file, or replace it by one without rows",
}
"""Message of Spark 4.2, and without SQLSTATE of Spark 3.5 -> remedy; the first match counts."""


def read_files(
    spark: SparkSession,
    path: str,
    *,
    format: Literal["json", "csv"],
    schema: str | StructType,
    header: bool = True,
    delimiter: str = ",",
    max_files_per_trigger: int | None = None,
) -> DataFrame:
    """A folder of change files as a streaming DataFrame: each value exactly as it was written, or in quarantine.

    Pass it to a `MergeSink` or `MergeSinks` with all of its columns. A record that does not fit (no JSON, another
    number of fields, a value that its type cannot hold exactly) has NULL in each of yours; the sink quarantines it as
    `undecodable`, with its file, its bytes and the reason, which the columns `__stream_merge_corrupt` and
    `__stream_merge_origin` hold. A filter would lose it.

    Args:
        spark: the session, not of Spark Connect.
        path: folder, URI or glob; files below it are read at any depth, names starting with `_` or `.` are not.
        format: "json" (an object a line) or "csv" (RFC 4180).
        schema: what to read, as Spark DDL or type; other fields are left out.
        header: CSV: whether each file starts with the column names.
        delimiter: CSV: what separates fields.
        max_files_per_trigger: None: everything that is there makes one micro-batch.

    Raises:
        ConfigError: there is no such folder, the schema cannot be used, or Spark's Python workers lack this package.
    """
    preflight.expect_workers(spark)
    if format not in ("json", "csv"):
        msg = f"[INVALID_SETTING] format={format!r} must be 'json' or 'csv'; read Parquet with spark.readStream"
        raise ConfigError(msg)
    known = parse(schema, setting="schema") if isinstance(schema, str) else Schema(fields=schema, is_inferred=False)
    folder = Folder(path=locations.hadoop_uri(path), format=format, header=header, delimiter=delimiter)
    return folder.events(spark, known, max_files_per_trigger=max_files_per_trigger)


_MOST_FIELDS = "200000"
"""Most fields of a CSV record, before the job ends; Spark's default is 20,480."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """A folder of change files; the fields are arguments of `read_files`.

    JSON: one object per line. CSV: RFC 4180, quotes doubled inside quotes, line breaks allowed there; a quoted
    empty field is an empty string where the column is a string, an unquoted one is NULL.
    """

    path: str
    format: Format
    header: bool = True
    delimiter: str = ","

    def infer(self, session: SparkSession) -> Schema:
        """The schema of the current files, without lines that cannot be read.

        Cost: reads all files once (Parquet: only their footers), CSV twice where columns are numbers.
        """
        reader = session.read.options(**_FILE_OPTIONS)
        try:
            match self.format:
                case "json":
                    fields = reader.option("mode", "DROPMALFORMED").json(self.path).schema
                case "csv":
                    self._expect_one_order(session)
                    reader = reader.options(**self._csv_options(), header=str(self.header).lower())
                    inferred = reader.option("inferSchema", "true").csv(self.path).schema
                    fields = _inferred(reader.option("inferSchema", "false").csv(self.path), inferred)
                case "parquet":
                    frame = reader.option("mergeSchema", "true").parquet(self.path)
                    fields = frame.schema
                    without = parquet.untyped(session, list(map(unquote, frame.inputFiles())), parquet.leaves(fields))
                    for name, file in without:
                        problem = f"{file}: {parquet.untyped_problem(name)}"
                        msg = f"[SCHEMA_NOT_INFERRED] source {self.path!r}: {problem}"
                        raise ConfigError(msg)
        except (PySparkException, Py4JJavaError) as err:
            problem = f"{message(err)}; put a {self.format} file there, or pass --schema"
            if self.format == "parquet":
                problem = self._column_problem(session) or problem
            msg = f"[SCHEMA_NOT_INFERRED] source {self.path!r}: {problem}"
            raise ConfigError(outside_problem(err, f"source {self.path!r}") or msg) from err
        if not fields.fields:
            msg = f"[SCHEMA_NOT_INFERRED] source {self.path!r} has no {self.format} events to infer from; pass --schema"
            raise ConfigError(msg)
        return Schema(fields=fields, is_inferred=True, keeps_spelling=True)

    def _expect_one_order(self, session: SparkSession) -> None:
        """Refuse CSV files with different orders of columns: Spark infers types by position.

        Cost: one Spark job that reads the files, where there are several.
        """
        reader = session.read.schema(_RECORD).options(**_FILE_OPTIONS, **self._csv_options(), **_AS_TEXT)
        records = reader.csv(self.path)
        if not self.header or len(records.inputFiles()) <= 1:
            return
        records = records.select(
            F.col("_metadata.file_path").alias("file"),
            F.monotonically_increasing_id().alias("number"),
            _record_text().alias("text"),
        )
        headers = records.groupBy("file").agg(F.min_by("text", "number").alias("header"))
        orders: dict[tuple[str, ...], tuple[str, ...]] = {}
        for (header,) in headers.select("header").distinct().collect():
            text = without_mark(bytes(header)).decode("utf-8", "replace").lower()
            try:
                names = tuple(name or "" for name in split_record(text, unescape_delimiter(self.delimiter)))
            except UndecodableError:  # the file is refused when it is read
                continue
            if orders.setdefault(tuple(sorted(names)), names) != names:
                msg = (
                    f"[SCHEMA_NOT_INFERRED] CSV files in {self.path!r} have their columns in different orders; pass"
                    " --schema"
                )
                raise ConfigError(msg)

    def _column_problem(self, session: SparkSession) -> str | None:
        try:
            files = session.read.options(**_FILE_OPTIONS).text(self.path).inputFiles()
        except AnalysisException:
            return None
        return parquet.difference(session, files)

    def events(self, session: SparkSession, schema: Schema, *, max_files_per_trigger: int | None) -> DataFrame:
        """The folder as a stream: the schema's fields and, for text formats, columns that only the sink reads."""
        stream = session.readStream.options(**_FILE_OPTIONS, **_STREAM_OPTIONS)
        if max_files_per_trigger is not None:
            stream = stream.option("maxFilesPerTrigger", max_files_per_trigger)
        try:
            return self._read(stream, session, schema)
        except AnalysisException as err:
            reason = message(err)
            msg = f"[SOURCE_NOT_FOUND] source {self.path!r} cannot be read: {reason}; create it, or correct the path"
            raise ConfigError(outside_problem(err, f"source {self.path!r}") or msg) from err

    def rows(self, session: SparkSession, schema: Schema) -> DataFrame:
        """The current files with the columns of `events`; not as a stream."""
        return self._read(session.read.options(**_FILE_OPTIONS), session, schema)

    def _read(self, reader: DataFrameReader | DataStreamReader, session: SparkSession, schema: Schema) -> DataFrame:
        match self.format:
            case "json":
                lines = reader.text(self.path).select(F.col("value").cast("binary"), *_file_columns())
            case "csv":
                records = reader.schema(_RECORD).options(**self._csv_options(), **_AS_TEXT)
                lines = records.csv(self.path).select(_record_text().alias("value"), *_file_columns())
            case "parquet":
                return reader.schema(schema.fields).parquet(self.path)
        return self.decoded(lines, schema, has_header=self.header)

    def decoded(
        self, records: DataFrame, schema: Schema, *, has_header: bool, order: tuple[int, ...] | None = None
    ) -> DataFrame:
        """Records as events, with the columns of `events`.

        Args:
            records: `value` (binary), `path`, `modified`, `line` (NULL: count them) and `file` (a number for each file
                whose records come from its beginning and in order, else NULL).
            schema: of the events.
            has_header: CSV: whether each file's first record is its header.
            order: CSV without headers: see `header_order`.
        """
        fields = StructType([StructField(f.name, columns.nullable(f.dataType)) for f in schema.fields.fields])
        decoder = FileDecoder(
            records=self._records(records.sparkSession, schema, fields, has_header, order), fields=fields
        )
        return _events(records, decoder)

    def _records(
        self,
        session: SparkSession,
        schema: Schema,
        fields: StructType,
        has_header: bool,
        order: tuple[int, ...] | None = None,
    ) -> JsonLines | CsvRecords:
        zone = str(session.conf.get("spark.sql.session.timeZone"))
        encodings = self._encodings(fields, zone, keeps_spelling=schema.keeps_spelling)
        if self.format == "json":
            return JsonLines(
                declared=encodings,
                fields=fields,
                is_inferred=schema.is_inferred,
                case_sensitive=columns.is_case_sensitive(session),
            )
        return CsvRecords(
            declared=encodings,
            delimiter=unescape_delimiter(self.delimiter),
            has_header=has_header,
            case_sensitive=columns.is_case_sensitive(session),
            order=order,
        )

    def _encodings(self, fields: StructType, zone: str, *, keeps_spelling: bool) -> Mapping[str, Encoding]:
        encoding = (
            json_encoding if self.format == "json" else partial(csv_records.encoding, keeps_spelling=keeps_spelling)
        )
        encodings: dict[str, Encoding] = {}
        for one in fields.fields:
            if one.name in encodings:
                msg = f"[INVALID_SETTING] the schema has column {one.name!r} twice; remove one of them"
                raise ConfigError(msg)
            try:
                encodings[one.name] = encoding(one.dataType, zone)
            except UndecodableError as err:
                msg = (
                    f"[INVALID_SETTING] column {one.name!r} of the schema cannot be read: {err}; use another type, or"
                    " remove the column"
                )
                raise ConfigError(msg) from err
        return encodings

    def header_order(
        self, session: SparkSession, schema: Schema, file: str, *, header: bytes | None, before: Schema | None
    ) -> tuple[int, ...] | None:
        """The index of each column of a schema in the records of a CSV file without its header; None: in its order.

        Args:
            session: reads the file's first record.
            schema: of the events.
            file: of this folder.
            header: the file's; None: read from the file, else from `before`.
            before: schema that the file was read with.
        """
        reader = session.read.schema(_RECORD).options(**self._csv_options(), **_AS_TEXT)
        try:
            first = None if header is not None else reader.csv(exactly(file)).select(_record_text()).head()
        except AnalysisException:
            first = None
        problem: str | None = "the file no longer exists, so the order of its columns is unknown"
        if first is not None:
            header = without_mark(bytes(first[0]))
        elif before is not None and header is None:
            quoted = ('"' + name.replace('"', '""') + '"' for name in before.fields.names)
            header = unescape_delimiter(self.delimiter).join(quoted).encode()
        if header is not None:
            lines, problem = self._records(session, schema, schema.fields, has_header=True).for_file(header)
            if problem is None and isinstance(lines, CsvRecords):
                return lines.order
        msg = f"[SOURCE_FILE_INVALID] records of {file} cannot be replayed: {problem}; pass --schema with its columns"
        raise ContractError(msg, reasons={})

    def _csv_options(self) -> dict[str, str]:
        quoting = {"quote": '"', "escape": '"', "multiLine": "true"}
        return {"sep": self.delimiter, **quoting, "mode": "PERMISSIVE", "maxColumns": _MOST_FIELDS}


def _events(records: DataFrame, decoder: FileDecoder) -> DataFrame:
    """Decoded records: their order matters, so Spark must not move or repeat the decoding."""
    decoded = F.col(_DECODED)
    rows = versions.decoded(
        records,
        decoder,
        *("value", "file"),
        dtype=decoder.schema,
        name=_DECODED,
        keep=records.columns,
        is_repeatable=False,
    ).where(decoded["is_event"])
    because = F.raise_error(F.concat("path", F.lit(": "), decoded["fatal"])).cast("string")
    corrupt = F.when(decoded["fatal"].isNotNull(), because).otherwise(decoded["error"])
    origins: dict[str, Column] = {
        "topic": F.col("path"),
        "offset": F.coalesce("line", decoded["line"]),
        "timestamp": F.col("modified"),
        "raw_key": decoded["header"],
        "raw_value": F.col("value"),
    }
    origin = F.struct(
        *(origins.get(f.name, F.lit(None)).cast(f.dataType).alias(f.name) for f in source_batch.ORIGIN_TYPE.fields)
    )
    own = {names.SOURCE_METADATA: "files"}
    return rows.select(
        *(decoded["row"][f.name].alias(f.name) for f in decoder.fields.fields),
        corrupt.alias(names.CORRUPT_COLUMN, metadata=own),
        decoded["left_out"].alias(names.LEFT_OUT_COLUMN, metadata=own),
        origin.alias(names.ORIGIN_COLUMN, metadata=own),
    )


def _file_columns() -> list[Column]:
    """Origin columns of a record. Text files may be split: lines can be counted in the first part alone."""
    is_first = F.col("_metadata.file_block_start") == 0
    return [
        F.col("_metadata.file_path").alias("path"),
        F.col("_metadata.file_modification_time").alias("modified"),
        F.lit(None).cast("bigint").alias("line"),
        F.when(is_first, F.xxhash64("_metadata.file_path")).alias("file"),
    ]


_NEVER, _WHOLE = f"{names.RESERVED_PREFIX}never", f"{names.RESERVED_PREFIX}whole"
_AS_TEXT = {
    "header": "false",
    "encoding": _BYTES,
    "columnPruning": "false",
    "columnNameOfCorruptRecord": _WHOLE,
    "dateFormat": f"'{_NEVER}'yyyy-MM-dd",
    "enableDateTimeParsingFallback": "false",
    "emptyValue": '""',
}
"""Options with which Spark's CSV reader only finds the ends of records: it gives the text of those that do not fit its
schema, a single date in a format that no field has. A quoted empty field is text, too, not NULL."""
_RECORD = StructType([StructField(_NEVER, DateType()), StructField(_WHOLE, StringType())])


def _record_text() -> Column:
    """The text of a record without its line end: Spark 4.2 leaves a lone carriage return.

    The date is named because Spark allows no query of the text of misfits alone.
    """
    none = F.raise_error(F.lit("Spark's CSV reader gave a record without its text")).cast("string")
    text = F.coalesce(F.col(_WHOLE), F.col(_NEVER).cast("string"), none)
    return F.encode(F.regexp_replace(text, r"\r\z", ""), _BYTES)


def failure(path: str, trace: str, reason: str) -> ContractError | None:
    """The error for files of source `path` that cannot be read, from Spark's trace; None for another reason."""
    for pattern, remedy in _READ_FAILURES.items():
        match = pattern.search(trace)
        if match is not None:
            text = " ".join(match.group().split())
            cause = "" if reason in text or text in reason else f" ({reason})"
            return ContractError(f"[SOURCE_FILE_INVALID] source {path!r}: {text}{cause}; {remedy}", reasons={})
    return None


def _inferred(texts: DataFrame, inferred: StructType) -> StructType:
    """CSV columns from Spark's inferred types: integers as BIGINT, text where a number would lose zeros or its plus."""
    numbers = [f.name for f in inferred.fields if isinstance(f.dataType, NumericType)]
    lossy = [F.max(columns.column(name).rlike(csv_records.RESPELLED)).alias(name) for name in numbers]
    row = texts.agg(*lossy).first() if lossy else None
    types = {name: StringType() for name in numbers if row is not None and row[name]}
    widened = {f.name: LongType() for f in inferred.fields if isinstance(f.dataType, IntegerType)}
    return StructType(
        [
            StructField(f.name.removeprefix("\ufeff"), types.get(f.name) or widened.get(f.name) or f.dataType)
            for f in inferred.fields
        ]
    )
