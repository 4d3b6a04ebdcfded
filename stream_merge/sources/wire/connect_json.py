"""Records of Kafka Connect's JSON converter (Kafka 4.1): with a schema block in each record, or without."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from stream_merge.sources.wire import connect_schema, json_table
from stream_merge.sources.wire.base import Payloads, RowOf
from stream_merge.sources.wire.encodings import Encoding, folded, refuse
from stream_merge.sources.wire.keys import WITH_BLOCK
from stream_merge.sources.wire.strict_json import UndecodableError, parse, text_of

DECLARED = ""
"""Id of the schema that the job declares."""
_SCHEMA_START, _PAYLOAD_START = '{"schema":{', ',"payload":'
_SAMPLES = 16
_MOST_STARTS = 100
"""So many different schema blocks are remembered by their text; each costs a comparison per record."""


@dataclass(kw_only=True)
class ConnectJson:
    """Unwraps records; remembers the schema blocks that it has seen, which repeat from record to record."""

    row_of: RowOf
    declared: Mapping[str, Encoding] | None = None
    """How columns are written in records without a schema block; None: such a row is refused."""
    placeholder: str = connect_schema.PLACEHOLDER
    """Debezium's `unavailable.value.placeholder`."""
    wanted: Mapping[str, T.DataType] = field(default_factory=dict)
    """Types that the job declares for columns whose digits are open."""
    _known_starts: dict[str, str | None] = field(default_factory=dict, repr=False)
    """Text of a record up to its payload -> schema id."""
    _known: dict[str, Mapping[str, Encoding]] = field(default_factory=dict, repr=False)
    _shapes: dict[str, pa.StructType] = field(default_factory=dict, repr=False)
    """Schema id -> what is around the rows."""

    @property
    def is_declared(self) -> bool:
        """As `Format.is_declared`."""
        return self.declared is not None

    def parse(self, value: bytes) -> tuple[Mapping[str, Any], str | None]:
        """As `Wire.parse`."""
        payload, schema_id = self._unwrapped(text_of(value))
        if not isinstance(payload, dict):
            refuse("the value is not an object")
        return payload, schema_id

    def named(self, fields: Mapping[str, Any], schema_id: str | None) -> Mapping[str, Any]:
        """As `Wire.named`; a schema block spells them as its row does."""
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
        row = self.row_of(block)
        found = None if row is None else connect_schema.canonical({"type": "struct", "fields": row.get("fields")})
        self._remember_start(text, found)
        return payload, found

    def _remember_start(self, text: str, schema_id: str | None) -> None:
        """A record that starts with the same characters, up to the payload, has the same schema block."""
        if not text.startswith(_SCHEMA_START) or len(self._known_starts) >= _MOST_STARTS:
            return
        _, end = json.JSONDecoder().raw_decode(text, len(_SCHEMA_START) - 1)
        if text.startswith(_PAYLOAD_START, end):
            self._known_starts[text[: end + len(_PAYLOAD_START)]] = schema_id

    def payloads(self, values: pa.BinaryArray) -> Iterator[Payloads]:
        """As `Wire.payloads`."""
        rest, texts = pa.arange(0, len(values)), values
        for start, schema_id in self._known_starts.items():
            if schema_id is None:
                continue
            begun = start.encode()
            found = pc.and_(pc.starts_with(texts, begun), pc.ends_with(texts, pattern=b"}"))
            if pc.any(found).as_py():
                yield Payloads(rest.filter(found), pc.binary_slice(texts.filter(found), len(begun), -1), schema_id)
                others = pc.invert(found)
                rest, texts = rest.filter(others), texts.filter(others)
        if self.declared is not None and len(rest):
            yield Payloads(rest, texts, DECLARED)

    def row_type(self, schema_id: str) -> pa.StructType | None:
        """As `Wire.row_type`."""
        try:
            types = {name: encoding.wire for name, encoding in self.encodings(schema_id).items()}
        except UndecodableError:
            return None
        return None if None in types.values() else pa.struct(list(types.items()))

    def shape(self, schema_id: str, texts: pa.BinaryArray, *, without: frozenset[str]) -> pa.StructType:
        """As `Wire.shape`."""
        samples = []
        for text in texts.take(pa.arange(0, len(texts), len(texts) // _SAMPLES + 1)).to_pylist():
            with suppress(UndecodableError):
                sample = parse(text_of(text))
                if isinstance(sample, dict):
                    samples.append({name: value for name, value in sample.items() if name not in without})
        self._shapes[schema_id] = json_table.shape_of(samples, self._shapes.get(schema_id, pa.struct([])))
        return self._shapes[schema_id]

    def encodings(self, schema_id: str) -> Mapping[str, Encoding]:
        """As `Format.encodings`."""
        if schema_id == DECLARED:
            if self.declared is None:
                refuse("the job declares no columns")
            return self.declared
        if schema_id not in self._known:
            self._known[schema_id] = {
                name: connect_schema.encoding(inner, placeholder=self.placeholder, wanted=self.wanted.get(name))
                for name, inner in connect_schema.fields(json.loads(schema_id)).items()
            }
        return self._known[schema_id]
