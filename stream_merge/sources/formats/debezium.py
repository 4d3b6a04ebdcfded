"""Debezium's envelope in JSON (Debezium 3.4, Kafka 4.1's JsonConverter), with its schema in each record or without."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from pyspark.sql import types as T

from stream_merge.sources.formats import base, connect_schema
from stream_merge.sources.formats.base import Kind, Read
from stream_merge.sources.formats.encodings import Encoding
from stream_merge.sources.formats.strict_json import UndecodableError, parse, text_of

_UPSERTS = frozenset("cur")
_SNAPSHOT_READS = frozenset({True, "true", "first", "first_in_data_collection", "last_in_data_collection", "last"})
"""Values of `source.snapshot` in initial and blocking snapshots; "incremental" reads go with the stream."""
_SCHEMA_START, _PAYLOAD_START = '{"schema":{', ',"payload":'
_MOST_STARTS = 100
"""So many different schema blocks are remembered by their text; each costs a comparison per record."""
_WITH_BLOCK = frozenset({"schema", "payload"})


@dataclass(kw_only=True)
class DebeziumJson:
    """Reads envelopes; remembers the schema blocks that it has seen, which repeat from record to record."""

    declared: Mapping[str, Encoding] | None = None
    """How columns are written in records without a schema block; None: such a record is refused."""
    placeholder: str = connect_schema.PLACEHOLDER
    """Debezium's `unavailable.value.placeholder`."""
    wanted: Mapping[str, T.DataType] = field(default_factory=dict)
    """Types that the job declares for columns whose digits are open."""
    _known_starts: dict[str, str] = field(default_factory=dict, repr=False)
    """Text of a record up to its payload -> schema id."""
    _known: dict[str, Mapping[str, Encoding]] = field(default_factory=dict, repr=False)

    def read(self, key: bytes | None, value: bytes) -> Read:
        """As `Format.read`."""
        payload, schema_id = self._unwrapped(text_of(value))
        if not isinstance(payload, dict):
            _refuse("the value is not an object")
        op = payload.get("op")
        if op in _UPSERTS or op == "d":
            return self._row_event(op, payload, key, schema_id)
        if op == "t":
            return Read(Kind.TRUNCATE)
        reason = base.MESSAGE if op == "m" else _side_record(payload)
        if reason is None:
            _refuse(f"op is {op!r}, which is none of c, u, d, r, t, m")
        return Read(Kind.FILTERED, note=reason)

    def _row_event(self, op: str, payload: Mapping[str, Any], key: bytes | None, schema_id: str | None) -> Read:
        source = payload.get("source")
        if not isinstance(source, dict):
            _refuse("the event has no source")
        position = source.get("lsn")
        if type(position) is not int:
            _refuse(f"source.lsn is {position!r}, not a position in PostgreSQL's log")
        if schema_id is None:
            _refuse("the event has no schema block, and the job declares no columns")
        image = payload.get("before" if op == "d" else "after")
        if op == "d":
            fields = {**self.key_fields(key), **{n: v for n, v in (image or {}).items() if v is not None}}
        elif isinstance(image, dict):
            fields = image
        else:
            _refuse(f"an event with op {op!r} has no row in `after`")
        millis = source.get("ts_ms")
        return Read(
            Kind.DELETE if op == "d" else Kind.UPSERT,
            fields,
            schema_id,
            position,
            source.get("snapshot") in _SNAPSHOT_READS,
            millis if type(millis) is int else None,
        )

    def key_fields(self, key: bytes | None) -> Mapping[str, Any]:
        """As `Format.key_fields`; no key is an empty one."""
        if key is None:
            return {}
        value = parse(text_of(key))
        if isinstance(value, dict) and value.keys() == _WITH_BLOCK:
            value = value["payload"]
        if not isinstance(value, dict):
            _refuse("the record key is not an object with the key columns")
        found: Mapping[str, Any] = value
        return found

    def encodings(self, schema_id: str) -> Mapping[str, Encoding]:
        """As `Format.encodings`."""
        if not schema_id:
            if self.declared is None:
                _refuse("the job declares no columns")
            return self.declared
        if schema_id not in self._known:
            row = json.loads(schema_id)
            self._known[schema_id] = {
                name: connect_schema.encoding(inner, placeholder=self.placeholder, wanted=self.wanted.get(name))
                for name, inner in connect_schema.fields(row).items()
            }
        return self._known[schema_id]

    def _unwrapped(self, text: str) -> tuple[Any, str | None]:
        """The payload, and the id of the schema that it is written in; None where there is none."""
        for start, schema_id in self._known_starts.items():
            if text.startswith(start) and text.endswith("}"):
                return parse(text[len(start) : -1]), schema_id
        value = parse(text)
        if not isinstance(value, dict) or value.keys() != _WITH_BLOCK:
            return value, None if self.declared is None else ""
        block, payload = value["schema"], value["payload"]
        if block is None:
            return payload, None if self.declared is None else ""
        if not isinstance(block, dict):
            _refuse("the schema block is not an object")
        found = _row_schema_id(block)
        self._remember_start(text, found)
        return payload, found

    def _remember_start(self, text: str, schema_id: str | None) -> None:
        """A record that starts with the same characters, up to the payload, has the same schema block."""
        if not text.startswith(_SCHEMA_START) or schema_id is None:
            return
        _, end = json.JSONDecoder().raw_decode(text, len(_SCHEMA_START) - 1)
        if text.startswith(_PAYLOAD_START, end) and len(self._known_starts) < _MOST_STARTS:
            self._known_starts[text[: end + len(_PAYLOAD_START)]] = schema_id


def _row_schema_id(block: Mapping[str, Any]) -> str | None:
    """The schema of the rows in an envelope, as text; None for records that hold no row."""
    row = connect_schema.fields(block).get("after") if block.get("type") == "struct" else None
    if row is None:
        return None
    return connect_schema.canonical({"type": "struct", "fields": row.get("fields")})


def _side_record(payload: Mapping[str, Any]) -> str | None:
    """What a record without `op` is, by the fields that Debezium 3.4 gives it."""
    if "tableChanges" in payload or "ddl" in payload:
        return base.SCHEMA_CHANGE
    if "status" in payload and "id" in payload and "event_count" in payload:
        return base.TRANSACTION
    if payload.keys() == {"ts_ms"}:
        return base.HEARTBEAT
    return None


def _refuse(msg: str) -> NoReturn:
    raise UndecodableError(msg)
