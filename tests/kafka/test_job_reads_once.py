"""What a job fetches from Kafka: each record once per batch, whatever is in the batch."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import services
from pyspark import SparkFiles
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from topic_job import TopicJob, raw
from traces import jobs_so_far

from stream_merge.engines.memory import reservations
from stream_merge.errors import MergeFailedError
from stream_merge.jobs.kafka import decode
from stream_merge.jobs.kafka.batch import TopicSink
from stream_merge.merge import steps
from stream_merge.merge.calls import Calls
from stream_merge.sources.kafka.connection import Connection

PLACEHOLDER = "__debezium_unavailable_value"
WHOLE = ("id", "small", "name", "__stream_merge_sequence")


@pytest.fixture
def job(spark: SparkSession, broker: services.Broker, tmp_path: Path) -> Iterator[TopicJob]:
    job = TopicJob(spark, broker, tmp_path)
    yield job
    job.close()


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> list[StreamingQuery]:
    """Every query that is started."""
    started: list[StreamingQuery] = []
    start = DataStreamWriter.start

    def starting(self: DataStreamWriter, *args: Any, **options: Any) -> StreamingQuery:
        started.append(start(self, *args, **options))
        return started[-1]

    monkeypatch.setattr(DataStreamWriter, "start", starting)
    return started


def fetched(queries: list[StreamingQuery]) -> list[int]:
    """Records that Spark's Kafka source gave out, for each batch that had any: the same ones again count again."""
    found = [(p["batchId"], p["numInputRows"]) for query in queries for p in query.recentProgress]
    return [rows for _, rows in sorted(found) if rows]


def everything(job: TopicJob) -> int:
    """A batch that makes the job look at stored rows, at other events of the batch, and into the quarantine."""
    job.send(1, job.event("c", 1, "first"))
    job.send(1, job.event("u", 1, "second"))
    job.send(2, None)
    job.send(3, job.event("u", 3, PLACEHOLDER))
    job.send(4, job.event("c", 4, PLACEHOLDER))
    job.send(5, job.event("d", 5))
    job.send(5, None)
    job.send(6, b"{")
    job.send(7, raw({"ts_ms": 1}))
    return 9


@pytest.fixture
def stored(job: TopicJob, queries: list[StreamingQuery]) -> TopicJob:
    """With rows that the next batch speaks of."""
    for key in (2, 3, 5):
        job.send(key, job.event("c", key, "stored"))
    job.merge()
    queries.clear()
    return job


def test_spark_reads_as_it_is_told_to(spark: SparkSession) -> None:
    services.need()
    jvm = spark._jvm
    options = {
        name.removeprefix("kafka."): value for name, value in Connection(bootstrap="b:1").spark_options().items()
    }
    told = jvm.org.apache.spark.sql.kafka010.KafkaSourceProvider.kafkaParamsForExecutors(
        jvm.PythonUtils.toScalaMap(options), "group"
    )

    assert options.keys() <= set(jvm.org.apache.kafka.clients.consumer.ConsumerConfig.configNames())
    assert {name: told[name] for name in options} == options
    assert int(told["receive.buffer.bytes"]) > 2**20  # 65,536 is what Spark takes by itself


def test_a_batch_is_fetched_once_whatever_is_in_it(stored: TopicJob, queries: list[StreamingQuery]) -> None:
    """Undecodable, null-value and unavailable-value events among the others."""
    records = everything(stored)

    stored.merge()

    assert fetched(queries) == [records]
    assert stored.rows() == [(1, "second"), (3, "stored")]
    kept = stored.spark.read.format("delta").load(stored.quarantine).collect()
    assert sorted(row.reasons for row in kept) == [["unavailable_value"], ["undecodable"]]


def with_block(columns: dict[str, str], row: dict[str, Any], lsn: int) -> bytes:
    fields = [{"field": name, "type": dtype, "optional": name != "id"} for name, dtype in columns.items()]
    images = [{"type": "struct", "fields": fields, "optional": True, "field": image} for image in ("before", "after")]
    payload = {"op": "c", "before": None, "after": row, "source": {"lsn": lsn, "ts_ms": 1, "snapshot": "false"}}
    return json.dumps({"schema": {"type": "struct", "fields": images}, "payload": payload}).encode()


def test_records_in_a_new_schema_are_looked_at_again_and_not_fetched_again(
    job: TopicJob, queries: list[StreamingQuery]
) -> None:
    old, new = {"id": "int64", "n": "string"}, {"id": "int64", "n": "string", "more": "int32"}
    wanted = {"value_format": {"type": "debezium"}}
    job.send(1, with_block(old, {"id": 1, "n": "a"}, 1))
    job.merge(**wanted)
    job.send(2, with_block(new, {"id": 2, "n": "b", "more": 2}, 2))
    job.send(3, with_block(old, {"id": 3, "n": "c"}, 3))
    job.send(4, b"{")
    job.merge(**wanted)

    assert fetched(queries) == [1, 3]
    assert job.rows("id", "n", "more") == [(1, "a", None), (2, "b", 2), (3, "c", None)]


def test_each_batch_of_several_is_fetched_once(job: TopicJob, queries: list[StreamingQuery]) -> None:
    for key in range(100):
        job.producer.send(job.topic, key=raw({"id": key}), value=job.event("c", key) if key % 10 else b"{")

    job.merge(limits={"max_events_per_batch": 30})

    assert fetched(queries) == [30, 30, 30, 10]


def change_feed(spark: SparkSession, table: str) -> list[Any]:
    """Everything that the table's changes say, but for the time of their commits."""
    reader = spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", 0)
    return sorted(str(row) for row in reader.load(table).drop("_commit_timestamp").collect())


