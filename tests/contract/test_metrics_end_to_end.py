"""What Prometheus sees of real merges: equal to the table's history, to the ledger and to the clock."""

from __future__ import annotations

import json
import math
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from deliveries import COPY_ON_WRITE
from delta.tables import DeltaTable
from grouped import sink_with
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from since import since

from stream_merge import MergeMetrics, MergeResult, MergeSink
from stream_merge.metrics.catalogue import CATALOGUE, DELTA_MERGE_METRICS
from stream_merge.metrics.server import serve
from stream_merge.model.results import CONFLICTS, FATES, OUTCOMES, PHASES, REASONS
from stream_merge.tables.explain import explain
from stream_merge.testing import batch, run, target_rows

EVENT = "id bigint, lsn bigint, name string, op string"
OF_HISTORY = {"numSourceRows": "operationNumSourceRows"}
"""Where a commit's history has another name than the SQL metric; `numOutputRows` is only there."""


def sink_of(target: str, **settings: Any) -> MergeSink:
    return sink_with(
        target=target,
        keys=["id"],
        sequence_by="lsn",
        apply_as_deletes="op = 'd'",
        except_column_list=["op"],
        **settings,
    )


class Scrape:
    """Samples of one scrape over HTTP."""

    def __init__(self, registry: CollectorRegistry) -> None:
        with serve(port=0, registry=registry) as server, urllib.request.urlopen(server.url, timeout=10) as answer:
            text = answer.read().decode()
        self.samples = {
            (sample.name.removeprefix("stream_merge_"), frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def value(self, name: str, *, query: str = "direct", target: str = "orders", **labels: str) -> float:
        """One sample."""
        return self.samples[name, frozenset({"query": query, "target": target, **labels}.items())]


@dataclass
class Story:
    """A handful of batches of one sink, and what was seen of them."""

    results: list[MergeResult] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)
    scrape: Scrape = field(init=False)
    history: list[Any] = field(default_factory=list)

    def total(self, what: Callable[[MergeResult], float]) -> float:
        """Sum over the batches that returned."""
        return sum(what(result) for result in self.results)


@pytest.fixture(scope="module")
def story(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Every outcome once, with quarantine, ties, stale and refused events."""
    target = str(tmp_path_factory.mktemp("story") / "orders")
    registry = CollectorRegistry()
    sink = sink_of(target, app_id="story", engine="spark", metrics=MergeMetrics(registry=registry))
    story = Story()

    def deliver(
        batch_id: int, *rows: tuple[Any, ...], change: Callable[[DataFrame], DataFrame] = lambda df: df
    ) -> None:
        events = change(batch(spark, EVENT, *rows))
        started = time.perf_counter()
        try:
            sink(events, batch_id)
        finally:
            story.walls.append(time.perf_counter() - started)
        story.results.append(sink.last_result)

    deliver(
        0,
        (1, 1, "ann", "u"),
        (1, 1, "another ann", "u"),
        (1, 1, "ann", "u"),
        (2, 1, "bob", "u"),
        (3, 1, "cid", "u"),
        (3, 0, "older", "u"),
        (None, 1, "no key", "u"),
        (None, None, "neither", "u"),
    )
    deliver(1, (1, 2, "ann 2", "u"), (2, 2, "", "d"), (4, 1, "dan", "u"))
    deliver(1, (1, 2, "ann 2", "u"), (2, 2, "", "d"), (4, 1, "dan", "u"))
    deliver(2, (2, 1, "ghost", "u"), (1, 1, "late", "u"), (5, 1, "eve", "u"))
    deliver(3, (77, 1, "", "d"))
    deliver(4)
    broken = F.raise_error(F.lit("broken source")).cast("string")
    with pytest.raises((PySparkException, Py4JJavaError), match="broken source"):
        deliver(5, (6, 1, "fay", "u"), change=lambda df: df.withColumn("name", broken))
    story.scrape = Scrape(registry)
    story.history = spark.sql(f"DESCRIBE HISTORY delta.`{target}`").collect()
    return story


def test_the_story_has_every_outcome(story):
    assert [result.outcome for result in story.results] == [
        "committed",
        "committed",
        "skipped_duplicate",
        "committed",
        "no_change",
        "empty",
    ]


@since((4, 0), "all metrics")
def test_a_real_merge_reports_exactly_the_metrics_of_the_table(story):
    """A Delta release that adds, drops or renames a metric must fail here."""
    assert len(DELTA_MERGE_METRICS) == 31
    assert [set(story.results[i].metrics) for i in (0, 1, 3)] == [set(DELTA_MERGE_METRICS)] * 3
    assert story.results[4].metrics == {}  # nothing to change, so that no MERGE ran


def test_the_driver_reports_what_it_counts_under_deltas_names(spark: SparkSession, tmp_path: Path):
    """What it does not count is absent, not 0."""
    registry = CollectorRegistry()
    sink = sink_of(
        str(tmp_path / "orders"),
        app_id="driver",
        engine="driver",
        metrics=MergeMetrics(registry=registry),
        table_properties=COPY_ON_WRITE,
    )
    run(sink, batch(spark, EVENT, (1, 1, "ann", "u"), (2, 1, "bob", "u")), 0)
    result = run(sink, batch(spark, EVENT, (1, 2, "eve", "u"), (2, 2, None, "d"), (3, 1, "cid", "u")), 1)

    commit = DeltaTable.forPath(spark, str(tmp_path / "orders")).history(1).collect()[0]
    exported = Scrape(registry)
    assert (result.mode, result.version) == ("rewrite", commit["version"])
    assert set(result.metrics) < set(DELTA_MERGE_METRICS)
    of_history = commit["operationMetrics"]
    counted = {name: value for name, value in result.metrics.items() if name in of_history and "Vectors" not in name}
    assert counted == {name: int(of_history[name]) for name in counted}
    assert {"numTargetRowsUpdated", "numTargetRowsCopied", "executionTimeMs"} <= counted.keys()
    log = (tmp_path / "orders" / "_delta_log" / f"{result.version:020d}.json").read_text()
    actions = [json.loads(line) for line in log.splitlines()]
    files = {kind: [one[kind]["size"] for one in actions if kind in one] for kind in ("add", "cdc", "remove")}
    names = {"add": ("FilesAdded", "BytesAdded"), "remove": ("FilesRemoved", "BytesRemoved")}
    for kind, (count, size) in {**names, "cdc": ("ChangeFilesAdded", "ChangeFileBytes")}.items():
        counted = result.metrics[f"numTarget{count}"], result.metrics[f"numTarget{size}"]
        assert counted == (len(files[kind]), sum(files[kind]))
        assert files[kind]
    commits = (tmp_path / "orders" / "_delta_log").glob("*.json")
    changes = sum('"cdc"' in line for text in commits for line in text.read_text().splitlines())
    assert exported.value("target_change_files_added_total") == changes
    told = explain(str(tmp_path / "orders"), last=1).merges[0].metrics
    assert told["numTargetFilesAdded"] == len(files["add"])
    assert exported.value("target_rows_updated_total") == exported.value("target_rows_deleted_total") == 1
    assert exported.value("merges_total", engine="driver") == 2
    assert exported.value("merges_total", engine="spark") == 0


def test_metrics_equal_the_history_of_the_table(story):
    """Everything that Delta writes into a commit, summed over the commits."""
    sums: Counter[str] = Counter()
    for commit in story.history:
        if commit["operation"] == "MERGE":
            sums.update({name: int(value) for name, value in commit["operationMetrics"].items()})
    del sums["numOutputRows"]
    assert len(sums) == 21
    expected = {}
    exported = {}
    for name, value in sums.items():
        row = DELTA_MERGE_METRICS[OF_HISTORY.get(name, name)]
        series = row.name.removeprefix("stream_merge_") + ("_sum" if row.type == "histogram" else "")
        expected[name] = value * row.factor
        exported[name] = story.scrape.value(series)

    assert exported == pytest.approx(expected, abs=1e-9)
    assert exported["numTargetRowsInserted"] == 5
    assert exported["numTargetRowsUpdated"] == 1
    assert exported["numTargetRowsDeleted"] == 1


def test_metrics_equal_the_numbers_of_every_merge(story):
    """The ten that only the executed plan knows included."""
    for name, row in DELTA_MERGE_METRICS.items():
        total = story.total(lambda result, name=name: result.metrics.get(name, 0)) * row.factor
        series = row.name.removeprefix("stream_merge_") + ("_sum" if row.type == "histogram" else "")
        assert story.scrape.value(series) == pytest.approx(total, abs=1e-9), name
    assert story.scrape.value("unknown_delta_metrics_total") == 0


def test_metrics_equal_the_ledger(story):
    fates = {fate: story.scrape.value("events_total", fate=fate) for fate in FATES}

    assert fates == {
        "quarantined": 2,
        "collapsed": 3,
        "stale": 1,
        "unaffected": 2,
        "inserted": 5,
        "updated": 1,
        "deleted": 1,
    }
    assert fates == {fate: story.total(lambda r, fate=fate: getattr(r.events, fate)) for fate in FATES}
    assert story.scrape.value("events_received_total") == sum(fates.values()) == 15
    assert story.scrape.value("ties_total") == story.total(lambda r: r.events.ties) == 1
    assert {reason: story.scrape.value("quarantined_events_total", reason=reason) for reason in REASONS} == {
        "null_key": 2,
        "null_sequence": 1,
        "unavailable_value": 0,
        "undecodable": 0,
    }


def test_batches_are_counted_by_outcome(story):
    outcomes = {outcome: story.scrape.value("batches_total", outcome=outcome) for outcome in (*OUTCOMES, "failed")}

    assert outcomes == {"committed": 3, "skipped_duplicate": 1, "no_change": 1, "empty": 1, "failed": 1}
    assert story.scrape.value("batch_duration_seconds_count") == 7
    assert story.scrape.value("attempts_total") == story.total(lambda r: r.attempts) == 4
    assert {name: story.scrape.value("conflicts_total", conflict=name) for name in CONFLICTS} == dict.fromkeys(
        CONFLICTS, 0
    )


def test_last_commit_is_the_newest_version_of_the_table(story):
    newest = max(story.history, key=lambda commit: commit["version"])

    assert story.scrape.value("last_committed_version") == newest["version"]
    committed = story.scrape.value("last_commit_timestamp_seconds")
    assert abs(committed - newest["timestamp"].timestamp()) < 30


def test_phases_add_up_to_the_call(story):
    """Within 2 % or 5 ms, whichever allows more; the failed call included."""
    for result, wall in zip(story.results, story.walls, strict=False):
        assert set(result.seconds) == set(PHASES)
        assert math.isclose(sum(result.seconds.values()), wall, rel_tol=0.02, abs_tol=0.005), result.batch_id
    phases = sum(story.scrape.value("phase_seconds_total", phase=phase) for phase in PHASES)
    assert phases == pytest.approx(sum(story.walls), rel=0.02)
    assert phases == pytest.approx(story.scrape.value("batch_duration_seconds_sum"))


def test_work_is_charged_to_its_phase(story):
    first, _, duplicate, _, _, _ = story.results

    assert {phase for phase, seconds in first.seconds.items() if seconds == 0} == {"read", "backoff", "maintenance"}
    assert first.seconds["merge"] > first.seconds["recheck"]
    assert duplicate.seconds["merge"] == 0


def test_every_series_exists_at_0_from_the_first_call(spark, tmp_path):
    """Prometheus cannot see a counter rise that starts above 0; an empty first batch shows all but two samples at 0."""
    registry = CollectorRegistry()
    result = run(sink_of(str(tmp_path / "orders"), metrics=MergeMetrics(registry=registry)), batch(spark, EVENT), 0)

    scrape = Scrape(registry)

    assert result.outcome == "empty"
    assert not (tmp_path / "orders").exists()
    for instrument in CATALOGUE:
        if instrument.label == "topic":  # a job's; a sink alone has no topics
            continue
        name = instrument.name.removeprefix("stream_merge_") + ("_count" if instrument.type == "histogram" else "")
        for value in instrument.values or (None,):
            scrape.value(name, **({} if value is None else {instrument.label: value}))
    risen = {
        name
        for (name, labels), value in scrape.samples.items()
        if value > 0 and not name.endswith("_bucket") and "phase" not in dict(labels)
    }
    assert risen == {"batches_total", "batch_duration_seconds_count", "batch_duration_seconds_sum"}


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Run one batch as a real streaming query, and tell the query's id."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "one.json").write_text('{"id": 1, "lsn": 1, "name": "ann", "op": "u"}\n')

    def deliver(sink: MergeSink, name: str | None) -> str:
        frames = spark.readStream.schema(EVENT).json(str(source))
        writer = frames.writeStream.foreachBatch(sink).trigger(availableNow=True)
        writer = writer.option("checkpointLocation", str(tmp_path / f"checkpoint {name}"))
        query = (writer if name is None else writer.queryName(name)).start()
        assert query.awaitTermination(120)
        assert query.exception() is None
        return str(query.id)

    return deliver


def test_labels_say_query_and_target(stream, tmp_path, spark):
    """Query name, else its id, else "direct"; the sink's name, else the table's."""
    registry = CollectorRegistry()
    metrics = MergeMetrics(registry=registry)

    stream(sink_of(str(tmp_path / "named"), name="orders of the shop", metrics=metrics), "orders_stream")
    query_id = stream(sink_of(str(tmp_path / "plain"), metrics=metrics), None)

    scrape = Scrape(registry)
    assert scrape.value("batches_total", query="orders_stream", target="orders of the shop", outcome="committed") == 1
    assert scrape.value("batches_total", query=query_id, target="plain", outcome="committed") == 1
    assert {(dict(labels)["query"], dict(labels)["target"]) for _, labels in scrape.samples} == {
        ("orders_stream", "orders of the shop"),
        (query_id, "plain"),
    }
    assert target_rows(spark, str(tmp_path / "plain")) == [(1, 1, "ann")]


def test_a_sink_without_metrics_counts_on_prometheus_own_registry(spark, tmp_path):
    run(sink_of(str(tmp_path / "default registry")), batch(spark, EVENT), 0)

    sample = {"query": "direct", "target": "default registry", "outcome": "empty"}
    assert REGISTRY.get_sample_value("stream_merge_batches_total", sample) == 1
