"""MariaDB and MySQL in Debezium 3.4."""

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

_NUMBER = r"\.(?P<number>[0-9]{1,10})\z"
"""End of a binlog's name, for Arrow (RE2)."""
_UUID = r"\A(?P<server>[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}):"
"""Start of MySQL's GTIDs; those of MariaDB name `server_id`."""
_OFFSET_BITS = 32
_MOST_FILES, _MOST_BYTES = 2**31 - 1, 2**32 - 1
"""Largest number of a binlog (`MAX_LOG_UNIQUE_FN_EXT` of MySQL 8 and MariaDB 10), and largest offset in one: an event's
header has four bytes for it."""
_FILE_BYTES = 2**30
"""Largest `max_binlog_size` of both, and its default."""


class Binlog(Database):
    """A database with MySQL's binlog.

    A position is the number of the file, and in the lower 32 bits the offset of the event: together 63 bits. Rows of
    one event have one position, and Kafka's offsets order those of a key. `source.row` takes no part: with MySQL's
    `binlog_transaction_compression` all events of a transaction have one offset, and each counts its rows from 0
    (Debezium 3.4, BinlogStreamingChangeEventSource.handleTransactionPayload).
    """

    def position(self, source: Mapping[str, Any]) -> LogPosition:
        """The file and offset of an event, and the server that wrote it first; of none where a snapshot has read it."""
        file, offset = source.get("file"), source.get("pos")
        match = re.search(r"\.([0-9]{1,10})\Z", file) if isinstance(file, str) else None
        number = 0 if match is None else int(match[1])
        if not 0 < number <= _MOST_FILES:
            self._refuse("file", source)
        if not isinstance(offset, int) or isinstance(offset, bool) or not 0 <= offset <= _MOST_BYTES:
            self._refuse("pos", source)
        server, gtid = source.get("server_id"), source.get("gtid")
        uuid = re.match(_UUID, gtid) if isinstance(gtid, str) else None
        if uuid is not None:
            server = uuid["server"]
        return LogPosition(number << _OFFSET_BITS | offset, server=str(server) if server else None)

    def positions(self, source: Mapping[str, pa.Array]) -> LogPositions:
        """`position` of each event."""
        number = pc.struct_field(pc.extract_regex(source["file"], _NUMBER), "number").cast(pa.int64())
        number = pc.if_else(_is_within(number, 1, _MOST_FILES), number, None)
        offset = pc.if_else(_is_within(source["pos"], 0, _MOST_BYTES), source["pos"], None)
        uuid = pc.struct_field(pc.extract_regex(source["gtid"], _UUID), "server")
        server_id = pc.if_else(pc.equal(source["server_id"], 0), None, source["server_id"]).cast(pa.string())
        return LogPositions(
            pc.bit_wise_or(pc.shift_left(number, _OFFSET_BITS), offset),
            pa.nulls(len(offset), pa.int64()),
            pc.coalesce(uuid, server_id),
        )

    def regression(self, highest: int, position: int) -> int:
        """At least so many bytes, as if each file between them had the largest size that rotates it.

        How much of the lower one's file lies behind it nobody knows: a flush or a restart rotates a small one.
        """
        files = (highest >> _OFFSET_BITS) - (position >> _OFFSET_BITS)
        return (files - 1) * _FILE_BYTES + (highest & _MOST_BYTES) if files > 0 else highest - position

    def shown(self, position: int) -> str:
        """Number of the file, and offset."""
        return f"{position >> _OFFSET_BITS:06}:{position & _MOST_BYTES}"

    def connect_schema(self, declared: str, modes: Modes) -> Schema:
        """The schema of a type as in SHOW CREATE TABLE, such as `int(11) unsigned`."""
        if modes.time_precision == "adaptive":
            msg = "the connectors for MariaDB and MySQL have no time.precision.mode 'adaptive'"
            raise AmbiguousTypeError(msg)
        match = _DECLARED.fullmatch(declared)
        if match is None:
            msg = f"{declared!r} is not a type of MariaDB or MySQL"
            raise AmbiguousTypeError(msg)
        name = " ".join(match["name"].lower().split())
        attributes = (match["attributes"] or "").lower().split()
        is_unsigned = "unsigned" in attributes or "zerofill" in attributes
        first, second = (None if match[part] is None else int(match[part]) for part in ("first", "second"))
        parts = Declared(declared, _ALIASES.get(name, name), first, second, modes)
        return {**_schema(parts, is_unsigned=is_unsigned), "optional": True}


