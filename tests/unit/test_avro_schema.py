"""Avro schemas as Kafka Connect's, and without anything that the bytes do not need."""

from __future__ import annotations

import io
import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import fastavro
import pytest

from stream_merge.sources.wire import avro_schema
from stream_merge.sources.wire.strict_json import UndecodableError


def parsed(schema: Any, *references: Any) -> avro_schema.AvroSchema:
    return avro_schema.parse(json.dumps(schema), [json.dumps(one) for one in references])


def record(*fields: Any, name: str = "Row", **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": n, "type": t} for n, t in fields], **more}


def column(avro: Any) -> dict[str, Any]:
    """The block of a column of this type."""
    (field,) = parsed(record(("c", avro))).block["fields"]
    assert field.pop("field") == "c"
    return dict(field)


@pytest.mark.parametrize(
    ("avro", "connect"),
    [
        ("boolean", {"type": "boolean", "optional": False}),
        ("float", {"type": "float32", "optional": False}),
        (["null", "string"], {"type": "string", "optional": True}),
        (["double", "null"], {"type": "float64", "optional": True}),
        (["long"], {"type": "int64", "optional": False}),
        ({"type": "int", "connect.type": "int16"}, {"type": "int16", "optional": False}),
        ({"type": "fixed", "name": "F", "size": 4}, {"type": "bytes", "optional": False}),
        ({"type": "enum", "name": "E", "symbols": ["a"]}, {"type": "string", "optional": False}),
        (
            {"type": "array", "items": ["null", "int"]},
            {"type": "array", "optional": False, "items": {"type": "int32", "optional": True}},
        ),
        (
            {"type": "map", "values": "long"},
            {
                "type": "map",
                "optional": False,
                "keys": {"type": "string", "optional": False},
                "values": {"type": "int64", "optional": False},
            },
        ),
        (
            ["null", {"type": "long", "connect.version": 1, "connect.name": "io.debezium.time.MicroTimestamp"}],
            {"type": "int64", "optional": True, "name": "io.debezium.time.MicroTimestamp"},
        ),
        (
            {
                "type": "bytes",
                "scale": 2,
                "precision": 10,
                "connect.version": 1,
                "connect.parameters": {"scale": "2", "connect.decimal.precision": "10"},
                "connect.default": "\u0004\u00e2",
                "connect.name": "org.apache.kafka.connect.data.Decimal",
                "logicalType": "decimal",
            },
            {
                "type": "bytes",
                "optional": False,
                "name": "org.apache.kafka.connect.data.Decimal",
                "parameters": {"scale": "2", "connect.decimal.precision": "10"},
                "default": "BOI=",
            },
        ),
    ],
)
def test_types_are_those_of_connects_json_converter(avro: Any, connect: dict[str, Any]) -> None:
    assert column(avro) == connect


@pytest.mark.parametrize(
    ("base", "logical", "name"),
    [
        ("int", "date", "org.apache.kafka.connect.data.Date"),
        ("int", "time-millis", "org.apache.kafka.connect.data.Time"),
        ("long", "timestamp-millis", "avro.timestamp-millis"),
        ("long", "timestamp-micros", "avro.timestamp-micros"),
        ("long", "local-timestamp-micros", "io.debezium.time.MicroTimestamp"),
        ("string", "uuid", "io.debezium.data.Uuid"),
        ("string", "unknown", None),
    ],
)
def test_logical_types_of_other_producers_have_a_meaning(base: str, logical: str, name: str | None) -> None:
    assert column({"type": base, "logicalType": logical}).get("name") == name


def test_a_decimal_of_another_producer_has_its_digits() -> None:
    block = column({"type": "fixed", "name": "D", "size": 8, "logicalType": "decimal", "precision": 12, "scale": 3})

    assert block["name"] == "org.apache.kafka.connect.data.Decimal"
    assert block["parameters"] == {"scale": "3", "connect.decimal.precision": "12"}


def test_names_are_looked_up_in_the_namespace_around_them() -> None:
    """Both images of an envelope have one type, which is defined where it is used first."""
    row = record(("id", "long"), name="Value")
    envelope = record(("before", ["null", row]), ("after", ["null", "Value"]), name="Envelope", namespace="shop.t")

    before, after = parsed(envelope).block["fields"]

    assert before["fields"] == [{"type": "int64", "optional": False, "field": "id"}]
    assert {**after, "field": "before"} == before


def test_types_of_other_subjects_are_found_by_their_full_names() -> None:
    address = record(("city", "string"), name="Address", namespace="shop.common")
    person = record(("home", "shop.common.Address"), name="Person", namespace="shop.common")
    order = record(("by", "shop.common.Person"), ("to", ["null", "shop.common.Address"]), name="Order", namespace="x")

    by, to = parsed(order, address, person).block["fields"]

    assert by["fields"][0]["fields"] == to["fields"] == [{"type": "string", "optional": False, "field": "city"}]


def test_bytes_of_a_schema_are_read_without_names_and_logical_types() -> None:
    """The same name in two namespaces, one that is used again, and a type of another subject."""
    common = record(("x", "int"), name="T", namespace="a.b")
    inner = record(("t", "T"), ("more", ["null", record(("y", "string"), name="T", namespace="c")]), name="In")
    schema = record(
        ("first", {**inner, "namespace": "a.b"}),
        ("again", {"type": "array", "items": "a.b.T"}),
        ("e", {"type": "enum", "name": "E", "symbols": ["s", "t"]}),
        ("f", {"type": "map", "values": {"type": "fixed", "name": "F", "size": 2}}),
        ("d", {"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 1}),
        ("on", {"type": "int", "logicalType": "date"}),
        ("at", {"type": "long", "logicalType": "timestamp-millis"}),
        name="Row",
        namespace="z",
    )
    written = io.BytesIO()
    row = {
        "first": {"t": {"x": 1}, "more": {"y": "z"}},
        "again": [{"x": 2}, {"x": 3}],
        "e": "t",
        "f": {"k": b"\x00\x01"},
        "d": Decimal("12.5"),
        "on": date(1970, 1, 3),
        "at": datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC),
    }
    full = fastavro.parse_schema(schema, {"a.b.T": fastavro.parse_schema(common)})
    fastavro.schemaless_writer(written, full, row)

    physical = json.loads(parsed(schema, common).physical)

    written.seek(0)
    assert fastavro.schemaless_reader(written, fastavro.parse_schema(physical), None) == {
        "p": {**row, "d": b"\x7d", "on": 2, "at": 1000}
    }
    assert "logicalType" not in json.dumps(physical)
    assert "namespace" not in json.dumps(physical)


def test_of_a_record_only_what_is_wanted_is_read() -> None:
    """Unless the record lacks one of these, or a type is defined in what is left out."""
    row = record(("id", "long"), name="Value")
    source = record(("lsn", "long"), ("db", "string"), name="Source")
    envelope = parsed(record(("op", "string"), ("after", row), ("source", source), ("block", ["null", "Value"])))
    reads = {"op": (), "after": (), "source": ("lsn", "snapshot")}

    (member,) = json.loads(avro_schema.reader(envelope.physical, reads))["fields"]
    names = [field["name"] for field in member["type"]["fields"]]

    assert names == ["op", "after", "source"]
    assert member["type"]["fields"][1]["type"]["fields"] == [{"name": "id", "type": "long"}]
    assert member["type"]["fields"][2]["type"]["fields"] == [{"name": "lsn", "type": "long"}]
    for others in ({}, {"op": (), "gone": ()}, {"block": ()}):
        assert avro_schema.reader(envelope.physical, others) == envelope.physical
    assert avro_schema.reader(parsed("long").physical, reads) == parsed("long").physical


def test_a_schema_without_fields_is_read() -> None:
    """A key of one value; Confluent's registry also keeps the bare word."""
    for text in ('"long"', '{"type": "long"}', "long"):
        schema = avro_schema.parse(text)
        assert schema.block == {"type": "int64", "optional": False}
        assert json.loads(schema.physical)["fields"] == [{"name": "p", "type": "long"}]


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (record(("c", ["null", "int", "string"])), "a union of 2 types other than null has no column type"),
        (record(("c", ["null", "Row"])), "the Avro record 'Row' contains itself, which has no column type"),
        (record(("c", "Gone")), "the Avro schema names type 'Gone', which it does not define"),
        ({"type": "record", "name": "R", "fields": [{"name": "c"}]}, "the schema is not Avro"),
        ({"type": "record", "name": "R", "fields": [1]}, "the schema is not Avro"),
        (7, "the Avro schema names type 7, which it does not define"),
    ],
)
def test_what_has_no_column_type_is_refused(schema: Any, why: str) -> None:
    with pytest.raises(UndecodableError) as raised:
        parsed(schema)

    assert str(raised.value) == why
