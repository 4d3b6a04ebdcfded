"""The events of the Kafka comparisons: one text for Spark, which fills topics, and for Python, which keeps a pace.

Envelopes as Debezium 3.4 writes them without a schema block (`decimal.handling.mode: precise`, the default), about
0.6 kB each.
"""

from __future__ import annotations

import json
import random
from base64 import b64encode
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.avro.functions import to_avro

COLUMNS = {
    "id": "bigint",
    "customer": "bigint",
    "status": "text",
    "total": "numeric(12,2)",
    "item": "text",
    "note": "text",
    "created": "timestamptz",
}
"""PostgreSQL types, as the job file declares them."""
VALUE_FORMAT = {"type": "debezium", "columns": COLUMNS, "decimal_handling_mode": "precise"}

_AVRO_TYPES = {
    "id": "long",
    "customer": ["null", "long"],
    "status": ["null", "string"],
    "total": [
        "null",
        {
            "type": "bytes",
            "connect.name": "org.apache.kafka.connect.data.Decimal",
            "connect.parameters": {"scale": "2", "connect.decimal.precision": "12"},
        },
    ],
    "item": ["null", "string"],
    "note": ["null", "string"],
    "created": ["null", {"type": "string", "connect.name": "io.debezium.time.ZonedTimestamp"}],
}
_SOURCE = {
    **{name: "string" for name in ("version", "connector", "name", "snapshot", "db", "sequence", "schema", "table")},
    **{name: "long" for name in ("ts_ms", "ts_us", "ts_ns", "txId", "lsn")},
}


