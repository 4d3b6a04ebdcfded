"""Kafka Connect's schemas in its JSON converter, with Debezium's semantic types."""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from pyspark.sql import types as T

from stream_merge.sources.wire import encodings as E
from stream_merge.sources.wire import times
from stream_merge.sources.wire.encodings import Encoding
from stream_merge.sources.wire.strict_json import UndecodableError

_MOST_PRECISE = 38
"""Digits of Delta's widest decimal."""
_MOST_SCALE, NEGATIVE_SCALES = 1000, 2048
"""PostgreSQL's largest scale; what the JDBC driver (42.7) adds to a negative one, read as eleven bits: Debezium 3.4
writes values of numeric(5,-2) with 2046 digits after the point."""
DECIMAL = "org.apache.kafka.connect.data.Decimal"
VARIABLE_SCALE_DECIMAL = "io.debezium.data.VariableScaleDecimal"
PLACEHOLDER = "__debezium_unavailable_value"
"""Debezium's default for `unavailable.value.placeholder`."""

_BASE_TYPES: dict[str, Callable[[], Encoding]] = {
    "boolean": E.boolean,
    "int8": lambda: E.integer(8),
    "int16": lambda: E.integer(16),
    "int32": lambda: E.integer(32),
    "int64": lambda: E.integer(64),
    "float": lambda: E.floating(32),
    "float32": lambda: E.floating(32),
    "double": lambda: E.floating(64),
    "float64": lambda: E.floating(64),
    "string": E.string,
    "bytes": E.binary,
}
_MILLIS, _MICROS, _NANOS = 1_000, 1_000_000, 1_000_000_000
_NAMED: dict[str, Callable[[], Encoding]] = {
    "org.apache.kafka.connect.data.Date": times.date_from_days,
    "org.apache.kafka.connect.data.Time": lambda: times.clock_time(_MILLIS),
    "org.apache.kafka.connect.data.Timestamp": lambda: times.timestamp_from_units(_MILLIS),
    "io.debezium.time.Date": times.date_from_days,
    "io.debezium.time.IsoDate": times.date_from_text,
    "io.debezium.time.Time": lambda: times.clock_time(_MILLIS),
    "io.debezium.time.MicroTime": lambda: times.clock_time(_MICROS),
    "io.debezium.time.NanoTime": lambda: times.clock_time(_NANOS),
    "io.debezium.time.Timestamp": lambda: times.timestamp_from_units(_MILLIS),
    "io.debezium.time.MicroTimestamp": lambda: times.timestamp_from_units(_MICROS),
    "io.debezium.time.NanoTimestamp": lambda: times.timestamp_from_units(_NANOS),
    "io.debezium.time.IsoTimestamp": lambda: times.timestamp_from_text(with_zone=False),
    "io.debezium.time.ZonedTimestamp": lambda: times.timestamp_from_text(with_zone=True),
    **{
        f"avro.timestamp-{unit}": partial(times.timestamp_from_units, per_second, with_zone=True)
        for unit, per_second in (("millis", _MILLIS), ("micros", _MICROS), ("nanos", _NANOS))
    },
}
"""Semantic types; those of Avro are of producers other than Connect. Others are stored by their base type: Json, Xml,
Uuid, Enum, Ltree, ZonedTime, Interval as text, MicroDuration as microseconds, Bits as bytes, Point as a struct."""


def encoding(
    schema: Mapping[str, Any], *, placeholder: str = PLACEHOLDER, wanted: T.DataType | None = None
) -> Encoding:
    """Encoding of a Connect schema (`schemas.enable` of Kafka 4.1's JsonConverter). Raises `UndecodableError`.

    `placeholder` is Debezium's `unavailable.value.placeholder`, `wanted` the declared type of numbers of open scale.
    """
    name = schema.get("name")
    by_name = _scaled(schema, wanted) or (_NAMED[name]() if name in _NAMED else None)
    return replace(
        by_name or _plain(schema, placeholder),
        is_optional=bool(schema.get("optional", False)),
        placeholders=_placeholders(schema, placeholder),
        default=schema.get("default"),
    )


def _plain(schema: Mapping[str, Any], placeholder: str) -> Encoding:
    base = schema.get("type")
    if base in _BASE_TYPES:
        return _BASE_TYPES[base]()
    if base == "array" and isinstance(schema.get("items"), Mapping):
        return E.array_encoding(encoding(schema["items"], placeholder=placeholder))
    if base == "map" and isinstance(schema.get("values"), Mapping):
        if (schema.get("keys") or {}).get("type") != "string":
            msg = "a map whose keys are not strings"
            raise UndecodableError(msg)
        return E.map_encoding(encoding(schema["values"], placeholder=placeholder))
    if base == "struct":
        inner = fields(schema).items()
        return E.struct_encoding({name: encoding(field, placeholder=placeholder) for name, field in inner})
    msg = f"schema type {base!r} is not one of Kafka Connect's"
    raise UndecodableError(msg)


