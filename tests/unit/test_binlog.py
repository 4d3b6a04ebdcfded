"""Events of MariaDB 10.11 as Debezium 3.4 gave them, and of MySQL as Debezium's documentation has them."""

from __future__ import annotations

import json
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from stream_merge.sources.databases.base import AmbiguousTypeError, Modes
from stream_merge.sources.databases.mysql import MARIADB, MYSQL
from stream_merge.sources.decode.decoding import Decoder
from stream_merge.sources.decode.events import Records
from stream_merge.sources.envelopes.base import Kind
from stream_merge.sources.envelopes.debezium import Debezium, row_schema
from stream_merge.sources.wire import connect_schema
from stream_merge.sources.wire.connect_json import ConnectJson
from stream_merge.sources.wire.encodings import Encoding, decode
from stream_merge.sources.wire.strict_json import UndecodableError

MODES = Modes(
    time_precision="adaptive_time_microseconds",
    decimal_handling="precise",
    bigint_unsigned_handling="precise",
    binary_handling="bytes",
)
CUSTOMERS = {"id": "int(11)", "first_name": "varchar(255)"}
ANNE = {"id": 1004, "first_name": "Anne"}
DOCUMENTED = {
    "version": "3.4.0.Final",
    "connector": "mysql",
    "name": "mysql-server-1",
    "ts_ms": 1_465_581_029_100,
    "snapshot": False,
    "db": "inventory",
    "table": "customers",
    "server_id": 223_344,
    "gtid": None,
    "file": "mysql-bin.000003",
    "pos": 484,
    "row": 0,
    "thread": 7,
}
RECORDED = {
    "version": "3.4.0.Final",
    "connector": "mariadb",
    "name": "shop",
    "ts_ms": 1_795_973_167_000,
    "snapshot": None,
    "db": "shop",
    "sequence": None,
    "table": "orders",
    "server_id": 7,
    "gtid": "0-7-9",
    "file": "binlog.000001",
    "pos": 5525,
    "row": 1,
    "thread": None,
    "query": None,
}
UUID = "3e11fa47-71ca-11e1-9e33-c80aa9429562"


def encoding(declared: str, **modes: Any) -> Encoding:
    return connect_schema.encoding(MYSQL.connect_schema(declared, Modes(**modes) if modes else MODES))


def one(by: Encoding, written: Any) -> Any:
    decoded = decode(by, [written])
    return decoded.errors[0] if decoded.errors else decoded.values[0].as_py()


def raw(value: Any) -> bytes:
    return json.dumps(value).encode()


def event(op: str, source: dict[str, Any], **changes: Any) -> bytes:
    image = {"before": ANNE, "after": None} if op == "d" else {"before": None, "after": ANNE}
    return raw({**image, "source": {**source, **changes}, "transaction": None, "op": op, "ts_ms": 1})


def events_of(*values: bytes | None) -> list[dict[str, Any]]:
    encodings = {name: encoding(declared) for name, declared in CUSTOMERS.items()}
    by = Decoder(
        format=Debezium(wire=ConnectJson(row_schema=row_schema, declared=encodings), database=MYSQL),
        columns=T.StructType([T.StructField(name, one.dtype) for name, one in encodings.items()]),
        keys=("id",),
        known=frozenset({""}),
        max_value_bytes=20_000,
    )
    keys = pa.array([raw({"id": 1004})] * len(values), pa.binary())
    found = by.decode(Records(keys, pa.array(values, pa.binary()), pa.array([0] * len(values), pa.int32())), set())
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows


def test_events_of_the_documentation_are_ordered_by_file_and_offset() -> None:
    found = events_of(
        event("c", {**DOCUMENTED, "server_id": 0, "pos": 154}),
        event("u", DOCUMENTED),
        event("d", {**DOCUMENTED, "pos": 805}),
        None,
        event("t", DOCUMENTED),
        raw(
            {"source": DOCUMENTED, "databaseName": "inventory", "schemaName": None, "ddl": "ALTER", "tableChanges": []}
        ),
    )

    assert [(row["kind"], row["note"]) for row in found] == [
        (Kind.UPSERT, None),
        (Kind.UPSERT, None),
        (Kind.DELETE, None),
        (Kind.REDUNDANT, None),
        (Kind.TRUNCATE, None),
        (Kind.FILTERED, "schema_change"),
    ]
    assert [row["position"] for row in found[:3]] == [(3 << 32) + 154, (3 << 32) + 484, (3 << 32) + 805]
    assert [row["server"] for row in found[:3]] == [None, "223344", "223344"]


def test_recorded_events_of_mariadb_are_read_alike() -> None:
    """A read of a snapshot names no server, and a streamed change has no `snapshot`."""
    read, changed = events_of(
        event("r", RECORDED, snapshot="last", server_id=0, gtid=None, pos=3530, row=0), event("c", RECORDED)
    )

    assert (read["kind"], read["is_snapshot"], read["server"]) == (Kind.UPSERT, True, None)
    assert (changed["kind"], changed["is_snapshot"], changed["server"]) == (Kind.UPSERT, False, "7")
    assert changed["source_millis"] == 1_795_973_167_000


