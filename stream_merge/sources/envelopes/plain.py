"""Plain JSON objects, one per record, with a schema that the job declares."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stream_merge.sources.envelopes.base import Kind, Read, ReadMany
from stream_merge.sources.wire import encodings as E
from stream_merge.sources.wire import json_table, times
from stream_merge.sources.wire.connect_json import DECLARED
from stream_merge.sources.wire.encodings import Encoding, folded, refuse, shown
from stream_merge.sources.wire.json_table import shape_of
from stream_merge.sources.wire.keys import JsonKey, KeyFormat
from stream_merge.sources.wire.strict_json import parse, text_of

_SCALARS: Mapping[str, Callable[[], Encoding]] = {
    "boolean": E.boolean,
    "tinyint": lambda: E.integer(8),
    "smallint": lambda: E.integer(16),
    "int": lambda: E.integer(32),
    "integer": lambda: E.integer(32),
    "bigint": lambda: E.integer(64),
    "long": lambda: E.integer(64),
    "float": lambda: E.floating(32),
    "double": lambda: E.floating(64),
    "string": E.string,
    "binary": E.binary,
    "date": times.date_of_text,
    "timestamp": lambda: times.timestamp_of_text(with_zone=True),
    "timestamp_ntz": lambda: times.timestamp_of_text(with_zone=False),
}
_DECIMAL = re.compile(r"(?:decimal|numeric)\((\d+)(?:,\s*(\d+))?\)")
_KEY_AND_VALUE = 2
_NESTED = re.compile(r"(array|map|struct)<(.*)>")


def encoding(declared: str) -> Encoding:
    """How a Spark type is written in JSON: numbers as numbers, dates and times as ISO 8601, bytes as base64.

    Args:
        declared: such as `bigint`, `decimal(10,2)`, `array<string>`, `map<string,int>`, `struct<a:int,b:date>`.

    Raises:
        UndecodableError: it is not such a type.
    """
    text = declared.strip().lower() if "struct" not in declared.lower() else declared.strip()
    if text in _SCALARS:
        return _SCALARS[text]()
    digits, nested = _DECIMAL.fullmatch(text), _NESTED.fullmatch(text)
    if digits:
        return E.decimal_of_text(int(digits[1]), int(digits[2] or 0))
    if nested and nested[1] == "array":
        return E.array_of(encoding(nested[2]))
    parts = _split(nested[2]) if nested else []
    if nested and nested[1] == "map" and len(parts) == _KEY_AND_VALUE and parts[0].strip() == "string":
        return E.map_of(encoding(parts[1]))
    named = [part.split(":", 1) for part in parts]
    if nested and nested[1] == "struct" and all(len(pair) == _KEY_AND_VALUE for pair in named):
        return E.struct_of({name.strip(): encoding(dtype) for name, dtype in named})
    refuse(
        f"{declared!r} is not a type that JSON can hold; known are {sorted(_SCALARS)!r}, decimal, array, map and struct"
    )


def _split(text: str) -> list[str]:
    """At the commas that are outside of brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "<(") - (char in ">)")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


@dataclass(kw_only=True)
class PlainJson:
    """Reads objects whose fields are the columns."""

    declared: Mapping[str, Encoding]
    position: str | None = None
    """Integer column that orders the events of a key; None: Kafka's order, for topics whose keys stay in their
    partitions."""
    deletes: tuple[str, Any] | None = None
    """Field, and the value that makes an event a delete. Not stored unless it is a declared column."""
    key: KeyFormat = field(default_factory=JsonKey)
    """How record keys are written."""
    key_completes: bool = False
    """Whether columns that a value lacks are taken from the record key; else only null-value records use it."""

    @property
    def is_declared(self) -> bool:
        """As `Format.is_declared`: always."""
        return True

    def read(self, key: bytes | None, value: bytes) -> Read:
        """As `Format.read`."""
        found = parse(text_of(value), exact=True)
        if not isinstance(found, dict):
            refuse("the value is not an object")
        names = self.declared.keys() | ({} if self.deletes is None else {self.deletes[0]})
        found = folded(found, names)
        if self.key_completes:
            found = {**folded(self.key.fields(key), names), **found}
        is_delete = False
        if self.deletes is not None:
            name, says = self.deletes
            is_delete = name in found and _are_the_same(found[name], says)
            if name not in self.declared:
                found = {field: value for field, value in found.items() if field != name}
        position: Any = 0 if self.position is None else found.get(self.position)
        if type(position) is not int:
            refuse(f"{self.position} is {shown(position)}, not an integer that orders the event")
        return Read(Kind.DELETE if is_delete else Kind.UPSERT, found, DECLARED, position)

    def encodings(self, schema_id: str) -> Mapping[str, Encoding]:
        """As `Format.encodings`; there is one schema."""
        return self.declared

    def read_many(self, values: pa.BinaryArray) -> Iterator[ReadMany]:
        """As `Format.read_many`."""
        row = {name: column.wire for name, column in self.declared.items()}
        marker, says = self.deletes or (None, None)
        around = {} if marker is None or marker in row else {marker: shape_of([says])}
        types = {**row, **around}
        if self.key_completes or None in types.values() or not self._can_compare(types):
            return
        for first, rows in json_table.read_parts(values, pa.schema(list(types.items()))):
            columns = [rows.field(name) for name in row]
            image = pa.StructArray.from_arrays(columns, fields=[pa.field(*field) for field in row.items()])
            is_delete = pa.repeat(pa.scalar(False), len(rows))
            if marker is not None:
                is_delete = pc.fill_null(pc.equal(rows.field(marker), pa.scalar(says, types[marker])), False)
            position = pa.repeat(pa.scalar(0, pa.int64()), len(rows))
            if self.position is not None:
                position = rows.field(self.position).cast(pa.int64())
            whole = json_table.lack_nothing(values.slice(first, len(rows)), rows, image, frozenset(around))
            found = ReadMany(
                indexes=pa.arange(first, first + len(rows)),
                schema_id=DECLARED,
                is_delete=is_delete,
                image=image,
                position=position,
                is_snapshot=pa.repeat(pa.scalar(False), len(rows)),
                source_millis=pa.nulls(len(rows), pa.int64()),
                connector=pa.nulls(len(rows), pa.string()),
                last_commit=pa.nulls(len(rows), pa.int64()),
                key_completes=False,
            )
            yield found.where(pc.and_(pc.or_(is_delete, whole), position.is_valid()))

    def _can_compare(self, types: Mapping[str, pa.DataType]) -> bool:
        """Whether Arrow finds deletes and positions as Python does, for whom 1 and 1.0 are the same."""
        is_integer = self.position is None or pa.types.is_signed_integer(types[self.position])
        return is_integer and (self.deletes is None or types[self.deletes[0]] == shape_of([self.deletes[1]]))


def _are_the_same(one: Any, other: Any) -> bool:
    """Values of JSON: to Python 1 is True, and 0 is False."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)
