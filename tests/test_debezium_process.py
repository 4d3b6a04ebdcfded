"""The whole way from the database as people run it, with everything on it killed or restarted under load."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import services
import yaml
from kafka import KafkaProducer
from oracle import replayed_feed
from pyspark.sql import SparkSession
from shop_world import CAPTURED, TABLES, WITH_BLOCKS, World, workload

from stream_merge.job import JobSettings
from stream_merge.job.trail import trail
from stream_merge.sources.kafka import Cluster, Connection
from stream_merge.testing import target_rows

STATEMENTS = 20_000
KILLS = 10
EVENTS_PER_BATCH = 500
BAD_PER_KILL = 3
SLOT = "killed"
START_SECONDS = 240


@pytest.fixture
def world(spark: SparkSession, postgres: services.Postgres, tmp_path: Path, seed: int) -> Iterator[World]:
    """A broker of its own, because it is restarted."""
    broker = services.Broker(tmp_path / "broker")
    with services.running(broker):
        postgres.run(f"DROP TABLE IF EXISTS orders, documents; {TABLES}")
        yield World(spark, broker, postgres, tmp_path, random.Random(seed))


class Runner:
    """`stream-merge run` over both tables, and what its files say."""

    def __init__(self, world: World) -> None:
        self.described = world.job(WITH_BLOCKS, events_per_batch=EVENTS_PER_BATCH)
        self.file = world.folder / "job.yaml"
        self.file.write_text(yaml.safe_dump(self.described))
        self.folder = world.folder

    def start(self, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "stream_merge.cli", "run", str(self.file), *more]
        command += ["--jars", str(services.SPARK_JARS), "--conf", "spark.driver.memory=1g"]
        heard: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, start_new_session=True, cwd=services.ROOT, **heard)

    def kill_behind_a_commit(self) -> bool:
        """Let it commit two batches of orders; whether it died before its checkpoint knew of the second one."""
        log = self.folder / "orders" / "_delta_log"
        before = _newest(log, "*.json")
        process = self.start()
        deadline = time.monotonic() + START_SECONDS
        while _newest(log, "*.json") < before + 2:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "no version was committed"
            time.sleep(0.002)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        checkpoint = self.folder / "checkpoint_orders"
        return _newest(checkpoint / "commits", "[0-9]*") < _newest(checkpoint / "offsets", "[0-9]*")


def _newest(folder: Path, pattern: str) -> int:
    return max((int(path.stem) for path in folder.glob(pattern)), default=-1)


def test_killed_ten_times_between_database_and_table(world: World) -> None:
    """Broker and Connect are restarted, too: rows, feed, history and quarantine are as if nothing had happened."""
    runner, connect = Runner(world), _connect(world)
    bad: dict[str, list[tuple[int, int]]] = {table: [] for table in CAPTURED}
    unrecorded = 0
    with services.running(connect):
        for number in range(KILLS):
            each = STATEMENTS // KILLS
            if number == KILLS // 2:
                world.postgres.run("ALTER TABLE orders ADD COLUMN extra integer;")
            world.postgres.run(workload(world.rng, each, start=number * each))
            world.wait_for_the_connector()
            for table in CAPTURED:
                bad[table] += _write_what_nobody_can_read(world, table)
            unrecorded += runner.kill_behind_a_commit()
            if number == KILLS // 3:
                connect.stop()
                world.broker.stop()
                world.broker.start()
                connect.start()
            elif number == 2 * KILLS // 3:
                connect.stop(signal.SIGKILL)
                connect.start()
        world.wait_for_the_connector()
    world.postgres.run(f"SELECT pg_drop_replication_slot('{SLOT}');")
    process = runner.start("--once")
    said, _ = process.communicate(timeout=START_SECONDS)

    assert process.returncode == 0, said
    assert unrecorded >= 3
    assert world.merged() == world.expected()
    there, merged = world.documents()
    assert merged == there
    rows = replayed_feed(world.feed(), ["id"]).values()
    without_position = [{name: value for name, value in row.items() if name != "position"} for row in rows]
    assert sorted(without_position, key=lambda row: row["id"]) == world.expected()
    produced = _ends(world)
    for query in JobSettings.model_validate(runner.described).queries:
        assert sum(step.offsets for step in trail(query)) == produced[query.topic[0]]
        quarantine = str(world.folder / f"__stream_merge_quarantine_{query.name}")
        assert target_rows(world.spark, quarantine, "partition", "offset") == sorted(bad[query.name], key=repr)


def _connect(world: World) -> services.Connect:
    connector = services.postgres_connector(world.postgres, tables="public.orders,public.documents")
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