@pytest.mark.parametrize(
    ("lower", "higher"),
    [
        ({"file": "binlog.000009", "pos": 2**32 - 1}, {"file": "binlog.000010", "pos": 4}),
        ({"file": "binlog.999999", "pos": 4}, {"file": "binlog.1000000", "pos": 4}),
        ({"pos": 154, "ts_ms": 9}, {"pos": 155, "ts_ms": 1}),
        ({"file": "z.0001.000001"}, {"file": "a.0001.000002"}),
    ],
)
def test_a_later_place_in_the_binlog_is_a_higher_position(lower: dict[str, Any], higher: dict[str, Any]) -> None:
    before, after = (MYSQL.position({**DOCUMENTED, **one}).position for one in (lower, higher))

    assert before < after < 2**63


def test_rows_of_one_event_have_one_position() -> None:
    """In MySQL's compressed transactions each event counts its rows anew, all at one offset: Kafka orders them."""
    assert MARIADB.position(RECORDED) == MARIADB.position({**RECORDED, "row": 0})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gtid": f"{UUID}:23"},
        {"gtid": f"{UUID.upper()}:23", "server_id": 0},
        {"gtid": "0-7-9"},
        {"server_id": 0},
        {"server_id": None},
        {"file": "binlog"},
        {"file": "binlog.000000"},
        {"file": "binlog.2147483648"},
        {"file": "binlog.00000000001"},
        {"file": "binlog.000001\n"},
        {"file": None},
        {"pos": -1},
        {"pos": 2**32},
        {"pos": None},
    ],
)
def test_positions_of_many_events_are_those_of_each(changes: dict[str, Any]) -> None:
    source = {**DOCUMENTED, **changes}
    many = MYSQL.positions({name: pa.array([source[name]], dtype) for name, dtype in MYSQL.fields.items()})
    try:
        one = MYSQL.position(source)
    except UndecodableError:
        assert many.position.to_pylist() == [None]
    else:
        assert (many.position[0].as_py(), many.server[0].as_py()) == (one.position, one.server)


def test_mysqls_gtid_names_the_server_that_wrote_the_change() -> None:
    """Behind replicas `server_id` may be set by hand; a UUID is a server's own."""
    assert MYSQL.position({**DOCUMENTED, "gtid": f"{UUID}:23"}).server == UUID


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"file": None}, "source.file is null, not a position in the binlog"),
        ({"pos": "4"}, "source.pos is '4', not a position in the binlog"),
        ({"connector": "postgresql", "file": None}, "the event is from 'postgresql', which 'database' must name"),
    ],
)
def test_an_event_without_a_position_says_what_is_wrong(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UndecodableError, match=why):
        MYSQL.position({**DOCUMENTED, **changes})


def test_a_regression_is_counted_in_bytes_of_binlog() -> None:
    """A connector that delivers the last minute again may go back to the file before, however small that is."""
    at = (7 << 32) + 500

    assert MYSQL.regression(at, (7 << 32) + 100) == 400
    assert MYSQL.regression(at, (6 << 32) + 4) == 500
    assert MYSQL.regression(at, (5 << 32) + 4) == 2**30 + 500
    assert MYSQL.regression(at, (8 << 32) + 4) < 0
    assert MYSQL.shown(at) == "000007:500"


