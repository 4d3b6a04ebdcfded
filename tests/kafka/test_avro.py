"""Records in Avro with a schema registry: the same rows as in JSON, and a sentence for what cannot be read."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pytest
import services
from pyspark.sql import SparkSession
from services.registry import Registry
from topic_job import TopicJob, raw

from stream_merge.jobs.kafka import query
from stream_merge.jobs.kafka.check import check
from stream_merge.jobs.kafka.exit_codes import Verdict, verdict
from stream_merge.jobs.kafka.replay import Request, replay
from stream_merge.testing import target_rows

AVRO = {"type": "debezium", "encoding": "avro"}
JSON = {"type": "debezium"}
PLACEHOLDER = "__debezium_unavailable_value"


def optional(avro: Any) -> list[Any]:
    return ["null", avro]


def record(name: str, fields: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": n, "type": t} for n, t in fields.items()], **more}


def named(avro: str, name: str, **more: Any) -> dict[str, Any]:
    """A semantic type as AvroConverter writes it."""
    return {"type": avro, "connect.version": 1, "connect.name": name, **more}


def block(connect: str, name: str | None = None, **more: Any) -> dict[str, Any]:
    """A schema as JSON's converter writes it."""
    return {"type": connect, "optional": True, **({} if name is None else {"name": name, "version": 1}), **more}


def b64(value: bytes) -> str:
    return base64.b64encode(value).decode()


class AvroTopic:
    """A topic, its job, and the registry that has its schemas."""

    def __init__(self, job: TopicJob, registry: Registry, *, id_bytes: int = 4) -> None:
        self.job, self.registry, self._id_bytes = job, registry, id_bytes
        self._ids: dict[str, int] = {}
        self.kafka: dict[str, Any] = {
            "bootstrap": job.producer.config["bootstrap_servers"],
            "schema_registry": {"url": registry.url, "id_bytes": id_bytes},
        }

    def framed(self, schema: Any, value: Any, *, types: Sequence[Any] = (), **more: Any) -> bytes:
        """What AvroConverter writes; its schema is registered where it is not yet.

        Args:
            schema: a record.
            value: in it.
            types: of other subjects, which the schema names.
            more: as `Registry.register`.
        """
        text = json.dumps(schema)
        if text not in self._ids:
            self._ids[text] = self.registry.register(f"{self.job.topic}-{schema['name']}", schema, **more)
        return self.encoded(self._ids[text], schema, value, *types)

    def encoded(self, schema_id: int, schema: Any, value: Any, *types: Any) -> bytes:
        """A value behind the id of a schema."""
        named: dict[str, Any] = {}
        for one in (*types, schema):
            parsed = fastavro.parse_schema(json.loads(json.dumps(one)), named)
        written = io.BytesIO()
        fastavro.schemaless_writer(written, parsed, value)
        return self.header(schema_id) + written.getvalue()

    def header(self, schema_id: int) -> bytes:
        return b"\0" + schema_id.to_bytes(self._id_bytes, "big")

    def send(self, key: bytes | None, value: bytes | None) -> int:
        return int(self.job.producer.send(self.job.topic, key=key, value=value).get(30).offset)

    def merge(self, **settings: Any) -> None:
        self.job.merge(kafka=self.kafka, **{"value_format": AVRO, **settings})

    def said(self) -> dict[str, str]:
        """What `check` says about the query."""
        job = self.job.settings(kafka=self.kafka, value_format=AVRO)
        return {finding.about: finding.said for finding in check(job, jars_in=None) if finding.query is not None}

    def quarantined(self) -> list[tuple[Any, ...]]:
        return target_rows(self.job.spark, self.job.quarantine, "offset", "error")


@pytest.fixture
def job(spark: SparkSession, broker: services.Broker, tmp_path: Path) -> Iterator[TopicJob]:
    job = TopicJob(spark, broker, tmp_path)
    yield job
    job.close()


@pytest.fixture
def topic(job: TopicJob, registry: Registry) -> AvroTopic:
    return AvroTopic(job, registry)


# -- Debezium's envelopes ------------------------------------------------------------------------

COLUMNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "small": (optional({"type": "int", "connect.type": "int16"}), block("int16")),
    "ok": (optional("boolean"), block("boolean")),
    "f": (optional("float"), block("float")),
    "r": (optional("double"), block("double")),
    "name": (optional("string"), block("string")),
    "raw": (optional("bytes"), block("bytes")),
    "price": (
        optional(
            {
                "type": "bytes",
                "scale": 2,
                "precision": 10,
                "connect.version": 1,
                "connect.parameters": {"scale": "2", "connect.decimal.precision": "10"},
                "connect.name": "org.apache.kafka.connect.data.Decimal",
                "logicalType": "decimal",
            }
        ),
        block(
            "bytes",
            "org.apache.kafka.connect.data.Decimal",
            parameters={"scale": "2", "connect.decimal.precision": "10"},
        ),
    ),
    "big": (
        optional(
            record(
                "VariableScaleDecimal",
                {"scale": "int", "value": "bytes"},
                namespace="io.debezium.data",
                **{"connect.doc": "Variable scaled decimal", "connect.version": 1},
                **{"connect.name": "io.debezium.data.VariableScaleDecimal"},
            )
        ),
        block(
            "struct",
            "io.debezium.data.VariableScaleDecimal",
            fields=[
                {"type": "int32", "optional": False, "field": "scale"},
                {"type": "bytes", "optional": False, "field": "value"},
            ],
        ),
    ),
    "on": (optional(named("int", "io.debezium.time.Date")), block("int32", "io.debezium.time.Date")),
    "at": (
        optional(named("long", "io.debezium.time.MicroTimestamp")),
        block("int64", "io.debezium.time.MicroTimestamp"),
    ),
    "seen": (
        optional(named("string", "io.debezium.time.ZonedTimestamp")),
        block("string", "io.debezium.time.ZonedTimestamp"),
    ),
    "uid": (optional(named("string", "io.debezium.data.Uuid")), block("string", "io.debezium.data.Uuid")),
    "kind": (
        optional(named("string", "io.debezium.data.Enum", **{"connect.parameters": {"allowed": "a,b"}})),
        block("string", "io.debezium.data.Enum", parameters={"allowed": "a,b"}),
    ),
    "tags": (
        optional({"type": "array", "items": optional("string")}),
        block("array", items={"type": "string", "optional": True}),
    ),
    "doc": (optional(named("string", "io.debezium.data.Json")), block("string", "io.debezium.data.Json")),
    "place": (
        optional(
            record(
                "Geometry",
                {"wkb": "bytes", "srid": optional("int")},
                namespace="io.debezium.data.geometry",
                **{
                    "connect.doc": "Geometry",
                    "connect.version": 1,
                    "connect.name": "io.debezium.data.geometry.Geometry",
                },
            )
        ),
        block(
            "struct",
            "io.debezium.data.geometry.Geometry",
            fields=[
                {"type": "bytes", "optional": False, "field": "wkb"},
                {"type": "int32", "optional": True, "field": "srid"},
            ],
        ),
    ),
    "long": (optional("string"), block("string")),
    "status": ({"type": "string", "connect.default": "new"}, {**block("string", default="new"), "optional": False}),
}
"""Column -> its type in an Avro schema and in a schema block; the key `id` is beside them."""

ROW: dict[str, Any] = {
    "small": -7,
    "ok": True,
    "f": 0.5,
    "r": 0.1,
    "name": 'a "\u0000\n\U0001f600" null: null',
    "raw": b"\x00\xff",
    "price": Decimal("-123.45"),
    "big": {"scale": 3, "value": b"\x05\xdc"},
    "on": 19_000,
    "at": 1_700_000_000_123_456,
    "seen": "2020-02-29T23:59:59.123456+02:00",
    "uid": "6f1f5b30-4b63-4a3e-9c4f-0a4d6c8a2d11",
    "kind": "b",
    "tags": ["a", None, "\u00e9"],
    "doc": '{"a": 1.0}',
    "place": {"wkb": b"\x01\x02", "srid": None},
    "long": "x" * 50,
    "status": "old",
}
STORED = {
    **ROW,
    "big": "1.500",
    "on": date(2022, 1, 8),
    "at": datetime(2023, 11, 14, 22, 13, 20, 123456),
    "seen": datetime(2020, 2, 29, 21, 59, 59, 123456),
    "raw": bytearray(b"\x00\xff"),
    "place": (bytearray(b"\x01\x02"), None),
}
NOTHING: dict[str, Any] = {**dict.fromkeys(ROW), "status": "new"}


