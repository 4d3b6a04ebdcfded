"""A job on a real standalone cluster, started by `deployments/spark-submit.sh` as people start it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import services
from delta_log import live_rows
from kafka import KafkaAdminClient, KafkaProducer
from typer.testing import CliRunner

from stream_merge.cli import app as cli
from stream_merge.jobs.kafka import load
from stream_merge.jobs.kafka.history import trail
from stream_merge.spark.versions import SPARK

KEYS = 100
SECONDS = 300


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[services.SparkCluster]:
    services.need()
    cluster = services.SparkCluster(tmp_path_factory.mktemp("cluster"))
    with services.running(cluster):
        yield cluster


class Shop:
    """A topic of two partitions, a job file, and the row of each key as it must be."""

    def __init__(self, broker: services.Broker, cluster: services.SparkCluster, folder: Path) -> None:
        self.folder, self.cluster = folder, cluster
        self.topic, self.target, self.file = folder.name, folder / "orders", folder / "job.yaml"
        self._output = folder / "output.log"
        self.rows: dict[int, str] = {}
        self.lsn = 0
        admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
        admin.create_topics({self.topic: {"num_partitions": 2, "replication_factor": 1}})
        admin.close()
        self._producer = KafkaProducer(bootstrap_servers=broker.bootstrap)
        (folder / "events").mkdir()
        self.file.write_text(
            f"""
kafka: {{bootstrap: "{broker.bootstrap}"}}
metrics: {{port: 0}}
defaults:
  trigger: 100 ms
  limits: {{max_events_per_batch: 100}}
queries:
  - name: orders
    topic: {self.topic}
    target: {self.target}
    keys: id
    checkpoint: {folder / "checkpoint"}
    value_format: {{type: debezium, columns: {{id: bigint, name: text}}}}