def fields(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The fields of a struct schema, in order. Raises `UndecodableError`."""
    inner = schema.get("fields")
    if not isinstance(inner, list) or not all(isinstance(f, dict) and isinstance(f.get("field"), str) for f in inner):
        msg = "the schema block has no struct where the event must have one"
        raise UndecodableError(msg)
    return {field["field"]: field for field in inner}


def _scaled(schema: Mapping[str, Any], wanted: T.DataType | None) -> Encoding | None:
    """Encoding of a number with its scale in the schema or in each value; None for other types."""
    if schema.get("name") == VARIABLE_SCALE_DECIMAL:
        if isinstance(wanted, T.DecimalType):
            return E.decimal_from_struct(wanted.precision, wanted.scale)
        return E.text_from_variable_scale()
    if schema.get("name") != DECIMAL:
        return None
    parameters = schema.get("parameters") or {}
    written = _number(parameters.get("scale"), "scale")
    # PostgreSQL 15 has numeric(5,-2), whole hundreds of seven digits, and numeric(2,4), of which Delta needs four.
    scale = written - NEGATIVE_SCALES if written > _MOST_SCALE else written
    if isinstance(wanted, T.StringType):
        return E.text_from_bytes(max(scale, 0), written=written)
    precision = _number(parameters.get("connect.decimal.precision", _MOST_PRECISE), "precision")
    stored = T.DecimalType(max(precision, scale, precision - scale), max(scale, 0))
    if stored.precision > _MOST_PRECISE:
        if not isinstance(wanted, T.DecimalType):
            msg = (
                f"numeric({precision},{scale}) exceeds the 38 digits of Delta's decimals; in 'types' declare string, or"
                " a decimal that holds its values"
            )
            raise UndecodableError(msg)
        stored = wanted
    return E.decimal_from_bytes(stored.precision, stored.scale, written=written)


def _number(value: Any, what: str) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        msg = f"the schema block gives {value!r} as {what} of a decimal"
        raise UndecodableError(msg) from None


def _placeholders(schema: Mapping[str, Any], placeholder: str) -> tuple[Any, ...]:
    """The JSON forms of an unavailable value by type (Debezium 3.4, UnchangedToastedPlaceholder)."""
    raw = bytes.fromhex(placeholder.removeprefix("hex:")) if placeholder.startswith("hex:") else placeholder.encode()
    text = raw.decode("utf-8", "replace")
    base, items, name = schema.get("type"), schema.get("items") or {}, schema.get("name")
    if base == "string" and name not in _NAMED:
        # An hstore in json mode is a json column with one pair.
        pair = json.dumps({text: text}, separators=(",", ":"), ensure_ascii=False)
        return (text, pair) if name == "io.debezium.data.Json" else (text,)
    if base == "bytes" and name != DECIMAL:
        return (base64.b64encode(raw).decode(),)
    if base == "map":
        return ({text: text},)
    if base == "array":
        by_item: dict[str, list[Any]] = {
            "string": [str(_name_uuid(raw))] if items.get("name") == "io.debezium.data.Uuid" else [text],
            "bytes": [base64.b64encode(raw).decode()],
            "int32": _signed(raw),
            "int64": _signed(raw),
        }
        item = str(items.get("type"))
        return (by_item[item],) if item in by_item else ()
    return ()


def _signed(raw: bytes) -> list[int]:
    return [byte - 256 if byte > 127 else byte for byte in raw]  # noqa: PLR2004


def _name_uuid(raw: bytes) -> uuid.UUID:
    """Java's `UUID.nameUUIDFromBytes`: MD5 of the bytes alone, without a namespace."""
    return uuid.UUID(bytes=hashlib.md5(raw, usedforsecurity=False).digest(), version=3)


@lru_cache(maxsize=1_000)
def part(schema_id: str, names: tuple[str, ...]) -> str | None:
    """The schema (`canonical`) with only these fields; None where it lacks one."""
    fields = {field.get("field"): field for field in json.loads(schema_id)["fields"] if isinstance(field, dict)}
    if not fields.keys() >= set(names):
        return None
    return canonical({"type": "struct", "fields": [fields[name] for name in names]})


def canonical(schema: Mapping[str, Any]) -> str:
    """A schema's text without insignificant spaces."""
    return json.dumps(schema, sort_keys=True, separators=(",", ":"))
