"""Rows that Debezium's ExtractNewRecordState has taken out of their envelopes (Debezium 3.4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stream_merge.sources.formats.base import Kind, Read
from stream_merge.sources.formats.connect_json import ConnectJson, refuse
from stream_merge.sources.formats.debezium import SNAPSHOT_READS, log_position
from stream_merge.sources.formats.strict_json import UndecodableError

_ABOUT = frozenset(
    ("op", "deleted", "db", "schema", "table", "lsn", "txId", "xmin", "sequence", "snapshot", "ts_ms", "ts_us", "ts_ns")
)
"""What ExtractNewRecordState can add (`add.fields`), and `__deleted`."""


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
            about.get("snapshot", about.get("source_snapshot")) in SNAPSHOT_READS,
            millis if type(millis) is int else None,
        )

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
