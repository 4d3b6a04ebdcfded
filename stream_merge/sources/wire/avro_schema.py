"""Avro schemas as Kafka Connect schemas (Confluent's AvroConverter 7.9), and as Spark's `from_avro` reads them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stream_merge.sources.wire.connect_schema import DECIMAL
from stream_merge.sources.wire.strict_json import UndecodableError

_CONNECT_TYPES = {
    "boolean": "boolean",
    "int": "int32",
    "long": "int64",
    "float": "float32",
    "double": "float64",
    "bytes": "bytes",
    "string": "string",
    "fixed": "bytes",
    "enum": "string",
    "record": "struct",
    "array": "array",
    "map": "map",
}
_LOGICAL = {
    "date": "org.apache.kafka.connect.data.Date",
    "time-millis": "org.apache.kafka.connect.data.Time",
    "time-micros": "io.debezium.time.MicroTime",
    "timestamp-millis": "avro.timestamp-millis",
    "timestamp-micros": "avro.timestamp-micros",
    "timestamp-nanos": "avro.timestamp-nanos",
    "local-timestamp-millis": "io.debezium.time.Timestamp",
    "local-timestamp-micros": "io.debezium.time.MicroTimestamp",
    "local-timestamp-nanos": "io.debezium.time.NanoTimestamp",
    "uuid": "io.debezium.data.Uuid",
}
"""Logical types (Avro 1.12) of producers other than Connect, as the semantic types that mean the same: only
`local-timestamp` is without zone."""
MEMBER = "p"
_PRECISION = "connect.decimal.precision"


class AvroSchema(NamedTuple):
    """A registered schema, in both forms."""

    block: Mapping[str, Any]
    """The Connect schema, as a schema block of Connect's JSON converter."""
    physical: str
    """The Avro schema without logical types and without references, in a record whose only field is `MEMBER`: what the
    bytes are. Spark reads malformed ones as a record without fields, which tells them from a record of NULLs."""


def parse(text: str, references: Sequence[str] = ()) -> AvroSchema:
    """Read an Avro schema, with the texts of the schemas that it refers to, those that are referred to first.

    Raises:
        UndecodableError: the schema is not Avro, or has a union of several types, or contains itself.
    """
    try:
        return _parsed([_json(one) for one in (*references, text)])
    except (AttributeError, KeyError, TypeError, ValueError) as err:
        if isinstance(err, UndecodableError):
            raise
        msg = "the schema is not Avro"
        raise UndecodableError(msg) from err


def reader(physical: str, reads: Mapping[str, Collection[str]]) -> str:
    """The schema to read records by where only some fields are wanted; `physical` where that is not possible.

    Args:
        physical: as `AvroSchema.physical`.
        reads: field -> which of its fields, all if empty.
    """
    schema = json.loads(physical)
    record = schema["fields"][0]["type"]
    names = {one["name"] for one in record.get("fields", ())} if isinstance(record, dict) else set()
    if not reads or not reads.keys() <= names:
        return physical
    record["fields"] = [one for one in record["fields"] if one["name"] in reads]
    for one in record["fields"]:
        inner = reads[one["name"]]
        if inner and isinstance(one["type"], dict) and "fields" in one["type"]:
            one["type"]["fields"] = [field for field in one["type"]["fields"] if field["name"] in inner]
    text = json.dumps(schema)
    defined = set(re.findall(r'"name": "(type\d+)"', text))
    return text if set(re.findall(r'"(type\d+)"', text)) <= defined else physical


def _parsed(schemas: Sequence[Any]) -> AvroSchema:
    names = _Names()
    for one in schemas[:-1]:
        names.collect(one, "")
    names.collect(schemas[-1], "")
    block = _Connect(names).block(schemas[-1], "")
    member = {"name": MEMBER, "type": _Physical(names).schema(schemas[-1], "")}
    return AvroSchema(block=block, physical=json.dumps({"type": "record", "name": "framed", "fields": [member]}))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text  # Confluent's registry keeps the schema "string" as a bare word, too


@dataclass(slots=True)
class _Names:
    """Named types (records, enums, fixed) by their full names, with the namespace around each."""

    types: dict[str, tuple[Mapping[str, Any], str]] = field(default_factory=dict)

    def collect(self, schema: Any, namespace: str) -> None:
        """Find the named types inside a schema."""
        if isinstance(schema, list):
            for one in schema:
                self.collect(one, namespace)
        elif isinstance(schema, dict):
            inner = namespace
            if schema.get("type") in ("record", "enum", "fixed", "error"):
                full = full_name(str(schema.get("name")), schema.get("namespace"), namespace)
                inner = full.rpartition(".")[0]
                self.types.setdefault(full, (schema, namespace))
            for part in _parts(schema):
                self.collect(part, inner)

    def get(self, name: str, namespace: str) -> tuple[Mapping[str, Any], str] | None:
        """A named type, by its name as it is used inside a namespace."""
        return self.types.get(full_name(name, None, namespace)) or self.types.get(name)


def full_name(name: str, namespace: Any, around: str) -> str:
    """The full name of a type (Avro 1.12, "Names")."""
    if "." in name:
        return name
    within = around if namespace is None else str(namespace)
    return f"{within}.{name}" if within else name


def _parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    if isinstance(schema.get("fields"), list):
        yield from (one.get("type") for one in schema["fields"] if isinstance(one, dict))
    yield from (schema[part] for part in ("items", "values") if part in schema)
    if isinstance(schema.get("type"), dict | list):
        yield schema["type"]


