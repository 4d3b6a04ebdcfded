"""The events of the Kafka comparisons: one text for Spark, which fills topics, and for Python, which keeps a pace.

Envelopes as Debezium 3.4 writes them without a schema block (`decimal.handling.mode: precise`, the default), about
0.6 kB each.
"""

from __future__ import annotations

import random
from base64 import b64encode
from datetime import UTC, datetime
from pathlib import Path

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

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
