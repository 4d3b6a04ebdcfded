"""A game day: faults in a real job on a real Kafka, and how long it takes until an alert that names each one fires.

    python tests/game_day.py FOLDER [FAULT ...]    all faults, or those of these names

Prometheus evaluates the rules as they are shipped every five seconds; times are taken at Alertmanager.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import services
import yaml
from dashboards import ALERTS_FILE, alerts
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError
from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import (
    ACL,
    ACLFilter,
    ACLOperation,
    ACLPermissionType,
    ResourcePattern,
    ResourceType,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from kafka.errors import KafkaError
from services import tls
from services.prometheus import Alertmanager, Prometheus

SCRAPE_SECONDS = 5
START_SECONDS = 400
GRACE_SECONDS = 60
"""What an alert may take beyond its own `for`."""
FIRST_LSN = 10 * 2**30
USER, PASSWORD = "job", "game-day"
SLOW_CHECK = "regexp_replace(repeat(note, 500000), 'n', 'mm') <> 'x'"
"""Tenths of a second for each row in Spark; delta-rs, which adds it, replaces one letter only."""
UNITS = {"s": 1, "m": 60, "h": 3600}


class World:
    """A job with a query for each fault, each of a topic of its own that five events a second come to."""

    def __init__(self, folder: Path, queries: list[str]) -> None:
        self.folder = folder
        self.queries = queries
        self.rates = dict.fromkeys(queries, 5)
        self.log = folder / "job.log"
        self.job_file = folder / "job.yaml"
        self.process: subprocess.Popen[bytes] | None = None
        settings = {
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.sasl_plaintext.scram-sha-512.sasl.jaas.config": tls.SCRAM,
        }
        self.broker = services.Broker(folder / "kafka", settings=settings, listeners=("SASL_PLAINTEXT",))
        self.port = services.free_port()
        self.alertmanager = Alertmanager(folder / "alertmanager")
        self.prometheus = Prometheus(
            folder / "prometheus",
            job="stream-merge",
            target=f"127.0.0.1:{self.port}",
            scrape_seconds=SCRAPE_SECONDS,
            rules=ALERTS_FILE,
            alertmanager=self.alertmanager.address,
        )
        self.over = threading.Event()
        self._disk = folder / "disk"
        self._lsn = itertools.count(FIRST_LSN, 8)
        self._ids = itertools.count(1)

    def target(self, query: str) -> Path:
        return (self._disk if query == "disk" else self.folder) / query

    @contextmanager
    def running(self) -> Iterator[None]:
        """Servers, job and events, until the block ends."""
        self._disk.mkdir()
        if "disk" in self.queries:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", self._disk], check=True)
        try:
            with services.running(self.broker, self.alertmanager, self.prometheus):
                self._prepare()
                threading.Thread(target=self._feed, daemon=True).start()
                self._start_job()
                try:
                    yield
                finally:
                    self.over.set()
                    with suppress(KafkaError):
                        self._producer.close(5)
        finally:
            self.over.set()
            if self.process is not None and self.process.poll() is None:
                self.kill()
            if "disk" in self.queries:
                subprocess.run(["umount", "-l", self._disk], check=True)

    def firing(self) -> set[tuple[str, str]]:
        """Alert and query; no query where it is the process that is concerned."""
        return {(labels["alertname"], labels.get("query", "")) for labels, _ in self.alertmanager.alerts()}

    def has_merged(self) -> bool:
        found = self.prometheus.instant("stream_merge_last_commit_timestamp_seconds > 0")
        return len(found) == len(self.queries)

    def send(self, query: str, number: int, *, lsn: int | None = None) -> None:
        for _ in range(number):
            key, at = next(self._ids), next(self._lsn) if lsn is None else lsn
            source = {"lsn": at, "ts_ms": int(time.time() * 1000), "snapshot": "false"}
            value = {"op": "c", "before": None, "after": {"id": key, "note": f"note {key}"}, "source": source}
            self._send(query, json.dumps({"id": key}).encode(), json.dumps(value).encode())

    # -- faults ----------------------------------------------------------------------------------

    def lose_acl(self, query: str) -> None:
        pattern = ResourcePattern(ResourceType.TOPIC, query)
        self._admin.delete_acls([ACLFilter(None, None, ACLOperation.ANY, ACLPermissionType.ANY, pattern)])

    def alter_table(self, query: str) -> None:
        rows = pa.table({"id": pa.array([0], pa.int64()), "note": pa.array([0], pa.int32())})
        write_deltalake(str(self.target(query)), rows, mode="overwrite", schema_mode="overwrite")

    def fill_disk(self, _: str) -> None:
        with suppress(OSError), (self._disk / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(b"0" * 4096)

    def send_broken(self, query: str) -> None:
        for _ in range(20):
            self._send(query, b'{"id": 1}', b"{")

    def slow_down(self, query: str) -> None:
        DeltaTable(str(self.target(query))).alter.add_constraint({"slow": SLOW_CHECK})
        self.rates[query] = 20
        self.send(query, 1_500)

    def write_beside(self, query: str) -> None:
        """Another writer that changes all rows again and again."""

        def write() -> None:
            while not self.over.wait(0.5):  # several times in the seconds that one merge of Spark takes
                with suppress(DeltaError):
                    DeltaTable(str(self.target(query))).update(updates={"note": "'other'"})

        threading.Thread(target=write, daemon=True).start()

    def restore_source(self, query: str) -> None:
        self.rates[query] = 0
        self.send(query, 5, lsn=FIRST_LSN - 2 * 2**30)

    def make_topic_anew(self, query: str) -> None:
        self.rates[query] = 0
        self._admin.delete_topics([query])
        services.wait_until(lambda: query not in self._admin.list_topics(), "the topic is gone")
        self._create_topic(query)
        self.rates[query] = 5

    def fall_behind(self, query: str) -> None:
        self.rates[query] = 100
        self.send(query, 1_500)

    def stop_broker(self, _: str) -> None:
        self.rates.clear()
        self.broker.kill()

    def kill_job(self, _: str) -> None:
        self.kill()

    # -- what they need --------------------------------------------------------------------------

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _prepare(self) -> None:
        self._admin = KafkaAdminClient(bootstrap_servers=self.broker.bootstrap)
        self._producer = KafkaProducer(bootstrap_servers=self.broker.bootstrap)
        self._admin.alter_user_scram_credentials(
            [UserScramCredentialUpsertion(USER, ScramMechanism.SCRAM_SHA_512, PASSWORD)]
        )
        for query in self.queries:
            self._create_topic(query)
        self._allow(*(ResourcePattern(ResourceType.TOPIC, query) for query in self.queries))
        self._allow(ResourcePattern(ResourceType.GROUP, "*"))

    def _create_topic(self, name: str) -> None:
        self._admin.create_topics({name: {"num_partitions": 1, "replication_factor": 1}}, wait_for_metadata=True)

    def _allow(self, *patterns: ResourcePattern) -> None:
        self._admin.create_acls(
            [
                ACL(f"User:{USER}", "*", operation, ACLPermissionType.ALLOW, pattern)
                for pattern in patterns
                for operation in (ACLOperation.READ, ACLOperation.DESCRIBE_CONFIGS)
            ]
        )

    def _send(self, topic: str, key: bytes, value: bytes) -> None:
        self._producer.send(topic, key=key, value=value)

    def _feed(self) -> None:
        while not self.over.is_set():
            for query, number in list(self.rates.items()):
                self.send(query, number)
            self.over.wait(1)

    def _start_job(self) -> None:
        security = {"protocol": "SASL_PLAINTEXT", "mechanism": "SCRAM-SHA-512", "user": USER, "password": PASSWORD}
        queries = [
            {
                "name": query,
                "topic": query,
                "target": str(self.target(query)),
                "checkpoint": str(self.target(query).with_name(f"{query}_checkpoint")),
                "limits": {"max_events_per_batch": 50 if query == "behind" else 100_000},
                "engine": "spark" if query == "conflicts" else "auto",
            }
            for query in self.queries
        ]
        defaults = {
            "trigger": "2 s",
            "keys": "id",
            "value_format": {"type": "debezium", "columns": {"id": "bigint", "note": "text"}},
            "table_properties": {"delta.enableDeletionVectors": "false"},
        }
        kafka = {"bootstrap": self.broker.bootstraps["SASL_PLAINTEXT"], "security": security}
        job = {"kafka": kafka, "metrics": {"port": self.port}, "defaults": defaults, "queries": queries}
        self.job_file.write_text(yaml.safe_dump(job, sort_keys=False))
        command = [sys.executable, "-m", "stream_merge.cli", "run", str(self.job_file)]
        command += ["--jars", str(services.SPARK_JARS), "--conf", "spark.driver.memory=2g"]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--conf", "spark.master=local[6]"],
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd=services.ROOT,
            )


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that goes wrong, and the alert that has to name it."""

    name: str
    query: str
    """The one that suffers; the whole process where it is empty."""
    alert: str
    provoke: Callable[[World, str], None]
    in_log: str = ""
    """What the runbook lets one find in the job's log."""
    begins_in_log: bool = False
    """Whether it is one only when the log says so: a commit may lose five attempts and win the sixth."""
    is_quick: bool = False
    """Whether it is over in a minute or two, and needs no root."""
    is_last: bool = False
    """Whether all others have to be over."""


