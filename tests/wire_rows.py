"""Rows as each wire format writes them, and values of each column that are unusual, wrong, or stand for another."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pyspark.sql import types as T

from stream_merge.sources.databases.base import Modes
from stream_merge.sources.databases.postgresql import POSTGRESQL
from stream_merge.sources.envelopes import plain
from stream_merge.sources.envelopes.base import Format
from stream_merge.sources.envelopes.debezium import Debezium, row_schema
from stream_merge.sources.envelopes.flattened import Added, Flattened
from stream_merge.sources.envelopes.plain import Plain, PlainJson
from stream_merge.sources.wire import connect_schema
from stream_merge.sources.wire.connect_json import ConnectJson
from stream_merge.sources.wire.encodings import Encoding

Record = tuple[bytes | None, bytes | None]

MODES = Modes(
    decimal_handling="precise", time_precision="adaptive", binary_handling="bytes", interval_handling="numeric"
)
COLUMNS = {
    "id": "bigint",
    "small": "smallint",
    "flag": "boolean",
    "half": "real",
    "whole": "double precision",
    "name": "text",
    "total": "numeric(12,2)",
    "any": "numeric",
    "raw": "bytea",
    "day": "date",
    "clock": "time(6)",
    "read": "timestamp(6)",
    "moment": "timestamptz",
    "doc": "jsonb",
    "tags": "text[]",
}
ROW = {
    "id": 7,
    "small": -3,
    "flag": True,
    "half": 1.5,
    "whole": 2.25,
    "name": 'Jürgen \u20ac "quoted" \\ ',
    "total": "AMg=",
    "any": {"scale": 3, "value": "AMg="},
    "raw": "aGVsbG8=",
    "day": 19_000,
    "clock": 45_296_000_000,
    "read": 1_700_000_000_123_456,
    "moment": "2026-11-21T07:08:09.123456Z",
    "doc": '{"a":null}',
    "tags": ["a", None, "b"],
}
ODD: dict[str, list[Any]] = {
    "id": [None, 2**63, 1.0, "7", True, -(2**63)],
    "small": [40_000, None, -0.0],
    "flag": [1, "true", None],
    "half": ["NaN", 16_777_217, 3.4028235e38, -3.5e38, 1e-50, -0.0, 0, 0.1],
    "whole": [2**53 + 1, 9_007_199_254_740_993.0, 1e300, "Infinity", -0.0, 5, 0.1],
    "name": ["", ":null", connect_schema.PLACEHOLDER, 5, "a\u0000b", "\U0001f600"],
    "total": ["", "////", "AQ", "fwAAAAAAAAAA", "=AMg", "AMg=\n", None, "AQIDBA=="],
    "any": [
        {"scale": 0},
        {"scale": 2, "value": "AMg=", "more": 1},
        {"value": "AMg="},
        None,
        {"scale": 10**6, "value": "AQ=="},
    ],
    "raw": ["a", "aGVsbG8", "", None],
    "day": [2**31, -719_162, -719_163, 2_932_896, 2_932_897, None],
    "clock": [-1, 86_400_000_000, 86_400_000_001, 1],
    "read": [-62_135_596_800_000_001, 253_402_300_799_999_999, 253_402_300_800_000_000, 2**62],
    "moment": [
        "2026-11-21",
        "2026-11-21T07:08:09+05:30",
        "2026-11-21T07:08:60Z",
        "0000-01-01T00:00:00Z",
        "0001-01-01T00:00:00+01:00",
        "2026-02-30T00:00:00Z",
        "2026-11-21T07:08:09.1234567Z",
        "2026-11-21T07:08:09",
        "2026-11-21T24:00:00Z",
    ],
    "doc": ["{}", connect_schema.PLACEHOLDER, None],
    "tags": [[], [":null"], None, [connect_schema.PLACEHOLDER], [None], "a"],
}
"""Values of each column that are unusual, wrong, or stand for another."""


def postgres(name: str) -> Encoding:
    return connect_schema.encoding({**POSTGRESQL.connect_schema(COLUMNS[name], MODES), "optional": name != "id"})


def fields_of(encodings: dict[str, Encoding]) -> T.StructType:
    return T.StructType([T.StructField(name, one.dtype) for name, one in encodings.items()])


def raw(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def envelope(row: Any, turn: int) -> Record:
    op = "crud"[turn % 4]
    after, before = (None, {name: None for name in COLUMNS} | {"id": turn}) if op == "d" else (row, None)
    source = {"name": "shop", "ts_ms": 1_700_000_000_000 + turn, "snapshot": ["false", "first"][op == "r"], "lsn": turn}
    source |= {"db": "shop", "xmin": None, "sequence": [f'["{turn + 1}","{turn}"]', f'[null,"{turn}"]'][turn % 3 == 0]}
    value = {"before": before, "after": after, "source": source, "transaction": None, "op": op, "ts_ms": turn}
    return raw({"id": turn}), raw(value)


def flattened(row: Any, turn: int) -> Record:
    about = {
        "__op": "cud"[turn % 3],
        "__lsn": turn,
        "__source_ts_ms": turn,
        "__deleted": "false",
        "__source_snapshot": None,
    }
    return raw({"id": turn}), raw({**(row or {}), **about})


def with_block(row: Any, turn: int) -> Record:
    columns = [
        {**POSTGRESQL.connect_schema(kind, MODES), "optional": name != "id", "field": name}
        for name, kind in COLUMNS.items()
    ]
    after = {"type": "struct", "fields": columns, "field": "after", "optional": True}
    key, value = envelope(row, turn)
    block = raw({"type": "struct", "fields": [after], "optional": False})
    return key, b'{"schema":%b,"payload":%b}' % (block, value)


def plain_with_block(row: Any, turn: int) -> Record:
    columns = [
        {**POSTGRESQL.connect_schema(kind, MODES), "optional": name != "id", "field": name}
        for name, kind in COLUMNS.items()
    ]
    columns += [{"type": "int64", "optional": True, "field": "turn"}, {"type": "boolean", "field": "gone"}]
    payload = {**(row or {}), "turn": turn, "gone": turn % 5 == 0}
    return None, raw({"schema": {"type": "struct", "fields": columns, "optional": False}, "payload": payload})


def bare(row: Any, turn: int) -> Record:
    return None, raw({**(row or {}), "turn": turn, **({"gone": True} if turn % 5 == 0 else {})})


PLAIN = {
    "id": "bigint",
    "small": "smallint",
    "flag": "boolean",
    "half": "float",
    "whole": "double",
    "name": "string",
    "total": "string",
    "any": "struct<scale:int,value:string>",
    "raw": "binary",
    "day": "int",
    "clock": "decimal(20,2)",
    "read": "bigint",
    "moment": "timestamp",
    "doc": "string",
    "tags": "array<string>",
    "turn": "bigint",
}


def debezium_json(declared: Mapping[str, Encoding] | None = None) -> Debezium:
    """Envelopes of PostgreSQL's connector, in Connect's JSON."""
    return Debezium(wire=ConnectJson(row_schema=row_schema, declared=declared))


def flattened_json(declared: Mapping[str, Encoding]) -> Flattened:
    """The same rows out of their envelopes."""
    added = Added()
    return Flattened(wire=ConnectJson(row_schema=added.row_schema, declared=declared), added=added)


def formats() -> dict[str, tuple[Format, dict[str, Encoding], frozenset[str], Callable[[Any, int], Record]]]:
    declared = {name: postgres(name) for name in COLUMNS}
    objects = {name: plain.declared_encoding(kind) for name, kind in PLAIN.items()}
    block = debezium_json()
    key, value = with_block(ROW, 0)
    schema_id = block.read(key, value or b"").schema_id
    wire = ConnectJson(row_schema=partial(plain.row_schema, marker="gone"))
    rows = Plain(wire=wire, position="turn", deletes=("gone", True))
    plain_id = rows.read(None, plain_with_block(ROW, 0)[1] or b"").schema_id
    return {
        "debezium": (debezium_json(declared), declared, frozenset({""}), envelope),
        "schema block": (debezium_json(), dict(block.encodings(schema_id)), frozenset({schema_id}), with_block),
        "flattened": (flattened_json(declared), declared, frozenset({""}), flattened),
        "json": (PlainJson(declared=objects, position="turn", deletes=("gone", True)), objects, frozenset({""}), bare),
        "plain": (rows, dict(rows.encodings(plain_id)), frozenset({plain_id}), plain_with_block),
    }