def _resolved(schema: Any, namespace: str, names: _Names) -> tuple[Mapping[str, Any], str, bool]:
    """A schema as an object, the namespace around it, and whether NULL is a value."""
    if isinstance(schema, list):
        others = [one for one in schema if one != "null"]
        if len(others) != 1:
            msg = f"a union of {len(others)} types other than null has no column type"
            raise UndecodableError(msg)
        found, around, _ = _resolved(others[0], namespace, names)
        return found, around, "null" in schema
    if isinstance(schema, dict) and isinstance(schema.get("type"), dict | list):
        found, around, is_optional = _resolved(schema["type"], namespace, names)
        return {**found, **{key: value for key, value in schema.items() if key != "type"}}, around, is_optional
    if isinstance(schema, dict) and (schema.get("type") in _CONNECT_TYPES or schema.get("type") == "null"):
        return schema, namespace, False
    name = schema.get("type") if isinstance(schema, dict) else schema
    if name in _CONNECT_TYPES:
        return {"type": name}, namespace, False
    known = names.get(str(name), namespace)
    if known is None:
        msg = f"the Avro schema names type {name!r}, which it does not define"
        raise UndecodableError(msg)
    return known[0], known[1], False


@dataclass(slots=True)
class _Connect:
    """Writes Connect schemas."""

    names: _Names
    _open: list[str] = field(default_factory=list)

    def block(self, schema: Any, namespace: str) -> dict[str, Any]:
        """A schema block."""
        avro, around, is_optional = _resolved(schema, namespace, self.names)
        kind = str(avro.get("type"))
        block: dict[str, Any] = {"type": _CONNECT_TYPES.get(kind, kind), "optional": is_optional}
        if kind == "record":
            block["fields"] = self._fields(avro, around)
        elif kind == "array":
            block |= self._array(avro, around)
        elif kind == "map":
            block |= {"keys": {"type": "string", "optional": False}, "values": self.block(avro["values"], around)}
        return {**block, **_annotations(avro, kind)}

    def _fields(self, record: Mapping[str, Any], around: str) -> list[dict[str, Any]]:
        full = full_name(str(record.get("name")), record.get("namespace"), around)
        if full in self._open:
            msg = f"the Avro record {full!r} contains itself, which has no column type"
            raise UndecodableError(msg)
        self._open.append(full)
        inner = full.rpartition(".")[0]
        fields = [{**self.block(one["type"], inner), "field": one["name"]} for one in record.get("fields", [])]
        self._open.pop()
        return fields

    def _array(self, avro: Mapping[str, Any], around: str) -> dict[str, Any]:
        """An array; Connect writes maps whose keys are not strings as arrays of pairs, which stay arrays."""
        return {"items": self.block(avro["items"], around)}


def _annotations(avro: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Name, version, parameters and default of a Connect schema; of another producer's by its logical type."""
    found: dict[str, Any] = {}
    logical, parameters = avro.get("logicalType"), dict(avro.get("connect.parameters") or {})
    name = avro.get("connect.name")
    if "connect.type" in avro and kind == "int":
        found["type"] = avro["connect.type"]  # int8, int16
    if logical == "decimal" and kind in ("bytes", "fixed"):
        name = name or DECIMAL
        parameters.setdefault("scale", str(avro.get("scale", 0)))
        if "precision" in avro:
            parameters.setdefault(_PRECISION, str(avro["precision"]))
    elif name is None and kind in ("int", "long", "string"):
        name = _LOGICAL.get(str(logical))
    if name is not None:
        found["name"] = name
    if parameters:
        found["parameters"] = parameters
    if "connect.default" in avro:
        default = avro["connect.default"]
        is_bytes = kind in ("bytes", "fixed") and isinstance(default, str)
        found["default"] = base64.b64encode(default.encode("latin-1")).decode() if is_bytes else default
    return found


@dataclass(slots=True)
class _Physical:
    """Writes Avro schemas without anything that is not needed to read bytes."""

    names: _Names
    _written: dict[str, str] = field(default_factory=dict)
    """Full name -> name in what is written."""

    def schema(self, schema: Any, namespace: str) -> Any:
        """A schema; each named type is written once."""
        if isinstance(schema, list):
            return [one if one == "null" else self.schema(one, namespace) for one in schema]
        if isinstance(schema, dict) and isinstance(schema.get("type"), dict | list):
            return self.schema(schema["type"], namespace)
        avro, around, _ = _resolved(schema, namespace, self.names)
        kind = str(avro.get("type"))
        inner = {part: self.schema(avro[part], around) for part in ("items", "values") if part in avro}
        if inner:
            return {"type": kind, **inner}
        return self._named(avro, kind, around) if kind in ("record", "enum", "fixed") else kind

    def _named(self, avro: Mapping[str, Any], kind: str, around: str) -> Any:
        full = full_name(str(avro.get("name")), avro.get("namespace"), around)
        if full in self._written:
            return self._written[full]
        self._written[full] = f"type{len(self._written)}"
        written: dict[str, Any] = {"type": kind, "name": self._written[full]}
        if kind == "enum":
            return {**written, "symbols": avro.get("symbols", [])}
        if kind == "fixed":
            return {**written, "size": avro.get("size")}
        inner = full.rpartition(".")[0]
        fields = [{"name": one["name"], "type": self.schema(one["type"], inner)} for one in avro.get("fields", [])]
        return {**written, "fields": fields}
