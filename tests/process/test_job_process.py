"""A job as people run it: a process with a job file, killed, stopped and started again."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import services
from job_process import START_SECONDS, JobProcesses, end
from kafka import KafkaAdminClient, KafkaProducer
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from stream_merge.cli import app as cli
from stream_merge.jobs.kafka import load
from stream_merge.jobs.kafka.history import trail
from stream_merge.testing import change_rows, target_rows

KILLS = 3
EVENTS_PER_BATCH = 200


class Shop:
    """A topic that is written to, a job file, and what the table must be in the end."""

    def __init__(self, broker: services.Broker, folder: Path, seed: int) -> None:
        self.folder = folder
        self.topic = folder.name
        self.target = folder / "orders"
        self.checkpoint = folder / "checkpoint"
        self.file = folder / "job.yaml"
        self.rng = random.Random(seed)
        self.rows: dict[int, str] = {}
        self.bad: list[tuple[int, int]] = []
        self.produced = 0
        self.lsn = 0
        self.job = JobProcesses(self.file, target=self.target, checkpoint=self.checkpoint)
        self._admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
        self._admin.create_topics({self.topic: {"num_partitions": 2, "replication_factor": 1}})
        # After an outage of a minute the client's default is to try again after half a minute: as long as we wait.
        self._producer = KafkaProducer(bootstrap_servers=broker.bootstrap, reconnect_backoff_max_ms=1_000)
        self.file.write_text(
            f"""
kafka: {{bootstrap: "{broker.bootstrap}"}}
metrics: {{port: 0}}
defaults:
  trigger: 100 ms
  limits: {{max_events_per_batch: {EVENTS_PER_BATCH}}}
queries:
  - name: orders
    topic: {self.topic}
    target: {self.target}
    keys: id
    checkpoint: {self.checkpoint}
    value_format: {{type: debezium, columns: {{id: bigint, name: text}}}}
"""
        )

    def copy_with_another_checkpoint(self) -> Path:
        copy = self.folder / "copy.yaml"
        copy.write_text(self.file.read_text().replace(str(self.checkpoint), f"{self.checkpoint}2"))
        return copy

    def close(self) -> None:
        self.job.close()
        self._producer.close()
        self._admin.close()

    def write(self, events: int) -> None:
        """Inserts, updates, deletes with their null-value records, and a record that nobody can read now and then."""
        for _ in range(events):
            key = self.rng.randrange(500)
            self.lsn += 8
            record_key, partition = json.dumps({"id": key}).encode(), key % 2
            if self.rng.random() < 0.02:
                sent = self._producer.send(self.topic, key=record_key, value=b"{", partition=partition).get(30)
                self.bad.append((sent.partition, sent.offset))
                self.produced += 1
                continue
            source = {"lsn": self.lsn, "ts_ms": int(time.time() * 1000), "snapshot": "false"}
            if key in self.rows and self.rng.random() < 0.3:
                del self.rows[key]
                value = {"op": "d", "before": {"id": key}, "after": None, "source": source}
                self._producer.send(self.topic, key=record_key, value=json.dumps(value).encode(), partition=partition)
                self._producer.send(self.topic, key=record_key, value=None, partition=partition)
                self.produced += 2
                continue
            self.rows[key] = f"v{self.lsn}"
            value = {"op": "u", "before": None, "after": {"id": key, "name": self.rows[key]}, "source": source}
            self._producer.send(self.topic, key=record_key, value=json.dumps(value).encode(), partition=partition)
            self.produced += 1
        self._producer.flush()

    def read(self) -> int:
        """Records that the table accounts for, or that a planned batch is about to."""
        return sum(step.offsets for step in trail(load(self.file).queries[0]))

    def merged_batch(self) -> int:
        """The last one that the table's log knows of."""
        return max(step.batch_id for step in trail(load(self.file).queries[0]) if step.batch_id is not None)


@pytest.fixture
def shop(broker: services.Broker, tmp_path: Path, seed: int) -> Iterator[Shop]:
    shop = Shop(broker, tmp_path, seed)
    yield shop
    shop.close()


def replay(feed: list[tuple[Any, ...]]) -> dict[int, str]:
    """The rows that a change feed ends with; each image of before must equal what was there."""
    rows: dict[int, str] = {}
    for _, kind, key, name in sorted(feed, key=lambda row: (row[0], row[1] in ("insert", "update_postimage"))):
        if kind == "delete":
            assert rows.pop(key) == name
        elif kind == "update_preimage":
            assert rows[key] == name
        else:
            rows[key] = name
    return rows


