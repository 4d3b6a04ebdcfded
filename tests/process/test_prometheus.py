"""A real Prometheus scrapes a running job, and every query of the dashboard has an answer there."""

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

import pytest
import services
from dashboards import alerts, dashboard, panels
from kafka import KafkaAdminClient, KafkaProducer
from services import prometheus
from services.prometheus import Prometheus

PLACEHOLDER = "__debezium_unavailable_value"
PLAIN, TAGGED = "watched.orders", "watched.tagged"
SECONDS = 45
"""At the least, with a right clock and then with one that is ahead: slow machines take until all has been seen."""
START_SECONDS = 400
KEYS = 400
QUIET = {
    "stream_merge_events_with_unknown_fields_total",  # of files
    # Nothing of this happens to a healthy job.
    "stream_merge_query_failed",
    'stream_merge_batches_total{..., outcome="failed"}',
    "stream_merge_topic_unexpected_gaps_total",
    "stream_merge_topic_lost_offsets_total",
    "stream_merge_conflicts_total",
    "stream_merge_backoff_seconds_total",
    "stream_merge_unknown_delta_metrics_total",
    # A job orders by offset in the end, so that no two events tie.
    "stream_merge_ties_total",
    # The sink's MERGE has no clause of this kind.
    "stream_merge_target_rows_not_matched_by_source_updated_total",
    "stream_merge_target_rows_not_matched_by_source_deleted_total",
    # The tables of this job are not partitioned and have no deletion vectors.
    "stream_merge_target_partitions_after_skipping_total",
    "stream_merge_target_partitions_added_to_total",
    "stream_merge_target_partitions_removed_from_total",
    "stream_merge_target_deletion_vectors_added_total",
    "stream_merge_target_deletion_vectors_updated_total",
    "stream_merge_target_deletion_vectors_removed_total",
    "stream_merge_target_deleted_rows_ratio",
    "stream_merge_target_files_awaiting_compaction",
}
"""What the queries that stay at 0 ask for first."""
EITHER = {
    # One may be counted while the broker makes its internal topics.
    "stream_merge_topic_mirror_failures_total",
    # The sink evaluates its batch before the merge; Delta's look at whether it has to takes up to a millisecond.
    "stream_merge_merge_materialize_source_seconds_sum",
    # Each merge writes the few files of these tables again, so that there may be none to put together.
    "stream_merge_upkeep_removed_files_total",
    "stream_merge_upkeep_added_files_total",
}
"""What may be at 0 or not; all others rise above it."""


class Source:
    """A connector that writes transactions of all kinds of records to two topics, and counts them."""

    def __init__(self, broker: services.Broker, seed: int) -> None:
        self._admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
        self._admin.create_topics({t: {"num_partitions": 2, "replication_factor": 1} for t in (PLAIN, TAGGED)})
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
        self._admin.delete_topics([PLAIN, TAGGED])
        self._admin.close()

    def writes_until(self, seen: Callable[[], bool], what: str) -> None:
        """Transaction by transaction, for `SECONDS` and until that has been seen."""
        start = time.monotonic()

        def is_seen() -> bool:
            self.transaction()
            time.sleep(0.3)
            return time.monotonic() > start + SECONDS and seen()

        services.wait_until(is_seen, what, seconds=START_SECONDS)

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
        for topic in (PLAIN, TAGGED):
            sent = value
            if topic == TAGGED and isinstance(value, dict) and isinstance(value.get("after"), dict):
                sent = {**value, "after": {**value["after"], "tags": {"colour": "red"}}}
            raw = json.dumps(sent).encode() if isinstance(sent, dict) else sent
            self._producer.send(topic, key=record_key, value=raw, partition=(key or 0) % 2)
            self.sent[kind] += 1