def source_record() -> dict[str, Any]:
    """As AvroConverter writes Debezium's, shortened."""
    snapshot = named("string", "io.debezium.data.Enum", **{"connect.parameters": {"allowed": "true,last,false"}})
    fields = {
        "version": "string",
        "name": "string",
        "ts_ms": "long",
        "snapshot": [{**snapshot, "connect.default": "false"}, "null"],
        "sequence": optional("string"),
        "lsn": optional("long"),
        "xmin": optional("long"),
    }
    return record("Source", fields, namespace="io.debezium.connector.postgresql")


def envelope_schema(columns: Mapping[str, Any], *, namespace: str = "shop.public.t") -> dict[str, Any]:
    """An envelope whose images have the same type, as AvroConverter writes it."""
    block_of_transaction = record("block", {"id": "string", "total_order": "long"}, namespace="event")
    fields = {
        "before": optional(record("Value", {"id": "long", **columns}, **{"connect.name": f"{namespace}.Value"})),
        "after": optional("Value"),
        "source": source_record(),
        "transaction": optional(block_of_transaction),
        "op": "string",
        "ts_ms": optional("long"),
    }
    return record("Envelope", fields, namespace=namespace, **{"connect.name": f"{namespace}.Envelope"})


def key_schema(avro: Any = "long", *, namespace: str = "shop.public.t") -> dict[str, Any]:
    return record("Key", {"id": avro}, namespace=namespace, **{"connect.name": f"{namespace}.Key"})


