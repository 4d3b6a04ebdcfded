"""What a job fetches from Kafka: each record once per batch, whatever is in the batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import services
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from topic_job import TopicJob, raw

from stream_merge.job.topic import TopicSink

PLACEHOLDER = "__debezium_unavailable_value"


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
