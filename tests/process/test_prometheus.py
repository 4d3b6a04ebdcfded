"""A real Prometheus scrapes a running job, and every query of the dashboards has an answer there."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import deltalake
import pyarrow
import pytest
import services
from dashboards import ALERTS_FILE, BOARDS, alerts, asked, dashboard, panels
from kafka import KafkaAdminClient, KafkaProducer
from services import prometheus
from services.prometheus import Prometheus

PLACEHOLDER = "__debezium_unavailable_value"
TOPICS = {"orders": "driver", "customers": "driver", "parcels": "spark"}
"""Topic, query and table -> expected engine."""
ANSWERS = os.environ.get("STREAM_MERGE_ANSWERS")
"""File for Prometheus' answers, from which `make pictures` draws."""
SECONDS = 90 if ANSWERS else 30
"""At the least, with a right clock and then with one that is ahead: slow machines take until all has been seen."""
START_SECONDS = 400
KEYS = 20_000
AT_ZERO = {
    # Nothing of this happens to a healthy job.
    "Failed batches",
    "Conflicts",
    "Waiting between attempts",
    "unexpected {{topic}}",
    "lost {{topic}}",
    # The state's number: running.
    "State",
    # No topic has had lag for five minutes, nor has one in the end.
    "Behind by",
}
"""Titles or legends of the queries that answer with 0 and nothing else."""
MAY_BE_AT_ZERO = {
    "Lag",  # In the end, as a number.
    "materialize source",  # The sink evaluates its batch before the merge; Delta takes up to a millisecond to notice.
    "files compacted",  # Each merge may write the few files of these tables again.
    # Which of the engines in the driver merges depends on how fast this machine is.
    "vectors added",
    "vectors replaced",
    "Rows marked as deleted",
    "Files awaiting compaction",
    "Copied per changed row",
    "copied",
}


class Source:
    """A connector that writes transactions of all kinds of records to two topics, and counts them."""

    def __init__(self, broker: services.Broker, seed: int) -> None:
        self._admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
        self._admin.create_topics({t: {"num_partitions": 2, "replication_factor": 1} for t in TOPICS})
        self._producer = KafkaProducer(bootstrap_servers=broker.bootstrap, transactional_id="shop")
        self._producer.init_transactions()
        self._rng = random.Random(seed)
        self._alive: dict[int, int] = {}
        self._dead: dict[int, int] = {}
        self._lsn = 1_000
        self._fresh = KEYS
        self._turn = 0
        self.is_ahead = False
        """Whether its clock is an hour ahead of the job's."""
        self.sent: Counter[str] = Counter()

    def close(self) -> None:
        self._producer.close()
        self._admin.delete_topics(list(TOPICS))
        self._admin.close()

    def writes_until(self, seen: Callable[[], bool], what: str) -> None:
        """Transaction by transaction, for `SECONDS` and until that has been seen."""
        start = time.monotonic()

        def is_seen() -> bool:
            self.transaction()
            time.sleep(0.3)
            return time.monotonic() > start + SECONDS and seen()

        services.wait_until(is_seen, what, seconds=START_SECONDS)

    def load(self) -> None:
        """Every key once, so that most rows stay as they are."""
        self._producer.begin_transaction()
        for key in range(KEYS):
            self._upsert(key)
        self._producer.commit_transaction()

    def transaction(self) -> None:
        """Upserts, deletes with null-value records, late and repeated events, and what cannot be merged."""
        self._turn += 1
        self._producer.begin_transaction()
        for _ in range(20):
            self._upsert(self._rng.randrange(KEYS))
        twice = self._rng.randrange(KEYS)
        self._upsert(twice)
        self._upsert(twice)
        for key in self._rng.sample(sorted(self._alive), min(2, len(self._alive))):
            self._delete(key)
        if self._dead:
            self._late(self._rng.choice(sorted(self._dead)), self._dead)
        self._late(self._rng.choice(sorted(self._alive)), self._alive)
        self._upsert_without_value()
        self._write("undecodable", 1, b"{")
        self._write("filtered", None, {"status": "END", "id": "571:1", "event_count": 4})
        if self._turn % 10 == 0:
            self._write("truncate", None, {"op": "t", "before": None, "after": None, "source": self._source(self._lsn)})
        self._producer.commit_transaction()

    def _upsert(self, key: int) -> None:
        self._lsn += 8
        self._alive[key] = self._lsn
        self._dead.pop(key, None)
        self._write("upsert", key, self._envelope("u", key, f"note {self._lsn}", self._lsn))

    def _delete(self, key: int) -> None:
        self._lsn += 8
        del self._alive[key]
        self._dead[key] = self._lsn
        self._write("delete", key, {"op": "d", "before": {"id": key}, "after": None, "source": self._source(self._lsn)})
        self._write("delete", key, None)

    def _late(self, key: int, of: dict[int, int]) -> None:
        self._write("upsert", key, self._envelope("u", key, "late", of[key] - 4))

    def _upsert_without_value(self) -> None:
        """Nobody has ever seen the key's note."""
        self._fresh += 1
        self._lsn += 8
        self._write("upsert", self._fresh, self._envelope("u", self._fresh, PLACEHOLDER, self._lsn))

    def _envelope(self, op: str, key: int, note: str, lsn: int) -> dict[str, object]:
        return {"op": op, "before": None, "after": {"id": key, "note": note}, "source": self._source(lsn)}

    def _source(self, lsn: int) -> dict[str, object]:
        ahead = 3600 if self.is_ahead else 0
        return {"lsn": lsn, "ts_ms": int((time.time() + ahead) * 1000), "snapshot": "false"}

    def _write(self, kind: str, key: int | None, value: dict[str, object] | bytes | None) -> None:
        record_key = None if key is None else json.dumps({"id": key}).encode()
        for topic in TOPICS:
            sent = value
            if isinstance(value, dict) and isinstance(after := value.get("after"), dict):
                if topic == "parcels":
                    sent = {**value, "after": {**after, "tags": {"colour": "red"}}}
                elif topic == "orders" and after["note"] != PLACEHOLDER:
                    # As long that marking rows as deleted beats writing their file again.
                    sent = {**value, "after": {**after, "note": f"{self._rng.getrandbits(3_000):x}"}}
            raw = json.dumps(sent).encode() if isinstance(sent, dict) else sent
            self._producer.send(topic, key=record_key, value=raw, partition=(key or 0) % 2)
            self.sent[kind] += 1


