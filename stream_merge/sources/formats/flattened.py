"""Rows that Debezium's ExtractNewRecordState has taken out of their envelopes (Debezium 3.4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stream_merge.sources.formats.base import Kind, Read
from stream_merge.sources.formats.connect_json import ConnectJson, refuse
from stream_merge.sources.formats.debezium import SNAPSHOT_READS


@dataclass(kw_only=True)
class FlattenedJson(ConnectJson):
    """Reads flattened rows: every field that starts with the prefix is about the event, the others are columns.

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
        own = [f for f in block["fields"] if not str(f.get("field", "")).startswith(self.prefix)]
        return {"type": "struct", "fields": own}

    def read(self, key: bytes | None, value: bytes) -> Read:
        """As `Format.read`."""
        payload, schema_id = self.unwrapped(value)
        if schema_id is None:
            refuse("the event has no schema block, and the job declares no columns")
        about = {n.removeprefix(self.prefix): v for n, v in payload.items() if n.startswith(self.prefix)}
        row = {name: v for name, v in payload.items() if not name.startswith(self.prefix)}
        is_delete = about.get("deleted") == "true" or about.get("op") == "d"
        if is_delete:
            row = {**self.key_fields(key), **{name: v for name, v in row.items() if v is not None}}
        millis = about.get("source_ts_ms")
        return Read(
            Kind.DELETE if is_delete else Kind.UPSERT,
            row,
            schema_id,
            self._position(about),
            about.get("snapshot", about.get("source_snapshot")) in SNAPSHOT_READS,
            millis if type(millis) is int else None,
        )

    def _position(self, about: Mapping[str, Any]) -> int:
        if self.ordered_by_offset:
            return 0
        position = about.get("lsn", about.get("source_lsn"))
        if type(position) is not int:
            refuse(
                f"{self.prefix}lsn is {position!r}, not a position in PostgreSQL's log; set"
                " 'add.fields=op,lsn,source.ts_ms' in the connector, or 'position: offset' in the job"
            )
        return position