def envelope_block(columns: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The same as a schema block."""
    key = {"type": "int64", "optional": False, "field": "id"}
    row = {
        "type": "struct",
        "optional": True,
        "fields": [key, *({**one, "field": name} for name, one in columns.items())],
    }
    return {"type": "struct", "fields": [{**row, "field": "before"}, {**row, "field": "after"}]}


def in_json(row: Mapping[str, Any] | None) -> Any:
    """A row as JSON's converter writes it."""
    if row is None:
        return None

    def one(value: Any) -> Any:
        if isinstance(value, bytes):
            return b64(value)
        if isinstance(value, Decimal):
            return b64(int(value.scaleb(2)).to_bytes(5, "big", signed=True))
        if isinstance(value, dict):
            return {name: one(inner) for name, inner in value.items()}
        return "NaN" if isinstance(value, float) and math.isnan(value) else value

    return {name: one(value) for name, value in row.items()}


def change(lsn: int, op: str, **images: Any) -> dict[str, Any]:
    source = {"version": "3.4.0.Final", "name": "shop", "ts_ms": 1_700_000_000_000 + lsn, "snapshot": "false"}
    source |= {"sequence": f'["{lsn}","{lsn}"]', "lsn": lsn, "xmin": None}
    return {"before": None, "after": None, **images, "source": source, "transaction": None, "op": op, "ts_ms": None}


def test_the_same_changes_in_avro_and_in_json_give_the_same_table(
    topic: AvroTopic, spark: SparkSession, broker: services.Broker, tmp_path: Path
) -> None:
    """All types, at once and one by one; deletes, null values behind them, and values that the source left out."""
    beside = TopicJob(spark, broker, tmp_path / f"{tmp_path.name}.json")
    schema = envelope_schema({name: avro for name, (avro, _) in COLUMNS.items()})
    schema_block = envelope_block({name: connect for name, (_, connect) in COLUMNS.items()})
    key_block = {"type": "struct", "optional": False, "fields": [{"type": "int64", "optional": False, "field": "id"}]}

    def write(key: int, value: Mapping[str, Any] | None) -> None:
        in_avro = None if value is None else topic.framed(schema, value)
        images = {} if value is None else {image: in_json(value[image]) for image in ("before", "after")}
        in_blocks = None if value is None else raw({"schema": schema_block, "payload": {**value, **images}})
        topic.job.producer.send(topic.job.topic, key=topic.framed(key_schema(), {"id": key}), value=in_avro)
        key_text = raw({"schema": key_block, "payload": {"id": key}})
        beside.producer.send(beside.topic, key=key_text, value=in_blocks)

    for key in range(300):
        row = ROW if key % 3 else {**NOTHING, "r": float("nan")}
        write(key, change(key, "c", after={"id": key, **row}))
    write(1, change(1_000, "u", before={"id": 1, **ROW}, after={"id": 1, **ROW, "name": "n", "long": PLACEHOLDER}))
    write(2, change(1_001, "d", before={"id": 2, **NOTHING}))
    write(2, None)
    write(3, None)
    write(4, change(1_002, "d", before={"id": 4, **NOTHING}))
    write(4, change(1_003, "c", after={"id": 4, **NOTHING}))
    beside.producer.flush()
    topic.job.producer.flush()

    said = topic.said()
    topic.merge()
    beside.merge(value_format=JSON)
    columns = ["id", *COLUMNS]
    rows = topic.job.rows(*columns)

    assert repr(rows) == repr(beside.rows(*columns))
    assert topic.job.accounted() == beside.accounted()
    by_key = {row[0]: dict(zip(columns, row, strict=True)) for row in rows}
    assert by_key.keys() == set(range(300)) - {2, 3}
    assert by_key[5] == {"id": 5, **STORED}
    assert by_key[1] == {"id": 1, **STORED, "name": "n"}
    assert by_key[4] == {"id": 4, **NOTHING}
    assert repr(by_key[6]) == repr({"id": 6, **NOTHING, "r": float("nan")})
    assert said["records"] == "200 tried, 0 undecodable"
    assert said["columns"] == (
        "id bigint, small smallint, ok boolean, f float, r double, name string, raw binary, price decimal(10,2), big"
        " string, on date, at timestamp_ntz, seen timestamp, uid string, kind string, tags array<string>, doc string,"
        " place struct<wkb:binary,srid:int>, long string, status string"
    )
    beside.close()


# -- rows without envelope -----------------------------------------------------------------------


def test_flattened_rows_are_read_by_the_schema_that_each_was_written_in(topic: AvroTopic) -> None:
    """A column that comes later, a type of another subject, and a null value whose key nobody has described yet."""
    address = record("Address", {"city": "string"}, namespace="shop.common")
    version = topic.registry.register("shop.common.Address", address) and ("shop.common.Address", 1)
    about = {"__lsn": optional("long"), "__op": optional("string"), "__deleted": optional("string")}
    first = record("Value", {"id": "long", "name": optional("string"), **about}, namespace="shop.flat")
    home = {"id": "long", "name": optional("string"), "home": optional("shop.common.Address"), **about}
    second = record("Value", home, namespace="shop.flat")
    references = [("shop.common.Address", *version)]
    key = key_schema(namespace="shop.flat")

    def write(schema: Any, lsn: int, op: str = "c", **row: Any) -> None:
        value = {"__lsn": lsn, "__op": op, "__deleted": str(op == "d").lower(), **row}
        more = {"references": references, "types": [address]} if schema is second else {}
        topic.send(topic.framed(key, {"id": row["id"]}), topic.framed(schema, value, **more))

    topic.send(topic.framed(key, {"id": 9}), None)
    write(first, 1, id=1, name="a")
    write(first, 2, id=2, name="b")
    topic.merge(value_format={"type": "flattened", "encoding": "avro"})
    write(second, 3, "u", id=1, name="c", home={"city": "Oslo"})
    write(first, 4, id=3, name="d")
    write(second, 5, "d", id=3, name=None, home=None)
    topic.send(topic.framed(key, {"id": 2}), None)
    write(first, 6, id=4, name="e")
    topic.merge(value_format={"type": "flattened", "encoding": "avro"})

    assert topic.job.rows("id", "name", "home") == [(1, "c", ("Oslo",)), (4, "e", None)]


def test_plain_rows_of_several_types_fill_one_table(job: TopicJob, registry: Registry) -> None:
    """With Apicurio's ids of eight bytes, a column for the order, and a field that marks deletes; keys are text."""
    topic = AvroTopic(job, registry, id_bytes=8)
    common = {"id": "string", "turn": "int", "gone": "boolean"}
    day = {"type": "int", "logicalType": "date"}
    price = {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}
    one = record("Sold", {**common, "on": day, "price": price}, namespace="shop.plain")
    instant = {"type": "long", "logicalType": "timestamp-micros"}
    other = record("Seen", {**common, "at": instant}, namespace="shop.plain")

    def write(schema: Any, key: str, turn: int, *, gone: bool = False, **row: Any) -> None:
        topic.send(key.encode(), topic.framed(schema, {"id": key, "turn": turn, "gone": gone, **row}))

    write(one, "a", 2, on=date(2024, 2, 29), price=Decimal("12.50"))
    write(other, "b", 1, at=datetime(2024, 1, 2, 3, 4, 5, 6, UTC))
    write(one, "a", 1, on=date(2020, 1, 1), price=Decimal("0.00"))
    write(other, "c", 1, at=datetime(2024, 1, 1, tzinfo=UTC))
    write(other, "c", 2, gone=True, at=datetime(2024, 1, 1, tzinfo=UTC))
    value_format = {"type": "plain", "encoding": "avro", "position": "turn", "deletes": {"gone": True}}
    topic.merge(value_format=value_format, key_format={"type": "text"})

    assert job.rows("id", "turn", "on", "price", "at") == [
        ("a", 2, date(2024, 2, 29), Decimal("12.50"), None),
        ("b", 1, None, None, datetime(2024, 1, 2, 3, 4, 5, 6)),
    ]


# -- what cannot be read ---------------------------------------------------------------------------


def test_what_cannot_be_read_is_quarantined_with_a_sentence_and_can_be_replayed(
    topic: AvroTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the registry is away nothing is: the query tries again. A schema that is registered later is found."""
    monkeypatch.setattr(query, "_LONGEST_OUTAGE_SECONDS", 0.0)
    job = topic.job
    schema = envelope_schema({"name": optional("string")})
    odd = envelope_schema({"name": ["null", "int", "string"]}, namespace="shop.odd")
    key = topic.framed(key_schema(), {"id": 1})
    good = topic.framed(schema, change(1, "c", after={"id": 1, "name": "a"}))
    head = good[:5]
    json_schema = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}
    of_json = topic.registry.register(f"{job.topic}-json", json_schema, kind="JSON")
    union = topic.framed(odd, change(2, "c", after={"id": 1, "name": "a"}))
    union_id = int.from_bytes(union[1:5], "big")
    later = union_id + 1
    late = envelope_schema({"name": optional("string"), "more": optional("int")}, namespace="shop.late")
    values = {
        "later": topic.encoded(later, late, change(3, "c", after={"id": 2, "name": "b", "more": 7})),
        "magic": b"\1" + good[1:],
        "short": b"\0\0",
        "not of it": head + b"\x02\xff\xff",
        "json": topic.header(of_json) + b"{}",
        "union": union,
        "glue": b"\3\0" + bytes(16) + good[5:],
        "glue, compressed": b"\3\5" + bytes(16) + good[5:],
    }
    topic.send(key, good)
    offsets = {name: topic.send(key, value) for name, value in values.items()}
    offsets["key"] = topic.send(b"\0\0\x7f\xff\xff\2", None)
    nowhere = {**topic.kafka, "schema_registry": {"url": f"http://127.0.0.1:{services.free_port()}"}}
    away = job.run(kafka=nowhere, value_format=AVRO).failures
    topic.merge()

    (reason,) = away.values()
    assert verdict(reason) is Verdict.AGAIN
    assert str(reason).startswith(
        "[REGISTRY_UNREACHABLE] query 'rows' failed: the schema registry at http://127.0.0.1:"
    )
    assert job.rows() == [(1, "a")]
    begins = "the record does not start with byte 0 and the id of a schema, as Avro of a schema registry does"
    of_glue = "the record has the header of AWS Glue's schema registry, which is not supported"
    number = int.from_bytes(head[1:], "big")
    assert topic.quarantined() == [
        (offsets["later"], f"its schema cannot be used: the schema registry has no schema {later}"),
        (offsets["magic"], begins),
        (offsets["short"], begins),
        (offsets["not of it"], f"the record is not Avro of schema {number}"),
        (offsets["json"], f"its schema cannot be used: schema {of_json} is JSON, not AVRO"),
        (offsets["union"], "its schema cannot be used: a union of 2 types other than null has no column type"),
        (offsets["glue"], of_glue),
        (offsets["glue, compressed"], of_glue),
        (offsets["key"], "its schema cannot be used: the schema registry has no schema 8388607"),
    ]

    assert topic.registry.register(f"{job.topic}-late", late) == later
    settings = job.settings(kafka=topic.kafka, value_format=AVRO)
    replayed = replay(job.spark.newSession(), settings.queries[0], Request())

    assert (replayed.records, replayed.marked, replayed.still) == (9, 1, 8)
    assert job.rows("id", "name", "more") == [(1, "a", None), (2, "b", 7)]
