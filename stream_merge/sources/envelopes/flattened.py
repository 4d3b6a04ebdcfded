"""Rows without envelope: Debezium's ExtractNewRecordState (Debezium 3.4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from stream_merge.sources import postgresql
from stream_merge.sources.envelopes import base
from stream_merge.sources.envelopes.base import ConnectFormat, Kind, Read, ReadMany
from stream_merge.sources.wire import json_table
from stream_merge.sources.wire.connect_json import Payloads
from stream_merge.sources.wire.encodings import refuse, shown
from stream_merge.sources.wire.strict_json import UndecodableError

_ABOUT = frozenset(
    ("op", "deleted", "db", "schema", "table", "lsn", "txId", "xmin", "sequence", "snapshot", "ts_ms", "ts_us", "ts_ns")
)
"""What ExtractNewRecordState can add (`add.fields`), and `__deleted`."""
_SNAPSHOT = "snapshot"
_READ = "r"
"""`op` of an event that a snapshot has read (Debezium 3.4)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Added:
    """The fields that the transformation adds; the others are columns, whatever their names start with."""

    prefix: str = "__"
    """`add.fields.prefix`."""

    def has(self, name: str) -> bool:
        """Whether a field is about the event."""
        bare = name.removeprefix(self.prefix)
        return bare != name and (bare in _ABOUT or bare.startswith(("source_", "transaction_")))

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
        return Read(
            Kind.DELETE if is_delete else Kind.UPSERT,
            row,
            schema_id,
            self._position(about),
            about.get("op") == _READ or _source_field(about, _SNAPSHOT) in base.SNAPSHOT_READS,
            millis if type(millis) is int else None,
            last_commit=postgresql.last_commit(_source_field(about, postgresql.LAST_COMMIT_FIELD)),
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

    def _metadata_fields(self, around: pa.StructType) -> _MetadataFields | None:
        """The fields with metadata; None where one may be there twice, or in another form."""
        fields = []
        for name in (postgresql.POSITION_FIELD, postgresql.LAST_COMMIT_FIELD, _SNAPSHOT):
            wanted = [f"{self.added.prefix}{name}", f"{self.added.prefix}source_{name}"]
            present = [field for field in wanted if around.get_field_index(field) >= 0]
            if len(present) > 1:
                return None
            fields.append(present[0] if present else wanted[0])
        metadata = _MetadataFields(*fields)
        has_position = self.ordered_by_offset or around.get_field_index(metadata.position) >= 0
        return metadata if has_position and base.tells_snapshot(around, metadata.snapshot) else None

    def _row_events(
        self, payloads: Payloads, rows: pa.StructArray, row: pa.StructType, metadata: _MetadataFields
    ) -> ReadMany:
        image = pa.StructArray.from_arrays([rows.field(field.name) for field in row], fields=list(row))
        deleted, op = (base.inner(rows, f"{self.added.prefix}{name}", pa.string()) for name in ("deleted", "op"))
        is_delete = pc.fill_null(pc.or_kleene(pc.equal(deleted, "true"), pc.equal(op, "d")), False)
        is_read = pc.fill_null(pc.equal(op, _READ), False)
        position = base.inner(rows, metadata.position, pa.int64())
        if self.ordered_by_offset:
            position = pa.repeat(pa.scalar(0, pa.int64()), len(rows))
        whole = json_table.lack_nothing(payloads.texts, rows, image, spared=is_delete)
        return ReadMany(
            indexes=payloads.indexes,
            schema_id=payloads.schema_id,
            is_delete=is_delete,
            image=image,
            position=position,
            is_snapshot=pc.or_(is_read, pc.fill_null(base.are_snapshot_reads(rows, metadata.snapshot), False)),
            source_millis=base.inner(rows, f"{self.added.prefix}source_ts_ms", pa.int64()),
            connector=pa.nulls(len(rows), pa.string()),
            last_commit=postgresql.last_commits(base.inner(rows, metadata.last_commit, pa.string())),
            key_completes=True,
        ).where(pc.and_(pc.or_(is_delete, whole), position.is_valid()))

    def _position(self, about: Mapping[str, Any]) -> int:
        if self.ordered_by_offset:
            return 0
        source = {name: _source_field(about, name) for name in postgresql.POSITION_FIELDS}
        try:
            return postgresql.position(source)
        except UndecodableError:
            name = postgresql.POSITION_FIELD
            others = [f"source.{other}" for other in ("ts_ms", *postgresql.POSITION_FIELDS) if other != name]
            added = ",".join(["op", name, *others])
            refuse(
                f"{self.added.prefix}{name} is {shown(source[name])}, not a position in PostgreSQL's log; set"
                f" 'add.fields={added}' in the connector, or 'position: offset' in the job"
            )


class _MetadataFields(NamedTuple):
    """Names of metadata fields, which may be missing."""

    position: str
    last_commit: str
    snapshot: str


def _source_field(about: Mapping[str, Any], name: str) -> Any:
    """A field of `source`, by either of the names that the transformation gives it."""
    return about.get(name, about.get(f"source_{name}"))
