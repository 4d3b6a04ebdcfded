"""What a value in a record becomes: exactly itself, or a refusal that says why."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T
from wire_rows import debezium_json, flattened_json

from stream_merge.sources.databases.base import AmbiguousTypeError, Modes
from stream_merge.sources.databases.postgresql import POSTGRESQL
from stream_merge.sources.decode import null_values
from stream_merge.sources.decode.decoding import Decoder
from stream_merge.sources.decode.events import Records
from stream_merge.sources.envelopes import plain
from stream_merge.sources.envelopes.base import Kind
from stream_merge.sources.envelopes.plain import Plain, PlainJson
from stream_merge.sources.wire import connect_schema, encodings
from stream_merge.sources.wire.connect_json import ConnectJson
from stream_merge.sources.wire.encodings import Encoding, decode
from stream_merge.sources.wire.keys import JsonKey, NoKey, TextKey
from stream_merge.sources.wire.strict_json import MOST_NESTED, UndecodableError, parse, utf8_text

MODES = Modes(
    time_precision="adaptive",
    decimal_handling="precise",
    binary_handling="bytes",
    interval_handling="numeric",
    hstore_handling="json",
    money_fraction_digits=2,
)


def postgres(declared: str, **modes: Any) -> Encoding:
    chosen = Modes(**modes) if modes else MODES
    return connect_schema.encoding(POSTGRESQL.connect_schema(declared, chosen))


def one(encoding: Encoding, value: Any) -> Any:
    """The value that is stored, or the reason why there is none."""
    decoded = decode(encoding, [value])
    return decoded.errors[0] if decoded.errors else decoded.values[0].as_py()


def b64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def unscaled(number: int) -> str:
    return b64(number.to_bytes((number.bit_length() + 8) // 8, "big", signed=True))


# -- JSON ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": 1', "not JSON at character 7"),
        ('{"a": 1} x', "not JSON at character 9: Extra data"),
        ('{"a": 1}{"a": 2}', "Extra data"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": -Infinity}', "-Infinity is not JSON"),
        ('{"a": 1, "a": 2}', "field 'a' is there twice"),
        ('{"a": 01}', "not JSON at character"),
        ('"tab\there"', "not JSON at character"),
        ("", "not JSON at character 0"),
        ("[" * 5_000 + "]" * 5_000, f"nested deeper than {MOST_NESTED} levels"),
        ("[" * (MOST_NESTED + 1) + "]" * (MOST_NESTED + 1), f"nested deeper than {MOST_NESTED} levels"),
        ("1" * 5_000, "not JSON"),
    ],
)
def test_a_text_that_is_not_one_json_value_is_refused(text: str, why: str) -> None:
    with pytest.raises(UndecodableError, match=why.replace("(", r"\(")):
        parse(text)


def test_what_json_can_say_is_read_exactly() -> None:
    assert parse("12345678901234567890123") == 12345678901234567890123
    assert parse("0.1", exact=True) == Decimal("0.1")
    assert parse("[" * MOST_NESTED + "]" * MOST_NESTED) is not None
    assert parse(' {"a" : [ ]}\n') == {"a": []}


def test_bytes_that_are_not_utf8_are_refused() -> None:
    with pytest.raises(UndecodableError, match="byte 2 is not UTF-8"):
        utf8_text(b"ab\xff")


# -- PostgreSQL's types --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "written", "stored"),
    [
        ("boolean", True, True),
        ("smallint", -32768, -32768),
        ("integer", 2147483647, 2147483647),
        ("bigint", -9223372036854775808, -9223372036854775808),
        ("real", 1.5, 1.5),
        ("real", 3.4028235e38, float.fromhex("0x1.fffffep127")),  # the largest, as Java writes it
        ("double precision", 0.1, 0.1),
        ("double precision", "Infinity", float("inf")),
        ("double precision", 3, 3.0),
        ("numeric(10,2)", unscaled(-12345), Decimal("-123.45")),
        ("numeric(38,0)", unscaled(10**38 - 1), Decimal(10**38 - 1)),
        ("numeric(5,-2)", unscaled(-9999900 * 10**2046), Decimal(-9999900)),  # as Debezium 3.4 writes it
        ("numeric(2,4)", unscaled(99), Decimal("0.0099")),
        ("numeric", {"scale": 3, "value": unscaled(1500)}, "1.500"),
        ("numeric", {"scale": 0, "value": unscaled(10**60)}, str(10**60)),
        ("money", unscaled(99), Decimal("0.99")),
        ("text", "a\u0000b\U0001f600", "a\u0000b\U0001f600"),
        ("varchar(10)", "", ""),
        ("uuid", "6f1f5b30-4b63-4a3e-9c4f-0a4d6c8a2d11", "6f1f5b30-4b63-4a3e-9c4f-0a4d6c8a2d11"),
        ("jsonb", '{"a": 1.0}', '{"a": 1.0}'),
        ("bytea", b64(b"\x00\xff"), b"\x00\xff"),
        ("bit(1)", True, True),
        ("bit(12)", b64(b"\x0f\x01"), b"\x0f\x01"),
        ("date", -719162, date(1, 1, 1)),
        ("time(3)", 86_399_999, "23:59:59.999"),
        ("time(6)", 86_400_000_000, "24:00:00"),
        ("time(6)", -500_000, "-00:00:00.5"),
        ("timestamp(3)", 1_500, datetime(1970, 1, 1, 0, 0, 1, 500_000)),
        ("timestamp(6)", -1, datetime(1969, 12, 31, 23, 59, 59, 999_999)),
        ("timestamptz", "2020-02-29T23:59:59.123456+02:00", datetime.fromisoformat("2020-02-29T21:59:59.123456+00:00")),
        ("timestamp with time zone", "0001-01-01T00:00:00Z", datetime.fromisoformat("0001-01-01T00:00:00+00:00")),
        ("timetz", "10:00:00+01", "10:00:00+01"),
        ("interval", 86_400_000_000, 86_400_000_000),
        ("text[]", ["a", None], ["a", None]),
        ("numeric(4,1)[]", [unscaled(15)], [Decimal("1.5")]),
        ("hstore", '{"a":"b"}', '{"a":"b"}'),
    ],
)
def test_a_value_is_stored_exactly(declared: str, written: Any, stored: Any) -> None:
    assert one(postgres(declared), written) == stored


@pytest.mark.parametrize(
    ("declared", "written", "why"),
    [
        ("boolean", 1, "1 is not a valid boolean"),
        ("integer", 2147483648, "2147483648 is out of range for int"),
        ("integer", 1.0, "1.0 is not a valid int"),
        ("integer", "1", "'1' is not a valid int"),
        ("integer", True, "true is not a valid int"),
        ("bigint", 2**63, "is out of range for bigint"),
        ("real", 3.4028236e38, "is out of range for float"),
        ("real", 10**400, "is out of range for float"),
        ("double precision", "fast", "'fast' is not a number"),
        ("double precision", 2**53 + 1, "has no exact double"),
        ("numeric(10,2)", "!!", "is not base64"),
        ("numeric(10,2)", "", "a decimal without a byte"),
        ("numeric(4,2)", unscaled(10000), "does not fit decimal\\(4,2\\)"),
        ("numeric", {"scale": "3", "value": "AA=="}, "is not a scale and a value"),
        ("numeric", {"scale": 10**18, "value": "AQ=="}, "has a scale that no number"),
        ("numeric", {"scale": -(10**18), "value": "AQ=="}, "has a scale that no number"),
        ("numeric", {"scale": 10**20, "value": "AQ=="}, "has a scale that no number"),
        ("text", "\ud800", "does not fit string"),
        ("bytea", "AAA", "is not base64"),
        ("date", 2_932_897, "is not within the years 1 to 9999"),
        ("timestamp(6)", 9_223_372_036_825_200_000, "is not a time within the years 1 to 9999"),
        ("timestamptz", "infinity", "is not a time with zone"),
        ("timestamptz", "2020-01-01T00:00:00", "is not a time with zone"),
        ("timestamptz", "2020-01-01T00:00:00.1234567Z", "not a whole number of microseconds"),
        ("timestamptz", "2020-02-30T00:00:00Z", "is not a time within"),
        ("time(6)", 839 * 3_600_000_000, "is not a time of less than 839 hours"),
        ("text[]", ["a", 1], "an element: 1 is not a valid string"),
    ],
)
def test_a_value_that_the_type_cannot_hold_is_refused(declared: str, written: Any, why: str) -> None:
    with pytest.raises(UndecodableError, match=why):
        raise UndecodableError(str(one(postgres(declared), written)))


@pytest.mark.parametrize(
    ("declared", "modes", "written", "stored"),
    [
        ("date", {"time_precision": "isostring"}, "2020-02-29Z", date(2020, 2, 29)),
        ("date", {"time_precision": "connect"}, 0, date(1970, 1, 1)),
        (
            "timestamp",
            {"time_precision": "isostring"},
            "2020-02-29T01:02:03.5Z",
            datetime(2020, 2, 29, 1, 2, 3, 500000),
        ),
        ("timestamp", {"time_precision": "nanoseconds"}, 1_000, datetime(1970, 1, 1, 0, 0, 0, 1)),
        ("timestamp", {"time_precision": "connect"}, 1, datetime(1970, 1, 1, 0, 0, 0, 1000)),
        ("time", {"time_precision": "adaptive_time_microseconds"}, 1_500_000, "00:00:01.5"),
        ("numeric(10,2)", {"decimal_handling": "string"}, "1.50", "1.50"),
        ("numeric(10,2)", {"decimal_handling": "double"}, 1.5, 1.5),
        ("bytea", {"binary_handling": "hex"}, "00ff", "00ff"),
        ("interval", {"interval_handling": "string"}, "P1Y", "P1Y"),
        ("hstore", {"hstore_handling": "map"}, {"a": None}, [("a", None)]),
    ],
)
def test_the_connectors_modes_decide_how_a_type_is_written(
    declared: str, modes: dict[str, Any], written: Any, stored: Any
) -> None:
    assert one(postgres(declared, **modes), written) == stored


@pytest.mark.parametrize(
    ("declared", "modes", "why"),
    [
        (
            "timestamp",
            {"time_precision": "adaptive"},
            r"lacks its precision; write 'timestamp\(6\)'",
        ),
        ("timestamp(6)", {}, "time.precision.mode"),
        ("numeric(10,2)", {}, "decimal.handling.mode"),
        ("bytea", {}, "binary.handling.mode"),
        ("interval", {}, "interval.handling.mode"),
        ("numeric(50,2)", {"decimal_handling": "precise"}, "more digits than Delta's decimals"),
        ("wibble", {}, "must be one of "),
        ("text;drop", {}, "is not a PostgreSQL type"),
    ],
)
def test_a_type_that_leaves_its_encoding_open_is_refused(declared: str, modes: dict[str, Any], why: str) -> None:
    with pytest.raises(AmbiguousTypeError, match=why):
        POSTGRESQL.connect_schema(declared, Modes(**modes))


def test_good_values_of_a_column_survive_a_bad_one() -> None:
    decoded = decode(encodings.integer(32), [1, "x", None, 2**40, 5])

    assert decoded.values.to_pylist() == [1, None, None, None, 5]
    assert set(decoded.errors) == {1, 3}


@pytest.mark.parametrize(
    ("schema", "placeholder"),
    [
        ({"type": "string"}, "__debezium_unavailable_value"),
        ({"type": "bytes"}, b64(b"__debezium_unavailable_value")),
        ({"type": "array", "items": {"type": "string"}}, ["__debezium_unavailable_value"]),
        ({"type": "array", "items": {"type": "int32"}}, list(b"__debezium_unavailable_value")),
        (
            {"type": "array", "items": {"type": "string", "name": "io.debezium.data.Uuid"}},
            ["0b5e8ac2-8a8b-3cc0-a5a0-bd4ff0fb5ac7"],
        ),
    ],
)
def test_an_unavailable_value_is_told_by_its_exact_form(schema: dict[str, Any], placeholder: Any) -> None:
    encoding = connect_schema.encoding(schema)

    if schema.get("items", {}).get("name"):  # Java's UUID.nameUUIDFromBytes
        (placeholder,) = encoding.placeholders
        assert len(placeholder[0]) == 36
    assert encoding.is_unavailable(placeholder)
    assert not encoding.is_unavailable(f"{placeholder} ")


# -- envelopes -----------------------------------------------------------------------------------

ROW_SCHEMA = {
    "type": "struct",
    "fields": [
        {"type": "int64", "optional": False, "field": "id"},
        {"type": "string", "optional": True, "field": "name"},
    ],
}


def envelope(op: str, after: Any, *, before: Any = None, lsn: Any = 7, snapshot: Any = "false") -> dict[str, Any]:
    source = {"lsn": lsn, "ts_ms": 1_700_000_000_000, "snapshot": snapshot}
    return {"op": op, "before": before, "after": after, "source": source}


def with_schema(payload: Any) -> dict[str, Any]:
    fields = [{**ROW_SCHEMA, "field": "before"}, {**ROW_SCHEMA, "field": "after"}]
    return {"schema": {"type": "struct", "fields": fields}, "payload": payload}


def raw(value: Any) -> bytes:
    return json.dumps(value).encode()


def decoder(**changes: Any) -> Decoder:
    declared = {"id": postgres("bigint"), "name": postgres("text")}
    columns = T.StructType([T.StructField("id", T.LongType()), T.StructField("name", T.StringType())])
    given = {"format": debezium_json(declared), "columns": columns, "known": frozenset({""}), "keys": ("id",)}
    return Decoder(max_value_bytes=10_000, **{**given, **changes})


def decoded(*records: tuple[bytes | None, bytes | None], by: Decoder | None = None) -> list[dict[str, Any]]:
    return decoded_as_one([key for key, _ in records], [value for _, value in records], by=by)


def decoded_as_one(
    keys: list[bytes | None],
    values: list[bytes | None],
    old_keys: list[bytes | None] | None = None,
    *,
    by: Decoder | None = None,
) -> list[dict[str, Any]]:
    columns = [pa.array(column, pa.binary()) for column in (keys, values, old_keys or [None] * len(keys))]
    partitions = pa.array([0] * len(keys), pa.int32())
    found = (by or decoder()).decode(Records(columns[0], columns[1], partitions, columns[2]), set())
    return list(found.to_pylist())


def test_each_operation_is_told() -> None:
    key = raw({"id": 1})
    found = decoded(
        (key, raw(envelope("c", {"id": 1, "name": "a"}))),
        (key, raw(envelope("r", {"id": 1, "name": "a"}, snapshot="first"))),
        (key, raw(envelope("r", {"id": 1, "name": "a"}, snapshot="incremental"))),
        (key, raw(envelope("d", None, before={"id": 1, "name": None}))),
        (key, None),
        (raw({"id": 2}), None),
        (None, raw({"op": "t", "source": {}})),
        (None, raw({"op": "m", "message": {}})),
        (None, raw({"ts_ms": 1})),
        (None, raw({"status": "BEGIN", "id": "1", "event_count": None, "ts_ms": 1})),
        (None, raw({"source": {}, "ddl": "x", "tableChanges": []})),
    )

    assert [row["kind"] for row in found] == [
        Kind.UPSERT,
        Kind.UPSERT,
        Kind.UPSERT,
        Kind.DELETE,
        Kind.REDUNDANT,
        Kind.NULL_VALUE,
        Kind.TRUNCATE,
        *[Kind.FILTERED] * 4,
    ]
    assert [row["is_snapshot"] for row in found[:4]] == [False, True, True, False]
    assert [row["note"] for row in found[7:]] == ["message", "heartbeat", "transaction", "schema_change"]
    assert found[0]["row"] == {"id": 1, "name": "a"}
    assert found[3]["row"] == {"id": 1, "name": None}
    assert found[5]["row"] == {"id": 2, "name": None}
    assert (found[0]["position"], found[0]["source_millis"]) == (7, 1_700_000_000_000)


def test_an_update_of_a_key_that_the_record_key_lacks_is_refused() -> None:
    """Debezium (3.4) sends no delete of the row before: it would stay for ever."""
    now, key = {"id": 1, "name": "B"}, raw({"id": 1})
    moved, stays, untold, new = (
        (key, raw(envelope(op, now, before=before)))
        for op, before in (("u", {"id": 1, "name": "A"}), ("u", now), ("u", None), ("c", {"id": 1, "name": "A"}))
    )
    in_the_key = (raw(now), moved[1])
    by = decoder(keys=("id", "name"))

    found = decoded(moved, stays, untold, new, in_the_key, by=by)

    assert [row["kind"] for row in found] == [Kind.UNDECODABLE, *[Kind.UPSERT] * 4]
    assert found[0]["note"].startswith(
        "an update changes key column(s) of its row from {'name': 'A'} to {'name': 'B'}, and as they are not in the"
    )
    # An image by another index's replica identity has columns outside of it as their types' defaults.
    assert [row["kind"] for row in decoded((key, raw(envelope("u", now, before={"id": 0, "name": "A"}))))] == ["upsert"]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b"", "not JSON at character 0"),
        (b"\xff", "byte 0 is not UTF-8"),
        (b"7", "the value is not an object"),
        (raw({"op": "x", "source": {}}), "op is 'x'"),
        (raw(envelope("c", None)), "has no row in `after`"),
        (raw(envelope("c", {"id": 1, "name": "a"}, lsn=None)), "source.lsn is null"),
        (raw(envelope("c", {"id": 1, "name": "a"}, lsn="7")), "source.lsn is '7'"),
        (raw({"op": "c", "after": {}}), "the event has no source"),
        (raw(envelope("c", {"id": "1", "name": "a"})), "column 'id': '1' is not a valid bigint"),
        (
            raw(envelope("c", {"id": 1, "name": "a", "more": 1})),
            r"column\(s\) \['more'\] are in the row but in no schema",
        ),
        (b'{"op": "c", "x": "' + b"x" * 20_000 + b'"}', "more than max_value_bytes"),
    ],
)
def test_a_broken_event_is_kept_with_its_bytes_and_the_reason(value: bytes, why: str) -> None:
    good = (raw({"id": 9}), raw(envelope("c", {"id": 9, "name": "good"})))
    found = decoded(good, (b"k", value), good)

    assert [row["kind"] for row in found] == [Kind.UPSERT, Kind.UNDECODABLE, Kind.UPSERT]
    assert (found[1]["raw_key"], found[1]["raw_value"]) == (b"k", value)
    assert found[0]["raw_value"] is None
    with pytest.raises(UndecodableError, match=why):
        raise UndecodableError(found[1]["note"])


def test_a_delete_without_an_image_takes_its_key_from_the_record_key() -> None:
    found = decoded((raw({"id": 5}), raw(envelope("d", None))), (raw({"schema": {}, "payload": {"id": 6}}), None))

    assert [row["row"]["id"] for row in found] == [5, 6]


@pytest.mark.parametrize("form", ["json", "flattened"])
def test_a_null_value_record_says_again_only_what_the_last_event_of_its_key_said(form: str) -> None:
    """Of a key that was deleted and came back it is the delete of the row that came back."""
    flat = form == "flattened"
    value_format = flattened_json(FLAT) if flat else PlainJson(declared=FLAT, deletes=("op", "d"))
    op, about = ("__op", {"__lsn": 5}) if flat else ("op", {})
    key, other = raw({"id": 1}), raw({"id": 2})
    gone = (key, raw({"id": 1, op: "d", **about}))
    back = (key, raw({"id": 1, "name": "b", op: "u", **about}))
    broken = (key, raw({"id": 1, "name": 5, op: "u", **about}))
    elsewhere = (other, raw({"id": 2, "name": "b", op: "u", **about}))
    null = (key, None)

    def kind_of_last(*records: tuple[bytes | None, bytes | None]) -> str:
        return str(decoded(*records, by=decoder(format=value_format))[-1]["kind"])

    assert kind_of_last(gone, back, null) == Kind.NULL_VALUE
    assert kind_of_last(gone, broken, null) == Kind.NULL_VALUE
    assert kind_of_last(gone, null, back, null) == Kind.NULL_VALUE
    assert kind_of_last(gone, elsewhere, null) == Kind.REDUNDANT
    assert kind_of_last(gone, back, gone, null) == Kind.REDUNDANT
    assert kind_of_last(gone, null, null) == Kind.REDUNDANT


def test_the_key_of_a_null_value_record_is_read_as_its_own_schema_says() -> None:
    """A column that was `numeric(12,0)` and is `numeric(14,2)`: 700 of then is not 7.00."""

    def written(scale: int, payload: str) -> bytes:
        parameters = {"scale": f"{scale}", "connect.decimal.precision": f"{12 + scale}"}
        name = "org.apache.kafka.connect.data.Decimal"
        column = {"type": "bytes", "name": name, "parameters": parameters, "field": "id", "optional": False}
        schema = {"type": "struct", "fields": [column], "optional": False, "name": "shop.Key"}
        return raw({"schema": schema, "payload": {"id": payload}})

    before, now = written(0, "Arw="), written(2, "Arw=")
    key = JsonKey(only="id")
    schemas = frozenset({key.schema(now) or ""})
    columns = T.StructType([T.StructField("id", T.DecimalType(14, 2))])
    by = Decoder(format=debezium_json(), columns=columns, keys=("id",), known=schemas, max_value_bytes=10_000)

    found = decoded((before, None), (now, None), by=by)
    more = raw({"schema": {"type": "struct", "fields": [{"type": "int32", "field": "of"}]}, "payload": {"id": "Arw="}})
    others = decoded((written(4, "Arw="), None), (more, None), by=by)  # too fine for the column, and without the key

    assert [str(row["row"]["id"]) for row in found] == ["700.00", "7.00"]
    first = decoded((before, None), by=replace(by, known=frozenset()))
    assert [row["kind"] for row in others] == [Kind.OTHER_SCHEMA, Kind.NULL_VALUE]
    assert (others[0]["note"], str(others[1]["row"]["id"])) == (None, "7.00")
    assert null_values.schemas([first[0]["note"], None]) == ([], [key.schema(before)])
    assert key.schema(raw({"schema": {"type": "int64", "optional": False}, "payload": 5})) is None


def test_a_null_value_record_behind_an_event_in_an_unknown_schema_may_be_its_delete() -> None:
    key = raw({"id": 1})
    found = decoded(
        (key, raw(envelope("d", None, before={"id": 1}))),
        (key, raw(with_schema(envelope("c", {"id": 1, "name": "a"})))),
        (key, None),
    )

    assert [row["kind"] for row in found] == [Kind.DELETE, Kind.OTHER_SCHEMA, Kind.NULL_VALUE]


def test_a_key_that_came_back_in_a_later_batch_of_its_task_is_no_longer_deleted() -> None:
    """Also in one without a delete, and only in its own partition."""
    by = decoder(format=PlainJson(declared=FLAT, deletes=("op", "d")))
    key, deleted = raw({"id": 1}), set[tuple[int, bytes]]()

    def kinds(partition: int, *values: bytes | None) -> list[str]:
        keys, found = (pa.array(column, pa.binary()) for column in ([key] * len(values), values))
        events = by.decode(Records(keys, found, pa.array([partition] * len(values), pa.int32())), deleted)
        return [row["kind"] for row in events.to_pylist()]

    kinds(0, raw({"id": 1, "op": "d"}))
    kinds(1, raw({"id": 1, "name": "b"}))

    assert kinds(0, None) == [Kind.REDUNDANT]
    assert kinds(0, raw({"id": 1, "name": "b"})) == [Kind.UPSERT]
    assert kinds(0, None) == [Kind.NULL_VALUE]


def test_a_record_with_neither_key_nor_value_is_undecodable() -> None:
    assert decoded((None, None))[0]["kind"] == Kind.UNDECODABLE


def test_an_event_in_an_unknown_schema_waits_for_a_second_look() -> None:
    """The first look tells the schema; the second one, which knows it, reads the row."""
    record = (raw({"id": 1}), raw(with_schema(envelope("c", {"id": 1, "name": "a"}))))
    first = decoded(record, by=decoder(format=debezium_json(), known=frozenset()))[0]

    assert first["kind"] == Kind.OTHER_SCHEMA
    assert first["raw_value"] == record[1]
    second = decoded(record, record, by=decoder(format=debezium_json(), known=frozenset({first["note"]})))
    assert [row["row"] for row in second] == [{"id": 1, "name": "a"}] * 2


def test_a_required_field_must_be_there() -> None:
    record = (raw({"id": 1}), raw(with_schema(envelope("c", {"id": None, "name": "a"}))))
    known = decoded(record, by=decoder(format=debezium_json(), known=frozenset()))[0]["note"]

    found = decoded(record, by=decoder(format=debezium_json(), known=frozenset({known})))[0]

    assert (found["kind"], found["note"]) == (Kind.UNDECODABLE, "column 'id': a required field is missing")


def test_values_that_are_not_in_the_event_are_named() -> None:
    found = decoded(
        (b"{}", raw(envelope("u", {"id": 1, "name": connect_schema.PLACEHOLDER}))),
        (b"{}", raw(envelope("u", {"id": 1}))),
        (b"{}", raw(envelope("u", {"id": 1, "name": f"{connect_schema.PLACEHOLDER}!"}))),
    )

    assert [(row["unavailable"], row["absent"]) for row in found] == [(["name"], None), (None, ["name"]), (None, None)]
    assert found[0]["row"]["name"] is None


@pytest.mark.parametrize(
    "value",
    [
        {"op": [], "source": {}},
        envelope("c", {"id": 1, "name": "a"}, snapshot=[]),
        envelope("d", None, before=[1]),
        envelope("c", {"id": 1, "name": "a"}, lsn=2**63),
        {"schema": {"type": "struct", "fields": [1]}, "payload": {}},
        {"schema": {"type": "struct", "fields": [{"field": "after", "type": "struct"}]}, "payload": envelope("c", {})},
    ],
)
def test_whatever_a_record_holds_the_decoder_does_not_stumble(value: Any) -> None:
    """A schema that makes no sense waits for a second look, which finds it broken."""
    (first,) = decoded((raw({"id": 1}), raw(value)))
    if first["kind"] == Kind.OTHER_SCHEMA:
        (first,) = decoded((raw({"id": 1}), raw(value)), by=decoder(broken={first["note"]: "no columns"}))

    assert first["kind"] == Kind.UNDECODABLE
    assert first["raw_value"] == raw(value)


def test_a_time_out_of_range_is_no_time() -> None:
    event = envelope("c", {"id": 1, "name": "a"})
    event["source"]["ts_ms"] = 2**70

    (row,) = decoded((b"{}", raw(event)))

    assert (row["kind"], row["source_millis"]) == (Kind.UPSERT, None)


def test_a_read_of_an_incremental_snapshot_stands_where_its_sequence_says() -> None:
    """Debezium 3.4 leaves `lsn` out of them."""
    event = envelope("r", {"id": 1, "name": "a"}, lsn=None, snapshot="incremental")
    event["source"]["sequence"] = '["40","44"]'

    (row,) = decoded((b"{}", raw(event)))

    assert (row["position"], row["last_commit"], row["is_snapshot"]) == (44, 40, True)


def test_a_missing_key_is_never_guessed() -> None:
    found = decoded((raw({"other": 1}), None), (None, raw(envelope("u", {"name": "a"}))))

    assert [(row["kind"], row["note"]) for row in found] == [
        (Kind.UNDECODABLE, "column 'id': the field is missing")
    ] * 2


def test_null_value_records_bring_the_schema_of_their_key() -> None:
    """After a restart they can be the first thing that comes."""
    key = raw({"schema": {"type": "struct", "fields": [{"type": "int64", "field": "id"}]}, "payload": {"id": 7}})
    (first,) = decoded((key, None), by=decoder(format=debezium_json(), known=frozenset()))

    (second,) = decoded((key, None), by=decoder(format=debezium_json(), known=frozenset({first["note"]})))

    assert (second["kind"], second["row"]["id"]) == (Kind.NULL_VALUE, 7)


@pytest.mark.parametrize("written", ['{"__debezium_unavailable_value":"__debezium_unavailable_value"}', "ab"])
def test_an_hstore_and_a_placeholder_in_hex_are_told_too(written: str) -> None:
    hexadecimal = "hex:6162" if written == "ab" else connect_schema.PLACEHOLDER
    encoding = connect_schema.encoding({"type": "string", "name": "io.debezium.data.Json"}, placeholder=hexadecimal)

    assert encoding.is_unavailable(written)


# -- rows without an envelope --------------------------------------------------------------------

FLAT = {"id": postgres("bigint"), "name": postgres("text")}


def test_flattened_rows_say_in_fields_of_their_own_what_they_are() -> None:
    by = decoder(format=flattened_json(FLAT))
    about = {"__lsn": 5, "__source_ts_ms": 1_000}
    found = decoded(
        (raw({"id": 1}), raw({"id": 1, "name": "a", "__op": "c", **about})),
        (raw({"id": 1}), raw({"id": 1, "name": "a", "__deleted": "true", **about})),
        (raw({"id": 1}), raw({"id": 1, "name": "a", "__deleted": "false", **about})),
        (raw({"id": 2}), None),
        (raw({"id": 1}), raw({"id": 1, "name": "a", "__op": "c"})),
        (raw({"id": 1}), raw({"id": 1, "name": "a", "__mine": "c", **about})),
        (raw({"id": 1}), raw({"id": 1, "name": "a", "__op": "r", **about})),
        by=by,
    )

    assert [row["kind"] for row in found] == [
        Kind.UPSERT,
        Kind.DELETE,
        Kind.UPSERT,
        Kind.NULL_VALUE,
        Kind.UNDECODABLE,
        Kind.UNDECODABLE,
        Kind.UPSERT,
    ]
    assert [row["is_snapshot"] for row in found] == [False] * 6 + [True]
    assert (found[0]["position"], found[0]["source_millis"], found[0]["row"]) == (5, 1_000, {"id": 1, "name": "a"})
    assert "add.fields" in found[4]["note"]
    assert "['__mine']" in found[5]["note"]


def test_plain_objects_are_read_in_the_declared_types() -> None:
    declared = {
        "id": plain.declared_encoding("bigint"),
        "name": plain.declared_encoding("string"),
    }
    by = decoder(format=PlainJson(declared=declared, deletes=("gone", True)))
    found = decoded(
        (None, raw({"id": 1, "name": "a"})),
        (None, raw({"id": 1, "gone": True})),
        (None, raw({"id": 1.5, "name": "a"})),
        by=by,
    )

    assert [row["kind"] for row in found] == [Kind.UPSERT, Kind.DELETE, Kind.UNDECODABLE]


def test_rows_with_a_schema_are_ordered_by_a_column_and_deleted_by_a_field() -> None:
    """That field is not a column; one of another type, or a row without a schema, orders nothing."""
    fields = [("id", "int64"), ("name", "string"), ("turn", "int32"), ("gone", "string")]
    block = {"type": "struct", "fields": [{"field": n, "type": t, "optional": n != "id"} for n, t in fields]}
    wire = ConnectJson(row_schema=partial(plain.row_schema, marker="gone"))
    form = Plain(wire=wire, position="turn", deletes=("gone", "yes"))
    columns = T.StructType().add("id", T.LongType()).add("name", T.StringType()).add("turn", T.IntegerType())

    def row(**payload: Any) -> tuple[None, bytes]:
        return None, raw({"schema": block, "payload": payload})

    known = form.read(*row(id=1, name="a", turn=1, gone=None)).schema_id
    found = decoded(
        row(id=1, name="a", turn=3, gone=None),
        row(id=1, name=None, turn=4, gone="yes"),
        row(id=1, name="a", turn=None, gone="no"),
        (None, raw({"id": 1, "turn": 1})),
        by=Decoder(format=form, columns=columns, keys=("id",), known=frozenset({known}), max_value_bytes=900),
    )

    assert [(row["kind"], row["position"], row["note"]) for row in found] == [
        (Kind.UPSERT, 3, None),
        (Kind.DELETE, 4, None),
        (Kind.UNDECODABLE, None, "turn is null, not an integer that orders the event"),
        (Kind.UNDECODABLE, None, "the record is not a row with a schema"),
    ]
    assert found[0]["row"] == {"id": 1, "name": "a", "turn": 3}


@pytest.mark.parametrize("count", [1, 300], ids=["one by one", "at once"])
def test_json_behind_the_header_of_a_schema_registry_is_read(count: int) -> None:
    """Byte 0 and the id of a JSON schema, before keys and values; the quarantine gets the bytes as they came."""
    by = replace(decoder(), may_be_framed=True)
    header = b"\0\0\0\0\7"
    good = header + raw({"id": 1}), header + raw(envelope("c", {"id": 1, "name": "a"}))
    bad = header + raw({"id": 1}), header + b"{"

    found = decoded(*[good] * count, (raw({"id": 2}), raw(envelope("d", None, before={"id": 2}))), bad, by=by)

    assert [row["row"] for row in found[:count]] == [{"id": 1, "name": "a"}] * count
    assert [row["kind"] for row in found[count:]] == [Kind.DELETE, Kind.UNDECODABLE]
    assert (found[-1]["raw_key"], found[-1]["raw_value"]) == bad


def test_a_field_is_the_column_of_its_name_in_any_case() -> None:
    """In each envelope and in record keys; two fields of one name cannot both be stored."""
    plain_columns = {
        "id": plain.declared_encoding("bigint"),
        "name": plain.declared_encoding("struct<first:string>"),
        "at": plain.declared_encoding("bigint"),
    }
    of_plain = decoder(
        columns=T.StructType([T.StructField(name, one.dtype) for name, one in plain_columns.items()]),
        format=PlainJson(declared=plain_columns, position="at", deletes=("gone", True), key_completes=True),
    )
    about = {"__lsn": 5, "__op": "u"}
    key = raw({"ID": 1})
    enveloped = decoded(
        (key, raw(envelope("c", {"ID": 1, "Name": "a"}))),
        (key, raw(envelope("d", None, before={"id": 1, "NAME": None}))),
        (raw({"Id": 2}), None),
        (raw({}), raw(envelope("u", {"ID": 2}, before={"Id": 1}))),
        (key, raw(envelope("c", {"id": 1, "ID": 1, "name": "a"}))),
    )
    flattened = decoded(
        (key, raw({"ID": 1, "NAME": "a", **about})),
        (key, raw({"id": 1, **about, "__op": "d"})),
        (key, raw({"id": 1, "name": "a", "Name": "a", **about})),
        by=decoder(format=flattened_json(FLAT)),
    )
    bare = decoded(
        (key, raw({"NAME": {"First": "a"}, "At": 3})),
        (None, raw({"Id": 1, "GONE": True, "at": 4})),
        (None, raw({"id": 1, "name": {"first": "a", "FIRST": "b"}, "at": 5})),
        by=of_plain,
    )

    assert [(row["kind"], row["row"] and row["row"]["id"]) for row in enveloped] == [
        (Kind.UPSERT, 1),
        (Kind.DELETE, 1),
        (Kind.NULL_VALUE, 2),
        (Kind.UNDECODABLE, None),
        (Kind.UNDECODABLE, None),
    ]
    assert enveloped[0]["row"] == {"id": 1, "name": "a"}
    assert enveloped[3]["note"].startswith("an update changes key column(s)")
    assert enveloped[4]["note"] == "field 'id' appears twice, in different case"
    assert [(row["kind"], row["note"]) for row in flattened] == [
        (Kind.UPSERT, None),
        (Kind.DELETE, None),
        (Kind.UNDECODABLE, "field 'name' appears twice, in different case"),
    ]
    assert flattened[0]["row"] == {"id": 1, "name": "a"}
    assert [(row["kind"], row["position"], row["note"]) for row in bare] == [
        (Kind.UPSERT, 3, None),
        (Kind.DELETE, 4, None),
        (Kind.UNDECODABLE, None, "column 'name': field 'first' appears twice, in different case"),
    ]
    assert bare[0]["row"] == {"id": 1, "name": {"first": "a"}, "at": 3}


@pytest.mark.parametrize(
    ("declared", "written", "stored"),
    [
        ("decimal(5,2)", Decimal("1.5"), Decimal("1.50")),
        ("bigint", Decimal("1.0"), 1),
        ("array<int>", [1, None], [1, None]),
        ("map<string,bigint>", {"a": 1}, [("a", 1)]),
        ("struct<a:int,b:array<string>>", {"a": 1, "b": ["x"]}, {"a": 1, "b": ["x"]}),
        ("timestamp_ntz", "2020-01-01T00:00:00", datetime(2020, 1, 1)),
    ],
)
def test_a_declared_type_of_plain_json_is_stored_exactly(declared: str, written: Any, stored: Any) -> None:
    assert one(plain.declared_encoding(declared), written) == stored


def test_a_type_that_plain_json_cannot_hold_is_refused() -> None:
    with pytest.raises(UndecodableError, match="'blob' is not a type"):
        plain.declared_encoding("array<blob>")


def test_keys_have_a_format_of_their_own() -> None:
    block = raw({"schema": {"type": "struct", "fields": [{"type": "int64", "field": "id"}]}, "payload": {"id": 7}})
    only, pair = JsonKey(only="id"), JsonKey()

    assert [only.fields(key) for key in (b"7", b'"7"', b'{"id": 7}', block, None)] == [
        {"id": 7},
        {"id": "7"},
        {"id": 7},
        {"id": 7},
        {},
    ]
    assert TextKey(only="id").fields(b"7") == {"id": "7"}
    assert TextKey(only="id", is_integer=True).fields(b"-7") == {"id": -7}
    assert NoKey().fields(b"whatever") == {}
    for refused, key in ((pair, b"7"), (only, b"[7]"), (only, b"7 8"), (TextKey(only="id", is_integer=True), b"7.0")):
        with pytest.raises(UndecodableError):
            refused.fields(key)


def test_an_event_that_lacks_a_value_says_which_key_its_row_had() -> None:
    lacking = raw(envelope("c", {"id": 2, "name": connect_schema.PLACEHOLDER}))
    whole = raw(envelope("c", {"id": 3, "name": "a"}))
    old_keys = [raw({"id": 1}), b"Struct{id=1}", None, raw({"id": 1})]
    keys = [raw({"id": 2})] * 3 + [raw({"id": 3})]

    found = decoded_as_one(keys, [lacking] * 3 + [whole], old_keys)

    assert [row["old_key"] for row in found] == [{"id": 1}, None, None, None]
    assert [row["raw_value"] for row in found] == [lacking, lacking, lacking, None]


@pytest.mark.parametrize(
    ("marker", "written", "kind"),
    [
        (True, "true", Kind.DELETE),
        (True, "1", Kind.UPSERT),
        (True, "1.0", Kind.UPSERT),
        (0, "0", Kind.DELETE),
        (0, "false", Kind.UPSERT),
        (0, "0.0", Kind.DELETE),
    ],
)
def test_a_delete_is_marked_by_the_value_and_not_by_one_that_python_takes_for_it(
    marker: Any, written: str, kind: Kind
) -> None:
    declared = {
        "id": plain.declared_encoding("bigint"),
        "name": plain.declared_encoding("string"),
    }
    by = decoder(format=PlainJson(declared=declared, deletes=("gone", marker)))

    (found,) = decoded((None, b'{"id": 1, "name": "a", "gone": %b}' % written.encode()), by=by)

    assert found["kind"] == kind
