"""The whole way from the database as people run it, with everything on it killed or restarted under load."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import services
import yaml
from job_process import START_SECONDS, JobProcesses
from kafka import KafkaProducer
from oracle import replayed_feed
from pyspark.sql import SparkSession
from shop_world import CAPTURED, TABLES, WITH_BLOCKS, World, workload

from stream_merge.jobs.kafka import load
from stream_merge.jobs.kafka.history import trail
from stream_merge.sources.kafka.connection import Cluster, Connection
from stream_merge.testing import target_rows

KILLS = int(os.environ.get("STREAM_MERGE_KILLS", "3"))
"""A kill and the start after it take half a minute; `make soak` has ten."""
PER_KILL = 2_500
"""Statements."""
EVENTS_PER_BATCH = 500
BAD_PER_KILL = 3
SLOT = "killed"


@pytest.fixture
def world(spark: SparkSession, postgres: services.Postgres, tmp_path: Path, seed: int) -> Iterator[World]:
    """A broker of its own, because it is restarted."""
    broker = services.Broker(tmp_path / "broker")
    with services.running(broker):
        postgres.run(f"DROP TABLE IF EXISTS orders, documents; {TABLES}")
        yield World(spark, broker, postgres, tmp_path, random.Random(seed))


@pytest.fixture
def job(world: World) -> Iterator[JobProcesses]:
    file = world.folder / "job.yaml"
    file.write_text(yaml.safe_dump(world.job(WITH_BLOCKS, events_per_batch=EVENTS_PER_BATCH)))
    job = JobProcesses(file, target=world.folder / "orders", checkpoint=world.folder / "checkpoint_orders")
    yield job
    job.close()


@pytest.mark.timeout(2_400)
def test_killed_again_and_again_between_database_and_table(world: World, job: JobProcesses) -> None:
    """Broker and Connect are restarted, too: rows, feed, history and quarantine are as if nothing had happened."""
    connect = _connect(world)
    bad: dict[str, list[tuple[int, int]]] = {table: [] for table in CAPTURED}
    unrecorded = 0
    with services.running(connect):
        for number in range(KILLS):
            if number == KILLS // 2:
                world.database.run("ALTER TABLE orders ADD COLUMN extra integer;")
            world.database.run(workload(world.rng, PER_KILL, start=number * PER_KILL))
            world.wait_for_the_connector()
            for table in CAPTURED:
                bad[table] += _write_what_nobody_can_read(world, table)
            unrecorded += job.kill_behind_a_commit()
            if number == KILLS // 3:
                connect.stop()
                world.broker.stop()
                world.broker.start()
                connect.start()
            elif number == 2 * KILLS // 3:
                connect.stop(signal.SIGKILL)
                connect.start()
        world.wait_for_the_connector()
    world.database.run(f"SELECT pg_drop_replication_slot('{SLOT}');")
    process = job.start("--once")
    said, _ = process.communicate(timeout=START_SECONDS)

    assert process.returncode == 0, said
    assert unrecorded >= max(1, KILLS // 3)
    assert world.merged() == world.expected()
    there, merged = world.documents()
    assert merged == there
    rows = replayed_feed(world.feed(), ["id"]).values()
    without_position = [{name: value for name, value in row.items() if name != "position"} for row in rows]
    assert sorted(without_position, key=lambda row: row["id"]) == world.expected()
    produced = _ends(world)
    for query in load(world.folder / "job.yaml").queries:
        assert sum(step.offsets for step in trail(query)) == produced[query.topic[0]]
        quarantine = str(world.folder / f"__stream_merge_quarantine_{query.name}")
        assert target_rows(world.spark, quarantine, "partition", "offset") == sorted(bad[query.name], key=repr)


def _connect(world: World) -> services.Connect:
    connector = services.postgres_connector(world.database, tables="public.orders,public.documents")
    connector |= {"slot.name": SLOT, "publication.name": SLOT}
    return services.Connect(world.folder / "connect", world.broker, connector, schemas=True)


def _write_what_nobody_can_read(world: World, table: str) -> list[tuple[int, int]]:
    producer = KafkaProducer(bootstrap_servers=world.broker.bootstrap)
    sent = [producer.send(f"shop.public.{table}", key=b"k", value=b'{"op": ') for _ in range(BAD_PER_KILL)]
    places = [(record.partition, record.offset) for record in (one.get(30) for one in sent)]
    producer.close()
    return places


def _ends(world: World) -> dict[str, int]:
    """Records in each topic; none of them is compacted or transactional."""
    cluster = Cluster(Connection(bootstrap=world.broker.bootstrap))
    topics = cluster.topics([f"shop.public.{table}" for table in CAPTURED])
    cluster.close()
    return {name: sum(state.ends.values()) for name, state in topics.items()}
