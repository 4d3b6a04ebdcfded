"""A shop's database, a random workload on it in PostgreSQL, and what its tables must be in Delta."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import services
from kafka import KafkaConsumer, TopicPartition
from oracle import Stored
from prometheus_client import CollectorRegistry
from pyspark.sql import SparkSession

from stream_merge import MergeMetrics
from stream_merge.jobs.kafka import JobSettings, run
from stream_merge.jobs.kafka.run import JobResult
from stream_merge.sources.kafka.connection import Cluster, Connection

TABLES = """
CREATE TABLE orders (
    id bigint PRIMARY KEY, small smallint, whole integer, price numeric(12,3), anything numeric, quick real,
    exact double precision, yes boolean, name varchar(40), note text, raw bytea, day date, clock time(6),
    at timestamp(6), coarse timestamp(3), moment timestamptz, tag uuid, doc jsonb, words text[]
);
ALTER TABLE orders REPLICA IDENTITY FULL;
CREATE TABLE documents (id bigint PRIMARY KEY, title text, body text);
ALTER TABLE documents ALTER COLUMN body SET STORAGE EXTERNAL;
"""
ORDERS = {
    "id": "bigint",
    "small": "smallint",
    "whole": "integer",
    "price": "numeric(12,3)",
    "anything": "numeric",
    "quick": "real",
    "exact": "double precision",
    "yes": "boolean",
    "name": "varchar(40)",
    "note": "text",
    "raw": "bytea",
    "day": "date",
    "clock": "time(6)",
    "at": "timestamp(6)",
    "coarse": "timestamp(3)",
    "moment": "timestamptz",
    "tag": "uuid",
    "doc": "jsonb",
    "words": "text[]",
}
SOURCE = """SELECT id, small, whole, price::text, trim_scale(anything)::text AS anything, quick, exact, yes, name, note,
    encode(raw, 'hex') AS raw, day::text, clock::text, to_char(at, 'YYYY-MM-DD HH24:MI:SS.US') AS at,
    to_char(coarse, 'YYYY-MM-DD HH24:MI:SS.US') AS coarse,
    to_char(moment AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US') AS moment, tag::text, doc::text, words FROM orders"""
_MICROS = "yyyy-MM-dd HH:mm:ss.SSSSSS"
TARGET = [
    "id", "small", "whole", "cast(price AS string) price",
    "regexp_replace(regexp_replace(anything, '(\\\\.\\\\d*?)0+$', '$1'), '\\\\.$', '') anything",
    "cast(cast(quick AS string) AS double) quick",
    "exact", "yes", "name", "note", "lower(hex(raw)) raw", "cast(day AS string) day", "clock",
    f"date_format(at, '{_MICROS}') at", f"date_format(coarse, '{_MICROS}') coarse",
    f"date_format(moment, '{_MICROS}') moment", "tag", "doc", "words",
]  # fmt: skip


Formats = Mapping[str, Mapping[str, Any]]
CAPTURED = ("orders", "documents")


@dataclass
class World:
    """A shop's database and what captures it."""

    topics: ClassVar[str] = "shop.public"
    """What their names begin with."""
    spark: SparkSession
    broker: services.Broker
    database: Any
    """Its server."""
    folder: Path
    rng: random.Random

    def job(self, formats: Formats, *, events_per_batch: int = 2_000, **limits: Any) -> dict[str, Any]:
        """A job file that merges both tables."""
        queries = [
            {
                "name": table,
                "topic": f"{self.topics}.{table}",
                "target": str(self.folder / table),
                "keys": "id",
                "checkpoint": str(self.folder / f"checkpoint_{table}"),
                "trigger": "100 ms",
                "limits": {"max_events_per_batch": events_per_batch, **limits},
                "value_format": formats[table],
                "on_column_default": "fill",
            }
            for table in CAPTURED
        ]
        return {"kafka": {"bootstrap": self.broker.bootstrap}, "metrics": {"port": 0}, "queries": queries}

    def merge(self, formats: Formats, **limits: Any) -> JobResult:
        """Merge all that is in the topics."""
        settings = JobSettings.model_validate(self.job(formats, **limits))
        result = run(settings, self.spark, once=True, metrics=MergeMetrics(CollectorRegistry()))
        assert result.failures == {}
        return result

    def wait_for_the_connector(self) -> None:
        """Until everything that was committed is in the topics: a row of its own is the last thing to come."""
        marker = self.rng.randrange(10**9, 10**10)
        self.database.run(f"INSERT INTO documents VALUES ({marker}, 'marker', NULL);")
        cluster = Cluster(Connection(bootstrap=self.broker.bootstrap))
        seen = {"end": -1}

        def is_quiet() -> bool:
            end = sum(sum(state.ends.values()) for state in cluster.topics([f"{self.topics}.documents"]).values())
            quiet, seen["end"] = end == seen["end"] and end > 0, end
            return quiet and self._has(marker)

        services.wait_until(is_quiet, "the marker is in the topic")
        cluster.close()

    def reads(self, table: str, *, at_least: int) -> list[dict[str, Any]]:
        """The `source` of the newest snapshot reads in a topic, once so many have come after those that were there."""
        topic = f"{self.topics}.{table}"
        consumer = KafkaConsumer(bootstrap_servers=self.broker.bootstrap, group_id=None)
        places = [TopicPartition(topic, p) for p in consumer.partitions_for_topic(topic) or ()]
        consumer.assign(places)
        consumer.seek_to_beginning(*places)
        found: list[dict[str, Any]] = []

        def has_come() -> bool:
            for records in consumer.poll(timeout_ms=200).values():
                values = [json.loads(record.value)["payload"] for record in records if record.value is not None]
                found.extend(value["source"] for value in values if value["op"] == "r")
            return len(found) >= at_least

        services.wait_until(has_come, f"{at_least} snapshot reads in {topic}")
        consumer.close()
        return found

    def _has(self, marker: int) -> bool:
        consumer = KafkaConsumer(bootstrap_servers=self.broker.bootstrap, auto_offset_reset="earliest")
        topic = f"{self.topics}.documents"
        partitions = [TopicPartition(topic, p) for p in consumer.partitions_for_topic(topic) or ()]
        consumer.assign(partitions)
        ends = consumer.end_offsets(partitions)
        for partition, end in ends.items():
            consumer.seek(partition, max(0, end - 5))
        found = False
        for _ in range(20):
            for records in consumer.poll(timeout_ms=200).values():
                found = found or any(str(marker).encode() in (record.key or b"") for record in records)
            if found:
                break
        consumer.close()
        return found

    def expected(self) -> list[dict[str, Any]]:
        return sorted(self.database.rows(SOURCE), key=lambda row: row["id"])

    def merged(self) -> list[dict[str, Any]]:
        frame = self.spark.read.format("delta").load(str(self.folder / "orders")).selectExpr(*TARGET)
        return sorted((row.asDict(recursive=True) for row in frame.collect()), key=lambda row: row["id"])

    def feed(self, *more: str) -> list[tuple[int, str, Stored]]:
        """The change feed of the orders, with more columns and the stored order: an update may advance nothing else.

        Delta 4.4 reads the feed through `java.sql.Date`, which shows 5 to 14 October 1582 as the 15th, whoever wrote
        the file; with Java 8's dates it does not.
        """
        java8 = "spark.sql.datetime.java8API.enabled"
        self.spark.conf.set(java8, "true")
        try:
            return self._feed(*more)
        finally:
            self.spark.conf.unset(java8)

    def _feed(self, *more: str) -> list[tuple[int, str, Stored]]:
        reader = self.spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", 0)
        wanted = [*TARGET, *more, "cast(__stream_merge_sequence AS string) position"]
        changes = reader.load(str(self.folder / "orders")).selectExpr("_commit_version", "_change_type", *wanted)
        return [
            (row[0], row[1], {k: v for k, v in row.asDict(True).items() if k[0] != "_"}) for row in changes.collect()
        ]

    def documents(self) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        """(in the database, in the table)."""
        there = [tuple(row.values()) for row in self.database.rows("SELECT id, title, body FROM documents")]
        frame = self.spark.read.format("delta").load(str(self.folder / "documents")).select("id", "title", "body")
        return sorted(there, key=repr), sorted((tuple(row) for row in frame.collect()), key=repr)


def text(rng: random.Random) -> str:
    return "".join(rng.choice("abcXYZ 0189äß中\U0001f600'\"\\\n") for _ in range(rng.randrange(0, 20)))


def literal(value: str | None) -> str:
    return "NULL" if value is None else "E'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def order_values(rng: random.Random) -> dict[str, str]:
    """One random literal per column, NULL now and then."""
    doc = json.dumps({"k": rng.randrange(9), "t": "v"})
    made = {
        "small": str(rng.randrange(-32768, 32768)),
        "whole": str(rng.randrange(-(2**31), 2**31)),
        "price": f"{rng.randrange(-(10**11), 10**11) / 1000:.3f}",
        "anything": f"{rng.randrange(-(10**30), 10**30)}e-{rng.randrange(0, 12)}",
        "quick": repr(rng.choice([0.5, -1.25, 3e10, 1e-3, 0.1])),
        "exact": repr(rng.uniform(-1e9, 1e9)),
        "yes": rng.choice(["true", "false"]),
        "name": literal(text(rng)[:40]),
        "note": literal(text(rng)),
        "raw": f"'\\x{rng.randbytes(rng.randrange(0, 9)).hex()}'",
        "day": f"date '2000-01-01' + {rng.randrange(-300_000, 300_000)}",
        "clock": f"time '00:00' + interval '{rng.randrange(86_400_000_000)} microseconds'",
        "at": f"timestamp '2000-01-01' + interval '{rng.randrange(-(10**15), 10**15)} microseconds'",
        "coarse": f"timestamp '2000-01-01' + interval '{rng.randrange(10**12)} milliseconds'",
        "moment": f"timestamptz '2000-01-01Z' + interval '{rng.randrange(-(10**15), 10**15)} microseconds'",
        "tag": f"'{rng.randrange(16**32):032x}'",
        "doc": literal(doc),
        "words": f"ARRAY[{literal(text(rng))}, NULL]::text[]",
    }
    return {name: value if rng.random() < 0.9 else "NULL" for name, value in made.items()}


def workload(rng: random.Random, statements: int, start: int = 0) -> str:
    """Inserts, updates, deletes, key changes and transactions that are rolled back."""
    lines = []
    for number in range(start, start + statements):
        key = rng.randrange(max(1, statements // 4))
        values = order_values(rng)
        names, literals = ", ".join(values), ", ".join(values.values())
        some = rng.sample(sorted(values), 3)
        body = literal("x" * 5 + str(number) + "y" * rng.choice([3, 9_000]))
        lines.append(
            rng.choice(
                [
                    f"INSERT INTO orders (id, {names}) VALUES ({key}, {literals}) ON CONFLICT (id) DO NOTHING;",
                    f"UPDATE orders SET {', '.join(f'{n} = {values[n]}' for n in some)} WHERE id = {key};",
                    f"DELETE FROM orders WHERE id = {key};",
                    f"UPDATE orders SET id = id + 1000000 WHERE id = {key}"
                    f" AND NOT EXISTS (SELECT FROM orders WHERE id = {key + 1_000_000});",
                    f"BEGIN; DELETE FROM orders; INSERT INTO orders (id) VALUES ({10**9 + number}); ROLLBACK;",
                    f"INSERT INTO documents VALUES ({key}, 't{number}', {body}) ON CONFLICT (id) DO UPDATE SET"
                    f" title = excluded.title;",
                    f"UPDATE documents SET title = 'u{number}' WHERE id = {key};",
                    f"UPDATE documents SET body = {body} WHERE id = {key};",
                    f"DELETE FROM documents WHERE id = {key};",
                ]
            )
        )
    return "\n".join(lines)


MODES = {"time_precision_mode": "adaptive", "decimal_handling_mode": "precise", "binary_handling_mode": "bytes"}
WITH_BLOCKS: Formats = {table: {"type": "debezium"} for table in CAPTURED}
WITHOUT_BLOCKS: Formats = {
    "orders": {"type": "debezium", "columns": ORDERS, **MODES},
    "documents": {"type": "debezium", "columns": {"id": "bigint", "title": "text", "body": "text"}, **MODES},
}
