"""CSV by RFC 4180: each field is read exactly as its column's type, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from functools import cache, partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from stream_merge.sources.envelopes import plain
from stream_merge.sources.envelopes.base import Declared, Kind, Read, ReadMany
from stream_merge.sources.wire import encodings as E
from stream_merge.sources.wire import many as M
from stream_merge.sources.wire import times
from stream_merge.sources.wire.encodings import Encoding, refuse, scalar, shown
from stream_merge.sources.wire.strict_json import UndecodableError, utf8_text
from stream_merge.spark.columns import resolve

OTHER_HEADER = "CSV header does not conform to the schema: "


@dataclass(kw_only=True)
class CsvRecords(Declared):
    """Records of RFC 4180; Spark's reader finds their ends."""

    delimiter: str
    has_header: bool
    case_sensitive: bool
    order: tuple[int, ...] | None = None
    """Index of each column of the schema in a record; None: the schema's order."""
    header: bytes | None = None
    """The file's, where its columns are in another order than the schema's."""
    are_counted: bool = field(default=False, init=False)
    """A record may have several lines, and Spark's reader drops empty ones."""

    def are_blank(self, records: pa.BinaryArray) -> pa.BooleanArray:
        """Which records are empty."""
        return pc.equal(pc.binary_length(records), 0)

    def read(self, key: bytes | None, value: bytes) -> Read:
        """A record, taken apart."""
        fields = _fields(value, self.delimiter, len(self.declared))
        texts = {name: fields[index] for name, index in self._indexes()}
        row = {name: text if text or self._is_text(name) else None for name, text in texts.items()}
        return Read(Kind.UPSERT, row, position=0)

    def read_many(self, values: pa.BinaryArray) -> Iterator[ReadMany]:
        """The records that have as many fields as the schema."""
        indexes, fields = split(values, self.delimiter, len(self.declared))
        columns = [fields[n] if self._is_text(name) else _null_if_empty(fields[n]) for name, n in self._indexes()]
        yield ReadMany.upserts(indexes, pa.StructArray.from_arrays(columns, names=list(self.declared)))

    def for_file(self, first: bytes) -> tuple[CsvRecords, str | None]:
        """The reader of a file by the names in its header, and why it must not be merged, or None."""
        if not self.has_header:
            return self, None
        wanted = list(self.declared)
        try:
            header = [name or "" for name in split_record(utf8_text(first), self.delimiter)]
        except UndecodableError as err:
            return self, f"{OTHER_HEADER}{err}"
        named = [resolve(name, header, case_sensitive=self.case_sensitive) for name in wanted]
        order = tuple(header.index(name) for name in named if name is not None)
        if len(set(order)) != len(wanted) or len(header) != len(wanted):
            return self, f"{OTHER_HEADER}it has {header!r}; the schema has {wanted!r}"
        return (self if order == tuple(range(len(wanted))) else replace(self, order=order, header=first)), None

    def _indexes(self) -> Iterator[tuple[str, int]]:
        return zip(self.declared, self.order or range(len(self.declared)), strict=True)

    def _is_text(self, name: str) -> bool:
        """Whether a quoted empty field is a value."""
        return isinstance(self.declared[name].dtype, T.StringType)


# -- records into fields -----------------------------------------------------------------------

_ESCAPED = {r"\t": "\t", r"\r": "\r", r"\b": "\b", r"\f": "\f", r"\\": "\\"}
"""Escapes of delimiters, as Spark reads them."""


def unescape_delimiter(written: str) -> str:
    """The characters of a delimiter that may be escaped."""
    return _ESCAPED.get(written, written)