@pytest.mark.parametrize(
    ("declared", "written", "stored", "dtype"),
    [
        ("tinyint(4)", -128, -128, "smallint"),
        ("tinyint(3) unsigned", 255, 255, "smallint"),
        ("tinyint(1)", 2, 2, "smallint"),
        ("boolean", True, True, "boolean"),
        ("smallint(6)", -32_768, -32_768, "smallint"),
        ("smallint(5) unsigned", 65_535, 65_535, "int"),
        ("mediumint(9)", -8_388_608, -8_388_608, "int"),
        ("mediumint(8) unsigned", 16_777_215, 16_777_215, "int"),
        ("int(11)", -(2**31), -(2**31), "int"),
        ("int(10) unsigned", 2**32 - 1, 2**32 - 1, "bigint"),
        ("int(5) unsigned zerofill", 42, 42, "bigint"),
        ("bigint(20)", -(2**63), -(2**63), "bigint"),
        ("bigint(20) unsigned", "AP//////////", Decimal(2**64 - 1), "decimal(20,0)"),
        ("decimal(12,3)", "HL6ZGoU=", Decimal("123456789.125"), "decimal(12,3)"),
        ("decimal", "AQ==", Decimal(1), "decimal(10,0)"),
        ("float", 0.5, 0.5, "float"),
        ("float(30)", 1.1, 1.1, "double"),
        ("float(7,3)", 2.5, 2.5, "double"),
        ("double", 1e300, 1e300, "double"),
        ("real", 1.25, 1.25, "double"),
        ("bit(1)", True, True, "boolean"),
        ("bit(10)", "AwI=", b"\x03\x02", "binary"),
        ("varchar(40) character set latin1 collate latin1_swedish_ci", "n\u00e4", "n\u00e4", "string"),
        ("binary(4)", "AQAAAA==", b"\x01\x00\x00\x00", "binary"),
        ("longblob", "AP8=", b"\x00\xff", "binary"),
        ("date", 19_782, date(2024, 2, 29), "date"),
        ("time(6)", -3_020_399_000_000, "-838:59:59", "string"),
        ("time", 360_000_000_000, "100:00:00", "string"),
        ("time(6)", 3_020_399_999_999, "838:59:59.999999", "string"),
        ("datetime(6)", 1_709_210_096_789_012, datetime(2024, 2, 29, 12, 34, 56, 789_012), "timestamp_ntz"),
        ("datetime(3)", 1_709_210_096_789, datetime(2024, 2, 29, 12, 34, 56, 789_000), "timestamp_ntz"),
        ("datetime", 1_709_210_096_000, datetime(2024, 2, 29, 12, 34, 56), "timestamp_ntz"),
        (
            "timestamp(6)",
            "2024-02-29T12:34:56.789012Z",
            datetime.fromisoformat("2024-02-29T12:34:56.789012+00:00"),
            "timestamp",
        ),
        ("year(4)", 1901, 1901, "int"),
        ("enum('S','it''s, (M)')", "it's, (M)", "it's, (M)", "string"),
        ("set('a','b','c')", "a,c", "a,c", "string"),
        ("json", '{"k": 1}', '{"k": 1}', "string"),
        ("uuid", "123e4567-e89b-12d3-a456-426655440000", "123e4567-e89b-12d3-a456-426655440000", "string"),
        (
            "point",
            {"x": 1.0, "y": 2.0, "wkb": "AQE=", "srid": None},
            {"x": 1.0, "y": 2.0, "wkb": b"\x01\x01", "srid": None},
            "struct<x:double,y:double,wkb:binary,srid:int>",
        ),
        ("polygon", {"wkb": "AQM=", "srid": 4326}, {"wkb": b"\x01\x03", "srid": 4326}, "struct<wkb:binary,srid:int>"),
    ],
)
def test_each_type_becomes_what_the_table_holds(declared: str, written: Any, stored: Any, dtype: str) -> None:
    by = encoding(declared)

    assert by.dtype.simpleString() == dtype
    assert one(by, written) == stored


@pytest.mark.parametrize(
    ("declared", "modes", "written", "stored"),
    [
        ("bigint(20) unsigned", {"bigint_unsigned_handling": "long"}, 2**63 - 1, 2**63 - 1),
        ("decimal(12,3)", {"decimal_handling": "string"}, "1.125", "1.125"),
        ("decimal(12,3)", {"decimal_handling": "double"}, 1.125, 1.125),
        ("varbinary(16)", {"binary_handling": "base64"}, "AQL/", "AQL/"),
        ("blob", {"binary_handling": "hex"}, "00ff", "00ff"),
        ("date", {"time_precision": "isostring"}, "2024-02-29Z", date(2024, 2, 29)),
        ("date", {"time_precision": "connect"}, 19_782, date(2024, 2, 29)),
        ("time(6)", {"time_precision": "isostring"}, "23:59:59.5Z", "23:59:59.5Z"),
        ("time(6)", {"time_precision": "connect"}, 1_500, "00:00:01.5"),
        ("time", {"time_precision": "nanoseconds"}, 1_500_000_000, "00:00:01.5"),
        ("datetime", {"time_precision": "isostring"}, "2024-02-29T01:02:03Z", datetime(2024, 2, 29, 1, 2, 3)),
        ("datetime", {"time_precision": "connect"}, 1_500, datetime(1970, 1, 1, 0, 0, 1, 500_000)),
        ("datetime", {"time_precision": "microseconds"}, 1_500_000, datetime(1970, 1, 1, 0, 0, 1, 500_000)),
    ],
)
def test_the_connectors_modes_decide_how_a_type_of_the_binlog_is_written(
    declared: str, modes: dict[str, Any], written: Any, stored: Any
) -> None:
    assert one(encoding(declared, **modes), written) == stored


@pytest.mark.parametrize(
    ("declared", "modes", "why"),
    [
        ("bigint unsigned", {}, "depends on bigint.unsigned.handling.mode"),
        ("datetime", {}, "depends on time.precision.mode"),
        ("decimal(12,3)", {}, "depends on decimal.handling.mode"),
        ("decimal(50,2)", {"decimal_handling": "precise"}, "more digits than Delta's decimals"),
        ("blob", {}, "depends on binary.handling.mode"),
        ("date", {"time_precision": "adaptive"}, "no time.precision.mode 'adaptive'"),
        ("inet6", {}, "must be one of"),
        ("int(", {}, "is not a type of MariaDB or MySQL"),
    ],
)
def test_a_type_of_the_binlog_that_leaves_its_form_open_is_refused(
    declared: str, modes: dict[str, Any], why: str
) -> None:
    with pytest.raises(AmbiguousTypeError, match=why):
        MYSQL.connect_schema(declared, Modes(**modes))
