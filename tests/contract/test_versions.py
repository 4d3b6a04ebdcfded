"""Ways that only some versions of Spark take are taken on every version: they give the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from stream_merge import MergeSink, read_files
from stream_merge.spark import versions
from stream_merge.spark.evaluate_once import materialised

OLDEST, OWN = (4, 0), versions.SPARK


@pytest.fixture(params=[OLDEST, OWN], ids=["as 4.0 does it", "as this version does it"])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "SPARK", request.param)


def numbering() -> versions.Decode:
    """Depends on the order of all rows of a task, as decoding does."""

    def numbered(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:  # sent to the workers by value
        seen = 0
        for values, _ in batches:
            count = len(values)
            yield pa.StructArray.from_arrays([pa.array(range(seen, seen + count)), values], names=["number", "value"])
            seen += count

    return numbered


@pytest.mark.usefixtures("version")
def test_python_sees_each_row_once_and_the_columns_beside_it_stay(spark: SparkSession):
    """Needs Spark: three Arrow batches of a task and an empty task, filtered by what Python gives."""
    rows = spark.range(0, 5, 1, 1).select(
        "id", F.lit("1500-01-01 12:00:00").cast("timestamp").alias("at"), F.format_string("v%d", "id").alias("value")
    )
    rows = rows.union(rows.where("id < 0"))
    made = T.StructType([T.StructField("number", T.LongType()), T.StructField("value", T.StringType())])
    size = "spark.sql.execution.arrow.maxRecordsPerBatch"
    spark.conf.set(size, "2")
    try:
        found = versions.decoded(
            rows,
            numbering(),
            "value",
            F.col("id"),
            dtype=made,
            name="made",
            keep=["at", "id"],
            is_repeatable=False,
        )
        kept = found.where("made.number % 2 = 0").selectExpr("id", "cast(at AS string)", "made").collect()
    finally:
        spark.conf.unset(size)

    assert found.schema["at"].dataType == T.TimestampType()
    assert kept == [(i, "1500-01-01 12:00:00", Row(number=i, value=f"v{i}")) for i in (0, 2, 4)]


def test_what_is_observed_comes_as_python_values(spark: SparkSession):
    """Needs Spark: the aggregates of one pass; those that a batch is counted, bounded and routed by."""
    rows = spark.range(3).select("id", F.format_string("é𝄞\n%d", "id").alias("text"))

    _, found = materialised(
        rows,
        F.count(F.lit(1)).alias("received"),
        F.max(F.col("id").cast("tinyint")).alias("greatest"),
        F.bool_and(F.col("id") > 1).alias("all"),
        F.min("text").alias("least"),
        F.max(F.lit(None).cast("string")).alias("nothing"),
        F.sort_array(F.collect_set("text")).alias("texts"),
        F.sort_array(F.collect_set("id")).alias("ids"),
    )

    assert found == {
        "received": 3,
        "greatest": 2,
        "all": False,
        "least": "é𝄞\n0",
        "nothing": None,
        "texts": ["é𝄞\n0", "é𝄞\n1", "é𝄞\n2"],
        "ids": [0, 1, 2],
    }


@pytest.mark.usefixtures("version")
def test_files_become_the_same_rows_and_the_same_quarantine(spark: SparkSession, tmp_path: Path):
    """Needs Spark: a stream of files through decoder, sink and quarantine."""
    (tmp_path / "in").mkdir()
    lines = ['{"id": 1, "lsn": 1, "at": "2024-03-01T10:00:00.000001Z"}', '{"id": 2, "lsn": "x"}', '{"id": 3, "lsn": 1}']
    (tmp_path / "in" / "a.json").write_text("\n".join(lines))
    events = read_files(spark, str(tmp_path / "in"), format="json", schema="id bigint, lsn bigint, at timestamp")
    sink = MergeSink(target=str(tmp_path / "table"), keys=["id"], sequence_by="lsn")

    writer = events.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()

    rows = spark.read.format("delta").load(str(tmp_path / "table")).selectExpr("id", "lsn", "cast(at AS string)")
    assert sorted(map(tuple, rows.collect())) == [(1, 1, "2024-03-01 10:00:00.000001"), (3, 1, None)]
    assert sink.last_result is not None
    assert (sink.last_result.events.received, sink.last_result.reasons) == (3, {"undecodable": 1})
