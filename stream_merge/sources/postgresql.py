"""PostgreSQL in Debezium 3.4: positions in its log, and schemas of its types for topics without schema blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from stream_merge.sources.wire.connect_schema import DECIMAL, NEGATIVE_SCALES, VARIABLE_SCALE_DECIMAL
from stream_merge.sources.wire.encodings import refuse
from stream_merge.sources.wire.strict_json import parse

TimePrecision = Literal["adaptive", "adaptive_time_microseconds", "connect", "isostring", "microseconds", "nanoseconds"]
DecimalHandling = Literal["precise", "double", "string"]
BinaryHandling = Literal["bytes", "base64", "base64-url-safe", "hex"]
IntervalHandling = Literal["numeric", "string"]
HstoreHandling = Literal["json", "map"]

Schema = dict[str, Any]

_LAST_COMMIT = r'\A\["(?P<lsn>[0-9]{1,18})",'
"""Pattern of `sequence` for Python and Arrow (RE2)."""
_MILLIS_DIGITS = 3
_DECLARED = re.compile(
    r"\s*(?P<name>[a-z][a-z0-9_ ]*?)\s*(?:\(\s*(?P<first>\d+)\s*(?:,\s*(?P<second>-?\d+)\s*)?\))?"
    r"\s*(?P<zone>with time zone|without time zone)?\s*(?P<array>\[\])?\s*",
    re.IGNORECASE,
)
_ALIASES = {
    "bool": "boolean",
    "int2": "smallint",
    "int": "integer",
    "int4": "integer",
    "int8": "bigint",
    "smallserial": "smallint",
    "serial": "integer",
    "bigserial": "bigint",
    "float4": "real",
    "float8": "double precision",
    "double": "double precision",
    "decimal": "numeric",
    "character varying": "text",
    "varchar": "text",
    "character": "text",
    "char": "text",
    "bpchar": "text",
    "citext": "text",
    "bit varying": "varbit",
}
_PLAIN: dict[str, Schema] = {
    "boolean": {"type": "boolean"},
    "smallint": {"type": "int16"},
    "integer": {"type": "int32"},
    "bigint": {"type": "int64"},
    "oid": {"type": "int64"},
    "real": {"type": "float"},
    "double precision": {"type": "double"},
    **{name: {"type": "string"} for name in ("text", "inet", "cidr", "macaddr", "macaddr8")},
    **{f"{name}range": {"type": "string"} for name in ("int4", "int8", "num", "ts", "tstz", "date")},
    "uuid": {"type": "string", "name": "io.debezium.data.Uuid"},
    "json": {"type": "string", "name": "io.debezium.data.Json"},
    "jsonb": {"type": "string", "name": "io.debezium.data.Json"},
    "xml": {"type": "string", "name": "io.debezium.data.Xml"},
    "ltree": {"type": "string", "name": "io.debezium.data.Ltree"},
    "enum": {"type": "string", "name": "io.debezium.data.Enum"},
    "tsvector": {"type": "string", "name": "io.debezium.data.Tsvector"},
    "timestamp with time zone": {"type": "string", "name": "io.debezium.time.ZonedTimestamp"},
    "time with time zone": {"type": "string", "name": "io.debezium.time.ZonedTime"},
    "varbit": {"type": "bytes", "name": "io.debezium.data.Bits"},
}
"""Types whose form depends on no setting of the connector."""


class AmbiguousTypeError(ValueError):
    """A declared type that leaves the form of its values open; the text says what to add."""


POSITION_FIELD = "lsn"
"""Integer field of `source` that orders the events of a key."""
POSITION_FIELDS = (POSITION_FIELD, "sequence", "snapshot")
"""Fields of `source` that `position` reads."""
LAST_COMMIT_FIELD = "sequence"
"""Text field of `source` that names the last commit before an event."""


def position(source: Mapping[str, Any]) -> int:
    """The LSN of an event, from its `source`.

    Reads of incremental snapshots carry no `lsn` (Debezium 3.4, PostgresSourceInfoStructMaker), but the pair of the
    last committed and the current position in `sequence`.
    """
    lsn = source.get("lsn")
    if lsn is None and source.get("snapshot") == "incremental" and isinstance(source.get("sequence"), str):
        pair = [text for text in parse(source["sequence"]) if text is not None]
        lsn = int(pair[-1]) if pair else None
    if type(lsn) is not int:
        refuse(f"source.lsn is {lsn!r}, not a position in PostgreSQL's log")
    return lsn


def last_commit(sequence: Any) -> int | None:
    """The LSN of the last commit delivered before an event; None until the connector has passed a commit."""
    match = re.match(_LAST_COMMIT, sequence) if isinstance(sequence, str) else None
    return None if match is None else int(match["lsn"])


def last_commits(sequences: pa.StringArray) -> pa.Int64Array:
    """`last_commit` of each text."""
    return pc.struct_field(pc.extract_regex(sequences, _LAST_COMMIT), "lsn").cast(pa.int64())


@dataclass(frozen=True, kw_only=True, slots=True)
class Modes:
    """Settings of the connector, `time.precision.mode` and so on; None: not stated."""

    time_precision: TimePrecision | None = None
    decimal_handling: DecimalHandling | None = None
    binary_handling: BinaryHandling | None = None
    interval_handling: IntervalHandling | None = None
    hstore_handling: HstoreHandling | None = None
    money_fraction_digits: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Declared:
    name: str
    first: int | None
    second: int | None


def connect_schema(declared: str, modes: Modes) -> Schema:
    """Debezium's schema of a column, declared as in CREATE TABLE, such as `numeric(10,2)`; an enum type is `enum`.

    Raises `AmbiguousTypeError`.
    """
    match = _DECLARED.fullmatch(declared)
    if match is None:
        msg = f"{declared!r} is not a PostgreSQL type"
        raise AmbiguousTypeError(msg)
    name = " ".join(match["name"].lower().split())
    name = _ALIASES.get(name, name)
    zone = (match["zone"] or "").lower()
    if name in {"timestamptz", "timetz"} or zone == "with time zone":
        name = f"{name.removesuffix('tz')} with time zone"
    parsed = _Declared(
        name=name,
        first=int(match["first"]) if match["first"] else None,
        second=int(match["second"]) if match["second"] else None,
    )
    schema = _schema(parsed, modes, declared)
    if match["array"]:
        return {"type": "array", "items": {**schema, "optional": True}, "optional": True}
    return {**schema, "optional": True}


def _schema(declared: _Declared, modes: Modes, text: str) -> Schema:
    if declared.name in _PLAIN:
        return _PLAIN[declared.name]
    by_mode: dict[str, Callable[[], Schema]] = {
        "bit": lambda: _bits(declared),
        "bytea": lambda: _BYTEA.get(_stated(modes.binary_handling, "binary.handling.mode", text), _TEXT),
        "numeric": lambda: _numeric(declared, _stated(modes.decimal_handling, "decimal.handling.mode", text), text),
        "money": lambda: _money(modes, text),
        "date": lambda: _DATES.get(_stated(modes.time_precision, "time.precision.mode", text), _DAYS),
        "time": lambda: _time(declared, _stated(modes.time_precision, "time.precision.mode", text), text),
        "timestamp": lambda: _timestamp(declared, _stated(modes.time_precision, "time.precision.mode", text), text),
        "interval": lambda: _INTERVALS[_stated(modes.interval_handling, "interval.handling.mode", text)],
        "hstore": lambda: _HSTORES[_stated(modes.hstore_handling, "hstore.handling.mode", text)],
        "point": lambda: _POINT,
    }
    if declared.name not in by_mode:
        msg = f"{text!r} must be one of {sorted({*_PLAIN, *by_mode})!r}"
        raise AmbiguousTypeError(msg)
    return by_mode[declared.name]()


def _stated(mode: Any, setting: str, text: str) -> Any:
    if mode is None:
        msg = f"{text!r} depends on {setting}; set the connector's value"
        raise AmbiguousTypeError(msg)
    return mode


_TEXT = {"type": "string"}
_BYTEA: Mapping[str, Schema] = {"bytes": {"type": "bytes"}}
_DAYS = {"type": "int32", "name": "io.debezium.time.Date"}
_DATES: Mapping[str, Schema] = {
    "connect": {"type": "int32", "name": "org.apache.kafka.connect.data.Date"},
    "isostring": {"type": "string", "name": "io.debezium.time.IsoDate"},
}
_INTERVALS: Mapping[str, Schema] = {
    "numeric": {"type": "int64", "name": "io.debezium.time.MicroDuration"},
    "string": {"type": "string", "name": "io.debezium.time.Interval"},
}
_HSTORES: Mapping[str, Schema] = {
    "json": {"type": "string", "name": "io.debezium.data.Json"},
    "map": {"type": "map", "keys": {"type": "string"}, "values": {"type": "string", "optional": True}},
}
_POINT: Schema = {
    "type": "struct",
    "name": "io.debezium.data.geometry.Point",
    "fields": [
        {"field": "x", "type": "double"},
        {"field": "y", "type": "double"},
        {"field": "wkb", "type": "bytes", "optional": True},
        {"field": "srid", "type": "int32", "optional": True},
    ],
}


def _bits(declared: _Declared) -> Schema:
    if declared.first in (None, 1):
        return {"type": "boolean"}
    return {"type": "bytes", "name": "io.debezium.data.Bits", "parameters": {"length": str(declared.first)}}


def _numeric(declared: _Declared, mode: str, text: str) -> Schema:
    if mode != "precise":
        return {"type": mode}
    if declared.first is None:
        return {
            "type": "struct",
            "name": VARIABLE_SCALE_DECIMAL,
            "fields": [{"field": "scale", "type": "int32"}, {"field": "value", "type": "bytes"}],
        }
    return _decimal(declared.first, declared.second or 0, text)


def _money(modes: Modes, text: str) -> Schema:
    mode = _stated(modes.decimal_handling, "decimal.handling.mode", text)
    if mode == "precise":
        return _decimal(38, _stated(modes.money_fraction_digits, "money.fraction.digits", text), text)
    return {"type": mode}


def _decimal(precision: int, scale: int, text: str) -> Schema:
    if max(precision, scale, precision - scale) > 38:  # noqa: PLR2004 - digits of Delta's widest decimal
        msg = (
            f"{text!r} has more digits than Delta's decimals (38); set the connector's decimal.handling.mode to string"
        )
        raise AmbiguousTypeError(msg)
    parameters = {
        "scale": str(scale if scale >= 0 else scale + NEGATIVE_SCALES),
        "connect.decimal.precision": str(precision),
    }
    return {"type": "bytes", "name": DECIMAL, "parameters": parameters}


_TIMES: Mapping[str, Schema] = {
    "isostring": {"type": "string", "name": "io.debezium.time.IsoTime"},
    "connect": {"type": "int32", "name": "org.apache.kafka.connect.data.Time"},
    "nanoseconds": {"type": "int64", "name": "io.debezium.time.NanoTime"},
}
_TIMESTAMPS: Mapping[str, Schema] = {
    "isostring": {"type": "string", "name": "io.debezium.time.IsoTimestamp"},
    "connect": {"type": "int64", "name": "org.apache.kafka.connect.data.Timestamp"},
    "nanoseconds": {"type": "int64", "name": "io.debezium.time.NanoTimestamp"},
}


def _time(declared: _Declared, mode: str, text: str) -> Schema:
    if mode == "adaptive" and _in_millis(declared, text):
        return {"type": "int32", "name": "io.debezium.time.Time"}
    return _TIMES.get(mode, {"type": "int64", "name": "io.debezium.time.MicroTime"})


def _timestamp(declared: _Declared, mode: str, text: str) -> Schema:
    if mode.startswith("adaptive") and _in_millis(declared, text):
        return {"type": "int64", "name": "io.debezium.time.Timestamp"}
    return _TIMESTAMPS.get(mode, {"type": "int64", "name": "io.debezium.time.MicroTimestamp"})


def _in_millis(declared: _Declared, text: str) -> bool:
    """Whether Debezium's adaptive modes write milliseconds: up to three digits; PostgreSQL's default is six."""
    if declared.first is None:
        msg = f"{text!r} lacks its precision; write '{declared.name}(6)', or the column's precision"
        raise AmbiguousTypeError(msg)
    return declared.first <= _MILLIS_DIGITS