def test_killed_again_and_again_it_still_ends_with_every_event_once(shop: Shop, spark: SparkSession) -> None:
    """Kills fall right behind a commit of the target, most of them before the checkpoint knows of it."""
    unrecorded = 0
    for _ in range(KILLS):
        shop.write(3 * EVENTS_PER_BATCH)
        unrecorded += shop.job.kill_behind_a_commit()

    process = shop.job.start("--once", downloads_jars=True)  # as people start it who were never told of jars
    said, _ = process.communicate(timeout=START_SECONDS)

    assert process.returncode == 0, said
    assert re.search(
        rf"^  done +[\d,]+ events in \d+ micro-batch(es)? merged into {shop.target}$", said, re.MULTILINE
    ), said
    assert unrecorded >= 1
    table = str(shop.target)
    assert target_rows(spark, table, "id", "name") == sorted(shop.rows.items(), key=repr)
    assert replay(change_rows(spark, table, "id", "name")) == shop.rows
    quarantine = str(shop.folder / "__stream_merge_quarantine_orders")
    assert target_rows(spark, quarantine, "partition", "offset") == sorted(shop.bad, key=repr)
    assert shop.read() == shop.produced


def test_sigterm_and_a_stop_request_end_it_after_the_running_batch(shop: Shop) -> None:
    """Exit code 0 either way, and nothing is planned that was not merged."""
    shop.write(50)
    asks: list[Callable[[subprocess.Popen[str]], object]] = [
        lambda process: os.kill(process.pid, signal.SIGTERM),
        lambda _: CliRunner().invoke(cli.app, ["stop", str(shop.file)]),
    ]
    for ask in asks:
        process = shop.job.start()
        before = shop.job.newest_version()
        shop.write(50)
        services.wait_until(
            lambda before=before: shop.job.newest_version() > before, "a version was committed", seconds=START_SECONDS
        )
        replayed = CliRunner().invoke(cli.app, ["quarantine", "replay", str(shop.file)])
        assert replayed.exit_code == 0, replayed.output
        assert "orders: asking the running job" in replayed.output
        answers = ("still cannot be merged", "no such record is in quarantine")
        assert any(answer in replayed.output for answer in answers), replayed.output
        beside = CliRunner().invoke(cli.app, ["quarantine", "replay", str(shop.copy_with_another_checkpoint())])
        assert beside.exit_code == 4
        assert f"process {process.pid} (query 'orders') is writing to {str(shop.target)!r}" in beside.output
        ask(process)
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0, said
        assert re.search(r"^  Spark +starting$", said, flags=re.MULTILINE), said
        assert re.search(r"^orders: \d+ events behind, no batch yet$", said, flags=re.MULTILINE), said
        # Spark may have planned one more batch by then, which nobody has read.
        assert shop.job.recorded_batch() == shop.merged_batch()
    assert not shop.checkpoint.with_name("checkpoint.stop").exists()


OUTAGE_SECONDS = 60


def probe(port: int, path: str) -> int:
    """The status of an answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as err:
        return err.code


def test_an_outage_of_the_broker_is_waited_for(tmp_path: Path, seed: int) -> None:
    """Nor does a probe end the job: a restart would not bring the broker back."""
    services.need()
    broker = services.Broker(tmp_path / "broker")
    broker.start()
    shop = Shop(broker, tmp_path, seed)
    # Its query starts again after the outage, where the checkpoint says and not where the job file does.
    port = services.free_port()
    written = shop.file.read_text().replace("metrics: {port: 0}", f"metrics: {{port: {port}}}")
    shop.file.write_text(f"{written}    start: earliest\n")
    process = None
    try:
        shop.write(50)
        process = shop.job.start()
        services.wait_until(lambda: shop.job.newest_version() >= 1, "a version was committed", seconds=START_SECONDS)
        services.wait_until(lambda: probe(port, "readyz") == 200, "the job was ready")
        broker.kill()
        for _ in range(OUTAGE_SECONDS):
            assert probe(port, "livez") == 200
            time.sleep(1)
        assert process.poll() is None, process.communicate()[0]
        broker.start()
        before = shop.job.newest_version()
        shop.write(50)
        services.wait_until(
            lambda: shop.job.newest_version() > before, "a version was committed", seconds=START_SECONDS
        )
        # The job may see the first of them before the last are written, and take them in two batches.
        services.wait_until(lambda: shop.read() == shop.produced, "everything was read", seconds=START_SECONDS)
        services.wait_until(lambda: probe(port, "readyz") == 200, "the job was ready again")
        os.kill(process.pid, signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0, said
    finally:
        if process is not None and process.poll() is None:
            end(process, signal.SIGKILL)
        shop.close()
        broker.stop()
    assert shop.read() == shop.produced


def test_check_tells_what_is_missing_without_writing(shop: Shop) -> None:
    shop.write(10)
    good = CliRunner().invoke(cli.app, ["check", str(shop.file), "--jars", str(services.SPARK_JARS)])
    shop.file.write_text(shop.file.read_text().replace("bigint", "boolean").replace("topic: ", "topic: no_"))
    bad = CliRunner().invoke(cli.app, ["check", str(shop.file), "--jars", str(shop.folder)])

    assert good.exit_code == 0, good.output
    assert "id bigint, name string" in good.output
    assert bad.exit_code == 2
    assert "lacks ['spark-sql-kafka-0-10'" in bad.output
    assert f"the broker has no topic ['no_{shop.topic}']" in bad.output
    assert not shop.target.exists()
