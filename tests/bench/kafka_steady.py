"""How long after the source's commit an event is in the table, when events come at a steady pace."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka_events import PARTITIONS, VALUE_FORMAT, event
from services import SPARK_JARS, wait_until

from stream_merge.jobs.kafka import load
from stream_merge.jobs.kafka.history import Step, trail

TOPIC = "steady"
PER_SECOND = 500
WARM_UP_SECONDS = 30
_SLICE = 5
_START_SECONDS = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """Seconds from the source's commit to the table's, over all events after the warm-up."""

    events: int
    per_second: float
    """What the producer kept up."""
    commits: int
    p50: float
    p99: float
    greatest: float
    events_per_commit: float


def steady(folder: Path, bootstrap: str, target: Path, *, rows: int, seconds: float) -> Latency:
    """Let `stream-merge run` follow a topic; with the settings that a job file has that says nothing else."""
    file = folder / "steady.yaml"
    query = {
        "name": "orders",
        "topic": TOPIC,
        "value_format": VALUE_FORMAT,
        "target": str(target),
        "keys": "id",
        "checkpoint": str(folder / "steady_checkpoint"),
    }
    job = {"kafka": {"bootstrap": bootstrap}, "metrics": {"port": 0}, "queries": [query]}
    file.write_text(yaml.safe_dump(job))
    producer = KafkaProducer(bootstrap_servers=bootstrap, linger_ms=2)
    pace = _Pace(producer, rows)
    before = _newest(target)
    try:
        with _job(file, folder):
            pace.send(1)
            producer.flush()
            wait_until(lambda: _newest(target) > before, "the job has committed", seconds=_START_SECONDS)
            pace.keep(WARM_UP_SECONDS)
            first, started = pace.sent, time.time()
            pace.keep(seconds)
            producer.flush()
            kept_up = (pace.sent - first) / (time.time() - started)
            wait_until(lambda: _accounted(file) >= pace.sent, "everything is in the table", seconds=_START_SECONDS)
    finally:
        producer.close()
    steps = [step for step in trail(load(file).queries[0]) if step.version is not None and step.ranges]
    measured = sorted(_latencies(bootstrap, target, steps, since_millis=int(started * 1000)))
    cuts = statistics.quantiles(measured, n=100)
    commits = sum(_committed(target, step) >= started for step in steps)
    return Latency(
        events=len(measured),
        per_second=kept_up,
        commits=commits,
        p50=cuts[49],
        p99=cuts[98],
        greatest=measured[-1],
        events_per_commit=len(measured) / commits,
    )


@contextmanager
def _job(file: Path, folder: Path) -> Iterator[None]:
    """`stream-merge run` in a process, ended by SIGTERM."""
    command = [sys.executable, "-m", "stream_merge.cli", "run", str(file), "--jars", str(SPARK_JARS)]
    said = folder / "steady.log"
    with said.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield
    except BaseException as err:
        err.add_note(said.read_text(errors="replace")[-2000:])
        os.killpg(process.pid, signal.SIGKILL)
        raise
    os.kill(process.pid, signal.SIGTERM)
    if process.wait(60):
        msg = f"the job ended with {process.returncode}: {said.read_text(errors='replace')[-2000:]}"
        raise AssertionError(msg)


class _Pace:
    """Sends events, so many a second."""

    def __init__(self, producer: KafkaProducer, rows: int) -> None:
        self._producer = producer
        self._rows = rows
        self._rng = random.Random(5)
        self.sent = 0

    def send(self, events: int) -> None:
        for _ in range(events):
            millis = int(time.time() * 1000)
            key, value, partition = event(self._rng, self.sent, self._rows, millis)
            self._producer.send(TOPIC, key=key, value=value, partition=partition)
            self.sent += 1

    def keep(self, seconds: float) -> None:
        """A few events every hundredth of a second; what was late is made up for."""
        started = time.monotonic()
        for turn in range(int(seconds * PER_SECOND / _SLICE)):
            time.sleep(max(0.0, started + turn * _SLICE / PER_SECOND - time.monotonic()))
            self.send(_SLICE)


def _newest(target: Path) -> int:
    return max(int(path.stem) for path in (target / "_delta_log").glob("*.json"))


def _accounted(file: Path) -> int:
    return sum(step.offsets for step in trail(load(file).queries[0]) if step.version is not None)


def _committed(target: Path, step: Step) -> float:
    """When the log file was there; the time inside of it is taken before it is written."""
    return (target / "_delta_log" / f"{step.version:020}.json").stat().st_mtime


def _latencies(bootstrap: str, target: Path, steps: list[Step], *, since_millis: int) -> Iterator[float]:
    at: dict[tuple[int, int], float] = {}
    for step in steps:
        committed = _committed(target, step)
        for partition, covered in step.ranges.get(TOPIC, {}).items():
            at.update({(partition, offset): committed for offset in range(covered.start, covered.end)})
    for partition, offset, millis in _sent(bootstrap):
        if millis >= since_millis:
            yield at[partition, offset] - millis / 1000


def _sent(bootstrap: str) -> Iterator[tuple[int, int, int]]:
    """Partition, offset and `source.ts_ms` of every record, by a consumer of our own."""
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", enable_auto_commit=False)
    places = [TopicPartition(TOPIC, partition) for partition in range(PARTITIONS)]
    consumer.assign(places)
    try:
        ends = consumer.end_offsets(places)
        while any(consumer.position(place) < end for place, end in ends.items()):
            polled: dict[Any, list[Any]] = consumer.poll(timeout_ms=1_000)
            for records in polled.values():
                for record in records:
                    yield record.partition, record.offset, json.loads(record.value)["source"]["ts_ms"]
    finally:
        consumer.close()