FAULTS = (
    Fault(name="slow merges", query="slow", alert="LagGrows", provoke=World.slow_down),
    Fault(name="consumer behind", query="behind", alert="LagGrows", provoke=World.fall_behind),
    Fault(name="topic ACL lost", query="acl", alert="BrokerSilent", provoke=World.lose_acl, in_log="Describe"),
    Fault(
        name="table altered",
        query="altered",
        alert="QueryEnded",
        provoke=World.alter_table,
        in_log="[TYPE_",
        is_quick=True,
    ),
    Fault(name="disk full", query="disk", alert="QueryEnded", provoke=World.fill_disk, in_log="[DISK_FULL]"),
    Fault(name="bad records", query="bad", alert="EventsQuarantined", provoke=World.send_broken, is_quick=True),
    Fault(
        name="conflicts",
        query="conflicts",
        alert="RetriesExhausted",
        provoke=World.write_beside,
        in_log="[COMMIT_CONFLICT]",
        begins_in_log=True,
    ),
    Fault(
        name="source restored",
        query="restored",
        alert="QueryEnded",
        provoke=World.restore_source,
        in_log="[POSITION_REGRESSED]",
        is_quick=True,
    ),
    Fault(
        name="topic made anew",
        query="anew",
        alert="QueryEnded",
        provoke=World.make_topic_anew,
        in_log="[TOPIC_RECREATED]",
    ),
    Fault(
        name="broker gone",
        query="bad",
        alert="BrokerSilent",
        provoke=World.stop_broker,
        in_log="broker_away",
        is_last=True,
    ),
    Fault(name="process killed", query="", alert="ProcessDown", provoke=World.kill_job, is_quick=True, is_last=True),
)
"""In this order: what takes longest comes first, and what ends the game last."""


