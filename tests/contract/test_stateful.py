"""A sink behind a stateful operator: Spark's own state, its batches without data, and restarts from the checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from stream_merge import MergeResult, MergeSink
from stream_merge.testing import change_rows, target_rows

SCHEMA = "id bigint, lsn bigint, at timestamp, name string"


class Query:
    """A stream of files through an operator into a table; each run ends when all files are merged."""

    def __init__(
        self, spark: SparkSession, root: Path, shape: Callable[[DataFrame], DataFrame], **settings: Any
    ) -> None:
        self.spark = spark
        self.target = str(root / "table")
        self.source = root / "in"
        self.source.mkdir()
        self.checkpoint = root / "checkpoint"
        self.shape = shape
        self.settings = settings
        self.evaluations = root / "evaluations.txt"
        self.files = 0

    def write(self, *events: tuple[int, int, str, str]) -> None:
        """One file, which makes one batch; times are minutes and seconds of an hour."""
        rows = [{"id": key, "lsn": lsn, "at": f"2026-01-01T00:{at}Z", "name": name} for key, lsn, at, name in events]
        file = self.source / f"{self.files:03}.json"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        self.files += 1
        os.utime(file, (self.files, self.files))  # Spark takes them by their age

    def run(self, *, dies_behind: int | None = None) -> list[MergeResult]:
        """All batches; or, with the merge of one batch, its process ends before the checkpoint knows of it."""
        sink = MergeSink(target=self.target, **self.settings)
        results: list[MergeResult] = []

        def merge(batch_df: DataFrame, batch_id: int) -> None:
            self.adaptive = batch_df.sparkSession.conf.get("spark.sql.adaptive.enabled")
            sink(batch_df, batch_id)
            assert sink.last_result is not None
            results.append(sink.last_result)
            if batch_id == dies_behind:
                msg = "the process ends"
                raise RuntimeError(msg)

        evaluations = str(self.evaluations)

        @F.udf("bigint", useArrow=False)
        def noted(lsn: int) -> int:
            with Path(evaluations).open("a") as lines:
                lines.write(f"{lsn}\n")
            return lsn

        events = self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(self.source))
        shaped = self.shape(events.withWatermark("at", "1 minute"))
        writer = shaped.withColumn("lsn", noted("lsn")).repartition(2).writeStream.foreachBatch(merge)
        writer = writer.outputMode(self.output_mode).option("checkpointLocation", str(self.checkpoint))
        query = writer.trigger(availableNow=True).start()
        try:
            query.awaitTermination()
        except Exception as err:
            if "the process ends" not in str(err):
                raise
        self.without_data = {batch["batchId"] for batch in query.recentProgress if not batch["numInputRows"]}
        return results

    output_mode = "update"

    def rows(self, *columns: str) -> list[tuple[Any, ...]]:
        return target_rows(self.spark, self.target, *columns)


def told(results: list[MergeResult]) -> list[tuple[int, str, int]]:
    return [(result.batch_id, result.outcome, result.events.received) for result in results]


@pytest.mark.parametrize("engine", ["spark", "driver"])
@pytest.mark.smoke
def test_a_deduplicated_stream_is_evaluated_once_and_goes_on_after_a_crash(
    spark: SparkSession, tmp_path: Path, engine: str
) -> None:
    """What the state has seen does not come again, and a batch that was merged before the crash is skipped."""
    query = Query(
        spark,
        tmp_path,
        lambda events: events.dropDuplicatesWithinWatermark(["id", "lsn"]),
        keys="id",
        sequence_by="lsn",
        engine=engine,
    )
    query.write((1, 1, "00:00", "one"), (2, 2, "00:02", "two"), (2, 2, "00:02", "two"))
    query.write((1, 1, "00:30", "again"), (1, 3, "00:31", "newer"))
    crashed = query.run(dies_behind=1)
    query.write((3, 4, "00:40", "three"), (1, 3, "00:41", "again"))

    results = query.run()

    assert told(crashed) == [(0, "committed", 2), (1, "committed", 1)]
    assert told(results)[0] == (1, "skipped_duplicate", 0)
    assert [result for result in told(results)[1:] if result[2]] == [(2, "committed", 1)]
    assert query.adaptive == "false"
    assert query.rows("id", "name") == [(1, "newer"), (2, "two"), (3, "three")]
    assert sorted(query.evaluations.read_text().split()) == ["1", "2", "3", "3", "4"]


def test_running_counts_overwrite_each_other_in_update_mode(spark: SparkSession, tmp_path: Path) -> None:
    """Each batch brings the windows that have changed; the count orders them."""

    def counted(events: DataFrame) -> DataFrame:
        return (
            events.groupBy(F.window("at", "10 minutes"), "id")
            .agg(F.count(F.lit(1)).alias("n"), F.max("lsn").alias("lsn"))
            .select("id", F.col("window.start").alias("since"), "n", "lsn")
        )

    query = Query(spark, tmp_path, counted, keys=["id", "since"], sequence_by=["n"])
    query.write((1, 1, "00:00", "a"), (1, 2, "00:01", "b"), (2, 1, "00:02", "c"))
    query.write((1, 3, "01:00", "d"))
    query.run(dies_behind=1)
    query.write((2, 9, "20:00", "e"))
    results = query.run()

    assert told(results)[0] == (1, "skipped_duplicate", 0)
    assert query.rows("id", "n", "lsn") == [(1, 3, 3), (2, 1, 1), (2, 1, 9)]
    kinds = [row[1] for row in change_rows(spark, query.target)]
    assert sorted(kinds) == ["insert"] * 3 + ["update_postimage", "update_preimage"]


def test_closed_windows_come_in_batches_without_data(spark: SparkSession, tmp_path: Path) -> None:
    """In append mode Spark runs a batch for what the watermark has closed: it reads nothing and brings rows."""

    def closed(events: DataFrame) -> DataFrame:
        return (
            events.groupBy(F.window("at", "1 minute"), "id")
            .agg(F.max("lsn").alias("lsn"))
            .select("id", F.col("window.start").alias("since"), "lsn")
        )

    query = Query(spark, tmp_path, closed, keys=["id", "since"], sequence_by="lsn")
    query.output_mode = "append"
    query.write((1, 1, "00:00", "a"), (1, 2, "00:01", "b"))
    query.write((1, 3, "10:00", "c"))
    first, without_data = query.run(), query.without_data
    query.write((1, 4, "20:00", "d"))
    (closing,) = [result.batch_id for result in first if result.events.received]
    second = query.run(dies_behind=closing + 2)
    third = query.run()

    assert {result.outcome for result in first} == {"empty", "committed"}
    assert closing in without_data
    assert told(second)[-1] == (closing + 2, "committed", 1)
    assert told(third)[0] == (closing + 2, "skipped_duplicate", 0)
    assert query.rows("id", "lsn") == [(1, 2), (1, 3)]