"""
        )

    def close(self) -> None:
        self._producer.close()

    def write(self, events: int) -> None:
        """Changes of the keys in turn, each tenth a delete."""
        for _ in range(events):
            self.lsn += 1
            key = self.lsn * 7 % KEYS
            if self.lsn % 10 == 0:
                self.rows.pop(key, None)
                self._send(key, op="d", before={"id": key}, after=None)
            else:
                self.rows[key] = f"v{self.lsn}"
                self._send(key, op="u", before=None, after={"id": key, "name": self.rows[key]})
        self._producer.flush()

    def truncate(self) -> None:
        """Say that somebody emptied the source's table."""
        self.lsn += 1
        self._send(0, op="t", before=None, after=None)
        self._producer.flush()

    def _send(self, key: int, **event: object) -> None:
        value = {**event, "source": {"lsn": self.lsn, "ts_ms": 1_750_000_000_000, "snapshot": "false"}}
        self._producer.send(
            self.topic, key=json.dumps({"id": key}).encode(), value=json.dumps(value).encode(), partition=key % 2
        )

    def start(
        self, *more: str, options: tuple[str, ...] = (), environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        confs = {
            "spark.executor.memory": "600m",
            "spark.ui.enabled": "false",
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.rolling.enabled": "true",  # Spark 3.5 asks for it
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": (self.folder / "events").as_uri(),
        }
        command = [str(services.ROOT / "deployments" / "spark-submit.sh"), "--master", self.cluster.url]
        command += ["--driver-memory", "1g", *(word for conf in confs.items() for word in ("--conf", "=".join(conf)))]
        with self._output.open("wb") as output:  # a pipe that nobody reads would stop Spark, which says much
            return subprocess.Popen(
                [*command, *options, str(self.file), *more],
                start_new_session=True,
                cwd=self.folder,
                env={
                    **os.environ,
                    **self.cluster.environment,
                    "SPARK_CONF_DIR": str(self.folder),  # without defaults of the tests
                    "PYSPARK_PYTHON": sys.executable,
                    "TZ": "Asia/Tokyo",
                    **(environment or {}),
                },
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def run(self, *more: str, options: tuple[str, ...] = ()) -> tuple[int, str]:
        return self.wait_for(self.start(*more, options=options))

    def wait_for(self, process: subprocess.Popen[bytes]) -> tuple[int, str]:
        """Exit code and output of a run that ends by itself."""
        try:
            code = process.wait(SECONDS)
        finally:
            end(process)
        return code, self._output.read_text()

    def stored(self) -> dict[int, str]:
        table = live_rows(self.target)  # delta-rs gives a table with deletion vectors to its own queries alone
        assert table.num_rows == len(set(table["id"].to_pylist()))
        return dict(zip(table["id"].to_pylist(), table["name"].to_pylist(), strict=True))

    def newest_version(self) -> int:
        return max((int(path.stem) for path in (self.target / "_delta_log").glob("*.json")), default=-1)

    def merged_batches(self) -> set[int]:
        """By the table's own log."""
        return {step.batch_id for step in trail(load(self.file).queries[0]) if step.batch_id is not None}

    def recorded_batches(self) -> set[int]:
        return {int(path.name) for path in (self.folder / "checkpoint" / "commits").glob("[0-9]*")}

    def application(self) -> tuple[str, list[dict[str, Any]]]:
        """Its id, and what Spark itself recorded of it."""
        (log,) = (self.folder / "events").glob("eventlog_v2_*/events_*")
        return log.parent.name.removeprefix("eventlog_v2_"), [json.loads(line) for line in log.read_text().splitlines()]


@pytest.fixture
def shop(broker: services.Broker, cluster: services.SparkCluster, tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(broker, cluster, tmp_path)
    yield shop
    shop.close()


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def merged(
    broker: services.Broker, cluster: services.SparkCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shop]:
    """After a run that ends by itself, with confs of its own."""
    shop = Shop(broker, cluster, tmp_path_factory.mktemp("merged"))
    shop.write(400)
    code, said = shop.run("--once", options=("--conf", "spark.sql.shuffle.partitions=3", "--name", "mine"))
    assert code == 0, said[-5000:]
    yield shop
    shop.close()


def test_the_executors_of_both_workers_merge_everything_that_is_there(merged: Shop) -> None:
    """And nothing runs in the driver, which a master that was not heeded would have done."""
    application, recorded = merged.application()
    ended = [event["Task Info"] for event in recorded if event["Event"] == "SparkListenerTaskEnd"]

    assert merged.stored() == merged.rows
    assert {task["Executor ID"] for task in ended} == {"0", "1"}
    for worker in merged.cluster.workers:
        assert len(list((worker / application).iterdir())) == 1


def test_the_preset_joins_what_spark_submit_was_told(merged: Shop) -> None:
    """Also that the JVM, which had been started before, lives in UTC."""
    _, recorded = merged.application()
    (environment,) = (event for event in recorded if event["Event"] == "SparkListenerEnvironmentUpdate")

    assert environment["System Properties"]["user.timezone"] == "UTC"
    log_store = {"spark.delta.logStore.s3a.impl": "streammerge.ConditionalPutLogStore"} if SPARK >= (4, 1) else {}
    assert {
        "spark.app.name": "mine",
        "spark.master": merged.cluster.url,
        "spark.driver.memory": "1g",
        "spark.sql.shuffle.partitions": "3",
        "spark.databricks.delta.snapshotPartitions": "2",
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        **log_store,
    }.items() <= environment["Spark Properties"].items()


def ask_in_job_file(shop: Shop, _: subprocess.Popen[bytes]) -> None:
    assert CliRunner().invoke(cli.app, ["stop", str(shop.file)]).exit_code == 0


def signal_spark_submit(_: Shop, process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGTERM)


@pytest.mark.parametrize("ask", [ask_in_job_file, signal_spark_submit])
def test_asked_to_stop_it_ends_after_the_running_batch(
    shop: Shop, ask: Callable[[Shop, subprocess.Popen[bytes]], None]
) -> None:
    """A signal reaches Spark's JVM, which is spark-submit's process."""
    shop.write(300)
    process = shop.start()
    try:
        services.wait_until(lambda: shop.newest_version() > 1, "versions were committed", seconds=SECONDS)
        ask(shop, process)
        code, said = shop.wait_for(process)
    finally:
        end(process)

    assert code == 0, said[-5000:]
    assert shop.recorded_batches() == shop.merged_batches()
    assert not list(shop.folder.glob("*.stop"))


def test_ctrl_c_does_not_reach_what_spark_has_started(shop: Shop) -> None:
    """A terminal signals the whole process group, so also the `chmod` that sets the mode of a checkpoint's file."""
    tools, is_there = shop.folder / "tools", shop.folder / "chmod"
    tools.mkdir()
    chmod = tools / "chmod"
    chmod.write_text(f"""#!/bin/bash
case "$*" in *checkpoint/commits/.[1-9]*) touch '{is_there}'; sleep 3;; esac
exec '{shutil.which("chmod")}' "$@"
""")
    chmod.chmod(0o755)
    shop.write(300)
    process = shop.start(environment={"PATH": f"{tools}:{os.environ['PATH']}"})
    try:
        services.wait_until(is_there.exists, "a batch is being recorded", seconds=SECONDS)
        os.killpg(process.pid, signal.SIGINT)
        code, said = shop.wait_for(process)
    finally:
        end(process)

    assert code == 0, said[-5000:]
    assert shop.recorded_batches() == shop.merged_batches()
    assert not list(shop.folder.glob("*.stop"))


def test_exit_codes_come_through(shop: Shop) -> None:
    """2: the job file has to change; 3: the data."""
    good = shop.file.read_text()
    shop.file.write_text(good.replace("keys:", "key:"))
    wrong_file = shop.run("--once")
    shop.file.write_text(good)
    shop.truncate()
    wrong_data = shop.run("--once")

    assert wrong_file[0] == 2, wrong_file
    assert "key" in wrong_file[1]
    assert wrong_data[0] == 3, wrong_data
    assert "truncate" in wrong_data[1]
