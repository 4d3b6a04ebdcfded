"""Avro records in Confluent's framing, which Spark transcodes to the JSON that Connect's JSON converter writes.

A record is a magic byte 0, the id of its schema in a registry, and Avro. From then on it is read as `ConnectJson`, so
that topics in Avro and in JSON give the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.avro.functions import from_avro

from stream_merge.sources.schema_registry import SchemaRegistry
from stream_merge.sources.wire import avro_schema, connect_schema
from stream_merge.sources.wire.avro_schema import AvroSchema
from stream_merge.sources.wire.connect_json import ConnectJson
from stream_merge.sources.wire.encodings import Encoding
from stream_merge.sources.wire.keys import JsonKey, KeyFormat
from stream_merge.sources.wire.strict_json import UndecodableError, UnknownSchemaError

_UNREAD = "registry:"
"""Start of a schema id, and of the text of a record whose schema is not known here yet."""
_NOT_FRAMED, _OF_GLUE = b"not framed", b"of glue"
_MAGIC = b"\x00"
_MAGIC_OF_GLUE = b"\x03\x00", b"\x03\x05"
"""Version, and whether the value is compressed (AWS Glue's serializer 1.1)."""
_PERMISSIVE, _WITH_NULLS = {"mode": "PERMISSIVE"}, {"ignoreNullFields": "false"}
_OBJECTS = frozenset({"struct", "map"})
_MEMBER = len(f'{{"{avro_schema.MEMBER}":')
_SCHEMA, _NULL = b'{"schema":', b"null"


@dataclass(kw_only=True)
class Schemas:
    """Schemas by their ids in the registry, as far as they were needed."""

    registry: SchemaRegistry | None = None
    """None on the workers."""
    id_bytes: int = 4
    """Bytes of an id: 4, or 8 as clients of Apicurio 2 write them."""
    known: dict[int, AvroSchema] = field(default_factory=dict)

    def get(self, schema_id: str) -> AvroSchema:
        """A schema by its id with `_UNREAD`, from the registry where it is not known yet.

        Raises:
            UndecodableError: there is none, or it has no columns.
            ConfigError: the registry refuses this client.
            ConnectionError: it cannot be reached.
        """
        number = int(schema_id.removeprefix(_UNREAD))
        if number not in self.known:
            if self.registry is None:
                raise UnknownSchemaError(schema_id)
            registered = self.registry.schema(number)
            if registered.kind != "AVRO":
                msg = f"schema {number} is {registered.kind}, not AVRO"
                raise UndecodableError(msg)
            self.known[number] = avro_schema.parse(registered.text, registered.references)
        return self.known[number]

    def texts(
        self,
        framed: str,
        write: Callable[[int, AvroSchema, Column], Column],
        reads: Mapping[str, Collection[str]],
    ) -> Column:
        """The JSON texts of framed records, as bytes.

        Args:
            framed: binary column.
            write: the text of a payload, which it names once: Spark would read the record again for a second time.
            reads: as `ConnectJson.reads`.
        """
        value, size = F.col(framed), 1 + self.id_bytes
        prefix, body = F.substring(value, 1, size), F.expr(f"substring(`{framed}`, {size + 1})")
        number = F.conv(F.hex(F.expr(f"substring(`{framed}`, 2, {self.id_bytes})")), 16, 10)
        text = F.when(value.isNull(), F.lit(None).cast("binary"))
        for schema_id, schema in self.known.items():
            frame = _MAGIC + schema_id.to_bytes(self.id_bytes, "big")
            options = {**_PERMISSIVE, "avroSchema": avro_schema.reader(schema.physical, reads)}
            payload = from_avro(body, schema.physical, options)[avro_schema.MEMBER]
            text = text.when(prefix == F.lit(frame), write(schema_id, schema, payload).cast("binary"))
        is_framed = (F.substring(value, 1, 1) == F.lit(_MAGIC)) & (F.length(value) > size)
        is_of_glue = F.substring(value, 1, 2).isin(*map(F.lit, _MAGIC_OF_GLUE))
        unread = F.concat(F.lit(_UNREAD), number).cast("binary")
        return text.when(is_framed, unread).when(is_of_glue, F.lit(_OF_GLUE)).otherwise(F.lit(_NOT_FRAMED))

    def ids(self, framed: Iterable[bytes | None]) -> set[str]:
        """Ids of the schemas of framed records."""
        end = 1 + self.id_bytes
        heads = {one[:end] for one in framed if one is not None and one.startswith(_MAGIC) and len(one) > end}
        return {f"{_UNREAD}{int.from_bytes(head[1:], 'big')}" for head in heads}


def _expect_read(text: bytes, *, of_key: bool = False) -> None:
    """Refuse a text that is not JSON, as `Schemas.texts` marks it."""
    if text.startswith(_UNREAD.encode()):
        raise UnknownSchemaError(text.decode(), of_key=of_key)
    if text == _OF_GLUE:
        msg = "the record has the header of AWS Glue's schema registry, which is not supported"
        raise UndecodableError(msg)
    if text == _NOT_FRAMED:
        msg = "the record does not start with byte 0 and the id of a schema, as Avro of a schema registry does"
        raise UndecodableError(msg)


@dataclass(kw_only=True)
class ConnectAvro(ConnectJson):
    """Unwraps transcoded values."""

    schemas: Schemas

    def text(self) -> Column:
        """The values of records, transcoded."""

        def write(number: int, _: AvroSchema, payload: Column) -> Column:
            return F.to_json(F.struct(F.lit(number).alias("schema"), payload.alias("payload")), _WITH_NULLS)

        return self.schemas.texts("value", write, self.reads)

    def registered(self, values: Iterable[bytes | None]) -> set[str] | None:
        """Ids of the schemas that values are framed with."""
        return self.schemas.ids(values)

    def parse(self, value: bytes) -> tuple[Mapping[str, Any], str | None]:
        """As `ConnectJson.parse`.

        Raises:
            UnknownSchemaError: its schema is not known yet.
        """
        _expect_read(value)
        number = int(value[len(_SCHEMA) : value.index(b",")])
        start = _start(number)
        if start not in self._known_starts:
            msg = f"{_UNREAD}{number}"
            raise UnknownSchemaError(msg)
        if value[len(start) : -1] == _NULL:
            msg = f"the record is not Avro of schema {number}"
            raise UndecodableError(msg)
        return super().parse(value)

    def encodings(self, schema_id: str) -> Mapping[str, Encoding]:
        """The encodings of a schema's columns; in the driver also of one that only the registry knows."""
        if not schema_id.startswith(_UNREAD):
            return super().encodings(schema_id)
        if schema_id not in self._known:
            row = self.row_schema(self.schemas.get(schema_id).block)
            number = int(schema_id.removeprefix(_UNREAD))
            self._known_starts[_start(number)] = None if row is None else schema_id
            if row is None:
                msg = f"schema {number} has no row"
                raise UndecodableError(msg)
            self._known[schema_id] = self.columns(row)
        return self._known[schema_id]


def _start(number: int) -> str:
    return f'{{"schema":{number},"payload":'


@dataclass(frozen=True, kw_only=True)
class AvroKey(KeyFormat):
    """Record keys in Avro: an object with the key columns; of a single key column also its value alone."""

    schemas: Schemas
    json: JsonKey

    def text(self) -> Column:
        """The keys of records, transcoded; with a schema block where the value is NULL, since nothing else has it."""

        def with_block(_: int, schema: AvroSchema, payload: Column) -> Column:
            start = f'{{"schema":{connect_schema.canonical(schema.block)},"payload":'
            return F.concat(F.lit(start), _bare(schema, payload), F.lit("}"))

        bare = self.schemas.texts("key", lambda _, schema, payload: _bare(schema, payload), {})
        return F.when(F.col("value").isNull(), self.schemas.texts("key", with_block, {})).otherwise(bare)

    def fields(self, key: bytes | None) -> Mapping[str, Any]:
        """JSON values of the key columns."""
        if key is None:
            return {}
        _expect_read(key, of_key=True)
        if key == _NULL:
            msg = "the record key is not Avro of its schema"
            raise UndecodableError(msg)
        return self.json.fields(key)

    def names(self, key: bytes | None) -> Set[str]:
        """The columns that a key holds, by its schema alone; in the driver."""
        blocks = [self.schemas.get(schema_id).block for schema_id in self.schemas.ids([key])]
        return {field["field"] for block in blocks for field in block.get("fields", [{"field": self.json.only}])}

    def are_readable(self, keys: pa.BinaryArray) -> pa.BooleanArray:
        """Keys that are read at once."""
        return self.json.are_readable(keys)

    def schema(self, key: bytes) -> str | None:
        """Id of the schema in a key's block, or None."""
        _expect_read(key, of_key=True)
        return self.json.schema(key)

    def unread(self, key: bytes | None) -> str | None:
        """Id of a key's schema that is not known yet."""
        return key.decode() if key is not None and key.startswith(_UNREAD.encode()) else None

    def learn(self, schema_id: str) -> str:
        """Get a key's schema from the registry; the id of its columns."""
        if not schema_id.startswith(_UNREAD):
            return schema_id
        block = self.schemas.get(schema_id).block
        return connect_schema.canonical({"type": "struct", "fields": block.get("fields", [])})


def _bare(schema: AvroSchema, payload: Column) -> Column:
    """The text of a payload alone; Spark writes that of a value without fields as a member only."""
    if schema.block["type"] in _OBJECTS:
        return F.coalesce(F.to_json(payload, _WITH_NULLS), F.lit("null"))
    member = F.to_json(F.struct(payload.alias(avro_schema.MEMBER)), _WITH_NULLS)
    return F.btrim(F.substring(member, _MEMBER + 1, 2**31 - 1), F.lit("}"))
