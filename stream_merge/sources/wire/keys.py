"""Formats of record keys, which connectors and producers set apart from those of values."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column

from stream_merge.sources.wire import connect_schema, json_table
from stream_merge.sources.wire.strict_json import UndecodableError, parse, utf8_text

WITH_BLOCK = frozenset({"schema", "payload"})
"""Fields of a record of Kafka Connect's JSON converter with schemas enabled (Kafka 4.1)."""
_OF_ONE_MEMBER = r'\A\{"[A-Za-z0-9_]+":(?:-?(?:0|[1-9][0-9]{0,17})|"[A-Za-z0-9_ -]*")\}\z'
"""An object with a single member, a whole number or a simple text: nothing in it that a strict reading refuses."""


class KeyFormat:
    """A format of record keys, sent to the workers; this one reads nothing from them."""

    def fields(self, key: bytes | None) -> Mapping[str, Any]:
        """JSON values of the key columns; empty without a key. Raises `UndecodableError`."""
        del key
        return {}

    def names(self, key: bytes | None) -> Set[str]:
        """The columns that a key holds, as it is in the topic. Raises `UndecodableError`."""
        return self.fields(key).keys()

    def are_readable(self, keys: pa.BinaryArray) -> pa.BooleanArray:
        """Keys that `fields` surely reads; others may be readable, too."""
        return pa.repeat(pa.scalar(True), len(keys))

    def schema(self, key: bytes) -> str | None:
        """Id of the schema that a key includes, or None."""
        del key
        return None

    def text(self) -> Column | None:
        """Record keys as `fields` takes them; None: as they are."""
        return None

    def unframed(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """Keys without the header of a schema registry's converter."""
        return keys

    def unread(self, key: bytes | None) -> str | None:
        """Id of a key's schema where only the registry has it, else None."""
        del key
        return None

    def learn(self, schema_id: str) -> str:
        """Id of the columns of a key's schema."""
        return schema_id


@dataclass(frozen=True, kw_only=True)
class JsonKey(KeyFormat):
    """An object with the key columns, in a schema block or bare; of a single key column also its value alone."""

    only: str | None = None
    """The key column where there is just one."""

    def unframed(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """Keys without the header of Confluent's JSON Schema converter."""
        return json_table.unframed(keys)

    def fields(self, key: bytes | None) -> Mapping[str, Any]:
        """JSON values of the key columns."""
        if key is None:
            return {}
        value = parse(utf8_text(key), exact=True)
        if isinstance(value, dict) and value.keys() == WITH_BLOCK:
            value = value["payload"]
        if self.only is not None and isinstance(value, str | int | float | Decimal):
            return {self.only: value}
        if not isinstance(value, dict):
            msg = "the record key is not an object with the key columns"
            raise UndecodableError(msg)
        return cast("Mapping[str, Any]", value)

    def are_readable(self, keys: pa.BinaryArray) -> pa.BooleanArray:
        """Keys with a single simple member."""
        return pc.fill_null(pc.match_substring_regex(keys, _OF_ONE_MEMBER), True)

    def schema(self, key: bytes) -> str | None:
        """Id of the schema in a key's block, or None."""
        value = parse(utf8_text(key))
        if not isinstance(value, dict) or value.keys() != WITH_BLOCK or not isinstance(value["schema"], dict):
            return None
        fields = value["schema"].get("fields")
        if not isinstance(fields, list):  # a key of one value: its schema does not name the column
            return None
        return connect_schema.canonical({"type": "struct", "fields": fields})


@dataclass(frozen=True, kw_only=True)
class TextKey(KeyFormat):
    """UTF-8 text of the only key column, as StringConverter and most producers write it."""

    only: str
    is_integer: bool = False
    """Whether the text is a whole number."""

    def fields(self, key: bytes | None) -> Mapping[str, Any]:
        """The text, or the number, of the key column."""
        if key is None:
            return {}
        text = utf8_text(key)
        if not self.is_integer:
            return {self.only: text}
        value = parse(text)
        if type(value) is not int:
            msg = f"the record key is {text[:100]!r}, not a whole number"
            raise UndecodableError(msg)
        return {self.only: value}

    def are_readable(self, keys: pa.BinaryArray) -> pa.BooleanArray:
        """No key: each is read by `fields`."""
        return pa.repeat(pa.scalar(False), len(keys))


class NoKey(KeyFormat):
    """Record keys that are not read: the key columns are in the value."""