@contextmanager
def job(broker: services.Broker, folder: Path, metrics_port: int) -> Iterator[None]:
    """`stream-merge run`: tables for each engine; `customers` gets a new column."""
    file, said = folder / "job.yaml", folder / "job.log"
    deltalake.write_deltalake(str(folder / "customers"), pyarrow.table({"id": pyarrow.array([0], pyarrow.int64())}))
    queries = "".join(
        f"""
  - name: {name}
    topic: {name}
    target: {folder / name}
    engine: {"spark" if engine == "spark" else "auto"}
    checkpoint: {folder / "checkpoints" / name}
    value_format:
      type: debezium
      columns: {{id: bigint, note: text{", tags: hstore" if engine == "spark" else ""}}}
      {"hstore_handling_mode: map" if engine == "spark" else ""}
"""
        for name, engine in TOPICS.items()
    )
    file.write_text(
        f"""
kafka: {{bootstrap: "{broker.bootstrap}"}}
metrics: {{port: {metrics_port}}}
defaults: {{trigger: 500 ms, on_truncate: ignore, transactional: true, keys: id, maintenance: {{every: 3}}}}
queries: {queries}
"""
    )
    command = [sys.executable, "-m", "stream_merge.cli", "run", str(file), "--jars", str(services.SPARK_JARS)]
    with said.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--conf", "spark.driver.memory=1g"],
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=services.ROOT,
        )
    try:
        yield
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == 0, said.read_text(errors="replace")[-2000:]
    except BaseException as err:
        err.add_note(said.read_text(errors="replace")[-2000:])
        raise
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def source(broker: services.Broker, seed: int) -> Iterator[Source]:
    prometheus.need()
    source = Source(broker, seed)
    yield source
    source.close()


