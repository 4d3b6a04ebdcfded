"""Records of files in, rows out: what Spark's workers run. Each record is read exactly, or refused with the reason."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from stream_merge.sources.files import csv_text
from stream_merge.sources.wire import json_table
from stream_merge.sources.wire.encodings import Encoding, decode, folded
from stream_merge.sources.wire.strict_json import UndecodableError, parse, text_of
from stream_merge.spark.columns import resolve
from stream_merge.spark.versions import arrow_type

UNKNOWN_FIELDS = "a line has field(s) that the schema lacks: "
OTHER_HEADER = "CSV header does not conform to the schema: "
NOT_LINES = "the file is a JSON array or a multi-line object, not one JSON object per line"
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
    left_out: pa.StringArray | None = None
    """Names of the fields that have a value and no column; NULL for records without such a field."""


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

    @property
    def header(self) -> bytes | None:
        """The header of the file, where its columns are in another order than the schema's."""
        ...

    def read(self, records: pa.BinaryArray) -> Iterator[Rows]:
        """Read the records of a batch, each in one of the parts."""
        ...

    def of_file(self, first: bytes) -> tuple[Lines, str | None]:
        """Reads the file that begins with this record; and why it may not be merged, or None."""
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
        counted, readers = _Counted(), [self.lines]
        for records, files in batches:
            lines, starts = counted.lines(files)
            records, fatal, opened = self._without_beginnings(records, starts)  # noqa: PLW2901
            begins = [0, *(start for start in opened if start)]
            readers = [opened.get(0, readers[-1]), *(reader for start, reader in opened.items() if start)]
            ends = itertools.pairwise([*begins, len(records)])
            runs = [(begin, end, reader) for (begin, end), reader in zip(ends, readers, strict=True)]
            yield self._decoded(records, lines, starts, fatal, runs)

    def _decoded(
        self,
        records: pa.BinaryArray,
        lines: pa.Int64Array,
        starts: list[int],
        fatal: dict[int, str],
        runs: list[tuple[int, int, Lines]],
    ) -> pa.StructArray:
        count = len(records)
        is_event = pc.invert(self.lines.are_blank(records))
        if self.lines.has_header:
            is_event = pc.and_(is_event, pc.invert(_mask(count, starts)))
        given = pc.indices_nonzero(is_event).cast(pa.int64())
        parts: list[tuple[pa.Int64Array, Rows]] = []
        for begin, end, reader in runs:
            wanted = given.filter(pc.and_(pc.greater_equal(given, begin), pc.less(given, end)))
            if len(wanted):
                read = reader.read(records if len(wanted) == count else records.take(wanted))
                parts += [(wanted.take(part.indexes), part) for part in read]
        errors: dict[int, str] = {}
        for indexes, part in parts:
            errors |= {indexes[i].as_py(): said for i, said in part.errors.items()}
            fatal |= {indexes[i].as_py(): said for i, said in part.fatal.items()}
        is_row = pc.and_(is_event, pc.invert(_mask(count, errors)))
        place = _places(pa.concat_arrays([indexes for indexes, _ in parts] or [pa.array([], pa.int64())]), count)
        place = pc.if_else(is_row, place, pa.scalar(None, pa.int64()))
        left_out = [
            pa.nulls(len(part.indexes), pa.string()) if part.left_out is None else part.left_out for _, part in parts
        ]
        headers = [pa.repeat(pa.scalar(reader.header, pa.binary()), end - begin) for begin, end, reader in runs]
        found = {
            "is_event": pc.or_(is_event, _mask(count, fatal)),
            "error": _texts(count, errors),
            "fatal": _texts(count, fatal),
            "line": lines if self.lines.are_counted else pa.nulls(count, pa.int64()),
            "left_out": pa.concat_arrays(left_out or [pa.array([], pa.string())]).take(place),
            "header": pa.concat_arrays(headers),
            "row": self._rows([part.columns for _, part in parts], place),
        }
        return pa.StructArray.from_arrays(list(found.values()), names=list(found))

    def _rows(self, parts: list[list[pa.Array]], place: pa.Int64Array) -> pa.StructArray:
        columns, fields = [], []
        for n, one in enumerate(self.fields.fields):
            dtype = arrow_type(one.dataType)
            pieces = [columns_of[n].cast(dtype) for columns_of in parts]
            columns.append(pa.concat_arrays(pieces).take(place) if pieces else pa.nulls(len(place), dtype))
            fields.append(pa.field(one.name, dtype))
        return pa.StructArray.from_arrays(columns, fields=fields)

    def _without_beginnings(
        self, records: pa.BinaryArray, starts: list[int]
    ) -> tuple[pa.BinaryArray, dict[int, str], dict[int, Lines]]:
        """The records without byte order marks before them.

        Returns: also the places of files that may not be merged, with the reason, and of those that another reader
            reads than the files before them.
        """
        fatal: dict[int, str] = {}
        readers: dict[int, Lines] = {}
        changed: dict[int, bytes] = {}
        for start in starts:
            first: bytes = records[start].as_py()
            if first.startswith(_BOM):
                first = changed[start] = without_mark(first)
            reader, problem = self.lines.of_file(first)
            if problem is not None:
                fatal[start] = problem
            if not readers or reader.header != next(reversed(readers.values())).header:
                readers[start] = reader
        if changed:
            mask = _mask(len(records), changed)
            records = pc.replace_with_mask(records, mask, pa.array([changed[i] for i in sorted(changed)], pa.binary()))
        return records, fatal, readers


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
    case_sensitive: bool
    header: bytes | None = field(default=None, init=False)
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
        spelled, others = self._seen(records)
        for first, table in self._at_once(records, spelled, others):
            indexes = pa.arange(first, first + len(table))
            errors: dict[int, str] = {}
            columns: list[pa.Array] = []
            for name, encoding in self.encodings.items():
                found = _column(encoding, table.field(spelled.get(name, name)), errors, name)
                if found is None:
                    break
                columns.append(found)
            else:
                done.append((first, first + len(table)))
                yield Rows(indexes, columns, errors, {}, _left_out(table, others))
        begin = 0
        for first, end in [*done, (len(records), len(records))]:
            if begin < first:
                yield self._one_by_one(records.slice(begin, first - begin), begin)
            begin = end

    def _seen(self, records: pa.BinaryArray) -> tuple[dict[str, str], dict[str, pa.DataType]]:
        """How some of the records spell columns in another case, and the types of their fields that are none."""
        others = _others_in([records[i].as_py() for i in (0, len(records) // 2, len(records) - 1)])
        others = {name: dtype for name, dtype in others.items() if name not in self.encodings}
        meant = {name: resolve(name, list(self.encodings), case_sensitive=self.case_sensitive) for name in others}
        spelled = {column: name for name, column in meant.items() if column is not None}
        left_out = {} if self.is_inferred else {name: others[name] for name, column in meant.items() if column is None}
        return spelled, left_out

    def _at_once(
        self, records: pa.BinaryArray, spelled: Mapping[str, str], others: Mapping[str, pa.DataType]
    ) -> Iterator[tuple[int, pa.StructArray]]:
        types = {spelled.get(name, name): encoding.wire for name, encoding in self.encodings.items()}
        if len(records) >= _FEWEST and None not in types.values():
            yield from json_table.read_parts(records, pa.schema(list({**others, **types}.items())))

    def _one_by_one(self, records: pa.BinaryArray, first: int) -> Rows:
        errors: dict[int, str] = {}
        fatal: dict[int, str] = {}
        left_out: dict[int, str] = {}
        objects: list[dict[str, Any]] = []
        for i, record in enumerate(records.to_pylist()):
            found: dict[str, Any] = {}
            known = _Known(case_sensitive=self.case_sensitive, is_inferred=self.is_inferred)
            try:
                found = known.value(_object(record), self.fields)
                if known.others:
                    (fatal if self.is_inferred else left_out)[i] = ", ".join(sorted(known.others))
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
        fatal = {i: UNKNOWN_FIELDS + said for i, said in fatal.items()}
        return Rows(pa.arange(first, first + len(records)), columns, errors, fatal, _texts(len(records), left_out))

    def of_file(self, first: bytes) -> tuple[Lines, str | None]:
        """As `Lines.of_file`."""
        begun = first.strip(_SPACES)
        is_array_of_objects = begun[:1] == b"[" and begun[1:].lstrip(_SPACES)[:1] == b"{"
        return self, NOT_LINES if is_array_of_objects or begun in (b"{", b"[") else None


def _object(record: bytes) -> dict[str, Any]:
    found = parse(text_of(record).strip(_SPACES.decode()), exact=True)
    if not isinstance(found, dict):
        msg = "the line is not a JSON object"
        raise UndecodableError(msg)
    return found


@dataclass(kw_only=True, slots=True)
class _Known:
    """Brings values to the fields that their types have."""

    case_sensitive: bool
    is_inferred: bool
    """Whether also a field without a value is a surprise."""
    others: set[str] = field(default_factory=set)
    """Dotted names of the fields that a type lacks."""

    def value(self, value: Any, dtype: T.DataType, path: str = "") -> Any:
        """The value, without other fields.

        Raises:
            UndecodableError: two fields of an object have one name.
        """
        match dtype:
            case T.StructType() if isinstance(value, dict):
                types = {field.name: field.dataType for field in dtype.fields}
                fields = value if self.case_sensitive else folded(value, types.keys())
                others = fields.keys() - types.keys()
                self.others |= {path + name for name in others if self.is_inferred or fields[name] is not None}
                return {
                    name: self.value(inner, types[name], f"{path}{name}.")
                    for name, inner in fields.items()
                    if name not in others
                }
            case T.ArrayType() if isinstance(value, list):
                return [self.value(inner, dtype.elementType, path) for inner in value]
            case T.MapType() if isinstance(value, dict):
                return {name: self.value(inner, dtype.valueType, path) for name, inner in value.items()}
        return value


def _left_out(table: pa.StructArray, others: Iterable[str]) -> pa.StringArray | None:
    """As `Rows.left_out`, of records that Arrow has read."""
    given = [pc.if_else(table.field(name).is_valid(), f"{name}, ", "") for name in sorted(others)]
    if not given:
        return None
    joined = pc.utf8_slice_codeunits(pc.binary_join_element_wise(*given, ""), 0, -2)
    return pc.if_else(pc.equal(joined, ""), pa.scalar(None, pa.string()), joined)


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
    order: tuple[int, ...] | None = None
    """Where in a record each column of the schema is; None: in the schema's order."""
    header: bytes | None = None
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
        fields = split.columns if self.order is None else [split.columns[place] for place in self.order]
        for (name, encoding), texts in zip(self.encodings.items(), fields, strict=True):
            if not isinstance(encoding.dtype, T.StringType):
                texts = pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)  # noqa: PLW2901
            found = _column(encoding, texts, errors, name)
            columns.append(texts if found is None else found)
        yield Rows(pa.arange(0, len(records)), columns, errors, {})

    def of_file(self, first: bytes) -> tuple[Lines, str | None]:
        """As `Lines.of_file`: columns are read by their names in the header."""
        if not self.has_header:
            return self, None
        wanted = list(self.encodings)
        try:
            header = [name or "" for name in csv_text.fields_of(text_of(first), self.delimiter)]
        except UndecodableError as err:
            return self, f"{OTHER_HEADER}{err}"
        named = [resolve(name, header, case_sensitive=self.case_sensitive) for name in wanted]
        order = tuple(header.index(name) for name in named if name is not None)
        if len(set(order)) != len(wanted) or len(header) != len(wanted):
            return self, f"{OTHER_HEADER}it has {header!r}; the schema has {wanted!r}"
        return (self if order == tuple(range(len(wanted))) else replace(self, order=order, header=first)), None


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


def _mask(count: int, places: Collection[int]) -> pa.BooleanArray:
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
