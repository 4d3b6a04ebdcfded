"""A query that is stopped, or fails, ends with what really happened."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from pyspark.errors.exceptions.captured import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from stream_merge import ConfigError, EventCounts, MergeResult, MergeSink
from stream_merge.jobs.watch import queries
from stream_merge.testing import target_rows

SCHEMA = "id bigint, lsn bigint"


def result(batch_id: int = 0, **changes: Any) -> MergeResult:
    fates = {"quarantined": 1, "collapsed": 22, "stale": 333, "unaffected": 4_444, "inserted": 5, "updated": 12_345}
    fields = {
        "target": "orders",
        "query": "orders",
        "batch_id": batch_id,
        "outcome": "committed",
        "engine": "spark",
        "mode": None,
        "version": 1_234,
        "attempts": 1,
        "conflicts": {},
        "plan": "",
        "events": EventCounts(received=sum(fates.values()), **fates),
        "seconds": {"merge": 1.25, "prepare": 0.5, "recheck": 0.01},
    }
    return MergeResult(**{**fields, **changes})


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """Three files, which make three micro-batches."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.json").write_text(f'{{"id": {number}, "lsn": 1}}\n')
    return folder


def stream(spark: SparkSession, source: Path, sink: MergeSink) -> queries.Stream:
    reader = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
    return queries.Stream(
        name="orders",
        events=reader.json(str(source)),
        sink=sink,
        checkpoint=str(source.parent / "checkpoint"),
    )


def test_a_stop_lets_the_running_micro_batch_end_and_the_next_run_does_the_rest(
    spark: SparkSession, source: Path, tmp_table: str
) -> None:
    """Also while more data waits: nothing is merged twice, nothing is left out.

    A stop may fall between two of Spark's own records of a batch to come, which then holds two files:
    batches are not counted, events are.
    """
    stopping = threading.Event()
    merged: list[MergeResult] = []

    def run(*, until_events: int) -> list[MergeResult]:
        def on_result(_: str, result: MergeResult) -> None:
            merged.append(result)
            if queries.total(one.events for one in merged).inserted >= until_events:
                stopping.set()

        stopping.clear()
        sink = MergeSink(target=tmp_table, keys="id", sequence_by="lsn")
        return queries.run([stream(spark, source, sink)], once=False, stopping=stopping, on_result=on_result)

    first = run(until_events=1)
    assert [r.batch_id for r in first] == list(range(len(first)))
    assert 1 <= len(first) < 3

    rest = run(until_events=3)
    assert merged == [*first, *rest]
    committed = [r.batch_id for r in merged if r.outcome == "committed"]
    assert committed == list(range(len(committed)))
    assert target_rows(spark, tmp_table, "id") == [(0,), (1,), (2,)]
    assert queries.total(one.events for one in merged) == EventCounts(received=3, inserted=3)


def test_the_error_of_a_sink_comes_out_as_it_was_raised(spark: SparkSession, source: Path, tmp_table: str) -> None:
    sink = MergeSink(target=tmp_table, keys="ident", sequence_by="lsn")

    with pytest.raises(ConfigError, match="'ident'"):
        queries.run([stream(spark, source, sink)], once=True, stopping=threading.Event(), on_result=lambda *_: None)


def test_another_error_says_what_the_innermost_cause_says(spark: SparkSession, source: Path, tmp_table: str) -> None:
    class Failing(MergeSink):
        def __call__(self, batch_df: DataFrame, batch_id: int) -> None:
            batch_df.selectExpr("raise_error('the disk is on fire')").collect()

    sink = Failing(target=tmp_table, keys="id", sequence_by="lsn")

    with pytest.raises(queries.QueryFailedError, match=r"query 'orders' failed: .*the disk is on fire") as raised:
        queries.run([stream(spark, source, sink)], once=True, stopping=threading.Event(), on_result=lambda *_: None)
    assert "\n" not in raised.value.reason


class Interrupted:
    """A running query that ends, when it is stopped, with an error without a message that Spark takes for a failure."""

    def __init__(self, spark: SparkSession, query: StreamingQuery) -> None:
        self._jvm, self._query = spark._jvm, query
        self._error: StreamingQueryException | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._query, name)

    def stop(self) -> None:
        self._query.stop()
        self.fail()

    def fail(self) -> None:
        cause = self._jvm.java.io.UncheckedIOException(self._jvm.java.nio.channels.ClosedByInterruptException())
        self._error = StreamingQueryException("=== Streaming Query ===\nIdentifier: orders", "")
        self._error._origin = self._jvm.java.lang.RuntimeException(cause)

    def exception(self) -> StreamingQueryException | None:
        return self._error


@pytest.mark.parametrize("when", ["stopped", "before"])
def test_what_spark_raises_for_being_stopped_is_no_failure(
    spark: SparkSession, source: Path, tmp_table: str, when: str
) -> None:
    """What it had raised before is one, and is called by its class where it says nothing.

    There is nothing to read: a micro-batch that begins here would be cut short, with an error of its own.
    """
    for file in source.iterdir():
        file.unlink()
    sink = MergeSink(target=tmp_table, keys="id", sequence_by="lsn")
    running = queries.Running(stream(spark, source, sink), SimpleQueue(), threading.Event(), once=False)
    query = Interrupted(spark, running._query)
    running._query = query  # type: ignore[assignment]
    if when == "before":
        query.fail()

    running.stop()

    if when == "stopped":
        assert running.failure is None
    else:
        assert str(running.failure) == "query 'orders' failed: java.nio.channels.ClosedByInterruptException"


def test_a_signal_to_the_jvm_stops_too_and_is_one_with_ours(spark: SparkSession) -> None:
    """Under spark-submit people signal the JVM; a signal to the process group arrives at both, and is not a second."""
    jvm = spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()
    said: list[str] = []

    with queries.stop_on_signal(said.append) as stopping:
        os.kill(jvm, signal.SIGTERM)
        assert stopping.wait(30)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            os.kill(jvm, signal.SIGTERM)
            time.sleep(30)
    assert len(said) == 1
    assert spark.range(3).count() == 3