def _is_within(values: pa.Int64Array, least: int, most: int) -> pa.BooleanArray:
    return pc.and_(pc.greater_equal(values, least), pc.less_equal(values, most))


_LOG: dict[str, Any] = {
    "log": "the binlog",
    "ordering": "binlog/1",
    "required": ("file", "pos"),
    "fields": {"file": pa.string(), "pos": pa.int64(), "server_id": pa.int64(), "gtid": pa.string()},
    "metadata": frozenset(("file", "pos", "row", "server_id", "gtid", "thread", "query")),
}
MARIADB, MYSQL = Binlog(name="mariadb", **_LOG), Binlog(name="mysql", **_LOG)

_DECLARED = re.compile(
    r"\s*(?P<name>[a-z][a-z0-9]*(?:\s+(?:precision|varying))?)"
    r"\s*(?:\(\s*(?:(?P<first>\d+)\s*(?:,\s*(?P<second>\d+)\s*)?|'.*'\s*)\))?"
    r"(?P<attributes>(?:\s+(?:unsigned|signed|zerofill|(?:character\s+set|charset|collate)\s+\w+))*)\s*",
    re.IGNORECASE | re.DOTALL,
)
_ALIASES = {
    "bool": "boolean",
    "integer": "int",
    "numeric": "decimal",
    "dec": "decimal",
    "double precision": "double",
    "real": "double",
    "character varying": "varchar",
}
_INTEGERS = {
    "tinyint": ("int16", "int16"),
    "smallint": ("int16", "int32"),
    "mediumint": ("int32", "int32"),
    "int": ("int32", "int64"),
}
"""Signed, unsigned."""
_TEXTS = ("char", "varchar", "tinytext", "text", "mediumtext", "longtext")
_BYTES = ("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob")
_GEOMETRIES = (
    "geometry",
    "linestring",
    "polygon",
    "multipoint",
    "multilinestring",
    "multipolygon",
    "geometrycollection",
    "geomcollection",
)
_GEOMETRY: Schema = {
    "type": "struct",
    "name": "io.debezium.data.geometry.Geometry",
    "fields": [{"field": "wkb", "type": "bytes"}, {"field": "srid", "type": "int32", "optional": True}],
}
_PLAIN: Mapping[str, Schema] = {
    "boolean": {"type": "boolean"},
    "double": {"type": "double"},
    "json": {"type": "string", "name": "io.debezium.data.Json"},
    "enum": {"type": "string", "name": "io.debezium.data.Enum"},
    "set": {"type": "string", "name": "io.debezium.data.EnumSet"},
    "year": {"type": "int32", "name": "io.debezium.time.Year"},
    "timestamp": {"type": "string", "name": "io.debezium.time.ZonedTimestamp"},
    "uuid": {"type": "string", "name": "io.debezium.data.Uuid"},
    "point": POINT,
    **{name: {"type": "string"} for name in _TEXTS},
    **dict.fromkeys(_GEOMETRIES, _GEOMETRY),
}
"""Types whose form depends on no setting of the connector."""
_SINGLE_DIGITS = 24
"""Of `float(p)`: with more it is a double."""
_MILLIS_DIGITS = 3


def _schema(declared: Declared, *, is_unsigned: bool) -> Schema:
    name, first = declared.name, declared.first or 0
    if name in _PLAIN:
        return _PLAIN[name]
    if name in _INTEGERS:
        return {"type": _INTEGERS[name][is_unsigned]}
    by_mode: dict[str, Callable[[], Schema]] = {
        "bigint": lambda: _bigint(declared, is_unsigned=is_unsigned),
        "float": lambda: {"type": "float" if declared.second is None and first <= _SINGLE_DIGITS else "double"},
        "decimal": lambda: declared.decimal(10 if declared.first is None else first, declared.second or 0),
        "bit": declared.bits,
        "date": declared.date,
        "time": declared.time,
        "datetime": lambda: declared.timestamp(
            in_millis=declared.time_precision == "adaptive_time_microseconds" and first <= _MILLIS_DIGITS
        ),
        **dict.fromkeys(_BYTES, declared.binary),
    }
    if name not in by_mode:
        msg = f"{declared.text!r} must be one of {sorted({*_PLAIN, *_INTEGERS, *by_mode})!r}"
        raise AmbiguousTypeError(msg)
    return by_mode[name]()


def _bigint(declared: Declared, *, is_unsigned: bool) -> Schema:
    is_precise = is_unsigned and declared.mode("bigint.unsigned.handling.mode") == "precise"
    return declared.precise(20, 0) if is_precise else {"type": "int64"}