@dataclass(kw_only=True)
class Outcome:
    """What became of a fault."""

    fault: Fault
    wait_seconds: int
    began: float
    seconds: float | None = None
    """From the fault until Alertmanager had the alert; None: it never did."""
    also: set[str] = field(default_factory=set)
    """Other alerts about the same query."""
    is_in_log: bool = False

    @property
    def is_well(self) -> bool:
        return self.seconds is not None and self.seconds <= self.wait_seconds + GRACE_SECONDS and self.is_in_log


def play(folder: Path, faults: tuple[Fault, ...] = FAULTS, *, say: Callable[[str], None] = print) -> list[Outcome]:
    """Let the faults happen, as many of them at once as can; how each one was told."""
    world = World(folder, list(dict.fromkeys(fault.query for fault in faults if fault.query)))
    found: list[Outcome] = []
    with world.running():
        services.wait_until(world.has_merged, "every query has merged", seconds=START_SECONDS)
        services.wait_until(lambda: not world.firing(), "no alert fires", seconds=START_SECONDS)
        if any(fault.alert == "LagGrows" for fault in faults):  # it compares with five minutes before
            earlier = "stream_merge_topic_lag_events offset 5m"
            services.wait_until(lambda: bool(world.prometheus.instant(earlier)), "there is a past", seconds=400)
        for fault in faults:
            if fault.is_last:
                _watch(world, found, say)
            say(f"{time.strftime('%H:%M:%S')} {fault.name}")
            fault.provoke(world, fault.query)
            wait = next(alert.wait for alert in alerts.ALERTS if alert.name == fault.alert)
            found.append(Outcome(fault=fault, wait_seconds=int(wait[:-1]) * UNITS[wait[-1]], began=time.monotonic()))
        _watch(world, found, say)
    return found


def _watch(world: World, outcomes: list[Outcome], say: Callable[[str], None]) -> None:
    """Until every alert has fired, or its time is over by a minute."""

    def is_over(outcome: Outcome) -> bool:
        waited = time.monotonic() - outcome.began
        return outcome.seconds is not None or waited > outcome.wait_seconds + 2 * GRACE_SECONDS

    start = time.monotonic()
    while not all(is_over(outcome) for outcome in outcomes):
        time.sleep(1)
        firing, log = world.firing(), world.log.read_text(errors="replace")
        for outcome in outcomes:
            fault = outcome.fault
            outcome.also = {name for name, query in firing if query == fault.query and name != fault.alert}
            if fault.begins_in_log and fault.in_log not in log and time.monotonic() - start < START_SECONDS:
                outcome.began = time.monotonic()
            if outcome.seconds is None and (fault.alert, fault.query) in firing:
                outcome.seconds = time.monotonic() - outcome.began
                outcome.is_in_log = fault.in_log in log
                say(f"{time.strftime('%H:%M:%S')} {fault.name}: {fault.alert} after {outcome.seconds:.0f} s")


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as Markdown."""
    rows = ["| fault | alert | for | seconds | also | log | |", "|---|---|---|---|---|---|---|"]
    for outcome in outcomes:
        fault, seconds = outcome.fault, "never" if outcome.seconds is None else f"{outcome.seconds:.0f}"
        also, log = ", ".join(sorted(outcome.also)), f"`{fault.in_log}`" if fault.in_log else ""
        said = "ok" if outcome.is_well else "FAILED"
        rows.append(
            f"| {fault.name} | {fault.alert} | {outcome.wait_seconds} s | {seconds} | {also} | {log} | {said} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    chosen = tuple(fault for fault in FAULTS if fault.name in sys.argv[2:] or not sys.argv[2:])
    outcomes = play(Path(sys.argv[1]).resolve(), chosen)
    print(table(outcomes))
    sys.exit(not all(outcome.is_well for outcome in outcomes))
