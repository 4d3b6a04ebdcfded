"""Rows without envelope: Debezium's ExtractNewRecordState (Debezium 3.4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stream_merge.sources.databases import DATABASES
from stream_merge.sources.databases.base import Database, LogPosition, LogPositions
from stream_merge.sources.envelopes import base
from stream_merge.sources.envelopes.base import ConnectFormat, Kind, Read, ReadMany
from stream_merge.sources.wire import json_table
from stream_merge.sources.wire.connect_json import Payloads
from stream_merge.sources.wire.encodings import refuse, shown
from stream_merge.sources.wire.strict_json import UndecodableError

_ABOUT = frozenset(("op", "deleted", "db", "table", "snapshot", "ts_ms", "ts_us", "ts_ns"))
"""What ExtractNewRecordState can add for any database (`add.fields`), and `__deleted`."""
_SNAPSHOT = "snapshot"
_READ = "r"
"""`op` of an event that a snapshot has read (Debezium 3.4)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Added:
    """The fields that the transformation adds; the others are columns, whatever their names start with."""

    prefix: str = "__"
    """`add.fields.prefix`."""
    database: Database = DATABASES[0]
    """Where the changes come from."""

    def has(self, name: str) -> bool:
        """Whether a field is about the event."""
        bare = name.removeprefix(self.prefix)
        return bare != name and (
            bare in _ABOUT or bare in self.database.metadata or bare.startswith(("source_", "transaction_"))
        )

    def row_schema(self, block: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The columns of a record, from its schema."""
        if block.get("type") != "struct" or not isinstance(block.get("fields"), list):
            return None
        own = [f for f in block["fields"] if not self.has(str(f.get("field", "")))]
        return {"type": "struct", "fields": own}


@dataclass(kw_only=True)
class Flattened(ConnectFormat):
    """Reads flattened rows; `wire` unwraps them by `Added.row_schema`.

    Deletes are rows with `__deleted` = "true" (`delete.tombstone.handling.mode` rewrite), or null-value records
    (tombstone). With mode drop there are none.
    """

    added: Added = field(default_factory=Added)
    ordered_by_offset: bool = False
    """Whether Kafka's order replaces a position: for topics whose keys stay in their partitions."""

    def read(self, key: bytes | None, value: bytes) -> Read:
        """A flattened row, taken apart."""
        payload, schema_id = self.wire.parse(value)
        if schema_id is None:
            refuse("the event has no schema block, and the job declares no columns")
        about = {n.removeprefix(self.added.prefix): v for n, v in payload.items() if self.added.has(n)}
        row = self.wire.named({name: v for name, v in payload.items() if not self.added.has(name)}, schema_id)
        is_delete = about.get("deleted") == "true" or about.get("op") == "d"
        if is_delete:
            keys = self.wire.named(self.key.fields(key), schema_id)
            row = {**keys, **{name: v for name, v in row.items() if v is not None}}
        millis = about.get("source_ts_ms")
        at = self._position(about)
        return Read(
            Kind.DELETE if is_delete else Kind.UPSERT,
            row,
            schema_id,
            at.position,
            about.get("op") == _READ or _source_field(about, _SNAPSHOT) in base.SNAPSHOT_READS,
            millis if type(millis) is int else None,
            last_commit=at.last_commit,
            server=at.server,
        )

    def read_many(self, values: pa.BinaryArray) -> Iterator[ReadMany]:
        """Flattened rows that Arrow reads exactly."""
        for payloads in self.wire.payloads(values):
            row = self.wire.row_type(payloads.schema_id)
            if row is None or any(self.added.has(field.name) for field in row):
                continue
            around = self.wire.shape(payloads.schema_id, payloads.texts, without=frozenset(field.name for field in row))
            around = pa.struct([field for field in around if self.added.has(field.name)])
            metadata = self._metadata_fields(around)
            if metadata is None:
                continue
            for part, rows in payloads.read(pa.schema([*around, *row])):
                yield self._row_events(part, rows, row, metadata)

    def _metadata_fields(self, around: pa.StructType) -> Mapping[str, str] | None:
        """Field of `source` -> the field with it, which may be missing; None where one may be there twice."""
        fields = {}
        for name in (*self.database.fields, _SNAPSHOT):
            wanted = [f"{self.added.prefix}{name}", f"{self.added.prefix}source_{name}"]
            present = [field for field in wanted if around.get_field_index(field) >= 0]
            if len(present) > 1:
                return None
            fields[name] = present[0] if present else wanted[0]
        has_position = all(around.get_field_index(fields[name]) >= 0 for name in self.database.required)
        has_order = self.ordered_by_offset or has_position
        return fields if has_order and base.tells_snapshot(around, fields[_SNAPSHOT]) else None

    def _row_events(
        self, payloads: Payloads, rows: pa.StructArray, row: pa.StructType, metadata: Mapping[str, str]
    ) -> ReadMany:
        image = pa.StructArray.from_arrays([rows.field(field.name) for field in row], fields=list(row))
        deleted, op = (base.inner(rows, f"{self.added.prefix}{name}", pa.string()) for name in ("deleted", "op"))
        is_delete = pc.fill_null(pc.or_kleene(pc.equal(deleted, "true"), pc.equal(op, "d")), False)
        is_read = pc.fill_null(pc.equal(op, _READ), False)
        at = self._positions(rows, metadata)
        whole = json_table.lack_nothing(payloads.texts, rows, image, spared=is_delete)
        return ReadMany(
            indexes=payloads.indexes,
            schema_id=payloads.schema_id,
            is_delete=is_delete,
            image=image,
            position=at.position,
            is_snapshot=pc.or_(is_read, pc.fill_null(base.are_snapshot_reads(rows, metadata[_SNAPSHOT]), False)),
            source_millis=base.inner(rows, f"{self.added.prefix}source_ts_ms", pa.int64()),
            connector=pa.nulls(len(rows), pa.string()),
            last_commit=at.last_commit,
            server=at.server,
            key_completes=True,
        ).where(pc.and_(pc.or_(is_delete, whole), at.position.is_valid()))

    def _position(self, about: Mapping[str, Any]) -> LogPosition:
        if self.ordered_by_offset:
            return LogPosition(0)
        source = {name: _source_field(about, name) for name in (*self.database.fields, _SNAPSHOT)}
        try:
            return self.database.position(source)
        except UndecodableError:
            required = self.database.required
            name = next((name for name in required if source[name] is None), required[0])
            others = [f"source.{other}" for other in ("ts_ms", *source) if other not in required]
            added = ",".join(["op", *required, *others])
            refuse(
                f"{self.added.prefix}{name} is {shown(source[name])}, not a position in {self.database.log}; set"
                f" 'add.fields={added}' in the connector, or 'position: offset' in the job"
            )

    def _positions(self, rows: pa.StructArray, metadata: Mapping[str, str]) -> LogPositions:
        if self.ordered_by_offset:
            return LogPositions.at_start(len(rows))
        fields = self.database.fields.items()
        return self.database.positions({name: base.inner(rows, metadata[name], dtype) for name, dtype in fields})


def _source_field(about: Mapping[str, Any], name: str) -> Any:
    """A field of `source`, by either of the names that the transformation gives it."""
    return about.get(name, about.get(f"source_{name}"))
