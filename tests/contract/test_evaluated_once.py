"""A batch is evaluated once per call, whatever happens to it afterwards; and what a call costs in Spark jobs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deliveries import COPY_ON_WRITE, SCHEMA, ChangeStream, delete, ledger, upsert
from delta.exceptions import ConcurrentAppendException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from traces import jobs_so_far

from stream_merge import RetryPolicy
from stream_merge.engines.driver.merger import DriverMerger
from stream_merge.engines.spark.merger import SparkMerger
from stream_merge.model.names import QUARANTINE_TABLE_PREFIX, TOMBSTONE_TABLE_PREFIX
from stream_merge.model.results import MergeResult
from stream_merge.spark.versions import ANSWERS_MERGE
from stream_merge.tables.side.tombstones import without_refused
from stream_merge.testing import batch, run

pytestmark = pytest.mark.generated  # jobs are counted in as many tasks as users have

BATCH = (
    upsert(1, "new", lsn=2),
    upsert(1, "collapsed", lsn=1),
    upsert(2, "back", lsn=9),
    delete(3, lsn=2),
    upsert(4, "stale", lsn=1),
    upsert(5, "first", lsn=1),
    (None, 1, "u", "no key"),
    upsert(6, "no sequence", lsn=None),
)


@pytest.fixture
def evaluations(tmp_path: Path) -> Path:
    """A file that gets a line for every event that is computed, on whichever worker."""
    return tmp_path / "evaluations.txt"


def noting(evaluations: Path) -> Callable[..., Column]:
    """A Python function that leaves a trace in the file each time it is called."""

    @F.udf("string", useArrow=False)
    def noted(name: str | None) -> str | None:
        with Path(evaluations).open("a") as lines:
            lines.write(f"{name}\n")
            lines.flush()
            os.fsync(lines.fileno())
        return name

    return noted


def noted_batch(stream: ChangeStream, evaluations: Path) -> DataFrame:
    events = batch(stream.spark, SCHEMA, *BATCH)
    return events.withColumn("name", noting(evaluations)("name")).repartition(2)


@pytest.fixture
def stream(spark: SparkSession, tmp_table: str) -> ChangeStream:
    """A target that the batch inserts into, updates, deletes from; with two tombstones, one of them newer."""
    policy = RetryPolicy(attempts=3, backoff_initial_seconds=0, backoff_max_seconds=0, backoff_jitter_seconds=0)
    stream = ChangeStream(spark, tmp_table, retry=policy)
    stream.deliver(upsert(1, "old", lsn=1), upsert(3, "old", lsn=1), delete(2, lsn=5), delete(4, lsn=5))
    return stream


def test_every_event_is_evaluated_exactly_once(stream: ChangeStream, evaluations: Path):
    """Contract, quarantine, tombstones, both kinds of hits, merge and ledger share one evaluation."""
    result = run(stream.sink(), noted_batch(stream, evaluations), 1)

    assert sorted(evaluations.read_text().split("\n")[:-1]) == sorted(str(event[3]) for event in BATCH)
    assert ledger(result) == {
        "received": 8,
        "quarantined": 2,
        "collapsed": 1,
        "stale": 1,
        "inserted": 2,
        "updated": 1,
        "deleted": 1,
    }
    assert stream.rows() == [(1, 2, "new"), (2, 9, "back"), (5, 1, "first")]


@pytest.mark.parametrize(("engine", "merger"), [("spark", SparkMerger), ("driver", DriverMerger)])
def test_lost_attempts_evaluate_nothing_again(
    stream: ChangeStream, evaluations: Path, monkeypatch: pytest.MonkeyPatch, engine: str, merger: Any
):
    """Each attempt merges the rows that the first one had."""
    merge, losses = merger.merge, 2
    stream.settings["engine"] = engine

    def losing(self: Any, hits: Any, tag: Any) -> Any:
        nonlocal losses
        if isinstance(self, SparkMerger):
            # An attempt that loses at its commit has read its source.
            without_refused(self._batch.rows.latest(), hits, self._layout, self._session).collect()
        if losses:
            losses -= 1
            msg = "[DELTA_CONCURRENT_APPEND] another writer was faster"
            raise ConcurrentAppendException(msg, "")
        return merge(self, hits, tag)

    monkeypatch.setattr(merger, "merge", losing)
    result = run(stream.sink(), noted_batch(stream, evaluations), 1)

    assert (result.attempts, result.conflicts) == (3, {"ConcurrentAppendException": 2})
    assert len(evaluations.read_text().splitlines()) == len(BATCH)
    assert stream.rows() == [(1, 2, "new"), (2, 9, "back"), (5, 1, "first")]


def outgrow(what: str, by: object, stream: ChangeStream, monkeypatch: pytest.MonkeyPatch) -> MergeResult:
    """What becomes of a batch that is taken for small, as the one before it was, and is not."""
    sink = stream.sink()
    run(sink, batch(stream.spark, SCHEMA, upsert(7, "small", lsn=1)), 1)
    monkeypatch.setattr(what, by)
    return run(sink, batch(stream.spark, SCHEMA, *BATCH), 2)


@pytest.mark.parametrize("stops", ["Spark", "Arrow"])
def test_a_batch_that_outgrows_the_driver_is_merged_all_the_same(
    stream: ChangeStream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stops: str
):
    """Spark stops a collection that exceeds the limit, Arrow 26 cannot take rows out of 2 GiB of texts."""

    def too_large(*_: Any) -> Any:
        msg = "Total size of serialized results is bigger than spark.driver.maxResultSize (1024.0 MiB)"
        raise RuntimeError(msg)

    outgrown = {
        "Spark": ("stream_merge.shapes.batch.arrow_table", too_large),
        "Arrow": ("stream_merge.shapes.batch.MOST_BYTES", 1),
    }
    result = outgrow(*outgrown[stops], stream, monkeypatch)

    assert "batch_too_large_for_the_driver" in caplog.text
    assert ledger(result)["received"] == len(BATCH)
    assert stream.rows() == [(1, 2, "new"), (2, 9, "back"), (5, 1, "first"), (7, 1, "small")]


def test_a_replay_evaluates_once_more_only_where_a_remembered_delete_could_concern_it(
    stream: ChangeStream, evaluations: Path
):
    """The re-check needs the events; without tombstones nothing is read at all."""
    run(stream.sink(), noted_batch(stream, evaluations), 1)

    replay = run(stream.sink(), noted_batch(stream, evaluations), 1)
    with_tombstones = len(evaluations.read_text().splitlines())
    stream.settings["tombstones"] = False
    run(stream.sink(), noted_batch(stream, evaluations), 1)

    assert replay.outcome == "skipped_duplicate"
    assert with_tombstones == 2 * len(BATCH)
    assert len(evaluations.read_text().splitlines()) == with_tombstones


def test_a_source_that_answers_differently_each_time_leaves_no_contradiction(spark: SparkSession, tmp_table: str):
    """Random keys, values and defects: target, quarantine, tombstones and ledger tell the same story."""
    stream = ChangeStream(spark, tmp_table, "", keys="id", sequence_by="lsn", apply_as_deletes="op = 'd'")
    events = spark.range(300).select(
        F.when(F.rand() > 0.2, F.expr("uuid()")).alias("id"),
        F.when(F.rand() > 0.2, F.lit(1)).alias("lsn"),
        F.when(F.rand() < 0.3, "d").otherwise("u").alias("op"),
        F.expr("uuid()").alias("token"),
    )

    result = run(stream.sink(), events.where(F.rand() < 0.9), 0)

    target = spark.read.format("delta").load(tmp_table)
    quarantine = stream.side_table(QUARANTINE_TABLE_PREFIX)
    counts = result.events
    assert counts.received == counts.quarantined + counts.inserted + counts.unaffected
    assert (target.count(), quarantine.count()) == (counts.inserted, counts.quarantined)
    assert stream.side_table(TOMBSTONE_TABLE_PREFIX).count() == counts.unaffected
    reasons = quarantine.selectExpr("explode(reasons) AS reason").groupBy("reason").count().collect()
    assert {row["reason"]: row["count"] for row in reasons} == result.reasons
    assert target.select("token").distinct().count() == counts.inserted


ROWS = (upsert(1, "old", lsn=1), upsert(3, "old", lsn=1))
UPSERTS = (upsert(1, "new", lsn=3), upsert(9, "first", lsn=1))
BROKEN = (None, 1, "u", "no key")


@pytest.mark.parametrize(
    ("before", "events", "jobs"),
    [
        # Spark: evaluation 2; MERGE 11, of which Delta's snapshot 3, finding the files 5, writing 3. Driver: the events
        (ROWS, UPSERTS, {"spark": 13, "driver": 1}),
        # and on Spark the append to the quarantine 4, of which its snapshot 3; the driver has Spark judge the one
        ((*ROWS, BROKEN), (*UPSERTS, BROKEN), {"spark": 17, "driver": 2}),
        # and looking tombstones up 3
        ((*ROWS, delete(2, lsn=1)), UPSERTS, {"spark": 16, "driver": 1}),
        # and appending to them 4
        ((*ROWS, delete(2, lsn=1)), (*UPSERTS, delete(3, lsn=3)), {"spark": 20, "driver": 1}),
    ],
    ids=["no deletes yet", "quarantined events", "tombstones elsewhere", "deletes"],
)
@pytest.mark.parametrize("engine", ["spark", "driver"])
def test_a_batch_costs_this_many_spark_jobs(
    spark: SparkSession, *, tmp_table: str, before: tuple[Any, ...], events: tuple[Any, ...], jobs: Any, engine: str
):
    """Jobs are what a small batch costs. Counted where all tables exist, in the third batch of a sink.

    Into a table with deletion vectors Spark's MERGE takes two more (Delta 4.4).
    """
    sink = ChangeStream(spark, tmp_table, engine=engine, table_properties=COPY_ON_WRITE).sink()
    run(sink, batch(spark, SCHEMA, *before), 0)
    run(sink, batch(spark, SCHEMA, upsert(1, "old", lsn=2)), 1)
    batch_df = batch(spark, SCHEMA, *events)
    earlier = jobs_so_far(spark)

    run(sink, batch_df, 2)

    unanswered = engine == "spark" and not ANSWERS_MERGE  # what a MERGE has done stands in its commit
    assert jobs_so_far(spark) - earlier == jobs[engine] + unanswered
