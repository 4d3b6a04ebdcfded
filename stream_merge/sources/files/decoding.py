"""Decodes records of files into rows, in Spark's workers: each exactly, or refused with the reason."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from stream_merge.sources.decode import events as record_events
from stream_merge.sources.decode.decoding import Decoder
from stream_merge.sources.decode.events import ROW
from stream_merge.sources.envelopes import plain
from stream_merge.sources.envelopes.base import Declared, Kind, Read, ReadMany
from stream_merge.sources.files.csv_records import CsvRecords
from stream_merge.sources.wire import json_table, times
from stream_merge.sources.wire import many as M
from stream_merge.sources.wire.connect_json import DECLARED
from stream_merge.sources.wire.encodings import Encoding, folded, json_text, scalar
from stream_merge.sources.wire.strict_json import UndecodableError, parse, utf8_text
from stream_merge.spark.columns import resolve

UNKNOWN_FIELDS = "a line has field(s) that the schema lacks: "
NOT_LINES = "the file is a JSON array or a multi-line object, not one JSON object per line"
_BOM = b"\xef\xbb\xbf"
_SPACES = b" \t\r\n"
_META = T.StructType(
    [
        T.StructField("is_event", T.BooleanType()),
        T.StructField("error", T.StringType()),
        T.StructField("fatal", T.StringType()),
        T.StructField("line", T.LongType()),
        T.StructField("left_out", T.StringType()),
        T.StructField("header", T.BinaryType()),
    ]
)
"""Whether a record is an event; why it cannot be read; why its file must not be merged; its line; names of its fields
that are not columns; its file's header, where that has another order than the schema."""
_LARGEST = 2**31 - 1
"""Most bytes of a record in Arrow."""