@pytest.mark.timeout(1_500)
def test_every_query_of_the_dashboards_has_data_while_a_job_runs(
    broker: services.Broker, source: Source, tmp_path: Path
) -> None:
    """Series exist at 0 from the start on, so that a query without an answer is a mistake."""
    metrics_port = services.free_port()
    scraper = Prometheus(
        tmp_path / "prometheus", job="stream-merge", target=f"127.0.0.1:{metrics_port}", rules=ALERTS_FILE
    )

    def value(query: str) -> float:
        return sum(number for _, number in scraper.instant(query))

    began = time.time()
    with services.running(scraper), job(broker, tmp_path, metrics_port):
        source.load()
        services.wait_until(
            lambda: value("count(stream_merge_last_commit_timestamp_seconds > 0)") == len(TOPICS),
            "each table has a commit",
            seconds=START_SECONDS,
        )
        start = time.time()
        of_each = "count(sum by (query) (stream_merge_maintenance_total) > 0)"
        source.writes_until(lambda: value(of_each) == len(TOPICS), "maintenance of each table")
        for _ in range(60):
            source.transaction()
        source.is_ahead = True
        least = "min(sum by (query) (stream_merge_batches_total))"
        known = value(least)
        # The first one may have been read before.
        source.writes_until(lambda: value(least) >= known + 2, "batches from a clock that is ahead")
        services.wait_until(
            lambda: value("sum(stream_merge_topic_records_total)") == sum(source.sent.values()),
            "every record is merged",
            seconds=START_SECONDS,
        )
        services.wait_until(lambda: value("sum(stream_merge_topic_lag_events)") == 0, "there is no lag")
        end = time.time()

        assert value(f"avg_over_time(up[{int(end - start)}s])") > 0.9
        answers = {
            board: [
                (
                    panel["title"],
                    query,
                    target,
                    answer(scraper, target["expr"], query, began, end, at_once=target["instant"]),
                )
                for panel in panels(board)
                for target in panel["targets"]
                for query in (TOPICS if board != "overview" else [None])
            ]
            for board in BOARDS
        }
        marks = {
            mark["name"]: answer(scraper, mark["expr"], None, began, end)
            for mark in dashboard("overview")["annotations"]["list"]
        }
        if ANSWERS:
            Path(ANSWERS).write_text(json.dumps({"marks": marks, "panels": answers, "start": began, "end": end}))
        assert [name for name, found in marks.items() if not found] == []
        silent = {(b, title, query) for b in BOARDS for title, query, _, found in answers[b] if not found}
        assert silent == set()
        highest: dict[tuple[str, str, str], float] = {}
        for board in BOARDS:
            for title, _, target, found in answers[board]:
                key = (board, title, target["legendFormat"])
                highest[key] = max([highest.get(key, 0.0), *(abs(value) for _, points in found for _, value in points)])
        at_zero = {key for key, value in highest.items() if value == 0 and not MAY_BE_AT_ZERO & set(key)}
        assert at_zero == {key for key in highest if AT_ZERO & set(key)}
        # Of the alerts one fires: this job has records that nobody can read.
        assert [alert.name for alert in alerts.ALERTS if scraper.instant(alert.expression)] == ["EventsQuarantined"]
        assert counted(scraper) == source.sent
        offered = {
            variable["name"]: scraper.label_values(*found.groups())
            for variable in dashboard("query")["templating"]["list"]
            if (found := re.fullmatch(r"label_values\((\w+).*, (\w+)\)", variable.get("definition", "")))
        }
        assert offered == {"job": {"stream-merge"}, "query": set(TOPICS), "target": set(TOPICS)}
        by_engine = scraper.instant("topk by (query) (1, stream_merge_merges_total)")
        engines = {labels["query"]: labels["engine"] for labels, _ in by_engine}
        assert engines == TOPICS


def answer(
    scraper: Prometheus, expression: str, query: str | None, start: float, end: float, *, at_once: bool = False
) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
    """Series that Grafana gets for a panel that shows these seconds; `query` is what is chosen, None is "All"."""
    chosen = {} if query is None else {"job": "stream-merge", "query": query, "target": query}
    replaced = asked(expression, scrape_seconds=scraper.scrape_seconds, range_seconds=int(end - start), chosen=chosen)
    return scraper.over_time(replaced, start=end if at_once else start, end=end)


def counted(scraper: Prometheus) -> Counter[str]:
    """Records by kind, as the job has told; a null-value record is redundant where its delete is in the same batch."""
    found: Counter[str] = Counter()
    for labels, number in scraper.instant("sum by (kind) (stream_merge_topic_records_total)"):
        found[labels["kind"].replace("redundant", "delete")] += int(number)
    return found
