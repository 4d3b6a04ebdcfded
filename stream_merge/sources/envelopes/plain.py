"""Rows without envelope: JSON objects whose columns the job declares, or rows of a schema that each record has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from stream_merge.sources.envelopes.base import ConnectFormat, Declared, Format, Kind, Read, ReadMany
from stream_merge.sources.wire import encodings as E
from stream_merge.sources.wire import json_table, times
from stream_merge.sources.wire.connect_json import DECLARED, Payloads
from stream_merge.sources.wire.encodings import Encoding, folded, refuse, shown
from stream_merge.sources.wire.json_table import infer_shape
from stream_merge.sources.wire.strict_json import parse, utf8_text

SCALARS: Mapping[type[T.DataType], Callable[[], Encoding]] = {
    T.BooleanType: E.boolean,
    T.ByteType: partial(E.integer, 8),
    T.ShortType: partial(E.integer, 16),
    T.IntegerType: partial(E.integer, 32),
    T.LongType: partial(E.integer, 64),
    T.FloatType: partial(E.floating, 32),
    T.DoubleType: partial(E.floating, 64),
    T.StringType: E.string,
    T.BinaryType: E.binary,
    T.DateType: times.date_from_text,
    T.TimestampType: partial(times.timestamp_from_text, with_zone=True),
    T.TimestampNTZType: partial(times.timestamp_from_text, with_zone=False),
}
"""Scalar type -> its encoding in JSON."""
_NAMES = {dtype().simpleString(): dtype() for dtype in SCALARS} | {"integer": T.IntegerType(), "long": T.LongType()}
_DECIMAL = re.compile(r"(?:decimal|numeric)\((\d+)(?:,\s*(\d+))?\)")
_KEY_AND_VALUE = 2
_NESTED = re.compile(r"(array|map|struct)<(.*)>")


def encoding(dtype: T.DataType, scalars: Mapping[type[T.DataType], Callable[[], Encoding]] = SCALARS) -> Encoding:
    """Encoding of a Spark type in JSON: dates and times in ISO 8601, bytes in base64. Raises `UndecodableError`."""
    match dtype:
        case T.ArrayType():
            return E.array_encoding(encoding(dtype.elementType, scalars))
        case T.MapType(keyType=T.StringType()):
            return E.map_encoding(encoding(dtype.valueType, scalars))
        case T.StructType():
            if len(set(dtype.names)) < len(dtype.names):
                refuse(f"{dtype.simpleString()} has a field twice")
            return E.struct_encoding({field.name: encoding(field.dataType, scalars) for field in dtype.fields})
        case T.DecimalType():
            return E.decimal_from_text(dtype.precision, dtype.scale)
        case _ if type(dtype) in scalars:
            return scalars[type(dtype)]()
    refuse(f"JSON holds no {dtype.simpleString()}")


def declared_type(declared: str) -> T.DataType:
    """The type that a job file declares, such as `struct<a:int,b:date>`; Spark's own parser needs a JVM."""
    text = declared.strip().lower() if "struct" not in declared.lower() else declared.strip()
    if text in _NAMES:
        return _NAMES[text]
    digits, nested = _DECIMAL.fullmatch(text), _NESTED.fullmatch(text)
    if digits:
        return T.DecimalType(int(digits[1]), int(digits[2] or 0))
    if nested and nested[1] == "array":
        return T.ArrayType(declared_type(nested[2]))
    parts = _split(nested[2]) if nested else []
    if nested and nested[1] == "map" and len(parts) == _KEY_AND_VALUE and parts[0].strip() == "string":
        return T.MapType(T.StringType(), declared_type(parts[1]))
    named = [part.split(":", 1) for part in parts]
    if nested and nested[1] == "struct" and all(len(pair) == _KEY_AND_VALUE for pair in named):
        return T.StructType([T.StructField(name.strip(), declared_type(dtype)) for name, dtype in named])
    refuse(
        f"{declared!r} is not a type that JSON can hold; known are {sorted(_NAMES)!r}, decimal, array, map and struct"
    )


def declared_encoding(declared: str) -> Encoding:
    """Encoding in JSON of the type that a job file declares."""
    return encoding(declared_type(declared))


