"""Rows that Debezium's ExtractNewRecordState has taken out of their envelopes (Debezium 3.4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stream_merge.sources.envelopes.base import Kind, Read, ReadMany
from stream_merge.sources.envelopes.debezium import (
    SNAPSHOT_READS,
    are_snapshot_reads,
    inner,
    log_position,
    tells_snapshot,
)
from stream_merge.sources.wire import json_table
from stream_merge.sources.wire.connect_json import ConnectJson, Payloads, refuse
from stream_merge.sources.wire.strict_json import UndecodableError

_ABOUT = frozenset(
    ("op", "deleted", "db", "schema", "table", "lsn", "txId", "xmin", "sequence", "snapshot", "ts_ms", "ts_us", "ts_ns")
)
"""What ExtractNewRecordState can add (`add.fields`), and `__deleted`."""
_SNAPSHOT = ("snapshot", "source_snapshot")


@dataclass(kw_only=True)
class FlattenedJson(ConnectJson):
    """Reads flattened rows: fields that the transformation added are about the event, the others are columns.

    Deletes are rows with `__deleted` = "true" (`delete.tombstone.handling.mode` rewrite), or null-value records
    (tombstone). With mode drop there are none.
    """

    prefix: str = "__"
    """`add.fields.prefix`."""
    ordered_by_offset: bool = False
    """Whether Kafka's order takes the place of `__lsn`: for topics whose keys stay in their partitions."""

    def row_schema(self, block: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The columns of the record."""
        if block.get("type") != "struct" or not isinstance(block.get("fields"), list):
            return None
        own = [f for f in block["fields"] if not self._is_about(str(f.get("field", "")))]
        return {"type": "struct", "fields": own}

    def read(self, key: bytes | None, value: bytes) -> Read:
        """As `Format.read`."""
        payload, schema_id = self.unwrapped(value)
        if schema_id is None:
            refuse("the event has no schema block, and the job declares no columns")
        about = {n.removeprefix(self.prefix): v for n, v in payload.items() if self._is_about(n)}
        row = {name: v for name, v in payload.items() if not self._is_about(name)}
        is_delete = about.get("deleted") == "true" or about.get("op") == "d"
        if is_delete:
            row = {**self.key.fields(key), **{name: v for name, v in row.items() if v is not None}}
        millis = about.get("source_ts_ms")
        return Read(
            Kind.DELETE if is_delete else Kind.UPSERT,
            row,
            schema_id,
            self._position(about),
            about.get(_SNAPSHOT[0], about.get(_SNAPSHOT[1])) in SNAPSHOT_READS,
            millis if type(millis) is int else None,
        )

    def read_many(self, values: pa.BinaryArray) -> Iterator[ReadMany]:
        """As `Format.read_many`."""
        for payloads in self.payloads(values):
            row = self.wire(payloads.schema_id)
            if row is None or any(self._is_about(field.name) for field in row):
                continue
            around = self.shape(payloads.schema_id, payloads.texts, without=frozenset(field.name for field in row))
            around = pa.struct([field for field in around if self._is_about(field.name)])
            place, snapshot = self._place(around), self._snapshot(around)
            if place is None or snapshot is None:
                continue
            for part, rows in payloads.read(pa.schema([*around, *row])):
                yield self._row_events(part, rows, row, place, snapshot)

    def _place(self, around: pa.StructType) -> str | None:
        """The field with the position; None where there is none, or not just one."""
        if self.ordered_by_offset:
            return ""
        found = {field.name for field in around} & {f"{self.prefix}lsn", f"{self.prefix}source_lsn"}
        return next(iter(found)) if len(found) == 1 else None

    def _snapshot(self, around: pa.StructType) -> str | None:
        """The field that says who has read an event; None where there are two, or one that says it otherwise."""
        wanted = [self.prefix + name for name in _SNAPSHOT]
        found = [name for name in wanted if around.get_field_index(name) >= 0] or wanted[:1]
        return found[0] if len(found) == 1 and tells_snapshot(around, found[0]) else None

    def _row_events(
        self, payloads: Payloads, rows: pa.StructArray, row: pa.StructType, place: str, snapshot: str
    ) -> ReadMany:
        image = pa.StructArray.from_arrays([rows.field(field.name) for field in row], fields=list(row))
        said = [inner(rows, f"{self.prefix}{name}", pa.string()) for name in ("deleted", "op")]
        is_delete = pc.fill_null(pc.or_kleene(pc.equal(said[0], "true"), pc.equal(said[1], "d")), False)
        position = inner(rows, place, pa.int64()) if place else pa.repeat(pa.scalar(0, pa.int64()), len(rows))
        whole = json_table.lack_nothing(payloads.texts, rows, image, spared=is_delete)
        return ReadMany(
            indexes=payloads.indexes,
            schema_id=payloads.schema_id,
            is_delete=is_delete,
            image=image,
            position=position,
            is_snapshot=are_snapshot_reads(rows, snapshot),
            source_millis=inner(rows, f"{self.prefix}source_ts_ms", pa.int64()),
            connector=pa.nulls(len(rows), pa.string()),
            key_completes=True,
        ).where(pc.and_(pc.or_(is_delete, whole), position.is_valid()))

    def _is_about(self, name: str) -> bool:
        """Whether a field is about the event: the others are columns, whatever their names start with."""
        bare = name.removeprefix(self.prefix)
        return bare != name and (bare in _ABOUT or bare.startswith(("source_", "transaction_")))

    def _position(self, about: Mapping[str, Any]) -> int:
        if self.ordered_by_offset:
            return 0
        source = {name: about.get(name, about.get(f"source_{name}")) for name in ("lsn", "sequence", "snapshot")}
        try:
            return log_position(source)
        except UndecodableError:
            refuse(
                f"{self.prefix}lsn is {source['lsn']!r}, not a position in PostgreSQL's log; set"
                " 'add.fields=op,lsn,source.ts_ms,source.sequence,source.snapshot' in the connector, or"
                " 'position: offset' in the job"
            )
