"""PostgreSQL, Debezium, Kafka, Delta: after a random workload the table equals SELECT *."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import services
from kafka import KafkaAdminClient
from oracle import replayed_feed
from pyspark.sql import SparkSession
from shop_world import CAPTURED, TABLES, WITH_BLOCKS, WITHOUT_BLOCKS, World, literal, workload

from stream_merge.sources.envelopes.base import SNAPSHOT_READS


@pytest.fixture
def world(
    spark: SparkSession, broker: services.Broker, postgres: services.Postgres, tmp_path: Path, seed: int
) -> Iterator[World]:
    """Empty tables; afterwards the topics are gone."""
    postgres.run(f"DROP TABLE IF EXISTS orders, documents; {TABLES}")
    yield World(spark, broker, postgres, tmp_path, random.Random(seed))
    admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
    admin.delete_topics([f"shop.public.{table}" for table in CAPTURED])
    admin.close()


STATEMENTS = 3_000
ADDED = {
    "extra": "integer DEFAULT 5",
    "cents": "numeric(8,2) DEFAULT 1.5",
    "hundreds": "numeric(5,-2) DEFAULT 1200",
    "opened": "date DEFAULT '2024-02-29'",
}


@pytest.mark.parametrize("schemas", [True, False], ids=["with schema blocks", "without schema blocks"])
def test_the_table_equals_the_source_after_a_random_workload(world: World, schemas: bool) -> None:
    """All common types, key changes, rolled back transactions, big unchanged values, columns added half-way."""
    formats = WITH_BLOCKS if schemas else WITHOUT_BLOCKS
    world.database.run(workload(world.rng, 50))
    slot = "with_blocks" if schemas else "without_blocks"
    connector = services.postgres_connector(world.database, tables="public.orders,public.documents")
    connector |= {"slot.name": slot, "publication.name": slot}
    with services.running(services.Connect(world.folder / "connect", world.broker, connector, schemas=schemas)):
        world.database.run(workload(world.rng, STATEMENTS))
        world.wait_for_the_connector()
        world.merge(formats)
        if schemas:
            columns = ", ".join(f"ADD COLUMN {name} {rest}" for name, rest in ADDED.items())
            world.database.run(f"ALTER TABLE orders {columns}; UPDATE orders SET extra = NULL WHERE id % 2 = 0;")
        world.database.run(workload(world.rng, STATEMENTS, start=STATEMENTS))
        world.wait_for_the_connector()
    world.database.run(f"SELECT pg_drop_replication_slot('{slot}');")

    world.merge(formats)

    assert world.merged() == world.expected()
    there, merged = world.documents()
    assert merged == there
    added = ADDED if schemas else {}
    rows = replayed_feed(world.feed(*added), ["id"]).values()
    without_position = [{n: value for n, value in row.items() if n not in ("position", *added)} for row in rows]
    assert sorted(without_position, key=lambda row: row["id"]) == world.expected()
    assert not list(world.folder.glob("__stream_merge_quarantine_*"))
    if schemas:
        there = world.database.rows(f"SELECT id, {', '.join(f'{name}::text' for name in ADDED)} FROM orders")
        orders = world.spark.read.format("delta").load(str(world.folder / "orders"))
        stored = orders.selectExpr("id", *(f"string({name}) AS {name}" for name in ADDED)).collect()
        assert sorted((row.asDict() for row in stored), key=repr) == sorted(there, key=repr)


def test_what_one_connector_delivers_never_falls_back(world: World) -> None:
    """By the last commit before each change; own positions do, by what was written while a transaction was open."""
    world.database.run("INSERT INTO orders (id) SELECT generate_series(1, 40);")
    connector = services.postgres_connector(world.database, tables="public.orders,public.documents")
    connector |= {"slot.name": "open", "publication.name": "open"}
    others = "; ".join(f"INSERT INTO documents VALUES ({n}, 'n', NULL)" for n in range(1, 200))
    with services.running(services.Connect(world.folder / "connect", world.broker, connector, schemas=True)):
        world.wait_for_the_connector()
        with world.database.in_open_transaction("UPDATE orders SET name = 'long' WHERE id <= 30;"):
            world.database.run(f"UPDATE orders SET name = 'short' WHERE id > 30; {others};")
        world.database.run("UPDATE orders SET note = 'after' WHERE id > 20;")
        world.wait_for_the_connector()
    world.database.run("SELECT pg_drop_replication_slot('open');")

    world.merge(WITH_BLOCKS, events_per_batch=10, max_position_regression=0)

    assert world.merged() == world.expected()


def test_a_changed_key_and_an_ad_hoc_snapshot_under_way(world: World) -> None:
    """Without REPLICA IDENTITY FULL a key change leaves a big value out, and names the key that still has it.

    Reads of a blocking ad-hoc snapshot (Debezium 3.4) say how far the log was when they were made. They neither lose to
    what came before nor overtake what is streamed after them, also by a transaction that was open then.
    """
    world.database.run(
        "CREATE TABLE signals (id varchar(42) PRIMARY KEY, type varchar(32) NOT NULL, data varchar(2048));"
        "INSERT INTO documents SELECT n, 't' || n, repeat(md5(n::text), 300) FROM generate_series(1, 50) n;"
    )
    connector = services.postgres_connector(world.database, tables="public.orders,public.documents,public.signals")
    connector |= {"slot.name": "signals", "publication.name": "signals", "signal.data.collection": "public.signals"}
    asked = json.dumps({"data-collections": ["public.documents"], "type": "blocking"})
    with services.running(services.Connect(world.folder / "connect", world.broker, connector, schemas=True)):
        world.database.run("INSERT INTO orders (id) VALUES (1);")
        world.wait_for_the_connector()
        world.merge(WITH_BLOCKS)
        world.database.run("UPDATE documents SET id = id + 100 WHERE id <= 10;")
        world.database.run("UPDATE documents SET title = 'before' WHERE id BETWEEN 20 AND 30;")
        in_flight = (
            "UPDATE documents SET title = 'in flight' WHERE id BETWEEN 41 AND 45; DELETE FROM documents WHERE id = 46;"
        )
        with world.database.in_open_transaction(in_flight):
            world.database.run(f"INSERT INTO signals VALUES ('again', 'execute-snapshot', {literal(asked)});")
            reads = world.reads("documents", at_least=50 + 51)  # the first snapshot, and all rows again
        world.database.run("UPDATE documents SET title = 'after' WHERE id BETWEEN 25 AND 40;")
        world.database.run("DELETE FROM documents WHERE id = 50;")
        world.wait_for_the_connector()
    world.database.run("SELECT pg_drop_replication_slot('signals'); DROP TABLE signals;")

    world.merge(WITH_BLOCKS, max_position_regression=0)

    there, merged = world.documents()
    assert merged == there
    assert len(there) == 50 + 2 - 2  # the two markers of `wait_for_the_connector`, less those deleted
    assert [title for key, title, _ in there if key == 41] == ["in flight"]
    assert not list(world.folder.glob("__stream_merge_quarantine_*"))
    assert {read["snapshot"] for read in reads} <= SNAPSHOT_READS
    assert sorted(Counter(read["lsn"] for read in reads).values()) == [50, 51]