def _split(text: str) -> list[str]:
    """The parts between commas outside of brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "<(") - (char in ">)")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


@dataclass(kw_only=True)
class Rows(Format):
    """A format of rows without envelope: their fields are the columns."""

    position: str | None = None
    """Integer column that orders the events of a key; None: Kafka's order, if keys stay in their partitions."""
    deletes: tuple[str, Any] | None = None
    """Field and its value in deletes. Not stored unless it is a column of the schema."""

    def _event(self, row: Mapping[str, Any], schema_id: str) -> Read:
        """The change that a row is."""
        is_delete = False
        if self.deletes is not None:
            name, marker = self.deletes
            is_delete = name in row and _are_equal(row[name], marker)
            if name not in self.encodings(schema_id):
                row = {field: value for field, value in row.items() if field != name}
        position: Any = 0 if self.position is None else row.get(self.position)
        if type(position) is not int:
            refuse(f"{self.position} is {shown(position)}, not an integer that orders the event")
        return Read(Kind.DELETE if is_delete else Kind.UPSERT, row, schema_id, position)

    def _events(self, payloads: Payloads) -> Iterator[ReadMany]:
        """The changes that rows of one schema are, where they surely have all columns and no other field."""
        wires = {name: column.wire for name, column in self.encodings(payloads.schema_id).items()}
        name, marker = self.deletes or (None, None)
        around = {} if name is None or name in wires else {name: infer_shape([marker])}
        types = {**wires, **around}
        if None in types.values() or not self._can_compare(types):
            return
        for part, rows in payloads.read(pa.schema(list(types.items()))):
            columns = [rows.field(column) for column in wires]
            image = pa.StructArray.from_arrays(columns, fields=[pa.field(*field) for field in wires.items()])
            is_delete = pa.repeat(pa.scalar(False), len(rows))
            if name is not None:
                is_delete = pc.fill_null(pc.equal(rows.field(name), pa.scalar(marker, types[name])), False)
            position = pa.repeat(pa.scalar(0, pa.int64()), len(rows))
            if self.position is not None:
                position = rows.field(self.position).cast(pa.int64())
            whole = json_table.lack_nothing(part.texts, rows, image, frozenset(around))
            upserts = ReadMany.upserts(part.indexes, image)
            read = upserts._replace(schema_id=part.schema_id, is_delete=is_delete, position=position)
            yield read.where(pc.and_(pc.or_(is_delete, whole), position.is_valid()))

    def _can_compare(self, types: Mapping[str, pa.DataType]) -> bool:
        """Whether Arrow compares deletes and positions as Python, where 1 equals 1.0."""
        position = None if self.position is None else types.get(self.position, pa.null())
        is_integer = position is None or pa.types.is_signed_integer(position)
        return is_integer and (self.deletes is None or types[self.deletes[0]] == infer_shape([self.deletes[1]]))


@dataclass(kw_only=True)
class PlainJson(Rows, Declared):
    """Reads objects with declared columns."""

    key_completes: bool = False
    """Whether missing columns are taken from the record key; else only null-value records use it."""

    def read(self, key: bytes | None, value: bytes) -> Read:
        """An object, taken apart."""
        row = parse(utf8_text(value), exact=True)
        if not isinstance(row, dict):
            refuse("the value is not an object")
        names = self.declared.keys() | ({} if self.deletes is None else {self.deletes[0]})
        row = folded(row, names)
        if self.key_completes:
            row = {**folded(self.key.fields(key), names), **row}
        return self._event(row, DECLARED)

    def read_many(self, values: pa.BinaryArray) -> Iterator[ReadMany]:
        """Objects that surely have all columns and no other field."""
        if not self.key_completes:
            yield from self._events(Payloads(pa.arange(0, len(values)), values, DECLARED))


@dataclass(kw_only=True)
class Plain(Rows, ConnectFormat):
    """Reads rows of a schema that each record has; `wire` unwraps them by `row_schema`."""

    def read(self, key: bytes | None, value: bytes) -> Read:
        """A row."""
        row, schema_id = self.wire.parse(value)
        if schema_id is None:
            refuse("the record is not a row with a schema")
        return self._event(row, schema_id)

    def read_many(self, values: pa.BinaryArray) -> Iterator[ReadMany]:
        """Rows that Arrow reads exactly."""
        for payloads in self.wire.payloads(values):
            if self.wire.row_type(payloads.schema_id) is not None:
                yield from self._events(payloads)


def row_schema(block: Mapping[str, Any], *, marker: str | None) -> Mapping[str, Any] | None:
    """The columns of a record, from its schema: all fields but the one that marks deletes."""
    if block.get("type") != "struct" or not isinstance(block.get("fields"), list):
        return None
    return {"type": "struct", "fields": [field for field in block["fields"] if field.get("field") != marker]}


def _are_equal(one: Any, other: Any) -> bool:
    """Whether JSON values are equal: in Python 1 is True, and 0 is False."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)
