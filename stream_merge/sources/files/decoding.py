"""Records of files in, rows out: what Spark's workers run. Each record is read exactly, or refused with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from stream_merge.sources.files import csv_text
from stream_merge.sources.wire import json_table
from stream_merge.sources.wire.encodings import Encoding, decode
from stream_merge.sources.wire.strict_json import UndecodableError, parse, text_of
from stream_merge.spark.versions import arrow_type

UNKNOWN_FIELDS = "a line has field(s) that the schema lacks: "
OTHER_HEADER = "CSV header does not conform to the schema: "
_BOM = b"\xef\xbb\xbf"
_SPACES = b" \t\r\n"
_FEWEST = json_table.FEWEST


class Rows(NamedTuple):
    """Some of the records of a batch, read."""

    indexes: pa.Int64Array
    """Which of the batch they are."""
    columns: list[pa.Array]
    errors: dict[int, str]
    """Place in these rows -> why its record cannot be read; its values mean nothing."""
    fatal: dict[int, str]
    """Place -> why no file like that may be merged."""


class Lines(Protocol):
    """One way of writing events in files; sent to the workers."""

    @property
    def has_header(self) -> bool:
        """Whether the first record of each file is none, but says what the others are."""
        ...

    @property
    def are_counted(self) -> bool:
        """Whether each line of a file is a record here."""
        ...

    def are_blank(self, records: pa.BinaryArray) -> pa.BooleanArray:
        """Which records are none."""
        ...

    def read(self, records: pa.BinaryArray) -> Iterator[Rows]:
        """Read the records of a batch, each in one of the parts."""
        ...

    def refuse_header(self, record: bytes) -> str | None:
        """Why a file with this header may not be merged, or None."""
        ...


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Turns records into rows; sent to the workers.

    Guarantees: one row out for each record in, in order. Never raises for what is in a record.
    """

    lines: Lines
    fields: T.StructType
    """Of the rows, all nullable."""

    @property
    def schema(self) -> T.StructType:
        """What comes out: see the fields of `_META`."""
        return T.StructType([*_META.fields, T.StructField("row", self.fields)])

    def __call__(self, batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        """Read what one task reads: records, and for each a number that tells its file (NULL: the middle of one)."""
        counted = _Counted()
        for records, files in batches:
            yield self._decoded(records, *counted.lines(files))

    def _decoded(self, records: pa.BinaryArray, lines: pa.Int64Array, starts: list[int]) -> pa.StructArray:
        headers: dict[int, str | None] = {}
        if starts:
            records, headers = self._without_beginnings(records, starts)
        count = len(records)
        is_event = pc.invert(self.lines.are_blank(records))
        if headers:
            is_event = pc.and_(is_event, pc.invert(_mask(count, headers)))
        given = pc.indices_nonzero(is_event).cast(pa.int64())
        parts = list(self.lines.read(records if len(given) == count else records.take(given))) if len(given) else []
        errors: dict[int, str] = {}
        fatal = {i: said for i, said in headers.items() if said is not None}
        for part in parts:
            indexes = given.take(part.indexes)
            errors |= {indexes[i].as_py(): said for i, said in part.errors.items()}
            fatal |= {indexes[i].as_py(): said for i, said in part.fatal.items()}
        read = pa.concat_arrays([given.take(part.indexes) for part in parts] or [pa.array([], pa.int64())])
        place = _places(read, count)
        is_row = pc.and_(is_event, pc.invert(_mask(count, errors)))
        rows = self._rows([part.columns for part in parts], place, is_row)
        is_kept = pc.or_(is_event, _mask(count, fatal))
        if not self.lines.are_counted:
            lines = pa.nulls(count, pa.int64())
        return pa.StructArray.from_arrays(
            [is_kept, _texts(count, errors), _texts(count, fatal), lines, rows], names=[*_META.names, "row"]
        )

    def _rows(self, parts: list[list[pa.Array]], place: pa.Int64Array, is_row: pa.BooleanArray) -> pa.StructArray:
        place = pc.if_else(is_row, place, pa.scalar(None, pa.int64()))
        columns, fields = [], []
        for n, one in enumerate(self.fields.fields):
            dtype = arrow_type(one.dataType)
            pieces = [columns_of[n].cast(dtype) for columns_of in parts]
            columns.append(pa.concat_arrays(pieces).take(place) if pieces else pa.nulls(len(place), dtype))
            fields.append(pa.field(one.name, dtype))
        return pa.StructArray.from_arrays(columns, fields=fields)

    def _without_beginnings(
        self, records: pa.BinaryArray, starts: list[int]
    ) -> tuple[pa.BinaryArray, dict[int, str | None]]:
        """The records without byte order marks before them; the headers among them, and what is wrong with those."""
        headers: dict[int, str | None] = {}
        changed: dict[int, bytes] = {}
        for start in starts:
            first: bytes = records[start].as_py()
            if first.startswith(_BOM):
                first = changed[start] = without_mark(first)
            if self.lines.has_header:
                headers[start] = self.lines.refuse_header(first)
        if changed:
            mask = _mask(len(records), changed)
            records = pc.replace_with_mask(records, mask, pa.array([changed[i] for i in sorted(changed)], pa.binary()))
        return records, headers


_META = T.StructType(
    [
        T.StructField("is_event", T.BooleanType()),
        T.StructField("error", T.StringType()),
        T.StructField("fatal", T.StringType()),
        T.StructField("line", T.LongType()),
    ]
)


@dataclass(slots=True)
class _Counted:
    """Where in its file each record stands: a task reads a file from its beginning, and one after the other."""

    file: int | None = None
    count: int = 0

    def lines(self, files: pa.Int64Array) -> tuple[pa.Int64Array, list[int]]:
        """The number of each record in its file, from 1, NULL where nobody knows; and which are the first ones."""
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
    """A file's first record without the byte order mark before it."""
    return record.removeprefix(_BOM)


# -- JSON --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class JsonLines:
    """An object a line: at once where Arrow's reader proves that nothing else is in it, else one by one."""

    encodings: Mapping[str, Encoding]
    fields: T.StructType
    is_inferred: bool
    """Whether a field that the schema lacks is a surprise; else it is left out."""
    has_header: bool = field(default=False, init=False)
    are_counted: bool = field(default=True, init=False)

    def are_blank(self, records: pa.BinaryArray) -> pa.BooleanArray:
        """Lines of nothing but white space."""
        is_odd = pc.invert(pc.starts_with(records, b"{"))
        if not pc.any(is_odd).as_py():
            return pc.invert(is_odd.is_valid())
        return pa.array([not record.strip(_SPACES) for record in records.to_pylist()], pa.bool_())

    def read(self, records: pa.BinaryArray) -> Iterator[Rows]:
        """As `Lines.read`."""
        done: list[tuple[int, int]] = []
        for first, table in self._at_once(records):
            indexes = pa.arange(first, first + len(table))
            errors: dict[int, str] = {}
            columns: list[pa.Array] = []
            for name, encoding in self.encodings.items():
                found = _column(encoding, table.field(name), errors, name)
                if found is None:
                    break
                columns.append(found)
            else:
                done.append((first, first + len(table)))
                yield Rows(indexes, columns, errors, {})
        begin = 0
        for first, end in [*done, (len(records), len(records))]:
            if begin < first:
                yield self._one_by_one(records.slice(begin, first - begin), begin)
            begin = end

    def _at_once(self, records: pa.BinaryArray) -> Iterator[tuple[int, pa.StructArray]]:
        types = {name: encoding.wire for name, encoding in self.encodings.items()}
        if len(records) < _FEWEST or None in types.values():
            return
        if not self.is_inferred:
            samples = [records[i].as_py() for i in (0, len(records) // 2, len(records) - 1)]
            types = {**_others_in(samples), **types}
        yield from json_table.read_parts(records, pa.schema(list(types.items())))

    def _one_by_one(self, records: pa.BinaryArray, first: int) -> Rows:
        errors: dict[int, str] = {}
        fatal: dict[int, str] = {}
        objects: list[dict[str, Any]] = []
        for i, record in enumerate(records.to_pylist()):
            found: dict[str, Any] = {}
            try:
                found, unknown = _known(_object(record), self.fields, "")
                if unknown and self.is_inferred:
                    fatal[i] = UNKNOWN_FIELDS + ", ".join(unknown)
            except UndecodableError as err:
                errors[i] = str(err)
            except Exception as err:
                # Whatever a record holds, it must not stop the query.
                errors[i] = f"{type(err).__name__}: {err}"
            objects.append(found)
        columns = []
        for name, encoding in self.encodings.items():
            decoded = decode(encoding, [found.get(name) for found in objects])
            _note(errors, decoded.errors, name)
            columns.append(decoded.values)
        return Rows(pa.arange(first, first + len(records)), columns, errors, fatal)

    def refuse_header(self, record: bytes) -> str | None:
        """There is none."""
        return None


def _object(record: bytes) -> dict[str, Any]:
    found = parse(text_of(record).strip(_SPACES.decode()), exact=True)
    if not isinstance(found, dict):
        msg = "the line is not a JSON object"
        raise UndecodableError(msg)
    return found


def _known(value: Any, dtype: T.DataType, path: str) -> tuple[Any, list[str]]:
    """The value without the fields that its type lacks, and the names of these."""
    unknown: list[str] = []
    if isinstance(value, dict) and isinstance(dtype, T.StructType):
        types = {field.name: field.dataType for field in dtype.fields}
        found: Any = {}
        for name, inner in value.items():
            if name in types:
                found[name], more = _known(inner, types[name], f"{path}{name}.")
                unknown += more
            else:
                unknown.append(path + name)
        return found, unknown
    if isinstance(value, list) and isinstance(dtype, T.ArrayType):
        return _each(value, dtype.elementType, path)
    if isinstance(value, dict) and isinstance(dtype, T.MapType):
        values, unknown = _each(list(value.values()), dtype.valueType, path)
        return dict(zip(value, values, strict=True)), unknown
    return value, unknown


def _each(values: list[Any], dtype: T.DataType, path: str) -> tuple[list[Any], list[str]]:
    if not isinstance(dtype, T.StructType | T.ArrayType | T.MapType):
        return values, []
    found = [_known(value, dtype, path) for value in values]
    return [value for value, _ in found], list(dict.fromkeys(name for _, unknown in found for name in unknown))


def _others_in(samples: list[bytes]) -> dict[str, pa.DataType]:
    """Types of the fields in some records, so that those which are left out do not make a record unexpected."""
    objects = []
    for sample in samples:
        try:
            objects.append(_object(sample))
        except UndecodableError:
            continue
    shape = json_table.shape_of(objects, pa.struct([]))
    return {one.name: one.type for one in shape}


# -- CSV ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CsvRecords:
    """Records of RFC 4180, of which Spark's reader has told where they end."""

    encodings: Mapping[str, Encoding]
    delimiter: str
    has_header: bool
    case_sensitive: bool
    are_counted: bool = field(default=False, init=False)
    """A record may have several lines, and Spark's reader leaves out empty ones."""

    def are_blank(self, records: pa.BinaryArray) -> pa.BooleanArray:
        """Spark's reader has left them out; a record of delimiters has empty fields."""
        return pc.equal(pc.binary_length(records), 0)

    def read(self, records: pa.BinaryArray) -> Iterator[Rows]:
        """As `Lines.read`."""
        split = csv_text.split(records, self.delimiter, len(self.encodings))
        errors = dict(split.errors)
        columns = []
        for (name, encoding), texts in zip(self.encodings.items(), split.columns, strict=True):
            if not isinstance(encoding.dtype, T.StringType):
                texts = pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)  # noqa: PLW2901
            found = _column(encoding, texts, errors, name)
            columns.append(texts if found is None else found)
        yield Rows(pa.arange(0, len(records)), columns, errors, {})

    def refuse_header(self, record: bytes) -> str | None:
        """By position values would land in the wrong columns."""
        fold: Callable[[str], str] = str if self.case_sensitive else str.lower
        wanted = list(self.encodings)
        try:
            found: list[str | None] = csv_text.fields_of(text_of(record), self.delimiter)
        except UndecodableError as err:
            return f"{OTHER_HEADER}{err}"
        if [fold(name or "") for name in found] == [fold(name) for name in wanted]:
            return None
        return f"{OTHER_HEADER}it has {', '.join(name or '' for name in found)}; the schema {', '.join(wanted)}"


# -- both --------------------------------------------------------------------------------------


def _column(encoding: Encoding, values: pa.Array, errors: dict[int, str], name: str) -> pa.Array | None:
    """A column of what Arrow has read; None where it has forgotten what was written."""
    found = None if encoding.many is None else encoding.many(values)
    if found is not None:
        return found
    if encoding.wire is None or pa.types.is_floating(encoding.wire) or json_table.holds_decimal(encoding.wire):
        return None  # a double may have been an integer, and a decimal has another number of digits
    decoded = decode(encoding, values.to_pylist())
    _note(errors, decoded.errors, name)
    return decoded.values


def _note(errors: dict[int, str], more: dict[int, str], name: str) -> None:
    for i, said in more.items():
        errors.setdefault(i, f"column {name!r}: {said}")


def _mask(count: int, places: Mapping[int, Any]) -> pa.BooleanArray:
    if not places:
        return pa.repeat(pa.scalar(False), count)
    return pc.is_in(pa.arange(0, count), value_set=pa.array(list(places), pa.int64()))


def _texts(count: int, texts: Mapping[int, str]) -> pa.StringArray:
    if not texts:
        return pa.nulls(count, pa.string())
    storable = {i: text.encode("utf-8", "backslashreplace").decode() for i, text in texts.items()}
    return pa.array([storable.get(i) for i in range(count)], pa.string())


def _places(read: pa.Int64Array, count: int) -> pa.Int64Array:
    """Where among the rows that were read each of the batch is."""
    return pc.index_in(pa.arange(0, count), value_set=read).cast(pa.int64())