@contextmanager
def job(broker: services.Broker, folder: Path, metrics_port: int) -> Iterator[None]:
    """`stream-merge run`: one table that delta-rs can merge, and one that only Spark can, because it has a map.

    Without deletion vectors, so that merge-on-read has neither.
    """
    file, said = folder / "job.yaml", folder / "job.log"
    file.write_text(
        f"""
kafka: {{bootstrap: "{broker.bootstrap}"}}
metrics: {{port: {metrics_port}}}
defaults: {{trigger: 500 ms, on_truncate: ignore, transactional: true, keys: id, maintenance: {{every: 3}}}}
queries:
  - name: orders
    topic: {PLAIN}
    table_properties: {{delta.enableDeletionVectors: "false"}}
    target: {folder / "orders"}
    checkpoint: {folder / "orders_checkpoint"}
    value_format: {{type: debezium, columns: {{id: bigint, note: text}}}}
  - name: tagged
    topic: {TAGGED}
    table_properties: {{delta.enableDeletionVectors: "false"}}
    target: {folder / "tagged"}
    checkpoint: {folder / "tagged_checkpoint"}
    value_format:
      type: debezium
      columns: {{id: bigint, note: text, tags: hstore}}
      hstore_handling_mode: map
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


def asked_by_grafana(expression: str, scrape_seconds: int) -> str:
    """With "All" chosen for every variable, and at most a point per scrape: then 4 scrapes are the rate's interval."""
    replaced = expression.replace("$__rate_interval", f"{4 * scrape_seconds}s")
    return re.sub(r'=~"\$(job|query|target)"', '=~".+"', replaced)


def first_asked_for(expression: str) -> str:
    found = re.search(r"(stream_merge_\w+)\{([^}]*)\}", expression)
    assert found is not None, expression
    more = re.findall(r'outcome="\w+"', found[2])
    return f"{found[1]}{{..., {more[0]}}}" if more else found[1]


@pytest.fixture
def source(broker: services.Broker, seed: int) -> Iterator[Source]:
    prometheus.need()
    source = Source(broker, seed)
    yield source
    source.close()


@pytest.mark.timeout(1_500)
def test_every_query_of_the_dashboard_has_data_while_a_job_runs(
    broker: services.Broker, source: Source, tmp_path: Path
) -> None:
    """Series exist at 0 from the start on, so that a query without an answer is a mistake."""
    metrics_port = services.free_port()
    scraper = Prometheus(tmp_path / "prometheus", job="stream-merge", target=f"127.0.0.1:{metrics_port}")

    def value(query: str) -> float:
        return sum(number for _, number in scraper.instant(query))

    with services.running(scraper), job(broker, tmp_path, metrics_port):
        source.transaction()
        services.wait_until(
            lambda: value("count(stream_merge_last_commit_timestamp_seconds > 0)") == 2,
            "both tables have a commit",
            seconds=START_SECONDS,
        )
        start = time.time()
        of_both = "count(sum by (query) (stream_merge_upkeep_total) > 0)"
        source.writes_until(lambda: value(of_both) == 2, "upkeep of both tables")
        source.is_ahead = True
        of_each = "min(sum by (query) (stream_merge_batches_total))"
        known = value(of_each)
        # The first one may have been read before.
        source.writes_until(lambda: value(of_each) >= known + 2, "batches from a clock that is ahead")
        services.wait_until(
            lambda: value("sum(stream_merge_topic_records_total)") == sum(source.sent.values()),
            "every record is merged",
            seconds=START_SECONDS,
        )
        services.wait_until(lambda: value("sum(stream_merge_topic_lag_events)") == 0, "there is no lag")
        end = time.time()

        assert value(f"avg_over_time(up[{int(end - start)}s])") > 0.9
        silent, wrong = [], []
        for panel in panels():
            for target in panel["targets"]:
                query = asked_by_grafana(target["expr"], scraper.scrape_seconds)
                values = [
                    number for of_series in scraper.over_time(query, start=start, end=end) for number in of_series
                ]
                first = first_asked_for(target["expr"])
                if not values:
                    silent.append((panel["title"], query))
                elif first not in EITHER and (max(values) == min(values) == 0) != (first in QUIET):
                    wrong.append((panel["title"], query, min(values), max(values)))
        assert silent == []
        assert wrong == []
        # Of the alerts one fires: this job has records that nobody can read.
        assert [alert.name for alert in alerts.ALERTS if scraper.instant(alert.expression)] == ["EventsQuarantined"]
        assert counted(scraper) == source.sent
        assert offered(scraper) == {
            "job": {"stream-merge"},
            "query": {"orders", "tagged"},
            "target": {"orders", "tagged"},
        }
        by_engine = {
            labels["query"]: labels["engine"] for labels, _ in scraper.instant("stream_merge_merges_total > 0")
        }
        assert by_engine == {"orders": "native", "tagged": "spark"}


def counted(scraper: Prometheus) -> Counter[str]:
    """Records by kind, as the job has told; a null-value record is redundant where its delete is in the same batch."""
    found: Counter[str] = Counter()
    for labels, number in scraper.instant("sum by (kind) (stream_merge_topic_records_total)"):
        found[labels["kind"].replace("redundant", "delete")] += int(number)
    return found


def offered(scraper: Prometheus) -> dict[str, set[str]]:
    """The values of the dashboard's variables."""
    found = {}
    for variable in dashboard()["templating"]["list"]:
        asked = (
            re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"]) if "definition" in variable else None
        )
        if asked is not None:
            found[variable["name"]] = scraper.label_values(asked_by_grafana(asked[1], scraper.scrape_seconds), asked[2])
    return found
