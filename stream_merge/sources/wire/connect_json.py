"""Records of Kafka Connect's JSON converter (Kafka 4.1), with or without schema blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column
from pyspark.sql import types as T

from stream_merge.sources.wire import connect_schema, json_table
from stream_merge.sources.wire.encodings import Encoding, folded, refuse
from stream_merge.sources.wire.keys import WITH_BLOCK
from stream_merge.sources.wire.strict_json import UndecodableError, parse, utf8_text

DECLARED = ""
"""Id of the schema that the job declares."""
_SCHEMA_START, _PAYLOAD_START = '{"schema":{', ',"payload":'
_SAMPLES = 16
_MOST_STARTS = 100
"""Schema blocks that are cached by their text; each costs a comparison per record."""


RowSchema = Callable[[Mapping[str, Any]], "Mapping[str, Any] | None"]
"""The schema of the row inside a record's schema, as its envelope knows; None for records without a row."""


class Payloads(NamedTuple):
    """Payloads in one schema."""

    indexes: pa.Int64Array
    """Which of the given records they are, ascending."""
    texts: pa.BinaryArray
    schema_id: str

    def read(self, schema: pa.Schema) -> Iterator[tuple[Payloads, pa.StructArray]]:
        """The parts that `json_table` can read, each with its rows."""
        for first, rows in json_table.read_parts(self.texts, schema):
            indexes, texts = (values.slice(first, len(rows)) for values in (self.indexes, self.texts))
            yield Payloads(indexes, texts, self.schema_id), rows


@dataclass(kw_only=True)
class ConnectJson:
    """Unwraps records; caches their schema blocks, which repeat from record to record. Sent to the workers."""

    row_schema: RowSchema
    declared: Mapping[str, Encoding] | None = None
    """Column -> encoding in records without a schema block; None: such a row is refused."""
    placeholder: str = connect_schema.PLACEHOLDER
    """Debezium's `unavailable.value.placeholder`."""
    wanted: Mapping[str, T.DataType] = field(default_factory=dict)
    """Column -> type that the job declares for numbers of open scale."""
    reads: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Fields of a record that are read where it has all of these, with those of their own fields; others need not be
    transcoded. Empty: all."""
    _known_starts: dict[str, str | None] = field(default_factory=dict, repr=False)
    """Text of a record up to its payload -> schema id."""
    _known: dict[str, Mapping[str, Encoding]] = field(default_factory=dict, repr=False)
    _shapes: dict[str, pa.StructType] = field(default_factory=dict, repr=False)
    """Schema id -> result of `shape`."""

    @property
    def is_declared(self) -> bool:
        """Whether columns are declared for records without a schema block."""
        return self.declared is not None

    def text(self) -> Column | None:
        """Record values as `parse` takes them; None: as they are."""
        return None

    def registered(self, values: Iterable[bytes | None]) -> set[str] | None:
        """Ids of the registered schemas of record values; None: they have none."""
        del values
        return None

    def parse(self, value: bytes) -> tuple[Mapping[str, Any], str | None]:
        """The payload of a record, and the id of the schema of its row; None where it has none."""
        payload, schema_id = self._unwrapped(utf8_text(value))
        if not isinstance(payload, dict):
            refuse("the value is not an object")
        return payload, schema_id

    def named(self, fields: Mapping[str, Any], schema_id: str | None) -> Mapping[str, Any]:
        """The fields of a row by the names of its schema; a schema block spells them as its row does."""
        return fields if self.declared is None or schema_id != DECLARED else folded(fields, self.declared.keys())

    def _unwrapped(self, text: str) -> tuple[Any, str | None]:
        for start, schema_id in self._known_starts.items():
            if text.startswith(start) and text.endswith("}"):
                return parse(text[len(start) : -1], begins_at=len(start)), schema_id
        value = parse(text)
        without = None if self.declared is None else DECLARED
        if not isinstance(value, dict) or value.keys() != WITH_BLOCK:
            return value, without
        block, payload = value["schema"], value["payload"]
        if block is None:
            return payload, without
        if not isinstance(block, dict):
            refuse("the schema block is not an object")
        row = self.row_schema(block)
        schema_id = None if row is None else connect_schema.canonical({"type": "struct", "fields": row.get("fields")})
        self._cache_start(text, schema_id)
        return payload, schema_id

    def _cache_start(self, text: str, schema_id: str | None) -> None:
        """A record that starts with the same characters, up to the payload, has the same schema block."""
        if not text.startswith(_SCHEMA_START) or len(self._known_starts) >= _MOST_STARTS:
            return
        _, end = json.JSONDecoder().raw_decode(text, len(_SCHEMA_START) - 1)
        if text.startswith(_PAYLOAD_START, end):
            self._known_starts[text[: end + len(_PAYLOAD_START)]] = schema_id

    def payloads(self, values: pa.BinaryArray) -> Iterator[Payloads]:
        """The payloads of records by the schema of their row, without those that `parse` has not read yet.

        Args:
            values: none of them NULL.
        """
        rest, texts = pa.arange(0, len(values)), values
        for start, schema_id in self._known_starts.items():
            if schema_id is None:
                continue
            begun = start.encode()
            has_schema = pc.and_(pc.starts_with(texts, begun), pc.ends_with(texts, pattern=b"}"))
            if pc.any(has_schema).as_py():
                payloads = pc.binary_slice(texts.filter(has_schema), len(begun), -1)
                yield Payloads(rest.filter(has_schema), payloads, schema_id)
                others = pc.invert(has_schema)
                rest, texts = rest.filter(others), texts.filter(others)
        if self.declared is not None and len(rest):
            yield Payloads(rest, texts, DECLARED)

    def row_type(self, schema_id: str) -> pa.StructType | None:
        """The type of a row in Arrow's JSON reader; None where it cannot read one of the columns."""
        try:
            types = {name: encoding.wire for name, encoding in self.encodings(schema_id).items()}
        except UndecodableError:
            return None
        return None if None in types.values() else pa.struct(list(types.items()))

    def shape(self, schema_id: str, texts: pa.BinaryArray, *, without: frozenset[str]) -> pa.StructType:
        """The type of payloads without the fields that are or hold the row, as far as samples show it."""
        samples = []
        for text in texts.take(pa.arange(0, len(texts), len(texts) // _SAMPLES + 1)).to_pylist():
            with suppress(UndecodableError):
                sample = parse(utf8_text(text))
                if isinstance(sample, dict):
                    samples.append({name: value for name, value in sample.items() if name not in without})
        self._shapes[schema_id] = json_table.infer_shape(samples, self._shapes.get(schema_id, pa.struct([])))
        return self._shapes[schema_id]

    def encodings(self, schema_id: str) -> Mapping[str, Encoding]:
        """The encodings of a schema's columns."""
        if schema_id == DECLARED:
            if self.declared is None:
                refuse("the job declares no columns")
            return self.declared
        if schema_id not in self._known:
            self._known[schema_id] = self.columns(json.loads(schema_id))
        return self._known[schema_id]

    def columns(self, row: Mapping[str, Any]) -> Mapping[str, Encoding]:
        """The encodings of the columns of a row's schema."""
        return {
            name: connect_schema.encoding(inner, placeholder=self.placeholder, wanted=self.wanted.get(name))
            for name, inner in connect_schema.fields(row).items()
        }