@dataclass(frozen=True, kw_only=True)
class FileDecoder:
    """Decodes the records of files; sent to the workers.

    Guarantees: one row for each record, in order. Never raises for the content of a record.
    """

    records: Records
    fields: T.StructType
    """Columns of the rows, all nullable."""

    @property
    def schema(self) -> T.StructType:
        """`_META` and the row, whose fields are NULL where there is none."""
        return T.StructType([*_META.fields, T.StructField(ROW, self.fields)])

    def __call__(self, batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        """Decode a task's records; each has the number of its file (NULL: the middle of one)."""
        counted, reader = _Counted(), self.records
        for values, files in batches:
            lines, starts = counted.lines(files)
            records, fatal, opened = self._without_beginnings(values, starts)
            readers = {0: reader, **opened}
            reader = readers[max(readers)]
            yield self._decoded(records, lines, starts, fatal, readers)

    def _decoded(
        self,
        records: pa.BinaryArray,
        lines: pa.Int64Array,
        starts: list[int],
        fatal: Mapping[int, str],
        readers: Mapping[int, Records],
    ) -> pa.StructArray:
        count = len(records)
        is_event = pc.invert(self.records.are_blank(records))
        if self.records.has_header:
            is_event = pc.and_(is_event, pc.invert(_mask(count, starts)))
        indexes = pc.indices_nonzero(is_event).cast(pa.int64())
        order, parts, headers = [], [], []
        for (begin, reader), end in zip(readers.items(), [*list(readers)[1:], count], strict=True):
            own = indexes.filter(pc.and_(pc.greater_equal(indexes, begin), pc.less(indexes, end)))
            order.append(own)
            parts.append(self._events(reader, records if len(own) == count else records.take(own)))
            headers.append(pa.repeat(pa.scalar(reader.header, pa.binary()), end - begin))
        place = pc.index_in(pa.arange(0, count), value_set=pa.concat_arrays(order)).cast(pa.int64())
        events = pa.concat_arrays(parts)
        kind, note = events.field("kind").take(place), events.field("note").take(place)
        notes = {one: pc.if_else(pc.equal(kind, str(one)), note, pa.scalar(None, pa.string())) for one in Kind}
        own_fatal = pc.binary_join_element_wise(UNKNOWN_FIELDS, notes[Kind.OTHER_SCHEMA], "")
        fatal_texts = pc.coalesce(pa.array([fatal.get(i) for i in range(count)], pa.string()), own_fatal)
        is_row = pc.fill_null(pc.equal(kind, str(Kind.UPSERT)), False)
        at = pc.if_else(is_row, place, pa.scalar(None, pa.int64()))
        rows = events.field(ROW)
        columns = {
            "is_event": pc.or_(is_event, fatal_texts.is_valid()),
            "error": notes[Kind.UNDECODABLE],
            "fatal": fatal_texts,
            "line": lines if self.records.are_counted else pa.nulls(count, pa.int64()),
            "left_out": notes[Kind.UPSERT],
            "header": pa.concat_arrays(headers),
            ROW: pa.StructArray.from_arrays([rows.field(f.name).take(at) for f in rows.type], fields=list(rows.type)),
        }
        return pa.StructArray.from_arrays(list(columns.values()), names=list(columns))

    def _events(self, reader: Records, records: pa.BinaryArray) -> pa.StructArray:
        """Kind, note and row of consecutive records without keys."""
        decoder = Decoder(
            format=reader, columns=self.fields, keys=(), known=frozenset({DECLARED}), max_value_bytes=_LARGEST
        )
        count = len(records)
        events = decoder.decode(
            record_events.Records(pa.nulls(count, pa.binary()), records, pa.nulls(count, pa.int32())), set()
        )
        return pa.StructArray.from_arrays(
            [events.field(name) for name in ("kind", "note", ROW)], names=["kind", "note", ROW]
        )

    def _without_beginnings(
        self, records: pa.BinaryArray, starts: list[int]
    ) -> tuple[pa.BinaryArray, dict[int, str], dict[int, Records]]:
        """Records without byte order marks; start -> why its file must not be merged; start -> reader from there."""
        fatal: dict[int, str] = {}
        readers: dict[int, Records] = {}
        changed: dict[int, bytes] = {}
        for start in starts:
            first: bytes = records[start].as_py()
            if first.startswith(_BOM):
                first = changed[start] = without_mark(first)
            reader, problem = self.records.for_file(first)
            if problem is not None:
                fatal[start] = problem
            if not readers or reader.header != next(reversed(readers.values())).header:
                readers[start] = reader
        if changed:
            mask = _mask(len(records), changed)
            records = pc.replace_with_mask(records, mask, pa.array([changed[i] for i in sorted(changed)], pa.binary()))
        return records, fatal, readers


@dataclass(slots=True)
class _Counted:
    """Line numbers: a task reads a file from its beginning, one after the other."""

    file: int | None = None
    count: int = 0

    def lines(self, files: pa.Int64Array) -> tuple[pa.Int64Array, list[int]]:
        """The number of each record in its file, from 1, NULL where unknown; and the indexes of first records."""
        runs = pc.run_end_encode(files, run_end_type=pa.int64())
        pieces, starts, begin = [], [], 0
        for end, file in zip(runs.run_ends.to_pylist(), runs.values.to_pylist(), strict=True):
            length = end - begin
            if file is None:
                pieces.append(pa.nulls(length, pa.int64()))
            else:
                if file != self.file:
                    self.count = 0
                    starts.append(begin)
                pieces.append(pa.arange(self.count + 1, self.count + 1 + length))
                self.count += length
            self.file, begin = file, end
        return pa.concat_arrays(pieces or [pa.array([], pa.int64())]), starts


def without_mark(record: bytes) -> bytes:
    """A file's first record without byte order mark."""
    return record.removeprefix(_BOM)


def _mask(count: int, places: Collection[int]) -> pa.BooleanArray:
    return pc.is_in(pa.arange(0, count), value_set=pa.array(list(places), pa.int64()))


# -- JSON --------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class JsonLines(Declared):
    """An object per line, whose fields are the columns; a missing one is NULL."""

    fields: T.StructType
    """The columns."""
    is_inferred: bool
    """Whether a field that the schema lacks is an error; else it is left out."""
    case_sensitive: bool
    header: bytes | None = field(default=None, init=False)
    has_header: bool = field(default=False, init=False)
    are_counted: bool = field(default=True, init=False)

    def are_blank(self, records: pa.BinaryArray) -> pa.BooleanArray:
        """Which lines are white space."""
        is_odd = pc.invert(pc.starts_with(records, b"{"))
        if not pc.any(is_odd).as_py():
            return pc.invert(is_odd.is_valid())
        return pa.array([not record.strip(_SPACES) for record in records.to_pylist()], pa.bool_())

    def for_file(self, first: bytes) -> tuple[JsonLines, str | None]:
        """The reader of a file; with a problem where its first line shows that it is not one object per line."""
        begun = first.strip(_SPACES)
        is_array_of_objects = begun[:1] == b"[" and begun[1:].lstrip(_SPACES)[:1] == b"{"
        return self, NOT_LINES if is_array_of_objects or begun in (b"{", b"[") else None

    def read(self, key: bytes | None, value: bytes) -> Read:
        """A line, taken apart."""
        others: set[str] = set()
        row = self._known(_object(value), self.fields, others)
        note = ", ".join(sorted(others)) or None
        if note is not None and self.is_inferred:
            return Read(Kind.OTHER_SCHEMA, note=note)
        return Read(Kind.UPSERT, {**dict.fromkeys(self.declared), **row}, DECLARED, position=0, note=note)

    def read_many(self, values: pa.BinaryArray) -> Iterator[ReadMany]:
        """Lines that surely have only columns and fields like those of some samples."""
        spelled, others = self._sampled(values)
        wires = {spelled.get(name, name): encoding.wire for name, encoding in self.declared.items()}
        if None in wires.values():
            return
        for first, rows in json_table.read_parts(values, pa.schema(list({**others, **wires}.items()))):
            image = pa.StructArray.from_arrays([rows.field(name) for name in wires], names=list(self.declared))
            yield ReadMany.upserts(pa.arange(first, first + len(rows)), image, _left_out(rows, others))

    def _sampled(self, records: pa.BinaryArray) -> tuple[dict[str, str], dict[str, pa.DataType]]:
        """Columns that sampled records spell in another case, and the types of their fields to leave out."""
        samples = []
        for i in (0, len(records) // 2, len(records) - 1):
            try:
                samples.append(_object(records[i].as_py()))
            except UndecodableError:
                continue
        shape = json_table.infer_shape(samples, pa.struct([]))
        others = {one.name: one.type for one in shape if one.name not in self.declared}
        meant = {name: resolve(name, list(self.declared), case_sensitive=self.case_sensitive) for name in others}
        spelled = {column: name for name, column in meant.items() if column is not None}
        unknown = {} if self.is_inferred else {name: others[name] for name, column in meant.items() if column is None}
        return spelled, unknown

    def _known(self, value: Any, dtype: T.DataType, others: set[str], path: str = "") -> Any:
        """A JSON value without the fields that its type lacks.

        Args:
            value: of a column, or of a part of it.
            dtype: its type.
            others: gets the dotted names of those fields; without a value only where the schema is inferred.
            path: of the value, with a dot at the end.
        """
        match dtype:
            case T.StructType() if isinstance(value, dict):
                types = {field.name: field.dataType for field in dtype.fields}
                fields = value if self.case_sensitive else folded(value, types.keys())
                more = fields.keys() - types.keys()
                others |= {path + name for name in more if self.is_inferred or fields[name] is not None}
                return {
                    name: self._known(inner, types[name], others, f"{path}{name}.")
                    for name, inner in fields.items()
                    if name not in more
                }
            case T.ArrayType() if isinstance(value, list):
                return [self._known(inner, dtype.elementType, others, path) for inner in value]
            case T.MapType() if isinstance(value, dict):
                return {name: self._known(inner, dtype.valueType, others, path) for name, inner in value.items()}
        return value


Records: TypeAlias = JsonLines | CsvRecords
"""Reader of the records of a file."""


def json_encoding(dtype: T.DataType, zone: str) -> Encoding:
    """Encoding of a type in a line: any JSON value is a text, and times without zone are in `zone`."""
    moment = partial(times.timestamp_from_text, with_zone=True, zone=zone)
    return plain.encoding(dtype, {**plain.SCALARS, T.StringType: _any_text, T.TimestampType: moment})


def _any_text() -> Encoding:
    """A JSON string; any other value as its JSON text, numbers with all their digits."""

    def one(value: Any) -> str:
        return value if isinstance(value, str) else json_text(value)

    kinds = (str, int, float, Decimal, bool, list, dict)
    return scalar(T.StringType(), pa.string(), one, *kinds, wire=pa.string(), many=M.as_they_are)


def _object(record: bytes) -> dict[str, Any]:
    value = parse(utf8_text(record).strip(_SPACES.decode()), exact=True)
    if not isinstance(value, dict):
        msg = "the line is not a JSON object"
        raise UndecodableError(msg)
    return value


def _left_out(table: pa.StructArray, others: Iterable[str]) -> pa.StringArray | None:
    """Names of each record's fields with a value; NULL without any."""
    named = [pc.if_else(table.field(name).is_valid(), f"{name}, ", "") for name in sorted(others)]
    if not named:
        return None
    joined = pc.utf8_slice_codeunits(pc.binary_join_element_wise(*named, ""), 0, -2)
    return pc.if_else(pc.equal(joined, ""), pa.scalar(None, pa.string()), joined)
