"""PostgreSQL in Debezium 3.4."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stream_merge.sources.databases.base import (
    POINT,
    AmbiguousTypeError,
    Database,
    Declared,
    LogPosition,
    LogPositions,
    Modes,
    Schema,
)
from stream_merge.sources.wire.connect_schema import VARIABLE_SCALE_DECIMAL
from stream_merge.sources.wire.strict_json import parse

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


class PostgreSQL(Database):
    """PostgreSQL."""

    def position(self, source: Mapping[str, Any]) -> LogPosition:
        """The LSN of an event, and that of the last commit delivered before it, once the connector has passed one.

        Reads of incremental snapshots carry no `lsn` (Debezium 3.4, PostgresSourceInfoStructMaker), but the pair of the
        last committed and the current position in `sequence`.
        """
        lsn, sequence = source.get("lsn"), source.get("sequence")
        if lsn is None and source.get("snapshot") == "incremental" and isinstance(sequence, str):
            pair = [text for text in parse(sequence) if text is not None]
            lsn = int(pair[-1]) if pair else None
        if not isinstance(lsn, int) or isinstance(lsn, bool):
            self._refuse("lsn", source)
        match = re.match(_LAST_COMMIT, sequence) if isinstance(sequence, str) else None
        return LogPosition(lsn, None if match is None else int(match["lsn"]))

    def positions(self, source: Mapping[str, pa.Array]) -> LogPositions:
        """`position` of each event that has an `lsn`."""
        lsn, sequence = source["lsn"], source["sequence"]
        last_commit = pc.struct_field(pc.extract_regex(sequence, _LAST_COMMIT), "lsn").cast(pa.int64())
        return LogPositions(lsn, last_commit, pa.nulls(len(lsn), pa.string()))

    def connect_schema(self, declared: str, modes: Modes) -> Schema:
        """The schema of a type such as `numeric(10,2)`; an enum type is `enum`."""
        match = _DECLARED.fullmatch(declared)
        if match is None:
            msg = f"{declared!r} is not a PostgreSQL type"
            raise AmbiguousTypeError(msg)
        name = " ".join(match["name"].lower().split())
        name = _ALIASES.get(name, name)
        zone = (match["zone"] or "").lower()
        if name in {"timestamptz", "timetz"} or zone == "with time zone":
            name = f"{name.removesuffix('tz')} with time zone"
        first, second = (None if match[part] is None else int(match[part]) for part in ("first", "second"))
        schema = _schema(Declared(declared, name, first, second, modes))
        if match["array"]:
            return {"type": "array", "items": {**schema, "optional": True}, "optional": True}
        return {**schema, "optional": True}


POSTGRESQL = PostgreSQL(
    name="postgresql",
    log="PostgreSQL's log",
    ordering="postgresql/1",
    required=("lsn",),
    fields={"lsn": pa.int64(), "sequence": pa.string()},
    metadata=frozenset(("schema", "lsn", "txId", "xmin", "sequence")),
)


def _schema(declared: Declared) -> Schema:
    if declared.name in _PLAIN:
        return _PLAIN[declared.name]
    by_mode: dict[str, Callable[[], Schema]] = {
        "bit": declared.bits,
        "bytea": declared.binary,
        "numeric": lambda: _numeric(declared),
        "money": lambda: _money(declared),
        "date": declared.date,
        "time": lambda: declared.time(in_millis=declared.time_precision == "adaptive" and _in_millis(declared)),
        "timestamp": lambda: declared.timestamp(
            in_millis=declared.time_precision.startswith("adaptive") and _in_millis(declared)
        ),
        "interval": lambda: _INTERVALS[declared.mode("interval.handling.mode")],
        "hstore": lambda: _HSTORES[declared.mode("hstore.handling.mode")],
        "point": lambda: POINT,
    }
    if declared.name not in by_mode:
        msg = f"{declared.text!r} must be one of {sorted({*_PLAIN, *by_mode})!r}"
        raise AmbiguousTypeError(msg)
    return by_mode[declared.name]()


_INTERVALS: Mapping[str, Schema] = {
    "numeric": {"type": "int64", "name": "io.debezium.time.MicroDuration"},
    "string": {"type": "string", "name": "io.debezium.time.Interval"},
}
_HSTORES: Mapping[str, Schema] = {
    "json": {"type": "string", "name": "io.debezium.data.Json"},
    "map": {"type": "map", "keys": {"type": "string"}, "values": {"type": "string", "optional": True}},
}


def _numeric(declared: Declared) -> Schema:
    if declared.first is None and declared.mode("decimal.handling.mode") == "precise":
        return {
            "type": "struct",
            "name": VARIABLE_SCALE_DECIMAL,
            "fields": [{"field": "scale", "type": "int32"}, {"field": "value", "type": "bytes"}],
        }
    return declared.decimal(declared.first or 0, declared.second or 0)


def _money(declared: Declared) -> Schema:
    is_precise = declared.mode("decimal.handling.mode") == "precise"
    return declared.decimal(38, declared.mode("money.fraction.digits") if is_precise else 0)


def _in_millis(declared: Declared) -> bool:
    """Whether Debezium's adaptive modes write milliseconds: up to three digits; PostgreSQL's default is six."""
    if declared.first is None:
        msg = f"{declared.text!r} lacks its precision; write '{declared.name}(6)', or the column's precision"
        raise AmbiguousTypeError(msg)
    return declared.first <= _MILLIS_DIGITS