@pytest.fixture
def jobs_per_batch(monkeypatch: pytest.MonkeyPatch, spark: SparkSession) -> list[int]:
    """Spark jobs of each call of the batch function."""
    found: list[int] = []
    merge = TopicSink.__call__

    def counted(self: TopicSink, batch_df: DataFrame, batch_id: int) -> None:
        before = jobs_so_far(spark)
        merge(self, batch_df, batch_id)
        found.append(jobs_so_far(spark) - before)

    monkeypatch.setattr(TopicSink, "__call__", counted)
    return found


def test_a_batch_of_whole_rows_costs_one_spark_job(
    stored: TopicJob, queries: list[StreamingQuery], jobs_per_batch: list[int]
) -> None:
    """Where the workers run on the driver's machine: decoded into its files, merged from there by delta-rs."""
    for turn in range(40):
        stored.send(turn % 7, stored.event("d" if turn % 5 == 0 else "u", turn % 7, f"name {turn}"))

    stored.merge(limits={"max_events_per_batch": 10})

    assert fetched(queries) == [10, 10, 10, 10]
    assert jobs_per_batch[1:] == [1, 1, 1]  # the first one also looks at what is there


def test_what_spark_merges_is_decoded_into_rows(stored: TopicJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a batch had to be left to Spark, the next one does not take the way by the driver."""
    here: list[int] = []
    evaluate_here = decode.evaluate_here

    def noted(*args: Any) -> decode.Decoded:
        here.append(1)
        return evaluate_here(*args)

    monkeypatch.setattr(decode, "evaluate_here", noted)
    monkeypatch.setattr(reservations, "take", lambda *_: 0)
    for turn in range(3):
        stored.send(2, stored.event("u", 2, f"name {turn}"))

    results = stored.merge(limits={"max_events_per_batch": 1})

    assert [(result.engine, result.refusal) for result in results] == [("spark", "memory")] * 3
    assert len(here) == 1
    assert stored.rows()[0] == (2, "name 2")


def test_files_of_the_machine_and_rows_lead_to_the_same(job: TopicJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of whole rows, among them some that are not, with ties, deliveries out of order and late events."""
    used: list[bool] = []
    evaluate_at_hand = steps.evaluate_at_hand

    def noted(*args: Any) -> Any:
        found = evaluate_at_hand(*args)
        used.append(found is not None)
        return found

    monkeypatch.setattr(steps, "evaluate_at_hand", noted)
    rng = random.Random(5)
    for turn in range(240):
        key = rng.randrange(12)
        value = job.event(rng.choice("cuuud"), key, f"name {turn % 9}", lsn=1_000 + turn // 2 - rng.randrange(6))
        if 90 < turn < 120:
            value = rng.choice([value, None, b"{", job.event("u", key, PLACEHOLDER), raw({"ts_ms": 1})])
        job.send(key, value)
    limited = {"limits": {"max_events_per_batch": 30}}
    events = [result.events for result in job.merge(**limited)]
    assert used.count(True) >= 3
    rows, table = job.rows(*WHOLE), job.target
    records = [counted for _, counted in job.accounted()]

    monkeypatch.setattr("stream_merge.jobs.kafka.batch.workers_are_here", lambda _: False)
    job.target, job.checkpoint = f"{job.folder}/on_rows", f"{job.folder}/other_checkpoint"
    again = [result.events for result in job.merge(**limited)]

    assert again == events
    assert job.rows(*WHOLE) == rows
    assert [counted for _, counted in job.accounted()] == records
    assert change_feed(job.spark, job.target) == change_feed(job.spark, table)


def test_a_batch_larger_than_those_before_is_not_brought_to_the_driver(
    stored: TopicJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size is known once it is decoded; what was guessed before let it pass."""
    brought: list[Any] = []
    monkeypatch.setattr(steps, "evaluate_at_hand", lambda *args: brought.append(args))
    monkeypatch.setattr(reservations, "allowed", lambda: 100_000)
    stored.send(1, stored.event("c", 1, "large" * 20_000))

    stored.merge()

    assert brought == []
    assert stored.rows()[0] == (1, "large" * 20_000)
    assert left_behind() == []


def test_a_batch_that_fails_leaves_no_files(stored: TopicJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        assert left_behind()
        msg = "no merge today"
        raise MergeFailedError(msg, target=stored.target, batch_id=0)

    monkeypatch.setattr(Calls, "merge", failing)
    stored.send(1, stored.event("c", 1))

    result = stored.run()

    assert "no merge today" in str(result.failures)
    assert left_behind() == []


def left_behind() -> list[str]:
    """Folders of events that are still there."""
    return [name for name in os.listdir(SparkFiles.getRootDirectory()) if name.startswith("events-")]


def test_an_epoch_may_be_a_time_in_milliseconds(job: TopicJob) -> None:
    for name in ("first", "second", "third"):
        job.send(1, job.event("u", 1, name))
        job.merge(epoch=1_732_233_600_000)

    assert job.rows() == [(1, "third")]


def test_a_second_evaluation_would_be_counted(
    stored: TopicJob, queries: list[StreamingQuery], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without it the tests above could not fail."""
    merge = TopicSink.__call__

    def merge_and_count(self: TopicSink, batch_df: DataFrame, batch_id: int) -> None:
        batch_df.count()
        merge(self, batch_df, batch_id)

    monkeypatch.setattr(TopicSink, "__call__", merge_and_count)
    records = everything(stored)

    stored.merge()

    assert fetched(queries) == [2 * records]