def split(records: pa.BinaryArray, delimiter: str, width: int) -> tuple[pa.Int64Array, list[pa.StringArray]]:
    """The indexes of records with `width` fields, ascending, and their fields, NULL for an unquoted empty one."""
    plain_ones = pc.invert(pc.match_substring(records, b'"'))
    texts = _text(records.filter(plain_ones))
    if texts is None:
        plain_ones, texts = pa.repeat(pa.scalar(False), len(records)), pa.array([], pa.string())
    lists = pc.split_pattern(texts, delimiter)
    fits = pc.equal(pc.list_value_length(lists), width)
    at, flat = pc.indices_nonzero(plain_ones).cast(pa.int64()).filter(fits), lists.filter(fits).flatten()
    first = pc.multiply(pa.arange(0, len(at)), width)
    columns = [_null_if_empty(flat.take(pc.add(first, n))) for n in range(width)]
    others: dict[int, list[str | None]] = {}
    for i in pc.indices_nonzero(pc.invert(plain_ones)).to_pylist():
        with suppress(UndecodableError):
            others[i] = _fields(records[i].as_py(), delimiter, width)
    if not others:
        return at, columns
    at = pa.concat_arrays([at, pa.array(others, pa.int64())])
    order = pc.sort_indices(at)
    more = [pa.array([fields[n] for fields in others.values()], pa.string()) for n in range(width)]
    return at.take(order), [pa.concat_arrays(both).take(order) for both in zip(columns, more, strict=True)]


def split_record(text: str, delimiter: str) -> list[str | None]:
    """The fields of one record; None for an unquoted empty one."""
    if '"' not in text:
        return [part or None for part in text.split(delimiter)]
    fields: list[str | None] = []
    start, pattern = 0, _pattern(delimiter)
    while True:
        match = pattern.match(text, start)
        if match is None:
            refuse(f"the quote at character {start + 1} is not closed, or something but a delimiter stands behind it")
        quoted = match["quoted"]
        fields.append(match["plain"] or None if quoted is None else quoted.replace('""', '"'))
        if not match["end"]:
            return fields
        start = match.end()


def _fields(record: bytes, delimiter: str, width: int) -> list[str | None]:
    fields = split_record(utf8_text(record), delimiter)
    return fields if len(fields) == width else refuse(f"the record has {len(fields)} field(s), the schema {width}")


@cache
def _pattern(delimiter: str) -> re.Pattern[str]:
    end = re.escape(delimiter)
    return re.compile(rf'(?:"(?P<quoted>[^"]*(?:""[^"]*)*)"|(?P<plain>(?!")(?:(?!{end})[\s\S])*))(?P<end>{end}|\Z)')


def _text(records: pa.BinaryArray) -> pa.StringArray | None:
    try:
        return records.cast(pa.string())
    except pa.ArrowException:  # not UTF-8
        return None


def _null_if_empty(texts: pa.StringArray) -> pa.StringArray:
    return pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)


# -- fields into values ------------------------------------------------------------------------


def encoding(dtype: T.DataType, zone: str, *, keeps_spelling: bool = False) -> Encoding:
    """Encoding of a type; `zone` is for TIMESTAMPs without one, `keeps_spelling` refuses numbers such as 007."""
    if keeps_spelling and isinstance(dtype, T.NumericType):
        return _as_spelled(encoding(dtype, zone))
    if isinstance(dtype, T.DecimalType):
        exact = E.decimal_from_text(dtype.precision, dtype.scale)
        return _from_text(exact, _number, partial(_decimals, dtype=dtype))
    if isinstance(dtype, T.TimestampType):
        return times.timestamp_from_text(with_zone=True, zone=zone)
    if type(dtype) not in _FROM_TEXT and type(dtype) not in _AS_IN_JSON:
        refuse(f"CSV holds no {dtype.simpleString()}")
    inner = plain.encoding(dtype)
    return inner if type(dtype) in _AS_IN_JSON else _FROM_TEXT[type(dtype)](inner)


def _from_text(inner: Encoding, parse: Callable[[str], Any], many: M.Many) -> Encoding:
    """Encoding of a value other than text: spaces around it are ignored."""

    def all_at_once(texts: pa.Array) -> pa.Array | None:
        return many(pc.ascii_trim_whitespace(texts))

    def one(text: str) -> Any:
        return inner.one(parse(text.strip()))

    return scalar(inner.dtype, inner.arrow, one, str, wire=pa.string(), many=all_at_once)


RESPELLED = r"^\s*([+]|-?0[0-9])"
"""Numbers whose spelling a number type loses: 007, +49."""