def _record(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": n, "type": t} for n, t in fields.items()]}


AVRO_KEY = _record("Key", {"id": "long"})
AVRO_VALUE = _record(
    "Envelope",
    {
        "before": ["null", _record("Value", _AVRO_TYPES)],
        "after": ["null", "Value"],
        "source": _record("Source", _SOURCE),
        "transaction": ["null", _record("block", {"id": "string"})],
        "op": "string",
        "ts_ms": "long",
    },
)
"""The same events as AvroConverter writes them."""

# `%` in Python and format_string in Spark read the same placeholders.
_ROW = '{"id":%d,"customer":%d,"status":"%s","total":"%s","item":"%s","note":"%s","created":"%s"}'
_OLD_ROW = '{"id":%d,"customer":null,"status":null,"total":null,"item":null,"note":null,"created":null}'
_ENVELOPE = (
    '{"before":%s,"after":%s,"source":{"version":"3.4.0.Final","connector":"postgresql","name":"shop","ts_ms":%d,'
    '"snapshot":"false","db":"shop","sequence":"[\\"24023128\\",\\"24023128\\"]","ts_us":%d000,"ts_ns":%d000000,'
    '"schema":"public","table":"orders","txId":740,"lsn":%d,"xmin":null},"transaction":null,"op":"%s","ts_ms":%d}'
)
_KEY = '{"id":%d}'
_NOTE = "left at the door of the neighbour"

PARTITIONS = 4
FILES = 16
"""Of the table that is merged into, ordered by key."""
POSITIONS_APART = 64
"""Bytes of the source's log between two events."""


def table_files(spark: SparkSession, rows: int, path: Path, *, with_position: bool) -> None:
    """The table before the first event; a hand-written merge stores the position to refuse older events."""
    found = spark.range(0, rows, 1, FILES).selectExpr(
        "id",
        "pmod(id * 7919, 100000) AS customer",
        "'new' AS status",
        "cast(pmod(id * 31, 100000) / 100 AS decimal(12, 2)) AS total",
        "md5(cast(id AS string)) AS item",
        f"'{_NOTE}' AS note",
        "timestamp_seconds(1700000000 + id) AS created",
    )
    if with_position:
        found = found.withColumn("lsn", F.lit(0).cast("bigint"))
    found.write.format("delta").option("delta.enableChangeDataFeed", "true").save(str(path))


def fill(spark: SparkSession, bootstrap: str, topic: str, *, events: int, rows: int) -> None:
    """Write events to a topic: 70 % updates and 10 % deletes of uniform keys, 20 % inserts of new ones.

    Each task writes a Kafka partition of its own in the order of the source's log, and a key is always in the
    same partition, as it would be by its hash.
    """
    each = events // PARTITIONS
    made = (
        spark.range(0, each * PARTITIONS, 1, PARTITIONS)
        .selectExpr(
            f"id DIV {each} AS slot",
            f"id % {each} AS turn",
            "rand(1) AS dice",
            f"cast(rand(2) * {rows // PARTITIONS} AS bigint) AS old",
            "uuid() AS item",
            "unix_millis(current_timestamp()) AS millis",
        )
        .selectExpr(
            "cast(slot AS int) AS partition",
            f"if(dice < 0.2, {rows} + turn * {PARTITIONS}, old * {PARTITIONS}) + slot AS id",
            "CASE WHEN dice < 0.2 THEN 'c' WHEN dice < 0.9 THEN 'u' ELSE 'd' END AS op",
            f"{POSITIONS_APART} * (1 + turn * {PARTITIONS} + slot) AS lsn",
            "item",
            "millis",
        )
        .withColumns({"before": F.lit("null"), "after": F.lit("null")})
        .withColumn("before", F.when(F.col("op") == "d", F.format_string(_OLD_ROW, "id")).otherwise(F.col("before")))
        .withColumn("after", F.when(F.col("op") != "d", _row_in_spark()).otherwise(F.col("after")))
        .select(
            F.format_string(_KEY, "id").alias("key"),
            F.format_string(_ENVELOPE, "before", "after", "millis", "millis", "millis", "lsn", "op", "millis").alias(
                "value"
            ),
            "partition",
        )
    )
    _save(made, bootstrap, topic)


def fill_in_avro(spark: SparkSession, bootstrap: str, topic: str, *, source: str, ids: tuple[int, int]) -> None:
    """Write a topic's events to another one in Avro.

    Args:
        spark: with Kafka's connector and Spark's Avro.
        bootstrap: of the broker.
        topic: to write.
        source: to read.
        ids: registered ids of `AVRO_KEY` and `AVRO_VALUE`.
    """
    row = "struct<id bigint, customer bigint, status string, total string, item string, note string, created string>"
    about = ", ".join(f"{name} {'string' if avro == 'string' else 'bigint'}" for name, avro in _SOURCE.items())
    envelope = (
        f"before {row}, after {row}, source struct<{about}>, transaction struct<id string>, op string, ts_ms bigint"
    )
    found = spark.read.format("kafka").option("kafka.bootstrap.servers", bootstrap).option("subscribe", source).load()
    key_header, header = (F.lit(b"\0" + number.to_bytes(4, "big")) for number in ids)
    key = F.from_json(F.col("key").cast("string"), "id bigint")
    value = F.from_json(F.col("value").cast("string"), envelope)
    for image in ("before", "after"):
        raw = F.unbase64(value[image]["total"])
        value = value.withField(image, F.when(value[image].isNotNull(), value[image].withField("total", raw)))
    made = found.select(
        F.concat(key_header, to_avro(key, json.dumps(AVRO_KEY))).alias("key"),
        F.concat(header, to_avro(value, json.dumps(AVRO_VALUE))).alias("value"),
        "partition",
    )
    _save(made, bootstrap, topic)


def _row_in_spark() -> Column:
    return F.format_string(
        _ROW,
        "id",
        F.expr("pmod(lsn, 100000)"),
        F.lit("packed"),
        F.expr("base64(unhex(lpad(hex(pmod(lsn, 1000000)), 8, '0')))"),  # hundredths, as four bytes
        "item",
        F.lit(_NOTE),
        F.expr("date_format(timestamp_seconds(1700000000 + id), \"yyyy-MM-dd'T'HH:mm:ss.SSSSSS'Z'\")"),
    )


def _save(records: DataFrame, bootstrap: str, topic: str) -> None:
    options = {"bootstrap.servers": bootstrap, "compression.type": "lz4", "linger.ms": "50", "batch.size": "1000000"}
    writer = records.write.format("kafka").option("topic", topic)
    writer.options(**{f"kafka.{name}": value for name, value in options.items()}).save()


def event(rng: random.Random, turn: int, rows: int, millis: int) -> tuple[bytes, bytes, int]:
    """The same kinds of events one at a time: record key, value, and Kafka partition."""
    dice = rng.random()
    op = "c" if dice < 0.2 else "u" if dice < 0.9 else "d"
    key = rows + turn if op == "c" else rng.randrange(rows)
    lsn = POSITIONS_APART * (1 + turn)
    before = after = "null"
    if op == "d":
        before = _OLD_ROW % key
    else:
        total, item = b64encode((lsn % 1_000_000).to_bytes(4, "big")).decode(), f"{rng.getrandbits(128):032x}"
        created = datetime.fromtimestamp(1_700_000_000 + key, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        after = _ROW % (key, lsn % 100_000, "packed", total, item, _NOTE, created)
    value = _ENVELOPE % (before, after, millis, millis, millis, lsn, op, millis)
    return (_KEY % key).encode(), value.encode(), key % PARTITIONS
