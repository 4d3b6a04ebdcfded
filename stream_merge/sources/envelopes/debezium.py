"""Debezium's envelope (Debezium 3.4): op, before, after and source."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stream_merge.sources.databases.base import Database
from stream_merge.sources.envelopes import base
from stream_merge.sources.envelopes.base import ConnectFormat, Kind, Read, ReadMany
from stream_merge.sources.wire import connect_schema, json_table
from stream_merge.sources.wire.connect_json import Payloads
from stream_merge.sources.wire.encodings import refuse, shown

UPSERTS = frozenset("cur")
_IMAGES = frozenset({"before", "after"})


def reads(database: Database) -> Mapping[str, Collection[str]]:
    """All that is read of an envelope, as `ConnectJson.reads`."""
    source = (*database.fields, *database.required, "snapshot", "ts_ms", "name", "connector")
    return {"op": (), "before": (), "after": (), "source": source}


def row_schema(block: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema of `after`."""
    return connect_schema.fields(block).get("after") if block.get("type") == "struct" else None


@dataclass(kw_only=True)
class Debezium(ConnectFormat):
    """Reads envelopes; `wire` unwraps rows by `row_schema`."""

    def read(self, key: bytes | None, value: bytes) -> Read:
        """An envelope, taken apart."""
        payload, schema_id = self.wire.parse(value)
        op = payload.get("op")
        if op in UPSERTS or op == "d":
            return self._row_event(op, payload, key, schema_id)
        if op == "t":
            return Read(Kind.TRUNCATE)
        reason = "message" if op == "m" else _side_record(payload)
        if reason is None:
            refuse(f"op is {shown(op)}, which is none of c, u, d, r, t, m")
        return Read(Kind.FILTERED, note=reason)

    def _row_event(self, op: str, payload: Mapping[str, Any], key: bytes | None, schema_id: str | None) -> Read:
        source = payload.get("source")
        if not isinstance(source, dict):
            refuse("the event has no source")
        at = self.database.position(source)
        if schema_id is None:
            refuse("the event has no schema block, and the job declares no columns")
        image = payload.get("before" if op == "d" else "after")
        fields: Mapping[str, Any]
        if op == "d":
            keys, row = (self.wire.named(part, schema_id) for part in (self.key.fields(key), image or {}))
            fields = {**keys, **{n: v for n, v in row.items() if v is not None}}
        elif isinstance(image, dict):
            fields = self.wire.named(image, schema_id)
        else:
            refuse(f"an event with op {op!r} has no row in `after`")
        millis, name = source.get("ts_ms"), source.get("name")
        before = payload.get("before") if op == "u" else None
        return Read(
            Kind.DELETE if op == "d" else Kind.UPSERT,
            fields,
            schema_id,
            at.position,
            source.get("snapshot") in base.SNAPSHOT_READS,
            millis if type(millis) is int else None,
            name if isinstance(name, str) else None,
            at.last_commit,
            at.server,
            before=self.wire.named(before, schema_id) if isinstance(before, dict) else {},
        )

    def read_many(self, values: pa.BinaryArray) -> Iterator[ReadMany]:
        """Envelopes whose row Arrow reads exactly."""
        for payloads in self.wire.payloads(values):
            row = self.wire.row_type(payloads.schema_id)
            if row is None:
                continue
            around = self.wire.shape(payloads.schema_id, payloads.texts, without=_IMAGES)
            if self._is_envelope(around):
                for part, rows in payloads.read(pa.schema([*around, *((name, row) for name in sorted(_IMAGES))])):
                    yield from self._row_events(part, rows)

    def _is_envelope(self, around: pa.StructType) -> bool:
        types = {field.name: field.type for field in around}
        source = types.get("source", pa.null())
        if types.get("op") != pa.string() or not pa.types.is_struct(source):
            return False
        position = {(name, self.database.fields[name]) for name in self.database.required}
        return position <= base.named(source) and base.tells_snapshot(source, "snapshot")

    def _row_events(self, payloads: Payloads, rows: pa.StructArray) -> Iterator[ReadMany]:
        """The upserts with the row after, then the deletes with the row before."""
        op, source, after = rows.field("op"), rows.field("source"), rows.field("after")
        is_delete = pc.fill_null(pc.equal(op, "d"), False)
        is_upsert = pc.is_in(op, value_set=pa.array(sorted(UPSERTS)))
        fields = self.database.fields
        at = self.database.positions({name: base.inner(source, name, dtype) for name, dtype in fields.items()})
        whole = json_table.lack_nothing(payloads.texts, rows, after, spared=is_delete)
        every = ReadMany(
            indexes=payloads.indexes,
            schema_id=payloads.schema_id,
            is_delete=is_delete,
            image=after,
            position=at.position,
            is_snapshot=base.are_snapshot_reads(source, "snapshot"),
            source_millis=base.inner(source, "ts_ms", pa.int64()),
            connector=base.inner(source, "name", pa.string()),
            last_commit=at.last_commit,
            server=at.server,
            key_completes=True,
        )
        before = rows.field("before")
        updates = every._replace(before=pc.if_else(pc.equal(op, "u"), before, pa.scalar(None, before.type)))
        yield updates.where(pc.and_(pc.and_(is_upsert, whole), at.position.is_valid()))
        yield every._replace(image=before).where(pc.and_(is_delete, at.position.is_valid()))


def _side_record(payload: Mapping[str, Any]) -> str | None:
    """The type of a record without `op`, by its fields (Debezium 3.4)."""
    if "tableChanges" in payload or "ddl" in payload:
        return "schema_change"
    if "status" in payload and "id" in payload and "event_count" in payload:
        return "transaction"
    if payload.keys() == {"ts_ms"}:
        return "heartbeat"
    return None