def _as_spelled(inner: Encoding) -> Encoding:
    def one(text: str) -> Any:
        if re.match(RESPELLED, text):
            refuse(
                f"{shown(text)} would be stored as a number, without its {'plus' if '+' in text else 'zeros'}, though"
                " only earlier files say that the column is one; pass --schema with the column's type"
            )
        return inner.one(text)

    def many(texts: pa.Array) -> pa.Array | None:
        is_respelled = pc.any(pc.match_substring_regex(texts, RESPELLED)).as_py()
        return None if is_respelled or inner.many is None else inner.many(texts)

    return scalar(inner.dtype, inner.arrow, one, str, wire=pa.string(), many=many)


def _bytes(inner: Encoding) -> Encoding:
    """Encoding of a field's own bytes."""
    return scalar(inner.dtype, inner.arrow, str.encode, str, wire=pa.string(), many=lambda t: t.cast(pa.binary()))


_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,5})?")
_NOT_NUMBERS = {"nan": "NaN", "inf": "Infinity", "infinity": "Infinity"}
_BOOLEANS = {
    **dict.fromkeys(("t", "true", "y", "yes", "1"), True),
    **dict.fromkeys(("f", "false", "n", "no", "0"), False),
}


def _boolean(text: str) -> bool:
    value = _BOOLEANS.get(text.lower())
    return value if value is not None else refuse(f"{shown(text)} is not a boolean")


def _booleans(texts: pa.Array) -> pa.Array | None:
    lower = pc.ascii_lower(texts)
    is_true = pc.is_in(lower, value_set=pa.array([name for name, value in _BOOLEANS.items() if value]))
    known = pc.is_in(lower, value_set=pa.array([*_BOOLEANS, None]))
    return pc.if_else(texts.is_valid(), is_true, pa.scalar(None, pa.bool_())) if pc.all(known).as_py() else None


def _integer(text: str) -> int:
    return int(text) if _INTEGER.fullmatch(text) else refuse(f"{shown(text)} is not an integer")


def _integers(texts: pa.Array, *, dtype: pa.DataType) -> pa.Array | None:
    return _cast(texts, dtype) if M.all_match(texts, "^-?[0-9]{1,19}$") else None


def _number(text: str) -> Decimal:
    try:
        return Decimal(text) if _NUMBER.fullmatch(text) else refuse(f"{shown(text)} is not a number")
    except InvalidOperation:
        refuse(f"{shown(text)} is not a number")


def _decimals(texts: pa.Array, *, dtype: T.DecimalType) -> pa.Array | None:
    whole, scale = dtype.precision - dtype.scale, dtype.scale
    fraction = rf"(\.[0-9]{{1,{scale}}})?" if scale else ""
    if not whole or not M.all_match(texts, f"^-?[0-9]{{1,{whole}}}{fraction}$"):
        return None
    return _cast(texts, pa.decimal128(dtype.precision, scale))


def _floating(text: str) -> int | Decimal | str:
    name = _NOT_NUMBERS.get(text.lstrip("+-").lower())
    if name is not None:
        return f"-{name}" if text.startswith("-") and name != "NaN" else name
    return int(text) if _INTEGER.fullmatch(text) else _number(text)


def _floats(texts: pa.Array, *, inner: Encoding) -> pa.Array | None:
    if not M.all_match(texts, r"^-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,5})?$"):
        return None
    numbers = _cast(texts, pa.float64())
    return None if numbers is None or inner.many is None else inner.many(numbers)


def _cast(texts: pa.Array, dtype: pa.DataType) -> pa.Array | None:
    try:
        return texts.cast(dtype)
    except pa.ArrowException:
        return None


_AS_IN_JSON = (T.StringType, T.DateType, T.TimestampNTZType)
_FROM_TEXT: dict[type[T.DataType], Callable[[Encoding], Encoding]] = {
    T.BooleanType: lambda inner: _from_text(inner, _boolean, _booleans),
    **dict.fromkeys(
        (T.ByteType, T.ShortType, T.IntegerType, T.LongType),
        lambda inner: _from_text(inner, _integer, partial(_integers, dtype=inner.arrow)),
    ),
    **dict.fromkeys(
        (T.FloatType, T.DoubleType), lambda inner: _from_text(inner, _floating, partial(_floats, inner=inner))
    ),
    T.BinaryType: _bytes,
}
